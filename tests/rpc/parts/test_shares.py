"""Shares of budgets: a model that takes and gives back in any order, and who is named as what."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from raftkv.rpc.shares import GREED, Identity, Shares, identity_of_peer, name_of, refusal

LIMIT = 64
NAMES: tuple[Identity, ...] = (b"alice", b"bob", "certificate alice", "address 10.0.0.1", "address 10.0.0.2")
WHO = st.sampled_from(NAMES)
SIZE = st.integers(1, 20)


class _Model(RuleBasedStateMachine):
    """What each holds is kept in lists; the shares must know the same sums."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares(LIMIT)
        self.held: dict[Identity, list[int]] = {}

    def total(self, identity: Identity) -> int:
        return sum(self.held.get(identity, ()))

    @rule(identity=WHO)
    def give_back(self, identity: Identity) -> None:
        if self.held.get(identity):
            self.shares.give_back(identity, self.held[identity].pop())

    @invariant()
    def what_is_held_is_what_was_taken_and_not_given_back(self) -> None:
        held = {identity: sum(sizes) for identity, sizes in self.held.items() if sizes}
        assert self.shares.held == held
        assert self.shares.used == sum(held.values())


class TakenBack(_Model):
    """Budgets whose greediest gives way."""

    @rule(identity=WHO, size=SIZE)
    def ask(self, identity: Identity, size: int) -> None:
        before = {other: self.total(other) for other in NAMES}
        gave: list[Identity] = []

        def give_way(greediest: Identity) -> bool:
            gave.append(greediest)
            assert self.total(greediest) == max(self.total(other) for other in NAMES if other != identity)
            assert self.total(greediest) > self.total(identity) + size
            self.give_back(greediest)
            return True

        if self.shares.make_room(identity, size, give_way):
            self.shares.take(identity, size)
            self.held.setdefault(identity, []).append(size)
            assert bool(gave) == (sum(before.values()) + size > LIMIT)
        else:
            most = max(self.total(other) for other in NAMES if other != identity)
            assert most <= self.total(identity) + size, "a greedier one holds more"
            asking = {other for other in NAMES if self.total(other)} | {identity}
            assert (self.total(identity) + size) * len(asking) > LIMIT, "it would have less than an equal share"

    @invariant()
    def no_more_is_held_than_there_is(self) -> None:
        assert self.shares.used <= LIMIT


class Kept(_Model):
    """Budgets of what cannot be taken back."""

    @rule(identity=WHO, size=SIZE)
    def ask(self, identity: Identity, size: int) -> None:
        others = sum(self.total(other) for other in NAMES if other != identity)
        if self.shares.has_room(identity, size):
            self.shares.take(identity, size)
            self.held.setdefault(identity, []).append(size)
            assert self.total(identity) <= LIMIT
        else:
            assert (self.total(identity) + size) * (GREED + 1) > (GREED + 1) * LIMIT - GREED * others

    @invariant()
    def something_is_left_for_a_newcomer(self) -> None:
        assert self.shares.used * GREED < LIMIT * (GREED + 1)


TestTakenBack = TakenBack.TestCase
TestKept = Kept.TestCase


def test_one_identity_alone_may_hold_all_of_it() -> None:
    for limit in (1, 2, 7, 64, 1000):
        taken_back, kept = Shares(limit), Shares(limit)
        for _ in range(limit):
            assert taken_back.make_room("address a", 1, lambda _: False)
            taken_back.take("address a", 1)
            assert kept.has_room("address a", 1)
            kept.take("address a", 1)
        assert not taken_back.make_room("address a", 1, lambda _: False)
        assert not kept.has_room("address a", 1)


def test_uncounted_bytes_of_others_leave_a_smaller_share() -> None:
    leases = Shares(8000)
    assert leases.has_room(b"alice", 1000, others=8000)
    assert not leases.has_room(b"alice", 1001, others=8000)


@pytest.mark.parametrize(
    ("address", "identity"),
    [
        ("10.0.0.7:51000", "address 10.0.0.7"),
        ("[::ffff:10.0.0.7]:443", "address 10.0.0.7"),
        ("[2001:db8::1]:443", "address 2001:db8::/64"),
        ("[2001:db8::ffff:2]:9", "address 2001:db8::/64"),
        ("[fe80::1%eth0]:9", "address fe80::/64"),
        ("unix:", "address unix"),
        ("", "address "),
    ],
)
def test_a_connection_is_its_address_unless_it_has_a_certificate(address: str, identity: str) -> None:
    assert identity_of_peer(address) == identity
    certificate = {"subject": ((("commonName", "node-7"),),)}
    assert identity_of_peer(address, certificate) == "certificate node-7"


def test_a_user_is_not_taken_for_a_certificate_or_an_address() -> None:
    assert name_of(b"address 10.0.0.1") == "user address 10.0.0.1"
    text = "raftkv: user alice has its share of the 64 open pages: each user, certificate or address has one"
    assert refusal(b"alice", "64 open pages") == text
