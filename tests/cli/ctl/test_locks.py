"""``raftkvctl lock`` and ``elect`` beside etcdctl 3.5.1: the same output, and one queue for both programs."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from raftkv.cli.ctl import top
from tests.cli.programs import Running, etcdctl, raftkvctl
from tests.cli.runner import Ran, run_ctl
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster, wait_for

PROGRAMS = {"etcd": ETCD_FAST, "raftkv": RAFTKV}
MAKERS = {"etcdctl": etcdctl, "raftkvctl": raftkvctl}
PAIRS = [(first, second) for first in MAKERS for second in MAKERS]
PATTERNS = [
    (re.compile(rb"/[0-9a-f]+\b"), b"/<lease>"),  # %x of the lease: of any width
    (re.compile(rb'"(revision|create_revision|mod_revision|lease|raft_term)":\d+'), rb'"\1":0'),
    (re.compile(rb'"key":"[^"]*"'), b'"key":"<key>"'),
    (re.compile(rb'"(Revision|CreateRevision|ModRevision|Lease)" : \d+'), rb'"\1" : 0'),
    (re.compile(rb"ETCD_LOCK_REV=\d+"), b"ETCD_LOCK_REV=<revision>"),
]


@pytest.fixture(scope="module", params=long_except(PROGRAMS, {"raftkv"}))
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    with Cluster(PROGRAMS[request.param]) as cluster:
        yield cluster.endpoints[0]


def normal(ran: Ran) -> Ran:
    output = ran.output
    for pattern, placeholder in PATTERNS:
        output = pattern.sub(placeholder, output)
    return Ran(ran.code, output, ran.errors)


def keys(server: str, prefix: str) -> bytes:
    return run_ctl(["--endpoints", server, "get", "--prefix", prefix, "--keys-only"]).output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("form", ["simple", "json", "fields"])
def test_a_lock_is_held_until_a_signal(server: str, form: str, number: signal.Signals) -> None:
    ran = []
    for make in MAKERS.values():
        with Running(make(server, "lock", "held", "-w", form)) as program:
            program.wait_printed(b"Count" if form == "fields" else b"\n")
            assert keys(server, "held/")
            ran.append(normal(program.stop(number)))
        assert keys(server, "held/") == b""
    assert ran[1] == ran[0]
    assert ran[1].code == 0


COMMANDS = [
    ("lock",),
    ("lock", "n", "echo", "hello"),
    ("lock", "n", "--ttl", "3", "echo", "hello"),
    ("lock", "n", "--ttl", "0", "echo", "hello"),
    ("lock", "n", "--ttl", "x", "echo", "hello"),
    ("lock", "n", "--", "sh", "-c", "env | grep ETCD_LOCK | sort; exit 7"),
    ("lock", "n", "--", "sh", "-c", "kill -9 $$"),
    ("lock", "n", "--", "sh", "-c", "kill -TERM $$"),
    ("lock", "n", "sh", "-c", "true"),
    ("lock", "n", "no-such-program"),
    ("lock", "n", "echo", "-w", "table"),
    ("elect",),
    ("elect", "e"),
    ("elect", "e", "p", "-l"),
    ("elect", "a", "b", "c"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command_lines_that_end(server: str, words: tuple[str, ...]) -> None:
    ran = []
    for make in MAKERS.values():
        with Running(make(server, *words)) as program:
            done = normal(program.wait())
        output = b"" if done.output.startswith(b"NAME:\n") else done.output
        ran.append(Ran(done.code, output, "\n".join(dict.fromkeys(done.errors.split("\n")))))
        assert keys(server, "n/") == b""
    assert ran[1] == ran[0]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_second_waits_for_the_first(server: str, first: str, second: str) -> None:
    with Running(MAKERS[first](server, "lock", "queue")) as holder:
        holder.wait_printed(b"queue/")
        with Running(MAKERS[second](server, "lock", "queue", "echo", "my turn")) as waiter:
            wait_keys(server, "queue/", 2)
            assert waiter.output == b""
            assert holder.stop().code == 0
            assert waiter.wait() == Ran(0, b"my turn\n", "")
    assert keys(server, "queue/") == b""


def wait_keys(server: str, prefix: str, count: int) -> None:
    wait_for(lambda: len(keys(server, prefix).split()) == count, f"{count} keys under {prefix}")


def wait_watchers(server: str, are_there: bool) -> None:
    """Wait until a waiter of a queue watches the one before it (raftkvctl: and its own key), or none does."""
    name = "etcd_debugging_mvcc_watcher_total"
    wait_for(lambda: bool(top.fetch(server, None, 90)[name]) == are_there, "watchers" if are_there else "no watchers")


@pytest.mark.long
@pytest.mark.parametrize("words", [("lock", "wait"), ("elect", "wait", "me")], ids=" ".join)
def test_a_signal_while_waiting_leaves_the_queue(server: str, words: tuple[str, ...]) -> None:
    ran = []
    with Running(etcdctl(server, "lock", "wait")) as holder:
        holder.wait_printed(b"wait/")
        for make in MAKERS.values():
            with Running(make(server, *words)) as waiter:
                # One that has not been told of its key yet leaves it behind, until the lease ends.
                wait_watchers(server, True)
                wait_keys(server, "wait/", 2)
                ran.append(waiter.stop())
            wait_keys(server, "wait/", 1)
            wait_watchers(server, False)
        holder.stop()
    assert ran[1] == ran[0]


def test_a_signal_reaches_the_command_and_the_lock_is_released(server: str) -> None:
    with Running(raftkvctl(server, "lock", "ended", "sleep", "1000")) as program:
        wait_keys(server, "ended/", 1)
        wait_child(program.process.pid)
        done = program.stop(signal.SIGTERM)
    assert done == Ran(255, b"", "Error: signal: terminated")
    assert keys(server, "ended/") == b""


def wait_child(pid: int) -> None:
    """Wait until the process has started a command."""
    from pathlib import Path

    def started() -> bool:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        return any(Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep") for child in children)

    wait_for(started, "the command under the lock")


@pytest.mark.long
def test_a_lost_lease_ends_the_command(server: str) -> None:
    with Running(raftkvctl(server, "lock", "lost", "sleep", "1000")) as program:
        wait_keys(server, "lost/", 1)
        wait_child(program.process.pid)
        lease = keys(server, "lost/").split(b"/")[1].decode().strip()
        assert run_ctl(["--endpoints", server, "lease", "revoke", lease]).code == 0
        done = program.wait()
    assert done == Ran(1, b"", "Error: session expired")


@pytest.mark.parametrize("form", long_except(["simple", "json", "fields"], {"json"}))
def test_an_election(server: str, form: str) -> None:
    """Two candidates in turn, and an observer of each program beside them."""
    ran = {}
    for name, make in MAKERS.items():
        with Running(make(server, "elect", "-l", "seat", "-w", form)) as observer:
            with Running(make(server, "elect", "seat", "first-one", "-w", form)) as first:
                first.wait_printed(marker(form, "first-one"))
                observer.wait_printed(marker(form, "first-one"))
                with Running(make(server, "elect", "seat", "second-one", "-w", form)) as second:
                    wait_keys(server, "seat/", 2)
                    one = normal(first.stop())
                    second.wait_printed(marker(form, "second-one"))
                    observer.wait_printed(marker(form, "second-one"))
                    two = normal(second.stop(signal.SIGTERM))
            ran[name] = one, two, normal(observer.stop())
    assert ran["raftkvctl"] == ran["etcdctl"]


def marker(form: str, text: str) -> bytes:
    import base64

    return base64.b64encode(text.encode()) if form == "json" else text.encode()


@pytest.mark.long
@pytest.mark.parametrize("kind", PROGRAMS)
def test_holder_and_waiter_outlive_their_member(kind: str) -> None:
    with Cluster(PROGRAMS[kind], size=3) as cluster:
        everyone, others = ",".join(cluster.endpoints), ",".join(cluster.endpoints[1:])
        with (
            Running(raftkvctl(everyone, "lock", "n", "--command-timeout", "20s")) as holder,
            Running(raftkvctl(everyone, "elect", "-l", "seat")) as observer,
            Running(raftkvctl(everyone, "elect", "seat", "me")) as leader,
        ):
            holder.wait_printed(b"n/")
            leader.wait_printed(b"me")
            observer.wait_printed(b"me")
            with Running(raftkvctl(everyone, "lock", "n", "echo", "my turn")) as waiter:
                wait_keys(everyone, "n/", 2)
                cluster.members[0].kill()
                wait_for(lambda: run_ctl(["--endpoints", others, "put", "x", "1"]).code == 0, "a put at another member")
                assert waiter.output == b""
                assert holder.stop().code == 0
                assert waiter.wait() == Ran(0, b"my turn\n", "")
            seat = keys(others, "seat/").decode().strip()
            assert run_ctl(["--endpoints", others, "put", seat, "proclaimed", "--ignore-lease"]).code == 0
            observer.wait_printed(b"proclaimed")
            assert leader.stop().code == 0
            assert observer.stop().code == 0
        assert keys(others, "").split() == [b"x"]
