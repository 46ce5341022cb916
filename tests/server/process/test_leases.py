"""Leases on three real members: answers, death of the leader, and members that fell behind."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Sequence

import grpc
import pytest

from raftkv.pb import rpc_pb2
from tests.compat.wire import Answer, Wire
from tests.procs import RAFTKV, Cluster, wait_for
from tests.server.process.process import PUT, leader_of, must_put, value_of

GRANT = "etcdserverpb.Lease/LeaseGrant"
REVOKE = "etcdserverpb.Lease/LeaseRevoke"
TIME_TO_LIVE = "etcdserverpb.Lease/LeaseTimeToLive"
LEASES = "etcdserverpb.Lease/LeaseLeases"
KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
WATCH = "/etcdserverpb.Watch/Watch"
FLAGS = ["--snapshot-count", "50", "--snapshot-catchup-entries", "10", "--lease-min-ttl", "1"]
OK = Answer("OK", "", None)
KEEP_ALIVE_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3, flags=FLAGS) as cluster:
        yield cluster


@pytest.fixture
def wire(cluster: Cluster) -> Iterator[Wire]:
    with Wire(cluster.endpoints) as wire:
        yield wire
        for member in cluster.members:
            if not member.is_running():
                member.restart()


def leader(wire: Wire, member: int = 0) -> int:
    wait_for(lambda: leader_of(wire, member) >= 0, "a leader")
    return leader_of(wire, member)


def grant(wire: Wire, ttl_s: int, member: int = 0) -> int:
    answer = wire.call(GRANT, rpc_pb2.LeaseGrantRequest(TTL=ttl_s), member)
    assert (answer.code, answer.message.TTL) == ("OK", ttl_s), answer
    return int(answer.message.ID)


def attach(wire: Wire, lease_id: int, *keys: bytes) -> None:
    for key in keys:
        answer = wire.call(PUT, rpc_pb2.PutRequest(key=key, value=b"v", lease=lease_id))
        assert answer.code == "OK", answer


def time_to_live(wire: Wire, lease_id: int, member: int = 0) -> rpc_pb2.LeaseTimeToLiveResponse:
    answer = wire.call(TIME_TO_LIVE, rpc_pb2.LeaseTimeToLiveRequest(ID=lease_id, keys=True), member)
    assert answer.code == "OK", answer
    response: rpc_pb2.LeaseTimeToLiveResponse = answer.message
    return response


def keep_alive(wire: Wire, lease_ids: Sequence[int], member: int = 0) -> tuple[Answer, list[tuple[int, int]]]:
    """Send all requests, half-close; how the stream ended, and id and TTL of each answer."""
    requests = [rpc_pb2.LeaseKeepAliveRequest(ID=lease_id).SerializeToString() for lease_id in lease_ids]
    call = wire.channel(member).stream_stream(KEEP_ALIVE)(iter(requests), timeout=KEEP_ALIVE_TIMEOUT_S)
    answers = []
    with contextlib.suppress(grpc.RpcError):  # the status is read below
        for data in call:
            response = rpc_pb2.LeaseKeepAliveResponse.FromString(data)
            answers.append((response.ID, response.TTL))
    return Answer(call.code().name, call.details() or "", None), answers


def ids_known_to(wire: Wire, member: int) -> set[int]:
    answer = wire.call(LEASES, rpc_pb2.LeaseLeasesRequest(), member)
    assert answer.code == "OK", answer
    return {status.ID for status in answer.message.leases}


@pytest.mark.long
def test_every_member_answers_for_the_leader(wire: Wire) -> None:
    lease_id = grant(wire, 30, member=(leader(wire) + 1) % 3)
    attach(wire, lease_id, b"any/2", b"any/1")
    for member in range(3):
        end, answers = keep_alive(wire, [lease_id, 5, lease_id], member)
        assert end.code == "OK", end
        assert sorted(answers) == [(5, 0), (lease_id, 30), (lease_id, 30)]
        response = time_to_live(wire, lease_id, member)
        assert 15 <= response.TTL <= 30
        assert (response.grantedTTL, list(response.keys)) == (30, [b"any/1", b"any/2"])
        missing = time_to_live(wire, 5, member)
        assert (missing.ID, missing.TTL, missing.grantedTTL, list(missing.keys)) == (5, -1, 0, [])
        wait_for(lambda member=member: lease_id in ids_known_to(wire, member), "the lease on every member")
    assert wire.call(REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease_id)).code == "OK"
    assert value_of(wire, "any/1") is None


@pytest.mark.long
def test_a_member_that_fell_behind_the_log_learns_the_leases(wire: Wire, cluster: Cluster) -> None:
    old = grant(wire, 600)
    behind = (leader(wire) + 1) % 3
    writer = (behind + 1) % 3
    wait_for(lambda: old in ids_known_to(wire, behind), "the lease there")
    cluster.members[behind].kill()
    assert wire.call(REVOKE, rpc_pb2.LeaseRevokeRequest(ID=old), writer).code == "OK"
    new = grant(wire, 600, writer)
    for number in range(150):
        must_put(wire, "behind", b"%d" % number, writer)
    cluster.members[behind].restart()
    wire.reconnect()
    wait_for(lambda: new in ids_known_to(wire, behind), "the new lease there")
    assert old not in ids_known_to(wire, behind)
    assert keep_alive(wire, [new], behind)[1] == [(new, 600)]


@pytest.mark.long
def test_leases_outlive_all_members(wire: Wire, cluster: Cluster) -> None:
    lease_id = grant(wire, 20)
    attach(wire, lease_id, b"all")
    for member in cluster.members:
        member.kill()
    for member in cluster.members:
        member.start()
    cluster.wait_ready()
    wire.reconnect()
    response = time_to_live(wire, lease_id)
    assert (response.grantedTTL, list(response.keys)) == (20, [b"all"])
    assert keep_alive(wire, [lease_id])[1] == [(lease_id, 20)]


def test_streams_end_when_their_member_stops(wire: Wire, cluster: Cluster) -> None:
    stopping = (leader(wire) + 1) % 3
    # The clients have not ended: they may say more.
    said: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(2)]
    calls = [
        wire.channel(stopping).stream_stream(path)(iter(requests.get, None), timeout=KEEP_ALIVE_TIMEOUT_S)
        for path, requests in zip((KEEP_ALIVE, WATCH), said, strict=True)
    ]
    said[0].put(rpc_pb2.LeaseKeepAliveRequest(ID=5).SerializeToString())
    create = rpc_pb2.WatchCreateRequest(key=b"a")
    said[1].put(rpc_pb2.WatchRequest(create_request=create).SerializeToString())
    assert rpc_pb2.LeaseKeepAliveResponse.FromString(next(calls[0])).ID == 5
    assert rpc_pb2.WatchResponse.FromString(next(calls[1])).created
    cluster.members[stopping].stop()
    for call in calls:
        assert (call.code().name, call.details()) == ("UNAVAILABLE", "etcdserver: server stopped")
    for requests in said:
        requests.put(None)
    cluster.members[stopping].restart()
