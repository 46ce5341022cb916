"""Misplaced pages make the open fail with one line, instead of crashing the process inside LMDB."""

from __future__ import annotations

import mmap
import random
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from raftkv.errors import CorruptionError, StorageError
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.backend.pages import _last_meta, check_pages
from raftkv.storage.mvcc import Store
from tests.storage.conftest import MAP_SIZE_BYTES

PAGE_BYTES = mmap.PAGESIZE
KEYS = 600
LAST_PAGE_AT = 136
"""Where in a meta page the number of the last page stands."""


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database of some pages, a few of them free, with values that take pages of their own."""
    path = tmp_path_factory.mktemp("pages") / "db"
    with closing(LMDBBackend(path, MAP_SIZE_BYTES)) as backend, closing(Store.open(backend)) as store:
        for number in range(KEYS):
            txn = store.begin()
            txn.put(b"key %03d" % (number % 50), b"value %03d " % number * (900 if number % 100 == 0 else 9))
            txn.end()
            store.set_applied(number + 1, 1)
            if number % 100 == 0:
                store.commit()
        store.commit()
    return path.read_bytes()


def _contents(path: Path) -> list[tuple[bytes, bytes]]:
    with closing(LMDBBackend(path, MAP_SIZE_BYTES)) as backend, closing(Store.open(backend)) as store:
        return list(store.history(0, KEYS + 1))


def _page(data: bytes, number: int) -> bytes:
    return data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]


@pytest.mark.parametrize("kind", ["zeros", "of another place", "garbage"])
def test_a_page_that_was_lost_is_never_read_for_another(tmp_path: Path, clean: bytes, kind: str) -> None:
    path, rng = tmp_path / "db", random.Random(kind)
    path.write_bytes(clean)
    expected, refused = _contents(path), 0
    pages = len(clean) // PAGE_BYTES
    for number in range(2, pages):
        other = _page(clean, rng.randrange(2, pages))
        page = {"zeros": bytes(PAGE_BYTES), "of another place": other, "garbage": rng.randbytes(PAGE_BYTES)}[kind]
        damaged = bytearray(clean)
        damaged[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] = page
        path.write_bytes(damaged)
        try:
            assert _contents(path) == expected  # a free page, or the same one
        except (CorruptionError, StorageError) as error:
            refused += len(str(error).splitlines()) == 1
    assert refused > pages // 2


def test_node_that_points_behind_its_page_is_refused_before_lmdb_follows_it(tmp_path: Path) -> None:
    """A flipped bit in the offset of a node ended a starting member with SIGBUS, without a word about the database."""
    path = tmp_path / "db"
    with closing(LMDBBackend(path, MAP_SIZE_BYTES)) as backend, closing(Store.open(backend)) as store:
        store.set_applied(1, 1)
        store.commit()
    sound = path.read_bytes()
    leaves = [at for at in range(2 * PAGE_BYTES, len(sound), PAGE_BYTES) if sound[at + 10 : at + 12] == b"\x02\0"]
    refused = 0
    for leaf in leaves:
        damaged = bytearray(sound)
        damaged[leaf + 17] ^= 0x80
        path.write_bytes(damaged)
        ended = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        refused += "is damaged: page" in ended.stdout
    assert refused > 2


@pytest.mark.parametrize(
    ("place", "bit", "why"),
    [(1, 0x80, "page 2[0-9]+ points behind its end"), (3, 0x40, "a value of page 2[0-9]+ goes beyond its end")],
    ids=["offset of a node", "size of a value"],
)
def test_flipped_bit_in_a_large_tree_ends_no_start_with_a_signal(
    tmp_path: Path, place: int, bit: int, why: str
) -> None:
    path, value = tmp_path / "db", bytes(1500)
    with closing(LMDBBackend(path, MAP_SIZE_BYTES)) as backend, closing(Store.open(backend)) as store:
        txn = store.begin()
        for number in range(600):
            txn.put(b"%d" % number, value)
        txn.end()
        store.set_applied(1, 1)
        store.commit()
    data = bytearray(path.read_bytes())
    leaf = next(at for at in range(200 * PAGE_BYTES, len(data), PAGE_BYTES) if data[at + 10 : at + 12] == b"\x02\0")
    at = leaf + 16 if place == 1 else leaf + int.from_bytes(data[leaf + 16 : leaf + 18], "little")
    data[at + place] ^= bit
    path.write_bytes(data)
    ended = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert re.search(f"is damaged: {why}", ended.stdout)


READ = """
import sys
from pathlib import Path
from raftkv.errors import CorruptionError
from raftkv.storage import schema
from raftkv.storage.backend.lmdb import LMDBBackend, read_value
from raftkv.storage.mvcc import Store
read_value(Path(sys.argv[1]), schema.META, schema.META_FORMAT_VERSION)
try:
    Store.open(LMDBBackend(Path(sys.argv[1])))
