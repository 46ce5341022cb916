"""KV.RangeStream of etcd 3.7: merging its chunks gives the answer of Range. etcd 3.5.1 does not have it."""

from __future__ import annotations

from typing import Any

import pytest

from raftkv.pb import rpc_pb2
from tests.compat.store import COMPACTED, EMPTY_KEY, EVERYTHING, FUTURE, Store, compact, get, put
from tests.procs import Cluster

RANGE_STREAM = "etcdserverpb.KV/RangeStream"
KEYS = [b"k%03d" % number for number in range(300)]


@pytest.fixture
def cluster(raftkv: Cluster) -> Cluster:
    """Only raftkv: there is no oracle at hand for this method."""
    return raftkv


def _merged(store: Store, request: rpc_pb2.RangeRequest) -> tuple[rpc_pb2.RangeResponse, list[Any]]:
    ended, chunks = store.wire.stream(RANGE_STREAM, request)
    assert ended.code == "OK", ended
    parts = [chunk.range_response for chunk in chunks]
    whole = rpc_pb2.RangeResponse()
    for part in parts:
        whole.MergeFrom(part)
    return whole, parts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"limit": 7},
        {"limit": 250},
        {"limit": -1},
        {"keys_only": True},
        {"count_only": True},
        {"serializable": True},
        {"revision": -1},
        {"sort_order": rpc_pb2.RangeRequest.ASCEND},
    ],
    ids=str,
)
def test_the_chunks_merge_to_the_range(store: Store, options: dict[str, Any]) -> None:
    store.fill(*KEYS)
    request = get(*EVERYTHING, **options)
    expected = store.wire.call("etcdserverpb.KV/Range", request).message
    whole, parts = _merged(store, request)
    assert whole == expected
    assert len(parts[0].kvs) <= 10
    assert not any(part.HasField("header") or part.more or part.count for part in parts[:-1])


def test_a_past_revision(store: Store) -> None:
    store.fill(*KEYS)
    request = get(*EVERYTHING, revision=store.at(150))
    whole, _ = _merged(store, request)
    assert whole == store.wire.call("etcdserverpb.KV/Range", request).message
    assert whole.count == 150


def test_large_values_come_in_several_messages(store: Store) -> None:
    for number in range(8):
        store.ask(put(b"big%d" % number, bytes(1_000_000)))
    whole, parts = _merged(store, get(*EVERYTHING))
    assert len(whole.kvs) == 8
    assert whole == store.wire.call("etcdserverpb.KV/Range", get(*EVERYTHING)).message
    assert sum(part.ByteSize() for part in parts) > 8_000_000


def test_nothing_found(store: Store) -> None:
    whole, parts = _merged(store, get(b"nothing"))
    assert len(parts) == 1
    assert whole.count == 0
    assert whole.header.revision == store.base


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sort_target": rpc_pb2.RangeRequest.MOD}, "custom sort orders"),
        ({"sort_order": rpc_pb2.RangeRequest.DESCEND}, "custom sort orders"),
        ({"min_mod_revision": 1}, "revision filters"),
        ({"max_mod_revision": 1}, "revision filters"),
        ({"min_create_revision": 1}, "revision filters"),
        ({"max_create_revision": 1}, "revision filters"),
    ],
    ids=str,
)
def test_what_cannot_be_streamed(store: Store, options: dict[str, int], text: str) -> None:
    ended, chunks = store.wire.stream(RANGE_STREAM, get(*EVERYTHING, **options))
    assert (ended.code, ended.text) == ("UNIMPLEMENTED", f"RangeStream does not support {text}")
    assert chunks == []


def test_refusals_are_those_of_range(store: Store) -> None:
    store.fill(b"a", b"a", b"a")
    store.ask(compact(store.at(2)))
    for request, expected in (
        (get(b""), EMPTY_KEY),
        (get(b"a", revision=store.at(4)), FUTURE),
        (get(b"a", revision=store.at(1)), COMPACTED),
    ):
        ended, _ = store.wire.stream(RANGE_STREAM, request)
        assert (ended.code, ended.text) == expected
