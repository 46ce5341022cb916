"""Administration of a cluster: members, status, compaction, alarms, snapshots, quotas, users.

for one in await kv.status(): print(one.endpoint, one.healthy, one.version, one.error)
await kv.compact((await kv.get("x")).mod_revision)
new = await kv.member_add(["http://10.0.0.4:2380"], learner=True)      # start it, then: member_promote(new.id)
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from raftkv.client.credentials import Secret
from raftkv.client.rpc import methods
from raftkv.client.scope import Part, Text, prefix_end, to_bytes
from raftkv.client.values import Alarm, EndpointStatus, Member, PrefixQuota, RateLimit
from raftkv.errors import StatusError, StorageError
from raftkv.pb import admin_pb2, auth_pb2, rpc_pb2
from raftkv.pb.enums import alarm_name, alarm_number

# -- snapshot -------------------------------------------------------------------------------------------------------
#
# Saves the database of one member as a file that etcd's tools can read.
#
#     saved = await kv.snapshot("backup.db")
#     print(saved.size_bytes, saved.version)
#
# The file is written as ``backup.db.part``. It is renamed when it is complete, has the right hash and is durable;
# after a failure it is removed. Only one process at a time may write there.

HASH_BYTES: Final = hashlib.sha256().digest_size
SECTOR_BYTES: Final = 512
"""The size of a database is a multiple of this; with its hash appended, the file's size is not."""

Progress = Callable[[int, int], None]
"""Called with the number of bytes received and the size of the whole database."""


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """A snapshot saved to a file.

    Attributes:
        path: path of the file.
        size_bytes: size of the file.
        version: storage version of the member; empty before etcd 3.6.
    """

    path: Path
    size_bytes: int
    version: str


async def save(
    messages: AsyncIterable[rpc_pb2.SnapshotResponse], to: str | os.PathLike[str], on_progress: Progress | None = None
) -> SavedSnapshot:
    """Write a snapshot stream to a file.

    Arguments:
        messages: responses of ``Maintenance.Snapshot``.
        to: path of the file. An existing file is replaced at the end; a symbolic link is followed.
        on_progress: called after each piece.

    Raises:
        StatusError: the member aborted the snapshot, or was lost.
        StorageError: the file cannot be written, or the snapshot is incomplete.
    """
    target = _target(to)
    part = target.with_name(target.name + ".part")
    try:
        part.unlink(missing_ok=True)  # left by a killed program, or made by a user who would read what is written to it
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _failed(f"could not open {part}", error) from None
    own = os.fstat(descriptor)
    try:
        with os.fdopen(descriptor, "wb") as file:
            saved = await _receive(messages, file, target, on_progress)
            file.flush()
            await asyncio.to_thread(os.fsync, descriptor)
            if not os.path.samestat(own, os.stat(part)):
                raise StorageError(f"could not write snapshot to {part} (another snapshot is being saved there)")
        os.replace(part, target)
        await asyncio.to_thread(_sync_directory, target)
    except OSError as error:
        raise _failed(f"could not write snapshot to {part}", error) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(own, os.stat(part)):  # else another snapshot is being saved there
                part.unlink()
    return saved


def _target(to: str | os.PathLike[str]) -> Path:
    """Return the path to write, with a symbolic link resolved; refuse to replace a device or a directory."""
    target = Path(os.path.realpath(to) if os.path.islink(to) else to)
    if not target.name:
        raise StorageError(f"could not open {os.fspath(to)!r} (is a directory)")
    with contextlib.suppress(OSError):
        mode = os.stat(to).st_mode
        if not stat.S_ISREG(mode):
            why = "is a directory" if stat.S_ISDIR(mode) else "not a regular file, which the snapshot would replace"
            raise StorageError(f"could not open {os.fspath(to)} ({why})")
    return target


async def _receive(
    messages: AsyncIterable[rpc_pb2.SnapshotResponse], file: BinaryIO, target: Path, on_progress: Progress | None
) -> SavedSnapshot:
    """Write all pieces; the last one is the hash of the others."""
    digest, waiting, received_bytes, version = hashlib.sha256(), b"", 0, ""
    async for message in messages:
        digest.update(waiting)
        file.write(waiting)
        waiting, version = message.blob, message.version
        received_bytes += len(waiting)
        if on_progress is not None:
            on_progress(received_bytes, received_bytes + message.remaining_bytes)
    if received_bytes % SECTOR_BYTES != HASH_BYTES:
        raise StorageError(f"sha256 checksum not found [bytes: {received_bytes}]")
    file.write(waiting)
    if waiting != digest.digest():
        raise StorageError(f"sha256 checksum of {received_bytes} bytes is wrong: the snapshot was damaged on its way")
    return SavedSnapshot(target, received_bytes, version)


