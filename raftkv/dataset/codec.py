"""Chunks and index nodes as bytes: ``blob`` (compressed, under its digest), ``chunk`` (entries), ``node`` (the index).

Invariant: no input makes a reader use much more memory than ``RAW_BYTES_MAX``, or raise anything but
``ChunkCorrupted``.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import operator
import re
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from raftkv.dataset.entry import BAD_SHARD, Entry
from raftkv.dataset.errors import ChunkCorrupted

# ---- blobs: compressed bytes under the digest of what is stored
#
#     digest, blob = seal(raw)
#     raw = unseal(digest, blob)         # ChunkCorrupted: not what the digest says, or more than a chunk may be
#
# The digest is that of the compressed bytes, so zlib only gets verified bytes.

BLOB_BYTES_MAX: Final = 512 * 1024
"""Maximum stored size: a third of etcd's limit for a request."""
RAW_BYTES_MAX: Final = BLOB_BYTES_MAX - 1024
"""Maximum unpacked size; smaller, so that even incompressible data fits after zlib."""
DIGEST_CHARACTERS: Final = 64
LEVEL: Final = 6
_DIGEST: Final = re.compile("[0-9a-f]" * DIGEST_CHARACTERS)


def digest_of(blob: bytes) -> str:
    """Return the digest under which bytes are stored."""
    return hashlib.sha256(blob).hexdigest()


def is_digest(text: object) -> bool:
    """Return whether a value has the form of a digest, so that it is safe as part of a key and as a file name."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def seal(raw: bytes) -> tuple[str, bytes]:
    """Return digest and stored form of a chunk or node."""
    blob = zlib.compress(raw, LEVEL)
    return digest_of(blob), blob


def check(digest: str, blob: bytes) -> bytes:
    """Return the stored bytes of a digest.

    Raises:
        ChunkCorrupted: the bytes do not have this digest.
    """
    if len(blob) > BLOB_BYTES_MAX or digest_of(blob) != digest:
        raise ChunkCorrupted(
            f"chunk {digest[:16]} is not what was published: {len(blob)} bytes with another digest; "
            "publish the dataset again with rewrite=True, and have the store's disks looked at"
        )
    return blob


def unseal(digest: str, blob: bytes) -> bytes:
    """Return the unpacked bytes of a blob.

    Raises:
        ChunkCorrupted: the bytes do not have this digest, or were not made by a publisher.
    """
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(check(digest, blob), RAW_BYTES_MAX + 1)
    except zlib.error as error:
        raise foreign(digest, str(error)) from None
    if len(raw) > RAW_BYTES_MAX or not unpacking.eof or unpacking.unused_data:
        raise foreign(digest, f"it unpacks to more than {RAW_BYTES_MAX} bytes, or has others behind it")
    return raw


def foreign(digest: str, why: str) -> ChunkCorrupted:
    """Make the error for bytes that have the right digest but that raftkv does not publish."""
    return ChunkCorrupted(
        f"chunk {digest[:16]} holds what raftkv does not publish: {why}; find out who may write below /raftkv/data/"
    )


# ---- chunks: thousands of entries, sorted by path, as columns
#
#     C {"count": 2, "shards": ["a.tar"], ...}\n | shared: 0 6 | sizes | shards | gaps | digests | train/ \0 1.jpg
#
# Columns compress better than rows, and are read by C code: each is an array of the narrowest width that fits; a column
# of zeros is omitted. A path is stored as the number of characters that it shares with the previous path, and the rest.
# An offset is stored as the gap after the end of the previous file.

ENTRIES_MAX: Final = 16384
_CHUNK_MARK: Final = b"C"
_UNSIGNED: Final = (("B", 1 << 8), ("H", 1 << 16), ("I", 1 << 32), ("Q", 1 << 64))
_SIGNED: Final = (("b", 1 << 7), ("h", 1 << 15), ("i", 1 << 31), ("q", 1 << 63))
_HEAD_BYTES: Final = 512
_GAPS: Final = 3
_CONTROL: Final = bytes([*range(1, 32), 127])
"""Octets that paths must not contain; a zero separates two paths."""
_ENTRY_BYTES: Final = 4 + 8 + 2 + 8 + 1 + 1
"""Upper bound of an entry's columns except path and digest: shared, size, shard, gap, digest length, separator."""


