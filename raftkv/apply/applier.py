"""Application of committed entries to the store.

    outcome = applier.apply(data)         # one committed entry
    outcome.error or header(outcome.revision) + outcome.body

Applied is applied: a ``StatusError`` is an outcome like any other, reached alike on every member. Applying is total:
whatever a committed entry holds has one outcome.

- A body that is no request of its kind is refused (``MalformedEntryError``). All members have the same bytes, so all
  refuse; to stop instead would let one entry end the cluster for good, since it is met again after each restart.
- Enums are open: values that this version does not know are kept and listed as numbers (alarms), hold (compares) or
  do nothing (sort targets, actions), as in etcd where it survives them. New ones are refused before they are proposed.
- A kind that this version does not know stops the member (``UnknownEntryError``): the others may know it.

Any other exception leaves ``apply`` as ``InvariantError`` and stops the member, because its state may no longer be
that of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from google.protobuf.message import DecodeError

from raftkv import __version__, errors
from raftkv.apply import ranges, response, txn
from raftkv.apply import request as requests
from raftkv.apply.alarms import Alarms, MetaStore
from raftkv.apply.leases import Leases
from raftkv.apply.membership import Membership
from raftkv.apply.ranges import ReadView
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.pb.rpc_pb2 import PutRequest
from raftkv.storage.mvcc_range import PinnedView

Kind = requests.Kind


class WriteTxn(txn.WriteView, Protocol):
    """A write txn with its end."""

    def end(self) -> object:
        """Make the writes visible to readers."""


class Store(ReadView, ranges.SmallView, MetaStore, Protocol):
    """The part of the MVCC store that applying needs."""

    revision: int
    compact_revision: int

    def begin(self) -> WriteTxn:
        """Open a write txn."""

    def poison(self) -> None:
        """Commit nothing any more."""

    def compact(self, revision: int, on_done: Callable[[], None] | None = None) -> None:
        """Make revisions below unreadable and schedule their removal."""

    @property
    def is_compacting(self) -> bool:
        """Whether a removal is not finished yet."""

    def pin(self) -> PinnedView:
        """The present, for reads that take long."""

    def lease_keys_unordered(self, lease: int) -> list[bytes]:
        """The keys attached to a lease."""

    def known_count(self, key: bytes, range_end: bytes) -> int:
        """Keys of an interval that a read of it looks at."""


class Outcome:
    """What one applied entry answers.

    Attributes:
        revision: for the response header.
        body: bytes of the response after its header.
        error: the refusal, if it was refused; the state is untouched then.
    """

    __slots__ = ("body", "error", "revision")

    def __init__(self, revision: int, body: bytes = b"", error: errors.StatusError | None = None) -> None:
        self.revision = revision
        self.body = body
        self.error = error


PARSERS: Final[dict[int, Callable[[bytes], Any]]] = {
    Kind.PUT: rpc_pb2.PutRequest.FromString,
    Kind.DELETE_RANGE: rpc_pb2.DeleteRangeRequest.FromString,
    Kind.TXN: rpc_pb2.TxnRequest.FromString,
    Kind.COMPACT: rpc_pb2.CompactionRequest.FromString,
    Kind.ALARM: rpc_pb2.AlarmRequest.FromString,
    Kind.MEMBER_ATTRIBUTES: raft_pb2.MemberRecord.FromString,
    Kind.LEASE_GRANT: rpc_pb2.LeaseGrantRequest.FromString,
    Kind.LEASE_REVOKE: rpc_pb2.LeaseRevokeRequest.FromString,
    Kind.LEASE_EXPIRE: raft_pb2.LeaseDecision.FromString,
    Kind.LEASE_RENEW: raft_pb2.LeaseDecision.FromString,
}


class Applier:
    """Executes entries in log order.

    Arguments:
        store: the MVCC store.
        alarms: raised alarms.
        membership: the members shown to clients.
        leases: the granted leases.

    Attributes:
        term: Raft term of the entry being applied; decisions of a leader hold under its own term alone.
    """

    def __init__(self, store: Store, alarms: Alarms, membership: Membership, leases: Leases) -> None:
        self.store = store
        self.alarms = alarms
        self.membership = membership
        self.leases = leases
        self.term = 0
        self._when_compacted: list[Callable[[], None]] = []
        self._handlers: dict[int, Callable[[Any], Outcome]] = {
            Kind.PUT: self._put,
            Kind.DELETE_RANGE: self._delete_range,
            Kind.TXN: self._txn,
            Kind.COMPACT: self._compact,
            Kind.ALARM: self._alarm,
            Kind.MEMBER_ATTRIBUTES: self._member_attributes,
            Kind.LEASE_GRANT: self._lease_grant,
            Kind.LEASE_REVOKE: self._lease_revoke,
            Kind.LEASE_EXPIRE: self._lease_expire,
            Kind.LEASE_RENEW: self._lease_renew,
        }

    def apply(self, kind: int, body: bytes, request: Any = None) -> Outcome:
        """Execute one entry.

        Arguments:
            kind: of the request.
            body: its protobuf bytes.
            request: the same already parsed, where the caller has it.

        Raises:
            UnknownEntryError: this version does not know the kind.
            InvariantError: the entry could not be executed for a reason that is not an answer.
        """
        handler = self._handlers.get(kind)
        if handler is None:
            raise _unknown(kind, body)
        try:
            if request is None:
                request = PARSERS[kind](body)
            if self.alarms.any:
                refusal = self.alarms.refusal(kind, request)
                if refusal is not None:
                    return Outcome(self.store.revision, error=refusal)
            return handler(request)
        except errors.StatusError as error:
            return Outcome(self.store.revision, error=error)
        except DecodeError:
            return Outcome(self.store.revision, error=errors.MalformedEntryError())
        except BaseException as error:
            # Whatever the entry has done by now must never be committed under the applied index of the one before.
            self.store.poison()
            if isinstance(error, errors.InvariantError) or not isinstance(error, Exception):
                raise
            raise errors.InvariantError(f"applying an entry of kind {kind} failed: {error!r}") from error

    def _put(self, request: PutRequest) -> Outcome:
        if request.lease or request.prev_kv or request.ignore_value or request.ignore_lease:
            return self._put_with_options(request)
        # The plain put is most of all writes: no call between here and the store.
        write = self.store.begin()
        write.put(request.key, request.value)
        write.end()
        return Outcome(self.store.revision)

    def _put_with_options(self, request: PutRequest) -> Outcome:
        txn.check_put(self.store, request, self.leases)
        write = self.store.begin()
        revision, body = txn.put(write, request)
        write.end()
        return Outcome(revision, body)

    def _delete_range(self, request: rpc_pb2.DeleteRangeRequest) -> Outcome:
        write = self.store.begin()
        revision, body = txn.delete_range(write, request)
        write.end()
        return Outcome(revision, body)

    def _txn(self, request: rpc_pb2.TxnRequest) -> Outcome:
        path = txn.choose_path(self.store, request)
        txn.check_path(self.store, path, self.leases)
        write = self.store.begin()
        body = txn.execute(write, path)
        write.end()
        return Outcome(self.store.revision, body)

    def read_txn(self, request: rpc_pb2.TxnRequest) -> Outcome:
        """Answer a read-only txn from the current state, outside the log.

        Raises:
            CompactedError, FutureRevisionError: a range asks for a revision that cannot be read.
        """
        path = txn.choose_path(self.store, request)
        view: Any = self.store  # a read-only path calls none of the writing methods
        txn.check_ranges(view, path)
        return Outcome(self.store.revision, txn.execute(view, path))

    def _compact(self, request: rpc_pb2.CompactionRequest) -> Outcome:
        self.store.compact(request.revision, self._compacted)
        return Outcome(self.store.revision)

    def when_compacted(self, callback: Callable[[], None]) -> None:
        """Call back once the removal of every compaction so far is durable on this member."""
        if self.store.is_compacting:
            self._when_compacted.append(callback)
        else:
            callback()

    def _compacted(self) -> None:
        if not self.store.is_compacting:
            waiting, self._when_compacted = self._when_compacted, []
            for callback in waiting:
                callback()

    def _alarm(self, request: rpc_pb2.AlarmRequest) -> Outcome:
        answer = rpc_pb2.AlarmResponse(alarms=self.alarms.execute(request))
        return Outcome(self.store.revision, answer.SerializeToString())

    def _member_attributes(self, record: raft_pb2.MemberRecord) -> Outcome:
        self.membership.set_attributes(record)
        return Outcome(self.store.revision)

    def _lease_grant(self, request: rpc_pb2.LeaseGrantRequest) -> Outcome:
        self.leases.grant(request.ID, request.TTL)
        return Outcome(self.store.revision, response.integer(2, request.ID) + response.integer(3, request.TTL))

    def _lease_revoke(self, request: rpc_pb2.LeaseRevokeRequest) -> Outcome:
        self.leases.revoke(request.ID)
        return Outcome(self.store.revision)

    def _lease_expire(self, decision: raft_pb2.LeaseDecision) -> Outcome:
        self._check_term(decision)
        self.leases.expire(decision.ids)
        return Outcome(self.store.revision)

    def _lease_renew(self, decision: raft_pb2.LeaseDecision) -> Outcome:
        self._check_term(decision)
        self.leases.renew(decision.ids)
        return Outcome(self.store.revision)

    def _check_term(self, decision: raft_pb2.LeaseDecision) -> None:
        """Refuse what a leader decided before another took over: the new one may have decided otherwise."""
        if decision.term != self.term:
            raise errors.LeaderChangedError


def _unknown(kind: int, body: bytes) -> errors.UnknownEntryError:
    needed = requests.needed_version(kind, body)
    return errors.UnknownEntryError(
        f"the log holds an entry of kind {kind}, unknown to raftkv {__version__}: run raftkv {needed} on this data"
    )
