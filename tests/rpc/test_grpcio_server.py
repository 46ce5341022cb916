"""Our channel against grpcio's server: every call type, statuses, metadata, deadlines, cancellation, sizes, restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from raftkv.rpc import Channel, ChannelState, Code, RpcError
from tests.rpc import services as s
from tests.rpc.loop import failure, until

MIB = 1024 * 1024


@pytest.fixture
def server() -> Iterator[s.GrpcioServer]:
    with s.grpcio_server(options=(("grpc.max_receive_message_length", 8 * MIB),)) as server:
        yield server


@pytest.fixture
@asynccontextmanager
async def channel(server: s.GrpcioServer) -> AsyncIterator[Channel]:
    async with Channel(server.target) as channel:
        yield channel


async def test_unary(channel: Channel) -> None:
    for size in (0, 1, 16_384 - 5, 16_384, 100_000, 4 * MIB):
        assert await channel.unary(s.UNARY, bytes(size), timeout_s=20) == bytes(size)


async def test_client_streaming(channel: Channel) -> None:
    stream = channel.stream(s.COLLECT, timeout_s=20)
    sizes = [0, 5, 100_000, 4 * MIB, 1]
    for size in sizes:
        await stream.send(bytes(size))
    stream.half_close()
    assert [message async for message in stream] == [repr(sizes).encode()]
    assert (stream.done, stream.error) == (True, None)


async def test_server_streaming(channel: Channel) -> None:
    stream = channel.stream(s.COUNT, timeout_s=20)
    await stream.send(b"1000")
    stream.half_close()
    assert [message async for message in stream] == [b"%d" % number for number in range(1000)]


async def test_bidi_streaming_is_a_conversation(channel: Channel) -> None:
    stream = channel.stream(s.BIDI, timeout_s=20)
    for message in [b"one", b"", bytes(4 * MIB), b"last"]:
        await stream.send(message)
        assert await stream.receive() == message
    stream.half_close()
    assert await stream.receive() is None


async def test_status_text_and_trailers(channel: Channel) -> None:
    error = await failure(channel.unary(s.FAIL, "nicht da: ä%\n".encode(), timeout_s=20))
    assert (error.code, error.text) == (Code.NOT_FOUND, "nicht da: ä%\n")
    assert error.trailers == ((b"x", b"1"),)
    assert not error.definite


async def test_stream_that_fails_after_a_message(channel: Channel) -> None:
    stream = channel.stream(s.BREAK, timeout_s=20)
    assert await stream.receive() == b"first"
    error = await failure(stream.receive())
    assert (error.code, error.text) == (Code.FAILED_PRECONDITION, "broke off")
    assert error.trailers == ((b"why", b"test"),)


async def test_metadata_reaches_the_handler(channel: Channel) -> None:
    metadata = (("hasleader", "true"), ("blob-bin", b"\0\xff"))
    seen = (await channel.unary(s.META, b"", 20, metadata)).decode()
    assert "('hasleader', 'true')" in seen
    assert "('blob-bin', b'\\x00\\xff')" in seen


@pytest.mark.long
async def test_deadline_ends_the_call_on_both_sides(channel: Channel, server: s.GrpcioServer) -> None:
    # Connected before the deadline begins: the call must reach the server within it.
    await channel.unary(s.UNARY, b"", 20)
    error = await failure(channel.unary(s.HANG, b"", timeout_s=1.0))
    assert error.code is Code.DEADLINE_EXCEEDED
    assert await asyncio.to_thread(server.cancelled.wait, 20)
    stream = channel.stream(s.BIDI, timeout_s=0.1)
    error = await failure(stream.receive())
    assert error.code is Code.DEADLINE_EXCEEDED


async def test_cancelling_the_future_cancels_the_handler(channel: Channel) -> None:
    await channel.unary(s.UNARY, b"", 20)
    call = channel.unary(s.HANG, b"")
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await channel.unary(s.UNARY, b"still there", 20) == b"still there"


async def test_cancel_in_mid_stream_reaches_the_handler(channel: Channel, server: s.GrpcioServer) -> None:
    stream = channel.stream(s.BIDI)
    await stream.send(b"one")
    assert await stream.receive() == b"one"
    stream.cancel()
    assert (await failure(stream.receive())).code is Code.CANCELLED
    assert await asyncio.to_thread(server.cancelled.wait, 20)


async def test_a_thousand_calls_queue_behind_a_limit_of_ten_streams() -> None:
    with s.grpcio_server(options=(("grpc.max_concurrent_streams", 10),)) as server:
        async with Channel(server.target) as channel:
            calls = [channel.unary(s.UNARY, b"%d" % number, 20) for number in range(1000)]
            assert await asyncio.gather(*calls) == [b"%d" % number for number in range(1000)]


async def test_server_that_stops_and_comes_back() -> None:
    states: list[ChannelState] = []
    with s.grpcio_server() as server:
        channel = Channel(server.target, on_state=states.append)
        await channel.unary(s.UNARY, b"", 20)
        stream = channel.stream(s.BIDI)
        await stream.send(b"x")
        assert await stream.receive() == b"x"
    error = await failure(stream.receive())
    assert isinstance(error, RpcError)
    assert not error.definite, "the stream had reached its handler"
    await until(lambda: channel.state is ChannelState.TRANSIENT_FAILURE)
    refused = await failure(channel.unary(s.UNARY, b"", 20))
    assert (refused.code, refused.definite) == (Code.UNAVAILABLE, True)
    waiting = channel.unary(s.UNARY, b"back", 20, wait_for_ready=True)
    with s.grpcio_server(port=server.port):
        channel.reconnect_now()
        assert await waiting == b"back"
        await channel.close()
    assert states == [
        ChannelState.CONNECTING,
        ChannelState.READY,
        *([ChannelState.CONNECTING] if ChannelState.CONNECTING in states[2:3] else []),
        ChannelState.TRANSIENT_FAILURE,
        ChannelState.READY,
        ChannelState.SHUTDOWN,
    ]
