"""bbolt database files: written files can be read, and the reader checks every value in a file."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.errors import InvariantError, StorageError
from raftkv.storage.bolt import page as pages
from raftkv.storage.bolt.reader import BoltFile
from raftkv.storage.bolt.writer import Layout, measure, write
from tests.fuzz.memory import measured

Content = dict[bytes, dict[bytes, bytes]]


def buckets(content: Content) -> list[tuple[bytes, list[tuple[bytes, bytes]]]]:
    return [(name, sorted(items.items())) for name, items in sorted(content.items())]


def written(content: Content) -> bytes:
    return b"".join(write(buckets(content), measure(buckets(content))))


def read(path: Path) -> Content:
    with BoltFile(path) as file:
        found = {name: dict(file.items(name)) for name in file.buckets()}
        file.check_free_pages()
        return found


NAMES = st.binary(min_size=1, max_size=40)
VALUES = st.one_of(st.binary(max_size=60), st.integers(0, 20_000).map(lambda size: bytes([size % 251]) * size))
KEYS = st.one_of(NAMES, st.integers(1, 6_000).map(lambda size: bytes([size % 251 + 1]) * size))


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(NAMES, st.dictionaries(KEYS, VALUES, max_size=60), max_size=6))
def test_written_database_is_read_back(tmp_path_factory: pytest.TempPathFactory, content: Content) -> None:
    path = tmp_path_factory.mktemp("bolt") / "db"
    data = written(content)
    assert len(data) == measure(buckets(content)).size_bytes
    path.write_bytes(data)
    assert read(path) == content


def test_a_tree_of_several_levels(tmp_path: Path) -> None:
    content = {b"key": {struct.pack(">QBQ", i, 95, 0): b"%d" % i for i in range(50_000)}, b"empty": {}}
    path = tmp_path / "db"
    path.write_bytes(written(content))
    with BoltFile(path) as file:
        assert file.buckets() == [b"empty", b"key"]
        assert list(file.items(b"key")) == sorted(content[b"key"].items())
        assert list(file.items(b"absent")) == []


@pytest.mark.parametrize("size", [16_384, 1_024])
def test_pages_of_other_sizes_and_a_torn_first_meta_page(tmp_path: Path, size: int) -> None:
    inline = pages.BUCKET.pack(0, 0) + pages.encode_leaf(0, [(b"k", b"v")], 34, 0)
    leaf = pages.encode_leaf(3, [(b"key", inline)], 100, pages.BUCKET_FLAG)
    metas = [pages.encode_meta(pages.Meta(size, 3, 2, 4, transaction)) for transaction in (0, 1)]
    freelist = pages.HEAD.pack(2, pages.FREELIST, 0, 0).ljust(size, b"\0")
    path = tmp_path / "db"
    path.write_bytes(b"".join((*metas, freelist, leaf.ljust(size, b"\0"))))
    assert read(path) == {b"key": {b"k": b"v"}}
    path.write_bytes(b"".join((bytes(size), metas[1], freelist, leaf.ljust(size, b"\0"))))
    assert read(path) == {b"key": {b"k": b"v"}}


def test_the_newest_sound_meta_page_counts(tmp_path: Path) -> None:
    data = bytearray(written({b"key": {b"k": b"v"}}))
    older = pages.encode_meta(pages.Meta(4096, 999, 2, 3, 1))  # says nonsense, but is older than the other
    newer = pages.encode_meta(pages.Meta(4096, measure(buckets({b"key": {b"k": b"v"}})).root, 2, len(data) // 4096, 2))
    path = tmp_path / "db"
    path.write_bytes(newer + older + bytes(data[8192:]))
    assert read(path) == {b"key": {b"k": b"v"}}


CONTENT: Content = {
    b"key": {struct.pack(">QBQ", i, 95, 0): b"value of %d" % i for i in range(3_000)},
    b"large": {b"a": b"x" * 30_000, b"b": b"y"},
    b"meta": {b"consistent_index": b"12345678"},
}


@pytest.mark.long
def test_damage_is_one_error_or_none(tmp_path: Path) -> None:
    """Flipped bytes, mostly where numbers are: a clear refusal, or items; nothing else, and an end."""
    data, path = written(CONTENT), tmp_path / "db"
    count, refusals = sum(map(len, CONTENT.values())), list[str]()
    chance = random.Random(12)
    for _ in range(1_500):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            page = chance.randrange(len(data) // 4096)
            damaged[page * 4096 + chance.choice((chance.randrange(80), chance.randrange(4096)))] = chance.choice(
                (0, 1, 255, chance.randrange(256))
            )
        path.write_bytes(damaged)
        reason = refusal(path, count)
        refusals.append(reason)
        assert reason == "" or (str(path) in reason and "\n" not in reason)
    assert 100 < refusals.count("") < 1_400


def refusal(path: Path, items_max: int) -> str:
    """Return why a file was refused; empty if it was read and held only the original items."""
    try:
        return "" if sum(map(len, read(path).values())) <= items_max else "too many items"
    except StorageError as error:
        return str(error)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data, path = written({b"key": CONTENT[b"meta"], b"large": CONTENT[b"large"]}), tmp_path / "db"
    for size in (0, 1, 63, 64, 4095, 4096, 5000, 8192, len(data) - 4096, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(StorageError):
            read(path)


def patched(data: bytes, offset: int, form: str, *values: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, offset, *values)
    return bytes(changed)


def test_hostile_files(tmp_path: Path) -> None:
    """Each names a page or a number that would lead a trusting reader astray: into a loop, or to take all memory."""
    data, path = written(CONTENT), tmp_path / "db"
    layout = measure(buckets(CONTENT))
    first_branch = next(
        number for number in range(3, layout.pages) if struct.unpack_from("<H", data, number * 4096 + 8)[0] == 1
    )
    at = first_branch * 4096
    hostile = {
        "says that it is page": patched(data, 3 * 4096, "<Q", 4),
        "multiple references": patched(data, at + 32 + 8, "<Q", struct.unpack_from("<Q", data, at + 24)[0]),
        "out of bounds": patched(data, at + 24, "<Q", 1 << 60),
        "more pages is out of bounds": patched(data, 3 * 4096 + 12, "<I", 0xFFFFFFFF),
        "too short for": patched(data, 3 * 4096 + 10, "<H", 0xFFFF),
        "runs beyond": patched(data, 3 * 4096 + 16 + 12, "<I", 0xFFFFFFFF),
        "cannot have": patched(data, at + 10, "<H", 0),
        "has flags": patched(data, at + 8, "<H", 16),
        "do not ascend": patched(data, 3 * 4096 + 16 + 4, "<I", 80),
        "is not a freelist": patched(data, 2 * 4096 + 8, "<H", 2),
        "reachable freed": patched(data, 2 * 4096 + 10, "<HIQ", 1, 0, 3),
        "runs beyond page 2": patched(data, 2 * 4096 + 10, "<HIQ", 0xFFFF, 0, 1 << 60),
        "free page": patched(data, 2 * 4096 + 10, "<HIQ", 1, 0, 1 << 40),
    }
    for reason, content in hostile.items():
        path.write_bytes(content)
        with pytest.raises(StorageError, match=reason):
            read(path)


def test_no_page_takes_more_memory_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file claims that one page is as long as the file; the reader must not read it."""
    path = tmp_path / "db"
    path.write_bytes(written({b"key": {b"k": b"x" * 20_000}}))
    monkeypatch.setattr("raftkv.storage.bolt.reader.PAGE_MAX_BYTES", 16_384)
    with pytest.raises(StorageError, match="with 4 more pages is out of bounds"):
        read(path)


