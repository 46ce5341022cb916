"""Room on the disk and in the log: a copy for a lagging member never takes room that all others need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv import errors
from raftkv.apply.wire import Kind
from raftkv.pb import rpc_pb2
from raftkv.raft import log as log_module
from raftkv.raft.log import ENTRY_OVERHEAD_BYTES, MemoryLog, limit_size, size_of
from raftkv.raft.types import NO_LIMIT, ConfState, Entry, SnapshotMeta
from raftkv.replica.node import housekeeping
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.housekeeping import LogCut, Retention
from raftkv.replica.snapshots.files import DISK_RESERVE_BYTES
from raftkv.storage.mvcc import Store
from tests.storage.memory import MemoryBackend

PUT = rpc_pb2.PutRequest(key=b"k", value=b"v")


class Room:
    """A member's admission on a disk of which so much is free, with so many copies of databases on it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        free_bytes: int,
        copies: int,
        quota_bytes: int | None = None,
        size_bytes: int = 0,
    ) -> None:
        self.copies = copies
        self.size_bytes = size_bytes
        self.alarms = 0
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free_bytes, f_frsize=1))
        node: Any = SimpleNamespace(leader=1, backlog=SimpleNamespace(is_long=False))
        self.alarms_raised = SimpleNamespace(no_space=False, corrupt=False)
        applier: Any = SimpleNamespace(alarms=self.alarms_raised)
        self.admission = Admission(
            node,
            applier,
            max_request_bytes=1 << 20,
            quota_bytes=quota_bytes,
            size_bytes=lambda: self.size_bytes,
            data_dir=str(tmp_path),
            log_dir=str(tmp_path / "wal"),
            raise_no_space=self._raise,
            make_room=lambda: self.copies > 0,
        )

    def _raise(self, reason: str) -> None:
        self.alarms += 1

    def put(self) -> bool:
        """Whether a write is taken."""
        call: Any = SimpleNamespace(headers=())
        try:
            self.admission.check_write(call, Kind.PUT, PUT.SerializeToString(), PUT)
        except errors.NoSpaceError:
            return False
        return True


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("free_bytes", "copies", "taken"),
    [
        (2 * DISK_RESERVE_BYTES, 0, True),
        (DISK_RESERVE_BYTES - 1, 0, False),
        (DISK_RESERVE_BYTES - 1, 1, True),
        (DISK_RESERVE_BYTES // 2 - 1, 1, False),
    ],
)
def test_copy_is_dropped_before_alarm_is_raised(monkeypatch, tmp_path, free_bytes, copies, taken):
    room = Room(monkeypatch, tmp_path, free_bytes, copies)
    assert room.put() == taken
    assert room.alarms == (not taken)
    assert room.admission.finds_no_room() == (not taken)


@pytest.mark.interpreted
def test_entries_of_other_members_count_towards_the_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    room = Room(monkeypatch, tmp_path, 2 * DISK_RESERVE_BYTES, 0, quota_bytes=1000, size_bytes=1500)
    looks = [(1500, False), (999, False), (1000, False), (1200, True), (1300, False), (1100, False), (1150, False)]
    alarms = []
    for size_bytes, is_raised in looks:
        room.size_bytes, room.alarms_raised.no_space = size_bytes, is_raised
        room.admission.watch_quota()
        alarms.append(room.alarms)
    # What was there at the start raises nothing; growth does, unless the alarm is on.
    assert alarms == [0, 0, 1, 1, 2, 2, 3]


class Snapshots:
    """Snapshots on their way, until given up."""

    def __init__(self) -> None:
        self.in_flight = True
        self.reasons: list[str] = []

    def holds_log(self) -> bool:
        return self.in_flight

    def give_up(self, reason: str) -> bool:
        self.reasons.append(reason)
        self.in_flight = False
        return True


ENTRY_BYTES = 1000 + ENTRY_OVERHEAD_BYTES


class Cut:
    """A log, a database that has all of it at once, and what cuts the log."""

    def __init__(self, snapshots: Any, **retention: int) -> None:
        limits = {"snapshot_entries": 10, "snapshot_bytes": 1 << 40, "catchup_entries": 5, "catchup_bytes": 1 << 40}
        self.log, self.store = MemoryLog(), Store.open(MemoryBackend())
        self.marks: list[Any] = []
        node: Any = SimpleNamespace(log=self.log, conf_changed_at=0)
        disk: Any = SimpleNamespace(submit=self.marks.append)
        self.cut = LogCut(node, self.store, disk, Retention(**(limits | retention)), snapshots)
        self.store.set_conf_state(ConfState(voters=(1,)))

    def append(self, index: int) -> None:
        """One more entry, applied and durable, and a step."""
        self.log.append([Entry(1, index, bytes(1000))])
        self.store.set_applied(index, 1)
        self.store.commit()
        self.cut.step()

    def finish_marks(self) -> int:
        """The disk has the markers; how many there were."""
        count = len(self.marks)
        while self.marks:
            self.marks.pop(0).done()
        return count


