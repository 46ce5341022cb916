"""Hours of hostile clients beside honest ones: rows at random on one cluster, then a verdict.

    python -m bench.hostile.soak --for 30m --nofile 1024 [--seed 7] [--attackers 2]

What must hold, exit code 1 otherwise: the honest client saw no error and no wrong answer (``honest``: puts, reads,
watches and kept leases at every member); the leader is the same; no turn was longer than 50 ms of its own; members live
and hold the same; and, after a quarter of the time, memory and descriptors are flat: the median of the last quarter is
at most a tenth (and 16 MB, or 16 descriptors) above that of the second quarter.

A line every ten seconds says how it stands. Data that rows leave behind is deleted after each, and history compacted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import statistics
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, fields
from time import monotonic
from typing import Any, Final

from rich.console import Console

from bench.hostile.attacker import KV, Attacker
from bench.hostile.report import TURN_LIMIT_MS
from bench.hostile.rows import ROWS, Row
from bench.hostile.stage import HonestProcess, Sampler, agreement, log_bytes, long_turns, members, metrics_of
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError
from tests.procs import Cluster

ROW_TIMEOUT_S: Final = 120.0
TELL_INTERVAL_S: Final = 10.0
SAMPLE_INTERVAL_S: Final = 1.0
COMPACT_INTERVAL_S: Final = 30.0
KEPT_REVISIONS: Final = 20_000
GROWTH_SHARE: Final = 0.1
GROWTH_BYTES: Final = 16 * 2**20
GROWTH_DESCRIPTORS: Final = 16
_LEFT_BEHIND: Final = (b"fill/", b"history/", b"leased/", b"n", b"unread", b"churn")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600}


@dataclass
class Verdict:
    """What became of it; ``misses`` is empty if all holds."""

    seed: int
    seconds: float
    rounds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    honest: dict[str, Any] = field(default_factory=dict)
    longest_turn_ms: float = 0.0
    longest_own_turn_ms: float = 0.0
    work: list[str] = field(default_factory=list)
    leader_changes: int = 0
    memory_mb: list[str] = field(default_factory=list)
    descriptors: list[str] = field(default_factory=list)
    slowest: list[str] = field(default_factory=list)
    """Honest puts that took the longest, and the rows meanwhile."""
    misses: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For people and programs."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "refusals": dict(self.refusals.most_common(20))}


class Soak:
    """One run.

    Arguments:
        cluster: running.
        seconds: how long.
        seed: of the choice of rows and members.
        scale: of the rows' counts; connections are never scaled.
        attack_s: of one row that can be repeated.
    """

    def __init__(self, cluster: Cluster, seconds: float, seed: int, scale: float, attack_s: float) -> None:
        self.verdict = Verdict(seed, seconds)
        self._cluster = cluster
        self._until = monotonic() + seconds
        self._random = random.Random(seed)
        self._scale = scale
        self._attack_s = attack_s
        self._rows: list[tuple[str, float, float]] = []
        """What was done, from when until when."""
        self._first: list[dict[str, float]] = []
        self._logged: list[int] = []

    async def run(self, attackers: int, console: Console) -> Verdict:
        """Attack to the end, then check the result."""
        honest = HonestProcess(self._cluster.endpoints, streams=True)
        try:
            self._first = [metrics_of(member) for member in self._cluster.members]
            self._logged = [log_bytes(member) for member in self._cluster.members]
            async with Sampler(self._cluster, SAMPLE_INTERVAL_S) as sampler, asyncio.TaskGroup() as group:
                for _ in range(attackers):
                    group.create_task(self._attack())
                watching = [group.create_task(self._compact()), group.create_task(self._tell(sampler, console))]
                await asyncio.sleep(max(0.0, self._until - monotonic()))
                for task in watching:
                    task.cancel()
            self.verdict.honest = await honest.tell()
        finally:
            honest.close()
        self._scrape()
        await self._check_result(sampler)
        return self.verdict

    # ---- at work

    async def _attack(self) -> None:
        while monotonic() < self._until:
            row = self._random.choice(ROWS)
            if "raftkv" not in row.programs:
                continue
            await self._one(row)

    async def _one(self, row: Row) -> None:
        began = monotonic()
        attacker = Attacker(
            self._cluster.endpoints, self._random.randrange(len(self._cluster.members)), self._scale, 1.0
        )
        try:
            async with asyncio.timeout(ROW_TIMEOUT_S):
                await row.prepare(attacker)
                attacker.until = min(monotonic() + self._attack_s, self._until)
                await row.attack(attacker)
                while row.repeats and not attacker.is_over():
                    await row.attack(attacker)
                for prefix in _LEFT_BEHIND:
                    gone = rpc_pb2.DeleteRangeRequest(key=prefix, range_end=prefix[:-1] + bytes((prefix[-1] + 1,)))
                    await attacker.call(KV + "DeleteRange", gone)
        except TimeoutError:
            self.verdict.refusals[f"{row.name}: it took longer than {ROW_TIMEOUT_S:g} s"] += 1
        except (RpcError, OSError) as error:
            self.verdict.refusals[f"{row.name}: {error}"] += 1
        finally:
            await attacker.close()
        self._rows.append((row.name, began, monotonic()))
        self.verdict.rounds[row.name] += 1
        self.verdict.refusals.update(attacker.refusals)

    async def _compact(self) -> None:
        channel = Channel(self._cluster.endpoints)
        try:
            while True:
                await asyncio.sleep(COMPACT_INTERVAL_S)
                with suppress(RpcError):
                    answer = await channel.unary(KV + "Range", rpc_pb2.RangeRequest(key=b"x").SerializeToString(), 30.0)
                    revision = rpc_pb2.RangeResponse.FromString(answer).header.revision - KEPT_REVISIONS
                    request = rpc_pb2.CompactionRequest(revision=revision).SerializeToString()
                    if revision > 0:
                        await channel.unary(KV + "Compact", request, 30.0)
        finally:
            await channel.close()

    async def _tell(self, sampler: Sampler, console: Console) -> None:
        began = monotonic()
        while True:
            await asyncio.sleep(TELL_INTERVAL_S)
            await asyncio.to_thread(self._scrape)
            megabytes = ", ".join(f"{size / 2**20:.0f}" for size in sampler.memory[-1])
            console.print(
                f"{monotonic() - began:5.0f} s: memory {megabytes} MB, descriptors {sampler.descriptors[-1]}, "
                f"longest turn {self.verdict.longest_own_turn_ms:.0f} ms, leader changes "
                f"{self.verdict.leader_changes}, rows {self.verdict.rounds.total()}",
                highlight=False,
                soft_wrap=True,
            )

    def _scrape(self) -> None:
        verdict = self.verdict
        for first, member in zip(self._first, self._cluster.members, strict=True):
            figures = metrics_of(member)
            changes = "etcd_server_leader_changes_seen_total"
            verdict.leader_changes = max(verdict.leader_changes, int(figures.get(changes, 0) - first.get(changes, 0)))
            longest_ms = figures.get("raftkv_loop_turn_longest_seconds", 0.0) * 1e3
            own_ms = figures.get("raftkv_loop_turn_longest_own_seconds", 0.0) * 1e3
            verdict.longest_turn_ms = max(verdict.longest_turn_ms, round(longest_ms, 1))
            verdict.longest_own_turn_ms = max(verdict.longest_own_turn_ms, round(own_ms, 1))

    # ---- the verdict

    async def _check_result(self, sampler: Sampler) -> None:
        verdict, found = self.verdict, self.verdict.misses
        problem = (await agreement(self._cluster)).problem
        if problem:
            found.append(problem)
        if verdict.honest["errors"]:
            found.append(f"{verdict.honest['errors']} honest errors, the first: {verdict.honest['error_texts'][0]}")
        if verdict.leader_changes:
            found.append(f"{verdict.leader_changes} changes of leader")
        if verdict.longest_own_turn_ms > TURN_LIMIT_MS:
            found.append(f"a turn of {verdict.longest_own_turn_ms:.0f} ms")
        for seconds, ended in verdict.honest.pop("slowest"):
            rows = [name for name, began, over in self._rows if began < ended and over > ended - seconds]
            verdict.slowest.append(f"{seconds:.2f} s: {', '.join(rows)}")
        for size, member in zip(self._logged, self._cluster.members, strict=True):
            longest = sorted(long_turns(member, size), reverse=True)[:5]
            verdict.work += [f"{member.name}: {own_ms} ms: {work}" for own_ms, work in longest]
        for number, member in enumerate(self._cluster.members):
            sizes = [sample[number] for sample in sampler.memory]
            counts = [sample[number] for sample in sampler.descriptors]
            before, after = quarters(sizes)
            verdict.memory_mb.append(
                f"{member.name}: {before / 2**20:.1f} -> {after / 2**20:.1f}, peak {max(sizes) / 2**20:.1f}"
            )
            if is_growth(before, after, GROWTH_BYTES):
                found.append(f"memory of {member.name} grew from {before / 2**20:.0f} to {after / 2**20:.0f} MB")
            before, after = quarters(counts)
            verdict.descriptors.append(f"{member.name}: {before:.0f} -> {after:.0f}, peak {max(counts)}")
            if is_growth(before, after, GROWTH_DESCRIPTORS):
                found.append(f"descriptors of {member.name} grew from {before:.0f} to {after:.0f}")


def quarters(samples: list[int]) -> tuple[float, float]:
    """The medians of the second and of the last quarter."""
    quarter = max(1, len(samples) // 4)
    return statistics.median(samples[quarter : 2 * quarter] or samples), statistics.median(samples[-quarter:])


def is_growth(before: float, after: float, allowance: float) -> bool:
    """Whether a median is more than what a flat curve shows."""
    return after > before * (1 + GROWTH_SHARE) + allowance


def duration_s(text: str) -> float:
    """``90s``, ``30m``, ``2h`` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"not a duration such as 90s, 30m or 2h: {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def allow_descriptors() -> None:
    """Let this process, the attacker, open as many as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run(options: argparse.Namespace, console: Console) -> int:
    """Soak and print the verdict."""
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    console.print(f"seed {seed}", highlight=False)
    with members("raftkv", options.nofile) as cluster:
        soak = Soak(cluster, options.seconds, seed, options.scale, options.attack_seconds)
        verdict = await soak.run(options.attackers, console)
    print(json.dumps(verdict.as_json(), indent=2))
    console.print("MISSED: " + "; ".join(verdict.misses) if verdict.misses else "all bars hold", highlight=False)
    return int(bool(verdict.misses))


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostile.soak", description="hostile clients for long")
    parser.add_argument("--for", dest="seconds", type=duration_s, default=1800.0, help="e.g. 90s, 30m, 2h")
    parser.add_argument("--nofile", type=int, default=1024, help="limit of descriptors of a member")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--scale", type=float, default=0.05, help="of the rows' numbers, but connections")
    parser.add_argument("--attackers", type=int, default=2, help="rows at once")
    parser.add_argument("--attack-seconds", type=float, default=4.0, help="of a row that can be repeated")
    options = parser.parse_args()
    allow_descriptors()
    sys.exit(asyncio.run(run(options, Console(stderr=True))))


if __name__ == "__main__":
    main()
