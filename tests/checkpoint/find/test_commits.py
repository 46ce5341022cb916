"""The watch of commits: each once, in order, from a revision on, though connections get lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.find import Commits
from raftkv.checkpoint.registry import Registry
from raftkv.client.errors import CLIENT_CLOSED, WatchCanceled
from raftkv.errors import CompactedError
from tests.checkpoint.world import KEYS, KIND, World, saved


async def told(commits: Commits, count: int) -> list[int]:
    found = [(await asyncio.wait_for(anext(commits), 90)).checkpoint.step for _ in range(count)]
    for _ in range(30):
        await asyncio.sleep(0)
    assert not commits._told
    return found


@pytest.mark.parametrize("trouble", ["none", "compaction", "lost watch"])
async def test_every_commit_is_told_once_and_in_order(claim, registry, world, trouble):
    await saved(registry, claim, 1)
    everything, news = registry.watch(start_revision=1), registry.watch()
    await news.ready()
    for step, kind in ((2, KIND), (1, "dcp"), (3, "dcp")):
        await saved(registry, claim, step, kind=kind)
    await registry.set_metrics(2, KIND, {"loss": 1.0})
    if trouble == "compaction":
        world.store.compact()
    for _ in range(len(registry.control.watches) if trouble == "lost watch" else 0):
        registry.control.lose_watch(CompactedError())
    await saved(registry, claim, 4)
    await registry.set_metrics(1, "dcp", {"loss": 1.0})
    assert await told(everything, 5) == [1, 2, 1, 3, 4]
    assert await told(news, 4) == [2, 1, 3, 4]
    last = world.store.items[KEYS.record("dcp", 3).encode()].create_revision
    resumed = registry.watch("dcp", start_revision=last)
    assert await told(resumed, 1) == [3]
    for commits in (everything, news, resumed):
        commits.cancel()
        with pytest.raises(StopAsyncIteration):
            await anext(commits)
    assert not world.store.on_commit


async def test_a_commit_and_a_metric_that_come_together_are_one_commit(claim, registry, world):
    commits = registry.watch(start_revision=world.store.revision + 1)
    await commits.ready()
    await saved(registry, claim, 1)
    await registry.set_metrics(1, KIND, {"loss": 1.0})
    items = world.store.events(KEYS.record(KIND, 1), "", 1)
    fresh = Commits(registry.control, "job", start_revision=2)
    fresh._take(items)
    assert [commit.checkpoint.step for commit in fresh._told] == [1]
    fresh.cancel()
    commits.cancel()


async def test_an_unreadable_record_ends_no_watch(claim: Claim, registry: Registry, world: World) -> None:
    commits = registry.watch(start_revision=1)
    world.put(KEYS.record(KIND, 7), b"?")
    await saved(registry, claim, 1)
    world.put(KEYS.record(KIND, 8), b"?")
    await saved(registry, claim, 2)
    assert await told(commits, 2) == [1, 2]
    late = registry.watch(start_revision=1)  # which finds the bad ones in a list, between the good ones
    assert await told(late, 2) == [1, 2]
    for each in (commits, late):
        each.cancel()


async def test_a_watcher_keeps_no_copy_of_the_records(claim: Claim, registry: Registry) -> None:
    commits = registry.watch(start_revision=1)
    for step in range(1, 20):
        await saved(registry, claim, step)
    assert await told(commits, 19) == list(range(1, 20))
    assert commits._copy.items == {}
    commits.cancel()


async def test_following_what_is_new_does_not_read_what_is_there(claim, registry, world):
    for step in range(1, 20):
        await saved(registry, claim, step)
    commits = registry.watch()
    assert await commits.ready() == world.store.revision
    assert len(world.sent[-1]().results[0]) <= 1
    await saved(registry, claim, 20)
    assert await told(commits, 1) == [20]
    commits.cancel()


async def test_follower_hears_that_the_client_was_closed() -> None:
    """After what had come before: nothing will come any more, and waiting for it would last for ever."""

    async def txn(*_: object) -> Any:
        raise WatchCanceled(CLIENT_CLOSED)

    world = World()
    registry = world.registry()
    claim = await registry.claim()
    commits, bests = registry.watch(), registry.watch_best("loss")
    await commits.ready()
    await saved(registry, claim, 1)
    waiting = asyncio.ensure_future(anext(bests))
    for _ in range(30):
        await asyncio.sleep(0)
    registry.control.txn = txn
    while registry.control.watches:
        registry.control.lose_watch(WatchCanceled(CLIENT_CLOSED))
    assert (await anext(commits)).checkpoint.step == 1
    for over in (waiting, anext(commits), commits.next_batch()):
        with pytest.raises(WatchCanceled, match="the client is closed"):
            await asyncio.wait_for(over, 90)
