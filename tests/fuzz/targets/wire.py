"""Bytes of connections: HTTP/2 and HTTP/1.1 into a server, and what a hostile server answers to a client."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from raftkv.integrations.horovod import HorovodService
from raftkv.rpc import Channel, ChannelOptions, RpcError, ServerLimits, framing, status
from raftkv.rpc.framing import frame
from raftkv.rpc.server.accept import Connection
from raftkv.rpc.server.http import HostCheck, HttpRequest, HttpResponse, Origins, text_response
from raftkv.server.http.access import HttpAccess
from tests.fuzz.target import Target
from tests.rpc import raw
from tests.rpc import services as s

LIMITS = ServerLimits(max_receive_message_bytes=1 << 16, http_body_bytes=1 << 14, http1_header_bytes=4096)


class _Pipe(asyncio.Transport):
    """A transport without a socket: counts what is written, and is gone when it is closed."""

    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self._protocol = protocol
        self._closing = False
        self.written = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not self._closing

    def pause_reading(self) -> None:
        """There is nothing more to come."""

    def resume_reading(self) -> None:
        """There is nothing more to come."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """What is written has left."""

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def feed(self, data: bytes) -> None:
        """Hand bytes to the protocol that the connection speaks by now."""
        at = 0
        while at < len(data) and not self._closing:
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                buffer = self._protocol.get_buffer(-1)
                size = min(len(buffer), len(data) - at)
                buffer[:size] = data[at : at + size]
                self._protocol.buffer_updated(size)
            else:
                assert isinstance(self._protocol, asyncio.Protocol)
                size = min(16, len(data) - at)
                self._protocol.data_received(data[at : at + size])
            at += size


class _Scopes:
    """Horovod's tables in memory."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], bytes] = {}

    async def get(self, _call: object, scope: str, key: str) -> bytes | None:
        return self.kept.get((scope, key))

    async def put(self, _call: object, scope: str, key: str, value: bytes) -> None:
        self.kept[scope, key] = value

    async def finish(self, _call: object, scope: str, key: str) -> None:
        self.kept.pop((scope, key), None)

    async def slot(self, _call: object, host: str, local_rank: int) -> tuple[int, ...]:
        return (local_rank, 1, 0, 1, 0, 1)


async def _otherwise(request: HttpRequest) -> HttpResponse:
    return text_response(404 if request.path != "/health" else 200, request.query)


class _Served:
    """A server on a loop of its own; each input is one connection, which leaves nothing behind."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._loop = asyncio.new_event_loop()
        self._failures: list[Any] = []
        self._loop.set_exception_handler(lambda loop, context: self._failures.append(context))

    def __call__(self, data: bytes) -> str:
        self._failures.clear()
        said = self._loop.run_until_complete(self._one(self._prefix + data))
        assert not self._failures, self._failures[0]
        return said

    def close(self) -> None:
        """Close the loop."""
        self._loop.close()

    async def _one(self, data: bytes) -> str:
        hosts, origins = HostCheck(("good.example", "x")), Origins(("https://a.example",))
        http = HttpAccess(HorovodService(_Scopes(), _otherwise).handle, hosts, origins)
        echo = s.EchoServer(LIMITS, http.handle)
        connection = Connection(echo.server, None)
        pipe = _Pipe(connection)
        connection.connection_made(pipe)
        half = len(data) // 2
        for piece in (data[:half], data[half:]):
            pipe.feed(piece)
            for _ in range(3):
                await asyncio.sleep(0)
        if b" 200 " not in pipe.written[:40] and len(pipe.written) > 1 << 20:
            raise AssertionError(f"{len(pipe.written)} bytes answer {len(data)}")
        if not pipe.is_closing():
            pipe.abort()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not echo.server.connections
        assert echo.server.answers.held_bytes == 0
        await echo.server.close()
        for path, error in echo.reported:
            assert isinstance(error, ZeroDivisionError), (path, error)
        # Of HTTP/1.1 the status line, of HTTP/2 what kinds of frames there are at which lengths.
        said = bytes(pipe.written)
        return said[:12].decode("latin-1") if said.startswith(b"HTTP") else f"{said[9:26].hex()} {len(said) // 64}"


def _frames() -> list[bytes]:
    body = b"\0\0\0\0\5hello"
    unary = raw.headers(1, raw.grpc_headers(s.UNARY)) + raw.message(1, body, raw.END_STREAM)
    stream = raw.headers(3, raw.grpc_headers(s.BIDI)) + raw.message(3, body) + raw.message(3, body, raw.END_STREAM)
    timed = raw.headers(5, raw.grpc_headers(s.HANG, (b"grpc-timeout", b"5S"), (b"x-bin", b"AAEC"))) + raw.reset(5)
    plain = raw.headers(7, ((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/s/k"), (b":authority", b"x")))
    other = raw.frame(raw.PING, 0, 0, bytes(8)) + raw.frame(raw.WINDOW_UPDATE, 0, 0, b"\0\0\1\0")
    start = raw.settings((3, 100), (4, 65535))
    cut = raw.headers(9, raw.grpc_headers(s.UNARY), flags=0) + raw.frame(raw.CONTINUATION, raw.END_HEADERS, 9, b"")
    return [
        start + unary,
        start + stream,
        start + timed + other,
        start + plain,
        start + cut,
        start + unary + stream + timed,
    ]


def _requests() -> list[bytes]:
    return [
        b"GET /health?exclude=NOSPACE HTTP/1.1\r\nHost: x:2379\r\n\r\n",
        b"PUT /s/key HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhelloGET /s/key HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PUT /scope/key HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"GET /rank_and_size/host-a:0 HTTP/1.1\r\nHost: x\r\nOrigin: https://a.example\r\n\r\n",
        b"OPTIONS /s/k HTTP/1.1\r\nHost: [::1]:1\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n",
        b"DELETE /global/0 HTTP/1.0\r\n\r\n",
    ]


class _HostileServer:
    """A listener that shakes hands, waits for a call, and then says what the input says; and a client that calls."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._failures: list[Any] = []
        self._loop.set_exception_handler(lambda loop, context: self._failures.append(context))
        self._answer = b""
        self._loop.run_until_complete(self._listen())

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw.settings())
        received = b""
        with suppress(OSError):
            while b"\0\0\1\0\0\0\1\0\0\0\0\5hello"[-5:] not in received:
                piece = await reader.read(65_536)
                if not piece:
                    break
                received += piece
            writer.write(self._answer)
            writer.close()

    def __call__(self, data: bytes) -> None:
        self._answer = data
        self._failures.clear()
        self._loop.run_until_complete(self._call())
        assert not self._failures, self._failures[0]

    def close(self) -> None:
        """Close the listener and the loop."""
        self._server.close()
        self._loop.run_until_complete(self._server.wait_closed())
        self._loop.close()

    async def _call(self) -> None:
        options = ChannelOptions(max_receive_message_bytes=1 << 16, backoff_base_s=0.001, backoff_max_s=0.001)
        async with Channel(self._target, options=options) as channel:
            await channel.unary("/test.Echo/Unary", b"hello", 5.0)


