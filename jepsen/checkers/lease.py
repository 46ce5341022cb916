"""The lease checker: when leases end, by the clients' monotonic clock, and what ends with them.

    L1 whole       the end of a lease deletes exactly its keys, all in one revision
    L2 not early   not before the TTL has passed since the last acknowledged renewal was *sent*, unless revoked
    L3 not late    once the cluster works: within the TTL, two election timeouts and 1 s
    L5 for good    an ended lease is not renewed, given keys, or reported alive again
    L6 unique      an id is not granted while a lease with this id lives; no refusal of an unused id

A client knows less than the server: a renewal took place between its call and its answer; a lease had ended when any
later state was seen (a revision, a refusal, TTL 0), and was still alive when any earlier state was requested. Each rule
uses the bound that favours the server. A new member counts all leases as renewed when it receives the data, and so does
each member at its start; so after the death of all members, or of a quorum, every lease may last for another TTL.
Leases without an acknowledged grant are not checked. For ids that were, or may have been, granted again, only L1 and L6
are checked.

L4 (steps of the wall clock change nothing): by the same rules, under the faults ``ahead`` and ``behind``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from jepsen.checkers import Violation
from jepsen.checkers.replay import Replayed, replayed
from jepsen.history import History, Operation
from jepsen.ops import RECIPES, Grant, KeepAlive, LeaseResult, Revoke, Special, TimeToLive, is_serializable, puts

_S = 1_000_000_000
LATE_S = 1.0
OBSERVED_S = 1.0
"""Allowance for the harness's own delays in lateness."""
_GONE = "etcdserver: requested lease not found"
_EXISTS = "etcdserver: lease already exists"

Span = tuple[int, int]
Trouble = tuple[int, int, bool]
"""Start, end, and whether all members that knew of the renewals may have died."""


def check(history: History) -> list[Violation]:
    """Return all violations of leases in a history."""
    true = replayed(history)
    ends, found = _ends(true)
    times = _Times(history)
    for lease in _leases(history, ends):
        found += _LeaseCheck(lease, times).run()
    return found


def lateness_s(history: History) -> list[float]:
    """Return the lateness of each lease with keys that expired and was granted once, in seconds.

    This is the time from when it was due (call of the last renewal plus TTL) until its end was seen.
    """
    ends, _ = _ends(replayed(history))
    times = _Times(history)
    found = []
    for lease in _leases(history, ends):
        due = [operation.call + ttl for operation, ttl in lease.renewals()]
        revoked = any(operation.kind != "fail" for operation in lease.asked(Revoke))
        granted = sum(operation.kind != "fail" for operation in lease.asked(Grant))
        if lease.ended_rev and due and granted == 1 and not revoked:
            found.append((times.seen_at(lease.ended_rev) - max(due)) / _S)
    return sorted(found)


@dataclass(slots=True)
class _Lease:
    """One lease id: the operations on it, and the revision that ended it (0: unknown)."""

    id: int
    ended_rev: int = 0
    has_keys: bool = False
    operations: list[Operation] = field(default_factory=list)

    def asked(self, kind: type[Special]) -> Iterator[Operation]:
        return (operation for operation in self.operations if isinstance(operation.request, kind))

    def renewals(self) -> Iterator[tuple[Operation, float]]:
        """Yield acknowledged grants and renewals, with their TTL."""
        for operation in self.operations:
            renews = isinstance(operation.request, Grant | KeepAlive)
            if renews and isinstance(operation.result, LeaseResult) and operation.result.ttl_s > 0:
                yield operation, operation.result.ttl_s * _S


