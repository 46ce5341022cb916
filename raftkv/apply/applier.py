"""Application of committed entries to the store.

    outcome = applier.apply(kind, body)   # one committed entry
    outcome.error or header(outcome.revision) + outcome.body

A refused entry is still an applied entry: a ``StatusError`` is an outcome like any other, the same on every member.
Applying is total: every committed entry has one outcome.

- A body that is not a request of its kind is refused (``MalformedEntryError``). All members have the same bytes, so all
  refuse them; stopping instead would let one entry end the cluster for good, because it is applied again after each
  restart.
- Enums are open: values that this version does not know are stored and listed as numbers (alarms), are true (compares)
  or have no effect (sort targets, actions), as in etcd where etcd survives them. New ones are refused before they are
  proposed.
- A kind that this version does not know stops the member (``UnknownEntryError``): other members may know it.

Any other exception leaves ``apply`` as ``InvariantError`` and stops the member, because its state may then differ from
that of the other members.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final

from google.protobuf.message import DecodeError

from raftkv import __version__, errors
from raftkv.apply import ranges, txn, wire
from raftkv.apply.alarms import Alarms
from raftkv.apply.auth.rights import KINDS_OF_MEMBERS, Rights
from raftkv.apply.auth.store import AuthStore, Pieces
from raftkv.apply.leases import Leases
from raftkv.apply.limits import Limits
from raftkv.apply.membership import Downgrade, Membership
from raftkv.apply.quotas import Quotas
from raftkv.apply.wire import Caller
from raftkv.pb import admin_pb2, raft_pb2, rpc_pb2
from raftkv.storage.mvcc import Store
from raftkv.storage.revision import SUB_MASK
from raftkv.storage.selection import finish

Kind = wire.Kind


class Outcome:
    """The result of one applied entry.

    Attributes:
        revision: revision for the response header.
        body: the response after its header; only its beginning if the rest is to be read.
        error: the refusal, if it was refused; the state is unchanged then.
        read: reads the whole body, if that may be too much for one turn of the loop: ``read(view, grow, body)`` as
            ``txn.read_answer``, on a view that was pinned after the entry was applied; ``None``: there is no more.
    """

    __slots__ = ("body", "error", "read", "revision")

    def __init__(
        self,
        revision: int,
        body: bytes = b"",
        error: errors.StatusError | None = None,
        read: Callable[..., Generator[None, None, ranges.Answer]] | None = None,
    ) -> None:
        self.revision = revision
        self.body = body
        self.read = read
        self.error = error
        if error is not None:
            # The error refers to the frames of applying, and these to this outcome: drop the cycle.
            error.__traceback__ = None

    def check(self) -> None:
        """Raise the refusal, if there is one; call only once, because the raised error refers to frames with this."""
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


Work = Generator[None, None, Outcome]
"""An entry that is applied in pieces: each ``next`` takes a few milliseconds at most."""

AT_ONCE_MAX: Final = 500
"""Number of keys and operations up to which an entry is applied at once: about 5 ms of the loop."""

CHANGES_MAX: Final = SUB_MASK + 1
"""Changes of one revision. A request with more is refused; a lease with more keys ends in several revisions."""

PARSERS: Final[dict[int, Callable[[bytes], Any]]] = {
    Kind.PUT: wire.parse_put,
    Kind.DELETE_RANGE: rpc_pb2.DeleteRangeRequest.FromString,
    Kind.TXN: wire.parse,
    Kind.COMPACT: rpc_pb2.CompactionRequest.FromString,
    Kind.ALARM: rpc_pb2.AlarmRequest.FromString,
    Kind.MEMBER_ATTRIBUTES: raft_pb2.MemberRecord.FromString,
    Kind.LEASE_GRANT: rpc_pb2.LeaseGrantRequest.FromString,
    Kind.LEASE_REVOKE: rpc_pb2.LeaseRevokeRequest.FromString,
    Kind.LEASE_EXPIRE: raft_pb2.LeaseDecision.FromString,
    Kind.LEASE_RENEW: raft_pb2.LeaseDecision.FromString,
    Kind.HISTORY_QUOTA: lambda body: admin_pb2.QuotaSetRequest.FromString(wire.unversioned(body)),
    Kind.LIMIT: lambda body: admin_pb2.Limit.FromString(wire.unversioned(body)),
    Kind.AUTH: lambda body: raft_pb2.AuthChange.FromString(wire.unversioned(body)),
    Kind.DOWNGRADE: lambda body: rpc_pb2.DowngradeInfo.FromString(wire.unversioned(body)),
}


class Applier:
    """The state machine: executes entries in log order.

    Arguments:
        store: the MVCC store.
        alarms: raised alarms.
        membership: the members shown to clients.
        leases: the granted leases.
        at_once_max: number of keys that one entry may look at or change at once; more are done in pieces.
        changes_max: maximum number of changes in one revision.

    Attributes:
        downgrade: the downgrade job of the cluster.
        quotas: quotas of prefixes.
        limits: rate limits of users, roles and prefixes, which members enforce when a request arrives.
        auth, rights: users and roles, and their permissions.
        term, index: term and index of the current entry; decisions of a leader are valid only in its own term.
    """

    def __init__(
        self,
        store: Store,
        alarms: Alarms,
        membership: Membership,
        leases: Leases,
        *,
        at_once_max: int = AT_ONCE_MAX,
        changes_max: int = CHANGES_MAX,
    ) -> None:
        self.store = store
        # Entries whose changes must be counted are executed in pieces.
        self._at_once_max = min(at_once_max, changes_max // 2)
        self._changes_max = changes_max
        self.alarms = alarms
        self.membership = membership
        self.leases = leases
        self.downgrade = Downgrade(store)
        self.quotas = Quotas(store)
        self.limits = Limits(store)
        self.auth = AuthStore(store)
        self.rights = Rights(self.auth, store, leases)
        membership.check_caller = self._check_change_of_members
        self.term = self.index = 0
        self._is_answered = True
        self._user = b""
        self._when_compacted: list[Callable[[], None]] = []
        self._handlers: dict[int, Callable[[Any], Outcome | Work]] = {
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
            Kind.HISTORY_QUOTA: self._prefix_quota,
            Kind.LIMIT: self._limit,
            Kind.DOWNGRADE: self._downgrade,
            Kind.AUTH: self._auth,
        }

    def apply(self, kind: int, body: bytes, request: Any = None, *, is_answered: bool = True) -> Outcome:
        """Execute one entry at once, however long it takes.

        Arguments:
            kind, body, request, is_answered: as in ``begin``, which also documents the errors.
        """
        outcome = self.begin(kind, body, request, is_answered=is_answered)
        if not isinstance(outcome, Outcome):
            outcome = finish(outcome)
        if outcome.read is not None:
            view = self.store.pin()
            try:
                _, pieces = finish(outcome.read(view))
            finally:
                view.let_go()
            outcome.body, outcome.read = b"".join(pieces), None
        return outcome

    def begin(self, kind: int, body: bytes, request: Any = None, *, is_answered: bool = True) -> Outcome | Work:
        """Execute one entry, or begin to if it is much work.

        Arguments:
            kind: kind of the request.
            body: protobuf bytes of the request.
            request: the parsed request, if the caller has it; it may be a ``PlainTxn`` or a ``PlainPut``.
            is_answered: whether a caller on this member waits for the response; if not, reads that are only for the
                response may be skipped.

        Returns:
            The outcome, or work that must be completed before anything else is applied. Meanwhile readers of the store
            see the state before the entry.

        Raises:
            UnknownEntryError: this version does not know the kind.
            InvariantError: the entry could not be executed, for a reason that is not a refusal.
        """
        caller = None
        self._user = b""
        if kind == wire.IDENTIFIED:
            try:
                caller, kind, body = wire.decode_identified(body)
            except errors.MalformedEntryError as error:
                return Outcome(self.store.revision, error=error)
            self._user = caller.user if self.auth.is_enabled else b""
        handler = self._handlers.get(kind)
        if handler is None:
            raise _unknown(kind, body)
        self._is_answered = is_answered
        try:
            if request is None:
                request = PARSERS[kind](body)
            # Rights may have changed since the request was admitted. They are checked before the alarms, so that a
            # caller without rights learns nothing about alarms.
            if self.auth.is_enabled and (caller is not None or kind not in KINDS_OF_MEMBERS):
                request = _message(request)
                left = self.rights.check_in_pieces(kind, request, caller)
                if left is not None:
                    return self._drive(kind, self._execute_after(left, kind, request))
            # The alarms are part of the state, so every member refuses the same entries.
            if self.alarms.any:
                self.alarms.check(kind, request)
            if self.quotas.is_active and self.quotas.passes_over_keys:
                return self._drive(kind, self._execute(kind, request))
            outcome = handler(request)
            if not isinstance(outcome, Outcome):
                return self._drive(kind, outcome)
        except errors.StatusError as error:
            outcome = Outcome(self.store.revision, error=error)
        # Only a faulty or hostile member proposes such bytes; all members refuse them, which keeps them equal.
        except DecodeError:
            outcome = Outcome(self.store.revision, error=errors.MalformedEntryError())
        except BaseException as error:
            raise self._failed(kind, error) from error
        return outcome

    def _execute_after(self, checks: Generator[None, None, None], kind: int, request: Any) -> Work:
        """Finish the checks of an entry, then execute it."""
        yield from checks
        self.alarms.check(kind, request)
        return (yield from self._execute(kind, request))

    def _execute(self, kind: int, request: Any) -> Work:
        outcome = self._handlers[kind](request)
        if not isinstance(outcome, Outcome):
            return (yield from outcome)
        yield
        return outcome

    def _drive(self, kind: int, work: Work) -> Work:
        """Run the slow part of an entry; its errors become outcomes, like those of the fast part."""
        try:
            if not self.quotas.is_active:
                return (yield from work)
            while True:
                outcome: Outcome | None = None
                try:
                    next(work)
                except StopIteration as end:
                    outcome = end.value
                # Count the changes in pieces, so that the end of a transaction of a million changes is short too.
                yield from self.quotas.account_unfinished(self.store.unfinished_changes)
                yield from self.quotas.count_owed()
                if outcome is not None:
                    return outcome
                yield
        except errors.StatusError as error:
            return Outcome(self.store.revision, error=error)
        except GeneratorExit:
            raise  # either a received database replaces these changes, or the member stops
        except BaseException as error:
            raise self._failed(kind, error) from error

    def _failed(self, kind: int, error: BaseException) -> BaseException:
        """Poison the store: a partial entry must never be committed with the applied index of the previous one."""
        self.store.poison()
        if isinstance(error, errors.InvariantError) or not isinstance(error, Exception):
            return error
        return errors.InvariantError(f"applying an entry of kind {kind} failed: {error!r}")

    def _put(self, request: rpc_pb2.PutRequest | wire.PlainPut) -> Outcome:
        if not isinstance(request, wire.PlainPut):
            return self._put_with_options(request)
        if self.quotas.is_active:
            return self._put_with_options(request.message())
        if request.lease:
            wire.check_lease(request, self.leases)
        # Most writes are plain puts: no further calls before the store.
        write = self.store.begin()
        write.put(request.key, request.value, request.lease)
        write.end()
        return Outcome(self.store.revision)

    def _put_with_options(self, request: rpc_pb2.PutRequest) -> Outcome:
        txn.check_put(self.store, request, self.leases)
        if self.quotas.is_active:
            self.quotas.check_put(request)
        write = self.store.begin()
        revision, body = txn.put(write, request)
        write.end()
        return Outcome(revision, body)

    def _delete_range(self, request: rpc_pb2.DeleteRangeRequest) -> Outcome | Work:
        # Nothing on this member needs the previous values, so do not read them.
        if not self._is_answered:
            request.prev_kv = False
        if request.range_end:
            count = self.store.known_count(request.key, request.range_end)
            reads = request.prev_kv or self.quotas.is_active
            if count > self._at_once_max or (reads and count > txn.VALUES_AT_ONCE):
                return self._delete_range_in_pieces(request)
        write = self.store.begin()
        revision, body = txn.delete_range(write, request)
        write.end()
        return Outcome(revision, body)

    def _delete_range_in_pieces(self, request: rpc_pb2.DeleteRangeRequest) -> Work:
        self._check_changes(self.store.range(request.key, request.range_end, count_only=True).count)
        write = self.store.begin()
        deleted = yield from txn.delete_in_pieces(write, request)
        step = write.bound, deleted
        write.end()
        if not request.prev_kv:
            return Outcome(self.store.revision, wire.delete_range_body(deleted, ()))
        return Outcome(self.store.revision, read=partial(txn.read_deleted, request=request, step=step))

    def _txn(self, request: rpc_pb2.TxnRequest | wire.PlainTxn) -> Outcome | Work:
        if not isinstance(request, wire.PlainTxn):
            return self._any_txn(request)
        size = request.size
        if (
            self.quotas.is_active
            or size > self._at_once_max
            or (size > txn.VALUES_AT_ONCE and request.values(self._is_answered) > txn.VALUES_AT_ONCE)
        ):
            return self._any_txn(request.message())
        store = self.store
        succeeded = wire.choose(store, request)
        branch = request.success if succeeded else request.failure
        wire.check(branch, self.leases)
        write = store.begin()
        body = wire.execute_txn(write, succeeded, branch, is_answered=self._is_answered)
        write.end()
        return Outcome(store.revision, body)

    def _any_txn(self, request: rpc_pb2.TxnRequest) -> Outcome | Work:
        budget = txn.Budget(self._at_once_max)
        try:
            path = txn.choose_path(self.store, request, budget)
            executed = path if self._is_answered else txn.without_answers(path)
            txn.spend_operations(self.store, executed, budget, is_counted=self.quotas.is_active)
        except txn.NeedsSlicing:
            # Nothing was changed yet: choose the path again, from the same state and with the same result.
            return self._txn_in_pieces(request, [] if self._is_answered else None)
        # Check the path including responses, because refusals must not depend on whether a caller waits here.
        txn.check_path(self.store, path, self.leases)
        if self.quotas.is_active:
            finish(self.quotas.check_path(path))
        write = self.store.begin()
        body = txn.execute(write, executed)
        write.end()
        return Outcome(self.store.revision, body)

    def _txn_in_pieces(self, request: rpc_pb2.TxnRequest, steps: list[txn.Step] | None) -> Work:
        path = yield from txn.choose_path_in_pieces(self.store, request)
        txn.check_path(self.store, path, self.leases)
        if self.quotas.is_active:
            yield from self.quotas.check_path(path)
        yield
        # Sub-revisions have 24 bits; a revision that overflows halfway could not be undone.
        self._check_changes((yield from txn.count_changes(self.store, path)))
        write = self.store.begin()
        yield from txn.execute_in_pieces(write, path, steps)
        # Let the quotas count the remaining changes before the end.
        yield
        write.end()
        read = None if steps is None else partial(txn.read_answer, path=path, steps=iter(steps))
        return Outcome(self.store.revision, wire.txn_body(path.succeeded, ()), read=read)

    def _check_changes(self, changes: int) -> None:
        if changes > self._changes_max:
            raise errors.TooManyChangesError(
                f"raftkv: the request makes {changes} changes, one revision holds at most {self._changes_max}"
            )

    def read_txn(self, request: rpc_pb2.TxnRequest) -> Outcome:
        """Answer a read-only txn from the current state, without the log.

        Raises:
            CompactedError, FutureRevisionError: a range requests a revision that cannot be read.
        """
        revision, pieces = finish(txn.read_in_pieces(self.store, request))
        return Outcome(revision, b"".join(pieces))

    def _compact(self, request: rpc_pb2.CompactionRequest) -> Outcome:
        self.store.compact(request.revision, self._compacted)
        if self.quotas.is_active:
            self.quotas.compact(request.revision)
        return Outcome(self.store.revision)

    def when_compacted(self, callback: Callable[[], None]) -> None:
        """Call back when the deletions of every compaction so far are durable on this member."""
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

    def _prefix_quota(self, request: admin_pb2.QuotaSetRequest) -> Work:
        quota = yield from self.quotas.execute(request)
        body = b"" if quota is None else admin_pb2.QuotaSetResponse(quota=quota.message()).SerializeToString()
        return Outcome(self.store.revision, body)

    def _limit(self, limit: admin_pb2.Limit) -> Outcome:
        self.limits.execute(limit)
        return Outcome(self.store.revision)

    def _auth(self, change: raft_pb2.AuthChange) -> Outcome | Work:
        answer = self.auth.execute(change, self.index)
        if isinstance(answer, Generator):
            return self._auth_in_pieces(answer)
        return Outcome(self.store.revision, answer.SerializeToString())

    def _auth_in_pieces(self, pieces: Pieces) -> Work:
        answer = yield from pieces
        return Outcome(self.store.revision, answer.SerializeToString())

    def _downgrade(self, wanted: rpc_pb2.DowngradeInfo) -> Outcome:
        self.downgrade.execute(wanted)
        return Outcome(self.store.revision)

    def _check_change_of_members(self, caller: Caller | None) -> None:
        if self.auth.is_enabled:
            self.rights.check_root(caller)

    def _member_attributes(self, record: raft_pb2.MemberRecord) -> Outcome:
        self.membership.set_attributes(record)
        return Outcome(self.store.revision)

    def _lease_grant(self, request: rpc_pb2.LeaseGrantRequest) -> Outcome:
        self.leases.grant(request.ID, request.TTL, self._user)
        return Outcome(self.store.revision, wire.integer(2, request.ID) + wire.integer(3, request.TTL))

    def _lease_revoke(self, request: rpc_pb2.LeaseRevokeRequest) -> Outcome | Work:
        self.leases.check(request.ID)
        return self._end_leases((request.ID,), expired=False)

    def _lease_expire(self, decision: raft_pb2.LeaseDecision) -> Outcome | Work:
        # A deposed leader's decision may be based on a lease that the next leader has renewed.
        self._check_term(decision)
        return self._end_leases(decision.ids, expired=True)

    def _end_leases(self, lease_ids: Sequence[int], *, expired: bool) -> Outcome | Work:
        keys = sum(map(self.store.attachments.count, lease_ids))
        work = self._end_leases_in_pieces(lease_ids, expired)
        at_once_max = min(self._at_once_max, txn.VALUES_AT_ONCE) if self.quotas.is_active else self._at_once_max
        return work if keys > at_once_max else finish(work)

    def _end_leases_in_pieces(self, lease_ids: Sequence[int], expired: bool) -> Work:
        yield from self.leases.end(lease_ids, self._changes_max, expired=expired)
        return Outcome(self.store.revision)

    def _lease_renew(self, decision: raft_pb2.LeaseDecision) -> Outcome:
        self._check_term(decision)
        self.leases.renew(decision.ids)
        return Outcome(self.store.revision)

    def _check_term(self, decision: raft_pb2.LeaseDecision) -> None:
        """Refuse a decision of an earlier leader: the new one may have decided otherwise."""
        if decision.term != self.term:
            raise errors.LeaderChangedError


def _message(request: Any) -> Any:
    return request.message() if isinstance(request, (wire.PlainTxn, wire.PlainPut)) else request


def _unknown(kind: int, body: bytes) -> errors.UnknownEntryError:
    needed = wire.needed_version(kind, body)
    return errors.UnknownEntryError(
        f"the log holds an entry of kind {kind}, unknown to raftkv {__version__}: run raftkv {needed} on this data"
    )
