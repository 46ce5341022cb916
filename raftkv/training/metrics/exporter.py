"""Watches the runs and checkpoints of a store and keeps their metrics.

::

    async with Exporter(kv) as exporter:
        await exporter.look()                       # for new runs; done by itself every DISCOVERY_S
        text = generate_latest(exporter.registry)

Owns one task a run, which follows its history; two copies of keys a run, of attempts and of commits; one copy of the
summaries of all runs; and the look for new runs and at clusters. What cannot be read now is tried again at the next
look, and counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from prometheus_client import CollectorRegistry, Counter

from raftkv.checkpoint.keys import LATEST, RegistryKeys, attempt_of, run_of
from raftkv.checkpoint.records import Checkpoint, Latest
from raftkv.client.control.control import ClientControl
from raftkv.client.control.records import Record, RecordError
from raftkv.client.control.reflector import Reflector, below
from raftkv.client.values import PUT, Event
from raftkv.errors import ConfigError, PermissionDeniedError, RaftKVError
from raftkv.training.errors import TrainingError
from raftkv.training.history.reader import follow, list_runs
from raftkv.training.metrics.checkpoints import CheckpointMetrics
from raftkv.training.metrics.queues import QueueMetrics
from raftkv.training.metrics.runs import RunMetrics
from raftkv.training.scheduling.view import describe_cluster, list_clusters

if TYPE_CHECKING:
    from raftkv.client.library import Client

_log = logging.getLogger(__name__)

DISCOVERY_S: Final = 15.0
"""How often new runs are looked for, by a read of the names of all keys of runs, and clusters looked at."""

_HEAD: Final = "head"
R = TypeVar("R", bound=Record)


class Exporter:
    """The metrics of all runs and checkpoints of a store.

    Arguments:
        kv: a client of the whole cluster, not a view.
        discovery_s: time between two looks for new runs.

    Attributes:
        registry: whose families are served.
    """

    def __init__(self, kv: Client, discovery_s: float = DISCOVERY_S) -> None:
        self.registry = CollectorRegistry()
        self._kv = kv
        self._discovery_s = discovery_s
        self._runs, self._checkpoints, self._queues = (
            RunMetrics(time.time),
            CheckpointMetrics(time.time),
            QueueMetrics(),
        )
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Look for runs and clusters.

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
        try:
            names = await list_clusters(self._kv)
            self._queues.views = {name: await describe_cluster(self._kv, name) for name in names}
        except PermissionDeniedError:
            # A user of runs need not be one of clusters: what it may see is shown.
            self._queues.views = {}
        except RecordError as error:
            self._failed("cannot read the slots of a cluster", error)

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
            return  # it was deleted, just now
        except (RaftKVError, ConfigError) as error:
            self._failed(f"cannot follow run {run_id!r}", error)

    def _failed(self, what: str, error: Exception) -> None:
        self._errors.inc()
        _log.warning("%s, it is tried again: %s", what, error)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _summaries(self, changes: Sequence[Event]) -> None:
        for event in changes:
            run_id, kind = run_of(event.key), event.key.decode(errors="replace").rpartition("/")[2]
            latest = self._decoded(Latest, event)
            if latest is not None or event.type != PUT:
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
            if found is None or found[2] != _HEAD:
                continue
            if event.type == PUT:
                self._checkpoints.began(keys.run_id, found[0], event.key)
            else:
                self._checkpoints.ended(keys.run_id, found[0], event.key, event.revision)

    def _commits(self, changes: Sequence[Event]) -> None:
        for event in changes:
            checkpoint = self._decoded(Checkpoint, event)
            if checkpoint is not None:
                self._checkpoints.committed(checkpoint, event.kv.create_revision)

    def _decoded(self, kind: type[R], event: Event) -> R | None:
        if event.type != PUT:
            return None
        try:
            return kind.decode(event.value)
        except RecordError as error:
            self._failed(f"cannot read {event.key!r}", error)
            return None
