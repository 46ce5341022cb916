"""Can one tenant be felt by another? An identity floods three members; another asks for a tenth of their capacity.

    python -m bench.tenants [--flood puts --flood reads ...] [--scale 0.2] [--seconds 5] [--programs raftkv,etcd]

The floods are rows of ``bench.hostile``, whose attacker comes from an address of its own (``GREEDY_ADDRESS``), or shows
a user's token. The honest client is a process of its own, in an open loop: it first has the members for itself, then
beside the flood. What is compared is within one run, on the same cores:

    rate kept    answered puts a second beside the flood, of those without
    p99 ratio    of an honest put, beside the flood and without
    stall        the longest that an honest put took, from when it was due

The bars: at least 90 % of the rate, p99 at most 1.2 times, a stall of at most 0.2 s, no election, no honest error. The
attacker runs on the cores of the members: on few of them, it takes time from both, which no member can give back.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import resource
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.hostile.attacker import KV, Attacker
from bench.hostile.rows import ROWS, Row
from bench.hostile.stage import HonestProcess, agreement, leader_number, members, metrics_of
from bench.hostile.users import UserChannel, permission, secure, user_of
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError

GREEDY_ADDRESS: Final = "127.9.9.9"
"""Where the flood comes from: an identity of its own, by address."""
CAPACITY_S: Final = 2.0
CAPACITY_CALLS: Final = 64
CALM_S: Final = 1.0
RATE_KEPT_MIN, P99_RATIO_MAX, STALL_MAX_S = 0.9, 1.2, 0.2
LEADER_CHANGES: Final = "etcd_server_leader_changes_seen_total"

FLOODS: Final = {
    "puts": ("burst-puts",),
    "txns": ("burst-txns",),
    "reads": ("burst-ranges",),
    "sorts": ("sort-50",),
    "watches": ("watch-unread",),
    "history": ("watch-history",),
    "leases": ("leases-100k",),
    "connections": ("connections",),
    "logins": ("logins-10k",),
    "frames": ("flood-ping",),
    "ten": (
        "burst-puts", "burst-txns", "burst-ranges", "sort-50", "watch-unread", "leases-100k", "connections",
        "flood-ping", "flood-reset", "churn-key",
    ),
}  # fmt: skip
"""Rows of ``bench.hostile`` that run at once, by name of the flood."""


class GreedyLoop(asyncio.SelectorEventLoop):
    """Connects from ``GREEDY_ADDRESS``."""

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """Bind first."""
        sock.bind((GREEDY_ADDRESS, 0))
        await super().sock_connect(sock, address)


@dataclass
class Outcome:
    """What the honest client had beside one flood, and without; ``problem``: why there is no figure."""

    flood: str
    program: str
    capacity_per_s: float = 0.0
    rate_kept: float = 0.0
    p99_alone_ms: float = 0.0
    p99_ms: float = 0.0
    read_p99_ms: float = 0.0
    stall_s: float = 0.0
    elections: int = 0
    errors: int = 0
    refused: int = 0
    problem: str = ""

    @property
    def p99_ratio(self) -> float:
        """Of an honest put."""
        return self.p99_ms / self.p99_alone_ms if self.p99_alone_ms else 0.0

    def misses(self) -> list[str]:
        """The bars that were missed."""
        found = [self.problem] if self.problem else []
        bars = (
            (self.rate_kept < RATE_KEPT_MIN, f"{self.rate_kept:.0%} of the rate"),
            (self.p99_ratio > P99_RATIO_MAX, f"p99 x {self.p99_ratio:.1f}"),
            (self.stall_s > STALL_MAX_S, f"a stall of {self.stall_s:.2f} s"),
            (self.elections, f"{self.elections} elections"),
            (self.errors, f"{self.errors} honest errors"),
        )
        return found + [text for is_missed, text in bars if is_missed]


async def capacity_per_s(endpoints: list[str], token: str) -> float:
    """Return how many puts a second the members answer."""
    channels = [UserChannel(endpoint, token) for endpoint in endpoints]
    request = rpc_pb2.PutRequest(key=b"honest/capacity", value=b"v" * 256).SerializeToString()
    count, until = 0, monotonic() + CAPACITY_S

    async def work(number: int) -> None:
        nonlocal count
        while monotonic() < until:
            await channels[number % len(channels)].unary(KV + "Put", request, 15.0)
            count += 1

    try:
        await asyncio.gather(*map(work, range(CAPACITY_CALLS)))
    finally:
        for channel in channels:
            await channel.close()
    return count / CAPACITY_S


async def window(honest: HonestProcess, beside: Callable[[], Awaitable[None]]) -> tuple[dict[str, Any], float]:
    """Return what the honest client tells of a time, and the answered puts a second in it."""
    honest.mark()
    began = monotonic()
    await beside()
    told = await honest.tell()
    return told, (told["put"]["count"] - told["errors"]) / (monotonic() - began)


async def measure(flood: str, program: str, options: argparse.Namespace) -> Outcome:
    """Run one flood against fresh members of a program."""
    rows = [row for row in ROWS if row.name in FLOODS[flood]]
    outcome = Outcome(flood, program)
    with members(program) as cluster:
        number = await leader_number(cluster)
        token = await secure(cluster.endpoints[number]) if any(row.users for row in rows) else ""
        attackers = [Attacker(cluster.endpoints, number, options.scale, options.scale, token=token) for _ in rows]
        try:
            user = await user_of(attackers[0], "honest", permission(b"honest/", b"honest0")) if token else ""
            for row, attacker in zip(rows, attackers, strict=True):
                await row.prepare(attacker)
            outcome.capacity_per_s = await capacity_per_s(cluster.endpoints, user)
            await _beside(cluster, list(zip(rows, attackers, strict=True)), user, options.seconds, outcome)
            outcome.problem = (await agreement(cluster, token)).problem
        except (RpcError, TimeoutError) as error:
            outcome.problem = f"{type(error).__name__}: {error}"
        finally:
            for attacker in attackers:
                outcome.refused += attacker.refusals.total()
                await attacker.close()
    return outcome


async def _beside(
    cluster: Any, pairs: list[tuple[Row, Attacker]], token: str, seconds: float, outcome: Outcome
) -> None:
    honest = HonestProcess(cluster.endpoints, puts_per_s=outcome.capacity_per_s / 10, token=token)
    try:
        await window(honest, functools.partial(asyncio.sleep, CALM_S))  # it has begun by then
        alone, alone_per_s = await window(honest, functools.partial(asyncio.sleep, seconds))
        before = [metrics_of(member) for member in cluster.members]
        told, per_s = await window(honest, functools.partial(_flood, pairs, seconds))
        after = [metrics_of(member) for member in cluster.members]
    finally:
        honest.end()
    changes = [new.get(LEADER_CHANGES, 0) - old.get(LEADER_CHANGES, 0) for old, new in zip(before, after, strict=True)]
    outcome.rate_kept, outcome.errors, outcome.elections = per_s / alone_per_s, told["errors"], int(max(changes))
    outcome.p99_alone_ms, outcome.p99_ms = alone["put"]["p99_ms"], told["put"]["p99_ms"]
    outcome.read_p99_ms, outcome.stall_s = told["read"]["p99_ms"], told["put"]["max_ms"] / 1e3


async def _flood(pairs: list[tuple[Row, Attacker]], seconds: float) -> None:
    async def rounds(row: Row, attacker: Attacker) -> None:
        attacker.until = monotonic() + seconds
        await row.attack(attacker)
        while row.repeats and not attacker.is_over():
            await row.attack(attacker)

    # A row that is not over by then is ended: the window is the same for all floods.
    tasks = [asyncio.create_task(rounds(row, attacker)) for row, attacker in pairs]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def show(outcomes: list[Outcome], console: Console) -> None:
    """Print the table."""
    table = Table(box=None, header_style="bold")
    for name in ("flood", "program", "capacity/s", "rate kept", "p99 alone", "p99 ms", "ratio", "read p99", "stall s"):
        table.add_column(name, justify="left" if name in ("flood", "program") else "right")
    table.add_column("misses")
    for one in outcomes:
        figures = (
            f"{one.capacity_per_s:,.0f}", f"{one.rate_kept:.0%}", f"{one.p99_alone_ms:.1f}", f"{one.p99_ms:.1f}",
            f"{one.p99_ratio:.1f}", f"{one.read_p99_ms:.1f}", f"{one.stall_s:.2f}",
        )  # fmt: skip
        table.add_row(one.flood, one.program, *figures, "; ".join(one.misses()) or "-")
    console.print(table)


async def run(options: argparse.Namespace) -> int:
    """Measure what was asked for; 1: raftkv missed a bar."""
    console, outcomes = Console(stderr=True, width=150), []
    for flood in options.flood or FLOODS:
        for program in options.programs.split(","):
            outcomes.append(await measure(flood, program, options))
            show(outcomes[-1:], console)
    if options.json:
        print(json.dumps([asdict(one) | {"misses": one.misses()} for one in outcomes], indent=2))
    else:
        show(outcomes, Console(width=150))
    return int(any(one.misses() for one in outcomes if one.program == "raftkv"))


def main() -> None:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.tenants", description="one tenant floods, another works")
    parser.add_argument("--flood", action="append", default=[], choices=FLOODS)
    parser.add_argument("--scale", type=float, default=0.2, help="of the numbers of the flood's rows")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the time alone, and of the flood")
    parser.add_argument("--programs", default="raftkv", help="comma-separated; etcd, raftkv")
    parser.add_argument("--json", action="store_true", help="one object instead of the table")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=GreedyLoop) as runner:
        sys.exit(runner.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
