"""One user and one role, in etcd's form (``authpb.User``, ``authpb.Role``).

    role = Role.parse(record)
    role.grant(b"a", b"b", Permission.READ)
    b"a" in role.readable                      # the union of its permissions
    role.record()                              # the bytes to store

A role of 10,000 permissions is encoded again with each change: the bytes of the permissions are kept, so that this
takes 0.2 ms.

Not here: which names exist, and the limits (``directory``).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, cast

from raftkv.apply import wire
from raftkv.apply.auth.permissions import KeySet
from raftkv.pb import auth_pb2

Permission = auth_pb2.Permission

ROOT: Final = "root"
"""The role that may do everything, and the user that must have it before authentication can be enabled."""
ROOT_USER: Final = ROOT.encode()

_READING: Final = frozenset((Permission.READ, Permission.READWRITE))
_WRITING: Final = frozenset((Permission.WRITE, Permission.READWRITE))
_KEY_PERMISSION: Final = 2


class Role:
    """A role.

    Arguments:
        name: name of the role.

    Attributes:
        permissions: key, range_end and type, in order; a type that this version does not know grants nothing.
        holders: names of the users that have it.
        size_bytes: size of its record.
    """

    __slots__ = ("_fields", "_readable", "_writable", "holders", "name", "permissions", "size_bytes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.permissions: list[tuple[bytes, bytes, int]] = []
        self.holders: set[bytes] = set()
        self._fields: list[bytes] = []
        self._forget()
        self.size_bytes = len(self.record())

    @classmethod
    def parse(cls, record: bytes) -> Role:
        """Return the role of a record.

        Raises:
            DecodeError, UnicodeDecodeError: the record is not a role.
        """
        message = auth_pb2.Role.FromString(record)
        role = cls(message.name.decode())
        role.permissions = sorted((each.key, each.range_end, each.permType) for each in message.keyPermission)
        role._fields = [_field(*permission) for permission in role.permissions]
        role.size_bytes = len(role.record())
        return role

    @property
    def key(self) -> bytes:
        """Its key in its bucket: the name."""
        return self.name.encode()

    def fields(self) -> list[bytes]:
        """Return its permissions in order, each as field 2 of ``authpb.Role``, as also in ``AuthRoleGetResponse``."""
        return list(self._fields)

    def record(self) -> bytes:
        """Return the role as ``authpb.Role``."""
        return b"".join((auth_pb2.Role(name=self.name.encode()).SerializeToString(), *self._fields))

    def grant(self, key: bytes, range_end: bytes, kind: int) -> None:
        """Grant an interval; an existing permission for exactly this interval is replaced.

        Arguments:
            key, range_end: the interval, as on the wire.
            kind: a ``Permission.Type``.
        """
        self.revoke(key, range_end)
        at = bisect_left(self.permissions, (key, range_end, kind))
        self.permissions.insert(at, (key, range_end, kind))
        self._fields.insert(at, _field(key, range_end, kind))
        self.size_bytes += len(self._fields[at])

    def revoke(self, key: bytes, range_end: bytes) -> bool:
        """Revoke the permission for exactly this interval; return whether there was one."""
        self._forget()
        at = bisect_left(self.permissions, (key, range_end))
        end = at
        # A snapshot file of etcd may contain one interval twice.
        while end < len(self.permissions) and self.permissions[end][:2] == (key, range_end):
            end += 1
        self.size_bytes -= sum(map(len, self._fields[at:end]))
        del self.permissions[at:end]
        del self._fields[at:end]
        return end > at

    def grants(self, key: bytes, range_end: bytes) -> bool:
        """Return whether there is a permission for exactly this interval."""
        at = bisect_left(self.permissions, (key, range_end))
        return at < len(self.permissions) and self.permissions[at][:2] == (key, range_end)

    def _forget(self) -> None:
        self._readable: KeySet | None = None
        self._writable: KeySet | None = None

    @property
    def readable(self) -> KeySet:
        """The keys that a user with this role may read."""
        if self._readable is None:
            self._readable = self._key_set(_READING)
        return self._readable

    @property
    def writable(self) -> KeySet:
        """The keys that a user with this role may write."""
        if self._writable is None:
            self._writable = self._key_set(_WRITING)
        return self._writable

    def _key_set(self, kinds: frozenset[int]) -> KeySet:
        return KeySet.of((key, range_end) for key, range_end, kind in self.permissions if kind in kinds)

    def messages(self) -> list[auth_pb2.Permission]:
        """Return the permissions as shown to clients."""
        return [_permission(*permission) for permission in self.permissions]


def _permission(key: bytes, range_end: bytes, kind: int) -> auth_pb2.Permission:
    # An open enum: the message accepts any number.
    return auth_pb2.Permission(permType=cast("auth_pb2.Permission.Type", kind), key=key, range_end=range_end)


def _field(key: bytes, range_end: bytes, kind: int) -> bytes:
    return wire.field(_KEY_PERMISSION, _permission(key, range_end, kind).SerializeToString())


class User:
    """A user.

    Arguments:
        message: its record.

    Attributes:
        message: its record.
        is_root: whether it may do everything.
        permission_count: number of permissions of all its roles.
    """

    __slots__ = ("is_root", "message", "permission_count")

    def __init__(self, message: auth_pb2.User) -> None:
        self.message = message
        self.permission_count = 0
        self.is_root = ROOT in message.roles

    @classmethod
    def parse(cls, record: bytes) -> User:
        """Return the user of a record.

        Raises:
            DecodeError: the record is not a user.
        """
        return cls(auth_pb2.User.FromString(record))

    def __repr__(self) -> str:
        return f"User({self.name!r})"

    @property
    def name(self) -> bytes:
        """Its name."""
        return self.message.name

    key = name
    """Its key in its bucket: the name."""

    @property
    def shown_name(self) -> str:
        """Its name in quotes, for messages."""
        return repr(self.name.decode("utf-8", "backslashreplace"))

    @property
    def roles(self) -> list[str]:
        """Names of its roles, in order."""
        return list(self.message.roles)

    @property
    def password_hash(self) -> bytes:
        """The bcrypt hash of its password; empty: no password is valid."""
        return self.message.password

    @property
    def has_password(self) -> bool:
        """Whether it may have a password: False for users who authenticate by certificate."""
        return not self.message.options.no_password

    @property
    def since(self) -> int:
        """The revision of users and roles at which this user was created; 0: unknown."""
        return self.message.raftkv_since

    @property
    def size_bytes(self) -> int:
        """Size of its record."""
        return self.message.ByteSize()

    def record(self) -> bytes:
        """Return the user as ``authpb.User``."""
        return self.message.SerializeToString(deterministic=True)

    def drop_role(self, name: str) -> None:
        """Remove one of its roles; takes 1 us, because thousands of users may have a deleted role."""
        self.message.roles.remove(name)
        self.is_root = self.is_root and name != ROOT

    def set_roles(self, roles: list[str]) -> None:
        """Replace its roles.

        Arguments:
            roles: their names.
        """
        self.message.roles[:] = sorted(roles)
        self.is_root = ROOT in roles
