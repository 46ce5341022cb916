"""Opening and closing connections of every kind does not grow a member's memory, and hardly triggers the collector."""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.procs import RAFTKV, Cluster, free_port
from tests.rpc import raw
from tests.rpc.conftest import Certificates

WARM_UP = 300
"""Opened before the first look: allocators and caches fill to what they keep."""

GROWTH_MAX_BYTES = 2 * 1024 * 1024
TIMEOUT_S = 90.0
GREETING = raw.PREFACE + raw.settings() + raw.frame(raw.SETTINGS, raw.ACK, 0)
RANGE = raw.headers(1, raw.grpc_headers("/etcdserverpb.KV/Range")) + raw.message(
    1, b"\0\0\0\0\5\x0a\1a\x38\1", raw.END_STREAM
)
WATCH = raw.headers(3, raw.grpc_headers("/etcdserverpb.Watch/Watch")) + raw.message(3, b"\0\0\0\0\5\x0a\3\x0a\1a")
KEEP_ALIVE = raw.headers(5, raw.grpc_headers("/etcdserverpb.Lease/LeaseKeepAlive")) + raw.message(
    5, b"\0\0\0\0\2\x08\1"
)
HTTP1 = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class Target:
    pid: int
    port: int
    tls_port: int
    client: ssl.SSLContext

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()


@pytest.fixture(scope="module")
def target(certificates: Certificates) -> Iterator[Target]:
    cluster = Cluster(RAFTKV, flags=[f"--cert-file={certificates.path('server.crt')}"])
    (member,) = cluster.members
    tls_port = free_port()
    urls = f"http://127.0.0.1:{member.client_port},https://127.0.0.1:{tls_port}"
    member.flags += [f"--listen-client-urls={urls}", f"--key-file={certificates.path('server.key')}"]
    with cluster:
        client = certificates.client_context()
        client.set_alpn_protocols(["h2"])
        assert member.process is not None
        yield Target(member.process.pid, member.client_port, tls_port, client)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)


def h2(target: Target) -> None:
    """Calls of all kinds, of which two are open when the client goes."""
    with connect(target.port) as sock:
        sock.sendall(GREETING + RANGE + WATCH + KEEP_ALIVE)
        sock.recv(65_536)


def h2_reset(target: Target) -> None:
    with connect(target.port) as sock:
        sock.sendall(GREETING + WATCH)
        sock.recv(65_536)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def http1(target: Target) -> None:
    with connect(target.port) as sock:
        sock.sendall(HTTP1)
        sock.recv(65_536)


def rubbish(target: Target) -> None:
    with connect(target.port) as sock:
        sock.sendall(GREETING + raw.message(1, b"of no stream"))
        with contextlib.suppress(OSError):
            while sock.recv(65_536):
                pass


def tls(target: Target) -> None:
    with target.client.wrap_socket(connect(target.tls_port), server_hostname="localhost") as sock:
        sock.sendall(GREETING + RANGE)
        sock.recv(65_536)


def tls_failed(target: Target) -> None:
    with connect(target.tls_port) as sock:
        sock.sendall(HTTP1)
        with contextlib.suppress(OSError):
            sock.recv(65_536)


KINDS = {h2: 1_500, h2_reset: 1_500, http1: 1_500, rubbish: 1_500, tls: 700, tls_failed: 700}
"""How many of each: a few KiB that one leaves would show."""


def assert_flat(target: Target, one: Callable[[Target], None], count: int) -> None:
    for _ in range(WARM_UP):
        one(target)
    before = target.resident_bytes()
    for _ in range(count):
        one(target)
    growth = target.resident_bytes() - before
    assert growth < GROWTH_MAX_BYTES, f"{growth / count:.0f} bytes are left of each connection"


@pytest.mark.long
@pytest.mark.parametrize(("one", "count"), KINDS.items(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_connections_leave_nothing(target: Target, one: Callable[[Target], None], count: int) -> None:
    assert_flat(target, one, count)
