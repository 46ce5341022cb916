"""Answers that no client reads: what they may take, of a connection and of the process, and who has to go."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from raftkv.loop.cycle_free import FREE_BYTES_PER_STEP, free_in_steps
from raftkv.rpc import Channel, Code, HttpRequest, HttpResponse, RpcError, ServerLimits, UnaryCall
from raftkv.rpc.http2 import RESPONSE_HEADERS, ServerConnection
from raftkv.rpc.server import core as server_core
from raftkv.rpc.server.budget import CONNECTION_FULL, GREEDIEST, NOT_FINISHED, NOT_READ, AnswerAccount, AnswerBudget
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.attacks.test_attacks import under_attack
from tests.rpc.conftest import Certificates
from tests.rpc.loop import failure, until

MIB = 1024 * 1024
BIG = "/test.Echo/Big"
FULL = (
    f"raftkv: address 127.0.0.1 has its share of the {4 * MIB} response bytes that may wait for all clients: "
    "each user, certificate or address has one"
)
ENHANCE_YOUR_CALM = 11
CLOSED_WINDOWS = raw.PREFACE + raw.settings((4, 0)) + raw.frame(raw.SETTINGS, raw.ACK, 0)
WIDE_WINDOWS = (
    raw.PREFACE
    + raw.settings((4, 2**31 - 1))
    + raw.frame(raw.WINDOW_UPDATE, 0, 0, (2**31 - 65_536).to_bytes(4, "big"))
    + raw.frame(raw.SETTINGS, raw.ACK, 0)
)


def ask(first: int, count: int, size: int, path: str = BIG) -> bytes:
    """``count`` requests for answers of ``size`` bytes, on streams from ``first`` on."""
    body = str(size).encode()
    request = b"\0" + len(body).to_bytes(4, "big") + body
    return b"".join(
        raw.headers(one, raw.grpc_headers(path)) + raw.message(one, request, raw.END_STREAM)
        for one in range(first, first + 2 * count, 2)
    )


def serve_big(echo: s.EchoServer) -> list[UnaryCall]:
    """Serve answers of any size; return the calls that came."""
    calls: list[UnaryCall] = []

    def big(call: UnaryCall, message: bytes) -> None:
        calls.append(call)
        call.reply(bytes(int(message)))

    echo.server.unary(BIG, big)
    return calls


async def refusals(client: raw.RawClient, count: int) -> list[tuple[bytes, str]]:
    """Code and text of ``count`` answers that consist of a header alone."""
    streams: list[int] = []
    while len(streams) < count:
        kind, flags, stream_id, _ = await client.next_frame()
        if kind == raw.HEADERS and flags & raw.END_STREAM:
            streams.append(stream_id)
    fields = raw.decode_headers(client.frames)
    return [(fields[one][b"grpc-status"], fields[one][b"grpc-message"].decode()) for one in streams]


async def test_a_burst_of_requests_cannot_queue_more_answers_than_the_limit() -> None:
    """All requests come in one read: the limit holds when an answer is made, not when the next bytes arrive."""
    limits = ServerLimits(connection_send_buffer_bytes=8 * MIB)
    async with under_attack(limits) as (echo, _):
        calls = serve_big(echo)
        attacker = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        attacker.send(ask(1, 100, MIB - 5))
        assert await refusals(attacker, 92) == [(b"8", CONNECTION_FULL)] * 92
        assert len(calls) == 100
        assert echo.server.answers.used_bytes <= 8 * MIB
        attacker.close()
        await until(lambda: echo.server.answers.used_bytes == 0)


async def test_an_answer_counts_whole_until_its_last_byte_has_left() -> None:
    """The engine keeps it whole: a client that takes all but one byte has freed nothing."""
    limits = ServerLimits(connection_send_buffer_bytes=8 * MIB)
    first = raw.PREFACE + raw.settings((4, MIB - 1)) + raw.frame(raw.SETTINGS, raw.ACK, 0)
    async with s.echo_server(limits) as echo:
        serve_big(echo)
        client = await raw.RawClient.connect(echo.target, first)
        client.send(raw.frame(raw.WINDOW_UPDATE, 0, 0, (2**30).to_bytes(4, "big")))
        client.send(ask(1, 9, MIB - 5))
        assert await refusals(client, 1) == [(b"8", CONNECTION_FULL)]
        client.close()


@pytest.mark.long
async def test_connections_that_do_not_read_go_first_when_the_process_is_short() -> None:
    unit = MIB // 8  # all is queued well within the grace, on a busy machine too
    limits = ServerLimits(
        connection_send_buffer_bytes=20 * unit, process_send_buffer_bytes=40 * unit, reading_grace_s=1.5
    )
    async with under_attack(limits) as (echo, _):
        serve_big(echo)
        attackers = []
        for size in (1, 2, 3, 4, 5, 6):
            attackers.append(await raw.RawClient.connect(echo.target, CLOSED_WINDOWS))
            attackers[-1].send(ask(1, 4 - size % 2, size * unit))
            await attackers[-1].until_frame(raw.HEADERS)
        loop = asyncio.get_running_loop()
        full_s = loop.time()
        await until(lambda: loop.time() > full_s + 1.5)
        async with Channel(echo.target) as honest:
            assert len(await honest.unary(BIG, str(8 * unit).encode(), 20)) == 8 * unit
            await attackers[3].until_closed()
            assert attackers[3].goaway == (ENHANCE_YOUR_CALM, NOT_READ), "the one that holds most"
            assert len(await honest.unary(BIG, str(8 * unit).encode(), 20)) == 8 * unit
        assert echo.server.answers.used_bytes <= 40 * unit
        for one in attackers:
            one.close()


async def test_a_full_process_refuses_large_answers_and_serves_small_ones() -> None:
    """All that hold much do read, just now: no connection is ended, the new call fails."""
    limits = ServerLimits(process_send_buffer_bytes=4 * MIB, reading_grace_s=1000)
    async with s.echo_server(limits) as echo, Channel(echo.target) as channel:
        serve_big(echo)
        client = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        client.send(ask(1, 1, 4 * MIB - 100_000))
        await until(lambda: echo.server.answers.used_bytes > 3 * MIB)
        error = await failure(channel.unary(BIG, b"400000", 10))
        assert (error.code, error.text) == (Code.RESOURCE_EXHAUSTED, FULL)
        assert len(await channel.unary(BIG, b"50000", 10)) == 50_000
        client.close()
        await until(lambda: echo.server.answers.used_bytes == 0)
        assert len(await channel.unary(BIG, b"400000", 10)) == 400_000


async def test_servers_share_a_budget() -> None:
    limits = ServerLimits(process_send_buffer_bytes=4 * MIB, reading_grace_s=1000)
    async with s.echo_server(limits) as first, s.echo_server(limits) as second, Channel(second.target) as channel:
        second.server.answers = first.server.answers
        second.server._environment = None
        serve_big(first)
        serve_big(second)
        client = await raw.RawClient.connect(first.target, CLOSED_WINDOWS)
        client.send(ask(1, 1, 4 * MIB - 100_000))
        await until(lambda: first.server.answers.used_bytes > 3 * MIB)
        assert (await failure(channel.unary(BIG, b"400000", 10))).text == FULL
        client.close()


async def test_a_handler_can_ask_how_much_room_there_is() -> None:
    limits = ServerLimits(connection_send_buffer_bytes=10 * MIB)
    rooms: list[int] = []

    def handle(call: UnaryCall, message: bytes) -> None:
        rooms.append(call.room_bytes())
        call.reply(bytes(int(message)))

    async with s.echo_server(limits) as echo:
        echo.server.unary("/test.Room/Ask", handle)
        client = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        client.send(ask(1, 3, 4 * MIB, "/test.Room/Ask"))
        await refusals(client, 1)
        assert rooms == [10 * MIB, 6 * MIB, 2 * MIB]
        client.close()


async def test_streams_that_let_nothing_through_are_reset_and_others_stay() -> None:
    limits = ServerLimits(send_stall_timeout_s=0.2)
    async with under_attack(limits) as (echo, _):
        client = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        client.send(raw.headers(1, raw.grpc_headers(s.FLOOD)))
        client.send(raw.headers(3, raw.grpc_headers(s.BIDI)))
        client.send(raw.headers(5, raw.grpc_headers(s.UNARY)) + raw.message(5, b"\0\0\0\0\1x", raw.END_STREAM))
        reset = set()
        while reset != {1, 5}:
            kind, _, stream_id, payload = await client.next_frame()
            if kind == raw.RST_STREAM:
                assert payload == ENHANCE_YOUR_CALM.to_bytes(4, "big")
                reset.add(stream_id)
        await until(lambda: echo.cancelled == ["flood"])
        assert client.goaway is None, "the stream that has nothing queued is left alone"
        await until(lambda: echo.server.answers.used_bytes == 0)
        client.close()


async def test_a_connection_whose_own_window_stays_closed_is_ended() -> None:
    limits = ServerLimits(send_stall_timeout_s=0.2)
    async with under_attack(limits) as (echo, _):
        client = await raw.RawClient.connect(echo.target)
        client.send(raw.headers(1, raw.grpc_headers(s.FLOOD)))
        await client.until_closed()
        assert client.goaway == (ENHANCE_YOUR_CALM, NOT_READ)
        await until(lambda: echo.server.answers.used_bytes == 0)
        client.close()


async def test_a_stream_that_trickles_is_one_that_stands_still() -> None:
    limits = ServerLimits(send_stall_timeout_s=0.2)
    async with under_attack(limits) as (echo, _):
        client = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        client.send(raw.headers(1, raw.grpc_headers(s.FLOOD)))
        kind = None
        while kind != raw.RST_STREAM:
            client.send(raw.frame(raw.WINDOW_UPDATE, 0, 1, (1).to_bytes(4, "big")))
            kind = (await client.next_frame())[0]
            await asyncio.sleep(0.001)  # the pace of the trickle: a byte at a time, but fast, is progress
        client.close()


async def test_streams_wait_while_the_process_is_short_and_go_on_afterwards() -> None:
    limits = ServerLimits(process_send_buffer_bytes=4 * MIB, reading_grace_s=1000)
    async with s.echo_server(limits) as echo, Channel(echo.target) as channel:
        serve_big(echo)
        hog = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        hog.send(ask(1, 1, 4 * MIB - 300_000))
        await until(lambda: echo.server.answers.used_bytes > 3 * MIB)
        stream = channel.stream(s.FLOOD)
        assert len(await stream.receive() or b"") == 65_536
        before = echo.flooded
        async with asyncio.timeout(90):
            hog.close()
            while echo.flooded < before + 100:
                await stream.receive()
        stream.cancel()


async def test_a_stream_waits_for_ever_rather_than_fail() -> None:
    """A flood into closed windows holds its own send buffer, not more, however short the process is."""
    limits = ServerLimits(process_send_buffer_bytes=4 * MIB, reading_grace_s=1000)
    async with s.echo_server(limits) as echo:
        clients = [await raw.RawClient.connect(echo.target, CLOSED_WINDOWS) for _ in range(8)]
        for client in clients:
            client.send(raw.headers(1, raw.grpc_headers(s.FLOOD)))
        await until(lambda: len(echo.streams) == 8)
        seen = -1
        while seen != echo.flooded:
            seen = echo.flooded
            for _ in range(50):
                await asyncio.sleep(0)
        assert echo.server.answers.used_bytes <= 4 * MIB
        assert echo.cancelled == []
        for client in clients:
            client.close()


@pytest.mark.long
async def test_large_honest_answers_pass_with_the_defaults() -> None:
    async with s.pair() as (echo, channel):
        serve_big(echo)
        assert len(await channel.unary(BIG, b"300000000", 30)) == 300_000_000
        answers = await asyncio.gather(*(channel.unary(BIG, b"30000000", 30) for _ in range(8)))
        assert [len(one) for one in answers] == [30_000_000] * 8
        await until(lambda: echo.server.answers.used_bytes == 0)


async def test_nothing_stays_charged_however_calls_end() -> None:
    async with s.pair() as (echo, channel):
        serve_big(echo)
        for _ in range(20):
            stream = channel.stream(s.FLOOD)
            await stream.receive()
            stream.cancel()
            channel.unary(BIG, b"1000000").cancel()
            assert (await failure(channel.unary(s.FAIL, b"x" * 1000, 10))).code == Code.NOT_FOUND
            counted = channel.stream(s.COUNT)
            await counted.send(b"300")
            counted.half_close()
            assert len([one async for one in counted]) == 300
        late = channel.unary(BIG, b"1000000")
        await asyncio.sleep(0)
        late.cancel()
        await until(lambda: not any(connection.open_calls for connection in echo.server.connections))
        await until(lambda: echo.server.answers.used_bytes == 0)
        (account,) = echo.server.answers.accounts
        assert account.total == 0
        assert not account.answers
    assert not echo.server.answers.accounts


async def test_queue_of_a_lost_connection_is_freed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving 300 MB back to the system at once takes 60 ms."""
    left: list[int] = []

    async def watched(drop: Callable[[int], bool]) -> None:
        h2 = drop.__self__
        left.append(h2.queued_body_size())
        for _ in free_in_steps(drop).__await__():
            left.append(h2.queued_body_size())
            await asyncio.sleep(0)
        left.append(h2.queued_body_size())

    monkeypatch.setattr(server_core, "free_in_steps", watched)
    async with s.echo_server() as echo:
        calls = serve_big(echo)
        client = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        client.send(ask(1, 64, MIB))
        await until(lambda: len(calls) == 64)
        client.close()
        await until(lambda: len(left) > 1 and left[-1] == 0)
    assert left[0] >= 64 * MIB
    assert max(before - after for before, after in pairwise(left)) <= FREE_BYTES_PER_STEP + MIB + 5


