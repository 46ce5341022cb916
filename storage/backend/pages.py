"""Checks the page trees of an LMDB file before LMDB uses it: the position and kind of each page.

LMDB trusts the pages that it finds. A page of another kind in the place of a leaf, as a lost or misplaced write of a
disk leaves it, ends the process with a C assertion; a page that is also on the list of free pages is overwritten by a
later commit. Neither reports anything useful. A value that seems to end behind the file ends the process with SIGBUS.
So all pages and the sizes of all values are checked at the start: 0.3 s per gigabyte, and 0.3 us per value (3 us if it
has pages of its own).

    meta pages 0 and 1: the later one --> free list, main tree --> a tree for each bucket

    page       number u64, pad u16, kind u16, end of offsets u16, begin of nodes u16, offset u16 of each node
    node       low u16, high u16, flags u16, size of the key u16, the key; in a leaf then the value
               branch: low, high and flags are the number of a page; leaf: low and high are the size of the value
    tree       pad u32, flags u16, depth u16, branch, leaf and overflow pages u64 each, entries u64, root u64
    large      number u64, pad u16, kind u16, how many pages u32, and the value, in pages of its own

Not checked: the contents of pages, which have checksums (``revision.py``, ``environment.py``).
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from raftkv.errors import CorruptionError

_HEAD: Final = Struct("<QHHHH")
_NODE: Final = Struct("<HHHH")
_META: Final = Struct("<IIQQ")
_TREE: Final = Struct("<IHHQQQQQ")
_ENDS: Final = Struct("<QQ")
_NUMBER: Final = Struct("<Q")

_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_BIG, _TREE_INSIDE = 1, 2
_NO_ROOT: Final = (1 << 64) - 1
_COPY_TXN: Final = 1
_META_PAGES: Final = 2
_PAGE_BYTES: Final = range(256, 65537)
_LEAVES_PER_PACE: Final = 200
_SMALL_LEAVES: Final = 200
"""Leaves of a small tree: checking them takes 10 ms."""


class _Tree(NamedTuple):
    depth: int
    branch_pages: int
    leaf_pages: int
    root: int


class _Meta(NamedTuple):
    page_bytes: int
    free: _Tree
    main: _Tree
    last_page: int
    txn: int


def check_pages(path: Path, pace: Callable[[], None] | None = None) -> None:
    """Refuse a database file whose pages are not where its trees say.

    A file that is not a database passes: LMDB detects it. A compact copy is checked only with ``pace``, because it is
    checked before it is put in place, or if it is too short.

    Arguments:
        path: the file; its writer must not change the pages of its last state meanwhile.
        pace: called from time to time.

    Raises:
        CorruptionError: a page is wrong; the message names it.
        OSError: the file cannot be read.
    """
    with _walk_of(path, pace) as walk:
        if walk is not None and not (walk.is_whole_copy and pace is None):
            walk.check()


def check_small_trees(path: Path) -> None:
    """Refuse a database file in which LMDB cannot follow the pages of small trees, without looking at large ones.

    Arguments:
        path: the file; a file that is not a database passes.

    Raises:
        CorruptionError: a page is wrong; the message names it.
        OSError: the file cannot be read.
    """
    with _walk_of(path, None) as walk:
        if walk is not None:
            walk.check_trees(_SMALL_LEAVES)


@contextmanager
def _walk_of(path: Path, pace: Callable[[], None] | None) -> Iterator[_Walk | None]:
    """Yield a check of a file, ``None`` if the file is not a database."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            yield None
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            meta = _last_meta(data)
            try:
                yield None if meta is None else _Walk(data, meta, pace)
            except _Misplaced as error:
                raise CorruptionError(f"the database {path} is damaged: {error}") from None


class _Misplaced(Exception):
    """A page of the wrong kind or in the wrong place."""


def _last_meta(data: mmap.mmap) -> _Meta | None:
    """Return the later one of the two meta pages, read without a concurrent write."""
    found = _read_meta(data)
    while (again := _read_meta(data)) != found:
        found = again
    return found


def _read_meta(data: mmap.mmap) -> _Meta | None:
    first = _meta_at(data, 0)
    # The page size is only in the first meta page, if that is intact.
    second = _meta_at(data, first.page_bytes if first else mmap.PAGESIZE)
    return max((meta for meta in (first, second) if meta), key=lambda meta: meta.txn, default=None)


