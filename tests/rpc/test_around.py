"""What every handler of a server is wrapped in, and what an observer of a call hears."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from raftkv.rpc import Channel, Code, RpcError, Server, StreamCall, UnaryCall
from raftkv.rpc.framing import frame
from raftkv.rpc.server.router import Around, Kind
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.loop import failure, until

UNARY, LATER, BIDI = "/test.Around/Unary", "/test.Around/Later", "/test.Around/Bidi"


@contextlib.asynccontextmanager
async def wrapped(*around: Around) -> AsyncIterator[Channel]:
    server = Server(around=around)

    async def later(message: bytes, call: UnaryCall) -> bytes:
        await asyncio.sleep(0)
        return message

    async def bidi(call: StreamCall) -> None:
        async for message in call:
            await call.send(message)

    server.unary(UNARY, lambda call, message: call.reply(message) if message != b"hang" else None)
    server.unary_async(LATER, later)
    server.stream(BIDI, bidi)
    async with s.channel_to(server) as channel:
        yield channel


def noting(told: list[Any], name: str) -> Around:
    def around(path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(call: Any, *message: bytes) -> Any:
            told.append((name, path, kind, *message))
            return handler(call, *message)

        return wrapper

    return around


def observing(ends: list[tuple[int, bytes]]) -> Around:
    def around(path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(call: Any, *message: bytes) -> Any:
            call.add_observer(lambda code, answer: ends.append((code, answer)))
            return handler(call, *message)

        return wrapper

    return around


async def test_every_kind_of_handler_is_wrapped_and_the_first_wrapper_is_outermost() -> None:
    told: list[Any] = []
    async with wrapped(noting(told, "outer"), noting(told, "inner")) as channel:
        assert await channel.unary(UNARY, b"a", 20) == b"a"
        assert await channel.unary(LATER, b"b", 20) == b"b"
        stream = channel.stream(BIDI)
        await stream.send(b"c")
        assert await stream.receive() == b"c"
        stream.cancel()
    expected = [(UNARY, Kind.UNARY, b"a"), (LATER, Kind.UNARY, b"b"), (BIDI, Kind.STREAM)]
    assert told == [(name, *rest) for rest in expected for name in ("outer", "inner")]


def test_without_wrappers_handlers_are_called_as_they_are() -> None:
    def handler(call: UnaryCall, message: bytes) -> None:
        raise AssertionError

    server = Server()
    server.unary(UNARY, handler)
    assert server.router.routes[UNARY.encode()].handler is handler


async def test_a_wrapper_refuses_calls_of_every_kind() -> None:
    def refuse(path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        def unary(call: UnaryCall, message: bytes) -> None:
            raise RpcError(Code.PERMISSION_DENIED, "no")

        async def stream(call: StreamCall) -> None:
            raise RpcError(Code.PERMISSION_DENIED, "no")

        return unary if kind is Kind.UNARY else stream

    ends: list[tuple[int, bytes]] = []
    async with wrapped(observing(ends), refuse) as channel:
        for path in (UNARY, LATER):
            assert (await failure(channel.unary(path, b"", 20))).code == Code.PERMISSION_DENIED
        stream = channel.stream(BIDI)
        assert (await failure(stream.receive())).code == Code.PERMISSION_DENIED
    assert ends == [(Code.PERMISSION_DENIED, b"")] * 3


async def test_an_observer_hears_once_how_each_call_ended() -> None:
    ends: list[tuple[int, bytes]] = []
    async with wrapped(observing(ends)) as channel:
        await channel.unary(UNARY, b"answer", 20)
        await channel.unary(LATER, b"", 20)
        stream = channel.stream(BIDI)
        stream.half_close()
        assert await stream.receive() is None
        assert ends == [(Code.OK, b"answer"), (Code.OK, b""), (Code.OK, b"")]
        ends.clear()
        left = channel.unary(UNARY, b"hang")
        cancelled = channel.stream(BIDI)
        await cancelled.send(b"there")
        await cancelled.receive()
        left.cancel()
        cancelled.cancel()
        await until(lambda: len(ends) == 2)
        assert ends == [(Code.CANCELLED, b"")] * 2


async def test_an_observer_hears_of_a_deadline() -> None:
    ends: list[tuple[int, bytes]] = []
    async with wrapped(observing(ends)) as channel:
        client = await raw.RawClient.connect(channel.targets[0])
        client.send(raw.headers(1, raw.grpc_headers(UNARY, (b"grpc-timeout", b"20m"))))
        client.send(raw.message(1, frame(b"hang"), raw.END_STREAM))
        await until(lambda: ends)
        assert ends == [(Code.DEADLINE_EXCEEDED, b"")]
        client.close()


async def test_a_call_that_is_aborted_is_answered_and_its_handler_cancelled() -> None:
    calls: list[Any] = []
    ended: list[str] = []

    def keep(path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        def unary(call: UnaryCall, message: bytes) -> None:
            calls.append(call)
            handler(call, message)

        async def stream(call: StreamCall) -> None:
            calls.append(call)
            await handler(call)

        return unary if kind is Kind.UNARY else stream

    async def wait(message: bytes, call: UnaryCall) -> bytes:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("unary")
        return b""

    async def wait_stream(call: StreamCall) -> None:
        try:
            await call.receive()
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("stream")

    server = Server(around=(keep,))
    server.unary_async(LATER, wait)
    server.stream(BIDI, wait_stream)
    async with s.channel_to(server) as channel:
        answer = channel.unary(LATER, b"", 20)
        stream = channel.stream(BIDI)
        await stream.send(b"")
        await until(lambda: len(calls) == 2)
        for call in calls:
            call.abort(RpcError(Code.PERMISSION_DENIED, "no more"))
            call.abort(RpcError(Code.PERMISSION_DENIED, "once is enough"))
        for error in (await failure(answer), await failure(stream.receive())):
            assert (error.code, error.text) == (Code.PERMISSION_DENIED, "no more")
        await until(lambda: sorted(ended) == ["stream", "unary"])


async def test_a_message_that_a_wrapper_has_looked_at_comes_again() -> None:
    def look(path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        async def stream(call: StreamCall) -> None:
            message = await call.receive()
            assert message is not None
            call.put_back(message)
            await handler(call)

        return stream if kind is Kind.STREAM else handler

    async with wrapped(look) as channel:
        stream = channel.stream(BIDI)
        # More than a window: what is looked at is given back to the sender once.
        for number in range(40):
            await stream.send(bytes([number]) * 20_000)
            assert await stream.receive() == bytes([number]) * 20_000
        stream.cancel()
