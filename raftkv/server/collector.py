"""Python's collector of cycles, in passes that hold the loop for a few milliseconds whatever the store holds.

    collect_in_small_passes()                        # of this process, before its loop runs
    with look_at_young_objects(loop, puts): ...      # and while it does, as keys are written

A full collection holds the loop for 0.2 s with 300,000 keys. So only young objects are looked at, and what a collection
leaves is never looked at again. Cycles that live longer are not freed, so there must be none; where one should slip
through, a member that is idle keeps it seldom, since hardly anything makes it look.

Invariants:

1. A collection looks at no more than some 20,000 objects (2 ms): more are not made between two.
2. Nor at large ones that have grown since: Python counts objects, not what is in them, and follows all of it. The list
   of a key's revisions may grow by a hundred thousand while hardly an object is made; 40 of them took a follower 0.37 s
   in one turn. So there is a collection after ``PUTS_A_PASS`` puts too.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

GC_THRESHOLDS: Final = (5_000, 2, 1_000_000)
PUTS_A_PASS: Final = 10_000
PASS_INTERVAL_S: Final = 0.25
"""How often puts are counted. A member applies some 40,000 in that time, and looks at as many references in 2 ms."""

_YOUNG: Final = 1
"""The older of the two generations that are looked at."""


def collect_in_small_passes() -> None:
    """Have the collector of this process look at young objects alone, whatever the size of the store."""
    gc.set_threshold(*GC_THRESHOLDS)
    if _keep_out_of_sight not in gc.callbacks:
        gc.callbacks.append(_keep_out_of_sight)


def _keep_out_of_sight(phase: str, collection: dict[str, int]) -> None:
    if phase == "stop" and collection["generation"] >= _YOUNG:
        gc.freeze()


@contextmanager
def look_at_young_objects(loop: asyncio.AbstractEventLoop, puts: Callable[[], int]) -> Iterator[None]:
    """Collect each time that ``PUTS_A_PASS`` keys have been put.

    Arguments:
        loop: of the member.
        puts: how many keys have been put.
    """
    timer: asyncio.TimerHandle
    looked_at = puts()

    def look() -> None:
        nonlocal timer, looked_at
        timer = loop.call_later(PASS_INTERVAL_S, look)
        now = puts()
        if now - looked_at >= PUTS_A_PASS:
            looked_at = now
            gc.collect(_YOUNG)

    timer = loop.call_later(PASS_INTERVAL_S, look)
    try:
        yield
    finally:
        timer.cancel()
