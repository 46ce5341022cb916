"""Horovod's rendezvous scopes as keys of the cluster: any member answers, and none of them is missed.

::

    /raftkv/horovod/<run>/<epoch>/key/<scope>/<key>       what workers put
    /raftkv/horovod/<run>/<epoch>/done/<scope>/<rank>     ranks that have finished with a scope

The epoch is that of the training run of the same id, 0 while there is none: what workers of an earlier world left
behind is invisible to the next, and deleted at its first put. Every write carries the revision of the ``round`` record,
so that none lands in an epoch that has just ended; every read is confirmed with a quorum.

A scope of workers (``global``, ``local_<host>``, ``cross_<n>``, each with or without a suffix for a set of processes)
is over when all its ranks have finished with it. Its ranks are those that have put something: a worker puts its address
before it looks for the others', and finishes after it has found all. All other scopes are plain tables.

Left out: HTTP (``horovod``), and what the values mean: they are bytes here, also those that Horovod pickles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.server.horovod.world import NO_SLOT, Slot, World, read_round, read_state
from raftkv.server.recipes.local_client import Recipe, prefix_end

ROOT: Final = "/raftkv/horovod/"
TRAINING_ROOT: Final = "/raftkv/train/"

SCOPE_KEYS_MAX: Final = 8192
"""Keys of a scope of workers, a few a rank; they are looked at in one turn when a rank has finished."""

_WORKERS: Final = re.compile(r"global(_.*)?|local_.+|cross_\d+(_.*)?")
_RANK: Final = re.compile(r"(?:rank_)?(\d+)")
_ANONYMOUS: Final[Any] = SimpleNamespace(headers=())
"""On whose behalf: plain HTTP has no metadata of a call."""


class Scopes:
    """The scopes of one run.

    Arguments:
        recipe: reads and writes keys on this member.
        run_id: of the training run whose epochs and ranks count.
    """

    def __init__(self, recipe: Recipe, run_id: str) -> None:
        self._recipe = recipe
        self._root = f"{ROOT}{run_id}/"
        self._round_key = f"{TRAINING_ROOT}{run_id}/round".encode()
        self._state_key = f"{TRAINING_ROOT}{run_id}/state".encode()

    async def get(self, scope: str, key: str) -> bytes | None:
        """The value of a key; None: there is none (an empty value is one).

        Raises:
            StatusError: there is no quorum that could tell.
            DamagedRecordError: the record of the run is not readable.
        """
        await self._recipe.confirm()
        found = self._find(self._place(scope, key, self._world()[1]))
        return found.value if found is not None else None

    async def put(self, scope: str, key: str, value: bytes) -> None:
        """Set a key. A rank that puts something has not finished. Raises as ``get``."""
        while True:
            await self._recipe.confirm()
            revision, world = self._world()
            writes = [_put(self._place(scope, key, world), value)]
            rank = _rank(scope, key)
            if rank is not None:
                writes.append(_delete(self._done(scope, rank, world)))
            past = self._root.encode(), self._epoch(world).encode()
            if self._list(*past, limit=1):
                writes.append(_delete(*past))
            if await self._write(revision, writes):
                return

    async def finish(self, scope: str, key: str) -> None:
        """A rank is done with a scope: clear it if all are. In a plain table: delete the key. Raises as ``get``."""
        rank = _rank(scope, key)
        while True:
            await self._recipe.confirm()
            revision, world = self._world()
            if rank is None:
                writes = [_delete(self._place(scope, key, world))]
            else:
                writes = [_put(self._done(scope, rank, world), b"")]
            if await self._write(revision, writes):
                break
        if rank is not None:
            await self._clear_if_over(scope, world)

    async def slot(self, host: str, local_rank: int) -> Slot:
        """The place of a worker in the present epoch; waits while there is none. Raises as ``get``."""
        while True:
            await self._recipe.confirm()
            state = self._find(self._state_key)
            _, world = self._world()
            if state is not None:
                epoch, phase = read_state(state.value)
                if phase == "closed":
                    return NO_SLOT
                if phase == "running" and world is not None and world.epoch == epoch:
                    return world.slot(host, local_rank)
            await self._recipe.changed(self._round_key, self._state_key)

    # -- keys --------------------------------------------------------------------------------------------------------

    def _epoch(self, world: World | None) -> str:
        return f"{self._root}{world.epoch if world is not None else 0:012d}/"

    def _place(self, scope: str, key: str, world: World | None) -> bytes:
        return f"{self._epoch(world)}key/{scope}/{key}".encode()

    def _done(self, scope: str, rank: str, world: World | None) -> bytes:
        return f"{self._epoch(world)}done/{scope}/{rank}".encode()

    def _world(self) -> tuple[int, World | None]:
        """Revision of the round record (0: there is none), and what it says."""
        found = self._find(self._round_key)
        return (0, None) if found is None else (found.mod_revision, read_round(found.value))

    # -- reading and writing -----------------------------------------------------------------------------------------

    def _find(self, key: bytes) -> kv_pb2.KeyValue | None:
        return next(iter(self._recipe.find(rpc_pb2.RangeRequest(key=key))), None)

    def _list(self, start: bytes, end: bytes, limit: int = 0) -> list[bytes]:
        request = rpc_pb2.RangeRequest(key=start, range_end=end, limit=limit, keys_only=True)
        return [found.key for found in self._recipe.find(request)]

    async def _write(self, round_revision: int, writes: Sequence[rpc_pb2.RequestOp]) -> bool:
        """Write, unless another epoch has begun."""
        fence = rpc_pb2.Compare(
            key=self._round_key,
            target=rpc_pb2.Compare.MOD,
            result=rpc_pb2.Compare.EQUAL,
            mod_revision=round_revision,
        )
        return await self._txn([fence], writes)

    async def _txn(self, compares: Sequence[rpc_pb2.Compare], writes: Sequence[rpc_pb2.RequestOp]) -> bool:
        _, response = await self._recipe.txn(_ANONYMOUS, rpc_pb2.TxnRequest(compare=compares, success=writes))
        return response.succeeded

    async def _clear_if_over(self, scope: str, world: World | None) -> None:
        """Delete a scope with which all its ranks have finished; one that somebody begins anew meanwhile stays.

        One with more keys than ranks can have is left to the next epoch: looking at all of them would hold the member.
        """
        keys = self._place(scope, "", world)
        done = self._done(scope, "", world)
        cleared = False
        while not cleared:
            revision = self._recipe.store.revision
            there = self._list(keys, prefix_end(keys), limit=SCOPE_KEYS_MAX + 1)
            ended = self._list(done, prefix_end(done), limit=SCOPE_KEYS_MAX + 1)
            ranks = {_rank(scope, _last_part(key)) for key in there} - {None}
            if max(len(there), len(ended)) > SCOPE_KEYS_MAX or not ranks <= set(map(_last_part, ended)):
                return
            unchanged = [_unchanged(keys, revision), _unchanged(done, revision)]
            cleared = await self._txn(unchanged, [_delete(keys, prefix_end(keys)), _delete(done, prefix_end(done))])


def _rank(scope: str, key: str) -> str | None:
    """Whose key it is, in a scope of workers."""
    match = _RANK.fullmatch(key) if _WORKERS.fullmatch(scope) else None
    return match[1] if match is not None else None


def _last_part(key: bytes) -> str:
    return key.rpartition(b"/")[2].decode()


def _put(key: bytes, value: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value))


def _delete(key: bytes, end: bytes = b"") -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key, range_end=end))


def _unchanged(prefix: bytes, revision: int) -> rpc_pb2.Compare:
    """Holds if nothing below a prefix was written after a revision."""
    return rpc_pb2.Compare(
        key=prefix,
        range_end=prefix_end(prefix),
        target=rpc_pb2.Compare.MOD,
        result=rpc_pb2.Compare.LESS,
        mod_revision=revision + 1,
    )
