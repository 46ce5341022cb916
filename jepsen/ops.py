"""The vocabulary of histories: requests of clients, their answers, and both as JSON.

A request is a ``Put``, ``Range``, ``Delete`` or ``Txn``; its result is the class with the matching name. Keys and
values are strings here (the workloads write only text), so that histories are readable and hand-made ones short:

>>> request = Txn((Compare("k", "value", "=", "1"),), (Put("k", "2"),), (Range("k"),))
>>> decode(encode(request)) == request
True

Requests for leases, locks and elections have separate classes (``Special``). The server changes their keys at a moment
that no answer names, so these keys begin with ``~`` and are checked separately (``SERVERS``).

Not supported, because no workload uses them yet: nested txns, and the filters and orders of Range. For watches, see
``watches.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

END_OF_KEYS = "\0"
"""The range end that means all keys from the start on."""

SERVERS = "~"
"""Prefix of keys that the server may delete by itself: leases expire, locks are released."""
RECIPES = SERVERS + "r/"
"""Prefix of keys that the server also writes by itself, for locks and elections."""

Target = Literal["value", "version", "create", "mod"]
Relation = Literal["=", "!=", ">", "<"]


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as the store holds it."""

    key: str
    value: str
    create: int
    mod: int
    version: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Write one key, attached to a lease if one is given; with ``previous``, the answer contains the replaced key."""

    key: str
    value: str
    previous: bool = False
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Range:
    """Read a key, or all of ``[key, end)``; ``rev`` 0: current; ``serializable``: a local, possibly stale read."""

    key: str
    end: str = ""
    rev: int = 0
    serializable: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key, or all of ``[key, end)``."""

    key: str
    end: str = ""
    previous: bool = False


@dataclass(frozen=True, slots=True)
class Compare:
    """One condition of a txn: ``<target> of key <relation> operand``."""

    key: str
    target: Target
    relation: Relation
    operand: str | int


@dataclass(frozen=True, slots=True)
class Txn:
    """A transaction: if all conditions hold, do ``success``, else ``failure``; all writes have one revision."""

    compares: tuple[Compare, ...]
    success: tuple[Part, ...]
    failure: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """Grant a lease."""

    id: int
    ttl_s: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Revoke a lease."""

    id: int


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Renew a lease."""

    id: int


@dataclass(frozen=True, slots=True)
class TimeToLive:
    """Read the remaining time of a lease."""

    id: int


@dataclass(frozen=True, slots=True)
class Lock:
    """Wait for a lock; it is held as long as the lease lives."""

    name: str
    lease: int


@dataclass(frozen=True, slots=True)
class Unlock:
    """Release a lock, by the key in the answer to ``Lock``."""

    key: str


@dataclass(frozen=True, slots=True)
class Campaign:
    """Wait to be elected; leadership lasts as long as the lease lives."""

    name: str
    lease: int
    value: str


@dataclass(frozen=True, slots=True)
class Proclaim:
    """Change the leader's value, in the term with token ``rev``."""

    name: str
    key: str
    rev: int
    lease: int
    value: str


@dataclass(frozen=True, slots=True)
class Resign:
    """End the term with token ``rev``."""

    name: str
    key: str
    rev: int
    lease: int


@dataclass(frozen=True, slots=True)
class Leader:
    """Read the current leader."""

    name: str


Part = Put | Range | Delete
Special = Grant | Revoke | KeepAlive | TimeToLive | Lock | Unlock | Campaign | Proclaim | Resign | Leader
Request = Part | Txn | Special


@dataclass(frozen=True, slots=True)
class PutResult:
    """The answer to ``Put``."""

    previous: KeyValue | None = None


@dataclass(frozen=True, slots=True)
class RangeResult:
    """The answer to ``Range``."""

    kvs: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """The answer to ``Delete``."""

    deleted: int
    previous: tuple[KeyValue, ...] = ()


