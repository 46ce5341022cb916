"""Step directories of Orbax: ``<root>/<step>/`` with a directory for each item, and ``_CHECKPOINT_METADATA``.

Orbax marks a complete step in two ways: the suffix ``.orbax-checkpoint-tmp`` of the directory is removed, or, on object
stores, a file ``commit_success.txt`` is added. Metadata without a commit time belongs to an unfinished step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from raftkv.checkpoint.errors import NotWhole
from raftkv.checkpoint.keys import ORBAX
from raftkv.integrations.importers.candidate import Candidate, Facts, numeric, step_in
from raftkv.integrations.importers.source import Listing, Source

NAME: Final = "orbax"
METADATA: Final = "_CHECKPOINT_METADATA"
TEMPORARY: Final = ".orbax-checkpoint-tmp"
_METRICS: Final = "metrics/metrics"


def detect(listing: Listing) -> list[Candidate]:
    """Return the directory if it is a step of Orbax, finished or not."""
    tree = any(
        name.rpartition("/")[2] in ("_METADATA", "manifest.ocdbt") for name in listing.files if name.count("/") < 2
    )
    is_step = METADATA in listing.top or TEMPORARY in listing.name or (step_in(listing.name) is not None and tree)
    return [Candidate(NAME, ORBAX, "", listing.files, step=step_in(listing.name.partition(".")[0]))] if is_step else []


def inspect(candidate: Candidate, source: Source) -> Facts:
    """Check that the step was finished, and return its metrics.

    Raises:
        NotWhole: the save did not end, or an item is missing; the text names it.
    """
    if TEMPORARY in candidate.path:
        raise NotWhole(source.uri, f"{candidate.path} is temporary: the save was stopped before its end")
    metadata = _metadata(candidate, source)
    for item in _items(metadata):
        if not any(name.startswith(f"{item}/") for name in candidate.files):
            raise NotWhole(source.uri, f"{candidate.base}{item}/ is missing, and {METADATA} names it")
    for name in candidate.files:
        directory, _, last = name.rpartition("/")
        if last == "manifest.ocdbt" and not any(
            other.startswith(f"{directory}/d/".lstrip("/")) for other in candidate.files
        ):
            raise NotWhole(source.uri, f"{candidate.base}{directory}/d/ is missing: {name} refers to its files")
    metrics = metadata.get("metrics")
    if _METRICS in candidate.files:
        metrics = source.read_json(candidate.base + _METRICS)
    return Facts(candidate.step, numeric(metrics) if isinstance(metrics, dict) else {})


def _metadata(candidate: Candidate, source: Source) -> Mapping[str, Any]:
    if METADATA not in candidate.files:
        return {}  # as older versions leave it
    found = source.read_json(candidate.base + METADATA)
    if not isinstance(found, dict):
        raise NotWhole(source.uri, f"{candidate.base}{METADATA} is not a JSON object")
    if "commit_timestamp_nsecs" in found and found["commit_timestamp_nsecs"] is None:
        raise NotWhole(source.uri, f"{candidate.base}{METADATA} has no time of a commit: the save was not ended")
    return found


def _items(metadata: Mapping[str, Any]) -> list[str]:
    handlers = metadata.get("item_handlers")
    return [str(name) for name in handlers] if isinstance(handlers, dict) else []
