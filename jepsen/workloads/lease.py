"""Leases: granted, given keys, kept alive, revoked, or left to expire, while watchers record every deletion.

Each client has a few leases and in each step does something with one of them: mostly a renewal. Keys are
``~l/<lease>/<n>``; the server deletes them. Some grants request an id that is taken.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from jepsen.checker import Checker
from jepsen.checkers import lease, watch
from jepsen.client import Client
from jepsen.history import History
from jepsen.ops import (
    END_OF_KEYS,
    SERVERS,
    Grant,
    KeepAlive,
    LeaseResult,
    Put,
    Range,
    RangeResult,
    Revoke,
    TimeToLive,
    Txn,
)
from jepsen.watcher import WatchingClient
from jepsen.watches import Watched
from jepsen.workloads.base import Rotation, Scene

_PREFIX, _END = SERVERS + "l/", SERVERS + "l0"
_OWN_MAX = 3
_ALL_END_S = 30.0
_ASK_S = 0.25


@dataclass(slots=True)
class _Own:
    """A client's leases."""

    number: int
    made: int = 0
    kept: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


class Lease:
    """Short leases in all phases of their lives."""

    name = "lease"

    def __init__(self) -> None:
        self.checkers: dict[str, Checker] = {"lease": lease.check, "watch": watch.check}
        self._own: dict[str, _Own] = {}
        self._keys = Rotation("k", active=5, uses_max=100)

    def figures(self, history: History) -> dict[str, Any]:
        """Return the lateness of expired leases, as clients saw it; negative is early."""
        late_s = lease.lateness_s(history)
        if not late_s:
            return {"leases_ended": 0}
        return {
            "leases_ended": len(late_s),
            "ended_late_min_s": round(late_s[0], 3),
            "ended_late_p50_s": round(late_s[len(late_s) // 2], 3),
            "ended_late_max_s": round(late_s[-1], 3),
        }

    async def step(self, client: Client) -> None:
        """Send one request about one lease, or the few that create one."""
        own = self._own.setdefault(client.name, _Own(len(self._own) + 1))
        choice = client.rng.random()
        if not own.kept or (len(own.kept) < _OWN_MAX and choice < 0.1):
            await self._begin(client, own)
        elif choice < 0.6:
            await self._renew(client, own)
        elif choice < 0.7:
            await self._put(client, client.rng.choice(own.kept))
        elif choice < 0.78:
            await client.call(TimeToLive(client.rng.choice(own.kept + own.left)))
        elif choice < 0.84 and own.left:
            await self._disturb(client, client.rng.choice(own.left))
        elif choice < 0.88:
            await client.call(Range(_PREFIX, _END))
        elif choice < 0.92:
            own.left.append(self._drop(client, own))
        elif choice < 0.94:
            await client.call(Revoke(self._drop(client, own)))
        else:
            value = client.fresh_value()
            await client.call(Put(self._keys.take(client.rng.choice(self._keys.active)), value))

    async def finish(self, client: Client) -> None:
        """Read until no key of a lease is left, for as long as that may take."""
        deadline = time.monotonic() + _ALL_END_S
        while time.monotonic() < deadline:
            operation = await client.call(Range(_PREFIX, _END))
            if isinstance(operation.result, RangeResult) and not operation.result.kvs:
                return
            await asyncio.sleep(_ASK_S)

    def companions(self, scene: Scene) -> Iterable[Coroutine[Any, Any, None]]:
        """Return a watcher on each member."""
        for seat in range(scene.seats):
            rng = random.Random(f"{scene.seed} lease m{seat + 1}")
            wanted = (Watched("\0", END_OF_KEYS, previous=True), Watched(_PREFIX, _END, without=("put",)))
            members = scene.endpoints.seat(seat)
            yield WatchingClient(f"at-m{seat + 1}", members, scene.recorder, rng, wanted).run(scene.ending)

    async def _begin(self, client: Client, own: _Own) -> None:
        taken = bool(own.kept) and client.rng.random() < 0.1
        own.made += 0 if taken else 1
        lease_id = client.rng.choice(own.kept) if taken else own.number * 100_000 + own.made
        operation = await client.call(Grant(lease_id, client.rng.randint(1, 4)))
        if isinstance(operation.result, LeaseResult) and not taken:
            own.kept.append(lease_id)
            keys = client.rng.randint(0, 4)
            puts = tuple(self._key(client, lease_id, number) for number in range(keys))
            if puts:
                await client.call(Txn((), puts))

    async def _renew(self, client: Client, own: _Own) -> None:
        lease_id = client.rng.choice(own.kept)
        operation = await client.call(KeepAlive(lease_id))
        if isinstance(operation.result, LeaseResult) and operation.result.ttl_s <= 0:
            own.kept.remove(lease_id)
            own.left.append(lease_id)

    async def _put(self, client: Client, lease_id: int) -> None:
        await client.call(self._key(client, lease_id, client.rng.randint(0, 5)))

    async def _disturb(self, client: Client, lease_id: int) -> None:
        """Use an abandoned lease, which may or may not have expired."""
        if client.rng.random() < 0.3:
            await client.call(KeepAlive(lease_id))
        elif client.rng.random() < 0.5:
            await self._put(client, lease_id)
        else:
            await client.call(TimeToLive(lease_id))

    def _key(self, client: Client, lease_id: int, number: int) -> Put:
        return Put(f"{_PREFIX}{lease_id}/{number}", client.fresh_value(), lease=lease_id)

    def _drop(self, client: Client, own: _Own) -> int:
        return own.kept.pop(client.rng.randrange(len(own.kept)))
