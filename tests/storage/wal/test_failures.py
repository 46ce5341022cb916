"""Disk failures: a full disk loses nothing, any other failure ends the use of the log, and a restart works."""

from __future__ import annotations

import errno
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raftkv.errors import SpaceError
from raftkv.raft.types import HardState, SnapshotMeta
from raftkv.storage import failpoints
from raftkv.storage.failpoints import FailpointPanic
from raftkv.storage.wal import WAL, WALFailedError, WALSpaceError
from tests.long import long_except
from tests.storage.wal.helpers import DIRECTORY, append_synced, create, entries, indexes, recover, reopen
from tests.storage.wal.simdisk import SimDisk


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm_all()


def fill_segment(wal: WAL) -> int:
    """Append until the next entry needs a new segment; return that entry's index."""
    while wal._offset + 200 < wal._size:
        append_synced(wal, wal.last_index + 1, wal.last_index + 1)
    return wal.last_index + 1


# -- no room ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_apart_and_the_append_can_be_tried_again(wal: WAL, disk: SimDisk, number: int) -> None:
    index = fill_segment(wal)
    big = entries(index, index, data=b"z" * 300)
    disk.fail("allocate", number)
    before = disk.contents()
    for _attempt in range(2):
        with pytest.raises(WALSpaceError, match="no room for 4096 bytes") as caught:
            wal.append(HardState(1, 1, index - 1), big)
        assert isinstance(caught.value, SpaceError)
    assert disk.contents() == before, "not a byte of the batch, and no leftover file"
    assert wal.last_index == index - 1
    disk.heal()
    wal.append(HardState(1, 1, index - 1), big)
    wal.close()
    assert indexes(recover(disk).entries) == list(range(1, index + 1))


def test_a_full_disk_is_met_by_prepare_next_while_there_is_still_room(wal: WAL, disk: SimDisk) -> None:
    append_synced(wal, 1, 25)
    assert wal.needs_next
    disk.fail("allocate", errno.ENOSPC)
    with pytest.raises(WALSpaceError):
        wal.prepare_next()
    append_synced(wal, 26, 27)
    assert len(wal.segments) == 1
    wal.close()
    assert indexes(recover(disk).entries) == list(range(1, 28))


def test_a_disk_without_room_for_one_more_name_is_a_full_disk(wal: WAL, disk: SimDisk) -> None:
    """All inodes are used, or the quota of files."""
    append_synced(wal, 1, 25)
    disk.fail("create", errno.ENOSPC)
    with pytest.raises(WALSpaceError, match="no room for one more file"):
        wal.prepare_next()
    append_synced(wal, 26, 27)
    disk.heal()
    wal.prepare_next()
    append_synced(wal, 28, 60)
    wal.close()
    assert indexes(recover(disk).entries) == list(range(1, 61))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_lack_of_descriptors_is_waited_out_while_there_is_still_room(wal: WAL, disk: SimDisk, number: int) -> None:
    """Any program can use up all descriptors for a moment; the log needs none before its segment is full."""
    append_synced(wal, 1, 25)
    disk.fail("create", number)
    wal.prepare_next()
    assert wal.needs_next
    append_synced(wal, 26, 27)
    disk.heal()
    wal.prepare_next()
    assert not wal.needs_next
    append_synced(wal, 28, 60)
    wal.close()
    assert indexes(recover(disk).entries) == list(range(1, 61))


@pytest.mark.parametrize("operation", ["allocate", "create"])
def test_a_full_disk_at_create_leaves_nothing_behind(disk: SimDisk, operation: str) -> None:
    disk.fail(operation, errno.ENOSPC)
    with pytest.raises(WALSpaceError):
        create(disk)
    assert not disk.names
    assert not disk.locks
    disk.heal()
    create(disk).close()


@pytest.mark.parametrize("operation", ["create", "write"])
def test_a_full_disk_keeps_no_torn_log_from_being_opened(wal, disk, monkeypatch, operation):
    """The copy of what is cut off takes as much room as a segment; these bytes were never reported as durable."""
    append_synced(wal, 1, 3)
    wal.append(None, entries(4, 4, data=b"y" * 1000))
    disk.kill()
    (path,) = [name for name in disk.names if name.endswith(".wal")]
    disk.names[path].data[wal._offset - 600 :] = bytes(len(disk.names[path].data) - wal._offset + 600)
    called = getattr(disk, operation)

    def full(*arguments: Any) -> Any:
        is_copy = arguments[0] if operation == "create" else disk.open_files[arguments[0]] is not disk.names[path]
        if is_copy:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return called(*arguments)

    monkeypatch.setattr(disk, operation, full)
    again, recovered = reopen(disk)
    assert indexes(recovered.entries) == [1, 2, 3]
    assert recovered.repair is not None
    assert (recovered.repair.path, recovered.repair.saved_as) == (path, "")
    assert re.fullmatch(
        rf"cut \d+ bytes at offset \d+ of {path} \(.+\): the disk had no room for a copy of them", str(recovered.repair)
    )
    assert sorted(disk.names) == [path], "not half a copy either"
    append_synced(again, 4, 6)
    again.close()
    assert indexes(recover(disk).entries) == [1, 2, 3, 4, 5, 6]


