"""How runs end, and what is said and left of it; on etcd 3.5.1 and raftkv."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raftkv.errors import ConfigError
from raftkv.training import BarrierTimeout, GenerationOver, RunClosed
from raftkv.training.aio import join
from raftkv.training.api.generation import Collectives
from raftkv.training.records import GenerationRecord
from raftkv.training.rendezvous import participant
from tests.training import test_run
from tests.training.test_run import Job, in_all

member, job = test_run.member, test_run.job


async def test_a_run_that_was_closed_is_not_taken_for_a_restored_one(job: Job):
    runs = await job.join(2)
    await runs[0].counter("steps").add(1)
    runs[0]._unwatch()  # it has not heard yet
    await runs[1].close("done")
    with pytest.raises(GenerationOver, match=": done"):
        await runs[0].counter("steps").add(1)


async def test_barrier_that_opens_at_the_timeout_names_no_rank(job: Job, monkeypatch):
    runs = await job.join(2)
    look = Collectives._missing

    async def late(self: Collectives, *what: Any) -> Any:
        await runs[1].barrier("b")
        return await look(self, *what)

    monkeypatch.setattr(Collectives, "_missing", late)
    with pytest.raises(BarrierTimeout, match="all have come by now") as caught:
        await runs[0].barrier("b", timeout_s=0.05)
    assert caught.value.missing == []
    await runs[0].barrier("b")


async def test_a_run_is_joined_with_a_client_of_all_keys_alone(job: Job):
    with pytest.raises(ConfigError, match=r"kv sees the keys below 'team/' alone; give the client that connect\(\)"):
        await join(job.run_id, kv=job.kv.view("team/"))


async def test_a_large_run_that_has_ended_keeps_a_short_record(job: Job, monkeypatch):
    monkeypatch.setattr(participant, "MEMBERS_KEPT", 2)

    async def members(job: Job) -> int:
        record = await job.kv.get(job.keys.round)
        return len(GenerationRecord.decode(record.value).members)

    runs = await job.join(3)
    await runs[0].close("done")
    await runs[1].leave()
    assert await members(job) == 3  # one is still there, and may write under its fence
    await runs[2].leave()
    assert await members(job) == 0
    (again,) = await job.join(1, min_nodes=1, max_nodes=1)
    assert (again.generation, again.world_size) == (runs[0].generation + 1, 1)


async def test_all_ranks_that_are_done_close_a_run_whose_generation_a_new_node_has_ended(job: Job):
    """They left it open, and the new node waited for them until its time was up."""
    runs = await job.join(2)
    late = asyncio.ensure_future(job.join(1))
    await in_all(runs, lambda run: run.wait_change())
    await in_all(runs, lambda run: run.finish())
    with pytest.raises(RunClosed):
        await late


async def test_a_new_node_ends_no_generation_of_which_a_rank_is_done(job: Job):
    runs = await job.join(2)
    async with job.kv.watch(job.keys.exits(1), prefix=True) as exits:
        first = asyncio.ensure_future(runs[0].finish())
        await anext(exits)
    waits = asyncio.Event()
    late = asyncio.ensure_future(job.join(1, on_progress=lambda progress: waits.set()))
    await waits.wait()
    assert not runs[1].changed
    await runs[1].finish()
    await first
    with pytest.raises(RunClosed):
        await late


@pytest.mark.long
async def test_member_that_does_not_return_is_evicted_before_join_timeout(job: Job):
    runs = await job.join(3, join_timeout_s=4.0)
    await runs[0].report(message="a fault")
    await in_all(runs[:2], lambda run: run.rejoin())
    assert [(run.generation, run.world_size) for run in runs[:2]] == [(2, 2)] * 2
