"""Users, roles and what they may do: the part of a client that looks after them.

await kv.users.add("alice", "pw")                          # in a prompt: raftkvctl user add alice
await kv.roles.add("jobs")
await kv.roles.grant("jobs", "readwrite", "jobs/", prefix=True)
await kv.users.grant_role("alice", "jobs")
await kv.users.enable_auth()                               # needs a user root with the role root

Keys are those of the store, also for a view. A change holds at once, for calls that are under way too.
"""

from __future__ import annotations

from typing import NamedTuple

from raftkv.client.credentials import Secret
from raftkv.client.keys import Text, prefix_end, to_bytes
from raftkv.client.rpc import methods
from raftkv.client.scope import Part
from raftkv.pb import auth_pb2, rpc_pb2

KINDS = ("read", "write", "readwrite")
"""What a permission allows."""

_OPEN_ENDED = b"\0"


class Permission(NamedTuple):
    """What a role may do with an interval of keys.

    Attributes:
        kind: one of ``KINDS``.
        key: where the interval begins.
        range_end: where it ends, that key excluded; empty: it is the key alone; ``b"\\0"``: it has no end.
    """

    kind: str
    key: bytes
    range_end: bytes

    @property
    def is_open_ended(self) -> bool:
        """Whether it reaches to the last key."""
        return self.range_end == _OPEN_ENDED

    @property
    def is_prefix(self) -> bool:
        """Whether it is all keys that begin with ``key``."""
        return bool(self.key) and prefix_end(self.key) == self.range_end


class AuthStatus(NamedTuple):
    """Whether users are asked for, and how often users and roles were changed."""

    is_enabled: bool
    revision: int


def interval(key: Text, end: Text = b"", *, prefix: bool = False, from_key: bool = False) -> tuple[bytes, bytes]:
    r"""Return the interval of a permission, as it goes over the wire.

    >>> interval("a/", prefix=True), interval("", prefix=True), interval("k", from_key=True)
    ((b'a/', b'a0'), (b'\x00', b'\x00'), (b'k', b'\x00'))

    Arguments:
        key: where it begins.
        end: where it ends; empty: it is the key alone.
        prefix: all keys that begin with ``key``.
        from_key: all keys from ``key`` on.
    """
    first = to_bytes(key)
    if (prefix or from_key) and not first:
        return _OPEN_ENDED, _OPEN_ENDED
    if prefix:
        return first, prefix_end(first)
    return first, _OPEN_ENDED if from_key else to_bytes(end)


