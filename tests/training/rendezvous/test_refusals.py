"""What a run does when the store refuses what its arbiter decides: nodes learn of it, and it goes on once it may."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from raftkv.client.operations import Compare, Operation, Put
from raftkv.client.values import TxnResult
from raftkv.errors import RequestTooLargeError
from raftkv.training.config import RunConfig
from raftkv.training.errors import JoinTimeout, RunClosed
from raftkv.training.records import OUT_OF_MEMORY, Fault, GenerationRecord, Node, RunKeys, State
from raftkv.training.rendezvous import participant
from raftkv.training.rendezvous.participant import Participant
from tests.virtual_store.direct import FakeControl, StoreWorld
from tests.virtual_store.store import Store

CONFIG = RunConfig(run_id="job", last_call_timeout_s=0.0)


class NarrowControl:
    """A store that takes no record of a generation, for its members are too many, until it is widened."""

    def __init__(self, control: FakeControl) -> None:
        self._control = control
        self.is_wide = False
        self.refused = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._control, name)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        round_key = RunKeys("job").round
        if not self.is_wide and any(isinstance(one, Put) and one.key == round_key for one in then):
            self.refused.set()
            raise RequestTooLargeError
        return await self._control.txn(compares, then, otherwise)


@pytest.mark.long
async def test_nodes_hear_of_what_the_store_refuses_and_go_on_when_it_does_not_any_more(caplog):
    control = NarrowControl(StoreWorld().control())
    told: list[str] = []
    first = await Participant.start(control, CONFIG, on_progress=lambda progress: told.append(progress.reason))
    coming = asyncio.ensure_future(first.next_world())
    await control.refused.wait()
    while not any("request is too large" in line for line in told):  # noqa: ASYNC110  told while it waits
        await asyncio.sleep(0.01)
    control.is_wide = True
    assert (await coming).generation == 1
    assert first.phase is not None
    assert first.phase.waits_for == ""
    await first.close()
    await first.leave()
    control.is_wide = False
    second = await Participant.start(control, CONFIG)
    with pytest.raises(
        JoinTimeout, match=r"take generation 2 of 1 node, a record of \d+ bytes: .*request is too large"
    ):
        await second.next_world(1.0)
    lines = [record.getMessage() for record in caplog.records if "cannot proceed" in record.getMessage()]
    assert len(lines) == 2


async def test_only_the_last_node_to_leave_a_closed_run_has_the_members_look_for_others(monkeypatch):
    """Each of 12,500 leaving nodes made all members scan the keys of all nodes: a minute of work."""
    monkeypatch.setattr(participant, "MEMBERS_KEPT", 2)
    scans = 0
    holds = Store.holds

    def counted(self: Store, compare: Compare) -> bool:
        nonlocal scans
        scans += compare.prefix
        return holds(self, compare)

    world = StoreWorld()
    config = replace(CONFIG, min_nodes=8, max_nodes=8)
    nodes = [await Participant.start(world.control(), config) for _ in range(8)]
    await asyncio.gather(*(node.next_world() for node in nodes))
    await asyncio.gather(*(node.finish() for node in nodes))
    monkeypatch.setattr(Store, "holds", counted)
    for node in reversed(nodes):  # the first is the arbiter
        await node.leave()
    assert scans == 1
    assert GenerationRecord.decode(world.store.items[RunKeys("job").round.encode()].value).members == ()


async def test_nodes_that_have_finished_close_a_run_whose_generation_a_new_node_has_ended() -> None:
    """They left it open, and the new node waited for them until its time was up."""
    world = StoreWorld()
    config = replace(CONFIG, min_nodes=2, max_nodes=3)
    nodes = [await Participant.start(world.control(), config) for _ in range(2)]
    await asyncio.gather(*(node.next_world() for node in nodes))
    news = asyncio.Event()
    for node in nodes:
        node.on_change(lambda _: news.set())
    late = await Participant.start(world.control(), config)
    waiting = asyncio.ensure_future(late.next_world())
    while not all(node.nodes_waiting for node in nodes):
        news.clear()
        await news.wait()
    assert [await node.finish() for node in nodes] == [False, True]
    with pytest.raises(RunClosed):
        await waiting


@pytest.mark.long
@pytest.mark.parametrize("record", ["state", "round"])
async def test_damaged_record_is_told_to_those_who_wait(record: str) -> None:
    control, told = StoreWorld().control(), list[str]()
    key = f"{RunKeys('job').base}{record}"
    await control.txn((), [Put(key, b"nonsense")])
    node = await Participant.start(control, CONFIG, on_progress=lambda progress: told.append(progress.damage))
    with pytest.raises(JoinTimeout, match=f"{record}: not a {record} record: "):
        await node.next_world(1.0)
    assert told[-1].startswith(f"{key}: not a {record} record: ")
    assert told[-1].endswith("; write it again, or: raftkvctl run delete job")
    await node.leave()


@pytest.mark.parametrize("claims", [{"want": 2**64 - 1}, {"slots": 2**64 - 1}, {"slots": 0}])
async def test_node_that_claims_what_cannot_be_is_in_no_generation(claims: dict[str, int]) -> None:
    """Such a claim moved the run past the last number of a record, or had all nodes make lists without end."""
    control, keys = StoreWorld().control(), RunKeys("job")
    stranger = Node("stranger", "host", max_nodes=2, **claims)
    await control.txn((), [Put(keys.node("stranger"), stranger.encode())])
    node = await Participant.start(control, replace(CONFIG, max_nodes=2))
    for generation in (1, 2):
        world = await node.next_world()
        assert (world.generation, [member.id for member in world.members]) == (generation, [node.node.id])
        await node.report(Fault(generation, node.node.id, node.node.host, cause=OUT_OF_MEMORY))
    await node.close()
    await node.leave()


async def test_arbiter_key_without_a_lease_is_taken_over() -> None:
    """No node would ever have decided: the key of a stranger does not end."""
    control, keys = StoreWorld().control(), RunKeys("job")
    await control.txn((), [Put(keys.arbiter, b"stranger")])
    node = await Participant.start(control, CONFIG)
    for generation in (1, 2):
        world = await node.next_world()
        assert world.generation == generation
        await control.txn((), [Put(keys.arbiter, b"stranger")])  # over that of the node
        await node.report(Fault(generation, node.node.id, node.node.host, cause=OUT_OF_MEMORY))
    assert (await node.next_world()).generation == 3
    await node.close()
    await node.leave()


@pytest.mark.long
@pytest.mark.parametrize("name", [b"\xff" * 10_000, "the node's own"])
async def test_arbiter_key_under_a_lease_that_is_no_nodes_is_taken_over(name: bytes | str) -> None:
    """A stranger that kept its lease alive held up all decisions, with any name in the key."""
    control, keys = StoreWorld().control(), RunKeys("job")
    lease = (await control.grant(60, 0.0, lambda: None)).id
    await control.txn((), [Put(keys.arbiter, b"stranger", lease=lease)])
    node = await Participant.start(control, replace(CONFIG, lease_ttl_s=1))
    assert (await node.next_world(20.0)).generation == 1
    value = name if isinstance(name, bytes) else node.node.id
    await control.txn((), [Put(keys.arbiter, value, lease=lease)])  # over that of the node
    await node.report(Fault(1, node.node.id, node.node.host, cause=OUT_OF_MEMORY))
    assert (await node.next_world(20.0)).generation == 2
    await node.close()
    await node.leave()


async def test_key_of_a_node_without_a_lease_is_no_node() -> None:
    """A copy of one, as a mirror of another cluster writes it, took part in a generation, which waited for it."""
    control, keys = StoreWorld().control(), RunKeys("job")
    config = replace(CONFIG, min_nodes=1, max_nodes=3)
    first = await Participant.start(control, config)
    assert (await first.next_world(20.0)).generation == 1
    ghost = replace(first.node, id="ghost", host="ghost")
    await control.txn((), [Put(keys.node("ghost"), ghost.encode())])
    second = await Participant.start(control, config)
    worlds = await asyncio.gather(first.next_world(20.0), second.next_world(20.0))
    assert [(world.generation, world.node_count) for world in worlds] == [(2, 2)] * 2
    left = await control.grant(60, 0.0, lambda: None)  # one of a node that was there, and is a ghost now
    for lease in (left.id, None):
        await control.txn((), [Put(keys.node("ghost"), ghost.encode(), lease=lease)])
    await second.leave()
    world = await first.next_world(20.0)
    while world.node_count != 1:
        world = await first.next_world(20.0)
    await first.close()
    await first.leave()


async def test_closed_run_is_used_again_beside_the_key_of_a_node_without_a_lease() -> None:
    """Every later job with this id was told that the run is closed."""
    control, keys = StoreWorld().control(), RunKeys("job")
    config = replace(CONFIG, min_nodes=1, max_nodes=1)
    first = await Participant.start(control, config)
    await first.next_world(20.0)
    await control.txn((), [Put(keys.node("ghost"), replace(first.node, id="ghost").encode())])
    await first.close()
    await first.leave()
    second = await Participant.start(control, config)
    assert (await second.next_world(20.0)).generation == 2
    await second.leave()


async def test_key_that_ends_like_a_nodes_takes_no_node_away() -> None:
    """The arbiter took the node for lost, and began a generation for every write of the stranger."""
    store = StoreWorld()
    control, keys = store.control(), RunKeys("job")
    config = replace(CONFIG, min_nodes=2, max_nodes=3)
    nodes = list(await asyncio.gather(*(Participant.start(control, config) for _ in range(2))))
    await asyncio.gather(*(node.next_world(20.0) for node in nodes))
    for node in nodes:
        await control.txn((), [Put(f"{keys.nodes}x/{node.node.id}", b"")])
    nodes.append(await Participant.start(control, config))
    worlds = await asyncio.gather(*(node.next_world(20.0) for node in nodes))
    assert [(world.generation, world.node_count) for world in worlds] == [(2, 3)] * 3
    written = [State.decode(event.value) for event in store.store.history if event.key == keys.state.encode()]
    assert {state.cause for state in written} == {"", "scale up"}
    await nodes[0].close()
    for node in nodes:
        await node.leave()


@pytest.mark.parametrize("name", ["x", "1", "x/000001", "9" * 5000, "\u0661"])
async def test_only_the_exit_of_a_member_says_that_it_has_finished(name: str) -> None:
    """A stranger's key closed the run while a member was at work, or kept its arbiter from every decision."""
    control, keys = StoreWorld().control(), RunKeys("job")
    config = replace(CONFIG, min_nodes=1, max_nodes=2)
    first = await Participant.start(control, config)
    assert (await first.next_world(20.0)).generation == 1
    await control.txn((), [Put(f"{keys.exits(1)}{name}", b"0")])
    second = await Participant.start(control, config)
    worlds = await asyncio.gather(first.next_world(20.0), second.next_world(20.0))
    assert [world.generation for world in worlds] == [2, 2]
    await control.txn((), [Put(f"{keys.exits(2)}{name}", b"0")])
    assert not await first.finish("done")
    assert await second.finish("done")
    for each in (first, second):
        await each.close()
        await each.leave()


async def test_fault_that_names_the_host_of_no_member_leaves_no_host_out() -> None:
    """A record below the run blames only a machine of the run: in a cluster a denial is that of all its runs."""
    world = StoreWorld()
    config = replace(CONFIG, fault_limit=1)
    node = await Participant.start(world.control(), config)
    for generation, host in enumerate(("innocent", node.node.host), start=1):
        assert (await node.next_world()).generation == generation
        for name in ("stranger", node.node.id):
            fault = Fault(generation, name, host, cause=OUT_OF_MEMORY)
            world.store.txn((), (Put(RunKeys("job").faults(generation) + fault.key, fault.encode()),))
    await node.next_world()
    denied = [key.decode().rpartition("/")[2] for key in world.store.items if b"/deny/" in key]
    assert denied == [node.node.host]
    await node.close()
    await node.leave()
