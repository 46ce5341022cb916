"""The API for user code, on one member of etcd 3.5.1 and of raftkv: what ranks do together, how a generation ends."""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import raftkv.training
from raftkv.aio import connect
from raftkv.client.control import ClientControl
from raftkv.errors import ConfigError, NoLeaderError, StatusError
from raftkv.training import BarrierTimeout, GenerationOver, JoinTimeout, RunClosed
from raftkv.training.aio import Run, join
from raftkv.training.api import async_run
from raftkv.training.api.attachment import announce
from raftkv.training.api.generation import Collectives, Counter, Generation, PostedLost
from raftkv.training.config import RunConfig, guess_address, is_loopback
from raftkv.training.history import read_history
from raftkv.training.records import PARTS, Fault, RunKeys
from raftkv.training.rendezvous.participant import Participant
from raftkv.urls import parse_endpoints
from tests.client.waiting import until
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster

PATIENCE_S = 120.0


@pytest.fixture(scope="module", params=long_except([ETCD_FAST, RAFTKV], [RAFTKV]), ids=["etcd", "raftkv"])
def member(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(request.param) as cluster:
        yield cluster


class Job:
    """The processes of one run, as tasks of one loop; those that are left over leave at its end."""

    def __init__(self, endpoints: list[str], run_id: str) -> None:
        self.endpoints = endpoints
        self.run_id = run_id
        self.keys = RunKeys(run_id)
        self.runs: list[Run] = []
        self.kv = connect(endpoints)

    async def join(self, count: int = 3, **options: Any) -> list[Run]:
        """That many processes of a generation of that size, by rank."""
        settings = {
            "min_nodes": 2,
            "max_nodes": 3,
            "expected_nodes": count,
            "last_call_timeout_s": PATIENCE_S,
            "disconnect_grace_s": 0.05,
            "lease_ttl_s": 10,
            **options,
        }
        runs = await asyncio.gather(*(join(self.run_id, endpoints=self.endpoints, **settings) for _ in range(count)))
        self.runs += runs
        return sorted(runs, key=lambda run: run.rank)

    async def below(self, prefix: str) -> list[str]:
        """Keys of the store."""
        return [item.key.decode() for item in await self.kv.range(prefix, prefix=True, keys_only=True)]

    async def close(self) -> None:
        await asyncio.gather(*(run.leave() for run in self.runs))
        await self.kv.close()


@pytest.fixture
@asynccontextmanager
async def job(member: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Job]:
    made = Job(member.endpoints, request.node.name)
    try:
        yield made
    finally:
        await made.close()


async def in_all(runs: list[Run], what: Callable[[Run], Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*(what(run) for run in runs))


async def test_places_of_three_ranks_on_one_host(job: Job):
    runs = await job.join()
    assert [run.rank for run in runs] == [0, 1, 2]
    assert {(run.world_size, run.generation, run.local_size, run.cross_rank, run.cross_size) for run in runs} == {
        (3, 1, 3, 0, 1)
    }
    assert [run.local_rank for run in runs] == [0, 1, 2]
    assert len({run.members for run in runs}) == 1
    assert not any(run.changed for run in runs)


@given(st.sampled_from(sorted(PARTS)), st.text("!-.0az~", max_size=3), st.sampled_from(["state", "round", "store/1/x"]))
def test_keys_of_a_run_below_are_in_no_interval_of_the_run(part, more, inner):
    """What a run ``job/bench`` or ``job/run`` stores came with each registration in ``job``, and was kept."""
    assume(more)
    keys, key = RunKeys("job"), f"{RunKeys(f'job/{part}{more}').base}{inner}".encode()
    for sparse in (keys.calls, keys.record, keys.news):
        assert not any(first.encode() <= key < (end or f"{first}\0").encode() for first, end in sparse.parts)


async def test_a_barrier_opens_when_the_last_has_come(job: Job):
    runs = await job.join()
    first = [asyncio.ensure_future(run.barrier("b")) for run in runs[:2]]
    arrived = f"{job.keys.sync(1)}at/barrier.b/1/arrived/"

    async def have_come() -> bool:
        return len(await job.below(arrived)) == 2

    await until(have_come)
    assert not any(task.done() for task in first)
    await runs[2].barrier("b")
    await asyncio.gather(*first)


@pytest.mark.long
async def test_a_rank_that_comes_to_a_barrier_twice_at_once_comes_to_two(job: Job):
    runs = await job.join(2)
    at_once = [asyncio.ensure_future(runs[0].barrier("b")) for _ in range(2)]
    await runs[1].barrier("b")
    done, _ = await asyncio.wait(at_once, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    await asyncio.gather(*at_once, runs[1].barrier("b"))
    with pytest.raises(BarrierTimeout, match=r"missing: rank 1$"):
        await runs[0].barrier("b", timeout_s=1)


async def test_a_barrier_costs_one_write_a_rank_and_leaves_nothing_behind(job: Job):
    runs = await job.join()
    await in_all(runs, lambda run: run.barrier("step"))
    page = await runs[0].kv.range(job.keys.base, prefix=True)
    for _ in range(4):
        await in_all(runs, lambda run: run.barrier("step"))
    after = await runs[0].kv.range(job.keys.base, prefix=True)
    assert after.revision - page.revision == 4 * len(runs)
    left = await job.below(job.keys.sync(1))
    assert [key.removeprefix(job.keys.sync(1)) for key in left] == ["open/barrier.step/5"]


async def test_names_do_not_get_in_each_others_way(job: Job):
    runs = await job.join()
    names = ["a", "a/1", "a/1/arrived", "é b", "%61"]
    for name in names:
        await in_all(runs, lambda run, name=name: run.barrier(name))
    for name in reversed(names):
        assert await in_all(runs, lambda run, name=name: run.all_gather(name, name)) == [[name.encode()] * 3] * 3
    with pytest.raises(ConfigError, match="a name is empty"):
        await runs[0].barrier("")


@pytest.mark.long
async def test_a_barrier_names_who_is_missing_and_can_be_waited_for_again(job: Job):
    runs = await job.join()
    # Time enough for a loaded machine to tell that rank 1 is there.
    with pytest.raises(BarrierTimeout, match=r"barrier 'b' was not complete within 2 s; missing: ranks 0, 2") as e:
        await runs[1].barrier("b", timeout_s=2)
    assert e.value.missing == [0, 2]
    await in_all(runs, lambda run: run.barrier("b", timeout_s=PATIENCE_S))
    await in_all(runs, lambda run: run.barrier("b", timeout_s=PATIENCE_S))
    with pytest.raises(BarrierTimeout, match=r"missing: ranks 0, 1$"):
        await runs[2].gather("g", b"", root=2, timeout_s=2)


async def test_a_broadcast_names_the_root_that_is_missing(job: Job):
    runs = await job.join(2)
    with pytest.raises(BarrierTimeout, match=r"^broadcast 'v' was not complete within 0.2 s; missing: rank 0$"):
        await runs[1].broadcast("v", timeout_s=0.2)


async def test_values_travel_by_rank(job: Job):
    runs = await job.join()
    for number in range(3):
        value = f"config {number}"
        got = await in_all(runs, lambda run, v=value: run.broadcast("config", v if run.rank == 1 else None, root=1))
        assert got == [value.encode()] * 3
    assert await in_all(runs, lambda run: run.gather("g", str(run.rank), root=2)) == [None, None, [b"0", b"1", b"2"]]
    assert await in_all(runs, lambda run: run.all_gather("g", str(run.rank))) == [[b"0", b"1", b"2"]] * 3
    await runs[0].put("note", b"x")
    assert await runs[2].get("note") == b"x"
    assert await runs[2].get("none") is None


async def test_a_rank_may_be_far_behind_a_root_that_broadcasts(job: Job):
    runs = await job.join()
    for number in range(5):
        await runs[0].broadcast("config", str(number))
    assert [await runs[1].broadcast("config") for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_rank_that_is_behind_a_compaction_is_told_that_it_missed_a_value(job: Job):
    runs = await job.join()
    waiting = asyncio.create_task(runs[2].broadcast("config"))
    for number in range(2):
        await runs[0].broadcast("config", str(number))
    assert await waiting == b"0"
    await job.kv.compact((await job.kv.put("compacted", b"")).revision)
    with pytest.raises(PostedLost, match="config/1 was missed"):
        await runs[1].broadcast("config")
    with pytest.raises(PostedLost, match="config/1 was missed"):
        await runs[1].broadcast("config")
    assert await runs[2].broadcast("config") == b"1"


async def test_a_value_that_came_as_the_time_was_up_is_there_for_the_next_call(job: Job):
    runs = await job.join()
    await runs[0].broadcast("config", "1")
    collectives = runs[1]._collectives
    await collectives._posted.wait("value.config/1")  # by a call whose time was up before it returned
    assert await runs[1].broadcast("config") == b"1"


async def test_invalid_values_are_refused(job: Job):
    runs = await job.join()
    with pytest.raises(ConfigError, match="rank 0 is the root of broadcast 'config' and gave no value"):
        await runs[0].broadcast("config")
    with pytest.raises(ConfigError, match="there is no rank 3 to be the root: the generation has 3"):
        await runs[0].broadcast("config", b"", root=3)
    with pytest.raises(ConfigError, match="a value of 300000 bytes is too large to be shared: at most 262144"):
        await runs[0].put("large", bytes(300_000))
    with pytest.raises(TypeError, match="values are str or bytes, not int"):
        await runs[0].all_gather("number", 7)


async def test_a_counter_gives_every_rank_another_number(job: Job):
    runs = await job.join()

    async def draw(run: Run) -> list[int]:
        return [await run.counter("numbers").add(1) for _ in range(10)]

    numbers = await in_all(runs, draw)
    assert sorted(number for mine in numbers for number in mine) == list(range(1, 31))
    assert all(mine == sorted(mine) for mine in numbers)
    await runs[0].counter("numbers").add(numpy.int64(-30))
    assert await runs[1].counter("numbers").value() == 0
    again = Generation(runs[0].kv, runs[0].world, 0)  # as a process that attaches a second time
    assert await Counter(again, "numbers").add(5) == 5


async def test_previous_names_work_and_warn(job: Job):
    """A generation was called an epoch before."""

    def old(names: str) -> AbstractContextManager[object]:
        return pytest.warns(DeprecationWarning, match=f"^{names} is deprecated; use ")

    (run,) = await job.join(1, min_nodes=1, max_nodes=1)
    with old("epoch"):
        assert run.epoch == run.world.epoch == run.generation == 1
    await run.put("x", b"1")
    with old("epoch"):
        assert await run.get("x", epoch=1) == b"1"
    with old("term"):
        leadership = run.term("writer")
    async with leadership as term:
        with old("RunTerm"):
            assert isinstance(term, raftkv.training.aio.RunTerm)
    await run.rejoin()
    with old("EpochOver"):
        previous = raftkv.training.EpochOver
    with pytest.raises(previous) as over:
        await term.campaign()
    with old("epoch"):
        assert over.value.epoch == over.value.generation == 1


async def test_one_leads_at_a_time_and_never_beyond_the_generation(job: Job):
    runs = await job.join()
    tokens = []

    async def lead(run: Run) -> None:
        async with await run.elect("writer") as term:
            assert term.leads
            leader = await run.leader("writer")
            assert leader is not None
            assert leader.value == str(run.rank).encode()
            tokens.append(term.token)
            await run.kv.put(f"{job.run_id}/{run.rank}", b"", fence=term)

    await in_all(runs, lead)
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 3
    term = await runs[0].elect("writer")
    waiting = asyncio.ensure_future(runs[1].elect("writer"))
    await runs[2].leave()
    with pytest.raises(GenerationOver):
        await waiting
    await in_all(runs[:2], lambda run: run.rejoin())
    with pytest.raises(GenerationOver):
        await runs[0].kv.put(f"{job.run_id}/late", b"", fence=term)
    assert not term.leads
    await term.resign()
    assert await runs[0].kv.get(f"{job.run_id}/late") is None


@pytest.mark.long
async def test_a_leader_that_stood_still_for_seconds_still_leads(job: Job):
    """PyTorch holds the interpreter's lock while it imports, loads and compiles: two seconds ended a leadership."""
    runs = await job.join()
    async with await runs[0].elect("writer") as term:
        ctypes.PyDLL(None).usleep(3_000_000)  # keeps the interpreter's lock, so nothing of this process runs
        await runs[0].kv.put(f"{job.run_id}/late", b"", fence=term)
        assert term.leads


async def test_the_end_of_a_generation_reaches_all_who_wait(job: Job):
    runs = await job.join()
    told: list[int] = []
    runs[0].on_change(lambda run: told.append(run.generation))
    runs[0].on_change(lambda _: told.append(-1))()
    waiting = [
        asyncio.ensure_future(waits)
        for waits in (
            runs[0].barrier("b"),
            runs[1].broadcast("value"),
            runs[0].all_gather("g", b""),
            runs[1].counter("c").value(),
            runs[1].wait_change(),
        )
    ]
    assert not await runs[0].wait_change(0.01)
    await waiting[3]
    await runs[2].leave()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in ended[:3]] == [GenerationOver] * 3
    assert "left" in str(ended[0])
    assert ended[3:] == [0, True]
    assert runs[0].changed
    with pytest.raises(GenerationOver):
        await runs[0].barrier("b")
    worlds = await in_all(runs[:2], lambda run: run.rejoin())
    assert [(world.generation, world.rank, world.world_size) for world in worlds] == [(2, 0, 2), (2, 1, 2)]
    assert told == [1]
    await in_all(runs[:2], lambda run: run.barrier("b"))


async def test_a_rank_that_missed_the_end_writes_nothing(job: Job):
    runs = await job.join()
    old = runs[0].world
    zombie = Generation(runs[0].kv, old, 0)  # it is not told
    await runs[0].put("mine", b"1")
    await runs[2].leave()
    await in_all(runs[:2], lambda run: run.rejoin())
    before = await job.below(job.keys.base)
    with pytest.raises(GenerationOver):
        await runs[0].kv.put("anywhere", b"", fence=old.fence)
    with pytest.raises(GenerationOver):
        await Collectives(Generation(runs[0].kv, old, 0)).barrier("b", None)
    with pytest.raises(GenerationOver):
        await Collectives(Generation(runs[0].kv, old, 0)).broadcast("v", b"x", 0, None)
    with pytest.raises(GenerationOver):
        await zombie.commit(lambda empty: empty)
    assert zombie.is_over
    assert await job.below(job.keys.base) == before
    assert await runs[1].get("mine") is None
    assert await runs[1].get("mine", generation=1) == b"1"


async def test_barrier_that_opened_before_the_end_succeeds(job: Job):
    """The end of a generation and the opening of its barrier come by different watches, in any order."""
    runs = await job.join()
    first = asyncio.ensure_future(runs[0].barrier("b"))
    posted = runs[0]._collectives._posted
    await until(lambda: posted._waiting)
    posted.close()  # its news will be late
    await in_all(runs[1:], lambda run: run.barrier("b"))
    runs[0]._generation.end("heard of first")
    await first
    with pytest.raises(GenerationOver, match="heard of first"):
        await runs[0].barrier("b")


async def test_arbiter_whose_node_key_is_deleted_registers_again(job: Job):
    runs = await job.join(2, max_nodes=2)
    arbiter = (await job.kv.get(job.keys.arbiter)).text
    await job.kv.delete(job.keys.node(arbiter))
    assert await in_all(runs, lambda run: run.wait_change()) == [True, True]
    await in_all(runs, lambda run: run.rejoin())
    assert [run.generation for run in runs] == [2, 2]


@pytest.mark.long
@pytest.mark.parametrize("is_arbiter", [True, False])
async def test_node_that_does_not_return_is_evicted(job: Job, is_arbiter):
    runs = await job.join(3, return_timeout_s=0.5)
    arbiter, first = (await job.kv.get(job.keys.arbiter)).text, runs[0].generation
    late = next(run for run in runs if (run.world.member.id == arbiter) == is_arbiter)
    others = [run for run in runs if run is not late]
    await others[0].report(message="a fault")
    await in_all(others, lambda run: run.rejoin())
    assert [(run.generation, run.world_size) for run in others] == [(first + 1, 2)] * 2
    told = [item.value for item in await job.kv.range(f"{job.keys.faults(first)}{late.world.member.id}")]
    assert b"did not come back within 0.5 s" in told[0]
    back = asyncio.ensure_future(late.rejoin())
    assert await in_all(others, lambda run: run.wait_change()) == [True, True]
    await asyncio.gather(back, *(run.rejoin() for run in others))
    assert [(run.generation, run.world_size) for run in runs] == [(first + 2, 3)] * 3


async def test_a_block_that_ends_closes_the_run(job: Job):
    runs = await job.join()

    async def work(run: Run) -> None:
        async with run:
            await run.put("x", b"")

    await in_all(runs, work)
    assert await job.below(job.keys.base) == [job.keys.round, job.keys.state]


async def test_closing_the_client_ends_waits_of_its_run(job):
    kv = connect(job.endpoints)
    alone = {"kv": kv, "min_nodes": 1, "lease_ttl_s": 10}
    run, meeting = await join(job.run_id, **alone), f"{job.run_id}-2"
    waits = [
        run.wait_change(),
        run.published(),
        run.barrier("a"),  # opens: no other node is in it
        join(job.run_id, **alone),  # as a standby
        join(meeting, kv=kv, min_nodes=2),
    ]
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await until(tasks[2].done)
    await until(lambda: _nodes_of(job, meeting))
    await until(lambda: _nodes_of(job, job.run_id, 2))
    await kv.close()
    async with asyncio.timeout(90):
        changed, published, _, standby, waiting = await asyncio.gather(*tasks, return_exceptions=True)
    assert changed is True
    assert ["the client is closed" in str(one) for one in (published, standby, waiting)] == [True] * 3
    async with asyncio.timeout(90):
        with pytest.raises(StatusError, match="the client is closed"):
            await run.rejoin()
    await run.leave()


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "limit"), [(ValueError("a bad batch"), "FAIL_S"), (asyncio.CancelledError("Ctrl-C"), "INTERRUPTED_S")]
)
async def test_an_error_in_a_block_is_not_held_up_by_a_cluster_that_is_away(job, monkeypatch, error, limit):
    monkeypatch.setattr(async_run, "FAIL_S", 3600)
    monkeypatch.setattr(async_run, limit, 0.05)

    async def away(fault):
        await asyncio.Event().wait()

    async def train():
        async with await join(job.run_id, endpoints=job.endpoints, min_nodes=1, lease_ttl_s=60) as run:
            run._attachment.report = away
            raise error

    with pytest.raises(type(error)):
        await asyncio.wait_for(train(), 90)


async def test_leave_without_answer_sends_no_more_requests(job, monkeypatch):
    ended = []

    async def away(*_):
        raise NoLeaderError

    async def end(self, grant, *, revoke):
        ended.append(revoke)

    (run,) = await job.join(1, min_nodes=1)
    monkeypatch.setattr(ClientControl, "end", end)
    monkeypatch.setattr(ClientControl, "txn", away)
    await run.leave()
    assert ended == [False]


async def test_a_callback_that_fails_keeps_no_other_from_the_news(job):
    (run,) = await job.join(1, min_nodes=1)
    told, failed = [], []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context["exception"]))
    run.on_change(lambda run: 1 / 0)
    run.on_change(told.append)
    await run.report(message="over")
    await until(lambda: told)
    assert [type(error) for error in failed] == [ZeroDivisionError]
    assert await run.wait_change()
    assert (await run.rejoin()).generation == 2


