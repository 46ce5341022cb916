"""A linearizable MVCC store in memory: what the cluster is to a run, without its members.

Owns keys, leases and the whole history. Written from the API's documentation and not from raftkv's own store, so that
a mistake there is not repeated here. No time: leases end when ``revoke`` is called (``cluster.py`` keeps the clock).

Invariants:
1. A txn is decided on the state before it and applied at one revision; if it changes nothing the revision stays.
2. A key with a lease ends with it, all keys of a lease in one revision.
3. ``history`` holds every change since the last compaction, in order of revision and, within one, of the txn.

    store = Store()
    store.txn([version("a") == 0], [Put("a", b"1")])
"""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from raftkv.client.kv import Txn
from raftkv.client.operations import Compare, Delete, Get, GetRange, Operation, Put
from raftkv.client.scope import Space, Text, to_bytes
from raftkv.client.values import DELETE, PUT, DeleteResult, Event, KeyValue, PutResult, RangeResult, TxnResult
from raftkv.errors import CompactedError, DuplicateKeyError, LeaseNotFoundError

SPACE: Final = Space()
_RELATIONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_FROM_KEY = b"\0"

OnCommit = Callable[[int, list[Event]], None]
"""Called after every revision with its changes."""


@dataclass(slots=True)
class LeaseKeys:
    """What the store knows of a lease."""

    id: int
    ttl_s: int
    keys: set[bytes] = field(default_factory=set)


