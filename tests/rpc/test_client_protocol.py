"""What our client makes of odd answers, and when it may say that a call certainly did not happen."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import ngh2
import pytest

from raftkv.rpc import Channel, ChannelOptions, ChannelState, Code
from raftkv.rpc.framing import frame
from tests.rpc.fake_server import OK_HEADERS, OK_TRAILERS, FakeConnection, fake_server
from tests.rpc.loop import failure, until


@contextlib.contextmanager
def silent_port() -> Iterator[str]:
    """A port that accepts connections (the kernel does) and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield "{}:{}".format(*listener.getsockname())


PATH = "/test.Fake/Call"
Headers = tuple[tuple[bytes, bytes], ...]


async def error_for(script: object, options: ChannelOptions | None = None) -> object:
    """Return the error of one unary call to a fake server."""
    async with fake_server(script) as target, Channel(target, options=options) as channel:
        return await failure(channel.unary(PATH, b"request", 20))


def answering(*pieces: bytes, trailers: Headers | None = OK_TRAILERS, headers: Headers = OK_HEADERS) -> object:
    async def script(connection: FakeConnection) -> None:
        connection.answer(await connection.request(), *pieces, trailers=trailers, headers=headers)

    return script


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [
        (answering(), Code.INTERNAL, "cardinality violation: received no response message for unary RPC"),
        (
            answering(frame(b"a"), frame(b"b")),
            Code.INTERNAL,
            "cardinality violation: received multiple response messages for unary RPC",
        ),
        (answering(frame(b"a"), trailers=None), Code.INTERNAL, "server closed the stream without sending trailers"),
        (
            answering(frame(b"a"), trailers=((b"x", b"y"),)),
            Code.UNKNOWN,
            "the server sent trailers without grpc-status",
        ),
        (answering(b"\1\0\0\0\1a"), Code.INTERNAL, "grpc: compressed flag set with identity or empty encoding"),
        (answering(b"\3\0\0\0\1a"), Code.INTERNAL, "grpc: received unexpected payload format 3"),
        (answering(frame(b"a"), trailers=((b"grpc-status", b"99"), (b"grpc-message", b"odd%20one"))), 99, "odd one"),
    ],
)
async def test_answers_that_break_the_protocol(script: object, code: int, text: str) -> None:
    error = await error_for(script)
    assert (error.code, error.text, error.definite) == (code, text, False)


async def test_two_messages_in_two_frames() -> None:
    async def script(connection: FakeConnection) -> None:
        stream_id = await connection.request()
        connection.h2.send_response(stream_id, OK_HEADERS)
        for piece in (frame(b"a"), frame(b"b")):
            connection.h2.send_data(stream_id, piece)
            connection.flush()
        connection.h2.send_trailers(stream_id, OK_TRAILERS)
        connection.flush()

    error = await error_for(script)
    assert error.text == "cardinality violation: received multiple response messages for unary RPC"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, Code.INTERNAL),
        (401, Code.UNAUTHENTICATED),
        (403, Code.PERMISSION_DENIED),
        (404, Code.UNIMPLEMENTED),
        (429, Code.UNAVAILABLE),
        (503, Code.UNAVAILABLE),
        (500, Code.UNKNOWN),
    ],
)
async def test_http_statuses_of_proxies(status: int, code: Code) -> None:
    head = ((b":status", b"%d" % status), (b"content-type", b"text/html"))
    error = await error_for(answering(b"<html>", headers=head, trailers=None))
    assert error.code is code
    assert str(status) in error.text


async def test_content_type_that_is_not_grpc() -> None:
    error = await error_for(answering(b"hello", headers=((b":status", b"200"), (b"content-type", b"text/plain"))))
    assert error.code is Code.UNKNOWN


async def test_response_above_the_limit_is_refused_by_its_prefix() -> None:
    error = await error_for(answering(frame(bytes(11))), ChannelOptions(max_receive_message_bytes=10))
    assert (error.code, error.text) == (Code.RESOURCE_EXHAUSTED, "grpc: received message larger than max (11 vs. 10)")


