"""The outcome of a task or future that continues when its caller leaves: nothing reports its failure then.

    return await outcome_of(task)                      # if this is cancelled, the task is not
    task.add_done_callback(take_outcome)               # a task for which no caller waits
    done = await done_before(work(), over)             # the finished work, or None when ``over`` is done first

``asyncio.shield`` of Python 3.14 reports such a failure to the loop's exception handler, where it looks like a fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def outcome_of(task: asyncio.Future[Result]) -> Result:
    """Wait for a task, which continues if the caller is cancelled."""
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.add_done_callback(take_outcome)
        raise
    return task.result()


def take_outcome(task: asyncio.Future[Any]) -> None:
    """Retrieve the outcome of a task; otherwise asyncio would log its exception."""
    if not task.cancelled():
        task.exception()


async def done_before(work: Awaitable[Result], *ends: asyncio.Future[Any]) -> asyncio.Future[Result] | None:
    """Run an awaitable until it ends, or until one of the futures is done.

    Arguments:
        work: awaitable to run.
        ends: futures; they are not cancelled.

    Returns:
        The finished work; None: a future was done first, and the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, *ends), return_when=asyncio.FIRST_COMPLETED)
        return task if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
