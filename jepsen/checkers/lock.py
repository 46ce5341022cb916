"""The lock checker: compares the holders and leaders in the store's own changes with the members' answers.

The holder of a name at a revision is the existing key below it with the lowest create revision. This is what an answer
to ``Lock`` or ``Campaign`` asserts; the holder's token is the create revision of that key.

    M1 order     tokens strictly increase from one holder to the next, and the token in the answer is correct
    M1 alone     while a holder certainly holds (lease renewed, nothing released), no other client gets the lock
    M1 fenced    no list update is lost that is written only if the holder's key still exists (``lost``)
    M2 checked   a lock is answered only if it was held at a moment between call and answer (etcd issue 11456)
    E1 leader    ``Leader`` answers who led at a moment between call and answer, or that there was no leader
    E1 observed  observers get only true leaders, and never an earlier term or value again
    E2 proclaim  a proclamation is acknowledged only to the leader, and is in the store

M3 (clients without fences lose updates) is not a fault of the store; it is measured, also by ``lost``.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from jepsen.checkers import Violation
from jepsen.checkers.replay import replayed
from jepsen.history import History, Operation
from jepsen.ops import (
    Campaign,
    Grant,
    HeldResult,
    KeepAlive,
    KeyValue,
    Leader,
    LeaseResult,
    Lock,
    Proclaim,
    Put,
    Range,
    RangeResult,
    Resign,
    Revoke,
    Special,
    Unlock,
    is_serializable,
    ran,
)
from jepsen.watches import Stream

_S = 1_000_000_000
OBSERVED = "observe/"
"""Name prefix of observers of elections (``observer.py``)."""
Log = list[tuple[int, str, KeyValue | None, KeyValue | None]]


def check(history: History) -> list[Violation]:
    """Return all violations of locks and elections in a history."""
    log = replayed(history).model.log
    return _Check(history, log).run()


def lost(history: History, key: str) -> list[str]:
    """Return the elements of a list whose addition was acknowledged, but which are missing in its last read.

    Arguments:
        history: history to check.
        key: key of the list, a JSON list that is always written as a whole.
    """
    final: list[str] | None = None
    added: dict[str, int] = {}
    for operation in sorted(history.operations, key=lambda op: op.returned):
        if operation.result is None:
            continue
        for part, answer in ran(operation.request, operation.result):
            if isinstance(part, Put) and part.key == key:
                added[json.loads(part.value)[-1]] = operation.returned
            elif isinstance(part, Range) and part.key == key and isinstance(answer, RangeResult):
                final = json.loads(answer.kvs[0].value) if answer.kvs else []
    shown = set(final or ())
    return [element for element in added if element not in shown]


@dataclass(slots=True)
class _Hold:
    """One hold of a lock, or one term of a leader: its key, its token, and its revisions [first, end)."""

    key: str
    token: int
    first: int
    end: float = math.inf
    versions: list[KeyValue] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Holder:
    """A hold in a member's answer: the operation, the token, and until when (ns) the hold certainly lasted."""

    operation: Operation
    token: int
    certain: float


