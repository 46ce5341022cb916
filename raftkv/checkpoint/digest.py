"""Digests of files and of checkpoints.

The digest of a checkpoint is the root of a Merkle tree over what its ranks prepared, in rank order, so the size of a
commit does not depend on the number of ranks. Leaves and nodes are hashed with different first bytes, so that a node
cannot be taken for a leaf (RFC 6962, section 2.1).

>>> of_bytes(b"")
'sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
>>> root([b"rank 0", b"rank 1"]) == root([b"rank 1", b"rank 0"])
False

The text of a digest names its algorithm; files may use any of ``ALGORITHMS``. sha256 is the default: no second file
with the same digest can be made, and each Python has it. blake3 is as safe and faster, but a package, which readers
need too. crc32c detects damage by disks or networks, but no forgery. Decision record 0011 has the figures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, Protocol

import google_crc32c

from raftkv.errors import ConfigError

SHA256: Final = "sha256"
BLAKE2B: Final = "blake2b"
BLAKE3: Final = "blake3"
CRC32C: Final = "crc32c"
_COPY_BYTES: Final = 1 << 20
_LEAF: Final = b"\0"
_NODE: Final = b"\1"


class Hasher(Protocol):
    """An incremental digest of bytes."""

    def update(self, data: Any, /) -> None:
        """Add bytes; releases the interpreter lock."""
        ...

    def hexdigest(self) -> str:
        """Return the digest of all added bytes."""
        ...


class _Crc32c:
    """The checksum of the Castagnoli polynomial as a ``Hasher``."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any, /) -> None:
        view = memoryview(data)
        for start in range(0, view.nbytes, _COPY_BYTES):  # it takes ``bytes`` alone
            self._value = google_crc32c.extend(self._value, bytes(view[start : start + _COPY_BYTES]))

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _blake3() -> Hasher:
    try:
        hasher: Hasher = import_module("blake3").blake3()
    except ImportError:
        raise ConfigError("digests of blake3 need its package: pip install blake3") from None
    return hasher


ALGORITHMS: Final[dict[str, Callable[[], Hasher]]] = {
    SHA256: hashlib.sha256,
    BLAKE2B: hashlib.blake2b,
    BLAKE3: _blake3,
    CRC32C: _Crc32c,
}
"""Name of each algorithm, and what makes its hasher."""


class Digest:
    """Incremental digest with its algorithm.

    Arguments:
        algorithm: digest algorithm, one of ``ALGORITHMS``.

    Raises:
        ConfigError: the algorithm is unknown.
    """

    def __init__(self, algorithm: str = SHA256) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(
                f"{algorithm!r} is not a digest algorithm of this raftkv, which has {', '.join(ALGORITHMS)}"
            )
        self.algorithm = algorithm
        self._hasher = ALGORITHMS[algorithm]()
        self.update = self._hasher.update

    @classmethod
    def like(cls, text: str) -> Digest:
        """Return a new digest with the algorithm of another. Raises ConfigError."""
        return cls(text.partition(":")[0])

    def __str__(self) -> str:
        return f"{self.algorithm}:{self._hasher.hexdigest()}"


def of_bytes(data: bytes | memoryview, like: str = SHA256) -> str:
    """Return the digest of some bytes, with the algorithm of another. Raises ConfigError: it is unknown."""
    found = Digest.like(like)
    found.update(data)
    return str(found)


def root(leaves: Sequence[bytes]) -> str:
    """Return the root of the Merkle tree over some leaves (RFC 6962: the left subtree is the largest full one)."""
    return f"{SHA256}:{_root([hashlib.sha256(_LEAF + leaf).digest() for leaf in leaves]).hex()}"


def _root(hashes: list[bytes]) -> bytes:
    if not hashes:
        return hashlib.sha256(b"").digest()
    while len(hashes) > 1:
        pairs = [hashlib.sha256(_NODE + a + b).digest() for a, b in zip(hashes[::2], hashes[1::2], strict=False)]
        hashes = pairs + hashes[len(pairs) * 2 :]  # an odd hash moves up unchanged, which gives RFC 6962's tree
    return hashes[0]
