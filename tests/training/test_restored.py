"""A cluster that is restored from an older snapshot under its clients: what they hold on to is of another cluster."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import raftkv
import raftkv.aio
from raftkv.errors import CompactedError
from raftkv.integrations.torchft.lighthouse import Lighthouse, LighthouseConfig
from raftkv.integrations.torchft.rules import Rules
from raftkv.training.aio import join
from raftkv.training.config import RunConfig
from raftkv.training.errors import GenerationOver
from raftkv.training.records import Fault, RunKeys
from raftkv.training.rendezvous.participant import Participant
from tests.cli.runner import run_utl
from tests.long import long_except
from tests.training.torchft.test_lighthouse import Replica, together

BUMP = ("--bump-revision=1000000", "--mark-compacted")

EACH = pytest.mark.parametrize(
    ("flags", "saved_in"),
    long_except([(BUMP, 1), ((), 1), ((), 0)], [((), 1)]),
    ids=["bumped", "same revisions", "before the run"],
)

Restorable = tuple[raftkv.aio.Client, Callable[[], Awaitable[None]], Callable[[], Awaitable[None]]]


@asynccontextmanager
async def cluster_of_one(tmp_path: Path, flags: tuple[str, ...]) -> AsyncIterator[Restorable]:
    """A client of a cluster of one member, with functions that save its state and go back to it."""
    saved = str(tmp_path / "saved.db")
    with raftkv.local() as cluster:
        (member,) = cluster.members

        def go_back() -> None:
            member.stop()
            shutil.rmtree(member.data_dir)
            words = [
                f"--data-dir={member.data_dir}", f"--name={member.name}", f"--initial-cluster={member.initial_cluster}",
                f"--initial-advertise-peer-urls={member.peer_url}", "--initial-cluster-token=restored",
            ]  # fmt: skip
            done = run_utl(["snapshot", "restore", saved, *words, *flags])
            assert done.code == 0, done.errors
            member.restart()

        async with raftkv.aio.connect(cluster.endpoints) as kv:
            yield kv, lambda: kv.snapshot(saved), lambda: asyncio.to_thread(go_back)


async def until_waiting(participant: Participant) -> None:
    news = asyncio.Event()
    forget = participant.on_change(lambda _: news.set())
    while not participant.nodes_waiting:
        news.clear()
        await news.wait()
    forget()


@pytest.mark.long
@EACH
async def test_a_run_begins_a_generation_above_all_that_its_nodes_have_seen(tmp_path, flags, saved_in):
    async with cluster_of_one(tmp_path, flags) as (kv, save, go_back):
        config = RunConfig(run_id="job", min_nodes=2, max_nodes=2)
        if saved_in == 0:
            await save()
        nodes = [await Participant.open(kv, config) for _ in range(2)]
        assert {world.generation for world in await asyncio.gather(*(node.next_world() for node in nodes))} == {1}
        await nodes[0].publish("10.0.0.5 29500")
        if saved_in == 1:
            await save()
        await nodes[0].report(Fault(1, nodes[0].node.id, "here", cause="exit"))
        await asyncio.gather(*map(until_waiting, nodes))
        worlds = await asyncio.gather(*(node.next_world() for node in nodes))
        assert {world.generation for world in worlds} == {2}
        await go_back()
        await asyncio.gather(*map(until_waiting, nodes))
        after = await asyncio.gather(*(node.next_world() for node in nodes))
        assert {world.generation for world in after} == {3}
        assert await kv.get(RunKeys("job").boot(1)) is None, "records of a boot without members are deleted"
        assert {member.id for member in after[0].members} == {node.node.id for node in nodes}
        await nodes[0].report(Fault(3, nodes[0].node.id, "here", cause="exit"))
        await asyncio.gather(*map(until_waiting, nodes))
        for node in nodes:
            await node.leave()


@pytest.mark.long
@pytest.mark.parametrize("flags", [BUMP, ()], ids=["bumped", "same revisions"])
async def test_ranks_that_wait_for_what_the_backup_does_not_know_begin_anew(tmp_path, flags):
    async with cluster_of_one(tmp_path, flags) as (kv, save, go_back):
        runs = await asyncio.gather(*(join("job", kv=kv, min_nodes=3) for _ in range(3)))
        counter = runs[1].counter("steps")
        await counter.add(1)
        await save()
        await counter.add(1)
        waiting = asyncio.ensure_future(runs[0].barrier("b"))
        while not await kv.count(RunKeys("job").sync(1) + "at/", prefix=True):  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.01)
        await go_back()
        with pytest.raises(GenerationOver, match="restored from a backup"):
            await waiting
        with pytest.raises(GenerationOver):
            await counter.add(1)
        coming = [asyncio.ensure_future(run.rejoin()) for run in runs[:2]]
        with pytest.raises(GenerationOver):
            await runs[2].barrier("b")
        await asyncio.gather(*coming, runs[2].rejoin())
        await asyncio.gather(*(run.barrier("b") for run in runs))
        assert [run.generation for run in runs] == [2, 2, 2]
        for run in runs:
            await run.leave()


@pytest.mark.long
@EACH
async def test_quorums_of_torchft_go_on_above_every_id_that_was_given_out(tmp_path, flags, saved_in):
    async with cluster_of_one(tmp_path, flags) as (kv, save, go_back):
        lighthouse = Lighthouse(kv, LighthouseConfig(rules=Rules(min_replicas=2)))
        ((_, port),) = await lighthouse.listen("127.0.0.1", 0, "job")
        serving = asyncio.ensure_future(lighthouse.run())
        if saved_in == 0:
            await save()
        replicas = [Replica(name, port) for name in "ab"]
        first = await together(*replicas)
        if saved_in == 1:
            await save()
        later = await together(*replicas, commit_failures=1)
        assert later.quorum_id > first.quorum_id
        await go_back()
        known = (await together(*replicas)).quorum_id
        assert known > later.quorum_id
        # A lease that the restore took away may be missed only now: the quorum after that is another one.
        while (found := (await together(*replicas)).quorum_id) != known:
            assert found > known
            known = found
        for replica in replicas:
            await replica.die()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.long
async def test_a_daemon_of_torchft_that_was_started_after_a_restore_gives_out_no_id_again(tmp_path: Path) -> None:
    """The one that knew the ids is gone with the machines of before; replicas may be left."""
    async with cluster_of_one(tmp_path, ()) as (kv, save, go_back):
        ids = []
        for life in range(2):
            lighthouse = Lighthouse(kv, LighthouseConfig(rules=Rules(min_replicas=2)))
            ((_, port),) = await lighthouse.listen("127.0.0.1", 0, "job")
            serving = asyncio.ensure_future(lighthouse.run())
            replicas = [Replica(name, port) for name in "ab"]
            ids.append((await together(*replicas)).quorum_id)
            if life == 0:
                await save()
            ids += [(await together(*replicas, commit_failures=1)).quorum_id for _ in range(2)]
            for replica in replicas:
                await replica.die()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            if life == 0:
                await go_back()
        assert ids == sorted(set(ids))


@pytest.mark.long
@pytest.mark.parametrize("flags", [BUMP, ()], ids=["bumped", "same revisions"])
async def test_a_watch_says_that_its_history_is_gone(tmp_path: Path, flags: tuple[str, ...]) -> None:
    async with cluster_of_one(tmp_path, flags) as (kv, save, go_back):
        await save()
        await kv.put("a", "lost")
        async with kv.watch("a") as watch:
            await go_back()
            with pytest.raises(CompactedError):
                await anext(watch)
        async with kv.watch("a") as watch:
            await kv.put("a", "new")
            assert (await anext(watch)).value == b"new"


@pytest.mark.long
async def test_a_lock_is_lost_with_the_cluster_that_gave_it(tmp_path: Path) -> None:
    with pytest.raises(raftkv.aio.LeaseLost, match="another cluster"):  # noqa: PT012  on leaving the lease
        async with (
            cluster_of_one(tmp_path, BUMP) as (kv, save, go_back),
            await kv.lease(30) as lease,
            kv.session(30) as session,
        ):
            await save()
            lock = await kv.lock("l", lease=lease).acquire()
            await session.keep("here", "1")
            assert (lock.held, session.generation) == (True, 1)
            await go_back()
            await session.established(2)
            assert (await kv.get("here")).value == b"1"
            await lease.lost.wait()
            assert not lock.held