@pytest.mark.long
async def test_queues_of_reset_streams_are_freed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asked for 512 MiB and reset its streams cost a turn of 116 to 231 ms, as often as it liked."""
    freed: list[int] = []

    async def watched(drop: partial[bool]) -> None:
        (outboxes,) = drop.args
        left = [sum(outbox.size_bytes for outbox in outboxes)]
        left += [sum(outbox.size_bytes for outbox in outboxes) for _ in free_in_steps(drop).__await__()]
        left.append(sum(outbox.size_bytes for outbox in outboxes))
        assert max(before - after for before, after in pairwise(left)) <= FREE_BYTES_PER_STEP + MIB + 5
        freed.append(left[0] - left[-1])
        await asyncio.sleep(0)

    monkeypatch.setattr(server_core, "free_in_steps", watched)
    async with s.echo_server() as echo:
        calls = serve_big(echo)
        client = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        client.send(ask(1, 64, MIB))
        await until(lambda: len(calls) == 64)
        client.send(b"".join(raw.reset(stream_id) for stream_id in range(1, 128, 2)))
        await until(lambda: sum(freed) >= 64 * MIB)
        await until(lambda: echo.server.answers.used_bytes == 0)
        client.close()


class Deaf:
    """Hears nothing of a connection."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@pytest.mark.parametrize(("streams", "size_bytes"), [(2, 40 * MIB), (1_000, 40_000)])
