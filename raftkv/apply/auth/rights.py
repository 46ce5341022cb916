"""Checks the rights of a request's caller: the same rules on the member that receives the request and while applying.

    rights.check(Kind.PUT, request, caller)            # raises the StatusError that refuses it
    rights.check_read(caller, b"a", b"b")              # for requests that are not log entries: ranges, watches
    rights.check_root(caller)
    rights.check_user(caller)                          # any existing user of the current revision

While authentication is disabled this costs nothing: callers test ``auth.is_enabled`` first.

| kind | needs |
|---|---|
| PUT | WRITE on the key, also for the lease's owner; READ with prev_kv; WRITE on all keys of the lease that it names |
| DELETE_RANGE | WRITE on the interval; READ with prev_kv |
| TXN | READ for every compare; the rights of each operation in both branches and all nested txns |
| LEASE_GRANT | any user |
| LEASE_REVOKE | WRITE on all keys of the lease; a lease without keys can be revoked only by its owner |
| ALARM | any user to list, root to raise and disarm |
| AUTH | root; a member for the grant of a token, because the user has none yet |
| COMPACT, HISTORY_QUOTA, DOWNGRADE, and kinds without a row here | root |
| kinds that only members propose (MEMBER_ATTRIBUTES, LEASE_EXPIRE, LEASE_RENEW) | a member |

The rules are etcd 3.6's (server/etcdserver/apply/apply_auth.go). For requests that need root, the caller's current role
counts, also under an older auth revision, as in etcd: an administrator need not authenticate again after each
change of users. A request that was admitted for a deleted user is refused even if a new user has the same name.

Two rules go beyond etcd's, so that no user can lock another out of its lease, or end it, by knowing the id: a key that
the lease's owner may not write cannot be attached to it, and only its owner can revoke a lease without keys. The owner
is the user to whom it was granted, as long as a user of that name exists. Ownership restricts others, but gives the
owner no rights: a user who may write all keys of a lease may renew and revoke it, as in etcd. Root may do all of this.

Checking a put costs 1.6 us with one permission and 1.9 us with 10,000; the first check after a change of the user's
roles also joins these: 7 ms for a role of 10,000 permissions, 20 ms for two of 5,000.

A lease may have a million keys. Its keys are checked in order, and each step skips all keys within one part of the
user's writable set, so the work grows with the permissions and not with the keys: 4 us per part. After
``LOOKS_AT_ONCE`` parts, the rest is done in pieces while applying (``check_in_pieces``). The member that proposes skips
that rest: ``check`` may accept such a request, and applying refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

from raftkv import errors
from raftkv.apply.auth.directory import Directory
from raftkv.apply.auth.permissions import KeySet
from raftkv.apply.auth.records import User
from raftkv.apply.auth.store import AuthStore
from raftkv.apply.leases import Leases
from raftkv.apply.wire import Caller, Kind
from raftkv.pb import rpc_pb2
from raftkv.storage.mvcc import Store

LOOKS_AT_ONCE: Final = 64
"""Parts of a user's writable set that are checked for the leases of one request before the work is split into pieces:
about 0.2 ms, because a client may send hundreds of such requests for one turn."""
_LOOKS_PER_PIECE: Final = 64
LEASE_LOOKS_AT_ONCE: Final = 4
"""The same for one check of a lease, of which a client may request a thousand in one turn; usually there is one part.
"""
FOUND_MAX: Final = 10_000
"""Number of cached results of who may read or write a lease."""


Left = Generator[None, None, None] | None
"""The rest of a check, to be done in pieces: nearly always ``None``. It raises the errors of the call that returned it.
"""


class _Asked:
    """The rights of one user, and the leases of which its request needs all keys.

    Attributes:
        leases: leases with the keys that the request attaches to each; no keys: it ends the lease.
    """

    __slots__ = ("leases", "readable", "user", "writable")

    def __init__(self, directory: Directory, user: User) -> None:
        self.user = user
        self.readable = directory.key_set(user, write=False)
        self.writable = directory.key_set(user, write=True)
        self.leases: dict[int, list[bytes]] = {}


class Rights:
    """The checks of rights.

    Arguments:
        auth: users and roles.
        store: store with the keys of leases.
        leases: leases with their owners.
    """

    def __init__(self, auth: AuthStore, store: Store, leases: Leases) -> None:
        self._auth = auth
        self._store = store
        self._leases = leases
        self._found: dict[tuple[bytes, int, bool], bool] = {}
        """Whether a user may read, or write, all keys of a lease; valid for one state of users and keys."""
        self._found_at = (0, 0)
        self._rules: dict[int, Callable[[Any, _Asked], None]] = {
            Kind.PUT: _put,
            Kind.DELETE_RANGE: _delete_range,
            Kind.TXN: _txn,
            Kind.LEASE_GRANT: lambda request, asked: None,
            Kind.LEASE_REVOKE: _lease_revoke,
            Kind.ALARM: lambda request, asked: None,
        }

    # Requests of the log.

    def check(self, kind: int, request: Any, caller: Caller | None) -> None:
        """Check the rights for a request of the log, on the member that proposes it.

        This takes 0.1 ms at most. The remaining work, for leases whose keys are spread over thousands of permissions,
        is only done while applying.

        Arguments:
            kind: kind of the request.
            request: the parsed message.
            caller: caller of the request; ``None``: unknown.

        Raises:
            UserEmptyError, AuthOldRevisionError, PermissionDeniedError: as in etcd.
        """
        self.check_in_pieces(kind, request, caller)

    def check_txn(self, request: rpc_pb2.TxnRequest, caller: Caller | None) -> None:
        """Check the rights for a txn, on the member that receives it: every caller may send an empty one, as in etcd.

        Arguments:
            request, caller: as in ``check``. Raises the same errors.
        """
        if caller is not None or request.compare or request.success or request.failure:
            self.check(Kind.TXN, request, caller)

    def check_in_pieces(self, kind: int, request: Any, caller: Caller | None) -> Generator[None, None, None] | None:
        """Check the rights for a request of the log, while it is applied.

        Arguments:
            kind, request, caller: as in ``check``.

        Returns:
            ``None``, nearly always; or the remaining work, with a pause after each piece. It raises the same errors.

        Raises:
            UserEmptyError, AuthOldRevisionError, PermissionDeniedError: as in etcd.
        """
        rule = self._rules.get(kind)
        if rule is None or _is_of_root(request):
            self.check_root(caller)
            if caller is not None and caller.user:
                _check_root_kind(kind, request)
            return None
        user = self._user(caller)
        if user is None or user.is_root:
            return None
        asked = _Asked(self._auth.directory, user)
        rule(request, asked)
        return self._begin(asked) if asked.leases else None

    def _begin(self, asked: _Asked) -> Generator[None, None, None] | None:
        """Check the keys of leases; return the remaining work after a while."""
        work = self._lease_keys(asked)
        for _ in range(LOOKS_AT_ONCE // _LOOKS_PER_PIECE):
            if next(work, _DONE) is _DONE:
                return None
        return work

    def _lease_keys(self, asked: _Asked) -> Generator[None, None, None]:
        looks = 0
        for lease in sorted(asked.leases):
            self._check_owner(lease, asked)
            for _ in self._parts(lease, asked.writable):
                looks += 1
                if looks % _LOOKS_PER_PIECE == 0:
                    yield

    def _check_owner(self, lease: int, asked: _Asked) -> None:
        """Refuse a request that would lock the owner out of its lease, or end a lease without keys.

        Raises:
            PermissionDeniedError: the lease belongs to another user.
        """
        directory = self._auth.directory
        owner = directory.users.get(self._leases.owners.get(lease, b""))
        if owner is None or owner is asked.user:
            return
        attached = asked.leases[lease]
        if attached:
            keys = None if owner.is_root else directory.key_set(owner, write=True)
            is_refused = keys is not None and any(key not in keys for key in attached)
        else:
            is_refused = self._store.attachments.key_from(lease, b"") is None
        if is_refused:
            raise errors.PermissionDeniedError

    def _parts(self, lease: int, keys: KeySet) -> Iterator[None]:
        """Iterate over the parts of a set that contain keys of a lease, skipping the keys within each part.

        Raises:
            PermissionDeniedError: a key of the lease is not in the set.
        """
        end: bytes | None = b""
        while end is not None:
            yield
            key = self._store.attachments.key_from(lease, end)
            if key is None:
                return
            try:
                end = keys.end_after(key)
            except KeyError:
                raise errors.PermissionDeniedError from None

    # Callers.

    def _user(self, caller: Caller | None) -> User | None:
        """Return the calling user, admitted under the current revision; ``None`` for a member.

        Raises:
            UserEmptyError, AuthOldRevisionError, PermissionDeniedError: as in ``check``.
        """
        if caller is not None and caller.user and caller.auth_revision < self._auth.revision:
            raise errors.AuthOldRevisionError
        return self._named(caller)

    def _named(self, caller: Caller | None) -> User | None:
        """Return the calling user as it exists now; ``None`` for a member.

        Raises:
            UserEmptyError, PermissionDeniedError: as in ``check``.
            AuthOldRevisionError: the request was admitted for an earlier user with the same name.
        """
        if caller is None:
            raise errors.UserEmptyError
        if not caller.user:
            return None
        user = self._auth.directory.users.get(caller.user)
        if user is None:
            raise errors.PermissionDeniedError
        if caller.auth_revision < user.since:
            raise errors.AuthOldRevisionError
        return user

    def check_user(self, caller: Caller | None) -> None:
        """Refuse ``None``, users that do not exist, and callers of an older revision. Raises errors like ``check``."""
        self._user(caller)

    def check_known(self, caller: Caller | None) -> None:
        """Refuse ``None``, and users that do not exist now or are not the admitted ones. Raises the errors of
        ``check``.
        """
        self._named(caller)

    def check_root(self, caller: Caller | None) -> None:
        """Refuse a caller without the role root. Raises the errors of ``check_known``."""
        user = self._named(caller)
        if user is not None and not user.is_root:
            raise errors.PermissionDeniedError

    def check_read(self, caller: Caller | None, key: bytes, range_end: bytes) -> None:
        """Refuse reading an interval, its end as on the wire, without permission. Raises the errors of ``check``."""
        user = self._user(caller)
        if user is not None and not user.is_root:
            _need(self._auth.directory.key_set(user, write=False), key, range_end)

    def check_write(self, caller: Caller | None, key: bytes, range_end: bytes) -> None:
        """Refuse changing an interval, its end as on the wire, without permission. Raises the errors of ``check``."""
        user = self._user(caller)
        if user is not None and not user.is_root:
            _need(self._auth.directory.key_set(user, write=True), key, range_end)

    def check_lease(self, caller: Caller | None, lease_id: int, *, write: bool) -> Left:
        """Refuse a lease unless the caller may read, or write, all keys attached to it.

        This takes 4 us for each part of the caller's readable, or writable, set that contains a key of the lease: 40 ms
        for a user with 10,000 permissions, all of them used by one lease. So it may return remaining work. Results are
        cached until the next write.

        Arguments:
            caller, lease_id: the caller and the lease.
            write: True for write permission.

        Returns:
            The remaining work.

        Raises:
            UserEmptyError, AuthOldRevisionError, PermissionDeniedError: as in ``check``.
        """
        user = self._user(caller)
        if caller is None or user is None or user.is_root:
            return None
        state = self._auth.revision, self._store.revision
        if state != self._found_at:
            self._found_at = state
            self._found.clear()
        which = caller.user, lease_id, write
        is_allowed = self._found.get(which)
        if is_allowed is None:
            work = self._all_keys(which, caller, self._auth.directory.key_set(user, write=write))
            return None if next(work, _DONE) is _DONE else work
        if not is_allowed:
            raise errors.PermissionDeniedError
        return None

    def _all_keys(self, which: tuple[bytes, int, bool], caller: Caller, keys: KeySet) -> Generator[None, None, None]:
        """Check whether all keys of a lease are in a set, with pauses. Raises the errors of ``check_lease``."""
        state = self._found_at
        is_allowed: bool | None = True
        looks = 0
        try:
            for _ in self._parts(which[1], keys):
                looks += 1
                if looks == LEASE_LOOKS_AT_ONCE or looks % _LOOKS_PER_PIECE == 0:
                    yield
                    # Another call may have finished the same check meanwhile.
                    if state == self._found_at and which in self._found:
                        break
        except errors.PermissionDeniedError:
            is_allowed = False
        if looks >= LEASE_LOOKS_AT_ONCE:
            self._user(caller)  # users may have changed meanwhile
        if state == (self._auth.revision, self._store.revision) == self._found_at:
            is_allowed = self._found.get(which, is_allowed)
            if len(self._found) < FOUND_MAX:
                self._found[which] = bool(is_allowed)
        if not is_allowed:
            raise errors.PermissionDeniedError


KINDS_OF_MEMBERS: Final = frozenset((Kind.MEMBER_ATTRIBUTES, Kind.LEASE_EXPIRE, Kind.LEASE_RENEW))
"""Kinds that no client can propose: they need no rights and have no caller."""

_DONE: Final = object()


def _need(keys: KeySet, key: bytes, range_end: bytes) -> None:
    if not keys.covers(key, range_end):
        raise errors.PermissionDeniedError


def _check_root_kind(kind: int, request: Any) -> None:
    """Refuse kinds that only members may propose, even for root."""
    if kind in KINDS_OF_MEMBERS or (kind == Kind.AUTH and request.HasField("token_grant")):
        raise errors.PermissionDeniedError


def _put(request: rpc_pb2.PutRequest, asked: _Asked) -> None:
    key = request.key
    if key not in asked.writable or (request.prev_kv and key not in asked.readable):
        raise errors.PermissionDeniedError
    if request.lease:
        asked.leases.setdefault(request.lease, []).append(key)


def _delete_range(request: rpc_pb2.DeleteRangeRequest, asked: _Asked) -> None:
    _need(asked.writable, request.key, request.range_end)
    if request.prev_kv:
        _need(asked.readable, request.key, request.range_end)


def _lease_revoke(request: rpc_pb2.LeaseRevokeRequest, asked: _Asked) -> None:
    asked.leases[request.ID] = []


def _txn(request: rpc_pb2.TxnRequest, asked: _Asked) -> None:
    for compare in request.compare:
        _need(asked.readable, compare.key, compare.range_end)
    for branch in (request.success, request.failure):
        for operation in branch:
            _operation(operation, asked)


def _operation(operation: rpc_pb2.RequestOp, asked: _Asked) -> None:
    kind = operation.WhichOneof("request")
    if kind == "request_put":
        _put(operation.request_put, asked)
    elif kind == "request_range":
        _need(asked.readable, operation.request_range.key, operation.request_range.range_end)
    elif kind == "request_delete_range":
        _delete_range(operation.request_delete_range, asked)
    elif kind == "request_txn":
        _txn(operation.request_txn, asked)
    else:
        raise errors.PermissionDeniedError


def _is_of_root(request: Any) -> bool:
    """Return whether a request of a kind for all users still needs root: raising or disarming an alarm."""
    return isinstance(request, rpc_pb2.AlarmRequest) and request.action != rpc_pb2.AlarmRequest.GET