@dataclass(frozen=True, slots=True)
class TxnResult:
    """The answer to ``Txn``: which branch ran, and the answers of its operations."""

    succeeded: bool
    results: tuple[PartResult, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """An answer without content: to ``Revoke``, ``Unlock``, ``Proclaim`` and ``Resign``."""


@dataclass(frozen=True, slots=True)
class LeaseResult:
    """The answer to ``Grant``, ``KeepAlive`` (TTL 0: no such lease) and ``TimeToLive`` (TTL -1: no such lease)."""

    ttl_s: int
    granted_s: int = 0


@dataclass(frozen=True, slots=True)
class HeldResult:
    """The answer to ``Lock`` and ``Campaign``.

    It has the key held, and its create revision, which is the token (0: not in the answer).
    """

    key: str
    token: int = 0


PartResult = PutResult | RangeResult | DeleteResult
Result = PartResult | TxnResult | Done | LeaseResult | HeldResult

_KINDS: dict[str, type[Any]] = {
    "put": Put, "range": Range, "delete": Delete, "txn": Txn, "put_result": PutResult, "range_result": RangeResult,
    "delete_result": DeleteResult, "txn_result": TxnResult, "compare": Compare, "kv": KeyValue, "grant": Grant,
    "revoke": Revoke, "keep_alive": KeepAlive, "time_to_live": TimeToLive, "lock": Lock, "unlock": Unlock,
    "campaign": Campaign, "proclaim": Proclaim, "resign": Resign, "leader": Leader, "done": Done,
    "lease_result": LeaseResult, "held_result": HeldResult,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _KINDS.items()}


def is_in(key: str, start: str, end: str) -> bool:
    """Return whether a key lies in the range of a Range or Delete.

    Arguments:
        key: the key.
        start, end: the range, in its wire form.
    """
    if end == "":
        return key == start
    return key >= start and (end == END_OF_KEYS or key < end)


def branches(request: Request) -> tuple[Part, ...]:
    """Return every operation that a request may execute, in either branch."""
    if isinstance(request, Txn):
        return (*request.success, *request.failure)
    return (request,) if isinstance(request, Part) else ()


def ran(request: Request, result: Result) -> Iterator[tuple[Part, PartResult]]:
    """Iterate over the operations that an answered request executed, with their answers.

    Arguments:
        request: the request.
        result: its answer.
    """
    if isinstance(request, Txn) and isinstance(result, TxnResult):
        yield from zip(request.success if result.succeeded else request.failure, result.results, strict=True)
    elif isinstance(request, Part) and isinstance(result, PartResult):
        yield request, result


def may_write(request: Request) -> bool:
    """Return whether a request could change the store, or affect a later change by the server."""
    if isinstance(request, Special):
        return not isinstance(request, TimeToLive | Leader)
    return any(isinstance(part, Put | Delete) for part in branches(request))


def did_write(request: Request, result: Result) -> bool:
    """Return whether an answered request changed the store (a delete without matches and a failed txn may not).

    Arguments:
        request: the request.
        result: its answer.
    """
    return any(
        isinstance(part, Put) or (isinstance(answer, DeleteResult) and answer.deleted > 0)
        for part, answer in ran(request, result)
    )


def is_serializable(request: Request) -> bool:
    """Return whether the answer may be stale: a local read, or a txn with only local reads."""
    return all(isinstance(part, Range) and part.serializable for part in branches(request))


def puts(request: Request) -> Iterator[Put]:
    """Iterate over every put that a request may execute."""
    return (part for part in branches(request) if isinstance(part, Put))


def encode(value: Any) -> Any:
    """Return requests or results as JSON data: ``[kind, field, ...]``, without trailing defaults."""
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    name = _NAMES.get(type(value))
    if name is None:
        return value
    return [name, *(encode(getattr(value, slot)) for slot in type(value).__slots__)]


def decode(data: Any) -> Any:
    """Convert data from ``encode`` back to a request or result."""
    if not isinstance(data, list):
        return data
    if data and isinstance(data[0], str) and data[0] in _KINDS:
        return _KINDS[data[0]](*(decode(item) for item in data[1:]))
    return tuple(decode(item) for item in data)
