"""Connections that keep a lease alive on one member, and leases reported when a connection breaks."""

from __future__ import annotations

import pytest

from raftkv.replica.lease import graces
from raftkv.replica.lease.graces import ConnectionLost, Graces


class Kept:
    """Graces with a manual clock, and their reports."""

    def __init__(self) -> None:
        self.now = 50.0
        self.reported: list[ConnectionLost] = []
        self.graces = Graces(lambda: self.now, self.reported.extend)

    def answered(self, stream: str, lease_id: int, grace_ms: int = 100, ttl_s: int = 5) -> None:
        self.graces.answered(stream, lease_id, grace_ms, ttl_s)

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
        ConnectionLost(1, 0.1, 50.0),
        ConnectionLost(3, 0.25, 51.0),
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


def test_ended_lease_is_forgotten() -> None:
    kept = Kept()
    kept.answered("a", 1)
    kept.answered("a", 2)
    kept.answered("a", 3, ttl_s=0)
    kept.graces.lease_ended(1)
    kept.graces.lease_ended(9)
    assert kept.ended("a") == [2]


@pytest.mark.interpreted
def test_a_stream_has_a_bounded_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graces, "KEPT_MAX", 2)
    kept = Kept()
    for lease_id in (1, 2, 3):
        kept.answered("a", lease_id)
    kept.answered("b", 3)
    assert kept.ended("b") == [3], "the other does not count as keeping it"
    assert kept.ended("a") == [1, 2]
