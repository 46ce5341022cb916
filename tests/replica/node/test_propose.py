"""Sending of proposals: in messages and turns of bounded size, none lost while waiting for a leader."""

from __future__ import annotations

import asyncio
import random

import pytest

from raftkv.apply.applier import Outcome
from raftkv.apply.wire import Kind, decode, encode, versioned
from raftkv.errors import StatusError, TooManyRequestsError
from raftkv.pb import rpc_pb2
from raftkv.raft.types import Entry, Message, MessageType
from raftkv.replica.codec import BatchEncoder
from raftkv.replica.node.node import PASS_ON_BACKLOG_MAX_BYTES, PROPOSE_BYTES_MAX
from raftkv.replica.node.proposals import PACE_MAX_BYTES, PACE_MIN_BYTES, PENDING_BYTES_MAX, SOON_S
from raftkv.server.listening import PEER_LIMITS
from tests.replica.node.node_world import ME, Caller, World
from tests.virtual_loop import NodeLoop, Scheduler

MIB = 1024 * 1024


def put(size_bytes: int) -> tuple[bytes, Caller]:
    request = rpc_pb2.PutRequest(key=b"k", value=bytes(size_bytes))
    return request.SerializeToString(), Caller(request)


class Alice(Caller):
    """A caller apart from the member."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = b"alice"


class Reader:
    """Waits for a linearizable read."""

    is_over = False
    is_served = False

    def ready(self) -> None:
        self.is_served = True

    def fail(self, error: StatusError) -> None:
        raise AssertionError(error)


def ids(messages: list[Message]) -> list[int]:
    return [decode(entry.data)[1] for message in messages for entry in message.entries]


def committed(world: World, messages: list[Message]) -> Message:
    """What member 2, which leads, appends and commits of these proposals."""
    last = world.log.last_index()
    datas = [entry.data for message in messages for entry in message.entries]
    entries = [Entry(1, index, data) for index, data in enumerate(datas, last + 1)]
    commit = last + len(entries)
    return Message(MessageType.APPEND, ME, 2, 1, min(last, 1), last, entries, commit)


@pytest.mark.long
@pytest.mark.parametrize(("count", "size_bytes"), [(100, MIB), (3, 40 * MIB), (5000, 10_000), (20, 100)])
async def test_requests_that_waited_for_a_leader_leave_in_readable_messages(world, count, size_bytes):
    for _ in range(count):
        world.node.submit(Kind.PUT, *put(size_bytes), None)
    await world.turns()
    assert not world.sender.take(MessageType.PROPOSE)
    world.node.receive([world.heartbeat(leader=2)])
    passed_on: list[int] = []
    while len(passed_on) < count:
        await asyncio.sleep(0)
        messages = world.sender.take(MessageType.PROPOSE)
        sizes = [[len(entry.data) for entry in message.entries] for message in messages]
        assert all(sum(size) <= PROPOSE_BYTES_MAX or len(size) == 1 for size in sizes)
        assert sum(map(sum, sizes)) < PACE_MAX_BYTES + PROPOSE_BYTES_MAX + size_bytes + 100
        assert all(len(batch) < PEER_LIMITS.max_receive_message_bytes for batch in BatchEncoder().batches(messages))
        passed_on += ids(messages)
        world.node.receive([committed(world, messages)])  # then comes more
    assert passed_on == list(range(1, count + 1))
    assert not world.failures


async def test_flood_waits_before_the_log_where_identities_take_turns(world: World) -> None:
    """All of it went into the log at once, and what came after it waited for seconds until that was applied."""
    world.node.receive([world.heartbeat(leader=2)])
    await world.turns()
    for _ in range(5_000):
        world.node.submit(Kind.PUT, *put(10), None)
    await world.turns()
    sent = world.sender.take(MessageType.PROPOSE)
    first = ids(sent)
    assert 0 < len(first) <= PACE_MIN_BYTES // 1024
    alice = [world.node.submit(Kind.PUT, put(10)[0], Alice(), None) for _ in range(1_000)]
    await world.turns()
    sent += (more := world.sender.take(MessageType.PROPOSE))
    passed = ids(more)
    assert passed == alice[: len(passed)], "the flood is in the log, not its own entries"
    assert 1 <= len(passed) <= PACE_MIN_BYTES // 1024 // 2, "an equal part of the round"
    world.node.receive([committed(world, sent)])
    await world.turns()
    assert alice[len(passed)] in ids(world.sender.take(MessageType.PROPOSE))
    world.node.receive([world.heartbeat(leader=3, term=2)])
    await world.turns()
    passed_on = ids(world.sender.take(MessageType.PROPOSE))
    assert len(passed_on) == len(first), "what another leader was sent holds up nothing"


def test_flood_never_fills_the_log_however_long_it_lasts() -> None:
    """The flood's own delay was taken for the disk's: after 50 rounds an honest put waited for 4 MB of the flood."""
    under_way: list[Message] = []
    waits_s: list[float] = []

    async def apply(world: World, loop: NodeLoop) -> None:
        """Apply ten entries in a millisecond, 3 ms after they were sent."""
        under_way.extend(world.sender.take(MessageType.PROPOSE))
        await asyncio.sleep(0.003 + 0.0001 * len(ids(under_way)))
        world.node.receive([committed(world, under_way)])
        under_way.clear()
        await world.turns()

    async def scenario(loop: NodeLoop) -> None:
        world = World()
        world.node.receive([world.heartbeat(leader=2)])
        await world.turns()
        while loop.time() < 4.0:
            while world.node.proposals.unsent_bytes < 4 * MIB:
                world.node.submit(Kind.PUT, *put(10), None)
            alice, began_at = world.node.submit(Kind.PUT, put(10)[0], Alice(), None), loop.time()
            await world.turns()
            while world.node.proposals.is_waiting(alice):
                await apply(world, loop)
            waits_s.append(loop.time() - began_at)

    scheduler = Scheduler(random.Random(1))
    loop = NodeLoop(scheduler)
    task = loop.create_task(scenario(loop))
    scheduler.run_until(5.0)
    assert task.done()
    task.result()
    assert len(waits_s) > 20
    assert max(waits_s) < 0.1, f"{max(waits_s):.3f} s"


@pytest.mark.parametrize("backlog", [None, PASS_ON_BACKLOG_MAX_BYTES + 1])
async def test_nothing_is_passed_on_to_a_leader_that_is_away_or_behind(world: World, backlog: int | None) -> None:
    world.node.receive([world.heartbeat(leader=2)])
    await world.turns()
    world.sender.backlog = backlog
    world.node.submit(Kind.PUT, *put(10), None)
    assert await world.turns() < 3, "it asks again at the next tick, not over and over"
    assert not world.sender.take(MessageType.PROPOSE)
    world.sender.backlog = 0
    world.node.receive([world.heartbeat(leader=2)])
    await world.turns()
    assert ids(world.sender.take(MessageType.PROPOSE)) == [1]


async def test_nothing_is_passed_on_to_a_new_leader_that_is_away(world: World) -> None:
    """What had waited for a leader was sent in the turn that brought one, and lost: its callers waited in vain."""
    world.sender.backlog = None
    world.node.submit(Kind.PUT, *put(10), None)
    world.node.receive([world.heartbeat(leader=2)])
    await world.turns()
    assert not world.sender.take(MessageType.PROPOSE)
    world.sender.backlog = 0
    world.node.receive([world.heartbeat(leader=2)])
    await world.turns()
    assert ids(world.sender.take(MessageType.PROPOSE)) == [1]


async def lead(world: World) -> None:
    """Let the member be the leader of its cluster of one."""
    world.node.raw.campaign()
    world.node.receive([])
    await world.turns()


async def test_more_than_the_log_takes_at_once_is_taken_little_by_little() -> None:
    world = World(voters=(1,), max_uncommitted_bytes=4 * MIB, max_inflight_bytes=0)
    callers = []
    for _ in range(30):
        body, caller = put(MIB)
        world.node.submit(Kind.PUT, body, caller, None)
        callers.append(caller)
    await lead(world)
    assert [caller for caller in callers if caller.outcome is None] == []
    assert world.machine.store.revision == 31


async def test_leader_keeps_forwarded_proposals_while_its_log_is_full() -> None:
    world = World(voters=(1,), max_uncommitted_bytes=2 * MIB)
    await lead(world)
    world.disk.held = []
    body, _ = put(MIB)
    for number in range(12):
        data = bytes([Kind.PUT]) + (1000 + number).to_bytes(8, "big") + body
        assert decode(data)[1] == 1000 + number
        world.node.receive([Message(MessageType.PROPOSE, to=1, from_=2, entries=[Entry(0, 0, data)])])
        await world.turns()
    while world.disk.held:
        held, world.disk.held = world.disk.held, []
        world.disk.outstanding = 0
        for batch in held:
            batch.done()
        await world.turns()
        world.node._wake()
        await world.turns()
    assert world.machine.store.revision == 13
    assert world.node.proposals_dropped == 0


@pytest.mark.parametrize(
    "data",
    [
        bytes([255]) + bytes(20),
        bytes([0]) + bytes(8),
        encode(Kind.IDENTIFIED, 7, versioned(Kind.IDENTIFIED, bytes([200]) + bytes(20))),
    ],
    ids=["later", "never-given-out", "in-a-callers-name"],
)
async def test_a_leader_takes_nothing_of_a_kind_that_would_stop_it(data: bytes) -> None:
    """Every member stops at such an entry, again at each start: one damaged byte would end the cluster for good."""
    world = World(voters=(1,))
    await lead(world)
    body, _ = put(10)
    entries = [Entry(0, 0, data), Entry(0, 0, encode(Kind.PUT, 7, body)), Entry(0, 0, b"short")]
    world.node.receive([Message(MessageType.PROPOSE, to=1, from_=2, entries=entries)])
    await world.turns()
    assert not world.failures
    assert world.machine.store.revision == 2
    assert world.node.proposals_dropped == 1


@pytest.mark.long
async def test_pending_proposals_are_bounded(world: World) -> None:
    for _ in range(PENDING_BYTES_MAX // (16 * MIB)):
        world.node.submit(Kind.PUT, *put(16 * MIB), None)
    with pytest.raises(TooManyRequestsError):
        world.node.submit(Kind.PUT, *put(1), None)


async def test_requests_of_one_pass_are_proposed_as_one_batch(world: World) -> None:
    world.node.receive([world.heartbeat(leader=2)])
    await world.turns()
    world.cork.begin_pass()
    for _ in range(3):
        world.node.submit(Kind.PUT, *put(10), None)
    assert not world.sender.take(MessageType.PROPOSE)
    world.cork.end_pass(is_late=False)
    (message,) = world.sender.take(MessageType.PROPOSE)
    assert len(message.entries) == 3
    assert not world.failures


async def test_answered_caller_is_expected_to_ask_again() -> None:
    world = World(voters=(1,))
    world.node.raw.campaign()
    world.node._wake()
    await world.turns()
    world.cork.begin_pass()
    for _ in range(3):
        world.node.submit(Kind.PUT, *put(10), None)
    assert not world.cork.awaits_more, "none was answered before"
    world.cork.end_pass(is_late=False)
    await world.turns()
    assert not world.node.proposals

    awaited: list[bool] = []
    world.cork.begin_pass()
    for _ in range(2):
        world.node.submit(Kind.PUT, *put(10), None)
        awaited.append(world.cork.awaits_more)
    reader = Reader()
    world.node.read(reader)
    awaited.append(world.cork.awaits_more)
    world.cork.end_pass(is_late=False)
    await world.turns()
    assert awaited == [True, True, False]
    assert reader.is_served

    world.cork.begin_pass()
    world.node.read(Reader())
    assert world.cork.awaits_more, "two writers and a reader were answered"
    world.cork.end_pass(is_late=False)
    assert not world.failures


async def test_an_idle_time_is_not_taken_for_the_time_until_an_entry_is_applied(monkeypatch):
    """A proposal with a deadline was refused as too late by the time that had passed without any."""
    now = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    world = World((1,))
    world.node.raw.campaign()
    world.node._wake()
    await world.turns()
    callers: list[Caller] = []
    for idle_s in (0.0, 50.0, 5.0):
        now += idle_s
        caller = Caller(rpc_pb2.PutRequest(key=b"k"))
        caller.deadline = now + 3.0
        world.node.submit(Kind.PUT, caller.request.SerializeToString(), caller, None)
        now += 2 * SOON_S
        await world.turns()
        callers.append(caller)
    assert [type(caller.outcome) for caller in callers] == [Outcome] * 3
