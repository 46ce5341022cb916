"""Everything that operators do, at random and without end, on one cluster under load; then a verdict.

    python -m bench.operate.soak --for 20m [--seed 7]

What must hold, exit code 1 otherwise: no client saw a stale read, a lost or a wrong event (``bench.hostile.honest``,
with watches and leases at every member); every kind of operation succeeded; members live and hold the same; and, after
a quarter of the time, memory, descriptors and disk of each place in the cluster are flat: the median of the last
quarter is at most a tenth (and 32 MB, 16 descriptors, 128 MB of disk) above that of the second quarter.

Calls that fail because their member is down, or because two things happen at once, are no fault: they are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import monotonic
from typing import Any, Final

from bench.hostile.soak import duration_s, is_growth, quarters
from bench.hostile.stage import FLAGS, HonestProcess, Sampler, agreement
from bench.operate.scene import Scene, Sizes
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError
from tests.procs import RAFTKV, Cluster, Member, ProcessError

SIZE: Final = 3
SAMPLE_INTERVAL_S: Final = 1.0
OPERATION_TIMEOUT_S: Final = 120.0
PAUSE_S: Final = 2.0
KEPT_REVISIONS: Final = 20_000
LOAD_KEYS: Final = 5_000
LOAD_PUTS_PER_S: Final = 200
LOAD_VALUE: Final = b"x" * 1024
LOOKS: Final = 30
GROWTH_BYTES: Final = 32 * 2**20
GROWTH_DESCRIPTORS: Final = 16
GROWTH_DISK_BYTES: Final = 128 * 2**20
LIES: Final = ("STALE", "LOST", "WRONG")


@dataclass
class Verdict:
    """What became of it; ``misses`` is empty if all holds."""

    seed: int
    seconds: float
    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    refused_calls: int = 0
    longest_stall_ms: float = 0.0
    memory_mb: list[str] = field(default_factory=list)
    descriptors: list[str] = field(default_factory=list)
    disk_mb: list[str] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For people and programs."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


class Soak:
    """One run.

    Arguments:
        scene: the cluster, running.
        seconds: how long.
        seed: of what is done, and to whom.
    """

    def __init__(self, scene: Scene, seconds: float, seed: int) -> None:
        self.verdict = Verdict(seed, seconds)
        self._scene = scene
        self._members = list(scene.cluster.members)
        self._random = random.Random(seed)
        self._until = monotonic() + seconds
        self._disk: list[list[int]] = []
        self._operations: tuple[Callable[[], Awaitable[None]], ...] = (
            self.kill,
            self.stop,
            self.move_leader,
            self.defragment,
            self.compact,
            self.save_snapshot,
            self.replace,
            self.grow_and_shrink,
        )

    async def run(self) -> Verdict:
        """Operate to the end, then check the result."""
        cluster = self._scene.cluster
        honest = HonestProcess(cluster.endpoints, streams=True)
        try:
            honest.mark()
            async with Sampler(cluster, SAMPLE_INTERVAL_S) as sampler:
                beside = [asyncio.create_task(work) for work in (self._load(), self._watch_disk())]
                await self._operate()
                for task in beside:
                    task.cancel()
            self._judge(await honest.tell())
        finally:
            honest.close()
        problem = await self._agreement()
        if problem:
            self.verdict.misses.append(problem)
        self._judge_growth(sampler)
        return self.verdict

    async def _agreement(self) -> str:
        """Wait until all hold the same; what keeps them from it, empty if nothing does."""
        for _ in range(LOOKS):
            if not (problem := (await agreement(self._scene.cluster)).problem):
                break
            await asyncio.sleep(PAUSE_S)
        return problem

    async def _operate(self) -> None:
        while monotonic() < self._until:
            # Every kind in turn, in another order each time.
            for operation in self._random.sample(self._operations, len(self._operations)):
                await self._one(operation)
                await asyncio.sleep(PAUSE_S)
                if monotonic() > self._until:
                    return

    async def _one(self, operation: Callable[[], Awaitable[None]]) -> None:
        name, began = operation.__name__, monotonic()
        try:
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                await operation()
            self.verdict.done[name] += 1
        except (RpcError, ProcessError, TimeoutError, OSError) as error:
            self.verdict.failed[f"{name}: {type(error).__name__} {error}"[:200]] += 1
        print(f"{name}: {monotonic() - began:.1f} s, left {max(0.0, self._until - monotonic()):.0f} s", file=sys.stderr)
        # Whatever happened: the next one meets members that run.
        for member in self._members:
            if not member.is_running():
                await asyncio.to_thread(member.start)

    # ---- what is done

    def _any(self) -> Member:
        return self._random.choice(self._members)

    async def _back(self, member: Member) -> None:
        await asyncio.to_thread(member.start)
        await self._scene.caught_up(member, next(other for other in self._members if other is not member))

    async def kill(self) -> None:
        """kill -9 of one member."""
        member = self._any()
        await asyncio.to_thread(member.kill)
        await self._back(member)

    async def stop(self) -> None:
        """SIGTERM to one member."""
        member = self._any()
        await asyncio.to_thread(member.stop)
        await self._back(member)

    async def move_leader(self) -> None:
        """Another one leads, on request."""
        leader, target = await self._scene.leader(), await self._scene.follower()
        request = rpc_pb2.MoveLeaderRequest(targetID=(await self._scene.status(target)).header.member_id)
        await self._scene.call("Maintenance/MoveLeader", request, rpc_pb2.MoveLeaderResponse, leader)

    async def defragment(self) -> None:
        """One member is defragmented."""
        await self._scene.call(
            "Maintenance/Defragment", rpc_pb2.DefragmentRequest(), rpc_pb2.DefragmentResponse, self._any()
        )

    async def compact(self) -> None:
        """The history is compacted up to the last so many revisions."""
        revision = await self._scene.revision() - KEPT_REVISIONS
        if revision > 0:
            request = rpc_pb2.CompactionRequest(revision=revision, physical=True)
            await self._scene.call("KV/Compact", request, rpc_pb2.CompactionResponse)

    async def save_snapshot(self) -> None:
        """A backup is read to its end."""
        path = "/etcdserverpb.Maintenance/Snapshot"
        async with Channel(self._any().endpoint) as channel, channel.stream(path) as stream:
            await stream.send(rpc_pb2.SnapshotRequest().SerializeToString())
            stream.half_close()
            async for _ in stream:
                pass

    async def replace(self) -> None:
        """A member loses its disk: it is removed, and comes back empty at the same address."""
        member = self._any()
        await self._scene.remove(member)
        await self._scene.add(member)
        await self._scene.caught_up(member, next(other for other in self._members if other is not member))

    async def grow_and_shrink(self) -> None:
        """A fourth member comes, gets everything, and goes again."""
        members = self._scene.cluster.members
        member = self._scene.new_member()
        try:
            await self._scene.add(member)
            await self._scene.caught_up(member, self._members[0])
            await self._scene.remove(member)
        finally:
            member.kill()
            members.remove(member)

    # ---- beside it

    async def _load(self) -> None:
        """Overwrite some thousand keys again and again, at whoever answers."""
        channel = Channel([member.endpoint for member in self._members])
        number, due = 0, monotonic()
        under_way: set[asyncio.Task[None]] = set()
        try:
            while True:
                task = asyncio.create_task(self._put(channel, number % LOAD_KEYS))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                number, due = number + 1, due + 1 / LOAD_PUTS_PER_S
                await asyncio.sleep(max(0.0, due - monotonic()))
        finally:
            await channel.close()

    async def _put(self, channel: Channel, number: int) -> None:
        request = rpc_pb2.PutRequest(key=b"load/%06d" % number, value=LOAD_VALUE)
        try:
            await channel.unary("/etcdserverpb.KV/Put", request.SerializeToString(), 10.0)
        except RpcError:
            self.verdict.refused_calls += 1

    async def _watch_disk(self) -> None:
        while True:
            self._disk.append([_disk_bytes(member.data_dir) for member in self._members])
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    # ---- the verdict

    def _judge(self, honest: dict[str, Any]) -> None:
        verdict = self.verdict
        verdict.longest_stall_ms = honest["put"]["max_ms"]
        verdict.refused_calls += honest["errors"]
        verdict.misses += [text for text in honest["lies"] if text.startswith(LIES)]
        for operation in self._operations:
            if not verdict.done[operation.__name__]:
                verdict.misses.append(f"{operation.__name__} never succeeded")

    def _judge_growth(self, sampler: Sampler) -> None:
        verdict = self.verdict
        for number, member in enumerate(self._members):
            for what, samples, allowance, unit, lines in (
                ("memory", sampler.memory, GROWTH_BYTES, 2**20, verdict.memory_mb),
                ("descriptors", sampler.descriptors, GROWTH_DESCRIPTORS, 1, verdict.descriptors),
                ("disk", self._disk, GROWTH_DISK_BYTES, 2**20, verdict.disk_mb),
            ):
                # While it was down it had none.
                seen = [sample[number] for sample in samples if sample[number]]
                before, after = quarters(seen)
                lines.append(f"{member.name}: {before / unit:.1f} -> {after / unit:.1f}, peak {max(seen) / unit:.1f}")
                if is_growth(before, after, allowance):
                    verdict.misses.append(
                        f"{what} of {member.name} grew from {before / unit:.0f} to {after / unit:.0f}"
                    )


def _disk_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total


async def run(options: argparse.Namespace) -> int:
    """Soak and print the verdict."""
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    print(f"seed {seed}", file=sys.stderr)
    flags = (*FLAGS, "--log-level", "warn", "--snapshot-count", "5000")
    with Cluster(RAFTKV.with_flags(*flags), SIZE) as cluster:
        verdict = await Soak(Scene(cluster, Sizes()), options.seconds, seed).run()
    print(json.dumps(verdict.as_json(), indent=2))
    print("MISSED: " + "; ".join(verdict.misses) if verdict.misses else "all bars hold", file=sys.stderr)
    return int(bool(verdict.misses))


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.operate.soak", description="operators' work for long")
    parser.add_argument("--for", dest="seconds", type=duration_s, default=1200.0, help="e.g. 90s, 20m, 2h")
    parser.add_argument("--seed", type=int)
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
