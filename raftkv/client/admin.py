"""Looking after a cluster: members, status, compaction, alarms, snapshots, quotas.

for one in await kv.status(): print(one.endpoint, one.healthy, one.version, one.error)
await kv.compact((await kv.get("x")).mod_revision)
new = await kv.member_add(["http://10.0.0.4:2380"], learner=True)      # start it, then: member_promote(new.id)
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
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
# Saves the database of one member as a file that etcd's tools read.
#
#     saved = await kv.snapshot("backup.db")
#     print(saved.size_bytes, saved.version)
#
# The file gets its name when it is whole, its hash is right, and it is durable; until then it is ``backup.db.part``,
# which is removed if anything fails. One process at a time writes there: two would write into the same file.

HASH_BYTES: Final = hashlib.sha256().digest_size
SECTOR_BYTES: Final = 512
"""A database is a multiple of this, so a file with its hash is not."""

Progress = Callable[[int, int], None]
"""Called with the bytes that were received and those of the whole database."""


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """A snapshot that was saved.

    Attributes:
        path: of the file.
        size_bytes: of the file.
        version: storage version of the member; empty before etcd 3.6.
    """

    path: Path
    size_bytes: int
    version: str


async def save(
    messages: AsyncIterable[rpc_pb2.SnapshotResponse], to: str | os.PathLike[str], on_progress: Progress | None = None
) -> SavedSnapshot:
    """Write what a member sends to a file.

    Arguments:
        messages: of ``Maintenance.Snapshot``.
        to: the path of the file; one that is there is replaced in the end, behind links.
        on_progress: called after each piece.

    Raises:
        StatusError: the member gave up, or was lost.
        StorageError: the file cannot be written, or what was sent is not whole.
    """
    target = _target(to)
    part = target.with_name(target.name + ".part")
    with _alone(part) as file:
        try:
            # A file that was there may have a wider mode.
            os.fchmod(file.fileno(), 0o600)
            saved = await _receive(messages, file, target, on_progress)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        except OSError as error:
            raise _failed(f"could not write snapshot to {part}", error) from None
        try:
            os.replace(part, target)
            await asyncio.to_thread(_sync_directory, target)
        except OSError as error:
            raise _failed(f"could not rename {part} to {target}", error) from None
    return saved


@contextlib.contextmanager
def _alone(part: Path) -> Iterator[BinaryIO]:
    """Open an empty file, and keep others from writing to it for the time of the block; one that fails removes it.

    Raises:
        StorageError: it cannot be opened, or another process writes to it.
    """
    file = _locked(part)
    try:
        yield file
    except BaseException:
        if _has_name(file, part):
            part.unlink(missing_ok=True)
        raise
    finally:
        # What a full disk did not take would fail here once more.
        with contextlib.suppress(OSError):
            file.close()


def _locked(part: Path) -> BinaryIO:
    # A link there could lead the snapshot, and its mode, elsewhere.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            file = os.fdopen(os.open(part, flags, 0o600), "wb")
        except OSError as error:
            raise _failed(f"could not open {part}", error) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise StorageError(f"could not open {part} (another snapshot is being saved there)") from None
        except OSError:
            pass  # a file system without locks
        # The last holder of the lock may have renamed the file: then it is no longer this one.
        if _has_name(file, part):
            file.truncate(0)
            return file
        file.close()


def _has_name(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except OSError:
        return False


def _target(to: str | os.PathLike[str]) -> Path:
    """Return the file that is to be there, behind links; what takes its place must not be a device or a directory."""
    target = Path(os.path.realpath(to) if os.path.islink(to) else to)
    if not target.name:
        raise StorageError(f"could not open {os.fspath(to)!r} (is a directory)")
    with contextlib.suppress(OSError):
        mode = os.stat(to).st_mode
        if not stat.S_ISREG(mode):
            why = "is a directory" if stat.S_ISDIR(mode) else "it is no file, and a file would take its place"
            raise StorageError(f"could not open {os.fspath(to)} ({why})")
    return target


async def _receive(
    messages: AsyncIterable[rpc_pb2.SnapshotResponse], file: BinaryIO, target: Path, on_progress: Progress | None
) -> SavedSnapshot:
    """Write all pieces; the last of them is the hash of all others."""
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
    """The part of a client that looks after the cluster."""

    async def status(self, endpoint: str | None = None, *, timeout_s: float | None = None) -> list[EndpointStatus]:
        """Return what every endpoint says of itself, side by side; one that does not answer has ``error``.

        Arguments:
            endpoint: only this one.
            timeout_s: for all of them; None: the time for one connection.
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
        """Add a member and return it; it is then started with ``--initial-cluster-state=existing``.

        Arguments:
            peer_urls: where the other members will reach it.
            learner: it gets all data but does not vote, until ``member_promote``.
            timeout_s: None: the client's.

        Raises:
            StatusError: the cluster refuses: a URL is in use, too many learners, or the quorum would be in danger.
        """
        request = rpc_pb2.MemberAddRequest(peerURLs=peer_urls, isLearner=learner)
        return _member((await self.scope.call(methods.MEMBER_ADD, request, timeout_s)).member)

    async def member_remove(self, member_id: int, *, timeout_s: float | None = None) -> list[Member]:
        """Remove a member, which stops; returns those that are left. Its id never comes back.

        Arguments:
            member_id: of the member.
            timeout_s: None: the client's.

        Raises:
            StatusError: there is no such member, or the quorum would be in danger.
        """
        request = rpc_pb2.MemberRemoveRequest(ID=member_id)
        return _members(await self.scope.call(methods.MEMBER_REMOVE, request, timeout_s))

    async def member_update(
        self, member_id: int, peer_urls: Iterable[str], *, timeout_s: float | None = None
    ) -> list[Member]:
        """Give a member other peer URLs, at which the others connect to it from now on; returns all members.

        Arguments:
            member_id: of the member.
            peer_urls: where the other members will reach it.
            timeout_s: None: the client's.

        Raises:
            StatusError: there is no such member, or a URL is in use.
        """
        request = rpc_pb2.MemberUpdateRequest(ID=member_id, peerURLs=peer_urls)
        return _members(await self.scope.call(methods.MEMBER_UPDATE, request, timeout_s))

    async def member_promote(self, member_id: int, *, timeout_s: float | None = None) -> list[Member]:
        """Make a learner a voter; returns all members.

        Arguments:
            member_id: of the learner.
            timeout_s: None: the client's.

        Raises:
            StatusError: it is no learner, or does not have the log yet: try again later.
        """
        request = rpc_pb2.MemberPromoteRequest(ID=member_id)
        return _members(await self.scope.call(methods.MEMBER_PROMOTE, request, timeout_s))

    async def compact(self, revision: int, *, physical: bool = False, timeout_s: float | None = None) -> int:
        """Discard history before a revision; returns the revision of the store.

        Arguments:
            revision: the oldest that can still be read.
            physical: wait until it is gone from the database too.
            timeout_s: None: the client's.

        Raises:
            Compacted: it was done already.
            FutureRevisionError: there is no such revision yet.
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
        """Save everything that one member holds, in one consistent state, as a file that etcd's tools read too.

        Arguments:
            to: path of the file, mode 0600; it gets this name when it is whole.
            endpoint: the member; None: the one that calls go to at present.
            on_progress: called with the bytes received so far and those of the whole database.
            timeout_s: None: as long as it takes.

        Raises:
            StatusError: the member gave up, or was lost.
            StorageError: the file cannot be written, or what was sent is not whole.
        """
        async with await self.scope.core.stream(methods.SNAPSHOT, endpoint, timeout_s=timeout_s) as stream:
            await stream.send(rpc_pb2.SnapshotRequest())
            stream.half_close()
            return await save(stream, to, on_progress)

    async def alarms(self, *, timeout_s: float | None = None) -> list[Alarm]:
        """Return alarms that are on."""
        return await self._alarm(rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET), timeout_s)

    async def disarm(self, *, timeout_s: float | None = None) -> list[Alarm]:
        """Switch all alarms off, after their causes are gone; returns those that were on."""
        on = await self.alarms(timeout_s=timeout_s)
        for alarm in on:
            number: Any = alarm_number(alarm.kind)  # the stubs have a type of their own for it
            off = rpc_pb2.AlarmRequest.DEACTIVATE
            request = rpc_pb2.AlarmRequest(action=off, memberID=alarm.member_id, alarm=number)
            await self._alarm(request, timeout_s)
        return on

    async def set_quota(
        self, prefix: bytes | str, *, bytes_max: int = 0, keys_max: int = 0, timeout_s: float | None = None
    ) -> PrefixQuota:
        """Limit what a prefix takes; what is there already, history included, is counted. Not on etcd.

        Arguments:
            prefix: of the keys, at most 256 bytes; empty for all.
            bytes_max: that the database keeps: each revision counts its key, its value and 64 bytes (whole pages of
                4 KiB if that is more than 2,000), until a compaction removes it; 0: no limit.
            keys_max: how many keys may exist; 0: no limit.
            timeout_s: None: the client's.

        Returns:
            the limits, and what is used.

        Raises:
            InvalidQuotaError: the prefix is too long, or a limit is negative.
            TooManyQuotasError: 1,000 prefixes have one.
        """
        request = admin_pb2.QuotaSetRequest(prefix=to_bytes(prefix), bytes_max=bytes_max, keys_max=keys_max)
        return _quota((await self.scope.call(methods.QUOTA_SET, request, timeout_s)).quota)

    async def remove_quota(self, prefix: bytes | str, *, timeout_s: float | None = None) -> None:
        """Lift the limits of a prefix.

        Arguments:
            prefix: as it was set.
            timeout_s: None: the client's.

        Raises:
            QuotaNotFoundError: it has none.
        """
        request = admin_pb2.QuotaRemoveRequest(prefix=to_bytes(prefix))
        await self.scope.call(methods.QUOTA_REMOVE, request, timeout_s)

    async def quotas(self, *, timeout_s: float | None = None) -> list[PrefixQuota]:
        """Return all quotas of prefixes, in order of prefix."""
        answer = await self.scope.call(methods.QUOTA_LIST, admin_pb2.QuotaListRequest(), timeout_s)
        return [_quota(one) for one in answer.quotas]

    async def set_limit(self, limit: RateLimit, *, timeout_s: float | None = None) -> None:
        """Limit how fast requests come; a limit without a number is lifted. Not on etcd.

        Arguments:
            limit: in place of the one that its kind and name have.
            timeout_s: None: the client's.

        Raises:
            InvalidLimitError: its kind or name is none, or a number is negative or a burst without a rate.
            LimitNotFoundError: there is none to lift.
            TooManyLimitsError: 1,000 are set.
        """
        request = admin_pb2.LimitSetRequest(limit=admin_pb2.Limit(**asdict(limit)))
        await self.scope.call(methods.LIMIT_SET, request, timeout_s)

    async def limits(self, *, timeout_s: float | None = None) -> list[RateLimit]:
        """Return all limits of rates, in order of kind and name."""
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
# Users, roles and what they may do: the part of a client that looks after them.
#
#     await kv.users.add("alice", "pw")                          # in a prompt: raftkvctl user add alice
#     await kv.roles.add("jobs")
#     await kv.roles.grant("jobs", "readwrite", "jobs/", prefix=True)
#     await kv.users.grant_role("alice", "jobs")
#     await kv.users.enable_auth()                               # needs a user root with the role root
#
# Keys are those of the store, also for a view. A change holds at once, for calls that are under way too.

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
        """Ask for users from now on; calls without one are refused.

        Raises:
            RootUserNotExistError, RootRoleNotExistError: no user would be left who may change users.
        """
        await self.scope.call(methods.AUTH_ENABLE, rpc_pb2.AuthEnableRequest(), timeout_s)

    async def disable_auth(self, *, timeout_s: float | None = None) -> None:
        """Ask for users no longer: all clients may do everything."""
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
