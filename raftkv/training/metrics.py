"""Prometheus metrics of the runs and checkpoints of a store, kept current by watches.

::

    async with Exporter(kv) as exporter:
        await exporter.look()                       # find new runs; done automatically every DISCOVERY_S
        text = generate_latest(exporter.registry)

Owns one task per run, which follows its history; two copies of keys per run, of attempts and of commits; one copy of
the summaries of all runs; and the periodic search for runs and clusters. Failed reads are counted, and repeated at the
next search.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, Self, TypeVar

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from raftkv.checkpoint.keys import KINDS, LATEST, MEMORY, RegistryKeys, attempt_of, kind_of, run_of
from raftkv.checkpoint.records import Checkpoint, Latest
from raftkv.client.control import ClientControl, Reflector, below
from raftkv.client.records import Record, RecordError, read
from raftkv.client.values import PUT, Event
from raftkv.errors import ConfigError, PermissionDeniedError, RaftKVError
from raftkv.training.errors import TrainingError
from raftkv.training.history import Fold, follow, list_runs
from raftkv.training.records import CAUSES, PHASES, RUNNING, State
from raftkv.training.scheduling.ledger import ClusterView, describe_cluster, list_clusters

if TYPE_CHECKING:
    from raftkv.client.library import Client

# -- checkpoints ----------------------------------------------------------------------------------------------------
#
# Metric families of checkpoints: commits, attempts, the newest of each kind. Pure, except for the clock.
#
# An attempt ends at the revision at which its head is deleted: it was committed if a record has the same revision, else
# aborted. Heads and records are watched separately, so the outcome is decided ``SETTLED_S`` after the deletion.

Key = TypeVar("Key", bound=tuple[str, ...])
Shown = TypeVar("Shown")

SETTLED_S: Final = 2.0
"""Time after which every commit of a revision is known whose deletions are known."""

REVISIONS_MAX: Final = 100_000
"""Number of remembered commits, to recognise heads deleted by them, and later changes of metrics."""

_LABELS: Final = ("run", "kind")
_KNOWN: Final = frozenset((*KINDS, MEMORY))
"""Kinds that are counted: the keys of a run can name any, and each would be a dozen more time series."""


def _gauges(
    prefix: str,
    labels: Sequence[str],
    rows: Iterable[tuple[str, str, Callable[[Shown], float | None]]],
    shown: Mapping[Key, Shown],
) -> Iterator[Metric]:
    """Make a family for each row, with a value for each object that has one."""
    for name, text, value in rows:
        family = GaugeMetricFamily(f"{prefix}_{name}", text, labels=labels)
        for key, one in shown.items():
            if (number := value(one)) is not None:
                family.add_metric(key, number)
        yield family


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
    """Metrics of the checkpoints of all known runs.

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
            run_id, kind: run and kind.
            latest: the summary; None: deleted, with all checkpoints of the kind.
            revision: store revision.
        """
        if latest is None:
            self._kinds.pop((run_id, kind), None)
            return
        found = self._kind(run_id, kind)
        found.latest, found.latest_revision = latest, revision

    def committed(self, checkpoint: Checkpoint, revision: int) -> None:
        """Take a commit; the same commit with changed metrics counts once.

        Arguments:
            checkpoint: committed checkpoint.
            revision: revision of the commit.
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
        """Note that an attempt with this head key has begun."""
        self._kind(run_id, kind).open_attempts.add(head)

    def ended(self, run_id: str, kind: str, head: bytes, revision: int) -> None:
        """Note that the head of an attempt was deleted at a revision: it was committed or aborted."""
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
            ("last_step", "Step of the newest.", _latest("step")),
            ("last_generation", "Generation that saved the newest.", _latest("generation")),
            ("last_timestamp_seconds", "When the newest was committed.", _latest("time")),
            ("age_seconds", "How old the newest is.", self._age_s),
            ("last_size_bytes", "Bytes of the newest.", lambda kind: kind.newest.size_bytes if kind.newest else None),
            ("last_files", "Files of the newest.", lambda kind: kind.newest.file_count if kind.newest else None),
            ("size_bytes", "Bytes of all that exist.", _latest("size_bytes")),
            ("committed", "Checkpoints that exist.", _latest("count")),
        )
        yield from _gauges("raftkv_checkpoint", _LABELS, rows, self._kinds)

    def _age_s(self, kind: _Kind) -> float | None:
        return None if kind.latest is None else max(self._clock() - kind.latest.time, 0.0)