def _meta_at(data: mmap.mmap, start: int) -> _Meta | None:
    start += _HEAD.size
    if start + _META.size + 2 * _TREE.size + _ENDS.size > len(data):
        return None
    magic, version, _, _ = _META.unpack_from(data, start)
    free, main = start + _META.size, start + _META.size + _TREE.size
    page_bytes = _TREE.unpack_from(data, free)[0]
    if (magic, version) != (_MAGIC, _VERSION) or page_bytes not in _PAGE_BYTES:
        return None
    return _Meta(page_bytes, _tree(data, free), _tree(data, main), *_ENDS.unpack_from(data, main + _TREE.size))


def _tree(data: mmap.mmap, start: int) -> _Tree:
    _, _, depth, branch_pages, leaf_pages, _, _, root = _TREE.unpack_from(data, start)
    return _Tree(depth, branch_pages, leaf_pages, root)


class _Walk:
    """One check of all trees of a file."""

    def __init__(self, data: mmap.mmap, meta: _Meta, pace: Callable[[], None] | None = None) -> None:
        self._pace = pace
        self._data = data
        self._meta = meta
        self._pages = min(meta.last_page + 1, len(data) // meta.page_bytes)
        self._seen = bytearray(self._pages)

    @property
    def is_whole_copy(self) -> bool:
        """Whether the file is a compact copy that is not cut short."""
        return self._meta.txn == _COPY_TXN and self._pages > self._meta.last_page

    def check(self) -> None:
        """Raise ``_Misplaced`` for the first page that is wrong."""
        free_leaves = list(self._leaves(self._meta.free))
        self.check_trees()
        behind = set[int]()
        for leaf in free_leaves:
            for value, size_bytes, flags in self._values(leaf):
                behind.update(self._checked_free(value, size_bytes, flags))
        # LMDB does not write pages at the end that it freed before the commit. All others are in the file. With a pace,
        # the file may have grown since it was mapped.
        claimed = self._meta.last_page + 1
        if self._pace is None and sum(number < claimed for number in behind) < claimed - self._pages:
            found_bytes, claimed_bytes = len(self._data), claimed * self._meta.page_bytes
            raise _Misplaced(f"it is cut short: {found_bytes} of {claimed_bytes} bytes")

    def check_trees(self, leaves_max: int | None = None) -> None:
        """Raise ``_Misplaced`` for the first wrong page of trees of at most ``leaves_max`` leaves; ``None``: of all."""
        for leaf in self._leaves(self._meta.main):
            for value, _, flags in self._values(leaf):
                if flags & _TREE_INSIDE:
                    tree = _tree(self._data, value)
                    if leaves_max is None or tree.leaf_pages <= leaves_max:
                        self._check_tree(tree)

    def _check_tree(self, tree: _Tree) -> None:
        for count, leaf in enumerate(self._leaves(tree), 1):
            for value, size_bytes, flags in () if self._is_plain(leaf) else self._values(leaf):
                if flags & _BIG and not self._is_big(value, size_bytes):
                    raise _Misplaced(f"a large value of page {leaf // self._meta.page_bytes} has no pages of its own")
            if self._pace is not None and not count % _LEAVES_PER_PACE:
                self._pace()

    def _leaves(self, tree: _Tree) -> Iterator[int]:
        """Iterate over a tree; yield the offsets of its leaves."""
        if tree.root == _NO_ROOT:
            return
        data, page_bytes, unpack = self._data, self._meta.page_bytes, _HEAD.unpack_from
        counts = [0, 0]
        waiting = [(tree.root, tree.depth)]
        while waiting:
            number, depth = waiting.pop()
            if not _META_PAGES <= number < self._pages:
                raise _Misplaced(f"page {number} is asked for, and the file has {self._pages}")
            if self._seen[number]:
                raise _Misplaced(f"page {number} is in two places")
            self._seen[number] = 1
            start = number * page_bytes
            stated, _, kind, lower, upper = unpack(data, start)
            is_leaf = depth == 1
            if (
                stated != number
                or kind & 7 != (_LEAF if is_leaf else _BRANCH)
                or not 16 <= lower <= upper <= page_bytes
            ):
                raise _Misplaced(f"page {number} is not the one that was written there")
            counts[is_leaf] += 1
            if is_leaf:
                yield start
            else:
                waiting += [(child, depth - 1) for child in self._children(start, lower)]
        if counts != [tree.branch_pages, tree.leaf_pages]:
            raise _Misplaced(f"a tree has {sum(counts)} pages, and should have {tree.branch_pages + tree.leaf_pages}")

    def _nodes(self, start: int, lower: int) -> Iterator[int]:
        page_bytes = self._meta.page_bytes
        for place in array("H", self._data[start + _HEAD.size : start + lower & ~1]):
            if place + _NODE.size > page_bytes:
                raise _Misplaced(f"page {start // page_bytes} points behind its end")
            yield start + place

    def _children(self, start: int, lower: int) -> Iterator[int]:
        for node in self._nodes(start, lower):
            low, high, top, _ = _NODE.unpack_from(self._data, node)
            yield low | high << 16 | top << 32

    def _is_plain(self, start: int) -> bool:
        """Return whether all values of a leaf are within it: true of most, and found in a fraction of the time."""
        page = self._data[start : start + self._meta.page_bytes]
        last, unpack = len(page) - _NODE.size, _NODE.unpack_from
        for place in array("H", page[_HEAD.size : _HEAD.unpack_from(page)[3] & ~1]):
            if place > last:
                return False
            low, high, flags, key_bytes = unpack(page, place)
            if flags or high or place + key_bytes + low > last:
                return False
        return True

    def _values(self, start: int) -> Iterator[tuple[int, int, int]]:
        """Iterate over the values of a leaf: offset, size, and flags of each."""
        end = start + self._meta.page_bytes
        for node in self._nodes(start, _HEAD.unpack_from(self._data, start)[3]):
            low, high, flags, key_bytes = _NODE.unpack_from(self._data, node)
            value, size_bytes = node + _NODE.size + key_bytes, low | high << 16
            inside_bytes = _NUMBER.size if flags & _BIG else _TREE.size if flags & _TREE_INSIDE else size_bytes
            if value + inside_bytes > end or flags & ~(_BIG | _TREE_INSIDE):
                raise _Misplaced(
                    f"a value of page {start // self._meta.page_bytes} goes beyond its end, or has an unknown kind"
                )
            yield value, size_bytes, flags

    def _is_big(self, value: int, size_bytes: int) -> bool:
        """Return whether a large value has its own pages, and as many as they state: a deletion frees that number."""
        page_bytes, number = self._meta.page_bytes, _NUMBER.unpack_from(self._data, value)[0]
        pages = slice(number, number + (_HEAD.size - 1 + size_bytes) // page_bytes + 1)
        if number < _META_PAGES or pages.stop > self._pages or any(self._seen[pages]):
            return False
        stated, _, kind, low, high = _HEAD.unpack_from(self._data, number * page_bytes)
        self._seen[pages] = bytes([1]) * (pages.stop - number)
        return (stated, kind & 7, low | high << 16) == (number, _OVERFLOW, pages.stop - number)

    def _end_of_big(self, value: int, size_bytes: int) -> int:
        """Return the end offset of a value that has its own pages."""
        number: int = _NUMBER.unpack_from(self._data, value)[0]
        return number * self._meta.page_bytes + _HEAD.size + size_bytes

    def _checked_free(self, value: int, size_bytes: int, flags: int) -> Iterator[int]:
        """Refuse a free page that is in use: the next commit would overwrite it. Yield those behind the file's end."""
        end = self._end_of_big(value, size_bytes) if flags & _BIG else value + size_bytes
        value = end - size_bytes
        if end > len(self._data) or size_bytes % _NUMBER.size or not size_bytes:
            raise _Misplaced("the list of free pages goes beyond its end")
        count, *free = array("Q", self._data[value : value + size_bytes])
        if count > len(free):
            raise _Misplaced("the list of free pages is cut short")
        seen, pages = self._seen, self._pages
        for number in free[:count]:
            if number >= pages:
                yield number
            elif seen[number]:
                raise _Misplaced(f"page {number} is in use, and on the list of free pages")
