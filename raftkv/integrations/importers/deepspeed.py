"""Directories of DeepSpeed: ``global_step<n>/`` with a file of states for each rank.

DeepSpeed writes ``latest`` before the other ranks have finished, so it may name an incomplete directory. The number of
ranks is given by two numbers in the states of the model, which are read without unpickling.
"""

from __future__ import annotations

import re
from typing import Final

from raftkv.checkpoint.errors import NotWhole
from raftkv.checkpoint.keys import DEEPSPEED_ZERO
from raftkv.integrations.importers.candidate import Candidate, Facts, first_missing, step_in
from raftkv.integrations.importers.formats import check_torch, number_in_torch
from raftkv.integrations.importers.source import Listing, Source

NAME: Final = "deepspeed"
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER: Final = re.compile(r"(.*)zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
RANKS_MAX: Final = 1_000_000


def detect(listing: Listing) -> list[Candidate]:
    """Return the directory if it has states of ranks; file names include its name, as DeepSpeed needs."""
    if not any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in listing.top):
        return []
    return [Candidate(NAME, DEEPSPEED_ZERO, "", listing.files, step=step_in(listing.name), keep=f"{listing.name}/")]


def inspect(candidate: Candidate, source: Source) -> Facts:
    """Check that the states of all ranks exist.

    Raises:
        NotWhole: those of one are missing or truncated; the message names it.
    """
    names = sorted(candidate.files)
    models = [(int(found[1] or 0), int(found[2])) for name in names if (found := _MODEL.fullmatch(name))]
    if not models:
        raise NotWhole(source.uri, f"{candidate.base}mp_rank_00_model_states.pt is missing")
    check_torch(source, (candidate.base + name for name in names if name.endswith(".pt")))
    first = next(name for name in names if _MODEL.fullmatch(name))
    shards, models_wanted = (_count(candidate, source, first, key) for key in ("dp_world_size", "mp_world_size"))
    missing = first_missing((model for _, model in models), models_wanted)
    if missing is not None:
        raise NotWhole(source.uri, f"{candidate.base}mp_rank_{missing:02d}_model_states.pt is missing")
    _check_optimizers(candidate, source, shards, {model for _, model in models})
    return Facts(candidate.step)


def _count(candidate: Candidate, source: Source, name: str, key: str) -> int:
    found = number_in_torch(source, candidate.base + name, key) or 0
    return min(max(found, 0), RANKS_MAX)


def _check_optimizers(candidate: Candidate, source: Source, count: int, models: set[int]) -> None:
    ranks: dict[int, set[int]] = {}
    prefix = ""
    for found in filter(None, map(_OPTIMIZER.fullmatch, candidate.files)):
        prefix = found[1]
        ranks.setdefault(int(found[3]), set()).add(int(found[2]))
    if not ranks:
        return  # without ZeRO the optimizer is in the states of the model
    wanted = max(count, *(max(numbers) + 1 for numbers in ranks.values()))
    for model in sorted(models):
        missing = first_missing(ranks.get(model, ()), wanted)
        if missing is not None:
            name = f"{prefix}zero_pp_rank_{missing}_mp_rank_{model:02d}_optim_states.pt"
            raise NotWhole(source.uri, f"{candidate.base}{name} is missing: there are {wanted} ranks")
