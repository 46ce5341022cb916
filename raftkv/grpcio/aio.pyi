from collections.abc import AsyncIterator, Iterator

import grpc
import grpc.aio

from raftkv.grpcio.calls import AsyncStream, AsyncUnary
from raftkv.pb import admin_pb2, election_pb2, health_pb2, lock_pb2, rpc_pb2

class KV:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    range: AsyncUnary[rpc_pb2.RangeRequest, rpc_pb2.RangeResponse]
    range_stream: AsyncStream[rpc_pb2.RangeRequest, rpc_pb2.RangeStreamResponse]
    put: AsyncUnary[rpc_pb2.PutRequest, rpc_pb2.PutResponse]
    delete_range: AsyncUnary[rpc_pb2.DeleteRangeRequest, rpc_pb2.DeleteRangeResponse]
    txn: AsyncUnary[rpc_pb2.TxnRequest, rpc_pb2.TxnResponse]
    compact: AsyncUnary[rpc_pb2.CompactionRequest, rpc_pb2.CompactionResponse]

class Watch:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    watch: AsyncStream[AsyncIterator[rpc_pb2.WatchRequest] | Iterator[rpc_pb2.WatchRequest], rpc_pb2.WatchResponse]

class Lease:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    lease_grant: AsyncUnary[rpc_pb2.LeaseGrantRequest, rpc_pb2.LeaseGrantResponse]
    lease_revoke: AsyncUnary[rpc_pb2.LeaseRevokeRequest, rpc_pb2.LeaseRevokeResponse]
    lease_keep_alive: AsyncStream[AsyncIterator[rpc_pb2.LeaseKeepAliveRequest] | Iterator[rpc_pb2.LeaseKeepAliveRequest], rpc_pb2.LeaseKeepAliveResponse]
    lease_time_to_live: AsyncUnary[rpc_pb2.LeaseTimeToLiveRequest, rpc_pb2.LeaseTimeToLiveResponse]
    lease_leases: AsyncUnary[rpc_pb2.LeaseLeasesRequest, rpc_pb2.LeaseLeasesResponse]

class Cluster:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    member_add: AsyncUnary[rpc_pb2.MemberAddRequest, rpc_pb2.MemberAddResponse]
    member_remove: AsyncUnary[rpc_pb2.MemberRemoveRequest, rpc_pb2.MemberRemoveResponse]
    member_update: AsyncUnary[rpc_pb2.MemberUpdateRequest, rpc_pb2.MemberUpdateResponse]
    member_list: AsyncUnary[rpc_pb2.MemberListRequest, rpc_pb2.MemberListResponse]
    member_promote: AsyncUnary[rpc_pb2.MemberPromoteRequest, rpc_pb2.MemberPromoteResponse]

class Maintenance:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    alarm: AsyncUnary[rpc_pb2.AlarmRequest, rpc_pb2.AlarmResponse]
    status: AsyncUnary[rpc_pb2.StatusRequest, rpc_pb2.StatusResponse]
    defragment: AsyncUnary[rpc_pb2.DefragmentRequest, rpc_pb2.DefragmentResponse]
    hash: AsyncUnary[rpc_pb2.HashRequest, rpc_pb2.HashResponse]
    hash_kv: AsyncUnary[rpc_pb2.HashKVRequest, rpc_pb2.HashKVResponse]
    snapshot: AsyncStream[rpc_pb2.SnapshotRequest, rpc_pb2.SnapshotResponse]
    move_leader: AsyncUnary[rpc_pb2.MoveLeaderRequest, rpc_pb2.MoveLeaderResponse]
    downgrade: AsyncUnary[rpc_pb2.DowngradeRequest, rpc_pb2.DowngradeResponse]

