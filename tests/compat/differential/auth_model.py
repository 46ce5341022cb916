"""Who may do what, as etcd 3.6 has it, written down once more and without any cleverness: sets of intervals, tried key
by key.

The player (``auth_requests``) asks it what etcd 3.5.1, the oracle, cannot know: its holes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from raftkv.pb import auth_pb2, rpc_pb2

Interval = tuple[bytes, bytes]
READ, WRITE, READWRITE = 0, 1, 2
ROOT = "root"


def _holds(interval: Interval, key: bytes) -> bool:
    first, end = interval
    return key == first if not end else first <= key and (end == b"\0" or key < end)


def covered(parts: Iterable[Interval], key: bytes, range_end: bytes) -> bool:
    """Whether every key of an interval is in one of the parts: its first key is, and each at which a part ends."""
    parts = list(parts)
    if not range_end:
        return any(_holds(part, key) for part in parts)
    if range_end == b"\0" and not any(end == b"\0" for _, end in parts):
        return False
    tried = {key, *(end or first + b"\0" for first, end in parts if end != b"\0")}
    return all(any(_holds(part, each) for part in parts) for each in tried if _holds((key, range_end), each))


@dataclass
class Model:
    """Users with their roles, roles with their permissions; as far as the oracle accepted them.

    Attributes:
        lease_keys: asks the oracle for the keys of a lease.
        owners: users to whom leases were granted, for raftkv's own rules.
    """

    lease_keys: Callable[[int], list[bytes]]
    is_enabled: bool = False
    users: dict[str, set[str]] = field(default_factory=dict)
    passwords: dict[str, str | None] = field(default_factory=dict)
    roles: dict[str, dict[Interval, int]] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)

    def is_root(self, user: str | None) -> bool:
        return user is not None and ROOT in self.users.get(user, ())

    def _parts(self, user: str, kinds: tuple[int, ...]) -> Iterator[Interval]:
        for role in self.users.get(user, ()):
            for interval, kind in self.roles.get(role, {}).items():
                if kind in kinds:
                    yield interval

    def may_read(self, user: str, key: bytes, range_end: bytes = b"") -> bool:
        return self.is_root(user) or covered(self._parts(user, (READ, READWRITE)), key, range_end)

    def may_write(self, user: str, key: bytes, range_end: bytes = b"") -> bool:
        return self.is_root(user) or covered(self._parts(user, (WRITE, READWRITE)), key, range_end)

    def _is_strange(self, user: str, lease: int) -> bool:
        owner = self.owners.get(lease, user)
        return owner != user and owner in self.users and not self.is_root(user)

    def shuts_out(self, user: str, request: rpc_pb2.PutRequest) -> bool:
        """Whether a put would attach a key to the lease of a user who may not write it."""
        return self._is_strange(user, request.lease) and not self.may_write(self.owners[request.lease], request.key)

    def may_attach(self, user: str, request: rpc_pb2.PutRequest) -> bool:
        """Whether a user may do a put, as etcd has it."""
        return (
            self.may_write(user, request.key)
            and (not request.prev_kv or self.may_read(user, request.key))
            and (not request.lease or all(self.may_write(user, key) for key in self.lease_keys(request.lease)))
        )

    def ends_of_another(self, user: str, lease: int) -> bool:
        """Whether a lease is another user's, and has no keys yet."""
        return self._is_strange(user, lease) and not self.lease_keys(lease)

    def may_revoke(self, user: str, lease: int) -> bool:
        """Whether a user may end a lease."""
        return not self.ends_of_another(user, lease) and all(
            self.may_write(user, key) for key in self.lease_keys(lease)
        )

    def may(self, user: str, request: Any) -> bool:
        """Whether a user may do a request of KV."""
        if isinstance(request, rpc_pb2.PutRequest):
            return self.may_attach(user, request) and not self.shuts_out(user, request)
        if isinstance(request, rpc_pb2.RangeRequest):
            return self.may_read(user, request.key, request.range_end)
        if isinstance(request, rpc_pb2.DeleteRangeRequest):
            may_write = self.may_write(user, request.key, request.range_end)
            return may_write and (not request.prev_kv or self.may_read(user, request.key, request.range_end))
        parts = [getattr(part, part.WhichOneof("request")) for part in (*request.success, *request.failure)]
        compares = all(self.may_read(user, each.key, each.range_end) for each in request.compare)
        return compares and all(self.may(user, part) for part in parts)

    def learn(self, request: Any) -> None:
        """Note a change that was accepted."""
        match request:
            case rpc_pb2.AuthEnableRequest():
                self.is_enabled = True
            case rpc_pb2.AuthDisableRequest():
                self.is_enabled = False
            case rpc_pb2.AuthUserAddRequest(name=name):
                self.users[name] = set()
                self.passwords[name] = None if request.options.no_password else request.password
            case rpc_pb2.AuthUserDeleteRequest(name=name):
                del self.users[name], self.passwords[name]
            case rpc_pb2.AuthUserChangePasswordRequest(name=name):
                if self.passwords[name] is not None:
                    self.passwords[name] = request.password
            case rpc_pb2.AuthUserGrantRoleRequest(user=name):
                self.users[name].add(request.role)
            case rpc_pb2.AuthUserRevokeRoleRequest(name=name):
                self.users[name].discard(request.role)
            case rpc_pb2.AuthRoleAddRequest(name=name):
                self.roles[name] = {}
            case rpc_pb2.AuthRoleDeleteRequest(role=name):
                del self.roles[name]
                for roles in self.users.values():
                    roles.discard(name)
            case rpc_pb2.AuthRoleGrantPermissionRequest(name=name, perm=auth_pb2.Permission() as perm):
                self.roles[name][perm.key, perm.range_end] = perm.permType
            case rpc_pb2.AuthRoleRevokePermissionRequest(role=name):
                del self.roles[name][request.key, request.range_end]
