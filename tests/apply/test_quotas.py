"""Prefix quotas: use covers all kept data, equally on all members; a refused write would have grown a full prefix."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv import errors
from raftkv.apply import check, compares, leases, quotas
from raftkv.apply.applier import Outcome
from raftkv.apply.quotas import COUNT_ON, QUOTAS_MAX, REMOVE, RUNS, History, kept_bytes
from raftkv.apply.wire import Kind, versioned
from raftkv.pb import admin_pb2, kv_pb2, rpc_pb2
from raftkv.storage import mvcc, schema, selection
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.revision import SUB_BITS, from_key, is_tombstone
from tests.apply.arbitrary import build
from tests.apply.machine import KINDS, Machine, keys_by_turn
from tests.compat.store import delete, put, txn

KEYS = (b"", b"a", b"ab", b"ab1", b"ab2", b"b", b"b\xff", b"\xff", b"\xff\xff")
PREFIXES = (b"", b"a", b"ab", b"b", b"\xff", b"\xff\xff", b"c")
ENDS = (b"", b"", b"\0", b"ac", b"b", b"c", b"\xff")


def apply(machine: Machine, request: Any) -> Outcome:
    """Return it as an entry, with its bytes."""
    if isinstance(request, admin_pb2.QuotaSetRequest):
        kind, body = Kind.HISTORY_QUOTA, versioned(Kind.HISTORY_QUOTA, request.SerializeToString())
    else:
        kind, body = KINDS[type(request)][0], request.SerializeToString()
    outcome = machine.applier.apply(kind, body)
    machine.store.set_applied(machine.store.applied_index + 1, 1)
    return outcome


def set_quota(prefix: bytes, bytes_max: int = 0, keys_max: int = 0) -> admin_pb2.QuotaSetRequest:
    return admin_pb2.QuotaSetRequest(prefix=prefix, bytes_max=bytes_max, keys_max=keys_max)


def remove(prefix: bytes) -> admin_pb2.QuotaSetRequest:
    return set_quota(prefix, REMOVE, REMOVE)


def counted(machine: Machine, prefix: bytes) -> int:
    """Keys that exist below a prefix."""
    # An entry that no service has checked can have an empty key.
    kvs = [kv_pb2.KeyValue.FromString(kv) for kv in machine.store.range(b"", b"\0").kvs]
    return sum(kv.key.startswith(prefix) for kv in kvs)


def kept(machine: Machine, prefix: bytes) -> int:
    """Bytes of the revisions below a prefix that compactions leave, by a look at each."""
    revisions: dict[bytes, list[tuple[bytes, int]]] = {}
    for revision_key, data in machine.store.history(0, machine.store.revision):
        kv = kv_pb2.KeyValue.FromString(data)
        if kv.key.startswith(prefix):
            revisions.setdefault(kv.key, []).append((revision_key, kept_bytes(len(kv.key) + len(kv.value))))
    compacted, total = machine.store.compact_revision, 0
    for changes in revisions.values():
        for (revision_key, size), newer in zip(changes, [*changes[1:], None], strict=True):
            main = from_key(revision_key) >> SUB_BITS
            newer_main = from_key(newer[0]) >> SUB_BITS if newer else compacted + 1
            is_deleted = is_tombstone(revision_key) and main < compacted
            total += 0 if newer_main <= compacted or is_deleted else size
    return total


def used(machine: Machine) -> dict[bytes, tuple[int, int]]:
    return {one.prefix: (one.bytes_used, one.keys_used) for one in machine.applier.quotas.by_prefix()}


def check_use(machine: Machine, is_exact: bool = True) -> None:
    """Compare use with a count.

    Arguments:
        machine: machine to check.
        is_exact: False: parts of the history may still count that compactions gave back.
    """
    for quota in machine.applier.quotas.by_prefix():
        if quota.cursor is not None:
            continue
        assert quota.keys_used == counted(machine, quota.prefix)
        if is_exact:
            assert quota.bytes_used == kept(machine, quota.prefix)
        else:
            assert quota.bytes_used >= kept(machine, quota.prefix)


def would_exceed(machine: Machine, request: Any) -> bool:
    """The model: do it without quotas, and look."""
    trial, limits = machine.reopened(), machine.applier.quotas.by_prefix()
    trial.applier.quotas._quotas = {}
    trial.applier.quotas._changed()
    if apply(trial, request).error is not None:
        return False
    for quota in limits:
        was, now = counted(machine, quota.prefix), counted(trial, quota.prefix)
        changes = trial.store.history(machine.store.revision + 1, trial.store.revision)
        kvs = [kv_pb2.KeyValue.FromString(data) for key, data in changes if not is_tombstone(key)]
        more_bytes = sum(kept_bytes(len(kv.key) + len(kv.value)) for kv in kvs if kv.key.startswith(quota.prefix))
        if quota.bytes_max and more_bytes > 0 and quota.bytes_used + more_bytes > quota.bytes_max:
            return True
        if quota.keys_max and now > was and now > quota.keys_max:
            return True
    return False


def _request(rng: Random, revision: int) -> Any:
    kind = rng.choice((*("put", "txn") * 3, "delete", "grant", "revoke", "set", "set", "remove", "compact"))
    if kind == "compact":
        return rpc_pb2.CompactionRequest(revision=rng.randint(max(revision - 9, 1), revision))
    key, end = rng.choice(KEYS), rng.choice(ENDS)
    if kind == "put":
        return put(key, rng.randbytes(rng.randrange(6)), lease=rng.choice((0, 0, 1)))
    if kind == "delete":
        return delete(key, end)
    if kind == "txn":
        return _small(rng, build(rng, rpc_pb2.TxnRequest, 4))
    if kind == "grant":
        return rpc_pb2.LeaseGrantRequest(ID=1, TTL=5)
    if kind == "revoke":
        return rpc_pb2.LeaseRevokeRequest(ID=1)
    if kind == "set":
        return set_quota(rng.choice(PREFIXES), rng.choice((0, 0, 5, 20, 400, 900)), rng.choice((0, 0, 1, 2, 4)))
    return remove(rng.choice(PREFIXES))


def _small(rng: Random, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnRequest:
    del request.compare[:]
    for operation in (*request.success, *request.failure):
        if operation.HasField("request_range"):
            operation.request_range.revision = 0
        elif operation.HasField("request_put"):
            made = operation.request_put
            made.key, made.lease, made.value = rng.choice(KEYS), 0, rng.randbytes(rng.randrange(6))
            made.ignore_lease = False
            made.ignore_value = rng.random() < 0.1
        elif operation.HasField("request_delete_range"):
            made = operation.request_delete_range
            made.key, made.range_end = rng.choice(KEYS), rng.choice(ENDS)
        elif operation.HasField("request_txn"):
            _small(rng, operation.request_txn)
    return request


def _is_legal(request: Any) -> bool:
    if not isinstance(request, rpc_pb2.TxnRequest):
        return True
    try:
        check.check_txn(request, 100)
    except errors.StatusError:
        return False
    return True


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_usage_is_exact_and_refusals_match_model(seed: int) -> None:
    """At once and in the smallest pieces, over restarts, all members come to the same."""
    rng = Random(seed)
    with pytest.MonkeyPatch.context() as patches:
        for module in (compares, mvcc, selection):
            patches.setattr(module, "KEYS_PER_PIECE", 1)
        patches.setattr(leases, "_KEYS_PER_PIECE", 1)
        plain, pieces = Machine(), Machine(at_once_max=0)
        for _ in range(40):
            request = _request(rng, plain.store.revision)
            if not _is_legal(request):
                continue
            exceeds = not isinstance(request, admin_pb2.QuotaSetRequest) and would_exceed(plain, request)
            outcome, other = apply(plain, request), apply(pieces, request)
            assert (repr(outcome.error), outcome.body, outcome.revision) == (
                repr(other.error),
                other.body,
                other.revision,
            )
            assert isinstance(outcome.error, errors.QuotaExceededError) == exceeds, request
            check_use(plain, is_exact=plain.store.compact_revision < 0)
            # Members remove what compactions gave up at their own pace.
            if rng.random() < 0.2:
                pieces.finish_compactions()
            if rng.random() < 0.1:
                pieces = pieces.reopened()
            assert used(plain) == used(pieces)
        assert plain.hash() == pieces.hash()


def test_refusal_names_prefix_and_maps_to_no_space_for_etcd_clients(machine: Machine) -> None:
    apply(machine, set_quota(b"jobs/", keys_max=1))
    assert apply(machine, put(b"jobs/1")).error is None
    error = apply(machine, put(b"jobs/2")).error
    assert isinstance(error, errors.NoSpaceError)
    assert error.code == errors.RESOURCE_EXHAUSTED
    assert str(error) == (
        "etcdserver: mvcc: database space exceeded "
        "(raftkv: quota of prefix 'jobs/' exceeded: 1 of 1 keys used, 1 more wanted)"
    )
    assert apply(machine, put(b"jobs/1", b"longer")).error is None
    assert apply(machine, put(b"job")).error is None


def test_a_txn_frees_and_takes_as_a_whole(machine: Machine) -> None:
    apply(machine, set_quota(b"k", keys_max=1))
    apply(machine, put(b"k1", b"12"))
    swap = txn(then=[delete(b"k", b"l"), txn(then=[put(b"m1")]), put(b"q")])
    assert apply(machine, swap).error is None
    assert used(machine)[b"k"][1] == 0
    apply(machine, put(b"k1", b"12"))
    assert apply(machine, txn(then=[delete(b"k1"), put(b"k2", b"1234")])).error is None
    refused = apply(machine, txn(then=[delete(b"k2"), put(b"k3"), put(b"k4"), put(b"x")]))
    assert isinstance(refused.error, errors.QuotaExceededError)
    assert machine.value(b"x") is None
    assert machine.value(b"k2") == b"1234"


def _pieces(machine: Machine, request: Any) -> list[float]:
    """Apply a request in pieces; the processor time of each."""
    outcome = machine.applier.begin(KINDS[type(request)][0], request.SerializeToString())
    took: list[float] = []
    while not isinstance(outcome, Outcome):
        began_s = time.thread_time()
        try:
            next(outcome)
        except StopIteration as end:
            outcome = end.value
        took.append(time.thread_time() - began_s)
    machine.store.set_applied(machine.store.applied_index + 1, 1)
    return took


def test_very_many_puts_and_deletions_are_checked_in_short_pieces(machine: Machine) -> None:
    # Each deletion looked at every put before it: 14,400 operations held the loop of all members for half a second.
    apply(machine, set_quota(b"k", keys_max=1))
    operations = [one for n in range(15_000) for one in (put(b"k%d" % n), delete(b"z%d" % n, b"z%d~" % n))]
    took = _pieces(machine, txn(then=operations))
    assert len(took) > 100
    assert max(took) < 0.5
    assert machine.store.range(b"k", b"l").count == 0


@pytest.mark.parametrize(
    "request_",
    [
        txn(then=[put(b"k%d" % number) for number in range(9)]),
        txn(then=[put(b"k%d" % number, bytes(300_000)) for number in range(9)]),
        delete(b"k", b"l"),
        rpc_pb2.LeaseRevokeRequest(ID=1),
    ],
    ids=["smaller", "as large", "deleted", "revoked"],
)
def test_freed_bytes_of_large_values_are_counted_in_pieces(machine: Machine, request_: Any) -> None:
    # 128 puts over values of 1.4 MB took a turn of 163 ms on every member, 500 such keys four times as much.
    apply(machine, rpc_pb2.LeaseGrantRequest(ID=1, TTL=5))
    apply(machine, set_quota(b"k", bytes_max=1 << 30))
    for number in range(9):
        apply(machine, put(b"k%d" % number, bytes(300_000), lease=1))
    assert len(_pieces(machine, request_)) > 9
    check_use(machine)


def test_quota_below_usage_refuses_only_growth(machine: Machine) -> None:
    for number in range(5):
        apply(machine, put(b"k%d" % number, b"12345"))
    body = apply(machine, set_quota(b"k", keys_max=2)).body
    quota = admin_pb2.QuotaSetResponse.FromString(body).quota
    assert (quota.bytes_used, quota.keys_used) == (5 * kept_bytes(7), 5)
    assert apply(machine, put(b"k0", b"54321")).error is None
    assert isinstance(apply(machine, put(b"k7")).error, errors.QuotaExceededError)
    assert apply(machine, delete(b"k1", b"k5")).error is None
    assert apply(machine, put(b"k7")).error is None
    assert isinstance(apply(machine, put(b"k8")).error, errors.QuotaExceededError)
    assert apply(machine, remove(b"k")).error is None
    assert apply(machine, put(b"k9", bytes(100))).error is None
    assert machine.store.accountant is None


def test_overwrites_and_deletions_fill_a_prefix_until_a_compaction(machine: Machine) -> None:
    # 46 overwrites of one key below a quota of 2 MiB filled a database of 64 MiB for all.
    apply(machine, set_quota(b"k", bytes_max=2 << 20))
    value = bytes(1_400_000)
    assert apply(machine, put(b"k", value)).error is None
    error = apply(machine, put(b"k", value)).error
    assert isinstance(error, errors.QuotaExceededError)
    assert apply(machine, delete(b"k")).error is None
    text = str(apply(machine, put(b"k", value)).error)
    assert "bytes used, 1400897 of them by old revisions until a compaction, 1400832 more wanted" in text
    assert apply(machine, txn(then=[delete(b"k"), put(b"k2", value)])).error is not None
    assert apply(machine, rpc_pb2.CompactionRequest(revision=machine.store.revision)).error is None
    assert apply(machine, put(b"k", value)).error is None
    check_use(machine)


@pytest.mark.long
@pytest.mark.parametrize("value_bytes", [0, 50, 700, 1_350, 1_880, 2_100, 5_000, 70_000])
def test_a_quota_bounds_the_database_for_values_of_any_size(tmp_path: Path, value_bytes: int) -> None:
    backend = LMDBBackend(tmp_path / "db", 64 << 20)
    machine = Machine(backend)
    empty_bytes = machine.store.backend.size_in_use_bytes
    apply(machine, set_quota(b"", bytes_max=1 << 20))
    while apply(machine, put(b"k", bytes(value_bytes))).error is None:
        pass
    machine.store.commit()
    in_use_bytes = machine.store.backend.size_in_use_bytes - empty_bytes
    machine.store.close()
    backend.close()
    assert (1 << 20) * 0.6 < in_use_bytes < (1 << 20) * 1.5


def count_on(prefix: bytes) -> admin_pb2.QuotaSetRequest:
    return set_quota(prefix, COUNT_ON, COUNT_ON)


def test_long_history_is_counted_in_parts_during_writes() -> None:
    machine, other = Machine(), Machine(at_once_max=0)
    both = (machine, other)
    for number in range(6_000):
        for each in both:
            apply(each, put(b"k%d" % (number % 3), bytes(number % 100)))
            if number % 7 == 0:
                apply(each, delete(b"k1"))
    for each in both:
        apply(each, rpc_pb2.CompactionRequest(revision=500))
    other.finish_compactions()
    body = versioned(Kind.HISTORY_QUOTA, set_quota(b"k", bytes_max=1 << 30).SerializeToString())
    work = machine.applier.begin(Kind.HISTORY_QUOTA, body)
    assert not isinstance(work, Outcome)
    for _ in work:
        assert not machine.store.compaction_step(), "a compaction waits, as the count reads the index"
    machine.store.set_applied(machine.store.applied_index + 1, 1)
    apply(other, set_quota(b"k", bytes_max=1 << 30))
    writes = 0
    while machine.applier.quotas.is_counting(b"k"):
        assert used(machine) == used(other)
        requests = (put(b"k0", b"new"), delete(b"k2"), put(b"elsewhere"), put(b"k1"))
        for each in both:
            apply(each, requests[writes % 4])
            apply(each, count_on(b"k") if writes % 3 == 0 else put(b"k2", bytes(writes)))
            if writes == 4:
                apply(each, rpc_pb2.CompactionRequest(revision=2_000))
        writes += 1
        if writes % 5 == 0:
            other.finish_compactions()
            other = other.reopened()
            both = (machine, other)
    assert writes > 5
    check_use(machine, is_exact=False)
    for revision in (2_500, 3_500, machine.store.revision):
        for each in both:
            apply(each, rpc_pb2.CompactionRequest(revision=revision))
        assert used(machine) == used(other) == used(other.reopened())
        check_use(machine, is_exact=False)
        assert used(machine)[b"k"][0] - kept(machine, b"k") < 7_000 * 164 // RUNS


@pytest.mark.interpreted
@pytest.mark.parametrize("deleted", ["first", "last", "in turn"])
def test_turn_looks_at_few_keys_however_many_a_quota_finds(machine: Machine, deleted: str) -> None:
    """Keys that a compaction is about to remove are passed over, for which a turn took a second with a million."""
    for number in range(6_000):
        apply(machine, put(b"k%05d" % number))
    for number in range(6_000):
        if {"first": number < 4_000, "last": number >= 2_000, "in turn": number % 300 != 0}[deleted]:
            apply(machine, delete(b"k%05d" % number))
    apply(machine, put(b"last"))
    apply(machine, rpc_pb2.CompactionRequest(revision=machine.store.revision))
    request = set_quota(b"k", keys_max=10_000)
    turns = keys_by_turn(machine, Kind.HISTORY_QUOTA, versioned(Kind.HISTORY_QUOTA, request.SerializeToString()))
    writes = 0
    while machine.applier.quotas.is_counting(b"k"):
        assert machine.store.is_compacting
        turns += keys_by_turn(machine, Kind.PUT, put(b"k-new-%d" % writes).SerializeToString())
        writes += 1
    assert sum(turns) >= 6_000
    assert max(turns) < 600
    check_use(machine)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_count_in_parts_ends_as_one_that_was_always_there(seed: int) -> None:
    rng = Random(seed)
    always, later = Machine(), Machine()
    apply(always, set_quota(b"k", bytes_max=1 << 30))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(quotas, "COUNTED_BY_ENTRY", rng.choice((1, 4_000)))
        patches.setattr(quotas, "COUNTED_BY_CHANGE", 1)
        for number in range(80):
            if number == 40:
                apply(later, set_quota(b"k", bytes_max=1 << 30))
            request: Any = put(b"k%d" % rng.randrange(4), rng.randbytes(rng.randrange(9)))
            if rng.random() < 0.4:
                request = delete(b"k%d" % rng.randrange(4), rng.choice((b"", b"l")))
            apply(always, request)
            apply(later, request)
            if rng.random() < 0.1:
                later = later.reopened()
        while later.applier.quotas.is_counting(b"k"):
            apply(later, count_on(b"k"))
    assert used(always) == used(later) == {b"k": (kept(always, b"k"), counted(always, b"k"))}
    for machine in (always, later):
        apply(machine, rpc_pb2.CompactionRequest(revision=machine.store.revision))
        apply(machine, put(b"x"))
        apply(machine, rpc_pb2.CompactionRequest(revision=machine.store.revision))
        check_use(machine)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 10_000)), max_size=600), st.integers(0, 2_000))
def test_a_history_gives_back_at_most_what_is_due_and_nearly_all_of_it(changes, compacted):
    history, main, due_bytes, total_bytes = History([], []), 1, 0, 0
    for step, size_bytes in changes:
        main += step
        history.add(main, size_bytes)
        total_bytes += size_bytes
        due_bytes += size_bytes if main <= compacted else 0
        assert len(history.encode()) <= 2 * RUNS * 16
    history = History.decode(history.encode())
    given_bytes = history.compact(compacted)
    assert due_bytes - total_bytes // (RUNS // 2) - 10_000 <= given_bytes <= due_bytes
    assert history.size_bytes == total_bytes - given_bytes
    assert given_bytes + history.compact(main) == total_bytes


def test_invalid_quotas_are_refused_identically(machine: Machine) -> None:
    for request, kind in (
        (set_quota(bytes(257), 1), errors.InvalidQuotaError),
        (set_quota(b"a", -1, 0), errors.InvalidQuotaError),
        (set_quota(b"a", 1, -5), errors.InvalidQuotaError),
        (remove(b"a"), errors.QuotaNotFoundError),
    ):
        assert isinstance(apply(machine, request).error, kind)
    assert apply(machine, set_quota(bytes(256), schema.QUOTA_LIMIT_MAX, schema.QUOTA_LIMIT_MAX)).error is None


def test_quotas_are_limited(machine: Machine) -> None:
    for number in range(QUOTAS_MAX):
        assert apply(machine, set_quota(b"%d" % number, 1)).error is None
    assert isinstance(apply(machine, set_quota(b"x", 1)).error, errors.TooManyQuotasError)
    assert apply(machine, set_quota(b"1", 2)).error is None
    assert len(used(machine.reopened())) == QUOTAS_MAX