class Auth:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    auth_enable: AsyncUnary[rpc_pb2.AuthEnableRequest, rpc_pb2.AuthEnableResponse]
    auth_disable: AsyncUnary[rpc_pb2.AuthDisableRequest, rpc_pb2.AuthDisableResponse]
    auth_status: AsyncUnary[rpc_pb2.AuthStatusRequest, rpc_pb2.AuthStatusResponse]
    authenticate: AsyncUnary[rpc_pb2.AuthenticateRequest, rpc_pb2.AuthenticateResponse]
    user_add: AsyncUnary[rpc_pb2.AuthUserAddRequest, rpc_pb2.AuthUserAddResponse]
    user_get: AsyncUnary[rpc_pb2.AuthUserGetRequest, rpc_pb2.AuthUserGetResponse]
    user_list: AsyncUnary[rpc_pb2.AuthUserListRequest, rpc_pb2.AuthUserListResponse]
    user_delete: AsyncUnary[rpc_pb2.AuthUserDeleteRequest, rpc_pb2.AuthUserDeleteResponse]
    user_change_password: AsyncUnary[rpc_pb2.AuthUserChangePasswordRequest, rpc_pb2.AuthUserChangePasswordResponse]
    user_grant_role: AsyncUnary[rpc_pb2.AuthUserGrantRoleRequest, rpc_pb2.AuthUserGrantRoleResponse]
    user_revoke_role: AsyncUnary[rpc_pb2.AuthUserRevokeRoleRequest, rpc_pb2.AuthUserRevokeRoleResponse]
    role_add: AsyncUnary[rpc_pb2.AuthRoleAddRequest, rpc_pb2.AuthRoleAddResponse]
    role_get: AsyncUnary[rpc_pb2.AuthRoleGetRequest, rpc_pb2.AuthRoleGetResponse]
    role_list: AsyncUnary[rpc_pb2.AuthRoleListRequest, rpc_pb2.AuthRoleListResponse]
    role_delete: AsyncUnary[rpc_pb2.AuthRoleDeleteRequest, rpc_pb2.AuthRoleDeleteResponse]
    role_grant_permission: AsyncUnary[rpc_pb2.AuthRoleGrantPermissionRequest, rpc_pb2.AuthRoleGrantPermissionResponse]
    role_revoke_permission: AsyncUnary[rpc_pb2.AuthRoleRevokePermissionRequest, rpc_pb2.AuthRoleRevokePermissionResponse]

class Admin:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    member_replace: AsyncUnary[admin_pb2.MemberReplaceRequest, admin_pb2.MemberReplaceResponse]
    quota_set: AsyncUnary[admin_pb2.QuotaSetRequest, admin_pb2.QuotaSetResponse]
    quota_remove: AsyncUnary[admin_pb2.QuotaRemoveRequest, admin_pb2.QuotaRemoveResponse]
    quota_list: AsyncUnary[admin_pb2.QuotaListRequest, admin_pb2.QuotaListResponse]
    limit_set: AsyncUnary[admin_pb2.LimitSetRequest, admin_pb2.LimitSetResponse]
    limit_list: AsyncUnary[admin_pb2.LimitListRequest, admin_pb2.LimitListResponse]

class Election:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    campaign: AsyncUnary[election_pb2.CampaignRequest, election_pb2.CampaignResponse]
    proclaim: AsyncUnary[election_pb2.ProclaimRequest, election_pb2.ProclaimResponse]
    leader: AsyncUnary[election_pb2.LeaderRequest, election_pb2.LeaderResponse]
    observe: AsyncStream[election_pb2.LeaderRequest, election_pb2.LeaderResponse]
    resign: AsyncUnary[election_pb2.ResignRequest, election_pb2.ResignResponse]

class Health:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    check: AsyncUnary[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
    list: AsyncUnary[health_pb2.HealthListRequest, health_pb2.HealthListResponse]
    watch: AsyncStream[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]

class Lock:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    lock: AsyncUnary[lock_pb2.LockRequest, lock_pb2.LockResponse]
    unlock: AsyncUnary[lock_pb2.UnlockRequest, lock_pb2.UnlockResponse]
