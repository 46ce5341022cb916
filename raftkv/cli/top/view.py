"""How ``raftkvctl top`` looks: a table of members under a line about the cluster.

Owns the columns and which of them give way: in a narrow window the last of ``_COLUMNS`` are left out, never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from raftkv.cli.output.printer import human_size
from raftkv.cli.top.model import Row, total

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

_STYLES: Final = {"leader": "bold green", "follower": "green", "learner": "cyan", "silent": "bold red"}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _size(value: int | None) -> str:
    return "-" if value is None else human_size(value)


Column = tuple[str, Callable[[Row], str]]
_FIRST: Final[tuple[Column, ...]] = (("member", lambda row: row.name), ("role", lambda row: row.role))
_COLUMNS: Final[tuple[Column, ...]] = (
    ("term", lambda row: _number(row.term)),
    ("lag", lambda row: _number(row.lag)),
    ("revision", lambda row: _number(row.revision)),
    ("db size", lambda row: _size(row.db_size_bytes)),
    ("writes/s", lambda row: _number(row.writes_per_s)),
    ("reads/s", lambda row: _number(row.reads_per_s)),
    ("events/s", lambda row: _number(row.events_per_s)),
    ("renewals/s", lambda row: _number(row.keepalives_per_s)),
    ("watchers", lambda row: _number(row.watchers)),
    ("watch lag", lambda row: _number(row.watch_lag if row.watch_lag is not None else row.slow_watchers)),
    ("elections", lambda row: _number(row.leader_changes)),
    ("leases", lambda row: _number(row.leases)),
    ("index", lambda row: _number(row.index)),
)
_PADDING: Final = 3
"""Columns of the terminal that a column of the table takes besides its text."""


def headline(rows: Sequence[Row]) -> str:
    """Return the cluster in one line."""
    whole: dict[str, Any] = total(rows)
    leader = f"leader {whole['leader']}" if whole["leader"] else "no leader"
    return (
        f"{whole['answering']} of {whole['members']} members answer, {leader}, revision {whole['revision']:,}, "
        f"{_number(whole['writes_per_s'])} writes/s, {_number(whole['reads_per_s'])} reads/s, "
        f"{_number(whole['events_per_s'])} events/s, {_number(whole['keepalives_per_s'])} keepalives/s"
    )


def fitting(rows: Sequence[Row], columns: int) -> tuple[Column, ...]:
    """Return the columns of the table that a window of so many columns has room for.

    Arguments:
        rows: what is to be shown.
        columns: width of the window.
    """

    def width(column: Column) -> int:
        return max(len(column[0]), *(len(column[1](row)) for row in rows), 0) + _PADDING

    left = columns - 1 - sum(map(width, _FIRST))
    chosen = []
    for column in _COLUMNS:
        left -= width(column)
        if left < 0:
            break
        chosen.append(column)
    return tuple(chosen)


class View:
    """The whole screen; it fits itself to the window when it is drawn."""

    def __init__(self, rows: Sequence[Row], hint: str = "") -> None:
        self._rows = rows
        self._hint = hint

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(headline(self._rows))
        yield self._table(options.max_width)
        yield from (Text(f"alarm: {alarm}", "bold red") for alarm in total(self._rows)["alarms"])
        yield from (Text(f"{row.name}: {row.error}", "red") for row in self._rows if row.error)

    def _table(self, width: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(caption=self._hint or None, caption_justify="left")
        columns = fitting(self._rows, width)
        for name, _ in _FIRST:
            table.add_column(name, no_wrap=True)
        for name, _ in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            role = Text(row.role, _STYLES.get(row.role, "yellow"))
            cells: list[RenderableType] = [Text(row.name), role, *(make(row) for _, make in columns)]
            table.add_row(*cells)
        return table