def test_queues_of_streams_are_freed_in_steps(streams: int, size_bytes: int) -> None:
    h2 = ServerConnection(Deaf(), ServerLimits())
    h2.receive(CLOSED_WINDOWS + ask(1, streams, 1))
    for stream_id in range(1, 2 * streams, 2):
        h2.send_headers(stream_id, RESPONSE_HEADERS)
        h2.send_in_slices(stream_id, bytes(size_bytes))
    left = [h2.queued_body_size()]
    left += [h2.queued_body_size() for _ in free_in_steps(h2.drop).__await__()]
    left.append(h2.queued_body_size())
    assert left[0] >= streams * size_bytes
    assert left[-1] == 0
    assert max(before - after for before, after in pairwise(left)) <= 2 * FREE_BYTES_PER_STEP


class Connection:
    """A connection of an identity that holds so many bytes of unfinished requests, and why it was ended."""

    def __init__(self, budget: AnswerBudget, limits: ServerLimits, identity: str, held: int = 0) -> None:
        self.held = held
        self.ended = b""
        self.account = AnswerAccount(budget, limits, lambda: 0.0, self, identity)

    def held_size(self) -> int:
        return self.held

    def queued_size(self) -> int:
        return self.account.total

    def queued_by_streams(self) -> list[int]:
        return []

    def give_up(self, reason: bytes) -> None:
        self.ended = reason

    def wake(self) -> None:
        """It has nothing to send."""

    def answer(self, size: int) -> RpcError | None:
        """Queue an answer."""
        error = self.account.ask(size)
        if error is None:
            self.account.answers[1] = self.account.answers.get(1, 0) + size
            self.account.room -= size
        return error


