"""Status, Hash, HashKV, MemberList, health, header rules and gRPC manners, on etcd 3.5.1 and on raftkv."""

from __future__ import annotations

import hashlib
from typing import Any

import google_crc32c
import pytest

from raftkv.pb import health_pb2, rpc_pb2
from tests.compat.store import COMPACTED, EVERYTHING, FUTURE, Store, compact, delete, get, put, txn
from tests.compat.wire import Answer, Wire
from tests.procs import Cluster

STATUS, HASH, HASH_KV = (f"etcdserverpb.Maintenance/{name}" for name in ("Status", "Hash", "HashKV"))
MEMBER_LIST = "etcdserverpb.Cluster/MemberList"
HEALTH = "grpc.health.v1.Health/Check"
CURRENT_REVISION = {STATUS: rpc_pb2.StatusRequest(), HASH: rpc_pb2.HashRequest(), HASH_KV: rpc_pb2.HashKVRequest()}


def _members(wire: Wire) -> range:
    return range(len(wire.endpoints))


# --- headers (reference section 2) --------------------------------------------------------------------------


@pytest.mark.parametrize("method", CURRENT_REVISION)
def test_header_revision_is_the_current_one(store: Store, method: str) -> None:
    store.fill(b"a", b"b")
    store.ask(get(b"a"))
    for member in _members(store.wire):
        store.wire.call("etcdserverpb.KV/Range", get(b"a"), member)  # the member has applied all by now
        assert store.wire.call(method, CURRENT_REVISION[method], member).revision == store.at(2)


@pytest.mark.parametrize("linearizable", [False, True])
def test_member_list(wire: Wire, cluster: Cluster, linearizable: bool) -> None:
    """Also: the header's revision is 0 in the Cluster service."""
    for member in _members(wire):
        answer = wire.call(MEMBER_LIST, rpc_pb2.MemberListRequest(linearizable=linearizable), member)
        assert (answer.code, answer.revision) == ("OK", 0)
        listed = {found.name: found for found in answer.message.members}
        assert sorted(listed) == [process.name for process in cluster.members]
        for process in cluster.members:
            found = listed[process.name]
            assert list(found.peerURLs) == [process.peer_url]
            assert list(found.clientURLs) == [f"http://{process.endpoint}"]
            assert found.ID
            assert not found.isLearner
        assert answer.message.header.member_id == listed[cluster.members[member].name].ID


def test_members_are_listed_by_id(wire: Wire) -> None:
    ids = [found.ID for found in wire.call(MEMBER_LIST, rpc_pb2.MemberListRequest()).message.members]
    assert ids == sorted(ids)


def test_every_answer_names_cluster_member_and_term(store: Store) -> None:
    requests: dict[str, Any] = {
        "etcdserverpb.KV/Put": put(b"a"),
        "etcdserverpb.KV/Range": get(b"a"),
        "etcdserverpb.KV/DeleteRange": delete(b"b"),
        "etcdserverpb.KV/Txn": txn(then=[get(b"a")]),
        "etcdserverpb.KV/Compact": compact(store.at(1)),
        MEMBER_LIST: rpc_pb2.MemberListRequest(),
        **CURRENT_REVISION,
    }
    headers = [store.wire.call(method, request).message.header for method, request in requests.items()]
    first = headers[0]
    assert first.cluster_id
    assert first.member_id
    assert first.raft_term >= 1
    for header in headers:
        assert (header.cluster_id, header.member_id) == (first.cluster_id, first.member_id)
        assert header.raft_term == first.raft_term


def test_member_and_cluster_ids_are_etcds(wire: Wire, cluster: Cluster) -> None:
    """First eight bytes of SHA-1 over the sorted peer URLs and the token; the cluster's over the sorted member ids."""

    def first_bytes(data: bytes) -> int:
        return int.from_bytes(hashlib.sha1(data).digest()[:8], "big")

    ids = [first_bytes(member.peer_url.encode() + b"raftkv-tests") for member in cluster.members]
    for member, expected in enumerate(ids):
        header = wire.call(MEMBER_LIST, rpc_pb2.MemberListRequest(), member).message.header
        assert header.member_id == expected
        assert header.cluster_id == first_bytes(b"".join(number.to_bytes(8, "big") for number in sorted(ids)))


