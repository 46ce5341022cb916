"""The fair queue beside a model of it: order within an identity, shares by cost, bounded waits, bounded memory."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.loop.fair import SERVED_KEPT_MIN, FairQueue, Identity

NAMES = (b"alice", b"bob", "address 10.0.0.0/24", "")
COST_MAX = 8

Make = Callable[[], FairQueue[int]]

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(NAMES), st.integers(1, COST_MAX)),
        st.tuples(st.just("flood"), st.sampled_from(NAMES), st.integers(1, COST_MAX)),
        st.tuples(st.just("serve"), st.sampled_from(NAMES), st.integers(1, 5)),
        st.tuples(st.just("discard"), st.sampled_from(NAMES), st.integers(0, 5)),
    ),
    max_size=60,
)


class _InOrderOfArrival(FairQueue[int]):
    """Planted: identities are forgotten, and a flood is served to its end."""

    def add(self, identity: Identity, item: int) -> None:
        super().add("", item)
        self.whose = getattr(self, "whose", {}) | {item: identity}

    def discard(self, identity: Identity, item: int) -> None:
        super().discard("", item)

    def pop(self) -> tuple[Identity, int]:
        item = super().pop()[1]
        return self.whose[item], item

    def charge(self, identity: Identity, cost: float) -> None:
        """Count nothing."""


class _FreeOfCharge(FairQueue[int]):
    """Planted: each item counts the same, so large ones get more than their share."""

    def charge(self, identity: Identity, cost: float) -> None:
        super().charge(identity, 1)


class _SavesUp(FairQueue[int]):
    """Planted: an identity that rested is owed the time of its rest, and keeps all others out for as long."""

    def add(self, identity: Identity, item: int) -> None:
        now, self._now = self._now, 0.0
        super().add(identity, item)
        self._now = now


def play(make: Make, steps: list[tuple[str, Identity, int]]) -> None:
    """Do the steps, and hold what comes out against the model."""
    queue = make()
    lines: defaultdict[Identity, deque[int]] = defaultdict(deque)
    costs: dict[int, int] = {}
    served: defaultdict[Identity, int] = defaultdict(int)
    lead: dict[tuple[Identity, Identity], int] = {}
    """For each pair of identities that have both had items ever since: how much more the first had been served then."""

    def add(name: Identity, cost: int) -> None:
        item = len(costs)
        costs[item] = cost
        if not lines[name]:
            for other in [one for one, line in lines.items() if line]:
                lead[name, other] = served[name] - served[other]
                lead[other, name] = served[other] - served[name]
        lines[name].append(item)
        queue.add(name, item)

    def leave(name: Identity) -> None:
        if not lines[name]:
            for pair in [pair for pair in lead if name in pair]:
                del lead[pair]

    def serve() -> None:
        name, item = queue.pop()
        assert lines[name].popleft() == item, "items of one identity keep their order"
        queue.charge(name, costs[item])
        served[name] += costs[item]
        for (one, other), ahead in lead.items():
            gained = served[one] - served[other] - ahead
            assert gained <= 2 * COST_MAX, f"{other!r} starves behind {one!r}: {gained}"
        leave(name)

    for what, name, number in steps:
        if what == "add":
            add(name, number)
        elif what == "flood":
            for _ in range(30):
                add(name, number)
        elif what == "discard":
            if number < len(lines[name]):
                item = lines[name][number]
                del lines[name][number]
                queue.discard(name, item)
                queue.discard(name, item)
                leave(name)
        else:
            for _ in range(min(number, len(queue))):
                serve()
        assert len(queue) == sum(map(len, lines.values()))
        assert sorted(queue) == sorted(item for line in lines.values() for item in line)
    while len(queue):
        serve()


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_each_identity_is_served_in_order_and_by_its_share(steps: list[tuple[str, Identity, int]]) -> None:
    play(FairQueue[int], steps)


FLOOD = [("flood", b"bob", 8), ("serve", b"bob", 5), ("flood", b"alice", 1), *[("serve", b"bob", 5)] * 8]
RESTED = [("flood", b"bob", 8)] * 4 + [("serve", b"bob", 5)] * 20 + [("flood", b"alice", 8)] * 4 + [
    ("serve", b"bob", 5)
] * 6  # fmt: skip


@pytest.mark.parametrize(("planted", "steps"), [(_InOrderOfArrival, FLOOD), (_FreeOfCharge, FLOOD), (_SavesUp, RESTED)])
def test_a_planted_starvation_is_found(planted: Make, steps: list[tuple[str, Identity, int]]) -> None:
    play(FairQueue[int], steps)
    with pytest.raises(AssertionError, match="starves"):
        play(planted, steps)


def test_waiting_does_not_depend_on_the_length_of_a_flood() -> None:
    waited = []
    for flood in (10, 100_000):
        queue = FairQueue[int]()
        for number in range(flood):
            queue.add(b"mallory", number)
        for _ in range(5):
            queue.charge(queue.pop()[0], 1)
        queue.add(b"alice", -1)
        waited.append(next(turn for turn in range(flood) if queue.pop()[1] == -1))
    assert waited[0] == waited[1] <= 1


def test_identities_are_served_by_their_weights() -> None:
    weights: dict[Identity, float] = {b"alice": 3.0, b"bob": 0.5}
    queue = FairQueue[int](weights=weights)
    served = dict.fromkeys(NAMES[:3], 0)

    def serve(count: int) -> dict[Identity, int]:
        for number in range(count):
            for name in served:
                queue.add(name, number)
        for _ in range(count):
            identity, _item = queue.pop()
            queue.charge(identity, 1)
            served[identity] += 1
        return dict(served)

    assert serve(900) == {b"alice": 600, b"bob": 100, "address 10.0.0.0/24": 200}
    queue.clear()
    weights.clear()
    served.update(dict.fromkeys(served, 0))
    assert set(serve(900).values()) == {300}


def test_wait_is_known_by_the_speed_of_late() -> None:
    now = [0.0]
    queue = FairQueue[int](lambda: now[0])
    for number in range(1000):
        queue.add(b"mallory", number)
    queue.add(b"alice", -1)
    assert (queue.wait_s(b"mallory"), queue.wait_s(b"bob")) == (0.0, 0.0), "not known yet"

    def serve(count: int, seconds: float) -> None:
        for _ in range(count):
            identity, item = queue.pop()
            queue.charge(identity, 1)
            queue.put_back(identity, item)
            queue.pop()
            now[0] += seconds

    serve(101, 0.01)
    assert (queue.length, queue.wait_s(b"alice")) == (900, 0.0), "it has none any more"
    assert queue.wait_s(b"mallory") == pytest.approx(9, rel=0.05)
    for _ in range(8):
        serve(50, 0.1)
        queue.wait_s(b"mallory")
    assert queue.wait_s(b"mallory") == pytest.approx(500 * 0.1, rel=0.1), "it is slower now"


def test_one_identity_is_served_in_order_of_arrival() -> None:
    queue = FairQueue[int]()
    for number in range(100):
        queue.add("", number)
        queue.add("", number)
    served = []
    while len(queue):
        identity, item = queue.pop()
        queue.charge(identity, item)
        served.append(item)
    assert served == list(range(100))


@pytest.mark.parametrize("is_served", [True, False])
def test_identities_that_come_once_leave_nothing(is_served: bool) -> None:
    queue = FairQueue[int]()
    for number in range(100 * SERVED_KEPT_MIN):
        name = b"made-up-%d" % number
        queue.add(name, number)
        if is_served:
            queue.charge(queue.pop()[0], 1)
        else:
            queue.discard(name, number)
    held = sum(len(part) for part in (queue._served, queue._heap, queue._heaped, queue._lines))
    assert held <= 4 * SERVED_KEPT_MIN