def _answers() -> list[bytes]:
    head = raw.headers(1, ((b":status", b"200"), (b"content-type", b"application/grpc")))
    body = raw.message(1, frame(b"hello"))
    trailers = ((b"grpc-status", b"0"), (b"grpc-message", b"all%20well"))
    end = raw.frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, 1, raw.header_block(trailers))
    failed = ((b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-status", b"5"))
    failed += ((b"grpc-message", b"etcdserver: x%C3%A4"), (b"grpc-status-details-bin", b"CAUSAA"))
    only = raw.frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, 1, raw.header_block(failed))
    away = raw.frame(raw.GOAWAY, 0, 0, b"\0\0\0\0\0\0\0\0too_many_pings")
    return [head + body + end, only, raw.settings((3, 0)) + head + end, away, raw.reset(1, 7)]


def _fields(data: bytes) -> None:
    """Input: lines of ``name value``; the pieces of headers that are read one by one."""
    fields = []
    for line in data.split(b"\n")[:40]:
        name, _, value = line.partition(b" ")
        fields.append((name, value))
        with suppress(ValueError):
            assert framing.decode_timeout(value) >= 0
        status.decode_message(value).encode()
        with suppress(ValueError):
            status.decode_binary(value)
    framing.user_metadata(tuple(fields))
    error = status.status_of(dict(fields), fields)
    if error is not None:
        repr(error)
        raise error


def _header_lines() -> list[bytes]:
    return [
        b"grpc-timeout 100m\nx-bin AAEC\nauthorization Bearer x.y\ngrpc-status 0",
        b"grpc-status 5\ngrpc-message a%20%C3%A4%zz\ngrpc-status-details-bin CAUSAWE",
    ]


GRPC_TOKENS = (b"PRI * HTTP/2.0", b"\0\0\4\1\4\0\0\0\1", b"\0\0\0\4\1\0\0\0\0", b"\x82\x84\x86", b"grpc-timeout")
HTTP_TOKENS = (
    b"HTTP/1.1", b"\r\n\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"Host: ", b"GET ", b"/../",
)  # fmt: skip
TARGETS = (
    Target("http2-server", lambda directory: _Served(raw.PREFACE), _frames, tokens=GRPC_TOKENS, examples=60),
    Target("http1-server", lambda directory: _Served(b""), _requests, tokens=HTTP_TOKENS, examples=100),
    Target(
        "client-connection", lambda directory: _HostileServer(), _answers, (RpcError,), tokens=GRPC_TOKENS, examples=40
    ),
    Target("header-fields", lambda directory: _fields, _header_lines, (RpcError,), tokens=(b"grpc-status ", b"\n")),
)
