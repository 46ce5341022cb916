"""The pages of a bbolt file: headers, elements and meta pages as bytes."""

from __future__ import annotations

from struct import Struct, pack
from typing import Final, NamedTuple

PAGE_BYTES: Final = 4096
"""Page size of written files; files with other sizes can be read."""

BRANCH: Final = 1
LEAF: Final = 2
META: Final = 4
FREELIST: Final = 16

HEAD: Final = Struct("<QHHI")
"""Page number, flags, count, overflow."""
HEAD_BYTES: Final = HEAD.size
ELEMENT_BYTES: Final = 16
BUCKET_FLAG: Final = 1
BUCKET: Final = Struct("<QQ")
"""Root page, sequence."""

FREELIST_PAGE: Final = 2
FIRST_TREE_PAGE: Final = 3
NO_FREELIST: Final = (1 << 64) - 1
"""Number that means that no freelist was written."""

_MAGIC: Final = 0xED0CDAED
_VERSION: Final = 2
_META: Final = Struct("<IIIIQQQQQ")
_SUM: Final = Struct("<Q")
META_BYTES: Final = HEAD_BYTES + _META.size + _SUM.size


class Meta(NamedTuple):
    """The content of a meta page."""

    page_bytes: int
    root: int
    """Page of the root bucket."""
    freelist: int
    pages: int
    """Number of pages in use, from page 0 on: the high water mark."""
    transaction: int


def encode_meta(meta: Meta) -> bytes:
    """Return a meta page; its page number is the transaction number modulo 2."""
    body = _META.pack(_MAGIC, _VERSION, meta.page_bytes, 0, meta.root, 0, meta.freelist, meta.pages, meta.transaction)
    page = HEAD.pack(meta.transaction % 2, META, 0, 0) + body + _SUM.pack(fnv1a(body))
    return page.ljust(meta.page_bytes, b"\0")


def decode_meta(page: bytes) -> Meta | str:
    """Return the content of a meta page, or its error in bbolt's words."""
    if len(page) < META_BYTES:
        return "invalid database"
    body = page[HEAD_BYTES : HEAD_BYTES + _META.size]
    magic, version, page_bytes, _, root, _, freelist, pages, transaction = _META.unpack(body)
    if magic != _MAGIC:
        return "invalid database"
    if version != _VERSION:
        return "version mismatch"
    if _SUM.unpack_from(page, HEAD_BYTES + _META.size)[0] != fnv1a(body):
        return "checksum error"
    return Meta(page_bytes, root, freelist, pages, transaction)


def encode_leaf(page: int, items: list[tuple[bytes, bytes]], used_bytes: int, flags: int) -> bytes:
    """Return a leaf page with its overflow, without the padding of its last page.

    Arguments:
        page: page number; 0 for a page inside a bucket's value.
        items: keys and values, ascending.
        used_bytes: their size, including head and elements.
        flags: flags of all items.
    """
    count = len(items)
    fields: list[int] = []
    parts = []
    position = count * ELEMENT_BYTES
    for key, value in items:
        key_bytes, value_bytes = len(key), len(value)
        fields += flags, position, key_bytes, value_bytes
        position += key_bytes + value_bytes - ELEMENT_BYTES
        parts.append(key)
        parts.append(value)
    head = HEAD.pack(page, LEAF, count, overflow(used_bytes))
    return b"".join((head, pack(f"<{4 * count}I", *fields), *parts))


def encode_branch(page: int, children: list[tuple[bytes, int]], used_bytes: int) -> bytes:
    """Return a branch page with its overflow, without the padding of its last page.

    Arguments:
        page: page number.
        children: first key and page of each child.
        used_bytes: their size, including head and elements.
    """
    position = len(children) * ELEMENT_BYTES
    elements = []
    for key, child in children:
        elements.append(_BRANCH_ELEMENT.pack(position, len(key), child))
        position += len(key) - ELEMENT_BYTES
    head = HEAD.pack(page, BRANCH, len(children), overflow(used_bytes))
    return b"".join((head, *elements, *(key for key, _ in children)))


_BRANCH_ELEMENT: Final = Struct("<IIQ")


def overflow(used_bytes: int) -> int:
    """Return the number of overflow pages of a page with this many bytes."""
    return (used_bytes - 1) // PAGE_BYTES


def fnv1a(data: bytes) -> int:
    """Return the 64-bit FNV-1a hash."""
    hashed = 0xCBF29CE484222325
    for byte in data:
        hashed = (hashed ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return hashed
