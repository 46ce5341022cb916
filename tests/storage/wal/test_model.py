"""Random lives of a log against a simple model: synced records are always there, and nothing unknown appears."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raftkv.raft.types import NONE, ConfState, Entry, HardState, SnapshotMeta
from raftkv.storage.wal import WAL, Recovered
from tests.storage.wal.helpers import DIRECTORY, create, reopen
from tests.storage.wal.simdisk import SimDisk

payloads = st.one_of(
    st.binary(max_size=60),
    st.integers(0, 1500).map(bytes),
    st.integers(0, 1500).map(lambda size: random.Random(size).randbytes(size)),
)


class Model:
    """The log as a dict; ``fold`` of the operations is all it knows."""

    def __init__(self, operations: list[tuple[object, ...]]) -> None:
        self.log: dict[int, Entry] = {}
        self.hard_state = HardState()
        self.snapshot = SnapshotMeta()
        self.last_index = 0
        for operation in operations:
            self.fold(operation)

    def fold(self, operation: tuple[object, ...]) -> None:
        for item in operation:
            if isinstance(item, Entry):
                self.log = {index: entry for index, entry in self.log.items() if index < item.index}
                self.log[item.index] = item
                self.last_index = item.index
            elif isinstance(item, HardState):
                self.hard_state = item
            elif isinstance(item, SnapshotMeta):
                self.mark(item)

    def mark(self, meta: SnapshotMeta) -> None:
        if self.term(meta.index) != meta.term:
            self.log.clear()
            self.last_index = meta.index
        self.snapshot = meta

    def term(self, index: int) -> int | None:
        if index == self.snapshot.index:
            return self.snapshot.term
        return self.log[index].term if index in self.log else None

    def entries(self) -> list[Entry]:
        return [self.log[index] for index in range(self.snapshot.index + 1, self.last_index + 1)]

    def same_as(self, recovered: Recovered) -> bool:
        return (
            self.hard_state == recovered.hard_state
            and self.snapshot == recovered.snapshot
            and self.entries() == recovered.entries
        )


class LogMachine(RuleBasedStateMachine):
    """Operations on a log on a disk that can lose power, and the list of the same operations."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = SimDisk()
        self.operations: list[tuple[object, ...]] = []
        self.synced = 0
        self.released = 0

    @initialize()
    def begin(self) -> None:
        self.wal: WAL = create(self.disk, 2048)
        self.model = Model([])

    def _do(self, *operation: object) -> None:
        self.operations.append(operation)
        self.model.fold(operation)

    @rule(
        data=st.lists(payloads, min_size=1, max_size=4),
        back=st.integers(0, 3),
        new_term=st.booleans(),
        commit=st.integers(0, 6),
        with_state=st.booleans(),
    )
    def append(self, data: list[bytes], back: int, new_term: bool, commit: int, with_state: bool) -> None:
        model = self.model
        floor = max(model.hard_state.commit, model.snapshot.index)
        first = max(model.last_index + 1 - back, floor + 1)
        overwrite = first <= model.last_index
        term = max(model.hard_state.term, model.snapshot.term, 1) + (new_term or overwrite)
        batch = [Entry(term, first + at, payload) for at, payload in enumerate(data)]
        committed = min(model.hard_state.commit + commit, batch[-1].index)
        state = HardState(term, term % 3, max(committed, model.snapshot.index))
        if not with_state and term == model.hard_state.term:
            self.wal.append(None, batch)
            self._do(*batch)
        else:
            self.wal.append(state, batch)
            self._do(*batch, state)

    @rule(commit=st.integers(1, 5))
    def commit_only(self, commit: int) -> None:
        old = self.model.hard_state
        state = HardState(old.term, old.vote, min(old.commit + commit, self.model.last_index))
        self.wal.append(state, [])
        self._do(state)

    @rule()
    def sync(self) -> None:
        self.wal.sync()
        self.synced = len(self.operations)

    @precondition(lambda self: self.model.hard_state.commit > self.model.snapshot.index)
    @rule(back=st.integers(0, 2))
    def save_own_snapshot(self, back: int) -> None:
        model = self.model
        index = max(model.hard_state.commit - back, model.snapshot.index + 1)
        meta = SnapshotMeta(index, model.log[index].term, ConfState((1, 2, 3)))
        self.wal.save_snapshot(meta)
        self._do(meta)

    @rule(beyond=st.integers(-2, 5))
    def save_snapshot_of_the_leader(self, beyond: int) -> None:
        model = self.model
        index = max(model.last_index + beyond, model.hard_state.commit + 1, model.snapshot.index + 1)
        term = max(model.hard_state.term, model.snapshot.term) + 1
        meta, state = SnapshotMeta(index, term, ConfState((1, 2), (3,))), HardState(term, NONE, index)
        self.wal.save_snapshot(meta, state)
        self._do(meta, state)

    @rule(back=st.integers(0, 8))
    def release(self, back: int) -> None:
        self.wal.release(self.model.snapshot.index + 1 - back)
        self.synced = len(self.operations)

    @rule()
    def prepare_next(self) -> None:
        self.wal.prepare_next()

    @rule(seed=st.integers(0, 2**32))
    def power_cut(self, seed: int) -> None:
        self.disk.power_cut(random.Random(seed))
        self._restart(at_least=self.synced)

    @rule()
    def kill(self) -> None:
        self.disk.kill()
        self._restart(at_least=len(self.operations))

    @rule()
    def close_and_open(self) -> None:
        self.wal.close()
        self._restart(at_least=len(self.operations))

    def _restart(self, at_least: int) -> None:
        """The log must equal the model after some number of operations, all the synced ones among them."""
        self.wal, recovered = reopen(self.disk, 2048)
        for count in range(len(self.operations), at_least - 1, -1):
            model = Model(self.operations[:count])
            if model.same_as(recovered):
                self.model = model
                del self.operations[count:]
                self.synced = count
                return
        raise AssertionError(f"{recovered} is not the state after {at_least}..{len(self.operations)} operations")

    @invariant()
    def names_are_few_and_in_order(self) -> None:
        names = [name for name in self.disk.list_names(DIRECTORY) if name.endswith(".wal")]
        assert sorted(names) == list(self.wal.segments)

    def teardown(self) -> None:
        if hasattr(self, "wal"):
            self.kill()


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