class Columns:
    """The entries of a chunk under construction. ``raw_bytes`` is an upper bound of the size of ``encode()``."""

    def __init__(self) -> None:
        self.first = ""
        self.last = ""
        self.size_bytes = 0
        self.raw_bytes = _HEAD_BYTES
        self._shared: list[int] = []
        self._suffixes: list[str] = []
        self._sizes: list[int] = []
        self._shards: list[int] = []
        self._offsets: list[int] = []
        self._digests: list[bytes] = []
        self._shard_numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, entry: Entry) -> None:
        """Add the next entry, which was checked and is greater than the last."""
        path, size, shard, offset, digest = entry
        shared = shared_length(self.last, path)
        suffix = path[shared:]
        number = self._shard_numbers.get(shard)
        if number is None:
            number = self._shard_numbers[shard] = len(self._shard_numbers)
            self.raw_bytes += 2 * len(shard.encode()) + 4
        self.raw_bytes += _ENTRY_BYTES + len(digest) + (len(suffix) if suffix.isascii() else len(suffix.encode()))
        self._shared.append(shared)
        self._suffixes.append(suffix)
        self._sizes.append(size)
        self._shards.append(number)
        self._offsets.append(offset)
        self._digests.append(digest)
        self.size_bytes += size
        self.first = self.first or path
        self.last = path

    def encode(self) -> bytes:
        """Return the chunk, ready for ``seal``."""
        lengths = [len(digest) for digest in self._digests]
        ends = map(operator.add, self._offsets, self._sizes)
        gaps = list(map(operator.sub, self._offsets, [0, *ends]))
        columns = [
            _packed(self._shared, _UNSIGNED),
            _packed(self._sizes, _UNSIGNED),
            _packed(self._shards, _UNSIGNED),
            _packed(gaps if any(self._offsets) else [0] * len(gaps), _SIGNED),
            _packed(lengths, _UNSIGNED),
        ]
        head = {
            "count": len(self),
            "shards": list(self._shard_numbers),
            "offsets": any(self._offsets),
            "widths": "".join(code for code, _ in columns),
        }
        line = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
        data = b"".join([*(data for _, data in columns), *self._digests])
        return b"".join([_CHUNK_MARK, line, b"\n", data, "\0".join(self._suffixes).encode()])


class Chunk:
    """The entries of a chunk, for reading.

    Attributes:
        size_bytes: approximate memory.
    """

    __slots__ = ("_digests", "_offsets", "_shard_names", "_shards", "_sizes", "paths", "size_bytes")

    def __init__(
        self,
        paths: list[str],
        sizes: Sequence[int],
        shard_names: list[str],
        shards: Sequence[int],
        offsets: Sequence[int],
        digests: Sequence[bytes],
    ) -> None:
        self.paths = paths
        self._sizes = sizes
        self._shard_names = shard_names
        self._shards = shards
        self._offsets = offsets
        self._digests = digests
        held = sum(map(sys.getsizeof, paths)) + sum(map(sys.getsizeof, digests))
        self.size_bytes = held + sum(map(sys.getsizeof, (paths, sizes, shards, offsets, digests))) + 1024

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, position: int) -> Entry:
        return Entry(
            self.paths[position],
            self._sizes[position],
            self._shard_names[self._shards[position]],
            self._offsets[position],
            self._digests[position] if self._digests else b"",
        )

    def __iter__(self) -> Iterator[Entry]:
        shards = map(self._shard_names.__getitem__, self._shards)
        digests = self._digests or [b""] * len(self)
        return map(Entry._make, zip(self.paths, self._sizes, shards, self._offsets, digests, strict=True))

    def find(self, path: str) -> Entry | None:
        """Return the entry of a path; None: absent."""
        position = bisect.bisect_left(self.paths, path)
        return self[position] if position < len(self.paths) and self.paths[position] == path else None


def shared_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two strings."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if other.startswith(one[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def decode_chunk(digest: str, raw: bytes) -> Chunk:
    """Decode a chunk.

    Arguments:
        digest: of its bytes, for errors.
        raw: what ``unseal`` returned.

    Raises:
        ChunkCorrupted: no publisher has written it.
    """
    try:
        return _decode(raw)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
        raise foreign(digest, f"{type(error).__name__}: {error}") from None


def _decode(raw: bytes) -> Chunk:
    line, _, data = raw.partition(b"\n")
    if line[:1] != _CHUNK_MARK:
        raise ValueError("it is not a chunk")
    head = json.loads(line[1:])
    count, shards, codes = int(head["count"]), list(head["shards"]), str(head["widths"])
    if not 0 < count <= ENTRIES_MAX or not all(isinstance(name, str) for name in shards):
        raise ValueError(f"{count} entries")
    if any(map(BAD_SHARD.search, shards)):
        raise ValueError("a shard that leads elsewhere")
    at = 0
    columns: list[Any] = []
    for number, code in enumerate(codes):
        column, used = _unpacked(code, "bhiq" if number == _GAPS else "BHIQ", count, memoryview(data)[at:])
        columns.append(column)
        at += used
    shared, sizes, numbers, gaps, lengths = columns
    if max(numbers) >= len(shards):
        raise ValueError("a shard without a name")
    digests, at = _cut(data, at, lengths)
    if len(data[at:].translate(None, _CONTROL)) < len(data) - at:
        raise ValueError("a path with control characters")
    paths = _paths(shared, data[at:].decode().split("\0"))
    if not head["offsets"] and any(gaps):
        raise ValueError("offsets where there are none")
    offsets = _offsets(gaps, sizes) if head["offsets"] else gaps
    return Chunk(paths, sizes, shards, numbers, offsets, digests)


