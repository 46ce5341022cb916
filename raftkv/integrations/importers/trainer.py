"""Folders of the Hugging Face Trainer: ``checkpoint-<step>/``.

The Trainer writes the model first and ``trainer_state.json`` last, but its own search for the newest folder checks
neither. So a folder without the state, or with only some of the files needed for resuming, was left by a crash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from raftkv.checkpoint.commit.summary import Measured, measured_at
from raftkv.checkpoint.errors import NotWhole
from raftkv.checkpoint.keys import DCP, DEEPSPEED_ZERO, FILES, SAFETENSORS, TORCH_SAVE
from raftkv.integrations.importers import deepspeed
from raftkv.integrations.importers.candidate import Candidate, Facts, first_missing, numeric
from raftkv.integrations.importers.distributed import check_shards
from raftkv.integrations.importers.formats import check_torch
from raftkv.integrations.importers.source import Listing, Source
from raftkv.integrations.importers.weights import check_weights, is_weights

NAME: Final = "trainer"
STATE: Final = "trainer_state.json"
_FOLDER: Final = re.compile(r"checkpoint-(\d{1,12})")
_OWN: Final = (STATE, "training_args.bin", "optimizer.pt", "scheduler.pt")
_RNG: Final = re.compile(r"rng_state_(\d{1,6})\.pth")
_TIMINGS: Final = ("_runtime", "_per_second", "_time")


def detect(listing: Listing) -> list[Candidate]:
    """Return the folder if it belongs to the Trainer."""
    folder = _FOLDER.fullmatch(listing.name)
    own = any(name in listing.top for name in _OWN) or any(is_weights(name) for name in listing.top)
    if folder is None or not own:
        return []
    return [Candidate(NAME, _kind(listing), "", listing.files, step=int(folder[1]))]


def _kind(listing: Listing) -> str:
    names = listing.files
    if any(name.endswith("_states.pt") for name in names):
        return DEEPSPEED_ZERO
    if any(name.endswith(".distcp") for name in names):
        return DCP
    if any(name.endswith(".safetensors") for name in listing.top):
        return SAFETENSORS
    return TORCH_SAVE if any(is_weights(name) for name in listing.top) else FILES


def inspect(candidate: Candidate, source: Source) -> Facts:
    """Check that the folder is complete, and return its metrics.

    Raises:
        NotWhole: a file is missing; the text names it.
    """
    if STATE not in candidate.files:
        raise NotWhole(source.uri, f"{candidate.base}{STATE} is missing: the Trainer writes it last, so it was stopped")
    state = source.read_json(candidate.base + STATE)
    if not isinstance(state, dict) or state.get("global_step") != candidate.step:
        raise NotWhole(source.uri, f"{candidate.base}{STATE} is of another step than its folder")
    _check_states(candidate, source)
    if candidate.kind == DEEPSPEED_ZERO:
        _check_deepspeed(candidate, source)
    if candidate.kind == DCP:
        check_shards(candidate, source)
    else:
        check_weights(candidate, source, needed=candidate.kind != DEEPSPEED_ZERO)
    return Facts(candidate.step, metrics_of(state), _metadata(state))


def _check_states(candidate: Candidate, source: Source) -> None:
    """Check that all files needed for resuming exist, or none (``save_only_model``)."""
    names = {name for name in candidate.files if "/" not in name}
    rng = [int(found[1]) for name in names if (found := _RNG.fullmatch(name))]
    missing = first_missing(rng)
    if missing is not None:
        raise NotWhole(
            source.uri, f"{candidate.base}rng_state_{missing}.pth is missing, and that of rank {max(rng)} is there"
        )
    has_rng = bool(rng) or "rng_state.pth" in names
    optimizer = {"optimizer.pt", "optimizer.bin"} & names
    is_sharded = candidate.kind in (DCP, DEEPSPEED_ZERO)
    if has_rng and not optimizer and not is_sharded:
        raise NotWhole(
            source.uri, f"{candidate.base}optimizer.pt is missing, and the states of random numbers are there"
        )
    if optimizer and not has_rng:
        raise NotWhole(source.uri, f"{candidate.base}rng_state.pth is missing, and the optimizer is there")
    states = [name for name in names if name.endswith((".pt", ".pth", ".bin")) and not is_weights(name)]
    check_torch(source, (candidate.base + name for name in sorted(states)))


def _check_deepspeed(candidate: Candidate, source: Source) -> None:
    for directory in sorted({name.rpartition("/")[0] for name in candidate.files if name.endswith("_states.pt")}):
        start = f"{directory}/" if directory else ""
        own = {name.removeprefix(start): size for name, size in candidate.files.items() if name.startswith(start)}
        deepspeed.inspect(replace(candidate, files=own, base=candidate.base + start), source)


def metrics_of(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that the Trainer recorded at the step of its state: loss and evaluation."""
    step = state.get("global_step")
    return numeric(measured_at(measured(state.get("log_history")), step)) if isinstance(step, int) else {}


def measured(log: object) -> dict[str, Measured]:
    """Return the last value of each metric in a log of the Trainer, and the step of its measurement."""
    return {
        name: Measured(value, entry["step"])
        for entry in (log if isinstance(log, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("step"), int)
        for name, value in entry.items()
        if _is_metric(name)
    }


def _is_metric(name: str) -> bool:
    return name == "loss" or (name.startswith("eval_") and not name.endswith(_TIMINGS))


def _metadata(state: Mapping[str, Any]) -> dict[str, str]:
    names = ("epoch", "best_metric", "best_global_step")
    return {name: str(state[name]) for name in names if isinstance(state.get(name), int | float)}