WRITER_UNDER_A_LIMIT = """
import resource, signal, sys
from raftkv.raft.types import Entry
from raftkv.storage.wal import WAL, WALSpaceError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
wal = WAL.create(sys.argv[1], b"m", segment_bytes=4096)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
wal.append(None, [Entry(1, 1, b"a" * 1000)])
wal.sync()
try:
    wal.append(None, [Entry(1, 2, b"b" * 20000)])
except WALSpaceError as error:
    print(error)
"""


def test_the_limits_of_the_real_system_count_as_no_room(tmp_path: Path) -> None:
    directory = str(tmp_path / "wal")
    command = [sys.executable, "-c", WRITER_UNDER_A_LIMIT, directory]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("no room for ")
    wal, recovered = WAL.open(directory)
    wal.close()
    assert indexes(recovered.entries) == [1]
    assert sorted(os.listdir(directory)) == ["0000000000000000-0000000000000001.wal", "lock"]


# -- anything else ----------------------------------------------------------------------------------------------


def uses(wal: WAL) -> list[Callable[[], object]]:
    return [
        lambda: wal.append(HardState(9, 9, 0), []),
        wal.sync,
        lambda: wal.start_sync(lambda fd: True),
        lambda: wal.save_snapshot(SnapshotMeta(1, 1)),
        lambda: wal.release(1),
        wal.prepare_next,
    ]


