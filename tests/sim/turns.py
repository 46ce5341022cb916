"""F1: the head of each queue before the log waits no longer than its share allows, even during floods of others.

While an identity waits, each other identity is served at most the cost of one proposal of each since the waiting one
was last served. ``Turns`` tracks waiting identities by the proposals that enter and leave a member, independent of the
queue's implementation: any queue must pass, and a queue that starves an identity, or reverses its order, fails. A
proposal that the log did not take counts as served, because it had its turn. What passes although the room of a round
is used up (``Pace.lets_pass``) has a limit of its own, and counts for no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from raftkv.loop.fair import Identity
from raftkv.replica.node.proposals import KEY_COST_BYTES, Proposals, Waiter, cost_bytes

Unsent = list[tuple[int, bytes]]


class Turns:
    """Watches the proposals of one life of a member.

    Arguments:
        proposals: proposals whose methods are wrapped.
        fail: called with the broken property, as ``Checkers.fail``.
    """

    def __init__(self, proposals: Proposals, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        self._lines: dict[Identity, deque[int]] = {}
        self._whose: dict[int, Identity] = {}
        self._served: dict[Identity, dict[Identity, int]] = {}
        """Bytes that others were served since each identity that waits was served."""
        self._largest = 0
        self.contended = 0
        """Turns in which some had to wait for others."""
        inner: Any = proposals
        self._inner = inner
        self._add, self._take = inner.add, inner.take_unsent
        self._give_back, self._leave = inner.give_back, inner._leave
        inner.add, inner.take_unsent, inner.give_back, inner._leave = self.add, self.take, self.give_back, self.leave

    def add(self, kind: int, body: bytes, waiter: Waiter, now: float) -> int:
        number: int = self._add(kind, body, waiter, now)
        self._whose[number] = waiter.identity
        self._lines.setdefault(waiter.identity, deque()).append(number)
        return number

    def leave(self, number: int) -> bool:
        is_unsent: bool = self._leave(number)
        if is_unsent:
            self._remove(number)
        return is_unsent

    def _remove(self, number: int) -> Identity:
        whose = self._whose[number]
        self._lines[whose].remove(number)
        if not self._lines[whose]:
            del self._lines[whose]
            self._served.pop(whose, None)
        return whose

    def give_back(self, unsent: Unsent) -> None:
        self._give_back(unsent)
        for number, _ in reversed(unsent):
            self._lines.setdefault(self._whose[number], deque()).appendleft(number)

    def take(self, bytes_max: int, *arguments: Any) -> Unsent:
        taken: Unsent = self._take(bytes_max, *arguments)
        for number, data in taken:
            cost = cost_bytes([data]) + self._inner._waiters[number].work * KEY_COST_BYTES
            self._take_one(number, cost if bytes_max else 0)
        if not self._lines:
            self._served.clear()
        self.contended += len(self._lines) > 1
        for whose in self._lines:
            for other, cost in self._served.get(whose, {}).items():
                if cost > 2 * self._largest:
                    self._fail("F1", f"{whose!r} waits while {other!r} is served {cost} bytes")
        return taken

    def _take_one(self, number: int, cost: int) -> None:
        whose = self._whose[number]
        if self._lines[whose][0] != number:
            self._fail("F1", f"a proposal of {whose!r} overtakes its older ones")
        self._remove(number)
        self._largest = max(self._largest, cost)
        self._served.pop(whose, None)
        for other in self._lines:
            if other != whose:
                served = self._served.setdefault(other, {})
                served[whose] = served.get(whose, 0) + cost
