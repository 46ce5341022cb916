"""Converts requests for leases, locks and elections between the vocabulary of histories and etcd's messages."""

from __future__ import annotations

from typing import Any

from jepsen.ops import (
    Campaign,
    Done,
    Grant,
    HeldResult,
    KeepAlive,
    Leader,
    LeaseResult,
    Lock,
    Proclaim,
    Resign,
    Result,
    Revoke,
    Special,
    TimeToLive,
    Unlock,
)
from raftkv.pb import election_pb2, lock_pb2, rpc_pb2

METHODS: dict[type[Any], tuple[str, type[Any]]] = {
    Grant: ("/etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantResponse),
    Revoke: ("/etcdserverpb.Lease/LeaseRevoke", rpc_pb2.LeaseRevokeResponse),
    KeepAlive: ("/etcdserverpb.Lease/LeaseKeepAlive", rpc_pb2.LeaseKeepAliveResponse),
    TimeToLive: ("/etcdserverpb.Lease/LeaseTimeToLive", rpc_pb2.LeaseTimeToLiveResponse),
    Lock: ("/v3lockpb.Lock/Lock", lock_pb2.LockResponse),
    Unlock: ("/v3lockpb.Lock/Unlock", lock_pb2.UnlockResponse),
    Campaign: ("/v3electionpb.Election/Campaign", election_pb2.CampaignResponse),
    Proclaim: ("/v3electionpb.Election/Proclaim", election_pb2.ProclaimResponse),
    Resign: ("/v3electionpb.Election/Resign", election_pb2.ResignResponse),
    Leader: ("/v3electionpb.Election/Leader", election_pb2.LeaderResponse),
}
STREAMING = frozenset({KeepAlive})


def message(request: Special) -> Any:
    """Return the wire message of a request."""
    match request:
        case Grant():
            return rpc_pb2.LeaseGrantRequest(ID=request.id, TTL=request.ttl_s)
        case Revoke():
            return rpc_pb2.LeaseRevokeRequest(ID=request.id)
        case KeepAlive():
            return rpc_pb2.LeaseKeepAliveRequest(ID=request.id)
        case TimeToLive():
            return rpc_pb2.LeaseTimeToLiveRequest(ID=request.id)
        case Lock():
            return lock_pb2.LockRequest(name=request.name.encode(), lease=request.lease)
        case Unlock():
            return lock_pb2.UnlockRequest(key=request.key.encode())
        case Campaign():
            name, value = request.name.encode(), request.value.encode()
            return election_pb2.CampaignRequest(name=name, lease=request.lease, value=value)
        case Proclaim():
            return election_pb2.ProclaimRequest(leader=_office(request), value=request.value.encode())
        case Resign():
            return election_pb2.ResignRequest(leader=_office(request))
        case Leader():
            return election_pb2.LeaderRequest(name=request.name.encode())


def result(request: Special, response: Any) -> Result:
    """Convert a response message to an answer.

    Arguments:
        request: the request.
        response: the response message.
    """
    match request:
        case Grant() | KeepAlive():
            return LeaseResult(response.TTL)
        case TimeToLive():
            return LeaseResult(response.TTL, response.grantedTTL)
        case Lock():
            return HeldResult(response.key.decode(), getattr(response, "create_revision", 0))
        case Campaign():
            return HeldResult(response.leader.key.decode(), response.leader.rev)
        case _:
            return Done()


def _office(request: Proclaim | Resign) -> Any:
    return election_pb2.LeaderKey(
        name=request.name.encode(), key=request.key.encode(), rev=request.rev, lease=request.lease
    )
