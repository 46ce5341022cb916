"""A client of asyncio that is used on a second event loop says so at once, and closes without a word."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import raftkv.aio

TEXT = r"^this client belongs to the event loop that it was first used on: make one in each \(raftkv.aio.connect\)"
PATIENCE_S = 90.0
Use = Callable[[raftkv.aio.Client], Coroutine[Any, Any, object]]


async def watch(kv: raftkv.aio.Client) -> object:
    return [event async for event in kv.watch("a", start_revision=1)]


async def lease(kv: raftkv.aio.Client) -> object:
    return await kv.lease(5).grant()


USES = {"get": lambda kv: kv.get("a"), "put": lambda kv: kv.put("a", "2"), "watch": watch, "lease": lease}


async def begin(kv: raftkv.aio.Client) -> None:
    done = await kv.put("a", "1")  # others may have compacted what was before
    async for _ in kv.watch("a", start_revision=done.revision):
        return


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "open"])
def test_a_client_says_that_it_belongs_to_another_loop(raftkv_cluster, use: Use, is_closed: bool) -> None:
    first = asyncio.Runner()
    kv = raftkv.aio.connect(raftkv_cluster.endpoints)
    first.run(begin(kv))
    if is_closed:
        first.close()

    async def again() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await use(kv)

    with pytest.raises(RuntimeError, match=TEXT):
        asyncio.run(again())
    if is_closed:
        asyncio.run(kv.close())
        del kv
        gc.collect()  # its sockets went with their loop, and Python says so
    else:
        first.run(kv.close())
        first.close()
