"""The client of raftkv: works against any member, or cluster, that speaks etcd's v3 API.

    raftkv.aio  = library.Client: kv, bulk, txns, watches, lessor, sessions, locks, elections, admin
                       | all over one Scope: core, key space, timeout, watch hub, lease keeper, fence
    raftkv      = sync: the same on a background thread
    raftkvctl   = rpc.core.Client, with ``watch``, ``lease`` and ``lock`` where a command needs them

Invariants: no event is lost or seen twice; lease validity is measured by this machine's clock; a write is retried only
if it certainly did not happen. Each module below states its own invariants.

Example::

    async with raftkv.aio.connect("127.0.0.1:2379") as kv:
        await kv.put("a", b"1")

Read ``library``, ``scope``, then ``rpc`` and the module of the feature. ``control`` and ``records`` are the basis of
programs that keep their state in the store. Not here: training runs (``raftkv.training``), and all code of the server.
"""

from raftkv.client.rpc.core import Client, ClientOptions
from raftkv.client.rpc.methods import Method

__all__ = ["Client", "ClientOptions", "Method"]
