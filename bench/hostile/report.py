"""The bars of a row, and the table."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.hostile.measure import Outcome

TURN_LIMIT_MS: Final = 50.0


def together(rounds: list[Outcome]) -> Outcome:
    """Several rounds of one program: the one of median honest p99, with the worst of all else that has a bar."""
    by_latency = sorted(rounds, key=lambda outcome: outcome.put.get("p99_ms", math.inf))
    return replace(
        by_latency[(len(rounds) - 1) // 2],
        turns_ms=[max(turns) for turns in zip(*(outcome.turns_ms for outcome in rounds), strict=False)],
        turns_own_ms=[max(turns) for turns in zip(*(outcome.turns_own_ms for outcome in rounds), strict=False)],
        errors=sum(outcome.errors for outcome in rounds),
        leader_changes=max(outcome.leader_changes for outcome in rounds),
        problem=next((outcome.problem for outcome in rounds if outcome.problem), ""),
    )


def misses(raftkv: Outcome, etcd: Outcome | None) -> list[str]:
    """The bars that a row of raftkv misses."""
    found = [raftkv.problem] if raftkv.problem else []
    if raftkv.turns_own_ms and max(raftkv.turns_own_ms) > TURN_LIMIT_MS:
        found.append(f"a turn of {max(raftkv.turns_own_ms):.0f} ms")
    if raftkv.leader_changes:
        found.append(f"{raftkv.leader_changes} changes of leader")
    if raftkv.errors:
        found.append(f"{raftkv.errors} honest errors")
    if etcd is not None and not etcd.problem and raftkv.put and raftkv.put["p99_ms"] > etcd.put["p99_ms"]:
        found.append(f"honest p99 {raftkv.put['p99_ms']:.1f} ms, etcd's {etcd.put['p99_ms']:.1f}")
    return found


def print_table(rows: list[tuple[Outcome | None, Outcome | None, list[str]]], console: Console) -> None:
    """One line for each program of each row: raftkv's, etcd's, what raftkv misses."""
    table = Table(box=None, header_style="bold")
    for name in ("row", "program"):
        table.add_column(name, no_wrap=True)
    for name in (
        "turn ms",
        "own ms",
        "put p50",
        "p99",
        "max ms",
        "read p99",
        "attack s",
        "leader",
        "peak MB",
    ):
        table.add_column(name, justify="right")
    table.add_column("misses", overflow="fold")
    for raftkv, etcd, missed in rows:
        for outcome in filter(None, (raftkv, etcd)):
            is_ours = outcome.program == "raftkv"
            verdict = ("; ".join(missed) or "-") if is_ours else outcome.problem
            table.add_row(*_cells(outcome), verdict, style="red" if is_ours and missed else None)
    console.print(table)


def _cells(outcome: Outcome) -> list[str]:
    put, read = outcome.put, outcome.read
    peak = f"{outcome.peak_mb:,.0f} (+{outcome.growth_mb:,.0f})"
    return [
        outcome.row,
        outcome.program,
        *(f"{max(turns):,.0f}" if turns else "" for turns in (outcome.turns_ms, outcome.turns_own_ms)),
        *(f"{put[name]:,.1f}" if put else "" for name in ("p50_ms", "p99_ms", "max_ms")),
        f"{read['p99_ms']:,.1f}" if read else "",
        f"{outcome.attack_s:.1f}",
        str(outcome.leader_changes),
        peak,
    ]


def details(outcome: Outcome) -> list[str]:
    """What the table has no room for, a line each."""
    lines = [f"long turn: {work}" for work in dict.fromkeys(outcome.work)]
    lines += [f"refused {count} times: {text}" for text, count in outcome.refusals.items()]
    lines += [f"honest error: {text}" for text in outcome.error_texts[:3]]
    lines += [f"{name}: {value:g}" for name, value in outcome.notes.items()]
    if outcome.restart_s:
        lines.append(f"restart: {outcome.restart_s:.2f} s")
    return [f"{outcome.row} {outcome.program}: {line}" for line in lines]
