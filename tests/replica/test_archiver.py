"""The archive of a log: every closed segment is archived before its deletion, after any failure, without delays."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from raftkv.config import ServerConfig
from raftkv.errors import ConfigError, StorageError
from raftkv.raft.types import ConfState, Entry, HardState, SnapshotMeta
from raftkv.replica import archiver as module
from raftkv.replica.archiver import Archiver, Store, run_command, store_by, store_in
from raftkv.replica.node.disk import Disk
from raftkv.storage.wal import WAL
from raftkv.storage.wal import archive as archiving
from raftkv.storage.wal.archive import PROGRESS_NAME, ArchiveDirectory, Mark, Progress, copy_sparse
from tests.rpc.loop import until

SEGMENT_BYTES = 4096


class Log:
    """A log, what is applied of it, and its archiver."""

    def __init__(self, path: Path, store: Store, *, timeout_s: float = 0.0, held_bytes: int = 1 << 30) -> None:
        directory = str(path / "wal")
        if WAL.exists(directory):
            self.wal, recovered = WAL.open(directory, segment_bytes=SEGMENT_BYTES)
            self.applied_index = recovered.hard_state.commit
        else:
            self.wal = WAL.create(directory, b"", segment_bytes=SEGMENT_BYTES)
            self.applied_index = 0
        self.applied_term, self.failed = 1, []
        self.disk = Disk(self.wal, asyncio.get_running_loop(), self.failed.append, lambda seconds: None)
        self.archiver = Archiver(self.wal, self.disk, self, store, timeout_s=timeout_s, held_bytes_max=held_bytes)

    @property
    def revision(self) -> int:
        return self.applied_index + 1

    def write(self, entries: int) -> None:
        for index in range(self.applied_index + 1, self.applied_index + 1 + entries):
            self.wal.append(HardState(1, 1, index), [Entry(1, index, b"x" * 200)])
            self.wal.sync()
        self.applied_index += entries

    def release(self) -> None:
        self.wal.save_snapshot(SnapshotMeta(self.applied_index, 1, ConfState((1,))))
        self.wal.release(self.applied_index)

    def close(self) -> None:
        self.disk.close()
        self.wal.close()


def metric(archiver: Archiver, name: str) -> float:
    return next(sample.value for family in archiver.collect() for sample in family.samples if sample.name == name)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BEAT_S", "RETRY_FIRST_S", "RETRY_LAST_S"):
        monkeypatch.setattr(module, name, 0.002)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()} if path.exists() else set()


async def test_closed_segments_are_archived_and_only_then_deleted(tmp_path: Path) -> None:
    log = Log(tmp_path, store_in(ArchiveDirectory(tmp_path / "archive")))
    log.write(40)
    before = {name: (tmp_path / "wal" / name).read_bytes() for name in log.wal.segments[:-1]}
    log.release()
    assert set(before) <= set(log.wal.segments), "a segment went before it was archived"
    task = asyncio.create_task(log.archiver.run())
    await until(lambda: set(before) <= names(tmp_path / "archive"))
    await until(lambda: metric(log.archiver, "raftkv_wal_archive_waiting") == 0)
    log.release()
    assert not set(before) & set(log.wal.segments)
    assert {name: (tmp_path / "archive" / name).read_bytes() for name in before} == before
    task.cancel()
    log.close()


def test_files_are_private_and_zeros_take_no_room(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"a" * 100 + bytes(8 << 20) + b"b" * 100 + bytes(4 << 20))
    copy_sparse(source, tmp_path / "copy")
    made = (tmp_path / "copy").stat()
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert (stat.S_IMODE(made.st_mode), made.st_blocks * 512 <= 4 << 20) == (0o600, True)


def test_a_file_that_another_user_has_made_beside_is_not_written_to(tmp_path: Path) -> None:
    """In a shared archive it may be open to its maker, who would read the log of the cluster there."""
    source, archive = tmp_path / "0000000000000000-0000000000000001.wal", tmp_path / "archive"
    source.write_bytes(b"secret")
    archive.mkdir(0o700)
    planted = archive / f"{source.name}.tmp"
    planted.touch(0o666)
    with planted.open("rb") as reader:
        ArchiveDirectory(archive).store(source)
        assert reader.read() == b""
    stored = archive / source.name
    assert (stored.read_bytes(), stat.S_IMODE(stored.stat().st_mode)) == (b"secret", 0o600)


def test_segment_cut_by_a_full_disk_is_not_archived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last write of a segment was cut short, as of a disk that fills up: zeros stood for its end in the archive."""
    source, archive, room = tmp_path / "0000000000000000-0000000000000001.wal", tmp_path / "archive", 1000

    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            left = room - self.tell()
            if left <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(memoryview(data)[:left])

    def opened(descriptor: int, mode: str, buffering: int = -1) -> io.RawIOBase | io.BufferedWriter:
        raw = Full(descriptor, mode)
        return raw if buffering == 0 else io.BufferedWriter(raw)

    source.write_bytes(b"a" * 1500 + bytes(4 << 20))
    monkeypatch.setattr(archiving, "open", opened, raising=False)
    with pytest.raises(StorageError, match=f"^cannot archive {source.name} in {archive}: No space left on device$"):
        ArchiveDirectory(archive).store(source)
    assert source.name not in names(archive)
    room = 2 << 20
    ArchiveDirectory(archive).store(source)
    assert (archive / source.name).read_bytes() == source.read_bytes()


