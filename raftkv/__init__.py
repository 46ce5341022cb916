"""raftkv: a Raft-replicated MVCC key-value store that speaks the etcd v3 API, and its client library.

::

    import raftkv
    from raftkv import get, put

    with raftkv.connect("127.0.0.1:2379,127.0.0.1:2381") as kv:
        kv.put("jobs/a", b"1")
        txn = kv.txn().when(kv.version("jobs/a") == 0).then(put("jobs/a", b"1")).otherwise(get("jobs/a"))
        ok, results = txn.commit()
        for event in kv.watch("jobs/", prefix=True): ...

    with raftkv.local() as cluster, cluster.connect() as kv: ...      # a throwaway cluster

``raftkv.connect`` returns the blocking client (``raftkv.client.sync.library``), which is safe in threads and after
fork; ``raftkv.aio`` is the same client for asyncio. Each name is imported at its first use, so that the server does
not load the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raftkv.lazy import attach

if TYPE_CHECKING:
    from raftkv import aio as aio
    from raftkv import errors as errors
    from raftkv.client.cache import CacheUpdate as CacheUpdate
    from raftkv.client.endpoints import Endpoint as Endpoint
    from raftkv.client.errors import AuthenticationFailed as AuthenticationFailed
    from raftkv.client.errors import CacheBehind as CacheBehind
    from raftkv.client.errors import CacheTooLarge as CacheTooLarge
    from raftkv.client.errors import EndpointsFailed as EndpointsFailed
    from raftkv.client.errors import FenceLost as FenceLost
    from raftkv.client.errors import HistoryReplaced as HistoryReplaced
    from raftkv.client.errors import LeaseLost as LeaseLost
    from raftkv.client.errors import LockLost as LockLost
    from raftkv.client.errors import LockNotFree as LockNotFree
    from raftkv.client.errors import TermLost as TermLost
    from raftkv.client.errors import TxnConflict as TxnConflict
    from raftkv.client.errors import WatchCanceled as WatchCanceled
    from raftkv.client.kv import txn as txn
    from raftkv.client.local import LocalCluster as LocalCluster
    from raftkv.client.local import LocalClusterError as LocalClusterError
    from raftkv.client.local import local as local
    from raftkv.client.operations import create_revision as create_revision
    from raftkv.client.operations import delete as delete
    from raftkv.client.operations import get as get
    from raftkv.client.operations import get_range as get_range
    from raftkv.client.operations import lease_of as lease_of
    from raftkv.client.operations import mod_revision as mod_revision
    from raftkv.client.operations import put as put
    from raftkv.client.operations import value as value
    from raftkv.client.operations import version as version
    from raftkv.client.sync.blocking import Watch as Watch
    from raftkv.client.sync.library import Cache as Cache
    from raftkv.client.sync.library import Client as Client
    from raftkv.client.sync.library import Endpoints as Endpoints
    from raftkv.client.sync.library import Lease as Lease
    from raftkv.client.sync.library import Lock as Lock
    from raftkv.client.sync.library import Session as Session
    from raftkv.client.sync.library import Term as Term
    from raftkv.client.sync.library import Transaction as Transaction
    from raftkv.client.sync.library import Txn as Txn
    from raftkv.client.sync.library import connect as connect
    from raftkv.client.sync.loop import Closed as Closed
    from raftkv.client.sync.loop import Forked as Forked
    from raftkv.client.sync.loop import WrongThread as WrongThread
    from raftkv.client.values import Event as Event
    from raftkv.client.values import KeyValue as KeyValue
    from raftkv.errors import CompactedError as Compacted
    from raftkv.errors import ConfigError as ConfigError
    from raftkv.errors import RaftKVError as RaftKVError
    from raftkv.errors import StatusError as StatusError

__version__ = "0.2.0"

_load, __dir__, __all__ = attach(
    __name__,
    {
        "client.cache": "CacheUpdate",
        "client.endpoints": "Endpoint",
        "client.errors": (
            "AuthenticationFailed CacheBehind CacheTooLarge EndpointsFailed FenceLost HistoryReplaced LeaseLost "
            "LockLost LockNotFree TermLost TxnConflict WatchCanceled"
        ),
        "client.kv": "txn",
        "client.local": "LocalCluster LocalClusterError local",
        "client.operations": "create_revision delete get get_range lease_of mod_revision put value version",
        "client.sync.blocking": "Watch",
        "client.sync.library": "Cache Client Endpoints Lease Lock Session Term Transaction Txn connect",
        "client.sync.loop": "Closed Forked WrongThread",
        "client.values": "Event KeyValue",
        "errors": "ConfigError RaftKVError StatusError",
    },
    ["aio", "errors"],
)
__all__ += ["Compacted", "__version__"]


def __getattr__(name: str) -> Any:
    return _load("errors").CompactedError if name == "Compacted" else _load(name)
