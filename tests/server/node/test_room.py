"""Room, on the disk and in the log: a copy for one member that lags never takes what all others need."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv import errors
from raftkv.apply.request import Kind
from raftkv.pb import rpc_pb2
from raftkv.raft.memory_log import MemoryLog
from raftkv.raft.types import ConfState, Entry
from raftkv.server.node import housekeeping
from raftkv.server.node.admission import DISK_RESERVE_BYTES, Admission
from raftkv.server.node.housekeeping import Housekeeping
from raftkv.storage.backend.memory import MemoryBackend
from raftkv.storage.mvcc import Store

PUT = rpc_pb2.PutRequest(key=b"k", value=b"v")


class Room:
    """A member's admission on a disk of which so much is free, with so many copies of databases on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_bytes: int, copies: int) -> None:
        self.copies = copies
        self.alarms = 0
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free_bytes, f_frsize=1))
        node: Any = SimpleNamespace(leader=1)
        applier: Any = SimpleNamespace(alarms=SimpleNamespace(no_space=False))
        self.admission = Admission(
            node,
            applier,
            max_request_bytes=1 << 20,
            quota_bytes=None,
            size_bytes=lambda: 0,
            data_dir=str(tmp_path),
            raise_no_space=self._raise,
            make_room=lambda: self.copies > 0,
        )

    def _raise(self) -> None:
        self.alarms += 1

    def put(self) -> bool:
        """Whether a write is taken."""
        call: Any = SimpleNamespace(headers=())
        try:
            self.admission.check_write(call, Kind.PUT, PUT.SerializeToString(), PUT)
        except errors.NoSpaceError:
            return False
        return True


@pytest.mark.parametrize(
    ("free_bytes", "copies", "taken"),
    [
        (2 * DISK_RESERVE_BYTES, 0, True),
        (DISK_RESERVE_BYTES - 1, 0, False),
        (DISK_RESERVE_BYTES - 1, 1, True),
        (DISK_RESERVE_BYTES // 2 - 1, 1, False),
    ],
)
def test_a_copy_is_given_up_before_an_alarm_is_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_bytes: int, copies: int, taken: bool
) -> None:
    room = Room(monkeypatch, tmp_path, free_bytes, copies)
    assert room.put() == taken
    assert room.alarms == (not taken)
    assert room.admission.finds_no_room() == (not taken)


class Snapshots:
    """Snapshots on their way, until given up."""

    def __init__(self) -> None:
        self.in_flight = True
        self.reasons: list[str] = []

    def give_up(self, reason: str) -> bool:
        self.reasons.append(reason)
        self.in_flight = False
        return True


@pytest.mark.parametrize(("entries_max", "bytes_max"), [(100, 1 << 40), (1 << 40, 100_000)])
def test_the_log_is_held_for_a_lagging_member_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, entries_max: int, bytes_max: int
) -> None:
    monkeypatch.setattr(housekeeping, "LOG_HELD_ENTRIES_MAX", entries_max)
    monkeypatch.setattr(housekeeping, "LOG_HELD_BYTES_MAX", bytes_max)
    log, store, snapshots = MemoryLog(), Store.open(MemoryBackend()), Snapshots()
    node: Any = SimpleNamespace(log=log, conf_changed_at=0)
    marks: list[Any] = []
    anything: Any = None
    disk: Any = SimpleNamespace(submit=marks.append)
    keeper = Housekeeping(
        node,
        store,
        anything,
        disk,
        anything,
        commit_interval_s=1.0,
        compaction_pause_s=1.0,
        compaction_keys=1,
        snapshot_entries=10,
        catchup_entries=5,
        snapshots=snapshots,
        on_no_space=lambda: None,
        auto_compaction=None,
    )
    store.set_conf_state(ConfState(voters=(1,)))
    for index in range(1, 200):
        log.append([Entry(1, index, bytes(1000))])
        store.set_applied(index, 1)
        store.commit()
        keeper._cut_log()
        if snapshots.reasons:
            break
        assert not marks, "it is held"
    assert 90 < index < 110
    (reason,) = snapshots.reasons
    assert "entries of" in reason
    keeper._cut_log()
    assert [mark.meta.index for mark in marks] == [index]
    store.close()
