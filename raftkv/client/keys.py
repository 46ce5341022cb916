"""Key intervals."""

from __future__ import annotations


def prefix_end(prefix: bytes) -> bytes:
    r"""Return the range end that makes ``[prefix, end)`` all keys beginning with a prefix.

    >>> prefix_end(b"a"), prefix_end(b"a\xff"), prefix_end(b"\xff")
    (b'b', b'b', b'\x00')
    """
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"
