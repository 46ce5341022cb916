"""The log's interface, on real files, and on the in-memory disk where files do not matter."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from raftkv.errors import ConfigError, CorruptionError, InvariantError, StorageError
from raftkv.raft.types import ConfState, Entry, EntryType, HardState, SnapshotMeta
from raftkv.storage.wal import (
    WAL,
    WALCorruptError,
    WALExistsError,
    WALFailedError,
    WALLockedError,
    WALNotFoundError,
    WALVersionError,
    describe,
)
from raftkv.storage.wal.record import encode_frame
from raftkv.storage.wal.wal import FILL_BYTES
from tests.storage.wal.helpers import (
    DIRECTORY,
    METADATA,
    append_synced,
    create,
    entries,
    indexes,
    last_segment,
    recover,
    reopen,
)
from tests.storage.wal.simdisk import SimDisk

# -- on real files ----------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "member" / "wal")


def test_a_log_survives_close_and_open(directory: str) -> None:
    written = [Entry(1, 1, b""), Entry(1, 2, bytes(5000)), Entry(2, 3, b"cc", EntryType.CONF_CHANGE_V2)]
    with_conf = SnapshotMeta(1, 1, ConfState((1, 2**64 - 1), (3,), (4,), (5,), True))
    wal = WAL.create(directory, METADATA, segment_bytes=1 << 16)
    wal.append(HardState(2, 1, 2), written)
    wal.save_snapshot(with_conf)
    wal.close()
    wal, recovered = WAL.open(directory)
    wal.close()
    assert recovered.metadata == METADATA
    assert recovered.hard_state == HardState(2, 1, 2)
    assert recovered.entries == written[1:]
    assert recovered.snapshot == with_conf
    assert recovered.repair is None


def test_files_are_0600_in_a_directory_0700_at_their_full_size(directory: str) -> None:
    old_umask = os.umask(0)
    try:
        wal = WAL.create(directory, METADATA, segment_bytes=1 << 16)
        wal.prepare_next()
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    names = sorted(os.listdir(directory))
    assert names == ["0000000000000000-0000000000000001.wal", "lock", "next.tmp"]
    for name in names:
        status = os.stat(os.path.join(directory, name))
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert name == "lock" or (status.st_size, status.st_blocks * 512) == (1 << 16, 1 << 16)
    wal.close()
    assert sorted(os.listdir(directory)) == names[:2]


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    wal = WAL.create(str(tmp_path / "wal"), METADATA, segment_bytes=4096)
    wal.close()
    (tmp_path / "wal").chmod(0o702)
    with pytest.raises(StorageError, match="group or others may write"):
        WAL.open(str(tmp_path / "wal"))


LOCK_HOLDER = """
import sys
from raftkv.storage.wal import WAL
wal, _ = WAL.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_deleted", [False, True])
def test_two_processes_cannot_have_it_open(directory: str, is_deleted: bool) -> None:
    """Not even when an operator takes the lock file for a leftover."""
    WAL.create(directory, METADATA, segment_bytes=4096).close()
    command = [sys.executable, "-c", LOCK_HOLDER, directory]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        if is_deleted:
            os.unlink(f"{directory}/lock")
        with pytest.raises(WALLockedError, match="in use by another process"):
            WAL.open(directory)
        holder.kill()
        holder.communicate()
    WAL.open(directory)[0].close()


def test_the_same_process_cannot_have_it_open_twice(directory: str) -> None:
    wal = WAL.create(directory, METADATA, segment_bytes=4096)
    with pytest.raises(WALLockedError):
        WAL.open(directory)
    with pytest.raises(WALLockedError):
        WAL.create(directory, METADATA)
    wal.close()
    WAL.open(directory)[0].close()


