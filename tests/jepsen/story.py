"""A small language for hand-made histories: the true writes to the store, and the answers to clients."""

from __future__ import annotations

import dataclasses
from typing import Any

from jepsen.checkers.model import Model
from jepsen.history import Change, History, Operation, StoreRecord
from jepsen.ops import (
    Compare,
    Delete,
    DeleteResult,
    KeyValue,
    Put,
    Range,
    RangeResult,
    Request,
    Result,
    Txn,
    TxnResult,
    puts,
)
from jepsen.outcome import Failure

LOST = Failure("UNAVAILABLE", "Socket closed", definite=False)
REFUSED = Failure("INVALID_ARGUMENT", "etcdserver: key is not provided", definite=True)


class Story:
    """The true order of writes from revision 2 on, and the resulting operations.

    >>> story = Story(Put("k", "1"), Put("k", "2"))
    >>> story.write(2, 0, 10).read("k", 3, 20, 30).history().store.last
    3
    """

    def __init__(self, *writes: Request) -> None:
        self.operations: list[Operation] = []
        self.events: list[dict[str, Any]] = []
        self._writes = dict(enumerate(writes, start=2))
        self._model = Model()
        self._answers: dict[int, Result] = {}
        self.store = StoreRecord(last=1 + len(writes))
        for rev, request in self._writes.items():
            self._happen(rev, request)

    def write(self, rev: int, call: int, returned: int, **changes: Any) -> Story:
        """Add the acknowledged write of a revision; ``changes`` falsify the operation."""
        return self._tell(self._writes[rev], rev, self._answers[rev], call, returned, changes)

    def read(self, key: str, rev: int, call: int, returned: int, **changes: Any) -> Story:
        """Add a linearizable read answered from a revision."""
        result = RangeResult(self._model.read(key, rev=rev))
        return self._tell(Range(key), rev, result, call, returned, changes)

    def list(self, start: str, end: str, rev: int, call: int, returned: int, **changes: Any) -> Story:
        """Add a read of an interval."""
        result = RangeResult(self._model.read(start, end, rev=rev))
        return self._tell(Range(start, end), rev, result, call, returned, changes)

    def stale(self, key: str, rev: int, call: int, returned: int, **changes: Any) -> Story:
        """Add a serializable read answered from a revision."""
        result = RangeResult(self._model.read(key, rev=rev))
        return self._tell(Range(key, serializable=True), rev, result, call, returned, changes)

    def answered(self, request: Request, result: Result, rev: int, call: int, returned: int, **changes: Any) -> Story:
        """Add an answered operation."""
        return self._tell(request, rev, result, call, returned, changes)

    def lost(self, request: Request, call: int, returned: int) -> Story:
        """Add a request whose answer was lost."""
        return self._tell(request, 0, None, call, returned, {"failure": LOST})

    def refused(self, request: Request, call: int, returned: int) -> Story:
        """Add a request that certainly had no effect."""
        return self._tell(request, 0, None, call, returned, {"failure": REFUSED})

    def history(self) -> History:
        """Return the history so far."""
        return History(self.operations, self.events, self.store)

    def _tell(
        self, request: Request, rev: int, result: Result | None, call: int, returned: int, changes: dict[str, Any]
    ) -> Story:
        number = len(self.operations) + 1
        operation = Operation(number, f"c{number}", 1, call, request, (1, 1), returned, rev, 7 if result else 0, result)
        self.operations.append(dataclasses.replace(operation, **changes))
        return self

    def _happen(self, rev: int, request: Request) -> None:
        before = set(self._model.current)
        self._answers[rev] = self._model.apply(request, rev)
        written = self._model.written_at(rev, {put.key for put in puts(request)})
        kvs = tuple(kv for kv in written.values() if kv is not None)
        deleted = tuple(sorted(before - set(self._model.current))) if not kvs else ()
        self.store.changes[rev] = Change(kvs, deleted)
        self.store.states[rev] = tuple(self._model.current.values())


def kv(key: str, value: str, mod: int, create: int = 0, version: int = 1) -> KeyValue:
    """A key; ``create`` is ``mod`` unless given."""
    return KeyValue(key, value, create or mod, mod, version)


def found(*kvs: KeyValue) -> RangeResult:
    """An answer to a read."""
    return RangeResult(kvs)


def swap(key: str, old: str, new: str) -> Txn:
    """Compare-and-swap by value, reading first."""
    return Txn((Compare(key, "value", "=", old),), (Range(key), Put(key, new)), (Range(key),))


__all__ = [
    "LOST", "REFUSED", "Compare", "Delete", "DeleteResult", "Put", "Range", "Story", "Txn", "TxnResult", "found",
    "kv", "swap",
]  # fmt: skip
