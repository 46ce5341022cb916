"""Weights as Hugging Face writes them: one file, or shards with an index that names them; safetensors and torch's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from raftkv.checkpoint.errors import NotWhole
from raftkv.checkpoint.keys import SAFETENSORS
from raftkv.integrations.importers.candidate import Candidate, Facts, first_missing, step_in
from raftkv.integrations.importers.formats import check_safetensors, check_torch
from raftkv.integrations.importers.source import Listing, Source

NAME: Final = "safetensors"
INDEX: Final = ".index.json"
_TORCH: Final = re.compile(r"(pytorch_model|adapter_model)[\w.-]*\.bin(\.index\.json)?")
_SHARD: Final = re.compile(r"(.*)-(\d{1,6})-of-(\d{1,6})(\.\w+)")


def is_weights(name: str) -> bool:
    """Return whether, by its name, a file has weights or is an index of weights."""
    return name.endswith((".safetensors", f".safetensors{INDEX}")) or _TORCH.fullmatch(name) is not None


def detect(listing: Listing) -> list[Candidate]:
    """Return the other files of a directory with safetensors files: configuration and tokenizer belong to the
    checkpoint."""
    if not any(name.endswith((".safetensors", f".safetensors{INDEX}")) for name in listing.top):
        return []
    return [Candidate(NAME, SAFETENSORS, "", listing.top, step=step_in(listing.name))]


def inspect(candidate: Candidate, source: Source) -> Facts:
    """Check that all shards exist and none is truncated.

    Raises:
        NotWhole: one is missing or truncated; the message names it.
    """
    metadata = check_weights(candidate, source)
    step = metadata.get("step", "")
    found = int(step) if step.isascii() and step.isdecimal() and len(step) <= 12 else None
    return Facts(candidate.step if candidate.step is not None else found)


def check_weights(candidate: Candidate, source: Source, *, needed: bool = True) -> dict[str, str]:
    """Check the weights of a candidate; return the metadata of the first safetensors file.

    Arguments:
        candidate, source: candidate and its source.
        needed: there must be some.

    Raises:
        NotWhole: one is missing or truncated; the message names it.
    """
    weights = sorted(name for name in candidate.files if "/" not in name and is_weights(name))
    if needed and not weights:
        raise NotWhole(source.uri, f"{candidate.base}model.safetensors is missing, and no other file has weights")
    for index in (name for name in weights if name.endswith(INDEX)):
        _check_index(candidate, source, index)
    shards = [name for name in weights if not name.endswith(INDEX)]
    _check_numbers(candidate, source, shards)
    said: dict[str, str] = {}
    for name in shards:
        if name.endswith(".safetensors"):
            metadata = check_safetensors(source, candidate.base + name)
            said = said or {key: value for key, value in metadata.items() if isinstance(value, str)}
        else:
            check_torch(source, [candidate.base + name])
    return said


def _check_index(candidate: Candidate, source: Source, index: str) -> None:
    parsed = source.read_json(candidate.base + index)
    shards = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(shards, dict):
        raise NotWhole(source.uri, f"{candidate.base}{index} is not an index of weights")
    missing = sorted({str(shard) for shard in shards.values()} - candidate.files.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotWhole(source.uri, f"{candidate.base}{missing[0]}{more} is missing, and {index} names it")


def _check_numbers(candidate: Candidate, source: Source, shards: Iterable[str]) -> None:
    """Check that all numbered shards exist, because the index is written last and may be missing too."""
    series: dict[tuple[str, int, str, int], set[int]] = {}
    for found in filter(None, map(_SHARD.fullmatch, shards)):
        key = found[1], int(found[3]), found[4], len(found[2])
        series.setdefault(key, set()).add(int(found[2]) - 1)
    for (name, count, suffix, width), numbers in series.items():
        missing = first_missing(numbers, count)
        if missing is not None:
            shard = f"{name}-{missing + 1:0{width}d}-of-{count:0{width}d}{suffix}"
            raise NotWhole(source.uri, f"{candidate.base}{shard} is missing")