async def test_wrong_arguments_are_refused_explain_outage_and_leave_nothing_behind(job):
    nan = float("nan")
    wrong = {
        "a run id is a text, not b'id'": lambda run: join(b"id", kv=run.kv),
        "min_nodes is a whole number, not 1.5": lambda run: join("wrong", kv=run.kv, min_nodes=1.5),
        "topology is a text, not 5": lambda run: join("wrong", kv=run.kv, topology=5),
        "timeout_s is a number of seconds, not '1'": lambda run: join("wrong", kv=run.kv, timeout_s="1"),
        "names are texts, not 5": lambda run: run.barrier(5),
        "timeout_s is a finite number of seconds, not nan": lambda run: run.barrier("b", timeout_s=nan),
        "a broadcast has a root: the rank whose value all get": lambda run: run.broadcast("b", "v", root=None),
        "metric 'loss' is 'x', which is not a number": lambda run: run.checkpoint(
            1, metrics={"loss": "x"}
        ).__aenter__(),
        "nothing is written that could not be read again: not a fault record: signal is 9": lambda run: run.report(
            signal=9
        ),
    }
    (run,) = await job.join(1, min_nodes=1)
    for text, call in wrong.items():
        with pytest.raises((TypeError, ValueError, ConfigError)) as refused:
            await call(run)
        assert str(refused.value) == text
    with pytest.raises(TimeoutError, match=r"^nothing was published in generation 1 of run .* within 0.01 s$"):
        await run.published(timeout_s=0.01)
    assert await job.below(RunKeys("wrong").base) == []
    assert not run.changed


