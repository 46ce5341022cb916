"""Connections that keep a lease alive on one member, and leases reported when a connection breaks."""

from __future__ import annotations

import pytest

from raftkv.apply.wire import Caller
from raftkv.replica.lease.graces import ConnectionLost, Graces


class Kept:
    """Graces with a manual clock, and their reports."""

    def __init__(self) -> None:
        self.now = 50.0
        self.reported: list[ConnectionLost] = []
        self.refused: set[Caller | None] = set()
        self.graces = Graces(lambda: self.now, self.reported.extend, lambda kept: kept.caller not in self.refused)

    def answered(self, stream: str, lease_id: int, grace_ms: int = 100, ttl_s: int = 5, user: bytes = b"") -> None:
        self.graces.answered(stream, lease_id, grace_ms, ttl_s, Caller(user, 1), user)

    def ended(self, stream: str, severed: bool = True) -> list[int]:
        """Leases reported because of it."""
        before = len(self.reported)
        self.graces.stream_ended(stream, severed=severed)
        return sorted(lost.lease_id for lost in self.reported[before:])


def test_a_broken_connection_reports_the_leases_with_a_grace() -> None:
    kept = Kept()
    kept.answered("a", 1, grace_ms=100)
    kept.answered("a", 2, grace_ms=0)
    kept.answered("a", 3, grace_ms=250)
    kept.now = 51.0
    kept.answered("a", 3, grace_ms=250)
    kept.now = 52.0
    assert kept.ended("a") == [1, 3]
    assert sorted(kept.reported, key=lambda one: one.lease_id) == [
        ConnectionLost(1, 0.1, 50.0, Caller(b"", 1)),
        ConnectionLost(3, 0.25, 51.0, Caller(b"", 1)),
    ]
    assert len(kept.graces) == 0
    assert kept.ended("a") == []


def test_a_stream_that_was_ended_reports_nothing() -> None:
    kept = Kept()
    kept.answered("a", 1)
    assert kept.ended("a", severed=False) == []
    assert len(kept.graces) == 0


@pytest.mark.parametrize("others_grace_ms", [100, 0])
def test_a_lease_that_another_stream_keeps_is_not_reported(others_grace_ms: int) -> None:
    kept = Kept()
    kept.answered("a", 1)
    kept.answered("b", 1, grace_ms=others_grace_ms)
    assert kept.ended("a") == []
    assert kept.ended("b") == ([1] if others_grace_ms else [])


def test_a_stream_whose_user_may_not_keep_the_lease_any_more_does_not_count() -> None:
    kept = Kept()
    kept.answered("a", 1, user=b"alice")
    kept.answered("b", 1, user=b"mallory")
    kept.refused.add(Caller(b"mallory", 1))
    assert kept.ended("a") == [1]
    kept.answered("a", 1, user=b"alice")
    kept.answered("c", 1, user=b"carol")
    assert kept.ended("a") == []


def test_ended_lease_is_forgotten() -> None:
    kept = Kept()
    kept.answered("a", 1)
    kept.answered("a", 2)
    kept.answered("a", 3, ttl_s=0)
    kept.graces.lease_ended(1)
    kept.graces.lease_ended(9)
    assert kept.ended("a") == [2]


def test_streams_of_an_identity_keep_a_bounded_number_of_them() -> None:
    """Each stream had a limit of its own: 10,000 streams of one connection kept 2 GB for 1,000 leases."""
    kept = Kept()
    kept.graces.shares.limit = 8
    for number in range(12):
        for lease_id in (1, 2, 3):
            kept.answered(f"a{number}", lease_id, user=b"mallory")
    assert kept.graces.shares.held == {b"mallory": 8}
    kept.answered("b", 3, user=b"bob")
    assert [kept.ended(f"a{number}") for number in range(11, -1, -1)] == [[]] * 11 + [[1, 2]]
    kept.answered("b", 4, user=b"bob")
    kept.graces.lease_ended(4)
    assert kept.ended("b") == [3]
    assert kept.graces.shares.held == {}
