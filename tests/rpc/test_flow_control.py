"""Slow ends: what they make the other end hold is bounded, and no other connection is slowed down."""

from __future__ import annotations

import asyncio

import ngh2

from raftkv.rpc import Channel, ChannelOptions, Code, ServerLimits, StreamCall
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.fake_server import OK_HEADERS, FakeConnection, fake_server
from tests.rpc.loop import failure, until

KIB = 1024
LIMITS = ServerLimits(
    stream_window_bytes=128 * KIB, connection_window_bytes=1024 * KIB, stream_send_buffer_bytes=100 * KIB
)
OPTIONS = ChannelOptions(
    stream_window_bytes=128 * KIB, connection_window_bytes=1024 * KIB, stream_send_buffer_bytes=100 * KIB
)


async def settled(value) -> int:
    """Return ``value()`` once it has stayed the same for many turns of the loop."""
    last, same = -1, 0
    while same < 50:
        now = value()
        same = same + 1 if now == last else 0
        last = now
        await asyncio.sleep(0)
    return last


async def test_a_client_that_does_not_read_stops_its_own_handler_alone() -> None:
    async with s.pair(LIMITS, OPTIONS) as (echo, channel):
        stream = channel.stream(s.FLOOD)
        await until(lambda: echo.flooded > 2)
        sent = await settled(lambda: echo.flooded) * 64 * KIB
        assert sent <= (128 + 100 + 3 * 64) * KIB
        assert stream.unread_bytes <= (128 + 64) * KIB
        assert echo.streams[0].send_buffer_size <= (100 + 65) * KIB
        assert await channel.unary(s.UNARY, b"unhindered", 20) == b"unhindered"
        for _ in range(20):
            assert len(await stream.receive() or b"") == 64 * KIB
        assert echo.flooded * 64 * KIB > sent, "reading lets the handler go on"
        stream.cancel()
        await until(lambda: echo.cancelled == ["flood"])
        await until(lambda: not echo.server._tasks)


async def test_a_handler_that_does_not_read_stops_its_client_alone() -> None:
    go_on, seen = asyncio.Event(), []

    async def lazy(call: StreamCall) -> None:
        await go_on.wait()
        seen.extend([len(message) async for message in call])
        await call.send(b"%d" % sum(seen))

    async with s.echo_server(LIMITS) as echo:
        echo.server.stream("/test.Lazy/Collect", lazy)
        async with Channel(echo.target, options=OPTIONS) as channel:
            stream = channel.stream("/test.Lazy/Collect")
            sent = 0

            async def flood() -> None:
                nonlocal sent
                for _ in range(40):
                    await stream.send(bytes(64 * KIB))
                    sent += 64 * KIB
                stream.half_close()

            task = asyncio.create_task(flood())
            await until(lambda: sent)
            assert await settled(lambda: sent) <= (128 + 100 + 3 * 64) * KIB
            assert stream.send_buffer_size <= (100 + 65) * KIB
            assert await channel.unary(s.UNARY, b"unhindered", 20) == b"unhindered"
            go_on.set()
            assert await stream.receive() == b"%d" % (40 * 64 * KIB)
            await task


async def test_messages_larger_than_every_window_pass() -> None:
    async with s.pair(
        ServerLimits(stream_window_bytes=65_535, connection_window_bytes=65_535),
        ChannelOptions(stream_window_bytes=65_535, connection_window_bytes=65_535),
    ) as (_, channel):
        message = bytes(range(256)) * 4 * KIB
        assert await channel.unary(s.UNARY, message, 20) == message
        stream = channel.stream(s.BIDI, timeout_s=20)
        for _ in range(3):
            await stream.send(message)
            assert await stream.receive() == message
        stream.cancel()


async def test_windows_come_back_however_streams_end() -> None:
    """Cancelled, failed, unread and refused streams must not eat the connection's window bit by bit."""
    limits = ServerLimits(stream_window_bytes=65_535, connection_window_bytes=200_000, max_receive_message_bytes=60_000)
    async with s.pair(limits) as (_, channel):
        for number in range(40):
            stream = channel.stream(s.HANG if number % 2 else "/no/Such")
            stream.send_nowait(bytes(50_000))
            await asyncio.sleep(0)
            stream.cancel()
            assert (await failure(channel.unary(s.UNARY, bytes(60_001), 20))).code is Code.RESOURCE_EXHAUSTED
            broken = channel.stream(s.BREAK)
            broken.send_nowait(bytes(50_000))
            assert await broken.receive() == b"first"
            assert (await failure(broken.receive())).code is Code.FAILED_PRECONDITION
        for _ in range(20):
            assert len(await channel.unary(s.UNARY, bytes(60_000), 20)) == 60_000


async def test_two_unread_streams_leave_room_for_a_third() -> None:
    async with s.pair(LIMITS, OPTIONS) as (echo, channel):
        streams = [channel.stream(s.FLOOD) for _ in range(4)]
        await until(lambda: len(echo.streams) == 4)
        await settled(lambda: echo.flooded)
        assert await channel.unary(s.UNARY, bytes(300 * KIB), 20) == bytes(300 * KIB)
        for stream in streams:
            stream.cancel()


async def test_data_of_refused_calls_returns_to_the_window() -> None:
    """Whole frames, and frames that have come half when their call is answered: the client may send on for ever."""
    limits = ServerLimits(stream_window_bytes=65_535, connection_window_bytes=200_000, max_receive_message_bytes=10)
    async with s.echo_server(limits) as echo:
        client = await raw.RawClient.connect(echo.target)
        for one in range(1, 401, 2):
            body = raw.message(one, b"\0\0\0\xff\xff" + bytes(16_000))
            cut = 12_000 if one % 4 == 1 else len(body)
            head = raw.headers(one, raw.grpc_headers(s.UNARY)) + raw.message(one, b"\0\0\0\xff\xff")
            client.send(head + body[:cut])
            await client.until_frame(raw.RST_STREAM, one)
            client.send(body[cut:])
        assert client.goaway is None
        returned = sum(
            int.from_bytes(payload, "big") for kind, _, one, payload in client.frames if kind == 8 and not one
        )
        assert returned >= 200 * 16_000 - 100_000, "all but what may wait to be returned"
        client.close()


async def test_data_of_cancelled_calls_returns_to_the_clients_window() -> None:
    options = ChannelOptions(stream_window_bytes=65_535, connection_window_bytes=200_000)
    seen: list[int] = []

    async def script(connection: FakeConnection) -> None:
        while True:
            stream_id = (await connection.event(ngh2.RequestReceived)).stream_id
            seen.append(stream_id)
            connection.h2.send_response(stream_id, OK_HEADERS)
            connection.h2.send_data(stream_id, b"\0\0\0\xff\xff" + bytes(16_000))
            data = connection.h2.data_to_send()
            connection.write(data[:-4000])
            await connection.event(ngh2.StreamReset)
            connection.write(data[-4000:])

    async with fake_server(script) as target, Channel(target, options=options) as channel:
        for number in range(50):
            stream = channel.stream("/test.Fake/Half", timeout_s=20)
            await until(lambda stream=stream: stream.headers)
            stream.cancel()
            await until(lambda number=number: len(seen) == number + 1)
    assert seen == list(range(1, 101, 2)), "all on one connection"
