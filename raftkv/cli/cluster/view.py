"""What a local cluster shows of itself: a live table on a terminal, lines of news elsewhere.

Owns the rows and how they look; asks nobody. ``rows`` come from ``cluster``, which asks the members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raftkv.cli.output.printer import human_size

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One member at one moment. ``role`` is leader, follower, learner, candidate, starting, silent or exited."""

    name: str
    address: str
    role: str
    term: int = 0
    index: int = 0
    applied: int = 0
    revision: int = 0
    size_bytes: int = 0
    writes_per_s: float = 0.0
    remark: str = ""

    @property
    def is_serving(self) -> bool:
        """Whether it answers and knows a leader."""
        return self.role in ("leader", "follower", "learner")


_STYLES = {"leader": "bold green", "follower": "green", "learner": "cyan", "exited": "bold red", "silent": "red"}
_COLUMNS = ("member", "role", "term", "index/applied", "revision", "db size", "writes/s", "address")


def make_table(rows: Sequence[Row]) -> Table:
    """Return the live table."""
    from rich.markup import escape
    from rich.table import Table

    url = dashboard(rows)
    caption = f"dashboard: {url}   Ctrl-C stops all members" if url else "Ctrl-C stops all members"
    table = Table(title="raftkv cluster", caption=caption)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("member", "role", "address") else "right")
    for row in rows:
        style = _STYLES.get(row.role, "yellow")
        table.add_row(row.name, f"[{style}]{row.role}[/]", *_numbers(row), escape(row.remark or row.address))
    return table


def dashboard(rows: Sequence[Row]) -> str:
    """Return where the dashboard is: at the first member that serves; empty while there is none.

    Arguments:
        rows: of the moment.
    """
    return next((f"{row.address}/ui/" for row in rows if row.is_serving), "")


def _numbers(row: Row) -> list[str]:
    if not row.is_serving and row.role != "candidate":
        return ["-"] * 5
    return [
        str(row.term),
        f"{row.index}/{row.applied}",
        str(row.revision),
        human_size(row.size_bytes),
        f"{row.writes_per_s:.0f}",
    ]


def news(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """Return lines about what has changed between two moments.

    Arguments:
        before, after: the rows of the two moments.
    """
    old = {row.name: row for row in before}
    lines = []
    for row in after:
        previous = old.get(row.name)
        if previous is not None and (previous.role, previous.term) == (row.role, row.term):
            continue
        if row.role == "exited":
            lines.append(f"{row.name}: {row.remark}")
        elif row.is_serving:
            lines.append(f"{row.name}: {row.role} in term {row.term} at {row.address}")
        elif previous is not None:
            lines.append(f"{row.name}: {row.role}")
    was_serving = bool(before) and all(row.is_serving for row in before)
    if not was_serving and after and all(row.is_serving for row in after):
        lines.append(f"dashboard: {dashboard(after)}")
        lines.append(f"ready: raftkvctl --endpoints {','.join(row.address for row in after)} endpoint status")
    return lines
