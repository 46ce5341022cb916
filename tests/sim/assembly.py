"""One life of a simulated member: the production replica (``replica.replica``) on simulated devices, with hooks for
the checkers.

Owns the devices of a life, and the services that clients reach without ports. Only code that touches sockets, threads
and files is replaced.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from raftkv.config import ServerConfig
from raftkv.loop.cork import Cork
from raftkv.raft.core import RawNode
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import ConfChange, ConfState, RaftConfig, Ready, SnapshotMeta
from raftkv.replica.node.bootstrap import Durable, memory_log, take_mark
from raftkv.replica.node.node import Node
from raftkv.replica.node.proposals import request_ids
from raftkv.replica.node.waits import NodeSettings
from raftkv.replica.replica import Devices, Replica
from raftkv.server.peer.service import PeerService
from raftkv.server.services.cluster import ClusterService
from raftkv.server.services.kv import KVService
from raftkv.server.services.responder import Responder
from raftkv.server.streams.lease import LeaseService
from raftkv.server.streams.watch import WatchService
from raftkv.storage.failpoints import FailpointPanic
from raftkv.storage.mvcc import Store
from tests.sim.clients.history import ViolationError
from tests.sim.devices.calls import Handlers, Outbox
from tests.sim.devices.database import CommitThread, Database, Directory, Mark, applied_meta
from tests.sim.devices.snapshots import SnapshotCarrier
from tests.sim.devices.wal_disk import Disk, DurableLog
from tests.sim.journal import stream
from tests.sim.replay import Change
from tests.sim.turns import Turns
from tests.virtual_loop import NodeLoop

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.member import Member

CLUSTER_ID = 0xC1
LEARNERS_MAX = 2
MAX_REQUEST_BYTES = 1_500_000
TXN_OPERATIONS_MAX = 128
DISK_FREE_BYTES = 1 << 40
TURN_S_MEAN = 0.000_5
"""How long a turn takes on a slow processor."""


@dataclass(frozen=True, slots=True)
class MemberParameters:
    """Configuration of members. Times in seconds."""

    tick_s: float = 0.1
    election_ticks: int = 10
    heartbeat_ticks: int = 1
    pre_vote: bool = True
    quiet_commits: bool = True
    check_quorum: bool = True
    max_size_per_message_bytes: int = 1 << 20
    max_inflight_messages: int = 64
    max_uncommitted_bytes: int = 1 << 20
    max_applying_bytes: int = 1 << 24
    unapplied_max_bytes: int = 1 << 28
    unwritten_max_bytes: int = 1 << 28
    commit_interval_s: float = 0.1
    compaction_pause_s: float = 0.01
    compaction_keys: int = 1_000
    snapshot_entries: int = 200
    snapshot_bytes: int = 1 << 20
    catch_up_entries: int = 20
    catch_up_bytes: int = 1 << 20
    at_once_max: int = 500
    ready_timeout_s: float = 5.0
    read_leases: bool = False
    clock_error: float = 0.0
    """Largest share by which the clocks of members run fast or slow."""
    steps_are_slow: bool = False
    """Looks at the processor's clock find that much time has passed: work is done in many slices, with time between."""