# --- Status -------------------------------------------------------------------------------------------------


def test_status(store: Store, cluster: Cluster) -> None:
    store.fill(b"a")
    statuses = []
    for member in _members(store.wire):
        store.wire.call("etcdserverpb.KV/Range", get(b"a"), member)
        status = store.wire.call(STATUS, rpc_pb2.StatusRequest(), member).message
        assert status.version.count(".") == 2
        assert status.dbSize >= status.dbSizeInUse > 0
        assert status.raftIndex >= status.raftAppliedIndex > 0
        assert status.raftTerm == status.header.raft_term
        assert list(status.errors) == []
        assert not status.isLearner
        statuses.append(status)
    leaders = {status.leader for status in statuses}
    assert len(leaders) == 1
    assert leaders <= {status.header.member_id for status in statuses}


def test_applied_index_counts_writes(store: Store) -> None:
    before = store.wire.call(STATUS, rpc_pb2.StatusRequest()).message.raftAppliedIndex
    for _ in range(10):
        store.wire.call("etcdserverpb.KV/Put", put(b"a"))
    after = store.wire.call(STATUS, rpc_pb2.StatusRequest()).message.raftAppliedIndex
    assert after >= before + 10


# --- Hash and HashKV ----------------------------------------------------------------------------------------


def _hash_kv(store: Store, revision: int = 0, member: int = 0) -> Answer:
    store.wire.call("etcdserverpb.KV/Range", get(b"a"), member)
    return store.wire.call(HASH_KV, rpc_pb2.HashKVRequest(revision=revision), member)


def test_hash_kv_of_now_and_of_the_current_revision_are_one(store: Store) -> None:
    store.fill(b"a", b"b")
    assert _hash_kv(store).message.hash == _hash_kv(store, store.at(2)).message.hash


def test_hash_kv_depends_on_the_history(store: Store) -> None:
    store.fill(b"a")
    before = _hash_kv(store).message.hash
    store.fill(b"a")
    assert _hash_kv(store).message.hash != before
    assert _hash_kv(store, store.at(1)).message.hash == before


def test_hash_kv_compact_revision(store: Store) -> None:
    store.fill(b"a", b"a", b"a")
    assert _hash_kv(store).message.compact_revision == store.base
    store.ask(compact(store.at(2), physical=True))
    assert _hash_kv(store).message.compact_revision == store.at(2)


def test_hash_kv_of_a_bad_revision(store: Store) -> None:
    store.fill(b"a", b"a")
    store.ask(compact(store.at(2)))
    future, compacted = _hash_kv(store, store.at(3)), _hash_kv(store, store.at(1))
    assert (future.code, future.text) == FUTURE
    assert (compacted.code, compacted.text) == COMPACTED


@pytest.mark.parametrize("revision", [-1, -2, -(1 << 63)])
def test_hash_kv_of_a_negative_revision_is_of_no_history(store: Store, revision: int) -> None:
    store.fill(b"a", b"a")
    store.ask(compact(store.at(2), physical=True))
    answer = _hash_kv(store, revision)
    assert answer.code == "OK"
    assert (answer.message.hash, answer.message.compact_revision) == (google_crc32c.value(b"key"), store.at(2))


def test_hash_kv_at_the_compacted_revision(store: Store) -> None:
    """Known difference: 3.5.1 refuses it too, 3.5.30 and later only what lies below."""
    store.fill(b"a", b"a")
    store.ask(compact(store.at(2)))
    answer = _hash_kv(store, store.at(2))
    if store.program == "etcd" and not store.is_newer:
        assert (answer.code, answer.text) == COMPACTED
    elif store.is_newer:
        assert answer.code == "OK", "of another number: it counts as compacted up to the compaction before"
    else:
        assert answer.message.hash == _hash_kv(store).message.hash


def test_hash_kv_is_equal_on_all_members(store: Store) -> None:
    store.fill(b"a", b"b", b"a")
    hashes = [_hash_kv(store, store.at(3), member).message.hash for member in _members(store.wire)]
    assert len(set(hashes)) == 1


