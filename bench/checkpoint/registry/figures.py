"""Figures with their bars, and how they are printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one program; ``bar``: what it may be at most; None: it has no bar."""

    row: str
    name: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def is_met(self) -> bool:
        return self.bar is None or self.value <= self.bar


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that so many percent are at or below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def latencies(row: str, name: str, seconds: Sequence[float], bar_ms: float | None = None) -> list[Figure]:
    """Return p50 and p99 of some seconds, in milliseconds."""
    return [
        Figure(row, f"{name} p{percent}", round(percentile(seconds, percent) * 1e3, 2), "ms", bar_ms)
        for percent in (50, 99)
    ]


def as_json(found: dict[str, list[Figure]], facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything as one object."""
    programs = {program: [{**asdict(one), "met": one.is_met} for one in figures] for program, figures in found.items()}
    return {"machine": facts, "load": list(os.getloadavg()), "programs": programs, "missed": missed(found)}


def table(found: dict[str, list[Figure]], facts: dict[str, Any]) -> str:
    """Return everything as Markdown; bars are raftkv's."""
    names = list(dict.fromkeys((one.row, one.name, one.unit) for figures in found.values() for one in figures))
    values = {program: {(one.row, one.name): one for one in figures} for program, figures in found.items()}
    lines = [f"| row | figure | {' | '.join(found)} | bar | |", f"|---|---|{'---:|' * len(found)}---:|---|"]
    for row, name, unit in names:
        cells = [values[program].get((row, name)) for program in found]
        shown = [f"{one.value:,g} {unit}" if one is not None else "-" for one in cells]
        own = values.get("raftkv", {}).get((row, name))
        bar = f"{own.bar:g} {unit}" if own is not None and own.bar is not None else ""
        verdict = ("met" if own.is_met else "MISSED") if own is not None and bar else ""
        lines.append(f"| {row} | {name} | {' | '.join(shown)} | {bar} | {verdict} |")
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    return "\n".join([*lines, "", f"{facts['cores']} cores, Python {facts['python']}, {facts['date']}; load {load}"])


def missed(found: dict[str, list[Figure]]) -> list[str]:
    """Return what raftkv misses."""
    return [
        f"{one.row}: {one.name} {one.value:g} {one.unit}, the bar is {one.bar:g}"
        for one in found.get("raftkv", [])
        if not one.is_met
    ]