class _Times:
    """Bounds of times, from all operations, streams and faults of a history."""

    def __init__(self, history: History) -> None:
        setting = next((event for event in history.events if event["event"] == "settings"), {})
        self.slack = int((LATE_S + OBSERVED_S + 2 * setting.get("election_ms", 500) / 1000) * _S)
        self.restarts = setting.get("system") != "raftkv"
        """Whether a new leader may restart the TTL of every lease, as etcd does."""
        self.troubles = _troubles(history)
        self.arrivals = _arrivals(history)
        self.last = max((op.returned for op in history.operations), default=0)
        answered = [op for op in history.operations if op.kind == "ok" and not isinstance(op.request, Special)]
        seen = [(op.rev, op.returned) for op in answered]
        seen += [(message.rev, message.at) for stream in history.streams for message in stream.messages]
        self._seen = sorted(seen)
        self._first_after = list(accumulate((at for _, at in reversed(self._seen)), min))[::-1]
        current = sorted((op.rev, op.call) for op in answered if op.wrote or not is_serializable(op.request))
        self._current = current
        self._last_before = list(accumulate((at for _, at in current), max))

    def seen_at(self, rev: int) -> float:
        """Return when a revision, or a later one, was first seen: it existed by then."""
        place = bisect_left(self._seen, (rev, 0))
        return self._first_after[place] if place < len(self._seen) else math.inf

    def not_yet_at(self, rev: int) -> float:
        """Return when a request was sent whose answer was from before a revision: the revision did not exist then."""
        place = bisect_left(self._current, (rev, 0))
        return self._last_before[place - 1] if place else -math.inf


class _LeaseCheck:
    def __init__(self, lease: _Lease, times: _Times) -> None:
        self._lease, self._times = lease, times
        self._found: list[Violation] = []

    def run(self) -> list[Violation]:
        granted = [operation for operation in self._lease.asked(Grant) if operation.kind != "fail"]
        self._check_unique()
        if len(granted) == 1 and granted[0].kind == "ok":
            gone = self._gone_at(granted[0].returned)
            self._check_end(gone)
            self._check_afterlife(gone)
            self._check_late()
        elif not granted and any(_failed_with(operation, _EXISTS) for operation in self._lease.asked(Grant)):
            self._refused_for_nothing()
        return self._found

    def _report(self, rule: str, text: str, *operations: Operation) -> None:
        ids = tuple(operation.id for operation in operations)
        self._found.append(Violation(rule, f"lease {self._lease.id}: {text}", ids))

    def _gone_at(self, granted: int) -> float:
        """Return when it had certainly ended."""
        seen = self._times.seen_at(self._lease.ended_rev) if self._lease.ended_rev else math.inf
        answered_at = [op.returned for op in self._lease.operations if op.call > granted and _says_gone(op)]
        return min([seen, *answered_at])

    def _check_end(self, gone: float) -> None:
        revoked = any(op.kind != "fail" and op.call < gone for op in self._lease.asked(Revoke))
        for operation, ttl in self._lease.renewals():
            if operation.call < gone < operation.call + ttl and not revoked:
                left_s = (operation.call + ttl - gone) / _S
                self._report("L2 early", f"ended {left_s:.3f} s before its time", operation)

    def _check_afterlife(self, gone: float) -> None:
        for operation in self._lease.operations:
            if operation.call > gone and operation.kind == "ok" and not _says_gone(operation):
                if isinstance(operation.request, Grant | Revoke):
                    continue  # An id may be granted again, so its revocation is no evidence.
                after_s = (operation.call - gone) / _S
                self._report("L5 after its end", f"{operation.request} answered {after_s:.3f} s after", operation)

    def _check_late(self) -> None:
        """Compare with the last time when it was certainly alive."""
        lease, times = self._lease, self._times
        answered_at = [op.call for op in lease.asked(TimeToLive) if op.kind == "ok" and not _says_gone(op)]
        answered_at = [call for call in answered_at if lease.ended_rev == 0 or call < times.seen_at(lease.ended_rev)]
        if lease.ended_rev:
            answered_at.append(int(max(times.not_yet_at(lease.ended_rev), 0)))
        elif lease.has_keys:
            answered_at.append(times.last)
        alive = max(answered_at, default=0)
        due = self._due()
        if alive > due:
            self._report("L3 late", f"alive {(alive - due) / _S:.3f} s after it had to be over")

    def _due(self) -> float:
        attempts = [op for op in self._lease.operations if isinstance(op.request, Grant | KeepAlive)]
        ttl = max(ttl for _, ttl in self._lease.renewals())
        doubtful = any(op.kind == "info" for op in attempts) or self._times.restarts
        due = max(op.returned for op in attempts if op.kind != "fail") + ttl + self._times.slack
        for began, ended, forgotten in self._times.troubles:
            if began < due:
                due = max(due, ended + self._times.slack + (ttl if doubtful or forgotten else 0))
        # A member that receives the data then counts every lease as renewed, and may lead as soon as it votes.
        return max([due, *(ended + self._times.slack + ttl for began, ended in self._times.arrivals if began < due)])

    def _check_unique(self) -> None:
        renewed = list(self._lease.renewals())
        revokes = [op for op in self._lease.asked(Revoke) if op.kind != "fail"]
        for again in self._lease.asked(Grant):
            alive = any(
                op is not again and op.returned < again.call and again.returned < op.call + ttl for op, ttl in renewed
            )
            if alive and again.kind == "ok" and not any(op.call < again.returned for op in revokes):
                self._report("L6 granted twice", "while it was alive", again)

    def _refused_for_nothing(self) -> None:
        if all(op.kind == "fail" for op in self._lease.asked(Grant)):
            self._report("L6 refused", "said to exist, and no client made it", *self._lease.asked(Grant))


