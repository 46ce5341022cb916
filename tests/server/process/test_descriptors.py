"""A member with 1,024 descriptors, all of them wanted by clients, lives, serves, and cuts its log."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, Program, wait_for
from tests.rpc import raw
from tests.server.process.process import log_of, must_put, put, run_to_end, value_of

DESCRIPTORS = 1024
IDLE = 2000
GREETING = raw.PREFACE + raw.settings() + raw.frame(raw.SETTINGS, raw.ACK, 0)
HANGING = raw.headers(1, raw.grpc_headers("/etcdserverpb.Watch/Watch"))
"""An open call: a connection that has one is never taken for idle."""


def limited(program: Program, soft: int, hard: int) -> Program:
    return Program(program.name, ("prlimit", f"--nofile={soft}:{hard}", *program.command), program.flags)


@pytest.fixture(autouse=True)
def _own_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def crowd(port: int, first: bytes) -> Iterator[list[socket.socket]]:
    """Open connections that say hello and nothing more, whether they are taken or not."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(IDLE):
            sock = socket.create_connection(("127.0.0.1", port), timeout=60)
            sockets.append(sock)
            with contextlib.suppress(ConnectionError):
                sock.sendall(first)
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


def is_open(sock: socket.socket) -> bool:
    """Whether the server has kept a connection: one that it closed has an end, or was reset."""
    sock.setblocking(False)
    try:
        while sock.recv(65_536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def last_segment(data_dir: Path) -> str:
    return max(path.name for path in (data_dir / "member" / "wal").glob("*.wal"))


@pytest.mark.long
def test_a_member_whose_clients_take_all_connections_lives_and_cuts_its_log() -> None:
    program = limited(RAFTKV, 256, DESCRIPTORS)
    with Cluster(program, size=3, flags=["--snapshot-count=20", "--snapshot-catchup-entries=5"]) as cluster:
        crowded = cluster.members[0]
        with contextlib.ExitStack() as stack:
            honest = stack.enter_context(Wire([crowded.endpoint]))
            must_put(honest, "before")
            sockets = stack.enter_context(crowd(crowded.client_port, GREETING + HANGING))
            wait_for(lambda: sum(map(is_open, sockets)) <= DESCRIPTORS - 150, "the refusals")
            assert sum(map(is_open, sockets)) > 800, "the soft limit of 256 was raised"
            before = last_segment(crowded.data_dir)
            cluster.members[2].kill()
            for number in range(80):
                must_put(honest, f"key-{number % 10}", bytes(1_000_000))
            assert last_segment(crowded.data_dir) > before
            cluster.members[2].restart()
            with Wire([cluster.members[2].endpoint]) as other:
                wait_for(
                    lambda: put(other, "back", b"x").code == "OK", "the killed member, which needs the crowded one"
                )
            assert value_of(honest, "key-9") == bytes(1_000_000)
        assert crowded.process is not None
        assert crowded.process.poll() is None
        assert "Traceback" not in log_of(crowded)
        assert "rejected" in log_of(crowded)


@pytest.mark.long
def test_a_limit_that_leaves_nothing_is_refused_in_a_line(tmp_path: Path) -> None:
    ended = run_to_end("--data-dir", str(tmp_path / "data"), program=limited(RAFTKV, 100, 100))
    assert not (tmp_path / "data").exists()
    assert ended.one_line() == (
        "raftkv: a limit of 100 file descriptors is too low: the member itself needs 150 (see ulimit -n)"
    )