@pytest.mark.parametrize(("entries_max", "bytes_max"), [(100, 1 << 40), (1 << 40, 100_000)])
def test_the_log_is_held_for_a_lagging_member_up_to_a_limit(monkeypatch, entries_max, bytes_max):
    monkeypatch.setattr(housekeeping, "LOG_HELD_ENTRIES_MAX", entries_max)
    monkeypatch.setattr(housekeeping, "LOG_HELD_BYTES_MAX", bytes_max)
    snapshots = Snapshots()
    cut = Cut(snapshots)
    for index in range(1, 200):
        cut.append(index)
        if snapshots.reasons:
            break
        assert not cut.marks, "it is held"
    assert 90 < index < 110
    (reason,) = snapshots.reasons
    assert "entries of" in reason
    cut.cut.step()
    assert [mark.meta.index for mark in cut.marks] == [index]
    cut.store.close()


@pytest.mark.parametrize(
    ("retention", "kept_max", "marks_max"),
    [
        # By count alone; by bytes alone: 20 entries between markers and 8 behind; the first limit counts.
        ({}, 15, 20),
        ({"snapshot_entries": 1 << 40, "snapshot_bytes": 20 * ENTRY_BYTES, "catchup_bytes": 8 * ENTRY_BYTES}, 28, 20),
        ({"snapshot_bytes": 1, "catchup_bytes": 0}, 1, 200),
        ({"catchup_entries": 1 << 40, "catchup_bytes": 8 * ENTRY_BYTES}, 18, 20),
    ],
)
def test_the_log_is_cut_by_entries_and_by_bytes(retention: dict[str, int], kept_max: int, marks_max: int) -> None:
    snapshots = Snapshots()
    snapshots.in_flight = False
    cut = Cut(snapshots, **retention)
    marks = 0
    for index in range(1, 201):
        cut.append(index)
        marks += cut.finish_marks()
        log = cut.log
        assert log.last_index() - log.first_index() < kept_max
        assert log.size_bytes == size_of(log.entries(log.first_index(), index + 1, NO_LIMIT) if kept_max > 1 else [])
    assert 200 // kept_max // 2 <= marks <= marks_max
    cut.store.close()


@pytest.mark.parametrize(
    ("name", "most"), [("DROPPED_AT_ONCE_MAX", 30), ("DROPPED_AT_ONCE_BYTES", 30 * ENTRY_BYTES - 1)]
)
def test_much_of_a_log_is_dropped_in_steps(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    monkeypatch.setattr(housekeeping, name, most)
    snapshots = Snapshots()
    cut = Cut(snapshots, catchup_entries=0)
    for index in range(1, 101):
        cut.append(index)
    snapshots.in_flight = False
    cut.cut.step()
    cut.finish_marks()
    firsts = []
    for _ in range(5):
        firsts.append(cut.log.first_index())
        cut.cut.step()
    assert firsts == [31, 61, 91, 101, 101]
    cut.store.close()


@pytest.mark.parametrize("deleted", ["", "wal"])
def test_data_deleted_under_a_member_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, deleted: str
) -> None:
    room, gone = Room(monkeypatch, tmp_path, 1 << 40, 0), str(tmp_path / deleted)

    def statvfs(path: str) -> SimpleNamespace:
        if path == gone:
            raise FileNotFoundError(2, "No such file or directory", path)
        return SimpleNamespace(f_bavail=1 << 40, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    for _ in range(3):
        room.admission.watch_disk()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{gone} was deleted under this member: its data is lost when it stops")
    assert room.put()


@pytest.mark.parametrize("bytes_max", [0, 50_000, 1 << 20, NO_LIMIT])
def test_message_cost_is_independent_of_log_length(monkeypatch: pytest.MonkeyPatch, bytes_max: int) -> None:
    """A member that is far behind is sent the log in many messages: each must not look at all the rest of it."""
    log = MemoryLog()
    entries = [Entry(1, index, bytes(index % 50)) for index in range(1, 100_001)]
    log.append(entries)
    looked_at: list[int] = []

    def counted(some: Sequence[Entry]) -> int:
        looked_at.append(len(some))
        return size_of(some)

    monkeypatch.setattr(log_module, "size_of", counted)
    for low, high in ((1, 100_001), (5_000, 100_001), (99_999, 100_001), (7, 8), (8, 8)):
        expected = limit_size(entries[low - 1 : high - 1], bytes_max)
        looked_at.clear()
        found = log.entries(low, high, bytes_max)
        assert found == expected
        if bytes_max < NO_LIMIT:
            assert sum(looked_at) <= 2 * len(found) + 4 * log_module.LOOKED_AT


def test_the_log_knows_its_size() -> None:
    log = MemoryLog()
    log.append([Entry(1, index, bytes(index)) for index in range(1, 6)])
    log.append([Entry(2, 4, b"other")])  # a new leader has 4 and 5 overwritten
    assert log.size_bytes == 1 + 2 + 3 + 5 + 4 * ENTRY_OVERHEAD_BYTES
    log.compact(2)
    log.append([Entry(2, 2, b"gone"), Entry(2, 3, b"c"), Entry(2, 4, b"d")])
    assert log.size_bytes == 2 + 2 * ENTRY_OVERHEAD_BYTES
    log.apply_snapshot(SnapshotMeta(9, 2, ConfState()))
    assert log.size_bytes == 0
