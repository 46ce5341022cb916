"""Two runs on one cluster, and hosts that are left out: nodes of several runs against three real members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from raftkv.aio import Client, connect, put
from raftkv.training.config import RunConfig
from raftkv.training.records import RUNNING, Fault, RunKeys
from raftkv.training.rendezvous.participant import Participant, Progress
from raftkv.training.rendezvous.world import World
from raftkv.training.scheduling.admission import ClusterKeys
from raftkv.training.scheduling.ledger import describe_cluster
from tests.client.waiting import until
from tests.procs import RAFTKV, Cluster

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def members() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3) as cluster:
        yield cluster


class Agent:
    """A node of a run: it takes part in every generation, and its workers always stop when they must."""

    def __init__(self, kv: Client, participant: Participant) -> None:
        self.kv = kv
        self.participant = participant
        self.worlds: list[World] = []
        self.task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while True:
            self.worlds.append(await self.participant.next_world(PATIENCE_S))
            await until(lambda: self.participant.nodes_waiting or self.participant.closed)
            if self.participant.closed:
                return

    @property
    def hosts(self) -> list[str]:
        """Hosts of the world that it is in, by name: who registers first may be either. None: it waits."""
        participant = self.participant
        if not self.worlds or participant.nodes_waiting or participant.closed:
            return []
        return sorted(member.host for member in self.worlds[-1].members)

    async def stop(self, *, word: bool = True) -> None:
        """Leave; without a word: its connection breaks, as when its process was killed."""
        self.task.cancel()
        if word:
            await self.participant.leave()
        await self.kv.close()


class Stage:
    """Starts agents, and stops those that are left."""

    def __init__(self, endpoints: str) -> None:
        self._endpoints = endpoints
        self.kv = connect(endpoints)
        self.agents: list[Agent] = []
        self.told: dict[str, list[str]] = {}

    async def agent(self, run_id: str, host: str, low: int, high: int, **options) -> Agent:
        name = f"{run_id}/{host}"
        told = self.told.setdefault(name, [])

        def note(progress: Progress) -> None:
            told.append(progress.reason)

        config = RunConfig(
            run_id=run_id, host=host, min_nodes=low, max_nodes=high, last_call_timeout_s=0.1, host_slots=1, **options
        )
        kv = connect(self._endpoints)
        agent = Agent(kv, await Participant.open(kv, config, on_progress=note))
        self.agents.append(agent)
        return agent

    async def run(self, run_id: str, hosts: str, **options) -> list[Agent]:
        return [await self.agent(run_id, host, len(hosts), len(hosts), **options) for host in hosts]

    async def fail(self, follower: Agent, culprit: Agent) -> None:
        """A worker runs out of memory, and its peer fails in a collective: both are reported at one revision."""
        keys, world = RunKeys(follower.participant.config.run_id), follower.worlds[-1]
        node, rank = follower.participant.node, follower.worlds[-1].rank
        message = "RuntimeError: Connection closed by peer"
        failed = Fault(world.generation, node.id, node.host, rank, "exit", exit_code=1, message=message)
        node, rank = culprit.participant.node, culprit.worlds[-1].rank
        began = Fault(world.generation, node.id, node.host, rank, "out of memory")
        puts = [put(keys.faults(world.generation) + fault.key, fault.encode()) for fault in (failed, began)]
        await self.kv.txn().then(*puts).commit()

    async def close(self, agents: list[Agent]) -> None:
        await agents[0].participant.close()
        for agent in agents:
            await agent.stop()


@pytest.fixture
@asynccontextmanager
async def stage(members: Cluster) -> AsyncIterator[Stage]:
    made = Stage(members.endpoints)
    try:
        yield made
    finally:
        for agent in made.agents:
            await agent.stop()
        await made.kv.close()


@pytest.mark.long
async def test_one_run_waits_for_the_slots_of_the_other(stage: Stage) -> None:
    first = await stage.run("a", "xy", cluster="gpu")
    await until(lambda: all(agent.hosts == ["x", "y"] for agent in first))
    second = await stage.run("b", "yz", cluster="gpu")
    await until(lambda: stage.told["b/y"] and "number 1 in line" in stage.told["b/y"][-1])
    assert stage.told["b/y"][-1] == "waits for slots of cluster gpu: number 1 in line for slots that a holds"
    assert not second[0].worlds
    await stage.close(first)
    await until(lambda: all(agent.hosts == ["y", "z"] for agent in second))
    assert [len(agent.worlds) for agent in second] == [1, 1]
    await stage.close(second)
    assert await stage.kv.get(ClusterKeys("gpu").ledger) is None


@pytest.mark.long
async def test_a_run_that_dies_without_a_word_makes_room(stage: Stage) -> None:
    first = await stage.run("c", "xy", cluster="dying")
    await until(lambda: all(agent.hosts for agent in first))
    second = await stage.run("d", "xy", cluster="dying")
    await until(lambda: stage.told["d/x"] and "c holds" in stage.told["d/x"][-1])
    await asyncio.gather(*(agent.stop(word=False) for agent in first))
    await until(lambda: all(agent.hosts == ["x", "y"] for agent in second))


@pytest.mark.long
async def test_a_run_grows_only_onto_slots_that_are_free(stage: Stage) -> None:
    other = await stage.run("e", "y", cluster="grow")
    await until(lambda: other[0].hosts == ["y"])
    one = await stage.agent("f", "x", 1, 2, cluster="grow")
    await until(lambda: one.hosts == ["x"])
    two = await stage.agent("f", "y", 1, 2, cluster="grow")

    async def asked() -> bool:
        view = await describe_cluster(stage.kv, "grow")
        return any(grant.run == "f" and grant.candidates == 2 for grant in view.grants)

    await until(asked)
    await stage.close(other)
    await until(lambda: one.hosts == two.hosts == ["x", "y"])
    assert [world.generation for world in one.worlds] == [1, 2], "not broken before there was room"


@pytest.mark.long
async def test_a_ledger_that_cannot_be_read_is_told_and_one_that_is_deleted_is_made_anew(stage: Stage) -> None:
    await stage.kv.put(ClusterKeys("broken").ledger, b"hello")
    one = await stage.run("j", "x", cluster="broken")
    await until(lambda: stage.told["j/x"] and "delete /raftkv/train-cluster/broken/ledger" in stage.told["j/x"][-1])
    await stage.kv.delete(ClusterKeys("broken").ledger)
    await until(lambda: one[0].hosts == ["x"])
    await stage.kv.delete(ClusterKeys("broken").ledger)
    await until(lambda: stage.kv.get(ClusterKeys("broken").ledger))
    assert [grant.run for grant in (await describe_cluster(stage.kv, "broken")).grants] == ["j"]
    assert len(one[0].worlds) == 1


@pytest.mark.long
async def test_a_run_below_its_minimum_gives_back_what_it_has(stage: Stage) -> None:
    first = await stage.run("h", "xy", cluster="short")
    await until(lambda: all(agent.hosts for agent in first))
    second = await stage.run("i", "y", cluster="short")
    await until(lambda: stage.told["i/y"] and "h holds" in stage.told["i/y"][-1])
    await first[1].stop()
    await until(lambda: second[0].hosts == ["y"])
    back = await stage.agent("h", "y", 2, 2, cluster="short")
    await until(lambda: stage.told["h/y"] and "i holds" in stage.told["h/y"][-1])
    await stage.close(second)
    await until(lambda: first[0].hosts == back.hosts == ["x", "y"])


async def test_a_host_that_broke_two_generations_is_left_out_and_told_why(stage: Stage) -> None:
    options = {"fault_limit": 2, "fault_window_s": 600, "fault_cooldown_s": 300}
    good, other, bad = [await stage.agent("g", host, 2, 3, **options) for host in ("good", "other", "bad")]
    for _ in range(2):
        await until(lambda: all(len(agent.hosts) == 3 for agent in (good, other, bad)))
        broken = good.worlds[-1].generation  # the third may come late, after a generation of two
        await stage.fail(good, culprit=bad)
        await until(lambda broken=broken: good.worlds[-1].generation > broken and good.hosts)
    await until(lambda: good.hosts == other.hosts == ["good", "other"])
    await until(lambda: any("is left out for 300 s after 2 faults" in line for line in stage.told["g/bad"][-1:]))
    assert bad.participant.phase is not None
    assert bad.participant.phase.phase == RUNNING
    # The run needs two: without the other good host the denied one is better than none.
    await other.stop()
    await until(lambda: good.hosts == bad.hosts == ["bad", "good"])