def _sync_directory(path: Path) -> None:
    directory = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _failed(what: str, error: OSError) -> StorageError:
    return StorageError(f"{what} ({(error.strerror or str(error)).lower()})")


class Admin(Part):
    """The administration methods of a client."""

    async def status(self, endpoint: str | None = None, *, timeout_s: float | None = None) -> list[EndpointStatus]:
        """Return the status of every endpoint, queried concurrently; an unreachable endpoint has ``error`` set.

        Arguments:
            endpoint: query only this endpoint.
            timeout_s: limit for the whole call; None: the connection timeout.
        """
        limit_s = self.scope.core.options.dial_timeout_s if timeout_s is None else timeout_s
        endpoints = [one.text for one in self.scope.core.endpoints] if endpoint is None else [endpoint]
        return await asyncio.gather(*(self._status_of(one, limit_s) for one in endpoints))

    async def _status_of(self, endpoint: str, timeout_s: float) -> EndpointStatus:
        try:
            request = rpc_pb2.StatusRequest()
            answer = await self.scope.core.call_at(endpoint, methods.STATUS, request, timeout_s=timeout_s)
        except StatusError as error:
            return EndpointStatus(endpoint, str(error))
        return EndpointStatus(
            endpoint,
            version=answer.version,
            member_id=answer.header.member_id,
            leader_id=answer.leader,
            revision=answer.header.revision,
            db_size_bytes=answer.dbSize,
            raft_term=answer.raftTerm,
            raft_index=answer.raftIndex,
            raft_applied_index=answer.raftAppliedIndex,
            is_learner=answer.isLearner,
            errors=tuple(answer.errors),
        )

    async def members(self, *, max_staleness_s: float | None = None, timeout_s: float | None = None) -> list[Member]:
        """Return the members of the cluster.

        Arguments:
            max_staleness_s: as for ``get``.
            timeout_s: None: the client's.
        """
        request = rpc_pb2.MemberListRequest(linearizable=True)
        answer = await self.scope.call(methods.MEMBER_LIST, request, timeout_s, max_staleness_s)
        return _members(answer)

    async def member_add(
        self, peer_urls: Iterable[str], *, learner: bool = False, timeout_s: float | None = None
    ) -> Member:
        """Add a member and return it; then start the member with ``--initial-cluster-state=existing``.

        Arguments:
            peer_urls: URLs at which the other members will reach it.
            learner: whether to add it as a learner, which gets all data but does not vote until ``member_promote``.
            timeout_s: None: the client's.

        Raises:
            StatusError: the cluster refuses: a URL is in use, too many learners, or the quorum would be at risk.
        """
        request = rpc_pb2.MemberAddRequest(peerURLs=peer_urls, isLearner=learner)
        return _member((await self.scope.call(methods.MEMBER_ADD, request, timeout_s)).member)

    async def member_remove(self, member_id: int, *, timeout_s: float | None = None) -> list[Member]:
        """Remove a member, which then stops; return the remaining members. Its id is never used again.

        Arguments:
            member_id: id of the member.
            timeout_s: None: the client's.

        Raises:
            StatusError: the member does not exist, or the quorum would be at risk.
        """
        request = rpc_pb2.MemberRemoveRequest(ID=member_id)
        return _members(await self.scope.call(methods.MEMBER_REMOVE, request, timeout_s))

    async def member_update(
        self, member_id: int, peer_urls: Iterable[str], *, timeout_s: float | None = None
    ) -> list[Member]:
        """Change the peer URLs of a member, which the other members use from now on; return all members.

        Arguments:
            member_id: id of the member.
            peer_urls: URLs at which the other members will reach it.
            timeout_s: None: the client's.

        Raises:
            StatusError: the member does not exist, or a URL is in use.
        """
        request = rpc_pb2.MemberUpdateRequest(ID=member_id, peerURLs=peer_urls)
        return _members(await self.scope.call(methods.MEMBER_UPDATE, request, timeout_s))

    async def member_promote(self, member_id: int, *, timeout_s: float | None = None) -> list[Member]:
        """Promote a learner to a voter; return all members.

        Arguments:
            member_id: id of the learner.
            timeout_s: None: the client's.

        Raises:
            StatusError: the member is not a learner, or does not have the whole log yet: try again later.
        """
        request = rpc_pb2.MemberPromoteRequest(ID=member_id)
        return _members(await self.scope.call(methods.MEMBER_PROMOTE, request, timeout_s))

    async def compact(self, revision: int, *, physical: bool = False, timeout_s: float | None = None) -> int:
        """Discard history before a revision; return the current revision of the store.

        Arguments:
            revision: oldest revision that stays readable.
            physical: whether to wait until the history is also gone from the database.
            timeout_s: None: the client's.

        Raises:
            Compacted: this revision has been compacted already.
            FutureRevisionError: the revision does not exist yet.
        """
        request = rpc_pb2.CompactionRequest(revision=revision, physical=physical)
        return (await self.scope.call(methods.COMPACT, request, timeout_s)).header.revision

    async def snapshot(
        self,
        to: str | os.PathLike[str],
        *,
        endpoint: str | None = None,
        on_progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> SavedSnapshot:
        """Save all data of one member, in one consistent state, as a file that etcd's tools can read too.

        Arguments:
            to: path of the file, mode 0600; the file appears under this name when it is complete.
            endpoint: the member; None: the member that the client uses at present.
            on_progress: called with the number of bytes received and the size of the whole database.
            timeout_s: None: no limit.

        Raises:
            StatusError: the member aborted the snapshot, or was lost.
            StorageError: the file cannot be written, or the snapshot is incomplete.
        """
        async with await self.scope.core.stream(methods.SNAPSHOT, endpoint, timeout_s=timeout_s) as stream:
            await stream.send(rpc_pb2.SnapshotRequest())
            stream.half_close()
            return await save(stream, to, on_progress)

    async def alarms(self, *, timeout_s: float | None = None) -> list[Alarm]:
        """Return the active alarms."""
        return await self._alarm(rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET), timeout_s)

    async def disarm(self, *, timeout_s: float | None = None) -> list[Alarm]:
        """Deactivate all alarms, once their causes are gone; return those that were active."""
        on = await self.alarms(timeout_s=timeout_s)
        for alarm in on:
            number: Any = alarm_number(alarm.kind)  # the stubs have a separate type for it
            off = rpc_pb2.AlarmRequest.DEACTIVATE
            request = rpc_pb2.AlarmRequest(action=off, memberID=alarm.member_id, alarm=number)
            await self._alarm(request, timeout_s)
        return on

    async def set_quota(
        self, prefix: bytes | str, *, bytes_max: int = 0, keys_max: int = 0, timeout_s: float | None = None
    ) -> PrefixQuota:
        """Limit the space of a prefix; existing data counts too, history included. Not on etcd.

        Arguments:
            prefix: prefix of the keys, at most 256 bytes; empty: all keys.
            bytes_max: limit of the bytes in the database; 0: no limit. Each revision counts its key, its value and 64
                bytes (whole pages of 4 KiB above 2,000 bytes) until a compaction removes it.
            keys_max: limit of the number of existing keys; 0: no limit.
            timeout_s: None: the client's.

        Returns:
            The limits, and the current usage.

        Raises:
            InvalidQuotaError: the prefix is too long, or a limit is negative.
            TooManyQuotasError: 1,000 prefixes have a quota already.
        """
        request = admin_pb2.QuotaSetRequest(prefix=to_bytes(prefix), bytes_max=bytes_max, keys_max=keys_max)
        return _quota((await self.scope.call(methods.QUOTA_SET, request, timeout_s)).quota)

    async def remove_quota(self, prefix: bytes | str, *, timeout_s: float | None = None) -> None:
        """Remove the quota of a prefix.

        Arguments:
            prefix: prefix that was given to ``set_quota``.
            timeout_s: None: the client's.

        Raises:
            QuotaNotFoundError: the prefix has no quota.
        """
        request = admin_pb2.QuotaRemoveRequest(prefix=to_bytes(prefix))
        await self.scope.call(methods.QUOTA_REMOVE, request, timeout_s)

    async def quotas(self, *, timeout_s: float | None = None) -> list[PrefixQuota]:
        """Return all quotas of prefixes, in order of prefix."""
        answer = await self.scope.call(methods.QUOTA_LIST, admin_pb2.QuotaListRequest(), timeout_s)
        return [_quota(one) for one in answer.quotas]

    async def set_limit(self, limit: RateLimit, *, timeout_s: float | None = None) -> None:
        """Set or remove a limit on the rate of requests; a limit without numbers is removed. Not on etcd.

        Arguments:
            limit: new limit; replaces the one with the same kind and name.
            timeout_s: None: the client's.

        Raises:
            InvalidLimitError: the kind or name is invalid, a number is negative, or there is a burst without a rate.
            LimitNotFoundError: there is no limit to remove.
            TooManyLimitsError: 1,000 limits are set already.
        """
        request = admin_pb2.LimitSetRequest(limit=admin_pb2.Limit(**asdict(limit)))
        await self.scope.call(methods.LIMIT_SET, request, timeout_s)

    async def limits(self, *, timeout_s: float | None = None) -> list[RateLimit]:
        """Return all rate limits, in order of kind and name."""
        answer = await self.scope.call(methods.LIMIT_LIST, admin_pb2.LimitListRequest(), timeout_s)
        return [RateLimit(**{name: getattr(one, name) for name in RateLimit.__slots__}) for one in answer.limits]

    async def _alarm(self, request: rpc_pb2.AlarmRequest, timeout_s: float | None) -> list[Alarm]:
        answer = await self.scope.call(methods.ALARM, request, timeout_s)
        return [Alarm(one.memberID, alarm_name(one.alarm)) for one in answer.alarms]


