"""Reads over many keys: sorted, counted, hashed, streamed."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from bench.hostile.attacker import EVERYTHING, KV, Attacker
from bench.hostile.rows.row import Row
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError

_MAINTENANCE = "/etcdserverpb.Maintenance/"
_SORTED = rpc_pb2.RangeRequest(
    key=EVERYTHING,
    range_end=EVERYTHING,
    limit=1,
    sort_target=rpc_pb2.RangeRequest.MOD,
    sort_order=rpc_pb2.RangeRequest.DESCEND,
)


async def _fill_300k(attacker: Attacker) -> None:
    await attacker.fill(attacker.count(300_000, 100))


async def _fill_50k(attacker: Attacker) -> None:
    await attacker.fill(attacker.count(50_000, 100))


async def _sorted(attacker: Attacker) -> None:
    await attacker.call(KV + "Range", _SORTED)


async def _fifty_sorted(attacker: Attacker) -> None:
    await asyncio.gather(*[attacker.call(KV + "Range", _SORTED) for _ in range(50)])


async def _by_value(attacker: Attacker) -> None:
    request = rpc_pb2.RangeRequest()
    request.CopyFrom(_SORTED)
    request.sort_target = rpc_pb2.RangeRequest.VALUE
    await asyncio.gather(*[attacker.call(KV + "Range", request) for _ in range(4)])


async def _filtered(attacker: Attacker) -> None:
    """Nothing passes, so nothing is sent: all of the cost is in looking."""
    request = rpc_pb2.RangeRequest(key=EVERYTHING, range_end=EVERYTHING, limit=1, min_create_revision=1 << 60)
    await asyncio.gather(*[attacker.call(KV + "Range", request) for _ in range(4)])


async def _counted(attacker: Attacker) -> None:
    request = rpc_pb2.RangeRequest(key=EVERYTHING, range_end=EVERYTHING, count_only=True)
    await asyncio.gather(*[attacker.call(KV + "Range", request) for _ in range(64)])


async def _hashed(attacker: Attacker) -> None:
    await asyncio.gather(
        attacker.call(_MAINTENANCE + "Hash", rpc_pb2.HashRequest()),
        attacker.call(_MAINTENANCE + "HashKV", rpc_pb2.HashKVRequest()),
    )


async def _streamed(attacker: Attacker) -> None:
    """Four streams of everything, while the last keys are written: each write makes a new revision to hold."""
    request = rpc_pb2.RangeRequest(key=EVERYTHING, range_end=EVERYTHING).SerializeToString()
    channel = attacker.channel()

    async def read() -> None:
        with suppress(RpcError):
            async with channel.stream(KV + "RangeStream") as stream:
                await stream.send(request)
                stream.half_close()
                async for _ in stream:
                    pass

    async def write() -> None:
        for number in range(20):
            put = rpc_pb2.PutRequest(key=b"fill/%08d" % number, value=b"w" * 16)
            await attacker.call(KV + "Put", put)

    await asyncio.gather(write(), *[read() for _ in range(4)])


ROWS = (
    Row("sort-modify", "range sorted by MODIFY, limit 1, over 300,000 keys, in a loop", _sorted, _fill_300k),
    Row("sort-50", "50 sorted ranges at once over 50,000 keys", _fifty_sorted, _fill_50k),
    Row("sort-value", "4 ranges at once sorted by VALUE over 50,000 keys", _by_value, _fill_50k),
    Row("filter", "4 ranges at once of which no key of 300,000 passes the filter", _filtered, _fill_300k),
    Row("count-only", "64 counts at once of 300,000 keys", _counted, _fill_300k),
    Row("hash", "Hash and HashKV of 300,000 keys in a loop", _hashed, _fill_300k),
    Row(
        "range-stream", "4 RangeStreams of 50,000 keys beside puts to them", _streamed, _fill_50k, programs=("raftkv",)
    ),
)
