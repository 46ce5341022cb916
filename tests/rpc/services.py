"""One small service, on our server and on grpcio's, so that every test can say which ends it joins."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from raftkv.rpc import Channel, ChannelOptions, RpcError, Server, ServerLimits, StreamCall, UnaryCall
from raftkv.rpc.server.http import HttpHandler

UNARY, LATER, FAIL, HANG, META = (f"/test.Echo/{name}" for name in ("Unary", "Later", "Fail", "Hang", "Meta"))
COLLECT, COUNT, BIDI, BREAK, FLOOD = (f"/test.Echo/{name}" for name in ("Collect", "Count", "Bidi", "Break", "Flood"))
RAISE, RAISE_LATER = "/test.Echo/Raise", "/test.Echo/RaiseLater"


class EchoServer:
    """Our server with the test service, and what its handlers have seen."""

    def __init__(self, limits: ServerLimits | None = None, http_handler: HttpHandler | None = None) -> None:
        self.reported: list[tuple[str, BaseException]] = []
        self.cancelled: list[str] = []
        self.hanging: list[UnaryCall] = []
        self.streams: list[StreamCall] = []
        self.flooded = 0
        self.server = Server(limits, http_handler, report=lambda path, error: self.reported.append((path, error)))
        self.target = ""
        server = self.server
        server.unary(UNARY, lambda call, message: call.reply(message))
        server.unary_async(LATER, self.later)
        server.unary(
            FAIL, lambda call, message: call.fail(5, message.decode(), details=b"d\0", trailers=((b"x", b"1"),))
        )
        server.unary(HANG, self.hang)
        server.unary(META, lambda call, message: call.reply(repr(sorted(call.metadata.items())).encode()))
        server.unary(RAISE, self.raise_now)
        server.unary_async(RAISE_LATER, self.raise_later)
        server.stream(COLLECT, self.collect)
        server.stream(COUNT, self.count)
        server.stream(BIDI, self.bidi)
        server.stream(BREAK, self.break_off)
        server.stream(FLOOD, self.flood)

    async def later(self, message: bytes, call: UnaryCall) -> bytes:
        await asyncio.sleep(0)
        return message

    def hang(self, call: UnaryCall, message: bytes) -> None:
        self.hanging.append(call)
        call.on_cancel(lambda: self.cancelled.append("hang"))

    def raise_now(self, call: UnaryCall, message: bytes) -> None:
        raise ZeroDivisionError("secret")

    async def raise_later(self, message: bytes, call: UnaryCall) -> bytes:
        await asyncio.sleep(0)
        raise ZeroDivisionError("secret")

    async def collect(self, call: StreamCall) -> None:
        sizes = [len(message) async for message in call]
        await call.send(repr(sizes).encode())

    async def count(self, call: StreamCall) -> None:
        request = await call.receive()
        for number in range(int(request or b"0")):
            await call.send(b"%d" % number)

    async def bidi(self, call: StreamCall) -> None:
        self.streams.append(call)
        call.on_cancel(lambda: self.cancelled.append("bidi"))
        async for message in call:
            await call.send(message)

    async def break_off(self, call: StreamCall) -> None:
        await call.send(b"first")
        raise RpcError(9, "broke off", trailers=((b"why", b"test"),))

    async def flood(self, call: StreamCall) -> None:
        self.streams.append(call)
        call.on_cancel(lambda: self.cancelled.append("flood"))
        piece = bytes(64 * 1024)
        while True:
            await call.send(piece)
            self.flooded += 1


@contextlib.asynccontextmanager
async def echo_server(
    limits: ServerLimits | None = None, http_handler: HttpHandler | None = None, ssl: Any = None
) -> AsyncIterator[EchoServer]:
    """Run our server on a free port."""
    echo = EchoServer(limits, http_handler)
    ((host, port),) = await echo.server.listen("127.0.0.1", 0, ssl)
    echo.target = f"{host}:{port}"
    try:
        yield echo
    finally:
        await echo.server.close()


@contextlib.asynccontextmanager
async def channel_to(server: Server) -> AsyncIterator[Channel]:
    """Run a server on a free port, and our channel to it."""
    ((host, port),) = await server.listen("127.0.0.1", 0)
    try:
        async with Channel(f"{host}:{port}") as channel:
            yield channel
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def pair(
    limits: ServerLimits | None = None, options: ChannelOptions | None = None
) -> AsyncIterator[tuple[EchoServer, Channel]]:
    """Run our server and our channel to it."""
    async with echo_server(limits) as echo, Channel(echo.target, options=options) as channel:
        yield echo, channel


class GrpcioServer:
    """grpcio's server with the same service."""

    def __init__(self, port: int = 0, options: tuple[tuple[str, Any], ...] = (), tls: Any = None) -> None:
        self.cancelled = threading.Event()
        self.release = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool, options=(("grpc.so_reuseport", 0), *options))
        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(lambda message, context: message),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
            "Hang": grpc.unary_unary_rpc_method_handler(self.hang),
            "Meta": grpc.unary_unary_rpc_method_handler(self.meta),
            "Collect": grpc.stream_unary_rpc_method_handler(self.collect),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
            "Bidi": grpc.stream_stream_rpc_method_handler(self.bidi),
            "Break": grpc.stream_stream_rpc_method_handler(self.break_off),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
        address = f"127.0.0.1:{port}"
        add = self._server.add_insecure_port
        self.port = add(address) if tls is None else self._server.add_secure_port(address, tls)
        self.target = f"127.0.0.1:{self.port}"
        self._server.start()

    def fail(self, message: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("x", "1"),))
        context.abort(grpc.StatusCode.NOT_FOUND, message.decode())
        raise AssertionError("abort raises")

    def hang(self, message: bytes, context: Any) -> bytes:
        context.add_callback(self.cancelled.set)
        self.release.wait(90)
        return b""

    def meta(self, message: bytes, context: Any) -> bytes:
        return repr(sorted((key, value) for key, value in context.invocation_metadata())).encode()

    def collect(self, messages: Iterator[bytes], context: Any) -> bytes:
        return repr([len(message) for message in messages]).encode()

    def count(self, message: bytes, context: Any) -> Iterator[bytes]:
        for number in range(int(message)):
            yield b"%d" % number

    def bidi(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.add_callback(self.cancelled.set)
        yield from messages

    def break_off(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield b"first"
        context.set_trailing_metadata((("why", "test"),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "broke off")

    def stop(self, grace_s: float | None = None) -> threading.Event:
        """Begin to stop; the event is set when it has."""
        self.release.set()
        return self._server.stop(grace_s)

    def close(self) -> None:
        """Stop, and wait for its threads."""
        self.stop().wait()
        self._pool.shutdown()


@contextlib.contextmanager
def grpcio_server(**arguments: Any) -> Iterator[GrpcioServer]:
    """Run grpcio's server on a free port."""
    server = GrpcioServer(**arguments)
    try:
        yield server
    finally:
        server.close()
