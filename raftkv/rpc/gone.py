"""What connections leave behind in asyncio when they have gone, and what it would hold for each that is open.

The collector hardly ever runs in a member (its pauses would be felt), so whoever opens connections and drops them must
not be able to leave reference cycles behind. This module owns the parts of that which are not our own objects:
asyncio's transports, and exceptions whose frames hold them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from raftkv.rpc.http2 import Connection
from raftkv.rpc.http2.streams import Outbox


class _GoneTransport(asyncio.Transport):
    """Stands in a protocol for the transport that has gone."""

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

FREE_BYTES_PER_STEP: Final = 4 * 1024 * 1024
"""Giving memory back to the system takes about 0.2 ms a MiB."""


async def free_in_steps(h2: Connection) -> None:
    """Free what an engine has queued on streams, bit by bit: hundreds of MiB at once would hold the loop.

    Arguments:
        h2: of a connection that is gone; nobody else has it.
    """
    for _ in iter(partial(h2.drop, FREE_BYTES_PER_STEP), False):
        await asyncio.sleep(0)


async def free_left_behind(outboxes: list[Outbox]) -> None:
    """Free what waited on closed streams of a connection that goes on, in the same steps.

    Arguments:
        outboxes: what is added meanwhile is freed too.
    """
    while outboxes:
        left_bytes = FREE_BYTES_PER_STEP
        while outboxes and left_bytes > 0:
            left_bytes -= outboxes[-1].drop_some(left_bytes)
            if not outboxes[-1].size_bytes:
                outboxes.pop()
        await asyncio.sleep(0)


async def free_pieces(pieces: list[bytes]) -> None:
    """Free an answer in the same steps.

    Arguments:
        pieces: emptied; who still has their bytes frees them instead.
    """
    while pieces:
        left_bytes = FREE_BYTES_PER_STEP
        while pieces and left_bytes > 0:
            left_bytes -= len(pieces.pop())
        await asyncio.sleep(0)


def nothing() -> None:
    """Stand for a callback that nobody needs any more."""


def release(transport: asyncio.BaseTransport | None) -> None:
    """Let go of a transport whose connection is lost.

    A socket transport keeps a bound method of itself, and from Python 3.12 on a second one unless it was closed, not
    aborted; so none of them is freed by its reference count.
    """
    if transport is not None and hasattr(transport, "_read_ready_cb"):
        transport._read_ready_cb = None
        is_kept = "_write_ready" in vars(transport)  # in Python 3.11 it is a method of the class
        if is_kept and transport.is_closing() and hasattr(transport, "_write_ready"):
            transport._write_ready = None


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that was dealt with: their frames hold the connection, and the error itself."""
    while error is not None:
        error.__traceback__ = None
        cause, error.__context__ = error.__context__, None
        error = cause
