"""Memory is freed by reference counts, in steps: no reference cycles, no long collections, no large frees.

    collect_in_small_passes()                        # for this process, before its loop runs
    with look_at_young_objects(loop, puts): ...      # while the loop runs: collect after many puts

    release(transport); forget_frames(error)         # break the cycles that asyncio and tracebacks make
    spawn(free_in_steps(h2.drop))                    # free hundreds of MiB over many turns of the loop

A full collection by Python's garbage collector blocks the loop for 0.2 s with 300,000 keys. The collector therefore
examines young objects only, and never examines an object again after it has survived one collection. Long-lived cycles
are not freed, so none may exist: a client that opens and drops connections must not leave cycles behind. Most cycles
are avoided where objects are made; this module breaks those of asyncio's transports and of exceptions whose frames hold
a connection. A cycle that is missed costs little while the member is idle, since few objects are made then.

Invariants:

1. A collection examines at most some 20,000 objects (2 ms): no more are made between two collections.
2. A collection examines no old object that has grown. Python counts objects, not their contents, and follows all
   references of an object. The list of a key's revisions may grow by a hundred thousand while almost no object is made;
   40 such lists took a follower 0.37 s in one turn. So ``PUTS_A_PASS`` puts cause a collection too.
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
"""How often puts are counted. A member applies some 40,000 in that time; examining as many references takes 2 ms."""
FREE_BYTES_PER_STEP: Final = 4 * 1024 * 1024
"""Bytes freed in one turn. Returning memory to the system takes about 0.2 ms per MiB."""

_YOUNG: Final = 1
"""The older of the two generations that are examined."""


def collect_in_small_passes() -> None:
    """Limit the garbage collector of this process to young objects."""
    gc.set_threshold(*GC_THRESHOLDS)
    if _keep_out_of_sight not in gc.callbacks:
        gc.callbacks.append(_keep_out_of_sight)


def _keep_out_of_sight(phase: str, collection: dict[str, int]) -> None:
    if phase == "stop" and collection["generation"] >= _YOUNG:
        gc.freeze()


@contextmanager
def look_at_young_objects(loop: asyncio.AbstractEventLoop, puts: Callable[[], int]) -> Iterator[None]:
    """Collect within the block each time ``PUTS_A_PASS`` keys have been put.

    Arguments:
        loop: event loop of the member.
        puts: returns the number of keys put so far.
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
    """Replaces the transport of a protocol whose connection is lost. All writes to it are ignored."""

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
    """Free much memory, one step per turn of the loop: freeing hundreds of MiB at once would block it.

    Arguments:
        drop: frees about the given number of bytes, and returns whether more is left. Nothing else refers to its data.
    """
    for _ in iter(partial(drop, FREE_BYTES_PER_STEP), False):
        await asyncio.sleep(0)


def nothing() -> None:
    """Do nothing: replaces a callback that is no longer needed."""


def release(transport: asyncio.BaseTransport | None) -> None:
    """Break the cycles of a transport whose connection is lost.

    A socket transport keeps a bound method of itself. From Python 3.12 on it keeps a second one after an abort (a close
    drops it). Without this function no such transport is freed by its reference count.
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
