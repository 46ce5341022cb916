"""Whose fault it was, and hosts that are left out for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.client.operations import Put
from raftkv.errors import StatusError
from raftkv.training.config import RunConfig
from raftkv.training.records import Fault
from raftkv.training.scheduling.denylist import DenyKeys, Denylist, Reported, blames_host, pardon, root_cause
from tests.long import long_except
from tests.training.scheduling.ledger_world import LedgerWorld, until

OOM = Fault(4, "n0", "h0", 0, "out of memory")
KILLED = Fault(4, "n1", "h1", 1, "signal", signal="SIGKILL")
ABORTED = Fault(4, "n2", "h2", 2, "signal", signal="SIGABRT")
LOST = Fault(4, "n3", "h3", -1, "heartbeat lost")
FAILED = Fault(4, "n4", "h4", 4, "exit", exit_code=1, message="ValueError: nan")
FOLLOWED = Fault(
    4, "n5", "h5", 5, "exit", exit_code=1, message="RuntimeError: [gloo/transport] Connection closed by peer"
)
STOPPED = Fault(4, "n6", "h6", 6, "signal", signal="SIGTERM")
STOPPED_BY_SHELL = Fault(4, "n7", "h7", 7, "exit", exit_code=143)
LEFT = Fault(4, "n8", "h8", -1, "left")
STRONGEST_FIRST = [OOM, KILLED, LOST, FAILED, FOLLOWED]


def told(*faults: Fault) -> list[Reported]:
    return [Reported(fault, revision) for revision, fault in enumerate(faults, start=100)]


def test_the_cause_is_the_strongest_hint_whenever_it_was_told() -> None:
    everything = [STOPPED, LEFT, *reversed(STRONGEST_FIRST), STOPPED_BY_SHELL]
    for cause in STRONGEST_FIRST:
        assert root_cause(told(*everything)) == cause
        everything.remove(cause)
    assert root_cause(told(*everything)) is None


def test_among_equals_the_first_that_was_told() -> None:
    later = replace(FAILED, rank=9, host="h9")
    assert root_cause(told(FAILED, later)) == FAILED
    assert root_cause(told(later, FAILED)) == later
    assert root_cause(told(LOST)) == LOST


def test_an_abort_is_no_stronger_than_an_exit_code() -> None:
    assert root_cause([*told(ABORTED), Reported(LOST, 999)]) == LOST
    assert root_cause(told(FAILED, ABORTED)) == FAILED


@given(st.permutations([(revision, fault) for revision, fault in enumerate([*STRONGEST_FIRST, STOPPED, LEFT])]))
def test_the_order_of_reading_does_not_matter(order: list[tuple[int, Fault]]) -> None:
    assert root_cause([Reported(fault, revision) for revision, fault in order]) == OOM


def test_whom_a_cause_blames() -> None:
    assert all(blames_host(fault) for fault in (OOM, KILLED, ABORTED, LOST, FAILED))
    assert not any(blames_host(fault) for fault in (FOLLOWED, STOPPED, STOPPED_BY_SHELL, LEFT, replace(OOM, host="")))


def test_a_denial_yields_only_up_to_the_minimum() -> None:
    hosts = ["bad", "good", "worse", "good"]
    denied = frozenset({"bad", "worse", "elsewhere"})
    assert pardon(hosts, denied, 2) == denied
    assert pardon(hosts, denied, 3) == {"worse", "elsewhere"}
    assert pardon(hosts, denied, 4) == {"elsewhere"}
    assert pardon(hosts, denied, 5) == denied, "it could not run anyway"


CONFIG = RunConfig(run_id="job", fault_limit=3, fault_window_s=600, fault_cooldown_s=300)


def fault(generation: int, host: str = "h1") -> Fault:
    return Fault(generation, "n", host, 3, "out of memory")


def ttl_of(world: LedgerWorld, key: str) -> int:
    return world.store.leases[world.store.items[key.encode()].lease].ttl_s


async def test_the_third_fault_within_the_window_denies_the_host(world: LedgerWorld) -> None:
    changes: list[frozenset[str]] = []
    denylist = Denylist(world.control(1), CONFIG)
    watcher = Denylist(world.control(2), CONFIG, lambda: changes.append(watcher.denied))
    await denylist.refresh()
    await watcher.refresh()
    changes.clear()
    assert [await denylist.strike(fault(generation)) for generation in (1, 2)] == [False, False]
    assert not await denylist.strike(fault(2)), "told twice, counted once"
    assert not await denylist.strike(fault(3, "h2")), "another host's"
    assert await denylist.strike(fault(3))
    await until(lambda: changes)
    assert changes == [frozenset({"h1"})]
    assert watcher.why("h1") == (
        "host h1 is left out for 300 s after 3 faults within 600 s, the last: rank 3 on h1 out of memory"
    )
    assert not await denylist.strike(fault(4)), "it is denied already"
    keys = DenyKeys.of("job", "")
    assert ttl_of(world, keys.strike("job", fault(1))) == 600
    assert ttl_of(world, "/raftkv/train/job/deny/h1") == 300

    world.store.revoke(world.store.items[b"/raftkv/train/job/deny/h1"].lease)
    await until(lambda: not watcher.denied)
    assert watcher.why("h1") == ""
    assert await denylist.strike(fault(5)), "on probation: its strikes are still there"


async def test_strikes_that_ended_do_not_count(world: LedgerWorld) -> None:
    denylist = Denylist(world.control(), CONFIG)
    for generation in range(1, 9):
        assert not await denylist.strike(fault(generation))
        if generation > 1:
            key = DenyKeys.of("job", "").strike("job", fault(generation - 1))
            world.store.revoke(world.store.items[key.encode()].lease)


async def test_two_faults_told_at_once_are_both_counted(world: LedgerWorld) -> None:
    control = world.control()
    limits = replace(CONFIG, fault_limit=2)
    first, second = Denylist(control, limits), Denylist(world.control(), limits)
    txn = control.txn

    async def meddled(compares, then, otherwise=()):
        if any(isinstance(each, Put) for each in then):
            control.txn = txn
            assert not await second.strike(fault(2))
        return await txn(compares, then, otherwise)

    control.txn = meddled
    assert await first.strike(fault(1))


async def test_runs_of_a_cluster_share_what_they_know(world: LedgerWorld) -> None:
    shared = replace(CONFIG, cluster="gpu", fault_limit=2)
    first, second = (Denylist(world.control(), replace(shared, run_id=run)) for run in ("a", "b"))
    assert not await first.strike(fault(1))
    assert await second.strike(fault(1)), "the same generation and rank of another run is another fault"
    await first.refresh()
    assert first.denied == {"h1"}
    assert b"/raftkv/train-cluster/gpu/deny/h1" in world.store.items


async def test_limit_of_zero_denies_no_host_and_writes_nothing(world: LedgerWorld) -> None:
    denylist = Denylist(world.control(), replace(CONFIG, fault_limit=0))
    await denylist.refresh()
    assert not await denylist.strike(fault(1))
    assert (world.txns, world.store.leases) == (0, {})


async def test_strikes_without_a_lease_do_not_count(world: LedgerWorld) -> None:
    """Copies of old ones, as a mirror of another cluster writes them, counted for ever: each fault denied the host."""
    denylist, keys = Denylist(world.control(), CONFIG), DenyKeys.of("job", "")
    for generation in (1, 2):
        world.store.txn((), (Put(keys.strike("job", fault(generation)), fault(generation).encode()),))
    assert [await denylist.strike(fault(generation)) for generation in (2, 3, 4)] == [False, False, True]
    denylist.close()


async def test_an_operator_can_deny_a_host_and_the_watch_is_begun_again(world: LedgerWorld) -> None:
    control = world.control()
    denylist = Denylist(control, CONFIG)
    await denylist.refresh()
    control.lose_watch()
    world.store.txn((), (Put("/raftkv/train/job/deny/h9", b"bad memory"),))
    await denylist.refresh()
    assert denylist.denied == {"h9"}
    assert denylist.why("h9") == "host h9 is left out: bad memory"
    denylist.close()
    assert not world.store.on_commit


@pytest.mark.parametrize("seed", long_except(range(20), range(6)))
async def test_arbiters_that_tell_the_same_faults_at_once_with_lost_answers(world: LedgerWorld, seed: int) -> None:
    async def tell(number: int) -> None:
        denylist = Denylist(world.control(seed * 10 + number, lost=0.15), CONFIG)
        for generation in (1, 2, 3 if seed % 2 else 2):
            while True:
                try:
                    await denylist.strike(fault(generation))
                    break
                except StatusError:
                    continue

    await asyncio.gather(*(tell(number) for number in range(4)))
    strikes = [key for key in world.store.items if b"/strike/h1/" in key]
    assert len(strikes) == (3 if seed % 2 else 2)
    assert (b"/raftkv/train/job/deny/h1" in world.store.items) == bool(seed % 2)
