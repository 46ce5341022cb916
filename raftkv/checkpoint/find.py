"""Lookups of committed checkpoints, and watches of new ones.

::

    lookup = Lookup(control)
    await lookup.latest("job", DCP), await lookup.best("job", "loss", MIN, count=3), await lookup.latest_of_all()
    async for commit in Commits(control, "job", start_revision=last + 1):
        evaluate(commit.checkpoint)
        last = commit.revision                                  # continue from here after a restart
    async for checkpoint in Bests(lookup, control, "job", "loss"):
        serve(checkpoint)

This module only reads. A checkpoint may be deleted after it was found, so a reader takes a pin before it loads one
(``retention.holds``).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.keys import (
    LATEST,
    MEMORY,
    AttemptId,
    RegistryKeys,
    check_step,
    from_ordered,
    is_comparable,
    kind_of,
    run_of,
    step_of,
)
from raftkv.checkpoint.records import Checkpoint, Latest, Reference
from raftkv.client.control import Control, Reflector, below, read_below, txn_until_answered
from raftkv.client.operations import Operation, get, get_range
from raftkv.client.records import RecordError, read, readable
from raftkv.client.scope import prefix_end
from raftkv.client.values import PUT, Event, KeyValue
from raftkv.errors import ConfigError

# ---- lookup: one or two reads of a few keys, however many checkpoints there are

_log = logging.getLogger(__name__)

MIN: Final = "min"
MAX: Final = "max"
PAGE: Final = 500
READS_MAX: Final = 100
"""Maximum reads of one txn; etcd allows 128 operations."""
LINEAGE_MAX: Final = 10_000
BEST_TRIES: Final = 10
"""Maximum reads of an index that changes meanwhile; the last one accepts the result as it is."""


@dataclass(frozen=True, slots=True)
class RunLatest:
    """The summary of one kind of one run."""

    run_id: str
    kind: str
    latest: Latest


class Lookup:
    """Lookups in the registry, across runs.

    Arguments:
        control: the store.
    """

    def __init__(self, control: Control) -> None:
        self._control = control

    async def summary(self, run_id: str, kind: str = "") -> list[RunLatest]:
        """Return the summaries of a run's kinds; empty: the run has no checkpoints.

        Arguments:
            run_id: run id.
            kind: only this kind; empty: all durable kinds.
        """
        keys = RegistryKeys(run_id)
        operation = get_range(keys.latest(kind)) if kind else get_range(keys.latest_all, prefix=True)
        found = (await txn_until_answered(self._control, (), [operation])).results[0]
        return [_summary(item) for item in found.items if kind_of(item.key) not in ("", "" if kind else MEMORY)]

    async def latest_of_all(self) -> list[RunLatest]:
        """Return the summaries of all runs and kinds, in the order of run ids; unreadable ones are logged."""
        return _readable([item async for items in read_below(self._control, LATEST, PAGE) for item in items])

    async def latest(self, run_id: str, kind: str = "") -> Checkpoint:
        """Return the newest checkpoint.

        Arguments:
            run_id: run id.
            kind: kind of the checkpoint; empty: the kind with the highest step, the first by name.

        Raises:
            CheckpointNotFound: no checkpoint exists.
        """
        before = -1
        while summaries := await self.summary(run_id, kind):
            newest = max(summaries, key=lambda found: found.latest.step)
            try:
                return await self.at(run_id, newest.latest.step, newest.kind)
            except CheckpointNotFound:
                if newest.latest.step <= before:
                    raise  # the key of the record was deleted
            before = newest.latest.step  # else this one was deleted after a later commit between the two reads
        raise CheckpointNotFound(f"run {run_id!r} has no checkpoint{f' of kind {kind}' if kind else ''}")

    async def at(self, run_id: str, step: int, kind: str = "") -> Checkpoint:
        """Return the checkpoint of a step.

        Arguments:
            run_id, step: run and step of the checkpoint.
            kind: kind of the checkpoint; empty: the first kind by name that has the step.

        Raises:
            CheckpointNotFound: the checkpoint does not exist, or was deleted.
            ConfigError: the step is not valid.
        """
        step = check_step(step)
        kinds = [kind] if kind else [found.kind for found in await self.summary(run_id)]
        keys = RegistryKeys(run_id)
        if kinds:
            for item in await self._read([get(keys.record(name, step)) for name in kinds]):
                if item is not None:
                    return read(Checkpoint, item)
        raise CheckpointNotFound(f"run {run_id!r} has no checkpoint of step {step}{f' of kind {kind}' if kind else ''}")

    async def tagged(self, run_id: str, name: str) -> Checkpoint:
        """Return the checkpoint with a tag.

        Raises:
            CheckpointNotFound: the tag does not exist.
        """
        (item,) = await self._read([get(RegistryKeys(run_id).tag(name))])
        if item is None:
            raise CheckpointNotFound(f"run {run_id!r} has no checkpoint with the tag {name!r}")
        found = read(Reference, item)
        return await self.at(found.run_id, found.step, found.kind)

    async def best(self, run_id: str, metric: str, mode: str, *, kind: str = "", count: int = 1) -> list[Checkpoint]:
        """Return the best checkpoints by a metric, the best first; of equal ones the newer first for the maximum.

        Arguments:
            run_id: run id.
            metric: metric name.
            mode: ``MIN`` or ``MAX``: which values are better.
            kind: kind of the checkpoints; empty: the kind with the best value.
            count: maximum number.

        Raises:
            CheckpointNotFound: no checkpoint has such a metric.
        """
        check_mode(mode)
        kinds = [kind] if kind else [found.kind for found in await self.summary(run_id)]
        found: list[Checkpoint] = []
        for name in kinds:
            found += await self._best(RegistryKeys(run_id), name, metric, mode, count)
        if not found:
            raise CheckpointNotFound(f"run {run_id!r} has no checkpoint with the metric {metric!r}")
        found.sort(key=lambda item: item.metrics[metric], reverse=mode == MAX)
        return found[:count]

    async def _best(self, keys: RegistryKeys, kind: str, metric: str, mode: str, count: int) -> list[Checkpoint]:
        for last_try in (False,) * (BEST_TRIES - 1) + (True,):
            found = await self._best_once(keys, kind, metric, mode, count, last_try=last_try)
            if found is not None:
                break
        return found or []

    async def _best_once(
        self, keys: RegistryKeys, kind: str, metric: str, mode: str, count: int, *, last_try: bool
    ) -> list[Checkpoint] | None:
        """Read the index until there are enough checkpoints; None: it changed meanwhile.

        A change between two pages may move a checkpoint from an unread page to one that was already read.

        The index is only a hint, because a metric may change, or a checkpoint be deleted, between the two reads: the
        record decides. A checkpoint counts if the value in its record is at least as good as the last one that was
        read.
        """
        found: dict[int, Checkpoint] = {}
        start, end = keys.metric_of(kind, metric).encode(), prefix_end(keys.metric_of(kind, metric).encode())
        limit, sign = min(count, READS_MAX), -1 if mode == MAX else 1
        seen: int | None = None
        while True:
            page_of = get_range(start, end, limit=limit, keys_only=True, descending=mode == MAX)
            read_both = await txn_until_answered(self._control, (), [get(keys.latest(kind)), page_of])
            summary, page = read_both.results
            revision = 0 if summary is None else summary.mod_revision
            if seen not in (None, revision) and not last_try:
                return None
            seen, values = revision, dict(_indexed(page.items))
            records = await self._read([get(keys.record(kind, step)) for step in values]) if values else []
            for checkpoint in readable(Checkpoint, [item for item in records if item is not None]):
                if is_comparable(checkpoint.metrics.get(metric, math.nan)):
                    found[checkpoint.step] = checkpoint
            reached = max((sign * value for value in values.values()), default=-math.inf)
            is_enough = sum(sign * each.metrics[metric] <= reached for each in found.values()) >= count
            if is_enough or not page.more:
                best = sorted(found.values(), key=lambda each: (each.metrics[metric], each.step), reverse=mode == MAX)
                return best[:count]
            last = page.items[-1].key
            start, end = (start, last) if mode == MAX else (last + b"\0", end)

    async def best_of_all(self, metric: str, mode: str, *, kind: str = "", count: int = 1) -> list[Checkpoint]:
        """Return the best checkpoints of all runs by a metric, at most one of each run and kind, the best first.

        Arguments:
            metric: metric name.
            mode: ``MIN`` or ``MAX``.
            kind: kind of the checkpoints; empty: all kinds.
            count: maximum number.

        Raises:
            CheckpointNotFound: no checkpoint has such a metric.
        """
        check_mode(mode)
        ranked: list[tuple[float, str, str, int]] = []
        sign = -1 if mode == MAX else 1
        for summary in await self.latest_of_all():
            extremes = summary.latest.best.get(metric)
            if extremes is not None and kind in ("", summary.kind):
                value, step = (
                    (extremes.min_value, extremes.min_step) if mode == MIN else (extremes.max_value, extremes.max_step)
                )
                hint = sign * value if is_comparable(value) else -math.inf  # a NaN would disorder all runs
                ranked.append((hint, summary.run_id, summary.kind, sign * step))
        if not ranked:
            raise CheckpointNotFound(f"no run has a checkpoint with the metric {metric!r}")
        heapq.heapify(ranked)
        known: dict[tuple[str, str], Checkpoint] = {}
        found: list[Checkpoint] = []
        while ranked and len(found) < count:
            value, run_id, name, step = heapq.heappop(ranked)
            best = known.get((run_id, name)) or await self._if_best(run_id, name, metric, sign * value, sign * step)
            if best is not None:
                found.append(best)
                continue
            # A summary is only a hint: the record decides. The current best is in the run's index.
            for best in await self._best(RegistryKeys(run_id), name, metric, mode, 1):
                known[run_id, name] = best
                heapq.heappush(ranked, (sign * best.metrics[metric], run_id, name, sign * best.step))
        return found

    async def _if_best(self, run_id: str, kind: str, metric: str, value: float, step: int) -> Checkpoint | None:
        """Return the checkpoint of a step if its metric has this value; None: deleted, changed, or damaged."""
        with contextlib.suppress(CheckpointNotFound, RecordError):
            found = await self.at(run_id, step, kind)
            return found if found.metrics.get(metric) == value else None
        return None

    async def checkpoints(
        self, run_id: str, kind: str = "", *, newest_first: bool = False, limit: int = 0
    ) -> list[Checkpoint]:
        """Return the checkpoints of a run by kind and step.

        Arguments:
            run_id: run id.
            kind: only this kind; empty: all kinds.
            newest_first: the highest step first.
            limit: maximum number of each kind; 0: all.
        """
        keys = RegistryKeys(run_id)
        found: list[Checkpoint] = []
        for name in [kind] if kind else [summary.kind for summary in await self.summary(run_id)]:
            prefix = keys.records_of(name)
            async for items in read_below(self._control, prefix, PAGE, limit=limit, descending=newest_first):
                found += readable(Checkpoint, items)
        return found

    async def lineage(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """Return a checkpoint and its ancestors, nearest first, as far as they still exist."""
        found, seen = [checkpoint], {checkpoint.reference}
        while (parent := found[-1].parent) is not None and parent not in seen and len(found) < LINEAGE_MAX:
            seen.add(parent)
            try:
                found.append(await self.at(parent.run_id, parent.step, parent.kind))
            except (CheckpointNotFound, RecordError):
                break
        return found

    # ---- reads

    async def _read(self, operations: Sequence[Operation]) -> list[KeyValue | None]:
        return list((await txn_until_answered(self._control, (), operations)).results)


def _indexed(items: Sequence[KeyValue]) -> Iterator[tuple[int, float]]:
    """Yield step and value of keys of the index of a metric; foreign keys are skipped."""
    for item in items:
        step = step_of(item.key)
        with contextlib.suppress(ValueError):
            value = from_ordered(item.key.split(b"/")[-2].decode())
            if step is not None:
                yield step, value


def check_mode(mode: str) -> str:
    """Return which values of a metric are better.

    Raises:
        ConfigError: neither ``min`` nor ``max``.
    """
    if mode not in (MIN, MAX):
        raise ConfigError(f"the best is the {MIN} or the {MAX} of a metric, not the {mode!r}")
    return mode


def _summary(item: KeyValue) -> RunLatest:
    return RunLatest(run_of(item.key), kind_of(item.key), read(Latest, item))


def _readable(items: Sequence[KeyValue]) -> list[RunLatest]:
    found = []
    for item in items:
        if kind_of(item.key) in ("", MEMORY):
            continue
        try:
            found.append(_summary(item))
        except RecordError as error:
            _log.warning("raftkv: skipped an unreadable checkpoint record: %s", error)
    return found


# ---- commits: a watch that reports each checkpoint once, through outages and compactions
#
# A commit is the creation of a record; a later change, such as a new metric, is not a commit. If the history from
# ``start_revision`` on is compacted, the existing commits are listed: those deleted meanwhile are omitted, and none is
# reported twice.


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint, as it was committed.

    Attributes:
        revision: store revision of the commit; continue a watch from the next one.
        checkpoint: checkpoint.
    """

    revision: int
    checkpoint: Checkpoint


