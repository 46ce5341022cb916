"""Find the tools that have written to a directory, from the names of files alone.

Directories are looked at from the top; a tool that knows one takes its files, and what is left is shown to the next.
The order is that of how much a tool's names say: a directory of Megatron's has DCP's files in it, for example.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from raftkv.integrations.importers import (
    deepspeed,
    distributed,
    lightning,
    megatron,
    orbax,
    tensorflow,
    trainer,
    weights,
)
from raftkv.integrations.importers.candidate import Candidate, Facts
from raftkv.integrations.importers.source import Listing, Source


class Tool(NamedTuple):
    """One importer.

    Attributes:
        detect: returns what of one directory is the tool's, by its listing.
        inspect: checks that a candidate is whole; raises ``NotWhole``.
    """

    detect: Callable[[Listing], list[Candidate]]
    inspect: Callable[[Candidate, Source], Facts]


TOOLS: Final[Mapping[str, Tool]] = {
    module.NAME: Tool(module.detect, module.inspect)
    for module in (megatron, trainer, deepspeed, orbax, tensorflow, distributed, lightning, weights)
}


def detect(listing: Listing) -> list[Candidate]:
    """Return all that may be checkpoints, oldest first; those whose step is not in their name come last."""
    names = sorted(listing.files)
    taken: set[str] = set()
    found: list[Candidate] = []
    for directory in ("", *listing.directories):
        for candidate in _detect_in(_left(directory, listing, names, taken)):
            found.append(candidate.below(directory))
            taken |= found[-1].sources
    return sorted(found, key=lambda candidate: (candidate.step is None, candidate.step or 0, candidate.path))


def _left(directory: str, listing: Listing, names: list[str], taken: set[str]) -> Listing:
    """Return the files of a directory that no tool has taken; in the order of all names they are neighbours."""
    start = f"{directory}/" if directory else ""
    first, end = (bisect_left(names, start), bisect_left(names, f"{directory}0")) if directory else (0, len(names))
    left = {name[len(start) :]: listing.files[name] for name in names[first:end] if name not in taken}
    return Listing(directory.rpartition("/")[2] or listing.name, left)


def _detect_in(here: Listing) -> list[Candidate]:
    found: list[Candidate] = []
    for tool in TOOLS.values():
        own = tool.detect(here) if here.files else []
        found += own
        taken = {name for candidate in own for name in candidate.sources}
        if taken:
            here = Listing(here.name, {name: size for name, size in here.files.items() if name not in taken})
    return found
