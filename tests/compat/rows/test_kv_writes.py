"""The rows on Put, DeleteRange, Compact and request sizes of the KV tables, on etcd 3.5.1 and on raftkv."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raftkv.pb import rpc_pb2
from tests.compat.store import (
    COMPACTED,
    EVERYTHING,
    FUTURE,
    KEY_NOT_FOUND,
    LEASE_NOT_FOUND,
    LEASE_PROVIDED,
    TOO_LARGE,
    VALUE_PROVIDED,
    Store,
    compact,
    compare,
    delete,
    get,
    put,
    txn,
)
from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, RAFTKV, Cluster

PROGRAMS = {"etcd": ETCD_FAST, "raftkv": RAFTKV}

# --- Put ----------------------------------------------------------------------------------------------------


def test_every_put_is_a_revision_even_of_the_same_value(store: Store) -> None:
    assert store.ask(put(b"a", b"1")) == store.put_answer(1)
    assert store.ask(put(b"a", b"1")) == store.put_answer(2)
    assert store.ask(get(b"a")) == store.range_answer(2, [store.kv(b"a", b"1", mod=2, version=2)])


def test_a_put_after_a_deletion_begins_anew(store: Store) -> None:
    store.fill(b"a", b"a")
    store.ask(delete(b"a"))
    store.ask(put(b"a", b"2"))
    assert store.ask(get(b"a")) == store.range_answer(4, [store.kv(b"a", b"2", create=4)])


def test_put_prev_kv(store: Store) -> None:
    assert store.ask(put(b"a", b"1", prev_kv=True)) == store.put_answer(1)
    assert store.ask(put(b"a", b"2", prev_kv=True)) == store.put_answer(2, store.kv(b"a", b"1"))
    store.ask(delete(b"a"))
    assert store.ask(put(b"a", b"3", prev_kv=True)) == store.put_answer(4)


def test_empty_value(store: Store) -> None:
    store.ask(put(b"a"))
    assert store.ask(get(b"a")) == store.range_answer(1, [store.kv(b"a")])


def test_ignore_value_keeps_the_value(store: Store) -> None:
    store.ask(put(b"a", b"1"))
    assert store.ask(put(b"a", ignore_value=True, prev_kv=True)) == store.put_answer(2, store.kv(b"a", b"1"))
    assert store.ask(get(b"a")) == store.range_answer(2, [store.kv(b"a", b"1", mod=2, version=2)])


def test_ignore_value_with_a_value(store: Store) -> None:
    assert store.refusal(put(b"a", b"1", ignore_value=True)) == VALUE_PROVIDED
    assert store.refusal(txn(then=[put(b"a", b"1", ignore_value=True)])) == VALUE_PROVIDED


def test_ignore_lease_with_a_lease(store: Store) -> None:
    assert store.refusal(put(b"a", lease=7, ignore_lease=True)) == LEASE_PROVIDED
    assert store.refusal(txn(otherwise=[put(b"a", lease=7, ignore_lease=True)])) == LEASE_PROVIDED


def test_value_provided_is_told_before_lease_provided(store: Store) -> None:
    request = put(b"a", b"1", lease=7, ignore_value=True, ignore_lease=True)
    assert store.refusal(request) == VALUE_PROVIDED


def test_ignore_needs_the_key(store: Store) -> None:
    for flags in ({"ignore_value": True}, {"ignore_lease": True}, {"ignore_value": True, "ignore_lease": True}):
        assert store.refusal(put(b"a", **flags)) == KEY_NOT_FOUND
        assert store.refusal(txn(then=[put(b"a", **flags)])) == KEY_NOT_FOUND
    store.fill(b"a")
    store.ask(delete(b"a"))
    assert store.refusal(put(b"a", ignore_value=True)) == KEY_NOT_FOUND


def test_unknown_lease(store: Store) -> None:
    for lease in (7, -1, 2**63 - 1):
        assert store.refusal(put(b"a", lease=lease)) == LEASE_NOT_FOUND
        assert store.refusal(txn(then=[put(b"a", lease=lease)])) == LEASE_NOT_FOUND
    assert store.ask(get(b"a")) == store.range_answer(0)


def test_unknown_lease_and_missing_key_together(store: Store) -> None:
    """A single put tells of the lease first, a put in a transaction of the key first."""
    request = put(b"a", lease=7, ignore_value=True)
    assert store.refusal(request) == LEASE_NOT_FOUND
    assert store.refusal(txn(then=[request])) == KEY_NOT_FOUND


# --- sizes --------------------------------------------------------------------------------------------------


def test_largest_request(store: Store) -> None:
    value = b"x" * (1536 * 1024 - 200)
    assert store.ask(put(b"a", value)) == store.put_answer(1)
    assert store.ask(get(b"a")) == store.range_answer(1, [store.kv(b"a", value)])
    over = b"x" * (1536 * 1024)
    assert store.refusal(put(b"a", over)) == TOO_LARGE
    assert store.refusal(txn(then=[put(b"a", over)])) == TOO_LARGE
    assert store.refusal(delete(b"a", over)) == TOO_LARGE


def test_reads_are_not_held_to_the_request_limit(store: Store) -> None:
    assert store.ask(get(b"a", b"x" * (1536 * 1024))) == store.range_answer(0)
    assert store.ask(txn([compare("VALUE", "EQUAL", b"a", b"x" * (1536 * 1024))])).succeeded is False


@pytest.mark.parametrize("over", [1, 4096, 3 * 1024 * 1024])
def test_a_message_over_two_mebibytes_is_not_even_read(store: Store, over: int) -> None:
    limit = 2 * 1024 * 1024
    answer = store.wire.call("etcdserverpb.KV/Put", bytes(limit + over))
    text = f"grpc: received message larger than max ({limit + over} vs. {limit})"
    assert (answer.code, answer.text) == ("RESOURCE_EXHAUSTED", text)


def test_a_message_of_two_mebibytes_is_read(store: Store) -> None:
    request = put(b"a", bytes(2 * 1024 * 1024 - 7))
    assert request.ByteSize() == 2 * 1024 * 1024
    assert store.refusal(request) == TOO_LARGE


# --- DeleteRange --------------------------------------------------------------------------------------------


def test_deleting_nothing_is_no_revision(store: Store) -> None:
    store.fill(b"a")
    assert store.ask(delete(b"b", prev_kv=True)) == store.delete_answer(1, deleted=0)
    assert store.ask(delete(b"b", b"a")) == store.delete_answer(1, deleted=0)
    store.ask(delete(b"a"))
    assert store.ask(delete(b"a")) == store.delete_answer(2, deleted=0)


def test_deleting_many_is_one_revision(store: Store) -> None:
    store.fill(b"a", b"b", b"c")
    prev_kvs = [store.kv(b"a", b"a", 1), store.kv(b"b", b"b", 2)]
    assert store.ask(delete(b"a", b"c", prev_kv=True)) == store.delete_answer(4, 2, prev_kvs)
    assert store.ask(put(b"d")) == store.put_answer(5)


def test_delete_without_prev_kv_only_counts(store: Store) -> None:
    store.fill(b"a", b"b")
    assert store.ask(delete(*EVERYTHING)) == store.delete_answer(3, deleted=2)


# --- Compact ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", [False, True])
def test_compact(store: Store, physical: bool) -> None:
    store.fill(b"a", b"a", b"b", b"a")
    answer = store.ask(compact(store.at(3), physical))
    assert answer == rpc_pb2.CompactionResponse(header=store.header(4))
    assert store.refusal(get(b"a", revision=store.at(2))) == COMPACTED
    at_compaction = store.ask(get(*EVERYTHING, revision=store.at(3)))
    kvs = [store.kv(b"a", b"a", mod=2, version=2), store.kv(b"b", b"b", create=3)]
    assert at_compaction == store.range_answer(4, kvs)


def test_compact_at_the_current_revision(store: Store) -> None:
    store.fill(b"a", b"a")
    store.ask(compact(store.at(2)))
    assert store.ask(get(b"a")) == store.range_answer(2, [store.kv(b"a", b"a", mod=2, version=2)])


def test_compact_again_or_below_is_compacted(store: Store) -> None:
    store.fill(b"a", b"a")
    store.ask(compact(store.at(1)))
    for revision in (store.at(1), store.at(0), 1, 0, -1, -(2**63)):
        assert store.refusal(compact(revision)) == COMPACTED
        assert store.refusal(compact(revision, physical=True)) == COMPACTED


def test_compact_in_the_future(store: Store) -> None:
    store.fill(b"a")
    for revision in (store.at(2), 2**63 - 1):
        assert store.refusal(compact(revision)) == FUTURE


def test_a_deleted_key_is_gone_after_compaction(store: Store) -> None:
    store.fill(b"a", b"b")
    store.ask(delete(b"a"))
    store.ask(put(b"b", b"2"))
    store.ask(compact(store.at(4), physical=True))
    assert store.keys(get(*EVERYTHING, revision=store.at(4))) == [b"b"]
    assert store.ask(put(b"a", b"1")) == store.put_answer(5)
    assert store.ask(get(b"a")) == store.range_answer(5, [store.kv(b"a", b"1", create=5)])


# --- a store without a write --------------------------------------------------------------------------------


@pytest.fixture(params=PROGRAMS)
def fresh(request: pytest.FixtureRequest) -> Iterator[Wire]:
    """A new cluster of one."""
    with Cluster(PROGRAMS[request.param]) as cluster, Wire(cluster.endpoints) as wire:
        yield wire


def test_a_new_store(fresh: Wire) -> None:
    """Revision 1 before the first put, which is 2; nothing is compacted, so that revision 1 can be read.

    Never compacted is kept as compact revision -1, so in a txn -1 still reads the latest, and only less is refused.
    """
    assert fresh.call("etcdserverpb.KV/Range", get(b"a")).revision == 1
    assert fresh.call("etcdserverpb.KV/Range", get(b"a", revision=1)).code == "OK"
    missing = fresh.call("etcdserverpb.KV/Range", get(b"a", revision=2))
    assert (missing.code, missing.text) == FUTURE
    assert fresh.call("etcdserverpb.KV/Put", put(b"a")).revision == 2
    answer = fresh.call("etcdserverpb.KV/Txn", txn(then=[get(b"a", revision=-1)]))
    assert answer.code == "OK"
    assert answer.message.responses[0].response_range.count == 1
    answer = fresh.call("etcdserverpb.KV/Txn", txn(then=[get(b"a", revision=-2)]))
    assert (answer.code, answer.text) == COMPACTED
    for revision, expected in ((3, FUTURE), (2**63 - 1, FUTURE), (-1, COMPACTED)):
        answer = fresh.call("etcdserverpb.KV/Compact", compact(revision))
        assert (answer.code, answer.text) == expected
    for revision in (0, 1):
        assert fresh.call("etcdserverpb.KV/Compact", compact(revision)).revision == 2
    answer = fresh.call("etcdserverpb.KV/Compact", compact(0))
    assert (answer.code, answer.text) == COMPACTED
