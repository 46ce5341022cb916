"""The users and roles: in memory, and in their own buckets in etcd's form.

    authUsers    name  ->  authpb.User
    authRoles    name  ->  authpb.Role

    directory.users[b"alice"].roles          # ["reader"]
    directory.key_set(user, write=True)      # the keys that its roles together let it write

Invariants

- Memory and buckets agree. ``role.holders`` are the users that name the role; users that name a role that does not
  exist are recorded too, because the role root may be granted before it exists.
- Everything that a client can make grow has a limit here. The limits bound the cost of one change (a deleted role is
  taken from all its users in one turn: 2 us each), the cost of a check, and the amount that a start reads.
- The rights of a user are the union over its roles, computed on first use and kept until one of the roles changes. A
  user of one role shares the sets of that role. For the others at most ``JOINED_INTERVALS_MAX`` intervals are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.apply.alarms import MetaStore
from raftkv.apply.auth.permissions import EMPTY, KeySet
from raftkv.apply.auth.records import Role, User
from raftkv.pb import auth_pb2
from raftkv.storage import schema

NAME_BYTES_MAX: Final = schema.META_KEY_BYTES_MAX
"""Longest name of a user or a role, which is a key of its bucket."""
USERS_MAX: Final = 10_000
HOLDERS_AT_ONCE: Final = 256
"""Users from whom a deleted role is taken without a pause: 1.5 ms."""
ROLES_MAX: Final = 10_000
ROLES_PER_USER_MAX: Final = 1_000
GRANTS_MAX: Final = 50_000
"""Roles of all users together: a deleted role is taken from all its users in one turn."""
PERMISSIONS_PER_USER_MAX: Final = 10_000
"""Permissions of all roles of a user together, and so of one role: joining them takes 20 ms."""
BYTES_MAX: Final = 16 << 20
"""Size of all records together, which a start reads."""
JOINED_INTERVALS_MAX: Final = 1_000_000
"""Intervals kept joined for users of several roles: 16 MB."""


_Record = TypeVar("_Record", Role, User)


class Directory:
    """Users and roles.

    Arguments:
        store: store of the records.

    Attributes:
        users, roles: by name; to be changed only by the methods.
    """

    def __init__(self, store: MetaStore) -> None:
        self._store = store
        self.users: dict[bytes, User] = {}
        self.roles: dict[str, Role] = {}
        self._size_bytes = 0
        self._grants = 0
        self._absent: dict[str, set[bytes]] = {}
        self._joined: OrderedDict[tuple[bytes, bool], KeySet] = OrderedDict()
        self._joined_intervals = 0

    def reload(self) -> None:
        """Read everything from the store.

        Raises:
            StorageError: a record cannot be read; the message names it.
        """
        self.roles = {role.name: role for role in self._read(schema.AUTH_ROLES, Role.parse)}
        self.users = {user.name: user for user in self._read(schema.AUTH_USERS, User.parse)}
        self._size_bytes = sum(role.size_bytes for role in self.roles.values())
        self._size_bytes += sum(user.size_bytes for user in self.users.values())
        self._joined.clear()
        self._joined_intervals = 0
        self._grants = 0
        self._absent = {}
        for user in self.users.values():
            names = user.roles
            self._grants += len(names)
            for name in names:
                self._join(user, name)

    def _read(self, bucket: bytes, parse: Callable[[bytes], _Record]) -> Iterator[_Record]:
        for key, data in self._store.meta_items(bucket):
            try:
                record = parse(data)
            except (DecodeError, UnicodeDecodeError):
                record = None
            if record is None or record.key != key:
                name = key.decode("utf-8", "backslashreplace")
                raise errors.StorageError(f"the record {name!r} in bucket {bucket.decode()} is none of a user or role")
            yield record

    # Users.

    def add_user(self, message: auth_pb2.User) -> None:
        """Add a user that does not exist.

        Raises:
            AuthLimitError: there are too many, or its name is too long.
        """
        if len(self.users) >= USERS_MAX:
            raise _limit(f"there are {USERS_MAX} users, more cannot be added")
        _check_name(message.name)
        self._check_bytes(message.ByteSize())
        user = User(message)
        self.users[user.name] = user
        self._size_bytes += user.size_bytes
        self._save_user(user)

    def delete_user(self, user: User) -> None:
        """Remove a user."""
        names = user.roles
        self._grants -= len(names)
        for name in names:
            self._leave(user, name)
        del self.users[user.name]
        self._size_bytes -= user.size_bytes
        self._store.meta_delete(schema.AUTH_USERS, user.name)
        self._forget(user)

    def set_password(self, user: User, password_hash: bytes) -> None:
        """Change the password of a user.

        Arguments:
            user: a user of the directory.
            password_hash: hash of the password; empty: none.
        """
        self._check_bytes(len(password_hash) - len(user.password_hash))
        self._size_bytes -= user.size_bytes
        user.message.password = password_hash
        self._size_bytes += user.size_bytes
        self._save_user(user)

    def _save_user(self, user: User) -> None:
        self._store.meta_put(schema.AUTH_USERS, user.name, user.record())

    # Roles of users.

    def grant_role(self, user: User, name: str) -> None:
        """Grant a user a role that it does not have.

        Raises:
            AuthLimitError: it would have too many roles, or permissions.
        """
        role = self.roles.get(name)
        count = len(role.permissions) if role is not None else 0
        if len(user.message.roles) >= ROLES_PER_USER_MAX:
            raise _limit(f"user {user.shown_name} has {ROLES_PER_USER_MAX} roles, more cannot be granted")
        if self._grants >= GRANTS_MAX:
            raise _limit(f"users have {GRANTS_MAX} roles together, more cannot be granted")
        self._check_permissions(user, count)
        self._check_bytes(len(name.encode()) + 4)
        before = user.size_bytes
        user.set_roles([*user.roles, name])
        self._size_bytes += user.size_bytes - before
        self._grants += 1
        self._save_user(user)
        self._forget(user)
        self._join(user, name)

    def revoke_role(self, user: User, name: str) -> None:
        """Revoke a role of a user."""
        before = user.size_bytes
        user.drop_role(name)
        self._size_bytes += user.size_bytes - before
        self._grants -= 1
        self._save_user(user)
        self._forget(user)
        self._leave(user, name)

    def _join(self, user: User, name: str) -> None:
        role = self.roles.get(name)
        if role is None:
            self._absent.setdefault(name, set()).add(user.name)
        else:
            role.holders.add(user.name)
            user.permission_count += len(role.permissions)

    def _leave(self, user: User, name: str) -> None:
        role = self.roles.get(name)
        if role is not None:
            role.holders.discard(user.name)
            user.permission_count -= len(role.permissions)
        elif (absent := self._absent.get(name)) is not None:
            absent.discard(user.name)
            if not absent:
                del self._absent[name]

    # Roles.

    def add_role(self, name: str) -> None:
        """Add a role that does not exist.

        Raises:
            AuthLimitError: there are too many, or its name is too long.
        """
        if len(self.roles) >= ROLES_MAX:
            raise _limit(f"there are {ROLES_MAX} roles, more cannot be added")
        _check_name(name.encode())
        role = Role(name)
        self._check_bytes(role.size_bytes)
        self._size_bytes += role.size_bytes
        self.roles[name] = role
        role.holders = self._absent.pop(name, set())
        self._save_role(role)

    def delete_role(self, role: Role) -> Iterator[None]:
        """Remove a role and take it from its users, with a pause after each ``HOLDERS_AT_ONCE`` users."""
        # In order, so that all members write the same batches.
        for number, name in enumerate(sorted(role.holders), 1):
            self.revoke_role(self.users[name], role.name)
            if number % HOLDERS_AT_ONCE == 0:
                yield
        del self.roles[role.name]
        self._size_bytes -= role.size_bytes
        self._store.meta_delete(schema.AUTH_ROLES, role.name.encode())

    def grant_permission(self, role: Role, key: bytes, range_end: bytes, kind: int) -> None:
        """Grant an interval to a role; an existing permission for exactly this interval is replaced.

        Arguments:
            role: a role of the directory.
            key, range_end: the interval, as on the wire.
            kind: a ``Permission.Type``.

        Raises:
            AuthLimitError: the role, or one of its users, would have too many permissions.
        """
        if not role.grants(key, range_end):
            if len(role.permissions) >= PERMISSIONS_PER_USER_MAX:
                raise _limit(f"role {role.name!r} has {PERMISSIONS_PER_USER_MAX} permissions, more cannot be granted")
            for name in sorted(role.holders):
                self._check_permissions(self.users[name], 1)
            self._check_bytes(len(key) + len(range_end) + 16)
        before = len(role.permissions)
        self._size_bytes -= role.size_bytes
        role.grant(key, range_end, kind)
        self._changed(role, before)

    def revoke_permission(self, role: Role, key: bytes, range_end: bytes) -> bool:
        """Revoke the permission for exactly this interval; return whether there was one.

        Arguments:
            role: a role of the directory.
            key, range_end: the interval, as on the wire.
        """
        before = len(role.permissions)
        size_bytes = role.size_bytes
        if not role.revoke(key, range_end):
            return False
        self._size_bytes -= size_bytes
        self._changed(role, before)
        return True

    def _changed(self, role: Role, before: int) -> None:
        self._size_bytes += role.size_bytes
        for name in role.holders:
            user = self.users[name]
            user.permission_count += len(role.permissions) - before
            self._forget(user)
        self._save_role(role)

    def _save_role(self, role: Role) -> None:
        self._store.meta_put(schema.AUTH_ROLES, role.name.encode(), role.record())

    # Limits.

    def _check_bytes(self, more: int) -> None:
        if self._size_bytes + more > BYTES_MAX:
            raise _limit(f"users and roles take {self._size_bytes} bytes, the most is {BYTES_MAX}")

    @staticmethod
    def _check_permissions(user: User, more: int) -> None:
        if user.permission_count + more > PERMISSIONS_PER_USER_MAX:
            count, most = user.permission_count, PERMISSIONS_PER_USER_MAX
            raise _limit(f"user {user.shown_name} has {count} permissions in its roles, the most is {most}")

    # Permissions of users.

    def key_set(self, user: User, *, write: bool) -> KeySet:
        """Return the keys that a user may read, or write; users with the role root may do more.

        Arguments:
            user: a user of the directory.
            write: True for the keys that it may write.
        """
        names = user.message.roles
        if len(names) == 1:
            role = self.roles.get(names[0])
            return EMPTY if role is None else role.writable if write else role.readable
        place = (user.name, write)
        found = self._joined.get(place)
        if found is not None:
            self._joined.move_to_end(place)
            return found
        roles = [role for name in names if (role := self.roles.get(name)) is not None]
        joined = KeySet.union(role.writable if write else role.readable for role in roles)
        self._joined[place] = joined
        self._joined_intervals += len(joined)
        while self._joined_intervals > JOINED_INTERVALS_MAX:
            self._joined_intervals -= len(self._joined.popitem(last=False)[1])
        return joined

    def _forget(self, user: User) -> None:
        for write in (False, True):
            joined = self._joined.pop((user.name, write), None)
            if joined is not None:
                self._joined_intervals -= len(joined)


def _check_name(name: bytes) -> None:
    if len(name) > NAME_BYTES_MAX:
        raise _limit(f"a name of {len(name)} bytes is too long, the most is {NAME_BYTES_MAX}")


def _limit(reason: str) -> errors.AuthLimitError:
    return errors.AuthLimitError(f"{errors.AuthLimitError.text} ({reason})")
