"""HTTP/2 abuse: the attacker's connection ends, an honest client notices nothing, memory stays where it was."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
import struct
from collections.abc import AsyncIterator

import pytest

from raftkv.rpc import Channel, Code, ServerLimits, StreamCall
from raftkv.rpc.server.accept import Connection
from raftkv.rpc.server.core import CALL_BYTES
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.loop import failure, until

ENHANCE_YOUR_CALM = 11
REFUSED_STREAM = 7
GROWTH_MAX_BYTES = 50 * 1024 * 1024


def resident_bytes() -> int:
    """Return the memory of this process, without what the C library keeps of what was freed."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _is_blocked(connection: Connection) -> bool:
    """Whether the client does not read what the server writes."""
    return connection._h2 is not None and not connection._h2.writable


@contextlib.asynccontextmanager
async def under_attack(limits: ServerLimits | None = None) -> AsyncIterator[tuple[s.EchoServer, raw.RawClient]]:
    """Run the server, an attacker, and an honest client that calls all the time and must never fail."""
    async with s.echo_server(limits) as echo, Channel(echo.target) as channel:
        await channel.unary(s.UNARY, b"")
        before, calls, stop = resident_bytes(), 0, asyncio.Event()

        async def honest() -> None:
            nonlocal calls
            while not stop.is_set():
                assert await channel.unary(s.UNARY, b"honest", timeout_s=10) == b"honest"
                calls += 1

        task = asyncio.create_task(honest())
        attacker = await raw.RawClient.connect(echo.target)
        try:
            yield echo, attacker
        finally:
            attacker.close()
            await asyncio.wait([task], timeout=0)
            stop.set()
            await task
        await until(lambda: len(echo.server.connections) == 1)
        assert calls > 0
        assert resident_bytes() - before < GROWTH_MAX_BYTES


async def test_rapid_reset() -> None:
    async with under_attack() as (echo, attacker):
        for first in range(1, 60_000, 6_000):
            attacker.send(b"".join(raw.headers(one) + raw.reset(one) for one in range(first, first + 6_000, 2)))
            await asyncio.sleep(0)
        await attacker.until_closed()
        assert len(echo.hanging) < 3000
        assert echo.server.connections


async def test_a_client_may_take_back_all_the_calls_that_it_may_have() -> None:
    """Reset every open call at once, as a client does when a quorum is lost and the time of its calls is up."""
    async with under_attack(ServerLimits(reset_free_after_s=0.01)) as (echo, attacker):
        limit = ServerLimits().max_concurrent_streams
        ids = range(1, 2 * limit, 2)
        attacker.send(b"".join(raw.headers(one) + raw.message(one, b"\0\0\0\0\0", raw.END_STREAM) for one in ids))
        await until(lambda: len(echo.hanging) == limit)
        aged_s = asyncio.get_running_loop().time() + 0.01
        await until(lambda: asyncio.get_running_loop().time() > aged_s)
        attacker.send(b"".join(raw.reset(one) for one in ids) + raw.frame(raw.PING, 0, 0, bytes(8)))
        assert (await attacker.until_frame(raw.PING))[1] == raw.ACK
        assert attacker.goaway is None


def late(stream_id: int) -> bytes:
    """Return a call whose deadline has passed before it is sent, and the reset that follows."""
    fields = raw.grpc_headers(s.HANG, (b"grpc-timeout", b"1n"))
    return raw.headers(stream_id, fields) + raw.message(stream_id, bytes(5), raw.END_STREAM) + raw.reset(stream_id)


@pytest.mark.long
async def test_calls_that_are_late_when_they_arrive_may_be_reset_at_once() -> None:
    """gRPC's core sends the calls that waited for a stream after their common deadline, and resets each at once."""
    async with under_attack() as (echo, attacker):
        for first in range(1, 40_000, 4_000):
            attacker.send(b"".join(map(late, range(first, first + 4_000, 2))))
        attacker.send(raw.frame(raw.PING, 0, 0, bytes(8)))
        assert (await attacker.until_frame(raw.PING))[1] == raw.ACK
        assert attacker.goaway is None
        assert not echo.hanging


