"""The best checkpoint by a metric, whenever it is another one: what a serving process follows.

::

    async for checkpoint in Bests(lookup, control, "job", "loss"):
        serve(checkpoint)

It looks again whenever the summary of the run changes: at commits, metrics that an evaluator adds later, deletions.
Which ones were the best for a moment in between is left out, as long as the present one comes. The same checkpoint
comes again only if another was the best meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.find.lookup import MIN, Lookup, check_mode
from raftkv.checkpoint.keys import AttemptId, RegistryKeys
from raftkv.checkpoint.records import Checkpoint
from raftkv.client.control.control import Control
from raftkv.client.control.reflector import Reflector, below
from raftkv.client.values import Event


class Bests:
    """Follow the best checkpoint; see the module. End it with ``cancel``.

    Arguments:
        lookup: of the store.
        control: the store.
        run_id: of the run.
        metric: its name.
        mode: ``min`` or ``max``: which values are better.
        kind: only of this one; empty: of all.

    Raises:
        ConfigError: there is no such mode.
    """

    def __init__(
        self, lookup: Lookup, control: Control, run_id: str, metric: str, mode: str = MIN, *, kind: str = ""
    ) -> None:
        self._lookup = lookup
        self._what = run_id, metric, check_mode(mode)
        self._kind = kind
        self._last: tuple[str, AttemptId] | None = None
        self._news = asyncio.Event()
        self._is_over = False
        self._end: Exception | None = None
        prefix = below(RegistryKeys(run_id).latest_all)
        self._copy = Reflector(control, prefix, self._take, deletes=False, on_end=self._ended)
        self._copy.start()

    def cancel(self) -> None:
        """End it."""
        self._is_over = True
        self._copy.close()
        self._news.set()

    async def next_batch(self) -> list[Checkpoint]:
        """Wait for another best one; empty: it was cancelled.

        Raises:
            StatusError: the cluster refused the look; the client is closed.
        """
        while True:
            await self._news.wait()
            if self._is_over:
                return []
            if self._end is not None:
                raise self._end
            self._news.clear()
            try:
                (best,) = await self._lookup.best(*self._what, kind=self._kind)
            except CheckpointNotFound:
                continue
            except BaseException:
                self._news.set()  # who waited has given up, or was refused, and was told nothing
                raise
            if (best.kind, best.id) != self._last:
                self._last = best.kind, best.id
                return [best]

    def __aiter__(self) -> Bests:
        return self

    async def __anext__(self) -> Checkpoint:
        for best in await self.next_batch():
            return best
        raise StopAsyncIteration

    def _take(self, _: Sequence[Event]) -> None:
        self._news.set()

    def _ended(self, error: Exception) -> None:
        self._end = error
        self._news.set()
