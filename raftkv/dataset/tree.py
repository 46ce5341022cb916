"""Builds chunks, and an index of them, from sorted entries.

    builder = Builder()
    for entry in entries:
        for digest, blob in builder.add(entry): ...     # blobs that are ready to store
    for digest, blob in builder.finish(): ...
    builder.root, builder.count

The content decides where a chunk ends (at an entry with a certain hash, between a minimum and a maximum size), so
adding or removing an entry changes one or two chunks, and all others are already stored. Index nodes are cut in the
same way, by the digests of their children.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from raftkv.client.arguments import instance
from raftkv.dataset.codec import CHILDREN_MAX, ENTRIES_MAX, LEVEL_MAX, RAW_BYTES_MAX, Child, Columns, Node, seal
from raftkv.dataset.entry import DIGEST_BYTES_MAX, PATH_BYTES_MAX, SHARD_BYTES_MAX, Entry, check_entry
from raftkv.dataset.errors import InvalidEntry

Sealed = tuple[str, bytes]
"""Digest and stored bytes."""

_ROOM: Final = PATH_BYTES_MAX + 2 * SHARD_BYTES_MAX + DIGEST_BYTES_MAX + 64
"""Maximum bytes that one more entry adds to a chunk."""
_CHILD_BYTES: Final = 160


@dataclass(frozen=True, slots=True)
class Cut:
    """The rule for the ends of chunks and nodes.

    Attributes:
        entries_min: minimum entries of a chunk, unless entries are large.
        entries_max: maximum entries of a chunk.
        entries_mean: after the minimum, each entry ends its chunk with a probability of one in this number.
        children_max: maximum children of a node.
    """

    entries_min: int = 4096
    entries_max: int = ENTRIES_MAX
    entries_mean: int = 4096
    children_max: int = CHILDREN_MAX


class Builder:
    """Makes the chunks and the index of one version; see the module.

    Arguments:
        cut: rule for chunk boundaries.

    Attributes:
        root: digest of the root; set by ``finish``.
        count, size_bytes: number of entries, and total size of the files that they name.
        chunks, stored_bytes: number and size of the chunks that were made.
    """

    def __init__(self, cut: Cut | None = None) -> None:
        self.root = ""
        self.count = 0
        self.size_bytes = 0
        self.chunks = 0
        self.stored_bytes = 0
        self._cut = Cut() if cut is None else instance(cut, Cut, "cut")
        self._columns = Columns()
        self._levels: list[list[Child]] = [[]]
        self._raw_bytes: list[int] = [0]
        self._last = ""

    def add(self, entry: Entry) -> Iterator[Sealed]:
        """Take the next entry; yields what is complete with it.

        Raises:
            InvalidEntry: it cannot be published, is a duplicate, or out of order.
        """
        check_entry(entry)
        path = entry.path
        if path <= self._last:
            if path == self._last:
                raise InvalidEntry(f"path {path!r} comes twice; every path has one entry")
            raise InvalidEntry(f"path {path!r} comes after {self._last!r}; sort the entries by path, as sorted() does")
        self._last = path
        self._columns.add(entry)
        if self._ends_chunk(path):
            yield from self._end_chunk()

    def _ends_chunk(self, path: str) -> bool:
        columns, cut = self._columns, self._cut
        if len(columns) < cut.entries_min:
            return columns.raw_bytes > RAW_BYTES_MAX - _ROOM
        by_content = zlib.crc32(path.encode()) % cut.entries_mean == 0
        return by_content or len(columns) >= cut.entries_max or columns.raw_bytes > RAW_BYTES_MAX - _ROOM

    def finish(self) -> Iterator[Sealed]:
        """Yield the rest; ``root`` is known at the end."""
        if len(self._columns):
            yield from self._end_chunk()
        level = 0
        while level + 1 < len(self._levels):
            if self._levels[level]:
                yield from self._end_node(level)
            level += 1
        digest, blob = self._seal(Node(level + 1, tuple(self._levels[level])).encode())
        self.root = digest
        yield digest, blob

    def _end_chunk(self) -> Iterator[Sealed]:
        columns, self._columns = self._columns, Columns()
        digest, blob = self._seal(columns.encode())
        self.chunks += 1
        self.count += len(columns)
        self.size_bytes += columns.size_bytes
        yield digest, blob
        yield from self._add_child(0, Child(digest, columns.first, len(columns), columns.size_bytes))

    def _add_child(self, level: int, child: Child) -> Iterator[Sealed]:
        """Note a child of the open node of a level; the node is ended when the next child comes and it is full."""
        children = self._levels[level]
        size_bytes = 2 * len(child.first.encode()) + _CHILD_BYTES
        if children and self._ends_node(level, size_bytes):
            yield from self._end_node(level)
        self._levels[level].append(child)
        self._raw_bytes[level] += size_bytes

    def _ends_node(self, level: int, size_bytes: int) -> bool:
        children, most = self._levels[level], self._cut.children_max
        if len(children) >= most or self._raw_bytes[level] + size_bytes > RAW_BYTES_MAX:
            return True
        # A quarter at least, then where a digest says so: as with chunks.
        return len(children) >= max(most // 4, 2) and int(children[-1].digest[:8], 16) % (most // 4 + 1) == 0

    def _end_node(self, level: int) -> Iterator[Sealed]:
        if level + 1 == LEVEL_MAX:
            raise InvalidEntry("the dataset has too many entries for one manifest; publish it as several datasets")
        children = self._levels[level]
        digest, blob = self._seal(Node(level + 1, tuple(children)).encode())
        yield digest, blob
        self._levels[level], self._raw_bytes[level] = [], 0
        if level + 1 == len(self._levels):
            self._levels.append([])
            self._raw_bytes.append(0)
        count, size_bytes = sum(child.entries for child in children), sum(child.size_bytes for child in children)
        yield from self._add_child(level + 1, Child(digest, children[0].first, count, size_bytes))

    def _seal(self, raw: bytes) -> Sealed:
        digest, blob = seal(raw)
        self.stored_bytes += len(blob)
        return digest, blob