async def _nodes_of(job: Job, run_id: str, count: int = 1) -> bool:
    return len(await job.below(RunKeys(run_id).nodes)) == count


async def test_an_error_in_a_block_is_what_the_others_are_told(job: Job):
    runs = await job.join()
    with pytest.raises(ZeroDivisionError):
        async with runs[1]:
            raise ZeroDivisionError("by zero\nand more")
    with pytest.raises(GenerationOver, match=r"rank 1 on .* exited with 1: ZeroDivisionError: by zero$"):
        await runs[0].barrier("b")
    await runs[0].close("enough")
    with pytest.raises(RunClosed, match="closed: enough"):
        await runs[2].rejoin()


@pytest.mark.long
async def test_joining_that_cannot_be(job: Job, monkeypatch):
    monkeypatch.delenv("RAFTKV_RUN_ID", raising=False)
    with pytest.raises(ConfigError, match="no run to join: give its id"):
        await join(endpoints=job.endpoints)
    with pytest.raises(ConfigError, match="unknown option 'lease_ttl' of join; known are address, cluster"):
        await join("job", endpoints=job.endpoints, lease_ttl=3)
    with pytest.raises(ConfigError, match="3:2 is not a number of nodes"):
        await join("job", endpoints=job.endpoints, min_nodes=3, max_nodes=2)
    with pytest.raises(JoinTimeout, match=r"\d of at least 2 nodes are present"):
        await join(job.run_id, endpoints=job.endpoints, min_nodes=2, timeout_s=1.5)
    monkeypatch.setenv("RAFTKV_RUN_ID", "job")
    with pytest.raises(ConfigError, match="RAFTKV_RUN_ID is in the environment, but RAFTKV_EPOCH is not"):
        await join(endpoints=job.endpoints)


