"""Runs as families of metrics, out of what ``history.timeline`` folds. Pure, but for the clock.

Times are those that nodes wrote. What is still going on lasts until the exporter's own clock, so a machine with a wrong
clock shows a wrong time without a world until the next generation begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raftkv.training.history.timeline import Fold
from raftkv.training.records import CAUSES, PHASES, RUNNING, State

_RUN: Final = ("run",)


class RunMetrics(Collector):
    """The runs that are known.

    Arguments:
        clock: seconds since 1970.

    Attributes:
        folds: of each run, by id; whoever follows the runs puts them here.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.folds: dict[str, Fold] = {}
        self._clock = clock
        self._lost_s: dict[str, float] = {}

    def forget(self, run_id: str) -> None:
        """Show a run no more: it was deleted."""
        self.folds.pop(run_id, None)
        self._lost_s.pop(run_id, None)

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield GaugeMetricFamily("raftkv_runs", "Runs that are known.", len(self.folds))
        yield from self._gauges()
        yield from self._phases()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        rows: tuple[tuple[str, str, Callable[[Fold], float]], ...] = (
            ("nodes", "Nodes that are there.", lambda fold: len(fold.present)),
            ("waiting_nodes", "Nodes that are there and in no running generation.", _waiting),
            ("members", "Nodes of the running generation; 0: none runs.", lambda fold: len(_members(fold))),
            ("world_size", "Workers of the running generation; 0: none runs.", _world_size),
            ("generation", "The last generation that began.", lambda fold: _state(fold).generation),
            ("min_nodes", "Nodes that a generation needs.", lambda fold: _state(fold).min_nodes),
            ("max_nodes", "Nodes that a generation may have.", lambda fold: _state(fold).max_nodes),
            ("denied_hosts", "Hosts that may not take part for now.", lambda fold: len(fold.denied)),
            ("has_arbiter", "Whether a node decides.", lambda fold: bool(fold.arbiter)),
            (
                "without_world_seconds",
                "How long a run whose nodes are there has had no running generation; 0: one runs.",
                self._without_world_s,
            ),
        )
        for name, text, value in rows:
            family = GaugeMetricFamily(f"raftkv_run_{name}", text, labels=_RUN)
            for run_id, fold in self.folds.items():
                family.add_metric((run_id,), value(fold))
            yield family

    def _phases(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("raftkv_run_phase", "1 for the phase that a run is in.", labels=("run", "phase"))
        for run_id, fold in self.folds.items():
            for phase in PHASES:
                family.add_metric((run_id, phase), float(_state(fold).phase == phase))
        yield family

    def _counters(self) -> Iterator[Metric]:
        text = "Faults that were reported, by their cause."
        faults = CounterMetricFamily("raftkv_run_faults", text, labels=("run", "cause"))
        text = "Time between generations: what faults, restarts and changes of size have cost."
        lost = CounterMetricFamily("raftkv_run_lost_seconds", text, labels=_RUN)
        for run_id, fold in self.folds.items():
            causes = [fault.cause for generation in fold.generations for fault in generation.faults]
            for cause in sorted({*CAUSES, *causes}):
                faults.add_metric((run_id, cause), causes.count(cause))
            # Another node's clock may end what this one's has measured until now: a counter never goes back.
            self._lost_s[run_id] = max(self._lost_s.get(run_id, 0.0), self._all_lost_s(fold))
            lost.add_metric((run_id,), self._lost_s[run_id])
        yield from (faults, lost)

    def _all_lost_s(self, fold: Fold) -> float:
        done = sum(one.recovery.seconds for one in fold.generations if one.recovery is not None)
        last = fold.generations[-1] if fold.generations else None
        under_way = self._clock() - last.ended.time if last is not None and last.ended and not last.closed else 0.0
        return done + max(under_way, 0.0)

    def _without_world_s(self, fold: Fold) -> float:
        if _state(fold).phase == RUNNING or not fold.present:
            return 0.0
        last = fold.generations[-1] if fold.generations else None
        came = min(node.time for node in fold.present.values())
        since = last.ended.time if last is not None and last.ended is not None and not last.closed else came
        return max(self._clock() - since, 0.0)


def _state(fold: Fold) -> State:
    return fold.state or State(0, PHASES[0])


def _members(fold: Fold) -> tuple[str, ...]:
    if fold.round is None or _state(fold).phase != RUNNING:
        return ()
    return tuple(member.id for member in fold.round.members)


def _world_size(fold: Fold) -> int:
    members = set(_members(fold))
    return sum(member.slots for member in fold.round.members if member.id in members) if fold.round else 0


def _waiting(fold: Fold) -> int:
    return len(fold.present.keys() - set(_members(fold)))