def test_a_failing_archive_is_retried_and_delays_no_call(tmp_path: Path, caplog) -> None:
    async def work() -> None:
        archive, failures = ArchiveDirectory(tmp_path / "archive"), []

        async def store(path: Path) -> None:
            if len(failures) < 5:
                failures.append(path)
                raise StorageError("the archive is away")
            archive.store(path)

        log = Log(tmp_path, store)
        task = asyncio.create_task(log.archiver.run())
        log.write(30)
        await until(lambda: metric(log.archiver, "raftkv_wal_archive_failures_total") >= 5)
        log.write(10)
        await until(lambda: set(log.wal.segments[:-1]) <= names(tmp_path / "archive"))
        task.cancel()
        log.close()

    with caplog.at_level(logging.INFO):
        run(work)
    assert "the archive is away; next attempt in 0 s" in caplog.text
    assert "archiving works again" in caplog.text


async def test_beyond_the_budget_the_oldest_go_and_the_gap_is_told(tmp_path: Path, caplog) -> None:
    archive, broken = ArchiveDirectory(tmp_path / "archive"), True

    async def store(path: Path) -> None:
        if broken:
            raise StorageError("the archive is away")
        archive.store(path)

    log = Log(tmp_path, store, held_bytes=2 * SEGMENT_BYTES)
    task = asyncio.create_task(log.archiver.run())
    log.write(20)
    await until(lambda: metric(log.archiver, "raftkv_wal_archive_failures_total") >= 1)
    log.write(100)
    oldest = log.wal.segments[0]

    def dropped() -> bool:
        log.release()
        return oldest not in log.wal.segments

    await until(dropped)
    assert len(log.wal.segments) >= 3, "what the budget allows is still there"
    assert metric(log.archiver, "raftkv_wal_archive_gaps_total") == 0
    broken = False
    await until(lambda: metric(log.archiver, "raftkv_wal_archive_waiting") == 0)
    assert metric(log.archiver, "raftkv_wal_archive_gaps_total") == 1
    task.cancel()
    log.close()
    assert "the log archive has a gap" in caplog.text


