"""The rules of Lock and Election, one by one (reference section 1.7), on etcd 3.5.1 and on raftkv."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from raftkv.pb import election_pb2, kv_pb2, lock_pb2, rpc_pb2
from tests.compat.store import EVERYTHING, Refusal, Store, compact, delete, get, put
from tests.compat.streams import Streams
from tests.compat.wire import Answer, Pending, Wire
from tests.procs import wait_for

LOCK, UNLOCK = "v3lockpb.Lock/Lock", "v3lockpb.Lock/Unlock"
CAMPAIGN, PROCLAIM, LEADER, RESIGN, OBSERVE = (
    f"v3electionpb.Election/{name}" for name in ("Campaign", "Proclaim", "Leader", "Resign", "Observe")
)
NO_LEASE: Refusal = ("UNKNOWN", "etcdserver: requested lease not found")
NO_KEY: Refusal = ("UNKNOWN", "etcdserver: key is not provided")
EXPIRED: Refusal = ("UNKNOWN", "mutex: session is expired")
NOT_LEADER: Refusal = ("UNKNOWN", "election: not leader")
NO_LEADER: Refusal = ("UNKNOWN", "election: no leader")
WHICH_LEADER: Refusal = ("UNKNOWN", '"leader" field must be provided')
LEASES = (0x1A, 0x2B, 0x3C)


class Callers:
    """Callers with three leases, on all members in turn."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_raftkv = store.program == "raftkv"
        self._members = itertools.cycle(range(len(store.wire.endpoints)))
        for lease_id in LEASES:
            self.revoke(lease_id)
            store.wire.call("etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=600))

    def revoke(self, lease_id: int) -> None:
        """End a lease, if there is one."""
        self.store.wire.call("etcdserverpb.Lease/LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=lease_id))

    def ask(self, method: str, request: Any) -> Answer:
        """Ask the next member."""
        return self.store.wire.call(method, request, next(self._members))

    def refusal(self, method: str, request: Any) -> Refusal:
        """Ask for what must be refused."""
        answer = self.ask(method, request)
        return answer.code, answer.text

    def wait(self, method: str, request: Any, key: bytes) -> Pending:
        """Begin a Lock or Campaign that has to wait; returns once its key stands in the queue."""
        call = self.store.wire.start(method, request.SerializeToString(), next(self._members))
        wait_for(lambda: call.done or bool(self.kvs(key)), f"the key {key!r}")
        assert not call.done, call.answer()
        return call

    def lock(self, lease_id: int = LEASES[0], name: bytes = b"n") -> Answer:
        """Lock what is free."""
        return self.ask(LOCK, lock_pb2.LockRequest(name=name, lease=lease_id))

    def campaign(self, lease_id: int, value: bytes) -> Answer:
        """Campaign where there is no leader, or as the leader."""
        return self.ask(CAMPAIGN, election_pb2.CampaignRequest(name=b"e", lease=lease_id, value=value))

    def kvs(self, key: bytes, range_end: bytes = b"") -> list[kv_pb2.KeyValue]:
        """Read."""
        return list(self.store.ask(get(key, range_end)).kvs)

    def keys(self) -> list[bytes]:
        """All keys."""
        return [kv.key for kv in self.kvs(*EVERYTHING)]

    def revision(self, answer: Answer) -> int:
        """The header's revision, counted from the emptied store."""
        assert answer.code == "OK", answer
        return answer.revision - self.store.base


@pytest.fixture
def callers(store: Store) -> Callers:
    return Callers(store)


@pytest.fixture
def streams(wire: Wire) -> Iterator[Streams]:
    with Streams(wire) as streams:
        yield streams


@pytest.mark.parametrize("name", [b"n", b"", b"n/m", b"\xff"])
def test_a_free_lock_is_taken_at_once_and_again(callers: Callers, name: bytes) -> None:
    for _ in range(2):
        answer = callers.lock(name=name)
        assert (answer.message.key, callers.revision(answer)) == (name + b"/1a", 1)
    assert callers.kvs(name + b"/1a")[0].lease == LEASES[0]


def test_raftkv_says_the_fencing_token(callers: Callers) -> None:
    answer = callers.lock()
    assert answer.message.create_revision == (callers.store.at(1) if callers.is_raftkv else 0)


def test_without_a_lease_one_of_a_minute_is_granted(callers: Callers) -> None:
    answer = callers.lock(0)
    name, _, lease = answer.message.key.partition(b"/")
    assert (name, callers.kvs(answer.message.key)[0].lease) == (b"n", int(lease, 16))
    asked = callers.ask("etcdserverpb.Lease/LeaseTimeToLive", rpc_pb2.LeaseTimeToLiveRequest(ID=int(lease, 16)))
    assert asked.message.grantedTTL == 60


def test_unknown_leases_are_refused(callers: Callers) -> None:
    for lease_id in (0x99, -5):
        assert callers.refusal(LOCK, lock_pb2.LockRequest(name=b"n", lease=lease_id)) == NO_LEASE
    assert callers.keys() == []


def test_a_waiter_gets_the_lock_when_it_is_free(callers: Callers) -> None:
    callers.lock()
    request = lock_pb2.LockRequest(name=b"n", lease=LEASES[1])
    waiting = callers.wait(LOCK, request, b"n/2b")
    callers.store.ask(put(b"unrelated"))
    assert callers.revision(callers.ask(UNLOCK, lock_pb2.UnlockRequest(key=b"n/1a"))) == 4
    assert (waiting.answer().message.key, callers.revision(waiting.answer())) == (b"n/2b", 4)


def test_the_end_of_the_holders_lease_frees_the_lock(callers: Callers) -> None:
    callers.lock()
    waiting = callers.wait(LOCK, lock_pb2.LockRequest(name=b"n", lease=LEASES[1]), b"n/2b")
    callers.revoke(LEASES[0])
    assert waiting.answer().message.key == b"n/2b"


def test_any_older_key_below_the_name_holds_the_lock(callers: Callers) -> None:
    callers.store.fill(b"n/x/y")
    waiting = callers.wait(LOCK, lock_pb2.LockRequest(name=b"n", lease=LEASES[0]), b"n/1a")
    callers.store.ask(delete(b"n/x/y"))
    assert waiting.answer().code == "OK"


def test_a_waiter_whose_lease_ends_does_not_get_the_lock(callers: Callers) -> None:
    callers.lock()
    waiting = callers.wait(LOCK, lock_pb2.LockRequest(name=b"n", lease=LEASES[1]), b"n/2b")
    callers.revoke(LEASES[1])
    callers.ask(UNLOCK, lock_pb2.UnlockRequest(key=b"n/1a"))
    assert (waiting.answer().code, waiting.answer().text) == EXPIRED
    assert callers.keys() == []


def test_raftkv_tells_a_key_made_anew_from_the_waiters_own(callers: Callers) -> None:
    callers.lock()
    waiting = callers.wait(LOCK, lock_pb2.LockRequest(name=b"n", lease=LEASES[1]), b"n/2b")
    callers.store.ask(delete(b"n/2b"))
    callers.store.fill(b"n/2b")
    callers.ask(UNLOCK, lock_pb2.UnlockRequest(key=b"n/1a"))
    assert (waiting.answer().code, waiting.answer().text) == (EXPIRED if callers.is_raftkv else ("OK", ""))


def test_a_waiter_that_gives_up_takes_its_key_along(callers: Callers) -> None:
    callers.lock()
    waiting = callers.wait(LOCK, lock_pb2.LockRequest(name=b"n", lease=LEASES[1]), b"n/2b")
    waiting.future.cancel()
    wait_for(lambda: not callers.kvs(b"n/2b"), "the key to go")
    assert callers.keys() == [b"n/1a"]


@pytest.mark.long
def test_a_waiter_whose_deadline_passes_takes_its_key_along(callers: Callers) -> None:
    callers.lock()
    request = lock_pb2.LockRequest(name=b"n", lease=LEASES[1])
    waiting = callers.store.wire.start(LOCK, request.SerializeToString(), timeout_s=1.0)
    wait_for(lambda: waiting.done or bool(callers.kvs(b"n/2b")), "the waiter's key")
    # etcd's own answer, UNKNOWN, may be faster than the client's clock.
    assert waiting.answer().code in ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED" if callers.is_raftkv else "UNKNOWN")
    wait_for(lambda: not callers.kvs(b"n/2b"), "the key to go")


def test_unlocking(callers: Callers) -> None:
    assert callers.refusal(UNLOCK, lock_pb2.UnlockRequest()) == NO_KEY
    assert callers.revision(callers.ask(UNLOCK, lock_pb2.UnlockRequest(key=b"nothing"))) == 0
    callers.lock()
    assert callers.revision(callers.ask(UNLOCK, lock_pb2.UnlockRequest(key=b"n/1a"))) == 2


def test_too_large_names_are_refused(callers: Callers) -> None:
    request = lock_pb2.LockRequest(name=b"n" * 1_600_000, lease=LEASES[0])
    assert callers.refusal(LOCK, request) == ("UNKNOWN", "etcdserver: request is too large")


def test_a_campaign_without_rivals_is_won_at_once(callers: Callers) -> None:
    answer = callers.campaign(LEASES[0], b"1")
    leader = election_pb2.LeaderKey(name=b"e", key=b"e/1a", rev=callers.store.at(1), lease=LEASES[0])
    assert (answer.message.leader, callers.revision(answer)) == (leader, 1)


def test_campaigning_again_proclaims(callers: Callers) -> None:
    callers.campaign(LEASES[0], b"1")
    for value, revision in ((b"1", 1), (b"2", 1), (b"2", 2)):  # the header's is from before the proclamation
        answer = callers.campaign(LEASES[0], value)
        assert (answer.message.leader.rev, callers.revision(answer)) == (callers.store.at(1), revision)
    assert callers.kvs(b"e/1a")[0].value == b"2"


def test_a_campaign_that_waits_says_the_revision_of_its_beginning(callers: Callers) -> None:
    leader = callers.campaign(LEASES[0], b"1").message.leader
    request = election_pb2.CampaignRequest(name=b"e", lease=LEASES[1], value=b"2")
    waiting = callers.wait(CAMPAIGN, request, b"e/2b")
    assert callers.revision(callers.ask(RESIGN, election_pb2.ResignRequest(leader=leader))) == 3
    assert (waiting.answer().message.leader.key, callers.revision(waiting.answer())) == (b"e/2b", 2)


def test_a_campaign_that_is_given_up_leaves_no_key(callers: Callers) -> None:
    callers.campaign(LEASES[0], b"1")
    request = election_pb2.CampaignRequest(name=b"e", lease=LEASES[1], value=b"2")
    callers.wait(CAMPAIGN, request, b"e/2b").future.cancel()
    wait_for(lambda: callers.keys() == [b"e/1a"], "the key to go")


def test_raftkv_does_not_elect_who_lost_the_lease(callers: Callers) -> None:
    callers.campaign(LEASES[0], b"1")
    request = election_pb2.CampaignRequest(name=b"e", lease=LEASES[1], value=b"2")
    waiting = callers.wait(CAMPAIGN, request, b"e/2b")
    callers.revoke(LEASES[1])
    callers.revoke(LEASES[0])
    assert (waiting.answer().code, waiting.answer().text) == (NOT_LEADER if callers.is_raftkv else ("OK", ""))


def test_campaigns_with_an_unknown_lease(callers: Callers) -> None:
    assert callers.refusal(CAMPAIGN, election_pb2.CampaignRequest(name=b"e", lease=0x99)) == NO_LEASE


def test_proclaiming(callers: Callers) -> None:
    leader = callers.campaign(LEASES[0], b"1").message.leader
    proclaim = election_pb2.ProclaimRequest
    assert callers.revision(callers.ask(PROCLAIM, proclaim(leader=leader, value=b"2"))) == 2
    later = election_pb2.LeaderKey(key=leader.key, rev=leader.rev + 1, lease=LEASES[0])
    assert callers.refusal(PROCLAIM, proclaim(leader=later)) == NOT_LEADER
    assert callers.refusal(PROCLAIM, proclaim(value=b"2")) == WHICH_LEADER
    assert callers.refusal(PROCLAIM, proclaim(leader=election_pb2.LeaderKey(lease=LEASES[0]))) == NO_KEY
    leaseless = election_pb2.LeaderKey(key=leader.key, rev=leader.rev, lease=0x99)
    assert callers.refusal(PROCLAIM, proclaim(leader=leaseless)) == NO_LEASE


def test_proclaiming_without_a_lease_grants_one(callers: Callers) -> None:
    leader = callers.campaign(LEASES[0], b"1").message.leader
    leader.lease = 0
    callers.ask(PROCLAIM, election_pb2.ProclaimRequest(leader=leader, value=b"2"))
    assert callers.kvs(b"e/1a")[0].lease not in (0, LEASES[0])


def test_resigning(callers: Callers) -> None:
    leader = callers.campaign(LEASES[0], b"1").message.leader
    resign = election_pb2.ResignRequest
    later = election_pb2.LeaderKey(key=leader.key, rev=leader.rev + 1, lease=LEASES[0])
    assert callers.revision(callers.ask(RESIGN, resign(leader=later))) == 1
    assert callers.refusal(RESIGN, resign()) == WHICH_LEADER
    assert callers.refusal(RESIGN, resign(leader=election_pb2.LeaderKey(lease=LEASES[0]))) == NO_KEY
    for revision in (2, 2):
        assert callers.revision(callers.ask(RESIGN, resign(leader=leader))) == revision
    assert callers.keys() == []


def test_the_leader_is_the_oldest(callers: Callers) -> None:
    assert callers.refusal(LEADER, election_pb2.LeaderRequest(name=b"e")) == NO_LEADER
    callers.store.fill(b"e/z", b"e/a")
    answer = callers.ask(LEADER, election_pb2.LeaderRequest(name=b"e"))
    assert (answer.message.kv, callers.revision(answer)) == (callers.store.kv(b"e/z", b"e/z"), 2)


def test_observing(callers: Callers, streams: Streams) -> None:
    """Other keys do not disturb it, nor does a compaction (in etcd it can end a campaign that has just begun)."""
    leader = callers.campaign(LEASES[0], b"1").message.leader
    observer = streams.open(OBSERVE, len(callers.store.wire.endpoints) - 1)
    observer.send(election_pb2.LeaderRequest(name=b"e"))
    observer.half_close()
    streams.wait(lambda: len(observer.messages) == 1, "the first leader")
    request = election_pb2.CampaignRequest(name=b"e", lease=LEASES[1], value=b"2")
    waiting = callers.wait(CAMPAIGN, request, b"e/2b")
    callers.ask(PROCLAIM, election_pb2.ProclaimRequest(leader=leader, value=b"3"))
    # The header tells the store's revision at the time of sending: what follows must not come before it.
    streams.wait(lambda: len(observer.messages) == 2, "the proclaimed value")
    callers.store.fill(b"other")
    if callers.is_raftkv:
        callers.store.ask(compact(callers.store.at(4)))
    callers.ask(RESIGN, election_pb2.ResignRequest(leader=leader))
    assert waiting.answer().code == "OK"
    streams.wait(lambda: len(observer.messages) == 3, "the second leader")
    callers.store.ask(delete(b"e/2b"))
    callers.campaign(LEASES[2], b"4")
    streams.wait(lambda: len(observer.messages) == 4, "the third leader")
    seen = [(message.kv.key, message.kv.value) for message in observer.messages]
    assert seen == [(b"e/1a", b"1"), (b"e/1a", b"3"), (b"e/2b", b"2"), (b"e/3c", b"4")]
    revisions = [message.header.revision - callers.store.base for message in observer.messages]
    assert revisions[:3] == [1, 3, 5]
