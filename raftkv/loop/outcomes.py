"""The outcome of a task or future that continues when its caller leaves: nothing reports its failure then.

    return await outcome_of(task)                      # if this is cancelled, the task is not
    task.add_done_callback(take_outcome)               # a task for which no caller waits

``asyncio.shield`` of Python 3.14 reports such a failure to the loop's exception handler, where it looks like a fault.
"""

from __future__ import annotations

import asyncio
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