async def test_the_open_segment_is_closed_after_its_time(tmp_path: Path) -> None:
    log = Log(tmp_path, store_in(ArchiveDirectory(tmp_path / "archive")), timeout_s=0.01)
    task = asyncio.create_task(log.archiver.run())
    await until(lambda: log.archiver._marked_index == 0)
    log.write(1)
    first = log.wal.segments[0]
    await until(lambda: first in names(tmp_path / "archive"))
    assert len(log.wal.segments) == 2
    await asyncio.sleep(0.05)  # five times the timeout: an idle log is not cut
    assert len(log.wal.segments) == 2
    task.cancel()
    assert log.failed == []
    log.close()


async def test_a_member_that_stops_archives_its_open_segment(tmp_path: Path) -> None:
    log = Log(tmp_path, store_in(ArchiveDirectory(tmp_path / "archive")))
    log.write(3)
    (name,) = log.wal.segments
    log.disk.close()
    await log.archiver.finish()
    assert names(tmp_path / "archive") == {name, f"{name}.marks"}
    last = (tmp_path / "archive" / f"{name}.marks").read_text().splitlines(keepends=True)[-1]
    assert (Mark.parse(last).index, Mark.parse(last).revision) == (3, 4)
    log.wal.close()


async def test_a_stop_does_not_wait_for_an_archive_that_hangs(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "LAST_SEGMENT_S", 0.02)
    log = Log(tmp_path, store_by("exec sleep 600"))
    log.write(3)
    log.disk.close()
    await log.archiver.finish()
    log.wal.close()
    assert "stopped before the last segments were archived, the next start archives them" in caplog.text


def test_restart_continues_from_archive_position(tmp_path: Path) -> None:
    stored: list[str] = []

    async def store(path: Path) -> None:
        stored.append(path.name)

    async def work() -> None:
        log = Log(tmp_path, store)
        log.write(25)
        log.disk.close()
        await log.archiver.finish()
        log.wal.close()

    run(work)
    first = len(stored)
    run(work)
    assert len(stored) == len(set(stored)) > first > 0
    assert Progress(tmp_path / "wal", 0, 1 << 20).next_sequence == len(
        [name for name in stored if name.endswith(".wal")]
    )


