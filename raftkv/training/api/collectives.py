"""Ranks that wait for each other: barriers, broadcasts, and gathered values of one generation.

What lies below ``sync/<generation>/`` for the third barrier ``"step"`` of three ranks, two of which have come::

    at/step/3/arrived/000000    the value of rank 0, empty at a barrier
    at/step/3/arrived/000002
    at/step/3/count             written by each who comes: its *version* is the number of those who came
    open/step/3                 not there yet: the last to come puts it

Coming is one txn: put the own key and the count, and if the count's version says that this is the last, ``open`` as
well. So a barrier costs one write a rank, and all wait for one key (``PostedKeys``); no rank counts the others' keys.
The txn can be repeated after a failure that leaves it open whether it happened: the own key tells, or ``open``.

Each name counts its uses, from 1, on every rank alike: all ranks use a name equally often, in the same order. The last
to come to a use removes the use before: all ranks have left that one, or would not have come. The last to come to a
barrier also removes what the others have put: no rank reads it, and of a name that is used once one key stays.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from raftkv.client.arguments import limit
from raftkv.client.control import ClientControl, Reflector, below
from raftkv.client.kv import txn
from raftkv.client.operations import Delete, Get, Put, version
from raftkv.client.values import Event
from raftkv.errors import ConfigError, StatusError
from raftkv.training.api.generation import RESTORED, checked_value, quoted
from raftkv.training.errors import BarrierTimeout, GenerationOver, PostedLost

if TYPE_CHECKING:
    from raftkv.client.kv import Txn
    from raftkv.client.values import KeyValue, TxnResult
    from raftkv.training.api.generation import Generation

# -- posted_keys ----------------------------------------------------------------------------------------------------
#
# The keys that all ranks of a generation wait for: below one prefix, each put once, seen by one reflector.
#
#     posted = PostedKeys(generation, is_stale)
#     value = await posted.wait("ready/0")      # put by the last rank to come, for all
#
# One watch a rank for any number of barriers: a member encodes an event once for all that watch the same interval, so a
# barrier of 1,024 ranks is 1,024 writes and one event. The watch begins with the generation, so what was put before a
# rank asked, even if it was deleted since, is seen; unless the store has compacted its history: then ``PostedLost`` is
# raised as soon as a later use of the name shows it. A value is kept until it is forgotten: who took it may not have
# got it, if its time was up in that moment. If the cluster is restored from a backup the generation ends: what ranks
# have said since is gone, and no rank would say it again.


class PostedKeys:
    """The keys below one prefix that all ranks wait for, kept current by one reflector.

    A key is ``<name>/<number of its use>``.

    Arguments:
        generation: whose keys.
        is_stale: tells whether no caller will ask for a name any more.
    """

    def __init__(self, generation: Generation, is_stale: Callable[[str], bool]) -> None:
        self.prefix = f"{generation.base}open/"
        self._generation = generation
        self._is_stale = is_stale
        self._values: dict[str, bytes] = {}
        self._newest: dict[str, int] = {}
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._reflector: Reflector | None = None
        self._failure: Exception | None = None

    async def wait(self, name: str) -> bytes:
        """Wait for the value of a name.

        Raises:
            PostedLost: it was deleted before it could be seen here.
            StatusError: the cluster refuses to be watched.
        """
        if self._failure is not None:
            raise self._failure
        if name in self._values:
            return self._values[name]
        if self._is_behind(name):
            raise PostedLost(name)
        if self._reflector is None:
            self._reflector = Reflector(
                ClientControl(self._generation.kv),
                below(self.prefix),
                self._on_changes,
                deletes=False,
                on_refused=self._on_refused,
                on_restored=lambda: self._generation.end(RESTORED),
            )
            self._reflector.start(revision=self._generation.world.revision)
        waiter = self._waiting.setdefault(name, asyncio.get_running_loop().create_future())
        # Shielded: another caller may wait for the same name, and one that gave up may come again.
        value = await asyncio.shield(waiter)
        self._waiting.pop(name, None)
        return value

    def forget(self, name: str) -> None:
        """Drop the value of a name: no caller will ask for it any more."""
        self._values.pop(name, None)

    def close(self) -> None:
        """Watch no more."""
        if self._reflector is not None:
            self._reflector.close()

    def _on_changes(self, changes: Sequence[Event]) -> None:
        for event in changes:
            name = event.key.decode()[len(self.prefix) :]
            if not self._is_stale(name):
                self._values[name] = event.value
            place, _, number = name.rpartition("/")
            self._newest[place] = max(self._newest.get(place, 0), int(number))
            waiter = self._waiting.get(name)
            if waiter is not None and not waiter.done():
                waiter.set_result(event.value)
        for name, waiter in self._waiting.items():
            if not waiter.done() and self._is_behind(name):
                waiter.set_exception(PostedLost(name))
                waiter.exception()  # seen: the waiter may have given up

    def _is_behind(self, name: str) -> bool:
        """Tell whether a later use of the name was posted; they come in order, so this one will not come any more."""
        place, _, number = name.rpartition("/")
        return int(number) < self._newest.get(place, 0)

    def _on_refused(self, error: Exception) -> None:
        self._failure = error
        self.close()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # seen: the waiter may have given up


Result = TypeVar("Result")

LAST_LOOK_TIMEOUT_S = 1.0
"""For asking, when the generation ends, whether a barrier had opened before."""


class Collectives:
    """The barriers, broadcasts and gathered values of one rank in one generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._posted = PostedKeys(generation, self._is_past)
        self._uses: dict[str, int] = defaultdict(lambda: 1)
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def close(self) -> None:
        """Wait for nothing any more."""
        self._posted.close()

    async def barrier(self, name: str, timeout_s: float | None) -> None:
        """Wait until all ranks are there.

        Arguments:
            name: of the barrier.
            timeout_s: None: until the generation ends.
        """
        timeout_s = limit(timeout_s, "timeout_s")
        await self._meet(_Use(self, f"barrier.{quoted(name)}", f"barrier {name!r}"), b"", timeout_s, wait=True)

    async def gather(
        self, name: str, value: str | bytes, root: int | None, timeout_s: float | None
    ) -> list[bytes] | None:
        """Give a value; returns all of them by rank, to the root alone unless it is None.

        Arguments:
            name: of the collective.
            value: of this rank.
            root: the rank that gets them; None: all ranks.
            timeout_s: None: until the generation ends.
        """
        timeout_s = limit(timeout_s, "timeout_s")
        self._check_root(root)
        use = _Use(self, f"gather.{quoted(name)}", f"gather {name!r}")
        receives = root is None or root == self._generation.rank
        return await self._meet(use, checked_value(value), timeout_s, wait=receives)

    async def broadcast(self, name: str, value: str | bytes | None, root: int, timeout_s: float | None) -> bytes:
        """Give all ranks the root's value.

        Arguments:
            name: of the collective.
            value: the root's.
            root: whose value it is.
            timeout_s: None: until the generation ends.
        """
        timeout_s = limit(timeout_s, "timeout_s")
        if root is None:
            raise ConfigError("a broadcast has a root: the rank whose value all get")
        self._check_root(root)
        use = _Use(self, f"value.{quoted(name)}", f"broadcast {name!r}")
        if self._generation.rank != root:
            return await self._in_turn(use, timeout_s, self._opened, root)
        if value is None:
            raise ConfigError(f"rank {root} is the root of broadcast {name!r} and gave no value")
        data = checked_value(value)

        async def publish(use: _Use) -> bytes:
            await self._generation.commit(lambda empty: use.publish(empty, data))
            return data

        return await self._in_turn(use, timeout_s, publish)

    def number(self, name: str) -> int:
        """Return which use of a name is the present one."""
        return self._uses[name]

    def key(self, place: str) -> str:
        """Return a key of the generation."""
        return f"{self._generation.base}{place}"

    def _finish(self, use: _Use) -> None:
        self._uses[use.name] += 1
        self._posted.forget(use.place)

    def _is_past(self, place: str) -> bool:
        name, _, number = place.rpartition("/")
        return int(number) < self._uses[name]

    def _check_root(self, root: int | None) -> None:
        if root is not None and not 0 <= root < self._generation.size:
            raise ConfigError(f"there is no rank {root} to be the root: the generation has {self._generation.size}")

    async def _meet(self, use: _Use, value: bytes, timeout_s: float | None, *, wait: bool) -> list[bytes] | None:
        return await self._in_turn(use, timeout_s, lambda use: self._come(use, value, wait))

    async def _come(self, use: _Use, value: bytes, wait: bool) -> list[bytes] | None:
        rank, size = self._generation.rank, self._generation.size
        done = await self._generation.commit(lambda empty: use.arrive(empty, rank, size, value))
        if not wait:
            return None
        if not use.is_open(done):
            await self._opened(use)
        if use.is_barrier:
            return None
        return [item.value async for item in self._generation.kv.scan(use.arrived, prefix=True)]

    async def _opened(self, use: _Use) -> bytes:
        try:
            return await self._generation.until_over(self._posted.wait(use.place))
        except GenerationOver:
            # The end of the generation and the opening come by different ways: who was let in first is let in.
            found = await self._last_look(use)
            if found is None:
                raise
            return found.value

    async def _last_look(self, use: _Use) -> KeyValue | None:
        try:
            return await self._generation.kv.get(use.open, timeout_s=LAST_LOOK_TIMEOUT_S)
        except StatusError:
            return None

    async def _in_turn(
        self, use: _Use, timeout_s: float | None, make: Callable[[_Use], Awaitable[Result]], root: int | None = None
    ) -> Result:
        """Take part in a use of a name: of those that this rank begins at once, as in two threads, one after the other.

        Arguments:
            use: the present one; the next, if others of this rank are at it.
            timeout_s: None: until the generation ends.
            make: takes part.
            root: the rank that this one waits for; None: all ranks.
        """
        try:
            async with asyncio.timeout(timeout_s) as within, self._turns[use.name]:
                use = use.present()
                result = await make(use)
                self._finish(use)
                return result
        except TimeoutError:
            if timeout_s is None or not within.expired():
                raise
        raise BarrierTimeout(use.title, timeout_s, await self._missing(use.present(), root))

    async def _missing(self, use: _Use, root: int | None) -> list[int] | None:
        """Return the ranks that all wait for; empty: they have come; None: the cluster does not answer."""
        try:
            opened = await self._generation.kv.get(use.open, timeout_s=LAST_LOOK_TIMEOUT_S)
            if opened is not None:
                return []
            if root is not None:
                return [root]
            there = await self._generation.kv.range(
                use.arrived, prefix=True, keys_only=True, timeout_s=LAST_LOOK_TIMEOUT_S
            )
        except StatusError:
            return None
        came = {int(item.key.rpartition(b"/")[2]) for item in there}
        return sorted(set(range(self._generation.size)) - came)


