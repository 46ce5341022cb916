"""Zeros written ahead of the frames: lives of a log whose segments are longer than one fill.

The segments of ``test_model`` are filled to their end with their head, so frames there never reach unwritten blocks.
Here a segment takes several fills, and a restart fills again from its position.
"""

from __future__ import annotations

import random

import pytest

from raftkv.raft.types import ConfState, Entry, HardState, SnapshotMeta
from raftkv.storage.wal import WAL, WALCorruptError
from raftkv.storage.wal.record import SECTOR_BYTES, read_frame
from raftkv.storage.wal.segment import load_segment
from raftkv.storage.wal.wal import FILL_BYTES
from tests.storage.wal.helpers import DIRECTORY, create, recover_or_refuse, reopen
from tests.storage.wal.simdisk import SimDisk
from tests.storage.wal.test_model import Model

SEGMENT_BYTES = 4 * FILL_BYTES
SIZES = (0, 10, 100, 600, 5_000, FILL_BYTES // 2, FILL_BYTES - 100, FILL_BYTES + 4_000, 3 * FILL_BYTES)
SOME_FILLS = 8
"""Appends of which some reach what was never written, with the sizes of the test of damage."""


class Lives:
    """A log on a disk that loses power, and the log's operations.

    Arguments:
        seed: decides what is appended, and what a power cut leaves.
        sizes: of values.
    """

    def __init__(self, seed: int, sizes: tuple[int, ...] = SIZES) -> None:
        self.rng = random.Random(seed)
        self.sizes = sizes
        self.disk = SimDisk()
        self.operations: list[tuple[object, ...]] = []
        self.synced = 0
        self.model = Model([])
        self.wal: WAL = create(self.disk, SEGMENT_BYTES)

    def payload(self) -> bytes:
        """A value: zeros, one byte again and again, or anything."""
        size = self.rng.choice(self.sizes)
        return self.rng.choice((bytes(size), b"z" * size, self.rng.randbytes(size)))

    def append(self) -> None:
        """Write a batch; some overwrite what is not committed."""
        model, rng = self.model, self.rng
        floor = max(model.hard_state.commit, model.snapshot.index)
        first = max(model.last_index + 1 - rng.choice((0, 0, 0, 2)), floor + 1)
        term = max(model.hard_state.term, model.snapshot.term, 1) + (first <= model.last_index)
        batch = [Entry(term, first + at, self.payload()) for at in range(rng.choice((1, 1, 2, 5)))]
        state = HardState(term, 1, max(min(model.hard_state.commit + rng.randrange(4), batch[-1].index), floor))
        self.wal.append(state, batch)
        self.note(*batch, state)

    def mark(self) -> None:
        """Write a snapshot marker, and release the segments before it."""
        model = self.model
        if model.hard_state.commit > model.snapshot.index:
            index = model.hard_state.commit
            meta = SnapshotMeta(index, model.log[index].term, ConfState((1, 2, 3)))
            self.wal.save_snapshot(meta)
            self.note(meta)
            self.wal.release(index + 1)
            self.synced = len(self.operations)

    def note(self, *operation: object) -> None:
        """Tell the model."""
        self.operations.append(operation)
        self.model.fold(operation)

    def sync(self) -> None:
        """Make all operations durable."""
        self.wal.sync()
        self.synced = len(self.operations)

    def step(self) -> None:
        """Do one thing that a member does."""
        chance = self.rng.random()
        if chance < 0.6:
            self.append()
        elif chance < 0.8:
            self.sync()
        elif chance < 0.85:
            self.mark()
        elif chance < 0.95:
            self.wal.prepare_next()
        elif self.wal.cut():
            self.synced = len(self.operations)

    def end(self) -> None:
        """End this life and begin the next: check that all synced operations and only known ones come back."""
        at_least = len(self.operations)
        way = self.rng.random()
        if way < 0.7:
            self.disk.power_cut(self.rng)
            at_least = self.synced
        elif way < 0.9:
            self.disk.kill()
        else:
            self.wal.close()
        self.wal, recovered = reopen(self.disk, SEGMENT_BYTES)
        for count in range(len(self.operations), at_least - 1, -1):
            model = Model(self.operations[:count])
            if model.same_as(recovered):
                self.model, self.synced = model, count
                del self.operations[count:]
                return
        raise AssertionError(f"not the state after any of {at_least}..{len(self.operations)} operations")


@pytest.mark.parametrize("seed", range(6))
def test_power_cuts_among_fills_lose_nothing_that_was_synced(seed: int) -> None:
    lives = Lives(seed)
    for _life in range(12):
        for _step in range(lives.rng.randrange(1, 12)):
            lives.step()
        lives.end()


@pytest.mark.parametrize("seed", range(2))
def test_damage_before_the_last_sync_is_refused_wherever_fills_begin(seed: int) -> None:
    """A sector that turns into zeros or into anything, where a later frame says that it was synced."""
    lives = Lives(seed, (10, 600, 5_000, FILL_BYTES // 3))
    for _life in range(3):
        for _append in range(SOME_FILLS):
            lives.append()
            lives.sync()
        lives.wal.close()
        lives.wal, _recovered = reopen(lives.disk, SEGMENT_BYTES)
    lives.wal.close()
    contents = lives.disk.contents()
    for name in lives.wal._segments:
        path = f"{DIRECTORY}/{name}"
        data = contents[path]
        reader = load_segment(lives.disk, DIRECTORY, name)
        frames = list(reader.frames())
        is_last = name == lives.wal._segments[-1]
        # What the last frame says was durable before it; in earlier segments, all that was written.
        end = frames[-1].header.durable if is_last and frames else reader.offset
        for sector in lives.rng.sample(range(end // SECTOR_BYTES), min(40, end // SECTOR_BYTES)):
            for damage in (bytes(SECTOR_BYTES), lives.rng.randbytes(SECTOR_BYTES)):
                at = sector * SECTOR_BYTES
                damaged = data[:at] + damage + data[at + SECTOR_BYTES :]
                result = recover_or_refuse({**contents, path: damaged})
                assert isinstance(result, WALCorruptError), f"{path} {at}"


def test_a_fill_cut_anywhere_leaves_the_frame_before_it() -> None:
    """The kernel got a part of a write: the frame without its zeros, or with some of them."""
    lives = Lives(1, (FILL_BYTES // 2,))
    while lives.wal._filled - lives.wal._offset > FILL_BYTES // 2:
        lives.append()
    lives.sync()
    start = lives.wal._offset
    lives.append()
    while lives.wal._filled - FILL_BYTES <= start:
        start = lives.wal._offset
        lives.sync()
        lives.append()
    path = f"{DIRECTORY}/{lives.wal.segments[-1]}"
    contents = lives.disk.contents()
    data, seed = contents[path], lives.wal._seed
    frame = read_frame(data, start, seed)
    assert frame is not None
    for size in (*range(start, start + 100, 9), *range(frame.header.end - 20, frame.header.end + 20)):
        result = recover_or_refuse({**contents, path: data[:size].ljust(len(data), b"\0")})
        assert not isinstance(result, WALCorruptError), str(result)
        count = len(lives.operations) - (size < frame.header.end)
        assert Model(lives.operations[:count]).same_as(result)
