"""The replay of the log: a simple state machine that gives the right effect of every entry.

Owns the correct state at each index and revision. The replay gets each committed entry once, when the first member
applies it; members are then compared with the recorded result at O(1) per change. The keys follow
``jepsen.checkers.model``; the replay adds leases, compaction and the counting of revisions.

    replay.apply(entry)
    replay.states[entry.index]           # revision, compact revision, leases: of every member that has applied it
    replay.changes[revision]             # what every member's store reports of that revision
    replay.events                        # the same in the form in which watches deliver it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jepsen import ops
from jepsen.checkers.model import Model
from raftkv.apply import wire
from raftkv.apply.wire import Kind
from raftkv.pb import kv_pb2, raft_pb2, rpc_pb2
from raftkv.raft.types import Entry, EntryType
from raftkv.storage.revision import SUB_BITS
from tests.sim.clients.history import Outcome, ViolationError
from tests.sim.clients.user_model import Users

Change = tuple[bytes, bytes, bool, int]
_RELATIONS: dict[int, ops.Relation] = {0: "=", 1: ">", 2: "<", 3: "!="}


class State(NamedTuple):
    """State of every member at an index."""

    revision: int
    compacted: int
    leases: int
    auth_revision: int


@dataclass(frozen=True, slots=True)
class Event:
    """A change as delivered by a watch."""

    revision: int
    key: bytes
    is_delete: bool
    kv: bytes
    previous: bytes | None


class Replay:
    """See the module.

    Arguments:
        index: of the last entry before the replay.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.revision = 1
        self.compacted = -1
        self.compactions_count = 0
        self.leases: dict[int, int] = {}
        self.ended: list[tuple[int, bool]] = []
        """Leases ended by the last entry, each with whether it expired."""
        self.states: dict[int, State] = {index: State(1, -1, 0, 1)}
        self.outcomes: dict[int, Outcome] = {}
        self.events: list[Event] = []
        self.changes: dict[int, list[Change]] = {}
        self._model = Model()
        self.users = Users(self._keys_of)
        self._first_event: dict[int, int] = {}
        self._last_lease_change = index

    def begin_with_users(self, changes: list[raft_pb2.AuthChange]) -> None:
        """Begin with users and roles."""
        self.users.begin(changes)
        self.states[self.index] = self.states[self.index]._replace(auth_revision=self.users.revision)

    # -- questions ------------------------------------------------------------------------------------------

    def read(self, key: str, end: str, revision: int) -> tuple[ops.KeyValue, ...]:
        """Return the live keys of an interval at a revision."""
        return self._model.read(key, end, revision)

    def position(self, revision: int) -> int:
        """Return the position in ``events`` of the first event at or after a revision."""
        while revision <= self.revision:
            if revision in self._first_event:
                return self._first_event[revision]
            revision += 1
        return len(self.events)

    def check_changes(self, revision: int, changes: list[Change]) -> str:
        """Compare a store's changes of a revision with the log. Returns the difference as text; empty for none."""
        known = self.changes.get(revision)
        if known is None:
            return self._check_first(revision, changes)
        return "" if known == changes else f"revision {revision} is {changes}, elsewhere {known}"

    def _check_first(self, revision: int, changes: list[Change]) -> str:
        start = self._first_event.get(revision)
        if start is None:
            return f"revision {revision} is {changes}, the log makes none"
        expected = self.events[start : start + len(changes)]
        found = [(key, is_delete, kv) for key, kv, is_delete, _ in changes]
        of_revision = [event for event in self.events[start:] if event.revision == revision]
        if found != [(event.key, event.is_delete, event.kv) for event in of_revision]:
            return f"revision {revision} is {changes}, the log makes {of_revision}"
        for event, (_, _, _, previous) in zip(expected, changes, strict=True):
            mod = kv_pb2.KeyValue.FromString(event.previous).mod_revision if event.previous else 0
            if previous >> SUB_BITS != mod:
                return f"revision {revision} of {event.key!r} follows {previous >> SUB_BITS}, in the log {mod}"
        self.changes[revision] = changes
        return ""

    def _keys_of(self, lease_id: int) -> list[bytes]:
        return [key.encode() for key, kv in self._model.current.items() if kv.lease == lease_id]

    # -- applying -------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> None:
        """Apply the next entry. Raises ViolationError for a request that is in the log twice."""
        self.index = entry.index
        self.ended = []
        request = wire.decode(entry.data) if entry.type is EntryType.NORMAL else None
        if request is not None:
            kind, request_id, body = request
            if request_id in self.outcomes:
                raise ViolationError(
                    "K9", f"request {request_id} is in the log twice, the second time at {entry.index}"
                )
            caller = None
            if kind == Kind.IDENTIFIED:
                caller, kind, body = wire.decode_identified(body)
                refusal = self.users.refusal(caller, kind, body)
            else:
                refusal = self.users.refusal_without_user(kind)
            if refusal:
                self.outcomes[request_id] = Outcome(self.revision, error=refusal)
            else:
                outcome = self.outcomes[request_id] = self._execute(Kind(kind), body, entry.term)
                if kind == Kind.LEASE_GRANT and not outcome.error:
                    self.users.granted(rpc_pb2.LeaseGrantRequest.FromString(body).ID, caller)
        self.states[entry.index] = State(self.revision, self.compacted, len(self.leases), self.users.revision)

    def _execute(self, kind: Kind, body: bytes, term: int) -> Outcome:
        if kind in (Kind.PUT, Kind.DELETE_RANGE, Kind.TXN):
            return self._write(_request_of(kind, body))
        if kind is Kind.AUTH:
            return Outcome(self.revision, error=self.users.change(body))
        if kind is Kind.COMPACT:
            return self._compact(rpc_pb2.CompactionRequest.FromString(body).revision)
        if kind is Kind.LEASE_GRANT:
            grant = rpc_pb2.LeaseGrantRequest.FromString(body)
            if grant.ID in self.leases:
                return Outcome(self.revision, error="etcdserver: lease already exists")
            self.leases[grant.ID] = grant.TTL
            return Outcome(self.revision, ops.LeaseResult(grant.TTL))
        if kind is Kind.LEASE_REVOKE:
            return self._revoke(rpc_pb2.LeaseRevokeRequest.FromString(body).ID)
        if kind is Kind.LEASE_EXPIRE:
            decision = raft_pb2.LeaseDecision.FromString(body)
            if decision.term == term:
                self._end_leases(list(decision.ids), expired=True)
        return Outcome(self.revision)

    def _write(self, request: ops.Request) -> Outcome:
        lacking = [lease for lease in _leases_of(request, self._model) if lease not in self.leases]
        if lacking:
            return Outcome(self.revision, error="etcdserver: requested lease not found")
        result = self._change(request)
        return Outcome(self.revision, result)

    def _change(self, request: ops.Request) -> ops.Result:
        log = self._model.log
        before = len(log)
        result = self._model.apply(request, self.revision + 1)
        if len(log) > before:
            self.revision += 1
            self._first_event[self.revision] = len(self.events)
            for _, key, new, old in log[before:]:
                self.events.append(
                    Event(self.revision, key.encode(), new is None, _encode(key, new, self.revision), _previous(old))
                )
        return result

    def _compact(self, revision: int) -> Outcome:
        if revision <= self.compacted:
            return Outcome(self.revision, error="etcdserver: mvcc: required revision has been compacted")
        if revision > self.revision:
            return Outcome(self.revision, error="etcdserver: mvcc: required revision is a future revision")
        self.compacted = revision
        self.compactions_count += 1
        return Outcome(self.revision, ops.Done())

    def _revoke(self, lease_id: int) -> Outcome:
        if lease_id not in self.leases:
            return Outcome(self.revision, error="etcdserver: requested lease not found")
        self._end_leases([lease_id], expired=False)
        return Outcome(self.revision, ops.Done())

    def _end_leases(self, lease_ids: list[int], *, expired: bool) -> None:
        for lease_id in lease_ids:
            if self.leases.pop(lease_id, None) is not None:
                self.ended.append((lease_id, expired))
                self.users.ended(lease_id)
                keys = sorted(key for key, kv in self._model.current.items() if kv.lease == lease_id)
                if keys:
                    self._change(ops.Txn((), tuple(ops.Delete(key) for key in keys)))


