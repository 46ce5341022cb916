"""Directories of Megatron: ``iter_<n>/``, distributed (DCP's files with ``common.pt``) or with a folder for each rank.

The tracker file does not show which iteration is complete, because Megatron truncates it before writing
(``importing``).
"""

from __future__ import annotations

import re
from typing import Final

from raftkv.checkpoint.errors import NotWhole
from raftkv.checkpoint.keys import MEGATRON_DIST, TORCH_SAVE
from raftkv.integrations.importers.candidate import Candidate, Facts, first_missing
from raftkv.integrations.importers.distributed import METADATA, check_shards
from raftkv.integrations.importers.formats import check_torch
from raftkv.integrations.importers.source import Listing, Source

NAME: Final = "megatron"
_FOLDER: Final = re.compile(r"iter_(\d{7,12})")
_RANK: Final = re.compile(r"mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?/.+")
_COMMON: Final = ("common.pt", "metadata.json")


def detect(listing: Listing) -> list[Candidate]:
    """Return the directory if it belongs to an iteration."""
    folder = _FOLDER.fullmatch(listing.name)
    if folder is None:
        return []
    per_rank = any(map(_RANK.fullmatch, listing.files))
    kind = TORCH_SAVE if per_rank else MEGATRON_DIST
    return [Candidate(NAME, kind, "", listing.files, step=int(folder[1]), keep=f"{listing.name}/")]


def inspect(candidate: Candidate, source: Source) -> Facts:
    """Check that the files of all ranks exist.

    Raises:
        NotWhole: one is missing or truncated; the message names it.
    """
    check_torch(source, (candidate.base + name for name in sorted(candidate.files) if name.endswith(".pt")))
    if candidate.kind == TORCH_SAVE:
        _check_ranks(candidate, source)
    else:
        for name in (METADATA, *_COMMON):
            if name not in candidate.files:
                raise NotWhole(source.uri, f"{candidate.base}{name} is missing")
        check_shards(candidate, source)
    return Facts(candidate.step)


def _check_ranks(candidate: Candidate, source: Source) -> None:
    """Check that all ranks of each dimension (tensor, pipeline, expert) exist, up to the largest one."""
    ranks = [
        tuple(int(part or 0) for part in found.groups()) for found in map(_RANK.fullmatch, candidate.files) if found
    ]
    for axis, what in enumerate(("tensor", "pipeline", "expert")):
        missing = first_missing(rank[axis] for rank in ranks)
        if missing is not None:
            raise NotWhole(source.uri, f"{candidate.base} has no files of {what} rank {missing}, and of a later one")
    wanted = 1
    for axis in range(3):
        wanted *= len({rank[axis] for rank in ranks})
    if wanted != len(set(ranks)):
        raise NotWhole(source.uri, f"{candidate.base} has files of {len(set(ranks))} ranks: there must be {wanted}")