def test_hash_of_the_backend(store: Store) -> None:
    """A number that stays as long as nothing is written, however soon after a write it is asked for."""
    for number in range(20):
        put = store.wire.call("etcdserverpb.KV/Put", rpc_pb2.PutRequest(key=b"hashed", value=b"%d" % number))
        assert put.code == "OK"
        first, second = (store.wire.call(HASH, rpc_pb2.HashRequest()) for _ in range(2))
        assert first.code == "OK"
        assert first.message.hash == second.message.hash


# --- MoveLeader and Downgrade -------------------------------------------------------------------------------

MOVE_LEADER, DOWNGRADE = (f"etcdserverpb.Maintenance/{name}" for name in ("MoveLeader", "Downgrade"))
Downgrade = rpc_pb2.DowngradeRequest


def _leader(wire: Wire) -> int:
    leader = wire.call(STATUS, rpc_pb2.StatusRequest()).message.leader
    headers = [wire.call(STATUS, rpc_pb2.StatusRequest(), member).message.header for member in _members(wire)]
    return [header.member_id for header in headers].index(leader)


def test_move_leader_answers_without_a_header(wire: Wire) -> None:
    """To the leader itself, which is done at once; and to each other member."""
    ids = [wire.call(STATUS, rpc_pb2.StatusRequest(), member).message.header.member_id for member in _members(wire)]
    for target in (ids[_leader(wire)], *ids):
        answer = wire.call(MOVE_LEADER, rpc_pb2.MoveLeaderRequest(targetID=target), _leader(wire))
        assert answer.code == "OK", answer
        assert not answer.message.HasField("header")
        assert ids[_leader(wire)] == target


@pytest.mark.parametrize("target", [0, 1, 2**64 - 1])
def test_move_leader_to_an_unknown_member(wire: Wire, target: int) -> None:
    answer = wire.call(MOVE_LEADER, rpc_pb2.MoveLeaderRequest(targetID=target), _leader(wire))
    assert (answer.code, answer.text) == ("FAILED_PRECONDITION", "etcdserver: bad leader transferee")


def test_move_leader_is_asked_of_the_leader(raftkv_store: Store) -> None:
    """Ask three members: the oracle here is one, and always leads."""
    wire = raftkv_store.wire
    for target in (0, wire.call(STATUS, rpc_pb2.StatusRequest()).message.leader):
        answer = wire.call(MOVE_LEADER, rpc_pb2.MoveLeaderRequest(targetID=target), (_leader(wire) + 1) % 3)
        assert (answer.code, answer.text) == ("FAILED_PRECONDITION", "etcdserver: not leader")


WRONG_FORMAT = "etcdserver: wrong downgrade target version format"
INVALID_TARGET = "etcdserver: invalid downgrade target version"


NO_VERSIONS = {
    WRONG_FORMAT: ["", "x", "3", "3.", "v3.5", "3.5.", "3.5.1.0", "3.5 ", "3.5-rc", "-3.5"],
    INVALID_TARGET: ["3.7", "3.8", "3.2", "2.5", "3.2.9-rc.1+meta", "99999999999999.5"],
}


@pytest.mark.parametrize("action", [Downgrade.VALIDATE, Downgrade.ENABLE])
def test_downgrade_to_no_such_version(wire: Wire, action: Any) -> None:
    for text, version in ((text, version) for text, versions in NO_VERSIONS.items() for version in versions):
        answer = wire.call(DOWNGRADE, Downgrade(action=action, version=version))
        assert (answer.code, answer.text) == ("INVALID_ARGUMENT", text), version


def _versions(wire: Wire, member: int) -> tuple[str, str, str]:
    """Versions of the server and its storage, and whither it goes back, if it does."""
    status = wire.call(STATUS, rpc_pb2.StatusRequest(), member).message
    return status.version, status.storageVersion, status.downgradeInfo.targetVersion


