"""Batches become durable in order: short syncs inline, long ones on the thread; a failure stops the disk."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from raftkv.raft.types import ConfState, Entry, HardState, SnapshotMeta
from raftkv.replica.node import disk as disk_module
from raftkv.replica.node.disk import (
    BUSY_S,
    FRAME_BYTES_MAX,
    SLOW_MAX_S,
    SLOW_S,
    SLOW_SYNC_S,
    Batch,
    Disk,
    Marker,
    SyncTimes,
)
from raftkv.storage import failpoints
from raftkv.storage.wal import WAL
from raftkv.storage.wal.disk import KernelSync
from tests.long import long_except


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
        self.gate.wait(90)
        if self.error is not None:
            raise self.error
        self.events.append("sync")

    def start_sync(self, start: Callable[[int], bool]) -> bool:
        if not start(0):
            self.sync()
            return False
        self.events.append("started")
        return True

    def end_sync(self, finish: Callable[[], None]) -> None:
        finish()
        self.events.append("sync")


class FakeBeside:
    """Syncs that end on command."""

    def __init__(self) -> None:
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.is_offered = True
        self.error: OSError | None = None
        self.started = 0

    def fileno(self) -> int:
        return self._event_fd

    def start(self, fd: int) -> bool:
        self.started += self.is_offered
        return self.is_offered

    def end(self) -> None:
        """Let the sync that is under way end."""
        os.eventfd_write(self._event_fd, 1)

    def finish(self) -> None:
        if self.error is not None:
            raise self.error
        os.eventfd_read(self._event_fd)

    def close(self) -> None:
        os.close(self._event_fd)


def _batch(index: int, done: list[int]) -> Batch:
    return Batch(None, [Entry(1, index)], True, lambda: done.append(index))


async def _all_durable(disk: Disk) -> None:
    """Wait for the last batch's callback, behind which nothing is outstanding."""
    last = asyncio.Event()
    disk.submit(Batch(None, (), True, last.set))
    await asyncio.wait_for(last.wait(), 90)
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


async def test_syncs_are_reported_to_the_observer(log: FakeLog) -> None:
    counted: list[float] = []
    seen: list[float] = []
    disk = Disk(log, asyncio.get_running_loop(), lambda error: None, counted.append)
    for index, observer in enumerate((None, seen.append, None), 1):
        disk.observer = observer
        disk.submit(_batch(index, []))
        await _all_durable(disk)
    disk.close()
    assert (len(counted), len(seen)) == (6, 2)


