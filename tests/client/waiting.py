"""Waiting for a condition on the loop, looked at every few milliseconds."""

from __future__ import annotations

import asyncio
import inspect

POLL_S = 0.01
PATIENCE_S = 90.0


async def until(condition):
    """Wait until ``condition()`` (awaited, if need be) is true; ``TimeoutError`` after ``PATIENCE_S``."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await _value(condition):
                return
            await asyncio.sleep(POLL_S)


async def _value(condition):
    value = condition()
    return await value if inspect.isawaitable(value) else value
