"""A watch of commits: each checkpoint once, in order, from a revision on; through outages and compactions.

::

    commits = Commits(control, "job", start_revision=last + 1)
    async for commit in commits:
        evaluate(commit.checkpoint)
        last = commit.revision                 # go on from here after a restart

A commit is the creation of a record, so a later change of it (a metric that was added) is none. If the history from
``start_revision`` on is compacted, the commits that still exist are listed instead: those that came and were deleted
meanwhile are left out, and no commit comes twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.records import Checkpoint
from raftkv.client.control.control import Control
from raftkv.client.control.records import readable
from raftkv.client.control.reflector import Reflector, below
from raftkv.client.values import PUT, Event, KeyValue


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint, as it was committed.

    Attributes:
        revision: of the store at the commit: go on from the next one.
        checkpoint: which.
    """

    revision: int
    checkpoint: Checkpoint


class Commits:
    """The commits of a run, as they come; see the module. End it with ``cancel``.

    Arguments:
        control: the store.
        run_id: of the run.
        kind: only of this one; empty: of all.
        start_revision: the first that comes; 0: what is committed from now on, 1: all that there are.
    """

    def __init__(self, control: Control, run_id: str, kind: str = "", *, start_revision: int = 0) -> None:
        keys = RegistryKeys(run_id)
        self._seen: int | None = start_revision - 1 if start_revision else None
        self._told: deque[Commit] = deque()
        self._news = asyncio.Event()
        self._is_over = False
        self._end: Exception | None = None
        prefix = keys.records_of(kind) if kind else keys.records
        # It keeps no copy of the records: a watcher's memory does not grow with their number.
        # After a restore the commits of before come again, or others in their revisions: the reader has to know.
        self._copy = Reflector(
            control, below(prefix), self._take, deletes=False, on_end=self._ended, outlives_restore=False
        )
        if start_revision > 1:
            self._copy.start(revision=start_revision - 1)
        else:
            self._copy.start(news_only=not start_revision)

    async def ready(self) -> int:
        """Wait until it watches; returns the revision up to which everything is known."""
        await self._copy.ready()
        return self._copy.revision

    def cancel(self) -> None:
        """End it: what was not read yet is dropped."""
        self._is_over = True
        self._copy.close()
        self._news.set()

    async def next_batch(self) -> list[Commit]:
        """Wait for commits; empty: it was cancelled.

        Raises:
            StatusError: the client is closed.
            CompactedError: the cluster was restored from a backup; look at what there is, and watch from there.
        """
        while not self._told and not self._is_over:
            await self._wait()
        found = [] if self._is_over else list(self._told)
        self._told.clear()
        return found

    async def _wait(self) -> None:
        if self._end is not None:
            raise self._end
        self._news.clear()
        await self._news.wait()

    def __aiter__(self) -> Commits:
        return self

    async def __anext__(self) -> Commit:
        while not self._told:
            if self._is_over:
                raise StopAsyncIteration
            await self._wait()
        return self._told.popleft()

    def _ended(self, error: Exception) -> None:
        self._end = error
        self._news.set()

    def _take(self, changes: Sequence[Event]) -> None:
        if self._seen is None:
            self._seen = self._copy.revision  # the first list is what was there before
            return
        # Records come in the order of their commits, and a later change keeps the create revision: no commit twice.
        fresh: dict[bytes, KeyValue] = {}
        for event in changes:
            if event.type == PUT and event.kv.create_revision > self._seen:
                fresh.setdefault(event.kv.key, event.kv)
        for item in sorted(fresh.values(), key=lambda item: item.create_revision):
            self._told += [Commit(item.create_revision, found) for found in readable(Checkpoint, [item])]
            self._seen = item.create_revision
        if self._told:
            self._news.set()