def test_an_identity_with_many_connections_that_read_gives_way_to_another() -> None:
    """Each of them held less than the one connection of the other: that one was refused, or ended."""
    limits = ServerLimits(process_send_buffer_bytes=16 * MIB, reading_grace_s=1000)
    budget = AnswerBudget(limits)
    greedy = [Connection(budget, limits, "address 10.0.0.6") for _ in range(8)]
    for number, one in enumerate(greedy):
        assert one.answer(MIB + number * 100_000) is None
    last = Connection(budget, limits, "address 10.0.0.6")
    error = last.answer(7 * MIB)
    assert error is not None
    assert "address 10.0.0.6 has its share of the 16777216 response bytes" in error.text
    honest = Connection(budget, limits, "address 10.0.0.7")
    assert honest.answer(2 * MIB) is None
    assert honest.account.room_bytes() >= 3 * MIB
    assert honest.answer(4 * MIB) is None
    assert [one.ended for one in greedy] == [b""] * 7 + [GREEDIEST]
    assert honest.answer(8 * MIB) is not None, "it would hold more than any other"
    assert not honest.ended
    assert budget.used_bytes <= 16 * MIB


def test_of_unfinished_requests_the_largest_of_the_greediest_identity_is_ended() -> None:
    limits = ServerLimits()
    budget = AnswerBudget(limits)
    honest = Connection(budget, limits, "address 10.0.0.7", held=5 * MIB)
    greedy = [Connection(budget, limits, "address 10.0.0.6", held=size * MIB) for size in (3, 4, 1)]
    budget.drop_greediest()
    assert (honest.ended, [one.ended for one in greedy]) == (b"", [b"", NOT_FINISHED, b""])
    budget.drop_greediest()
    assert honest.ended == NOT_FINISHED, "what is left of the others is less"