@pytest.mark.parametrize("operation", ["write", "sync_data"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_after_a_failed_write_or_sync_nothing_is_ever_tried_again(wal, disk, operation, number):
    append_synced(wal, 1, 3)
    disk.fail(operation, number)
    with pytest.raises(WALFailedError, match=os.strerror(number)):
        append_synced(wal, 4, 4)
    disk.heal()  # the disk is well again; the log must not believe it
    disk.calls.clear()
    for use in uses(wal):
        with pytest.raises(WALFailedError, match=f"not usable: .* failed: .*{os.strerror(number)}"):
            use()
    assert not {"write", "sync_data"} & set(disk.calls)
    wal.close()
    assert not {"write", "sync_data"} & set(disk.calls)
    recovered = recover(disk)
    assert indexes(recovered.entries)[:3] == [1, 2, 3]
    assert (recovered.repair is not None) == (operation == "write")


def test_after_a_sync_that_was_started_and_failed_nothing_is_ever_tried_again(disk: SimDisk) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    wal = create(disk)
    append_synced(wal, 1, 3)
    wal.append(None, entries(4, 4))
    assert wal.start_sync(lambda fd: True)
    with pytest.raises(WALFailedError, match=os.strerror(errno.EIO)):
        wal.end_sync(fail)
    disk.calls.clear()
    for use in uses(wal):
        with pytest.raises(WALFailedError, match=f"not usable: sync failed: .*{os.strerror(errno.EIO)}"):
            use()
    wal.close()
    assert not {"write", "sync_data"} & set(disk.calls)


@pytest.mark.parametrize("operation", ["create", "write", "sync_data", "rename", "sync_directory"])
def test_a_failure_in_a_cut_ends_the_use_and_loses_nothing(disk: SimDisk, operation: str) -> None:
    for after in range(3):
        disk = SimDisk()
        wal = create(disk)
        index = fill_segment(wal)
        disk.fail(operation, errno.EIO, after)
        try:
            append_synced(wal, index, index, data=b"q" * 300)
        except WALFailedError:
            with pytest.raises(WALFailedError):
                wal.sync()
        disk.heal()
        wal.close()
        wal, recovered = reopen(disk)
        assert indexes(recovered.entries)[: index - 1] == list(range(1, index))
        append_synced(wal, wal.last_index + 1, wal.last_index + 1)
        wal.close()


@pytest.mark.parametrize("operation", ["remove", "sync_directory"])
def test_a_removal_that_fails_is_made_by_the_next_release(wal: WAL, disk: SimDisk, operation: str) -> None:
    append_synced(wal, 1, 200)
    wal.save_snapshot(SnapshotMeta(190, 1))
    disk.fail(operation, errno.EIO, 1)
    wal.release(190)
    left = len(wal.segments)
    disk.heal()
    assert wal.release(190) == left - len(wal.segments) > 0
    append_synced(wal, 201, 202)
    wal.close()
    assert indexes(recover(disk).entries) == list(range(191, 203))


@pytest.mark.parametrize("operation", ["open", "read", "lock", "list_names", "sync_data", "sync_directory"])
def test_a_failure_to_open_is_one_error_and_gives_the_lock_back(wal: WAL, disk: SimDisk, operation: str) -> None:
    append_synced(wal, 1, 3)
    wal.close()
    disk.fail(operation, errno.EIO)
    with pytest.raises(WALFailedError, match=f"cannot open the write-ahead log in {DIRECTORY}"):
        reopen(disk)
    disk.heal()
    assert not disk.locks
    assert not disk.open_files
    assert indexes(recover(disk).entries) == [1, 2, 3]


def scenario(disk: SimDisk, synced: list[int]) -> None:
    """A life of a log with cuts, a snapshot and a release; ``synced`` gets each index that may be acknowledged."""
    wal = create(disk, segment_bytes=1024)
    for index in range(1, 31):
        wal.append(HardState(1, 1, index - 1), entries(index, index, data=b"d" * 90))
        wal.sync()
        synced.append(index)
        if index == 20:
            wal.save_snapshot(SnapshotMeta(18, 1))
            wal.release(18)
        if wal.needs_next:
            wal.prepare_next()
    wal.close()


def check_recovery(disk: SimDisk, synced: list[int]) -> None:
    if not WAL.exists(DIRECTORY, disk):
        assert not synced
        create(disk).close()
        return
    wal, recovered = reopen(disk)
    got = indexes(recovered.entries)
    assert got == list(range(recovered.snapshot.index + 1, wal.last_index + 1))
    assert wal.last_index >= (synced[-1] if synced else 0)
    append_synced(wal, wal.last_index + 1, wal.last_index + 2)
    wal.close()
    assert indexes(recover(disk).entries) == list(range(recovered.snapshot.index + 1, wal.last_index + 1))


def _is_of_a_removal(disk: SimDisk, after: int) -> bool:
    """Whether a sync of the directory makes a removal durable."""
    syncs = [at for at, call in enumerate(disk.calls) if call == "sync_directory"]
    return disk.calls[syncs[after] - 1] == "remove"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize(
    "operation", ["create", "allocate", "write", "sync_data", "rename", "remove", "sync_directory"]
)
def test_a_failure_of_any_call_acknowledges_nothing_more_and_the_log_opens_again(operation: str, number: int) -> None:
    """G15 of the reliability bar, in one process: every call of every kind fails once, and everything after it."""
    sound = SimDisk()
    scenario(sound, [])
    for after in range(sound.calls.count(operation)):
        disk = SimDisk()
        disk.fail(operation, number, after)
        synced: list[int] = []
        try:
            scenario(disk, synced)
        except (WALFailedError, WALSpaceError):
            pass
        else:  # nothing depends on the removal of a segment, or of an allocated file at the end
            assert operation == "remove" or (operation == "sync_directory" and _is_of_a_removal(sound, after))
        disk.heal()
        disk.kill()
        check_recovery(disk, synced)


WAL_SITES = [name for name in failpoints.SITES if name.startswith("wal") and "Repair" not in name]


@pytest.mark.parametrize("site", WAL_SITES)
def test_a_crash_at_any_failpoint_loses_nothing_that_was_synced(site: str) -> None:
    hits = 0
    for after in range(0, 200, 3):
        disk = SimDisk()
        failpoints.arm(site, f"after-{after} raise")
        synced: list[int] = []
        try:
            scenario(disk, synced)
            break
        except FailpointPanic:
            hits += 1
        finally:
            failpoints.disarm_all()
        disk.kill()
        check_recovery(disk, synced)
    assert hits > 0


@pytest.mark.parametrize("site", ["walBeforeRepair", "walAfterRepairCopy", "walAfterRepair"])
def test_a_crash_in_a_repair_is_repaired_again(wal: WAL, disk: SimDisk, site: str) -> None:
    append_synced(wal, 1, 3)
    disk.fail("write", errno.EIO)
    with pytest.raises(WALFailedError):
        append_synced(wal, 4, 4, data=b"y" * 1500)
    disk.heal()
    disk.kill()
    failpoints.arm(site, "raise")
    with pytest.raises(FailpointPanic):
        reopen(disk)
    failpoints.disarm_all()
    disk.kill()
    assert indexes(recover(disk).entries) == [1, 2, 3]
    broken = [name for name in disk.names if ".broken" in name]
    assert len(broken) == (2 if site == "walAfterRepairCopy" else 1)
    assert recover(disk).repair is None


@pytest.mark.parametrize("seed", long_except(range(20), range(6)))
def test_open_rewrites_pages_left_by_a_failed_sync(seed: int) -> None:
    """The kernel treats pages that it failed to write as written: no later sync would write them."""
    disk, rng = SimDisk(), random.Random(seed)
    wal = create(disk)
    append_synced(wal, 1, rng.randrange(1, 4), data=b"d" * rng.choice((20, 900)))
    wal.append(None, entries(wal.last_index + 1, wal.last_index + rng.randrange(1, 4), data=b"e" * 700))
    disk.fail("sync_data", errno.EIO)
    with pytest.raises(WALFailedError):
        wal.sync()
    disk.heal()
    disk.kill()
    # The member starts again, and says that it has these entries.
    wal, recovered = reopen(disk)
    promised = indexes(recovered.entries)
    disk.power_cut(rng)
    assert indexes(recover(disk).entries) == promised
