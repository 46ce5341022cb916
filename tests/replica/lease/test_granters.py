"""Leases are counted by the identity that had them granted, and each identity has a share."""

from __future__ import annotations

import pytest

from raftkv.errors import RESOURCE_EXHAUSTED, ShareError
from raftkv.replica.lease.lessor import UNKNOWN_MAX_S, Granters
from raftkv.rpc.shares import Identity


class World:
    """Leases that exist, and the time."""

    def __init__(self, limit: int) -> None:
        self.granted: dict[int, int] = {}
        self.now = 0.0
        self.start(limit)

    def start(self, limit: int) -> None:
        """Start as a process that knows no granter."""
        self.granters = Granters(self, lambda: self.now)
        self.granters.shares.limit = limit

    def grant(self, identity: Identity, count: int, first: int) -> int:
        """Grant up to a number of leases; return how many were granted."""
        for number in range(count):
            try:
                self.granters.admit(first + number, identity)
            except ShareError:
                return number
            self.granted[first + number] = 9_000_000_000
        return count

    def end(self, lease_id: int) -> None:
        del self.granted[lease_id]
        self.granters.ended(lease_id)


def test_one_identity_has_its_limit_and_leaves_leases_for_others() -> None:
    world = World(800)
    assert world.grant(b"mallory", 2000, 1) == 800
    with pytest.raises(ShareError, match="user mallory has its share of the 800 leases") as refused:
        world.granters.admit(9000, b"mallory")
    assert refused.value.code == RESOURCE_EXHAUSTED
    assert world.grant(b"alice", 2000, 10_000) == 100
    assert world.grant("address 10.0.0.1", 2000, 20_000) == 12
    for lease_id in range(1, 301):
        world.end(lease_id)
    assert world.grant(b"alice", 2000, 30_000) > 200


def test_after_a_restart_all_leases_count_and_something_is_left() -> None:
    world = World(800)
    assert world.grant(b"mallory", 2000, 1) == 800
    for _ in range(2):
        world.start(800)
        assert world.grant(b"mallory", 2000, len(world.granted) + 1) <= 100
    assert world.grant(b"alice", 1, 100_000) == 1
    for lease_id in list(world.granted):
        world.end(lease_id)
    assert world.granters.shares.held == {}


def test_a_grant_that_was_never_applied_is_counted_for_a_while() -> None:
    world = World(8)
    for lease_id in range(8):
        world.granters.admit(lease_id + 1, b"alice")
    assert world.grant(b"alice", 1, 100) == 0
    world.now += UNKNOWN_MAX_S
    for _ in range(4):
        world.grant(b"alice", 1, 200)
    assert world.granters.shares.held == {b"alice": 1}


def test_a_lease_that_exists_is_not_counted_again() -> None:
    world = World(8)
    world.grant(b"alice", 1, 1)
    world.granters.admit(1, b"mallory")
    world.granters.admit(1, b"alice")
    assert world.granters.shares.held == {b"alice": 1}
    world.end(1)
    assert world.granters.shares.held == {}