async def test_late_calls_do_not_pay_for_the_resets_of_others() -> None:
    async with under_attack() as (echo, attacker):
        for first in range(1, 60_000, 8_000):
            pairs = range(first, first + 8_000, 4)
            attacker.send(b"".join(late(one) + raw.headers(one + 2) + raw.reset(one + 2) for one in pairs))
            await asyncio.sleep(0)
        await attacker.until_closed()
        assert attacker.goaway is not None
        assert len(echo.hanging) < 3000


async def test_a_call_is_reset_once() -> None:
    async with under_attack() as (_, attacker):
        attacker.send(raw.headers(1) + raw.reset(1) * 60_000)
        await attacker.until_closed()


async def test_streams_above_the_limit_are_refused_while_the_client_need_not_know_it() -> None:
    async with under_attack(ServerLimits(max_concurrent_streams=1000)) as (echo, _):
        ignorant = await raw.RawClient.connect(echo.target, raw.PREFACE + raw.settings())
        ignorant.send(b"".join(raw.headers(one) for one in range(1, 6_001, 2)))
        for _ in range(2000):
            assert (await ignorant.until_frame(raw.RST_STREAM))[3] == REFUSED_STREAM.to_bytes(4, "big")
        assert sum(connection.open_calls for connection in echo.server.connections) == 1000
        ignorant.send(b"".join(raw.headers(one) for one in range(6_001, 40_001, 2)))
        await ignorant.until_closed()  # after thousands of refusals it is given up
        ignorant.close()


async def test_streams_above_the_limit_end_the_connection_of_a_client_that_knows_it() -> None:
    async with under_attack(ServerLimits(max_concurrent_streams=1000)) as (_, attacker):
        attacker.send(b"".join(raw.headers(one) for one in range(1, 40_001, 2)))
        await attacker.until_closed()


FEW = ServerLimits(control_burst=100, control_per_s=1)


@pytest.mark.parametrize(
    ("limits", "sent", "reason"),
    [
        (None, raw.headers(1, flags=0) + raw.frame(raw.CONTINUATION, 0, 1, b"") * 50_000, b""),
        (None, raw.settings() * 50_000, b""),
        (None, raw.settings(*((0x1000 + n, n) for n in range(2000))), b""),
        (None, raw.frame(raw.PING, 0, 0, bytes(8)) * 50_000, b""),
        (None, raw.frame(raw.WINDOW_UPDATE, 0, 0, (1).to_bytes(4, "big")) * 100_000, b"too_many_control_frames"),
        (FEW, raw.headers(1) + raw.message(1, b"") * 5_000, b"too_many_control_frames"),
        (FEW, raw.headers(1, raw.grpc_headers("/no/Such")) + raw.message(1, b"x") * 5_000, b"too_many_control_frames"),
    ],
    ids=["continuations", "settings", "one of many settings", "pings", "windows", "empty", "tiny, after the answer"],
)
async def test_a_flood_of_frames(limits: ServerLimits | None, sent: bytes, reason: bytes) -> None:
    async with under_attack(limits) as (_, attacker):
        attacker.send(sent)
        await attacker.until_closed()
        assert attacker.goaway is not None
        assert attacker.goaway == (ENHANCE_YOUR_CALM, reason or attacker.goaway[1])


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(tuple((b"x-%d" % n, b"v" * 4000) for n in range(9)), id="36 KB of metadata"),
        pytest.param(tuple((b"x-%d" % n, b"") for n in range(300)), id="300 fields"),
    ],
)
async def test_header_list_above_the_limit(fields: tuple[tuple[bytes, bytes], ...]) -> None:
    async with under_attack() as (echo, attacker):
        block = raw.header_block(raw.GRPC_HEADERS + fields)
        pieces = [block[start : start + 16_000] for start in range(0, len(block), 16_000)]
        attacker.send(raw.frame(raw.HEADERS, 0, 1, pieces[0]))
        for index, piece in enumerate([*pieces[1:], b""]):
            attacker.send(raw.frame(raw.CONTINUATION, raw.END_HEADERS if index == len(pieces) - 1 else 0, 1, piece))
        await attacker.until_closed()
        assert attacker.goaway is not None
        assert not echo.hanging