class _Use:
    """One use of a name: its keys, and the txns on them."""

    def __init__(self, collectives: Collectives, name: str, title: str) -> None:
        number = collectives.number(name)
        self._collectives = collectives
        self.name = name
        self.title = title
        self.place = f"{name}/{number}"
        self.open = collectives.key(f"open/{self.place}")
        self.is_barrier = name.startswith("barrier.")
        self._here = collectives.key(f"at/{self.place}/")
        self.count = collectives.key(f"at/{self.place}/count")
        self.arrived = collectives.key(f"at/{self.place}/arrived/")
        self._before = collectives.key(f"at/{name}/{number - 1}/")
        self._open_before = collectives.key(f"open/{name}/{number - 1}")

    def present(self) -> _Use:
        """Return the use of the name that it is now: this one may be over."""
        return _Use(self._collectives, self.name, self.title)

    def arrive(self, empty: Txn, rank: int, size: int, value: bytes) -> Txn:
        """Come; done twice it is as good as once.

        Arguments:
            empty: the txn to fill.
            rank, size: of who comes, and of the generation.
            value: that it brings.
        """
        mine = f"{self.arrived}{rank:06d}"
        came = (Put(self.count), Put(mine, value))
        tidy = (Delete(self._before, prefix=True), Delete(self._open_before), Put(self.open))
        opening = (*tidy, Delete(self._here, prefix=True)) if self.is_barrier else (*tidy, *came)
        last = txn().when(version(self.count) == size - 1).then(*opening).otherwise(*came)
        return empty.when(version(mine) == 0, version(self.open) == 0).then(last).otherwise(Get(self.open))

    def publish(self, empty: Txn, value: bytes) -> Txn:
        """Put the value that all wait for.

        Arguments:
            empty: the txn to fill.
            value: for all ranks.
        """
        return empty.then(Put(self.open, value), Delete(self._open_before))

    @staticmethod
    def is_open(done: TxnResult) -> bool:
        """Tell whether the answer to a rank's arrival says that all are there."""
        inner = done.results[0]
        return bool(inner.succeeded) if done.succeeded else inner is not None