class _Check:
    def __init__(self, history: History, log: Log) -> None:
        self._operations, self._streams = history.operations, history.streams
        self._clock = _Clock(history)
        self._log = log
        self._found: list[Violation] = []
        self._names = {op.request.name for op in history.operations if isinstance(op.request, Lock | Campaign)}
        self._alive: dict[int, float] = defaultdict(float)
        self._given_up: dict[int | str, list[Operation]] = defaultdict(list)
        for operation in history.operations:
            self._file(operation)
        self._holds = {name: list(_holds(log, name + "/")) for name in self._names}

    def _file(self, operation: Operation) -> None:
        """Record until when each lease certainly lived, and who released which lease or key."""
        request, result = operation.request, operation.result
        if isinstance(request, Grant | KeepAlive) and isinstance(result, LeaseResult) and result.ttl_s > 0:
            self._alive[request.id] = max(self._alive[request.id], operation.call + result.ttl_s * _S)
        elif isinstance(request, Revoke):
            self._given_up[request.id].append(operation)
        elif isinstance(request, Unlock | Resign):
            self._given_up[request.key].append(operation)

    def run(self) -> list[Violation]:
        for name in sorted(self._names):
            holders = [holder for op in self._answered(name) if (holder := self._holder(name, op)) is not None]
            self._check_order(holders)
            self._check_alone(holders)
        for operation in self._operations:
            if isinstance(operation.request, Proclaim) and operation.kind == "ok":
                self._check_proclaimed(operation, operation.request)
            if isinstance(operation.request, Leader) and isinstance(operation.result, RangeResult):
                self._check_leader(operation, operation.request.name, operation.result)
        for stream in self._streams:
            self._check_observed(stream)
        return self._found

    def _report(self, rule: str, text: str, *operations: Operation) -> None:
        self._found.append(Violation(rule, text, tuple(operation.id for operation in operations)))

    def _answered(self, name: str) -> Iterator[Operation]:
        for operation in sorted(self._operations, key=lambda op: op.call):
            request = operation.request
            if isinstance(request, Lock | Campaign) and request.name == name and operation.kind == "ok":
                yield operation

    def _holder(self, name: str, operation: Operation) -> _Holder | None:
        """Check M2, and return the hold in the answer with its token."""
        result = operation.result
        key, token = (result.key, result.token) if isinstance(result, HeldResult) else ("", 0)
        first, last = self._clock.window(operation)
        holds = [r for r in self._holds[name] if r.key == key and r.first <= last and r.end > first]
        if not holds:
            self._report("M2 not held", f"{key} got the hold between revisions {first} and {last:g}", operation)
            return None
        if token and token not in [hold.token for hold in holds]:
            self._report("M1 wrong token", f"{key} was answered token {token}, it is {holds[-1].token}", operation)
        return _Holder(operation, token or holds[-1].token, self._certain(operation))

    def _certain(self, operation: Operation) -> float:
        """Return until when it certainly held: its lease was renewed, and no client released it."""
        request = operation.request
        lease = request.lease if isinstance(request, Lock | Campaign) else 0
        key = operation.result.key if isinstance(operation.result, HeldResult) else ""
        given_up = [
            op.call
            for op in (*self._given_up[lease], *self._given_up[key])
            if op.call > operation.call and op.kind != "fail"
        ]
        alive = self._alive[lease]
        return min([alive, *given_up])

    def _check_order(self, holders: list[_Holder]) -> None:
        by_return = sorted(holders, key=lambda holder: holder.operation.returned)
        highest: _Holder | None = None
        place = 0
        for holder in holders:
            while place < len(by_return) and by_return[place].operation.returned < holder.operation.call:
                if highest is None or by_return[place].token > highest.token:
                    highest = by_return[place]
                place += 1
            same = highest is not None and _key(highest) == _key(holder)
            if highest is not None and holder.token <= highest.token and not same:
                text = f"{_key(holder)} has token {holder.token} after {highest.token}"
                self._report("M1 out of order", text, highest.operation, holder.operation)

    def _check_alone(self, holders: list[_Holder]) -> None:
        for holder in holders:
            for other in holders:
                during = holder.operation.returned < other.operation.call and other.operation.returned < holder.certain
                if during and _key(other) != _key(holder):
                    text = f"{_key(other)} got the hold while {_key(holder)} did"
                    self._report("M1 two holders", text, holder.operation, other.operation)

    def _check_proclaimed(self, operation: Operation, request: Proclaim) -> None:
        first, last = self._clock.window(operation)
        there = any(
            first <= rev <= last and now is not None and now.value == request.value and now.create == request.rev
            for rev, key, now, _ in self._log
            if key == request.key
        )
        if not there:
            self._report("E2 not the leader", f"{request.value} of {request.key} was acknowledged", operation)

    def _check_leader(self, operation: Operation, name: str, result: RangeResult) -> None:
        first, last = self._clock.window(operation)
        current = [hold for hold in self._holds.get(name, []) if hold.first <= last and hold.end > first]
        led = any(kv == result.kvs[0] for hold in current for kv in hold.versions)
        if not led:
            self._report("E1 wrong leader", f"{result.kvs[0]} between {first} and {last:g}", operation)

    def _check_observed(self, stream: Stream) -> None:
        holds = self._holds.get(stream.watcher.removeprefix(OBSERVED), [])
        true = {(kv.create, kv.mod): kv for hold in holds for kv in hold.versions}
        last = (0, 0)
        for event in (event for message in stream.messages for event in message.events):
            mark = (event.kv.create, event.kv.mod)
            if true.get(mark) != event.kv:
                self._report("E1 wrong leader", f"{stream.name} got {event.kv}")
            if mark < last:
                self._report("E1 observed back", f"{stream.name} got {event.kv} after revision {last[1]}")
            last = max(last, mark)


class _Clock:
    """Bounds of the revisions at which an operation took place, from what others saw before and after."""

    def __init__(self, history: History) -> None:
        answered = [op for op in history.operations if op.kind == "ok" and not isinstance(op.request, Special)]
        before = sorted((op.returned, op.rev) for op in answered)
        self._returned = [at for at, _ in before]
        self._highest = list(accumulate((rev for _, rev in before), max))
        after = sorted((op.call, op.rev) for op in answered if op.wrote or not is_serializable(op.request))
        self._called = [at for at, _ in after]
        self._lowest = list(accumulate((rev for _, rev in reversed(after)), min))[::-1]

    def window(self, operation: Operation) -> tuple[int, float]:
        """Return the lowest and the highest revision that an operation may have seen."""
        place = bisect_left(self._returned, operation.call)
        least = self._highest[place - 1] if place else 1
        place = bisect_right(self._called, operation.returned)
        return least, self._lowest[place] if place < len(self._lowest) else math.inf


def _holds(log: Log, prefix: str) -> Iterator[_Hold]:
    """Yield the holders of a name, one after the other."""
    living: dict[str, KeyValue] = {}
    hold: _Hold | None = None
    by_revision: dict[int, list[tuple[str, KeyValue | None]]] = defaultdict(list)
    for rev, key, now, _ in log:
        if key.startswith(prefix):
            by_revision[rev].append((key, now))
    for rev, changes in sorted(by_revision.items()):
        for key, now in changes:
            if now is None:
                living.pop(key, None)
            else:
                living[key] = now
        holder = min(living.values(), key=lambda kv: kv.create, default=None)
        if hold is not None and (holder is None or (holder.key, holder.create) != (hold.key, hold.token)):
            hold.end = rev
            yield hold
            hold = None
        if holder is not None:
            hold = hold or _Hold(holder.key, holder.create, rev)
            if holder not in hold.versions:
                hold.versions.append(holder)
    if hold is not None:
        yield hold


def _key(holder: _Holder) -> str:
    result = holder.operation.result
    return result.key if isinstance(result, HeldResult) else ""