async def test_header_bomb_by_indexed_repetition() -> None:
    """One 4,000-byte value put in the table, then named 10,000 times by one byte each."""
    async with under_attack() as (echo, attacker):
        big = b"\x40" + raw._integer(3, 7) + b"x-b" + raw._integer(4000, 7) + b"v" * 4000
        attacker.send(
            raw.frame(raw.HEADERS, raw.END_HEADERS, 1, raw.header_block(raw.GRPC_HEADERS) + big + b"\xbe" * 10_000)
        )
        await attacker.until_closed()
        assert attacker.goaway is not None
        assert not echo.hanging


async def test_settings_flood_in_small_doses() -> None:
    async with under_attack(FEW) as (_, attacker):
        for _ in range(150):
            attacker.send(raw.settings())
            with contextlib.suppress(EOFError):
                await attacker.until_frame(raw.SETTINGS)
        await attacker.until_closed()
        assert attacker.goaway == (ENHANCE_YOUR_CALM, b"too_many_control_frames")


async def test_ping_flood_where_no_interval_is_asked_for() -> None:
    """Read each answer, so that it is the pings that are too many, not the answers that wait."""
    limits = ServerLimits(ping_interval_min_s=0.0, control_burst=100, control_per_s=1)
    async with under_attack(limits) as (_, attacker):
        with contextlib.suppress(EOFError):
            for _ in range(200):
                attacker.send(raw.frame(raw.PING, 0, 0, bytes(8)))
                await attacker.until_frame(raw.PING)
        assert attacker.goaway == (ENHANCE_YOUR_CALM, b"too_many_control_frames")


async def test_the_fourth_early_ping_without_calls_is_too_many() -> None:
    async with under_attack() as (_, attacker):
        for _ in range(3):
            attacker.send(raw.frame(raw.PING, 0, 0, bytes(8)))
            assert (await attacker.until_frame(raw.PING))[1] == raw.ACK
        attacker.send(raw.frame(raw.PING, 0, 0, bytes(8)))
        await attacker.until_closed()
        assert attacker.goaway == (ENHANCE_YOUR_CALM, b"too_many_pings")


async def test_pings_with_calls_are_allowed_at_the_interval() -> None:
    limits = ServerLimits(ping_interval_min_s=0.01)
    async with under_attack(limits) as (echo, attacker):
        attacker.send(raw.headers(1) + raw.message(1, b"\0\0\0\0\0", raw.END_STREAM))
        await until(lambda: echo.hanging)
        loop = asyncio.get_running_loop()
        for _ in range(8):
            attacker.send(raw.frame(raw.PING, 0, 0, bytes(8)))
            assert (await attacker.until_frame(raw.PING))[1] == raw.ACK
            next_s = loop.time() + 0.012
            await until(lambda next_s=next_s: loop.time() > next_s)
        echo.hanging[0].reply(b"")
        await attacker.until_frame(raw.HEADERS, 1)


async def test_data_in_tiny_frames() -> None:
    async with under_attack() as (echo, attacker):
        attacker.send(
            raw.headers(1) + raw.message(1, b"\0" + struct.pack(">I", 50_000)) + raw.message(1, b"x") * 40_000
        )
        await attacker.until_closed()
        assert attacker.goaway == (ENHANCE_YOUR_CALM, b"too_many_small_frames")
        assert not echo.hanging


async def test_a_message_may_begin_with_small_frames(echo: s.EchoServer) -> None:
    """The prefix alone, and a few bytes where a window ended: some clients do that for every message."""
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1, raw.grpc_headers(s.BIDI)))
    for number in range(500):
        body = b"%05d" % number * 100
        client.send(raw.message(1, b"\0" + struct.pack(">I", len(body))))
        for start in range(0, 500, 100):
            client.send(raw.message(1, body[start : start + 100]))
        client.send(raw.frame(raw.WINDOW_UPDATE, 0, 1, (505).to_bytes(4, "big")))
        client.send(raw.frame(raw.WINDOW_UPDATE, 0, 0, (505).to_bytes(4, "big")))
    came = 0
    while came < 500 * 505:
        came += len((await client.until_frame(raw.DATA, 1))[3])
    assert client.goaway is None
    client.close()


