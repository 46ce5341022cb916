"""Memory is freed by reference count, in steps: no reference cycles, no long collection, no large free at once.

    collect_in_small_passes()                        # of this process, before its loop runs
    with look_at_young_objects(loop, puts): ...      # and while it runs, as keys are written

    release(transport); forget_frames(error)         # break the cycles that asyncio and tracebacks make
    spawn(free_in_steps(h2.drop))                    # free hundreds of MiB over many turns of the loop

A full collection by Python's garbage collector holds the loop for 0.2 s with 300,000 keys. So the collector looks at
young objects only, and an object that survives one collection is never looked at again. Long-lived cycles are not
freed, therefore none may exist: a client that opens and drops connections must not leave cycles behind. Most are
avoided where objects are made; this module breaks those of asyncio's transports and of exceptions whose frames hold a
connection. Should one slip through, it stays small while the member is idle, since few objects are made then.

Invariants:

1. A collection looks at no more than some 20,000 objects (2 ms): more are not made between two.
2. Nor at large objects that have grown since. Python counts objects, not their contents, and follows all of them. The
   list of a key's revisions may grow by a hundred thousand while hardly an object is made; 40 of them took a follower
   0.37 s in one turn. So there is a collection after ``PUTS_A_PASS`` puts too.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

GC_THRESHOLDS: Final = (5_000, 2, 1_000_000)
PUTS_A_PASS: Final = 10_000
PASS_INTERVAL_S: Final = 0.25
"""How often puts are counted. A member applies some 40,000 in that time, and looks at as many references in 2 ms."""
FREE_BYTES_PER_STEP: Final = 4 * 1024 * 1024
"""Giving memory back to the system takes about 0.2 ms a MiB."""

_YOUNG: Final = 1
"""The older of the two generations that are looked at."""


def collect_in_small_passes() -> None:
    """Have the collector of this process look at young objects only."""
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


class _GoneTransport(asyncio.Transport):
    """Replaces the transport of a protocol whose connection is lost."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return True

    def is_reading(self) -> bool:
        return False

    def write(self, data: object) -> None:
        del data

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


GONE: Final[asyncio.Transport] = _GoneTransport()


async def free_in_steps(drop: Callable[[int], bool]) -> None:
    """Free much memory, one step in each turn of the loop: hundreds of MiB at once would hold it.

    Arguments:
        drop: frees about so many bytes, and returns whether more is left. Its data has no other owner.
    """
    for _ in iter(partial(drop, FREE_BYTES_PER_STEP), False):
        await asyncio.sleep(0)


def nothing() -> None:
    """Replace a callback that is needed no more."""


def release(transport: asyncio.BaseTransport | None) -> None:
    """Break the cycles of a transport whose connection is lost.

    A socket transport keeps a bound method of itself, and from Python 3.12 on a second one unless it was closed, not
    aborted; so none of them is freed by its reference count.
    """
    if transport is not None and hasattr(transport, "_read_ready_cb"):
        transport._read_ready_cb = None
        is_kept = "_write_ready" in vars(transport)  # in Python 3.11 it is a method of the class
        if is_kept and transport.is_closing() and hasattr(transport, "_write_ready"):
            transport._write_ready = None


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of a handled error: their frames hold the connection and the error itself."""
    while error is not None:
        error.__traceback__ = None
        cause, error.__context__ = error.__context__, None
        error = cause
