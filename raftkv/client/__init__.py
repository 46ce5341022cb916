"""The client of raftkv: the core on which command line, benchmark and library stand.

Works against any member that speaks etcd's v3 API. Read ``core`` (calls with failover), ``endpoints`` (where to),
``methods`` (what can be called), ``streams`` (calls that go on), ``errors`` (what can go wrong), ``transport`` (the
one door to the RPC layer).

    async with Client(["127.0.0.1:2379"]) as client:
        answer = await client.call(methods.RANGE, rpc_pb2.RangeRequest(key=b"k"), timeout_s=5.0)

The friendly face over the messages is ``raftkv.aio``.
"""

from raftkv.client.rpc.core import Client, ClientOptions
from raftkv.client.rpc.methods import Method

__all__ = ["Client", "ClientOptions", "Method"]