@pytest.mark.parametrize(
    ("reset", "code"),
    [
        (ngh2.ErrorCode.CANCEL, Code.CANCELLED),
        (ngh2.ErrorCode.NO_ERROR, Code.INTERNAL),
        (ngh2.ErrorCode.INTERNAL_ERROR, Code.INTERNAL),
        (ngh2.ErrorCode.ENHANCE_YOUR_CALM, Code.RESOURCE_EXHAUSTED),
        (ngh2.ErrorCode.INADEQUATE_SECURITY, Code.PERMISSION_DENIED),
        (ngh2.ErrorCode.HTTP_1_1_REQUIRED, Code.UNKNOWN),
    ],
)
async def test_resets(reset: ngh2.ErrorCode, code: Code) -> None:
    async def script(connection: FakeConnection) -> None:
        connection.h2.reset_stream(await connection.request(), reset)
        connection.flush()

    error = await error_for(script)
    assert (error.code, error.definite) == (code, False)
    assert reset.name in error.text


async def test_a_stream_refused_once_is_tried_again() -> None:
    async def script(connection: FakeConnection) -> None:
        connection.h2.reset_stream(await connection.request(), ngh2.ErrorCode.REFUSED_STREAM)
        connection.flush()
        connection.answer(await connection.request(), frame(b"second time"))

    async with fake_server(script) as target, Channel(target) as channel:
        assert await channel.unary(PATH, b"", 20) == b"second time"


async def test_a_stream_refused_again_and_again_fails_and_is_definite() -> None:
    async def script(connection: FakeConnection) -> None:
        while True:
            connection.h2.reset_stream(await connection.request(), ngh2.ErrorCode.REFUSED_STREAM)
            connection.flush()

    error = await error_for(script)
    assert (error.code, error.definite) == (Code.UNAVAILABLE, True)


async def test_goaway_fails_what_lies_above_it_and_lets_the_rest_finish() -> None:
    answered = asyncio.Event()

    async def script(connection: FakeConnection) -> None:
        first, _ = await connection.request(), await connection.request()
        connection.h2.send_goaway(last_stream_id=first)
        connection.flush()
        await answered.wait()
        connection.answer(first, frame(b"first"))

    async with fake_server(script) as target, Channel(target) as channel:
        first, second = channel.unary(PATH, b"", 20), channel.unary(PATH, b"", 20)
        error = await failure(second)
        assert (error.code, error.definite) == (Code.UNAVAILABLE, True)
        assert not first.done()
        answered.set()
        assert await first == b"first"


async def test_after_goaway_new_calls_go_to_a_new_connection() -> None:
    served: list[FakeConnection] = []

    async def script(connection: FakeConnection) -> None:
        served.append(connection)
        while True:
            connection.answer(await connection.request(), frame(b"%d" % len(served)))
            connection.h2.send_goaway()
            connection.flush()

    async with fake_server(script) as target, Channel(target) as channel:
        assert await channel.unary(PATH, b"", 20) == b"1"
        await until(lambda: len(served) == 2)
        assert await channel.unary(PATH, b"", 20) == b"2"


async def test_connection_lost_after_the_request_left_is_not_definite() -> None:
    async def script(connection: FakeConnection) -> None:
        await connection.request()
        connection.drop()

    error = await error_for(script)
    assert (error.code, error.definite) == (Code.UNAVAILABLE, False)


async def test_call_of_the_very_turn_in_which_the_connection_is_lost_is_definite() -> None:
    """Its bytes were never handed to the transport."""

    async def script(connection: FakeConnection) -> None:
        await connection.event(ngh2.SettingsReceived)

    async with fake_server(script) as target, Channel(target) as channel:
        channel.connect()
        await until(lambda: channel.state is ChannelState.READY)
        sent = channel.unary(PATH, b"", 20)
        await asyncio.sleep(0)
        unsent = channel.unary(PATH, b"", 20)
        (connection,) = channel._connections
        connection.core.lost()
        assert not (await failure(sent)).definite
        assert (await failure(unsent)).definite


async def test_port_that_says_nothing_is_a_failure_to_connect() -> None:
    with silent_port() as target:
        async with Channel(target, options=ChannelOptions(settings_timeout_s=0.05)) as channel:
            error = await failure(channel.unary(PATH, b"", 20))
            assert (error.code, error.definite) == (Code.UNAVAILABLE, True)


async def test_deadline_before_a_connection_is_definite() -> None:
    with silent_port() as target:
        async with Channel(target) as channel:
            error = await failure(channel.unary(PATH, b"", 0.05))
            assert (error.code, error.definite) == (Code.DEADLINE_EXCEEDED, True)


