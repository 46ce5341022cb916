"""The client library under the load and faults of ``jepsen``; its answers are checked like those of any client.

    run(Options(..., client_class=LibraryClient))      every request goes through the library, which knows all members
    Beside                                             the mixed load, plus watches and locks of the library

A wrong retry shows as a request that is in the store twice; a failure wrongly called definite shows as a refused
request that is in the store. The library's watches are streams of the history, by their revisions. A lock must never
be reported as held by two clients at once, and no write under its fence may be lost.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from jepsen import client
from jepsen.checker import Checker
from jepsen.checkers import Violation, watch
from jepsen.history import History, Operation
from jepsen.ops import END_OF_KEYS, RECIPES, may_write
from jepsen.outcome import Failure
from jepsen.watcher import CATCH_UP_S
from jepsen.watches import Event, Kind, Message, Stream, Watched
from jepsen.wire import METHODS, key_values, request_message, result_of
from jepsen.workloads.base import Scene
from jepsen.workloads.mixed import Mixed
from raftkv import aio
from raftkv.client.errors import FenceLost, LeaseLost, LockNotFree
from raftkv.client.library import Client as Library
from raftkv.client.rpc.methods import Method
from raftkv.client.values import DELETE
from raftkv.errors import CODE_NAMES, CompactedError, StatusError

CALL_S = 1.0
LOCKS = 2
LOCK_TTL_S = 2
HOLDERS = 6
PATIENCE_S = 4.0
STALL_S = (2.5, 4.0)
MARK_EVERY_S = 0.3


class LibraryClient(client.Client):
    """A client that sends its requests through the library, with all members known at its start."""

    _library: Library | None = None

    async def _send(self, operation: Operation) -> None:
        if self._library is None:
            self._library = aio.connect([member.address for member in self._members])
        request = operation.request
        path, response = METHODS[type(request)]
        method: Method[Any] = Method(path, response, not may_write(request))
        try:
            answer = await self._library.scope.core.call(
                method, request_message(request), timeout_s=max(self._patience_s, CALL_S)
            )
        except StatusError as error:
            definite = error.definite or not may_write(request)
            operation.failure = Failure(CODE_NAMES[error.code], str(error), definite)
            return
        operation.result = result_of(request, answer)
        operation.rev, operation.by = answer.header.revision, answer.header.member_id
        # Whoever has answered: that one's revision must not go back.
        operation.member = operation.by
        self.last_rev = max(self.last_rev, operation.rev)

    async def close(self) -> None:
        if self._library is not None:
            await self._library.close()


class Beside(Mixed):
    """The mixed load, with watches and lock holders."""

    name = "library"

    def __init__(self) -> None:
        super().__init__()
        self.checkers: dict[str, Checker] = {"watch": watch.check, "locks": self._check_locks}
        self._found: list[Violation] = []
        self._holding: dict[str, set[aio.Lock]] = {}
        self._added: dict[str, list[str]] = {}
        self._lists: dict[str, list[str]] = {}
        self._left = HOLDERS
        self.held = 0

    def figures(self, history: History) -> dict[str, Any]:
        """Return the number of lock holds and of writes under them."""
        return {"held": self.held, "fenced": sum(map(len, self._added.values()))}

    def companions(self, scene: Scene) -> Iterable[Coroutine[Any, Any, None]]:
        """Return the watches and the lock holders."""
        wanted = [
            Watched("\0", END_OF_KEYS, start=2, previous=True),
            Watched("k", "l", start=2, without=("put",)),
            Watched("k", "l", start=2, without=("delete",)),
            Watched("kt", "ku", start=2),
        ]
        for number, watched in enumerate(wanted):
            yield _follow(scene, f"library{number}", watched)
        for number in range(HOLDERS):
            yield self._hold(scene, number)

    def _check_locks(self, _history: History) -> list[Violation]:
        found = list(self._found)
        for name, added in self._added.items():
            there = set(self._lists.get(name, ()))
            found += [
                Violation("lost", f"{one} was added under {name}, and is gone") for one in added if one not in there
            ]
        return found

    # ---- locks

    async def _hold(self, scene: Scene, number: int) -> None:
        rng = random.Random(f"{scene.seed} holder {number}")
        kv = aio.connect([member.address for member in scene.endpoints.shuffled(rng)])
        turn = 0
        async with kv:
            while not scene.ending.over.is_set():
                turn += 1
                name = f"{RECIPES}library{rng.randrange(LOCKS)}"
                try:
                    await self._take_turn(kv, rng, name, f"{number}.{turn}")
                except (FenceLost, LeaseLost, LockNotFree, StatusError):
                    await asyncio.sleep(rng.uniform(0.0, 0.1))
            self._left -= 1
            if not self._left:
                await self._read_lists(kv)

    async def _take_turn(self, kv: Library, rng: random.Random, name: str, mark: str) -> None:
        lock = kv.lock(name, ttl=LOCK_TTL_S, interrupt=rng.random() < 0.5)
        await lock.acquire(PATIENCE_S)
        holding = self._holding.setdefault(name, set())
        holding.add(lock)
        try:
            self._look(name)
            self.held += 1
            for part in range(rng.randint(1, 4)):
                if rng.random() < 0.05:
                    await asyncio.sleep(rng.uniform(*STALL_S))
                await self._add(kv, lock, name, f"{mark}.{part}")
        finally:
            self._look(name)
            holding.discard(lock)
            if rng.random() < 0.9:
                await lock.release()
            else:
                lock.lease.stop("its holder has died")

    async def _add(self, kv: Library, lock: aio.Lock, name: str, mark: str) -> None:
        key = f"{RECIPES}list/{name}"
        found = await kv.get(key)
        elements = json.loads(found.value) if found is not None else []
        self._look(name)
        await kv.put(key, json.dumps([*elements, mark]), fence=lock)
        self._added.setdefault(name, []).append(mark)

    def _look(self, name: str) -> None:
        held = [lock for lock in self._holding[name] if lock.held]
        if len(held) > 1:
            self._found.append(Violation("two holders", f"{name}: {held}"))

    async def _read_lists(self, kv: Library) -> None:
        for name in self._added:
            found = await kv.get(f"{RECIPES}list/{name}", timeout_s=CATCH_UP_S)
            self._lists[name] = json.loads(found.value) if found is not None else []


# ---- watches


async def _follow(scene: Scene, name: str, wanted: Watched) -> None:
    """Watch until the final revision; after a compaction continue from the oldest available revision."""
    rng = random.Random(f"{scene.seed} {name}")
    kv = aio.connect([member.address for member in scene.endpoints.shuffled(rng)])
    attempt, start = 0, wanted.start
    async with kv:
        while True:
            asked = Watched(wanted.key, wanted.end, start, wanted.previous, wanted.without)
            stream = Stream(name, attempt, 0, asked, time.monotonic_ns())
            scene.recorder.streams.append(stream)
            try:
                await _watch(kv, stream, scene)
                return
            except CompactedError as error:
                now = time.monotonic_ns()
                stream.messages.append(Message(now, "canceled", 0, compact=error.revision))
                attempt, start = attempt + 1, error.revision
            finally:
                stream.ended = time.monotonic_ns()


async def _watch(kv: Library, stream: Stream, scene: Scene) -> None:
    asked = stream.request
    follow = kv.watch(
        asked.key,
        asked.end,
        start_revision=asked.start,
        prev_kv=asked.previous,
        no_put="put" in asked.without,
        no_delete="delete" in asked.without,
    )
    reading: asyncio.Task[list[aio.Event]] | None = None
    try:
        await follow.ready(10 * CATCH_UP_S)
        stream.messages.append(Message(time.monotonic_ns(), "created", follow.revision))
        deadline = None
        while not (scene.ending.over.is_set() and stream.position() >= scene.ending.rev):
            if scene.ending.over.is_set():
                deadline = deadline or time.monotonic() + CATCH_UP_S
                kv.scope.hub._ask_now()
            if deadline is not None and time.monotonic() > deadline:
                return
            reading = reading or asyncio.create_task(follow.next_batch())
            await asyncio.wait([reading], timeout=MARK_EVERY_S)
            kind: Kind = "progress"
            events: list[aio.Event] = []
            if reading.done():
                kind, events, reading = "events", reading.result(), None
            rev = follow.revision
            if events:
                rev = events[-1].revision
            stream.messages.append(Message(time.monotonic_ns(), kind, rev, tuple(map(_event, events))))
    finally:
        if reading is not None:
            reading.cancel()
        follow.cancel()


def _event(event: aio.Event) -> Event:
    previous = key_values([event.prev_kv])[0] if event.prev_kv is not None else None
    return Event("delete" if event.type == DELETE else "put", key_values([event.kv])[0], previous)
