"""The rules of Lease, one by one (reference section 1.3), on etcd 3.5.1 and on raftkv."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raftkv.pb import rpc_pb2
from tests.compat.store import LEASE_NOT_FOUND, Refusal, Store, delete, get, put, txn
from tests.compat.streams import Stream, Streams
from tests.compat.wire import Answer, Wire

GRANT, REVOKE, TIME_TO_LIVE, LEASES, KEEP_ALIVE = (
    f"etcdserverpb.Lease/Lease{name}" for name in ("Grant", "Revoke", "TimeToLive", "Leases", "KeepAlive")
)
LEASE_EXISTS: Refusal = ("FAILED_PRECONDITION", "etcdserver: lease already exists")
TTL_TOO_LARGE: Refusal = ("OUT_OF_RANGE", "etcdserver: too large lease TTL")
TTL_MIN_S = 2
TTL_MAX_S = 9_000_000_000
ids = itertools.count(1_000)


class Leases:
    """Leases of a store; requests go to the members in turn."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._members = itertools.cycle(range(len(store.wire.endpoints)))

    def ask(self, method: str, request: Any) -> Answer:
        """Ask the next member, once it has applied everything."""
        member = next(self._members)
        self.store.wire.call("etcdserverpb.KV/Range", get(b"a"), member)
        return self.store.wire.call(method, request, member)

    def grant(self, ttl_s: int = 100, lease_id: int | None = None) -> int:
        """Grant a lease; its id."""
        request = rpc_pb2.LeaseGrantRequest(ID=next(ids) if lease_id is None else lease_id, TTL=ttl_s)
        answer = self.ask(GRANT, request)
        assert answer.code == "OK", answer
        return int(answer.message.ID)

    def revoke(self, lease_id: int) -> Answer:
        """Revoke a lease."""
        return self.ask(REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease_id))

    def keys(self, lease_id: int) -> list[bytes]:
        """The keys of a lease."""
        answer = self.ask(TIME_TO_LIVE, rpc_pb2.LeaseTimeToLiveRequest(ID=lease_id, keys=True))
        return sorted(answer.message.keys)


@pytest.fixture
def leases(store: Store) -> Leases:
    return Leases(store)


@pytest.fixture
def streams(wire: Wire) -> Iterator[Streams]:
    with Streams(wire) as streams:
        yield streams


def _refusal(answer: Answer) -> Refusal:
    return answer.code, answer.text


# --- granting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ttl_s", "granted_s"), [(0, TTL_MIN_S), (-1, TTL_MIN_S), (1, TTL_MIN_S), (2, 2), (3, 3), (TTL_MAX_S, TTL_MAX_S)]
)
def test_ttls(leases: Leases, ttl_s: int, granted_s: int) -> None:
    lease_id = next(ids)
    answer = leases.ask(GRANT, rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=ttl_s))
    assert (answer.code, answer.message.ID, answer.message.TTL, answer.message.error) == ("OK", lease_id, granted_s, "")
    assert answer.revision == leases.store.at(0)
    leases.revoke(lease_id)


def test_too_large_ttls_are_refused(leases: Leases) -> None:
    for ttl_s in (TTL_MAX_S + 1, 2**63 - 1):
        assert _refusal(leases.ask(GRANT, rpc_pb2.LeaseGrantRequest(TTL=ttl_s))) == TTL_TOO_LARGE


def test_ids(leases: Leases) -> None:
    chosen = {leases.grant(lease_id=0) for _ in range(5)}
    assert len(chosen) == 5
    assert all(0 < lease_id < 2**63 for lease_id in chosen)
    for lease_id in (*chosen, leases.grant(lease_id=-7)):
        assert _refusal(leases.ask(GRANT, rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=100))) == LEASE_EXISTS
        leases.revoke(lease_id)


def test_all_leases_are_listed(leases: Leases) -> None:
    granted = [leases.grant(ttl_s) for ttl_s in (3_000, 1_000, 2_000)]
    listed = [status.ID for status in leases.ask(LEASES, rpc_pb2.LeaseLeasesRequest()).message.leases]
    assert [lease_id for lease_id in listed if lease_id in granted] == [granted[1], granted[2], granted[0]]
    for lease_id in granted:
        leases.revoke(lease_id)


# --- keys ---------------------------------------------------------------------------------------------------


def test_keys_come_and_go_with_puts_and_deletions(leases: Leases) -> None:
    store = leases.store
    first, second = leases.grant(), leases.grant()
    store.ask(txn(then=[put(key, lease=first) for key in (b"b", b"a", b"c", b"d")]))
    assert leases.keys(first) == [b"a", b"b", b"c", b"d"]
    store.ask(put(b"a"))
    store.ask(put(b"b", lease=second))
    store.ask(put(b"c", b"1", ignore_lease=True))
    store.ask(delete(b"d"))
    assert (leases.keys(first), leases.keys(second)) == ([b"c"], [b"b"])