def test_downgrade_job(store: Store) -> None:
    """Since 3.7 it moves the versions of cluster and storage on all members, and to cancel none is no error."""
    wire, is_etcd = store.wire, store.program == "etcd"
    target, cluster = ("3.4", "3.5") if is_etcd else ("3.6", "3.7")

    def ask(action: Any, member: int = 0, version: str = target, cluster: str = cluster) -> tuple[str, str]:
        answer = wire.call(DOWNGRADE, Downgrade(action=action, version=version), member)
        assert answer.code != "OK" or answer.message.version.removesuffix(".0") == cluster
        assert answer.code != "OK" or answer.message.header.revision
        return answer.code, answer.text

    none = ("FAILED_PRECONDITION", "etcdserver: no inflight downgrade job")
    running = ("FAILED_PRECONDITION", "etcdserver: cluster has a downgrade job in progress")
    last = len(wire.endpoints) - 1
    assert ask(Downgrade.CANCEL) == (none if is_etcd else ("OK", ""))
    assert ask(Downgrade.VALIDATE)[0] == "OK"
    if is_etcd:
        return  # 3.5.1 begins no job that it can show: ENABLE times out
    assert ask(Downgrade.ENABLE, version=f"{target}.7")[0] == "OK"
    for member in (0, last):
        assert ask(Downgrade.VALIDATE, member, "3.5") == running
        assert ask(Downgrade.ENABLE, member, "3.5") == running
        assert ask(Downgrade.ENABLE, member) == ("INVALID_ARGUMENT", INVALID_TARGET)
        assert _versions(wire, member) == ("3.7.1", "3.6.0", "3.6.0")
    assert ask(Downgrade.CANCEL, last, cluster="3.6")[0] == "OK"
    assert ask(Downgrade.CANCEL, last)[0] == "OK"
    assert _versions(wire, last) == ("3.7.1", "3.7.0", "")


def test_an_unknown_action_of_a_downgrade(wire: Wire) -> None:
    answer = wire.call(DOWNGRADE, Downgrade.FromString(b"\x08\x07"))
    assert (answer.code, answer.text) == ("UNKNOWN", "etcdserver: unknown method")


# --- health and gRPC manners --------------------------------------------------------------------------------


def test_health(wire: Wire) -> None:
    answer = wire.call(HEALTH, health_pb2.HealthCheckRequest())
    assert answer.message.status == health_pb2.HealthCheckResponse.SERVING


def test_health_of_all_services(wire: Wire, cluster: Cluster) -> None:
    """grpc-go has List since 1.72, and so have etcd 3.5.30 and 3.7."""
    answer = wire.call("grpc.health.v1.Health/List", health_pb2.HealthListRequest())
    if cluster.program.name == "etcd":
        assert answer.code == "UNIMPLEMENTED"
    else:
        assert {name: one.status for name, one in answer.message.statuses.items()} == {"": 1}


@pytest.mark.parametrize("service", ["etcdserverpb.KV", "nothing"])
def test_health_of_a_named_service(wire: Wire, service: str) -> None:
    answer = wire.call(HEALTH, health_pb2.HealthCheckRequest(service=service))
    assert (answer.code, answer.text) == ("NOT_FOUND", "unknown service")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nothing.Service/Call", "unknown service nothing.Service"),
        ("etcdserverpb.KV/Nothing", "unknown method Nothing for service etcdserverpb.KV"),
        (
            "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            "unknown service grpc.reflection.v1alpha.ServerReflection",
        ),
    ],
)
def test_unserved_maintenance_calls(wire: Wire, path: str, text: str) -> None:
    answer = wire.start(path, b"").answer()
    assert (answer.code, answer.text) == ("UNIMPLEMENTED", text)


def test_bytes_that_are_no_request(wire: Wire) -> None:
    answer = wire.start("etcdserverpb.KV/Put", b"\xff\xff\xff").answer()
    assert answer.code == "INTERNAL"


@pytest.mark.parametrize("value", ["true", "false", ""])
def test_has_leader_with_a_leader(wire: Wire, value: str) -> None:
    for method, request in (("Put", put(b"a")), ("Range", get(b"a", serializable=True))):
        answer = wire.call(f"etcdserverpb.KV/{method}", request, metadata=[("hasleader", value)])
        assert answer.code == "OK"


def test_unknown_metadata_is_ignored(wire: Wire) -> None:
    metadata = [("client-api-version", "3.5.1"), ("x-something", "1"), ("some-bin", b"\x00\xff")]
    assert wire.call("etcdserverpb.KV/Range", get(*EVERYTHING, limit=1), metadata=metadata).code == "OK"
