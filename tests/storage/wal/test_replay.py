"""The fold of the records, by the examples of its docstring, and its refusals."""

from __future__ import annotations

import pytest

from raftkv.raft.types import Entry, HardState, SnapshotMeta
from raftkv.storage.wal.record import Metadata, Record
from raftkv.storage.wal.recovery import LogReplay, ReplayError
from tests.storage.wal.helpers import entries, indexes


def replayed(*records: Record, first_index: int = 1) -> LogReplay:
    replay = LogReplay(first_index)
    for record in records:
        replay.feed(record)
    return replay


def test_marker_beyond_log_restarts_it() -> None:
    replay = replayed(*entries(1, 3), SnapshotMeta(9, 4), Entry(4, 10))
    assert indexes(replay.entries_after(replay.snapshot)) == [10]
    with pytest.raises(ReplayError, match="begins at entry 10, the state ends at entry 0"):
        replay.entries_after(SnapshotMeta())


def test_a_log_without_its_first_segments_goes_back_only_to_its_first_entry() -> None:
    replay = replayed(SnapshotMeta(90, 1), *entries(100, 103), SnapshotMeta(101, 1), first_index=100)
    assert indexes(replay.entries_after(replay.snapshot)) == [102, 103]
    with pytest.raises(ReplayError, match="begins at entry 100, the state ends at entry 90"):
        replay.entries_after(SnapshotMeta(90, 1))


def test_segment_may_begin_with_overwrite_of_earlier_one() -> None:
    replay = replayed(*entries(95, 97, term=2), SnapshotMeta(96, 2), first_index=100)
    assert indexes(replay.entries_after(replay.snapshot)) == [97]


def test_the_hard_state_follows_a_snapshot_that_came_without_one() -> None:
    replay = replayed(HardState(1, 7, 0), SnapshotMeta(9, 4))
    assert replay.final_hard_state() == HardState(4, 0, 9)
    assert replayed(HardState(4, 7, 0), SnapshotMeta(9, 4)).final_hard_state() == HardState(4, 7, 9)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([*entries(1, 2), Entry(1, 4)], "entry 4 follows entry 2"),
        ([Entry(1, 2**64 - 1)], "entry 18446744073709551615 follows entry 0"),
        ([*entries(1, 3), HardState(1, 0, 2), Entry(1, 2)], "entry 2 overwrites what is committed"),
        ([*entries(1, 3), SnapshotMeta(2, 1), Entry(2, 2)], "entry 2 overwrites what is committed"),
        ([Entry(2, 1), Entry(1, 2)], "entry 2 has term 1, below"),
        ([SnapshotMeta(5, 3), Entry(2, 6)], "entry 6 has term 2, below"),
        ([HardState(2, 0, 0), HardState(1, 0, 0)], "follows"),
        ([*entries(1, 2), HardState(1, 0, 2), HardState(1, 0, 1)], "follows"),
        ([SnapshotMeta(5, 1), SnapshotMeta(4, 1)], "marker 4 follows the marker 5"),
        ([Metadata(b"")], "not at its head"),
    ],
)
def test_records_that_no_member_writes_are_refused(records: list[Record], reason: str) -> None:
    replay = replayed(*records[:-1])
    with pytest.raises(ReplayError, match=reason):
        replay.feed(records[-1])
