"""Requests for the matrix: every method of the client ports, every field through which a request touches keys.

The lease 201 has the key "m1", the lease 202 the keys "m1x" and "z": so who may write a part may not use the second.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raftkv.apply import wire
from raftkv.apply.wire import Kind
from raftkv.pb import election_pb2, lock_pb2, raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.server.auth.service import CHANGES
from tests.server.auth.oracle import ROOT, USER, Interval, Need

INSIDE, OUTSIDE = 201, 202
LEASES: dict[int, tuple[bytes, ...]] = {INSIDE: (b"m1",), OUTSIDE: (b"m1x", b"z")}
INTERVALS: dict[str, Interval] = {
    "key inside": (b"m1", b""),
    "first key inside": (b"m", b""),
    "key outside": (b"z", b""),
    "end outside": (b"n", b""),
    "interval inside": (b"m2", b"m4"),
    "the whole part": (b"m", b"n"),
    "interval over the begin": (b"l", b"m5"),
    "interval over the end": (b"m5", b"z"),
    "from one key on": (b"m1", b"\0"),
    "from the part on": (b"m", b"\0"),
    "everything": (b"\0", b"\0"),
}
Operation = rpc_pb2.RequestOp


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        method: ``service/method``.
        what: about it, for people.
        request: the message.
        needs: by the reference.
        kind: of the entry that it becomes; 0: it becomes none.
        is_open: whether callers are not authenticated.
        is_for_all: whether any caller may do it who shows no bad token.
    """

    method: str
    what: str
    request: Any
    needs: tuple[Need, ...]
    kind: int = 0
    is_open: bool = False
    is_for_all: bool = False

    def entry(self) -> bytes:
        """The body of the entry."""
        if self.kind != Kind.AUTH:
            body: bytes = self.request.SerializeToString()
            return body
        change = raft_pb2.AuthChange(**{CHANGES[self.method.rpartition("/")[2]]: self.request})
        return wire.versioned(Kind.AUTH, change.SerializeToString())


def _writes(interval: Interval, *, previous: bool = False) -> tuple[Need, ...]:
    return (("W", interval), ("R", interval)) if previous else (("W", interval),)


def _lease_keys(kind: str, lease: int) -> tuple[Need, ...]:
    return tuple((kind, (key, b"")) for key in LEASES.get(lease, ()))


def _operations() -> Iterator[tuple[str, str, Any, tuple[Need, ...]]]:
    """Operations that stand alone, or in a txn: field of RequestOp, what, message, needs."""
    for what, interval in INTERVALS.items():
        key, end = interval
        yield "request_range", what, rpc_pb2.RangeRequest(key=key, range_end=end), (("R", interval),)
        for previous in (False, True):
            deletion = rpc_pb2.DeleteRangeRequest(key=key, range_end=end, prev_kv=previous)
            name = f"{what}{', prev_kv' * previous}"
            yield "request_delete_range", name, deletion, _writes(interval, previous=previous)
            if not end:
                for lease in (0, INSIDE, OUTSIDE):
                    put = rpc_pb2.PutRequest(key=key, value=b"v", prev_kv=previous, lease=lease)
                    needs = _writes(interval, previous=previous) + _lease_keys("W", lease)
                    yield "request_put", f"{name}, lease {lease}", put, needs


METHOD_OF = {
    "request_range": ("Range", 0),
    "request_put": ("Put", Kind.PUT),
    "request_delete_range": ("DeleteRange", Kind.DELETE_RANGE),
}


def _single() -> Iterator[Case]:
    for field, what, message, needs in _operations():
        name, kind = METHOD_OF[field]
        yield Case(f"etcdserverpb.KV/{name}", what, message, needs, kind)
        if field == "request_range":
            yield Case("etcdserverpb.KV/RangeStream", what, message, needs)


def _nest(operations: dict[str, Any], where: str) -> rpc_pb2.TxnRequest:
    """A txn with something in one place: ``success``, ``failure``, or through nested txns, outermost first."""
    branch, _, inner = where.partition("/")
    if not inner:
        return rpc_pb2.TxnRequest(**({branch: [Operation(**operations)]} if branch != "compare" else operations))
    return rpc_pb2.TxnRequest(**{branch: [Operation(request_txn=_nest(operations, inner))]})


PLACES = ("success", "failure", "success/success", "success/failure", "failure/success", "failure/failure/success")
PLACES_OF_COMPARES = ("compare", "success/compare", "failure/compare", "failure/success/compare")


def _txns() -> Iterator[Case]:
    for field, what, message, needs in _operations():
        for where in PLACES:
            if field == "request_range" and "/" not in where:
                kind = 0  # a txn of ranges alone is a read
            else:
                kind = Kind.TXN
            yield Case("etcdserverpb.KV/Txn", f"{where}: {field}, {what}", _nest({field: message}, where), needs, kind)
    for what, (key, end) in INTERVALS.items():
        compare = rpc_pb2.Compare(key=key, range_end=end, target=rpc_pb2.Compare.VERSION)
        for where in PLACES_OF_COMPARES:
            request = _nest({"compare": [compare]}, where)
            kind = Kind.TXN if "/" in where else 0
            yield Case("etcdserverpb.KV/Txn", f"{where}, {what}", request, (("R", (key, end)),), kind)