def _member(one: rpc_pb2.Member) -> Member:
    return Member(one.ID, one.name, tuple(one.peerURLs), tuple(one.clientURLs), one.isLearner)


def _members(answer: Any) -> list[Member]:
    return [_member(one) for one in answer.members]


def _quota(message: admin_pb2.PrefixQuota) -> PrefixQuota:
    used = (message.bytes_used, message.keys_used, message.bytes_history, message.is_counting)
    return PrefixQuota(message.prefix, message.bytes_max, message.keys_max, *used)


# -- users ----------------------------------------------------------------------------------------------------------
#
# Management of users, roles and permissions.
#
#     await kv.users.add("alice", "pw")                          # in a prompt: raftkvctl user add alice
#     await kv.roles.add("jobs")
#     await kv.roles.grant("jobs", "readwrite", "jobs/", prefix=True)
#     await kv.users.grant_role("alice", "jobs")
#     await kv.users.enable_auth()                               # needs a user root with the role root
#
# Keys are the keys of the store, also in a view. A change takes effect at once, for calls in progress too.

KINDS = ("read", "write", "readwrite")
"""Kinds of permissions."""

_OPEN_ENDED = b"\0"


class Permission(NamedTuple):
    """The permission of a role on a range of keys.

    Attributes:
        kind: one of ``KINDS``.
        key: first key of the range.
        range_end: end of the range, exclusive; empty: ``key`` alone; ``b"\\0"``: no end.
    """

    kind: str
    key: bytes
    range_end: bytes

    @property
    def is_prefix(self) -> bool:
        """Whether the range is all keys that begin with ``key``."""
        return bool(self.key) and prefix_end(self.key) == self.range_end


