"""Scripted watchers on real servers: known bugs of etcd 3.5.1 are flagged, and raftkv does not have them.

etcd 3.5.1 answers a request for progress at once, whether or not the watchers of the stream have caught up or have
even begun (etcd issue 15220, mended in 3.5.8 and 3.4.25): one that starts in the future is given a bookmark that would
lead back before its start.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from jepsen.checkers import watch
from jepsen.history import History
from jepsen.ops import END_OF_KEYS, Delete, Put, Txn
from jepsen.watcher import Ending, Habits, WatchingClient
from jepsen.watches import Watched
from raftkv.pb import rpc_pb2
from tests.jepsen.stage import READY_S, Stage, staged
from tests.long import long_except

WRITES = 40
FUTURE = 1000
ASKS_S = 2.0


async def watched(stage: Stage, wanted: tuple[Watched, ...], habits: Habits) -> History:
    """Watch some writes; the watchers stay until they have all events, or until their time limit."""
    ending = Ending()
    watcher = WatchingClient("w", stage.members, stage.recorder, random.Random(1), wanted, habits)
    client = stage.client("c")
    async with asyncio.TaskGroup() as group:
        group.create_task(watcher.run(ending))
        for number in range(WRITES):
            await client.call(Put(f"k{number % 3}", client.fresh_value()))
        await client.call(Txn((), tuple(Put(f"t{number}", client.fresh_value()) for number in range(3))))
        await client.call(Delete("k0"))
        if habits.lasting:
            ending.rev = await stage.probe.revision()
            ending.over.set()
    await client.close()
    return await stage.history()


def rules(system: str, folder: Path, wanted: tuple[Watched, ...], habits: Habits) -> set[str]:
    """Return what the checker finds."""

    async def scenario() -> History:
        async with staged(system, folder) as stage:
            return await watched(stage, wanted, habits)

    return {violation.rule for violation in watch.check(asyncio.run(scenario()))}


@pytest.mark.long
@pytest.mark.parametrize(("system", "expected"), [("etcd", {"W8 bookmark before start"}), ("raftkv", set())])
def test_a_watcher_of_the_future_is_given_no_bookmark(system: str, expected: set[str], tmp_runs: Path) -> None:
    future = Watched("\0", END_OF_KEYS, start=FUTURE)
    assert rules(system, tmp_runs, (future,), Habits((ASKS_S, ASKS_S), lasting=False)) == expected


@pytest.mark.parametrize("system", long_except(["etcd", "raftkv"], {"raftkv"}))
def test_watchers_of_all_kinds_get_all(system: str, tmp_runs: Path) -> None:
    everything = Watched("\0", END_OF_KEYS, start=2, previous=True, fragment=True)
    wanted = (everything, Watched("k", "l", start=2, without=("put",)), Watched("t1", start=3))
    found = rules(system, tmp_runs, wanted, Habits())
    # Bookmarks of etcd 3.5.1 may run ahead here too.
    assert {rule for rule in found if system == "raftkv" or rule.split()[0] not in ("W6", "W9")} == set()


async def watched_from_compaction(stage: Stage) -> History:
    """Delete a key at revision 3, compact the store at that revision, and watch from there on."""
    client = stage.client("c")
    for request in (Put("k", "c.1"), Delete("k"), Put("j", "c.2")):
        await client.call(request)
    await client.close()
    history = await stage.history()
    stage.recorder.event("compacting", rev=3)
    await stage.probe.retry(rpc_pb2.CompactionRequest(revision=3, physical=True), READY_S)
    ending = Ending(rev=4)
    ending.over.set()
    wanted = (Watched("\0", END_OF_KEYS, start=3),)
    await WatchingClient("w", stage.members, stage.recorder, random.Random(1), wanted).run(ending)
    return history


@pytest.mark.parametrize(("system", "expected"), [("etcd", {"W5 lost at start"}), ("raftkv", set())])
def test_a_deletion_at_the_compacted_revision_is_told(system: str, expected: set[str], tmp_runs: Path) -> None:
    """etcd 3.5.1 loses this event (etcd issue 18089)."""

    async def scenario() -> History:
        async with staged(system, tmp_runs) as stage:
            return await watched_from_compaction(stage)

    assert {violation.rule for violation in watch.check(asyncio.run(scenario()))} == expected