def _encode(key: str, kv: ops.KeyValue | None, revision: int) -> bytes:
    if kv is None:
        return kv_pb2.KeyValue(key=key.encode(), mod_revision=revision).SerializeToString()
    return kv_pb2.KeyValue(
        key=kv.key.encode(),
        create_revision=kv.create,
        mod_revision=kv.mod,
        version=kv.version,
        value=kv.value.encode(),
        lease=kv.lease,
    ).SerializeToString()


def _previous(kv: ops.KeyValue | None) -> bytes | None:
    return None if kv is None else _encode(kv.key, kv, 0)


def _leases_of(request: ops.Request, model: Model) -> list[int]:
    """Return the leases that a request attaches keys to, in the branch taken."""
    if isinstance(request, ops.Put):
        return [request.lease] if request.lease else []
    if isinstance(request, ops.Txn):
        holds = all(model._holds(guard) for guard in request.compares)
        parts = request.success if holds else request.failure
        return [part.lease for part in parts if isinstance(part, ops.Put) and part.lease]
    return []


# -- requests and answers as the model knows them -------------------------------------------------------------------


def _request_of(kind: Kind, body: bytes) -> ops.Request:
    if kind is Kind.PUT:
        return _put(rpc_pb2.PutRequest.FromString(body))
    if kind is Kind.DELETE_RANGE:
        return _delete(rpc_pb2.DeleteRangeRequest.FromString(body))
    txn = rpc_pb2.TxnRequest.FromString(body)
    return ops.Txn(
        tuple(
            ops.Compare(each.key.decode(), "mod", _RELATIONS[each.result], each.mod_revision) for each in txn.compare
        ),
        tuple(map(_part, txn.success)),
        tuple(map(_part, txn.failure)),
    )