def test_a_branch_that_is_its_own_child_ends(tmp_path: Path) -> None:
    data, path = written(CONTENT), tmp_path / "db"
    at = next(n for n in range(3, len(data) // 4096) if struct.unpack_from("<H", data, n * 4096 + 8)[0] == 1) * 4096
    path.write_bytes(patched(data, at + 24, "<Q", at // 4096))
    with pytest.raises(StorageError, match="multiple references"):
        read(path)


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        (b"", "invalid database"),
        (b"PK\x03\x04" * 5_000, "invalid database"),
        (patched(pages.encode_meta(pages.Meta(4096, 3, 2, 4, 0)), 20, "<I", 3), "version mismatch"),
        (patched(pages.encode_meta(pages.Meta(4096, 3, 2, 4, 0)), 60, "<I", 3), "checksum error"),
        (pages.encode_meta(pages.Meta(4096, 3, 2, 1 << 50, 0)), "too short"),
        (pages.encode_meta(pages.Meta(4096, 3, 2, 1, 0)), "out of bounds"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, meta: bytes, reason: str) -> None:
    path = tmp_path / "db"
    path.write_bytes(meta)
    with pytest.raises(StorageError, match=reason):
        read(path)
    with pytest.raises(StorageError, match="no such file or directory"):
        BoltFile(tmp_path / "none")


def test_writer_refuses_unordered_keys_and_wrong_layout() -> None:
    for items in ([(b"b", b""), (b"a", b"")], [(b"a", b""), (b"a", b"")], [(b"", b"")]):
        with pytest.raises(InvariantError, match="does not come after"):
            measure([(b"key", items)])
    with pytest.raises(InvariantError, match="measured were"):
        list(write([(b"key", [(b"a", b"x" * 9_000)])], Layout(4, 3)))


def test_memory_does_not_grow_with_the_file() -> None:
    """The writer keeps one page of each level: 60,000 items pass through a few hundred kilobytes."""

    def items() -> list[tuple[bytes, object]]:
        return [(b"key", ((i.to_bytes(17, "big"), b"v" * 100) for i in range(1, 60_000)))]

    layout = measure(items())
    assert layout.size_bytes > 8_000_000

    def write_all() -> None:
        assert sum(map(len, write(items(), layout))) == layout.size_bytes

    assert measured(write_all).peak_bytes < 300_000
