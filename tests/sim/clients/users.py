"""Users of a simulated cluster: the initial users, how a member admits calls, and changes of rights.

Owns the part of a member that identifies the caller and checks rights before it proposes: a few lines that replace
tokens and passwords. The decisive check is the one when an entry is applied: the replay of the log has independent
rules (``auth_model``), and an entry that takes effect against them makes a revision that the replay does not have.
"""

from __future__ import annotations

import random
from typing import Any, Final

from raftkv.apply.applier import Applier, Outcome
from raftkv.apply.auth.store import AuthStore
from raftkv.apply.wire import Caller, Kind
from raftkv.errors import StatusError
from raftkv.pb import auth_pb2, raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.node.proposals import Waiter
from raftkv.storage.mvcc import Store
from tests.sim.devices.calls import CALLER, Call

ROOT: Final = "root"
USERS: Final = ("u0", "u1", "u2")
ROLES: Final = ("r0", "r1")
# No two begin with one key; together they are all keys of the workload.
INTERVALS: Final = ((b"k", b"k1"), (b"k0", b""), (b"k1", b"k2"), (b"k10", b"k3"), (b"k2", b"l"), (b"\0", b"\0"))
CHANGE_S_MEAN: Final = 0.1

_KV, _LEASE = SERVICES["etcdserverpb.KV"], SERVICES["etcdserverpb.Lease"]
_KINDS: Final[dict[str, tuple[int, Any]]] = {
    _KV["Put"].path: (Kind.PUT, rpc_pb2.PutRequest),
    _KV["DeleteRange"].path: (Kind.DELETE_RANGE, rpc_pb2.DeleteRangeRequest),
    _KV["Txn"].path: (Kind.TXN, rpc_pb2.TxnRequest),
    _KV["Compact"].path: (Kind.COMPACT, rpc_pb2.CompactionRequest),
    _LEASE["LeaseGrant"].path: (Kind.LEASE_GRANT, rpc_pb2.LeaseGrantRequest),
    _LEASE["LeaseRevoke"].path: (Kind.LEASE_REVOKE, rpc_pb2.LeaseRevokeRequest),
}


def beginning() -> list[raft_pb2.AuthChange]:
    """Return the initial users: each has a role with all rights."""
    everything = auth_pb2.Permission(permType=auth_pb2.Permission.READWRITE, key=b"\0", range_end=b"\0")
    changes: list[dict[str, Any]] = [{"user_add": {"name": name}} for name in (ROOT, *USERS)]
    changes += [{"role_add": {"name": role}} for role in ROLES]
    changes += [{"user_grant_role": {"user": ROOT, "role": ROOT}}]
    changes += [{"role_grant_permission": {"name": role, "perm": everything}} for role in ROLES]
    changes += [{"user_grant_role": {"user": name, "role": ROLES[0]}} for name in USERS]
    return [raft_pb2.AuthChange(**change) for change in (*changes, {"enable": {}})]


def found_users(store: Store) -> None:
    """Write the initial users into a store."""
    auth = AuthStore(store)
    for change in beginning():
        auth.execute(change, 0)


def may_ask(applier: Applier, path: str, data: bytes, call: Call) -> bool:
    """Admit a call or fail it. The metadata name the caller; the users applied at this member decide."""
    call.caller = Caller(str(call.metadata[CALLER]).encode(), applier.auth.revision)
    try:
        if path in _KINDS:
            kind, parser = _KINDS[path]
            applier.rights.check(kind, parser.FromString(data), call.caller)
        elif path == _KV["Range"].path:
            request = rpc_pb2.RangeRequest.FromString(data)
            applier.rights.check_read(call.caller, request.key, request.range_end)
    except StatusError as error:
        call.fail(error.code, str(error))
        return False
    return True


class Unheard(Waiter):
    """A waiter that ignores its answer."""

    def finish(self, outcome: Outcome) -> None:
        """Implement ``Waiter.finish``."""

    def fail(self, error: BaseException) -> None:
        """Implement ``Waiter.fail``."""


def draw_change(rng: random.Random) -> raft_pb2.AuthChange:
    """Draw a random change of rights."""
    user, role = rng.choice(USERS), rng.choice(ROLES)
    key, range_end = rng.choice(INTERVALS)
    kind = rng.choice((auth_pb2.Permission.READ, *[auth_pb2.Permission.READWRITE] * 3))
    permission = auth_pb2.Permission(permType=kind, key=key, range_end=range_end)
    changes: list[dict[str, Any]] = [
        {"user_grant_role": {"user": user, "role": role}},
        {"user_grant_role": {"user": user, "role": role}},
        {"user_revoke_role": {"name": user, "role": role}},
        {"role_grant_permission": {"name": role, "perm": permission}},
        {"role_grant_permission": {"name": role, "perm": permission}},
        {"role_revoke_permission": {"role": role, "key": key, "range_end": range_end}},
    ]
    return raft_pb2.AuthChange(**rng.choice(changes))
