"""Lease entries, and their equal effect on every member."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.wire import Kind
from raftkv.pb import raft_pb2, rpc_pb2
from tests.apply.machine import Machine

TERM = 5


class Recorder:
    """Records the calls that an observer of leases gets."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def granted(self, lease_id: int, ttl_s: int) -> None:
        self.events.append(("granted", lease_id, ttl_s))

    def renewed(self, lease_ids: Sequence[int]) -> None:
        self.events.append(("renewed", *lease_ids))

    def ended(self, lease_id: int, *, expired: bool) -> None:
        self.events.append(("expired" if expired else "revoked", lease_id))

    def reloaded(self, granted: dict[int, int]) -> None:
        self.events.append(("reloaded", *sorted(granted.items())))


@pytest.fixture
def machine() -> Machine:
    machine = Machine()
    machine.applier.term = TERM
    return machine


def grant(lease_id: int, ttl_s: int = 10) -> rpc_pb2.LeaseGrantRequest:
    return rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=ttl_s)


def revoke(lease_id: int) -> rpc_pb2.LeaseRevokeRequest:
    return rpc_pb2.LeaseRevokeRequest(ID=lease_id)


def put(key: bytes, lease_id: int = 0) -> rpc_pb2.PutRequest:
    return rpc_pb2.PutRequest(key=key, value=b"v", lease=lease_id)


def decide(machine: Machine, kind: int, *lease_ids: int, term: int = TERM) -> Outcome:
    decision = raft_pb2.LeaseDecision(term=term, ids=lease_ids)
    outcome = machine.applier.apply(kind, decision.SerializeToString())
    machine.store.set_applied(machine.store.applied_index + 1, TERM)
    return outcome


def test_the_id_that_means_none_is_not_granted(machine: Machine) -> None:
    with pytest.raises(errors.LeaseNotFoundError):
        machine.answer(grant(0))


def test_a_negative_id_is_an_id(machine: Machine) -> None:
    machine.answer(grant(-3))
    machine.answer(put(b"a", -3))
    assert machine.reopened().applier.leases.granted == {-3: 10}
    machine.answer(revoke(-3))
    assert machine.value(b"a") is None


def test_each_expired_lease_gets_one_revision_and_missing_ids_are_ignored(machine: Machine) -> None:
    for lease_id in (1, 2, 3):
        machine.answer(grant(lease_id))
    machine.answer(put(b"a", 1))
    machine.answer(put(b"c", 3))
    outcome = decide(machine, Kind.LEASE_EXPIRE, 1, 9, 2, 3)
    assert (outcome.error, outcome.revision) == (None, 5)
    assert machine.applier.leases.granted == {}
    assert [machine.store.attachments.count(lease_id) for lease_id in (1, 2, 3)] == [0, 0, 0]


@pytest.mark.parametrize("kind", [Kind.LEASE_EXPIRE, Kind.LEASE_RENEW])
@pytest.mark.parametrize("term", [TERM - 1, TERM + 1])
def test_lease_decision_of_another_term_has_no_effect(machine: Machine, kind: int, term: int) -> None:
    machine.answer(grant(7))
    recorder = machine.applier.leases.observer = Recorder()
    outcome = decide(machine, kind, 7, term=term)
    assert isinstance(outcome.error, errors.LeaderChangedError)
    assert machine.applier.leases.exists(7)
    assert recorder.events == []


def test_the_observer_is_told_everything_in_order(machine: Machine) -> None:
    recorder = machine.applier.leases.observer = Recorder()
    machine.answer(grant(1))
    machine.answer(grant(2))
    decide(machine, Kind.LEASE_RENEW, 1, 2)
    machine.answer(revoke(1))
    decide(machine, Kind.LEASE_EXPIRE, 2)
    machine.answer(grant(3, 4))
    machine.applier.leases.reload()
    assert recorder.events == [
        ("granted", 1, 10),
        ("granted", 2, 10),
        ("renewed", 1, 2),
        ("revoked", 1),
        ("expired", 2),
        ("granted", 3, 4),
        ("reloaded", (3, 4)),
    ]


def _random_entry(rng: random.Random) -> tuple[int, bytes]:
    lease_id = rng.randint(1, 8)
    key = rng.choice([b"a", b"b", b"c", b"d", b"e"])
    made: tuple[int, object] = rng.choice(
        [
            (Kind.LEASE_GRANT, grant(lease_id, rng.randint(1, 9))),
            (Kind.LEASE_REVOKE, revoke(lease_id)),
            (Kind.LEASE_EXPIRE, raft_pb2.LeaseDecision(term=rng.choice([TERM, 4]), ids=[lease_id, lease_id % 8 + 1])),
            (Kind.LEASE_RENEW, raft_pb2.LeaseDecision(term=TERM, ids=[lease_id])),
            (Kind.PUT, put(key, lease_id)),
            (Kind.PUT, put(key)),
            (Kind.PUT, rpc_pb2.PutRequest(key=key, value=b"x", ignore_lease=True)),
            (Kind.DELETE_RANGE, rpc_pb2.DeleteRangeRequest(key=key, range_end=b"d")),
        ]
    )
    return made[0], made[1].SerializeToString()


@pytest.mark.parametrize("seed", range(10))
def test_the_same_entries_make_the_same_leases_everywhere(seed: int) -> None:
    """One member runs through; the other is read back from its disk now and then, without an observer."""
    rng = random.Random(seed)
    plain, other = Machine(), Machine()
    plain.applier.leases.observer = Recorder()
    ended = 0
    for index in range(1, 600):
        kind, body = _random_entry(rng)
        outcomes = []
        for machine in (plain, other):
            machine.applier.term = TERM
            outcome = machine.applier.apply(kind, body)
            machine.store.set_applied(index, TERM)
            outcomes.append((outcome.revision, outcome.body, repr(outcome.error)))
        assert outcomes[0] == outcomes[1]
        ended += kind in (Kind.LEASE_EXPIRE, Kind.LEASE_REVOKE) and outcomes[0][2] == "None"
        if rng.random() < 0.03:
            other = other.reopened()
        assert plain.applier.leases.granted == other.applier.leases.granted
        for lease_id in range(1, 9):
            keys = sorted(plain.store.attachments.keys_unordered(lease_id))
            assert keys == sorted(other.store.attachments.keys_unordered(lease_id))
            assert not keys or plain.applier.leases.exists(lease_id)
    assert ended > 50
    assert plain.hash() == other.hash()