def test_of_equal_holders_the_oldest_is_ended() -> None:
    """Any of them was, by the address of its object: a request that had just come whole, too."""
    limits = ServerLimits()
    budget = AnswerBudget(limits)
    equals = [Connection(budget, limits, "address 10.0.0.6", held=2 * MIB) for _ in range(20)]
    for number in range(1, 21):
        budget.drop_greediest()
        assert [one.ended for one in equals] == [NOT_FINISHED] * number + [b""] * (20 - number)


def _connect(target: str, context: ssl.SSLContext | None) -> socket.socket:
    """A client that reads nothing yet, and whose kernel takes little for it."""
    host, _, port = target.rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    return sock if context is None else context.wrap_socket(sock, server_hostname=host)


def _read(sock: socket.socket, size: int) -> None:
    while size > 0:
        size -= len(sock.recv(65_536)) or size


@pytest.mark.parametrize("kind", ["plain", "tls", "http1"])
async def test_what_the_socket_has_taken_counts_no_longer(kind: str, certificates: Certificates) -> None:
    """Count them no longer at once: they counted for up to 15 s more, while other clients waited for the room."""
    size = 200_000

    async def answer(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, bytes(size))

    server_context = certificates.server_context() if kind == "tls" else None
    client_context = certificates.client_context() if kind == "tls" else None
    async with s.echo_server(ServerLimits(send_stall_timeout_s=1e6), answer, ssl=server_context) as echo:
        serve_big(echo)
        client = await asyncio.to_thread(_connect, echo.target, client_context)
        with client:
            await until(lambda: echo.server.connections)
            (connection,) = echo.server.connections
            transport: Any = connection._transport
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" if kind == "http1" else WIDE_WINDOWS + ask(1, 1, size))
            await until(lambda: echo.server.answers.used_bytes > size // 2)
            reading = asyncio.create_task(asyncio.to_thread(_read, client, size))
            await until(lambda: not transport.get_write_buffer_size())
            assert echo.server.answers.used_bytes == 0
            await reading
