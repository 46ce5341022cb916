"""Transactions that take long to apply: the put of another client waits for one of them, not for all of one client."""

from __future__ import annotations

import asyncio

import pytest

from raftkv.pb import rpc_pb2
from raftkv.rpc import Channel
from tests.long import long_except
from tests.procs import RAFTKV, Cluster

pytestmark = pytest.mark.xdist_group("process-long-txns")

KEYS, AT_ONCE = 20_000, 6
KV = "/etcdserverpb.KV/"
TXN, PUT = KV + "Txn", KV + "Put"


def range_of_all(ranges: int = 1) -> list[rpc_pb2.RequestOp]:
    """Return ranges that look at each key, and return one."""
    kind = rpc_pb2.RangeRequest
    one = kind(key=b"fill/", range_end=b"fill0", limit=1, sort_target=kind.MOD, sort_order=kind.DESCEND)
    return [rpc_pb2.RequestOp(request_range=one)] * ranges


PUT_OP = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"written", value=b"v"))
COMPARE = rpc_pb2.Compare(
    key=b"fill/", range_end=b"fill0", target=rpc_pb2.Compare.MOD, result=rpc_pb2.Compare.GREATER, mod_revision=0
)
LONG = {
    "ranges": rpc_pb2.TxnRequest(success=[PUT_OP, *range_of_all(4)]),
    "nested": rpc_pb2.TxnRequest(
        success=[PUT_OP, rpc_pb2.RequestOp(request_txn=rpc_pb2.TxnRequest(success=range_of_all(4)))]
    ),
    "compares": rpc_pb2.TxnRequest(compare=[COMPARE] * 10, success=[PUT_OP, *range_of_all(3)]),
}


async def fill(channel: Channel) -> None:
    for first in range(0, KEYS, 100):
        puts = [rpc_pb2.PutRequest(key=b"fill/%05d" % one, value=b"v") for one in range(first, first + 100)]
        txn = rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=put) for put in puts])
        await channel.unary(TXN, txn.SerializeToString(), 60)


@pytest.mark.parametrize("kind", long_except(LONG, {"ranges"}))
def test_a_put_waits_for_one_of_many_long_txns(kind: str) -> None:
    async def run(endpoint: str) -> None:
        async with Channel(endpoint) as attacker, Channel(endpoint) as other:
            await fill(other)
            ends: list[str] = []

            async def write(channel: Channel, path: str, request: bytes) -> None:
                await channel.unary(path, request, 60)
                ends.append(path)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(AT_ONCE):
                    tasks.create_task(write(attacker, TXN, LONG[kind].SerializeToString()))
                await asyncio.sleep(0.05)  # they are in the log, or wait for it
                before = len(ends)
                put = rpc_pb2.PutRequest(key=b"other", value=b"v")
                tasks.create_task(write(other, PUT, put.SerializeToString()))
            assert ends.index(PUT) - before <= 2

    with Cluster(RAFTKV, size=1) as cluster:
        asyncio.run(run(cluster.endpoints[0]))
