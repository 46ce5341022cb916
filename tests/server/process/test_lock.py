"""Locks on real members: deaths, pauses and leader changes while a client waits; and the use of the fencing token."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from raftkv.pb import election_pb2, lock_pb2, rpc_pb2
from tests.compat.streams import Streams
from tests.compat.wire import Pending, Wire
from tests.procs import RAFTKV, Cluster, wait_for
from tests.server.process.process import leader_of, value_of

pytestmark = pytest.mark.xdist_group("process-lock")

GRANT = "etcdserverpb.Lease/LeaseGrant"
LOCK, UNLOCK = "v3lockpb.Lock/Lock", "v3lockpb.Lock/Unlock"
CAMPAIGN, OBSERVE = "v3electionpb.Election/Campaign", "v3electionpb.Election/Observe"
HOLDER, WAITER = 0x1, 0x2
WAIT_MAX_S = 120.0


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
