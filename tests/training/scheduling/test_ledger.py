"""Arbiters that share a ledger: interleaved, with lost answers and lost watches, and with runs that die."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from raftkv.client.operations import Compare, Operation, Put, version
from raftkv.client.records import RecordError
from raftkv.client.scope import Space
from raftkv.client.values import TxnResult
from raftkv.errors import PermissionDeniedError, StatusError
from raftkv.training.records import RunKeys
from raftkv.training.scheduling.admission import ClusterKeys, HostRecord, Ledger
from raftkv.training.scheduling.ledger import ClusterAdmission, give_back
from tests.long import long_except
from tests.training.scheduling.ledger_world import LedgerWorld, until
from tests.virtual_store.direct import FakeControl

KEYS = ClusterKeys("gpu")


@dataclass(frozen=True)
class Here:
    """A node, as far as admission looks at it."""

    id: str
    host: str
    slots: int = 1
    data: Mapping[str, str] = field(default_factory=lambda: {"host_slots": "1"})


class Arbiter:
    """One run: its nodes, its admission, and what it may run on."""

    def __init__(self, world: LedgerWorld, run: str, hosts: list[str], low: int, seed: int = 0, lost: float = 0.0):
        self.world, self.run, self.low = world, run, low
        self.nodes = [Here(f"{run}-{host}", host) for host in hosts]
        self.leases = {node.id: world.arrive(run, node.id) for node in self.nodes}
        self.control = world.control(seed, lost)
        self.asked = asyncio.Event()
        self.admission = ClusterAdmission(self.control, "gpu", on_change=self.asked.set)
        self.grant: tuple[str, ...] = ()

    async def ask(self) -> tuple[str, ...]:
        self.asked.clear()
        self.grant = await self.admission.request(self.run, self.nodes, self.low, len(self.nodes))
        return self.grant

    async def admitted(self) -> None:
        """Until it may run; after a lost answer it asks again, otherwise only when it is called back."""
        while True:
            try:
                if await self.ask():
                    return
            except StatusError:
                continue
            await self.asked.wait()

    async def leave(self) -> None:
        self.grant = ()
        while True:
            try:
                return await self.admission.release(self.run)
            except StatusError:
                continue

    def die(self) -> None:
        """All nodes at once, without a word."""
        self.admission.close()
        for lease in self.leases.values():
            self.world.store.revoke(lease)


def ledger(world: LedgerWorld) -> Ledger:
    item = world.store.items.get(KEYS.ledger.encode())
    return Ledger.decode(item.value) if item else Ledger()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_run_that_waits_is_called_back_when_slots_become_free(world: LedgerWorld) -> None:
    first, second = Arbiter(world, "a", ["h1", "h2"], 2), Arbiter(world, "b", ["h2", "h3"], 2)
    assert (await first.ask()) == ("a-h1", "a-h2")
    assert await second.ask() == ()
    assert second.admission.reason == "number 1 in line for slots that a holds"
    assert not second.asked.is_set()
    await first.leave()
    await until(second.asked.is_set)
    assert await second.ask() == ("b-h2", "b-h3")
    await second.leave()
    assert KEYS.ledger.encode() not in world.store.items, "nothing stays behind"


async def test_asking_again_writes_nothing_and_quiet_runs_read_nothing(world: LedgerWorld) -> None:
    first, second = Arbiter(world, "a", ["h1"], 1), Arbiter(world, "b", ["h1"], 1)
    await first.ask()
    await second.ask()
    revision = world.store.revision
    await first.ask()
    await second.ask()
    assert world.store.revision == revision
    await settle()
    first.asked.clear()
    calls = world.txns
    third = Arbiter(world, "c", ["h9"], 1)
    await third.ask()
    await settle()
    assert not first.asked.is_set(), "a run that has all it wants does not care"
    assert world.txns == calls + 3, "read, read, write: of the third alone"


@pytest.mark.parametrize("waits_first", [True, False])
async def test_a_run_that_died_loses_its_claims(world: LedgerWorld, waits_first: bool) -> None:
    first, second = Arbiter(world, "a", ["h1"], 1), Arbiter(world, "b", ["h1"], 1)
    await first.ask()
    if waits_first:
        assert await second.ask() == ()
        first.die()
        await until(second.asked.is_set)
    else:
        first.die()
    assert await second.ask() == ("b-h1",)
    assert [claim.run for claim in ledger(world).claims] == ["b"]


class Confined(FakeControl):
    """The control of a team that may read the ledger, and not the nodes of run a."""

    refused = 0

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        named = [str(each.to_message(Space())) for each in (*compares, *then, *otherwise)]
        if any(RunKeys("a").nodes in each for each in named):
            self.refused += 1
            raise PermissionDeniedError
        return await super().txn(compares, then, otherwise)


async def test_a_run_whose_nodes_another_team_may_not_read_counts_as_alive(world: LedgerWorld) -> None:
    """Two teams with the roles of `run grant` shared no cluster: the second run was refused the nodes of the first."""
    first, other = Arbiter(world, "a", ["h1", "h2"], 2), Arbiter(world, "c", ["h4"], 1)
    await first.ask()
    await other.ask()
    second = Arbiter(world, "b", ["h2", "h3"], 2)
    second.control = control = Confined(world, random.Random(0), 0.0)
    second.admission = ClusterAdmission(control, "gpu", on_change=second.asked.set)
    assert await second.ask() == ()
    assert second.admission.reason == "number 1 in line for slots that a holds"
    refused = control.refused
    other.die()  # of the runs that it may read, it notices the end
    await until(second.asked.is_set)
    await second.ask()
    assert [claim.run for claim in ledger(world).claims] == ["a", "b"]
    await first.leave()
    await until(second.asked.is_set)
    assert await second.ask() == ("b-h2", "b-h3")
    assert control.refused == refused  # asked once


async def test_a_run_that_came_later_and_died_with_the_slots_is_noticed(world: LedgerWorld) -> None:
    first, big, small = (
        Arbiter(world, "a", ["h1"], 1), Arbiter(world, "big", ["h1", "h2"], 2), Arbiter(world, "small", ["h2"], 1)
    )  # fmt: skip
    await first.ask()
    assert await big.ask() == ()
    assert await small.ask()
    await until(big.asked.is_set)
    assert await big.ask() == ()
    await first.leave()
    small.die()
    await until(big.asked.is_set)
    assert await big.ask() == ("big-h1", "big-h2")


async def test_the_ghost_of_a_dead_run_gets_nothing(world: LedgerWorld) -> None:
    ghost = Arbiter(world, "a", ["h1"], 1)
    await ghost.ask()
    ghost.die()
    other = Arbiter(world, "b", ["h1"], 1)
    assert await other.ask()
    assert await ghost.ask() == ()
    assert [claim.run for claim in ledger(world).claims] == ["b"]


@pytest.mark.parametrize("asks_first", [True, False])
async def test_key_of_a_node_without_a_lease_holds_no_slots(world: LedgerWorld, asks_first: bool) -> None:
    """A copy of one, as a mirror of another cluster writes it, held the slots of a dead run for ever."""
    first, second = Arbiter(world, "a", ["h1"], 1), Arbiter(world, "b", ["h1"], 1)
    world.store.txn((), (Put(RunKeys("a").node("ghost"), b"{}"),))
    await first.ask()
    if asks_first:
        assert await second.ask() == ()
        first.die()
        await until(second.asked.is_set)
    else:
        first.die()
        await give_back(second.control, "gpu", "a")
        assert not ledger(world).claims
    assert await second.ask() == ("b-h1",)


async def test_former_arbiter_changes_nothing(world: LedgerWorld) -> None:
    arbiter = Arbiter(world, "a", ["h1", "h2"], 1)
    await arbiter.ask()
    before = ledger(world)
    guard = version(RunKeys("a").arbiter) > 0
    assert await arbiter.admission.request("a", arbiter.nodes[:1], 1, 1, [guard]) == ()
    assert "is no longer the arbiter" in arbiter.admission.reason
    await arbiter.admission.release("a", guards=[guard])
    assert ledger(world) == before


async def test_a_host_that_tells_its_slots(world: LedgerWorld) -> None:
    first, second = Arbiter(world, "a", ["h1"], 1), Arbiter(world, "b", ["h1"], 1)
    await first.ask()
    assert await second.ask() == ()
    world.store.txn((), (Put(f"{KEYS.hosts}h1", HostRecord(2).encode()),))
    await until(second.asked.is_set)
    assert await second.ask()


def interfere(world: LedgerWorld, arbiter: Arbiter, meddle) -> None:
    """Do something just before the next write of an arbiter."""
    txn = arbiter.control.txn

    async def meddled(compares, then, otherwise=()):
        if any(isinstance(each, Put) for each in then):
            arbiter.control.txn = txn
            meddle()
        return await txn(compares, then, otherwise)

    arbiter.control.txn = meddled


async def test_a_run_whose_node_comes_back_in_that_instant_is_not_dropped(world: LedgerWorld) -> None:
    first, second = Arbiter(world, "a", ["h1"], 1), Arbiter(world, "b", ["h1"], 1)
    await first.ask()
    first.die()
    interfere(world, second, lambda: world.arrive("a", "a-h1"))
    assert await second.ask() == ()
    assert [claim.run for claim in ledger(world).claims] == ["a", "b"]
    assert ledger(world).claims[0].granted == ("a-h1",)


async def test_slots_that_a_host_takes_back_in_that_instant_are_not_granted(world: LedgerWorld) -> None:
    tell = f"{KEYS.hosts}h1"
    world.store.txn((), (Put(tell, HostRecord(2).encode()),))
    first, second = Arbiter(world, "a", ["h1"], 1), Arbiter(world, "b", ["h1"], 1)
    await first.ask()
    interfere(world, second, lambda: world.store.txn((), (Put(tell, HostRecord(1).encode()),)))
    assert await second.ask() == ()


async def test_a_change_just_after_the_question_is_not_missed(world: LedgerWorld) -> None:
    first, second = Arbiter(world, "a", ["h1"], 1), Arbiter(world, "b", ["h1"], 1)
    await first.ask()
    # The first leaves between the second's last read and its watch.
    watch = second.control.watch

    def late(*arguments, **options):
        if first.leases:
            first.die()
            first.leases = {}
        return watch(*arguments, **options)

    second.control.watch = late
    assert await second.ask() == ()
    await until(second.asked.is_set)
    assert await second.ask()


async def test_watches_that_end_are_begun_again(world: LedgerWorld) -> None:
    first, second = Arbiter(world, "a", ["h1"], 1), Arbiter(world, "b", ["h1"], 1)
    await first.ask()
    assert await second.ask() == ()
    await settle()
    for _ in range(2):  # of the ledger, then of the first one's nodes
        second.control.lose_watch()
    first.die()  # before they are begun again
    await until(second.asked.is_set)
    assert await second.ask()
    second.admission.close()
    assert not [commit for commit in world.store.on_commit if commit]


async def test_foreign_ledger_is_an_error_in_one_line(world: LedgerWorld) -> None:
    world.store.txn((), (Put(KEYS.ledger, b"hello"),))
    with pytest.raises(RecordError, match="not a ledger record"):
        await Arbiter(world, "a", ["h1"], 1).ask()


@pytest.mark.parametrize("slots", ["9" * 30, "9" * 5000, "65537", "\u0661", "-1"])
async def test_slots_that_no_host_has_say_nothing_and_hurt_no_other_run(world: LedgerWorld, slots: str) -> None:
    """One node's record made the ledger unreadable for every run of the cluster."""
    first, second = (Arbiter(world, run, [f"h-{run}"], 1) for run in "ab")
    first.nodes = [replace(node, data={"host_slots": slots}) for node in first.nodes]
    await first.admitted()
    await second.admitted()
    assert ledger(world).declared == {"h-b": 1}


