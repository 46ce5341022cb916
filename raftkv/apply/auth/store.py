"""Users and roles, and whether authentication is enabled: replicated, in their own buckets.

    auth.execute(raft_pb2.AuthChange(user_add=...), index)   # applies an entry: a response, Pieces, or StatusError
    auth.users[b"alice"].password_hash                       # for reading; roles by name in ``auth.roles``
    auth.on_change.append(callback)                          # revision or is_enabled may have changed

Records are etcd's (``authpb.User``, ``authpb.Role``), so that snapshot files contain them:

    auth    authEnabled   ->  1 or 0 as one byte
            authRevision  ->  8 bytes, big-endian

The rules, their order and their errors are etcd's 3.6 (server/auth/store.go). The revision is 1 at first and grows by
one with each change. Enabling does not change it, nor do disabling while disabled and granting a role twice.

Deliberately different from etcd

- A role has at most one permission for an interval. etcd compares only the first permission with the same key, and may
  add a second one: a user whose permission is reduced keeps the old one.
- There are limits (``directory``).
- A log contains hashes of passwords, never passwords: an entry with a password is malformed.
- A token is granted only under the same revision of users under which its password was checked.
- A user has the revision of its creation, so that requests admitted for a deleted user with the same name are refused.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Callable, Generator
from typing import Any, Final

from raftkv import errors
from raftkv.apply.alarms import MetaStore
from raftkv.apply.auth.directory import Directory
from raftkv.apply.auth.permissions import is_interval
from raftkv.apply.auth.records import ROOT, ROOT_USER, Role, User
from raftkv.pb import auth_pb2, raft_pb2, rpc_pb2
from raftkv.storage import schema

Pieces = Generator[None, None, Any]
"""Work that pauses from time to time, and returns the response."""

OnTokenGrant = Callable[[bytes, bytes, int], None]
"""Called with user, SHA-256 of the token's secret part, and the index of the entry."""

ENABLED_KEY: Final = b"authEnabled"
REVISION_KEY: Final = b"authRevision"
_REVISION: Final = struct.Struct(">Q")
FIRST_REVISION: Final = 1
ON: Final = b"\x01"
OFF: Final = b"\x00"
_BCRYPT: Final = ("$2a$", "$2b$", "$2y$")
_BCRYPT_BYTES: Final = 60


