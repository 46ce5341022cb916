"""Candidates for checkpoints, found by file names, and the numbers in names.

>>> step_in("checkpoint-400"), step_in("epoch=3-step=400.ckpt"), step_in("iter_0000400"), step_in("model")
(400, 400, 400, None)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from raftkv.checkpoint.commit.summary import usable
from raftkv.checkpoint.keys import METRICS_MAX, STEP_MAX

_STEP: Final = (re.compile(r"step[=_-]?(\d{1,12})(?!\d)"), re.compile(r"(?:^|[-_.=])(\d{1,12})(?:\.[A-Za-z]\w*)?$"))


@dataclass(frozen=True)
class Candidate:
    """Files that may be one checkpoint.

    Attributes:
        tool: name of the importer.
        kind: one of ``keys.KINDS``.
        path: path below the source, for people.
        files: name in the checkpoint to size in bytes.
        base: prefix of those names in the source; empty, or with a slash at the end.
        step: step according to its name; None: the name has none.
        keep: put before the names in the checkpoint: for tools that load a directory by its name from the one above it.
    """

    tool: str
    kind: str
    path: str
    files: Mapping[str, int]
    base: str = ""
    step: int | None = None
    keep: str = ""

    def below(self, directory: str) -> Candidate:
        """Return it with names relative to its source instead of the examined directory."""
        if not directory:
            return self
        return replace(self, path=f"{directory}/{self.path}".rstrip("/"), base=f"{directory}/{self.base}")

    @property
    def sources(self) -> set[str]:
        """Names of its files in the source."""
        return {self.base + name for name in self.files}


@dataclass(frozen=True)
class Facts:
    """Facts from the files of a complete checkpoint.

    Attributes:
        step: None: nothing.
        metrics: name to value.
        metadata: metadata for people.
    """

    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


def step_in(name: str) -> int | None:
    """Return the step in a name: the number after ``step``, else the number at its end, before a suffix."""
    for pattern in _STEP:
        found = pattern.findall(name)
        if found and int(found[-1]) <= STEP_MAX:
            return int(found[-1])
    return None


def first_missing(numbers: Iterable[int], count: int = 0) -> int | None:
    """Return the first missing number from 0 on; None: all exist up to the largest, and at least ``count``.

    >>> first_missing([0, 1, 3]), first_missing([0, 1]), first_missing([0, 1], 4)
    (2, None, 2)
    """
    known = set(numbers)
    wanted = max(count, max(known, default=-1) + 1)
    return next((number for number in range(min(wanted, len(known) + 1)) if number not in known), None)


def numeric(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that can be metrics, according to ``usable``, up to the maximum number."""
    return dict(islice(usable(values).items(), METRICS_MAX))
