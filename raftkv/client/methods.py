"""The calls of etcd's API that the client makes, and which of them may be repeated.

A method is *repeatable* if doing it twice is as good as once: a call whose outcome is unknown is then tried again at
another endpoint. A write is not: it is tried again only if it certainly never reached a member.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from raftkv.pb import rpc_pb2

T = TypeVar("T")


@dataclass(frozen=True)
class Method(Generic[T]):
    """One unary call: its path, what it returns, whether it may be repeated."""

    path: str
    response: type[T]
    repeatable: bool


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
