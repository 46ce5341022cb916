"""What is in the log, and what a client sends that will be: every kind of entry applied, every request checked."""

from __future__ import annotations

from random import Random

from raftkv import errors
from raftkv.apply import check, wire
from raftkv.apply.applier import PARSERS
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.node.admission import parse_or_raise
from raftkv.rpc.status import RpcError
from tests.apply import test_plain, test_plain_txn
from tests.apply.arbitrary import payload
from tests.apply.machine import Machine
from tests.apply.test_total import TYPES as ENTRY_TYPES
from tests.fuzz.target import Target

KEEP = 300
"""Inputs that one state takes before a fresh one takes its place: what they store is no growth of the code."""
METHODS = [(service, method) for service, methods in sorted(SERVICES.items()) for method in methods.values()]
CHECKS = {
    rpc_pb2.RangeRequest: check.check_range,
    rpc_pb2.PutRequest: check.check_put,
    rpc_pb2.DeleteRangeRequest: check.check_delete_range,
    rpc_pb2.AlarmRequest: check.check_alarm,
    rpc_pb2.TxnRequest: lambda request: check.check_txn(request, 128),
}


class _Applied:
    """Entries applied to a state in memory, and to another with the same entries: both must come to the same."""

    def __init__(self) -> None:
        self._inputs = KEEP

    def __call__(self, data: bytes) -> str:
        if self._inputs >= KEEP:
            self._machines, self._inputs = [Machine(), Machine()], 0
            for machine in self._machines:
                machine.applier.term = 1
                machine.membership.bootstrap([rpc_pb2.Member(ID=1, peerURLs=["http://127.0.0.1:1"])])
        self._inputs += 1
        decoded = wire.decode(data)
        if decoded is None:
            return "too short"
        kind, _, body = decoded
        outcomes = [machine.applier.apply(kind, body) for machine in self._machines]
        for machine in self._machines:
            machine.store.set_applied(machine.store.applied_index + 1, 1)
        first, second = ((one.revision, one.body, repr(one.error)) for one in outcomes)
        assert first == second
        assert outcomes[0].error is None or isinstance(outcomes[0].error, errors.StatusError)
        return f"{kind} {type(outcomes[0].error).__name__}"


def _entries() -> list[bytes]:
    rng = Random(3)
    found = []
    for kind, message in ENTRY_TYPES.items():
        for depth in (1, 3):
            body = payload(rng, message, depth)[:2000]
            found.append(wire.encode(kind, 1, wire.versioned(kind, body) if kind >= wire.VERSIONED_FIRST else body))
    return found


def _txns() -> list[bytes]:
    return [data for data in map(test_plain_txn.encoded, map(Random, range(60))) if len(data) < 2000]


def _request(data: bytes) -> str:
    """Input: which RPC (one byte), then the bytes of its request."""
    _, method = METHODS[(data[0] if data else 0) % len(METHODS)]
    request = parse_or_raise(method.request, data[1:])
    checks = CHECKS.get(method.request)
    if checks is not None:
        checks(request)
    return method.path


def _requests() -> list[bytes]:
    rng = Random(4)
    return [bytes((number,)) + payload(rng, method.request, 2)[:1000] for number, (_, method) in enumerate(METHODS)]


def _intervals(data: bytes) -> str:
    """Input: pairs of low and high, a byte each, with a third that is looked for; beside sets that hold every key."""
    merged, plain = check.Intervals(), set()
    for at in range(0, min(len(data), 600) - 2, 3):
        low, high, key = data[at : at + 1], data[at + 1 : at + 2], data[at + 2 : at + 3]
        merged.add(low, high)
        plain |= {bytes((byte,)) for byte in range(low[0], high[0])}
        assert (key in merged) == (key in plain)
        assert merged.touch([key]) == (key in plain)
    lows, highs = merged._lows, merged._highs
    assert all(low < high for low, high in zip(lows, highs, strict=True))
    assert all(high < low for high, low in zip(highs, lows[1:], strict=False))
    return f"{len(merged)}"


