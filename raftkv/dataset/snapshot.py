"""One version of a dataset, as its reader sees it: it never changes, whatever is published meanwhile.

::

    files = data.next_pass()
    len(files), files[0], files[-3:], files.lookup("train/cat/1.jpg"), "x" in files
    for entry in files: ...
    files.chunk_counts                     # for orders that keep to few chunks at a time (``shuffle``)

The list of chunks is held whole (245 for a million entries); entries are read as they are asked for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Final, Protocol, overload

from raftkv.dataset.codec import node
from raftkv.dataset.codec.blob import foreign
from raftkv.dataset.codec.chunk import Chunk
from raftkv.dataset.codec.node import Child
from raftkv.dataset.entry import Entry
from raftkv.dataset.keys import Head

AHEAD: Final = 4


class Chunks(Protocol):
    """Where a snapshot finds chunks."""

    def chunk(self, digest: str) -> Chunk:
        """Return a chunk; blocks if it must be read."""
        ...

    def fetch_ahead(self, digests: Sequence[str]) -> None:
        """Begin to read chunks that will be asked for soon; returns at once."""
        ...


class Snapshot(Sequence[Entry]):
    """One version of a dataset; made by ``Dataset``.

    Arguments:
        head: which version.
        leaves: its chunks, in order.
        chunks: where they are found.

    Attributes:
        head: which version.
        chunk_counts: entries of each chunk.
    """

    def __init__(self, head: Head, leaves: Sequence[Child], chunks: Chunks) -> None:
        self.head = head
        self.chunk_counts = [leaf.entries for leaf in leaves]
        self._digests = [leaf.digest for leaf in leaves]
        self._firsts = [leaf.first for leaf in leaves]
        self._starts = list(accumulate(self.chunk_counts, initial=0))
        self._chunks = chunks

    def __repr__(self) -> str:
        return f"<version {self.head.version}: {len(self)} entries in {len(self._digests)} chunks>"

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, position: int) -> Entry: ...
    @overload
    def __getitem__(self, position: slice) -> list[Entry]: ...

    def __getitem__(self, position: int | slice) -> Entry | list[Entry]:
        """Return the entry at a position, or a list of those of a slice."""
        if isinstance(position, slice):
            first, stop, step = position.indices(len(self))
            if step == 1:
                return list(islice(self.entries(first), max(stop - first, 0)))
            return [self[at] for at in range(first, stop, step)]
        if not -len(self) <= position < len(self):
            raise IndexError(f"entry {position} of {len(self)}")
        position %= len(self)
        number = bisect_right(self._starts, position) - 1
        return self._read(number)[position - self._starts[number]]

    def __iter__(self) -> Iterator[Entry]:
        return self.entries()

    def __contains__(self, path: object) -> bool:
        """Return whether there is an entry of a path."""
        return isinstance(path, str) and self.lookup(path) is not None

    def lookup(self, path: str) -> Entry | None:
        """Return the entry of a path; None: there is none."""
        number = bisect_right(self._firsts, path) - 1
        return None if number < 0 else self._read(number).find(path)

    def entries(self, first: int = 0) -> Iterator[Entry]:
        """Yield the entries from a position on; the next chunks are read ahead."""
        if first >= len(self):
            return
        begin = bisect_right(self._starts, first) - 1
        for number in range(begin, len(self._digests)):
            self._chunks.fetch_ahead(self._digests[number + 1 : number + 1 + AHEAD])
            chunk = self._read(number)
            yield from islice(chunk, first - self._starts[number], None) if number == begin else chunk

    def below(self, folder: str) -> Iterator[Entry]:
        """Yield the entries whose paths begin with a text, as ``train/cat/``."""
        number = max(bisect_right(self._firsts, folder) - 1, 0)
        while number < len(self._digests):
            chunk = self._read(number)
            for at in range(bisect_left(chunk.paths, folder), len(chunk)):
                if not chunk.paths[at].startswith(folder):
                    return
                yield chunk[at]
            number += 1

    def fetch_ahead(self, numbers: Sequence[int]) -> None:
        """Begin to read some chunks, as those of the next window of a ``ChunkOrder``; returns at once."""
        self._chunks.fetch_ahead([self._digests[number] for number in numbers])

    def _read(self, number: int) -> Chunk:
        digest = self._digests[number]
        chunk = self._chunks.chunk(digest)
        if len(chunk) != self.chunk_counts[number] or chunk.paths[0] != self._firsts[number]:
            raise foreign(digest, "it is not what the index says")
        return chunk


def leaves_below(root: str, read: Callable[[str], node.Node]) -> list[Child]:
    """Return all chunks below a root, in order.

    Arguments:
        root: digest of the root.
        read: reads an index node.

    Raises:
        ChunkCorrupted: the index is none.
    """
    top = read(root)
    level, children = top.level, list(top.children)
    while level > 1:
        level -= 1
        below: list[Child] = []
        for child in children:
            found = read(child.digest)
            if found.level != level or not _is_what_is_said(found, child):
                raise foreign(child.digest, "it is not what the index above says")
            below += found.children
        children = below
        if any(later.first <= earlier.first for earlier, later in pairwise(children)):
            raise foreign(root, "its chunks are not sorted")
    return children


def _is_what_is_said(found: node.Node, child: Child) -> bool:
    # With the first path no node can stand in two places, so there are no more of them than the store has.
    firsts = [below.first for below in found.children[:1]]
    return firsts == [child.first] and sum(below.entries for below in found.children) == child.entries