async def test_written_bytes_leave_at_once() -> None:
    """The kernel would keep a small piece back until the one before it is acknowledged (Nagle's algorithm)."""
    async with fake_server(answering(frame(b"here"))) as target, Channel(target) as channel:
        await channel.unary(PATH, b"", 20)
        (connection,) = channel._connections
        assert connection._transport is not None
        kept: socket.socket = connection._transport.get_extra_info("socket")
        assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_several_targets_are_tried_in_turn() -> None:
    with silent_port() as dead:
        pass
    async with fake_server(answering(frame(b"alive"))) as target:
        async with Channel([dead, target]) as channel:
            assert await channel.unary(PATH, b"", 20) == b"alive"
        async with Channel([dead, "nonsense"]) as channel:
            error = await failure(channel.unary(PATH, b"", 20))
            assert (error.code, error.definite) == (Code.UNAVAILABLE, True)


async def test_too_many_pings_halves_the_eagerness() -> None:
    async def script(connection: FakeConnection) -> None:
        await connection.request()
        connection.h2.send_goaway(ngh2.ErrorCode.ENHANCE_YOUR_CALM, debug_data=b"too_many_pings")
        connection.flush()

    options = ChannelOptions(keepalive_time_s=100)
    async with fake_server(script) as target, Channel(target, options=options) as channel:
        call = channel.unary(PATH, b"")
        await until(lambda: channel.keepalive_time_s == 200)
        call.cancel()


async def test_keepalive_gives_up_a_connection_that_has_gone_silent() -> None:
    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await asyncio.Event().wait()

    options = ChannelOptions(keepalive_time_s=0.05, keepalive_timeout_s=0.05)
    error = await error_for(script, options)
    assert (error.code, error.definite) == (Code.UNAVAILABLE, False)


async def test_keepalive_keeps_a_connection_that_answers() -> None:
    async def script(connection: FakeConnection) -> None:
        stream_id = await connection.request()
        for _ in range(5):
            await connection.event(ngh2.PingReceived)
        connection.answer(stream_id, frame(b"after five pings"))

    options = ChannelOptions(keepalive_time_s=0.02, keepalive_timeout_s=5)
    async with fake_server(script) as target, Channel(target, options=options) as channel:
        assert await channel.unary(PATH, b"", 20) == b"after five pings"


async def test_calls_wait_for_a_free_stream_in_order_and_can_be_withdrawn() -> None:
    release = asyncio.Event()

    async def script(connection: FakeConnection) -> None:
        stream_id = await connection.request()
        await release.wait()
        connection.answer(stream_id, frame(b"1"))
        for number in (3, 4):
            connection.answer(await connection.request(), frame(b"%d" % number))

    async with fake_server(script, {3: 1}) as target, Channel(target) as channel:
        first, second, third, fourth = (channel.unary(PATH, b"", 20) for _ in range(4))
        await until(lambda: channel.state is ChannelState.READY)
        second.cancel()
        late = channel.unary(PATH, b"", 0.02)
        error = await failure(late)
        assert (error.code, error.definite) == (Code.DEADLINE_EXCEEDED, True)
        release.set()
        assert [await call for call in (first, third, fourth)] == [b"1", b"3", b"4"]


async def test_queue_of_waiting_calls_is_bounded() -> None:
    with silent_port() as target:
        async with Channel(target, options=ChannelOptions(queued_calls=2)) as channel:
            calls = [channel.unary(PATH, b"") for _ in range(3)]
            error = await failure(calls[2])
            assert (error.code, error.definite) == (Code.RESOURCE_EXHAUSTED, True)
            calls[0].cancel()
            calls[1].cancel()


async def test_close_fails_everything() -> None:
    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await asyncio.Event().wait()

    async with fake_server(script, {3: 1}) as target:
        channel = Channel(target)
        sent, queued = channel.unary(PATH, b""), channel.unary(PATH, b"")
        await until(lambda: channel.state is ChannelState.READY)
        await asyncio.sleep(0)
        await channel.close()
        for call, definite in ((sent, False), (queued, True), (channel.unary(PATH, b""), True)):
            error = await failure(call)
            assert (error.code, error.definite) == (Code.CANCELLED, definite)
            assert error.text == "grpc: the client connection is closing"
        await channel.close()
