"""Watches: the mixed load, and watchers of all kinds on every member while it runs.

Lasting watchers resume for the whole run, pinned to one member or moving around: from now, from the first revision, of
one key, of a part, of everything, with filters, previous values and fragments, one of them slow. Brief watchers come
and go, and start in the past, at the last compaction, or in the future.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Iterable
from typing import Any

from jepsen.checker import Checker
from jepsen.checkers import watch
from jepsen.client import Client
from jepsen.ops import END_OF_KEYS, Put, Txn
from jepsen.watcher import Habits, WatchingClient
from jepsen.watches import Watched
from jepsen.workloads.base import Scene
from jepsen.workloads.mixed import Mixed

_ALL = Watched("\0", END_OF_KEYS)
_FROM_START = Watched("\0", END_OF_KEYS, start=2, previous=True, fragment=True)
_PUTS = Watched("k", "l", start=2, without=("delete",))
_DELETES = Watched("k", "l", without=("put",), previous=True)
_PLAIN = Watched("k0", "k1")
_TXNS = Watched("kt", "ku", previous=True, fragment=True)
_PAST, _FUTURE = 150, 40
_BRIEF_EVERY_S = 0.3


class Watch(Mixed):
    """Writes and reads as in ``mixed``; the messages to watchers are checked too."""

    name = "watch"

    def __init__(self) -> None:
        super().__init__()
        self.checkers: dict[str, Checker] = {"watch": watch.check}

    async def step(self, client: Client) -> None:
        """Send one request of the mixed load, or a txn with many events."""
        if client.rng.random() < 0.02:
            keys = client.rng.sample(self._txn_keys.active, 8)
            await client.call(Txn((), tuple(Put(key, client.fresh_value()) for key in keys)))
        else:
            await super().step(client)

    def companions(self, scene: Scene) -> Iterable[Coroutine[Any, Any, None]]:
        """Return the watchers."""
        for seat in range(scene.seats):
            rng = random.Random(f"{scene.seed} watch m{seat + 1}")
            wanted = (_ALL, _FROM_START, _DELETES, _PLAIN, Watched("k00003"))
            client = WatchingClient(f"at-m{seat + 1}", scene.endpoints.seat(seat), scene.recorder, rng, wanted)
            yield client.run(scene.ending)
        rng = random.Random(f"{scene.seed} watch round")
        yield self._client(scene, "round", rng, (_FROM_START, _PUTS, _TXNS)).run(scene.ending)
        yield self._client(scene, "alone", rng, (_ALL,), Habits((0.3, 4.0))).run(scene.ending)
        yield self._client(scene, "slow", rng, (_FROM_START,), Habits((5.0, 30.0), slow_s=0.1)).run(scene.ending)
        yield self._brief(scene, random.Random(f"{scene.seed} watch brief"))

    def _client(
        self, scene: Scene, name: str, rng: random.Random, wanted: tuple[Watched, ...], habits: Habits | None = None
    ) -> WatchingClient:
        members = scene.endpoints.shuffled(rng)
        return WatchingClient(name, members, scene.recorder, random.Random(rng.random()), wanted, habits)

    async def _brief(self, scene: Scene, rng: random.Random) -> None:
        """Run short streams that start at any revision."""
        number = 0
        async with asyncio.TaskGroup() as group:
            while not scene.ending.over.is_set():
                number += 1
                wanted = (Watched("\0", END_OF_KEYS, self._start(scene, rng), rng.random() < 0.5),)
                client = self._client(scene, f"brief{number}", rng, wanted, Habits((0.3, 2.0), lasting=False))
                group.create_task(client.run(scene.ending))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(scene.ending.over.wait(), _BRIEF_EVERY_S)

    def _start(self, scene: Scene, rng: random.Random) -> int:
        last = max((operation.rev for operation in scene.recorder.operations[-50:]), default=1)
        compacted = next((e["rev"] for e in reversed(scene.recorder.events) if e["event"] == "compact"), 0)
        starts = [last - rng.randint(0, _PAST), last + rng.randint(1, _FUTURE), compacted, 0]
        return max(0, rng.choice(starts))
