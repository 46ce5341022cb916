"""Ctrl-C and SIGTERM end every command that waits, also while no member answers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import PATIENT, TIMEOUT_S, InTerminal, Running, raftkvctl
from tests.cli.runner import run_ctl
from tests.long import long_except
from tests.procs import RAFTKV, Cluster, find_tool, wait_for

SOON_S = 90.0
"""A bound for a busy machine: what is looked for is a wait of minutes or for ever."""

WAITING = [
    ("lock", "n"),
    ("lock", "n", "echo", "held"),
    ("elect", "n", "me"),
    ("elect", "-l", "n"),
    ("watch", "k"),
    ("watch", "-i"),
    ("lease", "keep-alive", "1234", "--command-timeout=1h"),
    ("get", "k", "--command-timeout=1h"),
    ("make-mirror", "127.0.0.1:1", "--command-timeout=1h"),
    ("top",),
    ("check", "perf", "--command-timeout=1h"),
    ("check", "datascale", "--command-timeout=1h"),
    ("bench", "put"),
    ("bench", "put", "--processes", "2"),
    ("bench", "watch"),
    ("bench", "lock"),
    ("bench", "lease-keepalive"),
    ("run", "list", "--command-timeout=1h"),
    ("run", "watch", "job", "--command-timeout=1h"),
    ("run", "exec", "--job", "j", "--command-timeout=1h", "--", "true"),
]

ENDED_BY_SIGNALS = [("elect", "-l"), ("run", "watch")]
"""Commands that a signal ends as they should end."""


class MutePort:
    """A port at which no member answers; ``came`` is set by the first connection."""

    def __init__(self, *, closes: bool) -> None:
        self.came = threading.Event()
        self.closes = closes
        self._held: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.came.set()
            if self.closes:
                connection.close()
            else:
                self._held.append(connection)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()
        for connection in self._held:
            connection.close()


@pytest.fixture(params=long_except(["closing", "silent"], {"silent"}))
def port(request: pytest.FixtureRequest) -> Iterator[MutePort]:
    port = MutePort(closes=request.param == "closing")
    yield port
    port.close()


@pytest.mark.long
def test_sigterm_ends_the_first_process_of_a_container() -> None:
    """The agent of a node ignored the end of its pod while it waited for a member."""
    port = MutePort(closes=False)
    words = raftkvctl(port.endpoint, "run", "exec", "--job", "j", "--command-timeout=1h", "--", "true")
    isolated = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    with Running([*isolated, *words]) as program:
        assert port.came.wait(TIMEOUT_S), program.errors
        outer = program.process.pid
        (inner,) = map(int, Path(f"/proc/{outer}/task/{outer}/children").read_text().split())
        os.kill(inner, signal.SIGTERM)
        assert program.process.wait(SOON_S) == 128 + signal.SIGTERM, program.errors
        assert "Traceback" not in program.errors
    port.close()


@pytest.mark.parametrize("program", ["etcdctl", "raftkvctl"])
def test_ctrl_c_ends_the_script_that_runs_a_command(program: str) -> None:
    """A shell goes on with a script whose command has ended otherwise than by the signal: loops went round for ever."""
    port = MutePort(closes=False)
    path = find_tool("etcdctl") if program == "etcdctl" else str(Path(sys.executable).parent / program)
    script = f"{path} --endpoints {port.endpoint} watch k; echo the script goes on"
    with Running(["bash", "-c", script]) as shell:
        assert port.came.wait(TIMEOUT_S), shell.errors
        os.killpg(shell.process.pid, signal.SIGINT)
        assert shell.process.wait(SOON_S) == -signal.SIGINT
        assert (shell.output, shell.errors) == (b"", "")
    port.close()


def must_end(program: Running, port: MutePort, number: signal.Signals) -> int:
    assert port.came.wait(TIMEOUT_S), f"no connection: {program.errors}"
    program.process.send_signal(number)
    try:
        code = program.process.wait(SOON_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{program.process.args} goes on after {number.name}: {program.errors}")
    assert "Traceback" not in program.errors
    return code


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=pytest.mark.long if at % 3 else []) for at, words in enumerate(WAITING)],
    ids=" ".join,
)
def test_a_signal_ends_a_command_that_no_member_answers(port: MutePort, words: tuple[str, ...]) -> None:
    """By Ctrl-C where the port is silent, by SIGTERM where it closes: what waits does not know which has come."""
    number = signal.SIGTERM if port.closes else signal.SIGINT
    with Running(raftkvctl(port.endpoint, *words)) as program:
        if words == ("watch", "-i"):
            program.feed("watch k\n")
        code = must_end(program, port, number)
        assert (code == 0) == (words[:2] in ENDED_BY_SIGNALS)


@pytest.mark.long
def test_a_silent_command_says_which_endpoints_it_tries() -> None:
    for words, code in ((("lock", "n"), 1), (("elect", "-l", "n"), 0)):
        with Running(raftkvctl("127.0.0.1:1", *words, "--command-timeout=100ms")) as program:
            program.wait_complained("raftkvctl: still trying; press Ctrl-C to stop")
            assert "raftkvctl: no answer from 127.0.0.1:1: connect: connection refused\n" in program.errors
            assert program.stop().code == code
    with Running(raftkvctl("127.0.0.1:1", "watch", "k")) as program:
        program.wait_complained("raftkvctl: the watch continues when a member answers")
        assert "raftkvctl: no answer from 127.0.0.1:1: connect: connection refused\n" in program.errors


@pytest.mark.long
def test_the_goodbye_of_a_lock_is_ended_by_a_second_signal() -> None:
    with (
        Cluster(RAFTKV) as cluster,
        Running(raftkvctl(cluster.endpoints[0], "lock", "n", "--command-timeout=1h")) as program,
    ):
        program.wait_printed(b"n/")
        cluster.members[0].kill()
        program.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            program.process.wait(1.0)
        program.process.send_signal(signal.SIGINT)
        program.process.wait(SOON_S)


LIBRARY = """
import sys, raftkv

