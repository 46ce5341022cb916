"""Quotas of prefixes: use is what a count would give, and what is refused is what would have grown a full prefix."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv import errors
from raftkv.apply import check, compares, leases, quotas
from raftkv.apply.applier import Outcome
from raftkv.apply.quotas import QUOTAS_MAX, REMOVE
from raftkv.apply.request import Kind, versioned
from raftkv.pb import admin_pb2, kv_pb2, rpc_pb2
from raftkv.storage import mvcc_txn, selection
from tests.apply.arbitrary import build
from tests.apply.machine import KINDS, Machine
from tests.compat.store import delete, put, txn

KEYS = (b"", b"a", b"ab", b"ab1", b"ab2", b"b", b"b\xff", b"\xff", b"\xff\xff")
PREFIXES = (b"", b"a", b"ab", b"b", b"\xff", b"\xff\xff", b"c")
ENDS = (b"", b"", b"\0", b"ac", b"b", b"c", b"\xff")


def apply(machine: Machine, request: Any) -> Outcome:
    """Return it as an entry, with its bytes."""
    if isinstance(request, admin_pb2.QuotaSetRequest):
        kind, body = Kind.PREFIX_QUOTA, versioned(Kind.PREFIX_QUOTA, request.SerializeToString())
    else:
        kind, body = KINDS[type(request)][0], request.SerializeToString()
    outcome = machine.applier.apply(kind, body)
    machine.store.set_applied(machine.store.applied_index + 1, 1)
    return outcome


def set_quota(prefix: bytes, bytes_max: int = 0, keys_max: int = 0) -> admin_pb2.QuotaSetRequest:
    return admin_pb2.QuotaSetRequest(prefix=prefix, bytes_max=bytes_max, keys_max=keys_max)


def remove(prefix: bytes) -> admin_pb2.QuotaSetRequest:
    return set_quota(prefix, REMOVE, REMOVE)


def counted(machine: Machine, prefix: bytes) -> tuple[int, int]:
    """Bytes and keys that exist below a prefix."""
    # An entry that no service has checked can have an empty key.
    kvs = [kv_pb2.KeyValue.FromString(kv) for kv in machine.store.range(b"", b"\0").kvs]
    sizes = [len(kv.key) + len(kv.value) for kv in kvs if kv.key.startswith(prefix)]
    return sum(sizes), len(sizes)


def used(machine: Machine) -> dict[bytes, tuple[int, int]]:
    return {one.prefix: (one.bytes_used, one.keys_used) for one in machine.applier.quotas.by_prefix()}


def check_use(machine: Machine) -> None:
    assert used(machine) == {prefix: counted(machine, prefix) for prefix in used(machine)}


def would_exceed(machine: Machine, request: Any) -> bool:
    """The model: do it without quotas, and look."""
    trial, limits = machine.reopened(), machine.applier.quotas.by_prefix()
    trial.applier.quotas._quotas = {}
    trial.applier.quotas._changed()
    if apply(trial, request).error is not None:
        return False
    for quota in limits:
        before, after = counted(machine, quota.prefix), counted(trial, quota.prefix)
        for was, now, most in zip(before, after, (quota.bytes_max, quota.keys_max), strict=True):
            if most and now > was and now > most:
                return True
    return False


def _request(rng: Random) -> Any:
    kind = rng.choice(("put", "put", "put", "delete", "txn", "txn", "txn", "grant", "revoke", "set", "set", "remove"))
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
        return set_quota(rng.choice(PREFIXES), rng.choice((0, 0, 5, 10, 20)), rng.choice((0, 0, 1, 2, 4)))
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


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_use_is_a_count_and_refusals_are_those_of_the_model(seed: int) -> None:
    """At once and in the smallest pieces, over restarts, all members come to the same."""
    rng = Random(seed)
    with pytest.MonkeyPatch.context() as patches:
        for module in (compares, mvcc_txn, selection):
            patches.setattr(module, "KEYS_PER_PIECE", 1)
        patches.setattr(leases, "_KEYS_PER_PIECE", 1)
        plain, pieces = Machine(), Machine(at_once_max=0)
        for _ in range(40):
            request = _request(rng)
            if not _is_legal(request):
                continue
            exceeds = not isinstance(request, admin_pb2.QuotaSetRequest) and would_exceed(plain, request)
            outcome = apply(plain, request)
            other = apply(pieces, request)
            assert (repr(outcome.error), outcome.body, outcome.revision) == (
                repr(other.error),
                other.body,
                other.revision,
            )
            assert isinstance(outcome.error, errors.QuotaExceededError) == exceeds, request
            check_use(plain)
            if rng.random() < 0.1:
                pieces = pieces.reopened()
            assert used(plain) == used(pieces)
        assert plain.hash() == pieces.hash()


def test_a_refusal_names_the_prefix_and_is_no_space_to_clients_of_etcd() -> None:
    machine = Machine()
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


def test_a_txn_frees_and_takes_as_a_whole() -> None:
    machine = Machine()
    apply(machine, set_quota(b"k", bytes_max=6))
    apply(machine, put(b"k1", b"12"))
    swap = txn(then=[delete(b"k", b"l"), txn(then=[put(b"m1")]), put(b"q")])
    assert apply(machine, swap).error is None
    assert used(machine) == {b"k": (0, 0)}
    apply(machine, put(b"k1", b"12"))
    assert apply(machine, txn(then=[delete(b"k1"), put(b"k2", b"1234")])).error is None
    refused = apply(machine, txn(then=[delete(b"k2"), put(b"k3", b"12345"), put(b"x")]))
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


def test_very_many_puts_and_deletions_are_checked_in_short_pieces() -> None:
    # Each deletion looked at every put before it: 14,400 operations held the loop of all members for half a second.
    machine = Machine()
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
def test_what_large_values_give_back_is_counted_in_pieces(request_: Any) -> None:
    # 128 puts over values of 1.4 MB took a turn of 163 ms on every member, 500 such keys four times as much.
    machine = Machine()
    apply(machine, rpc_pb2.LeaseGrantRequest(ID=1, TTL=5))
    apply(machine, set_quota(b"k", bytes_max=1 << 30))
    for number in range(9):
        apply(machine, put(b"k%d" % number, bytes(300_000), lease=1))
    assert len(_pieces(machine, request_)) > 9
    check_use(machine)


def test_a_quota_below_what_is_there_takes_no_growth_and_everything_else() -> None:
    machine = Machine()
    for number in range(5):
        apply(machine, put(b"k%d" % number, b"12345"))
    body = apply(machine, set_quota(b"k", bytes_max=10, keys_max=2)).body
    quota = admin_pb2.QuotaSetResponse.FromString(body).quota
    assert (quota.bytes_used, quota.keys_used) == (35, 5)
    assert apply(machine, put(b"k0", b"54321")).error is None
    assert apply(machine, put(b"k0", b"1")).error is None
    assert isinstance(apply(machine, put(b"k0", b"12")).error, errors.QuotaExceededError)
    assert apply(machine, delete(b"k1", b"k5")).error is None
    assert apply(machine, put(b"k0", b"12345678")).error is None
    assert apply(machine, remove(b"k")).error is None
    assert apply(machine, put(b"k9", bytes(100))).error is None
    assert machine.store.accountant is None


def test_what_is_no_quota_is_refused_alike() -> None:
    machine = Machine()
    for request, kind in (
        (set_quota(bytes(257), 1), errors.InvalidQuotaError),
        (set_quota(b"a", -1, 0), errors.InvalidQuotaError),
        (set_quota(b"a", 1, -5), errors.InvalidQuotaError),
        (remove(b"a"), errors.QuotaNotFoundError),
    ):
        assert isinstance(apply(machine, request).error, kind)
    assert apply(machine, set_quota(bytes(256), quotas.LIMIT_MAX, quotas.LIMIT_MAX)).error is None


def test_quotas_are_limited() -> None:
    machine = Machine()
    for number in range(QUOTAS_MAX):
        assert apply(machine, set_quota(b"%d" % number, 1)).error is None
    assert isinstance(apply(machine, set_quota(b"x", 1)).error, errors.TooManyQuotasError)
    assert apply(machine, set_quota(b"1", 2)).error is None
    assert len(used(machine.reopened())) == QUOTAS_MAX