def _says_gone(operation: Operation) -> bool:
    if isinstance(operation.request, KeepAlive | TimeToLive) and isinstance(operation.result, LeaseResult):
        return operation.result.ttl_s <= 0 and operation.result.granted_s == 0
    return _failed_with(operation, _GONE)


def _failed_with(operation: Operation, text: str) -> bool:
    return operation.failure is not None and operation.failure.text == text


def _leases(history: History, ends: dict[int, int]) -> list[_Lease]:
    leases: dict[int, _Lease] = {}
    for operation in history.operations:
        for lease_id in _concerned(operation):
            lease = leases.setdefault(lease_id, _Lease(lease_id, ends.get(lease_id, 0)))
            lease.operations.append(operation)
    for kvs in [history.store.states.get(history.store.last, ())] if history.store else []:
        for kv in kvs:
            if kv.lease in leases:
                leases[kv.lease].has_keys = True
    return list(leases.values())


def _concerned(operation: Operation) -> set[int]:
    request = operation.request
    if isinstance(request, Grant | Revoke | KeepAlive | TimeToLive):
        return {request.id}
    return {put.lease for put in puts(request) if put.lease} if operation.wrote or operation.kind == "fail" else set()


def _ends(true: Replayed) -> tuple[dict[int, int], list[Violation]]:
    """Return the revision that ended each lease, and violations of L1, by following the keys of each lease."""
    held: dict[int, set[str]] = defaultdict(set)
    gone: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    whole: dict[tuple[int, int], set[str]] = {}
    for rev, key, now, before in true.model.log:
        if key.startswith(RECIPES):
            continue  # Locks are also released without the end of a lease.
        if before is not None and before.lease:
            if now is None and rev in true.servers:
                gone[rev][before.lease].add(key)
                whole.setdefault((rev, before.lease), set(held[before.lease]))
            held[before.lease].discard(key)
        if now is not None and now.lease:
            held[now.lease].add(key)
    ends: dict[int, int] = {}
    found = []
    for rev, leases in gone.items():
        if len(leases) > 1:
            found.append(Violation("L1 not whole", f"revision {rev} ends leases {sorted(leases)}"))
        for lease, keys in leases.items():
            left = whole[rev, lease] - keys
            if left:
                text = f"revision {rev} ends lease {lease} without {', '.join(sorted(left))}"
                found.append(Violation("L1 not whole", text))
            ends.setdefault(lease, rev)
    return ends, found


def _arrivals(history: History) -> list[Span]:
    """Return the spans from the start of each new member until it votes; in between it receives the data."""
    spans: dict[str, Span] = {}
    for event in history.events:
        if event["event"] == "joining":
            spans[event["member"]] = (event["at"], event["at"])
        elif event["event"] in ("added", "replaced"):
            name = event["by"] if event["event"] == "replaced" else event["member"]
            spans[name] = (spans.get(name, (event["at"], 0))[0], event["at"])
    return list(spans.values())


def _troubles(history: History) -> list[Trouble]:
    """Return the spans from each fault until a write called after the healing was acknowledged."""
    acked = sorted((op.call, op.returned) for op in history.operations if op.wrote)
    troubles: list[Trouble] = []
    began, forgotten = 0, False
    for event in history.events:
        if event["event"] == "heal":
            place = bisect_left(acked, (event["at"], 0))
            worked = acked[place][1] if place < len(acked) else event["at"]
            troubles.append((began or event["at"], worked, forgotten))
            began, forgotten = 0, False
        elif event["event"] == "died":
            troubles.append((event["at"], event["at"], False))
        elif "target" in event:
            began = began or event["at"]
            forgotten |= event["event"] == "kill" and event["target"] in ("all", "quorum")
    return troubles