class _PlainTxns:
    """Txns beside their messages: decoded alike, and applied to two states, which stay the same."""

    def __init__(self) -> None:
        self._inputs = KEEP

    def __call__(self, data: bytes) -> str:
        if self._inputs >= KEEP:
            self._pair, self._inputs = test_plain_txn.Pair(), 0
        self._inputs += 1
        is_plain = test_plain_txn.check_decoded(data)
        self._pair.apply(data, is_answered=len(data) % 3 > 0)
        if self._inputs == KEEP:
            self._pair.check_equal()
        return f"{is_plain}"


def _plain(data: bytes) -> str:
    """Puts and reads beside their messages: decoded alike."""
    return f"{test_plain.check_put(data)} {test_plain.check_get(data)}"


def _plain_requests() -> list[bytes]:
    return [data for data in map(test_plain.encoded, map(Random, range(60))) if len(data) < 2000]


class _Hashed:
    """Puts, deletions, compactions, and hashes at any revision: each hash is one, or etcd's refusal."""

    def __call__(self, data: bytes) -> str:
        machine, hashed = Machine(), 0
        for at in range(0, min(len(data), 90) - 2, 3):
            action, key, number = data[at] % 4, data[at + 1 : at + 2], data[at + 2]
            try:
                if action == 0:
                    machine.answer(rpc_pb2.PutRequest(key=key, value=bytes((number,))))
                elif action == 1:
                    machine.answer(rpc_pb2.DeleteRangeRequest(key=key, range_end=bytes((number,))))
                elif action == 2:
                    machine.answer(rpc_pb2.CompactionRequest(revision=number))
                else:
                    self._hash(machine, number)
                    hashed += 1
            except (errors.CompactedError, errors.FutureRevisionError):
                continue
        return f"{hashed}"

    def _hash(self, machine: Machine, revision: int) -> None:
        wanted = machine.hash(revision)
        assert machine.reopened().hash(revision) == wanted


def _changes() -> list[bytes]:
    member = rpc_pb2.Member(ID=5, name="m", peerURLs=["http://127.0.0.1:2"], isLearner=True)
    kinds = raft_pb2.MemberChange.Kind.values()
    return [
        raft_pb2.MembershipChange(
            request_id=1, changes=[raft_pb2.MemberChange(kind=kind, member=member)], learners_max=1
        ).SerializeToString()
        for kind in kinds
    ]


def _membership(data: bytes) -> None:
    """Input: the context of a change of members; decided alike twice, and carried out if it is one."""
    from raftkv.apply.membership import conf_change_of
    from raftkv.raft import confchange
    from raftkv.raft.types import ConfChange, ConfState

    machine = Machine()
    machine.membership.bootstrap([rpc_pb2.Member(ID=1, peerURLs=["http://127.0.0.1:1"])])
    record = raft_pb2.MembershipChange.FromString(data)
    wanted = conf_change_of(record)
    entry = confchange.encode(ConfChange(wanted.changes, wanted.transition, data))
    decision = machine.membership.decide(entry)
    if decision.error is None:
        machine.membership.execute(decision, ConfState(voters=(1,)))
        machine.store.set_applied(machine.store.applied_index + 1, 1)
        assert machine.reopened().membership.members.keys() == machine.membership.members.keys()


def _allowed() -> tuple[type[BaseException], ...]:
    from google.protobuf.message import DecodeError

    return (DecodeError, errors.StatusError)


assert ENTRY_TYPES.keys() == PARSERS.keys()
TARGETS = (
    Target("log-entry", lambda directory: _Applied(), _entries, (errors.UnknownEntryError,), memory_max_bytes=64 << 20),
    Target("request", lambda directory: _request, _requests, (errors.StatusError, RpcError), examples=300),
    Target("plain-txn", lambda directory: _PlainTxns(), _txns, (), memory_max_bytes=64 << 20),
    Target("plain", lambda directory: _plain, _plain_requests, ()),
    Target("intervals", lambda directory: _intervals, lambda: [b"aeb", b"aecbgfadm", bytes(range(90))], (IndexError,)),
    Target(
        "hash-kv",
        lambda directory: _Hashed(),
        lambda: [b"\0a1\0b2\3a\0\1aa\3a\3\2a\2\3a\3"],
        (ValueError,),
        examples=60,
    ),
    Target("membership", lambda directory: _membership, _changes, _allowed()),
)
