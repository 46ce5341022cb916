"""Output without a reader: ``raftkv --help | head -1`` and its kind end without a word, a full disk with one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runner import run_ctl
from tests.procs import RAFTKV, Cluster

BIN = Path(sys.executable).parent
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A member with a key and a lease."""
    with Cluster(RAFTKV) as cluster:
        endpoint = cluster.endpoints[0]
        assert run_ctl(["--endpoints", endpoint, "put", "/a", "1"]).code == 0
        yield endpoint


HELP = [
    "raftkv --help", "raftkv version", "raftkvctl help", "raftkvctl completion bash",
    "raftkv cluster --help", "raftkv torchft-lighthouse --help", "raftkv tcpstore-gateway --help",
    "raftkvctl get --help", "raftkvctl version", "raftkvctl bench put --help",
]  # fmt: skip
ANSWERS = [
    "get --prefix / -w protobuf",
    "endpoint status -w table",
    "watch --prefix / --rev 1",
    "lock left",
    "run list --json",
    "get --prefix /",
    "get --prefix / -w json",
    "watch --prefix / --rev 1 -w json",
    "elect left p",
    "lease keep-alive 7b",
    "top --json --interval 1ms",
    "bench put --total 20 --clients 1 --conns 1 --json --dial-timeout 60s",
]


def run_unread(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """A program whose output has no reader: the other end of its pipe is closed before it starts."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False
        )
    finally:
        os.close(writing)


@pytest.mark.long
@pytest.mark.parametrize("words", HELP)
def test_help_into_a_closed_pipe_ends_silently(words: str) -> None:
    program, *rest = words.split()
    done = run_unread([str(BIN / program), *rest])
    assert (done.returncode, done.stderr) == (1, b"")


def test_so_does_the_module() -> None:
    done = run_unread([sys.executable, "-m", "raftkv", "--help"])
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.long
@pytest.mark.parametrize("words", ANSWERS)
def test_unread_answers_end_silently(server: str, words: str) -> None:
    done = run_unread([str(BIN / "raftkvctl"), "--endpoints", server, *words.split()])
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("words", [("raftkv", "--help"), ("raftkvctl", "help"), ("raftkvctl", "completion", "bash")])
def test_output_for_which_there_is_no_room_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [str(BIN / words[0]), *words[1:]], stdout=full, stderr=subprocess.PIPE, timeout=TIMEOUT_S, check=False
        )
    program = {"raftkv": b"raftkv", "raftkvctl": b"Error"}[words[0]]
    assert (done.returncode, done.stderr) == (1, program + b": No space left on device\n")


@pytest.mark.parametrize("words", [("raftkv", "version"), ("raftkvctl", "version")])
def test_a_program_without_any_output_stream_ends_well(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", str(BIN / words[0]), *words[1:]],
        stderr=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.long
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("how", ["simple", "json"])
def test_an_answer_of_which_only_a_part_was_written_is_an_error(server, tmp_path, how, unbuffered):
    """Without buffers, as in containers, Python drops what a full disk or a gone reader leaves of one write."""
    assert run_ctl(["--endpoints", server, "put", "large", "x" * 100_000]).code == 0
    command = f"ulimit -f 64; exec {BIN / 'raftkvctl'} --endpoints {server} get large -w {how} > {tmp_path / 'out'}"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (1, b"Error: File too large\n")
