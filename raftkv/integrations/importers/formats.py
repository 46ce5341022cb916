"""Checks whether single files are complete, with a few bounded reads; nothing is unpickled or unpacked.

A safetensors file has its length in its header. An archive of ``torch.save`` (zip) has its index at the end, so a
truncated one has none. Numbers in a pickle are found as bytes: a key directly followed by an integer.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from typing import Any, Final

from raftkv.checkpoint.errors import NotWhole
from raftkv.integrations.importers.source import Source

HEADER_MAX_BYTES: Final = 16 * 1024 * 1024
"""Maximum header of a safetensors file: about 100,000 tensors."""
SCANNED_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of the pickle in an archive of torch that is searched for numbers."""
_ZIP: Final = b"PK\x03\x04"
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_BYTES: Final = 22


def check_safetensors(source: Source, name: str) -> dict[str, Any]:
    """Check that a safetensors file has the length in its header; return its metadata.

    Raises:
        NotWhole: the file is truncated, or not of this format.
        StorageError: it could not be read.
    """
    size = source.listing.files[name]
    head = source.head(name, 8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
    if length > size - 8:
        raise NotWhole(source.uri, f"{name} is cut off within its header: it has {size} bytes")
    if length > HEADER_MAX_BYTES:
        raise NotWhole(source.uri, f"{name} has a header of {length} bytes: at most {HEADER_MAX_BYTES}")
    try:
        header = json.loads(source.head(name, 8 + length)[8:])
        metadata = header.pop("__metadata__", None) or {}
        end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise NotWhole(source.uri, f"{name} is not a safetensors file: {type(error).__name__}: {error}") from None
    if size != 8 + length + end:
        raise NotWhole(source.uri, f"{name} has {size} bytes, and its header speaks of {8 + length + end}")
    return metadata if isinstance(metadata, dict) else {}


def check_torch(source: Source, names: Iterable[str]) -> None:
    """Check that files of ``torch.save``, or shards that consist of such files, are not truncated.

    Raises:
        NotWhole: one is.
        StorageError: one could not be read.
    """
    for name in names:
        size = source.listing.files[name]
        if not size:
            raise NotWhole(source.uri, f"{name} is empty")
        if source.head(name, 4) == _ZIP and _ZIP_END not in source.tail(name, _ZIP_END_BYTES):
            raise NotWhole(source.uri, f"{name} is cut off after {size} bytes: the end of its archive is missing")


def number_in_torch(source: Source, name: str, key: str) -> int | None:
    """Return the integer of a key in a dictionary written by ``torch.save``; None: not found."""
    data = source.head(name, SCANNED_BYTES)
    is_archive = data.startswith(_ZIP)
    if is_archive and b"/data.pkl" not in data[:256]:
        return None
    return number_behind(data, key)


def number_behind(data: bytes, key: str) -> int | None:
    """Return the integer that follows a string in the bytes of a pickle; None: not found.

    >>> number_behind(b"...X\\x04\\x00\\x00\\x00stepq\\x01K\\x07...", "step")
    7
    """
    text = key.encode()
    before = b"X" + struct.pack("<I", len(text)), b"\x8c" + bytes([len(text)])
    memo = rb"(?:q.|r.{4}|\x94)?"
    pattern = b"(?:%s)" % b"|".join(map(re.escape, before)) + re.escape(text) + memo + rb"(?:K(.)|M(..)|J(.{4}))"
    found = re.search(pattern, data, re.DOTALL)
    if found is None:
        return None
    return int.from_bytes(found[found.lastindex or 0], "little", signed=found.lastindex == 3)