def _watches() -> Iterator[Case]:
    intervals = INTERVALS | {"no key": (b"", b""), "no key, from there on": (b"", b"\0")}
    for what, (key, end) in intervals.items():
        for previous in (False, True):
            create = rpc_pb2.WatchCreateRequest(key=key, range_end=end, prev_kv=previous)
            # No key is the first of all keys.
            needs: tuple[Need, ...] = (("R", (key or b"\0", end)),)
            request = rpc_pb2.WatchRequest(create_request=create)
            yield Case("etcdserverpb.Watch/Watch", f"{what}{', prev_kv' * previous}", request, needs)


def _leases() -> Iterator[Case]:
    service = "etcdserverpb.Lease"
    yield Case(f"{service}/LeaseGrant", "", rpc_pb2.LeaseGrantRequest(ID=300, TTL=60), (USER,), Kind.LEASE_GRANT)
    for lease in (INSIDE, OUTSIDE, 299):
        revoke, keep = rpc_pb2.LeaseRevokeRequest(ID=lease), rpc_pb2.LeaseKeepAliveRequest(ID=lease)
        needs = (USER, *_lease_keys("W", lease))
        yield Case(f"{service}/LeaseRevoke", f"{lease}", revoke, needs, Kind.LEASE_REVOKE)
        yield Case(f"{service}/LeaseKeepAlive", f"{lease}", keep, needs)
        for keys in (False, True):
            ask = rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=keys)
            needs = (USER, *_lease_keys("R", lease)) if keys else (USER,)
            yield Case(f"{service}/LeaseTimeToLive", f"{lease}{', keys' * keys}", ask, needs)
    needs = (USER, *_lease_keys("R", INSIDE), *_lease_keys("R", OUTSIDE))
    yield Case(f"{service}/LeaseLeases", "", rpc_pb2.LeaseLeasesRequest(), needs)


def _queues() -> Iterator[Case]:
    for name in (b"m", b"z"):
        below, where = (name + b"/", name + b"0"), name.decode()
        for lease in (INSIDE, OUTSIDE):
            key = name + b"/%x" % lease
            needs: tuple[Need, ...] = (("R", below), ("W", (key, b"")), *_lease_keys("W", lease))
            what = f"{where}, lease {lease}"
            yield Case("v3lockpb.Lock/Lock", what, lock_pb2.LockRequest(name=name, lease=lease), needs)
            campaign = election_pb2.CampaignRequest(name=name, lease=lease)
            yield Case("v3electionpb.Election/Campaign", what, campaign, needs)
            leader = election_pb2.LeaderKey(name=name, key=key, rev=1, lease=lease)
            both: tuple[Need, ...] = (("R", (key, b"")), ("W", (key, b"")))
            proclaim = election_pb2.ProclaimRequest(leader=leader)
            yield Case("v3electionpb.Election/Proclaim", what, proclaim, (*both, *_lease_keys("W", lease)))
            yield Case("v3electionpb.Election/Resign", what, election_pb2.ResignRequest(leader=leader), both)
            yield Case("v3lockpb.Lock/Unlock", what, lock_pb2.UnlockRequest(key=key), (("W", (key, b"")),))
        ask = election_pb2.LeaderRequest(name=name)
        yield Case("v3electionpb.Election/Leader", where, ask, (("R", below),))
        yield Case("v3electionpb.Election/Observe", where, ask, (("R", below),))


def _alarms() -> Iterator[Case]:
    for action in (rpc_pb2.AlarmRequest.GET, rpc_pb2.AlarmRequest.ACTIVATE, rpc_pb2.AlarmRequest.DEACTIVATE):
        needs = (USER,) if action == rpc_pb2.AlarmRequest.GET else (ROOT,)
        alarm = rpc_pb2.AlarmRequest(action=action, alarm=rpc_pb2.NOSPACE)
        yield Case("etcdserverpb.Maintenance/Alarm", f"{action}", alarm, needs, Kind.ALARM)


ANYBODY = {"etcdserverpb.Auth/AuthStatus"}
OPEN = {"etcdserverpb.Auth/Authenticate", *(f"grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch"))}
ANY_USER = {"etcdserverpb.Cluster/MemberList", "etcdserverpb.Maintenance/Status"}


HASH = base64.b64encode(b"$2a$04$" + b"x" * 53).decode()
REQUESTS = {
    "UserAdd": rpc_pb2.AuthUserAddRequest(name="new", hashedPassword=HASH),
    "UserChangePassword": rpc_pb2.AuthUserChangePasswordRequest(name="nobody", hashedPassword=HASH),
}
"""Requests without which a method gives the same answer as to no user, or works for long."""


def _others(named: set[str]) -> Iterator[Case]:
    """Requests that touch no keys, from the descriptors: a new method requires root until it is listed here."""
    for service, methods in SERVICES.items():
        if service == "raftkvpb.Peer":
            continue
        for name, method in methods.items():
            path = f"{service}/{name}"
            if path not in named:
                change = CHANGES.get(name) if service == "etcdserverpb.Auth" else None
                kind = Kind.COMPACT if name == "Compact" else Kind.AUTH if change is not None else 0
                needs = () if path in OPEN | ANYBODY else (USER,) if path in ANY_USER else (ROOT,)
                yield Case(path, "", REQUESTS.get(name, method.request()), needs, kind, path in OPEN, path in ANYBODY)


def cases() -> list[Case]:
    """All of them."""
    touching = [*_single(), *_txns(), *_watches(), *_leases(), *_queues(), *_alarms()]
    return touching + list(_others({case.method for case in touching}))
