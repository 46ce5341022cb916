"""The order of changes to one value of a store, in this process: a queue for each key, and what was last seen there.

Many connections of one gateway add to the same counter. If each tried for itself, all but one would fail each time;
in a queue each begins with what the one before has written, and usually succeeds at once. What was seen is a guess,
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
        """Make one of what a read has found."""
        return ABSENT if item is None else cls(item.value, item.mod_revision)


ABSENT: Final = Seen(None, 0)


@dataclass
class KeyQueue:
    """The queue of one key.

    Attributes:
        seen: what was last seen; None: nothing is known.
        users: how many hold or wait for the lock.
    """

    seen: Seen | None = None
    users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class KeyQueues:
    """The queues of one store; only ``REMEMBERED_MAX`` are kept in which nobody waits."""

    def __init__(self) -> None:
        self._queues: OrderedDict[bytes, KeyQueue] = OrderedDict()

    @contextlib.asynccontextmanager
    async def at(self, key: bytes) -> AsyncIterator[KeyQueue]:
        """Wait in the queue of a key until it is this caller's turn."""
        queue = self._queues.setdefault(key, KeyQueue())
        self._queues.move_to_end(key)
        queue.users += 1
        try:
            async with queue.lock:
                yield queue
        finally:
            queue.users -= 1
            self._tidy(queue)

    def _tidy(self, queue: KeyQueue) -> None:
        if queue.seen is not None and queue.seen.value is not None and len(queue.seen.value) > REMEMBERED_BYTES_MAX:
            queue.seen = None
        while len(self._queues) > REMEMBERED_MAX:
            oldest = next(iter(self._queues))
            if self._queues[oldest].users:
                return
            del self._queues[oldest]