async def test_segments_are_deleted_on_the_thread_however_fast_the_disk_is() -> None:
    threads: list[int] = []

    class DeletingLog(FakeLog):
        def release(self, index: int) -> int:
            threads.append(threading.get_ident())
            return super().release(index)

    deleting = DeletingLog()
    disk = Disk(deleting, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
    disk.submit(Marker(SnapshotMeta(7, 1, ConfState((1,))), lambda: None))
    await _all_durable(disk)
    disk.close()
    assert deleting.events[:2] == ["mark 7", "release 7"]
    assert threading.get_ident() not in threads


async def test_a_large_batch_is_left_to_the_thread_and_written_in_frames(log: FakeLog) -> None:
    frames: list[tuple[HardState | None, list[int]]] = []

    class FramedLog(FakeLog):
        def append(self, hard_state: HardState | None, entries: Sequence[Entry]) -> None:
            frames.append((hard_state, [entry.index for entry in entries]))
            super().append(hard_state, entries)

    framed = FramedLog()
    state = HardState(1, 1, 3)
    half = bytes(FRAME_BYTES_MAX // 2)
    disk = Disk(framed, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
    for entries in ([Entry(1, index, half) for index in range(1, 4)], [Entry(1, 4, half * 5)], [Entry(1, 5, b"")]):
        disk.submit(Batch(state, entries, True, lambda: None))
    await _all_durable(disk)
    disk.close()
    assert frames[:-1] == [(None, [1]), (None, [2]), (state, [3]), (state, [4]), (state, [5])]
    assert threading.get_ident() not in framed.threads


@pytest.mark.interpreted
async def test_a_slow_disk_is_left_to_the_thread_and_batches_share_a_sync(log, monkeypatch):
    monkeypatch.setattr(disk_module, "INLINE_SYNC_MAX_S", -1.0)
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
    assert log.threads.isdisjoint({threading.get_ident()})
    assert [event for event in log.events if event != "sync"] == [1, 2, 3, 4, 5]
    assert log.events.count("sync") <= 2, "what gathered during a sync shares the next"


@pytest.mark.interpreted
async def test_after_a_slow_sync_the_next_are_left_to_the_thread_for_a_while(log, monkeypatch):
    monkeypatch.setattr(disk_module, "SLOW_SYNC_S", -1.0)
    disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
    done: list[int] = []
    disk.submit(_batch(1, done))
    assert done == [1]
    disk.submit(_batch(2, done))
    assert done == [1]
    await _all_durable(disk)
    monkeypatch.setattr(disk._times, "_slow_s", -1.0)  # as if it had passed when the next sync ends
    disk.submit(_batch(3, done))
    await _all_durable(disk)
    disk.submit(_batch(4, done))
    assert done == [1, 2, 3, 4]
    disk.close()


async def test_while_the_database_is_written_for_long_syncs_are_left_to_the_thread(log: FakeLog) -> None:
    since_s = [math.inf]
    loop = asyncio.get_running_loop()
    disk = Disk(log, loop, lambda error: None, lambda seconds: None, busy_since_s=lambda: since_s[0])
    done: list[int] = []
    disk.submit(_batch(1, done))
    assert done == [1]
    since_s[0] = time.monotonic() - 2 * BUSY_S
    disk.submit(_batch(2, done))
    assert done == [1]
    await _all_durable(disk)
    since_s[0] = math.inf
    disk.submit(_batch(3, done))
    assert done == [1, 2, 3]
    disk.close()


def _slow_at(times: SyncTimes, started: float) -> float:
    """Note a slow sync; when the loop does the next itself."""
    ended = started + 2 * SLOW_SYNC_S
    times.note(started, ended)
    after = [step / 100 for step in range(1, 3_000)]
    return next(delay for delay in after if times.is_fast(ended + delay))


def test_the_loop_tries_again_later_and_later_while_syncs_stay_slow_now_and_then() -> None:
    times = SyncTimes()
    now, found = 100.0, []
    for _ in range(6):
        found.append(_slow_at(times, now))
        assert not times.is_fast(now + found[-1] / 2)
        now += found[-1] + 1.0  # it was fast for a second
    assert found == pytest.approx([SLOW_S * 2**doubled for doubled in range(6)], abs=0.02)
    # Slow ones beside the loop delay no call: each begins the spell anew, and none doubles it.
    beside = [_slow_at(times, now), _slow_at(times, now + 1.0), _slow_at(times, now + 2.0)]
    assert beside == pytest.approx([SLOW_MAX_S] * 3, abs=0.02)
    # Once it has been fast for a while, the next slow one is the first of its kind.
    assert _slow_at(times, now + 1_000.0) == pytest.approx(SLOW_S, abs=0.02)
    assert _slow_at(times, now + 1_000.1) == pytest.approx(SLOW_S, abs=0.02)


@pytest.mark.interpreted
async def test_a_batch_behind_an_outstanding_one_never_overtakes_it(log, monkeypatch):
    disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
    done: list[int] = []
    log.gate.clear()
    with monkeypatch.context() as slow:
        slow.setattr(disk_module, "INLINE_SYNC_MAX_S", -1.0)
        disk.submit(_batch(1, done))
    disk.submit(_batch(2, done))  # the disk counts as fast again, but 1 is still on its way
    assert done == []
    log.gate.set()
    await _all_durable(disk)
    assert done == [1, 2]
    disk.close()


@pytest.mark.interpreted
async def test_a_failed_sync_is_reported_and_nothing_counts_as_durable(log, monkeypatch):
    monkeypatch.setattr(disk_module, "INLINE_SYNC_MAX_S", -1.0)
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    disk = Disk(log, asyncio.get_running_loop(), failed.set_result, lambda seconds: None)
    done: list[int] = []
    log.error = OSError(5, "Input/output error")
    disk.submit(_batch(1, done))
    assert await asyncio.wait_for(failed, 90) is log.error
    assert done == []


@pytest.mark.interpreted  # the bound of inline syncs is replaced
async def test_failing_listener_of_a_durable_batch_is_reported(log: FakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "INLINE_SYNC_MAX_S", -1.0)

    def fail() -> None:
        raise ValueError("the error was not told")

    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    disk = Disk(log, asyncio.get_running_loop(), failed.set_result, lambda seconds: None)
    disk.submit(Batch(None, (), True, fail))
    assert str(await asyncio.wait_for(failed, 90)) == "the error was not told"
    disk.close()


async def test_an_inline_failure_reaches_the_caller(log: FakeLog) -> None:
    disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
    log.error = OSError(5, "Input/output error")
    done: list[int] = []
    with pytest.raises(OSError, match="Input/output"):
        disk.submit(_batch(1, done))
    assert done == []
    disk.close()


async def test_a_marker_is_written_before_what_it_dispenses_with_goes(log: FakeLog) -> None:
    disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None)
    disk.submit(Marker(SnapshotMeta(7, 1), lambda: None))
    disk.close()
    assert log.events == ["mark 7", "release 7", "sync"]


# ---- syncs beside the loop


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk counts as slow."""
    monkeypatch.setattr(disk_module, "INLINE_SYNC_MAX_S", -1.0)


async def _until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something holds."""
    loop = asyncio.get_running_loop()
    holds = loop.create_future()

    def look() -> None:
        if condition():
            holds.set_result(None)
        else:
            loop.call_soon(look)

    look()
    await asyncio.wait_for(holds, 90)


@pytest.mark.interpreted
@pytest.mark.usefixtures("slow")
async def test_slow_sync_leaves_loop_and_batches_share_next_sync(log: FakeLog) -> None:
    beside = FakeBeside()
    disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None, beside)
    done: list[int] = []
    for index in range(1, 5):
        disk.submit(_batch(index, done))
    assert log.events == [1, "started"], "nothing is written while a sync is under way"
    assert disk.outstanding == 4
    beside.end()
    await _until(lambda: bool(done))
    assert done == [1]
    assert log.events == [1, "started", "sync", 2, 3, 4, "started"]
    beside.end()
    await _until(lambda: not disk.outstanding)
    assert done == [1, 2, 3, 4]
    disk.close()
    assert log.threads == {threading.get_ident()}


@pytest.mark.parametrize("more_bytes", [0, 1])
async def test_a_batch_of_some_size_is_not_synced_inline_however_fast_the_disk_is(log, more_bytes):
    """Its sync may take a disk a hundred times as long as the last small one."""
    beside = FakeBeside()
    disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None, beside)
    done: list[int] = []
    batch = _batch(1, done)
    batch.size_bytes = disk_module.INLINE_BYTES_MAX + more_bytes
    disk.submit(batch)
    assert done == [1][more_bytes:]
    assert disk.outstanding == more_bytes
    if more_bytes:
        beside.end()
        await _until(lambda: not disk.outstanding)
    assert done == [1]
    disk.close()
    assert log.threads == {threading.get_ident()}


