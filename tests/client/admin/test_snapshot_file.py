"""Saving a snapshot: a complete private file under its name, or nothing."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from raftkv.client.admin import SavedSnapshot, save
from raftkv.errors import NoLeaderError, StorageError
from raftkv.pb import rpc_pb2

DATA = bytes(range(256)) * 256


def messages(blobs: Sequence[bytes]) -> list[rpc_pb2.SnapshotResponse]:
    total = sum(map(len, blobs))
    found = []
    for blob in blobs:
        total -= len(blob)
        found.append(rpc_pb2.SnapshotResponse(remaining_bytes=total, blob=blob, version="3.6.0"))
    return found


WHOLE = messages([DATA[:32768], DATA[32768:], hashlib.sha256(DATA).digest()])


async def sent(
    parts: Sequence[rpc_pb2.SnapshotResponse], error: Exception | None = None
) -> AsyncIterator[rpc_pb2.SnapshotResponse]:
    for part in parts:
        yield part
    if error is not None:
        raise error


def test_a_whole_snapshot_is_saved_with_its_hash(tmp_path: Path) -> None:
    path, shown = tmp_path / "file", list[tuple[int, int]]()
    (tmp_path / "file.part").write_bytes(b"left by a crash")
    os.chmod(tmp_path / "file.part", 0o666)
    saved = asyncio.run(save(sent(WHOLE), path, lambda received, total: shown.append((received, total))))
    assert saved == SavedSnapshot(path, len(DATA) + 32, "3.6.0")
    assert path.read_bytes() == DATA + hashlib.sha256(DATA).digest()
    assert path.stat().st_mode & 0o777 == 0o600
    assert shown == [(32768, 65568), (65536, 65568), (65568, 65568)]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], r"^sha256 checksum not found \[bytes: 0\]$"),
        (WHOLE[:-1], r"^sha256 checksum not found \[bytes: 65536\]$"),
        (WHOLE[1:], "is wrong: the snapshot was damaged"),
    ],
)
def test_incomplete_snapshot_leaves_the_old_file(tmp_path, parts, reason):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(StorageError, match=reason):
        asyncio.run(save(sent(parts), path))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_member_that_gives_up_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoLeaderError):
        asyncio.run(save(sent(WHOLE[:1], NoLeaderError()), tmp_path / "file"))
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"^could not open .*/none/file.part \(no such file or directory\)$"):
        asyncio.run(save(sent(WHOLE), tmp_path / "none" / "file"))
    (tmp_path / "file").mkdir()
    with pytest.raises(StorageError, match=r"^could not open .*/file \(is a directory\)$"):
        asyncio.run(save(sent(WHOLE), tmp_path / "file"))
    (tmp_path / "elsewhere").write_bytes(b"of somebody else")
    (tmp_path / "led.part").symlink_to(tmp_path / "elsewhere")
    asyncio.run(save(sent(WHOLE), tmp_path / "led"))
    assert (tmp_path / "elsewhere").read_bytes() == b"of somebody else"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"^could not write snapshot to .*/full\.part \(no space left on device\)$"):
        asyncio.run(save(sent(WHOLE), tmp_path / "full"))


def test_file_that_another_has_open_gets_no_snapshot(tmp_path: Path) -> None:
    """Another user of the machine makes it beforehand, and reads what is written to it."""
    part = tmp_path / "file.part"
    part.write_bytes(b"planted")
    with part.open("rb") as spy:
        asyncio.run(save(sent(WHOLE), tmp_path / "file"))
        assert spy.read() == b"planted"
    os.mkfifo(part)
    spying = os.open(part, os.O_RDONLY | os.O_NONBLOCK)
    try:
        asyncio.run(save(sent(WHOLE), tmp_path / "file"))
        assert os.read(spying, 100) == b""
    finally:
        os.close(spying)
    assert (tmp_path / "file").read_bytes() == DATA + hashlib.sha256(DATA).digest()


@pytest.mark.parametrize("first_ends", ["first", "last"])
def test_of_two_that_save_to_a_file_at_once_the_later_succeeds(tmp_path: Path, first_ends: str) -> None:
    """Two processes wrote into one file; and one that was refused deleted the file of the other."""
    path, later = tmp_path / "file", DATA[::-1] * 2
    others = messages([later[:32768], later[32768:], hashlib.sha256(later).digest()])

    async def both() -> None:
        begun, ends = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]

        async def slow(number: int, parts: list[rpc_pb2.SnapshotResponse]) -> AsyncIterator[rpc_pb2.SnapshotResponse]:
            yield parts[0]
            begun[number].set()
            await ends[number].wait()
            for part in parts[1:]:
                yield part

        saves = []
        for number, parts in enumerate((WHOLE, others)):
            saves.append(asyncio.ensure_future(save(slow(number, parts), path)))
            await begun[number].wait()
        for number in (0, 1) if first_ends == "first" else (1, 0):
            ends[number].set()
            await asyncio.wait([saves[number]])
        with pytest.raises(StorageError, match=r"^could not write snapshot to .*/file\.part \("):
            await saves[0]
        await saves[1]

    asyncio.run(both())
    assert path.read_bytes() == later + hashlib.sha256(later).digest()
    assert list(tmp_path.iterdir()) == [path]
