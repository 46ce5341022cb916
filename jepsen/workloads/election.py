"""Elections: candidates campaign, proclaim, resign or let their lease expire; others read or observe the leader."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable
from typing import Any

from jepsen.checker import Checker
from jepsen.checkers import lease, lock
from jepsen.client import Client
from jepsen.observer import observe
from jepsen.ops import (
    RECIPES,
    Campaign,
    Grant,
    HeldResult,
    KeepAlive,
    Leader,
    LeaseResult,
    Proclaim,
    Put,
    Resign,
    Revoke,
)
from jepsen.workloads.base import Rotation, Scene

_NAMES = [f"{RECIPES}election{number}" for number in range(4)]
_TTL_S = 2
_STALL_S = (1.5, 3.0)
_PATIENCE_S = 6.0


class Election:
    """Candidates and observers of a few elections."""

    name = "election"

    def __init__(self) -> None:
        self.checkers: dict[str, Checker] = {"lock": lock.check, "lease": lease.check}
        self._leases = 0
        self._keys = Rotation("k", active=5, uses_max=100)

    async def step(self, client: Client) -> None:
        """Be a candidate once, or read the leader and write something so that the log grows."""
        name = client.rng.choice(_NAMES)
        if client.rng.random() < 0.8:
            await client.call(Leader(name))
            await client.call(Put(self._keys.take(client.rng.choice(self._keys.active)), client.fresh_value()))
            return
        self._leases += 1
        lease_id = self._leases
        if isinstance((await client.call(Grant(lease_id, _TTL_S))).result, LeaseResult):
            await self._run(client, name, lease_id)

    def companions(self, scene: Scene) -> Iterable[Coroutine[Any, Any, None]]:
        """Return an observer of each election."""
        for name in _NAMES:
            rng = random.Random(f"{scene.seed} observe {name}")
            yield observe(name, scene.endpoints.shuffled(rng), scene.recorder, rng, scene.ending)

    async def finish(self, client: Client) -> None:
        """Read the leader a last time."""
        for name in _NAMES:
            await client.call(Leader(name))

    async def _run(self, client: Client, name: str, lease_id: int) -> None:
        result = (await client.call(Campaign(name, lease_id, client.fresh_value()), _PATIENCE_S)).result
        if isinstance(result, HeldResult):
            for _ in range(client.rng.randint(0, 3)):
                if client.rng.random() < 0.1:
                    await asyncio.sleep(client.rng.uniform(*_STALL_S))
                await client.call(Proclaim(name, result.key, result.token, lease_id, client.fresh_value()))
                await client.call(KeepAlive(lease_id))
            if client.rng.random() < 0.6:
                await client.call(Resign(name, result.key, result.token, lease_id))
                return
        if client.rng.random() < 0.7:
            await client.call(Revoke(lease_id))
