"""What operators do, one function a row: each gets fresh members and returns figures, of which less is better."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

from bench.operate.scene import Scene
from raftkv.pb import rpc_pb2
from tests.procs import Member

Figures = dict[str, float]

DOWN_S: Final = 1.0
SETTLE_S: Final = 1.5
"""After a restart, before the next one: all have found each other."""
HEALTHY_S: Final = 6.0
"""Both programs want members that have been connected for so long before they add another."""
STALLS: Final = ("longest stall ms", "p99 ms")
HISTORY_KEYS: Final = 1_000
SNAPSHOT_ENTRIES: Final = 10_000
MISSED_ENTRIES: Final = 40_000
"""Puts that a follower misses: more than either program keeps of its log behind a cut."""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that operators do.

    Attributes:
        name: for ``--row``.
        what: in a line.
        run: does it.
        bars: the figures of which raftkv's may not be above etcd's.
        flags: of the members, beside the quota.
    """

    name: str
    what: str
    run: Callable[[Scene], Awaitable[Figures]]
    bars: tuple[str, ...]
    flags: tuple[str, ...] = ()


# ---- restarts


async def _restarted(scene: Scene, members: list[Member], end: Callable[[Member], object]) -> float:
    """End members and start them again: seconds from the start to a linearizable read of each."""
    for member in members:
        await asyncio.to_thread(end, member)
    await asyncio.sleep(DOWN_S)
    began = monotonic()
    for member in members:
        member.start()
    await asyncio.gather(*map(scene.first_read, members))
    took_s = monotonic() - began
    await asyncio.sleep(SETTLE_S)
    return took_s


async def restart_killed(scene: Scene) -> Figures:
    """One follower after the other, by kill -9; and all at once."""
    await asyncio.to_thread(scene.fill, scene.sizes.keys)
    one = [await _restarted(scene, [await scene.follower()], Member.kill) for _ in range(3)]
    together = await _restarted(scene, scene.cluster.members, Member.kill)
    return {"one member s": round(statistics.median(one), 2), "all members s": round(together, 2)}


# ---- housekeeping under load


async def defragment(scene: Scene) -> Figures:
    """Half of the keys deleted, then every member defragmented, the leader last."""
    await asyncio.to_thread(scene.fill, scene.sizes.keys)
    deletion = rpc_pb2.DeleteRangeRequest(key=b"\0", range_end=b"\0")
    await scene.call("KV/DeleteRange", deletion, rpc_pb2.DeleteRangeResponse)
    await asyncio.to_thread(scene.fill, scene.sizes.keys // 2)
    await _compact(scene)
    leader = await scene.leader()

    async def work() -> None:
        for member in sorted(scene.cluster.members, key=lambda member: member is leader):
            request = rpc_pb2.DefragmentRequest()
            await scene.call("Maintenance/Defragment", request, rpc_pb2.DefragmentResponse, member)

    return await scene.writer_during(work)


async def compact(scene: Scene) -> Figures:
    """A history of very many revisions of a thousand keys, compacted to the present, and waited for."""
    await asyncio.to_thread(scene.fill, HISTORY_KEYS, total=scene.sizes.revisions)
    return await scene.writer_during(lambda: _compact(scene))


async def _compact(scene: Scene) -> None:
    request = rpc_pb2.CompactionRequest(revision=await scene.revision(), physical=True)
    await scene.call("KV/Compact", request, rpc_pb2.CompactionResponse)


# ---- databases on their way


async def send_snapshot(scene: Scene) -> Figures:
    """A follower was away for so long that the log does not reach back: it gets the database, under load."""
    await asyncio.to_thread(scene.fill, _copied_keys(scene) // 4, 1024)
    follower = await scene.follower()
    leader = await scene.leader()
    follower.kill()
    await asyncio.to_thread(scene.fill, 1_000, total=MISSED_ENTRIES)

    async def work() -> None:
        follower.start()
        await scene.caught_up(follower, leader)

    return await scene.writer_during(work)


async def add_member(scene: Scene) -> Figures:
    """A fourth member is added under load, and gets the database."""
    await asyncio.to_thread(scene.fill, _copied_keys(scene) // 4, 1024)
    leader = await scene.leader()

    async def work() -> None:
        member = scene.new_member()
        await scene.add(member)
        await scene.caught_up(member, leader)

    await asyncio.sleep(HEALTHY_S)
    return await scene.writer_during(work)


def _copied_keys(scene: Scene) -> int:
    return max(scene.sizes.copied_bytes // 1024, 8)


_CUT = ("--snapshot-count", str(SNAPSHOT_ENTRIES))

ROWS: Final = (
    Row("restart-killed", "kill -9, then start to first linearizable read", restart_killed, ("one member s",)),
    Row("defragment", "every member defragmented under load", defragment, STALLS),
    Row("compact", "a long history compacted under load", compact, STALLS),
    Row("send-snapshot", "a database sent to a follower under load", send_snapshot, STALLS, _CUT),
    Row("add-member", "a member added under load", add_member, STALLS, _CUT),
)
