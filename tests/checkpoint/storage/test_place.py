"""Files of a checkpoint on a local disk and on an object store: names, links, lists, deletions, errors of one line."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from raftkv.checkpoint.digest import of_bytes
from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.keys import AttemptId
from raftkv.checkpoint.records import Checkpoint, FileRecord
from raftkv.checkpoint.retention.ownership import PREFIX, read_marks
from raftkv.checkpoint.storage import filesystems, place
from raftkv.checkpoint.storage.place import Found, Place
from raftkv.checkpoint.storage.verify import stream_verified
from raftkv.checkpoint.trackers import DEEPSPEED, FILES, write_all
from raftkv.errors import ConfigError

NAMES = ["a*", "a1", "b [1]?.bin", "sub/deep/ü.bin"]
STEP, BESIDE = AttemptId(1, 2, 3).directory, AttemptId(1, 2, 33).directory


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "job") if request.param == "local" else f"memory://{tmp_path}/job"


def test_written_file_is_listed_read_and_deleted(root: str) -> None:
    there, beside = Place(f"{root}/{STEP}"), Place(f"{root}/{BESIDE}")
    assert (there.list(), there.names(), there.exists("a1")) == ([], [], False)
    beside.write("a1", b"of another")
    for name in NAMES:
        assert there.write(name, name.encode()) == FileRecord(name, len(name.encode()), of_bytes(name.encode()))
    assert there.list() == [Found(name, len(name.encode())) for name in NAMES]
    assert there.names() == ["a*", "a1", "b [1]?.bin", "sub"]
    assert there.read("b [1]?.bin") == b"b [1]?.bin"
    assert b"".join(there.chunks("sub/deep/ü.bin", 3)) == "sub/deep/ü.bin".encode()
    assert there.size_now("a*") == 2
    there.delete("a*")  # a name, not a pattern
    there.delete("a*")
    assert [found.name for found in there.list()] == NAMES[1:]
    assert Place(root).names() == [STEP, BESIDE]
    there.delete_tree()
    there.delete_tree()
    assert there.list() == []
    assert Place(root).names() == [BESIDE]
    assert beside.read("a1") == b"of another"


def test_a_deletion_that_was_cut_off_goes_on(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Place(f"{root}/{STEP}")
    for number in range(4):
        there.write(f"{number}/file", b"x")
    owner, name = (os, "unlink") if there.is_local else (type(there.fs), "rm_file")
    kept: Callable[..., None] = getattr(owner, name)
    calls = 0

    def stumble(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(5, "Input/output error")
        kept(*args, **kwargs)

    monkeypatch.setattr(owner, name, stumble)
    with pytest.raises(StorageError, match=r"cannot delete .*Input/output error"):
        there.delete_tree()
    assert 0 < len(there.list()) < 4
    there.delete_tree()
    assert there.list() == []


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a//b", ".", "a\\b", "a\nb", "x" * 1025])
def test_no_name_leads_elsewhere(root: str, name: str) -> None:
    there = Place(root)
    for use in (there.path, there.read, there.exists, there.open_reader, there.open_writer, there.delete):
        with pytest.raises(ConfigError, match="cannot be used"):
            use(name)


@pytest.mark.parametrize("uri", ["/", "file:///", "memory://", "job", ".", f"{STEP}/sub", f"{STEP}.old", "step-1.g1.1"])
def test_only_the_directory_of_an_attempt_is_deleted_whole(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").write_bytes(b"1")
    with pytest.raises(ConfigError, match="is not deleted: its name is not that of the directory of a checkpoint"):
        Place(uri).delete_tree()
    assert (tmp_path / "precious").exists()


def test_a_url_without_a_path_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [Place(uri).root for uri in ("/", "file:///", "memory://", "memory:///")] == [""] * 4
    with pytest.raises(ConfigError, match="is empty; name one"):
        Place("")
    assert Place("memory://a/b//").uri == "memory://a/b"
    assert Place("here/../job/").uri == str(tmp_path / "job")
    assert Place(f"file://{tmp_path}/job/").root == str(tmp_path / "job")


def test_links_are_read_through_and_never_walked_into(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    there = Place(str(tmp_path / STEP))
    there.write("own", b"1")
    os.symlink(outside, tmp_path / STEP / "directory")
    os.symlink(outside / "precious", tmp_path / STEP / "file")
    os.symlink(outside / "nothing", tmp_path / STEP / "broken")
    found = {each.name: each.is_link for each in there.list()}
    assert found == {"own": False, "directory": True, "file": True, "broken": True}
    assert there.read("file") == b"precious"
    with there.open_writer("file") as file:  # takes the place of the link: another program's file keeps its bytes
        file.write(b"2")
    assert (there.read("file"), (outside / "precious").read_bytes()) == (b"2", b"precious")
    with pytest.raises(StorageError, match="leads out"):
        there.delete("directory/precious")
    there.delete_tree()
    assert not (tmp_path / STEP).exists()
    assert (outside / "precious").read_bytes() == b"precious"


def test_a_place_that_is_a_link_is_only_unlinked(tmp_path: Path) -> None:
    real = Place(str(tmp_path / "real"))
    real.write("a", b"1")
    os.symlink(tmp_path / "real", tmp_path / STEP)
    Place(str(tmp_path / STEP)).delete_tree()
    assert not (tmp_path / STEP).is_symlink()
    assert real.read("a") == b"1"


def test_a_whole_file_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Place(str(tmp_path))
    there.write("manifest", b"old")

    def refuse(path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        there.write("manifest", b"new")
    assert there.read("manifest") == b"old"
    assert [found.name for found in there.list()] == ["manifest"]


def test_names_of_files_and_directories_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(place, "sync", lambda path: synced.append(os.path.relpath(path, tmp_path)))
    there = Place(str(tmp_path / "job" / "step"))
    with there.open_writer("sub/a") as file:
        file.write(b"1")
    assert synced == ["job/step/sub", "job/step", "job", "."]
    synced.clear()
    with there.open_writer("sub/b") as file:
        file.write(b"1")
    assert synced == ["job/step/sub"]  # the others have their names already


def test_the_names_of_all_directories_that_were_made_are_synced(tmp_path, monkeypatch):
    """Lose no new place of a run with the power: a directory above it that was made too had no durable name."""
    synced: list[str] = []
    monkeypatch.setattr(place, "sync", lambda path: synced.append(os.path.relpath(path, tmp_path)))
    there = Place(str(tmp_path / "team" / "jobs" / "job"))
    there.write("mark", b"")
    assert {"team/jobs/job", "team/jobs", "team", "."} <= set(synced)
    synced.clear()
    there.write("sub/a", b"1")
    assert set(synced) == {"team/jobs/job/sub", "team/jobs/job"}


@pytest.mark.parametrize(
    ("uri", "line"),
    [
        ("nothing://x", "cannot use nothing://x: Protocol not known: nothing"),
        ("s3://bucket/job", "cannot use s3://bucket/job: Install s3fs to access S3"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_line(uri: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ConfigError) as caught:
        Place(uri)
    assert str(caught.value) == line


def test_without_fsspec_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"pip install 'raftkv\[checkpoint\]'"):
        Place("/tmp")


def test_disk_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot write .*/file/a: ") as caught:
        Place(str(tmp_path / "file")).open_writer("a")
    assert "\n" not in str(caught.value)
    with pytest.raises(StorageError, match="No such file or directory; check that the directory or bucket exists"):
        Place(str(tmp_path)).read("gone")
    assert filesystems.describe(PermissionError(13, "Permission denied")).startswith("Permission denied; give this")
    assert filesystems.describe(PermissionError("Access Denied")).startswith("Access Denied; give this process")
    assert filesystems.describe(RuntimeError("two\nlines")) == "two lines"
    assert filesystems.describe(RuntimeError()) == "RuntimeError"


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    there = Place(str(tmp_path))
    there.write("sub/a", b"1")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("sub"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StorageError, match=r"cannot list .*Permission denied"):
        there.list()


def test_files_have_the_rights_that_the_process_gives(tmp_path: Path) -> None:
    with Place(str(tmp_path)).open_writer("a") as file:
        file.write(b"1")
    (tmp_path / "b").write_bytes(b"1")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "b").stat().st_mode)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_name_with_two_colons_is_a_name(tmp_path: Path, scheme: str) -> None:
    """Keep the name whole: taken for a chain of file systems, all attempts wrote to the directory before it."""
    for number in (1, 2):
        Place(f"{scheme}{tmp_path}/a::b/step-{number}").write("m", b"%d" % number)
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("m")}
    assert found == {"a::b/step-1/m": b"1", "a::b/step-2/m": b"2"}
    with pytest.raises(ConfigError, match="without it"):
        Place("memory://bucket/a::b/step-1")
    assert Place(f"simplecache::file://{tmp_path}/a").root == f"{tmp_path}/a"


class Remembering(MemoryFileSystem):
    """Remember what a directory held when it was listed, as s3fs and gcsfs do."""

    protocol = "remembering"
    listed: ClassVar[dict[str, set[str]]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("remembering://", "memory://"))

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        path = self._strip_protocol(path)
        found = super().ls(path, detail=True, **more)
        self.listed[path] = {each["name"] for each in found}
        return found if detail else [each["name"] for each in found]

    def info(self, path: str, **more: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.listed.get(self._parent(path), {path}):
            raise FileNotFoundError(path)
        return super().info(path, **more)

    def isfile(self, path: str) -> bool:
        return bool(AbstractFileSystem.isfile(self, path))

    def find(self, path: str, *given: Any, **more: Any) -> Any:
        return AbstractFileSystem.find(self, path, *given, **more)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listed.clear()


def test_a_file_that_came_after_a_list_is_there(tmp_path: Path) -> None:
    """Ask anew: the manifest of a checkpoint was not there for who had listed the directory before it was written."""
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    place = Place(f"remembering://{tmp_path}/job")
    place.write("a.bin", b"a")
    assert [found.name for found in place.list()] == ["a.bin"]
    Place(f"memory://{tmp_path}/job").write("b.bin", b"b")  # by another process
    assert place.exists("b.bin")


@pytest.mark.parametrize("planted", ["pipe", "device", "directory"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, planted: str) -> None:
    """A colleague who may write to a shared place puts a pipe where a file is looked for."""

    def plant(name: str) -> None:
        path = tmp_path / name
        if planted == "pipe":
            os.mkfifo(path)
        elif planted == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()

    there = Place(str(tmp_path))
    for name in ("model.bin", f"{PREFIX}00", FILES[DEEPSPEED]):
        plant(name)
    file = FileRecord("model.bin", 4, of_bytes(b"data"))
    for use in (
        lambda: there.read("model.bin"),
        lambda: list(there.chunks("model.bin")),
        lambda: there.open_reader("model.bin"),
        lambda: there.size_now("model.bin"),
        lambda: there.make_durable("model.bin", contents=True) if planted != "directory" else there.read("model.bin"),
        lambda: list(stream_verified(there, file)),
        lambda: read_marks(str(tmp_path)),
    ):
        with pytest.raises(StorageError):
            use()
    with pytest.raises(StorageError) if planted == "directory" else contextlib.nullcontext():
        write_all(str(tmp_path), (DEEPSPEED,), _committed_at(f"{tmp_path}/{STEP}"))  # it takes the place of a pipe
        assert there.read(FILES[DEEPSPEED]) == STEP.encode()


def test_of_a_mark_no_more_is_read_than_a_run_id_has(tmp_path: Path) -> None:
    """Others write to a shared place too, and a file of a terabyte costs them nothing."""
    (tmp_path / f"{PREFIX}00").touch()
    os.truncate(tmp_path / f"{PREFIX}00", 1 << 40)
    assert {mark: len(run_id) for mark, run_id in read_marks(str(tmp_path)).items()} == {"00": 201}


def _committed_at(uri: str) -> Checkpoint:
    return Checkpoint("job", 1, 2, 3, "files", 1, uri, "", "", 0, 0)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_file_system_that_syncs_no_directories_keeps_files(tmp_path, monkeypatch, kind):
    """Every save failed on a file system that refuses to sync directories, as some network ones; a file must be."""
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) is (kind == "directory"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    place = Place(str(tmp_path / "step"))
    if kind == "file":
        with pytest.raises(StorageError, match="Invalid argument"):
            place.write("sub/a.bin", b"x")
    else:
        assert place.write("sub/a.bin", b"x").size_bytes == 1
        assert place.read("sub/a.bin") == b"x"
