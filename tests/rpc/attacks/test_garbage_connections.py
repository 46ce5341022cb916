"""Connections that have gone are freed at once, of every kind: the server's collector hardly ever runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from raftkv.loop.cycle_free import forget_frames
from raftkv.rpc import Channel, ChannelOptions, ServerLimits
from raftkv.rpc.protocol import read_buffer
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.conftest import Certificates
from tests.rpc.loop import until

CONNECTIONS = 60
SPARE = 12
"""Objects in cycles that a whole scenario may leave behind: what belongs to the loop, not to each connection."""


async def handle(request: HttpRequest) -> HttpResponse:
    if request.path == "/pieces":
        return HttpResponse(body=_begun())
    return HttpResponse(body=request.body)


async def _begun() -> AsyncIterator[bytes]:
    yield b"begun"
    await asyncio.Event().wait()


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def leaks(server: s.EchoServer, one: Callable[[], Awaitable[None]], kept: int = 0) -> list[str]:
    """Run ``one`` many times; the kinds of objects that only a collector can free."""
    for _ in range(3):
        await one()
    await until(lambda: len(server.server.connections) == kept)
    # Two rounds: what a thread of another test drops meanwhile, such as a client that ends, is in one of them.
    with no_collector():
        rounds = [await _garbage(server, one, kept) for _ in range(2)]
    return min(rounds, key=len)


async def _garbage(server: s.EchoServer, one: Callable[[], Awaitable[None]], kept: int) -> list[str]:
    for _ in range(CONNECTIONS):
        await one()
    await until(lambda: len(server.server.connections) == kept)
    for _ in range(5):
        await asyncio.sleep(0)
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sorted(type(found).__qualname__ for found in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()  # without the debug flag this frees the cycles, which the next round would find again


def address(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host, int(port)


async def talk(target: str, *data: bytes, reset: bool = False, wait: bool = True) -> None:
    """Connect, say something, hear something, and go: with a FIN, or with a RST."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, address(target))
        for piece in data:
            await loop.sock_sendall(sock, piece)
            if wait:
                await loop.sock_recv(sock, 65_536)
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


