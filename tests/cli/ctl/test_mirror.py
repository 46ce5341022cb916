"""``raftkvctl make-mirror`` beside etcdctl's: what arrives at the destination, and what ends it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from random import Random

import pytest

import raftkv
from tests.cli.programs import Running, etcdctl, raftkvctl
from tests.cli.runner import Ran, run_ctl
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster, wait_for

PROGRAMS = {"etcd": ETCD_FAST, "raftkv": RAFTKV}
MAKERS = {"etcdctl": etcdctl, "raftkvctl": raftkvctl}


@pytest.fixture(scope="module", params=long_except(PROGRAMS, {"raftkv"}))
def endpoints(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A source and a destination."""
    with Cluster(PROGRAMS[request.param]) as source, Cluster(ETCD_FAST) as destination:
        yield source.endpoints[0], destination.endpoints[0]


def ctl(endpoint: str, *words: str, text: bytes = b"") -> bytes:
    ran = run_ctl(["--endpoints", endpoint, *words], text)
    assert ran.code == 0, ran.errors
    return ran.output


def content(endpoint: str, prefix: str) -> bytes:
    return ctl(endpoint, "get", prefix, "--prefix")


@pytest.mark.parametrize("flags", [(), ("--dest-prefix", "there/"), ("--no-dest-prefix",)], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_prefix_is_copied_and_followed(endpoints: tuple[str, str], maker: str, flags: tuple[str, ...]) -> None:
    source, destination = endpoints
    for endpoint in endpoints:
        ctl(endpoint, "del", "", "--prefix")
    for name in ("m/a", "m/b", "m/c", "other"):
        ctl(source, "put", name, "old")
    words = ("make-mirror", destination, "--prefix", "m/", *flags)
    target = {"--dest-prefix": "there/", "--no-dest-prefix": ""}.get(flags[0] if flags else "", "m/")
    with Running(MAKERS[maker](source, *words)) as mirror:
        wait_for(lambda: content(destination, "").count(b"old") == 3, "the copy")
        ctl(source, "put", "m/a", "new")
        ctl(source, "del", "m/b")
        ctl(source, "put", "other", "unseen")
        ctl(source, "txn", text=b'\nput m/d "two words"\ndel m/c\n\n\n')
        expected = f"{target}a\nnew\n{target}d\ntwo words\n".encode()
        wait_for(lambda: content(destination, "") == expected, "the changes")
        done = mirror.stop()
    assert done == Ran(130, b"", "")


def test_all_keys_in_pages_and_large_transactions(endpoints: tuple[str, str]) -> None:
    source, destination = endpoints
    for endpoint in endpoints:
        ctl(endpoint, "del", "", "--prefix")
    for start in range(0, 1100, 100):
        puts = "".join(f"put k{number:04d} v\n" for number in range(start, start + 100))
        ctl(source, "txn", text=f"\n{puts}\n\n".encode())
    with Running(raftkvctl(source, "make-mirror", destination, "--max-txn-ops", "30")) as mirror:
        wait_for(lambda: content(destination, "").count(b"v") == 1100, "the copy")
        ctl(source, "del", "k", "--prefix")
        wait_for(lambda: content(destination, "") == b"", "the deletion")
        mirror.stop()


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--max-request-bytes=100000", "--max-txn-ops=16")], ids=str)
def test_values_of_any_size_go_to_a_destination_with_limits(endpoints: tuple[str, str], flags: tuple[str, ...]) -> None:
    """128 values of 20 KB are more than any member takes at a time; etcdctl copies key by key."""
    source = endpoints[0]
    ctl(source, "del", "", "--prefix")
    with raftkv.connect(source) as kv:
        for number in range(150):
            kv.put(f"k{number:03}", b"v" * 20_000)
    with (
        Cluster(ETCD_FAST, flags=flags) as limited,
        Running(raftkvctl(source, "make-mirror", *limited.endpoints)) as mirror,
    ):
        there = limited.endpoints[0]
        wait_for(lambda: content(there, "") == content(source, ""), "the copy")
        puts = "".join(f"put k{number:03} new\n" for number in range(100))
        ctl(source, "txn", text=f"\n{puts}\n\n".encode())
        wait_for(lambda: content(there, "") == content(source, ""), "the changes")
        assert mirror.stop() == Ran(130, b"", "")


def test_a_key_that_one_revision_puts_and_deletes_is_as_it_ends(endpoints: tuple[str, str]) -> None:
    """The destination refused both in one transaction, and the mirror could never pass that revision."""
    source, destination = endpoints
    for endpoint in endpoints:
        ctl(endpoint, "del", "", "--prefix")
    with Running(raftkvctl(source, "make-mirror", destination)) as mirror:
        ctl(source, "put", "first", "1")
        wait_for(lambda: content(destination, "") == b"first\n1\n", "the mirror to follow")
        ctl(source, "txn", text=b"\nput m/b one\ndel m/a --from-key\n\n\n")
        ctl(source, "put", "last", "2")
        wait_for(lambda: content(destination, "") == b"first\n1\nlast\n2\n", "what came after")
        assert mirror.stop() == Ran(130, b"", "")


@pytest.mark.long
@pytest.mark.parametrize(("source", "destination"), [("etcd", "raftkv"), ("raftkv", "etcd")])
def test_a_move_in_either_direction_while_writes_go_on(source: str, destination: str) -> None:
    """The mirror is killed half-way and begins again at the revision that was noted before it was first started."""
    with Cluster(PROGRAMS[source]) as old, Cluster(PROGRAMS[destination]) as new:
        (there,), (here,) = old.endpoints, new.endpoints
        writes = Writes(there)
        writes.make(200)
        noted = json.loads(ctl(there, "get", "none", "-w", "json"))["header"]["revision"] + 1
        with Running(raftkvctl(there, "make-mirror", here)) as mirror:
            wait_for(lambda: content(here, "").count(b"k/") > 20, "the copy")
            writes.make(100)
            mirror.process.kill()
        writes.make(100)
        with Running(raftkvctl(there, "make-mirror", here, f"--rev={noted}")) as mirror:
            writes.make(100)
            wait_for(lambda: content(here, "") == content(there, ""), "the rest")
            assert mirror.stop().code == 130


@pytest.mark.long
@pytest.mark.parametrize("frozen", ["source", "destination"])
def test_it_says_which_end_is_frozen_and_goes_on(frozen: str) -> None:
    """Has a mirror say which end stands still: it said nothing until a call's 60 s were over."""
    with Cluster(RAFTKV) as source, Cluster(RAFTKV) as destination:
        (there,), (here,) = source.endpoints, destination.endpoints
        process = {"source": source, "destination": destination}[frozen].members[0].process
        assert process is not None
        ctl(there, "put", "a", "1")
        with Running(raftkvctl(there, "make-mirror", here)) as mirror:
            wait_for(lambda: content(here, "") == b"a\n1\n", "the copy")
            process.send_signal(signal.SIGSTOP)
            try:
                if frozen == "destination":
                    ctl(there, "put", "a", "2")
                mirror.wait_complained("the mirror continues when it answers")
            finally:
                process.send_signal(signal.SIGCONT)
            ctl(there, "put", "b", "3")
            wait_for(lambda: b"b\n3\n" in content(here, ""), "what came after")
            place = {"source": there, "destination": here}[frozen]
            line = f"raftkvctl: no answer from the {frozen} ({place}) for 5 s; the mirror continues when it answers"
            assert mirror.stop() == Ran(130, b"", line)


class Writes:
    """Puts, deletions and txns of 40 keys, drawn by a seed."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint, self._rng = endpoint, Random(5)

    def make(self, count: int) -> None:
        rng = self._rng
        with raftkv.connect(self._endpoint) as kv:
            for _ in range(count):
                key, value = f"k/{rng.randrange(40)}", f"{rng.random()}"
                if rng.random() < 0.2:
                    kv.delete(key)
                else:
                    kv.put(key, value)


def test_it_can_begin_at_a_revision(endpoints: tuple[str, str]) -> None:
    source, destination = endpoints
    for endpoint in endpoints:
        ctl(endpoint, "del", "", "--prefix")
    ctl(source, "put", "before", "1")
    ctl(source, "put", "after", "2")
    revision = ctl(source, "get", "after", "-w", "fields").decode().split('"Revision" : ')[1].split("\n")[0]
    with Running(raftkvctl(source, "make-mirror", destination, "--rev", revision)) as mirror:
        wait_for(lambda: content(destination, "") == b"after\n2\n", "the change of that revision")
        mirror.stop()


def test_a_compacted_revision_ends_it(endpoints: tuple[str, str]) -> None:
    source, destination = endpoints
    for _ in range(3):
        ctl(source, "put", "x", "1")
    revision = ctl(source, "get", "x", "-w", "fields").decode().split('"Revision" : ')[1].split("\n")[0]
    ctl(source, "compaction", revision)
    with Running(raftkvctl(source, "make-mirror", destination, "--rev", "1")) as mirror:
        done = mirror.wait()
    assert done == Ran(1, b"", "Error: etcdserver: mvcc: required revision has been compacted")


@pytest.mark.parametrize("words", [(), ("a", "b"), ("127.0.0.1:1", "--dest-prefix", "x", "--no-dest-prefix")], ids=str)
def test_wrong_words(endpoints: tuple[str, str], words: tuple[str, ...]) -> None:
    ran = []
    for make in MAKERS.values():
        with Running(make(endpoints[0], "make-mirror", *words)) as program:
            ran.append(program.wait())
    assert ran[1] == ran[0]