async def test_a_generation_that_begins_before_a_node_asks_for_it_waits_for_that_node(job: Job):
    config = RunConfig(run_id=job.run_id, min_nodes=1, max_nodes=2, lease_ttl_s=10, disconnect_grace_s=0.05)
    nodes = [await Participant.open(job.kv, config) for _ in range(2)]

    async def has_begun() -> bool:
        return all(node.phase is not None and node.phase.generation == 1 for node in nodes)

    await until(has_begun)
    worlds = [await nodes[0].next_world(), await nodes[1].next_world()]
    assert [(world.generation, world.node_rank) for world in worlds] == [(1, 0), (1, 1)]
    assert [node.nodes_waiting for node in nodes] == [0, 0]
    for node in nodes:
        await node.leave()


async def test_a_run_that_is_deleted_under_its_nodes_forms_again(job: Job):
    """Else the nodes would run on unseen, beside those of the next run with this id."""
    config = RunConfig(run_id=job.run_id, min_nodes=2, max_nodes=2, lease_ttl_s=10, disconnect_grace_s=0.05)
    nodes = [await Participant.open(job.kv, config) for _ in range(2)]
    assert {world.generation for world in await asyncio.gather(*(node.next_world() for node in nodes))} == {1}
    await job.kv.delete(job.keys.base, prefix=True)
    await until(lambda: all(node.nodes_waiting for node in nodes))
    worlds = await asyncio.gather(*(node.next_world() for node in nodes))
    assert len({world.generation for world in worlds}) == 1
    assert worlds[0].generation > 1
    assert {item.key for item in await job.kv.range(job.keys.nodes, prefix=True)} == {
        job.keys.node(node.node.id).encode() for node in nodes
    }
    for node in nodes:
        await node.leave()