GREETING = raw.PREFACE + raw.settings() + raw.frame(raw.SETTINGS, raw.ACK, 0)
CALL = raw.headers(1, raw.grpc_headers(s.UNARY)) + raw.message(1, b"\0\0\0\0\1x", raw.END_STREAM)
HANGING = raw.headers(3) + raw.message(3, b"\0\0\0\0\1x", raw.END_STREAM)
STREAM = raw.headers(5, raw.grpc_headers(s.BIDI)) + raw.message(5, b"\0\0\0\0\1x")
FLOOD = raw.headers(7, raw.grpc_headers(s.FLOOD))
UNFINISHED = raw.headers(9, raw.grpc_headers(s.UNARY)) + raw.message(9, b"\0\0\0\1\0x")
PLAIN, PIECES = (
    raw.headers(1, ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")))
    + raw.message(1, b"body", raw.END_STREAM)
    for path in (b"/x", b"/pieces")
)
CLEAR = {
    "says nothing": (b"",),
    "stops in the preface": (b"PRI",),
    "h2": (GREETING,),
    "h2 with a call": (GREETING, CALL),
    "h2 with open calls": (GREETING, HANGING + STREAM + FLOOD + UNFINISHED),
    "h2, plain requests": (GREETING, PLAIN),
    "h2, amid a plain answer": (GREETING, PIECES),
    "h2 against the protocol": (GREETING, raw.message(1, b"data of no stream")),
    "h2, too many pings": (GREETING, raw.frame(raw.PING, 0, 0, bytes(8)) * 5),
    "wrong preface": (b"PRI * HTTP/3.0\r\n\r\nSM\r\n\r\n",),
    "http/1.1": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "http/1.1, amid an answer": (b"GET /pieces HTTP/1.1\r\nHost: x\r\n\r\n",),
    "half of http/1.1": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf",),
    "malformed http/1.1": (b"\0\r\n\r\n",),
}


@pytest.mark.long
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("name", CLEAR)
async def test_connections_in_clear(name: str, reset: bool) -> None:
    async with s.echo_server(ServerLimits(http1_half_closed_s=0.001), handle) as echo:
        wait = name not in ("says nothing", "stops in the preface", "half of http/1.1")

        async def one() -> None:
            before = len(echo.server.connections)
            await talk(echo.target, *CLEAR[name], reset=reset, wait=wait)
            await until(lambda: len(echo.server.connections) == before)
            echo.hanging.clear()
            echo.streams.clear()
            echo.cancelled.clear()

        found = await leaks(echo, one)
        assert len(found) < SPARE, found[:: max(1, len(found) // 30)]


async def test_connections_above_the_limit() -> None:
    async with s.echo_server(ServerLimits(connections=1)) as echo:
        kept = await raw.RawClient.connect(echo.target)
        await kept.until_frame(raw.SETTINGS)

        async def one() -> None:
            try:
                await talk(echo.target, GREETING)
            except ConnectionError as error:
                forget_frames(error)

        found = await leaks(echo, one, kept=1)
        kept.close()
        assert len(found) < SPARE, found[:: max(1, len(found) // 30)]


async def test_connections_that_the_server_ends(echo: s.EchoServer) -> None:
    async def one() -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, address(echo.target))
            await loop.sock_sendall(sock, GREETING + HANGING)
            await until(lambda: echo.hanging)
            echo.hanging.clear()
            for connection in list(echo.server.connections):
                connection.abort()
        await until(lambda: not echo.server.connections)
        echo.cancelled.clear()

    found = await leaks(echo, one)
    assert len(found) < SPARE, found[:: max(1, len(found) // 30)]


def tls_hello(context: ssl.SSLContext) -> bytes:
    """The first flight of a TLS client."""
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


async def tls_talk(target: str, context: ssl.SSLContext, data: bytes) -> None:
    """A TLS client without any object of asyncio's, which would leave garbage of its own."""
    loop = asyncio.get_running_loop()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    steps = [client.do_handshake, lambda: client.write(data), lambda: client.read(100)]
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, address(target))
        while steps:
            try:
                steps[0]()
                del steps[0]
            except ssl.SSLWantReadError:
                await loop.sock_sendall(sock, outgoing.read())
                received = await loop.sock_recv(sock, 65_536)
                if not received:
                    return
                incoming.write(received)
        await loop.sock_sendall(sock, outgoing.read())


@pytest.mark.long
@pytest.mark.parametrize("name", ["no hello", "hello and gone", "rubbish", "whole", "no alpn", "http/1.1", "untrusted"])
async def test_tls_connections(certificates: Certificates, name: str) -> None:
    server, client = certificates.server_context(ask_client=name == "untrusted"), certificates.client_context()
    hello = tls_hello(client)
    if name != "no alpn":
        client.set_alpn_protocols(["http/1.1" if name == "http/1.1" else "h2"])
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" if name == "http/1.1" else GREETING + CALL
    async with s.echo_server(None, handle, ssl=server) as echo:

        async def one() -> None:
            match name:
                case "no hello":
                    await talk(echo.target, b"", wait=False)
                case "hello and gone":
                    await talk(echo.target, hello)
                case "rubbish":
                    await talk(echo.target, b"GET / HTTP/1.1\r\n\r\n", wait=True)
                case _:
                    try:
                        await tls_talk(echo.target, client, request)
                    except OSError as error:
                        forget_frames(error)
            await until(lambda: not echo.server.connections)

        found = await leaks(echo, one)
        assert len(found) < SPARE, found[:: max(1, len(found) // 30)]


async def test_tls_connections_have_no_read_buffer_of_their_own(certificates: Certificates) -> None:
    """Neither while the handshake is unfinished nor after it; asyncio's take 256 KiB each."""
    async with s.echo_server(ssl=certificates.server_context()) as echo:
        with socket.create_connection(address(echo.target)) as half_open:
            half_open.sendall(b"\x16")
            await until(lambda: [one for one in echo.server.connections if one._handshake is not None])
            async with Channel(echo.target, certificates.client_context()) as channel:
                assert await channel.unary(s.UNARY, b"x" * 300_000, 10) == b"x" * 300_000
                below = [connection._below_tls for connection in echo.server.connections]
                assert len(below) == 2
                buffers = [one.get_protocol().get_buffer(-1) for one in below if one is not None]
                assert [buffer.obj is read_buffer().obj for buffer in buffers] == [True, True]


@pytest.mark.long
@pytest.mark.parametrize("tls", [False, True], ids=["h2c", "tls"])
async def test_channels(certificates: Certificates, tls: bool) -> None:
    server = certificates.server_context() if tls else None
    client = certificates.client_context() if tls else None
    async with s.echo_server(ssl=server) as echo:

        async def one() -> None:
            async with Channel(echo.target, client) as channel:
                assert await channel.unary(s.UNARY, b"x", 10) == b"x"
                stream = channel.stream(s.BIDI)
                await stream.send(b"x")
                assert await stream.receive() == b"x"
                stream.cancel()
            await until(lambda: not echo.server.connections)
            echo.streams.clear()
            echo.cancelled.clear()

        found = await leaks(echo, one)
        assert len(found) < SPARE, found[:: max(1, len(found) // 30)]


async def test_connections_that_a_channel_loses_and_attempts_that_fail(echo: s.EchoServer) -> None:
    options = ChannelOptions(backoff_base_s=0.001, backoff_max_s=0.001)
    async with Channel(["127.0.0.1:9", echo.target], options=options) as channel:

        async def one() -> None:
            assert await channel.unary(s.UNARY, b"x", 10, wait_for_ready=True) == b"x"
            old = set(echo.server.connections)
            for connection in old:
                connection.abort()
            await until(lambda: echo.server.connections and not old & echo.server.connections)

        found = await leaks(echo, one, kept=1)
        assert len(found) < SPARE, found[:: max(1, len(found) // 30)]
