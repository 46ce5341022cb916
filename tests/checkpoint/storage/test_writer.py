"""Files that are digested while they are written: every way to write the same bytes gives the same digest."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.checkpoint import digest
from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.storage import place
from raftkv.checkpoint.storage.place import Place
from raftkv.errors import ConfigError

FORMS = {"bytes": bytes, "bytearray": bytearray, "memoryview": memoryview}


@given(
    pieces=st.lists(st.tuples(st.sampled_from(sorted(FORMS)), st.integers(0, 40)), max_size=12),
    block=st.integers(1, 20),
)
def test_bytes_in_any_pieces_give_the_same_file(pieces: list[tuple[str, int]], block: int) -> None:
    data = os.urandom(sum(size for _, size in pieces))
    there, at = Place("memory://pieces"), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "BLOCK_BYTES", block)
        with there.open_writer("a") as file:
            for form, size in pieces:
                piece = FORMS[form](bytearray(data[at : at + size]))
                assert file.write(piece) == size
                if not isinstance(piece, bytes) and size:
                    piece[0] ^= 255  # it is the caller's again
                at += size
                assert file.tell() == at
    assert there.read("a") == data
    assert (file.record.size_bytes, file.record.digest) == (len(data), digest.of_bytes(data))


@pytest.mark.parametrize("algorithm", sorted(digest.ALGORITHMS))
def test_the_text_of_a_digest_names_its_algorithm(tmp_path: Path, algorithm: str) -> None:
    data = os.urandom(3 << 20)
    with Place(str(tmp_path)).open_writer("a", digest=algorithm) as file:
        file.write(memoryview(data))
    name, _, found = file.record.digest.partition(":")
    assert name == algorithm
    if algorithm in hashlib.algorithms_available:
        assert found == hashlib.new(algorithm, data).hexdigest()
    own = digest.Digest.like(file.record.digest)
    own.update(data)
    assert str(own) == file.record.digest


@pytest.mark.parametrize(
    ("data", "published"),
    [
        (b"123456789", "crc32c:e3069283"),
        (b"", "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
    ],
)
def test_digests_equal_the_published_ones(data: bytes, published: str) -> None:
    assert digest.of_bytes(memoryview(bytearray(data)), like=published) == published


def test_blake3_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ConfigError, match="pip install blake3"):
        digest.Digest(digest.BLAKE3)


def test_an_algorithm_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'md5' is not a digest algorithm"):
        Place(str(tmp_path)).open_writer("a", digest="md5")
    assert Place(str(tmp_path)).list() == []


def test_numbers_of_other_sizes_are_written_as_bytes(tmp_path: Path) -> None:
    numbers = memoryview(bytearray(os.urandom(4 << 20))).cast("d")
    with Place(str(tmp_path)).open_writer("a") as file:
        assert file.write(numbers) == 4 << 20
    assert file.record.digest == digest.of_bytes(bytes(numbers))


def test_it_digests_on_another_thread(tmp_path: Path) -> None:
    seen: list[str] = []
    with Place(str(tmp_path)).open_writer("a") as file:
        update = file._digest.update

        def look(data: bytes) -> None:
            seen.append(threading.current_thread().name)
            update(data)

        file._digest.update = look
        file.write(bytes(2 << 20))
    assert seen
    assert all(name.startswith("raftkv-digest") for name in seen)


def _write_and_fail(there: Place) -> place.Writer:
    with there.open_writer("a") as file:
        file.write(bytes(2 << 20))
        raise ZeroDivisionError(file)
    return file


@pytest.mark.parametrize("uri", ["local", "memory://aborted"])
def test_a_block_that_fails_leaves_no_file(uri: str, tmp_path: Path) -> None:
    there = Place(str(tmp_path) if uri == "local" else uri)
    with pytest.raises(ZeroDivisionError) as caught:
        _write_and_fail(there)
    assert there.list() == []
    file = caught.value.args[0]
    with pytest.raises(StorageError, match="is not finished"):
        _ = file.record
    with pytest.raises(StorageError, match="open it anew"):
        file.write(b"more")
    file.close()  # as a `finally` does; it finishes nothing
    assert there.list() == []


def test_a_file_of_the_same_name_is_replaced_and_not_changed(tmp_path: Path) -> None:
    """One of a hard link to it, or of a user who has it open to read what is written next, keeps the bytes."""
    there = Place(str(tmp_path))
    (tmp_path / "a").write_bytes(b"old")
    os.link(tmp_path / "a", tmp_path / "copy")
    with (tmp_path / "a").open("rb") as reader:
        with there.open_writer("a") as file:
            file.write(b"new bytes")
        assert reader.read() == b"old"
    assert ((tmp_path / "copy").read_bytes(), there.read("a")) == (b"old", b"new bytes")


def test_one_that_is_abandoned_leaves_the_file_of_the_next(tmp_path: Path) -> None:
    there = Place(str(tmp_path))
    first = there.open_writer("a")
    first.write(b"half")
    with there.open_writer("a") as file:
        file.write(b"whole")
    first.abort()
    assert there.read("a") == b"whole"


def test_one_that_is_forgotten_leaves_no_file(tmp_path: Path) -> None:
    there = Place(str(tmp_path))
    file = there.open_writer("a")
    file.write(b"1")
    del file
    assert there.list() == []


class _Upload(io.BytesIO):
    """A file of fsspec that is finished when it is closed, as those of object stores are."""

    def __init__(self, finished: list[bytes]) -> None:
        super().__init__()
        self.finished = finished
        self.discarded = False

    def discard(self) -> None:
        self.discarded = True

    def close(self) -> None:
        if not self.__dict__.get("_closed"):
            self.finished.append(self.getvalue())
        self._closed = True


def test_an_upload_that_fails_is_discarded_and_never_finished() -> None:
    finished: list[bytes] = []
    upload = _Upload(finished)
    with pytest.raises(ZeroDivisionError), place.Writer(Place("memory://uploads"), "a", upload):
        raise ZeroDivisionError
    upload.close()  # as fsspec does when it is collected
    assert (upload.discarded, finished) == (True, [])


def test_a_disk_that_takes_less_is_asked_again() -> None:
    class Slow(io.BytesIO):
        def write(self, data: bytes) -> int:
            return super().write(bytes(data[:100_000]))

    taken = Slow()
    file = place.Writer(Place("memory://slow"), "a", taken)
    file.write(bytes(range(256)) * 8192)
    file.flush()
    assert taken.getvalue() == bytes(range(256)) * 8192
    file.close()


FULL = """
import sys
from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.storage.place import Place

