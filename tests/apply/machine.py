"""A state machine without a member around it: the applier on a store in memory.

machine = Machine()
machine.answer(put(b"a", b"1"))           # the response, without its header; StatusError if refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raftkv.apply import check, txn
from raftkv.apply.alarms import Alarms
from raftkv.apply.applier import Applier, Outcome
from raftkv.apply.leases import Leases
from raftkv.apply.membership import Membership
from raftkv.apply.wire import Kind
from raftkv.pb import kv_pb2, raft_pb2, rpc_pb2
from raftkv.storage import schema
from raftkv.storage.hash import KVHash
from raftkv.storage.index import Index
from raftkv.storage.mvcc import Store
from tests.storage.memory import MemoryBackend

OPERATIONS_MAX = 128
KINDS: dict[type[Any], tuple[int, type[Any]]] = {
    rpc_pb2.PutRequest: (Kind.PUT, rpc_pb2.PutResponse),
    rpc_pb2.DeleteRangeRequest: (Kind.DELETE_RANGE, rpc_pb2.DeleteRangeResponse),
    rpc_pb2.TxnRequest: (Kind.TXN, rpc_pb2.TxnResponse),
    rpc_pb2.CompactionRequest: (Kind.COMPACT, rpc_pb2.CompactionResponse),
    rpc_pb2.AlarmRequest: (Kind.ALARM, rpc_pb2.AlarmResponse),
    raft_pb2.MemberRecord: (Kind.MEMBER_ATTRIBUTES, rpc_pb2.MemberUpdateResponse),
    rpc_pb2.LeaseGrantRequest: (Kind.LEASE_GRANT, rpc_pb2.LeaseGrantResponse),
    rpc_pb2.LeaseRevokeRequest: (Kind.LEASE_REVOKE, rpc_pb2.LeaseRevokeResponse),
}
CHECKS: dict[type[Any], Callable[[Any], None]] = {
    rpc_pb2.PutRequest: check.check_put,
    rpc_pb2.DeleteRangeRequest: check.check_delete_range,
    rpc_pb2.TxnRequest: lambda request: check.check_txn(request, OPERATIONS_MAX),
}


class ManyLeases(Leases):
    """Leases 100 and above count as granted."""

    def exists(self, lease_id: int) -> bool:
        """See ``Leases``."""
        return lease_id >= 100 or super().exists(lease_id)


class Machine:
    """Store, applier, and the index of the last entry."""

    def __init__(self, backend: MemoryBackend | None = None, **limits: int) -> None:
        self.limits = limits
        self.backend = backend or MemoryBackend()
        self.store = Store.open(self.backend)
        self.alarms = Alarms(self.store, schema.ALARM)
        self.membership = Membership(self.store)
        self.applier = Applier(self.store, self.alarms, self.membership, ManyLeases(self.store), **limits)

    def apply(self, request: Any, parsed: bool = False, is_answered: bool = True) -> Outcome:
        """Apply as an entry; from its bytes, as another member does, unless ``parsed``."""
        kind, _ = KINDS[type(request)]
        data = request.SerializeToString()
        outcome = self.applier.apply(kind, data, request if parsed else None, is_answered=is_answered)
        self.store.set_applied(self.store.applied_index + 1, 1)
        return outcome

    def answer(self, request: Any) -> Any:
        """Check and apply; the response without header.

        Raises:
            StatusError: the request was refused.
        """
        CHECKS.get(type(request), lambda _: None)(request)
        if isinstance(request, rpc_pb2.TxnRequest) and txn.is_readonly(request):
            outcome = self.applier.read_txn(request)
        else:
            outcome = self.apply(request)
        if outcome.error is not None:
            raise outcome.error
        return KINDS[type(request)][1].FromString(outcome.body)

    def value(self, key: bytes) -> bytes | None:
        """The current value of a key."""
        stored = self.store.get(key)
        return None if stored is None else kv_pb2.KeyValue.FromString(stored).value

    def hash(self, revision: int = 0) -> KVHash:
        """HashKV."""
        jobs: list[Callable[[], KVHash]] = []
        self.store.hash_kv(revision, jobs.append)
        return jobs[0]()

    def reopened(self) -> Machine:
        """Return the machine after a clean restart: all data committed and read back from the backend."""
        self.store.commit()
        return Machine(self.backend.clone(), **self.limits)

    def finish_compactions(self) -> None:
        """Finish all compactions."""
        while self.store.is_compacting:
            self.store.compaction_step()
            self.store.commit()


def keys_by_turn(machine: Machine, kind: int, body: bytes) -> list[int]:
    """Apply an entry; how many keys of the index each turn of it looked at."""
    looked_at = [0]
    keys = Index.keys

    def counting(index: Index, *interval: bytes, **more: bool) -> Iterator[bytes]:
        for key in keys(index, *interval, **more):
            looked_at[-1] += 1
            yield key

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Index, "keys", counting)
        work = machine.applier.begin(kind, body)
        if not isinstance(work, Outcome):
            looked_at.append(0)
            while next(work, work) is None:
                looked_at.append(0)
    machine.store.set_applied(machine.store.applied_index + 1, 1)
    return looked_at
