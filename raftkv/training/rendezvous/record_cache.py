"""A node's view of ``round`` and ``state``: as of one revision, moved on by its watch, never back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from raftkv.client.values import DELETE, Event, KeyValue
from raftkv.training.errors import RecordError
from raftkv.training.keys import RunKeys
from raftkv.training.records import Round, State


class RecordCache:
    """See the module.

    Arguments:
        run_id: of the run.
        on_change: called on the loop when something is new.

    Attributes:
        round, state: as of ``revision``; None: not there.
        round_revision, state_revision: their mod revisions; 0: not there.
        damage: why a record cannot be read; empty: all is well.
    """

    def __init__(self, run_id: str, on_change: Callable[[], None]) -> None:
        self.round: Round | None = None
        self.state: State | None = None
        self.round_revision = self.state_revision = 0
        self.revision = 0
        self.damage = ""
        keys = RunKeys(run_id)
        self._round_key, self._state_key = keys.round.encode(), keys.state.encode()
        self._on_change = on_change
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def load(self, items: Iterable[KeyValue], revision: int) -> None:
        """Take what a read has found, if it is newer than what is known."""
        if revision < self.revision:
            return
        found = {item.key: item for item in items}
        for key, known in ((self._round_key, self.round_revision), (self._state_key, self.state_revision)):
            if key in found:
                self._put(found[key])
            elif known:
                self._remove(key)
        self._moved(revision)

    def on_events(self, revision: int, events: Sequence[Event]) -> None:
        """Take what the watch has brought."""
        for event in events:
            if event.kv.mod_revision <= self.revision:
                continue
            if event.type == DELETE:
                self._remove(event.kv.key)
            else:
                self._put(event.kv)
        self._moved(max(revision, self.revision))

    async def reached(self, revision: int) -> None:
        """Wait until everything up to a revision is known here."""
        if self.revision >= revision:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((revision, future))
        await future

    def _put(self, item: KeyValue) -> None:
        try:
            if item.key == self._round_key:
                self.round, self.round_revision = Round.decode(item.value), item.mod_revision
            elif item.key == self._state_key:
                self.state, self.state_revision = State.decode(item.value), item.mod_revision
        except RecordError as error:
            self.damage = f"{item.key.decode(errors='replace')}: {error}"

    def _remove(self, key: bytes) -> None:
        if key == self._round_key:
            self.round, self.round_revision = None, 0
        elif key == self._state_key:
            self.state, self.state_revision = None, 0

    def _moved(self, revision: int) -> None:
        self.revision = revision
        waiting, self._waiting = self._waiting, []
        for wanted, future in waiting:
            if wanted > revision:
                self._waiting.append((wanted, future))
            elif not future.done():
                future.set_result(None)
        self._on_change()
