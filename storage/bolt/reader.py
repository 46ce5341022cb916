"""Reads an untrusted database file: each number is checked against the file before it is used.

The reader visits the pages below a root from left to right and keeps only those on the path down. No page is visited
twice, so reading ends after at most as many pages as the file has, even in a damaged file. Damage is a
``StorageError``: one line that names the file and the page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from struct import Struct, unpack_from
from typing import Final, NamedTuple

from raftkv.errors import StorageError
from raftkv.storage.bolt.page import (
    BRANCH,
    BUCKET,
    BUCKET_FLAG,
    ELEMENT_BYTES,
    FREELIST,
    HEAD,
    HEAD_BYTES,
    LEAF,
    META_BYTES,
    NO_FREELIST,
    Meta,
    decode_meta,
)

PAGE_SIZES: Final = tuple(512 << shift for shift in range(12))
"""Supported page sizes: 512 bytes to 1 MiB."""
PAGE_MAX_BYTES: Final = 256 << 20
"""Largest page, including its overflow, that is read: memory is needed for one page of each level at a time."""
DEPTH_MAX: Final = 64
"""Maximum number of levels of a tree: 20 are more than the largest possible file needs."""

BUCKETS_MAX: Final = 1_000
"""Maximum number of buckets: etcd has 10. Their headers, with small buckets inside, are kept in memory."""

_WORD: Final = Struct("<Q")


class _Page(NamedTuple):
    data: bytes
    flags: int
    elements: int


class BoltFile:
    """A database file, open for reading.

    Arguments:
        path: the file.
        size_bytes: size of the database, if something follows it in the file; ``None``: the whole file.

    Raises:
        StorageError: the file cannot be read or is not a database.
    """

    def __init__(self, path: str | os.PathLike[str], size_bytes: int | None = None) -> None:
        self._path = os.fspath(path)
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"open {self._path}: {(error.strerror or str(error)).lower()}") from error
        try:
            self._file_bytes = os.fstat(self._file).st_size if size_bytes is None else size_bytes
            self._meta = self._newest_meta()
            self._page_bytes = self._meta.page_bytes
            self._seen = bytearray((self._meta.pages + 7) // 8)
            self._buckets = self._read_root()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BoltFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. May be called more than once."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def size_bytes(self) -> int:
        """Size of the database: its pages in use, which may be smaller than the file."""
        return self._meta.pages * self._page_bytes

    def buckets(self) -> list[bytes]:
        """Return the names of the buckets, in order."""
        return list(self._buckets)

    def items(self, bucket: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values of a bucket in order; nothing if the bucket does not exist.

        A bucket can be read only once: a page that is visited again is treated as damage.

        Raises:
            StorageError: the file is damaged.
        """
        value = self._buckets.get(bucket)
        if value is None:
            return
        last = b""
        for flags, key, data in self._bucket_items(value):
            if flags & BUCKET_FLAG:
                raise self._error(f"bucket {bucket!r} has a bucket inside")
            if key <= last:
                raise self._error(f"keys of bucket {bucket!r} do not ascend")
            last = key
            yield key, data

    def check_free_pages(self) -> None:
        """Refuse a file that lists a visited page as free: etcd would overwrite it.

        Call it after everything was read.
        """
        number = self._meta.freelist
        if number == NO_FREELIST:
            return
        page = self._read(number)
        if page.flags != FREELIST:
            raise self._error(f"page {number} is not a freelist")
        count, start = page.elements, HEAD_BYTES
        if count == 0xFFFF:
            count, start = _WORD.unpack_from(page.data, start)[0], start + _WORD.size
        if start + count * _WORD.size > len(page.data):
            raise self._error(f"freelist of {count} pages runs beyond page {number}")
        for (free,) in _WORD.iter_unpack(page.data[start : start + count * _WORD.size]):
            if free >= self._meta.pages:
                raise self._error(f"free page {free} is out of bounds: {self._meta.pages}")
            if self._seen[free >> 3] >> (free & 7) & 1:
                raise self._error(f"page {free}: reachable freed")

    def _newest_meta(self) -> Meta:
        first = self._meta_at(0)
        # A torn first meta page does not give the page size, so the second meta page is tried at all sizes.
        sizes = PAGE_SIZES if isinstance(first, str) else (first.page_bytes,)
        found = [first, *(self._meta_at(size) for size in sizes)]
        metas = [meta for meta in found if not isinstance(meta, str)]
        sound = [meta for meta in metas if self._is_possible(meta)]
        if sound:
            return max(sound, key=lambda meta: meta.transaction)
        if metas:
            pages, page_bytes = metas[0].pages, metas[0].page_bytes
            raise self._error(f"{self._file_bytes} bytes are too short for {pages} pages of {page_bytes} bytes")
        reasons = [meta for meta in found if isinstance(meta, str)]
        raise self._error(next((reason for reason in reasons if reason != "invalid database"), "invalid database"))

    def _meta_at(self, offset: int) -> Meta | str:
        whole = offset + META_BYTES <= self._file_bytes
        return decode_meta(os.pread(self._file, META_BYTES, offset) if whole else b"")

    def _is_possible(self, meta: Meta) -> bool:
        return meta.page_bytes in PAGE_SIZES and 0 < meta.pages <= self._file_bytes // meta.page_bytes

    def _read_root(self) -> dict[bytes, bytes]:
        buckets: dict[bytes, bytes] = {}
        last = b""
        for flags, name, value in self._walk(self._meta.root):
            if not flags & BUCKET_FLAG or name <= last:
                raise self._error(f"entry {name[:64]!r} of the root bucket is not a bucket")
            last = name
            buckets[name] = value
            if len(buckets) > BUCKETS_MAX:
                raise self._error(f"more than {BUCKETS_MAX} buckets")
        return buckets

    def _bucket_items(self, value: bytes) -> Iterator[tuple[int, bytes, bytes]]:
        if len(value) < BUCKET.size:
            raise self._error("the header of a bucket is cut off")
        root = BUCKET.unpack_from(value)[0]
        if root:
            return self._walk(root)
        data = value[BUCKET.size :]
        if len(data) < HEAD_BYTES:
            raise self._error("an inline bucket is cut off")
        _, flags, count, _ = HEAD.unpack_from(data)
        if flags != LEAF:
            raise self._error("an inline bucket is not a leaf page")
        return self._leaf_items(0, _Page(data, flags, count))

    def _walk(self, root: int) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield the items of the leaves below a page, from left to right."""
        waiting = [[root]]
        while waiting:
            if not waiting[-1]:
                waiting.pop()
                continue
            number = waiting[-1].pop()
            page = self._visit(number)
            if page.flags == LEAF:
                yield from self._leaf_items(number, page)
            elif page.flags == BRANCH and len(waiting) < DEPTH_MAX:
                waiting.append(self._children(number, page))
            else:
                raise self._error(f"page {number} has flags {page.flags:#x}, or lies too deep")

    def _visit(self, number: int) -> _Page:
        page = self._read(number)
        for part in range(number, number + len(page.data) // self._page_bytes):
            if self._seen[part >> 3] >> (part & 7) & 1:
                raise self._error(f"page {part}: multiple references")
            self._seen[part >> 3] |= 1 << (part & 7)
        return page

    def _read(self, number: int) -> _Page:
        """Read a page including its overflow."""
        if not 2 <= number < self._meta.pages:
            raise self._error(f"page {number} is out of bounds: {self._meta.pages}")
        data = os.pread(self._file, self._page_bytes, number * self._page_bytes)
        if len(data) < self._page_bytes:
            raise self._error(f"page {number} is cut off")
        found, flags, count, overflow = HEAD.unpack_from(data)
        if found != number:
            raise self._error(f"page {number} says that it is page {found}")
        if overflow:
            size_bytes = (1 + overflow) * self._page_bytes
            if number + overflow >= self._meta.pages or size_bytes > PAGE_MAX_BYTES:
                raise self._error(f"page {number} with {overflow} more pages is out of bounds: {self._meta.pages}")
            data = self._read_all(number * self._page_bytes, size_bytes)
        return _Page(data, flags, count)

    def _read_all(self, offset: int, size_bytes: int) -> bytes:
        parts = []
        while size_bytes:
            part = os.pread(self._file, size_bytes, offset)
            if not part:
                raise self._error(f"it ends at byte {offset}")
            parts.append(part)
            offset += len(part)
            size_bytes -= len(part)
        return b"".join(parts)

    def _leaf_items(self, number: int, page: _Page) -> Iterator[tuple[int, bytes, bytes]]:
        data, size_bytes = page.data, len(page.data)
        start = HEAD_BYTES
        if start + page.elements * ELEMENT_BYTES > size_bytes:
            raise self._error(f"page {number} is too short for {page.elements} elements")
        fields = iter(unpack_from(f"<{4 * page.elements}I", data, start))
        for flags, position, key_bytes, value_bytes in zip(fields, fields, fields, fields, strict=True):
            key_at = start + position
            value_at = key_at + key_bytes
            end = value_at + value_bytes
            if end > size_bytes:
                raise self._error(f"an element of page {number} runs beyond its end")
            yield flags, data[key_at:value_at], data[value_at:end]
            start += ELEMENT_BYTES

    def _children(self, number: int, page: _Page) -> list[int]:
        """Return the pages below a branch page, in reverse order."""
        if not page.elements or HEAD_BYTES + page.elements * ELEMENT_BYTES > len(page.data):
            raise self._error(f"branch page {number} cannot have {page.elements} elements")
        words = unpack_from(f"<{2 * page.elements}Q", page.data, HEAD_BYTES)
        return list(words[-1::-2])

    def _error(self, reason: str) -> StorageError:
        return StorageError(f"{self._path} is not a sound database of etcd: {reason}")
