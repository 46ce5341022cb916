"""HTTP/1.1 under its limits by the documented numbers, and slow readers over HTTP/2: who is cut and who is not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from raftkv.rpc import HttpRequest, HttpResponse, ServerLimits, StreamCall
from raftkv.rpc.protocol import _passed_bytes
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.clock import Clock, on_clock
from tests.rpc.loop import until

LIMITS = ServerLimits()
LARGE = bytes(12_000_000)
"""More than the kernel takes for a client that does not read."""
GET = b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n"
SMALL_ANSWER = b"\r\n\r\nsmall"


async def handler(request: HttpRequest) -> HttpResponse:
    match request.path:
        case "/large":
            return HttpResponse(200, LARGE)
        case "/pieces":
            return HttpResponse(200, pieces())
        case "/echo":
            return HttpResponse(200, request.body)
    return HttpResponse(200, b"small")


async def pieces() -> AsyncIterator[bytes]:
    for start in range(0, len(LARGE), 100_000):
        yield LARGE[start : start + 100_000]


async def stream_pieces(call: StreamCall) -> None:
    async for piece in pieces():
        await call.send(piece)


class Client:
    """A socket with a small receive buffer, and what came out of it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.got = b""
        self.ended = False

    @classmethod
    async def connect(cls, target: str) -> Client:
        host, _, port = target.rpartition(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        return cls(sock)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def read(self, size: int = 65_536) -> bytes:
        """Read once; b"" at the end of the connection, however it came."""
        try:
            data = await asyncio.get_running_loop().sock_recv(self.sock, size)
        except ConnectionError:
            data = b""
        self.got += data
        self.ended = not data
        return data

    async def read_until(self, ending: bytes) -> bytes:
        """Read up to an ending, or to the end of the connection; forget what came."""
        while not self.got.endswith(ending) and await self.read():
            pass
        got, self.got = self.got, b""
        return got

    async def ask(self, request: bytes = GET, ending: bytes = SMALL_ANSWER) -> bytes:
        await self.send(request)
        return await self.read_until(ending)


@contextlib.asynccontextmanager
async def world(limits: ServerLimits = LIMITS) -> AsyncIterator[tuple[s.EchoServer, Client]]:
    """A server, and a client that is connected to it."""
    async with s.echo_server(limits, handler) as echo:
        echo.server.unary(CALL, lambda call, message: call.reply(LARGE))
        echo.server.stream(STREAM, stream_pieces)
        client = await Client.connect(echo.target)
        await until(lambda: echo.server.connections)
        try:
            yield echo, client
        finally:
            client.sock.close()
        assert echo.reported == []


def connection(echo: s.EchoServer) -> Any:
    (one,) = echo.server.connections
    return one


async def cut(clock: Clock, echo: s.EchoServer) -> None:
    """Let time pass until the connection is cut: each byte that the kernel takes late begins the time anew."""
    for _ in range(60):
        if not echo.server.connections:
            break
        await clock.pass_s(5.0)
    await closed(echo)


async def closed(echo: s.EchoServer) -> None:
    await until(lambda: not echo.server.connections)


async def answer_under_way(echo: s.EchoServer) -> asyncio.Transport:
    """Wait until an answer does not fit into the socket; return the server's transport."""
    transport: asyncio.Transport = connection(echo)._transport
    await until(lambda: transport.get_write_buffer_size() > 65_536)
    return transport


async def acknowledged(transport: asyncio.Transport, before: int) -> None:
    """Wait until the server knows that more than ``before`` bytes have passed, or all."""
    await until(lambda: _passed_bytes(transport) != before or not transport.get_write_buffer_size())


# ---- who reads, slowly or not at all

BEGIN_HTTP2 = (
    raw.PREFACE + raw.settings((4, 2**31 - 1)) + raw.frame(raw.WINDOW_UPDATE, 0, 0, (2**31 - 65_536).to_bytes(4, "big"))
)
PLAIN = ((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/large"), (b":authority", b"x"))
OVER_HTTP2 = BEGIN_HTTP2 + raw.headers(1, PLAIN, 5)
CALL, STREAM = "/test.Echo/Large", "/test.Echo/Pieces"
ASKED = raw.message(1, b"\0\0\0\0\0", raw.END_STREAM)
LARGE_REQUESTS = [
    b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /pieces HTTP/1.1\r\nHost: x\r\n\r\n",
    OVER_HTTP2,
    BEGIN_HTTP2 + raw.headers(1, raw.grpc_headers(CALL)) + ASKED,
    BEGIN_HTTP2 + raw.headers(1, raw.grpc_headers(STREAM)) + ASKED,
]
IDS = ["whole", "in pieces", "over HTTP/2", "a call", "a stream"]


@pytest.mark.long
@pytest.mark.parametrize("request_bytes", LARGE_REQUESTS, ids=IDS)
@on_clock
async def test_a_slow_reader_is_not_cut(clock: Clock, request_bytes: bytes) -> None:
    """150 kB in twenty seconds, for longer than every timeout: the kernel takes nothing new from us for minutes."""
    async with world() as (echo, client):
        await client.send(request_bytes)
        transport = await answer_under_way(echo)
        total = 0
        while total < len(LARGE):
            before, wanted = _passed_bytes(transport), total + 150_000
            while total < min(wanted, len(LARGE)):
                data = await client.read()
                assert data, f"cut after {total} bytes"
                total += len(data)
            await acknowledged(transport, before)
            await clock.pass_s(20.0)


@pytest.mark.parametrize("request_bytes", LARGE_REQUESTS, ids=IDS)
@on_clock
async def test_a_connection_that_is_not_read_is_cut_after_the_stall_timeout(clock: Clock, request_bytes: bytes) -> None:
    async with world() as (echo, client):
        await client.send(request_bytes)
        await answer_under_way(echo)
        for _ in range(11):
            await clock.pass_s(5.0)
        assert len(echo.server.connections) == 1
        await cut(clock, echo)


@on_clock
async def test_an_unread_last_answer_is_cut_too(clock: Clock) -> None:
    async with world() as (echo, client):
        await client.send(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await answer_under_way(echo)
        await cut(clock, echo)


@on_clock
async def test_the_end_of_an_answer_over_tls_may_take_seconds_to_leave(clock, certificates):
    async with s.echo_server(LIMITS, handler, certificates.server_context()) as echo:
        host, _, port = echo.target.rpartition(":")
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        small.connect((host, int(port)))
        reader, writer = await asyncio.open_connection(
            sock=small, ssl=certificates.client_context(), server_hostname="localhost", limit=10_000
        )
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        total = 0
        while echo.server.connections and not connection(echo)._http1._finished:
            total += len(await reader.read(10_000))
        await clock.pass_s(5.0)
        while data := await reader.read(10_000):
            total += len(data)
        assert total == len(LARGE)
        writer.transport.abort()


@on_clock
async def test_a_large_answer_that_was_read_leaves_no_timer_behind(clock: Clock) -> None:
    async with world() as (echo, client):
        await client.send(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await answer_under_way(echo)
        while len(client.got) < len(LARGE):
            await client.read()
        client.got = b""
        await until(lambda: connection(echo)._http1._task is None)
        await clock.pass_s(70.0)
        assert (await client.ask()).endswith(SMALL_ANSWER)


# ---- who lets us wait


@on_clock
async def test_the_first_header_is_timed_from_the_connection(clock: Clock) -> None:
    async with world() as (echo, client):
        await clock.pass_s(6.0)
        await client.send(b"GET /small HT")
        await until(lambda: connection(echo)._http1 is not None)
        await clock.pass_s(3.0)
        assert len(echo.server.connections) == 1
        await clock.pass_s(1.5)
        assert (await client.read_until(b"-")).startswith(b"HTTP/1.1 408 ")


@on_clock
async def test_the_next_header_is_timed_from_its_first_byte(clock: Clock) -> None:
    async with world() as (echo, client):
        for _ in range(3):
            assert (await client.ask()).endswith(SMALL_ANSWER)
            await until(lambda: connection(echo)._http1._task is None)
            await clock.pass_s(70.0)
            await client.send(GET[:9])
            await until(lambda: not connection(echo)._http1._idle)
            await clock.pass_s(9.0)
            assert (await client.ask(GET[9:])).endswith(SMALL_ANSWER)
        await client.send(GET[:9])
        await until(lambda: not connection(echo)._http1._idle)
        await clock.pass_s(9.0)
        await client.send(GET[9:15])
        await until(lambda: connection(echo)._http1._fed_bytes == 15)
        await clock.pass_s(1.5)
        assert (await client.read_until(b"-")).startswith(b"HTTP/1.1 408 ")
        await closed(echo)


@on_clock
async def test_an_idle_connection_is_closed_without_a_word(clock: Clock) -> None:
    async with world() as (echo, client):
        assert (await client.ask()).endswith(SMALL_ANSWER)
        await until(lambda: connection(echo)._http1._task is None)
        await clock.pass_s(74.0)
        assert len(echo.server.connections) == 1
        await clock.pass_s(2.0)
        assert await client.read_until(b"-") == b""


@on_clock
async def test_a_body_may_take_its_time_but_not_stop(clock: Clock) -> None:
    post = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n"
    async with world() as (echo, client):
        for sent in (post, b"1", b"2", b"3", b"4", b"5"):
            await client.send(sent)
            await until(lambda: connection(echo)._http1 is not None and not connection(echo)._http1._inbox)
            await arrived(echo, sent)
            await clock.pass_s(19.0)
        assert (await client.ask(b"6", b"\r\n\r\n123456")).endswith(b"\r\n\r\n123456")
        await client.send(post + b"12")
        await arrived(echo, b"12")
        await clock.pass_s(19.0)
        assert len(echo.server.connections) == 1
        await clock.pass_s(2.0)
        assert (await client.read_until(b"-")).startswith(b"HTTP/1.1 408 ")


async def arrived(echo: s.EchoServer, ending: bytes) -> None:
    """Wait until the server has taken what was sent: the end of a header, or a piece of a body."""
    http1 = connection(echo)._http1
    await until(lambda: http1._body.endswith(ending) if len(ending) < 3 else http1._request is not None)


# ---- sizes


def header_of(size: int) -> bytes:
    head, tail = b"GET /small HTTP/1.1\r\nHost: x\r\nX-Filler: ", b"\r\n\r\n"
    return head + b"f" * (size - len(head) - len(tail)) + tail


@pytest.mark.parametrize("pieces", [1, 2, 40])
@pytest.mark.parametrize("before", [b"", GET], ids=["first", "next"])
@on_clock
async def test_the_header_limit_is_exact(clock: Clock, before: bytes, pieces: int) -> None:
    limit = LIMITS.http1_header_bytes
    async with world() as (echo, client):
        await client.send(before)
        for size in (limit, limit + 1):
            header = before + header_of(size)
            before = b""
            step = len(header) // pieces + 1
            for start in range(0, len(header), step):
                await client.send(header[start : start + step])
                await clock.pass_s(0.0)
            if size == limit:
                expected = SMALL_ANSWER
                got = await client.read_until(expected)
                assert got.startswith(b"HTTP/1.1 200 ")
        got = await client.read_until(b"request header too large\n")
        assert b"HTTP/1.1 431 " in got
        assert got.endswith(b"request header too large\n")
        await closed(echo)


# ---- pipelining


@on_clock
async def test_a_thousand_requests_at_once_are_answered_in_order(clock: Clock) -> None:
    bodies = [b"%04d" % number for number in range(1000)]
    request = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
    async with world() as (_, client):
        got = await client.ask(b"".join(request + body for body in bodies), b"\r\n\r\n0999")
    assert [answer[:4] for answer in got.split(b"\r\n\r\n")[1:]] == bodies


@on_clock
async def test_requests_whose_answers_are_not_read_pile_up_nothing(clock: Clock) -> None:
    large = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
    async with world() as (echo, client):
        await client.send(large * 100)
        transport = await answer_under_way(echo)
        for _ in range(50):
            await clock.pass_s(0.0)
        assert transport.get_write_buffer_size() <= len(LARGE)


@on_clock
async def test_requests_faster_than_their_answers_are_not_read(clock: Clock) -> None:
    async with world() as (echo, client):
        sender = asyncio.create_task(client.send(GET * 1_000_000))
        largest = 0
        for _ in range(2000):
            await client.read()
            client.got = b""
            if echo.server.connections:
                http1 = connection(echo)._http1
                largest = max(largest, (len(getattr(http1, "_inbox", b"")) + len(http1._h11.trailing_data[0])))
        assert 0 < largest <= LIMITS.http_body_bytes + 600_000
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
