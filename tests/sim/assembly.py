"""What a life of a simulated member is made of: the production parts, put together as ``server/member.py`` does it, and
the places where the checkers look in.

Owns the order of assembly: what the disks hold is read (``bootstrap``), parts are made, connected (``wiring.wire``) and
started. Nothing of production code is replaced but what touches sockets, threads and files.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from raftkv.apply.alarms import Alarms
from raftkv.apply.applier import Applier
from raftkv.apply.leases import Leases
from raftkv.apply.membership import Membership
from raftkv.apply.request import Kind
from raftkv.apply.response import HeaderEncoder
from raftkv.errors import StatusError
from raftkv.loop.cork import Cork
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft import MemoryLog, RaftConfig, RawNode
from raftkv.raft.types import ConfChange, ConfState, Ready, SnapshotMeta
from raftkv.server.lease.lessor import Lessor
from raftkv.server.lease.service import LeaseService
from raftkv.server.maintenance.defragmentation import Defragmenter
from raftkv.server.membership.changes import Changes, PeerAccess
from raftkv.server.membership.presence import Departure
from raftkv.server.membership.service import ClusterService
from raftkv.server.node.admission import Admission
from raftkv.server.node.bootstrap import memory_log, take_mark
from raftkv.server.node.housekeeping import Housekeeping
from raftkv.server.node.log_cut import LogCut, Retention
from raftkv.server.node.lost_leader import LostLeader
from raftkv.server.node.node import Node
from raftkv.server.node.proposals import request_ids
from raftkv.server.node.readiness import Readiness
from raftkv.server.node.surroundings import NodeSettings
from raftkv.server.peer.service import PeerService
from raftkv.server.peer.transport import peer_metadata
from raftkv.server.services.kv import KVService
from raftkv.server.services.leader_guard import LeaderGuard
from raftkv.server.services.responder import Responder
from raftkv.server.snapshots import Installer
from raftkv.server.watch.hub import WatchHub
from raftkv.server.watch.service import WatchRunner, WatchService
from raftkv.server.wiring import Parts, wire
from raftkv.storage import schema
from raftkv.storage.failpoints import FailpointPanic
from raftkv.storage.mvcc import Store
from tests.sim.clients.history import ViolationError
from tests.sim.devices.calls import Handlers, Outbox
from tests.sim.devices.database import CommitThread, Database, Directory, Mark, applied_meta
from tests.sim.devices.snapshots import SnapshotCarrier
from tests.sim.devices.wal_disk import Disk, DurableLog
from tests.sim.replay import Change
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
    """How members are configured. Times in seconds."""

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
        """Ask for a turn: at once, or on a slow processor after a while, so that timers come between slices."""
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
        """Implement ``NodeLoop.call_exception_handler``: a process that is dead reports nothing."""
        error = context.get("exception")
        if not self.crashed and not isinstance(error, FailpointPanic | ViolationError):
            super().call_exception_handler(context)


class _Core(RawNode):
    """The production core, with the checkers looking on."""

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
    """The production store, likewise."""

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


class _Admission(Admission):
    """Admission of a member whose disk always has room."""

    def watch_disk(self) -> None:
        self._disk_free_bytes = DISK_FREE_BYTES


class Assembly:
    """One life after the other of a member; ``Member`` is the rest of it.

    Attributes:
        log, database, mark, directory: what survives a crash.
        loop, cork, outbox: of this life, made before ``assemble``.
        node: None while it is down.
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
    node: Node | None
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
        """Make all parts, connect and start them; on the loop of this life."""
        me, parameters = cast("Member", self), self.parameters
        log, store = self._recover()
        self.memory_log, self.store = log, store
        self.leases = Leases(store)
        applier = Applier(
            store,
            Alarms(store, schema.ALARM),
            Membership(store),
            self.leases,
            at_once_max=parameters.at_once_max,
        )
        self.applier = applier
        self.disk = Disk(self.log, me, self._disk_rng, self.cluster.parameters.disk)
        self.snapshots = SnapshotCarrier(me)
        self.installer = Installer(store, cast(Path, self.directory), self._fatal)
        self.defragmenter = Defragmenter(store, cast(Path, self.directory), self._fatal, _nothing, _nothing)
        self.raw = self._make_core(log, store)
        ids = request_ids(self.id, int(self.cluster.scheduler.now * 1000) + self.incarnation)
        self.last_id = 0
        settings = NodeSettings(
            self.id,
            self.tick_s,
            parameters.election_ticks * parameters.tick_s,
            unapplied_max_bytes=parameters.unapplied_max_bytes,
            unwritten_max_bytes=parameters.unwritten_max_bytes,
        )
        self.node = node = Node(
            raw=self.raw,
            log=log,
            disk=cast(Any, self.disk),
            store=store,
            applier=applier,
            sender=me,
            settings=settings,
            ids=map(self._note_id, ids),
            conf_state=store.conf_state,
            applied=store.applied_index,
            on_fatal=self._fatal,
            install_snapshot=self.installer.install,
            note_applied=self.mark.note,
            cork=self.cork,
        )
        self.lost_leader = LostLeader(node, cast(Any, self.loop))
        self.raw.member = store.member = me
        self.cluster.checkers.started(me)
        self._serve(node, applier)

    def _make_core(self, log: MemoryLog, store: Store) -> _Core:
        parameters = self.parameters
        config = RaftConfig(
            id=self.id,
            election_ticks=parameters.election_ticks,
            heartbeat_ticks=parameters.heartbeat_ticks,
            pre_vote=parameters.pre_vote,
            check_quorum=parameters.check_quorum,
            max_size_per_message_bytes=parameters.max_size_per_message_bytes,
            max_inflight_messages=parameters.max_inflight_messages,
            max_uncommitted_bytes=parameters.max_uncommitted_bytes,
            max_committed_size_per_ready_bytes=parameters.max_applying_bytes,
            quiet_commits=parameters.quiet_commits,
            applied=store.applied_index,
        )
        return _Core(config, log, random.Random(self._rng.random()))

    def _note_id(self, request_id: int) -> int:
        self.last_id = request_id
        return request_id

    def _serve(self, node: Node, applier: Applier) -> None:
        """Everything around the loop, in the order of ``server/member.py``."""
        parameters, store = self.parameters, self.store
        admission = _Admission(
            node,
            applier,
            max_request_bytes=MAX_REQUEST_BYTES,
            quota_bytes=None,
            size_bytes=lambda: store.size_in_use_bytes,
            data_dir="/",
            raise_no_space=_nothing,
            make_room=lambda: False,
        )
        retention = Retention(
            snapshot_entries=parameters.snapshot_entries,
            snapshot_bytes=parameters.snapshot_bytes,
            catchup_entries=parameters.catch_up_entries,
            catchup_bytes=parameters.catch_up_bytes,
        )
        self.log_cut = LogCut(node, store, cast(Any, self.disk), retention, self.snapshots)
        self.housekeeping = Housekeeping(
            node,
            store,
            cast(Any, self.log),
            admission,
            self.log_cut,
            commit_interval_s=parameters.commit_interval_s,
            compaction_pause_s=parameters.compaction_pause_s,
            compaction_keys=parameters.compaction_keys,
            on_no_space=_nothing,
            auto_compaction=None,
        )
        header = HeaderEncoder(CLUSTER_ID, self.id)
        runner = WatchRunner()
        self.hub = WatchHub(store, lambda revision: header.encode(revision, node.term), runner.wake, self.cork)
        guard = LeaderGuard(node)
        self.lessor = Lessor(
            node,
            applier,
            ttl_min_s=1,
            channel=cast(Any, lambda peer: self.cluster.network.channel(cast("Member", self), peer)),
            introduction=lambda peer: peer_metadata(CLUSTER_ID, self.id, peer),
            cork=self.cork,
        )
        responder = Responder(node, applier, header, admission)
        leases = LeaseService(responder, self.lessor, guard, self.cork)
        self.departure = Departure(self.id, applier.membership, self._leave)
        self.handlers = Handlers()
        server: Any = self.handlers
        KVService(responder, TXN_OPERATIONS_MAX).register(server)
        leases.register(server)
        WatchService(self.hub, admission, guard, fragment_bytes=MAX_REQUEST_BYTES, progress_interval_s=1.0).register(
            server
        )
        members: Any = SimpleNamespace(members=self.cluster.members, removed=frozenset())
        for_members = leases.for_members()
        if self.cluster.parameters.is_managed:
            cluster_service = ClusterService(responder, self._make_changes(node, applier.membership))
            cluster_service.register(server)
            members, for_members = applier.membership, {**for_members, **cluster_service.for_members()}
        nothing: Any = None
        PeerService(CLUSTER_ID, self.id, members, node.receive, nothing, for_members, nothing).register(server)
        self._wire(runner, guard, leases, admission)
        if self.departure.is_known:
            self._leave()
        node.start()
        self.lessor.start()
        self.loop.create_task(self.housekeeping.run())
        self.loop.create_task(self._serve_clients(node))

    def _make_changes(self, node: Node, membership: Membership) -> Changes:
        me = cast("Member", self)
        ways = PeerAccess(
            connected_since=me.connected_since,
            channel=cast(Any, lambda peer: self.cluster.network.channel(me, peer)),
            introduction=lambda peer: peer_metadata(CLUSTER_ID, self.id, peer),
            wait_until_dispensable=self.departure.wait_until_dispensable,
        )
        return Changes(node, membership, ways, cluster_id=CLUSTER_ID, strict=True, learners_max=LEARNERS_MAX)

    def _leave(self) -> None:
        """This member was removed: the process ends."""
        self.cluster.scheduler.after(0.0, self.cluster.retire, self.id)

    async def _publish(self) -> None:
        """Publish the name, as ``membership.presence`` does."""
        node, membership = self.running, self.applier.membership
        record = raft_pb2.MemberRecord(member=rpc_pb2.Member(ID=self.id, name=f"m{self.id:x}"), update=True)
        while self.id in membership.members and not membership.members[self.id].name:
            try:
                await node.propose(Kind.MEMBER_ATTRIBUTES, record.SerializeToString(), record, None)
            except StatusError:
                await asyncio.sleep(self.tick_s)

    async def _serve_clients(self, node: Node) -> None:
        started_at, timeout_s = self.loop.time(), self.parameters.ready_timeout_s
        publish = self._publish if self.cluster.parameters.is_managed else _published
        if timeout_s:
            await Readiness(node, publish, timeout_s).wait()
        confirmed = self.loop.time() - started_at < timeout_s
        self.cluster.journal.record("serves", self.id, confirmed)
        self.cluster.checkers.serves(cast("Member", self), confirmed=confirmed)
        self.accepts_clients = True
        await publish()

    def _wire(self, runner: WatchRunner, guard: LeaderGuard, leases: LeaseService, admission: Admission) -> None:
        is_managed = self.cluster.parameters.is_managed
        wire(
            Parts(
                store=self.store,
                applier=self.applier,
                node=self.running,
                disk=cast(Any, self.disk),
                installer=self.installer,
                hub=self.hub,
                watch_runner=runner,
                lessor=self.lessor,
                guard=guard,
                graces=leases.graces,
                admission=admission if is_managed else None,
                departure=self.departure if is_managed else None,
                peers=(cast("Member", self),) if is_managed else (),
            )
        )
        if is_managed:
            members = self.applier.membership
            cast("Member", self).follow(members.members, members.removed)
        self.installer.on_swapped.append(self._swapped)

    def _swapped(self, meta: SnapshotMeta) -> None:
        self.cluster.journal.record("install", self.id, meta.index)
        self.cluster.checkers.installed(cast("Member", self))

    @property
    def running(self) -> Node:
        """The loop. Raises ``RuntimeError`` while the member is down."""
        if self.node is None:
            raise RuntimeError(f"member {self.id} is down")
        return self.node

    def _fatal(self, error: BaseException) -> None:
        """The member stops itself: there is no reason for it in a simulation."""
        if self.cluster.checkers.violation is None:
            self.cluster.checkers.violation = ViolationError("stopped", f"{self.id}: {error!r}")
            self.cluster.checkers.violation.__cause__ = error


async def _published() -> None:
    """Publish nothing: these members have no URLs."""


def _nothing(*_: object) -> None:
    """Disks have room here."""
