"""Locks on real members: deaths, pauses and leader changes while a client waits; and the use of the fencing token."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from raftkv.pb import election_pb2, lock_pb2, rpc_pb2
from tests.compat.streams import Streams
from tests.compat.wire import Pending, Wire
from tests.procs import RAFTKV, Cluster, wait_for
from tests.server.process.process import leader_of, must_put, value_of

pytestmark = pytest.mark.xdist_group("process-lock")

GRANT, REVOKE = "etcdserverpb.Lease/LeaseGrant", "etcdserverpb.Lease/LeaseRevoke"
LOCK, UNLOCK = "v3lockpb.Lock/Lock", "v3lockpb.Lock/Unlock"
CAMPAIGN, OBSERVE = "v3electionpb.Election/Campaign", "v3electionpb.Election/Observe"
TXN = "etcdserverpb.KV/Txn"
HOLDER, WAITER = 0x1, 0x2
WAIT_MAX_S = 60.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3, flags=["--election-timeout", "500", "--heartbeat-interval", "50"]) as cluster:
        yield cluster


@pytest.fixture
def wire(cluster: Cluster) -> Iterator[Wire]:
    with Wire(cluster.endpoints) as wire:
        wait_for(lambda: leader_of(wire) >= 0, "a leader")
        for lease_id in (HOLDER, WAITER):
            assert wire.call(GRANT, rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=600)).code == "OK"
        yield wire


def _lock(wire: Wire, lease_id: int, member: int) -> Pending:
    payload = lock_pb2.LockRequest(name=b"n", lease=lease_id).SerializeToString()
    return wire.start(LOCK, payload, member, timeout_s=WAIT_MAX_S)


def _wait_in_queue(wire: Wire, member: int) -> Pending:
    """One client holds the lock, and another waits for it at a member."""
    assert _lock(wire, HOLDER, member).answer().code == "OK"
    waiting = _lock(wire, WAITER, member)
    wait_for(lambda: value_of(wire, "n/2", member) is not None, "the waiter's key")
    assert not waiting.done
    return waiting


def test_a_waiter_outlives_its_leader(cluster: Cluster, wire: Wire) -> None:
    leader = leader_of(wire)
    follower = (leader + 1) % 3
    waiting = _wait_in_queue(wire, follower)
    cluster.members[leader].kill()
    unlock = lock_pb2.UnlockRequest(key=b"n/1")
    wait_for(lambda: wire.call(UNLOCK, unlock, follower).code == "OK", "another leader")
    answer = waiting.answer()
    assert (answer.code, answer.message.key if answer.message else answer.text) == ("OK", b"n/2")


@pytest.mark.long
def test_an_observer_outlives_its_leader(cluster: Cluster, wire: Wire) -> None:
    leader = leader_of(wire)
    follower = (leader + 1) % 3
    with Streams(wire) as streams:
        observer = streams.open(OBSERVE, follower)
        observer.send(election_pb2.LeaderRequest(name=b"e"))
        observer.half_close()
        cluster.members[leader].kill()
        campaign = election_pb2.CampaignRequest(name=b"e", lease=HOLDER, value=b"1")
        wait_for(lambda: wire.call(CAMPAIGN, campaign, follower).code == "OK", "another leader")
        streams.wait(lambda: len(observer.messages) == 1, "the leader of the election")
        assert observer.messages[0].kv.value == b"1"
        assert observer.ended is None


def test_a_stopping_member_sends_its_waiters_to_another(cluster: Cluster, wire: Wire) -> None:
    follower = (leader_of(wire) + 1) % 3
    waiting = _wait_in_queue(wire, follower)
    assert cluster.members[follower].stop() == -signal.SIGTERM
    assert (waiting.answer().code, waiting.answer().text) == ("UNAVAILABLE", "etcdserver: server stopped")
    # The same lease takes up its place elsewhere, or a new one.
    elsewhere = (follower + 1) % 3
    again = _lock(wire, WAITER, elsewhere)
    assert wire.call(UNLOCK, lock_pb2.UnlockRequest(key=b"n/1"), elsewhere).code == "OK"
    assert again.answer().code == "OK"


def test_a_fenced_write_of_a_former_holder_is_refused_and_an_unfenced_one_is_not(wire: Wire) -> None:
    """The holder is paused for longer than its lease and goes on as if nothing had happened."""
    tokens = [_lock(wire, HOLDER, 0).answer().message.create_revision]
    assert wire.call(REVOKE, rpc_pb2.LeaseRevokeRequest(ID=HOLDER)).code == "OK"
    tokens.append(_lock(wire, WAITER, 1).answer().message.create_revision)
    assert 0 < tokens[0] < tokens[1]

    def fenced_put(key: bytes, token: int, value: bytes) -> bool:
        compare = rpc_pb2.Compare(key=key, target=rpc_pb2.Compare.CREATE, create_revision=token)
        put = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"resource", value=value))
        answer = wire.call(TXN, rpc_pb2.TxnRequest(compare=[compare], success=[put]))
        assert answer.code == "OK", answer
        return bool(answer.message.succeeded)

    assert fenced_put(b"n/2", tokens[1], b"new holder")
    assert not fenced_put(b"n/1", tokens[0], b"old holder")
    assert value_of(wire, "resource") == b"new holder"
    must_put(wire, "resource", b"old holder")  # nothing but the comparison stood in the way
    assert value_of(wire, "resource") == b"old holder"
