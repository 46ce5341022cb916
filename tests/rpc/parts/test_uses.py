"""Who uses a member: those that use most have figures of their own, which only grow, and names are bounded."""

from __future__ import annotations

import random

from raftkv.loop.fair import MEMBER, Identity
from raftkv.rpc.shares import COMPANY, KEPT_MAX, MINUTE_S, NAMED_MAX, OTHER, Use, Uses, label_of


def seconds_of(uses: Uses) -> dict[Identity, float]:
    return {identity: use.seconds for identity, use in uses.figures()}


def test_networks_and_users_are_told_apart() -> None:
    uses = Uses()
    for identity in (b"alice", "address 10.0.0.7", "address 10.0.0.8", "address 10.0.1.1"):
        uses.charge(identity, 1.0, 2, 30)
    uses.waited(b"alice", 0.5)
    found = {label_of(identity): (use.calls, use.size_bytes, use.wait_s) for identity, use in uses.figures()}
    assert found == {
        "user alice": (2, 30, 0.5),
        "address 10.0.0.0/24": (4, 60, 0.0),
        "address 10.0.1.0/24": (2, 30, 0.0),
        OTHER: (0, 0, 0.0),
    }


def test_names_made_up_by_the_million_cost_no_memory_and_hide_no_one() -> None:
    now = [0.0]
    uses = Uses(lambda: now[0])
    for minute in range(3):
        for number in range(5 * KEPT_MAX):
            uses.charge(b"made up %d in %d" % (number, minute), 0.001, 1)
        for _ in range(10):
            uses.charge(b"mallory", 4.0)
            uses.charge(b"alice", 0.5)
        now[0] += MINUTE_S
        assert len([*uses.figures()]) <= NAMED_MAX + 1
        assert len(uses._named) + len(uses._others) + len(uses._use_of) <= 2 * KEPT_MAX + 2 * NAMED_MAX
    shares = {identity: round(use.share, 3) for identity, use in uses.figures()}
    assert (shares[b"mallory"], shares[b"alice"]) == (0.667, 0.083)
    calls = sum(use.calls for _, use in uses.figures())
    assert 15 * KEPT_MAX - 3 * NAMED_MAX <= calls <= 15 * KEPT_MAX


def test_figures_only_grow_for_every_identity() -> None:
    now, rng = [0.0], random.Random(1)
    uses = Uses(lambda: now[0])
    before: dict[Identity, float] = {}
    used = 0.0
    for _ in range(60):
        for _ in range(200):
            uses.charge(b"%d" % int(rng.paretovariate(0.5)), 0.01)
            used += 0.01
        after = seconds_of(uses)
        assert all(after[identity] >= seconds - 1e-9 for identity, seconds in before.items() if identity in after)
        now[0] += rng.choice((1.0, 70.0))
        uses.roll()
        before = seconds_of(uses)
        fresh = before.keys() - after.keys()
        assert all(before[identity] == 0 for identity in fresh), "one that is named anew begins with nothing"
        assert before[OTHER] >= after[OTHER]
    assert sum(before.values()) <= used + 1e-6


def test_share_is_of_the_last_whole_minute() -> None:
    now = [0.0]
    uses = Uses(lambda: now[0])

    def share() -> float:
        return next(use.share for identity, use in uses.figures() if identity == b"mallory")

    uses.charge(b"mallory", 45.0)
    assert share() == 0.0
    now[0] = 60.0
    assert share() == 0.75
    uses.charge(b"mallory", 6.0)
    now[0] = 180.0
    assert share() == 0.05
    uses.waited(b"mallory", 3.0)
    now[0] = 240.0
    assert dict(uses.figures())[b"mallory"].wait_s == 3.0
    now[0] = 300.0
    assert dict(uses.figures())[b"mallory"].wait_s == 0.0


def test_label_cannot_harm_a_terminal_or_a_page() -> None:
    assert label_of(b"\x1b[2Jalice\n") == "user \\x1b[2Jalice\\x0a"
    long = {label_of(b"a" * 10_000 + b"%d" % number) for number in range(100)}
    assert len(long) == 100
    assert max(map(len, long)) < 150
    assert isinstance(Use().wait_s, float)


def test_company_begins_with_a_second_identity_and_ends_after_a_while_without_one() -> None:
    uses = Uses()
    for identity in (b"alice", MEMBER, b"alice"):
        uses.charge(identity, 0.001)
        assert not uses.company
    uses.charge(b"mallory", 0.001)
    for _ in range(COMPANY):
        assert uses.company
        uses.charge(b"mallory", 0.001)
        uses.charge(MEMBER, 0.001)
    assert not uses.company