def _put(request: Any) -> ops.Put:
    return ops.Put(request.key.decode(), request.value.decode(), request.prev_kv, request.lease)


def _delete(request: Any) -> ops.Delete:
    return ops.Delete(request.key.decode(), request.range_end.decode(), request.prev_kv)


def _part(operation: Any) -> ops.Part:
    which = operation.WhichOneof("request")
    if which == "request_put":
        return _put(operation.request_put)
    if which == "request_delete_range":
        return _delete(operation.request_delete_range)
    return ops.Range(operation.request_range.key.decode(), operation.request_range.range_end.decode())


def key_value(kv: Any) -> ops.KeyValue:
    """A KeyValue of an answer."""
    return ops.KeyValue(kv.key.decode(), kv.value.decode(), kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def result_of(response: Any) -> ops.Result:
    """Return the content of an answer without its header."""
    if isinstance(response, rpc_pb2.PutResponse):
        return ops.PutResult(key_value(response.prev_kv) if response.HasField("prev_kv") else None)
    if isinstance(response, rpc_pb2.RangeResponse):
        return ops.RangeResult(tuple(map(key_value, response.kvs)))
    if isinstance(response, rpc_pb2.DeleteRangeResponse):
        return ops.DeleteResult(response.deleted, tuple(map(key_value, response.prev_kvs)))
    if isinstance(response, rpc_pb2.TxnResponse):
        return ops.TxnResult(response.succeeded, tuple(map(_part_result, response.responses)))
    if isinstance(response, rpc_pb2.LeaseGrantResponse):
        return ops.LeaseResult(response.TTL)
    return ops.Done()


def _part_result(part: Any) -> Any:
    return result_of(getattr(part, part.WhichOneof("response")))
