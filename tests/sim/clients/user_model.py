"""Model of users, roles and their rights along the log, by the rules of ``auth_model``.

refusal = users.refusal(caller, kind, body)      # empty: the entry takes effect
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from raftkv.apply.wire import Caller, Kind, unversioned
from raftkv.pb import raft_pb2, rpc_pb2
from tests.compat.differential.auth_model import Model

OLD: Final = "etcdserver: revision of auth store is old"
DENIED: Final = "etcdserver: permission denied"
EMPTY: Final = "etcdserver: user name is empty"
NOT_GRANTED: Final = {
    "user_revoke_role": "etcdserver: role is not granted to the user",
    "role_revoke_permission": "etcdserver: permission is not granted to the role",
}
_OF_USERS: Final = (Kind.PUT, Kind.DELETE_RANGE, Kind.TXN, Kind.LEASE_GRANT, Kind.LEASE_REVOKE)
"""What others than root may cause."""
_PARSERS: Final[dict[int, Any]] = {
    Kind.PUT: rpc_pb2.PutRequest,
    Kind.DELETE_RANGE: rpc_pb2.DeleteRangeRequest,
    Kind.TXN: rpc_pb2.TxnRequest,
}


class Users:
    """Users and roles as of the last entry.

    Arguments:
        keys_of: the keys of a lease.
    """

    def __init__(self, keys_of: Callable[[int], list[bytes]]) -> None:
        self.revision = 1
        self._model = Model(keys_of)

    def begin(self, changes: list[raft_pb2.AuthChange]) -> None:
        """Set the users and roles that a cluster has before its first entry."""
        for change in changes:
            self._learn(change)

    def _learn(self, change: raft_pb2.AuthChange) -> None:
        kind = change.WhichOneof("change")
        self._model.learn(getattr(change, kind or ""))
        self.revision += kind != "enable"

    def granted(self, lease_id: int, caller: Caller | None) -> None:
        """Record a granted lease; with auth enabled the caller is its owner. No id is granted twice."""
        if caller is not None and caller.user and self._model.is_enabled:
            self._model.owners[lease_id] = caller.user.decode()

    def ended(self, lease_id: int) -> None:
        """Record the end of a lease."""
        self._model.owners.pop(lease_id, None)

    def refusal_without_user(self, kind: int) -> str:
        """Return why an entry without a caller has no effect; empty: it takes effect."""
        is_members = kind in (Kind.LEASE_EXPIRE, Kind.LEASE_RENEW, Kind.MEMBER_ATTRIBUTES)
        return EMPTY if self._model.is_enabled and not is_members else ""

    def refusal(self, caller: Caller, kind: int, body: bytes) -> str:
        """Return why an entry of a user has no effect; empty: it takes effect."""
        user = caller.user.decode()
        if not self._model.is_enabled or not user:
            return ""
        if kind not in _OF_USERS:
            return "" if self._model.is_root(user) else DENIED
        if caller.auth_revision < self.revision:
            return OLD
        if self._model.is_root(user) or kind == Kind.LEASE_GRANT:
            return ""
        if kind == Kind.LEASE_REVOKE:
            lease_id = rpc_pb2.LeaseRevokeRequest.FromString(body).ID
            return "" if self._model.may_revoke(user, lease_id) else DENIED
        return "" if self._model.may(user, _PARSERS[kind].FromString(body)) else DENIED

    def change(self, body: bytes) -> str:
        """Apply a change of the kinds that the simulation makes; return why it is refused, empty if it is not."""
        change = raft_pb2.AuthChange.FromString(unversioned(body))
        kind = change.WhichOneof("change") or ""
        request, model = getattr(change, kind), self._model
        if kind in ("user_grant_role", "user_revoke_role"):
            has = request.role in model.users[request.user if kind == "user_grant_role" else request.name]
            if has == (kind == "user_grant_role"):
                return NOT_GRANTED.get(kind, "")
        if kind == "role_revoke_permission" and (request.key, request.range_end) not in model.roles[request.role]:
            return NOT_GRANTED[kind]
        self._learn(change)
        return ""
