"""Streams that a listener serves: no task, one end, and nothing after it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from raftkv.rpc import Channel, Code, RpcError, Server
from raftkv.rpc.framing import frame
from raftkv.rpc.server.router import Kind
from raftkv.rpc.server.stream import ListenedCall
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.loop import failure, until

PATH = "/test.Listened/Echo"
CALLS = 100


class Echo:
    """Answers each request with itself; some words end the call, or break it."""

    def __init__(self, call: ListenedCall) -> None:
        self.call = call
        self.heard: list[str] = []
        self.last: list[bytes] = []

    def receive(self, message: bytes) -> None:
        self.heard.append(message.decode())
        if message == b"raise":
            raise RpcError(Code.ABORTED, "as asked")
        if message == b"fail":
            self.call.fail_with(RpcError(Code.ABORTED, "as asked"))
        elif message == b"finish":
            self.call.finish()
        elif message == b"at the end":
            self.last.append(message)
        else:
            self.call.send_frames_nowait(frame(message), 1)

    def half_closed(self) -> None:
        self.heard.append("half closed")
        self.call.finish(b"".join(map(frame, self.last)), len(self.last))

    def released(self) -> None:
        self.heard.append("severed" if self.call.severed else "released")


class Scene:
    """A server, a channel to it, and the listeners of all calls."""

    def __init__(self, server: Server, channel: Channel, echoes: list[Echo]) -> None:
        self.server = server
        self.channel = channel
        self.echoes = echoes

    @property
    def heard(self) -> list[str]:
        """What the listener of the last call has heard."""
        return self.echoes[-1].heard if self.echoes else []


def _listen(call: ListenedCall, echoes: list[Echo]) -> None:
    echoes.append(Echo(call))
    call.listen(echoes[-1])


Handler = Callable[[ListenedCall, list[Echo]], None]


@contextlib.asynccontextmanager
async def scene(handler: Handler = _listen, **more: Any) -> AsyncIterator[Scene]:
    server, echoes = Server(**more), list[Echo]()
    server.listened(PATH, lambda call: handler(call, echoes))
    async with s.channel_to(server) as channel:
        yield Scene(server, channel, echoes)


@pytest.fixture
@contextlib.asynccontextmanager
async def here() -> AsyncIterator[Scene]:
    async with scene() as here:
        yield here


async def test_requests_are_answered_without_a_task(here: Scene) -> None:
    stream = here.channel.stream(PATH)
    await stream.send(b"one")
    assert await stream.receive() == b"one"
    tasks = {task for task in asyncio.all_tasks() if "TaskCall" in repr(task.get_coro())}
    assert not tasks
    await stream.send(b"two")
    stream.half_close()
    assert [await stream.receive(), await stream.receive()] == [b"two", None]
    assert here.heard == ["one", "two", "half closed", "released"]
    assert here.server.router.routes[PATH.encode()].counts.answered == 1


async def test_final_answer_follows_the_earlier_ones_whole(here: Scene) -> None:
    counts = here.server.router.routes[PATH.encode()].counts
    for number, before in enumerate(([], [b"one"]), 1):
        stream = here.channel.stream(PATH)
        for message in (*before, b"at the end", b"at the end"):
            await stream.send(message)
        stream.half_close()
        assert [message async for message in stream] == [*before, b"at the end", b"at the end"]
        assert here.heard[-2:] == ["half closed", "released"]
        assert (counts.answered, counts.sent) == (number, 2 * number + len(before))
    assert here.server.answers.used_bytes == 0


async def test_final_answer_waits_for_a_window(here: Scene) -> None:
    closed = raw.PREFACE + raw.settings((4, 0)) + raw.frame(raw.SETTINGS, raw.ACK, 0)
    client = await raw.RawClient.connect(here.channel.targets[0], closed)
    client.send(raw.headers(1, raw.grpc_headers(PATH)) + raw.message(1, frame(b"at the end"), raw.END_STREAM))
    await until(lambda: here.heard == ["at the end", "half closed", "released"])
    client.send(raw.frame(raw.WINDOW_UPDATE, 0, 1, (1000).to_bytes(4, "big")))
    assert (await client.until_frame(raw.DATA))[3] == frame(b"at the end")
    assert (await client.until_frame(raw.HEADERS))[1] & raw.END_STREAM
    client.close()


async def test_a_handler_refuses_and_nothing_of_the_call_stays() -> None:
    def refuse(call: ListenedCall, echoes: list[Echo]) -> None:
        calls.append(call)
        raise RpcError(Code.PERMISSION_DENIED, "no")

    calls: list[ListenedCall] = []
    async with scene(refuse) as here:
        stream = here.channel.stream(PATH)
        await stream.send(b"one")
        error = await failure(stream.receive())
        assert (error.code, error.text) == (Code.PERMISSION_DENIED, "no")
        assert calls[0]._carrier.open_calls == 0
        assert (await failure(here.channel.stream(PATH, timeout_s=20).receive())).code == Code.PERMISSION_DENIED


async def test_an_unknown_error_is_reported() -> None:
    def broken(call: ListenedCall, echoes: list[Echo]) -> None:
        raise KeyError("bug")

    reported: list[tuple[str, BaseException]] = []
    async with scene(broken, report=lambda path, error: reported.append((path, error))) as here:
        assert (await failure(here.channel.stream(PATH).receive())).code == Code.INTERNAL
    assert [(path, type(error)) for path, error in reported] == [(PATH, KeyError)]


async def _send_together(here: Scene, *messages: bytes) -> None:
    """Send messages in one DATA frame, one behind the end of the call, and another call."""
    client = await raw.RawClient.connect(here.channel.targets[0])
    client.send(raw.headers(1, raw.grpc_headers(PATH)))
    client.send(raw.message(1, b"".join(frame(message) for message in messages)))
    await until(lambda: here.heard and here.heard[-1] == "released")
    client.send(raw.message(1, frame(b"late")))
    client.send(raw.headers(3, raw.grpc_headers(PATH)) + raw.message(3, b"", raw.END_STREAM))
    await until(lambda: len(here.echoes) == 2 and here.heard[-1] == "released")
    client.close()


async def test_a_message_may_end_the_call_and_those_behind_it_are_not_heard() -> None:
    for word in (b"raise", b"fail", b"finish"):
        async with scene() as here:
            await _send_together(here, b"one", word, b"two")
            assert here.echoes[0].heard == ["one", word.decode(), "released"]
            counts = here.server.router.routes[PATH.encode()].counts
            assert counts.failed == ({} if word == b"finish" else {Code.ABORTED: 1})


async def test_the_last_word_of_a_listener_says_how_the_client_left(here: Scene) -> None:
    stream = here.channel.stream(PATH)
    await stream.send(b"one")
    await stream.receive()
    stream.cancel()
    await until(lambda: here.heard == ["one", "released"])
    client = await raw.RawClient.connect(here.channel.targets[0])
    client.send(raw.headers(1, raw.grpc_headers(PATH)) + raw.message(1, frame(b"one")))
    await until(lambda: len(here.echoes) == 2 and here.heard == ["one"])
    client.close()
    await until(lambda: here.heard == ["one", "severed"])
    last = here.channel.stream(PATH)
    await last.send(b"one")
    await last.receive()
    here.echoes[-1].call.abort(RpcError(Code.UNAVAILABLE, "stopping"))
    assert (await failure(last.receive())).text == "stopping"
    assert here.heard == ["one", "released"]


async def test_half_a_message_is_no_request(here: Scene) -> None:
    client = await raw.RawClient.connect(here.channel.targets[0])
    client.send(raw.headers(1, raw.grpc_headers(PATH)) + raw.message(1, frame(b"one")[:-1], raw.END_STREAM))
    await until(lambda: here.heard == ["released"])
    assert here.server.router.routes[PATH.encode()].counts.failed == {Code.INTERNAL: 1}
    client.close()


async def test_guard_may_begin_a_call_later() -> None:
    def around(path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        assert kind is Kind.LISTENED

        def guarded(call: ListenedCall) -> None:
            calls.append(call)

        handlers.append(handler)
        return guarded

    calls: list[ListenedCall] = []
    handlers: list[Callable[..., Any]] = []
    async with scene(around=(around,)) as here:
        stream = here.channel.stream(PATH)
        await stream.send(b"one")
        await stream.send(b"two")
        stream.half_close()
        await until(lambda: calls and calls[0].request_done)
        calls[0].begin(handlers[0])
        assert [await stream.receive(), await stream.receive(), await stream.receive()] == [b"one", b"two", None]
        assert here.heard == ["one", "two", "half closed", "released"]
        left = here.channel.stream(PATH)
        await left.send(b"one")
        await until(lambda: len(calls) == 2)
        left.cancel()
        await until(lambda: calls[1].done)
        calls[1].begin(handlers[0])
        assert len(here.echoes) == 1, "an ended call is not reported"


async def test_calls_that_are_over_leave_no_cycles(here: Scene) -> None:
    client = await raw.RawClient.connect(here.channel.targets[0])
    ids = itertools.count(1, 2)

    async def one(word: bytes) -> None:
        stream_id = next(ids)
        client.send(raw.headers(stream_id, raw.grpc_headers(PATH)) + raw.message(stream_id, frame(word)))
        await until(lambda: here.heard)
        client.send(raw.reset(stream_id))
        await until(lambda: here.heard[-1] == "released")
        here.echoes.clear()

    words = (b"one", b"finish", b"fail", b"raise")
    for word in words:
        await one(word)
    gc.collect()
    gc.disable()
    try:
        for word in words * CALLS:
            await one(word)
        assert gc.collect() < CALLS
    finally:
        gc.enable()
        client.close()