async def test_unread_messages_cost_what_they_take_not_only_what_they_weigh() -> None:
    async def deaf(call: StreamCall) -> None:
        await asyncio.Event().wait()

    limits = ServerLimits(assembly_bytes=100_000)
    async with under_attack(limits) as (echo, attacker):
        echo.server.stream("/test.Deaf/Stream", deaf)
        attacker.send(raw.headers(1, raw.grpc_headers("/test.Deaf/Stream")))
        attacker.send(raw.message(1, bytes(5) * 3_000) * 2)
        assert (await attacker.until_frame(raw.HEADERS, 1))[1] & raw.END_STREAM
        assert raw.decode_headers(attacker.frames)[1][b"grpc-status"] == b"%d" % Code.RESOURCE_EXHAUSTED
        await until(lambda: not any(one.held_bytes for one in echo.server.connections))


async def test_the_connection_with_most_unfinished_messages_goes_when_all_have_too_many() -> None:
    limits = ServerLimits(process_assembly_bytes=1 << 20)
    async with under_attack(limits) as (echo, _):
        attackers = [await raw.RawClient.connect(echo.target) for _ in range(3)]
        prefix = b"\0" + struct.pack(">I", 500_001)
        for attacker, pieces in zip(attackers, (20, 40, 22), strict=True):
            attacker.send(raw.headers(1) + raw.headers(3))
            for one in (1, 3):
                attacker.send(raw.message(one, prefix))
                for _ in range(pieces // 2):
                    attacker.send(raw.message(one, bytes(16_000)))
            await attacker.until_frame(raw.SETTINGS)
        await attackers[1].until_closed()
        assert attackers[1].goaway == (ENHANCE_YOUR_CALM, b"unfinished_requests")
        await until(lambda: echo.server.answers.held_bytes == 42 * 16_000 + 20)
        for attacker in attackers:
            attacker.close()
        await until(lambda: echo.server.answers.held_bytes == 0)


async def test_open_calls_are_bounded_for_all_connections_together() -> None:
    """Calls of which nothing but the header came."""
    async with under_attack(ServerLimits(process_assembly_bytes=5 << 20)) as (echo, _):
        attackers = [await raw.RawClient.connect(echo.target) for _ in range(3)]
        for attacker, calls in zip(attackers[:2], (150, 400), strict=True):
            attacker.send(b"".join(raw.headers(one) for one in range(1, 2 * calls, 2)))
            await until(lambda calls=calls: calls in [one.open_calls for one in echo.server.connections])
        attackers[2].send(b"".join(raw.headers(one) for one in range(1, 400, 2)))
        await attackers[1].until_closed()
        assert attackers[1].goaway == (ENHANCE_YOUR_CALM, b"unfinished_requests")
        await until(lambda: sum(one.open_calls for one in echo.server.connections) in (350, 351))
        for attacker in attackers:
            attacker.close()
        await until(lambda: echo.server.answers.held_bytes == 0)


async def test_plain_bodies_count_as_unfinished_messages() -> None:
    async def handle(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    plain = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"x"))
    async with s.echo_server(ServerLimits(assembly_bytes=1 << 20), handle) as echo:
        attacker = await raw.RawClient.connect(echo.target)
        for one in range(1, 80, 2):
            attacker.send(raw.headers(one, plain) + raw.message(one, bytes(16_000)) * 2)
        await attacker.until_frame(raw.HEADERS)
        assert next(iter(raw.decode_headers(attacker.frames).values()))[b":status"] == b"503"
        assert echo.server.answers.held_bytes <= (1 << 20) + 40 * CALL_BYTES
        attacker.close()
        await until(lambda: echo.server.answers.held_bytes == 0)


async def test_bodies_over_http_1_1_count_with_those_of_all_connections() -> None:
    """Forty clients begin bodies of 1 MiB; who comes when there are too many is refused, and a short one is served."""
    may_end = asyncio.Event()

    async def handle(request: HttpRequest) -> HttpResponse:
        if request.path == "/wait":
            await may_end.wait()
        return HttpResponse(200, b"short")

    limit = 4 << 20
    async with s.echo_server(ServerLimits(process_assembly_bytes=limit), handle) as echo:
        budget = echo.server.answers
        host, _, port = echo.target.rpartition(":")
        begun = b"PUT /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1048576\r\n\r\n" + bytes(900_000)
        clients = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        for _, writer in clients:
            writer.write(begun)
        answers = [asyncio.create_task(reader.readline()) for reader, _ in clients]
        await until(lambda: sum(answer.done() for answer in answers) >= 35)
        assert {answer.result() for answer in answers if answer.done()} == {b"HTTP/1.1 503 Service Unavailable\r\n"}
        assert 3 << 20 < budget.held_bytes <= limit
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        for answer in answers:
            answer.cancel()
        for _, one in [*clients, (reader, writer)]:
            one.close()
        await until(lambda: budget.held_bytes == 0)

        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PUT /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000))
        await until(lambda: 100_000 < budget.held_bytes < 101_000)  # the header counts too
        may_end.set()
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await until(lambda: budget.held_bytes == 0)
        writer.close()


