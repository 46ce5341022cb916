"""Who changes a value of a store next, in this process: a line for each key, and what was last seen there.

Many connections of one gateway add to the same counter. If each tried for itself, all but one would fail each time;
in a line each begins with what the one before has written, and usually succeeds at once. What was seen is a guess,
never an answer: others write too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from raftkv import aio

REMEMBERED_MAX: Final = 256
REMEMBERED_BYTES_MAX: Final = 64 * 1024
"""A larger value is read again rather than kept."""


class Seen(NamedTuple):
    """A value (None: absent) and the revision that wrote it (0: absent)."""

    value: bytes | None
    revision: int

    @classmethod
    def of(cls, item: aio.KeyValue | None) -> Seen:
        """What a read has found."""
        return ABSENT if item is None else cls(item.value, item.mod_revision)


ABSENT: Final = Seen(None, 0)


@dataclass
class Line:
    """Of one key.

    Attributes:
        seen: what was last seen; None: nothing is known.
        users: in the line.
    """

    seen: Seen | None = None
    users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Lines:
    """The lines of one store; only so many are remembered that nobody stands in."""

    def __init__(self) -> None:
        self._lines: OrderedDict[bytes, Line] = OrderedDict()

    @contextlib.asynccontextmanager
    async def at(self, key: bytes) -> AsyncIterator[Line]:
        """Stand in line, and be the first."""
        line = self._lines.setdefault(key, Line())
        self._lines.move_to_end(key)
        line.users += 1
        try:
            async with line.lock:
                yield line
        finally:
            line.users -= 1
            self._tidy(line)

    def _tidy(self, line: Line) -> None:
        if line.seen is not None and line.seen.value is not None and len(line.seen.value) > REMEMBERED_BYTES_MAX:
            line.seen = None
        while len(self._lines) > REMEMBERED_MAX:
            oldest = next(iter(self._lines))
            if self._lines[oldest].users:
                return
            del self._lines[oldest]
