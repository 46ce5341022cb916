"""An index node: what lies below it, in order. Nodes of level 1 have chunks below them, others nodes.

N {"level": 1, "digests": ["ab..", ...], "first": ["a/1", ...], "counts": [8192, ...], "sizes": [...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from raftkv.dataset.codec.blob import foreign, is_digest

CHILDREN_MAX: Final = 1024
LEVEL_MAX: Final = 6
_MARK: Final = b"N"


class Child(NamedTuple):
    """What lies below a node.

    Attributes:
        digest: of its blob.
        first: path of its first entry.
        entries: how many are below it.
        size_bytes: of the files that they name.
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
        """Return the node, to be sealed."""
        names = ("digests", "first", "counts", "sizes")
        columns = zip(*self.children, strict=True) if self.children else ((),) * 4
        plain = {"level": self.level, **dict(zip(names, columns, strict=True))}
        return _MARK + json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()


def decode(digest: str, raw: bytes) -> Node:
    """Read a node.

    Arguments:
        digest: of its bytes, for errors.
        raw: what ``blob.unseal`` returned.

    Raises:
        ChunkCorrupted: no publisher has written it.
    """
    try:
        if raw[:1] != _MARK:
            raise ValueError("it is no index node")
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
