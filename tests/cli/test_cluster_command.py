"""``raftkv cluster`` as people run it: three members, one killed, the rest stopped by Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from raftkv.cli.cluster import Member, make_table, news
from raftkv.cli.ctl.top import Row
from raftkv.client.local import stop_all
from tests.cli.runner import run_ctl, run_server
from tests.procs import data_directory, free_port

STOP_TIMEOUT_S = 120


@contextmanager
def local_cluster(size: int, *flags: str) -> Iterator[tuple[subprocess.Popen[str], list[int], Path]]:
    directory = data_directory()
    ports = [free_port() for _ in range(2 * size)]
    command = [
        *(sys.executable, "-m", "raftkv", "cluster", f"--size={size}", f"--data-dir={directory}"),
        "--client-ports=" + ",".join(map(str, ports[:size])),
        "--peer-ports=" + ",".join(map(str, ports[size:])),
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process, ports[:size], directory
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
        assert process.stdout is not None
        process.stdout.close()


def read_until(process: subprocess.Popen[str], wanted: Callable[[str], bool]) -> list[str]:
    """Lines up to the wanted one; the end of the output, or an alarm, ends the wait."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if wanted(line):
            return lines
    raise AssertionError("the output ended:\n" + "\n".join(lines))


def member_processes(directory: Path) -> list[int]:
    """Processes whose command line names the data directory, without ``raftkv cluster`` itself."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"serve" in words and str(directory).encode() in b" ".join(words):
                found.append(int(entry.name))
    return sorted(found)


def process_of(directory: Path, name: str) -> int:
    for number in member_processes(directory):
        if f"--name={name}".encode() in Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0"):
            return number
    raise AssertionError(f"no process of {name}")


@pytest.mark.long
def test_three_members_live_and_die():
    with local_cluster(3) as (process, ports, directory):
        ready = read_until(process, lambda line: line.startswith("ready: "))[-1]
        pasted = subprocess.run(ready.removeprefix("ready: "), shell=True, capture_output=True, text=True, check=True)
        assert len(pasted.stdout.splitlines()) == 3, "the line is a command for this shell"
        endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
        assert run_ctl([f"--endpoints={endpoints}", "put", "k", "v"]).output == b"OK\n"
        assert len(member_processes(directory)) == 3
        os.kill(process_of(directory, "node2"), signal.SIGKILL)
        back = f"kill -USR1 {process.pid}"
        read_until(process, lambda line: line == f"node2: killed by SIGKILL (start it again: {back})\n")
        assert run_ctl([f"--endpoints={endpoints}", "get", "k"]).output == b"k\nv\n"
        os.kill(process.pid, signal.SIGUSR1)
        read_until(process, lambda line: line.startswith("ready: "))
        assert run_ctl([f"--endpoints=127.0.0.1:{ports[1]}", "get", "k"]).output == b"k\nv\n"
        process.send_signal(signal.SIGINT)
        read_until(process, lambda line: line == "stopping all members\n")
        assert process.wait(STOP_TIMEOUT_S) == 0
        assert member_processes(directory) == []


def member_running(tmp_path: Path, on_term: str) -> Member:
    """A member whose process does ``on_term`` when it is asked to stop."""
    code = f"import signal, sys\nsignal.signal(signal.SIGTERM, {on_term})\nprint(flush=True)\nwhile 1: signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline()  # from here on the handler is there
    return Member("node1", tmp_path, 1, 2, process=process)


def test_members_are_asked_to_stop_before_they_are_killed(tmp_path):
    willing = member_running(tmp_path, "lambda *_: sys.exit(7)")
    stubborn = member_running(tmp_path, "signal.SIG_IGN")
    stop_all([willing], timeout_s=STOP_TIMEOUT_S)
    stop_all([stubborn], timeout_s=0.1)
    assert (willing.exit_status, stubborn.exit_status) == (7, -signal.SIGKILL)


@pytest.mark.long
def test_members_that_cannot_run_are_named():
    with local_cluster(1, "--", "--heartbeat-interval=0") as (process, _, directory):
        text = "node1: exited with status 1: raftkv: --heartbeat-interval must be >0 (set to 0ms) "
        read_until(process, lambda line: line.startswith(text))
        assert process.wait(STOP_TIMEOUT_S) == 1
        assert member_processes(directory) == []


def test_a_taken_port_is_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = run_server(
            ["cluster", "--size=1", f"--client-ports={port}", f"--peer-ports={free_port()}", f"--data-dir={tmp_path}/x"]
        )
    assert ran.code == 1
    assert ran.errors.startswith(f"raftkv: cannot listen on 127.0.0.1:{port}: Address already in use by ")
    assert ran.errors.endswith(f" (process {os.getpid()})\n")


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    ports = (f"--client-ports={free_port()}", f"--peer-ports={free_port()}")
    ran = run_server(["cluster", "--size=1", f"--data-dir={file}", *ports])
    assert (ran.code, ran.errors) == (1, f"raftkv: {file} is not a directory\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--size=0"], "--size must be between 1 and 6 (set to 0)"),
        (["--size=2", "--client-ports=1"], "--client-ports must be 2 numbers (set to 1)"),
        (["--size=1", "--client-ports=x"], "--client-ports must be 1 numbers (set to x)"),
        (["--siz=1"], "unknown flag: --siz (did you mean --size?)"),
        (["extra"], "'extra' is not a valid flag of raftkv cluster"),
    ],
)
def test_bad_options(words, text):
    ran = run_server(["cluster", *words])
    assert (ran.code, ran.errors) == (2, f"raftkv: {text}\n")


LEADER = Row("node1", "http://127.0.0.1:52379", "leader", term=3, revision=5_000_000, db_size_bytes=957_344_000,
             writes_per_s=12345.4)  # fmt: skip
FOLLOWER = Row("node2", "http://b", "follower", term=3, revision=5, db_size_bytes=57_344)
DEAD = Row("node3", "http://c", "exited", error="killed by SIGKILL [/]")


def test_the_table_shows_every_member():
    console = Console(width=80, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(make_table([LEADER, FOLLOWER, DEAD], {"node1": 4_194_303, "node2": 7}))
    console.file.close()
    text = console.export_text()
    for shown in (
        "node1",
        "leader",
        "4194303",
        "57 kB",
        "12345",
        " 127.0.0.1:52379",
        "follower",
        "exited",
        "http://127.0.0.1:52379/ui/",
        f"node3: killed by SIGKILL [/]; start it again: kill -USR1 {os.getpid()}",
    ):
        assert shown in text
    assert "…" not in text, "it fits 80 columns"


def test_news_are_told_once():
    *_, dashboard, ready = news([], [LEADER, FOLLOWER])
    assert dashboard == "dashboard: http://127.0.0.1:52379/ui/"
    assert ready.startswith("ready: ")
    assert news([LEADER, FOLLOWER], [LEADER, FOLLOWER]) == []
    assert news([LEADER, DEAD], [LEADER, DEAD]) == []
    assert news([FOLLOWER], [Row("node2", "http://b", "leader", term=4)]) == ["node2: leader in term 4 at http://b"]


@pytest.mark.parametrize("noted", [True, False])
def test_data_of_a_cluster_of_another_size_is_refused_at_once(tmp_path: Path, noted: bool) -> None:
    ports = [str(free_port()) for _ in range(8)]

    def words(size: int, peers: list[str]) -> list[str]:
        clients = ",".join(ports[:size])
        return ["cluster", "--data-dir", str(tmp_path / "d"), "--size", str(size), "--client-ports", clients,
                "--peer-ports", ",".join(peers)]  # fmt: skip

    for name in ("node1", "node2", "node3"):
        (tmp_path / "d" / name / "member" / "wal").mkdir(parents=True)
    if noted:
        urls = (f"node{number}=http://127.0.0.1:{port}" for number, port in enumerate(ports[4:7], start=1))
        (tmp_path / "d" / "members").write_text(",".join(urls))
    remedy = f"or give another --data-dir, or remove {tmp_path / 'd'} with all of its data"
    for size in (1, 4):
        ran = run_server(words(size, ports[4 : 4 + size]))
        told = f"{tmp_path / 'd'} holds a cluster of 3 members, not {size}: give --size 3, {remedy}"
        assert (ran.code, ran.errors) == (1, f"raftkv: {told}\n")
    if noted:
        ran = run_server(words(3, ports[5:8]))
        told = f"{tmp_path / 'd'} holds a cluster with --peer-ports {','.join(ports[4:7])}: give these, {remedy}"
        assert (ran.code, ran.errors) == (1, f"raftkv: {told}\n")