def test_file_system_that_locks_no_directory_is_accepted(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rely on the lock file alone, for example on NFS."""
    lock = fcntl.flock

    def refuse(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    wal = WAL.create(directory, METADATA, segment_bytes=4096)
    with pytest.raises(WALLockedError):
        WAL.open(directory)
    wal.close()


def test_a_torn_tail_on_a_real_file_is_cut_and_kept_beside_it(directory: str) -> None:
    wal = WAL.create(directory, METADATA, segment_bytes=1 << 16)
    append_synced(wal, 1, 3)
    offset = wal._offset
    wal.append(None, entries(4, 4, data=b"y" * 3000))
    wal.close()
    path = os.path.join(directory, wal.segments[-1])
    with open(path, "r+b") as file:
        file.seek(offset + 1000)
        file.write(bytes(4000))
    wal, recovered = WAL.open(directory)
    assert indexes(recovered.entries) == [1, 2, 3]
    assert recovered.repair is not None
    assert (recovered.repair.path, recovered.repair.offset) == (path, offset)
    assert recovered.repair.cut_bytes == 1000
    assert recovered.repair.saved_as == f"{path}.broken"
    assert Path(recovered.repair.saved_as).stat().st_size == offset + 1000
    append_synced(wal, 4, 4)
    wal.close()
    wal, recovered = WAL.open(directory)
    wal.close()
    assert (indexes(recovered.entries), recovered.repair) == ([1, 2, 3, 4], None)


def test_create_and_open_errors(directory: str, tmp_path: Path) -> None:
    with pytest.raises(WALNotFoundError):
        WAL.open(directory)
    assert not WAL.exists(directory)
    WAL.create(directory, METADATA, segment_bytes=4096).close()
    assert WAL.exists(directory)
    with pytest.raises(WALExistsError):
        WAL.create(directory, METADATA)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="is not a directory"):
        WAL.create(str(tmp_path / "file"), METADATA)
    with pytest.raises(ConfigError):
        WAL.create(str(tmp_path / "tiny"), METADATA, segment_bytes=10)


# -- append, cut, release ---------------------------------------------------------------------------------------


def test_a_batch_is_one_write_and_a_sync_is_one_sync(wal: WAL, disk: SimDisk) -> None:
    disk.calls.clear()
    wal.append(HardState(1, 1, 0), entries(1, 9))
    assert disk.calls == ["write"]
    wal.sync()
    assert disk.calls == ["write", "sync_data"]
    wal.sync()
    wal.append(None, [])
    assert disk.calls == ["write", "sync_data"]


class _Writes(SimDisk):
    """Remembers where each write began and ended, and what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[int, int, bytes]] = []

    def write(self, fd: int, buffers: Sequence[bytes], offset: int) -> None:
        data = b"".join(buffers)
        self.spans.append((offset, offset + len(data), data))
        super().write(fd, buffers, offset)


def test_blocks_are_written_ahead_so_that_few_syncs_meet_a_new_one() -> None:
    """And no zero lands on a frame, none beyond the segment."""
    disk = _Writes()
    segment_bytes = 4 * FILL_BYTES
    wal = create(disk, segment_bytes=segment_bytes)
    first_end = disk.spans[-1][1]
    assert first_end > FILL_BYTES
    ends = [first_end]
    for index in range(1, 1000):
        wal.append(None, entries(index, index, data=b"x" * 500))
        start, end, data = disk.spans[-1]
        assert end <= segment_bytes
        if end > ends[-1]:  # blocks that nothing was written to before
            ends.append(end)
            written = len(data.rstrip(b"\0"))
            assert end == segment_bytes or end - start - written >= FILL_BYTES
        else:
            assert end - start < 600
    wal.close()
    assert len(wal.segments) == 2
    assert ends[-1] == segment_bytes
    assert len(ends) == 4
    wal, recovered = WAL.open(DIRECTORY, segment_bytes=segment_bytes, disk=disk)
    assert indexes(recovered.entries) == list(range(1, 1000))
    # Who opens a log does not know what was written ahead, and begins anew behind its end.
    wal.append(None, entries(1000, 1000))
    assert len(disk.spans[-1][2]) > FILL_BYTES
    wal.close()
    assert indexes(recover(disk).entries)[-1] == 1000


def test_a_sync_can_be_done_by_another(wal: WAL, disk: SimDisk) -> None:
    assert not wal.start_sync(lambda fd: True), "there is nothing to sync"
    wal.append(HardState(1, 1, 0), entries(1, 9))
    disk.calls.clear()
    assert wal.start_sync(lambda fd: True)
    wal.end_sync(lambda: None)
    wal.sync()
    assert disk.calls == [], "that sync was this one"
    wal.append(None, entries(10, 10))
    assert not wal.start_sync(lambda fd: False), "who is refused has synced it itself"
    assert disk.calls == ["write", "sync_data"]


