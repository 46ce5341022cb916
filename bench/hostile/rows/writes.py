"""Writes whose work is inherently in apply, on every member."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from bench.hostile.attacker import EVERYTHING, KV, Attacker
from bench.hostile.rows.row import Row
from raftkv.pb import rpc_pb2

_OPERATIONS_MAX = 128


async def _fill_20k(attacker: Attacker) -> None:
    await attacker.fill(attacker.count(20_000, 100))


async def _fill_300k(attacker: Attacker) -> None:
    await attacker.fill(attacker.count(300_000, 100))


async def _compares(attacker: Attacker) -> None:
    """All hold, so that each looks at every key."""
    request = rpc_pb2.TxnRequest()
    for _ in range(_OPERATIONS_MAX):
        compare = request.compare.add()
        compare.key, compare.range_end = b"fill/", b"fill0"
        compare.target, compare.result = rpc_pb2.Compare.MOD, rpc_pb2.Compare.GREATER
        compare.mod_revision = 0
    await attacker.call(KV + "Txn", request)


async def _ranges_in_txn(attacker: Attacker) -> None:
    request = rpc_pb2.TxnRequest()
    for _ in range(_OPERATIONS_MAX):
        asked = request.success.add().request_range
        asked.key, asked.range_end, asked.limit = b"fill/", b"fill0", 1
        asked.sort_target, asked.sort_order = rpc_pb2.RangeRequest.MOD, rpc_pb2.RangeRequest.DESCEND
    put = request.success[0].request_put  # a write makes it an entry of the log
    put.key, put.value = b"fill/00000000", b"v"
    await attacker.call(KV + "Txn", request)


async def _delete_all(attacker: Attacker) -> None:
    await attacker.call(KV + "DeleteRange", rpc_pb2.DeleteRangeRequest(key=b"fill/", range_end=b"fill0"))


def _nested(fan_outs: tuple[int, ...], key_bytes: int) -> rpc_pb2.TxnRequest:
    """Puts of different keys in txns in a txn: so many operations in each txn of a level.

    What is allowed is 128 along each path from the outermost to an operation, not in all.
    """
    request = rpc_pb2.TxnRequest()
    layer = [request]
    for fan_out in fan_outs[:-1]:
        layer = [txn.success.add().request_txn for txn in layer for _ in range(fan_out)]
    for number, txn in enumerate(txn for txn in layer for _ in range(fan_outs[-1])):
        txn.success.add().request_put.key = b"n%0*x" % (key_bytes - 1, number)
    return request


async def _nested_188kb(attacker: Attacker) -> None:
    await attacker.call(KV + "Txn", _nested((64, attacker.count(64, 2)), 40))


async def _nested_many(attacker: Attacker) -> None:
    await attacker.call(KV + "Txn", _nested((43, attacker.count(43, 2), 42), 6))


async def _nested_deletes(attacker: Attacker) -> None:
    """Deletes of one range in each txn: what compares each pair of them compares the most."""
    request = rpc_pb2.TxnRequest()
    for _ in range(64):
        inner = request.success.add().request_txn
        for _ in range(attacker.count(64, 2)):
            gone = inner.success.add().request_delete_range
            gone.key, gone.range_end = b"none/", b"none0"
    await attacker.call(KV + "Txn", request)


async def _churn(attacker: Attacker) -> None:
    put = rpc_pb2.PutRequest(key=b"churn", value=b"v")
    delete = rpc_pb2.DeleteRangeRequest(key=b"churn")
    channel = attacker.channel()

    def pair() -> Callable[[], Awaitable[Any]]:
        async def call() -> None:
            await attacker.call(KV + "Put", put, channel)
            await attacker.call(KV + "DeleteRange", delete, channel)

        return call

    await attacker.each((pair() for _ in range(attacker.count(40_000, 100))), in_flight=256)


async def _churned_and_read(attacker: Attacker) -> None:
    await _churn(attacker)
    request = rpc_pb2.RangeRequest(key=EVERYTHING, range_end=EVERYTHING, revision=2)
    await attacker.each(functools.partial(attacker.call, KV + "Range", request) for _ in range(100))


ROWS = (
    Row("txn-compares", "a txn of 128 compares over 20,000 keys, in a loop", _compares, _fill_20k),
    Row("txn-ranges", "a txn of a put and 127 sorted ranges over 20,000 keys, in a loop", _ranges_in_txn, _fill_20k),
    Row("delete-300k", "delete of 300,000 keys in one entry", _delete_all, _fill_300k, repeats=False),
    Row("txn-nested", "a nested txn of 64 x 64 puts (188 KB), in a loop", _nested_188kb),
    Row("txn-nested-many", "a nested txn of 43 x 43 x 42 puts (1 MB), in a loop", _nested_many),
    Row("txn-nested-deletes", "a nested txn of 64 x 64 equal range deletes, in a loop", _nested_deletes),
    Row(
        "churn-key",
        "put and delete of one key 40,000 times, then a restart",
        _churned_and_read,
        repeats=False,
        restarts=True,
    ),
)