class MemberLoop(NodeLoop):
    """The event loop of one life of a member."""

    turns_in_a_row = 4

    def __init__(self, member: Member) -> None:
        super().__init__(member.cluster.scheduler, name=f"{member.id}.{member.incarnation}")
        self._member = member
        if member.parameters.steps_are_slow:
            self.turns_in_a_row = 1

    def _wake(self) -> None:
        """Request a turn: at once, or delayed on a slow processor, so that timers run between slices."""
        if self.turns_in_a_row > 1:
            super()._wake()
        elif not self._due and not self._torn:
            self._due = True
            self._scheduler.after(self._scheduler.random.expovariate(1.0 / TURN_S_MEAN), self._turn)

    def died(self) -> None:
        """Implement ``NodeLoop.died``."""
        self._member.cluster.crash(self._member.id)

    def turned(self) -> None:
        """Implement ``NodeLoop.turned``."""
        self._member.turned()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Implement ``NodeLoop.call_exception_handler``: a dead process reports nothing."""
        error = context.get("exception")
        if not self.crashed and not isinstance(error, FailpointPanic | ViolationError):
            super().call_exception_handler(context)


class _Core(RawNode):
    """The production core, observed by the checkers."""

    member: Member

    def ready(self) -> Ready:
        ready = super().ready()
        member = self.member
        member.is_changed = True
        member.cluster.checkers.ready(member, ready)
        if ready.committed_entries:
            member.cluster.checkers.handed_out(member, ready.committed_entries)
        return ready

    def tick(self) -> None:
        self.member.cluster.journal.record("tick", self.member.id)
        term = self.raft.term
        super().tick()
        self.member.is_changed = True
        self.member.cluster.checkers.ticked(self.member, term)

    def on_append_durable(self, ready: Ready) -> None:
        super().on_append_durable(ready)
        self.member.is_changed = True

    def apply_conf_change(self, change: ConfChange) -> ConfState:
        # What was committed so far was by the old membership.
        self.member.cluster.checkers.after_event(self.member)
        return super().apply_conf_change(change)


class _Store(Store):
    """The production store, observed by the checkers."""

    member: Member | None = None

    def _changed(self, main: int, changes: list[Change]) -> None:
        super()._changed(main, changes)
        if self.member is not None:
            self.member.cluster.checkers.changed(self.member, main, changes)

    def set_applied(self, index: int, term: int) -> None:
        super().set_applied(index, term)
        member = self.member
        if member is not None:
            member.cluster.journal.record("apply", member.id, index, self.revision)
            member.cluster.checkers.applied(member, index)

    def set_conf_state(self, conf_state: ConfState) -> None:
        super().set_conf_state(conf_state)
        if self.member is not None:
            self.member.conf_changed(conf_state)


class Assembly:
    """The successive lives of a member; ``Member`` extends this class.

    Attributes:
        log, database, mark, directory: durable state, which survives crashes.
        loop, cork, outbox: objects of this life, made before ``assemble``.
        replica: replica of this life.
        node: node of this life; None while the member is down.
    """

    id: int
    cluster: Cluster
    incarnation: int
    tick_s: float
    loop: MemberLoop
    cork: Cork
    outbox: Outbox
    log: DurableLog
    database: Database
    mark: Mark
    directory: Directory
    parameters: MemberParameters
    accepts_clients: bool
    clock_rate: float = 0.0
    node: Node | None
    replica: Replica
    _rng: random.Random
    _disk_rng: random.Random

    def _recover(self) -> tuple[MemoryLog, _Store]:
        """Read the disks, as ``bootstrap`` does."""
        me = cast("Member", self)
        recovered = self.log.open()
        backend = self.database
        marker = recovered.snapshot
        received = self.directory.received(marker.index)
        if received is not None and applied_meta(backend).index < marker.index:
            backend.replace(received)
        self.directory.files.clear()
        self.commits = CommitThread(me, self._disk_rng, self.cluster.parameters.disk)
        store = cast(_Store, _Store.open(backend, self.commits, on_fatal=self._fatal))
        log = memory_log(recovered, store)
        take_mark(log, self.mark)
        return log, store

    def assemble(self) -> None:
        """Open the replica on the devices of this life and start it. Runs on the loop of this life."""
        me, parameters = cast("Member", self), self.parameters
        log, store = self._recover()
        self.memory_log, self.store = log, store
        self.disk = Disk(self.log, me, self._disk_rng, self.cluster.parameters.disk)
        self.last_id = 0
        ids = request_ids(self.id, int(self.cluster.scheduler.now * 1000) + self.incarnation)
        devices = Devices(
            disk=cast(Any, self.disk),
            peers=me,
            cork=self.cork,
            ids=map(self._note_id, ids),
            settings=NodeSettings(
                self.id,
                self.tick_s,
                parameters.election_ticks * parameters.tick_s,
                unapplied_max_bytes=parameters.unapplied_max_bytes,
                unwritten_max_bytes=parameters.unwritten_max_bytes,
            ),
            at_once_max=parameters.at_once_max,
            new_core=self._make_core,
            new_snapshots=partial(SnapshotCarrier, me),
            free_bytes=lambda directory: DISK_FREE_BYTES,
            on_damage=self._fatal,
        )
        disks: tuple[Any, ...] = (self.log, log, self.database, store, self.mark, self.directory)
        self.replica = Replica(self._config(), Durable(CLUSTER_ID, self.id, *disks), devices, self._fatal, self._leave)
        self.node, self.applier = self.replica.node, self.replica.applier
        if self.cluster.parameters.pace_bytes:
            self.turns = Turns(self.node.proposals, self.cluster.checkers.fail)
        if not self.cluster.parameters.is_managed:  # no member publishes its version
            self.node.may_hold_lease = lambda: parameters.read_leases
        store.member = me
        self.cluster.checkers.started(me)
        self._serve(self.replica)

    def _config(self) -> ServerConfig:
        parameters = self.parameters
        return ServerConfig(
            name=f"m{self.id:x}",
            initial_election_tick_advance=False,
            pre_vote=parameters.pre_vote,
            read_leases=parameters.read_leases,
            snapshot_count=parameters.snapshot_entries,
            snapshot_bytes=parameters.snapshot_bytes,
            snapshot_catchup_entries=parameters.catch_up_entries,
            snapshot_catchup_bytes=parameters.catch_up_bytes,
            quota_backend_bytes=-1,
            backend_batch_interval_s=parameters.commit_interval_s,
            compaction_sleep_interval_s=parameters.compaction_pause_s,
            compaction_batch_limit=parameters.compaction_keys,
            max_request_bytes=MAX_REQUEST_BYTES,
            max_learners=LEARNERS_MAX,
            lease_min_ttl_s=1,
            wait_cluster_ready_timeout_s=parameters.ready_timeout_s,
        )

    def _make_core(self, config: RaftConfig, log: MemoryLog) -> _Core:
        parameters = self.parameters
        config = replace(
            config,
            election_ticks=parameters.election_ticks,
            heartbeat_ticks=parameters.heartbeat_ticks,
            check_quorum=parameters.check_quorum,
            max_size_per_message_bytes=parameters.max_size_per_message_bytes,
            max_inflight_messages=parameters.max_inflight_messages,
            max_uncommitted_bytes=parameters.max_uncommitted_bytes,
            max_committed_size_per_ready_bytes=parameters.max_applying_bytes,
            quiet_commits=parameters.quiet_commits,
        )
        self.raw = _Core(config, log, random.Random(self._rng.random()), self.elapsed_ns)
        self.raw.member = cast("Member", self)
        return self.raw

    def elapsed_ns(self) -> int:
        """Read the machine's clock, which has its own rate and runs on while processes are stopped."""
        if self.clock_rate == 0.0:
            error = self.parameters.clock_error
            self.clock_rate = 1.0 + stream(self.cluster.seed, f"clock {self.id}").uniform(-error, error)
        return int(self.cluster.scheduler.now * self.clock_rate * 1e9) + 1

    def _note_id(self, request_id: int) -> int:
        self.last_id = request_id
        return request_id

    def _serve(self, replica: Replica) -> None:
        """Create the services for clients and members, connect and start them."""
        node, guard = replica.node, replica.leader_guard
        responder = Responder(
            node, replica.applier, replica.header, replica.admission, replica.versions.check_capable, node.uses
        )
        leases = LeaseService(responder, replica.lessor, guard, self.cork)
        self.handlers = Handlers()
        server: Any = self.handlers
        KVService(responder, TXN_OPERATIONS_MAX).register(server)
        leases.register(server)
        WatchService(
            replica.hub, replica.admission, guard, fragment_bytes=MAX_REQUEST_BYTES, progress_interval_s=1.0
        ).register(server)
        members: Any = SimpleNamespace(members=self.cluster.members, removed=frozenset())
        for_members = leases.for_members()
        if self.cluster.parameters.is_managed:
            cluster_service = ClusterService(responder, replica.changes)
            cluster_service.register(server)
            members, for_members = replica.membership, {**for_members, **cluster_service.for_members()}
        nothing: Any = None
        PeerService(CLUSTER_ID, self.id, members, node.receive, nothing, for_members, nothing).register(server)
        replica.connect(graces=leases.graces)
        if not self.cluster.parameters.is_managed:  # clients ask learners too, which then answer as voters do
            node.on_conf_change.remove(replica.admission.conf_changed)
            replica.admission.is_learner = False
        replica.installer.on_swapped.append(self._swapped)
        if replica.departure.is_known:
            self._leave()
        replica.start()
        self.loop.create_task(replica.housekeeping.run())
        self.loop.create_task(self._serve_clients())

    def _leave(self) -> None:
        """End the process, because this member was removed."""
        self.cluster.scheduler.after(0.0, self.cluster.retire, self.id)

    async def _serve_clients(self) -> None:
        started_at, timeout_s = self.loop.time(), self.parameters.ready_timeout_s
        if timeout_s:
            await self.replica.readiness.wait()
        confirmed = self.loop.time() - started_at < timeout_s
        self.cluster.journal.record("serves", self.id, confirmed)
        self.cluster.checkers.serves(cast("Member", self), confirmed=confirmed)
        self.accepts_clients = True
        await self.replica.publication.publish()

    def _swapped(self, meta: SnapshotMeta) -> None:
        self.cluster.journal.record("install", self.id, meta.index)
        self.cluster.checkers.installed(cast("Member", self))

    @property
    def running(self) -> Node:
        """The member's loop. Raises ``RuntimeError`` while the member is down."""
        if self.node is None:
            raise RuntimeError(f"member {self.id} is down")
        return self.node

    def _fatal(self, error: BaseException) -> None:
        """Report that the member stopped itself, which a simulation gives no reason for."""
        if self.cluster.checkers.violation is None:
            self.cluster.checkers.violation = ViolationError("stopped", f"{self.id}: {error!r}")
            self.cluster.checkers.violation.__cause__ = error