class AuthStatus(NamedTuple):
    """Whether authentication is enabled, and the number of changes to users and roles so far."""

    is_enabled: bool
    revision: int


def interval(key: Text, end: Text = b"", *, prefix: bool = False, from_key: bool = False) -> tuple[bytes, bytes]:
    r"""Return the key range of a permission in its wire form.

    >>> interval("a/", prefix=True), interval("", prefix=True), interval("k", from_key=True)
    ((b'a/', b'a0'), (b'\x00', b'\x00'), (b'k', b'\x00'))

    Arguments:
        key: first key.
        end: end of the range, exclusive; empty: ``key`` alone.
        prefix: whether to cover all keys that begin with ``key``.
        from_key: whether to cover all keys from ``key`` on.
    """
    first = to_bytes(key)
    if (prefix or from_key) and not first:
        return _OPEN_ENDED, _OPEN_ENDED
    if prefix:
        return first, prefix_end(first)
    return first, _OPEN_ENDED if from_key else to_bytes(end)


class Users(Part):
    """The methods of a client for users and authentication."""

    async def enable_auth(self, *, timeout_s: float | None = None) -> None:
        """Enable authentication; calls without a user are refused from now on.

        Raises:
            RootUserNotExistError, RootRoleNotExistError: there is no user with the right to manage users.
        """
        await self.scope.call(methods.AUTH_ENABLE, rpc_pb2.AuthEnableRequest(), timeout_s)

    async def disable_auth(self, *, timeout_s: float | None = None) -> None:
        """Disable authentication: all clients may do everything."""
        await self.scope.call(methods.AUTH_DISABLE, rpc_pb2.AuthDisableRequest(), timeout_s)

    async def auth_status(self, *, timeout_s: float | None = None) -> AuthStatus:
        """Return whether authentication is enabled, and the revision of users and roles."""
        answer = await self.scope.call(methods.AUTH_STATUS, rpc_pb2.AuthStatusRequest(), timeout_s)
        return AuthStatus(answer.enabled, answer.authRevision)

    async def add(self, name: str, password: str | Secret | None, *, timeout_s: float | None = None) -> None:
        """Add a user.

        Arguments:
            name: user name.
            password: password; None: the user can only authenticate with a certificate that has this name.
            timeout_s: None: the client's.

        Raises:
            UserEmptyError, UserAlreadyExistError: the name cannot be used.
        """
        request = rpc_pb2.AuthUserAddRequest(name=name, options=auth_pb2.UserAddOptions(no_password=password is None))
        request.password = "" if password is None else await Secret(password).reveal()
        await self.scope.call(methods.USER_ADD, request, timeout_s)

    async def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a user and invalidate its tokens. Raises ``UserNotFoundError``."""
        await self.scope.call(methods.USER_DELETE, rpc_pb2.AuthUserDeleteRequest(name=name), timeout_s)

    async def get(self, name: str, *, timeout_s: float | None = None) -> list[str]:
        """Return the roles of a user. Raises ``UserNotFoundError``."""
        return list((await self.scope.call(methods.USER_GET, rpc_pb2.AuthUserGetRequest(name=name), timeout_s)).roles)

    async def list(self, *, timeout_s: float | None = None) -> list[str]:
        """Return the names of all users."""
        return list((await self.scope.call(methods.USER_LIST, rpc_pb2.AuthUserListRequest(), timeout_s)).users)

    async def change_password(self, name: str, password: str | Secret, *, timeout_s: float | None = None) -> None:
        """Change a user's password and invalidate its tokens. Raises ``UserNotFoundError``."""
        text = await Secret(password).reveal()
        request = rpc_pb2.AuthUserChangePasswordRequest(name=name, password=text)
        await self.scope.call(methods.USER_CHANGE_PASSWORD, request, timeout_s)

    async def grant_role(self, name: str, role: str, *, timeout_s: float | None = None) -> None:
        """Grant a user a role, which it may have already. Raises ``UserNotFoundError``, ``RoleNotFoundError``."""
        request = rpc_pb2.AuthUserGrantRoleRequest(user=name, role=role)
        await self.scope.call(methods.USER_GRANT_ROLE, request, timeout_s)

    async def revoke_role(self, name: str, role: str, *, timeout_s: float | None = None) -> None:
        """Revoke a role from a user. Raises ``UserNotFoundError``, ``RoleNotGrantedError``."""
        request = rpc_pb2.AuthUserRevokeRoleRequest(name=name, role=role)
        await self.scope.call(methods.USER_REVOKE_ROLE, request, timeout_s)


