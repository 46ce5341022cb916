"""Apply is total: any bytes in the log have the same outcome on every member and never stop one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv import errors
from raftkv.apply import wire
from raftkv.apply.alarms import ALARMS_MAX
from raftkv.apply.applier import PARSERS, Outcome
from raftkv.apply.wire import Kind
from raftkv.pb import admin_pb2, raft_pb2, rpc_pb2
from tests.apply.arbitrary import payload
from tests.apply.machine import Machine

ENTRIES = 60
TYPES: dict[int, type] = {
    Kind.PUT: rpc_pb2.PutRequest, Kind.DELETE_RANGE: rpc_pb2.DeleteRangeRequest, Kind.TXN: rpc_pb2.TxnRequest,
    Kind.COMPACT: rpc_pb2.CompactionRequest, Kind.ALARM: rpc_pb2.AlarmRequest,
    Kind.MEMBER_ATTRIBUTES: raft_pb2.MemberRecord, Kind.LEASE_GRANT: rpc_pb2.LeaseGrantRequest,
    Kind.LEASE_REVOKE: rpc_pb2.LeaseRevokeRequest, Kind.LEASE_EXPIRE: raft_pb2.LeaseDecision,
    Kind.LEASE_RENEW: raft_pb2.LeaseDecision, Kind.HISTORY_QUOTA: admin_pb2.QuotaSetRequest,
    Kind.LIMIT: admin_pb2.Limit, Kind.DOWNGRADE: rpc_pb2.DowngradeInfo, Kind.AUTH: raft_pb2.AuthChange,
}  # fmt: skip


def _told(outcome: Outcome) -> tuple[int, bytes, str]:
    return outcome.revision, outcome.body, repr(outcome.error)


def _apply(machine: Machine, kind: int, body: bytes) -> Outcome:
    outcome = machine.applier.apply(kind, body)
    machine.store.set_applied(machine.store.applied_index + 1, 1)
    return outcome


def _state(machine: Machine) -> tuple[object, ...]:
    everything = machine.store.range(b"\0", b"\0").kvs
    members = [member.SerializeToString(deterministic=True) for member in machine.membership.list()]
    alarms = [(alarm.memberID, alarm.alarm) for alarm in machine.alarms.raised()]
    leases = sorted(machine.applier.leases.granted.items())
    others = [machine.applier.downgrade.info, *(quota.message() for quota in machine.applier.quotas.by_prefix())]
    others += machine.applier.limits.messages()
    return machine.hash(), everything, members, alarms, leases, [each.SerializeToString() for each in others]


def test_every_kind_is_tried() -> None:
    assert TYPES.keys() == PARSERS.keys() == set(Kind) - {Kind.IDENTIFIED}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_arbitrary_entries_have_one_outcome(seed: int) -> None:
    rng = Random(seed)
    plain, other = Machine(), Machine()
    for machine in (plain, other):
        machine.applier.term = 1
        machine.membership.bootstrap([rpc_pb2.Member(ID=1)])
    for _ in range(ENTRIES):
        kind = rng.choice(sorted(TYPES))
        body = payload(rng, TYPES[kind])
        if kind >= wire.VERSIONED_FIRST:
            body = wire.versioned(kind, body)
        if rng.random() < 0.05:
            body = rng.randbytes(rng.randrange(40))
        outcome = _apply(plain, kind, body)
        assert _told(_apply(other, kind, body)) == _told(outcome), (kind, body.hex())
        if rng.random() < 0.1:
            other.store.commit()
        if rng.random() < 0.05:
            other = other.reopened()
            other.applier.term = 1
    assert _state(plain) == _state(other) == _state(other.reopened())


@pytest.mark.parametrize("kind", [0, 7, 12, 127, 199, 200, 255])
def test_an_unknown_kind_stops_the_member_with_the_version_it_needs(kind: int) -> None:
    with pytest.raises(errors.UnknownEntryError, match="raftkv") as caught:
        Machine().applier.apply(kind, b"\x02\x07 and what a later version knows")
    assert "\n" not in str(caught.value)
    assert ("raftkv 2.7 or later" in str(caught.value)) == (kind >= wire.VERSIONED_FIRST)


def test_undecodable_request_is_refused_identically(machine: Machine) -> None:
    for kind in TYPES:
        outcome = _apply(machine, kind, b"\xff")
        assert isinstance(outcome.error, errors.MalformedEntryError)
    assert machine.store.revision == 1


def test_an_entry_without_a_request_header_has_no_kind_and_no_waiter() -> None:
    assert wire.decode(b"\x01short") is None


@pytest.mark.parametrize("alarm", [-1, 7, 2**31 - 1, -(2**31)])
def test_an_alarm_of_an_old_log_is_kept_listed_and_disarmed(machine: Machine, alarm: int) -> None:
    raise_it = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=2**64 - 1, alarm=alarm)
    assert machine.apply(raise_it).error is None
    assert [one.alarm for one in machine.reopened().alarms.raised()] == [alarm]
    machine.apply(rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.DEACTIVATE, memberID=2**64 - 1, alarm=alarm))
    assert machine.reopened().alarms.raised() == []


def test_alarms_are_limited(machine: Machine) -> None:
    for number in range(ALARMS_MAX):
        request = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=number, alarm=rpc_pb2.CORRUPT)
        assert machine.apply(request).error is None
    assert machine.apply(request).error is None
    request.memberID = ALARMS_MAX
    assert isinstance(machine.apply(request).error, errors.TooManyRequestsError)


def test_a_txn_with_an_operation_left_empty_changes_nothing(machine: Machine) -> None:
    put = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"a"))
    nested = rpc_pb2.RequestOp(request_txn=rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp()]))
    for empty in (rpc_pb2.RequestOp(), nested):
        outcome = machine.apply(rpc_pb2.TxnRequest(success=[put, empty]))
        assert isinstance(outcome.error, errors.KeyNotFoundError)
        assert machine.store.revision == 1


def test_an_unknown_sort_target_sorts_by_key(machine: Machine) -> None:
    for key in (b"b", b"a"):
        machine.apply(rpc_pb2.PutRequest(key=key))
    read = rpc_pb2.RangeRequest(key=b"a", range_end=b"z", sort_order=7, sort_target=9)
    write = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"c"))
    outcome = machine.apply(rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_range=read), write]))
    assert outcome.error is None
    answer = rpc_pb2.TxnResponse.FromString(outcome.body).responses[0].response_range
    assert [kv.key for kv in answer.kvs] == [b"a", b"b"]


def test_a_lease_longer_than_any_is_refused() -> None:
    outcome = Machine().apply(rpc_pb2.LeaseGrantRequest(ID=1, TTL=2**63 - 1))
    assert isinstance(outcome.error, errors.LeaseTTLTooLargeError)
