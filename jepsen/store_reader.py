"""Reads back the whole history of the store, revision by revision, for the checker that replays it.

Each revision is read separately: ``Range(revision=r, min_mod_revision=r)`` returns the keys written at r, and many of
these reads are batched in one read-only txn. If an acknowledged request claims a revision, only its keys are read,
which is cheap. For other revisions (writes of unknown fate), the whole store is read; if nothing was written there, the
deleted keys are found by comparing the keys of two revisions. In addition, whole states are read at some revisions, so
that a change of other keys cannot stay hidden.

Compaction destroys history that must be read, so ``Compactor`` first reads up to the compact revision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from jepsen.history import Change, Operation, Recorder, StoreRecord
from jepsen.ops import END_OF_KEYS, Delete, Put, branches
from jepsen.probe import Probe, ProbeError
from jepsen.wire import key_values
from raftkv.pb import rpc_pb2

_BATCH = 64
_STATES = 16
_TIMEOUT_S = 60.0
_FOREVER_S = 1e6
_KEPT = 40
"""Newest revisions that stay uncompacted, for clients' reads of the past."""

Interval = tuple[str, str]
_WHOLE: Interval = (END_OF_KEYS, END_OF_KEYS)


class StoreReader:
    """A reader that fills a ``StoreRecord`` through linearizable reads."""

    def __init__(self, probe: Probe) -> None:
        self.record = StoreRecord(last=1)
        self._probe = probe

    async def read_up_to(self, last: int, operations: list[Operation]) -> None:
        """Read all revisions that have not been read yet.

        Arguments:
            last: last revision to read.
            operations: operations of clients so far.

        Raises:
            ProbeError: the cluster did not answer, or refused a revision.
        """
        first = self.record.last + 1
        acked = {op.rev: span for op in operations if op.wrote and (span := _span(op)) is not None}
        for start in range(first, last + 1, _BATCH):
            batch = range(start, min(start + _BATCH, last + 1))
            intervals = [acked.get(rev, _WHOLE) for rev in batch]
            for rev, interval, kvs in zip(batch, intervals, await self._changes(batch, intervals), strict=True):
                deleted = await self._deleted(rev) if interval is _WHOLE and not kvs else ()
                self.record.changes[rev] = Change(kvs, deleted)
        for rev in _spread(first, last):
            self.record.states[rev] = key_values(await self._state(rev))
        self.record.last = max(last, self.record.last)

    async def _changes(self, revs: range, intervals: list[Interval]) -> list[Any]:
        reads = [
            rpc_pb2.RequestOp(
                request_range=rpc_pb2.RangeRequest(
                    key=start.encode(), range_end=end.encode(), revision=rev, min_mod_revision=rev
                )
            )
            for rev, (start, end) in zip(revs, intervals, strict=True)
        ]
        response = await self._probe.retry(rpc_pb2.TxnRequest(success=reads), _TIMEOUT_S)
        return [key_values(answer.response_range.kvs) for answer in response.responses]

    async def _deleted(self, rev: int) -> tuple[str, ...]:
        before = {kv.key for kv in await self._state(rev - 1, keys_only=True)}
        after = {kv.key for kv in await self._state(rev, keys_only=True)}
        return tuple(sorted(key.decode() for key in before - after))

    async def _state(self, rev: int, keys_only: bool = False) -> Any:
        request = rpc_pb2.RangeRequest(key=b"\0", range_end=b"\0", revision=rev, keys_only=keys_only)
        return (await self._probe.retry(request, _TIMEOUT_S)).kvs


class Compactor:
    """A task that compacts repeatedly under load and faults, each time after reading the history to be discarded.

    Arguments:
        every: acknowledged writes between compactions.
    """

    def __init__(self, probe: Probe, reader: StoreReader, recorder: Recorder, every: int) -> None:
        self.busy = asyncio.Lock()
        """Held during a compaction, because members may disagree on the compact revision until it has finished."""
        self._probe, self._reader, self._recorder, self._every = probe, reader, recorder, every

    async def run(self) -> None:
        """Compact until cancelled."""
        while True:
            await self._recorder.wait_acked(self._every, _FOREVER_S)
            async with self.busy:
                await self._compact()

    async def _compact(self) -> None:
        try:
            rev = await self._probe.revision(_TIMEOUT_S) - _KEPT
            if rev > self._reader.record.last:
                await self._reader.read_up_to(rev, self._recorder.operations)
                self._recorder.event("compacting", rev=rev)
                await self._probe.retry(rpc_pb2.CompactionRequest(revision=rev), _TIMEOUT_S)
        except (
            ProbeError
        ) as error:  # A retry may find that its first attempt succeeded; a cluster that is down is reported elsewhere.
            self._recorder.event("compact failed", why=str(error))
        else:
            self._recorder.event("compact", rev=rev)


def _span(operation: Operation) -> Interval | None:
    """Return a range with every key that the operation may put; without puts, that of its only delete, or None."""
    keys = sorted(part.key for part in branches(operation.request) if isinstance(part, Put))
    if keys:
        return (keys[0], "") if keys[0] == keys[-1] else (keys[0], keys[-1] + "\0")
    deletes = [part for part in branches(operation.request) if isinstance(part, Delete)]
    return (deletes[0].key, deletes[0].end) if len(deletes) == 1 else None


def _spread(first: int, last: int) -> Iterator[int]:
    """Yield evenly spread revisions, including the last one."""
    step = max(1, (last - first + 1) // _STATES)
    yield from range(last, first - 1, -step)