def test_a_batch_larger_than_a_segment_gets_a_larger_segment(wal: WAL, disk: SimDisk) -> None:
    append_synced(wal, 1, 1)
    wal.append(None, [Entry(1, 2, b"z" * 50_000)])
    append_synced(wal, 3, 4)
    wal.close()
    assert wal.segments == tuple(f"{number:016x}-{first:016x}.wal" for number, first in [(0, 1), (1, 2), (2, 3)])
    assert indexes(recover(disk).entries) == [1, 2, 3, 4]


def test_the_cut_uses_the_segment_prepared_ahead(wal: WAL, disk: SimDisk) -> None:
    assert not wal.needs_next
    append_synced(wal, 1, 25)
    assert wal.needs_next
    wal.prepare_next()
    wal.prepare_next()
    assert not wal.needs_next
    disk.calls.clear()
    append_synced(wal, 26, 40)
    assert len(wal.segments) == 2
    assert "allocate" not in disk.calls
    wal.close()
    assert indexes(recover(disk).entries) == list(range(1, 41))


def test_release_deletes_the_oldest_segments_wholly_below(wal: WAL, disk: SimDisk) -> None:
    append_synced(wal, 1, 200)
    first = [int(name[17:33], 16) for name in wal.segments]
    assert len(first) > 4
    assert wal.release(first[2]) == 0, "no marker: everything may still be needed"
    wal.save_snapshot(SnapshotMeta(first[2] + 1, 1))
    assert wal.release(first[2] - 1) == 1
    assert wal.release(10**6) == 1, "never beyond the marker"
    assert [int(name[17:33], 16) for name in wal.segments] == first[2:]
    wal.close()
    recovered = recover(disk)
    assert recovered.snapshot.index == first[2] + 1
    assert indexes(recovered.entries) == list(range(first[2] + 2, 201))


def test_segments_that_wait_for_an_archive_alone_are_not_read(wal: WAL, disk: SimDisk) -> None:
    """A member started while its archive was away loaded gigabytes of entries from these segments."""
    append_synced(wal, 1, 200)
    wal.keep(0)
    wal.save_snapshot(SnapshotMeta(199, 1))
    append_synced(wal, 201, 300)
    assert wal.release(10**6) == 0
    wal.close()
    first = [int(name[17:33], 16) for name in wal.segments]
    needed = max(number for number, index in enumerate(first) if index <= 200)
    assert needed > 3
    disk.names[f"{DIRECTORY}/{wal.segments[1]}"].data[2000] ^= 1
    disk.calls.clear()
    again, recovered = reopen(disk)
    assert disk.calls.count("read") == len(first) - needed
    assert recovered.snapshot == SnapshotMeta(199, 1)
    assert indexes(recovered.entries) == list(range(200, 301))
    assert recovered.hard_state == HardState(1, 1, 299)
    assert again.segments == wal.segments, "they are there still"
    again.release(10**6)
    assert again.segments == wal.segments[needed:], "the others are no longer kept"
    again.close()
    assert indexes(recover(disk).entries) == list(range(200, 301))


def test_each_segment_is_readable_alone(wal: WAL, disk: SimDisk) -> None:
    append_synced(wal, 1, 100)
    wal.save_snapshot(SnapshotMeta(99, 1, ConfState((1, 2, 3))))
    append_synced(wal, 101, 140)
    wal.release(100)
    wal.close()
    recovered = recover(disk)
    assert recovered.snapshot == SnapshotMeta(99, 1, ConfState((1, 2, 3)))
    assert recovered.hard_state == HardState(1, 1, 139)
    assert indexes(recovered.entries) == list(range(100, 141))


def test_entries_after_earlier_marker_are_readable(wal: WAL, disk: SimDisk) -> None:
    append_synced(wal, 1, 10)
    wal.save_snapshot(SnapshotMeta(4, 1))
    wal.save_snapshot(SnapshotMeta(8, 1))
    wal.close()
    for snapshot_index, expected in [(None, [9, 10]), (8, [9, 10]), (4, [5, 6, 7, 8, 9, 10]), (0, [*range(1, 11)])]:
        wal, recovered = reopen(disk, snapshot_index=snapshot_index)
        wal.close()
        assert indexes(recovered.entries) == expected
        assert [meta.index for meta in recovered.markers] == [4, 8]
    with pytest.raises(WALCorruptError, match="no snapshot marker 5"):
        reopen(disk, snapshot_index=5)


