"""Tasks that continue without their callers."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from raftkv.loop.outcomes import outcome_of


@pytest.mark.parametrize("is_late", [True, False], ids=["fails later", "has failed"])
async def test_failure_without_a_caller_is_not_reported(is_late: bool) -> None:
    """Python 3.14 reports one that was shielded, and every version one whose exception was never retrieved."""
    reported: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: reported.append(context))
    shared: asyncio.Future[None] = loop.create_future()
    left = asyncio.create_task(outcome_of(shared))
    await asyncio.sleep(0)
    if not is_late:
        shared.set_exception(ValueError("planted"))
    left.cancel()
    await asyncio.wait([left])
    assert left.cancelled()
    if is_late:
        shared.set_exception(ValueError("planted"))
    del shared, left
    for _ in range(2):
        await asyncio.sleep(0)
        gc.collect()
    assert not reported
