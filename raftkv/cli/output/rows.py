"""Tables for people: frames and colour on a terminal, the same cells as plain columns elsewhere.

Plain text is stable: columns two spaces apart, one header line, no colour, whatever the width; scripts are better
served by JSON. Leaves out etcdctl's own formats (``printer``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from raftkv.cli.output.table import width


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: its header, its cells, and the style of each row."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    styles: Sequence[str] = ()


def printable(text: str) -> str:
    """Return a text of somebody else's that does nothing to a terminal, and is one line.

    >>> printable("caf\\u00e9 \\x1b[2J")
    'caf\u00e9 \\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def out(rows: Rows) -> None:
    """Print a table: with frame and colour on a terminal wide enough for whole words, as plain columns elsewhere."""
    rows = Rows(rows.header, [tuple(map(printable, row)) for row in rows.rows], rows.styles)
    if not sys.stdout.isatty():
        print(plain(rows))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, least = Console(), _longest_words(rows)
    if sum(least) + 3 * len(least) + 1 > console.width:  # the frame would cut names short, and leave nothing of others
        print(plain(rows))
        return
    table = Table()
    for name, columns in zip(rows.header, least, strict=True):
        table.add_column(name, min_width=columns)
    for number, row in enumerate(rows.rows):
        style = rows.styles[number] if rows.styles else ""
        table.add_row(*(Text(cell) for cell in row), style=style)
    console.print(table)


def _longest_words(rows: Rows) -> list[int]:
    """Return for each column the width of its longest word: lines are broken between words alone."""
    words = (" ".join(cells).split() for cells in zip(rows.header, *rows.rows, strict=True))
    return [max(map(width, column), default=0) for column in words]


def plain(rows: Rows) -> str:
    """Lay the cells out in columns.

    >>> print(plain(Rows(("run", "nodes"), [("jobs/a", "2")])))
    run     nodes
    jobs/a  2
    """
    lines = [rows.header, *rows.rows]
    widths = [max(width(line[place]) for line in lines) for place in range(len(rows.header))]
    return "\n".join(
        "  ".join(cell + " " * (size - width(cell)) for cell, size in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def clock(seconds: float) -> str:
    """Format a time of day, with the date if it is not today's; empty: not known."""
    if not seconds:
        return ""
    shown = time.localtime(seconds)
    today = shown[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", shown)


def count(number: int, what: str) -> str:
    """Format as ``1 node`` or ``2 nodes``.

    Arguments:
        number: how many.
        what: in the singular.
    """
    return f"{number} {what}{'' if number == 1 else 's'}"