class Store:
    """See the module.

    Attributes:
        revision: of the last change.
        items: the keys that exist.
        leases: those that live.
        history: changes, oldest first; ``compacted`` says from where on they are all there.
    """

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self.items: dict[bytes, KeyValue] = {}
        self.leases: dict[int, LeaseKeys] = {}
        self.history: list[Event] = []
        self.on_commit: list[OnCommit] = []
        self._order: list[bytes] = []
        self._last_lease = 0x1000
        self._changes: dict[bytes, Event] = {}

    # ---- leases

    def grant(self, ttl_s: int) -> int:
        """A new lease."""
        self._last_lease += 1
        self.leases[self._last_lease] = LeaseKeys(self._last_lease, ttl_s)
        return self._last_lease

    def revoke(self, lease_id: int) -> None:
        """End a lease, with its keys; it may be gone already."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return
        for key in sorted(lease.keys):
            self._delete(key)
        self._commit()

    # ---- txns

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Execute one transaction, or refuse it whole."""
        _refuse_overlaps(then)
        _refuse_overlaps(otherwise)
        path = self._judge(compares, then, otherwise)
        self._refuse_unknown_leases(path)
        results = self._execute(path)
        self._commit()
        return self._stamped(path.succeeded, results)

    def _stamped(self, succeeded: bool, results: tuple[Any, ...]) -> TxnResult:
        return TxnResult(succeeded, results, self.revision)

    def _judge(self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation]) -> _Path:
        succeeded = all(self.holds(compare) for compare in compares)
        chosen = then if succeeded else otherwise
        steps: list[Operation | _Path] = []
        for operation in chosen:
            if isinstance(operation, Txn):
                steps.append(self._judge(operation._compares, operation._then, operation._otherwise))
            else:
                steps.append(operation)
        return _Path(succeeded, steps)

    def _refuse_unknown_leases(self, path: _Path) -> None:
        puts = [step for step in path.flat() if isinstance(step, Put)]
        for put in puts:
            lease_id = _lease_id(put)
            if lease_id and lease_id not in self.leases:
                raise LeaseNotFoundError

    def _execute(self, path: _Path) -> tuple[Any, ...]:
        results: list[Any] = []
        for step in path.steps:
            if isinstance(step, _Path):
                results.append(TxnResult(step.succeeded, self._execute(step), self.revision + bool(self._changes)))
            else:
                results.append(self._operate(step))
        return tuple(results)

    def _operate(self, operation: Operation) -> Any:
        if isinstance(operation, Put):
            return self._put(to_bytes(operation.key), to_bytes(operation.value), _lease_id(operation))
        if isinstance(operation, Delete):
            start, end = SPACE.interval(operation.key, operation.end, prefix=operation.prefix)
            keys = list(self._keys(start, end))
            for key in keys:
                self._delete(key)
            return DeleteResult(self.revision + bool(self._changes), len(keys))
        if isinstance(operation, Get):
            return self.items.get(to_bytes(operation.key))
        if isinstance(operation, GetRange):
            return self._range(operation)
        raise NotImplementedError(f"the simulated store has no {operation!r}")

    def _range(self, operation: GetRange) -> RangeResult:
        if operation.sort_by != "key":
            raise NotImplementedError(f"the simulated store cannot {operation!r}")
        if operation.revision not in (0, self.revision):
            raise CompactedError  # it keeps no history
        start, end = SPACE.interval(operation.key, operation.end, prefix=operation.prefix)
        found = [self.items[key] for key in self._keys(start, end)]
        items = [item for item in found if _passes(operation, item)]
        if operation.descending:
            items.reverse()
        limit = operation.limit or len(items)
        shown = () if operation.count_only else tuple(items[:limit])
        return RangeResult(shown, len(found), len(items) > limit, self.revision + bool(self._changes))

    # ---- conditions

    def holds(self, compare: Compare) -> bool:
        """Whether a condition holds now; of an interval: for each of its keys."""
        start, end = SPACE.interval(compare.key, compare.end, prefix=compare.prefix)
        if not end:
            return self._holds_for(compare, self.items.get(start))
        found = [self.items[key] for key in self._keys(start, end)]
        return all(self._holds_for(compare, item) for item in found) if found else self._holds_for(compare, None)

    def _holds_for(self, compare: Compare, item: KeyValue | None) -> bool:
        relation = _RELATIONS[compare.relation]
        if compare.target == "value":
            return item is not None and relation(item.value, to_bytes(compare.constant))
        return relation(0 if item is None else getattr(item, compare.target), compare.constant)

    def _keys(self, start: bytes, end: bytes) -> Iterator[bytes]:
        if not end:
            yield from (key for key in (start,) if key in self.items)
            return
        order = self._order
        first = bisect_left(order, start)
        last = len(order) if end == _FROM_KEY else bisect_left(order, end)
        yield from order[first:last]

    # ---- changes of the revision that is being made

    def _put(self, key: bytes, value: bytes, lease_id: int) -> PutResult:
        revision = self.revision + 1
        old = self.items.get(key)
        if old is None:
            insort(self._order, key)
            item = KeyValue(key, value, 1, revision, revision, lease_id)
        else:
            item = KeyValue(key, value, old.version + 1, old.create_revision, revision, lease_id)
            if old.lease in self.leases:
                self.leases[old.lease].keys.discard(key)
        if lease_id:
            self.leases[lease_id].keys.add(key)
        self.items[key] = item
        self._changes[key] = Event(PUT, item, old)
        return PutResult(revision)

    def _delete(self, key: bytes) -> None:
        old = self.items.pop(key)
        self._order.remove(key)
        if old.lease in self.leases:
            self.leases[old.lease].keys.discard(key)
        self._changes[key] = Event(DELETE, KeyValue(key, b"", 0, 0, self.revision + 1, 0), old)

    def _commit(self) -> None:
        if not self._changes:
            return
        changes, self._changes = list(self._changes.values()), {}
        self.revision += 1
        self.history += changes
        for notify in self.on_commit:
            notify(self.revision, changes)

    # ---- history

    def backup(self) -> Callable[[], None]:
        """Return what puts the present state back later, as a restore of a cluster does."""
        saved = self.revision, dict(self.items), list(self.history), list(self._order)

        def restore() -> None:
            self.revision, self.items, self.history, self._order = saved

        return restore

    def compact(self) -> None:
        """Forget how the present came about."""
        self.compacted = self.revision
        self.history.clear()

    def events(self, key: Text, end: Text, first_revision: int) -> list[Event]:
        """Changes of an interval from a revision on, without the previous values.

        Raises:
            CompactedError: they are not all there any more.
        """
        if first_revision <= self.compacted:
            raise CompactedError
        start, stop = SPACE.interval(key, end or None, prefix=False)
        found = []
        for event in reversed(self.history):
            if event.kv.mod_revision < first_revision:
                break
            if event.kv.key == start or (stop and start <= event.kv.key and (stop == _FROM_KEY or event.kv.key < stop)):
                found.append(Event(event.type, event.kv))
        return found[::-1]


@dataclass(frozen=True, slots=True)
class _Path:
    """The side of a txn that its conditions chose; nested ones are chosen before anything is executed."""

    succeeded: bool
    steps: list[Operation | _Path]

    def flat(self) -> Iterator[Operation]:
        for step in self.steps:
            if isinstance(step, _Path):
                yield from step.flat()
            else:
                yield step


def _lease_id(put: Put) -> int:
    lease = put.lease
    return 0 if lease is None else lease if isinstance(lease, int) else lease.id


def _passes(asked: GetRange, item: KeyValue) -> bool:
    modified = asked.min_mod_revision <= item.mod_revision <= (asked.max_mod_revision or item.mod_revision)
    created = asked.min_create_revision <= item.create_revision <= (asked.max_create_revision or item.create_revision)
    return modified and created


def _refuse_overlaps(operations: Sequence[Operation]) -> None:
    """A key is written once in a txn at most: put twice, or put and deleted, is refused."""
    puts = [to_bytes(each.key) for each in operations if isinstance(each, Put)]
    deletes = [each for each in operations if isinstance(each, Delete)]
    if len(set(puts)) < len(puts):
        raise DuplicateKeyError
    for each in deletes:
        start, end = SPACE.interval(each.key, each.end, prefix=each.prefix)
        if any(key == start or (end and start <= key and (end == _FROM_KEY or key < end)) for key in puts):
            raise DuplicateKeyError