with raftkv.connect(sys.argv[1], timeout_s=3600) as kv:
    {}
"""
BLOCKING = [
    "kv.get('a')", "kv.put_many([('a', 'b')] * 100)", "kv.txn().then(raftkv.put('a', 'b')).commit()",
    "list(kv.watch('a'))", "list(kv.observe('a'))", "kv.lock('a').acquire()", "kv.lock('a').__enter__()",
    "kv.lease(ttl=5).__enter__()", "kv.campaign('a', b'me').__enter__()", "kv.session(ttl=5).__enter__()",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("line", BLOCKING)
def test_a_signal_ends_a_blocking_call_of_the_client(port: MutePort, line: str) -> None:
    with Running([sys.executable, "-c", LIBRARY.format(line), port.endpoint]) as program:
        assert port.came.wait(TIMEOUT_S), f"no connection: {program.errors}"
        program.process.send_signal(signal.SIGINT)  # SIGTERM ends a Python program that does not ask for it at once
        program.process.wait(SOON_S)
        assert program.errors.endswith("KeyboardInterrupt")


MEASURING = [
    ("bench", "put", "--total", "1000000"),
    ("bench", "put", "--total", "1000000", "--processes", "2", "--clients", "2"),
    ("bench", "mixed", "--total", "1000000", "--key-space-size", "10"),
    ("bench", "watch", "--total", "1000000", "--streams", "1", "--watch-per-stream", "2"),
    ("bench", "watch-latency", "--total", "1000000"),
    ("bench", "lease-keepalive", "--total", "1000000"),
    ("bench", "lock", "--total", "1000000"),
    ("check", "perf"),
    ("check", "datascale", "--load", "xl"),
]


@pytest.fixture(scope="module")
def member() -> Iterator[str]:
    with Cluster(RAFTKV) as cluster:
        yield cluster.endpoints[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=() if words in (MEASURING[0], MEASURING[-1]) else pytest.mark.long)
        for words in MEASURING
    ],
    ids=" ".join,
)
def test_a_measurement_shows_its_progress_and_ctrl_c_prints_what_it_has(member: str, words: tuple[str, ...]) -> None:
    with InTerminal(raftkvctl(member, *words, *PATIENT)) as terminal:
        terminal.wait_shown(r"\b[1-9]\d*/\d")
        terminal.press(b"\x03")
        assert terminal.wait() == 130
        shown = terminal.shown
    assert "Traceback" not in shown
    result = shown.partition("nterrupted")
    assert result[1], shown
    expected = {"bench": "/s", "check": "until then" if words[1] == "perf" else "memory used"}[words[0]]
    assert expected in shown
    keys = run_ctl(["--endpoints", member, "get", "/etcdctl-check", "--prefix", "--keys-only", "--limit=1"])
    assert keys.output == b""


def test_without_a_terminal_nothing_is_drawn_and_a_signal_prints_what_there_is(member: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        assert run_ctl(["--endpoints", member, "del", "--prefix", ""]).code == 0
        command = raftkvctl(member, "bench", "put", "--total", "1000000", "--json", *PATIENT)
        with Running(command) as program:
            wait_for(lambda: put_in(member), "a put of the measurement")
            done = program.stop(number)
        assert (done.code, done.errors) == (130, "")
        result = json.loads(done.output)
        assert result["interrupted"] is True
        assert 0 < result["calls"] < 1_000_000


def put_in(member: str) -> bool:
    return run_ctl(["--endpoints", member, "get", "--prefix", "", "--keys-only", "--limit=1"]).output != b""


INTERRUPTED_IMPORT = """
import os, signal, sys

_, module, program = sys.argv
del sys.argv[1:]

class Finder:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from raftkv.cli import start
sys.exit(getattr(start, program)())
"""


@pytest.mark.parametrize(
    ("module", "program", "code"),
    [
        ("raftkv.cli.ctl", "raftkvctl", -signal.SIGINT),
        ("raftkv.cli.main", "raftkv", -signal.SIGINT),
        ("raftkv.server.main", "raftkv", -signal.SIGINT),
    ],
)
def test_a_signal_during_the_imports_ends_a_program_without_a_word(module: str, program: str, code: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_interrupted_command_prints_nothing() -> None:
    """Let go of a loop half made: once in 250 times asyncio's end of it was a traceback, its coroutine's a warning."""
    code = """
from raftkv.cli.program import leave

class HalfMade:
    def __del__(self):
        raise AttributeError("_ssock")

async def never_awaited():
    pass

def body():
    loop, coroutine = HalfMade(), never_awaited()
    raise KeyboardInterrupt

raise SystemExit(leave(body, print))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
