"""Writes a database file bottom-up: leaves from left to right, and a branch page whenever one is full.

    items -> pages of items -> leaf pages -> (first key, page) -> branch pages -> ... -> one page, the root

A tree keeps the unfinished branch page of each level, so memory does not grow with the file. ``measure`` and ``write``
take the same steps and number pages in the same way; ``measure`` only counts.

Invariants: every page has one parent or is a root; numbers are given in the order of writing, without gaps; a branch
has at least two children, so each level is at most half as long as the one below.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Final, NamedTuple

from raftkv.errors import InvariantError
from raftkv.storage.bolt.page import (
    BUCKET,
    BUCKET_FLAG,
    ELEMENT_BYTES,
    FIRST_TREE_PAGE,
    FREELIST,
    FREELIST_PAGE,
    HEAD,
    HEAD_BYTES,
    PAGE_BYTES,
    Meta,
    encode_branch,
    encode_leaf,
    encode_meta,
    overflow,
)

INLINE_MAX_BYTES: Final = PAGE_BYTES // 4
"""Largest leaf page that is stored inside the value of its bucket, as in bbolt."""
BRANCH_CHILDREN_MIN: Final = 2

Items = Iterable[tuple[bytes, bytes]]
"""Keys and values, ascending by key."""
Buckets = Iterable[tuple[bytes, Items]]
"""Names and contents, ascending by name."""

_Pages = Iterator[tuple[list[tuple[bytes, bytes]], int]]
_Steps = Generator[None, None, bytes]


class Layout(NamedTuple):
    """Sizes and pages, known before the first byte: the result of ``measure``."""

    pages: int
    """Number of pages of the file."""
    root: int
    """Page of the root bucket."""

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.pages * PAGE_BYTES


def measure(buckets: Buckets) -> Layout:
    """Return the layout of a file with these contents.

    Arguments:
        buckets: the contents; of values only the length matters.
    """
    build = _Build(counts_only=True)
    for _ in build.run(buckets):
        pass
    return Layout(build.pages, build.root)


def write(buckets: Buckets, layout: Layout) -> Iterator[bytes]:
    """Yield the file, from its first byte on, in pieces of about a page.

    Arguments:
        buckets: the contents.
        layout: result of ``measure`` for the same contents.

    Raises:
        InvariantError: the contents are different or do not ascend; the yielded data is useless.
    """
    for transaction in (0, 1):
        yield encode_meta(Meta(PAGE_BYTES, layout.root, FREELIST_PAGE, layout.pages, transaction))
    yield HEAD.pack(FREELIST_PAGE, FREELIST, 0, 0).ljust(PAGE_BYTES, b"\0")
    build = _Build()
    for _ in build.run(buckets):
        yield from build.take()
    yield from build.take()
    if (build.pages, build.root) != layout:
        raise InvariantError(f"the database has {build.pages} pages, measured were {layout.pages}")


class _Branch:
    """The unfinished branch page of one level of a tree."""

    __slots__ = ("children", "used_bytes")

    def __init__(self) -> None:
        self.children: list[tuple[bytes, int]] = []
        self.used_bytes = HEAD_BYTES


class _Build:
    """A file under construction: numbers pages, and keeps finished pages until they are taken.

    Arguments:
        counts_only: only count pages.

    Attributes:
        pages: number of pages so far.
        root: page of the root bucket, once everything is built.
    """

    def __init__(self, *, counts_only: bool = False) -> None:
        self.pages = FIRST_TREE_PAGE
        self.root = 0
        self._counts_only = counts_only
        self._ready: list[bytes] = []

    def run(self, buckets: Buckets) -> Iterator[None]:
        """Build all trees, in steps of a leaf page."""
        headers: list[tuple[bytes, bytes]] = []
        for name, items in buckets:
            headers.append((name, (yield from self._bucket(items))))
        levels: list[_Branch] = []
        # Without a bucket there is one leaf page without items.
        for page, used_bytes in _cut(headers) if headers else [([], HEAD_BYTES)]:
            self._leaf(levels, page, used_bytes, BUCKET_FLAG)
        self.root = self._root(levels)

    def take(self) -> list[bytes]:
        """Return the pages finished since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def _bucket(self, items: Items) -> _Steps:
        """Build the tree of one bucket; return the bucket's value in the root bucket."""
        pages = _cut(items)
        first, used_bytes = next(pages, ([], HEAD_BYTES))
        second = next(pages, None)
        if second is None and used_bytes <= INLINE_MAX_BYTES:
            return BUCKET.pack(0, 0) + encode_leaf(0, first, used_bytes, 0)
        levels: list[_Branch] = []
        self._leaf(levels, first, used_bytes, 0)
        while second is not None:
            yield
            self._leaf(levels, *second, 0)
            second = next(pages, None)
        return BUCKET.pack(self._root(levels), 0)

    def _leaf(self, levels: list[_Branch], page: list[tuple[bytes, bytes]], used_bytes: int, flags: int) -> None:
        number = self._number(used_bytes)
        if not self._counts_only:
            self._finish(encode_leaf(number, page, used_bytes, flags))
        self._add(levels, 0, page[0][0] if page else b"", number)

    def _add(self, levels: list[_Branch], height: int, key: bytes, child: int) -> None:
        """Record a finished page in the branch page above it."""
        if height == len(levels):
            levels.append(_Branch())
        level = levels[height]
        size_bytes = ELEMENT_BYTES + len(key)
        if level.used_bytes + size_bytes > PAGE_BYTES and len(level.children) >= BRANCH_CHILDREN_MIN:
            self._branch(levels, height)
        level.children.append((key, child))
        level.used_bytes += size_bytes

    def _branch(self, levels: list[_Branch], height: int) -> None:
        """Finish the branch page of a level and begin the next one."""
        level = levels[height]
        number = self._number(level.used_bytes)
        if not self._counts_only:
            self._finish(encode_branch(number, level.children, level.used_bytes))
        key = level.children[0][0]
        level.children, level.used_bytes = [], HEAD_BYTES
        self._add(levels, height + 1, key, number)

    def _root(self, levels: list[_Branch]) -> int:
        """Finish a tree; return its root page."""
        height = 0
        while True:
            children = levels[height].children
            if height + 1 == len(levels) and len(children) == 1:
                return children[0][1]
            self._branch(levels, height)
            height += 1

    def _number(self, used_bytes: int) -> int:
        number = self.pages
        self.pages += 1 + overflow(used_bytes)
        return number

    def _finish(self, data: bytes) -> None:
        self._ready.append(data)
        if rest := -len(data) % PAGE_BYTES:
            self._ready.append(bytes(rest))


def _cut(items: Items) -> _Pages:
    """Group items into pages as full as possible: yield the items of a page, and their size with head and elements.

    An item larger than a page gets pages of its own.
    """
    page: list[tuple[bytes, bytes]] = []
    used_bytes, last = HEAD_BYTES, b""
    for item in items:
        key = item[0]
        size_bytes = ELEMENT_BYTES + len(key) + len(item[1])
        if used_bytes + size_bytes > PAGE_BYTES and page:
            yield page, used_bytes
            page, used_bytes = [], HEAD_BYTES
        # Also refuses the empty key, which bbolt does not allow.
        if key <= last:
            raise InvariantError(f"key {key.hex()} does not come after {last.hex()}")
        last = key
        page.append(item)
        used_bytes += size_bytes
    if page:
        yield page, used_bytes
