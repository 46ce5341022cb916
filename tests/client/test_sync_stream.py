"""Blocking iteration over a source on the loop's thread: each item is taken once, even if a reader is interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raftkv.client.sync.blocking import Stream
from raftkv.client.sync.loop import LoopThread

PATIENCE_S = 90.0


class Numbers:
    """A source of 0, 1, 2, ..., two in a batch."""

    def __init__(self) -> None:
        self.given = 0

    async def next_batch(self) -> list[int]:
        await asyncio.sleep(0)
        self.given += 2
        return [self.given - 2, self.given - 1]

    def cancel(self) -> None:
        """Do nothing: no reader waits."""


class Silence:
    """A source without items.

    Attributes:
        asked: set when a reader waits.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._over = asyncio.Event()

    async def next_batch(self) -> list[int]:
        self.asked.set()
        await self._over.wait()
        return []

    def cancel(self) -> None:
        self._over.set()


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("under-test")
    yield made
    made.close()


def test_events_just_before_ctrl_c_reach_the_next_reader(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a loop over a watch, and run it again, as a notebook does."""
    stream = Stream(None, loop, Numbers())
    assert [next(stream), next(stream)] == [0, 1]
    run = loop.run

    def interrupted(coroutine: Any) -> None:
        run(coroutine)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.setattr(loop, "run", run)
    assert [next(stream), next(stream), next(stream)] == [2, 3, 4]


def test_a_batch_that_another_thread_takes_is_not_the_end(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(None, loop, Numbers())
    run, stolen = loop.run, []

    def robbed(coroutine: Any) -> Any:
        result = run(coroutine)
        monkeypatch.setattr(loop, "run", run)
        while stream._batch:  # as another thread does, which needs no lock for what is there
            stolen.append(stream._take())
        return result

    monkeypatch.setattr(loop, "run", robbed)
    assert next(stream) == 2
    assert stolen == [0, 1]


def test_nothing_is_taken_after_the_end(loop: LoopThread) -> None:
    stream = Stream(None, loop, Numbers())
    assert next(stream) == 0
    stream.cancel()
    assert list(stream) == []
    assert stream.get(timeout_s=1.0) is None


@pytest.mark.parametrize("timeout_s", [-1, -0.5, 0])
def test_expired_timeout_does_not_wait_for_other_reader(loop: LoopThread, timeout_s: float) -> None:
    source = Silence()
    stream: Stream[int] = Stream(None, loop, source)
    with ThreadPoolExecutor() as threads:
        other = threads.submit(stream.get)
        source.asked.wait(PATIENCE_S)
        try:
            with pytest.raises(TimeoutError):
                stream.get(timeout_s=timeout_s)
        finally:
            stream.cancel()
        assert other.result(PATIENCE_S) is None
