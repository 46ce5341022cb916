"""Rewinding before a marker whose database cannot be installed: all or nothing; term and vote stay."""

from __future__ import annotations

import random

import pytest

from raftkv.raft.types import ConfState, HardState, SnapshotMeta
from raftkv.storage.wal import WALCorruptError, WALFailedError
from tests.storage.wal.helpers import append_synced, create, entries, indexes, recover, reopen
from tests.storage.wal.simdisk import SimDisk

STATE = SnapshotMeta(4, 1, ConfState(voters=(1, 2)))
RECEIVED = SnapshotMeta(50, 3, ConfState(voters=(1, 2)))


def interrupted(segment_bytes: int = 1024) -> SimDisk:
    """The log of a member that has entries 1 to 20, of which a state holds 4, and was sent a database of entry 50."""
    disk = SimDisk()
    wal = create(disk, segment_bytes)
    append_synced(wal, 1, 20)
    wal.save_snapshot(RECEIVED, HardState(3, 0, 50))
    wal.append(HardState(5, 2, 50), entries(51, 60, term=4))
    wal.sync()
    wal.close()
    assert indexes(recover(disk).entries) == list(range(51, 61))
    return disk


def check_rewound(disk: SimDisk) -> None:
    wal, recovered = reopen(disk)
    assert recovered.snapshot == STATE
    assert recovered.entries == entries(5, 20)
    assert recovered.hard_state == HardState(5, 2, 19), "what was known to be committed, and the last vote"
    append_synced(wal, 21, 30, term=5)
    wal.save_snapshot(SnapshotMeta(70, 5, STATE.conf_state), HardState(6, 1, 70))
    wal.sync()
    wal.close()
    assert recover(disk).snapshot.index == 70


@pytest.mark.parametrize("segment_bytes", [1024, 1 << 20])
def test_log_continues_without_the_marker(segment_bytes: int) -> None:
    disk = interrupted(segment_bytes)
    wal, _ = reopen(disk, segment_bytes)
    rewound = wal.rewind(STATE)
    assert (rewound.snapshot, rewound.hard_state) == (STATE, HardState(5, 2, 19))
    assert indexes(rewound.entries) == list(range(5, 21))
    wal.close()
    check_rewound(disk)


@pytest.mark.parametrize("operation", ["write", "sync_data", "rename", "remove", "sync_directory"])
def test_a_crash_leaves_the_log_as_it_was_or_rewound(operation: str) -> None:
    outcomes = set()
    for number in range(1, 12):
        disk = interrupted()
        wal, _ = reopen(disk)
        disk.fail(operation, 5, after=number)
        try:
            wal.rewind(STATE)
        except WALFailedError:
            pass
        disk.heal()
        disk.power_cut(random.Random(number))
        recovered = recover(disk)
        outcomes.add(recovered.snapshot.index)
        if recovered.snapshot == RECEIVED:
            assert indexes(recovered.entries) == list(range(51, 61))
            again, _ = reopen(disk)
            again.rewind(STATE)
            again.close()
        check_rewound(disk)
    assert 4 in outcomes


def test_a_state_that_the_log_does_not_continue_is_refused() -> None:
    disk = interrupted()
    wal, _ = reopen(disk)
    wal.append(HardState(5, 2, 60), [])
    with pytest.raises(WALCorruptError, match="the log ends at entry 20, the state at entry 40"):
        wal.rewind(SnapshotMeta(40, 1, STATE.conf_state))
    wal.close()
