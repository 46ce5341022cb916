"""Medians and ranges of the pairs, for people: a table in the terminal, and one in Markdown for the page."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

COLUMNS = (
    "row",
    "generator",
    "its cost",
    "etcd 3.5.1",
    "raftkv",
    "ratio (range)",
    "members' cost",
    "ratio",
    "the leader's",
)
WIDTH_MIN = 140
_LEFT = 2
"""Number of columns, from the left, that hold text."""


@dataclass(frozen=True)
class Line:
    """One row, put together from its pairs; ratios are raftkv's figure as a multiple of etcd's in the same pair."""

    row: str
    generator: str
    etcd: dict[str, float]
    raftkv: dict[str, float]
    ratios: list[float]
    cost_ratio: float

    @classmethod
    def of(cls, row: dict[str, Any]) -> Line:
        """Take the medians."""

        def medians(program: str) -> dict[str, float]:
            return {name: statistics.median(one[name] for one in row[program]) for name in row[program][0]}

        def ratios(name: str) -> list[float]:
            return [ours[name] / theirs[name] for theirs, ours in zip(row["etcd"], row["raftkv"], strict=True)]

        etcd, raftkv = medians("etcd"), medians("raftkv")
        cost = raftkv["members_us"] / etcd["members_us"] if etcd["members_us"] else 0.0
        return cls(row["row"], row["generator"], etcd, raftkv, ratios("rate"), cost)

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    def cells(self) -> list[str]:
        """What the table shows, under ``COLUMNS``."""
        generator, members, leader = (
            " / ".join(us(side[name]) for side in (self.etcd, self.raftkv)) + " us"
            for name in ("generator_us", "members_us", "leader_us")
        )
        return [
            self.row,
            self.generator,
            generator,
            f"{self.etcd['rate']:,.0f}/s",
            f"{self.raftkv['rate']:,.0f}/s",
            f"**{self.ratio:.2f}** ({min(self.ratios):.2f}-{max(self.ratios):.2f})",
            members,
            f"{self.cost_ratio:.2f}",
            leader,
        ]


def us(value: float) -> str:
    """Show microseconds with two digits that count."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def others_shares(results: dict[str, Any]) -> list[float]:
    """Return what share of the cores others used, for each measurement."""
    return [one["others_share"] for row in results["rows"] for name in ("etcd", "raftkv") for one in row[name]]


def facts(results: dict[str, Any]) -> str:
    """Say in one paragraph how the figures came about."""
    machine = results["machine"]
    shares = others_shares(results)
    return (
        f"Three members of each program and the generator on {machine['cores']} shared cores, both clusters up, calls "
        f"to the leader, 256-byte values, fsync on; {results['pairs']} alternating pairs of about "
        f"{results['seconds']:g} s, {machine['date']}, Python {machine['python']}, hot path {machine['hot_path']}. "
        f"Rates and ratios are medians. Costs are user and system time of processors for a call (of streams: for a "
        f"keep-alive or an event), etcd / raftkv; members are taken all three together. All calls of h2load in a row "
        f"are the same bytes, so all puts go to one key. Load of the machine before the run "
        f"{machine['load_before']:g}; other work used {statistics.median(shares):.0%} of the cores meanwhile "
        f"({min(shares):.0%} to {max(shares):.0%})."
    )


def markdown(results: dict[str, Any]) -> str:
    """The table and how it came about."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - _LEFT)]
    lines += [f"| {' | '.join(Line.of(row).cells())} |" for row in results["rows"]]
    return "\n".join([*lines, "", facts(results)])


def show(results: dict[str, Any]) -> None:
    """Print the table for people."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number < _LEFT else "right", no_wrap=True)
    for row in results["rows"]:
        table.add_row(*(cell.replace("**", "") for cell in Line.of(row).cells()))
    console = Console()
    console.width = max(console.width, WIDTH_MIN)
    console.print(table)
    console.print(facts(results), highlight=False)