async def test_unfinished_messages_of_one_connection_are_bounded_together() -> None:
    """Sixty streams, each with a message of which only the last byte is missing."""
    limits = ServerLimits(assembly_bytes=1 << 20)
    async with under_attack(limits) as (echo, attacker):
        prefix = b"\0" + struct.pack(">I", 50_001)
        for one in range(1, 120, 2):
            attacker.send(raw.headers(one))
            for piece in (prefix + bytes(10_000), *[bytes(10_000)] * 4):
                attacker.send(raw.message(one, piece))
        _, _, stream_id, _ = await attacker.until_frame(raw.HEADERS)
        assert stream_id == 41, "twenty messages of 50,000 bytes fit, the 21st does not"
        await until(
            lambda: sum(connection.held_bytes for connection in echo.server.connections) <= limits.assembly_bytes
        )


async def test_a_peer_that_reads_nothing_cannot_make_us_hold_its_answers() -> None:
    """The attacker opens wide windows, asks for an endless stream, and stops reading its socket."""
    limits = ServerLimits(stream_send_buffer_bytes=200_000, transport_buffer_bytes=100_000)
    async with under_attack(limits) as (echo, attacker):
        attacker.reader._transport.pause_reading()
        attacker.send(
            raw.settings((4, 2**31 - 1)) + raw.frame(raw.WINDOW_UPDATE, 0, 0, (2**31 - 65_536).to_bytes(4, "big"))
        )
        attacker.send(raw.headers(1, raw.grpc_headers(s.FLOOD)))
        await until(lambda: any(map(_is_blocked, echo.server.connections)))
        seen = -1
        while seen != echo.flooded:
            seen = echo.flooded
            for _ in range(20):
                await asyncio.sleep(0)
        (connection,) = [one for one in echo.server.connections if one.open_calls]
        assert echo.streams[0].send_buffer_size <= limits.stream_send_buffer_bytes + 70_000
        assert connection._transport.get_write_buffer_size() <= 2 * limits.transport_buffer_bytes + 70_000


async def test_a_peer_that_reads_nothing_is_not_read_for_ever_either() -> None:
    limits = ServerLimits(transport_buffer_bytes=65_536, blocked_input_bytes=100_000, ping_strikes_max=10**9)
    async with under_attack(limits) as (echo, attacker):
        attacker.reader._transport.pause_reading()
        attacker.send(
            raw.settings((4, 2**31 - 1)) + raw.frame(raw.WINDOW_UPDATE, 0, 0, (2**31 - 65_536).to_bytes(4, "big"))
        )
        attacker.send(raw.headers(1, raw.grpc_headers(s.FLOOD)))
        await until(lambda: any(map(_is_blocked, echo.server.connections)))
        ignored = raw.frame(0xFA, 0, 0, bytes(16_000))  # an unknown extension: read and dropped
        while attacker.writer.transport.get_write_buffer_size() == 0:
            attacker.send(ignored * 100)
            await asyncio.sleep(0)
        (connection,) = filter(_is_blocked, echo.server.connections)
        await until(lambda: not connection.reading)


async def test_a_stalled_peer_is_disconnected() -> None:
    limits = ServerLimits(transport_buffer_bytes=65_536, write_stall_timeout_s=0.05)
    async with under_attack(limits) as (echo, attacker):
        attacker.reader._transport.pause_reading()
        attacker.send(
            raw.settings((4, 2**31 - 1)) + raw.frame(raw.WINDOW_UPDATE, 0, 0, (2**31 - 65_536).to_bytes(4, "big"))
        )
        attacker.send(raw.headers(1, raw.grpc_headers(s.FLOOD)))
        await until(lambda: echo.cancelled == ["flood"])