async def test_workers_attach_to_the_run_of_their_agents(job: Job, monkeypatch):
    config = RunConfig(run_id=job.run_id, min_nodes=2, max_nodes=2, slots=2, disconnect_grace_s=0.05, lease_ttl_s=10)
    agents = [await Participant.open(job.kv, config) for _ in range(2)]
    worlds = await asyncio.gather(*(agent.next_world() for agent in agents))
    for name in ("RUN_ID", "EPOCH", "ENDPOINTS", "RANK"):
        monkeypatch.setenv(f"RAFTKV_{name}", "7")  # of an outer run; put back in the end
    announce(job.run_id, 1, ",".join(job.endpoints), os.environ)
    workers = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        workers.append(await join())
    assert [(worker.rank, worker.local_rank, worker.world_size) for worker in workers] == [(n, n, 4) for n in range(4)]
    assert await in_all(workers, lambda run: run.all_gather("g", str(run.rank))) == [[b"0", b"1", b"2", b"3"]] * 4
    assert worlds[0].generation == workers[0].generation
    monkeypatch.setenv("RAFTKV_RANK", "4")  # as `raftkvctl run exec` says it, and it is right
    with pytest.raises(ConfigError, match=r"generation 1 of run .* has no rank 4"):
        await join()
    waiting = asyncio.ensure_future(workers[0].barrier("b"))
    await workers[3].report("exit", "no luck", exit_code=3)
    with pytest.raises(GenerationOver, match=r"rank 3 on .* exited with 3: no luck"):
        await waiting
    with pytest.raises(GenerationOver, match="its node's agent starts one in the next generation"):
        await workers[0].rejoin()
    await asyncio.gather(*(agent.next_world() for agent in agents))
    monkeypatch.setenv("RAFTKV_RANK", "0")
    with pytest.raises(GenerationOver, match="generation 2 is the present one"):
        await join()
    for worker in workers:
        await worker.close()
    for agent in agents:
        assert not agent.closed
        await agent.leave()


