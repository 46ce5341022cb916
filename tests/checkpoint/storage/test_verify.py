"""Whether bytes are those that were committed: every kind of damage is found, and no wrong byte is handed out."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raftkv.checkpoint import digest
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.commit.manifest import Manifest
from raftkv.checkpoint.errors import DigestMismatch, FilesChanged, NotWhole, StorageError
from raftkv.checkpoint.keys import FILES, AttemptId
from raftkv.checkpoint.records import AttemptRecord, Checkpoint, Prepared
from raftkv.checkpoint.storage import verify as module
from raftkv.checkpoint.storage.place import Found, Place
from raftkv.checkpoint.storage.transfer import UNKNOWN, copy_files
from raftkv.checkpoint.storage.verify import (
    check_there,
    load_manifest,
    open_verified,
    read_manifest,
    read_verified,
    stream_verified,
    verify,
)
from raftkv.client.records import RecordError

DATA = {"a.bin": b"a" * 1000, "sub/b.bin": b"b" * 2000, "empty": b""}


def saved(place: Place, data: dict[str, bytes], *, algorithm: str = digest.SHA256) -> Checkpoint:
    """A committed checkpoint without a store: files, manifest, and the record that vouches for both."""
    files = []
    for name, content in data.items():
        with place.open_writer(name, digest=algorithm) as file:
            file.write(content)
        files.append(file.record)
    attempt = AttemptRecord(7, 1, 1, FILES, 1, place.uri)
    manifest = Manifest.of(attempt, {0: Prepared(0, tuple(files))})
    place.write(MANIFEST, manifest.encoded)
    return Checkpoint("job", 7, 1, 1, FILES, 1, place.uri, manifest.digest, manifest.root, len(files), 3000)


def overwrite(place: Place, name: str, data: bytes) -> None:
    """Change a file in place: those that have it open see it."""
    if place.is_local:
        Path(place.path(name)).write_bytes(data)
    else:
        file = place.fs.store[place.path(name)]
        file.seek(0)
        file.truncate()
        file.write(data)


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(str(tmp_path / "job") if request.param == "local" else f"memory://{tmp_path}/job")


@pytest.mark.parametrize("algorithm", sorted(digest.ALGORITHMS))
def test_a_whole_checkpoint_is_whole(place: Place, algorithm: str) -> None:
    checkpoint = saved(place, DATA, algorithm=algorithm)
    told: list[tuple[int, int]] = []
    report = verify(checkpoint, on_progress=lambda done, total: told.append((done, total)))
    assert report.is_whole
    assert (report.file_count, report.size_bytes) == (3, 3000)
    assert told[-1] == (3000, 3000)
    assert sorted(told) == told
    for name, data in DATA.items():
        assert read_verified(checkpoint, name) == data
        with open_verified(checkpoint, name) as file:
            file.seek(min(5, len(data)))
            assert file.read(10) == data[5:15]


def test_every_kind_of_damage_is_named(place: Place) -> None:
    names = [f"{number:02d}" for number in range(12)]
    checkpoint = saved(place, {name: bytes(5000) for name in names})
    place.delete("03")
    place.write("04", bytes(4999))
    place.write("05", bytes(4999) + b"1")
    place.write("06", b"1" + bytes(4999))
    place.write("extra/file", b"1")
    report = verify(checkpoint)
    assert not report.is_whole
    assert (report.missing, report.wrong_size, report.wrong_digest) == (("03",), ("04",), ("05", "06"))
    assert (report.extra, report.unreadable, report.file_count) == (("extra/file",), (), 8)
    for name, why in {"04": "differs in size", "05": "differs in contents", "06": "differs in contents"}.items():
        with pytest.raises(DigestMismatch, match=why) as caught:
            open_verified(checkpoint, name)
        assert caught.value.name == name
    with pytest.raises(StorageError, match="cannot read"):
        open_verified(checkpoint, "03")
    with pytest.raises(DigestMismatch, match="is not a file of this checkpoint"):
        open_verified(checkpoint, "extra/file")


def test_an_error_of_one_file_hides_no_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved(place, DATA)
    opened = Place._open

    def refuse(own: Place, name: str) -> object:
        if name == "a.bin":
            raise OSError(5, "Input/output error")
        return opened(own, name)

    monkeypatch.setattr(Place, "_open", refuse)
    report = verify(checkpoint)
    assert not report.is_whole
    ((name, why),) = report.unreadable
    assert (name, report.file_count) == ("a.bin", 2)
    assert why.endswith("a.bin: [Errno 5] Input/output error")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: data.replace(b"a.bin", b"b.bin"),
        lambda data: b"",
    ],
)
def test_a_manifest_that_was_changed_is_refused(place: Place, damage: Callable[[bytes], bytes]) -> None:
    checkpoint = saved(place, DATA)
    place.write(MANIFEST, damage(place.read(MANIFEST)))
    for look in (load_manifest, verify, lambda one: open_verified(one, "a.bin")):
        with pytest.raises(DigestMismatch, match="is not the one that was committed"):
            look(checkpoint)


def test_of_a_large_file_in_place_of_a_manifest_only_the_beginning_is_read(place: Place, monkeypatch) -> None:
    monkeypatch.setattr("raftkv.checkpoint.storage.verify.MAX_BYTES", 1000)
    checkpoint = saved(place, DATA)
    place.write(MANIFEST, bytes(5000))
    assert read_manifest(checkpoint) == bytes(1000)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside"])
def test_a_manifest_never_leads_out_of_the_directory(place: Place, name: str) -> None:
    """Even one whose digest the record has: the writer of the record wrote the manifest."""
    Place(place.uri.removesuffix("/job")).write("outside", b"secret")
    checkpoint = saved(place, DATA)
    hostile = place.read(MANIFEST).replace(b"a.bin", name.encode())
    place.write(MANIFEST, hostile)
    with pytest.raises(DigestMismatch, match="cannot be read"):
        verify(replace(checkpoint, manifest=digest.of_bytes(hostile)))


def test_an_algorithm_of_a_later_version_is_no_match(place: Place) -> None:
    checkpoint = saved(place, DATA)
    changed = place.read(MANIFEST).replace(b"sha256:", b"sha999:", 1).replace(b'"sha256:', b'"sha999:')
    place.write(MANIFEST, changed)
    report = verify(replace(checkpoint, manifest=digest.of_bytes(changed)))
    assert not report.is_whole
    assert "'sha999' is not a digest algorithm" in report.unreadable[0][1]


def test_without_a_manifest_it_says_where_it_looked(place: Place) -> None:
    checkpoint = saved(place, DATA)
    place.delete(MANIFEST)
    with pytest.raises(
        StorageError, match=f"cannot read .*job/{MANIFEST}.*; step .* begin afresh under another run id"
    ):
        verify(checkpoint)


def test_a_large_file_is_checked_before_it_is_handed_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL_BYTES", 100)
    checkpoint = saved(place, DATA)
    with open_verified(checkpoint, "a.bin") as file:
        assert file.read() == DATA["a.bin"]
    place.write("a.bin", b"x" + DATA["a.bin"][1:])
    with pytest.raises(DigestMismatch):
        open_verified(checkpoint, "a.bin")


def test_a_file_that_changes_after_its_check_hands_out_no_other_byte(place, monkeypatch):
    """A restore uses the bytes that were checked: a large file is read twice, and was compared the first time only."""
    monkeypatch.setattr(module, "SMALL_BYTES", 100)
    data = bytes(range(256)) * (3 << 12)  # 3 MiB, and so of several pieces
    checkpoint = saved(place, {"a.bin": data})
    for start, size_bytes in ((0, -1), (len(data) - 7, 7), (1 << 20, 4), (5, 1 << 21)):
        with open_verified(checkpoint, "a.bin") as file:
            file.seek(start)
            assert file.read(size_bytes) == data[start:][: None if size_bytes < 0 else size_bytes]
            assert file.seek(-3, 2) == len(data) - 3
            assert file.read() == data[-3:]
    # In place, as a writer that was thought dead does it: the reader has the same file open.
    for change in (data[:2_000_000] + b"x" + data[2_000_001:], data[:-1]):
        place.write("a.bin", data)
        with open_verified(checkpoint, "a.bin") as file:
            assert file.read(10) == data[:10]
            overwrite(place, "a.bin", change)
            with pytest.raises((DigestMismatch, StorageError), match=r"a\.bin"):
                file.read()
        assert file.closed


def test_a_stream_says_at_its_end_that_it_was_wrong(place: Place) -> None:
    checkpoint = saved(place, DATA)
    (record,) = [file for _, file in load_manifest(checkpoint).files if file.name == "a.bin"]
    assert b"".join(stream_verified(place, record)) == DATA["a.bin"]
    place.write("a.bin", DATA["a.bin"][:-1] + b"x")
    stream = stream_verified(place, record)
    assert next(stream) == DATA["a.bin"][:-1] + b"x"
    with pytest.raises(DigestMismatch):
        next(stream)


@pytest.mark.parametrize("is_known", [True, False])
def test_of_a_file_that_has_grown_no_more_is_copied_than_was_recorded(
    place: Place, is_known: bool, tmp_path, monkeypatch
):
    """Refuse a file that grew since it was recorded before it fills the disk."""
    checkpoint = saved(place, DATA)
    (record,) = [file for _, file in load_manifest(checkpoint).files if file.name == "a.bin"]
    if not is_known:
        record = replace(record, digest=UNKNOWN)
    pieces = iter([DATA["a.bin"]] * 100)
    monkeypatch.setattr(Place, "chunks", lambda *_: pieces)
    target = Place(str(tmp_path / "copy"))
    with pytest.raises(DigestMismatch if is_known else NotWhole, match=r"a\.bin"):
        copy_files(place, [record], target)
    assert (len(list(pieces)), target.list()) == (98, [])


def test_a_reader_during_a_deletion_gets_the_right_bytes_or_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SMALL_BYTES", 100)
    place = Place(str(tmp_path / AttemptId(7, 1, 1).directory))
    checkpoint = saved(place, DATA)
    with open_verified(checkpoint, "a.bin") as file:
        place.delete_tree()
        assert file.read() == DATA["a.bin"]  # it is open: the disk keeps it until it is closed
    with pytest.raises(StorageError, match="cannot read"):
        open_verified(checkpoint, "sub/b.bin")


def test_an_interrupt_waits_for_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ended ``raftkvctl checkpoint verify`` when the files under way were read to their ends: minutes."""
    began, left = threading.Event(), threading.Event()

    class Interrupted(ThreadPoolExecutor):
        """Threads whose caller gets Ctrl-C when the first piece is read."""

        def map(self, *words: Any, **options: Any) -> Any:
            under_way = super().map(*words, **options)
            began.wait()
            raise KeyboardInterrupt(under_way)

        def __exit__(self, *error: Any) -> None:
            left.set()
            super().__exit__(*error)

    told: list[int] = []

    def on_progress(done: int, total: int) -> None:
        told.append(done)
        began.set()
        left.wait()

    place = Place(str(tmp_path / "job"))
    checkpoint = saved(place, {"a.bin": bytes(12 << 20)})
    monkeypatch.setattr(module, "ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        verify(checkpoint, on_progress=on_progress)
    assert told == [4 << 20]


def test_memory_is_bounded_for_files_of_any_size(tmp_path: Path) -> None:
    place, size = Place(str(tmp_path / "job")), 96 << 20
    piece = os.urandom(1 << 20)
    tracemalloc.start()
    try:
        with place.open_writer("large") as file:
            for _ in range(size >> 20):
                file.write(piece)
        manifest = Manifest.of(AttemptRecord(7, 1, 1, FILES, 1, place.uri), {0: Prepared(0, (file.record,))})
        place.write(MANIFEST, manifest.encoded)
        checkpoint = Checkpoint("job", 7, 1, 1, FILES, 1, place.uri, manifest.digest, manifest.root, 1, size)
        assert verify(checkpoint).is_whole
        with open_verified(checkpoint, "large") as opened:
            assert opened.read(100) == piece[:100]
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_files_that_are_gone_or_cut_are_found_by_their_sizes(place: Place) -> None:
    manifest = load_manifest(saved(place, DATA))
    check_there(place, manifest)
    place.write("sub/b.bin", b"b" * 1999)
    with pytest.raises(FilesChanged, match=r"sub/b\.bin, which rank 0 had prepared, has 1999 bytes now, not 2000"):
        check_there(place, manifest)
    place.write("sub/b.bin", b"")
    with pytest.raises(FilesChanged, match="has 0 bytes now, not 2000"):
        check_there(place, manifest)
    for name in ("sub/b.bin", "a.bin", "empty", MANIFEST):
        place.delete(name)
    with pytest.raises(FilesChanged, match=r"a\.bin, which rank 0 had prepared, is not there any more"):
        check_there(place, manifest)
    place.delete_empty_directories()
    with pytest.raises(FilesChanged, match="is not there any more"):
        check_there(place, manifest)
    assert place.list() == []


def test_a_list_that_is_older_than_the_files_is_not_believed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = load_manifest(saved(place, DATA))
    monkeypatch.setattr(place, "list", lambda: [Found("a.bin", 3), Found("empty", 0)])
    check_there(place, manifest)


def test_a_reader_does_not_believe_a_list_that_is_older_than_the_files(place, monkeypatch):
    """Look for what the list does not have: a whole checkpoint missed files on another machine of a shared disk."""
    checkpoint = saved(place, DATA)
    monkeypatch.setattr(Place, "list", lambda _: [Found("a.bin", 3), Found("empty", 0)])
    assert verify(checkpoint).is_whole
    place.delete("sub/b.bin")
    assert verify(checkpoint).missing == ("sub/b.bin",)


def test_a_manifest_with_an_infinite_rank_is_none(place: Place) -> None:
    line = b'{"rank":1e999,"name":"a.bin","size_bytes":1,"digest":"sha256:00"}\n'
    with pytest.raises(RecordError, match="not a manifest record"):
        Manifest.decode(b'{"format":1,"root":""}\n' + line)