@pytest.mark.parametrize("seed", long_except(range(40), range(10)))
async def test_many_arbiters_and_lost_answers(seed: int) -> None:
    """Every run is admitted in the end, some die silently; no host is ever held twice."""
    rng = random.Random(seed)
    world = LedgerWorld()
    hosts = [f"h{number}" for number in range(4)]
    finished: list[str] = []

    running: Counter[str] = Counter()  # what runs believe that they may use, apart from the ledger

    async def live(number: int) -> None:
        mine = rng.sample(hosts, rng.randint(1, 4))
        arbiter = Arbiter(world, f"r{number}", mine, rng.randint(1, len(mine)), seed * 100 + number, lost=0.1)
        await arbiter.admitted()
        assert arbiter.grant
        taken = Counter(node_id.partition("-")[2] for node_id in arbiter.grant)
        running.update(taken)
        assert max(running.values()) == 1, running
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        running.subtract(taken)
        if rng.random() < 0.3:
            arbiter.die()
        else:
            await arbiter.leave()
            arbiter.die()
        finished.append(arbiter.run)

    await asyncio.gather(*(live(number) for number in range(8)))
    assert len(finished) == 8


async def test_foreign_key_among_the_hosts_holds_no_run_up(world):
    """What one run of a cluster writes there keeps no other from its slots."""
    world.store.txn((), (Put(KEYS.hosts.encode() + b"\xff", b'{"slots":1}'),))
    world.store.txn((), (Put(f"{KEYS.hosts}h1", HostRecord(1).encode()),))
    arbiter = Arbiter(world, "job", ["h1"], 1)
    assert await arbiter.ask() == ("job-h1",)
