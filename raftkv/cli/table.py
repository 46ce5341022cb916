"""Tables and progress bars.

``render`` draws a table byte for byte like etcdctl: a frame of ``+``, ``-`` and ``|``, an upper-case centred header,
right-aligned cells, and cells longer than 30 columns folded at spaces into lines of even length. ``out`` prints a table
for people: frame and colour on a terminal, plain columns elsewhere. Plain columns are stable: two spaces apart, one
header line, no colour, at any width; for scripts, JSON is better. Progress bars appear only on a terminal, so that logs
and pipes stay clean.

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
from typing import TYPE_CHECKING, Any, Final, TypeVar

from raftkv.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

R = TypeVar("R")

FOLD_COLUMNS = 30
_TOO_LONG = 100_000  # cost of a line over the limit, as in etcdctl


def width(text: str) -> int:
    """Return the width of a text on a terminal, in columns."""
    if text.isascii():
        return len(text)
    wide = ("W", "F")
    return sum(2 if unicodedata.east_asian_width(c) in wide else 1 for c in text if not unicodedata.combining(c))


def fold(text: str, limit: int) -> list[str]:
    """Break a text at spaces into lines of at most ``limit`` columns, with least squared slack; no word is split.

    Arguments:
        text: text to break.
        limit: maximum columns per line.
    """
    words = text.replace("\n", " ").split(" ")
    sizes = list(map(width, words))
    limit, count = max(limit, *sizes), len(words)
    ends = [count] * count  # where the first of the lines from each word on ends
    costs: list[float] = [0.0] * count
    rest = -1
    for start in reversed(range(count)):
        rest += 1 + sizes[start]
        if rest <= limit:
            continue
        least, columns = math.inf, -1
        for end in range(start + 1, count):
            columns += 1 + sizes[end - 1]
            cost = (limit - columns) ** 2 + (_TOO_LONG if columns > limit else 0)
            if columns > limit and cost >= least:
                break  # a longer line costs more
            if cost + costs[end] < least:
                least, ends[start] = cost + costs[end], end
        costs[start] = least
    lines, start = [], 0
    while start < len(words):
        lines.append(" ".join(words[start : ends[start]]))
        start = ends[start]
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
    """Return the table as text without the last newline.

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


def out(rows: Rows) -> None:
    """Print a table: with frame and colour on a terminal wide enough for whole words, otherwise as plain columns."""
    rows = Rows(rows.header, [tuple(map(printable, row)) for row in rows.rows], rows.styles)
    if not sys.stdout.isatty():
        print(plain(rows))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, least = Console(), _longest_words(rows)
    if sum(least) + 3 * len(least) + 1 > console.width:  # the frame would truncate cells
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
"""Styles of members by role; all other roles are yellow."""


def draw(
    columns: Sequence[tuple[str, Callable[[R], str]]], rows: Sequence[R], left: Sequence[str], **look: Any
) -> Table:
    """Return a table for repeated drawing, for example of members, whose roles have colours.

    Arguments:
        columns: name of each column, and a function that returns its cell for a row.
        rows: rows of the table.
        left: names of the left-aligned columns.
        look: arguments of rich's table.
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
    """Print an answer: a line of JSON for programs; for people a table, a text, or the output of a function.

    Arguments:
        as_json: whether to print JSON.
        plain: value of the JSON, converted by ``to_plain``.
        shown: output for people.
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
    """Convert to JSON types: records become objects, numbers that JSON lacks become their names.

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
    """Return the width of the longest word of each column, because lines are only broken between words."""
    words = (" ".join(cells).split() for cells in zip(rows.header, *rows.rows, strict=True))
    return [max(map(width, column), default=0) for column in words]


def plain(rows: Rows) -> str:
    """Return the cells laid out in columns.

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
    """Format a time of day, with the date unless it is today; empty if unknown."""
    if not seconds:
        return ""
    shown = time.localtime(seconds)
    today = shown[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", shown)


def count(number: int, what: str) -> str:
    """Format as ``1 node`` or ``2 nodes``.

    Arguments:
        number: the count.
        what: noun in the singular.
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


@contextmanager
def progress_bar(
    what: str, columns: Sequence[str], total: int | None = None, *, hidden: bool = False
) -> Iterator[Callable[..., None]]:
    """Show a progress bar on standard error during the block, if it is a terminal; yield a function to update the bar.

    Arguments:
        what: text before the bar; empty: none.
        columns: rich columns after the bar: ``Download`` means ``DownloadColumn``.
        total: total of the bar; None: unknown.
        hidden: whether to show no bar, as for JSON.
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
    """Show a bar of bytes; yield a thread-safe function that takes the bytes done and the total.

    Arguments:
        what, hidden: as for ``progress_bar``.
    """
    with progress_bar(what, ("Download", "TransferSpeed"), hidden=hidden) as update:
        yield lambda done, total: update(completed=done, total=total)
