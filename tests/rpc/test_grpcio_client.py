"""grpcio's channel against our server: every call type, statuses, metadata, deadlines, cancellation, sizes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from raftkv.rpc import ServerLimits
from tests.rpc import services as s
from tests.rpc.loop import until

MIB = 1024 * 1024
BIG = ServerLimits(max_receive_message_bytes=8 * MIB)
BIG_OPTIONS = (("grpc.max_receive_message_length", 8 * MIB),)


async def against(echo: s.EchoServer, use: Callable[[grpc.Channel], Any]) -> Any:
    """Run ``use`` with grpcio's channel in a thread of its own."""

    def work() -> Any:
        with grpc.insecure_channel(echo.target, options=BIG_OPTIONS) as channel:
            return use(channel)

    return await asyncio.to_thread(work)


def error_of(call: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


async def test_unary() -> None:
    async with s.echo_server(BIG) as echo:

        def use(channel: grpc.Channel) -> None:
            for path in (s.UNARY, s.LATER):
                for size in (0, 1, 16_384 - 5, 16_384, 100_000, 4 * MIB):
                    message = bytes(size)
                    assert channel.unary_unary(path)(message, timeout=60) == message

        await against(echo, use)


async def test_client_streaming() -> None:
    async with s.echo_server(BIG) as echo:

        def use(channel: grpc.Channel) -> None:
            call = channel.stream_unary(s.COLLECT)
            assert call(iter(()), timeout=60) == b"[]"
            sizes = [0, 5, 100_000, 4 * MIB, 1]
            assert call((bytes(size) for size in sizes), timeout=60) == repr(sizes).encode()

        await against(echo, use)


async def test_server_streaming(echo: s.EchoServer) -> None:
    def use(channel: grpc.Channel) -> None:
        call = channel.unary_stream(s.COUNT)
        assert list(call(b"0", timeout=60)) == []
        assert list(call(b"1000", timeout=60)) == [b"%d" % number for number in range(1000)]

    await against(echo, use)


async def test_bidi_streaming_is_a_conversation() -> None:
    async with s.echo_server(BIG) as echo:

        def use(channel: grpc.Channel) -> None:
            answered = threading.Semaphore(1)

            def ask() -> Iterator[bytes]:
                for number in range(50):
                    answered.acquire()
                    yield b"%d" % number

            got = []
            for message in channel.stream_stream(s.BIDI)(ask(), timeout=60):
                got.append(message)
                answered.release()
            assert got == [b"%d" % number for number in range(50)]
            large = [bytes([byte]) * (4 * MIB) for byte in range(3)]
            assert list(channel.stream_stream(s.BIDI)(iter(large), timeout=60)) == large

        await against(echo, use)


async def test_status_text_details_and_trailers(echo: s.EchoServer) -> None:
    def use(channel: grpc.Channel) -> None:
        error: Any = error_of(lambda: channel.unary_unary(s.FAIL)("nicht da: ä%\n".encode(), timeout=60))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert error.details() == "nicht da: ä%\n"
        trailers = dict(error.trailing_metadata())
        assert trailers == {"x": "1", "grpc-status-details-bin": b"d\0"}

    await against(echo, use)


async def test_stream_that_fails_after_a_message(echo: s.EchoServer) -> None:
    def use(channel: grpc.Channel) -> None:
        call = channel.stream_stream(s.BREAK)(iter(()), timeout=60)
        assert next(call) == b"first"
        error: Any = error_of(lambda: next(call))
        assert (error.code(), error.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "broke off")
        assert tuple(error.trailing_metadata()) == (("why", "test"),)

    await against(echo, use)


async def test_unknown_paths(echo: s.EchoServer) -> None:
    def use(channel: grpc.Channel) -> None:
        for path, text in (
            ("/test.Echo/Nope", "unknown method Nope for service test.Echo"),
            ("/test.Nope/Unary", "unknown service test.Nope"),
        ):
            error: Any = error_of(lambda path=path: channel.unary_unary(path)(b"", timeout=60))
            assert (error.code(), error.details()) == (grpc.StatusCode.UNIMPLEMENTED, text)

    await against(echo, use)


async def test_exceptions_in_handlers_are_internal_say_nothing_and_are_reported(echo: s.EchoServer) -> None:
    def use(channel: grpc.Channel) -> None:
        for path in (s.RAISE, s.RAISE_LATER):
            error: Any = error_of(lambda path=path: channel.unary_unary(path)(b"", timeout=60))
            assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")

    await against(echo, use)
    assert [(path, type(error)) for path, error in echo.reported] == [
        (s.RAISE, ZeroDivisionError),
        (s.RAISE_LATER, ZeroDivisionError),
    ]


async def test_metadata_reaches_the_handler(echo: s.EchoServer) -> None:
    def use(channel: grpc.Channel) -> bytes:
        metadata = (("hasleader", "true"), ("blob-bin", b"\0\xff"))
        return channel.unary_unary(s.META)(b"", timeout=60, metadata=metadata)

    seen = (await against(echo, use)).decode()
    assert "('hasleader', 'true')" in seen
    assert "('blob-bin', b'\\x00\\xff')" in seen
    assert "grpc-timeout" not in seen


async def test_message_above_the_limit(echo: s.EchoServer) -> None:
    def use(channel: grpc.Channel) -> None:
        for call in (channel.unary_unary(s.UNARY), lambda m, timeout: channel.stream_unary(s.COLLECT)(iter([m]))):
            error: Any = error_of(lambda call=call: call(bytes(2 * MIB + 1), timeout=60))
            text = "grpc: received message larger than max (2097153 vs. 2097152)"
            assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        assert len(channel.unary_unary(s.UNARY)(bytes(2 * MIB), timeout=60)) == 2 * MIB

    await against(echo, use)


@pytest.mark.long
async def test_deadline_cancels_the_handler(echo: s.EchoServer) -> None:
    def use(channel: grpc.Channel) -> None:
        # Connected before the deadline begins: the call must reach the server within it.
        channel.unary_unary(s.UNARY)(b"", timeout=20)
        error: Any = error_of(lambda: channel.unary_unary(s.HANG)(b"", timeout=1.0))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    await against(echo, use)
    await until(lambda: echo.cancelled == ["hang"])
    assert echo.hanging[0].cancelled


async def test_cancel_in_mid_stream_cancels_the_handler(echo: s.EchoServer) -> None:
    done = threading.Event()

    def use(channel: grpc.Channel) -> None:
        def ask() -> Iterator[bytes]:
            yield b"one"
            done.wait(90)

        call = channel.stream_stream(s.BIDI)(ask())
        assert next(call) == b"one"
        call.cancel()
        error: Any = error_of(lambda: next(call))
        assert error.code() is grpc.StatusCode.CANCELLED
        done.set()

    await against(echo, use)
    await until(lambda: echo.cancelled == ["bidi"])
    await until(lambda: not echo.server._tasks)
    assert echo.reported == []


async def test_many_calls_at_once(echo: s.EchoServer) -> None:
    def use(channel: grpc.Channel) -> None:
        call = channel.unary_unary(s.UNARY)
        futures = [call.future(b"%d" % number, timeout=60) for number in range(500)]
        assert [future.result() for future in futures] == [b"%d" % number for number in range(500)]

    await against(echo, use)


async def test_as_many_calls_as_a_connection_may_have_wait_at_once() -> None:
    """gRPC's core opens the windows of each stream before it is answered: these updates are no attack."""
    limits = ServerLimits(max_concurrent_streams=2_000)
    async with s.echo_server(limits) as echo:

        def use(channel: grpc.Channel) -> None:
            call = channel.unary_unary(s.HANG)
            waiting = [call.future(b"hello", timeout=60) for _ in range(limits.max_concurrent_streams)]
            assert {one.result() for one in waiting} == {b"answered"}

        async def answer() -> None:
            await until(lambda: len(echo.hanging) == limits.max_concurrent_streams)
            for call in echo.hanging:
                call.reply(b"answered")

        async with asyncio.TaskGroup() as both:
            both.create_task(answer())
            both.create_task(against(echo, use))


@pytest.mark.long
async def test_a_call_survives_the_common_deadline_of_a_thousand_others() -> None:
    """Most of them wait for a stream until then: the channel sends them late, and resets them at once."""
    async with s.echo_server(ServerLimits(max_concurrent_streams=100, reset_burst=10, reset_per_s=1)) as echo:
        loop = asyncio.get_running_loop()

        def use(channel: grpc.Channel) -> bytes:
            hang = channel.unary_unary(s.HANG)
            survivor = hang.future(b"survivor", timeout=60)
            expiry_s = time.monotonic() + 1
            others = [hang.future(b"", timeout=expiry_s - time.monotonic()) for _ in range(1_000)]
            assert {call.code() for call in others} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            [call] = [one for one in echo.hanging if not one.done]
            loop.call_soon_threadsafe(call.reply, b"answer")
            return survivor.result()

        assert await against(echo, use) == b"answer"
