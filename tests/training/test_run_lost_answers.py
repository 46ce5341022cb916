"""What ranks do together over a client that loses answers, or whose requests come late; on etcd too (``mark.long``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from raftkv.client.errors import from_status
from raftkv.errors import UNAVAILABLE
from tests.training import test_run
from tests.training.test_run import PATIENCE_S, Job

member, job = test_run.member, test_run.job


class LossyCore:
    """Calls of a client, whose first txn loses its answer, or is held up and done later."""

    def __init__(self, core: Any, *, is_done: bool) -> None:
        self._core = core
        self._is_done = is_done
        self._txns = 0
        self.meanwhile: Callable[[], Awaitable[Any]] | None = None
        self.late: Callable[[], Awaitable[Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    async def call(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        self._txns += method.path.endswith("Txn")
        if self._txns != 1:
            return await self._core.call(method, request, timeout_s=timeout_s)
        self._txns += 1
        if self._is_done:
            await self._core.call(method, request, timeout_s=timeout_s)
        else:
            self.late = lambda: self._core.call(method, request, timeout_s=PATIENCE_S)
        if self.meanwhile is not None:
            await self.meanwhile()
        raise from_status(UNAVAILABLE, "connection lost", definite=False)


async def test_a_copy_that_comes_late_undoes_nothing(job: Job):
    runs = await job.join(2)
    counter, kv = runs[0].counter("steps"), runs[0].kv
    kv.scope.core = lossy = LossyCore(kv.scope.core, is_done=False)
    assert [await counter.add(1) for _ in range(2)] == [1, 2]
    await lossy.late()
    assert await runs[1].counter("steps").add(1) == 3
    kv.scope.core = lossy = LossyCore(kv.scope.core, is_done=False)
    for value in ("first", "second"):
        await runs[0].put("note", value)
    await lossy.late()
    assert await runs[1].get("note") == b"second"


async def test_two_ranks_get_two_numbers_though_an_answer_is_lost(job: Job):
    runs = await job.join(2)
    mine, other = (run.counter("steps") for run in runs)
    kv, numbers = runs[0].kv, []
    kv.scope.core = lossy = LossyCore(kv.scope.core, is_done=True)

    async def add() -> None:
        numbers.append(await other.add(1))

    lossy.meanwhile = add
    numbers.append(await mine.add(1))
    assert sorted(numbers) == [1, 2]
    numbers += [await mine.add(1), await other.add(1)]
    assert numbers[2:] == [3, 4]


async def test_a_barrier_opens_though_the_last_to_come_is_not_answered(job: Job):
    runs = await job.join(2)
    runs[1].kv.scope.core = LossyCore(runs[1].kv.scope.core, is_done=True)
    waiting = asyncio.ensure_future(runs[0].barrier("b"))
    while not await job.below(f"{job.keys.sync(1)}at/barrier.b/1/arrived/"):  # noqa: ASYNC110  nothing tells of it
        await asyncio.sleep(0.01)
    await runs[1].barrier("b")
    await waiting
    await asyncio.gather(*(run.barrier("b") for run in runs))
    left = await job.below(f"{job.keys.sync(1)}open/")
    assert left == [f"{job.keys.sync(1)}open/barrier.b/2"]
