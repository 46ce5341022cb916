"""The asyncio client of raftkv; works with any server that speaks etcd's v3 API.

::

    import raftkv.aio
    from raftkv.aio import get, put

    async with raftkv.aio.connect("127.0.0.1:2379,127.0.0.1:2381") as kv:
        await kv.put("jobs/a", b"1")
        item = await kv.get("jobs/a")                                       # KeyValue or None
        page = await kv.range("jobs/", prefix=True, limit=100)

        ok, results = await kv.txn().when(kv.version("jobs/a") == 0).then(put("jobs/a", b"1")).commit()

        async for event in kv.watch("jobs/", prefix=True): ...              # survives members; no event lost or twice

        async with kv.cache("jobs/") as jobs:                               # a local copy, kept current
            await jobs.get("jobs/a", linearizable=True)                     # sees all writes that were answered

        async with kv.lease(ttl=10) as lease:                               # a loss interrupts the block
            await kv.put("workers/1", b"here", lease=lease)
        async with kv.lock("name", ttl=10) as lock:
            await kv.put("x", b"y", fence=lock)                             # only while the lock is held
        async with kv.campaign("leader", b"me") as term: ...

Further reading: ``raftkv.client.library`` (``connect``, ``Client``), then the modules of the features: ``kv`` (with
txns), ``watch``, ``lease`` (with sessions), ``lock`` (with elections), ``cache``, ``endpoints``, ``admin``. The
blocking API with the same names is ``raftkv`` itself.

The errors are those of ``raftkv.errors`` and the few below. After a failed write, ``error.definite`` says whether the
write certainly did not happen.
"""

from __future__ import annotations

from raftkv.client.cache import Cache, CacheUpdate
from raftkv.client.endpoints import Endpoint, Endpoints
from raftkv.client.errors import (
    AuthenticationFailed,
    CacheBehind,
    CacheTooLarge,
    EndpointsFailed,
    FenceLost,
    HistoryReplaced,
    LeaseLost,
    LockLost,
    LockNotFree,
    TermLost,
    TxnConflict,
    WatchCanceled,
)
from raftkv.client.kv import Transaction, Txn, txn
from raftkv.client.lease import Lease, Session
from raftkv.client.library import Client, connect
from raftkv.client.lock import Lock, Term
from raftkv.client.operations import (
    create_revision,
    delete,
    get,
    get_range,
    lease_of,
    mod_revision,
    put,
    value,
    version,
)
from raftkv.client.values import (
    Alarm,
    DeleteResult,
    EndpointStatus,
    Event,
    KeyValue,
    LeaseInfo,
    Member,
    PrefixQuota,
    PutResult,
    RangeResult,
    RateLimit,
    TxnResult,
)
from raftkv.client.watch import Watch
from raftkv.errors import CompactedError as Compacted
from raftkv.errors import ConfigError, RaftKVError, StatusError

__all__ = [
    "Alarm",
    "AuthenticationFailed",
    "Cache",
    "CacheBehind",
    "CacheTooLarge",
    "CacheUpdate",
    "Client",
    "Compacted",
    "ConfigError",
    "DeleteResult",
    "Endpoint",
    "EndpointStatus",
    "Endpoints",
    "EndpointsFailed",
    "Event",
    "FenceLost",
    "HistoryReplaced",
    "KeyValue",
    "Lease",
    "LeaseInfo",
    "LeaseLost",
    "Lock",
    "LockLost",
    "LockNotFree",
    "Member",
    "PrefixQuota",
    "PutResult",
    "RaftKVError",
    "RangeResult",
    "RateLimit",
    "Session",
    "StatusError",
    "Term",
    "TermLost",
    "Transaction",
    "Txn",
    "TxnConflict",
    "TxnResult",
    "Watch",
    "WatchCanceled",
    "connect",
    "create_revision",
    "delete",
    "get",
    "get_range",
    "lease_of",
    "mod_revision",
    "put",
    "txn",
    "value",
    "version",
]