class _Followed:
    """The common part of ``Commits`` and ``Bests``: a copy that follows the store, and its end."""

    _copy: Reflector

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._is_over = False
        self._end: Exception | None = None

    def cancel(self) -> None:
        """End the watch and drop what is unread."""
        self._is_over = True
        self._copy.close()
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    def _ended(self, error: Exception) -> None:
        self._end = error
        self._news.set()


class Commits(_Followed):
    """Iterate over the commits of a run as they happen. End it with ``cancel``.

    Arguments:
        control: the store.
        run_id: run id.
        kind: only this kind; empty: all kinds.
        start_revision: first revision; 0: only new commits, 1: all existing ones too.
    """

    def __init__(self, control: Control, run_id: str, kind: str = "", *, start_revision: int = 0) -> None:
        super().__init__()
        keys = RegistryKeys(run_id)
        self._seen: int | None = start_revision - 1 if start_revision else None
        self._told: deque[Commit] = deque()
        prefix = keys.records_of(kind) if kind else keys.records
        self._unwanted = b"" if kind else keys.records_of(MEMORY).encode()
        # No copy of the records is kept: a watcher's memory does not grow with their number. A restore of the cluster
        # ends the watch, because earlier commits would be repeated, or others would have their revisions.
        self._copy = Reflector(
            control, below(prefix), self._take, deletes=False, on_end=self._ended, outlives_restore=False
        )
        if start_revision > 1:
            self._copy.start(revision=start_revision - 1)
        else:
            self._copy.start(news_only=not start_revision)

    async def ready(self) -> int:
        """Wait until the watch runs. Returns the revision up to which all commits are known."""
        await self._copy.ready()
        return self._copy.revision

    async def next_batch(self) -> list[Commit]:
        """Wait for commits and return them; empty: the watch was cancelled.

        Raises:
            StatusError: the client is closed.
            CompactedError: the cluster was restored from a backup; look up the existing commits, and watch from there.
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

    async def __anext__(self) -> Commit:
        while not self._told:
            if self._is_over:
                raise StopAsyncIteration
            await self._wait()
        return self._told.popleft()

    def _is_wanted(self, key: bytes) -> bool:
        return not self._unwanted or not key.startswith(self._unwanted)

    def _take(self, changes: Sequence[Event]) -> None:
        if self._seen is None:
            self._seen = self._copy.revision  # the first list contains the existing commits
            return
        # Records arrive in the order of their commits; a later change keeps the create revision: no repetition.
        fresh: dict[bytes, KeyValue] = {}
        for event in changes:
            if event.type == PUT and event.kv.create_revision > self._seen and self._is_wanted(event.kv.key):
                fresh.setdefault(event.kv.key, event.kv)
        for item in sorted(fresh.values(), key=lambda item: item.create_revision):
            self._told += [Commit(item.create_revision, found) for found in readable(Checkpoint, [item])]
            self._seen = item.create_revision
        if self._told:
            self._news.set()


# ---- bests: the best checkpoint by a metric, each time it changes; for serving processes
#
# The lookup is repeated when the summary of the run changes: at commits, later metrics and deletions. A best checkpoint
# that was replaced before the lookup is omitted. The same one is repeated only if another was the best meanwhile.


class Bests(_Followed):
    """Follow the best checkpoint; see the module. End it with ``cancel``.

    Arguments:
        lookup: lookup on the store.
        control: the store.
        run_id: run id.
        metric: metric name.
        mode: ``min`` or ``max``: which values are better.
        kind: only this kind; empty: all kinds.

    Raises:
        ConfigError: the mode is unknown.
    """

    def __init__(
        self, lookup: Lookup, control: Control, run_id: str, metric: str, mode: str = MIN, *, kind: str = ""
    ) -> None:
        super().__init__()
        self._lookup = lookup
        self._what = run_id, metric, check_mode(mode)
        self._kind = kind
        self._last: tuple[str, AttemptId] | None = None
        prefix = below(RegistryKeys(run_id).latest_all)
        self._copy = Reflector(control, prefix, self._take, deletes=False, on_end=self._ended)
        self._copy.start()

    async def next_batch(self) -> list[Checkpoint]:
        """Wait for another best one; empty: it was cancelled.

        Raises:
            StatusError: the cluster refused the look; the client is closed.
        """
        while True:
            await self._news.wait()
            if self._is_over:
                return []
            if self._end is not None:
                raise self._end
            self._news.clear()
            try:
                (best,) = await self._lookup.best(*self._what, kind=self._kind)
            except CheckpointNotFound:
                continue
            except BaseException:
                self._news.set()  # the waiting caller was cancelled or refused, and has not seen the change
                raise
            if (best.kind, best.id) != self._last:
                self._last = best.kind, best.id
                return [best]

    async def __anext__(self) -> Checkpoint:
        for best in await self.next_batch():
            return best
        raise StopAsyncIteration

    def _take(self, _: Sequence[Event]) -> None:
        self._news.set()
