"""Sharing of runs by callers, and ends of runs, on a scripted database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from raftkv.errors import InvariantError, SpaceError, StorageError
from raftkv.replica.maintenance import defragmentation
from raftkv.replica.maintenance.defragmentation import TOLD_IN_A_TURN, Defragmenter


class Fake:
    """Store, backend and defragmentation in one; a run ends when ``finish`` is called."""

    size_bytes = size_in_use_bytes = 1

    def __init__(self) -> None:
        self.backend = self
        self.runs = self.closed = 0
        self.failure: StorageError | None = None
        self.finish: Callable[[BaseException | None], None]
        self.is_waiting = asyncio.Event()

    def defragment(self, _: Path) -> Fake:
        self.runs += 1
        return self

    def copy(self) -> None:
        if self.failure is not None:
            raise self.failure

    def catch_up(self) -> int:
        return 0

    def finish_defragmentation(self, _: Fake, on_done: Callable[[BaseException | None], None]) -> None:
        self.finish = on_done
        self.is_waiting.set()

    def give_up(self) -> None:
        self.failure = StorageError("given up")

    def close(self) -> None:
        self.closed += 1

    async def end(self, error: BaseException | None = None) -> None:
        await self.is_waiting.wait()
        self.is_waiting.clear()
        self.finish(error)


def make(fake: Fake, fatal: Any = None) -> Defragmenter:
    store: Any = fake
    return Defragmenter(store, Path("/"), fatal or (lambda _: None), lambda _: None, lambda *_: None)


async def test_requests_during_a_run_share_the_next_run() -> None:
    fake = Fake()
    defragmenter = make(fake)
    first = asyncio.create_task(defragmenter.run())
    await fake.is_waiting.wait()
    others = [asyncio.create_task(defragmenter.run()) for _ in range(3)]
    others[0].cancel()
    await asyncio.wait([others[0]])
    assert fake.runs == 1
    await fake.end()
    await first
    await fake.end()
    await asyncio.gather(*others[1:])
    assert (fake.runs, fake.closed) == (2, 2)
    await defragmenter.close()


async def test_shared_run_answers_callers_in_slices() -> None:
    """17,000 calls that waited for one run were answered in one turn."""
    fake = Fake()
    defragmenter = make(fake)
    sharing = [asyncio.create_task(defragmenter.run()) for _ in range(5 * TOLD_IN_A_TURN)]
    await fake.end()
    counts = [0]
    while counts[-1] < len(sharing):
        await asyncio.sleep(0)
        counts.append(sum(task.done() for task in sharing))
    assert max(after - before for before, after in pairwise(counts)) <= TOLD_IN_A_TURN
    assert fake.runs == 1


async def test_a_failure_is_told_and_the_next_run_may_do_better() -> None:
    fake = Fake()
    defragmenter = make(fake)
    fake.failure = SpaceError("full")
    with pytest.raises(SpaceError):
        await defragmenter.run()
    fake.failure = None
    run = asyncio.create_task(defragmenter.run())
    await fake.end()
    await run
    assert fake.closed == 2


async def test_a_file_that_has_lost_its_name_stops_the_member() -> None:
    fake, fatal = Fake(), []
    run = asyncio.create_task(make(fake, fatal.append).run())
    error = InvariantError("exchanged")
    await fake.end(error)
    with pytest.raises(InvariantError):
        await run
    assert fatal == [error]


async def test_the_end_of_the_member_does_not_wait_for_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defragmentation, "CLOSE_TIMEOUT_S", 0.01)
    fake = Fake()
    defragmenter = make(fake)
    run = asyncio.create_task(defragmenter.run())
    await fake.is_waiting.wait()
    await defragmenter.close()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert fake.closed == 1
    with pytest.raises(StorageError, match="stops"):
        await defragmenter.run()
