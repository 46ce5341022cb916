"""Entries other than reads and txns: plain puts, compactions, alarms, membership, and entries that stop a member."""

from __future__ import annotations

import struct

import pytest

from raftkv import errors
from raftkv.apply import wire
from raftkv.apply.wire import Kind
from raftkv.pb import auth_pb2, raft_pb2, rpc_pb2
from raftkv.storage import schema
from tests.apply.machine import Machine
from tests.compat.store import compact, put

Alarm = rpc_pb2.AlarmRequest


def _alarm(action: int, member_id: int = 0, kind: int = rpc_pb2.NONE) -> rpc_pb2.AlarmRequest:
    return rpc_pb2.AlarmRequest(action=action, memberID=member_id, alarm=kind)


def _names(response: rpc_pb2.AlarmResponse) -> list[tuple[int, str]]:
    return [(alarm.memberID, rpc_pb2.AlarmType.Name(alarm.alarm)) for alarm in response.alarms]


def test_compactions(machine: Machine) -> None:
    for number in range(5):
        machine.answer(put(b"a", b"%d" % number))
    with pytest.raises(errors.FutureRevisionError):
        machine.answer(compact(7))
    machine.answer(compact(4))
    with pytest.raises(errors.CompactedError):
        machine.answer(compact(4))
    done: list[str] = []
    machine.applier.when_compacted(lambda: done.append("a"))
    assert done == []
    machine.finish_compactions()
    assert done == ["a"]
    machine.applier.when_compacted(lambda: done.append("b"))
    assert done == ["a", "b"]


def test_alarms(machine: Machine) -> None:
    assert _names(machine.answer(_alarm(Alarm.ACTIVATE, 7, rpc_pb2.NOSPACE))) == [(7, "NOSPACE")]
    assert _names(machine.answer(_alarm(Alarm.ACTIVATE, 5, rpc_pb2.CORRUPT))) == [(5, "CORRUPT")]
    machine.answer(_alarm(Alarm.ACTIVATE, 7, rpc_pb2.NOSPACE))
    assert _names(machine.answer(_alarm(Alarm.ACTIVATE, 7, rpc_pb2.NONE))) == []
    everything = [(5, "CORRUPT"), (7, "NOSPACE")]
    assert _names(machine.answer(_alarm(Alarm.GET))) == everything
    assert _names(machine.answer(_alarm(Alarm.GET, 0, rpc_pb2.NOSPACE))) == everything[1:]
    assert _names(machine.reopened().answer(_alarm(Alarm.GET))) == everything
    assert _names(machine.answer(_alarm(Alarm.DEACTIVATE, 9, rpc_pb2.NOSPACE))) == []
    assert _names(machine.answer(_alarm(Alarm.DEACTIVATE, 7, rpc_pb2.NOSPACE))) == everything[1:]
    machine.answer(_alarm(Alarm.DEACTIVATE, 5, rpc_pb2.CORRUPT))
    assert not machine.reopened().alarms.any


def _record(member_id: int, name: str, *urls: str) -> raft_pb2.MemberRecord:
    return raft_pb2.MemberRecord(member=rpc_pb2.Member(ID=member_id, name=name, clientURLs=urls), update=True)


def test_members_publish_themselves(machine: Machine) -> None:
    founders = [rpc_pb2.Member(ID=number, peerURLs=[f"http://p:{number}"]) for number in (9, 2)]
    machine.membership.bootstrap(founders)
    machine.apply(_record(9, "nine", "http://c:9"))
    machine.apply(_record(9, "nine", "http://c:90", "http://c:91"))
    machine.apply(_record(3, "a stranger"))
    expected = [
        rpc_pb2.Member(ID=2, peerURLs=["http://p:2"]),
        rpc_pb2.Member(ID=9, name="nine", peerURLs=["http://p:9"], clientURLs=["http://c:90", "http://c:91"]),
    ]
    assert machine.membership.list() == expected
    assert machine.reopened().membership.list() == expected
    assert machine.store.revision == 1


@pytest.mark.interpreted
def test_an_unforeseen_failure_stops_the_member(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.store, "begin", lambda: 1 // 0)
    with pytest.raises(errors.InvariantError, match="ZeroDivisionError"):
        machine.applier.apply(Kind.PUT, put(b"a").SerializeToString())


def test_entries() -> None:
    data = wire.encode(Kind.TXN, 2**64 - 1, b"body")
    assert wire.decode(data) == (Kind.TXN, 2**64 - 1, b"body")
    assert wire.decode(data[:8]) is None


def _quota(cursor: bytes, history: bytes = b"") -> bytes:
    return struct.pack(">QQQQQI", 1, 1, 0, 0, 5, len(cursor)) + cursor + history


@pytest.mark.parametrize(
    ("bucket", "key", "value"),
    [
        (schema.MEMBERS, struct.pack(">Q", 7), rpc_pb2.Member(ID=8, peerURLs=["http://m8:2380"]).SerializeToString()),
        (schema.MEMBERS, b"7", rpc_pb2.Member(ID=7).SerializeToString()),
        (schema.AUTH_USERS, b"alice", auth_pb2.User(name=b"root", roles=["root"]).SerializeToString()),
        (schema.AUTH_ROLES, b"reader", auth_pb2.Role(name=b"root").SerializeToString()),
        (schema.CLUSTER, schema.CLUSTER_QUOTA_PREFIX + b"team-a/", _quota(b"team-b/5")),
        (schema.CLUSTER, schema.CLUSTER_QUOTA_PREFIX + b"team-a/", _quota(b"team-a/5", struct.pack(">QQQ", 1, 2, 3))),
    ],
    ids=["member", "key of no member", "user", "role", "count of a quota", "history of a quota"],
)
def test_stored_record_speaks_for_its_own_key_alone(machine: Machine, bucket: bytes, key: bytes, value: bytes) -> None:
    machine.store.meta_put(bucket, key, value)
    machine.store.set_applied(1, 1)
    with pytest.raises((errors.StorageError, errors.CorruptionError)):
        machine.reopened()
