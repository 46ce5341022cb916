"""Compressed bytes under the digest of what is stored.

    digest, blob = seal(raw)
    raw = unseal(digest, blob)         # ChunkCorrupted: not what the digest says, or more than a chunk may be

The digest is that of the compressed bytes, so nothing is handed to zlib that was not verified before.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from typing import Final

from raftkv.dataset.errors import ChunkCorrupted

BLOB_BYTES_MAX: Final = 512 * 1024
"""Stored: a third of what one request of etcd admits."""
RAW_BYTES_MAX: Final = BLOB_BYTES_MAX - 1024
"""Unpacked; less, so that the worst that zlib makes of it can be stored."""
DIGEST_CHARACTERS: Final = 64
LEVEL: Final = 6
_DIGEST: Final = re.compile("[0-9a-f]" * DIGEST_CHARACTERS)


def digest_of(blob: bytes) -> str:
    """Return the digest under which bytes are stored."""
    return hashlib.sha256(blob).hexdigest()


def is_digest(text: object) -> bool:
    """Return whether something has the form of a digest, so that it can be a part of a key, and the name of a file."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def seal(raw: bytes) -> tuple[str, bytes]:
    """Return digest and stored form of a chunk or node."""
    blob = zlib.compress(raw, LEVEL)
    return digest_of(blob), blob


def check(digest: str, blob: bytes) -> bytes:
    """Return the stored bytes of a digest.

    Raises:
        ChunkCorrupted: they are others.
    """
    if len(blob) > BLOB_BYTES_MAX or digest_of(blob) != digest:
        raise ChunkCorrupted(
            f"chunk {digest[:16]} is not what was published: {len(blob)} bytes with another digest; "
            "publish the dataset again with rewrite=True, and have the store's disks looked at"
        )
    return blob


def unseal(digest: str, blob: bytes) -> bytes:
    """Return what was sealed.

    Raises:
        ChunkCorrupted: the bytes are not those of the digest, or no publisher has made them.
    """
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(check(digest, blob), RAW_BYTES_MAX + 1)
    except zlib.error as error:
        raise foreign(digest, str(error)) from None
    if len(raw) > RAW_BYTES_MAX or not unpacking.eof or unpacking.unused_data:
        raise foreign(digest, f"it unpacks to more than {RAW_BYTES_MAX} bytes, or has others behind it")
    return raw


def foreign(digest: str, why: str) -> ChunkCorrupted:
    """Make the error for bytes that are those of the digest, and still none that raftkv publishes."""
    return ChunkCorrupted(
        f"chunk {digest[:16]} holds what raftkv does not publish: {why}; find out who may write below /raftkv/data/"
    )
