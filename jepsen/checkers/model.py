"""The reference store: a simple model of etcd's key-value semantics, which does not care about speed.

Keeps every version of every key, so that reads of the past can be checked. Invariant: ``current`` is the last version
of each existing key. Every write has a given revision; the model never counts revisions itself.

>>> model = Model()
>>> model.apply(Put("k", "1"), rev=2)
PutResult(previous=None)
>>> model.apply(Range("k"), rev=2).kvs[0].version
1
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from jepsen.ops import (
    Compare,
    Delete,
    DeleteResult,
    KeyValue,
    Part,
    PartResult,
    Put,
    PutResult,
    Range,
    RangeResult,
    Relation,
    Request,
    Result,
    Special,
    Txn,
    TxnResult,
    is_in,
)

_RELATIONS: dict[Relation, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


class Model:
    """The keys and their versions, as of the last revision applied."""

    def __init__(self) -> None:
        self.current: dict[str, KeyValue] = {}
        self.log: list[tuple[int, str, KeyValue | None, KeyValue | None]] = []
        """Every change in order: revision, key, new version (None: deleted), old version."""
        self._versions: dict[str, list[tuple[int, KeyValue | None]]] = {}

    def apply(self, request: Request, rev: int) -> Result:
        """Execute a request and return the right answer.

        Arguments:
            request: the request.
            rev: revision of its writes, if any.
        """
        if isinstance(request, Special):
            raise TypeError(f"the model knows nothing of {request}")
        if not isinstance(request, Txn):
            return self._do(request, rev)
        succeeded = all(self._holds(guard) for guard in request.compares)
        branch = request.success if succeeded else request.failure
        return TxnResult(succeeded, tuple(self._do(part, rev) for part in branch))

    def copy(self) -> Model:
        """Return an independent copy of the model."""
        other = Model()
        other.current, other.log = dict(self.current), list(self.log)
        other._versions = {key: list(versions) for key, versions in self._versions.items()}
        return other

    def read(self, key: str, end: str = "", rev: int = 0) -> tuple[KeyValue, ...]:
        """Return the existing keys of a range in order.

        Arguments:
            key, end: the range, in its wire form.
            rev: a past revision; 0: the current one.
        """
        if end == "":
            found = self._at(key, rev)
            return (found,) if found is not None else ()
        inside = sorted(k for k in (self._versions if rev else self.current) if is_in(k, key, end))
        return tuple(kv for k in inside if (kv := self._at(k, rev)) is not None)

    def written_at(self, rev: int, keys: set[str]) -> dict[str, KeyValue | None]:
        """Return the effect of the last revision on some keys: the new version, or None for deleted.

        Arguments:
            rev: the last revision.
            keys: the keys.
        """
        last = {key: self._versions.get(key, [(0, None)])[-1] for key in keys}
        return {key: kv for key, (at, kv) in last.items() if at == rev}

    def force(self, rev: int, kvs: tuple[KeyValue, ...], deleted: tuple[str, ...]) -> None:
        """Adopt a revision of the store that no request explains, so that the check can continue.

        Arguments:
            rev: the revision.
            kvs: keys written in it.
            deleted: keys deleted in it.
        """
        for kv in kvs:
            self._set(kv.key, rev, kv)
        for key in deleted:
            self._set(key, rev, None)

    def _do(self, part: Part, rev: int) -> PartResult:
        match part:
            case Put():
                return self._put(part, rev)
            case Delete():
                return self._delete(part, rev)
            case Range():
                return RangeResult(self.read(part.key, part.end, part.rev))

    def _put(self, request: Put, rev: int) -> PutResult:
        old = self.current.get(request.key)
        create, version = (old.create, old.version + 1) if old is not None else (rev, 1)
        self._set(request.key, rev, KeyValue(request.key, request.value, create, rev, version, request.lease))
        return PutResult(old if request.previous else None)

    def _delete(self, request: Delete, rev: int) -> DeleteResult:
        old = self.read(request.key, request.end)
        for kv in old:
            self._set(kv.key, rev, None)
        return DeleteResult(len(old), old if request.previous else ())

    def _holds(self, guard: Compare) -> bool:
        kv = self.current.get(guard.key)
        if guard.target == "value":
            return kv is not None and _RELATIONS[guard.relation](kv.value, guard.operand)
        actual = 0 if kv is None else getattr(kv, guard.target)
        return _RELATIONS[guard.relation](actual, guard.operand)

    def _at(self, key: str, rev: int) -> KeyValue | None:
        if rev <= 0:
            return self.current.get(key)
        versions = self._versions.get(key, [])
        position = bisect_right(versions, rev, key=lambda version: version[0])
        return versions[position - 1][1] if position else None

    def _set(self, key: str, rev: int, kv: KeyValue | None) -> None:
        self.log.append((rev, key, kv, self.current.get(key)))
        self._versions.setdefault(key, []).append((rev, kv))
        if kv is None:
            self.current.pop(key, None)
        else:
            self.current[key] = kv
