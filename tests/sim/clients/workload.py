"""Key-value clients: each sends one request at a time to one member, with a timeout.

Owns the choice of operations and the history. An operation is never sent twice: after a timeout it is *unknown*
and the client continues with a new one, as etcd's client does for writes. Requests and answers are the bytes of the
wire, handled by the production services.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raftkv.client.errors import from_status
from raftkv.client.rpc.methods import staleness_metadata
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.status import RpcError
from tests.sim.clients.history import History, Invocation, Operation, Outcome
from tests.sim.clients.users import ROOT, USERS
from tests.sim.cluster import Cluster
from tests.sim.devices.calls import CALLER, IDENTITY
from tests.sim.journal import slowness
from tests.sim.replay import result_of

_METHODS = {
    method.path: method for service in ("KV", "Lease") for method in SERVICES[f"etcdserverpb.{service}"].values()
}
PUT, TXN, DELETE, RANGE, COMPACT = (
    SERVICES["etcdserverpb.KV"][name].path for name in ("Put", "Txn", "DeleteRange", "Range", "Compact")
)
GRANT, REVOKE = (SERVICES["etcdserverpb.Lease"][name].path for name in ("LeaseGrant", "LeaseRevoke"))

FLOODERS = (1_000_001, 1_000_002)

PREFIX, PREFIX_END = b"k", b"l"
"""All keys begin so."""


def key_name(number: int) -> bytes:
    """The name of a key."""
    return b"k%d" % number


@dataclass(frozen=True, slots=True)
class WorkloadParameters:
    """Kinds and rates of requests. Times in seconds, the rest weights and counts."""

    clients_count: int = 4
    think_s_mean: float = 0.05
    timeout_s: float = 3.0
    keys_count: int = 4
    put_weight: int = 5
    compare_and_set_weight: int = 3
    multiple_weight: int = 1
    delete_weight: int = 1
    read_weight: int = 5
    stale_weight: int = 1
    past_weight: int = 1
    compact_weight: float = 0.2
    bounded_weight: float = 0.0
    to_leader: float = 0.3
    operators_count: int = 0
    owners_count: int = 1
    ttl_s_max: int = 3
    watchers_count: int = 2
    admins_count: int = 0
    """Who change what users may do; the clients are users then."""
    flood_puts: int = 0
    """Puts that each of ``FLOODERS`` asks for at once, now and then; each client has an identity of its own then."""
    calm: float = 1.0
    """Clients and operators think so many times as long, but for bursts (``journal.slowness``)."""


class Workload:
    """Drives the clients until ``stop``."""

    def __init__(self, rng: random.Random, parameters: WorkloadParameters, cluster: Cluster) -> None:
        self.parameters = parameters
        self.history = History()
        self.newest_revision = 1
        self._rng = rng
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._running = True
        self._values_count = 0
        self._seen: dict[bytes, int] = {}
        self._current: dict[int, Invocation] = {}
        self.lease_ids: list[int] = []
        """Leases that keys may be attached to; kept by their owners."""
        chances: dict[Callable[[], Operation], float] = {
            self.put: parameters.put_weight,
            self._compare_and_set: parameters.compare_and_set_weight,
            self._multiple: parameters.multiple_weight,
            self._delete: parameters.delete_weight,
            self.read: parameters.read_weight,
            self._read_stale: parameters.stale_weight,
            self._read_past: parameters.past_weight,
            self._compact: parameters.compact_weight,
            self._read_bounded: parameters.bounded_weight,
        }
        self._makers, self._weights = list(chances), list(chances.values())

    def start(self) -> None:
        """Let every client begin."""
        for client in range(self.parameters.clients_count):
            self._think(client)
        for flooder in FLOODERS if self.parameters.flood_puts else ():
            self._flood(flooder)

    def _flood(self, flooder: int) -> None:
        if not self._running:
            return
        member_id = self.pick_member()
        count = self._rng.randrange(self.parameters.flood_puts)
        for _ in range(count if member_id is not None else 0):
            self.call(flooder, member_id, self.put(), lambda outcome: None)
        self._scheduler.after(self._rng.choice((0.01, 0.1, 0.5)), self._flood, flooder)

    def stop(self) -> None:
        """Start no new operations."""
        self._running = False

    def call(
        self, client: int, member_id: int, operation: Operation, then: Callable[[Outcome | None], None]
    ) -> Invocation:
        """Send a request and record call and answer; ``then`` gets the answer, None if the outcome is unknown."""
        invocation = self.history.call(client, operation, now=self._scheduler.now)
        journal, member = self._cluster.journal, self._cluster.members[member_id]
        data = operation.request.SerializeToString()
        journal.record("ask", member_id, client, operation.path, data.hex())

        def answered(message: bytes | None, error: RpcError | None) -> None:
            journal.record("answer", member_id, client, (message or b"").hex(), str(error))
            outcome = _outcome(operation.path, message, error)
            if outcome is not None:
                self.history.end(invocation, outcome, self._scheduler.now)
                self.newest_revision = max(self.newest_revision, outcome.revision)
            then(outcome)

        def proposed(request_id: int) -> None:
            if not operation.is_read:
                invocation.request_id = request_id

        metadata = {CALLER: self._user_of(client)} if self._cluster.parameters.has_users else None
        if self.parameters.flood_puts:
            metadata = {**(metadata or {}), IDENTITY: f"client {client}"}
        if operation.staleness_s_max is not None:
            metadata = {**(metadata or {}), **dict(staleness_metadata(operation.staleness_s_max))}
        member.ask(operation.path, data, answered, proposed, metadata)
        return invocation

    def _user_of(self, client: int) -> str:
        """User of a client; lease owners and the end of the run are root."""
        return USERS[client % len(USERS)] if client < self.parameters.clients_count else ROOT

    # -- operations -----------------------------------------------------------------------------------------

    def _key(self) -> bytes:
        return key_name(self._rng.randrange(self.parameters.keys_count))

    def _value(self) -> bytes:
        """Return a unique value for a write, sometimes a large one."""
        self._values_count += 1
        return b"%d" % self._values_count + b"." * self._rng.choice((0, 0, 16, 200))

    def put(self) -> Operation:
        """Write a key, sometimes attached to a lease."""
        lease = self._rng.choice(self.lease_ids) if self.lease_ids and self._rng.random() < 0.3 else 0
        return Operation(PUT, rpc_pb2.PutRequest(key=self._key(), value=self._value(), lease=lease))

    def _compare_and_set(self) -> Operation:
        key = self._key()
        request = rpc_pb2.TxnRequest()
        compare = request.compare.add(target=rpc_pb2.Compare.MOD, key=key)
        compare.mod_revision = self._seen.get(key, 0)
        request.success.add().request_put.CopyFrom(rpc_pb2.PutRequest(key=key, value=self._value()))
        request.failure.add().request_range.key = key
        return Operation(TXN, request)

    def _multiple(self) -> Operation:
        """Write two keys, perhaps delete one, and read all, in one revision."""
        request = rpc_pb2.TxnRequest()
        count = self.parameters.keys_count
        first = self._rng.randrange(count)
        names = [key_name((first + offset) % count) for offset in range(min(3, count))]
        for name in names[:2]:
            request.success.add().request_put.CopyFrom(rpc_pb2.PutRequest(key=name, value=self._value()))
        for name in names[2:]:
            request.success.add().request_delete_range.key = name
        request.success.add().request_range.CopyFrom(rpc_pb2.RangeRequest(key=PREFIX, range_end=PREFIX_END))
        return Operation(TXN, request)

    def _delete(self) -> Operation:
        if self._rng.random() < 0.1:
            return Operation(DELETE, rpc_pb2.DeleteRangeRequest(key=PREFIX, range_end=PREFIX_END, prev_kv=True))
        return Operation(DELETE, rpc_pb2.DeleteRangeRequest(key=self._key()))

    def read(self) -> Operation:
        """Read one key or all, confirmed by a quorum."""
        if self._rng.random() < 0.2:
            return Operation(RANGE, rpc_pb2.RangeRequest(key=PREFIX, range_end=PREFIX_END))
        return Operation(RANGE, rpc_pb2.RangeRequest(key=self._key()))

    def _read_stale(self) -> Operation:
        return Operation(RANGE, rpc_pb2.RangeRequest(key=self._key(), serializable=True))

    def _read_bounded(self) -> Operation:
        bound_s = self._rng.choice((0.0, 0.01, 0.1, 1.0))
        return Operation(RANGE, rpc_pb2.RangeRequest(key=self._key()), bound_s)

    def _read_past(self) -> Operation:
        revision = max(1, self.newest_revision - self._rng.randrange(20))
        return Operation(RANGE, rpc_pb2.RangeRequest(key=PREFIX, range_end=PREFIX_END, revision=revision))

    def _compact(self) -> Operation:
        revision = max(1, self.newest_revision - self._rng.randrange(10))
        return Operation(COMPACT, rpc_pb2.CompactionRequest(revision=revision, physical=self._rng.random() < 0.3))

    # -- the life of a client -------------------------------------------------------------------------------

    def _think(self, client: int) -> None:
        mean_s = self.parameters.think_s_mean * slowness(self._scheduler.now, self.parameters.calm)
        self._scheduler.after(self._rng.expovariate(1.0 / mean_s), self._ask, client)

    def pick_member(self) -> int | None:
        """Pick a member that accepts connections, the leader more often."""
        members = self._cluster.members_reachable()
        if not members:
            return None
        leader = self._cluster.leader_hint()
        to_leader = leader in members and self._rng.random() < self.parameters.to_leader
        return leader if to_leader else self._rng.choice(members)

    def _ask(self, client: int) -> None:
        if not self._running:
            return
        member_id = self.pick_member()
        if member_id is None:
            self._think(client)
            return
        operation = self._rng.choices(self._makers, self._weights)[0]()
        # An answer is always later than the call.
        invocation = self.call(client, member_id, operation, lambda outcome: self._answered(invocation, outcome))
        self._current[client] = invocation
        self._scheduler.after(self.parameters.timeout_s, self._move_on, invocation)

    def _move_on(self, invocation: Invocation) -> None:
        """Continue after the answer or the timeout."""
        if self._current.get(invocation.client) is invocation:
            del self._current[invocation.client]
            self._think(invocation.client)

    def _answered(self, invocation: Invocation, outcome: Outcome | None) -> None:
        request = invocation.operation.request
        if outcome is not None and invocation.operation.path == PUT and not outcome.error:
            self._seen[request.key] = outcome.revision
        self._move_on(invocation)


def _outcome(path: str, message: bytes | None, error: RpcError | None) -> Outcome | None:
    """Return the definite outcome of an answer; None if the operation may or may not have happened."""
    if error is not None:
        status = from_status(error.code, error.text)
        return Outcome(0, error=error.text) if status.definite else None
    response: Any = _METHODS[path].response.FromString(message or b"")
    return Outcome(response.header.revision, result_of(response))
