"""The methods of etcd's API that the client calls, and which of them may be repeated.

A method is *repeatable* if executing it twice has the same effect as once: a call with an unknown outcome is then tried
again at another endpoint. A write is not repeatable: it is tried again only if it certainly never reached a member.

``Method`` is for ``Client.call``, ``StreamMethod`` for ``Client.stream``; streams are only repeated by their callers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from raftkv.client.arguments import seconds
from raftkv.client.errors import from_status
from raftkv.errors import INTERNAL
from raftkv.pb import admin_pb2, lock_pb2, rpc_pb2

T = TypeVar("T", bound="Message")


def parse_answer(kind: type[T], data: bytes) -> T:
    """Parse the answer of a member.

    Raises:
        StatusError: INTERNAL, as in other clients: the bytes are not a message of this type.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise from_status(INTERNAL, f"grpc: failed to unmarshal the received message: {error}") from None


@dataclass(frozen=True)
class Method(Generic[T]):
    """One unary call: its path, its response type, whether it is repeatable, and whether it may be cancelled in flight.

    A cancelled caller returns at once in any case; the answer to a call that is not cancellable is then dropped.
    """

    path: str
    response: type[T]
    repeatable: bool
    cancellable: bool = True


@dataclass(frozen=True)
class StreamMethod(Generic[T]):
    """One streaming call: its path and its response type."""

    path: str
    response: type[T]


