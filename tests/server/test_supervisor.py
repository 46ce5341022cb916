"""Notifications to systemd: ready, stopping, and watchdog pings of the loop."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftkv.client.local import ServerProcess, is_healthy
from raftkv.server.main import Supervisor
from tests.procs import PATIENCE_S, free_port


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """The end that systemd has; a datagram at a time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(PATIENCE_S)
        yield listener


def heard(systemd: socket.socket) -> list[str]:
    systemd.setblocking(False)
    texts = []
    try:
        while True:
            texts.append(systemd.recv(4096).decode())
    except BlockingIOError:
        return texts


async def test_without_a_socket_no_notification_is_sent():
    supervisor = Supervisor.of({})
    supervisor.ready("serves")
    supervisor.stopping("stops")
    supervisor.feed_watchdog(asyncio.get_running_loop())
    supervisor.close()


def test_the_variables_are_taken_out_so_that_children_do_not_speak_for_the_member(systemd):
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    supervisor = Supervisor.of(environment)
    assert environment == {}
    supervisor.ready("serves")
    supervisor.stopping("stops")
    supervisor.close()
    assert supervisor.watchdog_s == 3
    assert heard(systemd) == ["READY=1\nSTATUS=serves", "STOPPING=1\nSTATUS=stops"]


@pytest.mark.parametrize(
    ("variables", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "2000000"}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
        ({}, 0.0),
    ],
)
def test_a_watchdog_counts_if_it_is_this_process_s(systemd, variables, watchdog_s):
    supervisor = Supervisor.of({"NOTIFY_SOCKET": systemd.getsockname(), **variables})
    supervisor.close()
    assert supervisor.watchdog_s == watchdog_s


def test_a_socket_in_no_file_system_is_told_too():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("")  # the kernel chooses a name outside the file system
        supervisor = Supervisor(listener.getsockname().decode().replace("\0", "@"))
        supervisor.ready("serves")
        supervisor.close()
        assert heard(listener) == ["READY=1\nSTATUS=serves"]


async def test_a_member_that_is_ready_says_so_until_there_is_room_for_it(systemd):
    """A machine that starts fills the socket: systemd would have ended a member that serves, and started it anew."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as others:
        others.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                others.sendto(b"READY=1", systemd.getsockname())
    supervisor = Supervisor(systemd.getsockname())
    supervisor.ready("serves")
    assert "READY=1\nSTATUS=serves" not in heard(systemd)
    systemd.setblocking(False)
    text = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(systemd, 4096), PATIENCE_S)
    supervisor.close()
    assert [text.decode(), *heard(systemd)] == ["READY=1\nSTATUS=serves"]


@pytest.mark.parametrize("address", ["/nowhere/notify", "vsock:2:1234"])
def test_a_supervisor_that_cannot_be_told_is_a_line_in_the_log(address, caplog):
    supervisor = Supervisor.of({"NOTIFY_SOCKET": address})
    supervisor.ready("serves")
    supervisor.close()
    assert len(caplog.messages) == 1
    assert address in caplog.text


def hold_up() -> None:
    """Return after several times 3 ms, in which the loop does nothing else."""
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)


async def test_the_watchdog_is_fed_by_the_loop_and_by_nothing_else(systemd):
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(systemd.getsockname(), watchdog_s=0.003)
    supervisor.feed_watchdog(loop)
    systemd.setblocking(False)
    for _ in range(3):
        assert await loop.sock_recv(systemd, 100) == b"WATCHDOG=1"
    heard(systemd)
    hold_up()
    assert heard(systemd) == []
    assert await loop.sock_recv(systemd, 100) == b"WATCHDOG=1"
    supervisor.close()


@contextlib.contextmanager
def notifying_member(systemd, directory, monkeypatch):
    """A member that has said to systemd that it lives, and will say more."""
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    member = ServerProcess("a", directory, free_port(), free_port())
    member.initial_cluster = f"a={member.peer_url}"
    member.start()
    try:
        assert systemd.recv(4096) == b"WATCHDOG=1"
        yield member
    finally:
        member.kill()


@pytest.mark.long
def test_a_member_tells_when_it_serves_and_when_it_stops(systemd, tmp_path, monkeypatch):
    with notifying_member(systemd, tmp_path, monkeypatch) as member:
        assert systemd.recv(4096).decode() == f"READY=1\nSTATUS=member a serves clients on {member.client_url}"
        assert is_healthy(member.endpoint)
        member.process.send_signal(signal.SIGTERM)
        assert systemd.recv(4096) == b"STOPPING=1\nSTATUS=stopping on SIGTERM"
        assert member.process.wait(PATIENCE_S) == -signal.SIGTERM
    assert heard(systemd) == []


@pytest.mark.long
def test_a_member_that_the_watchdog_ends_leaves_its_stacks_in_the_log(systemd, tmp_path, monkeypatch):
    with notifying_member(systemd, tmp_path, monkeypatch) as member:
        member.process.send_signal(signal.SIGABRT)
        assert member.process.wait(PATIENCE_S) == -signal.SIGABRT
    text = member.log_path.read_text()
    assert "Fatal Python error: Aborted" in text
    assert "raftkv/server/main.py" in text
