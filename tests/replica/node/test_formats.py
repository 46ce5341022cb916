"""A data directory of a later version is refused in one line that names the version, and not changed."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import lmdb
import pytest

from raftkv import __version__
from raftkv.config import ServerConfig
from raftkv.errors import CorruptionError, StorageError
from raftkv.raft.types import Entry, HardState
from raftkv.storage import schema
from raftkv.storage.datadir import ensure_private_directory
from raftkv.storage.wal import WAL, wal
from raftkv.storage.wal.record import SegmentHead
from tests.replica.node.durable import close, opened


def _open_and_close(config: ServerConfig) -> None:
    durable = opened(config)
    durable.mark.note(durable.store.applied_index, durable.store.applied_term)
    close(durable)


def _write_database(data: Path, stated: int) -> None:
    with (
        lmdb.open(str(data / "member/snap/db"), subdir=False, max_dbs=20) as environment,
        environment.begin(write=True) as txn,
    ):
        meta = environment.open_db(schema.META, txn=txn)
        txn.put(schema.META_FORMAT_VERSION, schema.encode_integer(stated), db=meta)


def _write_mark(data: Path, stated: int) -> None:
    path = data / "member/snap/applied"
    mark = bytearray(path.read_bytes())
    mark[20:24] = mark[84:88] = stated.to_bytes(4, "little")
    path.write_bytes(mark)


def _write_log(data: Path, stated: int) -> None:
    for path in (data / "member/wal").iterdir():
        path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wal, "SegmentHead", partial(SegmentHead, version=stated))
        WAL.create(str(data / "member/wal"), b"").close()


def _contents(data: Path) -> dict[str, bytes]:
    return {
        os.path.relpath(path, data): path.read_bytes()
        for path in sorted(data.rglob("*"))
        if path.is_file() and not path.name.endswith("lock")
    }


@pytest.mark.long
@pytest.mark.interpreted
@pytest.mark.parametrize("write", [_write_database, _write_mark, _write_log])
@pytest.mark.parametrize(
    ("stated", "named"),
    [
        (2, "the raftkv that wrote it, or a later one,"),
        (2 | 7 << 16, "raftkv 0.7 or later"),
        (3 | 1 << 24, "raftkv 1.0 or later"),
    ],
)
@pytest.mark.interpreted
def test_a_later_format_is_refused_and_nothing_is_changed(tmp_path, write, stated, named):
    config = ServerConfig(data_dir=str(tmp_path / "data"))
    _open_and_close(config)
    write(tmp_path / "data", stated)
    before = _contents(tmp_path / "data")
    with pytest.raises(StorageError) as refused:
        opened(config)
    text = str(refused.value)
    assert "\n" not in text
    assert f"has format {stated & 0xFFFF}, and raftkv {__version__} reads format 1: run {named} on this data" in text
    assert _contents(tmp_path / "data") == before


def test_the_formats_of_this_version_are_taken(tmp_path: Path) -> None:
    config = ServerConfig(data_dir=str(tmp_path / "data"))
    for _ in range(3):
        _open_and_close(config)
    # As the first version left it: no number in the mark.
    assert (tmp_path / "data/member/snap/applied").read_bytes()[20:24] == bytes(4)


def test_a_database_of_another_term_than_its_log_is_refused(tmp_path: Path) -> None:
    """Either of the two numbers that say how far the log is applied may be damaged: they have no checksum."""
    config = ServerConfig(data_dir=str(tmp_path / "data"))
    durable = opened(config)
    durable.wal.append(HardState(2, 0, 3), [Entry(1, 1), Entry(1, 2), Entry(2, 3)])
    durable.wal.sync()
    durable.store.set_applied(2, 2)
    durable.store.commit()
    close(durable)
    with pytest.raises(CorruptionError, match=r"^entry 2 is of term 1 in the log, and of term 2 in the database$"):
        opened(config)


def test_a_damaged_format_number_asks_for_no_other_version(tmp_path: Path) -> None:
    """An operator who reads "run a later raftkv" looks for one, and not at the disk."""
    config = ServerConfig(data_dir=str(tmp_path / "data"))
    _open_and_close(config)
    mark = tmp_path / "data/member/snap/applied"
    for slot in (0, 64):
        flipped = bytearray(mark.read_bytes())
        flipped[slot + 21] ^= 4
        mark.write_bytes(flipped)
        _open_and_close(config)
        mark.write_bytes(bytes(len(flipped)))
    database = tmp_path / "data/member/snap/db"
    damaged = bytearray(database.read_bytes())
    damaged[damaged.rindex(schema.META_FORMAT_VERSION) + len(schema.META_FORMAT_VERSION) + 6] ^= 4
    database.write_bytes(damaged)
    with pytest.raises(CorruptionError, match="/db is damaged: "):
        opened(config)


@pytest.mark.parametrize("name", ["snap/applied", "snap/db", "snap/db-lock", "wal/lock"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "old"])
def test_another_thing_in_the_place_of_a_file_is_refused_with_a_remedy(tmp_path: Path, name: str, is_new: bool) -> None:
    """A volume that is mounted over a missing file makes a directory there."""
    config = ServerConfig(data_dir=str(tmp_path / "data"))
    if not is_new:
        _open_and_close(config)
    place, kept = tmp_path / "data/member" / name, tmp_path / "kept"
    if is_new:
        ensure_private_directory(place.parent)
    else:
        place.rename(kept)
    place.mkdir()
    with pytest.raises(StorageError) as refused:
        opened(config)
    assert (
        str(refused.value) == f"{place} is not a file, and raftkv keeps one there: move it elsewhere, then start again"
    )
    place.rmdir()
    if not is_new:
        kept.rename(place)
    _open_and_close(config)


@pytest.mark.parametrize("name", ["applied", "db-lock"])
def test_a_mapped_file_that_was_cut_short_is_told_at_the_next_start(tmp_path, name, caplog):
    config = ServerConfig(data_dir=str(tmp_path / "data"))
    _open_and_close(config)
    _open_and_close(config)
    assert not [record for record in caplog.records if "cut short" in record.message]
    path = tmp_path / "data/member/snap" / name
    os.truncate(path, 0)
    _open_and_close(config)
    (line,) = (record.getMessage() for record in caplog.records if "cut short" in record.getMessage())
    assert line.startswith(f"another program has cut short {path} to 0 bytes")
