"""Tables and progress bars.

``render`` draws a table as etcdctl draws it, to the byte: a frame of ``+``, ``-`` and ``|``, an upper-case centred
header, cells to the right, and cells longer than 30 columns folded at spaces so that the lines come out most even.
``out`` prints a table for people: frame and colour on a terminal, plain columns elsewhere. Plain columns are stable:
two spaces apart, one header line, no colour, for any width; JSON serves scripts better. Progress bars are shown on a
terminal only, so that logs and pipes stay clean.

>>> print(render(["a_b"], [["xyz"]]))
+-----+
| A B |
+-----+
| xyz |
+-----+
"""

from __future__ import annotations

import json
import math
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

R = TypeVar("R")

FOLD_COLUMNS = 30
_TOO_LONG = 100_000  # what a line over the limit costs; only a single long word ever is


def width(text: str) -> int:
    """Return how many columns the text takes on a terminal."""
    if text.isascii():
        return len(text)
    wide = ("W", "F")
    return sum(2 if unicodedata.east_asian_width(c) in wide else 1 for c in text if not unicodedata.combining(c))


def fold(text: str, limit: int) -> list[str]:
    """Break at spaces into lines of at most ``limit`` columns, least squared slack first; no word is cut.

    Arguments:
        text: to break.
        limit: columns a line.
    """
    words = text.replace("\n", " ").split(" ")
    limit = max(limit, *map(width, words))

    @cache
    def best(start: int) -> tuple[int, int]:
        """Return the cost of the lines from a word on, and where the first of them ends."""
        if width(" ".join(words[start:])) <= limit:
            return 0, len(words)
        found = []
        for end in range(start + 1, len(words)):
            columns = width(" ".join(words[start:end]))
            too_long = _TOO_LONG if columns > limit else 0
            found.append(((limit - columns) ** 2 + too_long + best(end)[0], end))
        return min(found)

    lines, start = [], 0
    while start < len(words):
        end = best(start)[1]
        lines.append(" ".join(words[start:end]))
        start = end
    return lines


def _cell(text: str) -> list[str]:
    widest = max(map(width, text.split("\n")))
    return fold(text, min(widest, FOLD_COLUMNS))


def _title(name: str, columns: int) -> str:
    text = name.replace("_", " ").strip().upper()
    gap = columns - width(text)
    return " " * (gap // 2) + text + " " * (gap - gap // 2)


def _right(text: str, columns: int) -> str:
    return " " * (columns - width(text)) + text


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as text without the last line end.

    Arguments:
        header: names of the columns.
        rows: cells of each row.
    """
    heads = [_cell(name) for name in header]
    cells = [[_cell(text) for text in row] for row in rows]
    columns = [max(width(line) for row in [heads, *cells] for line in row[i]) for i in range(len(header))]
    rule = "+" + "".join("-" * (size + 2) + "+" for size in columns)
    lines = [rule, *_lines(heads, columns, _title), rule]
    for row in cells:
        lines += _lines(row, columns, _right)
    if rows:
        lines.append(rule)
    return "\n".join(lines)


def _lines(row: list[list[str]], columns: list[int], align: Callable[[str, int], str]) -> list[str]:
    height = max(map(len, row))
    padded = [cell + [""] * (height - len(cell)) for cell in row]
    return [
        "|" + "".join(f" {align(cell[i], size)} |" for cell, size in zip(padded, columns, strict=True))
        for i in range(height)
    ]


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: its header, its cells, and the style of each row."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    styles: Sequence[str] = ()


def printable(text: str) -> str:
    """Escape a text that another program wrote: one line, without control sequences for the terminal.

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


ROLE_STYLES: Final = {"leader": "bold green", "follower": "green", "learner": "cyan"} | dict.fromkeys(
    ("silent", "exited"), "bold red"
)
"""Styles of members, by their role; others are yellow."""


def draw(
    columns: Sequence[tuple[str, Callable[[R], str]]], rows: Sequence[R], left: Sequence[str], **look: Any
) -> Table:
    """Return a table that is drawn again and again, as of members: their roles have colours.

    Arguments:
        columns: each with the cell that it has for a row.
        rows: of the table.
        left: names of the columns that begin at the left.
        look: of rich's table.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(**look)
    for name, _ in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name != "identity")
    for row in rows:
        cells = [(name, make(row)) for name, make in columns]
        table.add_row(*(Text(cell, ROLE_STYLES.get(cell, "yellow") if name == "role" else "") for name, cell in cells))
    return table


def tell(as_json: bool, plain: Any, shown: Rows | str | Callable[[], object]) -> None:
    """Print an answer: a line of JSON for programs; for people a table, a text, or what a function prints.

    Arguments:
        as_json: whether JSON is wanted.
        plain: what JSON is made of, by ``to_plain``.
        shown: for people.
    """
    if as_json:
        print(json.dumps(to_plain(plain), allow_nan=False), flush=True)
    elif isinstance(shown, Rows):
        out(shown)
    elif isinstance(shown, str):
        print(shown, flush=True)
    else:
        shown()


def to_plain(value: Any) -> Any:
    """Convert to what JSON can hold: records to objects, numbers that JSON does not have to their names.

    >>> to_plain({"loss": math.nan, "steps": (1, 2)})
    {'loss': 'NaN', 'steps': [1, 2]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


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


@contextmanager
def progress_bar(
    what: str, columns: Sequence[str], total: int | None = None, *, hidden: bool = False
) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error inside the block, if that is a terminal; yields what updates it.

    Arguments:
        what: before the bar; empty: nothing.
        columns: of rich, behind the bar: ``Download`` stands for ``DownloadColumn``.
        total: of the bar; None: not known yet.
        hidden: show none, as for JSON.
    """
    if hidden or not sys.stderr.isatty():
        yield lambda **fields: None
        return
    from rich import progress
    from rich.console import Console

    text = [progress.TextColumn("{task.description}")] if what else []
    made = [*text, progress.BarColumn(), *(getattr(progress, f"{name}Column")() for name in columns)]
    with progress.Progress(*made, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda **fields: bars.update(task, **fields)


@contextmanager
def byte_bar(what: str, *, hidden: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of bytes; yields a function of the bytes done and of all, which any thread may call.

    Arguments:
        what, hidden: as of ``progress_bar``.
    """
    with progress_bar(what, ("Download", "TransferSpeed"), hidden=hidden) as update:
        yield lambda done, total: update(completed=done, total=total)
