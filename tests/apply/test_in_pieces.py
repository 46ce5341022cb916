"""An entry applied in the smallest pieces has the same result as at once, and readers never see it half applied."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv import errors
from raftkv.apply import applier, check, compares, leases, ranges, txn, wire
from raftkv.apply.applier import Outcome
from raftkv.apply.wire import Kind
from raftkv.pb import kv_pb2, raft_pb2, rpc_pb2
from raftkv.storage import mvcc, selection
from raftkv.storage.mvcc_range import PinnedView
from raftkv.storage.overlay import Overlay
from raftkv.storage.selection import finish
from tests.apply.arbitrary import build
from tests.apply.machine import KINDS, Machine, keys_by_turn
from tests.apply.test_total import _state, _told
from tests.compat.store import delete, put
from tests.compat.store import txn as make_txn

KEYS = (b"a", b"b", b"c", b"d", b"e")
ENDS = (b"", b"", b"\0", b"b", b"d", b"z")
EVERYTHING = rpc_pb2.RangeRequest(key=b"\0", range_end=b"\0")


@pytest.fixture(autouse=True)
def _smallest_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compares, mvcc, selection):
        monkeypatch.setattr(module, "KEYS_PER_PIECE", 1)
    monkeypatch.setattr(leases, "_KEYS_PER_PIECE", 1)
    monkeypatch.setattr(leases, "_RUN_KEYS", 2)


def _request(rng: Random) -> Any:
    kind = rng.choice(("put", "put", "put", "delete", "txn", "txn", "txn", "grant", "revoke", "expire", "compact"))
    key, end = rng.choice(KEYS), rng.choice(ENDS)
    if kind == "put":
        return put(key, rng.choice((b"1", b"2")), lease=rng.choice((0, 0, 1, 2)), prev_kv=rng.random() < 0.5)
    if kind == "delete":
        return rpc_pb2.DeleteRangeRequest(key=key, range_end=end, prev_kv=rng.random() < 0.5)
    if kind == "txn":
        return _small(rng, build(rng, rpc_pb2.TxnRequest, 4))
    if kind == "grant":
        return rpc_pb2.LeaseGrantRequest(ID=rng.choice((1, 2)), TTL=5)
    if kind == "revoke":
        return rpc_pb2.LeaseRevokeRequest(ID=rng.choice((1, 2)))
    if kind == "expire":
        return raft_pb2.LeaseDecision(term=1, ids=[1, 2, 1])
    return rpc_pb2.CompactionRequest(revision=rng.randrange(1, 40))


def _small(rng: Random, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnRequest:
    """Let numbers and keys of an arbitrary txn be such that compares hold and revisions exist now and then."""
    for compare in request.compare:
        compare.key, compare.range_end = rng.choice(KEYS), rng.choice(ENDS)
        if compare.WhichOneof("target_union") == "version":
            compare.version = rng.choice((0, 1, 2))
    for operation in (*request.success, *request.failure):
        if operation.HasField("request_range"):
            operation.request_range.revision = rng.choice((0, 0, 1, 5))
        elif operation.HasField("request_put"):
            operation.request_put.lease = rng.choice((0, 0, 0, 1))
        elif operation.HasField("request_txn"):
            _small(rng, operation.request_txn)
    return request


def _in_pieces(machine: Machine, kind: int, body: bytes) -> tuple[Outcome, int]:
    """Apply with a look at the store after each piece; the outcome and the number of pieces."""
    store, pieces = machine.store, 0
    outcome = machine.applier.begin(kind, body)
    while not isinstance(outcome, Outcome):
        before = {revision: store.range(b"\0", b"\0", revision=revision).kvs for revision in (store.revision,)}
        try:
            next(outcome)
        except StopIteration as end:
            outcome = end.value
            break
        pieces += 1
        if store.revision in before:
            assert store.range(b"\0", b"\0").kvs == before[store.revision]
            assert store.range(b"\0", b"\0", revision=store.revision, count_only=True).count == len(
                before[store.revision]
            )
            found = {kv_pb2.KeyValue.FromString(kv).key: kv for kv in before[store.revision]}
            assert [store.get(key) for key in KEYS] == [found.get(key) for key in KEYS]
        store.commit()
        assert store.durable_index < store.applied_index + 1
    store.set_applied(store.applied_index + 1, 1)
    return outcome, pieces


def _read(view: PinnedView, outcome: Outcome) -> tuple[int, bytes, str]:
    """What a caller hears whose answer is read from a view."""
    if outcome.read is None:
        return _told(outcome)
    return outcome.revision, b"".join(finish(outcome.read(view))[1]), repr(outcome.error)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_pieces_come_to_the_same(seed: int) -> None:
    """Read the answer long after the entry was applied, when others have changed and compacted the keys."""
    rng = Random(seed)
    whole = Machine(at_once_max=10**9)
    pieces = Machine(at_once_max=0)
    for machine in (whole, pieces):
        machine.applier.term = 1
    unread: list[tuple[PinnedView, Outcome, object]] = []
    for _ in range(40):
        request = _request(rng)
        kind = Kind.LEASE_EXPIRE if isinstance(request, raft_pb2.LeaseDecision) else KINDS[type(request)][0]
        body = request.SerializeToString()
        expected = _told(whole.applier.apply(kind, body))
        whole.store.set_applied(whole.store.applied_index + 1, 1)
        outcome, _ = _in_pieces(pieces, kind, body)
        unread.append((pieces.store.pin(), outcome, expected))
        while unread and rng.random() < 0.4:
            view, outcome, expected = unread.pop(rng.randrange(len(unread)))
            assert _read(view, outcome) == expected, request
            view.let_go()
            while pieces.store.compaction_step():
                pieces.store.commit()
    for view, outcome, expected in unread:
        assert _read(view, outcome) == expected
    assert _state(whole) == _state(pieces) == _state(pieces.reopened())


@pytest.mark.parametrize("is_held", [True, False])
def test_an_answer_of_compacted_changes_is_not_read(is_held: bool) -> None:
    """A compaction at the revision of a txn drops what its own later changes replaced."""
    machine = Machine(at_once_max=0)
    machine.apply(put(b"a", b"1"))
    before = machine.store.revision
    answered = make_txn(then=[EVERYTHING, put(b"a", b"2", prev_kv=True), EVERYTHING, delete(b"a", prev_kv=True)])
    outcome, _ = _in_pieces(machine, Kind.TXN, answered.SerializeToString())
    view = machine.store.pin()
    if not is_held:
        view.let_go()
    machine.apply(rpc_pb2.CompactionRequest(revision=before + 1))
    machine.apply(put(b"b"))
    while machine.store.compaction_step():
        machine.store.commit()
    if not is_held:
        with pytest.raises(errors.RequestTimeoutError):
            _read(view, outcome)
        return
    answer = rpc_pb2.TxnResponse.FromString(_read(view, outcome)[1])
    found = [kv.value for one in answer.responses for kv in one.response_range.kvs]
    replaced = (
        answer.responses[1].response_put.prev_kv.value,
        answer.responses[3].response_delete_range.prev_kvs[0].value,
    )
    assert (found, replaced) == ([b"1", b"2"], (b"1", b"2"))
    assert [one.response_range.header.revision for one in answer.responses[::2]] == [before, before + 1]


@pytest.mark.interpreted
def test_long_entries_have_pieces() -> None:
    machine = Machine(at_once_max=10)
    for number in range(20):
        machine.apply(put(b"k%02d" % number))
        machine.apply(put(b"m%02d" % number))
    machine.apply(rpc_pb2.LeaseGrantRequest(ID=1, TTL=5))
    for number in range(20):
        machine.apply(put(b"l%02d" % number, lease=1))
    for kind, request in (
        (Kind.TXN, make_txn(then=[delete(b"m", b"n"), put(b"x")])),
        (Kind.DELETE_RANGE, delete(b"k", b"l", prev_kv=True)),
        (Kind.LEASE_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=1)),
    ):
        outcome, pieces = _in_pieces(machine, kind, request.SerializeToString())
        assert outcome.error is None
        assert pieces >= 20


@pytest.mark.parametrize("at_once_max", [10_000, 1], ids=["at once", "in pieces"])
def test_reads_of_a_txn_are_left_out_without_a_waiter(at_once_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(at_once_max=at_once_max)
    for key in KEYS:
        machine.answer(put(key, b"v"))
    gone = delete(b"a", b"c", prev_kv=True)
    request = make_txn(then=[EVERYTHING, put(b"f", b"v"), EVERYTHING, make_txn(then=[EVERYTHING]), gone])
    asked = machine.reopened()
    answer = rpc_pb2.TxnResponse.FromString(asked.apply(request).body)
    assert len(answer.responses[2].response_range.kvs) == len(KEYS) + 1
    assert len(answer.responses[4].response_delete_range.prev_kvs) == 2

    def never(*_: object, **__: object) -> None:
        raise AssertionError("no caller waits for that")

    monkeypatch.setattr(ranges, "execute", never)
    monkeypatch.setattr(ranges, "in_pieces", never)
    monkeypatch.setattr(wire, "delete_range_body", lambda deleted, prev_kvs: never() if prev_kvs else b"")
    outcome = machine.apply(request, is_answered=False)
    assert (outcome.error, outcome.revision) == (None, asked.store.revision)
    assert machine.hash() == asked.hash()


@pytest.mark.interpreted
def test_the_answer_of_an_entry_is_not_read_while_it_is_applied(machine, monkeypatch):
    """A txn that read 500 MB for its answer had all other writes wait for more than a second."""
    for number in range(600):
        machine.apply(put(b"k%03d" % number, b"v"))
    gone = delete(b"k", b"k5", prev_kv=True)
    request = make_txn(then=[EVERYTHING, put(b"k000", prev_kv=True), make_txn(then=[EVERYTHING]), gone, EVERYTHING])
    load, loaded = Overlay.load_all, [0]

    def counted(overlay: Overlay, revisions: list[int], size_bytes_max: int) -> list[bytes]:
        kvs = load(overlay, revisions, size_bytes_max)
        loaded[0] += len(kvs)
        return kvs

    monkeypatch.setattr(Overlay, "load_all", counted)
    monkeypatch.setattr(Overlay, "load", lambda overlay, key: pytest.fail("a value was read"))
    outcome, _ = _count_pieces(machine, request)
    assert loaded == [0]
    monkeypatch.undo()
    answer = rpc_pb2.TxnResponse.FromString(_read(machine.store.pin(), outcome)[1])
    assert [len(one.response_range.kvs) for one in answer.responses] == [600, 0, 0, 0, 100]
    assert len(answer.responses[3].response_delete_range.prev_kvs) == 500


DELETED = 700
ALL = rpc_pb2.Compare(key=b"k", range_end=b"l", target=rpc_pb2.Compare.VERSION, version=0)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "request_",
    [
        delete(b"k", b"l"),
        rpc_pb2.DeleteRangeRequest(key=b"k", range_end=b"l", prev_kv=True),
        make_txn(then=[delete(b"k", b"l")]),
        make_txn([ALL], [put(b"x")]),
    ],
    ids=["deletion", "deletion with values", "deletion in a txn", "compare"],
)
def test_turn_looks_at_few_keys_however_many_were_deleted(machine: Machine, request_: Any) -> None:
    """They stay in the index until a compaction: to delete a million of them anew took a turn of half a second."""
    for number in range(DELETED):
        machine.apply(put(b"k%03d" % number))
    machine.apply(delete(b"k", b"l"))
    machine.apply(put(b"k999"))
    turns = keys_by_turn(machine, KINDS[type(request_)][0], request_.SerializeToString())
    assert sum(turns) >= DELETED
    assert max(turns) < DELETED // 2


def test_txn_too_large_for_one_revision_is_refused_before_any_change() -> None:
    machine = Machine(changes_max=10)
    for number in range(11):
        machine.apply(put(b"k%02d" % number))
    before = machine.store.revision
    for request in (delete(b"k", b"l"), make_txn(then=[delete(b"k", b"l")]), make_txn(then=[delete(b"a", b"\0")])):
        with pytest.raises(errors.TooManyChangesError, match="one revision holds at most 10"):
            machine.answer(request)
    assert machine.store.revision == before
    assert machine.answer(delete(b"k", b"k10")).deleted == 10


def test_a_lease_with_more_keys_than_a_revision_holds_ends_in_several() -> None:
    machine = Machine(changes_max=4)
    machine.apply(rpc_pb2.LeaseGrantRequest(ID=1, TTL=5))
    for number in range(10):
        machine.apply(put(b"k%02d" % number, lease=1))
    before = machine.store.revision
    assert machine.apply(rpc_pb2.LeaseRevokeRequest(ID=1)).error is None
    assert machine.store.revision == before + 3
    assert machine.store.range(b"\0", b"\0").count == 0


def _compared(count: int) -> rpc_pb2.TxnRequest:
    compares_ = [
        rpc_pb2.Compare(key=b"k%02d" % number, target=rpc_pb2.Compare.VALUE, result=rpc_pb2.Compare.NOT_EQUAL)
        for number in range(count)
    ]
    return rpc_pb2.TxnRequest(compare=compares_, success=make_txn(then=[put(b"x")]).success)


def _gets(count: int) -> rpc_pb2.TxnRequest:
    return make_txn(then=[put(b"x"), *(rpc_pb2.RangeRequest(key=b"k%02d" % number) for number in range(count))])


def _kept(count: int) -> rpc_pb2.TxnRequest:
    return make_txn(then=[rpc_pb2.PutRequest(key=b"k%02d" % number, ignore_value=True) for number in range(count)])


def _replaced(count: int) -> rpc_pb2.TxnRequest:
    return make_txn(then=[put(b"k%02d" % number, prev_kv=True) for number in range(count)])


def _deleted(count: int) -> rpc_pb2.TxnRequest:
    return make_txn(then=[delete(b"k%02d" % number, prev_kv=True) for number in range(count)])


@pytest.mark.parametrize("make", [_compared, _gets, _kept, _replaced, _deleted])
def test_values_are_read_a_few_at_once(machine: Machine, make: Callable[[int], rpc_pb2.TxnRequest]) -> None:
    # A request of 5 KB that read 128 values of 1.4 MB took a turn of half a second on every member.
    for number in range(txn.VALUES_AT_ONCE + 1):
        machine.apply(put(b"k%02d" % number, b"value"))
    few, many = (make(txn.VALUES_AT_ONCE + more).SerializeToString() for more in (0, 1))
    assert isinstance(machine.applier.begin(Kind.TXN, few), Outcome)
    machine.store.set_applied(machine.store.applied_index + 1, 1)
    outcome, pieces = _in_pieces(machine, Kind.TXN, many)
    assert outcome.error is None
    assert pieces > 1


def test_previous_values_are_read_a_few_at_once(machine: Machine) -> None:
    for number in range(txn.VALUES_AT_ONCE + 1):
        machine.apply(put(b"k%02d" % number, b"value"))
    request = delete(b"k", b"l", prev_kv=True).SerializeToString()
    assert isinstance(machine.applier.begin(Kind.DELETE_RANGE, request, is_answered=False), Outcome)
    for number in range(txn.VALUES_AT_ONCE + 1):
        machine.apply(put(b"k%02d" % number, b"value"))
    assert not isinstance(machine.applier.begin(Kind.DELETE_RANGE, request), Outcome)


def _ranges(count: int, each: rpc_pb2.RangeRequest, nested: int = 64) -> rpc_pb2.TxnRequest:
    """A txn of a put and so many nested ones of 64 times the same range."""
    return make_txn(then=[put(b"x"), *([make_txn(then=[each] * nested)] * (count // nested))])


def _count_pieces(machine: Machine, request: rpc_pb2.TxnRequest) -> tuple[Outcome, int]:
    work = machine.applier.begin(Kind.TXN, request.SerializeToString())
    assert not isinstance(work, Outcome)
    pieces = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            machine.store.set_applied(machine.store.applied_index + 1, 1)
            return end.value, pieces
        pieces += 1


@pytest.mark.parametrize(
    "each",
    [
        rpc_pb2.RangeRequest(key=b"k"),
        rpc_pb2.RangeRequest(key=b"k", range_end=b"l"),
        rpc_pb2.RangeRequest(key=b"k", range_end=b"l", count_only=True),
        delete(b"l", b"m"),
    ],
)
def test_many_small_operations_are_answered_and_pause(each: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # 14,000 counts, or deletions of nothing, were one piece of 0.16 s.
    monkeypatch.setattr(selection, "KEYS_PER_PIECE", 256)
    machine = Machine()
    machine.apply(put(b"k", b"v"))
    outcome, pieces = _count_pieces(machine, _ranges(63 * 64, each))
    _, body, _ = _read(machine.store.pin(), outcome)
    assert len(rpc_pb2.TxnResponse.FromString(body).responses) == 1 + 63
    assert pieces >= 63 * 64 // txn.OPERATIONS_PER_PIECE


@pytest.mark.interpreted
def test_an_error_in_a_later_piece_poisons_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(at_once_max=1)
    for key in KEYS:
        machine.apply(put(key))
    work = machine.applier.begin(Kind.DELETE_RANGE, delete(b"a", b"z").SerializeToString())
    assert not isinstance(work, Outcome)
    next(work)
    monkeypatch.setattr(machine.store._index, "tombstone", lambda key, revision: 1 // 0)
    with pytest.raises(errors.InvariantError, match="ZeroDivisionError"):
        next(work)
    with pytest.raises(errors.InvariantError):
        machine.store.set_applied(machine.store.applied_index + 1, 1)


def _model(machine: Machine, compare: rpc_pb2.Compare) -> bool:
    kvs = [kv_pb2.KeyValue.FromString(kv) for kv in machine.store.range(compare.key, compare.range_end).kvs]
    if not kvs:
        return compare.target != rpc_pb2.Compare.VALUE and _matches(compare, kv_pb2.KeyValue())
    return all(_matches(compare, kv) for kv in kvs)


def _matches(compare: rpc_pb2.Compare, kv: kv_pb2.KeyValue) -> bool:
    have, want = {
        rpc_pb2.Compare.VERSION: (kv.version, compare.version),
        rpc_pb2.Compare.CREATE: (kv.create_revision, compare.create_revision),
        rpc_pb2.Compare.MOD: (kv.mod_revision, compare.mod_revision),
        rpc_pb2.Compare.VALUE: (kv.value, compare.value),
        rpc_pb2.Compare.LEASE: (kv.lease, compare.lease),
    }.get(compare.target, (0, 0))
    order = (have > want) - (have < want)
    return {0: order == 0, 1: order > 0, 2: order < 0, 3: order != 0}.get(compare.result, True)


COMPARES = st.builds(
    lambda key, end, target, result, field, number, value: rpc_pb2.Compare(
        key=key, range_end=end, target=target, result=result, **{field: value if field == "value" else number}
    ),
    st.sampled_from((*KEYS, b"z")),
    st.sampled_from(ENDS),
    st.sampled_from((0, 1, 2, 3, 4, 7)),
    st.sampled_from((0, 1, 2, 3, 9)),
    st.sampled_from(("version", "create_revision", "mod_revision", "value", "lease")),
    st.integers(-1, 8),
    st.sampled_from((b"", b"1", b"2", b"3")),
)
WRITES = st.lists(
    st.tuples(st.sampled_from(KEYS), st.sampled_from((b"", b"1", b"2", None)), st.sampled_from((0, 0, 100, 101))),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(WRITES, st.lists(COMPARES, max_size=6))
def test_compares(writes: list[tuple[bytes, bytes | None, int]], wanted: list[rpc_pb2.Compare]) -> None:
    machine = Machine()
    for key, value, lease in writes:
        machine.apply(delete(key) if value is None else put(key, value, lease=lease))
    expected = all(_model(machine, compare) for compare in wanted)
    assert finish(compares.all_hold(machine.store, wanted)) == expected
    request = rpc_pb2.TxnRequest(compare=wanted)
    assert txn.choose_path(machine.store, request, txn.Budget(10**9, 10**9)).succeeded == expected
    for compare in wanted:
        if not compare.range_end:
            parts = compare.key, compare.target, compare.result, compares.wanted(compare)
            assert compares.holds(machine.store, *parts) == _model(machine, compare)


def test_the_limits_are_what_the_store_holds() -> None:
    assert applier.CHANGES_MAX == 1 << 24
    assert check.OPERATIONS_TOTAL_MAX >= 4 * 128
