"""The calls of etcd's API that the client makes, and which of them may be repeated.

A method is *repeatable* if doing it twice is as good as once: a call whose outcome is unknown is then tried again at
another endpoint. A write is not: it is tried again only if it certainly never reached a member.

``Method`` is for ``Client.call``, ``StreamMethod`` for ``Client.stream``; nobody repeats a stream but its caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from raftkv.pb import election_pb2, lock_pb2, rpc_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message

T = TypeVar("T", bound="Message")


@dataclass(frozen=True)
class Method(Generic[T]):
    """One unary call: its path, what it returns, whether it may be repeated."""

    path: str
    response: type[T]
    repeatable: bool


@dataclass(frozen=True)
class StreamMethod(Generic[T]):
    """One streaming call: its path and what every message of its answer is."""

    path: str
    response: type[T]


RANGE: Final = Method("/etcdserverpb.KV/Range", rpc_pb2.RangeResponse, True)
PUT: Final = Method("/etcdserverpb.KV/Put", rpc_pb2.PutResponse, False)
DELETE_RANGE: Final = Method("/etcdserverpb.KV/DeleteRange", rpc_pb2.DeleteRangeResponse, False)
TXN: Final = Method("/etcdserverpb.KV/Txn", rpc_pb2.TxnResponse, False)
COMPACT: Final = Method("/etcdserverpb.KV/Compact", rpc_pb2.CompactionResponse, False)
MEMBER_LIST: Final = Method("/etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListResponse, True)
STATUS: Final = Method("/etcdserverpb.Maintenance/Status", rpc_pb2.StatusResponse, True)
HASH_KV: Final = Method("/etcdserverpb.Maintenance/HashKV", rpc_pb2.HashKVResponse, True)
ALARM: Final = Method("/etcdserverpb.Maintenance/Alarm", rpc_pb2.AlarmResponse, True)
AUTHENTICATE: Final = Method("/etcdserverpb.Auth/Authenticate", rpc_pb2.AuthenticateResponse, True)

LEASE_GRANT: Final = Method("/etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantResponse, False)
LEASE_REVOKE: Final = Method("/etcdserverpb.Lease/LeaseRevoke", rpc_pb2.LeaseRevokeResponse, False)
LEASE_TIME_TO_LIVE: Final = Method("/etcdserverpb.Lease/LeaseTimeToLive", rpc_pb2.LeaseTimeToLiveResponse, True)
LEASE_LEASES: Final = Method("/etcdserverpb.Lease/LeaseLeases", rpc_pb2.LeaseLeasesResponse, True)
LOCK: Final = Method("/v3lockpb.Lock/Lock", lock_pb2.LockResponse, False)
UNLOCK: Final = Method("/v3lockpb.Lock/Unlock", lock_pb2.UnlockResponse, False)
CAMPAIGN: Final = Method("/v3electionpb.Election/Campaign", election_pb2.CampaignResponse, False)
PROCLAIM: Final = Method("/v3electionpb.Election/Proclaim", election_pb2.ProclaimResponse, False)
LEADER: Final = Method("/v3electionpb.Election/Leader", election_pb2.LeaderResponse, True)
RESIGN: Final = Method("/v3electionpb.Election/Resign", election_pb2.ResignResponse, False)

WATCH: Final = StreamMethod("/etcdserverpb.Watch/Watch", rpc_pb2.WatchResponse)
LEASE_KEEP_ALIVE: Final = StreamMethod("/etcdserverpb.Lease/LeaseKeepAlive", rpc_pb2.LeaseKeepAliveResponse)
OBSERVE: Final = StreamMethod("/v3electionpb.Election/Observe", election_pb2.LeaderResponse)
