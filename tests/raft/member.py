"""A member under test: a ``RawNode`` with a disk that writes on command, and a state machine.

It carries out the caller's duties of ``raftkv/raft/__init__.py`` one by one, so that tests can act between them.
Entries in ``log`` are durable; Readys in ``writing`` and entries in ``applying`` are lost in a crash.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

from raftkv.raft import confchange
from raftkv.raft.core import RawNode
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import ConfState, Entry, EntryType, Message, RaftConfig, ReadState, Ready
from tests.raft import invariants


class FixedRandom(random.Random):
    """Returns the same number each time: the election timeout is ``election_ticks + value``."""

    def __init__(self, value: int) -> None:
        super().__init__(0)
        self.value = value

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return self.value % start


class Member:
    """See the head of the module."""

    def __init__(self, config: RaftConfig, log: MemoryLog, rng: random.Random) -> None:
        self.id = config.id
        self.config = config
        self.rng = rng
        self.log = log
        self.applied = log.snapshot().index
        # Configuration after each index that changed it, for restarts and snapshots.
        self.conf_states: dict[int, ConfState] = {self.applied: log.conf_state}
        # (index, term, data) of everything this member applied in this life.
        self.history: list[Entry] = []
        self.read_states: list[ReadState] = []
        self.start()

    def start(self) -> None:
        """Start from the durable state."""
        self.writing: deque[Ready] = deque()
        self.applying: deque[list[Entry]] = deque()
        self.log.conf_state = self.conf_state_at(self.applied)
        self.node = RawNode(replace(self.config, applied=self.applied), self.log, self.rng)
        self.checker = invariants.Checker(self.node.raft)

    def conf_state_at(self, index: int) -> ConfState:
        """The configuration in force after ``index``."""
        return self.conf_states[max(at for at in self.conf_states if at <= index)]

    def crash(self, applied: int | None = None, survivors: int = 0) -> None:
        """Lose everything that is not durable and start again; the state machine falls back to ``applied``.

        ``survivors``: so many of the Readys on their way reached the disk, although no write was confirmed.
        """
        for ready in list(self.writing)[:survivors]:
            self._persist(ready)
        persisted = invariants.observe(self.node.raft)
        hard_state = self.log.hard_state
        persisted = replace(persisted, term=hard_state.term, vote=hard_state.vote)
        if applied is not None:
            self.applied = max(applied, self.log.first_index() - 1)
        self.conf_states = {at: state for at, state in self.conf_states.items() if at <= self.applied}
        self.read_states = []
        self.start()
        invariants.check_restart(persisted, self.node.raft)

    # -- the duties --------------------------------------------------------------------------------------------------

    def take(self) -> Ready:
        """Take a Ready; its messages are the caller's to send (duty 1)."""
        ready = self.node.ready()
        self.writing.append(ready)
        if ready.committed_entries:
            self.applying.append(ready.committed_entries)
        self.read_states += ready.read_states
        return ready

    def write(self) -> list[Message]:
        """Make the oldest Ready durable (duties 2-4); returns the messages that may leave now (duty 5)."""
        ready = self.writing.popleft()
        self._persist(ready)
        self.node.on_append_durable(ready)
        return ready.messages_after_append

    def _persist(self, ready: Ready) -> None:
        if ready.snapshot is not None:
            self.log.apply_snapshot(ready.snapshot)
            self.applied = ready.snapshot.index
            self.conf_states[self.applied] = ready.snapshot.conf_state
        self.log.append(ready.entries)
        if ready.hard_state is not None:
            self.log.hard_state = ready.hard_state

    def apply(self) -> list[Entry]:
        """Apply the oldest page of committed entries (duties 6-7)."""
        entries = self.applying.popleft()
        for entry in entries:
            if entry.index != self.applied + 1:
                raise AssertionError(f"{self.id} applies {entry.index} after {self.applied}")
            if entry.type != EntryType.NORMAL:
                change = confchange.decode(entry.data)
                self.conf_states[entry.index] = self.node.apply_conf_change(change)
            self.applied = entry.index
        self.history += entries
        self.node.on_applied(self.applied)
        return entries

    def work(self) -> tuple[Ready, list[Message]]:
        """Take a Ready and do all duties at once; returns it and every message that may leave."""
        ready = self.take()
        messages = list(ready.messages)
        while self.writing:
            messages += self.write()
        while self.applying:
            self.apply()
        return ready, messages

    def compact(self, index: int) -> None:
        """Snapshot at ``index`` and drop the log up to there."""
        self.log.create_snapshot(index, self.conf_state_at(index))
        self.log.compact(index)
