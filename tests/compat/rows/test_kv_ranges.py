"""The rows on key intervals and Range of the KV tables, each with its literal answer, on etcd 3.5.1 and on raftkv.

Every expectation is proven on the real etcd first (fixture `store` gives both in turn). Where etcd 3.5.1 is known
to differ from 3.6.14, which raftkv follows, the row says so by name.
"""

from __future__ import annotations

import pytest

from raftkv.pb import rpc_pb2
from tests.compat.store import (
    COMPACTED,
    EMPTY_KEY,
    EVERYTHING,
    FUTURE,
    INVALID_SORT,
    Store,
    compact,
    compare,
    delete,
    get,
    put,
    txn,
)

ASCEND, DESCEND = rpc_pb2.RangeRequest.ASCEND, rpc_pb2.RangeRequest.DESCEND
KEY, VERSION = rpc_pb2.RangeRequest.KEY, rpc_pb2.RangeRequest.VERSION
CREATE, MOD, VALUE = rpc_pb2.RangeRequest.CREATE, rpc_pb2.RangeRequest.MOD, rpc_pb2.RangeRequest.VALUE

# --- key intervals ------------------------------------------------------------------------------------------


INTERVALS = [
    (b"a", b"", [b"a"]),
    (b"aa", b"", []),
    (b"b", b"\x00", [b"b", b"b\xff", b"c"]),
    (b"b", b"c", [b"b", b"b\xff"]),
    (b"a", b"b", [b"a", b"ab"]),
    (b"b\xff", b"c", [b"b\xff"]),
    (b"\x00", b"\x00", [b"a", b"ab", b"b", b"b\xff", b"c"]),
    (b"c", b"a", []),
    (b"b", b"b", []),
    (b"\xff", b"\x00", []),
]


def test_interval(store: Store) -> None:
    names = [b"a", b"ab", b"b", b"b\xff", b"c"]
    store.fill(*names)
    revision = 5
    for key, range_end, keys in INTERVALS:
        assert store.keys(get(key, range_end)) == keys
        assert store.ask(get(key, range_end, count_only=True)) == store.range_answer(revision, count=len(keys))
        deleted = store.ask(delete(key, range_end))
        assert deleted == store.delete_answer(revision + bool(keys), deleted=len(keys)), (key, range_end)
        store.fill(*keys)
        revision += len(keys) + bool(keys)


def test_an_empty_key_is_refused_in_every_request(store: Store) -> None:
    for request in (
        *(get(b""), get(b"", b"\x00"), put(b"", b"v"), delete(b""), delete(b"", b"\x00")),
        txn([compare("VERSION", "EQUAL", b"", 0)]),
        *(txn(then=[part]) for part in (get(b""), put(b""), delete(b""))),
        txn(otherwise=[txn(then=[put(b"")])]),
    ):
        assert store.refusal(request) == EMPTY_KEY


# --- revisions ----------------------------------------------------------------------------------------------


def test_revision_zero_or_less_is_the_latest(store: Store) -> None:
    store.fill(b"a", b"b")
    latest = store.range_answer(2, [store.kv(b"a", b"a")])
    for revision in (0, -1, -(2**63)):
        assert store.ask(get(b"a", revision=revision)) == latest, revision


def test_header_revision_is_that_of_the_store_not_the_one_asked_for(store: Store) -> None:
    store.fill(b"a", b"a", b"a")
    assert store.ask(get(b"a", revision=store.at(1))) == store.range_answer(3, [store.kv(b"a", b"a")])


def test_a_past_revision_shows_what_was_deleted_later(store: Store) -> None:
    store.fill(b"a", b"b")
    store.ask(delete(b"a"))
    assert store.keys(get(*EVERYTHING)) == [b"b"]
    assert store.keys(get(*EVERYTHING, revision=store.at(2))) == [b"a", b"b"]
    assert store.keys(get(*EVERYTHING, revision=store.at(1))) == [b"a"]


def test_a_future_revision_is_refused(store: Store) -> None:
    store.fill(b"a")
    assert store.refusal(get(b"a", revision=store.at(2))) == FUTURE
    assert store.refusal(get(b"a", revision=2**63 - 1)) == FUTURE
    assert store.ask(get(b"a", revision=store.at(1))) == store.range_answer(1, [store.kv(b"a", b"a")])


def test_below_the_compacted_revision_is_refused_and_at_it_is_readable(store: Store) -> None:
    store.fill(b"a", b"a", b"a")
    store.ask(compact(store.at(2)))
    assert store.refusal(get(b"a", revision=store.at(1))) == COMPACTED
    assert store.refusal(get(b"a", revision=1)) == COMPACTED
    assert store.ask(get(b"a", revision=store.at(2))) == store.range_answer(3, [store.kv(b"a", b"a", mod=2, version=2)])