RANGE: Final = Method("/etcdserverpb.KV/Range", rpc_pb2.RangeResponse, True)
PUT: Final = Method("/etcdserverpb.KV/Put", rpc_pb2.PutResponse, False)
DELETE_RANGE: Final = Method("/etcdserverpb.KV/DeleteRange", rpc_pb2.DeleteRangeResponse, False)
TXN: Final = Method("/etcdserverpb.KV/Txn", rpc_pb2.TxnResponse, False)
# etcd 3.5.1 panics if a read-only txn is cancelled while it runs (etcd issue 14110; fixed in later versions).
READ_TXN: Final = Method(TXN.path, TXN.response, True, cancellable=False)
COMPACT: Final = Method("/etcdserverpb.KV/Compact", rpc_pb2.CompactionResponse, False)
MEMBER_LIST: Final = Method("/etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListResponse, True)
MEMBER_ADD: Final = Method("/etcdserverpb.Cluster/MemberAdd", rpc_pb2.MemberAddResponse, False)
MEMBER_REMOVE: Final = Method("/etcdserverpb.Cluster/MemberRemove", rpc_pb2.MemberRemoveResponse, False)
MEMBER_UPDATE: Final = Method("/etcdserverpb.Cluster/MemberUpdate", rpc_pb2.MemberUpdateResponse, False)
MEMBER_PROMOTE: Final = Method("/etcdserverpb.Cluster/MemberPromote", rpc_pb2.MemberPromoteResponse, False)
STATUS: Final = Method("/etcdserverpb.Maintenance/Status", rpc_pb2.StatusResponse, True)
HASH_KV: Final = Method("/etcdserverpb.Maintenance/HashKV", rpc_pb2.HashKVResponse, True)
ALARM: Final = Method("/etcdserverpb.Maintenance/Alarm", rpc_pb2.AlarmResponse, True)
DEFRAGMENT: Final = Method("/etcdserverpb.Maintenance/Defragment", rpc_pb2.DefragmentResponse, False)
MOVE_LEADER: Final = Method("/etcdserverpb.Maintenance/MoveLeader", rpc_pb2.MoveLeaderResponse, False)
DOWNGRADE: Final = Method("/etcdserverpb.Maintenance/Downgrade", rpc_pb2.DowngradeResponse, False)
QUOTA_SET: Final = Method("/raftkvpb.Admin/QuotaSet", admin_pb2.QuotaSetResponse, True)
QUOTA_REMOVE: Final = Method("/raftkvpb.Admin/QuotaRemove", admin_pb2.QuotaRemoveResponse, False)
QUOTA_LIST: Final = Method("/raftkvpb.Admin/QuotaList", admin_pb2.QuotaListResponse, True)
LIMIT_SET: Final = Method("/raftkvpb.Admin/LimitSet", admin_pb2.LimitSetResponse, False)
LIMIT_LIST: Final = Method("/raftkvpb.Admin/LimitList", admin_pb2.LimitListResponse, True)
AUTHENTICATE: Final = Method("/etcdserverpb.Auth/Authenticate", rpc_pb2.AuthenticateResponse, True)
AUTH_ENABLE: Final = Method("/etcdserverpb.Auth/AuthEnable", rpc_pb2.AuthEnableResponse, False)
AUTH_DISABLE: Final = Method("/etcdserverpb.Auth/AuthDisable", rpc_pb2.AuthDisableResponse, False)
AUTH_STATUS: Final = Method("/etcdserverpb.Auth/AuthStatus", rpc_pb2.AuthStatusResponse, True)
USER_ADD: Final = Method("/etcdserverpb.Auth/UserAdd", rpc_pb2.AuthUserAddResponse, False)
USER_GET: Final = Method("/etcdserverpb.Auth/UserGet", rpc_pb2.AuthUserGetResponse, True)
USER_LIST: Final = Method("/etcdserverpb.Auth/UserList", rpc_pb2.AuthUserListResponse, True)
USER_DELETE: Final = Method("/etcdserverpb.Auth/UserDelete", rpc_pb2.AuthUserDeleteResponse, False)
USER_CHANGE_PASSWORD: Final = Method(
    "/etcdserverpb.Auth/UserChangePassword", rpc_pb2.AuthUserChangePasswordResponse, False
)
USER_GRANT_ROLE: Final = Method("/etcdserverpb.Auth/UserGrantRole", rpc_pb2.AuthUserGrantRoleResponse, False)
USER_REVOKE_ROLE: Final = Method("/etcdserverpb.Auth/UserRevokeRole", rpc_pb2.AuthUserRevokeRoleResponse, False)
ROLE_ADD: Final = Method("/etcdserverpb.Auth/RoleAdd", rpc_pb2.AuthRoleAddResponse, False)
ROLE_GET: Final = Method("/etcdserverpb.Auth/RoleGet", rpc_pb2.AuthRoleGetResponse, True)
ROLE_LIST: Final = Method("/etcdserverpb.Auth/RoleList", rpc_pb2.AuthRoleListResponse, True)
ROLE_DELETE: Final = Method("/etcdserverpb.Auth/RoleDelete", rpc_pb2.AuthRoleDeleteResponse, False)
ROLE_GRANT_PERMISSION: Final = Method(
    "/etcdserverpb.Auth/RoleGrantPermission", rpc_pb2.AuthRoleGrantPermissionResponse, False
)
ROLE_REVOKE_PERMISSION: Final = Method(
    "/etcdserverpb.Auth/RoleRevokePermission", rpc_pb2.AuthRoleRevokePermissionResponse, False
)

LEASE_GRANT: Final = Method("/etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantResponse, False)
LEASE_REVOKE: Final = Method("/etcdserverpb.Lease/LeaseRevoke", rpc_pb2.LeaseRevokeResponse, False)
LEASE_TIME_TO_LIVE: Final = Method("/etcdserverpb.Lease/LeaseTimeToLive", rpc_pb2.LeaseTimeToLiveResponse, True)
LEASE_LEASES: Final = Method("/etcdserverpb.Lease/LeaseLeases", rpc_pb2.LeaseLeasesResponse, True)
LOCK: Final = Method("/v3lockpb.Lock/Lock", lock_pb2.LockResponse, False)
UNLOCK: Final = Method("/v3lockpb.Lock/Unlock", lock_pb2.UnlockResponse, False)

WATCH: Final = StreamMethod("/etcdserverpb.Watch/Watch", rpc_pb2.WatchResponse)
LEASE_KEEP_ALIVE: Final = StreamMethod("/etcdserverpb.Lease/LeaseKeepAlive", rpc_pb2.LeaseKeepAliveResponse)
SNAPSHOT: Final = StreamMethod("/etcdserverpb.Maintenance/Snapshot", rpc_pb2.SnapshotResponse)
RANGE_STREAM: Final = StreamMethod("/etcdserverpb.KV/RangeStream", rpc_pb2.RangeStreamResponse)

MEMBER_REPLACE: Final = Method("/raftkvpb.Admin/MemberReplace", admin_pb2.MemberReplaceResponse, False)


def staleness_metadata(max_staleness_s: float) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a read that any member may answer from its own state if that is certainly not older.

    etcd's members ignore the metadata, and confirm the read.

    Arguments:
        max_staleness_s: maximum age in seconds; rounded down to milliseconds, because it is a guarantee.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is negative, or not finite.
    """
    if seconds(max_staleness_s, "max_staleness_s") < 0:
        raise ValueError(f"max_staleness_s must not be negative, and is {max_staleness_s}")
    return (("raftkv-max-staleness-ms", str(int(max_staleness_s * 1000))),)