class Users(Part):
    """The part of a client that knows users, and whether they are asked for."""

    async def enable_auth(self, *, timeout_s: float | None = None) -> None:
        """Ask for users from now on; whoever is nobody is refused.

        Raises:
            RootUserNotExistError, RootRoleNotExistError: nobody could change anything any more.
        """
        await self.scope.call(methods.AUTH_ENABLE, rpc_pb2.AuthEnableRequest(), timeout_s)

    async def disable_auth(self, *, timeout_s: float | None = None) -> None:
        """Ask for users no longer: everybody may do everything."""
        await self.scope.call(methods.AUTH_DISABLE, rpc_pb2.AuthDisableRequest(), timeout_s)

    async def auth_status(self, *, timeout_s: float | None = None) -> AuthStatus:
        """Return whether users are asked for, and the revision of users and roles."""
        answer = await self.scope.call(methods.AUTH_STATUS, rpc_pb2.AuthStatusRequest(), timeout_s)
        return AuthStatus(answer.enabled, answer.authRevision)

    async def add(self, name: str, password: str | Secret | None, *, timeout_s: float | None = None) -> None:
        """Add a user.

        Arguments:
            name: of the user.
            password: None: the user has none, and is known by the name in its certificate alone.
            timeout_s: None: the client's.

        Raises:
            UserEmptyError, UserAlreadyExistError: the name cannot be used.
        """
        request = rpc_pb2.AuthUserAddRequest(name=name, options=auth_pb2.UserAddOptions(no_password=password is None))
        request.password = "" if password is None else await Secret(password).reveal()
        await self.scope.call(methods.USER_ADD, request, timeout_s)

    async def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a user; its tokens are void. Raises ``UserNotFoundError``."""
        await self.scope.call(methods.USER_DELETE, rpc_pb2.AuthUserDeleteRequest(name=name), timeout_s)

    async def get(self, name: str, *, timeout_s: float | None = None) -> list[str]:
        """Return the roles of a user. Raises ``UserNotFoundError``."""
        return list((await self.scope.call(methods.USER_GET, rpc_pb2.AuthUserGetRequest(name=name), timeout_s)).roles)

    async def list(self, *, timeout_s: float | None = None) -> list[str]:
        """Return the names of all users."""
        return list((await self.scope.call(methods.USER_LIST, rpc_pb2.AuthUserListRequest(), timeout_s)).users)

    async def change_password(self, name: str, password: str | Secret, *, timeout_s: float | None = None) -> None:
        """Give a user another password; its tokens are void. Raises ``UserNotFoundError``."""
        text = await Secret(password).reveal()
        request = rpc_pb2.AuthUserChangePasswordRequest(name=name, password=text)
        await self.scope.call(methods.USER_CHANGE_PASSWORD, request, timeout_s)

    async def grant_role(self, name: str, role: str, *, timeout_s: float | None = None) -> None:
        """Give a user a role; nothing happens if it has it. Raises ``UserNotFoundError``, ``RoleNotFoundError``."""
        request = rpc_pb2.AuthUserGrantRoleRequest(user=name, role=role)
        await self.scope.call(methods.USER_GRANT_ROLE, request, timeout_s)

    async def revoke_role(self, name: str, role: str, *, timeout_s: float | None = None) -> None:
        """Take a role from a user. Raises ``UserNotFoundError``, ``RoleNotGrantedError``."""
        request = rpc_pb2.AuthUserRevokeRoleRequest(name=name, role=role)
        await self.scope.call(methods.USER_REVOKE_ROLE, request, timeout_s)


class Roles(Part):
    """The part of a client that knows roles."""

    async def add(self, role: str, *, timeout_s: float | None = None) -> None:
        """Add a role, which may nothing yet. Raises ``RoleEmptyError``, ``RoleAlreadyExistError``."""
        await self.scope.call(methods.ROLE_ADD, rpc_pb2.AuthRoleAddRequest(name=role), timeout_s)

    async def delete(self, role: str, *, timeout_s: float | None = None) -> None:
        """Delete a role, also from all users. Raises ``RoleNotFoundError``."""
        await self.scope.call(methods.ROLE_DELETE, rpc_pb2.AuthRoleDeleteRequest(role=role), timeout_s)

    async def get(self, role: str, *, timeout_s: float | None = None) -> list[Permission]:
        """Return what a role may do. Raises ``RoleNotFoundError``."""
        answer = await self.scope.call(methods.ROLE_GET, rpc_pb2.AuthRoleGetRequest(role=role), timeout_s)
        return [Permission(KINDS[one.permType], one.key, one.range_end) for one in answer.perm]

    async def list(self, *, timeout_s: float | None = None) -> list[str]:
        """Return the names of all roles."""
        return list((await self.scope.call(methods.ROLE_LIST, rpc_pb2.AuthRoleListRequest(), timeout_s)).roles)

    async def grant(
        self,
        role: str,
        kind: str,
        key: Text,
        end: Text = b"",
        *,
        prefix: bool = False,
        from_key: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Let a role do something with keys; another kind for the same interval takes the place of the one before.

        Arguments:
            role: which.
            kind: one of ``KINDS``.
            key, end, prefix, from_key: see ``interval``.
            timeout_s: None: the client's.

        Raises:
            RoleNotFoundError: there is no such role.
            ValueError: there is no such kind.
        """
        first, last = interval(key, end, prefix=prefix, from_key=from_key)
        permission = auth_pb2.Permission(key=first, range_end=last)
        permission.permType = (auth_pb2.Permission.READ, auth_pb2.Permission.WRITE, auth_pb2.Permission.READWRITE)[
            KINDS.index(kind)
        ]
        request = rpc_pb2.AuthRoleGrantPermissionRequest(name=role, perm=permission)
        await self.scope.call(methods.ROLE_GRANT_PERMISSION, request, timeout_s)

    async def revoke(
        self,
        role: str,
        key: Text,
        end: Text = b"",
        *,
        prefix: bool = False,
        from_key: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Take a permission from a role: that of just this interval.

        Arguments:
            role: which.
            key, end, prefix, from_key: see ``interval``.
            timeout_s: None: the client's.

        Raises:
            RoleNotFoundError, PermissionNotGrantedError: there is none.
        """
        first, last = interval(key, end, prefix=prefix, from_key=from_key)
        request = rpc_pb2.AuthRoleRevokePermissionRequest(role=role, key=first, range_end=last)
        await self.scope.call(methods.ROLE_REVOKE_PERMISSION, request, timeout_s)
