"""The differential test must be able to fail: planted lies are seen, named, replayed and made small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raftkv.pb import kv_pb2, rpc_pb2
from tests.compat.differential.compare import HeaderWatch, allowed_difference, difference
from tests.compat.differential.generator import Generator, Step, View
from tests.compat.differential.requests import Player
from tests.compat.wire import Answer, Pending, Wire
from tests.procs import ETCD_FAST, Cluster

HEADER = rpc_pb2.ResponseHeader(cluster_id=1, member_id=2, revision=9, raft_term=3)
KV = kv_pb2.KeyValue(key=b"a", value=b"1", create_revision=5, mod_revision=6, version=2)


def _range_step(**fields: Any) -> Step:
    return Step("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=b"a", range_end=b"z", **fields))


def _range_answer(*kvs: kv_pb2.KeyValue, **fields: Any) -> Answer:
    return Answer("OK", "", rpc_pb2.RangeResponse(header=HEADER, kvs=kvs, **fields))


# --- what counts as a difference ----------------------------------------------------------------------------

LIES: dict[str, Callable[[rpc_pb2.RangeResponse], object]] = {
    "header.revision": lambda response: setattr(response.header, "revision", 8),
    "count": lambda response: setattr(response, "count", 2),
    "more": lambda response: setattr(response, "more", True),
    "kvs (1 against 0)": lambda response: response.ClearField("kvs"),
    "kvs[0].version": lambda response: setattr(response.kvs[0], "version", 3),
    "kvs[0].lease": lambda response: setattr(response.kvs[0], "lease", 1),
}


@pytest.mark.parametrize("where", LIES)
def test_every_field_counts(where: str) -> None:
    oracle, ours = _range_answer(KV, count=1), _range_answer(KV, count=1)
    assert difference(_range_step(), oracle, ours) is None
    LIES[where](ours.message)
    assert difference(_range_step(), oracle, ours) == f"fields: {where}"


def test_an_empty_message_is_not_an_absent_one() -> None:
    step = Step("etcdserverpb.KV/Put", rpc_pb2.PutRequest(key=b"a", prev_kv=True))
    absent = Answer("OK", "", rpc_pb2.PutResponse(header=HEADER))
    empty = Answer("OK", "", rpc_pb2.PutResponse(header=HEADER, prev_kv=kv_pb2.KeyValue()))
    assert difference(step, absent, empty) == "fields: prev_kv (present: False)"


def test_ids_and_term_of_the_cluster_may_differ() -> None:
    other = _range_answer(KV)
    other.message.header.cluster_id, other.message.header.member_id, other.message.header.raft_term = 7, 8, 9
    assert difference(_range_step(), _range_answer(KV), other) is None


def _versions(*pairs: tuple[bytes, int]) -> list[kv_pb2.KeyValue]:
    return [kv_pb2.KeyValue(key=key, version=version) for key, version in pairs]


BY_VERSION = {"sort_order": rpc_pb2.RangeRequest.ASCEND, "sort_target": rpc_pb2.RangeRequest.VERSION}


def test_order_among_equal_sort_keys_is_free() -> None:
    one = _range_answer(*_versions((b"a", 1), (b"b", 1), (b"c", 2)))
    other = _range_answer(*_versions((b"b", 1), (b"a", 1), (b"c", 2)))
    assert difference(_range_step(**BY_VERSION), one, other) is None
    assert difference(_range_step(), one, other) is not None
    swapped = _range_answer(*_versions((b"c", 2), (b"a", 1), (b"b", 1)))
    assert difference(_range_step(**BY_VERSION), one, swapped) is not None


def test_which_equals_a_limit_keeps_is_free_but_not_how_many() -> None:
    step = _range_step(limit=2, **BY_VERSION)
    one = _range_answer(*_versions((b"a", 1), (b"b", 2)), more=True)
    other = _range_answer(*_versions((b"a", 1), (b"c", 2)), more=True)
    assert difference(step, one, other) is None
    assert difference(step, one, _range_answer(*_versions((b"a", 1)), more=True)) is not None
    assert difference(step, one, _range_answer(*_versions((b"d", 1), (b"c", 2)), more=True)) is not None


def test_ties_are_settled_inside_transactions() -> None:
    request = rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_range=_range_step(**BY_VERSION).request)])

    def answer(*keys: bytes) -> Answer:
        part = rpc_pb2.ResponseOp(response_range=_range_answer(*_versions(*((key, 1) for key in keys))).message)
        return Answer("OK", "", rpc_pb2.TxnResponse(header=HEADER, succeeded=True, responses=[part]))

    step = Step("etcdserverpb.KV/Txn", request)
    assert difference(step, answer(b"a", b"b"), answer(b"b", b"a")) is None
    assert difference(step, answer(b"a", b"b"), answer(b"b", b"c")) is not None


def test_only_nonsense_sorts_may_be_refused() -> None:
    refused = Answer("INVALID_ARGUMENT", "etcdserver: invalid sort option", None)
    nonsense = _range_step(sort_order=7)
    assert allowed_difference(nonsense, _range_answer(KV), refused) == "sort-outside-enum"
    assert allowed_difference(_range_step(sort_order=1), _range_answer(KV), refused) is None
    assert allowed_difference(nonsense, _range_answer(KV), _range_answer()) is None


def test_header_rules_within_a_cluster() -> None:
    def problem(*headers: rpc_pb2.ResponseHeader) -> str | None:
        watch = HeaderWatch()
        found = [watch.problem(0, Answer("OK", "", rpc_pb2.PutResponse(header=header))) for header in headers]
        return found[-1]

    def header(**changes: int) -> rpc_pb2.ResponseHeader:
        return rpc_pb2.ResponseHeader(**{"cluster_id": 1, "member_id": 2, "raft_term": 3, **changes})

    assert problem(header(), header(raft_term=4)) is None
    assert "raft_term" in (problem(header(), header(raft_term=2)) or "")
    assert "member_id" in (problem(header(), header(member_id=9)) or "")
    assert "cluster_id" in (problem(header(), header(cluster_id=9)) or "")
    assert "cluster_id" in (problem(header(cluster_id=0)) or "")


# --- the stream ---------------------------------------------------------------------------------------------


def _stream(seed: int, length: int = 400) -> list[Step]:
    generator = Generator(seed, View(base=1, revision=50, compacted=10))
    return [generator.next_step() for _ in range(length)]


def test_the_stream_has_every_method_and_every_range_field() -> None:
    steps = _stream(3, 3000)
    assert {step.method.partition("/")[2] for step in steps} == {"Put", "Range", "DeleteRange", "Txn", "Compact"}
    ranges = [step.request for step in steps if isinstance(step.request, rpc_pb2.RangeRequest)]
    used = {descriptor.name for request in ranges for descriptor, _ in request.ListFields()}
    assert used == set(rpc_pb2.RangeRequest.DESCRIPTOR.fields_by_name)


# --- the whole, with a server that lies ---------------------------------------------------------------------


class LyingPending:
    """Gives a wrong version for the key `b` once it was overwritten three times."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def answer(self) -> Answer:
        answer = self._pending.answer()
        if isinstance(answer.message, rpc_pb2.RangeResponse):
            for kv in answer.message.kvs:
                if kv.key == b"b" and kv.version > 3:
                    kv.version -= 1
        return answer


class LyingWire(Wire):
    """A connection to a server with a bug."""

    def start(self, *arguments: Any, **options: Any) -> Any:
        return LyingPending(super().start(*arguments, **options))


@pytest.mark.long
def test_a_planted_bug_is_found_replayed_and_made_small() -> None:
    with (
        Cluster(ETCD_FAST) as first,
        Cluster(ETCD_FAST) as second,
        Wire(first.endpoints) as oracle,
        LyingWire(second.endpoints) as tested,
    ):
        report = Player(oracle, tested, seed=4).run(3000, differences_max=1)
    assert len(report.differences) == 1, report.describe()
    found = report.differences[0]
    assert "version" in found.what
    assert found.reproduced
    assert len(found.history) <= 6, found.describe()
    assert isinstance(found.history[-1].request, rpc_pb2.RangeRequest)
    assert "b (tested)" in found.describe()