def test_unknown_leases(leases: Leases) -> None:
    assert leases.store.refusal(put(b"a", lease=99)) == LEASE_NOT_FOUND
    assert _refusal(leases.revoke(99)) == LEASE_NOT_FOUND
    unknown = leases.ask(TIME_TO_LIVE, rpc_pb2.LeaseTimeToLiveRequest(ID=99, keys=True))
    assert (unknown.code, unknown.message.ID) == ("OK", 99)
    assert (unknown.message.TTL, unknown.message.grantedTTL, list(unknown.message.keys)) == (-1, 0, [])


def test_the_keys_are_listed_only_if_asked_for(leases: Leases) -> None:
    lease_id = leases.grant(500)
    leases.store.ask(put(b"a", lease=lease_id))
    answer = leases.ask(TIME_TO_LIVE, rpc_pb2.LeaseTimeToLiveRequest(ID=lease_id))
    assert (answer.message.ID, answer.message.grantedTTL, list(answer.message.keys)) == (lease_id, 500, [])
    assert 490 <= answer.message.TTL <= 500
    assert answer.revision == leases.store.at(1)


def test_a_revocation_deletes_all_keys_at_one_revision_in_order(leases: Leases, streams: Streams) -> None:
    store = leases.store
    lease_id = leases.grant()
    store.ask(txn(then=[put(key, lease=lease_id) for key in (b"c", b"a", b"b")]))
    watch = streams.open("etcdserverpb.Watch/Watch")
    create = rpc_pb2.WatchCreateRequest(key=b"\0", range_end=b"\0", start_revision=store.at(2))
    watch.send(rpc_pb2.WatchRequest(create_request=create))
    assert leases.revoke(lease_id).revision == store.at(2)
    streams.wait(lambda: len(watch.messages) > 1, "the deletions")
    assert [(event.type, event.kv.key) for event in watch.messages[1].events] == [(1, b"a"), (1, b"b"), (1, b"c")]
    assert {event.kv.mod_revision for event in watch.messages[1].events} == {store.at(2)}


def test_without_keys_there_is_no_revision(leases: Leases) -> None:
    assert leases.revoke(leases.grant()).revision == leases.store.at(0)
    assert leases.store.ask(put(b"a")) == leases.store.put_answer(1)


# --- keeping alive, and the end -----------------------------------------------------------------------------


def _keep_alive(streams: Streams, member: int) -> Callable[[int], rpc_pb2.LeaseKeepAliveResponse]:
    """A stream of keep-alives; each call sends one and waits for its answer."""
    stream: Stream = streams.open(KEEP_ALIVE, member)

    def ask(lease_id: int) -> rpc_pb2.LeaseKeepAliveResponse:
        received = len(stream.messages)
        stream.send(rpc_pb2.LeaseKeepAliveRequest(ID=lease_id))
        streams.wait(lambda: len(stream.messages) > received, "the answer to a keep-alive")
        response: rpc_pb2.LeaseKeepAliveResponse = stream.messages[received]
        return response

    return ask


def test_keep_alives(leases: Leases, streams: Streams) -> None:
    """One that meets no lease says so by a TTL of 0, and the stream goes on."""
    granted = [leases.grant(ttl_s) for ttl_s in (100, 200)]
    for member in range(len(leases.store.wire.endpoints)):
        ask = _keep_alive(streams, member)
        answers = [ask(lease_id) for lease_id in (99, granted[0], 0, granted[1])]
        assert [(answer.ID, answer.TTL) for answer in answers] == [
            (99, 0),
            (granted[0], 100),
            (0, 0),
            (granted[1], 200),
        ]
        assert all(answer.header.revision == leases.store.at(0) for answer in answers)


@pytest.mark.long
def test_a_lease_ends_by_itself_and_not_before_its_time(leases: Leases, streams: Streams) -> None:
    store = leases.store
    ask = _keep_alive(streams, 0)
    lease_id = leases.grant(TTL_MIN_S)
    watch = streams.open("etcdserverpb.Watch/Watch")
    create = rpc_pb2.WatchCreateRequest(key=b"\0", range_end=b"\0", start_revision=store.at(2))
    watch.send(rpc_pb2.WatchRequest(create_request=create))
    store.ask(txn(then=[put(b"b", lease=lease_id), put(b"a", lease=lease_id)]))
    before = time.monotonic()
    assert ask(lease_id).TTL == TTL_MIN_S
    streams.wait(lambda: len(watch.messages) > 1, "the end of the lease")
    assert time.monotonic() - before >= TTL_MIN_S
    assert [(event.type, event.kv.key) for event in watch.messages[1].events] == [(1, b"a"), (1, b"b")]
    assert ask(lease_id).TTL == 0
    assert _refusal(leases.revoke(lease_id)) == LEASE_NOT_FOUND
