"""The rights that each RPC of the client ports needs: one row for every method, and no method without one.

    row = row_of("/etcdserverpb.KV/Put")
    left = row.ask(rights, request, caller)    # raises the refusal; returns the rest of a long check

| row | who may call |
|---|---|
| OPEN | every caller: logins and health |
| ANYBODY | every caller; a token, if shown, must be valid |
| USER | a user admitted under the current revision |
| KNOWN | a user |
| ROOT | a user with the role root |
| BY_MESSAGE | every caller may open the stream; the service checks every message (``guard``) |
| a function | depends on the request |

Rows are those of etcd 3.7.1. A row that reads or writes keys names every range that the request touches. The rights for
an entry of the log are defined once, in ``rights.check``, which is checked again when the entry is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Final

from raftkv import errors
from raftkv.apply import check
from raftkv.apply.auth.rights import Left, Rights
from raftkv.apply.wire import Caller, Kind
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES, Method

Check = Callable[[Rights, Any, Caller | None], Left]
"""Raises the StatusError that refuses a request; returns the rest of the check."""


@dataclass(frozen=True, slots=True)
class Row:
    """The rights that one RPC needs.

    Attributes:
        check: raises the refusal of a request; None: callers are not authenticated.
        valid: raises the fault of an invalid request (arguments: request, ``max-txn-ops``). As in etcd it comes first,
            and a request too large to execute is too large to check.
        valid_in_pieces: the same with pauses, for a request that may be long.
        lasts: whether a call may last so long that it is checked again when users or rights change.
        by_message: whether the service checks each message of a stream.
        is_recipe: whether refusals have the code UNKNOWN, as in etcd, whose recipes are clients inside the server.
    """

    check: Check | None = None
    valid: Callable[[Any, int], object] | None = None
    valid_in_pieces: Callable[[Any, int], Generator[None, None, object]] | None = None
    lasts: bool = False
    by_message: bool = False
    is_recipe: bool = False

    def ask(self, rights: Rights, request: Any, caller: Caller | None) -> Left:
        """Raise the StatusError that refuses a request; return the rest of the check."""
        return None if self.check is None else self.check(rights, request, caller)


def _below(name: bytes) -> tuple[bytes, bytes]:
    """Return the range of the keys of a lock or an election."""
    return name + b"/", name + b"0"


def _entry(kind: int) -> Check:
    return lambda rights, request, caller: rights.check(kind, request, caller)


def _valid(checks: Callable[[Any], None]) -> Callable[[Any, int], None]:
    return lambda request, _operations_max: checks(request)


def _range(rights: Rights, request: rpc_pb2.RangeRequest, caller: Caller | None) -> None:
    rights.check_read(caller, request.key, request.range_end)


def _alarm(rights: Rights, request: rpc_pb2.AlarmRequest, caller: Caller | None) -> None:
    if request.action == rpc_pb2.AlarmRequest.GET:
        rights.check_user(caller)
    else:
        rights.check_root(caller)


def _time_to_live(rights: Rights, request: rpc_pb2.LeaseTimeToLiveRequest, caller: Caller | None) -> Left:
    rights.check_user(caller)
    return rights.check_lease(caller, request.ID, write=False) if request.keys else None


def _lock(rights: Rights, request: Any, caller: Caller | None) -> Left:
    """Check a lock or a candidacy: it writes a key below the name, and reads all of them."""
    rights.check_read(caller, *_below(request.name))
    if not request.lease:
        return None
    rights.check_write(caller, b"%s/%x" % (request.name, request.lease), b"")
    return rights.check_lease(caller, request.lease, write=True)


def _unlock(rights: Rights, request: Any, caller: Caller | None) -> None:
    rights.check_write(caller, request.key, b"")


def _proclaim(rights: Rights, request: Any, caller: Caller | None) -> Left:
    rights.check_user(caller)
    if not request.HasField("leader"):
        return None
    rights.check_read(caller, request.leader.key, b"")
    rights.check_write(caller, request.leader.key, b"")
    return rights.check_lease(caller, request.leader.lease, write=True) if request.leader.lease else None


def _resign(rights: Rights, request: Any, caller: Caller | None) -> None:
    rights.check_user(caller)
    if request.HasField("leader"):
        rights.check_read(caller, request.leader.key, b"")
        rights.check_write(caller, request.leader.key, b"")


def _leader(rights: Rights, request: Any, caller: Caller | None) -> None:
    rights.check_read(caller, *_below(request.name))


OPEN: Final = Row()
ANYBODY: Final = Row(lambda _rights, _request, _caller: None)
USER: Final = Row(lambda rights, _request, caller: rights.check_user(caller))
KNOWN: Final = Row(lambda rights, _request, caller: rights.check_known(caller))
ROOT: Final = Row(lambda rights, _request, caller: rights.check_root(caller))
BY_MESSAGE: Final = replace(USER, by_message=True)
_ROOT_LASTS: Final = replace(ROOT, lasts=True)

TABLE: Final[dict[str, dict[str, Row]]] = {
    "etcdserverpb.KV": {
        "Range": Row(_range, _valid(check.check_range)),
        "RangeStream": Row(_range, _valid(check.check_range), lasts=True),
        "Put": Row(_entry(Kind.PUT), _valid(check.check_put)),
        "DeleteRange": Row(_entry(Kind.DELETE_RANGE), _valid(check.check_delete_range)),
        "Txn": Row(
            lambda rights, request, caller: rights.check_txn(request, caller),
            check.check_txn,
            check.check_txn_in_pieces,
        ),
        "Compact": Row(_entry(Kind.COMPACT)),
    },
    "etcdserverpb.Watch": {"Watch": BY_MESSAGE},
    "etcdserverpb.Lease": {
        "LeaseGrant": Row(_entry(Kind.LEASE_GRANT)),
        "LeaseRevoke": Row(_entry(Kind.LEASE_REVOKE)),
        "LeaseKeepAlive": BY_MESSAGE,
        "LeaseTimeToLive": Row(_time_to_live),
        # Its service checks READ on the keys of all leases, in slices.
        "LeaseLeases": USER,
    },
    "etcdserverpb.Cluster": {
        "MemberAdd": ROOT,
        "MemberRemove": ROOT,
        "MemberUpdate": ROOT,
        "MemberPromote": ROOT,
        "MemberList": USER,
    },
    "etcdserverpb.Maintenance": {
        "Alarm": Row(_alarm, _valid(check.check_alarm)),
        "Status": USER,
        "Defragment": _ROOT_LASTS,
        "Hash": _ROOT_LASTS,
        "HashKV": _ROOT_LASTS,
        "Snapshot": _ROOT_LASTS,
        "MoveLeader": _ROOT_LASTS,
        "Downgrade": _ROOT_LASTS,
    },
    "etcdserverpb.Auth": {
        "Authenticate": OPEN,
        "AuthStatus": ANYBODY,
        "AuthEnable": ROOT,
        "AuthDisable": ROOT,
        "UserAdd": ROOT,
        # Their services let users see themselves and their own roles.
        "UserGet": KNOWN,
        "RoleGet": KNOWN,
        "UserList": ROOT,
        "UserDelete": ROOT,
        "UserChangePassword": ROOT,
        "UserGrantRole": ROOT,
        "UserRevokeRole": ROOT,
        "RoleAdd": ROOT,
        "RoleList": ROOT,
        "RoleDelete": ROOT,
        "RoleGrantPermission": ROOT,
        "RoleRevokePermission": ROOT,
    },
    "v3lockpb.Lock": {"Lock": Row(_lock, lasts=True, is_recipe=True), "Unlock": Row(_unlock, is_recipe=True)},
    "v3electionpb.Election": {
        "Campaign": Row(_lock, lasts=True, is_recipe=True),
        "Proclaim": Row(_proclaim, is_recipe=True),
        "Leader": Row(_leader, lasts=True, is_recipe=True),
        "Observe": Row(_leader, lasts=True, is_recipe=True),
        "Resign": Row(_resign, is_recipe=True),
    },
    "grpc.health.v1.Health": {"Check": OPEN, "List": OPEN, "Watch": OPEN},
    "raftkvpb.Admin": {
        "MemberReplace": ROOT,
        "QuotaSet": ROOT,
        "QuotaRemove": ROOT,
        "QuotaList": _ROOT_LASTS,
        "LimitSet": ROOT,
        "LimitList": _ROOT_LASTS,
    },
}
"""Rows by service and method."""

_BY_PATH: Final[dict[str, tuple[Method, Row]]] = {
    SERVICES[service][name].path: (SERVICES[service][name], row)
    for service, rows in TABLE.items()
    for name, row in rows.items()
}


def row_of(path: str) -> tuple[Method, Row]:
    """Return a method and its row.

    Arguments:
        path: ``/package.Service/Method``.

    Raises:
        ConfigError: the method has no row, so it cannot be served.
    """
    found = _BY_PATH.get(path)
    if found is None:
        raise errors.ConfigError(f"{path} has no row in raftkv.server.auth.table, which says who may call it")
    return found
