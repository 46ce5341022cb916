"""Scopes of Horovod on a store in memory: what one worker can make a member look at is bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raftkv.integrations.horovod import SCOPE_KEYS_MAX, Scopes
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.training.records import GenerationRecord, RunKeys


class _Store:
    revision = 7


class _Recipe:
    """Keys of one scope and of its finished ranks; notes how many keys each search gave."""

    def __init__(self, ranks: int, generation: int = 0) -> None:
        root = f"/raftkv/horovod/run/{generation:012d}"
        self.keys = [
            f"{root}/{name}".encode() for rank in range(ranks) for name in (f"key/global/{rank}", f"done/global/{rank}")
        ]
        self.found: list[int] = []
        self.txns: list[rpc_pb2.TxnRequest] = []
        self.store = _Store()

    async def confirm(self, queue: object) -> None:
        pass

    def let_in(self, _call: object, **_keys: object) -> None:
        pass

    def find(self, request: rpc_pb2.RangeRequest) -> list[kv_pb2.KeyValue]:
        if not request.range_end:
            return []
        keys = [key for key in sorted(self.keys) if request.key <= key < request.range_end]
        keys = keys[: request.limit] if request.limit else keys
        self.found.append(len(keys))
        return [kv_pb2.KeyValue(key=key) for key in keys]

    async def txn(self, _: Any, request: rpc_pb2.TxnRequest) -> tuple[int, rpc_pb2.TxnResponse]:
        self.txns.append(request)
        return 8, rpc_pb2.TxnResponse(succeeded=True)


def _finish(ranks: int) -> _Recipe:
    recipe: Any = _Recipe(ranks)
    asyncio.run(Scopes(recipe, "run").finish(None, "global", "0"))
    found: _Recipe = recipe
    return found


def test_a_scope_whose_ranks_have_finished_is_deleted() -> None:
    assert len(_finish(3).txns[-1].success) == 2


@pytest.mark.parametrize(
    "name", [b"key/global/\xff", b"done/global/\xff\xfe", b"key/global/other/7", b"done/global/a/b"]
)
def test_a_key_that_no_worker_put_keeps_no_scope(name: bytes) -> None:
    """The answer was 500 for a name that is not UTF-8; one that ended in a number was a rank that never finishes."""
    recipe: Any = _Recipe(3)
    recipe.keys.append(b"/raftkv/horovod/run/000000000000/" + name)
    asyncio.run(Scopes(recipe, "run").finish(None, "global", "0"))
    assert len(recipe.txns[-1].success) == 2


def test_keys_of_a_run_below_outlive_the_generations_of_the_run() -> None:
    """``run/0`` lies before the generations of ``run`` in the order of keys: the first put of ``run`` deleted it."""
    recipe: Any = _Recipe(2, generation=3)
    below = [f"/raftkv/horovod/run/{name}/000000000001/key/global/0".encode() for name in ("-a", "0", "00", "1", "z")]
    recipe.keys += below
    keys = RunKeys("run")
    record = GenerationRecord(5).encode()
    find = recipe.find
    recipe.find = lambda request: (
        [kv_pb2.KeyValue(key=request.key, value=record, mod_revision=4)]
        if request.key == keys.round.encode()
        else find(request)
    )
    asyncio.run(Scopes(recipe, "run").put(None, "global", "0", b"x"))
    (txn,) = recipe.txns
    deleted = [write.request_delete_range for write in txn.success if write.HasField("request_delete_range")]
    gone = {key for key in recipe.keys for each in deleted if each.key <= key < (each.range_end or each.key + b"\0")}
    assert gone == set(recipe.keys) - set(below)


def test_a_scope_of_very_many_keys_is_not_looked_at_as_a_whole() -> None:
    recipe = _finish(SCOPE_KEYS_MAX + 100)
    assert max(recipe.found) == SCOPE_KEYS_MAX + 1
    assert len(recipe.txns) == 1  # that the rank has finished; nothing is deleted
