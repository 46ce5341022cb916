"""Rights of a request, checked against its caller: the same rules at the member that takes it and while applying.

    rights.check(Kind.PUT, request, caller)            # raises the StatusError that refuses it
    rights.check_read(caller, b"a", b"b")              # for what is no entry of the log: ranges, watches
    rights.check_root(caller)
    rights.check_user(caller)                          # any user that exists, of the present revision

Cheap where users are not asked for: callers test ``auth.is_enabled`` first.

| kind | needs |
|---|---|
| PUT | WRITE on the key, for the lease's owner too; READ with prev_kv; WRITE on all keys of the lease that it names |
| DELETE_RANGE | WRITE on the interval; READ with prev_kv |
| TXN | READ for every compare; both branches and all nested txns: each operation what it needs alone |
| LEASE_GRANT | any user |
| LEASE_REVOKE | WRITE on all keys of the lease; one without keys only its owner revokes |
| ALARM | any user to look, root to raise and disarm |
| AUTH | root; the grant of a token a member, as no user has one yet |
| COMPACT, PREFIX_QUOTA, DOWNGRADE, and kinds that have no row here | root |
| what members alone propose (MEMBER_ATTRIBUTES, LEASE_EXPIRE, LEASE_RENEW) | a member |

The rules are etcd 3.6's (server/etcdserver/apply/apply_auth.go). For requests that need root the
caller's present role counts, at any auth revision of its admission, as in etcd: an administrator need not log in anew
after each change of users. What was let in for a user who was deleted is refused to the next one of the same name.

Two rules go beyond etcd's, so that no user locks another out of its lease, or ends it, by knowing the id: a key that
the lease's owner may not write cannot be attached to it, and a lease without keys can be revoked by its owner alone.
The owner is the user to whom it was granted, as long as there is one of that name; the name restricts others, and gives
the owner no right: who may write all keys of a lease may renew and revoke it, as in etcd. Root may do all of it.

To check a put costs 1.6 us with one permission and 1.9 us with 10,000; the first one after a change of the user's roles
also joins these: 7 ms for a role of 10,000 permissions, 20 ms for two of 5,000.

A lease may have a million keys. Its keys are looked at in order, and one look leaps over all that lie in one part of
what the user may write: so the work grows with the permissions and not with the keys, 4 us a part. What is left after
``LOOKS_AT_ONCE`` parts is done in pieces while applying (``check_in_pieces``). The member that proposes leaves it out:
``check`` may let such a request pass, and applying refuses it.
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
"""Parts of what a user may write that are looked at for the leases of one request before the work is cut in pieces:
about 0.2 ms, because a client may send hundreds of such requests for one turn."""
_LOOKS_PER_PIECE: Final = 64
LEASE_LOOKS_AT_ONCE: Final = 4
"""The same for one question about a lease, of which a client may have a thousand in one turn; usual is one part."""
FOUND_MAX: Final = 10_000
"""Leases of which it is remembered who may read or write them."""


Left = Generator[None, None, None] | None
"""The rest of a check, to be done in pieces: None nearly always. It raises as the call that returned it."""


class _Asked:
    """The rights of one user, and the leases that its request needs all keys of.

    Attributes:
        leases: with the keys that the request attaches to each; none: it ends the lease.
    """

    __slots__ = ("leases", "readable", "user", "writable")

    def __init__(self, directory: Directory, user: User) -> None:
        self.user = user
        self.readable = directory.key_set(user, write=False)
        self.writable = directory.key_set(user, write=True)
        self.leases: dict[int, list[bytes]] = {}


class Rights:
    """The checks.

    Arguments:
        auth: users and roles.
        store: knows the keys of leases.
        leases: knows their owners.
    """

    def __init__(self, auth: AuthStore, store: Store, leases: Leases) -> None:
        self._auth = auth
        self._store = store
        self._leases = leases
        self._found: dict[tuple[bytes, int, bool], bool] = {}
        """Whether a user may read, or write, all keys of a lease; as of one state of users and keys."""
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
        """Refuse what a request of the log may not do, at the member that proposes it.

        It takes 0.1 ms at most: what is left then, of leases whose keys are scattered over thousands of permissions,
        is looked at while applying alone.

        Arguments:
            kind: of the request.
            request: the parsed message.
            caller: who asks; None: unknown.

        Raises:
            UserEmptyError, AuthOldRevisionError, PermissionDeniedError: as etcd's.
        """
        self.check_in_pieces(kind, request, caller)

    def check_txn(self, request: rpc_pb2.TxnRequest, caller: Caller | None) -> None:
        """Refuse what a txn may not do, at the member that takes it: an empty one is for every caller, as in etcd.

        Arguments:
            request, caller: as of ``check``. Raises as it.
        """
        if caller is not None or request.compare or request.success or request.failure:
            self.check(Kind.TXN, request, caller)

    def check_in_pieces(self, kind: int, request: Any, caller: Caller | None) -> Generator[None, None, None] | None:
        """Refuse what a request of the log may not do, while it is applied.

        Arguments:
            kind, request, caller: as of ``check``.

        Returns:
            None, nearly always; or what is left to look at, with a pause after each piece. It raises as this does.

        Raises:
            UserEmptyError, AuthOldRevisionError, PermissionDeniedError: as etcd's.
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
        """Look at the keys of leases; what is left after a while."""
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
        """Refuse what would lock the owner out of its lease, or end one that has no keys yet.

        Raises:
            PermissionDeniedError: the lease is another user's.
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
            is_refused = self._store.lease_key_from(lease, b"") is None
        if is_refused:
            raise errors.PermissionDeniedError

    def _parts(self, lease: int, keys: KeySet) -> Iterator[None]:
        """Leap over the keys of a lease that lie in one part of a set, one part at a time.

        Raises:
            PermissionDeniedError: a key of the lease is not in the set.
        """
        end: bytes | None = b""
        while end is not None:
            yield
            key = self._store.lease_key_from(lease, end)
            if key is None:
                return
            try:
                end = keys.end_after(key)
            except KeyError:
                raise errors.PermissionDeniedError from None

    # Callers.

    def _user(self, caller: Caller | None) -> User | None:
        """Return the user who calls, let in under the present revision; None for a member.

        Raises:
            UserEmptyError, AuthOldRevisionError, PermissionDeniedError: as of ``check``.
        """
        if caller is not None and caller.user and caller.auth_revision < self._auth.revision:
            raise errors.AuthOldRevisionError
        return self._named(caller)

    def _named(self, caller: Caller | None) -> User | None:
        """Return the user who calls, by the present users; None for a member.

        Raises:
            UserEmptyError, PermissionDeniedError: as of ``check``.
            AuthOldRevisionError: let in was an earlier user of the same name.
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
        """Refuse None, users that do not exist, and callers of an older revision. Raises as ``check``."""
        self._user(caller)

    def check_known(self, caller: Caller | None) -> None:
        """Refuse None, users that do not exist now, and those who had the name of a later one. Raises as ``check``."""
        self._named(caller)

    def check_root(self, caller: Caller | None) -> None:
        """Refuse a caller without the role root. Raises as ``check_known``."""
        user = self._named(caller)
        if user is not None and not user.is_root:
            raise errors.PermissionDeniedError

    def check_read(self, caller: Caller | None, key: bytes, range_end: bytes) -> None:
        """Refuse reading an interval, its end as on the wire. Raises as ``check``."""
        user = self._user(caller)
        if user is not None and not user.is_root:
            _need(self._auth.directory.key_set(user, write=False), key, range_end)

    def check_write(self, caller: Caller | None, key: bytes, range_end: bytes) -> None:
        """Refuse changing an interval, its end as on the wire. Raises as ``check``."""
        user = self._user(caller)
        if user is not None and not user.is_root:
            _need(self._auth.directory.key_set(user, write=True), key, range_end)

    def check_lease(self, caller: Caller | None, lease_id: int, *, write: bool) -> Left:
        """Refuse a lease unless the caller may read, or write, all keys attached to it.

        It takes 4 us for each part of what the caller may read, or write, that has a key of the lease: 40 ms for a user
        of 10,000 permissions, all of which it uses with one lease. So there may be something left to do. What was found
        holds until something is written.

        Arguments:
            caller, lease_id: who asks, and for which lease.
            write: whether it wants to write.

        Returns:
            What is left to look at.

        Raises:
            UserEmptyError, AuthOldRevisionError, PermissionDeniedError: as ``check``.
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
        """Look whether all keys of a lease are in a set, with pauses. Raises as ``check_lease``."""
        state = self._found_at
        is_allowed: bool | None = True
        looks = 0
        try:
            for _ in self._parts(which[1], keys):
                looks += 1
                if looks == LEASE_LOOKS_AT_ONCE or looks % _LOOKS_PER_PIECE == 0:
                    yield
                    # Another caller may have asked the same, and be done.
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
"""Kinds that no client can cause: they need no rights and name no caller."""

_DONE: Final = object()


def _need(keys: KeySet, key: bytes, range_end: bytes) -> None:
    if not keys.covers(key, range_end):
        raise errors.PermissionDeniedError


def _check_root_kind(kind: int, request: Any) -> None:
    """Refuse what not even root may cause: what members alone decide."""
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
    """Whether a request of a kind that users may cause is root's all the same: to raise an alarm, or to disarm it."""
    return isinstance(request, rpc_pb2.AlarmRequest) and request.action != rpc_pb2.AlarmRequest.GET
