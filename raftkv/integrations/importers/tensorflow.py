"""The forms of TensorFlow: variables (``.index`` and ``.data``), SavedModel (graph and variables), frozen graphs."""

from __future__ import annotations

import re
from typing import Final

from raftkv.checkpoint.errors import NotWhole
from raftkv.checkpoint.keys import TF_FROZEN, TF_SAVEDMODEL, TF_VARIABLES
from raftkv.integrations.importers.candidate import Candidate, Facts, first_missing, step_in
from raftkv.integrations.importers.source import Listing, Source

NAME: Final = "tensorflow"
GRAPHS: Final = ("saved_model.pb", "saved_model.pbtxt")
_INDEX: Final = ".index"
_DATA: Final = re.compile(r"(.+)\.data-(\d{5})-of-(\d{5})")
_TABLE: Final = bytes.fromhex("57fb808b247547db")
"""The last bytes of an index: the magic number of a LevelDB table."""


def detect(listing: Listing) -> list[Candidate]:
    """Return TensorFlow's parts of a directory: a complete SavedModel, else each prefix and each frozen graph."""
    if any(name in listing.top for name in GRAPHS) or "variables/variables.index" in listing.files:
        return [Candidate(NAME, TF_SAVEDMODEL, "", listing.files, step=step_in(listing.name))]
    found = []
    for prefix, files in _prefixes(listing).items():
        files |= {name: listing.top[name] for name in (f"{prefix}.meta",) if name in listing.top}
        found.append(Candidate(NAME, TF_VARIABLES, prefix, files, step=step_in(prefix)))
    for name, size in listing.top.items():
        if name.endswith(".pb"):
            found.append(Candidate(NAME, TF_FROZEN, name, {name: size}, step=step_in(name)))
    return found


def _prefixes(listing: Listing) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for name, size in listing.top.items():
        data = _DATA.fullmatch(name)
        if data is not None:
            found.setdefault(data[1], {})[name] = size
        elif name.endswith(_INDEX):
            found.setdefault(name.removesuffix(_INDEX), {})[name] = size
    return found


def inspect(candidate: Candidate, source: Source) -> Facts:
    """Check that it is complete.

    Raises:
        NotWhole: a file is missing or truncated; the message names it.
    """
    if candidate.kind == TF_SAVEDMODEL:
        if not any(name in candidate.files for name in GRAPHS):
            raise NotWhole(source.uri, f"{candidate.base}{GRAPHS[0]} is missing: the export was stopped")
        if any(name.startswith("variables/") for name in candidate.files):
            _check_variables(candidate, source, "variables/variables")
    elif candidate.kind == TF_VARIABLES:
        _check_variables(candidate, source, candidate.path.rpartition("/")[2])
    elif not all(candidate.files.values()):
        raise NotWhole(source.uri, f"{candidate.path} is empty")
    return Facts(candidate.step)


def _check_variables(candidate: Candidate, source: Source, prefix: str) -> None:
    index = f"{prefix}{_INDEX}"
    if index not in candidate.files:
        raise NotWhole(source.uri, f"{candidate.base}{index} is missing: it is written last, so the save was stopped")
    if source.tail(candidate.base + index, len(_TABLE)) != _TABLE:
        raise NotWhole(source.uri, f"{candidate.base}{index} is cut off")
    shards = [found for found in map(_DATA.fullmatch, candidate.files) if found and found[1] == prefix]
    counts = {int(found[3]) for found in shards} or {1}
    for count in counts:
        missing = first_missing((int(found[2]) for found in shards if int(found[3]) == count), count)
        if missing is not None:
            raise NotWhole(source.uri, f"{candidate.base}{prefix}.data-{missing:05d}-of-{count:05d} is missing")
