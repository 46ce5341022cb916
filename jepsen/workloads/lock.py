"""Locks: lists that the holder of a lock reads, extends and writes back as a whole, in two ways.

*Fenced*: the write is a txn whose condition is that the holder's key (its token) still exists; nothing may be lost.
*Plain*: the holder just writes. Some holders stall for longer than the TTL of their lease, like a program whose machine
swaps. The plain list then loses updates, which shows why tokens are needed. These losses are measured, not checked.

Half of the clients use the Lock service; the others wait in the same queue with the algorithm of client libraries: put
a key with the lease, wait until no key is older. The lists are too long for the linearizability search, so their keys
are named as if the server wrote them.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from jepsen.checker import Checker
from jepsen.checkers import Violation, lease, lock
from jepsen.client import Client
from jepsen.history import History
from jepsen.ops import (
    RECIPES,
    SERVERS,
    Compare,
    Grant,
    HeldResult,
    KeepAlive,
    KeyValue,
    LeaseResult,
    Lock,
    Put,
    Range,
    RangeResult,
    Revoke,
    Txn,
    TxnResult,
    Unlock,
)

_NAMES = [f"{RECIPES}lock{number}" for number in range(3)]
_TTL_S = 1
_STALL_S = (1.2, 2.5)
_PATIENCE_S = 6.0
_POLL_S = 0.05


class LockedLists:
    """Lists that are read, extended and written back under locks."""

    name = "lock"

    def __init__(self) -> None:
        self.checkers: dict[str, Checker] = {"lock": lock.check, "lease": lease.check, "lists": _lists}
        self._leases = 0

    def figures(self, history: History) -> dict[str, Any]:
        """Return the updates lost without fences."""
        held = sum(isinstance(op.result, HeldResult) for op in history.operations)
        return {"held": held, "lost_unfenced": sum(len(lock.lost(history, _plain(name))) for name in _NAMES)}

    async def step(self, client: Client) -> None:
        """Do one cycle: lease, lock, some updates, unlock."""
        self._leases += 1
        lease_id = self._leases
        if not isinstance((await client.call(Grant(lease_id, _TTL_S))).result, LeaseResult):
            return
        name = client.rng.choice(_NAMES)
        take = self._ask_service if client.rng.random() < 0.5 else self._stand_in_queue
        key = await take(client, name, lease_id)
        if key is not None:
            await self._hold(client, name, key, lease_id)
        if client.rng.random() < 0.93:  # The others let the lease expire.
            request = Unlock(key) if key is not None and client.rng.random() < 0.7 else Revoke(lease_id)
            await client.call(request)

    async def finish(self, client: Client) -> None:
        """Read the lists."""
        for name in _NAMES:
            await client.call(Range(_fenced(name)))
            await client.call(Range(_plain(name)))

    async def _ask_service(self, client: Client, name: str, lease_id: int) -> str | None:
        result = (await client.call(Lock(name, lease_id), _PATIENCE_S)).result
        return result.key if isinstance(result, HeldResult) else None

    async def _stand_in_queue(self, client: Client, name: str, lease_id: int) -> str | None:
        key = f"{name}/{lease_id:x}"
        new = Txn((Compare(key, "create", "=", 0),), (Put(key, client.fresh_value(), lease=lease_id),))
        if (await client.call(new)).result is None:
            return None
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            result = (await client.call(Range(name + "/", name + "0"))).result
            if isinstance(result, RangeResult):
                if key not in {kv.key for kv in result.kvs}:
                    return None
                if min(result.kvs, key=lambda kv: kv.create).key == key:
                    return key
            await client.call(KeepAlive(lease_id))
            await asyncio.sleep(_POLL_S)
        return None

    async def _hold(self, client: Client, name: str, key: str, lease_id: int) -> None:
        """Update both lists; the token is the create revision of the key."""
        for _ in range(client.rng.randint(1, 3)):
            reads = (Range(key), Range(_fenced(name)), Range(_plain(name)))
            result = (await client.call(Txn((), reads))).result
            held = _kvs(result)
            if held is None or held[0] is None:
                return
            if client.rng.random() < 0.04:
                await asyncio.sleep(client.rng.uniform(*_STALL_S))
            guard = Compare(key, "create", "=", held[0].create)
            longer = _longer(held[1], client.fresh_value())
            await client.call(Txn((guard,), (Put(_fenced(name), longer),)))
            await client.call(Put(_plain(name), _longer(held[2], client.fresh_value())))
            await client.call(KeepAlive(lease_id))


def _fenced(name: str) -> str:
    return f"{SERVERS}fenced/{name}"


def _plain(name: str) -> str:
    return f"{SERVERS}plain/{name}"


def _longer(kv: KeyValue | None, element: str) -> str:
    return json.dumps([*(json.loads(kv.value) if kv is not None else []), element])


def _kvs(result: object) -> list[KeyValue | None] | None:
    if not isinstance(result, TxnResult):
        return None
    answers = [answer for answer in result.results if isinstance(answer, RangeResult)]
    return [answer.kvs[0] if answer.kvs else None for answer in answers]


def _lists(history: History) -> list[Violation]:
    return [
        Violation("M1 lost update", f"{element} was added to {_fenced(name)} and is gone")
        for name in _NAMES
        for element in lock.lost(history, _fenced(name))
    ]