async def test_damaged_segment_is_told_of_when_it_is_archived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The archive had its damage too, the log let go of it, and a restore was the first to find out."""
    log = Log(tmp_path, store_in(ArchiveDirectory(tmp_path / "archive")))
    log.write(40)
    name = log.wal.segments[1]
    data = bytearray((tmp_path / "wal" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "wal" / name).write_bytes(data)
    task = asyncio.create_task(log.archiver.run())
    await until(lambda: metric(log.archiver, "raftkv_wal_archive_waiting") == 0)
    assert metric(log.archiver, "raftkv_wal_archive_gaps_total") == 1
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line.startswith(f"the log archive has a gap: write-ahead log {tmp_path / 'wal' / name} is damaged")
    assert (tmp_path / "archive" / name).read_bytes() == data, "what can be read of it is kept"
    task.cancel()
    log.close()


def test_no_flipped_bit_lets_segments_go_that_are_not_archived(tmp_path: Path) -> None:
    """A 5 that became a 7 had two segments deleted before they were archived, without a word."""
    file, first, last = tmp_path / PROGRESS_NAME, 2, 40
    for noted in (2, 5, 15, 40):
        Progress(tmp_path, first, last).note(noted)
        written = file.read_bytes()
        assert Progress(tmp_path, first, last).next_sequence == noted
        for bit in range(8 * len(written)):
            spoiled = bytearray(written)
            spoiled[bit // 8] ^= 1 << bit % 8
            file.write_bytes(spoiled)
            assert Progress(tmp_path, first, last).next_sequence in (noted, first)
            assert Progress(tmp_path, first, last).next_sequence <= noted, "and it is written anew"


@pytest.mark.parametrize("written", ["7\n", "41\n", "-1\n", "", "x\n", "1 2 3\n"])
def test_progress_that_cannot_be_read_begins_anew(written: str, tmp_path: Path) -> None:
    (tmp_path / PROGRESS_NAME).write_text(written)
    assert Progress(tmp_path, 2, 40).next_sequence == 2


class Killed(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("step", ["os.rename", "copy_sparse", "sync_directory", "os.fsync"])
def test_killed_at_any_step_no_half_segment_has_a_name(step: str, tmp_path: Path, monkeypatch) -> None:
    archive, source = ArchiveDirectory(tmp_path / "archive"), tmp_path / "0000000000000000-0000000000000001.wal"
    source.write_bytes(b"x" * 3_000_000)

    def killed(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        (tmp_path / "archive").mkdir(mode=0o700)
        patch.setattr(f"raftkv.storage.wal.archive.{step}", killed)
        with pytest.raises(Killed):
            archive.store(source)
    for path in (tmp_path / "archive").glob("*.wal"):
        assert path.read_bytes() == source.read_bytes()
    archive.store(source)
    assert names(tmp_path / "archive") == {source.name}


def test_existing_archive_is_not_overwritten(tmp_path: Path) -> None:
    archive = ArchiveDirectory(tmp_path / "archive")
    source = tmp_path / "0000000000000000-0000000000000001.wal"
    source.write_bytes(b"one")
    archive.store(source)
    archive.store(source)
    source.write_bytes(b"two")
    with pytest.raises(StorageError, match="has other contents"):
        archive.store(source)
    assert (tmp_path / "archive" / source.name).read_bytes() == b"one"


def test_an_archive_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    source = tmp_path / "0000000000000000-0000000000000001.wal"
    source.write_bytes(b"one")
    with pytest.raises(StorageError, match="is not a directory"):
        ArchiveDirectory(tmp_path / "file" / "archive").store(source)


@pytest.mark.parametrize("placed", ["%p", '"%p"', "'%p'", "''%p"])
@pytest.mark.parametrize("folder", ["plain", "two words", "it's", '5" $HOME `false` \\ *'])
def test_a_path_with_any_characters_is_one_word_to_the_command(folder: str, placed: str, tmp_path: Path) -> None:
    source = tmp_path / folder / "seg"
    source.parent.mkdir()
    source.write_text("data")
    run(lambda: run_command(f"cp {placed} '{tmp_path}/%f.copy'", source))
    assert (tmp_path / "seg.copy").read_text() == "data"


async def test_command_gets_path_and_name_and_reports_failure(tmp_path: Path) -> None:
    source = tmp_path / "seg"
    source.write_text("data")
    await run_command(f"test $(basename %p) = %f && cp %p {tmp_path}/%f.100%%", source)
    assert (tmp_path / "seg.100%").read_text() == "data"
    with pytest.raises(StorageError, match="failed for seg with exit code 3: no room"):
        await run_command("echo no room >&2; exit 3", source)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"wal_archive_dir": "a", "wal_archive_command": "b"}, "exclude each other"),
        ({"wal_archive_timeout_s": -1.0}, "--wal-archive-timeout must not be negative"),
        ({"wal_archive_held_bytes": -1}, "--wal-archive-held-bytes must not be negative"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        ServerConfig(**settings)


@pytest.mark.parametrize(
    "line", ["", "2026-01-01T00:00:00Z 1 2 3", "2026-01-01T00:00:00 1 2 3\n", "x 1 2 3\n", "1 2\n"]
)
def test_truncated_mark_is_ignored(line: str) -> None:
    assert Mark.parse(line) is None
    mark = Mark(1_700_000_000.5, 1, 2, 3)
    assert Mark.parse(str(mark)) == mark


def test_a_flipped_bit_in_a_mark_makes_no_other_mark() -> None:
    """A wrong index would restore entries that were never committed; a wrong time, another state."""
    line = str(Mark(1_700_000_000.5, 100, 200, 3)).encode()
    for bit in range(8 * len(line)):
        flipped = bytearray(line)
        flipped[bit // 8] ^= 1 << bit % 8
        assert Mark.parse(flipped.decode("latin-1")) is None, bytes(flipped)
