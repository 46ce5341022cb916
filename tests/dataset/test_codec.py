"""Chunks and nodes: what goes in comes out, and no bytes make a reader fail otherwise than with a typed error."""

from __future__ import annotations

import doctest
import hashlib
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.dataset import codec
from raftkv.dataset import entry as entry_module
from raftkv.dataset import shuffle as shuffle_module
from raftkv.dataset.entry import NUMBER_MAX, Entry, check_entry
from raftkv.dataset.errors import ChunkCorrupted, InvalidEntry
from raftkv.dataset.tree import Builder

NAMES = st.text(
    st.characters(exclude_characters="/\\", exclude_categories=("Cc", "Cs")), min_size=1, max_size=8
).filter(lambda name: name not in (".", ".."))
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
NUMBERS = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, NUMBER_MAX))
ENTRIES = st.builds(
    Entry, PATHS, NUMBERS, st.sampled_from(["", "a.tar", "s3://b/ü.tar"]), NUMBERS, st.binary(max_size=64)
)


def packed(entries: list[Entry]) -> bytes:
    columns = codec.Columns()
    for each in entries:
        columns.add(each)
    raw = columns.encode()
    assert len(raw) <= columns.raw_bytes
    return raw


@pytest.mark.long
@pytest.mark.parametrize(("digest_bytes", "most"), [(0, 6), (16, 24)])
def test_entry_of_a_dataset_of_images_takes_few_bytes(digest_bytes: int, most: int) -> None:
    builder = Builder()
    for number in range(40_000):
        path = f"train/n{number // 1300:08d}/n{number // 1300:08d}_{number:08d}.JPEG"
        shard, at = divmod(number, 10_000)
        digest = hashlib.sha256(path.encode()).digest()[:digest_bytes]
        size_bytes = 60_000 + number * 7919 % 90_000
        list(builder.add(Entry(path, size_bytes, f"train-{shard:05d}.tar", at * 150_016, digest)))
    list(builder.finish())
    assert builder.stored_bytes / builder.count <= most


@given(st.lists(ENTRIES, min_size=1, max_size=30, unique_by=lambda each: each.path))
def test_a_chunk_holds_what_was_put_in(found: list[Entry]) -> None:
    found.sort()
    for each in found:
        check_entry(each)
    read = codec.decode_chunk("d", packed(found))
    assert list(read) == found
    assert [read[at] for at in range(len(read))] == found
    assert all(read.find(each.path) == each for each in found)
    assert read.find(found[0].path + "\0") is None


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Entry("", 1), "path"),
        (Entry("/etc/passwd", 1), "path"),
        (Entry("a/../b", 1), "path"),
        (Entry("..", 1), "path"),
        (Entry("a//b", 1), "path"),
        (Entry("a/", 1), "path"),
        (Entry("./a", 1), "path"),
        (Entry("a\nb", 1), "path"),
        (Entry("a\0b", 1), "path"),
        (Entry("\ud800", 1), "path"),
        (Entry("ü" * 2049, 1), "too long"),
        (Entry("a", -1), "size"),
        (Entry("a", NUMBER_MAX + 1), "size"),
        (Entry("a", True), "size"),
        (Entry("a", 1.0), "size"),
        (Entry("a", 1, "../x.tar"), "shard"),
        (Entry("a", 1, "x" * 1025), "shard"),
        (Entry("a", 1, "", -1), "offset"),
        (Entry("a", 1, "", 0, b"x" * 65), "digest"),
        (Entry(b"a", 1), "path"),
    ],
)
def test_unpublishable_entries_are_refused_in_one_line(found: Entry, why: str) -> None:
    with pytest.raises(InvalidEntry, match=why) as error:
        check_entry(found)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_the_largest_entries_fit_into_chunks_that_can_be_stored() -> None:
    builder = Builder()
    random_like = "".join(chr(0x4E00 + (at * 7919) % 20000) for at in range(1300))
    sealed = []
    for number in range(600):
        large = Entry(f"{number:06d}{random_like}", NUMBER_MAX, f"{number}" + "\\" * 900, NUMBER_MAX, b"%64d" % number)
        sealed += builder.add(large)
    sealed += builder.finish()
    assert builder.chunks > 3
    assert max(len(stored) for _, stored in sealed) <= codec.BLOB_BYTES_MAX
    assert sum(
        len(codec.decode_chunk(digest, codec.unseal(digest, stored))) for digest, stored in sealed[: builder.chunks]
    )


