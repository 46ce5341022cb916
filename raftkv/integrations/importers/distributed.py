"""Directories of ``torch.distributed.checkpoint``: ``.metadata`` and ``__<rank>_<n>.distcp``, also of Lightning's FSDP.

``.metadata`` is a pickle, which is not unpickled: the names of shards are found as bytes in it, and the places of their
items in its operations. It is written last, so a directory without it was left by a crash. A directory saved without
collectives has ``__<rank>.metadata`` for each rank.
"""

from __future__ import annotations

import pickletools
import re
from contextlib import suppress
from typing import Final

from raftkv.checkpoint.errors import NotWhole
from raftkv.checkpoint.keys import DCP, DCP_PER_RANK
from raftkv.integrations.importers.candidate import Candidate, Facts, first_missing, step_in
from raftkv.integrations.importers.formats import check_torch
from raftkv.integrations.importers.source import Listing, Source

NAME: Final = "dcp"
METADATA: Final = ".metadata"
METADATA_MAX_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of a ``.metadata`` that is searched for names: 33 MB are 900 tensors on 256 ranks."""
_SHARD: Final = re.compile(rb"__\d{1,9}_\d{1,9}\.distcp")
_FIELDS: Final = ("relative_path", "offset", "length")
_OF_RANK: Final = re.compile(r"__(\d{1,9})\.metadata")


def detect(listing: Listing) -> list[Candidate]:
    """Return the directory if it has shards or their metadata."""
    names = listing.top
    if not any(name.endswith((".distcp", METADATA)) for name in names):
        return []
    per_rank = METADATA not in names and any(map(_OF_RANK.fullmatch, names))
    return [Candidate(NAME, DCP_PER_RANK if per_rank else DCP, "", listing.files, step=step_in(listing.name))]


def inspect(candidate: Candidate, source: Source) -> Facts:
    """Check that all shards exist.

    Raises:
        NotWhole: one is missing or truncated; the message names it.
    """
    check_shards(candidate, source)
    return Facts(candidate.step)


def check_shards(candidate: Candidate, source: Source) -> None:
    """Check each directory with shards: all shards named by its metadata exist, and none is truncated.

    Raises:
        NotWhole: a file is missing or incomplete; the text names it.
    """
    shards = [name for name in candidate.files if name.endswith(".distcp")]
    metadata = [name for name in candidate.files if name.endswith(METADATA)]
    for directory in sorted({name.rpartition("/")[0] for name in (*shards, *metadata)}):
        _check_directory(candidate, source, f"{directory}/" if directory else "")
    check_torch(source, (candidate.base + name for name in shards))


def _check_directory(candidate: Candidate, source: Source, base: str) -> None:
    names = {name.removeprefix(base) for name in candidate.files if name.startswith(base)}
    where = candidate.base + base
    ranks = [int(found[1]) for name in names if (found := _OF_RANK.fullmatch(name))]
    listed = [METADATA] if METADATA in names else [f"__{rank}{METADATA}" for rank in sorted(ranks)]
    if not listed:
        raise NotWhole(source.uri, f"{where}{METADATA} is missing: it is written last, so the save was stopped")
    missing_rank = None if METADATA in names else first_missing(ranks)
    if missing_rank is not None:
        raise NotWhole(
            source.uri, f"{where}__{missing_rank}{METADATA} is missing, and that of rank {max(ranks)} is there"
        )
    for metadata in listed:
        data = _read(source, where + metadata)
        missing = sorted({found.decode() for found in set(_SHARD.findall(data))} - names)
        if missing:
            raise NotWhole(source.uri, f"{where}{missing[0]} is missing, and {metadata} names it")
        for shard, end in sorted(_ends(data).items()):
            if (size := source.listing.files.get(where + shard, end)) < end:
                raise NotWhole(source.uri, f"{where}{shard} is cut off after {size} of {end} bytes")


def _read(source: Source, name: str) -> bytes:
    size = source.listing.files[name]
    if not 0 < size <= METADATA_MAX_BYTES:
        raise NotWhole(source.uri, f"{name} has {size} bytes: 1 to {METADATA_MAX_BYTES}")
    data = source.head(name, METADATA_MAX_BYTES)
    if not data.endswith(b"."):  # the last operation of every pickle
        raise NotWhole(source.uri, f"{name} is cut off after {size} bytes")
    return data


def _ends(data: bytes) -> dict[str, int]:
    """Return the end of the last item in each shard, in bytes, as far as the operations of a pickle show them.

    Nothing is executed. An item is a dictionary of ``relative_path``, ``offset`` and ``length``, in this order.

    >>> _ends(b"(Vrelative_path\\nV__0_0.distcp\\nVoffset\\nI8\\nVlength\\nI300\\nd.")
    {'__0_0.distcp': 308}
    """
    ends: dict[str, int] = {}
    memo: dict[object, object] = {}
    item: dict[str, object] = {}
    field, value = "", None
    with suppress(ValueError):  # it is no whole pickle
        for operation, argument, _ in pickletools.genops(data):
            if "PUT" in operation.name or operation.name == "MEMOIZE":
                memo[len(memo) if argument is None else argument] = value
                continue
            value = memo.get(argument) if "GET" in operation.name else argument
            if not field:
                field = str(value) if value in _FIELDS else ""
                continue
            item[field] = value
            path, offset, length = map(item.get, _FIELDS)
            if field == "length" and isinstance(path, str) and isinstance(offset, int) and isinstance(length, int):
                ends[path] = max(ends.get(path, 0), offset + length)
            field = ""
    return ends
