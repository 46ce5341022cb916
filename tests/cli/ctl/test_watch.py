"""``raftkvctl watch`` beside etcdctl 3.5.1, on real etcd and on raftkv: the same bytes, complaints and codes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.cli.programs import Running, etcdctl, raftkvctl
from tests.cli.runner import Ran, run_ctl
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster, Program, wait_for

PROGRAMS = {"etcd": ETCD_FAST, "raftkv": RAFTKV}
ENDS = {"json": b"ZW5kLW9mLWhpc3Rvcnk=", "hex": rb"\x65\x6e\x64\x2d\x6f\x66", "other": b"end-of-history"}
HISTORY = ("put w1 1", "put w1 2", "del w1", "put w2 'é\nx'", "put w1 <&>", "put w3 end-of-history")


@pytest.fixture(scope="module", params=long_except(PROGRAMS, {"raftkv"}))
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The endpoint of a server whose revisions 2 to 7 are the history, and 8 to 9 are compacted and more."""
    with Cluster(PROGRAMS[request.param]) as cluster:
        endpoint = cluster.endpoints[0]
        write_history(endpoint)
        yield endpoint


def write_history(endpoint: str) -> None:
    for line in HISTORY:
        verb, *rest = line.split(" ", 2)
        assert run_ctl(["--endpoints", endpoint, verb, *rest]).code == 0


def watched(command: list[str], end: bytes, times: int = 1, environment: dict[str, str] | None = None) -> Ran:
    with Running(command, environment) as program:
        program.wait_printed(end, times)
        return program.stop()


FOLLOWS = [
    *(f"w --prefix --rev=2 -w {form}" for form in ("simple", "json", "fields", "protobuf")),
    *(f"w --prefix --rev=3 --prev-kv -w {form}" for form in ("simple", "json", "fields", "protobuf")),
    "w --prefix --rev=2 --hex",
    "w3 --rev=2",
    "w3 --rev=2 --progress-notify",
    "w1 w9 --rev=2",
    "w3 '' --rev=2",
    "w3 b c --rev=2",
    "'' --prefix --rev=2",
]


@pytest.mark.parametrize("text", long_except(FOLLOWS, FOLLOWS[::3]))
def test_changes_are_printed(server: str, text: str) -> None:
    words = [word.strip("'") for word in text.split(" ")]
    form = "json" if "json" in text else "hex" if "hex" in text else "other"
    expected, found = (watched(make(server, "watch", *words), ENDS[form]) for make in (etcdctl, raftkvctl))
    assert found == expected


SCRIPT = 'echo $ETCD_WATCH_REVISION $ETCD_WATCH_EVENT_TYPE "$ETCD_WATCH_KEY" "$ETCD_WATCH_VALUE."'


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (("--prefix", "w", "--rev=2", "--", "sh", "-c", SCRIPT), b'"end-of-history".\n'),
        (("w3", "--rev=2", "--", "echo", "-n", "done."), b"done."),
    ],
)
def test_a_command_runs_for_each_change(server: str, words: tuple[str, ...], end: bytes) -> None:
    expected, found = (watched(make(server, "watch", *words), end) for make in (etcdctl, raftkvctl))
    assert found == expected


@pytest.mark.parametrize(
    ("words", "environment", "end"),
    [
        (("--rev=2",), {"ETCDCTL_WATCH_KEY": "w3"}, ENDS["other"]),
        (("--rev=2",), {"ETCDCTL_WATCH_KEY": "w", "ETCDCTL_WATCH_RANGE_END": "x"}, ENDS["other"]),
        (("--rev=2", "--", "echo"), {"ETCDCTL_WATCH_KEY": "w3"}, ENDS["other"] + b"\n\n"),  # the command's own line too
    ],
)
def test_keys_from_the_environment(server, words, environment, end):
    ran = [watched(make(server, "watch", *words), end, 1, environment) for make in (etcdctl, raftkvctl)]
    assert ran[1] == ran[0]


ENDINGS: list[tuple[str, dict[str, str]]] = [
    ("", {}),
    ("--", {}),
    ("w1 --", {}),
    ("-- echo", {}),
    ("w1 w2 --prefix", {}),
    ("w2 w1", {}),
    ("w2 w1 -w json", {}),
    ("w2 w1 -w fields", {}),
    ("w2 w1 -w protobuf", {}),
    ("w1 --rev=x", {}),
    ("w3 --rev=2 -w table", {}),
    ("w3 --rev=2 -- false", {}),
    ("w3 --rev=2 -- no-such-program a", {}),
    ("w3 --rev=2 -- ./no-such-program", {}),
    ("w3 --rev=2", {"ETCDCTL_WATCH_RANGE_END": "x"}),
    ("w3 --rev=2", {"ETCDCTL_WATCH_KEY": "w3"}),
    ("w3 --rev=2 -- echo", {"ETCDCTL_WATCH_KEY": "w3"}),
]


