"""One run: load under faults, quiet points, heal, read the store back, check.

    start -> load + faults, every few faults a quiet point -> stop -> last reads -> store read back -> checkers

At a quiet point, clients are blocked, all members must be healthy and at the same revision, and their hashes are
compared. After a run that passed, only the report's files are kept; the folder of a failed run is kept as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jepsen.checker import Verdict, check_history
from jepsen.checkers.logs import signs_of_bugs
from jepsen.client import Client, Gate
from jepsen.db import ROOT, Cluster, Member, Settings, require_disk
from jepsen.endpoints import Endpoints
from jepsen.faults import nemesis as nemeses
from jepsen.faults.nemesis import LIVE_S, Nemesis
from jepsen.history import History, Recorder, save
from jepsen.probe import Probe, ProbeError
from jepsen.store_reader import Compactor, StoreReader
from jepsen.watcher import Ending
from jepsen.workloads import WORKLOADS
from jepsen.workloads.base import Scene, Workload

RUNS = ROOT / "jepsen" / "runs"
SEATS_CHANGING = 5
"""Number of pinned companions in runs with membership changes: the maximum number of members."""
CLUSTER_CLIENTS = 2
"""Number of clients that move around the cluster; the others are pinned to one member each."""
STATUS_EVERY_S = 0.05
STATUS_TIMEOUT_S = 1.0
"""Seconds between Status requests to each member, and the time limit of each."""

ClientClass = Callable[..., Client]


@dataclass(frozen=True, slots=True)
class Options:
    """The description of a run.

    Attributes:
        faults, time_s: the run ends at the first of the two limits; None: no limit.
        rate: target rate of operations per second, of all clients together.
        timeout_s: seconds after which the answer to a request counts as lost.
        quiet_every: faults between quiet points.
        acked_min: acknowledged writes below which the run fails.
        compact_every: acknowledged writes between compactions; 0: never compact.
        read_back_s: seconds for which each read of the store at the end is retried.
        client_class: class of the clients; tests use clients that lie, which the checkers must detect.
    """

    settings: Settings = field(default_factory=Settings)
    workload: str = "mixed"
    nemesis: str = "kill"
    seed: int = 0
    faults: int | None = None
    time_s: float | None = 30.0
    clients: int = 10
    rate: float = 300.0
    timeout_s: float = 0.5
    quiet_every: int = 10
    acked_min: int = 100
    compact_every: int = 0
    read_back_s: float = 60.0
    runs: Path = RUNS
    keep: bool = False
    client_class: ClientClass = Client


@dataclass(slots=True)
class Report:
    """The result of a run: its verdict and its figures."""

    verdict: Verdict
    figures: dict[str, Any]
    folder: Path


async def run(options: Options) -> Report:
    """Run once, from an empty store to the verdict.

    Raises:
        DbError: the run could not take place (no ports, data directory in memory).
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{options.settings.system}-{options.workload}-{options.seed}"
    folder = options.runs / f"{name}-{random.SystemRandom().getrandbits(24):06x}"
    if nemeses.uses_network(options.nemesis):
        options = replace(options, settings=replace(options.settings, network=True))
    if nemeses.uses_disks(options.nemesis):
        options = replace(options, settings=replace(options.settings, disks=True))
    cluster = Cluster(folder, options.settings)
    cluster.environment, cluster.seed = nemeses.environment(options.nemesis), options.seed
    require_disk(folder)
    try:
        await cluster.open_network(options.seed)
        report = await _Run(options, cluster).go()
    finally:
        await cluster.close_network()
        cluster.close()
    if report.verdict.valid and not options.keep:
        shutil.rmtree(folder)
    return report


