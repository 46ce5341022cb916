"""What workers print: whole lines, none lost at the end, and no worker waits for a reader."""

from __future__ import annotations

import asyncio
import doctest
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.errors import ConfigError
from raftkv.training.process import output
from raftkv.training.process.output import (
    LINE_MAX_BYTES,
    Backlog,
    Console,
    Destinations,
    Lines,
    Output,
    Writer,
    parse_ranks,
    parse_streams,
)
from tests.procs import wait_for

WORKER = [sys.executable, "-I", "-S", "-u", "-c"]


def test_examples() -> None:
    assert doctest.testmod(output).failed == 0


@given(st.lists(st.binary(max_size=30)), st.sampled_from([b"\n", b"\r\n"]))
def test_lines_are_the_same_however_they_are_cut(texts: list[bytes], end: bytes) -> None:
    texts = [text.replace(b"\r", b"").replace(b"\n", b"") for text in texts]
    whole = b"".join(text + end for text in texts)
    for size in (1, 2, 3, 1000):
        cutter, found = Lines(), []
        for start in range(0, len(whole), size):
            found += cutter.feed(whole[start : start + size])
        assert [*found, *cutter.rest()] == texts


def test_a_line_without_end_is_cut_and_not_kept_whole() -> None:
    cutter = Lines()
    found = [part for _ in range(40) for part in cutter.feed(b"x" * 10_000)]
    assert {len(part) for part in found} == {LINE_MAX_BYTES}
    assert sum(map(len, found + cutter.rest())) == 400_000


@given(st.lists(st.one_of(st.binary(min_size=1, max_size=60), st.none())))
def test_a_backlog_gives_back_what_it_was_given_in_order(steps: list[bytes | None]) -> None:
    backlog = Backlog(memory_max_bytes=50, file_max_bytes=10_000)
    given_bytes = b"".join(step for step in steps if step is not None)
    taken = b""
    for step in steps:
        if step is None:
            taken += backlog.take()
        else:
            backlog.put(step)
    while data := backlog.take():
        taken += data
    backlog.clear()
    assert (taken, len(backlog)) == (given_bytes, 0)


def test_a_backlog_drops_what_is_too_much_and_counts_it() -> None:
    backlog = Backlog(memory_max_bytes=10, file_max_bytes=100)
    for _ in range(20):
        backlog.put(b"0123456789")
    assert (len(backlog), backlog.dropped_bytes) == (110, 90)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for end in (reading, writing):
        try:
            os.close(end)
        except OSError:
            pass


def read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def test_stalled_reader_delays_no_worker(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = Writer(writing, Backlog(memory_max_bytes=1000))
    for number in range(50_000):  # far more than a pipe holds
        writer.write(b"line %d\n" % number)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(read_all(reading)))
    reader.start()
    writer.close()
    os.close(writing)
    reader.join()
    assert got[0].splitlines() == [b"line %d" % number for number in range(50_000)]


def test_a_reader_that_never_reads_ends_the_wait_at_the_end(pipe: tuple[int, int]) -> None:
    _, writing = pipe
    writer = Writer(writing)
    writer.write(b"x" * 1_000_000)
    writer.close(patience_s=0.05)


