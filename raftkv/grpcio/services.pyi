from collections.abc import Iterator

import grpc
import grpc.aio

from raftkv.grpcio.calls import Stream, Unary
from raftkv.pb import admin_pb2, election_pb2, health_pb2, lock_pb2, rpc_pb2

class KV:
    def __init__(self, channel: grpc.Channel) -> None: ...
    range: Unary[rpc_pb2.RangeRequest, rpc_pb2.RangeResponse]
    range_stream: Stream[rpc_pb2.RangeRequest, rpc_pb2.RangeStreamResponse]
    put: Unary[rpc_pb2.PutRequest, rpc_pb2.PutResponse]
    delete_range: Unary[rpc_pb2.DeleteRangeRequest, rpc_pb2.DeleteRangeResponse]
    txn: Unary[rpc_pb2.TxnRequest, rpc_pb2.TxnResponse]
    compact: Unary[rpc_pb2.CompactionRequest, rpc_pb2.CompactionResponse]

class Watch:
    def __init__(self, channel: grpc.Channel) -> None: ...
    watch: Stream[Iterator[rpc_pb2.WatchRequest], rpc_pb2.WatchResponse]

class Lease:
    def __init__(self, channel: grpc.Channel) -> None: ...
    lease_grant: Unary[rpc_pb2.LeaseGrantRequest, rpc_pb2.LeaseGrantResponse]
    lease_revoke: Unary[rpc_pb2.LeaseRevokeRequest, rpc_pb2.LeaseRevokeResponse]
    lease_keep_alive: Stream[Iterator[rpc_pb2.LeaseKeepAliveRequest], rpc_pb2.LeaseKeepAliveResponse]
    lease_time_to_live: Unary[rpc_pb2.LeaseTimeToLiveRequest, rpc_pb2.LeaseTimeToLiveResponse]
    lease_leases: Unary[rpc_pb2.LeaseLeasesRequest, rpc_pb2.LeaseLeasesResponse]

class Cluster:
    def __init__(self, channel: grpc.Channel) -> None: ...
    member_add: Unary[rpc_pb2.MemberAddRequest, rpc_pb2.MemberAddResponse]
    member_remove: Unary[rpc_pb2.MemberRemoveRequest, rpc_pb2.MemberRemoveResponse]
    member_update: Unary[rpc_pb2.MemberUpdateRequest, rpc_pb2.MemberUpdateResponse]
    member_list: Unary[rpc_pb2.MemberListRequest, rpc_pb2.MemberListResponse]
    member_promote: Unary[rpc_pb2.MemberPromoteRequest, rpc_pb2.MemberPromoteResponse]

class Maintenance:
    def __init__(self, channel: grpc.Channel) -> None: ...
    alarm: Unary[rpc_pb2.AlarmRequest, rpc_pb2.AlarmResponse]
    status: Unary[rpc_pb2.StatusRequest, rpc_pb2.StatusResponse]
    defragment: Unary[rpc_pb2.DefragmentRequest, rpc_pb2.DefragmentResponse]
    hash: Unary[rpc_pb2.HashRequest, rpc_pb2.HashResponse]
    hash_kv: Unary[rpc_pb2.HashKVRequest, rpc_pb2.HashKVResponse]
    snapshot: Stream[rpc_pb2.SnapshotRequest, rpc_pb2.SnapshotResponse]
    move_leader: Unary[rpc_pb2.MoveLeaderRequest, rpc_pb2.MoveLeaderResponse]
    downgrade: Unary[rpc_pb2.DowngradeRequest, rpc_pb2.DowngradeResponse]

class Auth:
    def __init__(self, channel: grpc.Channel) -> None: ...
    auth_enable: Unary[rpc_pb2.AuthEnableRequest, rpc_pb2.AuthEnableResponse]
    auth_disable: Unary[rpc_pb2.AuthDisableRequest, rpc_pb2.AuthDisableResponse]
    auth_status: Unary[rpc_pb2.AuthStatusRequest, rpc_pb2.AuthStatusResponse]
    authenticate: Unary[rpc_pb2.AuthenticateRequest, rpc_pb2.AuthenticateResponse]
    user_add: Unary[rpc_pb2.AuthUserAddRequest, rpc_pb2.AuthUserAddResponse]
    user_get: Unary[rpc_pb2.AuthUserGetRequest, rpc_pb2.AuthUserGetResponse]
    user_list: Unary[rpc_pb2.AuthUserListRequest, rpc_pb2.AuthUserListResponse]
    user_delete: Unary[rpc_pb2.AuthUserDeleteRequest, rpc_pb2.AuthUserDeleteResponse]
    user_change_password: Unary[rpc_pb2.AuthUserChangePasswordRequest, rpc_pb2.AuthUserChangePasswordResponse]
    user_grant_role: Unary[rpc_pb2.AuthUserGrantRoleRequest, rpc_pb2.AuthUserGrantRoleResponse]
    user_revoke_role: Unary[rpc_pb2.AuthUserRevokeRoleRequest, rpc_pb2.AuthUserRevokeRoleResponse]
    role_add: Unary[rpc_pb2.AuthRoleAddRequest, rpc_pb2.AuthRoleAddResponse]
    role_get: Unary[rpc_pb2.AuthRoleGetRequest, rpc_pb2.AuthRoleGetResponse]
    role_list: Unary[rpc_pb2.AuthRoleListRequest, rpc_pb2.AuthRoleListResponse]
    role_delete: Unary[rpc_pb2.AuthRoleDeleteRequest, rpc_pb2.AuthRoleDeleteResponse]
    role_grant_permission: Unary[rpc_pb2.AuthRoleGrantPermissionRequest, rpc_pb2.AuthRoleGrantPermissionResponse]
    role_revoke_permission: Unary[rpc_pb2.AuthRoleRevokePermissionRequest, rpc_pb2.AuthRoleRevokePermissionResponse]

class Admin:
    def __init__(self, channel: grpc.Channel) -> None: ...
    member_replace: Unary[admin_pb2.MemberReplaceRequest, admin_pb2.MemberReplaceResponse]
    quota_set: Unary[admin_pb2.QuotaSetRequest, admin_pb2.QuotaSetResponse]
    quota_remove: Unary[admin_pb2.QuotaRemoveRequest, admin_pb2.QuotaRemoveResponse]
    quota_list: Unary[admin_pb2.QuotaListRequest, admin_pb2.QuotaListResponse]
    limit_set: Unary[admin_pb2.LimitSetRequest, admin_pb2.LimitSetResponse]
    limit_list: Unary[admin_pb2.LimitListRequest, admin_pb2.LimitListResponse]

class Election:
    def __init__(self, channel: grpc.Channel) -> None: ...
    campaign: Unary[election_pb2.CampaignRequest, election_pb2.CampaignResponse]
    proclaim: Unary[election_pb2.ProclaimRequest, election_pb2.ProclaimResponse]
    leader: Unary[election_pb2.LeaderRequest, election_pb2.LeaderResponse]
    observe: Stream[election_pb2.LeaderRequest, election_pb2.LeaderResponse]
    resign: Unary[election_pb2.ResignRequest, election_pb2.ResignResponse]

class Health:
    def __init__(self, channel: grpc.Channel) -> None: ...
    check: Unary[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
    list: Unary[health_pb2.HealthListRequest, health_pb2.HealthListResponse]
    watch: Stream[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]

class Lock:
    def __init__(self, channel: grpc.Channel) -> None: ...
    lock: Unary[lock_pb2.LockRequest, lock_pb2.LockResponse]
    unlock: Unary[lock_pb2.UnlockRequest, lock_pb2.UnlockResponse]
