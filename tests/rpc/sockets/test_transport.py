"""A protocol hears from our transport what it hears from asyncio's: each scenario is played on both."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any, cast

import pytest

from raftkv.loop.cork import Cork
from raftkv.rpc.sockets import READ_BYTES, READING_S, READS_MAX, EpollPoller, LoopPoller, Poller, SocketTransport
from tests.rpc.loop import until

RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset."""


class Noted:
    """What a protocol heard, in order, and what it does then."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.transport: Any = None
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.keeps_open = False
        self.failures: list[Exception] = []
        """What it has raised by intent."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.heard.append("made")

    def take(self, data: bytes) -> None:
        self.heard.append(data)
        self.on_data(data)

    def eof_received(self) -> bool:
        self.heard.append("eof")
        return self.keeps_open

    def pause_writing(self) -> None:
        self.heard.append("pause")

    def resume_writing(self) -> None:
        self.heard.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.append(("lost", type(exc)))

    @property
    def is_lost(self) -> bool:
        return bool(self.heard) and isinstance(self.heard[-1], tuple)


class Plain(Noted, asyncio.Protocol):
    """Takes what was read as an object."""

    def data_received(self, data: bytes) -> None:
        self.take(data)


class Buffered(Noted, asyncio.BufferedProtocol):
    """Brings a buffer to read into."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = memoryview(bytearray(64 * 1024))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.take(bytes(self.buffer[:nbytes]))


def _pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair over TCP, small buffers, neither end blocks."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        far = socket.socket()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        far.connect(listening.getsockname())
        near, _ = listening.accept()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    near.setblocking(False)
    far.setblocking(False)
    return near, far


def _poller(kind: str) -> Poller:
    loop = asyncio.get_running_loop()
    return EpollPoller(loop, Cork()) if kind == "epoll" else LoopPoller(loop)


@contextlib.asynccontextmanager
async def _open(kind: str, protocol: Any) -> AsyncIterator[socket.socket]:
    """Connect a protocol by a kind of transport; yields the other end. No callback of the loop may fail meanwhile."""
    near, far = _pair()
    loop = asyncio.get_running_loop()
    failures: list[Any] = []
    with far:
        loop.set_exception_handler(lambda loop, context: failures.append(context.get("exception")))
        if kind == "asyncio":
            await loop.connect_accepted_socket(lambda: protocol, near)
            yield far
        else:
            poller = _poller(kind)
            SocketTransport(loop, poller, near, far.getsockname()).open(protocol)
            yield far
            await until(lambda: protocol.is_lost)
            poller.close()
    await asyncio.sleep(0)
    assert failures == protocol.failures


async def _drained(far: socket.socket) -> bytes:
    """Read until the other end closes."""
    loop = asyncio.get_running_loop()
    found = bytearray()
    while data := await loop.sock_recv(far, 64 * 1024):
        found += data
    return bytes(found)


def _filled(protocol: Noted) -> int:
    """Write until a write waits; returns how many bytes were written."""
    size = 0
    while not protocol.transport.get_write_buffer_size():
        protocol.transport.write(bytes(16 * 1024))
        size += 16 * 1024
    return size


KINDS = ["asyncio", "epoll", "loop"]
both_protocols = pytest.mark.parametrize("protocol_type", [Plain, Buffered])
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@both_protocols
async def test_bytes_arrive_in_both_directions(kind: str, protocol_type: type[Noted]) -> None:
    protocol: Any = protocol_type()
    async with _open(kind, protocol) as far:
        far.send(b"one")
        await until(lambda: b"one" in protocol.heard)
        far.send(b"two")
        await until(lambda: b"two" in protocol.heard)
        protocol.transport.write(b"answer")
        far.shutdown(socket.SHUT_WR)
        assert await _drained(far) == b"answer"
        await until(lambda: protocol.is_lost)
    assert protocol.heard == ["made", b"one", b"two", "eof", ("lost", type(None))]


@every_kind
async def test_a_writer_is_paused_and_all_arrives_in_order_before_the_end(kind: str) -> None:
    protocol: Any = Plain()
    async with _open(kind, protocol) as far:
        protocol.transport.set_write_buffer_limits(high=100_000, low=10_000)
        assert protocol.transport.get_write_buffer_limits() == (10_000, 100_000)
        pieces = [bytes([number]) * 50_000 for number in range(200)]
        for piece in pieces:
            protocol.transport.write(piece)
        assert protocol.heard == ["made", "pause"]
        waiting_bytes = protocol.transport.get_write_buffer_size()
        assert 100_000 < waiting_bytes <= 10_000_000
        protocol.transport.close()
        assert protocol.transport.is_closing()
        assert protocol.transport.get_write_buffer_size() == waiting_bytes
        assert await _drained(far) == b"".join(pieces)
        await until(lambda: protocol.is_lost)
    assert protocol.heard == ["made", "pause", "resume", ("lost", type(None))]


@every_kind
async def test_writing_resumes_at_the_low_mark(kind: str) -> None:
    protocol: Any = Plain()
    async with _open(kind, protocol) as far:
        loop = asyncio.get_running_loop()
        protocol.transport.set_write_buffer_limits(high=100_000, low=50_000)
        sizes: list[int] = []
        protocol.resume_writing = lambda: sizes.append(protocol.transport.get_write_buffer_size())
        protocol.transport.write(bytes(4_000_000))
        while not sizes:
            await loop.sock_recv(far, 4096)
        assert sizes[0] <= 50_000
        protocol.transport.abort()
        await until(lambda: protocol.is_lost)


@every_kind
async def test_abort_drops_what_waits(kind: str) -> None:
    protocol: Any = Plain()
    async with _open(kind, protocol) as far:
        size = _filled(protocol)
        protocol.transport.abort()
        assert protocol.transport.get_write_buffer_size() == 0
        assert not protocol.is_lost  # not from within a call of its own
        protocol.transport.abort()
        protocol.transport.close()
        protocol.transport.write(b"late")
        await until(lambda: protocol.is_lost)
        arrived = await _drained(far)
        assert len(arrived) < size
        assert b"late" not in arrived
    assert [event for event in protocol.heard if event != "pause"] == ["made", ("lost", type(None))]


@every_kind
async def test_nothing_is_sent_after_the_end(kind: str) -> None:
    protocol: Any = Plain()
    async with _open(kind, protocol) as far:
        protocol.transport.close()
        protocol.transport.write(b"late")
        assert await _drained(far) == b""
        await until(lambda: protocol.is_lost)


@every_kind
@both_protocols
async def test_a_reset_is_heard_as_an_error(kind: str, protocol_type: type[Noted]) -> None:
    protocol: Any = protocol_type()
    async with _open(kind, protocol) as far:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        far.close()
        await until(lambda: protocol.is_lost)
    assert protocol.heard == ["made", ("lost", ConnectionResetError)]


@every_kind
async def test_a_reset_while_nothing_is_read_is_heard_by_who_writes(kind: str) -> None:
    protocol: Any = Plain()
    async with _open(kind, protocol) as far:
        protocol.transport.pause_reading()
        _filled(protocol)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        far.close()
        await until(lambda: protocol.is_lost)
    assert protocol.heard[-1][1] in (ConnectionResetError, BrokenPipeError)


@every_kind
@both_protocols
async def test_nothing_is_read_while_paused(kind: str, protocol_type: type[Noted]) -> None:
    protocol: Any = protocol_type()
    async with _open(kind, protocol) as far:
        protocol.on_data = lambda data: protocol.transport.pause_reading()
        far.send(b"first")
        await until(lambda: b"first" in protocol.heard)
        assert not protocol.transport.is_reading()
        far.send(b"second")
        for _ in range(10):
            await asyncio.sleep(0)
        assert protocol.heard == ["made", b"first"]
        protocol.transport.resume_reading()
        assert protocol.transport.is_reading()
        await until(lambda: b"second" in protocol.heard)
        protocol.transport.close()
        assert not protocol.transport.is_reading()
        await until(lambda: protocol.is_lost)


class Endless:
    """A connected socket that always has more to read."""

    def __init__(self) -> None:
        self.reads = 0

    def fileno(self) -> int:
        return 0

    def recv(self, size: int) -> bytes:
        self.reads += 1
        return bytes(size)


class Sudden(Endless):
    """A connected socket that takes ten bytes, and then everything."""

    def __init__(self) -> None:
        super().__init__()
        self.room = 10

    def send(self, data: bytes) -> int:
        sent, self.room = min(self.room, len(data)), 1 << 30
        return sent

    def close(self) -> None:
        pass


class Nowhere:
    """Watches nothing."""

    def watch(self, fd: int, owner: Any, events: int) -> None:
        pass

    def close(self) -> None:
        pass


def _endless(protocol: Any) -> tuple[Endless, SocketTransport]:
    endless = Endless()
    transport = SocketTransport(asyncio.get_running_loop(), Nowhere(), cast(socket.socket, endless), None)
    transport.open(protocol)
    return endless, transport


async def test_much_is_read_at_once_if_it_is_soon_taken_and_else_a_little() -> None:
    quick: Any = Plain()
    endless, transport = _endless(quick)
    transport.on_readable()
    assert 1 <= endless.reads <= READS_MAX
    busy: Any = Plain()

    def work(data: bytes) -> None:
        until = monotonic() + 2 * READING_S
        while monotonic() < until:
            pass

    busy.on_data = work
    endless, transport = _endless(busy)
    transport.on_readable()
    assert busy.heard == ["made", bytes(READ_BYTES)]
    assert endless.reads == 1


async def test_writing_resumes_when_the_last_bytes_leave_at_once_before_a_close() -> None:
    protocol: Any = Plain()
    transport = SocketTransport(asyncio.get_running_loop(), Nowhere(), cast(socket.socket, Sudden()), None)
    transport.open(protocol)
    transport.set_write_buffer_limits(high=100, low=10)
    transport.write(bytes(1_000))
    transport.close()
    transport.on_writable()
    await until(lambda: protocol.is_lost)
    assert protocol.heard == ["made", "pause", "resume", ("lost", type(None))]


async def test_nothing_more_is_read_once_the_protocol_pauses() -> None:
    protocol: Any = Plain()
    protocol.on_data = lambda data: protocol.transport.pause_reading()
    endless, transport = _endless(protocol)
    transport.on_readable()
    assert endless.reads == 1
    transport.on_readable()
    assert endless.reads == 1


@every_kind
@both_protocols
async def test_a_protocol_that_fails_loses_its_connection_and_no_other(kind: str, protocol_type: type[Noted]) -> None:
    protocol: Any = protocol_type()
    error = ValueError("planted")
    protocol.failures.append(error)

    def fail(data: bytes) -> None:
        raise error

    protocol.on_data = fail
    async with _open(kind, protocol) as far:
        far.send(b"data")
        await until(lambda: protocol.is_lost)
    assert protocol.heard == ["made", b"data", ("lost", ValueError)]


@every_kind
async def test_an_answer_may_follow_the_end_of_the_other_side(kind: str) -> None:
    protocol: Any = Plain()
    protocol.keeps_open = True
    async with _open(kind, protocol) as far:
        far.send(b"question")
        far.shutdown(socket.SHUT_WR)
        await until(lambda: "eof" in protocol.heard)
        for _ in range(10):
            await asyncio.sleep(0)
        protocol.transport.write(b"answer")
        protocol.transport.close()
        assert await _drained(far) == b"answer"
        await until(lambda: protocol.is_lost)
    assert protocol.heard == ["made", b"question", "eof", ("lost", type(None))]


@every_kind
async def test_another_protocol_takes_over_with_the_next_bytes(kind: str) -> None:
    protocol: Any = Plain()
    other: Any = Buffered()

    def hand_over(data: bytes) -> None:
        other.transport = protocol.transport
        protocol.transport.set_protocol(other)
        assert protocol.transport.get_protocol() is other

    protocol.on_data = hand_over
    near, far = _pair()
    loop = asyncio.get_running_loop()
    with far:
        if kind == "asyncio":
            await loop.connect_accepted_socket(lambda: protocol, near)
        else:
            SocketTransport(loop, _poller(kind), near, far.getsockname()).open(protocol)
        far.send(b"first")
        await until(lambda: b"first" in protocol.heard)
        far.send(b"second")
        await until(lambda: b"second" in other.heard)
        other.transport.close()
        await until(lambda: other.is_lost)
    assert protocol.heard == ["made", b"first"]
    assert other.heard == [b"second", ("lost", type(None))]


@every_kind
async def test_addresses_are_those_of_the_socket(kind: str) -> None:
    protocol: Any = Plain()
    async with _open(kind, protocol) as far:
        info = protocol.transport.get_extra_info
        assert info("peername") == far.getsockname()
        assert info("sockname") == far.getpeername()
        assert info("socket").fileno() >= 0
        assert info("ssl_object") is None
        assert info("unknown", 7) == 7
        protocol.transport.close()
        await until(lambda: protocol.is_lost)


class Full(Nowhere):
    """Has no room for another socket."""

    def watch(self, fd: int, owner: Any, events: int) -> None:
        if events:
            raise OSError(errno.ENOSPC, "planted")


async def test_a_connection_that_cannot_be_watched_is_lost() -> None:
    loop = asyncio.get_running_loop()
    failures: list[Any] = []
    loop.set_exception_handler(lambda loop, context: failures.append(context["exception"].errno))
    protocol: Any = Plain()
    near, far = _pair()
    with far:
        SocketTransport(loop, Full(), near, far.getsockname()).open(protocol)
        await until(lambda: protocol.is_lost)
        assert await _drained(far) == b""
    assert failures == [errno.ENOSPC]


@pytest.mark.parametrize("kind", ["epoll", "loop"])
async def test_a_protocol_that_refuses_in_connection_made_is_not_read(kind: str) -> None:
    protocol: Any = Plain()
    made = protocol.connection_made

    def refuse(transport: Any) -> None:
        made(transport)
        transport.write(b"too many")
        transport.close()

    protocol.connection_made = refuse
    async with _open(kind, protocol) as far:
        with contextlib.suppress(OSError):
            far.send(b"data")
        assert await asyncio.get_running_loop().sock_recv(far, 100) == b"too many"
        await until(lambda: protocol.is_lost)
    assert protocol.heard == ["made", ("lost", type(None))]