@pytest.mark.parametrize("first", [b"", b"P", b"PRI * HTTP/2.0", raw.PREFACE, b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_half_open_connections_are_closed(first: bytes) -> None:
    limits = ServerLimits(preface_timeout_s=0.05, http1_header_timeout_s=0.05)
    async with s.echo_server(limits) as echo:
        client = await raw.RawClient.connect(echo.target, first)
        await client.reader.read(-1)
        await until(lambda: not echo.server.connections)
        client.close()


async def test_wrong_preface_is_told_so(echo: s.EchoServer) -> None:
    client = await raw.RawClient.connect(echo.target, b"PRI * HTTP/3.0\r\n\r\nSM\r\n\r\n")
    await client.until_closed()
    client.close()


async def test_connection_limit() -> None:
    async with s.echo_server(ServerLimits(connections=3)) as echo:
        clients = [await raw.RawClient.connect(echo.target) for _ in range(3)]
        for client in clients:
            await client.until_frame(raw.SETTINGS)
        fourth = await raw.RawClient.connect(echo.target)
        await fourth.until_closed()
        assert fourth.goaway == (ENHANCE_YOUR_CALM, b"too_many_connections")
        clients[0].close()
        await until(lambda: len(echo.server.connections) == 2)
        async with Channel(echo.target) as channel:
            assert await channel.unary(s.UNARY, b"room again") == b"room again"
        for client in [*clients, fourth]:
            client.close()


async def test_an_address_that_holds_all_connections_gives_way_to_another() -> None:
    async with s.echo_server(ServerLimits(connections=3)) as echo:
        greedy = [await raw.RawClient.connect(echo.target) for _ in range(3)]
        for client in greedy:
            await client.until_frame(raw.SETTINGS)
        others = []
        for number in range(2):
            others.append(await raw.RawClient.connect(echo.target, local_host="127.0.1.1"))
            await others[-1].until_frame(raw.SETTINGS) if number == 0 else await others[-1].until_closed()
        await greedy[2].until_closed()
        assert others[1].goaway == (ENHANCE_YOUR_CALM, b"too_many_connections"), "it has its share"
        assert len(echo.server.connections) == 3
        for client in [*greedy, *others]:
            client.close()


@pytest.mark.long
async def test_a_full_server_lets_go_of_connections_that_only_idle() -> None:
    async with s.echo_server(ServerLimits(connections=3, crowded_idle_s=0.05)) as echo, Channel(echo.target) as busy:
        stream = busy.stream(s.BIDI)
        await stream.send(b"kept")
        assert await stream.receive() == b"kept"
        idle = [await raw.RawClient.connect(echo.target) for _ in range(2)]
        for client in idle:
            await client.until_frame(raw.SETTINGS)
        async with Channel(echo.target) as late:
            assert await late.unary(s.UNARY, b"room", 20, wait_for_ready=True) == b"room"
        await stream.send(b"still")
        assert await stream.receive() == b"still"
        assert any(client.reader.at_eof() or client.reader._buffer for client in idle)
        for client in idle:
            client.close()
        stream.cancel()


async def test_unread_answers_stop_new_calls_not_old_ones() -> None:
    """HTTP/2 windows closed: answers pile up in the engine until the limit, then calls are refused."""
    limits = ServerLimits(connection_send_buffer_bytes=300_000)
    async with under_attack(limits) as (_, attacker):
        body = b"\0" + struct.pack(">I", 100_000) + bytes(100_000)
        pieces = [body[start : start + 16_000] for start in range(0, len(body), 16_000)]
        for one in range(1, 41, 2):
            attacker.send(raw.headers(one, raw.grpc_headers(s.UNARY)))
            for index, piece in enumerate(pieces):
                attacker.send(raw.message(one, piece, raw.END_STREAM if index == len(pieces) - 1 else 0))
        while True:
            kind, flags, stream_id, _ = await attacker.next_frame()
            if kind == raw.HEADERS and flags & raw.END_STREAM:
                break  # a trailers-only answer: refused
        assert stream_id >= 7, "300,000 bytes of answers were taken before"


async def test_error_codes_of_refusals_reach_an_honest_client() -> None:
    async with s.pair(ServerLimits(max_receive_message_bytes=10)) as (_, channel):
        error = await failure(channel.unary(s.UNARY, bytes(11)))
        assert (error.code, error.text) == (
            Code.RESOURCE_EXHAUSTED,
            "grpc: received message larger than max (11 vs. 10)",
        )