def test_missing_address_is_guessed():
    assert guess_address(parse_endpoints("192.0.2.1.invalid:2379")) != ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
        outside.bind(("127.0.0.1", 0))
        guessed = guess_address(parse_endpoints(f"127.0.0.1:{outside.getsockname()[1]}"))
    assert ipaddress.ip_address(guessed)
    assert is_loopback("127.0.1.1")
    assert not is_loopback("10.0.0.1")


@pytest.mark.parametrize("environment", [{}, {"RAFTKV_RUN_ID": "away", "RAFTKV_EPOCH": "1", "RAFTKV_RANK": "0"}])
def test_a_join_ends_by_its_time_limit_though_the_store_does_not_answer(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        endpoint = f"127.0.0.1:{frozen.getsockname()[1]}"
        with pytest.raises(JoinTimeout, match=r"^run 'away' did not begin within 0.3 s: the store cannot be reached$"):
            raftkv.training.join("" if environment else "away", endpoints=endpoint, timeout_s=0.3)


async def test_foreign_keys_among_those_of_ranks_disturb_none(job: Job):
    """A colleague who may write below the run neither ends its barriers nor adds a value to what ranks gather."""
    runs = await job.join(2)
    base = job.keys.sync(runs[0].generation)
    await in_all(runs, lambda run: run.barrier("step"))
    for foreign in ("open/note", "open/barrier.step/x", b"open/\xff", "at/gather.names/1/arrived/zz/000001"):
        await job.kv.put(base.encode() + (foreign if isinstance(foreign, bytes) else foreign.encode()), b"x")
    for foreign in (b"x", b"000001/000000", b"9" * 5000, b"\xff"):
        await job.kv.put(f"{base}counter/numbers/".encode() + foreign, b"7")
    assert sorted(await in_all(runs, lambda run: run.counter("numbers").add(1))) == [1, 2]
    await in_all(runs, lambda run: run.barrier("step"))
    assert await in_all(runs, lambda run: run.all_gather("names", str(run.rank))) == [[b"0", b"1"]] * 2
    strange = Fault(runs[0].generation, "h-1", rank=7)  # below another generation than its own
    await job.kv.put(f"{job.keys.faults(99)}{strange.key}", strange.encode())
    await job.kv.put(job.keys.nodes.encode() + b"\xff", b"x")
    history = await read_history(job.kv, job.run_id)
    assert [(one.generation, one.faults) for one in history.generations] == [(runs[0].generation, ())]
