"""Runs async test functions, and waits for conditions instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

TEST_TIMEOUT_S = 300.0
"""Beyond any limit that a test sets itself, on a busy machine."""


def run_async(test: Coroutine[Any, Any, None]) -> None:
    """Run an async test on a loop of its own; one that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await test

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    """Give the loop turns until ``condition()`` holds; the test's own timeout ends a vain wait.

    The pauses are a thread's: the loop's own time may stand still (``tests.rpc.clock``).
    """
    loop = asyncio.get_running_loop()
    while not condition():
        await loop.run_in_executor(None, time.sleep, 0.001)  # not to_thread, which tests replace


async def failure(awaitable: Awaitable[Any]) -> Any:
    """Return the exception that awaiting raises; fail if it raises none."""
    try:
        result = await awaitable
    except Exception as error:
        return error
    raise AssertionError(f"no error, but {result!r:.100}")