# -- queues ---------------------------------------------------------------------------------------------------------
#
# Metric families of clusters whose slots runs share: slots, grants, and waiting runs.


def _latest(name: str) -> Callable[[_Kind], float | None]:
    return lambda kind: getattr(kind.latest, name, None)


_CLUSTER: Final = ("cluster",)


class QueueMetrics(Collector):
    """Metrics of all known clusters.

    Attributes:
        views: view of each cluster by name, as of the last look.
    """

    def __init__(self) -> None:
        self.views: dict[str, ClusterView] = {}

    def collect(self) -> Iterator[Metric]:
        """All families."""
        rows: tuple[tuple[str, str, Callable[[ClusterView], float | None]], ...] = (
            ("slots", "Slots of the hosts.", lambda view: sum(host.slots for host in view.hosts)),
            ("free_slots", "Slots that no run holds.", lambda view: sum(host.free for host in view.hosts)),
            ("admitted", "Runs that have slots.", lambda view: len(view.grants)),
            ("queued", "Runs that wait for slots.", lambda view: len(view.queue)),
            ("denied_hosts", "Hosts that are left out.", lambda view: sum(bool(host.denied) for host in view.hosts)),
        )
        yield from _gauges("raftkv_run_cluster", _CLUSTER, rows, {(name,): view for name, view in self.views.items()})
        text = "Place of a run that waits for slots, from 1; 0: it cannot be served."
        places = GaugeMetricFamily("raftkv_run_queue_place", text, labels=("cluster", "run"))
        for cluster, view in self.views.items():
            for waiting in view.queue:
                places.add_metric((cluster, waiting.run), waiting.place)
        yield places


# -- runs -----------------------------------------------------------------------------------------------------------
#
# Metric families of runs, from the folds of ``history``. Pure, except for the clock.
#
# Times are those that nodes wrote. Open periods last until the current time of the exporter's clock, so if that clock
# is wrong, the time without a world is wrong until the next generation begins.

_RUN: Final = ("run",)
_OTHER: Final = "other"
"""Label of all causes that are not in ``CAUSES``: a node can write any text, and each would be one more time series."""


