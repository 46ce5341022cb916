"""Compressed requests of a client that means harm: what they cost is counted, and done a little at a time."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from raftkv.loop.timers import DeadlineWheel
from raftkv.rpc import Channel, Server, StreamCall
from raftkv.rpc.framing import PREFIX, frame
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.budget import AnswerBudget
from raftkv.rpc.server.calls import KEPT_TIMES, Environment, Peer, UnaryCall
from raftkv.rpc.server.core import RECEIVE_S, ServerCore
from raftkv.rpc.server.router import Route, Router
from raftkv.rpc.server.stream import ListenedCall, TaskCall
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.loop import failure, until

MIB = 1024 * 1024
LOOK_S = 0.001
"""How far the clock goes each time it is looked at."""
LOOKS = round(RECEIVE_S / LOOK_S) + 1
LOOKS_MAX = 100_000
"""Bounds the looks of one test: more of them would go on for ever."""
UNARY, HEARD, READ = "/test.Packed/Unary", "/test.Packed/Heard", "/test.Packed/Read"


class Heard:
    """Listens to one call."""

    def __init__(self) -> None:
        self.said: list[int | str] = []

    def receive(self, message: bytes) -> None:
        self.said.append(len(message))

    def half_closed(self) -> None:
        self.said.append("half-closed")

    def released(self) -> None:
        self.said.append("released")


class End:
    """A connection whose clock goes on with each look, and what its handlers saw."""

    def __init__(self, limits: ServerLimits | None = None) -> None:
        limits = limits or ServerLimits()
        ticks = iter(range(LOOKS_MAX))
        router = Router()
        self.heard = Heard()
        self.asked: list[int] = []
        self.call: ListenedCall | None = None
        router.add(Route(UNARY, UnaryCall, lambda call, message: self.asked.append(len(message))))
        router.add(Route(HEARD, ListenedCall, self._listen))
        self.environment = Environment(
            clock=lambda: next(ticks) * LOOK_S,
            wheel=DeadlineWheel(lambda when: None),
            spawn=asyncio.ensure_future,
            report=lambda path, error: self.reports.append(error),
            translate=lambda error: None,
            answers=AnswerBudget(limits),
        )
        self.reports: list[BaseException] = []
        self.core = ServerCore(router, limits, self.environment, Peer(identity="address 127.0.0.1"))
        self.core.receive(raw.PREFACE + raw.settings())

    def _listen(self, call: ListenedCall) -> None:
        self.call = call
        call.listen(self.heard)

    def finish(self) -> int:
        """Go on until nothing is left; how many turns that took."""
        turns = 0
        while self.core.h2.is_held:
            self.core.go_on()
            turns += 1
        return turns


def packed(size: int) -> bytes:
    data = gzip.compress(bytes(size))
    return PREFIX.pack(1, len(data)) + data


def asked(stream_id: int, path: str, body: bytes, flags: int = raw.END_STREAM) -> bytes:
    fields = raw.grpc_headers(path, (b"grpc-encoding", b"gzip"))
    return raw.headers(stream_id, fields) + raw.message(stream_id, body, flags)


def test_a_frame_of_bombs_takes_many_turns_and_nothing_passes_it() -> None:
    end = End()
    end.core.receive(asked(1, HEARD, packed(MIB) * 8) + asked(3, UNARY, packed(7)))
    assert end.core.h2.is_held
    assert len(end.heard.said) < 8
    assert end.asked == []
    assert end.finish() >= 8 * (MIB // (128 * 1024)) // LOOKS
    assert end.heard.said == [MIB] * 8 + ["half-closed"]
    assert end.asked == [7]
    assert end.core.held_bytes == 0


def test_turns_are_shorter_while_another_connection_is_served() -> None:
    said: list[int] = []
    for others in (0, 1):
        end = End()
        end.environment.traffic.serves += others
        end.core.receive(asked(1, HEARD, packed(100) * 100))
        said.append(len(end.heard.said))
    assert said[0] > said[1]


def test_one_bomb_is_many_turns_as_well() -> None:
    end = End()
    end.core.receive(asked(1, UNARY, packed(2 * MIB)))
    assert end.core.h2.is_held
    assert end.core.held_bytes > 0
    assert end.finish() >= 2
    assert end.asked == [2 * MIB]
    assert end.core.held_bytes == 0


@pytest.mark.parametrize("how", ["answered", "expired", "lost"])
def test_a_call_that_ends_while_it_is_unpacked(how: str) -> None:
    end = End()
    end.core.receive(asked(1, HEARD, packed(MIB) * 8) + asked(3, UNARY, packed(7)))
    assert end.call is not None
    said = len(end.heard.said)
    if how == "lost":
        end.core.lost()
        end.core.close_calls()
        end.core.go_on()
        assert end.asked == []
    else:
        end.call.finish() if how == "answered" else end.call.expire()
        end.finish()
        assert end.asked == [7]
    assert end.heard.said[said:] == ["released"]
    assert end.core.held_bytes == 0
    assert end.environment.answers.held_bytes == (0 if how == "lost" else 7)  # of the call that is not answered


def test_damaged_data_ends_its_call_alone() -> None:
    end = End()
    good, bad = packed(5), PREFIX.pack(1, 20) + bytes(20)
    end.core.receive(asked(1, HEARD, good + bad + good) + asked(3, UNARY, bad) + asked(5, UNARY, good))
    end.finish()
    assert end.heard.said == [5, "released"]
    assert end.asked == [5]
    assert end.core.pull(MIB).count(b"gzip: invalid header") == 2


def test_messages_of_nothing_do_not_hold_up_what_is_behind_them() -> None:
    """Clients leave them plain, though they compress others."""
    end = End()
    end.core.receive(asked(1, HEARD, frame(b"") * 3, 0) + raw.message(1, packed(5), raw.END_STREAM))
    assert end.heard.said == [0, 0, 0, 5, "half-closed"]
    end.core.receive(asked(3, UNARY, frame(b"") * 2) + asked(5, HEARD, frame(b"") + PREFIX.pack(2, 0)))
    end.finish()
    assert end.heard.said[5:] == [0, "released"]
    assert end.core.open_calls == 1  # the first, whose listener has not answered
    assert end.core.held_bytes == 0


def test_a_connection_that_is_ended_while_it_is_unpacked_is_not_unpacked_any_more() -> None:
    """Not what is broken of it either, which no step would ever pass."""
    end = End(ServerLimits(process_assembly_bytes=MIB))
    whole = gzip.compress(bytes(2 * MIB))
    broken = whole[:-8] + bytes(4) + whole[-4:]
    end.core.receive(asked(1, UNARY, PREFIX.pack(1, len(broken)) + broken))
    end.finish()
    assert end.core.closing
    assert end.environment.answers.ended_total == 1
    assert not end.core.close_calls()
    assert end.asked == []
    assert end.environment.answers.held_bytes == 0


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "gzip"])
def test_a_message_without_the_end_of_its_request_is_counted(is_packed: bool) -> None:
    """It is whole, and its octets were given back to the windows: thousands of streams may each have one."""
    end = End(ServerLimits(assembly_bytes=8 * MIB))
    extra = ((b"grpc-encoding", b"gzip"),) if is_packed else ()
    body = packed(2 * MIB) if is_packed else frame(bytes(2 * MIB))
    for stream_id in range(1, 13, 2):
        end.core.receive(raw.headers(stream_id, raw.grpc_headers(UNARY, *extra)))
        for at in range(0, len(body), 16_384):
            end.core.receive(raw.message(stream_id, body[at : at + 16_384]))
            end.finish()
    assert 6 * MIB <= end.core.held_bytes <= 8 * MIB
    assert end.core.open_calls == end.core.held_bytes // (2 * MIB)
    end.core.receive(raw.message(1, b"", raw.END_STREAM))
    assert end.asked == [2 * MIB]
    assert end.core.held_bytes <= 6 * MIB
    end.core.receive(b"".join(raw.reset(stream_id) for stream_id in range(3, 13, 2)))
    end.finish()
    assert end.core.held_bytes == 0


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "gzip"])
async def test_unread_messages_are_counted_until_they_are_read(is_packed: bool) -> None:
    """What was given back before they were whole, and what they are beyond their octets."""
    limits = ServerLimits()
    end = End(limits)
    go, read = asyncio.Event(), []

    async def reader(call: TaskCall) -> None:
        await go.wait()
        while (message := await call.receive()) is not None:
            read.append(len(message))

    router = Router()
    router.add(Route(READ, TaskCall, reader))
    end.core = ServerCore(router, limits, end.environment, Peer(identity="address 127.0.0.1"))
    end.core.receive(raw.PREFACE + raw.settings())
    extra = ((b"grpc-encoding", b"gzip"),) if is_packed else ()
    body = packed(2 * MIB) if is_packed else frame(bytes(2 * MIB))
    end.core.receive(raw.headers(1, raw.grpc_headers(READ, *extra)))
    for at in range(0, len(body), 16_384):
        end.core.receive(raw.message(1, body[at : at + 16_384]))
        end.finish()
    assert end.core.held_bytes > 1.5 * MIB
    go.set()
    await until(lambda: read)
    assert end.core.held_bytes == 0
    end.core.receive(raw.message(1, b"", raw.END_STREAM))
    await until(lambda: end.core.open_calls == 0)


async def test_large_requests_are_counted_until_they_are_answered() -> None:
    """What they ask for may wait for a leader, a lock or a quorum: thousands of calls of one connection may."""
    limits = ServerLimits(process_assembly_bytes=16 * MIB)
    end = End(limits)
    calls: list[UnaryCall] = []
    router = Router()
    router.add(Route(UNARY, UnaryCall, lambda call, message: calls.append(call)))

    async def reader(call: TaskCall) -> None:
        await call.receive()
        call.send_headers()
        await asyncio.Event().wait()

    router.add(Route(READ, TaskCall, reader))
    end.core = ServerCore(router, limits, end.environment, Peer(identity="address 127.0.0.1"))
    end.core.receive(raw.PREFACE + raw.settings())
    answers = end.environment.answers

    async def ask(stream_id: int, path: str) -> None:
        end.core.receive(asked(stream_id, path, packed(2 * MIB)))
        end.finish()
        for _ in range(5):
            await asyncio.sleep(0)

    for stream_id in (1, 3):
        await ask(stream_id, UNARY)
    assert answers.held_bytes == 4 * MIB
    await ask(5, READ)
    assert answers.held_bytes == end.core.held_size() == 4 * MIB + KEPT_TIMES * 2 * MIB
    calls[0].reply(b"")
    assert answers.held_bytes == 2 * MIB + KEPT_TIMES * 2 * MIB
    end.core.receive(raw.reset(3) + raw.reset(5))
    end.finish()
    assert answers.held_bytes == 0
    for stream_id in range(7, 13, 2):
        await ask(stream_id, READ)
    assert end.core.closing
    assert answers.held_bytes == 0
    assert answers.ended_total == 1
    end.core.close_calls()
    assert end.reports == []


async def test_a_handler_need_not_know_that_its_call_is_over(echo: s.EchoServer) -> None:
    """It was given up over its head; the header that it sends then is no failure of its own."""

    async def given_up(call: StreamCall) -> None:
        await call.receive()
        call.fail(8, "given up")
        call.send_headers()

    echo.server.stream(READ, given_up)
    async with Channel(echo.target) as channel, channel.stream(READ) as stream:
        await stream.send(b"")
        assert (await failure(stream.receive())).text == "given up"
    assert echo.reported == []


async def test_a_call_above_the_limit_of_its_connection_is_refused_alone() -> None:
    """It came in many pieces, of which nothing is left: it is no sender of crumbs."""
    async with s.echo_server(ServerLimits(assembly_bytes=4 * MIB)) as echo:
        echo.server.stream(READ, lambda call: asyncio.Event().wait())
        client = await raw.RawClient.connect(echo.target)
        body = frame(bytes(2 * MIB))
        for stream_id in (1, 3, 5):
            client.send(raw.headers(stream_id, raw.grpc_headers(READ)))
            for at in range(0, len(body), 16_384):
                client.send(raw.message(stream_id, body[at : at + 16_384]))
        client.send(raw.frame(raw.PING, 0, 0, bytes(8)))
        await client.until_frame(raw.PING)
        refused = {one[2] for one in client.frames if one[0] == raw.HEADERS and one[1] & raw.END_STREAM}
        assert 1 <= len(refused) <= 2
        assert client.goaway is None
        client.close()


async def test_requests_of_calls_with_a_task_are_counted_as_what_is_kept_of_them() -> None:
    """A lock is waited for with its request, message and key: 2,000 calls with long names took 2.7 GB, not .3."""

    async def wait(message: bytes, call: UnaryCall) -> bytes:
        await asyncio.Event().wait()
        return b""

    server = Server()
    server.unary_async(UNARY, wait)
    async with s.channel_to(server) as channel:
        calls = [channel.unary(UNARY, bytes(size)) for size in (100, 10_000, 200_000)]
        await until(lambda: server.answers.held_bytes == KEPT_TIMES * 210_000)
        calls[2].cancel()
        await until(lambda: server.answers.held_bytes == KEPT_TIMES * 10_000)
        calls[1].cancel()
        await until(lambda: server.answers.held_bytes == 0)