@pytest.mark.parametrize(("text", "environment"), long_except(ENDINGS, ENDINGS[::3]))
def test_ends_of_a_watch(server: str, text: str, environment: dict[str, str]) -> None:
    ran = []
    for make in (etcdctl, raftkvctl):
        with Running(make(server, "watch", *text.split()), environment) as program:
            done = program.wait()
        # After a wrong flag etcdctl shows its usage page and repeats the error.
        output = b"" if done.output.startswith(b"NAME:\n") else done.output
        ran.append(Ran(done.code, output, "\n".join(dict.fromkeys(done.errors.split("\n")))))
    assert ran[1] == ran[0]


DIALOGUES = [
    ("watch w3 --rev=2\n", b"end-of-history"),
    ('watch "w3" --rev=2 --prev-kv -- echo "a b" c\n', b"a b c"),
    ("nonsense\n\nwatch\nwatch a b --prefix\nwatch w3 --rev=2\n", b"end-of-history"),
    ("watch w3 --rev=2 --progress-notify\n", b"end-of-history"),
    *((lines, b"") for lines in ("watch w1 --\n", "watch --prefix\n", "watch w1 --rev=x\n", "watch -w json w1\n", "x")),
]


@pytest.mark.parametrize(("lines", "end"), DIALOGUES)
def test_interactive(server: str, lines: str, end: bytes) -> None:
    ran = []
    for make in (etcdctl, raftkvctl):
        with Running(make(server, "watch", "-i")) as program:
            program.feed(lines)
            if end:  # else the lines end it
                program.wait_printed(end)
            program.end_input()
            ran.append(program.wait())
    assert ran[1] == ran[0]


@pytest.mark.parametrize("lines", ["watch w1 --\n", "watch w3 --rev=2\n"])
def test_interactive_ends_quietly_while_more_input_may_come(server: str, lines: str) -> None:
    with Running(raftkvctl(server, "watch", "-i")) as program:
        program.feed(lines)
        if "--rev" in lines:
            program.wait_printed(b"end-of-history")
            done = program.stop()
        else:
            done = program.wait()
    assert done.code == (130 if "--rev" in lines else 128)
    assert done.errors.count("\n") == 0


def test_interactive_progress(server: str) -> None:
    ran = []
    for make in (etcdctl, raftkvctl):
        with Running(make(server, "watch", "-i")) as program:
            program.feed("watch w3 --rev=7\nwatch w2 --rev=5\n")
            program.wait_printed(b"end-of-history")
            program.wait_printed("é".encode())
            program.feed("progress\n")
            program.wait_printed(b"progress notify: ", 2)
            program.end_input()
            done = program.wait()
            ran.append((done.code, sorted(done.output.split(b"\n")), done.errors))
    assert ran[1] == ran[0]


@pytest.mark.long
@pytest.mark.parametrize("form", ["simple", "json", "fields", "protobuf"])
def test_a_compacted_revision(form: str) -> None:
    for program in PROGRAMS.values():
        with Cluster(program) as cluster:
            endpoint = cluster.endpoints[0]
            write_history(endpoint)
            run_ctl(["--endpoints", endpoint, "compaction", "5"])
            ran = []
            for make in (etcdctl, raftkvctl):
                with Running(make(endpoint, "watch", "w3", "--rev=3", "-w", form)) as running:
                    ran.append(running.wait())
            assert ran[1] == ran[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_quietly(server: str, number: signal.Signals) -> None:
    with Running(raftkvctl(server, "watch", "w3", "--rev=2")) as program:
        program.wait_printed(b"end-of-history")
        done = program.stop(number)
    assert (done.code, done.errors) == (128 + number, "")


@pytest.mark.long
@pytest.mark.parametrize("kind", PROGRAMS)
def test_it_outlives_its_member(kind: str) -> None:
    program: Program = PROGRAMS[kind]
    with Cluster(program, size=3) as cluster:
        endpoints = ",".join(cluster.endpoints)
        with Running(raftkvctl(endpoints, "watch", "k", "--prefix", "--rev=1")) as watch:
            run_ctl(["--endpoints", endpoints, "put", "k1", "one"])
            watch.wait_printed(b"one")
            cluster.members[0].kill()
            # Only its first endpoint was tried so far, so the watch has to go on elsewhere.
            others = ",".join(cluster.endpoints[1:])
            # A put may fail as the leader dies, and may have happened all the same: only the last one counts.
            wait_for(lambda: run_ctl(["--endpoints", others, "put", "k2", "two"]).code == 0, "a put at another member")
            assert run_ctl(["--endpoints", others, "put", "k3", "three"]).code == 0
            watch.wait_printed(b"three")
            done = watch.stop()
    assert (done.code, done.errors) == (130, "")
    first, *rest = done.output.split(b"PUT\n")[1:]
    assert first == b"k1\none\n"
    assert rest[-1] == b"k3\nthree\n"
    assert set(rest[:-1]) == {b"k2\ntwo\n"}
