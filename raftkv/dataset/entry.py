"""The entry of one file in a manifest, and its limits.

>>> check_entry(Entry("train/cat/1.jpg", 1024, shard="train-000.tar", offset=512))
>>> check_entry(Entry("../secret", 1))                                          # doctest: +ELLIPSIS
Traceback (most recent call last):
raftkv.dataset.errors.InvalidEntry: path '../secret' cannot be published: a relative path without '..' ...
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from raftkv.dataset.errors import InvalidEntry

PATH_BYTES_MAX: Final = 4096
SHARD_BYTES_MAX: Final = 1024
DIGEST_BYTES_MAX: Final = 64
NUMBER_MAX: Final = 2**62 - 1
"""Maximum size and offset, so that sums and differences fit into 64 bits."""

# A part is refused if it is empty, '.' or '..'; lone surrogates cannot be UTF-8.
_BAD_PATH: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]|^/|//|/$|(?:^|/)\.{1,2}(?:/|$)")
BAD_SHARD: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]|(?:^|/)\.\.(?:/|$)")


class Entry(NamedTuple):
    """One file of a dataset.

    Attributes:
        path: relative name, with slashes. Entries are sorted by path, in the order of Python strings.
        size: bytes.
        shard: file or URL that contains it, as an archive; empty: it is a separate file.
        offset: offset in the shard.
        digest: digest of its content, at most 64 bytes; empty: unknown.
    """

    path: str
    size: int
    shard: str = ""
    offset: int = 0
    digest: bytes = b""


def check_entry(entry: Entry) -> None:
    """Raise unless the entry is valid.

    Raises:
        InvalidEntry: the entry is not valid; the message says why.
    """
    path, size, shard, offset, digest = entry
    if not isinstance(path, str) or not path or _BAD_PATH.search(path):
        raise InvalidEntry(
            f"path {_shown(path)} cannot be published: a relative path without '..' and empty parts, of UTF-8 text "
            "without control characters"
        )
    if len(path) > PATH_BYTES_MAX // 4 and len(path.encode()) > PATH_BYTES_MAX:
        raise InvalidEntry(f"path {_shown(path)} is too long: at most {PATH_BYTES_MAX} bytes; shorten its folders")
    if shard and (BAD_SHARD.search(shard) or len(shard.encode()) > SHARD_BYTES_MAX):
        raise InvalidEntry(
            f"shard {_shown(shard)} of {_shown(path)} cannot be published: a path or URL of at most "
            f"{SHARD_BYTES_MAX} bytes, without '..' and control characters"
        )
    # A bool is an int in Python, but not a size.
    if type(size) is not int or type(offset) is not int or not (0 <= size <= NUMBER_MAX and 0 <= offset <= NUMBER_MAX):
        raise InvalidEntry(
            f"size {size!r} and offset {offset!r} of {_shown(path)} cannot be published: whole numbers from 0 to "
            f"{NUMBER_MAX}"
        )
    if not isinstance(digest, bytes) or len(digest) > DIGEST_BYTES_MAX:
        raise InvalidEntry(f"the digest of {_shown(path)} cannot be published: at most {DIGEST_BYTES_MAX} bytes")


def _shown(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 120 else f"{shown[:110]}...{shown[-6:]}"