there = Place(sys.argv[1])
there.write("small", b"1")
try:
    with there.open_writer("shard") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
except StorageError as error:
    print(error)
print([found.name for found in there.list()])
"""
MOUNT_THEN_RUN = 'mount -t tmpfs -o size=8m none "$1" && exec "$2" -c "$3" "$1"'


def test_a_full_disk_in_the_middle_of_a_shard(tmp_path: Path) -> None:
    namespaces = "-m" if os.geteuid() == 0 else "-Urm"
    words = ["unshare", namespaces, "sh", "-c", MOUNT_THEN_RUN, "sh", str(tmp_path), sys.executable, FULL]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    lines = ran.stdout.splitlines()
    wanted = f"cannot write {tmp_path}/shard: No space left on device; free some space there, or use another place"
    assert lines[:1] == [wanted], ran.stderr
    assert lines[1] == "['small']"  # what was written of it makes room again


FORKED = """
import os, sys
from raftkv.checkpoint.storage.place import Place

def write(name):
    with Place(sys.argv[1]).open_writer(name) as file:
        file.write(bytes(4 << 20))
    return file.record.digest

first = write("parent")
child = os.fork()
if child == 0:
    os._exit(0 if write("child") == first else 1)
print(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_digests_on_threads_of_its_own(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.stdout, ran.returncode) == ("0\n", 0)


LEFT_IN_A_CHILD = """
import os, sys
from raftkv.checkpoint.storage.place import Place

parent = os.getpid()
with Place(sys.argv[1]).open_writer("model") as file:
    file.write(bytes(int(sys.argv[2])))
    child = os.fork()
    if child == 0:
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(os.path.getsize(sys.argv[1] + "/model"))
"""


@pytest.mark.long
@pytest.mark.parametrize("size_bytes", [1, 5 << 20])
def test_a_forked_child_that_leaves_the_block_of_its_parent_leaves_the_file_alone(tmp_path, size_bytes):
    """Leave the file to the parent: a child deleted it, or waited for ever for a thread that only the parent has."""
    words = [sys.executable, "-c", LEFT_IN_A_CHILD, str(tmp_path), str(size_bytes)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)
    assert (ran.stdout, ran.returncode) == (f"7\n{size_bytes}\n", 0)