class Roles(Part):
    """The methods of a client for roles."""

    async def add(self, role: str, *, timeout_s: float | None = None) -> None:
        """Add a role without permissions. Raises ``RoleEmptyError``, ``RoleAlreadyExistError``."""
        await self.scope.call(methods.ROLE_ADD, rpc_pb2.AuthRoleAddRequest(name=role), timeout_s)

    async def delete(self, role: str, *, timeout_s: float | None = None) -> None:
        """Delete a role and revoke it from all users. Raises ``RoleNotFoundError``."""
        await self.scope.call(methods.ROLE_DELETE, rpc_pb2.AuthRoleDeleteRequest(role=role), timeout_s)

    async def get(self, role: str, *, timeout_s: float | None = None) -> list[Permission]:
        """Return the permissions of a role. Raises ``RoleNotFoundError``."""
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
        """Grant a role a permission on a range of keys; it replaces an earlier permission on the same range.

        Arguments:
            role: role name.
            kind: one of ``KINDS``.
            key, end, prefix, from_key: see ``interval``.
            timeout_s: None: the client's.

        Raises:
            RoleNotFoundError: the role does not exist.
            ValueError: the kind does not exist.
        """
        first, last = interval(key, end, prefix=prefix, from_key=from_key)
        if kind not in KINDS:
            raise ValueError(f"a permission is one of {', '.join(KINDS)}, not {kind!r}")
        permission = auth_pb2.Permission(permType=kind.upper(), key=first, range_end=last)
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
        """Revoke a role's permission on exactly this range of keys.

        Arguments:
            role: role name.
            key, end, prefix, from_key: see ``interval``.
            timeout_s: None: the client's.

        Raises:
            RoleNotFoundError, PermissionNotGrantedError: the role or the permission does not exist.
        """
        first, last = interval(key, end, prefix=prefix, from_key=from_key)
        request = rpc_pb2.AuthRoleRevokePermissionRequest(role=role, key=first, range_end=last)
        await self.scope.call(methods.ROLE_REVOKE_PERMISSION, request, timeout_s)
