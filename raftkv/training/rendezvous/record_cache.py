"""A node's view of ``round`` and ``state``: decoded, as of one revision, kept current by a reflector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raftkv.client.control.control import Control
from raftkv.client.control.records import RecordError
from raftkv.client.control.reflector import Reflector
from raftkv.client.values import DELETE, Event, KeyValue
from raftkv.training.keys import RunKeys
from raftkv.training.records import BROKEN, CLOSED, GenerationRecord, State
from raftkv.training.rendezvous.world import World


class RecordCache(Reflector):
    """The records ``round`` and ``state`` of a run, decoded and kept current.

    Arguments:
        control: the store.
        run_id: of the run.
        on_change: called on the loop when something is new.

    Attributes:
        round, state: as of ``revision``; None: not there.
        round_revision, state_revision: their mod revisions; 0: not there.
        end: why nothing new will come any more, as when the client was closed; None: it is followed.
    """

    def __init__(self, control: Control, run_id: str, on_change: Callable[[], None]) -> None:
        keys = RunKeys(run_id)
        super().__init__(control, keys.record, self._decode, on_end=self._ended)
        self.round: GenerationRecord | None = None
        self.state: State | None = None
        self.round_revision = self.state_revision = 0
        self.end: Exception | None = None
        self._round_key, self._state_key = keys.round.encode(), keys.state.encode()
        self._damage: dict[bytes, str] = {}
        self._on_change = on_change

    @property
    def damage(self) -> str:
        """Why a record cannot be read; empty: all is well."""
        return next(iter(self._damage.values()), "")

    @property
    def closed(self) -> bool:
        """Whether the run is over."""
        return self.state is not None and self.state.phase == CLOSED

    def nodes_waiting(self, world: World | None) -> int:
        """Return 0 while a world is whole, as far as is known; else how many nodes wait for the next, at least 1."""
        state = self.state
        if world is None or state is None or state.phase == CLOSED:
            return 0
        if self.round_revision != world.revision:
            return 1  # a later one; or that of then, or none, when the cluster was restored from a backup
        return max(1, state.joined) if state.phase == BROKEN and state.generation == world.generation else 0

    def _decode(self, changes: Sequence[Event]) -> None:
        for event in changes:
            self._apply(event.key, None if event.type == DELETE else event.kv)
        self._on_change()

    def _apply(self, key: bytes, item: KeyValue | None) -> None:
        revision = item.mod_revision if item is not None else 0
        self._damage.pop(key, None)
        try:
            if key == self._round_key:
                self.round, self.round_revision = (
                    GenerationRecord.decode(item.value) if item is not None else None,
                    revision,
                )
            elif key == self._state_key:
                self.state, self.state_revision = State.decode(item.value) if item is not None else None, revision
        except RecordError as error:
            self._damage[key] = f"{key.decode(errors='replace')}: {error}"

    def _ended(self, error: Exception) -> None:
        self.end = error
        self._on_change()