@pytest.mark.interpreted
@pytest.mark.usefixtures("slow")
async def test_long_gathered_batch_is_written_by_the_thread(log: FakeLog) -> None:
    beside = FakeBeside()
    disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None, beside)
    done: list[int] = []
    disk.submit(_batch(1, done))
    log.threads.clear()
    for index in (2, 3):
        batch = _batch(index, done)
        batch.size_bytes = disk_module.SHORT_BYTES_MAX // 2 + 1
        disk.submit(batch)
    beside.end()
    await _until(lambda: not disk.outstanding)
    assert done == [1, 2, 3]
    disk.close()
    assert log.threads.isdisjoint({threading.get_ident()})


@pytest.mark.interpreted
@pytest.mark.usefixtures("slow")
async def test_a_sync_that_fails_beside_the_loop_is_reported_and_nothing_counts_as_durable(log: FakeLog) -> None:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    beside = FakeBeside()
    disk = Disk(log, asyncio.get_running_loop(), failed.set_result, lambda seconds: None, beside)
    done: list[int] = []
    for index in (1, 2):
        disk.submit(_batch(index, done))
    beside.error = OSError(5, "Input/output error")
    beside.end()
    assert await asyncio.wait_for(failed, 90) is beside.error
    assert done == []
    disk.close()
    assert log.events == [1, "started"]


@pytest.mark.interpreted
@pytest.mark.usefixtures("slow")
async def test_a_kernel_that_takes_no_sync_is_done_without(log: FakeLog) -> None:
    beside = FakeBeside()
    beside.is_offered = False
    disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None, beside)
    done: list[int] = []
    disk.submit(_batch(1, done))
    assert done == [1]
    assert log.threads == {threading.get_ident()}
    log.threads.clear()
    beside.is_offered = True
    disk.submit(_batch(2, done))
    await _until(lambda: not disk.outstanding)
    disk.close()
    assert log.events == [1, "sync", 2, "sync"]
    assert log.threads.isdisjoint({threading.get_ident()}), "the thread has them from then on"


@pytest.mark.interpreted
@pytest.mark.usefixtures("slow")
async def test_a_sync_that_fails_at_the_end_is_reported(log: FakeLog) -> None:
    failures: list[BaseException] = []
    beside = FakeBeside()
    disk = Disk(log, asyncio.get_running_loop(), failures.append, lambda seconds: None, beside)
    for index in (1, 2):
        disk.submit(_batch(index, []))
    beside.error = OSError(5, "Input/output error")
    disk.close()
    assert failures == [beside.error]
    assert log.events == [1, "started"]


