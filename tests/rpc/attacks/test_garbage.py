"""Answered calls are freed at once: no cycles for the garbage collector, whose pauses clients would feel."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

from raftkv.rpc import Channel, Server, UnaryCall
from raftkv.rpc.limits import ChannelOptions
from tests.procs import free_port
from tests.rpc import services as s
from tests.rpc.loop import failure, until

CALLS = 200


class Waiter:
    """Holds its call, as a handler that answers later does."""

    def __init__(self, call: UnaryCall) -> None:
        self.call = call

    def cancel(self) -> None:
        """The client is gone."""


async def cycles_left(one: Callable[[], Awaitable[object]]) -> int:
    """Do something often, and return how many objects only a collector frees; the first time does not count."""
    await one()
    gc.collect()
    gc.disable()
    try:
        for _ in range(CALLS):
            await one()
        return gc.collect()
    finally:
        gc.enable()


def test_answered_calls_leave_no_cycles() -> None:
    async def scenario() -> int:
        server = Server()

        def handle(call: UnaryCall, message: bytes) -> None:
            waiter = Waiter(call)
            call.on_cancel(waiter.cancel)
            waiter.call.reply(message)

        server.unary("/test.Echo/Say", handle)
        async with s.channel_to(server) as channel:
            return await cycles_left(lambda: channel.unary("/test.Echo/Say", b"hello", 10.0))

    assert asyncio.run(scenario()) < CALLS


def test_streams_that_fail_leave_no_cycles() -> None:
    """A member tries a peer that is away again and again: each try is a stream that fails."""

    async def scenario() -> int:
        options = ChannelOptions(backoff_base_s=0.001, backoff_max_s=0.002)
        away = Channel(f"127.0.0.1:{free_port()}", None, options)
        async with s.echo_server() as echo, Channel(echo.target) as channel, away:

            async def one() -> None:
                for tried in (channel.stream("/test.Echo/None"), away.stream(s.COUNT)):
                    errors = [await failure(tried.receive()) for _ in range(2)]
                    assert [str(error) for error in errors] == [str(tried.error)] * 2
                    errors.clear()

            return await cycles_left(one)

    assert asyncio.run(scenario()) < CALLS


def test_ended_streams_leave_no_cycles() -> None:
    async def scenario() -> int:
        async with s.echo_server() as echo, Channel(echo.target) as channel:

            async def one() -> None:
                stream = channel.stream(s.COUNT)
                await stream.send(b"3")
                stream.half_close()
                assert len([message async for message in stream]) == 3
                cancelled = channel.stream(s.BIDI)
                await cancelled.send(b"x")
                assert await cancelled.receive() == b"x"
                cancelled.cancel()
                await until(lambda: echo.cancelled)
                echo.cancelled.clear()
                echo.streams.clear()

            return await cycles_left(one)

    assert asyncio.run(scenario()) < CALLS
