"""The effect of one tenant on another: one identity floods three members; another uses a tenth of their capacity.

    python -m bench.tenants [--floods puts,txns,gzip] [--scale 0.2] [--seconds 5] [--programs raftkv,etcd]

A flood is a row of ``bench.hostile``, or several at once; its attacker has a separate address, or presents a user's
token. The honest client is a separate process with an open loop: it first has the members for itself, then shares them
with the flood. Only values of one run, on the same cores, are compared:

    rate kept    answered puts per second during the flood, as a share of those without it
    p99          of an honest put in ms, without and during the flood
    stall        longest duration of an honest put in s, from the time when it was due

The bars: at least 90 % of the rate, p99 at most 1.2 times, a stall of at most 0.2 s, no election, no error for the
honest client. The attacker shares the cores with the members, where each cluster's attackers have machines of their
own. So the kernel serves the attacker last (``os.nice``): what is measured is the members' work for it, not its own.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from time import monotonic
from typing import Any, Final

import raftkv.aio
from bench.hostile.attacker import ROOT_PASSWORD, Attacker, login, secure
from bench.hostile.honest import HonestProcess
from bench.hostile.measure import SIZE, agreement, elections, metrics_of
from bench.hostile.rows import ROWS, Row
from bench.report import finish, machine, markdown, names_of, parser_of, plot_bars
from bench.stage import NAMES, PROGRAMS, allow_many_files, load, number_of_leader, progress
from raftkv.rpc.status import RpcError
from tests.procs import ROOT, Cluster, Program

GREEDY_ADDRESS: Final = "127.9.9.9"
"""Source address of the flood, which makes it a separate identity."""
ATTACKER_NICE: Final = 19
CAPACITY_PUTS: Final = 10_000
CALM_S: Final = 1.0
RATE_KEPT_MIN, P99_RATIO_MAX, STALL_MAX_S = 0.9, 1.2, 0.2

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
"""Rows of ``bench.hostile`` that run concurrently, by name of the flood; each other row is a flood by its own name."""
KNOWN: Final = {row.name: (row.name,) for row in ROWS} | FLOODS
ALL: Final = [*FLOODS, *(row.name for row in ROWS if (row.name,) not in FLOODS.values())]
"""Each row alone, and ten at once."""

PLOT: Final = ROOT / "docs" / "images" / "tenants.svg"
COLOURS: Final = {"etcd": "#9aa5b1", "raftkv": "#2563eb"}
HEADINGS: Final = (
    "flood", "capacity/s", "rate kept", "p99 alone ms", "p99 ms", "ratio", "stall s", "elections", "errors",
    "raftkv misses",
)  # fmt: skip


class GreedyLoop(asyncio.SelectorEventLoop):
    """An event loop whose connections come from ``GREEDY_ADDRESS``."""

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """Bind the socket to the address, then connect."""
        sock.bind((GREEDY_ADDRESS, 0))
        await super().sock_connect(sock, address)


async def measure(flood: str, program: Program, scale: float, seconds: float) -> tuple[list[str], list[str]]:
    """Run one flood against fresh members of a program; return the cells of the table, and the missed bars."""
    rows = [row for row in ROWS if row.name in KNOWN[flood]]
    with Cluster(program, SIZE) as cluster:
        number = number_of_leader(cluster)
        capacity = load(cluster.endpoints, "put", clients=64, connections=SIZE, total=CAPACITY_PUTS)["rate"]
        token = await secure(cluster.endpoints[number]) if any(row.users for row in rows) else ""
        attackers = [Attacker(cluster.endpoints, number, scale, token=token) for _ in rows]
        try:
            user = await _honest_user(cluster.endpoints[number]) if token else ""
            for row, attacker in zip(rows, attackers, strict=True):
                await row.prepare(attacker)
            pairs = list(zip(rows, attackers, strict=True))
            flooding = functools.partial(_flood, pairs, seconds)
            cells, missed = await _compare(cluster, capacity / 10, user, flooding, seconds)
            problem = await agreement(cluster, token)
        except (RpcError, TimeoutError) as error:
            cells, missed, problem = [""] * 7, [], f"{type(error).__name__}: {error}"
        finally:
            for attacker in attackers:
                await attacker.close()
    return [f"{capacity:,.0f}", *cells], missed + [problem] * bool(problem)


async def _honest_user(endpoint: str) -> str:
    """Create a user with the permissions that the honest client needs; return its token."""
    async with raftkv.aio.connect(endpoint, user="root", password=ROOT_PASSWORD) as kv:
        await kv.users.add("honest", "honest")
        await kv.roles.add("honest")
        await kv.roles.grant("honest", "readwrite", "honest/", prefix=True)
        await kv.users.grant_role("honest", "honest")
    return await login(endpoint, "honest", "honest")


async def _compare(
    cluster: Cluster, puts_per_s: float, user: str, flood: Callable[[], Awaitable[None]], seconds: float
) -> tuple[list[str], list[str]]:
    honest = HonestProcess(cluster.endpoints, puts_per_s=puts_per_s, token=user)
    try:
        await honest.window(functools.partial(asyncio.sleep, CALM_S))  # the flood has begun by then
        alone, alone_per_s = await honest.window(functools.partial(asyncio.sleep, seconds))
        before = [metrics_of(member) for member in cluster.members]
        told, per_s = await honest.window(flood)
    finally:
        honest.end()
    changes = elections(before, [metrics_of(member) for member in cluster.members])
    kept, stall_s = per_s / alone_per_s, told["put"]["max_ms"] / 1e3
    ratio = told["put"]["p99_ms"] / alone["put"]["p99_ms"]
    bars = (
        (kept < RATE_KEPT_MIN, f"{kept:.0%} of the rate"),
        (ratio > P99_RATIO_MAX, f"p99 x {ratio:.1f}"),
        (stall_s > STALL_MAX_S, f"a stall of {stall_s:.2f} s"),
        (changes > 0, f"{changes} elections"),
        (told["errors"] > 0, f"{told['errors']} honest errors"),
    )
    p99s = [f"{one['put']['p99_ms']:.1f}" for one in (alone, told)]
    counts = (str(changes), str(told["errors"]))
    return [f"{kept:.0%}", *p99s, f"{ratio:.1f}", f"{stall_s:.2f}", *counts], [text for missed, text in bars if missed]


async def _flood(pairs: list[tuple[Row, Attacker]], seconds: float) -> None:
    os.nice(ATTACKER_NICE)
    for _, attacker in pairs:
        attacker.until = monotonic() + seconds
    # Rows that still run are ended: the window is the same for all floods.
    tasks = [asyncio.create_task(row.repeat(attacker)) for row, attacker in pairs]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def run(flood: str, program: str, scale: float, seconds: float) -> tuple[list[str], list[str]]:
    """Call ``measure`` in this process, whose priority is lower afterwards."""
    found = next(one for one in PROGRAMS if one.name == program)
    with asyncio.Runner(loop_factory=GreedyLoop) as runner:
        return runner.run(measure(flood, found, scale, seconds))


def main() -> None:
    """Run the measurements and print the table; exit with 1 if raftkv missed a bar."""
    parser = parser_of(__doc__, writes="the table and the plot of docs/reference/performance.md")
    parser.add_argument(
        "--floods", type=names_of([*KNOWN, "all"]), default=list(FLOODS), help=f"all, or of {', '.join(KNOWN)}"
    )
    parser.add_argument("--scale", type=float, default=0.2, help="of the numbers of the flood's rows")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the time alone, and of the flood")
    parser.add_argument("--programs", type=names_of(NAMES), default=["raftkv"])
    options = parser.parse_args()
    if options.floods == ["all"]:
        options.floods = ALL
    allow_many_files()
    lines, problems, bars = list[list[str]](), list[str](), list[tuple[str, float, str, str]]()
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as processes:
        for flood in options.floods:
            found = {one: processes.submit(run, flood, one, options.scale, options.seconds).result()
                     for one in options.programs}  # fmt: skip
            told = "; ".join(found["raftkv"][1]) if "raftkv" in found else ""
            columns = zip(*(cells for cells, _ in found.values()), strict=True)
            lines.append([flood, *(" / ".join(column) for column in columns), told or "-"])
            problems += [f"{flood}: {text}" for text in found.get("raftkv", ([], []))[1]]
            progress("  ".join(lines[-1]))
            if flood in FLOODS:
                bars += [(f"{flood}, {one}", float(cells[5] or 0), f"{cells[5]} s", COLOURS[one])
                         for one, (cells, _) in found.items()]  # fmt: skip
    if options.write:
        plot_bars(PLOT, "Longest put of a client beside a flood of another", "seconds", bars)
    facts = machine()
    what = (
        f"{' / '.join(options.programs)}; {facts['cores']} cores, hot path {facts['hot_path']}, "
        f"{options.seconds:g} s for each flood, {facts['date']}"
    )
    finish(f"{markdown(HEADINGS, lines, texts=1)}\n\n{what}", problems, table="tenants" if options.write else "")


if __name__ == "__main__":
    main()