@pytest.mark.interpreted
@pytest.mark.usefixtures("slow")
async def test_an_armed_failpoint_acts_on_the_thread(log: FakeLog) -> None:
    """One that sleeps stands for a slow disk, which must not hold the loop."""
    failpoints.arm("walBeforeSync", "count")
    try:
        disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None, FakeBeside())
        disk.submit(_batch(1, []))
        await _until(lambda: not disk.outstanding)
        disk.close()
    finally:
        failpoints.disarm_all()
    assert log.threads.isdisjoint({threading.get_ident()})


@pytest.mark.interpreted
@pytest.mark.usefixtures("slow")
async def test_closing_finishes_write_in_progress(log: FakeLog) -> None:
    beside = FakeBeside()
    disk = Disk(log, asyncio.get_running_loop(), lambda error: None, lambda seconds: None, beside)
    for index in (1, 2):
        disk.submit(_batch(index, []))
    beside.end()
    disk.close()
    assert log.events == [1, "started", "sync", 2, "sync"]


class CheckedLog(FakeLog):
    """Knows what is written and what is durable, and takes nothing while a sync is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []
        self.durable = 0
        self.is_syncing = False

    def append(self, hard_state: HardState | None, entries: Sequence[Entry]) -> None:
        assert not self.is_syncing
        self.written += [entry.index for entry in entries]

    def sync(self) -> None:
        assert not self.is_syncing
        self.durable = len(self.written)

    def start_sync(self, start: Callable[[int], bool]) -> bool:
        self.is_syncing = super().start_sync(start)
        return self.is_syncing

    def end_sync(self, finish: Callable[[], None]) -> None:
        super().end_sync(finish)
        self.durable, self.is_syncing = len(self.written), False


class Submitter:
    """Submits batches of all kinds, some of them when another is reported."""

    def __init__(self, log: CheckedLog, disk: Disk, rng: Random) -> None:
        self._log = log
        self._disk = disk
        self._rng = rng
        self.submitted = 0
        self.done: list[int] = []

    def submit(self) -> None:
        self.submitted = index = self.submitted + 1
        must_sync = self._rng.random() < 0.8
        batch = Batch(None, [Entry(1, index)], must_sync, lambda: self._report(index, must_sync))
        if self._rng.random() < 0.2:
            batch.size_bytes = self._rng.choice((disk_module.INLINE_BYTES_MAX, disk_module.SHORT_BYTES_MAX)) + 1
        self._disk.submit(batch)

    def _report(self, index: int, must_sync: bool) -> None:
        assert not must_sync or index <= self._log.durable
        self.done.append(index)
        if self._rng.random() < 0.2 and self.submitted < 300:
            self.submit()


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", long_except(range(30), range(8)))
async def test_batches_of_all_kinds_are_written_and_reported_in_their_order(monkeypatch, seed):
    rng = Random(seed)
    log = CheckedLog()
    beside = FakeBeside()
    failures: list[BaseException] = []
    disk = Disk(log, asyncio.get_running_loop(), failures.append, lambda seconds: None, beside)
    batches = Submitter(log, disk, rng)

    def is_over() -> bool:
        if log.is_syncing:
            beside.end()
        return not disk.outstanding

    while batches.submitted < 200:
        monkeypatch.setattr(disk_module, "INLINE_SYNC_MAX_S", rng.choice((-1.0, 1.0)))
        beside.is_offered = rng.random() < 0.99
        for _ in range(rng.randrange(4)):
            batches.submit()
        if rng.random() < 0.5:
            is_over()
        await asyncio.sleep(0)
    await _until(is_over)
    assert failures == []
    assert batches.done == log.written == list(range(1, batches.submitted + 1))
    disk.close()


@pytest.mark.usefixtures("slow")
def test_the_kernel_makes_a_real_log_durable(tmp_path: Path) -> None:
    directory = str(tmp_path / "wal")
    beside = KernelSync.open()
    assert beside is not None

    async def scenario() -> None:
        wal = WAL.create(directory, b"metadata")
        disk = Disk(wal, asyncio.get_running_loop(), lambda error: None, lambda seconds: None, beside)
        done: list[int] = []
        for index in range(1, 101):
            disk.submit(_batch(index, done))
            if index % 10 == 0:
                await _until(lambda: not disk.outstanding)
        assert done == list(range(1, 101))
        disk.close()
        wal.close()

    asyncio.run(scenario())
    wal, recovered = WAL.open(directory)
    wal.close()
    assert [entry.index for entry in recovered.entries] == list(range(1, 101))


def test_the_kernel_tells_of_a_sync_that_it_cannot_do(tmp_path: Path) -> None:
    beside = KernelSync.open()
    assert beside is not None
    read_end, write_end = os.pipe()
    try:
        assert not beside.start(write_end), "a pipe has nothing to sync"
        with (tmp_path / "file").open("wb") as file:
            assert beside.start(file.fileno())
            beside.finish()
    finally:
        os.close(read_end)
        os.close(write_end)
        beside.close()
