"""How ranks wait for each other: on copies of a few keys, and no longer than their claim lasts.

::

    async with Watching(control, claim, (keys.head, "")) as copy:
        await copy.until(lambda items: not items)      # FenceBroken as soon as somebody else has claimed the run

A claim of a run ends with the generation that it stands on, when that is known to end: the next claim may be far away,
since whoever waits here is one of those that the next generation waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.client.arguments import limit
from raftkv.client.control.control import Control
from raftkv.client.control.reflector import Interval, Reflector
from raftkv.client.values import Event, KeyValue

Items = Mapping[bytes, KeyValue]


class Watching:
    """A copy of some keys of a run that is followed while a claim lasts; for ``async with``.

    Arguments:
        control: the store.
        claim: what ends the wait.
        intervals: of the keys; no two share one.
    """

    def __init__(self, control: Control, claim: Claim, *intervals: Interval) -> None:
        self._claim = claim
        self._changed = asyncio.Event()
        self._refusal: Exception | None = None
        self._fence = self._follow(control, (RegistryKeys(claim.run_id).fence, ""))
        self._world = None if claim.world is None else self._follow(control, claim.world.watched)
        self._copies = [self._follow(control, interval) for interval in intervals]

    def _follow(self, control: Control, interval: Interval) -> Reflector:
        return Reflector(control, interval, self._look, on_refused=self._refuse)

    @property
    def items(self) -> Items:
        """The keys as far as they are known."""
        if len(self._copies) == 1:
            return self._copies[0].items
        return {key: item for copy in self._copies for key, item in copy.items.items()}

    @property
    def why_over(self) -> str | None:
        """Return why the claim has ended, as far as that is known: empty: it is not known why; None: it lasts."""
        world = self._claim.world
        reason = None if world is None or self._world is None else world.why_over(self._world.items)
        fence = self._fence.get(RegistryKeys(self._claim.run_id).fence)
        has_ended = fence is None or fence.mod_revision != self._claim.revision
        return "" if has_ended and reason is None else reason

    @property
    def _everything(self) -> list[Reflector]:
        return [self._fence, *([] if self._world is None else [self._world]), *self._copies]

    async def __aenter__(self) -> Watching:
        for reflector in self._everything:
            reflector.start()
        try:
            await self._until(lambda: all(reflector.is_following for reflector in self._everything))
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for reflector in self._everything:
            reflector.close()

    async def holds(self, is_so: Callable[[Items], bool]) -> bool:
        """Wait until the keys are as they should be, or the claim is over; whether they are.

        Raises:
            StatusError: the cluster refuses to show the keys, or the client was closed.
        """
        await self._until(lambda: is_so(self.items) or self.why_over is not None)
        if not is_so(self.items):  # each copy has a watch of its own: what came before the end may not be known yet
            await asyncio.gather(*(copy.refresh() for copy in self._copies))
        return is_so(self.items)

    async def until(self, is_so: Callable[[Items], bool]) -> Items:
        """Wait until the keys are as they should be; returns them.

        Raises:
            FenceBroken, GenerationOver: the claim ended before.
            StatusError: the cluster refuses to show the keys, or the client was closed.
        """
        if not await self.holds(is_so):
            raise self._claim.broken(self.why_over or "")
        return self.items

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            if self._refusal is not None:
                raise self._refusal
            await self._changed.wait()

    def _look(self, _: Sequence[Event]) -> None:
        self._changed.set()

    def _refuse(self, error: Exception) -> None:
        self._refusal = error
        self._changed.set()


@asynccontextmanager
async def limited(timeout_s: float | None, what: str) -> AsyncIterator[None]:
    """Limit the time that something may take; None: there is no limit.

    Raises:
        TimeoutError: it took longer; the text says what did not happen.
    """
    try:
        async with asyncio.timeout(limit(timeout_s, "timeout_s")):
            yield
    except TimeoutError:
        if timeout_s is None:
            raise
        raise TimeoutError(f"{what} within {timeout_s:g} s") from None