def test_a_reader_that_leaves_costs_its_output_alone(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.close(reading)
    writer = Writer(writing)
    writer.write(b"nobody\n")
    writer.close()
    writer.write(b"nobody\n")


def test_dropped_output_is_reported(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    backlog = Backlog(memory_max_bytes=0, file_max_bytes=0)
    writer = Writer(writing, backlog)
    writer.write(b"too much\n")
    with writer._changed:
        backlog._memory_max_bytes = 1000
    writer.write(b"after\n")
    writer.close()
    os.close(writing)
    left_out = b"raftkvctl: 9 bytes of output were not taken in time and are left out\n"
    assert read_all(reading) == left_out + b"after\n"


class Node:
    """An output whose console are two files."""

    def __init__(self, tmp_path: Path, chosen: Destinations) -> None:
        self.paths = [tmp_path / "console-out", tmp_path / "console-err"]
        self._files = [path.open("wb") for path in self.paths]
        self.console = Console(*(file.fileno() for file in self._files))
        self.output = Output(self.console, chosen)

    def start(self, code: str, rank: int, local_rank: int) -> subprocess.Popen[bytes]:
        with self.output.of_worker(1, rank, local_rank) as (stdout, stderr):
            return subprocess.Popen([*WORKER, code], stdout=stdout, stderr=stderr)

    def end(self, *processes: subprocess.Popen[bytes]) -> list[bytes]:
        for process in processes:
            process.wait()
        asyncio.run(self.output.drained())
        self.console.close()
        for file in self._files:
            file.close()
        return [path.read_bytes() for path in self.paths]


MANY = "import sys\nfor n in range(20000): sys.stdout.write('%d ' % n); sys.stdout.write('x' * 40 + chr(10))"


def test_no_line_is_mixed_and_none_is_lost(tmp_path: Path) -> None:
    node = Node(tmp_path, Destinations())
    output, errors = node.end(*(node.start(MANY, 4 + number, number) for number in range(2)))
    assert errors == b""
    printed = output.splitlines()
    for rank in (4, 5):
        expected = [b"[rank%d]: %d " % (rank, n) + b"x" * 40 for n in range(20_000)]
        assert [line for line in printed if line.startswith(b"[rank%d]" % rank)] == expected
    assert len(printed) == 40_000


def test_the_last_words_of_a_worker_that_dies_are_there(tmp_path: Path) -> None:
    node = Node(tmp_path, Destinations())
    code = "import os; os.write(1, b'half a li'); os.write(2, b'why' * 30000); os.kill(os.getpid(), 9)"
    output, errors = node.end(node.start(code, 0, 0))
    assert output == b"[rank0]: half a li\n"
    assert errors.replace(b"[rank0]: ", b"").replace(b"\n", b"") == b"why" * 30_000


BOTH = "import os; os.write(1, b'out\\r\\n'); os.write(2, b'err')"


@pytest.mark.parametrize(
    ("chosen", "shown", "files"),
    [
        ({}, (b"[rank3]: out\n", b"[rank3]: err\n"), {}),
        ({"prefixed": False}, (b"out\n", b"err\n"), {}),
        ({"redirects": "3"}, (b"", b""), {"stdout.log": b"out\r\n", "stderr.log": b"err"}),
        ({"redirects": "1"}, (b"", b"[rank3]: err\n"), {"stdout.log": b"out\r\n"}),
        ({"redirects": "1:3"}, (b"", b""), {"stdout.log": b"out\r\n", "stderr.log": b"err"}),
        ({"redirects": "0:3"}, (b"[rank3]: out\n", b"[rank3]: err\n"), {}),
        ({"tee": "2"}, (b"[rank3]: out\n", b"[rank3]: err\n"), {"stderr.log": b"err"}),
        ({"tee": "3", "redirects": "3"}, (b"[rank3]: out\n", b"[rank3]: err\n"), {"stdout.log": b"out\r\n"}),
        ({"tee": "3", "shown": frozenset({0})}, (b"", b""), {"stdout.log": b"out\r\n", "stderr.log": b"err"}),
        ({"shown": frozenset({1})}, (b"[rank3]: out\n", b"[rank3]: err\n"), {}),
    ],
    ids=str,
)
def test_streams_go_where_they_are_sent(tmp_path: Path, chosen: dict, shown: tuple, files: dict) -> None:
    words = {name: parse_streams(value) if isinstance(value, str) else value for name, value in chosen.items()}
    node = Node(tmp_path, Destinations(tmp_path / "logs", **words))
    assert node.end(node.start(BOTH, 3, 1)) == list(shown)
    folder = tmp_path / "logs" / "epoch_1" / "1"
    found = {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}
    assert found.items() >= files.items()
    assert len(found) == (2 if chosen.get("tee") == "3" else len(files))


def test_a_log_that_cannot_be_written_is_told_once_and_costs_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "epoch_1" / "0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").symlink_to("/dev/full")
    node = Node(tmp_path, Destinations(tmp_path, tee=parse_streams("1")))
    output, errors = node.end(node.start("print('one'); print('two')", 0, 0))
    assert output == b"[rank0]: one\n[rank0]: two\n"
    assert errors.decode() == f"raftkvctl: cannot write {folder / 'stdout.log'}: no space left on device\n"


@pytest.mark.parametrize(
    ("owner", "name"), [(os, "read"), (Lines, "feed"), (Backlog, "put"), (Backlog, "take"), (os, "write")]
)
def test_a_lack_of_memory_costs_no_worker_its_pipe(tmp_path, monkeypatch, owner, name):
    """The thread closed the pipe at the first one, and the worker's next line killed the worker."""
    call, failures = getattr(owner, name), [MemoryError()] * 3

    def starved(*arguments: Any) -> Any:
        if failures and threading.current_thread() is not threading.main_thread():
            raise failures.pop()
        return call(*arguments)

    monkeypatch.setattr(output, "STARVED_S", 0.001)
    monkeypatch.setattr(owner, name, starved)
    node = Node(tmp_path, Destinations())
    worker = node.start(MANY, 0, 0)
    printed, _ = node.end(worker)
    assert (worker.returncode, failures) == (0, [])
    assert printed.splitlines()[-1] == b"[rank0]: 19999 " + b"x" * 40


def test_one_place_for_both_streams_gets_whole_lines(tmp_path: Path) -> None:
    with (tmp_path / "both").open("wb") as file:
        console = Console(file.fileno(), file.fileno())
        assert console.output is console.errors
        console.tell("heard")
        console.close()
    assert (tmp_path / "both").read_bytes() == b"raftkvctl: heard\n"


@pytest.mark.long
def test_a_process_that_keeps_the_pipe_does_not_keep_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftkv.training.process.output.PIPE_PATIENCE_S", 1.0)
    code = "import os, sys\nprint('said')\nif os.fork() == 0:\n    open(sys.argv[1], 'w').close()\n    sys.stdin.read()"
    node = Node(tmp_path, Destinations())
    with node.output.of_worker(1, 0, 0) as (stdout, stderr):
        ready = tmp_path / "ready"
        command = [*WORKER, code, str(ready)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)
    wait_for(ready.exists, "the child of a worker")
    assert node.end(process) == [b"[rank0]: said\n", b""]
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.long
def test_process_that_keeps_the_pipe_and_prints_does_not_keep_us(tmp_path, monkeypatch):
    """A child that no mark finds, as one with an environment of its own, held its node for as long as it printed."""
    monkeypatch.setattr("raftkv.training.process.output.PIPE_PATIENCE_S", 1.0)
    code = "import os, select, sys\nprint('said')\nif os.fork() == 0:\n    open(sys.argv[1], 'w').close()\n"
    code += "    while not select.select([sys.stdin], [], [], 0.01)[0]:\n        print('again')"
    node = Node(tmp_path, Destinations())
    with node.output.of_worker(1, 0, 0) as (stdout, stderr):
        ready = tmp_path / "ready"
        process = subprocess.Popen([*WORKER, code, str(ready)], stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)
    wait_for(ready.exists, "the child of a worker")
    ended = threading.Thread(target=node.end, args=(process,), daemon=True)
    ended.start()
    ended.join(30.0)
    assert process.stdin is not None
    process.stdin.close()
    assert not ended.is_alive()


@pytest.mark.parametrize("text", ["", "4", "x", "0:4", "0:1,", "1:", ":1", "-1"])
def test_streams_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="is 0, 1 "):
        parse_streams(text)


def test_ranks() -> None:
    read: Callable[[str], frozenset[int] | None] = parse_ranks
    assert (read(""), read("0,2")) == (None, frozenset({0, 2}))
    with pytest.raises(ConfigError, match="list of numbers"):
        read("0,x")