@pytest.mark.parametrize(
    ("hard_state", "batch", "reason"),
    [
        (None, entries(7, 7), "do not follow entry 5"),
        (None, [Entry(1, 6), Entry(1, 8)], "do not follow"),
        (None, entries(3, 3), "overwrites what is committed"),
        (HardState(1, 1, 7), entries(6, 6), "beyond the last entry 6"),
        (HardState(0, 1, 4), [], "follows"),
        (HardState(1, 1, 3), [], "follows"),
    ],
)
def test_a_batch_that_could_not_be_opened_again_is_not_written(wal, disk, hard_state, batch, reason):
    append_synced(wal, 1, 5)
    before = disk.contents()
    with pytest.raises(InvariantError, match=reason):
        wal.append(hard_state, batch)
    assert disk.contents() == before
    append_synced(wal, 6, 6)
    wal.save_snapshot(SnapshotMeta(4, 1))
    with pytest.raises(InvariantError, match="marker 2 follows marker 4"):
        wal.save_snapshot(SnapshotMeta(2, 1))


def test_a_commit_index_may_come_with_the_overwriting_entries_it_commits(wal: WAL, disk: SimDisk) -> None:
    append_synced(wal, 1, 5)
    wal.append(HardState(2, 1, 6), entries(5, 7, term=2))
    wal.close()
    assert [(entry.term, entry.index) for entry in recover(disk).entries[-3:]] == [(2, 5), (2, 6), (2, 7)]


def test_open_syncs_bytes_of_a_killed_process_before_use(wal: WAL, disk: SimDisk) -> None:
    wal.append(None, entries(1, 1))
    disk.kill()
    disk.calls.clear()
    reopen(disk)
    assert "sync_data" in disk.calls
    assert all(inode.durable == bytes(inode.data) for inode in disk.names.values())


# -- refusals ---------------------------------------------------------------------------------------------------


def several_segments(disk: SimDisk) -> list[str]:
    wal = create(disk)
    append_synced(wal, 1, 120)
    wal.close()
    paths = sorted(path for path in disk.names if path.endswith(".wal"))
    assert len(paths) > 2
    return paths


def test_a_missing_segment_in_the_middle_is_refused(disk: SimDisk) -> None:
    paths = several_segments(disk)
    del disk.names[paths[1]]
    with pytest.raises(WALCorruptError, match="is missing") as caught:
        recover(disk)
    assert (caught.value.path, caught.value.offset) == (paths[2], 0)


def test_a_renamed_segment_is_refused(disk: SimDisk) -> None:
    paths = several_segments(disk)
    disk.names[paths[-1][:-5] + "0.wal"] = disk.names.pop(paths[-1])
    with pytest.raises(WALCorruptError, match="its head says that it is"):
        recover(disk)


def test_a_segment_of_another_log_is_refused(disk: SimDisk) -> None:
    paths = several_segments(disk)
    other = SimDisk()
    wal = WAL.create(DIRECTORY, b"another member", segment_bytes=4096, disk=other)
    append_synced(wal, 1, 120)
    wal.close()
    disk.names[paths[1]] = other.names[paths[1]] if paths[1] in other.names else disk.names[paths[0]]
    with pytest.raises(WALCorruptError):
        recover(disk)


def test_different_metadata_in_a_chained_segment_are_refused(wal: WAL, disk: SimDisk) -> None:
    append_synced(wal, 1, 5)
    wal._metadata = b"someone else"
    append_synced(wal, 6, 60)
    wal.close()
    with pytest.raises(WALCorruptError, match="metadata differ"):
        recover(disk)


def test_frames_lost_from_the_end_of_an_earlier_segment_are_noticed_by_the_chain(disk: SimDisk) -> None:
    paths = several_segments(disk)
    data = disk.names[paths[0]].data
    last_magic = data.rfind(b"\xa7rkW")
    data[last_magic:] = bytes(len(data) - last_magic)
    with pytest.raises(WALCorruptError, match="goes on from other contents") as caught:
        recover(disk)
    assert (caught.value.path, caught.value.offset) == (paths[0], last_magic)


def test_a_torn_tail_in_an_earlier_segment_is_damage(disk: SimDisk) -> None:
    paths = several_segments(disk)
    data = disk.names[paths[0]].data
    data[data.rfind(b"\xa7rkW") + 60 :] = b""
    data.extend(bytes(4096 - len(data)))
    with pytest.raises(WALCorruptError, match="stops before its end") as caught:
        recover(disk)
    assert caught.value.path == paths[0]