class _Run:
    def __init__(self, options: Options, cluster: Cluster) -> None:
        self._options, self._cluster = options, cluster
        self._recorder, self._gate = Recorder(), Gate()
        self._workload: Workload = WORKLOADS[options.workload]()
        self._stopping = False
        self._term = 0

    async def go(self) -> Report:
        began = time.monotonic()
        settings = self._options.settings
        self._recorder.event("settings", system=settings.system, election_ms=settings.election_ms)
        async with self._probing() as probe:
            trouble = Nemesis(self._cluster, probe, self._recorder)
            reader = StoreReader(probe)
            compactor = Compactor(probe, reader, self._recorder, self._options.compact_every)
            self._cluster.start(self._cluster.members)
            if not await probe.wait_healthy(2 * LIVE_S):
                self._recorder.event("unhealthy", why="the cluster did not come up")
            else:
                await self._accompanied(trouble, probe, compactor)
            loaded = time.monotonic()
            await self._read_back(probe, reader)
        self._cluster.close()
        self._note_signs_of_bugs()
        history = History(self._recorder.operations, self._recorder.events, reader.record, self._recorder.streams)
        save(history, self._cluster.folder / "history.jsonl")
        verdict = check_history(history, self._workload.checkers, self._options.acked_min)
        (self._cluster.folder / "verdict").write_text("\n".join(verdict.lines(1000)) + "\n")
        own: dict[str, Any] = getattr(self._workload, "figures", lambda history: {})(history)
        figures = self._figures(trouble, loaded - began) | own | {"checked_s": round(time.monotonic() - loaded, 1)}
        return Report(verdict, figures, self._cluster.folder)

    def _note_signs_of_bugs(self) -> None:
        if self._options.settings.system == "raftkv":
            for log in sorted(self._cluster.folder.glob("m*/log")):
                for line in signs_of_bugs(log):
                    self._recorder.event("logged", member=log.parent.name, line=line)

    async def _accompanied(self, trouble: Nemesis, probe: Probe, compactor: Compactor) -> None:
        """Run load and faults, with tasks that continue until they have reached the last revision."""
        ending = Ending()
        endpoints = Endpoints(self._cluster, probe)
        changing = nemeses.changes_members(self._options.nemesis)
        seats = SEATS_CHANGING if changing else len(self._cluster.members)
        scene = Scene(endpoints, seats, self._recorder, ending, self._options.seed)
        companions = getattr(self._workload, "companions", None)
        async with asyncio.TaskGroup() as group:
            for task in companions(scene) if companions is not None else ():
                group.create_task(task)
            group.create_task(self._note_statuses(probe, ending))
            if changing:
                group.create_task(endpoints.follow(ending.over))
            try:
                await self._torment(trouble, probe, compactor, endpoints)
                await self._tell_end(ending, probe)
                self._term = await probe.term()
            finally:
                ending.over.set()

    async def _tell_end(self, ending: Ending, probe: Probe) -> None:
        """Read and record the revision that companions have to reach; the store may continue beyond it."""
        try:
            ending.rev = await probe.revision()
        except ProbeError as error:
            self._recorder.event("unhealthy", why=f"the last revision could not be read: {error}")
        else:
            self._recorder.event("ending", rev=ending.rev)

    async def _note_statuses(self, probe: Probe, ending: Ending) -> None:
        """Poll the status of all members, including those that are added later."""
        asked: set[int] = set()
        async with asyncio.TaskGroup() as group:
            while not ending.over.is_set():
                for member in self._cluster.members:
                    if member.number not in asked:
                        asked.add(member.number)
                        group.create_task(self._note_status(member, probe, ending))
                await asyncio.sleep(STATUS_EVERY_S)

    async def _note_status(self, member: Member, probe: Probe, ending: Ending) -> None:
        """Poll and record a member's progress, which must never decrease, not even over restarts."""
        while not ending.over.is_set() and member in self._cluster.members:
            call = time.monotonic_ns()
            answer = await probe.status(member, STATUS_TIMEOUT_S)
            if answer is not None:
                rev, applied = answer.header.revision, answer.raftAppliedIndex
                self._recorder.event("status", member=member.number, call=call, rev=rev, applied=applied)
            await asyncio.sleep(STATUS_EVERY_S)

    async def _torment(self, trouble: Nemesis, probe: Probe, compactor: Compactor, endpoints: Endpoints) -> None:
        """Run load and faults to the end, then the last quiet point and the last reads."""
        clients = self._clients(endpoints)
        self._gate.open()
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(self._load(client))
            compacting = group.create_task(compactor.run()) if self._options.compact_every else None
            try:
                await self._faults(trouble, probe, compactor)
                await self._recorder.wait_acked(self._options.acked_min - len(self._recorder.acked_calls), LIVE_S)
            finally:
                self._stopping = True
                self._gate.open()
                if compacting is not None:
                    compacting.cancel()
        await self._quiet_point(trouble, probe, compactor)
        last = self._client("last", self._cluster.members, 10.0)
        await self._workload.finish(last)
        self._gate.shut()
        for client in (*clients, last):
            await client.close()

    async def _faults(self, trouble: Nemesis, probe: Probe, compactor: Compactor) -> None:
        options = self._options
        deadline = None if options.time_s is None else time.monotonic() + options.time_s
        steps = nemeses.schedule(nemeses.parse(options.nemesis, options.settings.size), options.seed)
        if not await self._recorder.wait_acked(nemeses.ACKS_MIN, LIVE_S):
            self._recorder.event("unhealthy", why="no load before the first fault")
        for step in steps:
            if trouble.faults == options.faults or (deadline is not None and time.monotonic() > deadline):
                return
            await trouble.carry_out(step)
            if trouble.faults % options.quiet_every == 0:
                await self._quiet_point(trouble, probe, compactor)
        if deadline is not None:
            await asyncio.sleep(max(0.0, deadline - time.monotonic()))

    async def _quiet_point(self, trouble: Nemesis, probe: Probe, compactor: Compactor) -> None:
        """Block the clients, wait for all members, compare their hashes, continue."""
        self._gate.shut()
        await self._recorder.wait_idle(60.0)
        async with compactor.busy:
            trouble.revive()
            if not await probe.wait_healthy(LIVE_S):
                why = f"not every member well within {LIVE_S} s at a quiet point: {await probe.describe()}"
                self._recorder.event("unhealthy", why=why)
            await self._compare(probe)
        self._gate.open()

    async def _compare(self, probe: Probe) -> None:
        """Read the hash of one revision from all members; record it if a member cannot give one."""
        with contextlib.suppress(ProbeError):
            rev = await probe.revision()
            await probe.wait_revision(rev, LIVE_S)
            answers = {member.name: await probe.hash_kv(member, rev) for member in self._cluster.members}
            self._recorder.event("hashes", rev=rev, members=answers)

    async def _read_back(self, probe: Probe, reader: StoreReader) -> None:
        try:
            last = await probe.revision(self._options.read_back_s)
            await reader.read_up_to(last, self._recorder.operations)
        except ProbeError as error:
            self._recorder.event("unhealthy", why=f"the store could not be read back: {error}")

    def _clients(self, endpoints: Endpoints) -> list[Client]:
        clients = []
        for number in range(self._options.clients):
            own = endpoints.round_from(number) if number < CLUSTER_CLIENTS else endpoints.seat(number)
            clients.append(self._client(f"c{number}", own, self._options.timeout_s))
        return clients

    def _client(self, name: str, members: list[Member], timeout_s: float) -> Client:
        rng = random.Random(f"{self._options.seed} {name}")
        return self._options.client_class(name, members, self._recorder, self._gate, timeout_s, rng)

    async def _load(self, client: Client) -> None:
        """Run steps at this client's share of the rate; time lost by a slow answer is not made up for."""
        interval_s = self._options.clients / self._options.rate
        due = time.monotonic() + client.rng.uniform(0, interval_s)
        while not self._stopping:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._workload.step(client)
            due = max(due + interval_s, time.monotonic())

    @contextlib.asynccontextmanager
    async def _probing(self) -> AsyncIterator[Probe]:
        probe = Probe(self._cluster)
        try:
            yield probe
        finally:
            await probe.close()

    def _figures(self, trouble: Nemesis, loaded_s: float) -> dict[str, Any]:
        operations = self._recorder.operations
        kinds = {kind: sum(op.kind == kind for op in operations) for kind in ("ok", "fail", "info")}
        waits = failovers_s(self._recorder)
        return {
            "seconds": round(loaded_s, 1),
            "faults": trouble.faults,
            "kills": trouble.kills,
            "crash_points": len(trouble.crashed_at) or None,
            **({"found_out": trouble.found_out} if trouble.found_out else {}),
            **trouble.operator.counts,
            "terms": self._term,
            "compactions": sum(event["event"] == "compact" for event in self._recorder.events),
            "ops": len(operations),
            **kinds,
            "acked_writes": len(self._recorder.acked_calls),
            **self._watch_figures(),
            "ops_per_s": round(len(operations) / loaded_s),
            "failovers": len(waits),
            "failover_p50_s": quantile(waits, 0.5),
            "failover_p99_s": quantile(waits, 0.99),
            "failover_max_s": quantile(waits, 1.0),
        }

    def _watch_figures(self) -> dict[str, int]:
        streams = self._recorder.streams
        if not streams:
            return {}
        messages = [message for stream in streams for message in stream.messages]
        return {
            "streams": len(streams),
            "events": sum(len(message.events) for message in messages),
            "bookmarks": sum(message.kind == "progress" for message in messages),
        }


def failovers_s(recorder: Recorder) -> list[float]:
    """Return, for each loss of a leader, the seconds until a write called after it was acknowledged."""
    acked = sorted((op.call, op.returned) for op in recorder.operations if op.wrote)
    waits = []
    for at in nemeses.leader_losses(recorder.events):
        later = [returned for call, returned in acked if call > at]
        if later:
            waits.append((min(later) - at) / 1e9)
    return waits


def quantile(values: list[float], share: float) -> float | None:
    """Return the value that a given share of all values does not exceed (nearest rank); None: there are no values.

    Arguments:
        values: values in any order.
        share: share between 0 and 1.
    """
    if not values:
        return None
    rank = max(0, min(len(values) - 1, -(-int(share * 1000) * len(values) // 1000) - 1))
    return round(sorted(values)[rank], 3)
