"""Output is flushed together at the end of a turn; a listener takes messages without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from raftkv.loop.cork import Cork
from raftkv.rpc import Channel, Server, StreamCall


async def _with_channel(server: Server, use: Callable[[Channel], Any]) -> None:
    ((_, port),) = await server.listen("127.0.0.1", 0)
    async with Channel(f"127.0.0.1:{port}") as channel:
        await use(channel)
    await server.close()


class Gathers:
    """A stream, or a connection: flushing it notes its name, and may touch others."""

    def __init__(self, name: str, flushed: list[str], then: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._flushed = flushed
        self._then = then

    def flush(self) -> None:
        self._flushed.append(self._name)
        self._then()


def test_streams_are_flushed_before_connections_by_one_callback_of_the_next_turn() -> None:
    flushed: list[str] = []
    scheduled: list[Callable[[], None]] = []
    cork = Cork(scheduled.append)
    cork.mark(Gathers("connection", flushed))
    cork.touch(Gathers("stream", flushed, lambda: cork.mark(Gathers("its connection", flushed))))
    assert (flushed, len(scheduled)) == ([], 1)
    scheduled[0]()
    assert flushed == ["stream", "connection", "its connection"]
    cork.touch(Gathers("later", flushed))
    assert len(scheduled) == 2


def test_a_held_cork_schedules_nothing_and_flushes_at_its_end_or_when_told() -> None:
    flushed: list[str] = []
    scheduled: list[Callable[[], None]] = []
    cork = Cork(scheduled.append)
    with cork:
        cork.touch(Gathers("a", flushed))
        cork.flush()
        assert flushed == ["a"]
        cork.mark(Gathers("b", flushed))
        assert flushed == ["a"]
    assert (flushed, scheduled) == (["a", "b"], [])


def test_a_failed_flush_does_not_stop_the_others() -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    flushed: list[str] = []
    scheduled: list[Callable[[], None]] = []
    cork = Cork(scheduled.append)
    for name in ("a", "b"):
        cork.touch(Gathers(name, flushed, fail if name == "a" else lambda: None))
    cork.mark(Gathers("connection", flushed))
    with pytest.raises(RuntimeError, match="broken"):
        scheduled.pop()()
    assert flushed == ["a", "b", "connection"]
    cork.touch(Gathers("later", flushed))
    assert len(scheduled) == 1, "the cork is not held by the failure"


async def test_messages_that_a_stream_sends_at_once_are_in_order() -> None:
    server = Server()
    got: list[bytes] = []
    begun, ended = asyncio.Event(), asyncio.Event()

    def listen(message: bytes) -> None:
        got.append(message)
        begun.set()

    async def take(call: StreamCall) -> None:
        call.deliver_to(listen)
        assert await call.receive() is None
        ended.set()

    server.stream("/test.Echo/Take", take)

    async def use(channel: Channel) -> None:
        stream = channel.stream("/test.Echo/Take", timeout_s=90.0)
        await stream.send(b"0")  # connects
        await begun.wait()
        stream.send_at_once([b"1", b"2"])
        stream.half_close()
        await asyncio.wait_for(ended.wait(), 90)
        assert got == [b"0", b"1", b"2"]

    await _with_channel(server, use)


async def test_a_listener_gets_what_came_before_it() -> None:
    server = Server()
    got: list[bytes] = []
    sent = asyncio.Event()

    async def take(call: StreamCall) -> None:
        first = await call.receive()
        assert first is not None
        got.append(first)
        await sent.wait()
        call.deliver_to(got.append)
        await call.receive()

    server.stream("/test.Echo/Take", take)

    async def use(channel: Channel) -> None:
        stream = channel.stream("/test.Echo/Take", timeout_s=90.0)
        for number in (b"1", b"2", b"3"):
            await stream.send(number)
        stream.half_close()
        sent.set()
        assert await stream.receive() is None
        assert got == [b"1", b"2", b"3"]

    await _with_channel(server, use)


def test_a_pass_ends_with_what_was_deferred_and_what_that_touched() -> None:
    done: list[str] = []
    scheduled: list[Callable[[], None]] = []
    cork = Cork(scheduled.append)
    assert not cork.defer(lambda: done.append("never"))

    def turn() -> None:
        assert not cork.defer(lambda: done.append("never"))  # work for another turn of the loop
        with cork:
            done.append("turn")
            cork.touch(Gathers("answer", done))

    cork.begin_pass()
    cork.mark(Gathers("connection", done))
    assert cork.defer(turn)
    assert done == []
    cork.end_pass(is_late=False)
    assert done == ["turn", "answer", "connection"]
    assert scheduled == []
    cork.mark(Gathers("later", done))
    assert len(scheduled) == 1


def test_a_failure_at_the_end_of_a_pass_keeps_nothing_back() -> None:
    done: list[str] = []
    cork = Cork(lambda callback: None)

    def fail() -> None:
        raise ValueError("planted")

    cork.begin_pass()
    cork.mark(Gathers("connection", done))
    assert cork.defer(fail)
    assert cork.defer(lambda: done.append("turn"))
    with pytest.raises(ValueError, match="planted"):
        cork.end_pass(is_late=False)
    assert done == ["turn", "connection"]
    cork.begin_pass()
    cork.end_pass(is_late=False)


def test_a_late_pass_leaves_what_was_deferred_to_the_next_turn_of_the_loop() -> None:
    done: list[str] = []
    scheduled: list[Callable[[], None]] = []
    cork = Cork(scheduled.append)
    cork.begin_pass()
    cork.mark(Gathers("connection", done))
    assert cork.defer(lambda: done.append("turn"))
    cork.end_pass(is_late=True)
    assert done == ["connection"]
    for callback in scheduled:
        callback()
    assert done == ["connection", "turn"]
