"""What the keys and the files say, read without the code that is tested: what a takeover must come to, what is left.

Only the names of keys are taken from ``raftkv.checkpoint.keys``.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raftkv.checkpoint.keys import RegistryKeys


@dataclass(frozen=True)
class State:
    """The registry's keys at one moment.

    Attributes:
        committed: steps that have a record.
        latest: the step of ``latest``; 0: there is none.
        heads: step and generation of every attempt that is not decided, and whether all its ranks have prepared.
        named: directories that a record, an attempt or a deletion names.
    """

    committed: frozenset[int]
    latest: int
    heads: tuple[tuple[int, int, bool], ...]
    named: frozenset[str]

    @property
    def expected(self) -> int:
        """The step that ``latest`` must have after a takeover of all that there is."""
        return max([self.latest, *(step for step, _, is_whole in self.heads if is_whole)])


def read_state(kv: Any, run_id: str) -> State:
    """Read all keys of a run."""
    keys = RegistryKeys(run_id)
    values = {item.key.decode(): item.value for item in kv.scan(keys.base, prefix=True)}
    ranks = Counter(key.rpartition("rank/")[0] for key in values if key.startswith(keys.attempts) and "/rank/" in key)
    heads = []
    for key in values:
        if key.startswith(keys.attempts) and key.endswith("/head"):
            head = json.loads(values[key])
            is_whole = ranks[key.removesuffix("head")] == head["world_size"]
            heads.append((head["step"], head["generation"], is_whole))
    latest = [json.loads(item.value)["step"] for item in kv.scan(keys.latest_all, prefix=True)]
    places = (keys.attempts, keys.records, keys.deletings)
    naming = [json.loads(value) for key, value in values.items() if key.startswith(places) and "/rank/" not in key]
    return State(
        frozenset(int(key.rpartition("/")[2]) for key in values if key.startswith(keys.records)),
        max(latest, default=0),
        tuple(sorted(heads)),
        frozenset(Path(each["uri"]).name for each in naming),
    )


def strays(state: State, directory: Path) -> list[str]:
    """Return directories that nobody could ever find, to load or to delete them."""
    return sorted(path.name for path in directory.iterdir() if path.is_dir() and path.name not in state.named)
