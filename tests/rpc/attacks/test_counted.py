"""Bytes of requests are given back however their calls end: random calls, plain and compressed, on three
connections of one process, and nothing is counted when none of them is left.
"""

from __future__ import annotations

import asyncio
import gzip
import random

import pytest

from raftkv.loop.timers import DeadlineWheel
from raftkv.rpc.framing import PREFIX, frame
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.budget import AnswerBudget
from raftkv.rpc.server.calls import Environment, Peer, UnaryCall
from raftkv.rpc.server.core import ServerCore
from raftkv.rpc.server.router import Route, Router
from raftkv.rpc.server.stream import ListenedCall, TaskCall
from raftkv.rpc.status import RpcError
from tests.long import long_except
from tests.rpc import raw

MIB = 1024 * 1024
FRAME_BYTES = 16_384
STEPS = 60
PATHS = UNARY, HEARD, READ = "/test.Counted/Unary", "/test.Counted/Heard", "/test.Counted/Read"
REFUSED = RpcError(3, "refused")


class Client:
    """One connection, its next stream, its streams, and those of them whose request has not ended."""

    def __init__(self, core: ServerCore) -> None:
        self.core = core
        self.next_id = 1
        self.begun: list[int] = []
        self.open: list[int] = []
        core.receive(raw.PREFACE + raw.settings())

    def receive(self, octets: bytes) -> None:
        """Have the server receive octets, unless it has ended the connection."""
        if not self.core.closing:
            self.core.receive(octets)

    def reset(self, stream_id: int) -> None:
        """Reset a stream."""
        self.begun.remove(stream_id)
        if stream_id in self.open:
            self.open.remove(stream_id)
        self.receive(raw.reset(stream_id))

    def finish(self) -> None:
        """Let the server go on with what it has received."""
        while self.core.h2.is_held:
            self.core.go_on()


class World:
    """Three clients of a server whose handlers do what a seed says."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.now_s = 0.0
        self.reports: list[BaseException] = []
        self.waiting: list[UnaryCall] = []
        self.wheel = DeadlineWheel(lambda when: None)
        limits = ServerLimits(
            process_assembly_bytes=rng.choice((MIB, 8 * MIB, 512 * MIB)),
            assembly_bytes=rng.choice((MIB, 4 * MIB, 64 * MIB)),
        )
        self.answers = AnswerBudget(limits)
        environment = Environment(
            clock=self._clock,
            wheel=self.wheel,
            spawn=asyncio.ensure_future,
            report=lambda path, error: self.reports.append(error),
            translate=lambda error: None,
            answers=self.answers,
        )
        router = Router()
        router.add(Route(UNARY, UnaryCall, self._answer))
        router.add(Route(HEARD, ListenedCall, lambda call: call.listen(Heard(call, rng))))
        router.add(Route(READ, TaskCall, self._read))
        self.clients = [
            Client(ServerCore(router, limits, environment, Peer(identity="address 127.0.0.1"))) for _ in range(3)
        ]

    def _clock(self) -> float:
        self.now_s += 0.0007
        return self.now_s

    def _answer(self, call: UnaryCall, message: bytes) -> None:
        what = self.rng.random()
        if what < 0.3:
            call.reply(bytes(self.rng.choice((0, 10, 100_000))))
        elif what < 0.4:
            raise REFUSED
        else:
            self.waiting.append(call)

    async def _read(self, call: TaskCall) -> None:
        while (message := await call.receive()) is not None:
            what = self.rng.random()
            if what < 0.2:
                call.put_back(message)
                await call.receive()
            elif what < 0.4:
                await asyncio.sleep(0)
            elif what < 0.5:
                return
            elif what < 0.6:
                raise REFUSED
            elif what < 0.7:
                await asyncio.Event().wait()
            elif what < 0.8:
                call.send_nowait(bytes(self.rng.choice((1, 200_000))))

    def step(self) -> None:
        """Do something with one of the connections."""
        rng = self.rng
        client, what = rng.choice(self.clients), rng.random()
        if client.core.closing:
            return
        if what < 0.45 or not client.open:
            self._begin(client)
        elif what < 0.8:
            self._say(client, rng.choice(client.open))
        elif what < 0.87:
            client.reset(client.open[-1])
        elif what < 0.93 and self.waiting:
            call = self.waiting.pop(rng.randrange(len(self.waiting)))
            if not call.done:
                call.reply(b"") if rng.random() < 0.5 else call.fail(5, "failed")
        elif what < 0.98:
            self.now_s += 0.1
            self.wheel.expire(self.now_s)
        else:
            lose(client.core)
        client.core.pull(rng.choice((1000, 10 * MIB)))

    def _begin(self, client: Client) -> None:
        extra = [(b"grpc-encoding", b"gzip")] if self.rng.random() < 0.6 else []
        if self.rng.random() < 0.3:
            extra.append((b"grpc-timeout", b"%dm" % self.rng.choice((0, 1, 50, 500))))
        if self.rng.random() < 0.3:
            extra.append((b"large", b"v" * self.rng.choice((5_000, 15_000))))
        client.receive(raw.headers(client.next_id, raw.grpc_headers(self.rng.choice(PATHS), *extra)))
        client.begun.append(client.next_id)
        client.open.append(client.next_id)
        client.next_id += 2

    def _say(self, client: Client, stream_id: int) -> None:
        body = b"".join(self._message() for _ in range(self.rng.choice((1, 1, 2, 3))))
        if self.rng.random() < 0.3:
            body = body[: self.rng.randrange(len(body) + 1)]
        is_end = self.rng.random() < 0.4
        pieces = [body[at : at + FRAME_BYTES] for at in range(0, len(body), FRAME_BYTES)] or [b""]
        for number, piece in enumerate(pieces, 1):
            is_last = is_end and number == len(pieces)
            client.receive(raw.message(stream_id, piece, raw.END_STREAM if is_last else 0))
            if self.rng.random() < 0.7:
                client.finish()
        if is_end:
            client.open.remove(stream_id)

    def _message(self) -> bytes:
        data = bytes(self.rng.choice((0, 0, 5, 1000, 20_000, 300_000, MIB)))
        if self.rng.random() < 0.4:
            return frame(data)
        packed = gzip.compress(data, 1, mtime=0)
        if self.rng.random() < 0.2:
            packed = packed[:-8] + bytes(4) + packed[-4:]
        return PREFIX.pack(1, len(packed)) + packed


class Heard:
    """Listens to one call, and may end it at any message."""

    def __init__(self, call: ListenedCall, rng: random.Random) -> None:
        self._call = call
        self._rng = rng

    def receive(self, message: bytes) -> None:
        what = self._rng.random()
        if what < 0.1:
            raise REFUSED
        if what < 0.15:
            self._call.finish()

    def half_closed(self) -> None:
        if self._rng.random() < 0.5:
            self._call.finish()

    def released(self) -> None:
        """The call is over."""


def lose(core: ServerCore) -> None:
    """End a connection as its transport does."""
    core.lost()
    while core.close_calls():
        pass


@pytest.mark.parametrize("seed", long_except(range(40), range(10)))
async def test_nothing_is_counted_when_all_calls_are_over(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
        await asyncio.sleep(0)
    for client in world.clients:
        client.finish()
        for stream_id in [*client.begun]:
            client.reset(stream_id)
            client.finish()
        assert client.core.held_size() == 0
    assert world.answers.held_bytes == 0
    for client in world.clients:
        lose(client.core)
    await asyncio.sleep(0)
    assert world.answers.used_bytes == 0
    assert world.reports == []
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
