"""Checkpoints as families of metrics: commits, attempts, the newest of each kind. Pure, but for the clock.

An attempt is committed or given up in the revision in which its head goes: there is a record of the same revision, or
there is none. The two are watched apart, so what became of a head is decided ``SETTLED_S`` after it went.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from raftkv.checkpoint.records import Checkpoint, Latest

SETTLED_S: Final = 2.0
"""After so long every commit of a revision is known, if its deletions are."""

REVISIONS_MAX: Final = 100_000
"""Commits that are kept, to know heads that went with them, and metrics that came later."""

_LABELS: Final = ("run", "kind")


@dataclass
class _Kind:
    latest: Latest | None = None
    latest_revision: int = 0
    newest: Checkpoint | None = None
    commits: int = 0
    duration_s: float = 0.0
    open_attempts: set[bytes] = field(default_factory=set)
    undecided: dict[int, float] = field(default_factory=dict)
    aborted: int = 0


class CheckpointMetrics(Collector):
    """The checkpoints of the runs that are known.

    Arguments:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._committed: OrderedDict[tuple[str, str, int], set[int]] = OrderedDict()
        """Steps that were committed, by run, kind and revision."""

    def _kind(self, run_id: str, kind: str) -> _Kind:
        return self._kinds.setdefault((run_id, kind), _Kind())

    def summed_up(self, run_id: str, kind: str, latest: Latest | None, revision: int) -> None:
        """Take the summary of a kind.

        Arguments:
            run_id, kind: of what.
            latest: the summary; None: it is gone, with all checkpoints of the kind.
            revision: of the store.
        """
        if latest is None:
            self._kinds.pop((run_id, kind), None)
            return
        found = self._kind(run_id, kind)
        found.latest, found.latest_revision = latest, revision

    def committed(self, checkpoint: Checkpoint, revision: int) -> None:
        """Take a commit; the same one again (its metrics have changed) counts once.

        Arguments:
            checkpoint: what was committed.
            revision: in which.
        """
        steps = self._committed.setdefault((checkpoint.run_id, checkpoint.kind, revision), set())
        if checkpoint.step in steps:
            return
        steps.add(checkpoint.step)
        while len(self._committed) > REVISIONS_MAX:
            self._committed.popitem(last=False)
        found = self._kind(checkpoint.run_id, checkpoint.kind)
        found.commits += 1
        found.duration_s += checkpoint.duration_s
        if found.newest is None or checkpoint.step >= found.newest.step:
            found.newest = checkpoint

    def began(self, run_id: str, kind: str, head: bytes) -> None:
        """An attempt is under way, whose head has this key."""
        self._kind(run_id, kind).open_attempts.add(head)

    def ended(self, run_id: str, kind: str, head: bytes, revision: int) -> None:
        """The head of an attempt has gone in a revision: it was committed or given up."""
        found = self._kind(run_id, kind)
        if head in found.open_attempts:
            found.open_attempts.discard(head)
            found.undecided[revision] = self._clock()

    def _settle(self, run_id: str, kind: str, found: _Kind) -> None:
        now = self._clock()
        for revision, ended_at in list(found.undecided.items()):
            if (run_id, kind, revision) in self._committed:
                del found.undecided[revision]
            elif now - ended_at >= SETTLED_S:
                del found.undecided[revision]
                found.aborted += 1

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for (run_id, kind), found in self._kinds.items():
            self._settle(run_id, kind, found)
        yield from self._gauges()
        text = "Attempts that were given up since the exporter began to watch."
        aborted = CounterMetricFamily("raftkv_checkpoint_attempts_aborted", text, labels=_LABELS)
        text = "Commits that the exporter knows, and what they took from the beginning of the attempt to the commit."
        commits = SummaryMetricFamily("raftkv_checkpoint_commit_seconds", text, labels=_LABELS)
        for labels, found in self._kinds.items():
            aborted.add_metric(labels, found.aborted)
            commits.add_metric(labels, found.commits, found.duration_s)
        yield from (aborted, commits)

    def _gauges(self) -> Iterator[Metric]:
        rows: tuple[tuple[str, str, Callable[[_Kind], float | None]], ...] = (
            ("attempts", "Attempts under way.", lambda kind: len(kind.open_attempts)),
            ("last_revision", "Revision of the store of the last commit.", lambda kind: kind.latest_revision or None),
            ("last_step", "Step of the newest.", lambda kind: kind.latest.step if kind.latest else None),
            (
                "last_generation",
                "Generation that saved the newest.",
                lambda kind: kind.latest.generation if kind.latest else None,
            ),
            (
                "last_timestamp_seconds",
                "When the newest was committed.",
                lambda kind: kind.latest.time if kind.latest else None,
            ),
            ("age_seconds", "How old the newest is.", self._age_s),
            ("last_size_bytes", "Bytes of the newest.", lambda kind: kind.newest.size_bytes if kind.newest else None),
            ("last_files", "Files of the newest.", lambda kind: kind.newest.file_count if kind.newest else None),
            ("size_bytes", "Bytes of all that exist.", lambda kind: kind.latest.size_bytes if kind.latest else None),
            ("committed", "Checkpoints that exist.", lambda kind: kind.latest.count if kind.latest else None),
        )
        for name, text, value in rows:
            family = GaugeMetricFamily(f"raftkv_checkpoint_{name}", text, labels=_LABELS)
            for labels, found in self._kinds.items():
                number = value(found)
                if number is not None:
                    family.add_metric(labels, number)
            yield family

    def _age_s(self, kind: _Kind) -> float | None:
        return None if kind.latest is None else max(self._clock() - kind.latest.time, 0.0)
