"""Fair service: identities that wait for the same resource are served in turn, by the cost of their items.

    queue = FairQueue[Job]()
    queue.add(b"alice", job)            # behind the other items of alice
    identity, job = queue.pop()         # an item of the identity that has been served least
    queue.charge(identity, seconds)     # the cost of the item, once it is known: time, bytes or calls
    queue.wait_s(identity)              # about how long a new item would wait

In order of arrival, one identity that floods a member would make all others wait until its flood ends. Here the wait
depends on the number of waiting identities and the cost of one item of each. With a single identity items are served in
order of arrival.

This is start-time fair queueing (Goyal, Vin and Cheng, 1996). Each identity has a virtual time, the total cost of its
served items over its weight; the identity with the least goes next. A new identity begins at the virtual time of the
last served item, so it cannot save up time for a flood of its own. Of two identities that always have items waiting,
neither is served more than the cost of one item ahead of the other. A cost may be charged after the item was served,
and counts from then on.

Invariants: items of one identity keep their order. Memory is a few words for each identity that has items or has been
served more than others, so an identity has paid for its memory.

Leaves out: limits on what may wait (``rpc/shares``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from heapq import heappop, heappush
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

Identity = str | bytes
"""A user's name as bytes; otherwise "certificate NAME" or "address ADDRESS"."""

MEMBER: Final = "member"
"""The identity of the member's own work, which no client asked for."""

Weights = Mapping[Identity, float]
"""How much more than others an identity is served while all wait; those without a weight count 1."""

EQUAL: Final[Weights] = {}

SERVED_KEPT_MIN: Final = 64
"""Virtual times kept before those of identities without items that are not ahead of the others are dropped."""

MEASURED_S: Final = 1.0
"""How long an identity is measured before the past counts half."""


class FairQueue(Generic[T]):
    """Waiting items by identity. Each item is in the queue at most once.

    Arguments:
        clock: returns seconds; None: waits are not measured.
        weights: weights of identities; they may change at any time, and count for work done from then on.

    Attributes:
        length: number of waiting items.
    """

    def __init__(self, clock: Callable[[], float] | None = None, weights: Weights = EQUAL) -> None:
        self._clock = clock
        self._weights = weights
        self._pace: dict[Identity, tuple[float, int]] = {}
        """For each identity with items: when its measurement began, and how many items were taken since."""
        # OrderedDict, since a plain dict is slow to find its first item when many before it were deleted.
        self._lines: dict[Identity, OrderedDict[T, None]] = {}
        self._served: dict[Identity, float] = {}
        """The virtual time of each identity that has items or is ahead of the others."""
        self._heap: list[tuple[float, int, Identity]] = []
        """Each identity with items once, under a virtual time that may be outdated; also identities without items."""
        self._heaped: set[Identity] = set()
        self._now = 0.0
        self._number = 0
        self.length = 0
        self._served_max = SERVED_KEPT_MIN

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[T]:
        for line in self._lines.values():
            yield from line

    def has(self, identity: Identity) -> bool:
        """Return whether an identity has waiting items."""
        return identity in self._lines

    def add(self, identity: Identity, item: T) -> None:
        """Add a waiting item; one that already waits keeps its place.

        Arguments:
            identity: owner of the item.
            item: item to be served.
        """
        line = self._lines.get(identity)
        if line is None:
            if not self.length:
                self.clear()  # while the queue was empty, no identity lost to another
            line = self._lines[identity] = OrderedDict()
            self._served[identity] = max(self._served.get(identity, 0.0), self._now)
            self._push(identity)
            if self._clock is not None:
                self._pace[identity] = (self._clock(), 0)
        if item not in line:
            line[item] = None
            self.length += 1

    def pop_other_than(self, excepted: Callable[[Identity], bool]) -> tuple[Identity, T] | None:
        """Take the oldest item of the first identity that is not excepted; None: all identities are."""
        for identity, line in self._lines.items():
            if not excepted(identity):
                item, _none = line.popitem(last=False)
                self.length -= 1
                self._note_taken(identity, 1)
                if not line:
                    self._end(identity)
                return identity, item
        return None

    def put_back(self, identity: Identity, item: T) -> None:
        """Add an item again, ahead of the other items of its identity."""
        self._note_taken(identity, -1)
        self.add(identity, item)
        self._lines[identity].move_to_end(item, last=False)

    def _push(self, identity: Identity) -> None:
        if identity not in self._heaped:
            self._heaped.add(identity)
            self._number += 1
            heappush(self._heap, (self._served[identity], self._number, identity))

    def pop(self) -> tuple[Identity, T]:
        """Take the next item, and return it with its identity.

        Raises:
            IndexError: no item waits.
        """
        while True:
            served, _, identity = heappop(self._heap)
            self._heaped.discard(identity)
            line = self._lines.get(identity)
            if line is None:
                continue  # all its items were discarded
            if served < self._served[identity]:
                self._push(identity)  # it has been charged since it was pushed
                continue
            self._now = served
            item, _none = line.popitem(last=False)
            self.length -= 1
            if self._clock is not None:
                self._note_taken(identity, 1)
            if line:
                self._push(identity)
            else:
                self._end(identity)
            return identity, item

    def _note_taken(self, identity: Identity, count: int) -> None:
        if identity in self._pace:
            since, taken = self._pace[identity]
            self._pace[identity] = (since, taken + count)

    def wait_s(self, identity: Identity) -> float:
        """Return how long a new item would wait at the recent speed; 0: unknown."""
        if self._clock is None or identity not in self._pace:
            return 0.0
        now = self._clock()
        since, taken = self._pace[identity]
        wait_s = len(self._lines[identity]) * (now - since) / taken if taken > 0 else 0.0
        if now - since > MEASURED_S:
            self._pace[identity] = (now - (now - since) / 2, taken // 2)
        return wait_s

    def charge(self, identity: Identity, cost: float) -> None:
        """Add the cost of work done for an identity.

        Arguments:
            identity: identity returned by ``pop``.
            cost: in the same unit for all calls on this queue.
        """
        if self._weights:
            cost /= self._weights.get(identity, 1.0)
        self._served[identity] = max(self._served.get(identity, 0.0), self._now) + cost

    def discard(self, identity: Identity, item: T) -> None:
        """Remove an item, if it waits."""
        line = self._lines.get(identity)
        if line is not None and item in line:
            del line[item]
            self.length -= 1
            if not line:
                self._end(identity)

    def _end(self, identity: Identity) -> None:
        """Remove an identity without items. Its virtual time is kept while it is ahead of the others."""
        del self._lines[identity]
        self._pace.pop(identity, None)
        if not self.length:
            self.clear()
        if len(self._served) > self._served_max:
            now, lines = self._now, self._lines
            self._served = {one: time for one, time in self._served.items() if time > now or one in lines}
            self._served_max = max(SERVED_KEPT_MIN, 2 * len(self._served))
            self._heap = sorted(entry for entry in self._heap if entry[2] in lines)
            self._heaped = {entry[2] for entry in self._heap}

    def clear(self) -> None:
        """Remove all items and virtual times."""
        self._lines.clear()
        self._served.clear()
        self._heap.clear()
        self._heaped.clear()
        self._pace.clear()
        self.length = 0