def test_a_whole_frame_that_does_not_follow_the_one_before_it_is_refused(wal: WAL, disk: SimDisk) -> None:
    append_synced(wal, 1, 3)
    offset = wal._offset
    wal._crc ^= 1
    append_synced(wal, 4, 5)
    wal.close()
    with pytest.raises(WALCorruptError, match="does not follow the one before it") as caught:
        recover(disk)
    assert caught.value.offset == offset


def test_another_format_version_is_refused_by_name(disk: SimDisk) -> None:
    several_segments(disk)
    path = last_segment(disk)
    data = disk.names[path].data
    body = bytearray(data[32 : 32 + int.from_bytes(data[4:8], "little")])
    body[8:12] = bytes((2, 0, 7, 0))  # format 2, which raftkv 0.7 reads
    previous = int.from_bytes(data[16:20], "little")
    frame = b"".join(encode_frame(bytes(body), 0, 0, previous, 0)[0])
    data[: len(frame)] = frame
    with pytest.raises(
        WALVersionError, match=r"has format 2, and raftkv .* reads format 1: run raftkv 0\.7 or later on"
    ):
        recover(disk)


def test_an_index_with_a_right_checksum_but_a_gap_is_refused(wal: WAL, disk: SimDisk) -> None:
    append_synced(wal, 1, 3)
    wal.last_index = 2**63
    offset = wal._offset
    wal.append(None, [Entry(1, 2**63 + 1)])
    wal.close()
    with pytest.raises(WALCorruptError, match="follows entry 3") as caught:
        recover(disk)
    assert caught.value.offset == offset + 32
    assert isinstance(caught.value, CorruptionError)
    assert str(caught.value).startswith(f"write-ahead log {last_segment(disk)} is damaged at offset {offset + 32}: ")


def test_a_log_shorter_than_its_commit_index_is_refused_and_left_as_it_is(wal: WAL, disk: SimDisk) -> None:
    append_synced(wal, 1, 3)
    wal.last_index = 9  # as if entries 4 to 9 had been there, and the device had lost them
    wal.append(HardState(1, 1, 9), [])
    offset = wal._offset
    wal.append(None, entries(10, 10, data=b"y" * 1200))
    wal.close()
    disk.names[last_segment(disk)].data[offset + 600 :] = bytes(4096 - offset - 600)
    before = disk.contents()
    with pytest.raises(WALCorruptError, match="but entry 9 was committed"):
        recover(disk)
    assert disk.contents() == before


def test_a_closed_log_refuses(wal: WAL) -> None:
    wal.close()
    wal.close()
    for use in (lambda: wal.append(HardState(1), []), wal.sync, wal.prepare_next, lambda: wal.release(1)):
        with pytest.raises(WALFailedError, match="closed"):
            use()


# -- the text form ----------------------------------------------------------------------------------------------


def test_describe_has_a_line_for_every_record(wal: WAL, disk: SimDisk) -> None:
    wal.append(HardState(1, 2, 1), entries(1, 2))
    wal.save_snapshot(SnapshotMeta(1, 1, ConfState((10, 11))))
    wal.close()
    text = "\n".join(describe(DIRECTORY, disk))
    assert [line.split(maxsplit=1)[-1] for line in text.splitlines() if "crc" not in line] == [
        "0000000000000000-0000000000000001.wal: 4096 bytes",
        "head: sequence 0, first index 1, version 1",
        f"metadata: {METADATA.hex()}",
        "hard state: term 0, vote 0, commit 0",
        "snapshot 0/0 voters none",
        "entry 1/1 NORMAL 21 bytes",
        "entry 1/2 NORMAL 21 bytes",
        "hard state: term 1, vote 2, commit 1",
        "snapshot 1/1 voters a,b",
        "end: nothing was written from here on",
    ]


def test_describe_says_where_a_log_stops_being_readable(wal: WAL, disk: SimDisk) -> None:
    append_synced(wal, 1, 3)
    wal.close()
    disk.names[last_segment(disk)].data[300] ^= 1
    assert "damaged" in list(describe(DIRECTORY, disk))[-1]
    disk.names[last_segment(disk)].data[0] ^= 1
    assert list(describe(DIRECTORY, disk)) == [
        f"damaged: write-ahead log {last_segment(disk)} is damaged at offset 0: the head of the segment is damaged"
    ]
