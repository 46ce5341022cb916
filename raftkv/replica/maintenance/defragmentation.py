"""Defragment: replaces the database by a compacted copy online, while the member continues to read and write.

    space on the disk? -> copy, on a thread -> catch up, on a thread, until little is left
        -> the writer copies the rest and renames (commits wait in memory) -> the loop continues with the copy

There is one run at a time. A call during a run waits for the next run, which begins after the call and is shared by all
waiting callers: pages that were free at the time of a call are released when the call returns. A run begins only while
a caller waits for it, and continues after its caller has left, but not after every caller has lost the right to it.

Up to the rename no failure changes the database: no space, too many commits meanwhile, a database received from the
leader, the stop of the member. A crash leaves a copy, which the next start removes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raftkv.errors import CorruptionError, PermissionDeniedError, StorageError
from raftkv.loop.fair import MEMBER
from raftkv.loop.limiter import Limiter
from raftkv.loop.outcomes import outcome_of
from raftkv.loop.scheduler import on_thread
from raftkv.replica.snapshots.files import check_room, outgoing_path
from raftkv.storage.backend.base import Defragmentation
from raftkv.storage.mvcc import Store

_log = logging.getLogger(__name__)

ROUND_SMALL: Final = 2_000
"""Number of changes that are few enough for the last round, in which commits wait."""
ROUNDS_MAX: Final = 20
"""Rounds after which the last one begins with the rest; each round has only the changes made during the previous one.
"""
CLOSE_TIMEOUT_S: Final = 5.0
"""Time in seconds that a stopping member waits for the end of a run."""
TOLD_IN_A_TURN: Final = 100
"""Callers answered in one turn of the loop: about 2 ms."""


class Defragmenter(Collector):
    """Defragments the database of a member.

    Arguments:
        store: store of the member.
        directory: directory of the database, for the copy.
        on_fatal: called with an error, after which the member must stop.
        observe: called with the duration of a run in seconds.
        check_room: refuses a copy of a given size in the directory.
        on_damage: called when the database is found to be damaged; it is unchanged then.

    Attributes:
        on_done: called with the sizes before and after a run, and its duration in seconds.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        on_fatal: Callable[[BaseException], None],
        observe: Callable[[float], None],
        check_room: Callable[[Path, int, str], None] = check_room,
        on_damage: Callable[[CorruptionError], None] | None = None,
    ) -> None:
        self._store = store
        self._directory = directory
        self._on_fatal = on_fatal
        self._observe = observe
        self._check_room = check_room
        self._on_damage = on_damage or on_fatal
        self._current: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self._under_way: Defragmentation | None = None
        self._callers: list[tuple[asyncio.Future[None], Callable[[], bool]]] = []
        self._is_closed = False
        self._telling = Limiter(TOLD_IN_A_TURN)
        self.on_done: list[Callable[[int, int, float], None]] = []

    def collect(self) -> Iterator[Metric]:
        """Yield whether a run is in progress, for ``/metrics``."""
        is_running = float(self._under_way is not None)
        yield GaugeMetricFamily(
            "etcd_disk_defrag_inflight",
            "Whether or not defrag is active on the member. 1 means active, 0 means not.",
            is_running,
        )

    async def run(self, is_allowed: Callable[[], bool] = lambda: True) -> None:
        """Defragment, in a run that begins after the call.

        Arguments:
            is_allowed: returns whether the caller still may; called when the run begins, and before the copy takes
                over.

        Raises:
            PermissionDeniedError: no caller that shares the run still may.
            SpaceError: there is no space for the copy.
            StorageError: the copy failed, was cancelled, or the database was replaced meanwhile.
        """
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._after(self._current))
            self._next.add_done_callback(_seen)
        # A caller that leaves does not cancel the run; thousands of waiting callers are notified some per turn.
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._callers.append((told, is_allowed))
        self._next.add_done_callback(lambda run: self._telling.add(partial(_tell, told, run), MEMBER))
        await told

    async def _after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._current, self._next = self._next, None
        checks = [is_allowed for told, is_allowed in self._callers if not told.done()]
        self._callers = []
        if self._is_closed:
            raise StorageError("the member stops")
        try:
            await self._defragment(lambda: _check(checks))
        except (StorageError, PermissionDeniedError) as error:
            _log.warning("the database was not defragmented: %s", error)
            raise
        except CorruptionError as error:
            self._on_damage(error)
            raise
        except Exception as error:
            self._on_fatal(error)
            raise

    async def _defragment(self, check: Callable[[], None]) -> None:
        check()
        store, loop = self._store, asyncio.get_running_loop()
        started_at, before_bytes = loop.time(), store.backend.size_bytes
        self._check_room(self._directory, store.backend.size_in_use_bytes, "a compact copy of the database")
        defragmentation = store.backend.defragment(outgoing_path(self._directory))
        self._under_way = defragmentation
        try:
            await on_thread(lambda: _prepare(defragmentation))
            check()
            done: asyncio.Future[None] = loop.create_future()
            store.finish_defragmentation(defragmentation, lambda error: _settle(done, error))
            await outcome_of(done)
        finally:
            self._under_way = None
            await on_thread(defragmentation.close)
        took_s = loop.time() - started_at
        self._observe(took_s)
        _log.info(
            "defragmented the database: %d bytes, now %d, in %.1f s", before_bytes, store.backend.size_bytes, took_s
        )
        for callback in self.on_done:
            callback(before_bytes, store.backend.size_bytes, took_s)

    async def close(self) -> None:
        """End the run in progress; the database is unchanged, or defragmented."""
        self._is_closed = True
        if self._under_way is not None:
            self._under_way.give_up()
        tasks = {task for task in (self._current, self._next) if task is not None}
        if tasks:
            # A full disk delays the commit that the end of a run waits for.
            _, waiting = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            for task in waiting:
                task.cancel()
            if waiting:
                await asyncio.wait(waiting)


def _check(checks: list[Callable[[], bool]]) -> None:
    """Refuse a run for which no caller waits, or that no caller may request any more."""
    if not checks:
        raise StorageError("every caller left before it began")
    if not any(is_allowed() for is_allowed in checks):
        raise PermissionDeniedError


def _prepare(defragmentation: Defragmentation) -> None:
    """Copy, and catch up until little is left; runs on a thread."""
    defragmentation.copy()
    for _ in range(ROUNDS_MAX):
        if defragmentation.catch_up() <= ROUND_SMALL:
            return


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _tell(told: asyncio.Future[None], run: asyncio.Task[None]) -> None:
    """Report the result of a run to its waiters."""
    if run.cancelled():
        told.cancel()
    elif not told.done():
        _settle(told, run.exception())


def _seen(task: asyncio.Task[None]) -> None:
    """Retrieve an error whose caller may have left, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
