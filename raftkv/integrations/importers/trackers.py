"""Files that name the newest checkpoint of a directory: DeepSpeed's, Megatron's and TensorFlow's.

They are the reason why a directory is worth a look: written before what they name is whole, truncated before they are
written, or left behind by a deletion. The importer compares the named checkpoint with the files that exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from raftkv.checkpoint.errors import printable
from raftkv.integrations.importers.candidate import Candidate
from raftkv.integrations.importers.source import Source

TRACKERS: Final = {
    "latest": re.compile(r"(?P<name>[\w.-]{1,255})\s*"),
    "latest_checkpointed_iteration.txt": re.compile(r"(?P<number>\d{1,12})\s*|(?P<name>release)\s*"),
    "checkpoint": re.compile(r'model_checkpoint_path:\s*"(?P<name>[^"\n]{1,1000})"(?:.|\n)*'),
}
"""Name of the file, and what is in it."""
TRACKER_MAX_BYTES: Final = 64 * 1024


def wrong_trackers(source: Source, candidates: Iterable[Candidate]) -> dict[str, str]:
    """Return the trackers of the source that name nothing that is there, and why.

    Raises:
        StorageError: one could not be read.
    """
    paths = {candidate.path or source.listing.name for candidate in candidates}
    found = {}
    for tracker, pattern in TRACKERS.items():
        if tracker in source.listing.top and paths:
            text = source.head(tracker, TRACKER_MAX_BYTES).decode(errors="replace")
            match = pattern.fullmatch(text)
            if match is None:
                found[tracker] = "names nothing: it is empty or cut off, as after a crash while it was written"
            else:
                number = match.groupdict().get("number")
                name = f"iter_{int(number):07d}" if number else match["name"].rpartition("/")[2]
                if name not in paths:
                    found[tracker] = printable(f"names {name}, which is not there")
    return found
