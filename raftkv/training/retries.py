"""Calls that are made again until the store answers: an outage delays a run, it ends nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from raftkv.errors import LeaseNotFoundError, StatusError

T = TypeVar("T")

RETRY_MIN_S: Final = 0.02
RETRY_MAX_S: Final = 0.25
_OUTAGE_CODES: Final = frozenset((1, 4, 8, 10, 14))
"""CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, ABORTED, UNAVAILABLE."""


def is_outage(error: StatusError) -> bool:
    """Whether an error says that the store cannot answer now, rather than that it will not."""
    return not isinstance(error, LeaseNotFoundError) and (not error.definite or error.code in _OUTAGE_CODES)


async def until_answered(call: Callable[[], Awaitable[T]], limit_s: float | None = None) -> T:
    """Make a call that is safe to repeat until the store answers.

    Arguments:
        call: makes it anew each time.
        limit_s: no attempt begins later than that; None: however long it takes.

    Raises:
        StatusError: the store refused, or the last attempt within the limit failed.
    """
    loop = asyncio.get_running_loop()
    deadline = None if limit_s is None else loop.time() + limit_s
    wait_s = RETRY_MIN_S
    while True:
        try:
            return await call()
        except StatusError as error:
            if not is_outage(error) or (deadline is not None and loop.time() + wait_s > deadline):
                raise
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, RETRY_MAX_S)