def _cut(data: bytes, at: int, lengths: Sequence[int]) -> tuple[Sequence[bytes], int]:
    if not any(lengths):
        return (), at
    ends = list(accumulate(lengths, initial=at))
    return [data[first:end] for first, end in pairwise(ends)], ends[-1]


def _paths(shared: Sequence[int], suffixes: list[str]) -> list[str]:
    paths = []
    path, total = "", 0
    for length, suffix in zip(shared, suffixes, strict=True):
        path = path[:length] + suffix
        total += len(path)
        if total > 64 * 1024 * 1024:  # 16,384 paths of 4 KiB
            raise ValueError("its paths are too long")
        paths.append(path)
    # Programs open files by these paths, so none may lead out of a folder; lookups need the order.
    text = "/" + "/\0/".join(paths) + "/"
    if any(part in text for part in ("//", "/./", "/../")):
        raise ValueError("a path that leads elsewhere")
    if not all(map(operator.lt, paths, paths[1:])):
        raise ValueError("its paths are not sorted")
    return paths


def _offsets(gaps: Sequence[int], sizes: Sequence[int]) -> Sequence[int]:
    offsets = array("q", accumulate(map(operator.add, gaps, [0, *sizes[:-1]])))
    if min(offsets) < 0:
        raise ValueError("a negative offset")
    return offsets


def _packed(values: list[int], codes: Sequence[tuple[str, int]]) -> tuple[str, bytes]:
    """Return the narrowest type code that holds the values, and their bytes; ``0``: all are zero."""
    low, high = min(values, default=0), max(values, default=0)
    if not low and not high:
        return "0", b""
    code = next(code for code, limit in codes if high < limit and -low <= limit)
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return code, packed.tobytes()


def _unpacked(code: str, admitted: str, count: int, data: memoryview) -> tuple[Sequence[int], int]:
    if code == "0":
        return bytes(count), 0
    if code not in admitted:
        raise ValueError(f"width {code!r}")
    column = array(code)
    used = column.itemsize * count
    if len(data) < used:
        raise ValueError("it is cut off")
    column.frombytes(data[:used])
    if sys.byteorder == "big":
        column.byteswap()
    return column, used


# ---- index nodes: their children, in order; the children of level 1 are chunks, those of other levels are nodes
#
#     N {"level": 1, "digests": ["ab..", ...], "first": ["a/1", ...], "counts": [8192, ...], "sizes": [...]}

CHILDREN_MAX: Final = 1024
LEVEL_MAX: Final = 6
_NODE_MARK: Final = b"N"


class Child(NamedTuple):
    """A chunk or node below an index node.

    Attributes:
        digest: digest of its blob.
        first: path of its first entry.
        entries: number of entries below it.
        size_bytes: total size of the files that they name.
    """

    digest: str
    first: str
    entries: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """An index node."""

    level: int
    children: tuple[Child, ...]

    def encode(self) -> bytes:
        """Return the node, ready for ``seal``."""
        names = ("digests", "first", "counts", "sizes")
        columns = zip(*self.children, strict=True) if self.children else ((),) * 4
        plain = {"level": self.level, **dict(zip(names, columns, strict=True))}
        return _NODE_MARK + json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()


def decode_node(digest: str, raw: bytes) -> Node:
    """Decode a node.

    Arguments:
        digest: of its bytes, for errors.
        raw: what ``unseal`` returned.

    Raises:
        ChunkCorrupted: no publisher has written it.
    """
    try:
        if raw[:1] != _NODE_MARK:
            raise ValueError("it is not an index node")
        plain = json.loads(raw[1:])
        level = plain["level"]
        columns = zip(plain["digests"], plain["first"], plain["counts"], plain["sizes"], strict=True)
        children = tuple(_checked(columns))
        if not isinstance(level, int) or not 1 <= level <= LEVEL_MAX:
            raise ValueError(f"level {level!r}")
        firsts = [child.first for child in children]
        if sorted(set(firsts)) != firsts:
            raise ValueError("its children are not sorted")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise foreign(digest, f"{type(error).__name__}: {error}") from None
    return Node(level, children)


def _checked(columns: Iterable[tuple[object, object, object, object]]) -> Iterable[Child]:
    for digest, first, count, size in columns:
        if not isinstance(digest, str) or not is_digest(digest):
            raise ValueError(f"digest {digest!r}")
        if not isinstance(first, str) or not isinstance(count, int) or not isinstance(size, int) or count < 1:
            raise ValueError(f"child {first!r}")
        yield Child(digest, first, count, size)
