"""Tables drawn as etcdctl draws them, to the byte.

Owns the layout only: a frame of ``+``, ``-`` and ``|``, an upper-case centred header, cells to the right, and cells
longer than 30 columns folded at spaces so that the lines come out most even.

>>> print(render(["a_b"], [["xyz"]]))
+-----+
| A B |
+-----+
| xyz |
+-----+
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import cache

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
        return min(
            (_slack_cost(width(" ".join(words[start:end])), limit) + best(end)[0], end)
            for end in range(start + 1, len(words))
        )

    lines, start = [], 0
    while start < len(words):
        end = best(start)[1]
        lines.append(" ".join(words[start:end]))
        start = end
    return lines


def _slack_cost(columns: int, limit: int) -> int:
    return (limit - columns) ** 2 + (_TOO_LONG if columns > limit else 0)


def _cell(text: str) -> list[str]:
    widest = max(map(width, text.split("\n")))
    return fold(text, min(widest, FOLD_COLUMNS))


def _title(name: str) -> str:
    return name.replace("_", " ").strip().upper()


def _centre(text: str, columns: int) -> str:
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
    lines = [rule, *_lines(heads, columns, lambda text, size: _centre(_title(text), size)), rule]
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