def test_a_missing_key_at_a_bad_revision_is_refused_all_the_same(store: Store) -> None:
    assert store.refusal(get(b"nothing", revision=store.at(1))) == FUTURE
    assert store.refusal(get(b"z", b"a", revision=store.at(1))) == FUTURE
    assert store.refusal(get(b"nothing", revision=store.at(-1))) == COMPACTED


def test_a_negative_revision_in_a_transaction_is_compacted(store: Store) -> None:
    store.fill(b"a")
    assert store.refusal(txn(then=[get(b"a", revision=-1)])) == COMPACTED
    assert store.refusal(txn(then=[get(b"a", revision=-1), put(b"a")])) == COMPACTED


def test_serializable_gives_the_same_answer_on_a_member_that_is_up_to_date(store: Store) -> None:
    store.fill(b"a")
    for member in range(len(store.wire.endpoints)):
        linearizable = store.wire.call("etcdserverpb.KV/Range", get(b"a"), member).message
        serializable = store.wire.call("etcdserverpb.KV/Range", get(b"a", serializable=True), member).message
        assert serializable == linearizable


# --- limit, more, count -------------------------------------------------------------------------------------


def test_limit_cuts_and_count_ignores_it(store: Store) -> None:
    store.fill(b"a", b"b", b"c")
    kvs = [store.kv(b"a", b"a", 1), store.kv(b"b", b"b", 2), store.kv(b"c", b"c", 3)]
    for limit, kept in ((0, 3), (-1, 3), (1, 1), (2, 2), (3, 3), (4, 3), (2**63 - 1, 3)):
        expected = store.range_answer(3, kvs[:kept], count=3, more=kept < 3)
        assert store.ask(get(*EVERYTHING, limit=limit)) == expected, limit


def test_count_only_has_no_kvs_and_no_more(store: Store) -> None:
    store.fill(b"a", b"b", b"c")
    assert store.ask(get(*EVERYTHING, count_only=True, limit=1)) == store.range_answer(3, count=3)
    assert store.ask(get(*EVERYTHING, count_only=True, revision=store.at(2))) == store.range_answer(3, count=2)
    assert store.ask(get(b"zz", count_only=True)) == store.range_answer(3, count=0)


def test_keys_only_keeps_all_but_the_value(store: Store) -> None:
    store.fill(b"a", b"a")
    assert store.ask(get(b"a", keys_only=True)) == store.range_answer(2, [store.kv(b"a", mod=2, version=2)])


def test_count_ignores_filters_and_more_is_of_the_filtered(store: Store) -> None:
    store.fill(b"a", b"b", b"c", b"d")
    filtered = get(*EVERYTHING, min_mod_revision=store.at(2), limit=2)
    kvs = [store.kv(b"b", b"b", 2), store.kv(b"c", b"c", 3)]
    assert store.ask(filtered) == store.range_answer(4, kvs, count=4, more=True)
    filtered.limit = 3
    assert store.ask(filtered) == store.range_answer(4, [*kvs, store.kv(b"d", b"d", 4)], count=4)


# --- filters ------------------------------------------------------------------------------------------------


FILTERED: list[tuple[dict[str, int], list[bytes]]] = [
    ({"min_mod_revision": 3}, [b"a", b"c"]),
    ({"max_mod_revision": 3}, [b"b", b"c"]),
    ({"min_mod_revision": 3, "max_mod_revision": 3}, [b"c"]),
    ({"min_create_revision": 2}, [b"b", b"c"]),
    ({"max_create_revision": 2}, [b"a", b"b"]),
    ({"min_create_revision": 1, "max_create_revision": 1, "min_mod_revision": 4}, [b"a"]),
    ({"min_mod_revision": 4, "max_mod_revision": 3}, []),
    ({"min_mod_revision": 5}, []),
]


def test_filters_are_inclusive(store: Store) -> None:
    store.fill(b"a", b"b", b"c", b"a")
    for bounds, keys in FILTERED:
        moved = {name: store.at(revision) for name, revision in bounds.items()}
        assert store.keys(get(*EVERYTHING, **moved)) == keys, bounds


def test_negative_filters(store: Store) -> None:
    store.fill(b"a")
    assert store.keys(get(*EVERYTHING, min_mod_revision=-1)) == [b"a"]
    assert store.keys(get(*EVERYTHING, max_mod_revision=-1)) == []