class RunMetrics(Collector):
    """Metrics of all known runs.

    Arguments:
        clock: seconds since 1970.

    Attributes:
        folds: fold of each run by id, set by the exporter.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.folds: dict[str, Fold] = {}
        self._clock = clock
        self._lost_s: dict[str, float] = {}

    def forget(self, run_id: str) -> None:
        """Drop a run that was deleted."""
        self.folds.pop(run_id, None)
        self._lost_s.pop(run_id, None)

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield GaugeMetricFamily("raftkv_runs", "Runs that are known.", len(self.folds))
        yield from self._gauges()
        yield from self._phases()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        rows: tuple[tuple[str, str, Callable[[Fold], float | None]], ...] = (
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
        yield from _gauges("raftkv_run", _RUN, rows, {(run_id,): fold for run_id, fold in self.folds.items()})

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
            causes = dict.fromkeys(CAUSES, 0)
            for fault in chain.from_iterable(generation.faults for generation in fold.generations):
                cause = fault.cause if fault.cause in CAUSES else _OTHER
                causes[cause] = causes.get(cause, 0) + 1
            for cause, number in sorted(causes.items()):
                faults.add_metric((run_id, cause), number)
            # The end may be written by another node's clock, so keep the counter from decreasing.
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


_log = logging.getLogger(__name__)

DISCOVERY_S: Final = 15.0
"""Interval of the search for new runs, which reads the names of all keys of runs, and for clusters."""

_HEAD: Final = "head"
R = TypeVar("R", bound=Record)


class Exporter:
    """The metrics of all runs and checkpoints of a store.

    Arguments:
        kv: a client of the whole cluster, not a view.
        discovery_s: time between two searches for new runs.

    Attributes:
        registry: registry whose families are served.
    """

    def __init__(self, kv: Client, discovery_s: float = DISCOVERY_S) -> None:
        self.registry = CollectorRegistry()
        self._kv = kv
        self._discovery_s = discovery_s
        self._runs, self._checkpoints = RunMetrics(time.time), CheckpointMetrics(time.time)
        self._queues = QueueMetrics()
        for collector in (self._runs, self._checkpoints, self._queues):
            self.registry.register(collector)
        text = "Reads and watches of this exporter that failed; they are tried again."
        self._errors = Counter("raftkv_run_exporter_errors", text, registry=self.registry)
        self._control = ClientControl(kv)
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._copies: dict[str, list[Reflector]] = {}
        self._latest = Reflector(self._control, below(LATEST), self._summaries)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._latest.start()
        await self._latest.ready()
        await self.look()
        self._task = asyncio.create_task(self._keep_looking())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._followers.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for copy in (self._latest, *(copy for copies in self._copies.values() for copy in copies)):
            copy.close()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._discovery_s)
            try:
                await self.look()
            except RaftKVError as error:
                self._failed("cannot look for runs", error)

    async def look(self) -> None:
        """Find runs and clusters.

        Raises:
            RaftKVError: the store did not answer.
        """
        runs = {one.run_id for one in await list_runs(self._kv)}
        for run_id in {*self._runs.folds, *self._followers} - runs:
            self._forget(run_id)
        for run_id in runs:
            if run_id not in self._followers or self._followers[run_id].done():
                self._followers[run_id] = asyncio.create_task(self._follow(run_id))
        known = {*runs, *(run_of(key) for key in self._latest.items)}
        for run_id in self._copies.keys() - known:
            for copy in self._copies.pop(run_id):
                copy.close()
        for run_id in known - self._copies.keys():
            self._watch_checkpoints(run_id)
        await self._look_at_clusters()

    async def _look_at_clusters(self) -> None:
        views: dict[str, ClusterView] = {}
        try:
            for name in await list_clusters(self._kv):
                try:
                    views[name] = await describe_cluster(self._kv, name)
                except RecordError as error:
                    self._failed(f"cannot read the slots of cluster {name!r}", error)
        except PermissionDeniedError:
            views = {}  # the user may lack permission for clusters; show the rest
        self._queues.views = views

    def _forget(self, run_id: str) -> None:
        self._runs.forget(run_id)
        task = self._followers.pop(run_id, None)
        if task is not None:
            task.cancel()

    async def _follow(self, run_id: str) -> None:
        try:
            async for _, fold in follow(self._kv, run_id):
                self._runs.folds[run_id] = fold
        except TrainingError:
            return  # it was deleted just now
        except (RaftKVError, ConfigError) as error:
            self._failed(f"cannot follow run {run_id!r}", error)

    def _failed(self, what: str, error: Exception) -> None:
        self._errors.inc()
        _log.warning("%s, retrying: %s", what, error)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _summaries(self, changes: Sequence[Event]) -> None:
        for event in changes:
            run_id, kind = run_of(event.key), kind_of(event.key)
            latest = self._decoded(Latest, event)
            if kind in _KNOWN and (latest is not None or event.type != PUT):
                self._checkpoints.summed_up(run_id, kind, latest, event.revision)

    def _watch_checkpoints(self, run_id: str) -> None:
        keys = RegistryKeys(run_id)
        attempts = Reflector(self._control, below(keys.attempts), partial(self._attempts, keys))
        commits = Reflector(self._control, below(keys.records), self._commits, deletes=False)
        self._copies[run_id] = [attempts, commits]
        for copy in (attempts, commits):
            copy.start()

    def _attempts(self, keys: RegistryKeys, changes: Sequence[Event]) -> None:
        for event in changes:
            found = attempt_of(event.key, keys.attempts)
            if found is None or found[0] not in _KNOWN or found[2] != _HEAD:
                continue
            if event.type == PUT:
                self._checkpoints.began(keys.run_id, found[0], event.key)
            else:
                self._checkpoints.ended(keys.run_id, found[0], event.key, event.revision)

    def _commits(self, changes: Sequence[Event]) -> None:
        for event in changes:
            checkpoint = self._decoded(Checkpoint, event)
            if checkpoint is not None and checkpoint.kind in _KNOWN:
                self._checkpoints.committed(checkpoint, event.kv.create_revision)

    def _decoded(self, kind: type[R], event: Event) -> R | None:
        if event.type != PUT:
            return None
        try:
            return read(kind, event.kv)
        except RecordError as error:
            self._failed("cannot read a record", error)
            return None