except CorruptionError as error:
    print(error)
"""


@pytest.mark.parametrize("place", [0, 10, 12, 15], ids=["number", "kind", "how many", "how many, last byte"])
def test_a_large_value_whose_pages_are_not_its_own_is_refused(tmp_path: Path, clean: bytes, place: int) -> None:
    """A deletion frees as many pages as the first one says: those of other records, if a bit was flipped there."""
    path, refused = tmp_path / "db", 0
    for page in (at for at in range(2 * PAGE_BYTES, len(clean), PAGE_BYTES) if clean[at + 10 : at + 12] == b"\x04\0"):
        damaged = bytearray(clean)
        damaged[page + place] ^= 4
        path.write_bytes(damaged)
        try:
            check_pages(path)
        except CorruptionError as error:
            refused += "has no pages of its own" in str(error)
    assert refused == 6  # all but those of values that were free pages by then


def test_a_free_page_that_is_in_use_is_refused(tmp_path: Path, clean: bytes) -> None:
    """The next commit would write over it."""
    path = tmp_path / "db"
    path.write_bytes(clean)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        meta = _last_meta(data)
        assert meta is not None
        leaf = meta.free.root * PAGE_BYTES
        node = leaf + int.from_bytes(data[leaf + 16 : leaf + 18], "little")
        first = node + 8 + 8 + 8  # behind the head of the node, its key, and the count
        data[first : first + 8] = meta.main.root.to_bytes(8, "little")
    with pytest.raises(CorruptionError, match=rf"page {meta.main.root} is in use, and on the list of free pages"):
        check_pages(path)


def test_a_sound_file_passes(tmp_path: Path, clean: bytes) -> None:
    path = tmp_path / "db"
    for data in (b"", b"no database", clean):
        path.write_bytes(data)
        check_pages(path)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("bit", [9, 11, 13, 16, 19], ids=["2 MiB", "8 MiB", "32 MiB", "256 MiB", "2 GiB"])
def test_a_file_that_claims_more_is_damaged_and_not_full(tmp_path: Path, clean: bytes, is_open: bool, bit: int) -> None:
    """A flipped bit in the number of the last page raised the alarm that stops all writes of the cluster."""
    path = tmp_path / "db"
    path.write_bytes(clean)

    def flip() -> None:
        with path.open("r+b") as file:
            for meta in (0, 1):
                file.seek(meta * PAGE_BYTES + LAST_PAGE_AT + bit // 8)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 1 << bit % 8]))

    if not is_open:
        flip()
        with pytest.raises(CorruptionError, match=rf"is damaged: it is cut short: {len(clean)} of [0-9]{{7,10}} bytes"):
            LMDBBackend(path, MAP_SIZE_BYTES)
        return
    resized = "(.*MDB_MAP_RESIZED|its last transaction)" if bit > 13 else "its last transaction"
    for map_size_bytes, why in ((1 << 34, "its last transaction"), (MAP_SIZE_BYTES, resized)):
        path.write_bytes(clean)
        with closing(LMDBBackend(path, map_size_bytes)) as backend, closing(Store.open(backend)) as store:
            before_bytes = backend.size_bytes
            flip()
            txn = store.begin()
            txn.put(b"more", b"value" * PAGE_BYTES)
            txn.end()
            store.set_applied(KEYS + 1, 1)
            with pytest.raises(CorruptionError, match=f"is damaged: {why}"):
                store.commit()
            assert backend.size_bytes == before_bytes