def test_filter_then_sort_then_limit(store: Store) -> None:
    store.fill(b"a", b"b", b"c", b"d")
    request = get(*EVERYTHING, max_mod_revision=store.at(3), sort_order=DESCEND, sort_target=MOD, limit=2)
    assert store.keys(request) == [b"c", b"b"]


# --- sorting ------------------------------------------------------------------------------------------------


def _history_without_ties(store: Store) -> None:
    """Versions a 2, b 1, c 3; created b, a, c; last written b, c, a; values a "1", b "2", c "0"."""
    for key, value in ((b"b", b"2"), (b"a", b"x"), (b"c", b"x"), (b"c", b"x"), (b"c", b"0"), (b"a", b"1")):
        store.ask(put(key, value))


SORTED = {
    KEY: [b"a", b"b", b"c"],
    VERSION: [b"b", b"a", b"c"],
    CREATE: [b"b", b"a", b"c"],
    MOD: [b"b", b"c", b"a"],
    VALUE: [b"c", b"a", b"b"],
}


def test_sort_by_each_target(store: Store) -> None:
    """A target without an order ascends."""
    _history_without_ties(store)
    for target, keys in SORTED.items():
        assert store.keys(get(*EVERYTHING, sort_target=target, sort_order=ASCEND)) == keys, target
        assert store.keys(get(*EVERYTHING, sort_target=target, sort_order=DESCEND)) == keys[::-1], target
        assert store.keys(get(*EVERYTHING, sort_target=target)) == keys, target


def test_an_order_sorts_before_the_limit(store: Store) -> None:
    _history_without_ties(store)
    assert store.keys(get(*EVERYTHING, sort_target=VALUE, sort_order=ASCEND, limit=2)) == [b"c", b"a"]
    assert store.keys(get(*EVERYTHING, sort_target=KEY, sort_order=DESCEND, limit=1)) == [b"c"]


def test_an_implicit_order_sorts_after_the_limit_took_one_more(store: Store) -> None:
    """The quirk: without an order one key more than the limit is fetched in key order, then sorted, then cut."""
    _history_without_ties(store)
    assert store.keys(get(*EVERYTHING, sort_target=VALUE, limit=1)) == [b"a"]
    assert store.keys(get(*EVERYTHING, sort_target=VALUE, limit=2)) == [b"c", b"a"]
    assert store.keys(get(*EVERYTHING, sort_target=MOD, limit=1)) == [b"b"]


def test_a_filter_lifts_the_limit_of_an_implicit_order(store: Store) -> None:
    _history_without_ties(store)
    assert store.keys(get(*EVERYTHING, sort_target=VALUE, limit=1, min_mod_revision=1)) == [b"c"]


def test_a_sort_order_outside_its_enum(store: Store) -> None:
    """Known difference: 3.5.1 ignores it, 3.6.14 refuses it."""
    store.fill(b"a")
    if store.program == "etcd":
        assert store.keys(get(b"a", sort_order=7)) == [b"a"]
    else:
        for request in (get(b"a", sort_order=7), get(b"a", sort_order=-1), get(b"a", sort_target=9)):
            assert store.refusal(request) == INVALID_SORT
            assert store.refusal(txn(then=[request])) == INVALID_SORT
        assert store.refusal(get(b"", sort_order=7)) == EMPTY_KEY


@pytest.mark.parametrize(
    ("sent", "by_gogo"),
    [(b"\n\x01b\x12\x00", ("OK", 2)), (b"\n\x01b\x1a\x01\x00", ("INTERNAL", 0))],
    ids=["an empty range_end", "a limit in another wire type"],
)
def test_bytes_that_decoders_read_in_two_ways(store: Store, sent: bytes, by_gogo: tuple[str, int]) -> None:
    """Known difference: up to 3.6, gogo's decoder tells an empty range_end from none, and refuses other wire types."""
    store.fill(b"a", b"b", b"c")
    answer = store.wire.call("etcdserverpb.KV/Range", sent)
    found = answer.code, answer.message.count if answer.message is not None else 0
    assert found == (by_gogo if store.program == "etcd" else ("OK", 1))


def test_an_operation_given_twice_in_one_oneof(store: Store) -> None:
    """Known difference: up to 3.6, gogo's decoder keeps the later message; protocol buffers merge the two."""
    store.fill(b"a")
    twice = rpc_pb2.RequestOp(request_range=get(b"a")).SerializeToString()
    twice += rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(limit=1)).SerializeToString()
    answer = store.wire.call("etcdserverpb.KV/Txn", b"\x12" + bytes([len(twice)]) + twice)
    assert answer.code == ("INVALID_ARGUMENT" if store.program == "etcd" else "OK")
