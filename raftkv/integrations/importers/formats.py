"""Whether single files are whole, from a few bounded reads: nothing is unpickled or unpacked.

A safetensors file says in its header how long it is. An archive of ``torch.save`` (zip) has its index at its end, so
one that was cut off has none. Numbers in a pickle are found as bytes: a key, and an integer right behind it.
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
"""Limit of the header of a safetensors file: 100,000 tensors."""
SCANNED_BYTES: Final = 16 * 1024 * 1024
"""Limit of the pickle at the beginning of an archive of torch, in which numbers are looked for."""
_ZIP: Final = b"PK\x03\x04"
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_BYTES: Final = 22


def check_safetensors(source: Source, name: str) -> dict[str, Any]:
    """Check that a safetensors file is as long as its header says; returns its metadata.

    Raises:
        NotWhole: it is not, or is no such file.
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
        raise NotWhole(source.uri, f"{name} is no safetensors file: {type(error).__name__}: {error}") from None
    if size != 8 + length + end:
        raise NotWhole(source.uri, f"{name} has {size} bytes, and its header speaks of {8 + length + end}")
    return metadata if isinstance(metadata, dict) else {}


def check_torch(source: Source, names: Iterable[str]) -> None:
    """Check that files of ``torch.save``, or shards made of such, are not cut off.

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
    """Return the integer behind a key of the dictionary that ``torch.save`` has written; None: there is none."""
    data = source.head(name, SCANNED_BYTES)
    is_archive = data.startswith(_ZIP)
    if is_archive and b"/data.pkl" not in data[:256]:
        return None
    return number_behind(data, key)


def number_behind(data: bytes, key: str) -> int | None:
    """Return the integer behind a text in the bytes of a pickle; None: there is none.

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
