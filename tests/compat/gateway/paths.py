"""The 51 paths of etcd's JSON gateway, written down from etcd's own definitions: raftkv's table is not looked at.

48 RPCs have a path each, three of the leases a second one. What etcd 3.5.1 has otherwise is in ``compare``.
"""

from __future__ import annotations

from typing import Any

from raftkv.pb.services import SERVICES

_UNDER = {
    "etcdserverpb.KV": {
        "Range": "kv/range",
        "Put": "kv/put",
        "DeleteRange": "kv/deleterange",
        "Txn": "kv/txn",
        "Compact": "kv/compaction",
    },
    "etcdserverpb.Watch": {"Watch": "watch"},
    "etcdserverpb.Lease": {
        "LeaseGrant": "lease/grant",
        "LeaseRevoke": "lease/revoke",
        "LeaseKeepAlive": "lease/keepalive",
        "LeaseTimeToLive": "lease/timetolive",
        "LeaseLeases": "lease/leases",
    },
    "etcdserverpb.Cluster": {
        "MemberAdd": "cluster/member/add",
        "MemberRemove": "cluster/member/remove",
        "MemberUpdate": "cluster/member/update",
        "MemberList": "cluster/member/list",
        "MemberPromote": "cluster/member/promote",
    },
    "etcdserverpb.Maintenance": {
        "Alarm": "maintenance/alarm", "Status": "maintenance/status", "Defragment": "maintenance/defragment",
        "Hash": "maintenance/hash", "HashKV": "maintenance/hashkv", "Snapshot": "maintenance/snapshot",
        "MoveLeader": "maintenance/transfer-leadership", "Downgrade": "maintenance/downgrade",
    },
    "etcdserverpb.Auth": {
        "AuthEnable": "auth/enable", "AuthDisable": "auth/disable", "AuthStatus": "auth/status",
        "Authenticate": "auth/authenticate", "UserAdd": "auth/user/add", "UserGet": "auth/user/get",
        "UserList": "auth/user/list", "UserDelete": "auth/user/delete", "UserChangePassword": "auth/user/changepw",
        "UserGrantRole": "auth/user/grant", "UserRevokeRole": "auth/user/revoke", "RoleAdd": "auth/role/add",
        "RoleGet": "auth/role/get", "RoleList": "auth/role/list", "RoleDelete": "auth/role/delete",
        "RoleGrantPermission": "auth/role/grant", "RoleRevokePermission": "auth/role/revoke",
    },
    "v3lockpb.Lock": {"Lock": "lock/lock", "Unlock": "lock/unlock"},
    "v3electionpb.Election": {
        "Campaign": "election/campaign",
        "Proclaim": "election/proclaim",
        "Leader": "election/leader",
        "Observe": "election/observe",
        "Resign": "election/resign",
    },
}  # fmt: skip
_SECOND = {
    "kv/lease/revoke": ("etcdserverpb.Lease", "LeaseRevoke"),
    "kv/lease/timetolive": ("etcdserverpb.Lease", "LeaseTimeToLive"),
    "kv/lease/leases": ("etcdserverpb.Lease", "LeaseLeases"),
}

METHODS: dict[str, tuple[str, str]] = {
    **{path: (service, name) for service, methods in _UNDER.items() for name, path in methods.items()},
    **_SECOND,
}
"""Service and RPC of every path below /v3/."""

LASTING = ("watch", "election/observe", "maintenance/snapshot", "lease/keepalive")
"""Paths whose answers are streams."""


def request_of(path: str) -> Any:
    """Return the descriptor of the message that a path takes."""
    service, name = METHODS[path]
    return SERVICES[service][name].request.DESCRIPTOR
