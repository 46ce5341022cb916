"""Recorded requests whose revisions keep their meaning when the requests around them are left out.

A request may ask for "revision 107", which was the third put of the recorded history. When that history is played
again elsewhere, or with half of it left out, the third put has another revision. So a recording keeps the store's
revision before and after each request, and `RevisionMap` learns, while replaying, which revision now stands for which.

    recorded: 105 put a -> 106, 106 put b -> 107, get rev=107
    replayed without the first put from a store at 2000: 2000 put b -> 2001, get rev=2001
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from tests.compat.differential.generator import map_revisions


@dataclass(frozen=True)
class Recorded:
    """A request, and the revision of the oracle's store before and after it."""

    request: Any
    before: int
    after: int


class RevisionMap:
    """Recorded revisions and those that stand for them in a replay."""

    def __init__(self, recorded_base: int, base: int) -> None:
        self._recorded = [recorded_base]
        self._now = [base]

    def learn(self, recorded: int, now: int) -> None:
        """Note that the store, recorded at `recorded`, is at `now`; calls come in ascending order."""
        if recorded > self._recorded[-1]:
            self._recorded.append(recorded)
            self._now.append(now)

    def mapped(self, revision: int) -> int:
        """Return what stands for a recorded revision.

        One whose write was left out becomes the nearest kept one before it; one in the future keeps its distance;
        one from before the recording stays, except the last, which is the compacted edge.
        """
        if revision >= self._recorded[-1]:
            return self._now[-1] + revision - self._recorded[-1]
        if revision >= self._recorded[0]:
            return self._now[bisect_right(self._recorded, revision) - 1]
        return self._now[0] - 1 if revision == self._recorded[0] - 1 else revision

    def moved(self, entry: Recorded, now: int) -> Any:
        """Return a copy of the entry's request for a store that is at `now`."""
        self._recorded_at(entry.before, now)
        copy = type(entry.request)()
        copy.CopyFrom(entry.request)
        map_revisions(copy, self.mapped)
        return copy

    def _recorded_at(self, recorded: int, now: int) -> None:
        self.learn(recorded, now)
        self._now[-1] = now
