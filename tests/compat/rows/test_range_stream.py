"""KV.RangeStream of etcd 3.7: merging its chunks gives the answer of Range. etcd 3.5.1 does not have it."""

from __future__ import annotations

from typing import Any

from raftkv.pb import rpc_pb2
from tests.cli.runner import run_ctl
from tests.compat.store import COMPACTED, EMPTY_KEY, EVERYTHING, FUTURE, Store, compact, get, put

RANGE_STREAM = "etcdserverpb.KV/RangeStream"
KEYS = [b"k%03d" % number for number in range(40)]


def _merged(store: Store, request: rpc_pb2.RangeRequest) -> tuple[rpc_pb2.RangeResponse, list[Any]]:
    ended, chunks = store.wire.stream(RANGE_STREAM, request)
    assert ended.code == "OK", ended
    parts = [chunk.range_response for chunk in chunks]
    whole = rpc_pb2.RangeResponse()
    for part in parts:
        whole.MergeFrom(part)
    return whole, parts


OPTIONS: list[dict[str, Any]] = [
    {}, {"limit": 7}, {"limit": 250}, {"limit": -1}, {"keys_only": True}, {"count_only": True},
    {"serializable": True}, {"revision": -1}, {"sort_order": rpc_pb2.RangeRequest.ASCEND},
]  # fmt: skip


def test_the_chunks_merge_to_the_range(raftkv_store: Store) -> None:
    raftkv_store.fill(*KEYS)
    # The last write may have been acknowledged by another member: let this one catch up before it answers by itself.
    raftkv_store.wire.call("etcdserverpb.KV/Range", get(KEYS[0]))
    for options in OPTIONS:
        request = get(*EVERYTHING, **options)
        expected = raftkv_store.wire.call("etcdserverpb.KV/Range", request).message
        whole, parts = _merged(raftkv_store, request)
        assert whole == expected, options
        assert len(parts[0].kvs) <= 10, options
        assert not any(part.HasField("header") or part.more or part.count for part in parts[:-1]), options
    request = get(*EVERYTHING, revision=raftkv_store.at(20))
    whole, _ = _merged(raftkv_store, request)
    assert whole == raftkv_store.wire.call("etcdserverpb.KV/Range", request).message
    assert whole.count == 20


def test_large_values_come_in_several_messages(raftkv_store: Store) -> None:
    for number in range(8):
        raftkv_store.ask(put(b"big%d" % number, bytes(1_000_000)))
    whole, parts = _merged(raftkv_store, get(*EVERYTHING))
    assert len(whole.kvs) == 8
    assert whole == raftkv_store.wire.call("etcdserverpb.KV/Range", get(*EVERYTHING)).message
    assert sum(part.ByteSize() for part in parts) > 8_000_000


def test_nothing_found(raftkv_store: Store) -> None:
    whole, parts = _merged(raftkv_store, get(b"nothing"))
    assert len(parts) == 1
    assert whole.count == 0
    assert whole.header.revision == raftkv_store.base


UNSTREAMED: list[tuple[dict[str, Any], str]] = [
    ({"sort_target": rpc_pb2.RangeRequest.MOD, "sort_order": rpc_pb2.RangeRequest.ASCEND}, "custom sort orders"),
    ({"sort_order": rpc_pb2.RangeRequest.DESCEND}, "custom sort orders"),
    ({"min_mod_revision": 1}, "revision filters"),
    ({"max_mod_revision": 1}, "revision filters"),
    ({"min_create_revision": 1}, "revision filters"),
    ({"max_create_revision": 1}, "revision filters"),
]


def test_ranges_that_cannot_be_streamed(raftkv_store: Store) -> None:
    for options, text in UNSTREAMED:
        ended, chunks = raftkv_store.wire.stream(RANGE_STREAM, get(*EVERYTHING, **options))
        assert (ended.code, ended.text) == ("UNIMPLEMENTED", f"RangeStream does not support {text}"), options
        assert chunks == []


def test_refusals_are_those_of_range(raftkv_store: Store) -> None:
    raftkv_store.fill(b"a", b"a", b"a")
    raftkv_store.ask(compact(raftkv_store.at(2)))
    for request, expected in (
        (get(b""), EMPTY_KEY),
        (get(b"a", revision=raftkv_store.at(4)), FUTURE),
        (get(b"a", revision=raftkv_store.at(1)), COMPACTED),
    ):
        ended, _ = raftkv_store.wire.stream(RANGE_STREAM, request)
        assert (ended.code, ended.text) == expected


def test_the_command_line_prints_the_same_with_and_without_chunks(raftkv_store: Store) -> None:
    raftkv_store.fill(*KEYS)
    words = ["--endpoints", raftkv_store.wire.endpoints[0], "get", "k", "--prefix", "--limit", "250", "-w", "fields"]

    def printed(*more: str) -> list[bytes]:
        ran = run_ctl([*words, *more])
        assert (ran.code, ran.errors) == (0, "")
        return ran.output.splitlines()

    assert printed("--stream") == printed()
    refused = run_ctl([*words, "--stream", "--order", "DESCEND"])
    assert (refused.code, refused.errors) == (
        1,
        "Error: rpc error: code = Unimplemented desc = RangeStream does not support custom sort orders\n",
    )