class AuthStore:
    """Users, roles and their revision.

    Arguments:
        store: store of the records.

    Attributes:
        directory: users and roles.
        is_enabled: whether authentication is enabled.
        revision: grows with each change; 1 at first.
        on_change: called when either may have changed.
        on_token_grant: called when a user has given the right password to some member.
        on_password_change: called with the name of a user whose tokens become invalid: changed or deleted.
    """

    def __init__(self, store: MetaStore) -> None:
        self._store = store
        self.directory = Directory(store)
        self.is_enabled = False
        self.revision = FIRST_REVISION
        self.on_change: list[Callable[[], None]] = []
        self.on_token_grant: list[OnTokenGrant] = []
        self.on_password_change: list[Callable[[bytes], None]] = []
        self._rules: dict[str | None, Callable[[Any], Any]] = {
            "enable": self._enable,
            "disable": self._disable,
            "user_add": self._user_add,
            "user_delete": self._user_delete,
            "user_change_password": self._user_change_password,
            "user_grant_role": self._user_grant_role,
            "user_revoke_role": self._user_revoke_role,
            "role_add": self._role_add,
            "role_delete": self._role_delete,
            "role_grant_permission": self._role_grant_permission,
            "role_revoke_permission": self._role_revoke_permission,
        }
        self.reload()

    def reload(self) -> None:
        """Read everything from the store: at start, and after a received database replaced it.

        Raises:
            StorageError: a record cannot be read; the message names it.
        """
        self.directory.reload()
        found = dict(self._store.meta_items(schema.AUTH))
        self.is_enabled = found.get(ENABLED_KEY) == ON
        record = found.get(REVISION_KEY, bytes(_REVISION.size))
        if len(record) != _REVISION.size:
            raise errors.StorageError(f"the revision of users and roles has {len(record)} bytes")
        # 0 in files of etcd versions that did not write it yet.
        self.revision = max(_REVISION.unpack(record)[0], FIRST_REVISION)
        self._tell()

    def _tell(self) -> None:
        for callback in self.on_change:
            callback()

    @property
    def users(self) -> dict[bytes, User]:
        """The users by name, for reading."""
        return self.directory.users

    @property
    def roles(self) -> dict[str, Role]:
        """The roles by name, for reading."""
        return self.directory.roles

    def has_role(self, user: bytes, role: str) -> bool:
        """Return whether a user exists and has a role."""
        found = self.users.get(user)
        return found is not None and role in found.message.roles

    def execute(self, change: raft_pb2.AuthChange, index: int) -> Any:
        """Apply a change.

        Arguments:
            change: change in the entry.
            index: index of the entry.

        Returns:
            The response, without header; or work that must be completed and returns it.

        Raises:
            StatusError: the change is refused; nothing has changed.
        """
        kind = change.WhichOneof("change")
        if kind == "token_grant":
            return self._token_grant(change.token_grant, index)
        rule = self._rules.get(kind)
        if rule is None:
            raise errors.MalformedEntryError
        return rule(getattr(change, kind or ""))

    def _changed(self) -> None:
        self.revision += 1
        self._store.meta_put(schema.AUTH, REVISION_KEY, _REVISION.pack(self.revision))
        self._tell()

    # Enabling and disabling authentication.

    def _enable(self, request: rpc_pb2.AuthEnableRequest) -> rpc_pb2.AuthEnableResponse:
        if not self.is_enabled:
            root = self.users.get(ROOT_USER)
            if root is None:
                raise errors.RootUserNotExistError
            if not root.is_root:
                raise errors.RootRoleNotExistError
            self.is_enabled = True
            self._store.meta_put(schema.AUTH, ENABLED_KEY, ON)
            self._tell()
        return rpc_pb2.AuthEnableResponse()

    def _disable(self, request: rpc_pb2.AuthDisableRequest) -> rpc_pb2.AuthDisableResponse:
        if self.is_enabled:
            self.is_enabled = False
            self._store.meta_put(schema.AUTH, ENABLED_KEY, OFF)
            self._changed()
        return rpc_pb2.AuthDisableResponse()

    # Users.

    def _user(self, name: str) -> User:
        user = self.users.get(name.encode())
        if user is None:
            raise errors.UserNotFoundError
        return user

    def _user_add(self, request: rpc_pb2.AuthUserAddRequest) -> rpc_pb2.AuthUserAddResponse:
        name = request.name.encode()
        if not name:
            raise errors.UserEmptyError
        if name in self.users:
            raise errors.UserAlreadyExistError
        has_password = not request.options.no_password
        password_hash = _password_hash(request) if has_password else b""
        options = auth_pb2.UserAddOptions(no_password=not has_password)
        user = auth_pb2.User(name=name, password=password_hash, options=options, raftkv_since=self.revision + 1)
        self.directory.add_user(user)
        self._changed()
        return rpc_pb2.AuthUserAddResponse()

    def _user_delete(self, request: rpc_pb2.AuthUserDeleteRequest) -> rpc_pb2.AuthUserDeleteResponse:
        if self.is_enabled and request.name == ROOT:
            raise errors.InvalidAuthManagementError
        user = self._user(request.name)
        self.directory.delete_user(user)
        self._void_tokens(user.name)
        return rpc_pb2.AuthUserDeleteResponse()

    def _user_change_password(
        self, request: rpc_pb2.AuthUserChangePasswordRequest
    ) -> rpc_pb2.AuthUserChangePasswordResponse:
        user = self._user(request.name)
        self.directory.set_password(user, _password_hash(request) if user.has_password else b"")
        self._void_tokens(user.name)
        return rpc_pb2.AuthUserChangePasswordResponse()

    def _void_tokens(self, name: bytes) -> None:
        for callback in self.on_password_change:
            callback(name)
        self._changed()

    def _user_grant_role(self, request: rpc_pb2.AuthUserGrantRoleRequest) -> rpc_pb2.AuthUserGrantRoleResponse:
        user = self._user(request.user)
        if request.role != ROOT:
            self._role(request.role)
        if request.role not in user.message.roles:
            self.directory.grant_role(user, request.role)
            self._changed()
        return rpc_pb2.AuthUserGrantRoleResponse()

    def _user_revoke_role(self, request: rpc_pb2.AuthUserRevokeRoleRequest) -> rpc_pb2.AuthUserRevokeRoleResponse:
        if self.is_enabled and request.name == request.role == ROOT:
            raise errors.InvalidAuthManagementError
        user = self._user(request.name)
        if request.role not in user.message.roles:
            raise errors.RoleNotGrantedError
        self.directory.revoke_role(user, request.role)
        self._changed()
        return rpc_pb2.AuthUserRevokeRoleResponse()

    # Roles.

    def _role(self, name: str) -> Role:
        role = self.roles.get(name)
        if role is None:
            raise errors.RoleNotFoundError
        return role

    def _role_add(self, request: rpc_pb2.AuthRoleAddRequest) -> rpc_pb2.AuthRoleAddResponse:
        if not request.name:
            raise errors.RoleEmptyError
        if request.name in self.roles:
            raise errors.RoleAlreadyExistError
        self.directory.add_role(request.name)
        self._changed()
        return rpc_pb2.AuthRoleAddResponse()

    def _role_delete(self, request: rpc_pb2.AuthRoleDeleteRequest) -> Pieces:
        if self.is_enabled and request.role == ROOT:
            raise errors.InvalidAuthManagementError
        return self._role_delete_in_pieces(self._role(request.role))

    def _role_delete_in_pieces(self, role: Role) -> Pieces:
        yield from self.directory.delete_role(role)
        self._changed()
        return rpc_pb2.AuthRoleDeleteResponse()

    def _role_grant_permission(
        self, request: rpc_pb2.AuthRoleGrantPermissionRequest
    ) -> rpc_pb2.AuthRoleGrantPermissionResponse:
        if not request.HasField("perm"):
            raise errors.PermissionNotGivenError
        perm = request.perm
        if not is_interval(perm.key, perm.range_end):
            raise errors.InvalidAuthManagementError
        self.directory.grant_permission(self._role(request.name), perm.key, perm.range_end, perm.permType)
        self._changed()
        return rpc_pb2.AuthRoleGrantPermissionResponse()

    def _role_revoke_permission(
        self, request: rpc_pb2.AuthRoleRevokePermissionRequest
    ) -> rpc_pb2.AuthRoleRevokePermissionResponse:
        role = self._role(request.role)
        if not self.directory.revoke_permission(role, request.key, request.range_end):
            raise errors.PermissionNotGrantedError
        self._changed()
        return rpc_pb2.AuthRoleRevokePermissionResponse()

    # Tokens.

    def _token_grant(self, grant: raft_pb2.TokenGrant, index: int) -> rpc_pb2.AuthenticateResponse:
        if not self.is_enabled:
            raise errors.AuthNotEnabledError
        if grant.auth_revision != self.revision:
            raise errors.AuthOldRevisionError
        user = self.users.get(grant.user)
        if user is None or not user.has_password:
            raise errors.AuthFailedError
        for callback in self.on_token_grant:
            callback(grant.user, grant.token_sha256, index)
        return rpc_pb2.AuthenticateResponse()


def _password_hash(request: rpc_pb2.AuthUserAddRequest | rpc_pb2.AuthUserChangePasswordRequest) -> bytes:
    """Return the password hash in a request: in base64 as in etcd, or directly in place of the password.

    Raises:
        NoPasswordUserError: the hash is not base64, as in etcd.
        MalformedEntryError: there is a password in place of the hash.
    """
    if request.hashedPassword or not request.password:
        try:
            return base64.b64decode(request.hashedPassword, validate=True)
        except (binascii.Error, ValueError):
            raise errors.NoPasswordUserError from None
    if len(request.password) != _BCRYPT_BYTES or not request.password.startswith(_BCRYPT):
        raise errors.MalformedEntryError
    return request.password.encode()