def test_a_bomb_is_not_unpacked() -> None:
    digest, stored = codec.seal(b"C" + b"0" * (64 * 1024 * 1024))
    assert len(stored) < codec.BLOB_BYTES_MAX
    with pytest.raises(ChunkCorrupted, match="unpacks to more"):
        codec.unseal(digest, stored)


def test_bytes_of_another_digest_are_refused_before_they_are_unpacked() -> None:
    digest, stored = codec.seal(b"C")
    with pytest.raises(ChunkCorrupted, match="rewrite=True"):
        codec.unseal(digest, stored[:-1])
    behind = stored + b"x"
    with pytest.raises(ChunkCorrupted, match="behind"):
        codec.unseal(codec.digest_of(behind), behind)
    no_zlib = b"no zlib"
    with pytest.raises(ChunkCorrupted):
        codec.unseal(codec.digest_of(no_zlib), no_zlib)


@pytest.mark.parametrize("paths", [["a", "../b"], ["b", "a"], ["a", "a"], ["/a"], ["a//b"], ["a/./b"], ["a/.."], [""]])
def test_a_hostile_chunk_leads_nowhere(paths: list[str]) -> None:
    text = "\0".join(paths).encode()
    head = {"count": len(paths), "shards": [""], "offsets": False, "widths": "00000"}
    with pytest.raises(ChunkCorrupted):
        codec.decode_chunk("d", b"C" + json.dumps(head).encode() + b"\n" + text)


@pytest.mark.parametrize("shard", ["../../etc/passwd", "a/..", "a\nb", "\x1b[31m"])
def test_a_hostile_shard_leads_nowhere(shard: str) -> None:
    head = {"count": 1, "shards": [shard], "offsets": False, "widths": "00000"}
    with pytest.raises(ChunkCorrupted, match="a shard that leads elsewhere"):
        codec.decode_chunk("d", b"C" + json.dumps(head).encode() + b"\na")


@pytest.mark.parametrize("path", ["a\nb", "\x1b[31m", "a\x7f"])
def test_control_characters_reach_no_terminal(path: str) -> None:
    head = {"count": 1, "shards": [""], "offsets": False, "widths": "00000"}
    with pytest.raises(ChunkCorrupted, match="control characters"):
        codec.decode_chunk("d", b"C" + json.dumps(head).encode() + b"\n" + path.encode())


@pytest.mark.parametrize("has_offsets", [False, True])
def test_no_offset_is_negative(has_offsets: bool) -> None:
    head = {"count": 1, "shards": [""], "offsets": has_offsets, "widths": "000b0"}
    with pytest.raises(ChunkCorrupted, match="offset"):
        codec.decode_chunk("d", b"C" + json.dumps(head).encode() + b"\n" + b"\xfba")


def test_a_chunk_whose_paths_grow_without_end_is_refused() -> None:
    count = codec.ENTRIES_MAX
    head = {"count": count, "shards": [""], "offsets": False, "widths": "I0000"}
    shared = (2**31).to_bytes(4, "little") * count
    raw = b"C" + json.dumps(head).encode() + b"\n" + shared + b"\0".join([b"x" * 20] * count)
    assert len(zlib.compress(raw)) < codec.BLOB_BYTES_MAX
    with pytest.raises(ChunkCorrupted, match="too long"):
        codec.decode_chunk("d", raw)


def test_examples_of_the_documentation() -> None:
    for module in (entry_module, shuffle_module):
        assert doctest.testmod(module, optionflags=doctest.IGNORE_EXCEPTION_DETAIL).failed == 0
