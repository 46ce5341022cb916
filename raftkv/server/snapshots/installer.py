"""Puts a received database in the place of the present one, beside everything else that the loop does.

Reading it takes seconds; it is done in steps of some milliseconds, between which the member ticks, answers heartbeats
and serves the state that it has. The last step swaps. By then the marker in the log says that the new database holds,
so a crash at any moment has the rest done at the next start (``bootstrap``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from raftkv.errors import CorruptionError, StorageError
from raftkv.raft.types import SnapshotMeta
from raftkv.server.snapshots.files import remove_received, snapshot_path
from raftkv.storage.failpoints import failpoint
from raftkv.storage.mvcc import Beside, Store

_log = logging.getLogger(__name__)


class Installer:
    """Installs one database at a time.

    Arguments:
        store: of the member.
        directory: where received databases wait.
        on_fatal: called with an error, after which the member must stop.

    Attributes:
        on_received: called before the swap: read what is derived from the store from the received database, in steps.
        on_swapped: called in the turn of the swap; what is derived from the store is read again here.
        is_installing: whether a database is being installed.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._store = store
        self._directory = directory
        self.on_received: list[Beside] = []
        self.on_swapped: list[Callable[[SnapshotMeta], None]] = []
        self._on_fatal = on_fatal
        self._task: asyncio.Task[None] | None = None
        self.is_installing = False

    def install(self, meta: SnapshotMeta, done: Callable[[], None]) -> None:
        """Begin; ``done`` is called in the turn of the swap. No entry may be applied until then.

        Arguments:
            meta: of the received database.
            done: called in the turn of the swap.
        """
        self._task = asyncio.get_running_loop().create_task(self._install(meta, done))

    async def close(self) -> None:
        """Stop where it is; the next start does the rest."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _install(self, meta: SnapshotMeta, done: Callable[[], None]) -> None:
        path = snapshot_path(self._directory, meta.index)
        steps = self._store.install_steps(path, beside=self.on_received)
        self.is_installing = True
        try:
            failpoint("raftBeforeApplySnap")
            for rest_s in steps:
                await asyncio.sleep(rest_s)
            for callback in self.on_swapped:
                callback(meta)
            remove_received(self._directory, meta.index)
            _log.info("installed a snapshot at %d", meta.index)
            done()
        except CorruptionError as error:
            self._on_fatal(
                StorageError(
                    f"the database that was received as {path} was damaged on this disk since: {error}; start the "
                    "member again: it goes on with its own, and asks for another"
                )
            )
        except Exception as error:
            self._on_fatal(error)
        finally:
            self.is_installing = False
            steps.close()
