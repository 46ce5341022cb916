"""Batches become durable in order, short syncs inline, long ones on the thread, and a failure ends it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from raftkv.raft.types import ConfState, Entry, HardState, SnapshotMeta
from raftkv.server.node import disk as disk_module
from raftkv.server.node.disk import FRAME_BYTES_MAX, Batch, Disk, Mark


class FakeLog:
    """A log whose syncs wait for a gate."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.threads: set[int] = set()

    def append(self, hard_state: HardState | None, entries: Sequence[Entry]) -> None:
        self.threads.add(threading.get_ident())
        self.events += [entry.index for entry in entries]

    def save_snapshot(self, meta: SnapshotMeta, hard_state: HardState | None = None) -> None:
        self.events.append(f"mark {meta.index}")

    def release(self, index: int) -> int:
        self.events.append(f"release {index}")
        return 0

    def sync(self) -> None:
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self.events.append("sync")


def _batch(index: int, done: list[int]) -> Batch:
    return Batch(None, [Entry(1, index)], True, lambda: done.append(index))


async def _all_durable(disk: Disk) -> None:
    """Wait for the last batch's callback, behind which nothing is outstanding."""
    last = asyncio.Event()
    disk.submit(Batch(None, (), True, last.set))
    await asyncio.wait_for(last.wait(), 10)
    assert disk.outstanding == 0


@pytest.fixture
def log() -> FakeLog:
    return FakeLog()


def test_a_fast_disk_is_written_on_the_loop(log: FakeLog) -> None:
    async def scenario() -> list[int]:
        disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
        done: list[int] = []
        disk.submit(_batch(1, done))
        assert done == [1], "durable before submit returned"
        disk.close()
        return done

    asyncio.run(scenario())
    assert log.threads == {threading.get_ident()}
    assert log.events == [1, "sync"]


def test_syncs_are_told_to_whoever_looks(log: FakeLog) -> None:
    async def scenario() -> tuple[int, int]:
        counted: list[float] = []
        seen: list[float] = []
        disk = Disk(log, asyncio.get_running_loop(), lambda error: None, counted.append)
        for index, observer in enumerate((None, seen.append, None), 1):
            disk.observer = observer
            disk.submit(_batch(index, []))
            await _all_durable(disk)
        disk.close()
        return len(counted), len(seen)

    assert asyncio.run(scenario()) == (6, 2)


def test_segments_are_deleted_on_the_thread_however_fast_the_disk_is() -> None:
    threads: list[int] = []

    class DeletingLog(FakeLog):
        def release(self, index: int) -> int:
            threads.append(threading.get_ident())
            return super().release(index)

    deleting = DeletingLog()

    async def scenario() -> None:
        disk = Disk(deleting, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
        disk.submit(Mark(SnapshotMeta(7, 1, ConfState((1,))), lambda: None))
        await _all_durable(disk)
        disk.close()

    asyncio.run(scenario())
    assert deleting.events[:2] == ["mark 7", "release 7"]
    assert threading.get_ident() not in threads


def test_a_large_batch_is_left_to_the_thread_and_written_in_frames(log: FakeLog) -> None:
    frames: list[tuple[HardState | None, list[int]]] = []

    class FramedLog(FakeLog):
        def append(self, hard_state: HardState | None, entries: Sequence[Entry]) -> None:
            frames.append((hard_state, [entry.index for entry in entries]))
            super().append(hard_state, entries)

    framed = FramedLog()
    state = HardState(1, 1, 3)
    half = bytes(FRAME_BYTES_MAX // 2)

    async def scenario() -> None:
        disk = Disk(framed, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
        for entries in ([Entry(1, index, half) for index in range(1, 4)], [Entry(1, 4, half * 5)], [Entry(1, 5, b"")]):
            disk.submit(Batch(state, entries, True, lambda: None))
        await _all_durable(disk)
        disk.close()

    asyncio.run(scenario())
    assert frames[:-1] == [(None, [1]), (None, [2]), (state, [3]), (state, [4]), (state, [5])]
    assert threading.get_ident() not in framed.threads


def test_a_slow_disk_is_left_to_the_thread_and_batches_share_a_sync(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "INLINE_SYNC_MAX_S", -1.0)

    async def scenario() -> None:
        disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
        done: list[int] = []
        log.gate.clear()
        for index in range(1, 6):
            disk.submit(_batch(index, done))
        assert done == []
        assert disk.outstanding == 5
        log.gate.set()
        await _all_durable(disk)
        assert done == [1, 2, 3, 4, 5]
        disk.close()

    asyncio.run(scenario())
    assert log.threads.isdisjoint({threading.get_ident()})
    assert [event for event in log.events if event != "sync"] == [1, 2, 3, 4, 5]
    assert log.events.count("sync") <= 2, "what gathered during a sync shares the next"


def test_after_a_slow_sync_the_next_are_left_to_the_thread_for_a_while(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "SLOW_SYNC_S", -1.0)

    async def scenario() -> None:
        disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
        done: list[int] = []
        disk.submit(_batch(1, done))
        assert done == [1]
        disk.submit(_batch(2, done))
        assert done == [1]
        await _all_durable(disk)
        monkeypatch.setattr(disk_module, "SLOW_S", -1.0)  # as if it had passed when the next sync ends
        disk.submit(_batch(3, done))
        await _all_durable(disk)
        disk.submit(_batch(4, done))
        assert done == [1, 2, 3, 4]
        disk.close()

    asyncio.run(scenario())


def test_a_batch_behind_an_outstanding_one_never_overtakes_it(log: FakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
        done: list[int] = []
        log.gate.clear()
        with monkeypatch.context() as slow:
            slow.setattr(disk_module, "INLINE_SYNC_MAX_S", -1.0)
            disk.submit(_batch(1, done))
        disk.submit(_batch(2, done))  # the disk counts as fast again, but 1 is still on its way
        assert done == []
        log.gate.set()
        disk.drain()
        await _all_durable(disk)
        assert done == [1, 2]
        disk.close()

    asyncio.run(scenario())


def test_a_failed_sync_is_reported_and_nothing_counts_as_durable(log: FakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "INLINE_SYNC_MAX_S", -1.0)

    async def scenario() -> None:
        failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        disk = Disk(log, asyncio.get_running_loop(), failed.set_result, lambda seconds: None)
        done: list[int] = []
        log.error = OSError(5, "Input/output error")
        disk.submit(_batch(1, done))
        assert await asyncio.wait_for(failed, 10) is log.error
        assert done == []

    asyncio.run(scenario())


def test_an_inline_failure_reaches_the_caller(log: FakeLog) -> None:
    async def scenario() -> None:
        disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
        log.error = OSError(5, "Input/output error")
        done: list[int] = []
        with pytest.raises(OSError, match="Input/output"):
            disk.submit(_batch(1, done))
        assert done == []
        disk.close()

    asyncio.run(scenario())


def test_a_marker_is_written_before_what_it_dispenses_with_goes(log: FakeLog) -> None:
    async def scenario() -> None:
        disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
        disk.submit(Mark(SnapshotMeta(7, 1), lambda: None))
        disk.close()

    asyncio.run(scenario())
    assert log.events == ["mark 7", "release 7", "sync"]
