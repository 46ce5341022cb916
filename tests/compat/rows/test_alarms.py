"""What an alarm refuses and what it leaves alone: each row of the reference, asked of etcd 3.5.1 and of raftkv."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raftkv.pb import rpc_pb2
from tests.compat.store import compact, delete, get, put, txn
from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, RAFTKV, Cluster, Program, http_get

NO_SPACE = ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded")
CORRUPT = ("DATA_LOSS", "etcdserver: corrupt cluster")
OK = ("OK", "")
ALARM = "etcdserverpb.Maintenance/Alarm"
KV, LEASE, MAINTENANCE = "etcdserverpb.KV/", "etcdserverpb.Lease/", "etcdserverpb.Maintenance/"
Request = rpc_pb2.AlarmRequest

ROWS: dict[str, tuple[str, Any, tuple[str, str], tuple[str, str]]] = {
    "put": (KV + "Put", put(b"a"), NO_SPACE, CORRUPT),
    "txn with a put": (KV + "Txn", txn(then=[put(b"a")]), NO_SPACE, CORRUPT),
    "txn with a put not taken": (KV + "Txn", txn(otherwise=[put(b"a")]), NO_SPACE, CORRUPT),
    "txn with a nested put": (KV + "Txn", txn(then=[txn(then=[put(b"a")])]), NO_SPACE, CORRUPT),
    "txn that deletes": (KV + "Txn", txn(then=[delete(b"z")]), OK, CORRUPT),
    "txn that reads": (KV + "Txn", txn(then=[get(b"a")]), OK, OK),
    "txn of nothing": (KV + "Txn", txn(), OK, OK),
    "range": (KV + "Range", get(b"a"), OK, OK),
    "serializable range": (KV + "Range", get(b"a", serializable=True), OK, OK),
    "delete": (KV + "DeleteRange", delete(b"z"), OK, CORRUPT),
    "compact": (KV + "Compact", compact(2), OK, CORRUPT),
    "grant": (LEASE + "LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=100), NO_SPACE, CORRUPT),
    "time to live": (LEASE + "LeaseTimeToLive", rpc_pb2.LeaseTimeToLiveRequest(ID=7), OK, OK),
    "leases": (LEASE + "LeaseLeases", rpc_pb2.LeaseLeasesRequest(), OK, OK),
    "revoke": (LEASE + "LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=7), OK, CORRUPT),
    "status": (MAINTENANCE + "Status", rpc_pb2.StatusRequest(), OK, OK),
    "hash": (MAINTENANCE + "HashKV", rpc_pb2.HashKVRequest(), OK, OK),
    "defragment": (MAINTENANCE + "Defragment", rpc_pb2.DefragmentRequest(), OK, OK),
    "members": ("etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListRequest(), OK, OK),
    "alarms": (ALARM, Request(), OK, OK),
}


@pytest.fixture(scope="module", params=[ETCD_FAST, RAFTKV], ids=lambda program: program.name)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A server of its own: an alarm is of all clients."""
    program: Program = request.param
    with Cluster(program) as cluster:
        yield cluster


@pytest.fixture(params=[rpc_pb2.NOSPACE, rpc_pb2.CORRUPT], ids=["NOSPACE", "CORRUPT"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def _told(wire: Wire, method: str, request: Any) -> tuple[str, str]:
    answer = wire.call(method, request)
    return answer.code, answer.text


def test_calls_refused_under_an_alarm(cluster: Cluster, kind: Any) -> None:
    """Raise it for a member that does not exist: it holds for all. A second one of the kind changes nothing."""
    with Wire(cluster.endpoints) as wire:
        granted = wire.call(LEASE + "LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=100, ID=7))
        assert granted.code in ("OK", "FAILED_PRECONDITION")
        for _ in range(3):
            wire.call(KV + "Put", put(b"a"))
        # A known difference: etcd looks at the outermost operations alone, so a nested put goes on filling its disk.
        expected = {name: row[2 if kind == rpc_pb2.NOSPACE else 3] for name, row in ROWS.items()}
        if cluster.program.name == "etcd" and kind == rpc_pb2.NOSPACE:
            expected["txn with a nested put"] = OK
        raised = wire.call(ALARM, Request(action=Request.ACTIVATE, memberID=9, alarm=kind)).message.alarms
        assert [(one.memberID, one.alarm) for one in raised] == [(9, kind)]
        assert wire.call(ALARM, Request(action=Request.ACTIVATE, memberID=9, alarm=kind)).code == "OK"
        try:
            found = {name: _told(wire, method, request) for name, (method, request, _, _) in ROWS.items()}
            name = rpc_pb2.AlarmType.Name(kind)
            health = http_get(cluster.endpoints[0], "/health")
            errors = list(wire.call(MAINTENANCE + "Status", rpc_pb2.StatusRequest()).message.errors)
        finally:
            gone = wire.call(ALARM, Request(action=Request.DEACTIVATE, memberID=9, alarm=kind)).message.alarms
        assert [(one.memberID, one.alarm) for one in gone] == [(9, kind)]
        assert found == expected
        assert errors == [f"memberID:9 alarm:{name} "]
        assert health[0] == 503
        assert f"ALARM {name}" in health[2]
        assert _told(wire, KV + "Put", put(b"a")) == OK
        again = wire.call(ALARM, Request(action=Request.DEACTIVATE, memberID=9, alarm=kind))
        assert (again.code, list(again.message.alarms)) == ("OK", [])


def test_of_both_alarms_corruption_is_told(cluster: Cluster) -> None:
    """Who hears of space alone would compact, and look no further."""
    with Wire(cluster.endpoints) as wire:
        wire.call(LEASE + "LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=100, ID=7))
        try:
            for kind in (rpc_pb2.NOSPACE, rpc_pb2.CORRUPT):
                raised = wire.call(ALARM, Request(action=Request.ACTIVATE, memberID=9, alarm=kind))
                assert raised.code == "OK"
            found = {name: _told(wire, method, request) for name, (method, request, _, _) in ROWS.items()}
        finally:
            for kind in (rpc_pb2.NOSPACE, rpc_pb2.CORRUPT):
                wire.call(ALARM, Request(action=Request.DEACTIVATE, memberID=9, alarm=kind))
        assert found == {name: row[3] for name, row in ROWS.items()}
