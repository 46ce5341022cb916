"""A member without its sockets: creates, connects, starts and stops all parts of its state machine.

    replica = Replica(config, durable, Devices(disk, transport, cork, ids, settings), on_fatal, on_removed)
    replica.connect(graces=leases.graces)                   # with parts of its owner
    replica.start()
    ... housekeeping.run(), corruption.run(), scrub.run()
    replica.leave(); await replica.stop()

``Member`` opens a replica between its disks and its ports. The simulator of members opens the same class on its own
devices: a disk in memory, a network of messages, a loop with virtual time. The clock is that of the running loop.

Constructors connect the parts; ``connect`` makes every subscription. Subscribers are called in this order:

    store.on_changes        a write txn changed keys       -> watch hub
    leases.observer         a lease was applied            -> lease times -> lessor.on_end -> disconnect graces
    auth.on_change (and two more)   users changed          -> tokens, live calls of users
    node.on_applied         a turn's entries are applied   -> live calls, watch hub, lessor
    node.on_leader_change   a leader is found or lost      -> leader guard, lessor, stalled leader, leader log
    node.on_conf_change     members or voters changed      -> admission, departure, connections to peers
    installer.on_swapped    the database was replaced      -> the log, state derived from the store, watch hub, hashes

Not here: callbacks from one object to one other (errors, wake-ups), which constructors receive; and temporary waits
(``Node.wait_until``).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final, Protocol

from prometheus_client.core import Metric

from raftkv import suspend_clock
from raftkv.apply.alarms import Alarms
from raftkv.apply.applier import AT_ONCE_MAX, Applier
from raftkv.apply.leases import Leases
from raftkv.apply.membership import Membership
from raftkv.apply.wire import HeaderEncoder
from raftkv.config import ServerConfig
from raftkv.errors import CorruptionError
from raftkv.histograms import DISK_S, Buckets, doubling
from raftkv.loop.cork import Cork
from raftkv.pb import rpc_pb2
from raftkv.raft.confchange import is_conf_change
from raftkv.raft.core import RawNode
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import INDEX_MAX, Message, RaftConfig, SnapshotMeta, StateRole
from raftkv.replica.lease.graces import Graces
from raftkv.replica.lease.lessor import Lessor
from raftkv.replica.maintenance.corruption import CorruptionChecker, CorruptionSettings, Members
from raftkv.replica.maintenance.damage import Damage, Scrub
from raftkv.replica.maintenance.defragmentation import Defragmenter
from raftkv.replica.maintenance.hashes import Hashes
from raftkv.replica.maintenance.space import Space, tell_alarm
from raftkv.replica.membership.changes import Changes
from raftkv.replica.membership.presence import Attributes, Departure, Publication, Readiness
from raftkv.replica.membership.versions import Versions
from raftkv.replica.metrics import (
    durations,
    lease_metrics,
    quota_metrics,
    server_metrics,
    store_metrics,
    transfer_metrics,
    watch_metrics,
    work_metrics,
)
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.auto_compaction import AutoCompaction, PeriodicPolicy, Policy, RevisionPolicy
from raftkv.replica.node.bootstrap import Durable
from raftkv.replica.node.disk import Disk, Marker
from raftkv.replica.node.housekeeping import Housekeeping, LogCut, Retention
from raftkv.replica.node.leadership import LeaderGuard, LostLeader
from raftkv.replica.node.node import Node
from raftkv.replica.node.throttle import Throttle
from raftkv.replica.node.waits import NodeSettings, Sender, Stages
from raftkv.replica.snapshots import Installer, SnapshotReceiver, SnapshotSender
from raftkv.replica.snapshots.files import check_room, free_disk_bytes
from raftkv.replica.watch.hub import WatchHub, WatchRunner
from raftkv.rpc.client.channel import Channel
from raftkv.storage import schema

Follow = Callable[[Mapping[int, rpc_pb2.Member], Collection[int]], None]
"""Connects to these other members, by id, at their current URLs, and to none of the removed ids."""


class Peers(Sender, Protocol):
    """The connections to the other members (``server.peer.transport``)."""

    def follow(self, members: Mapping[int, rpc_pb2.Member], removed: Collection[int]) -> None:
        """Implement ``Follow``."""

    def channel(self, peer_id: int) -> Channel | None:
        """Return the connection to a member, whose calls introduce this one; ``None`` if the member is unknown."""


READ_LEASES_KNOWN_IN: Final = (0, 2)
"""The first version whose members wait for the read lease of an earlier leader."""


def new_core(config: RaftConfig, log: MemoryLog) -> RawNode:
    """Create the Raft core of a member, with random election timeouts from the operating system."""
    return RawNode(config, log, random.Random(random.SystemRandom().getrandbits(64)), suspend_clock.elapsed_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices that a replica runs on, in addition to the running loop.

    Attributes:
        disk: makes its log durable.
        peers: connections to the other members.
        cork: flushes connections at the end of a turn.
        ids: fresh request ids.
        settings: identity, timing and limits of the node.
        syncs: durations of the syncs of the log in seconds, counted by the owner of the disk.
        stages: notified of the progress of requests; ``None``: no tracing.
        at_once_max: number of changes that one entry makes at once.
        new_core: creates the Raft core.
        new_snapshots: creates the sender of databases.
        free_bytes: returns the free disk space of a directory.
        on_damage: called when the database is found to be damaged; ``None``: ``Damage`` decides.
    """

    disk: Disk
    peers: Peers
    cork: Cork
    ids: Iterator[int]
    settings: NodeSettings
    syncs: Buckets = field(default_factory=lambda: Buckets(DISK_S))
    stages: Stages | None = None
    at_once_max: int = AT_ONCE_MAX
    new_core: Callable[[RaftConfig, MemoryLog], RawNode] = new_core
    new_snapshots: Callable[..., SnapshotSender] = SnapshotSender
    free_bytes: Callable[[str | Path], int] = free_disk_bytes
    on_damage: Callable[[CorruptionError], None] | None = None


class Replica:
    """The parts of one member, as attributes.

    Arguments:
        config: configuration of the member.
        durable: contents of its disks.
        devices: devices of the member.
        on_fatal: called with the error after which the member must stop.
        on_removed: called when the member was removed from its cluster and must stop.
    """

    def __init__(
        self,
        config: ServerConfig,
        durable: Durable,
        devices: Devices,
        on_fatal: Callable[[BaseException], None],
        on_removed: Callable[[], None],
    ) -> None:
        self.config = config
        self.durable = durable
        self._syncs, self._commits = devices.syncs, Buckets(DISK_S)
        durable.backend.observe_commit = self._commits.observe
        self.disk, self.peers, self.store = devices.disk, devices.peers, durable.store
        self.header = HeaderEncoder(durable.cluster_id, durable.member_id)
        self.damaged: Callable[[CorruptionError], None] = devices.on_damage or self._found_damage
        self.membership = Membership(self.store)
        self.departure = Departure(durable.member_id, self.membership, on_removed, lambda: self.node.hears_leader)
        self.versions = Versions(self.membership, durable.member_id)
        alarms = Alarms(self.store, schema.ALARM, tell_alarm)
        self.applier = Applier(self.store, alarms, self.membership, Leases(self.store), at_once_max=devices.at_once_max)
        self.installer = Installer(self.store, durable.snapshots, on_fatal)
        self.node = self._make_node(devices, on_fatal)
        self._make_snapshots(devices, on_fatal)
        self.lost_leader = LostLeader(self.node, asyncio.get_running_loop())
        self._watch_the_database(on_fatal)
        self._join_the_cluster()
        self._make_housekeeping(devices)
        self._make_watches_and_leases(devices)

    def _make_snapshots(self, devices: Devices, on_fatal: Callable[[BaseException], None]) -> None:
        store, directory = self.store, self.durable.snapshots
        self.snapshots = devices.new_snapshots(
            store,
            directory,
            self.peers.channel,
            self._is_snapshot_wanted,
            self._is_served,
            self.node.report_snapshot,
            self.damaged,
        )
        self._defragmentations = Buckets(doubling(0.1, 13))
        self.defragmenter = Defragmenter(
            store,
            directory,
            on_fatal,
            self._defragmentations.observe,
            partial(check_room, free_disk_bytes=devices.free_bytes),
            self.damaged,
        )
        self.receiver = SnapshotReceiver(directory, self.node.awaits_snapshot, self._newest_record, self.node.fatal)

    def _make_node(self, devices: Devices, on_fatal: Callable[[BaseException], None]) -> Node:
        config, durable, store = self.config, self.durable, self.store
        raft_config = RaftConfig(
            id=durable.member_id,
            election_ticks=config.election_ticks,
            pre_vote=config.pre_vote,
            quiet_commits=True,
            starts_within_lease=self._starts_within_lease(),
            applied=store.applied_index,
        )
        node = Node(
            raw=devices.new_core(raft_config, durable.log),
            log=durable.log,
            disk=self.disk,
            store=store,
            applier=self.applier,
            sender=self.peers,
            settings=devices.settings,
            ids=devices.ids,
            conf_state=store.conf_state,
            applied=store.applied_index,
            on_fatal=on_fatal,
            install_snapshot=self.installer.install,
            note_applied=durable.mark.note,
            cork=devices.cork,
            stages=devices.stages,
        )
        node.on_damage = self.damaged
        node.may_hold_lease = self._may_hold_lease
        return node

    def _newest_record(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the newest record of the store, if the state after an entry must have it or have compacted it."""
        if self.store.applied_index >= index:
            return None  # this member went on meanwhile: it will not install that state
        try:
            return next(iter(self.store.history(self.store.revision, self.store.revision)), None)
        except CorruptionError:
            return None

    def _starts_within_lease(self) -> bool:
        log = self.durable.log
        hard_state, conf_state = log.hard_state, log.conf_state
        first, end = max(self.store.applied_index + 1, log.first_index()), log.last_index() + 1
        # Entries that are not applied here yet may have added other members, which may lead.
        unapplied = log.entries(first, end, INDEX_MAX) if first < end else []
        is_alone = (
            conf_state.voters == (self.durable.member_id,)
            and not conf_state.voters_outgoing
            and not any(map(is_conf_change, unapplied))
        )
        return hard_state.term > 0 and (self.config.read_leases or not is_alone)

    def _may_hold_lease(self) -> bool:
        return self.config.read_leases and self.versions.lowest_version() >= READ_LEASES_KNOWN_IN

    def _watch_the_database(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Create the parts that look for damage of the database, and for differences between members."""
        config, durable = self.config, self.durable
        where = f"{durable.snapshots / 'db'} of this member ({config.name}, {durable.member_id:x})"
        self.damage = Damage(self.node, where, self.peers.connected_since, on_fatal)
        self.scrub = Scrub(self.store, self.damage)
        self.hashes = Hashes(self.store, durable.member_id, self.damaged)
        settings = CorruptionSettings(
            config.initial_corrupt_check,
            config.corrupt_check_time_s,
            config.compact_hash_check,
            config.compact_hash_check_time_s,
        )
        members = Members(self.membership, durable.member_id, self.peers.channel)
        self.corruption = CorruptionChecker(settings, self.node, self.hashes, members)

    def _join_the_cluster(self) -> None:
        """Create the parts that publish this member to the cluster, and change its members."""
        config, peers = self.config, self.peers
        attributes = Attributes(config.name, tuple(config.advertise_client_urls))
        self.publication = Publication(self.node, self.membership, attributes)
        self.versions.on_upgraded = self.publication.again
        self.readiness = Readiness(self.node, self.publication.publish, config.wait_cluster_ready_timeout_s)
        self.changes = Changes(
            self.node,
            self.membership,
            connected_since=peers.connected_since,
            channel=peers.channel,
            wait_until_dispensable=self.departure.wait_until_dispensable,
            cluster_id=self.durable.cluster_id,
            strict=config.strict_reconfig_check,
            learners_max=config.max_learners,
            check_capable=self.versions.check_started_capable,
        )

    def _make_housekeeping(self, devices: Devices) -> None:
        config, store = self.config, self.store
        space = Space(self.node, self.applier.alarms, self.snapshots, self.receiver)
        self.admission = Admission(
            self.node,
            self.applier,
            max_request_bytes=config.max_request_bytes,
            quota_bytes=config.quota_bytes,
            # Pages that a compaction freed are reused, so they count as free space.
            size_bytes=partial(attrgetter("backend.size_in_use_bytes"), store),
            data_dir=str(self.durable.snapshots),
            log_dir=self.durable.wal.directory,
            raise_no_space=space.raise_no_space,
            make_room=space.make_room,
            free_bytes=devices.free_bytes,
        )
        retention = Retention(
            snapshot_entries=config.snapshot_count,
            snapshot_bytes=config.snapshot_bytes,
            catchup_entries=config.snapshot_catchup_entries,
            catchup_bytes=config.snapshot_catchup_bytes,
        )
        self.log_cut = LogCut(self.node, store, self.disk, retention, self.snapshots)
        self.housekeeping = Housekeeping(
            self.node,
            store,
            self.durable.wal,
            self.admission,
            self.log_cut,
            commit_interval_s=config.backend_batch_interval_s,
            compaction_pause_s=config.compaction_sleep_interval_s,
            compaction_keys=config.compaction_batch_limit,
            on_no_space=space.raise_no_space,
            auto_compaction=self._make_auto_compaction(),
        )

    def _make_auto_compaction(self) -> AutoCompaction | None:
        config, node = self.config, self.node
        if config.auto_compaction_retention_revisions > 0:
            policy: Policy = RevisionPolicy(config.auto_compaction_retention_revisions)
        elif config.auto_compaction_retention_s > 0:
            policy = PeriodicPolicy(config.auto_compaction_retention_s, asyncio.get_running_loop().time())
        else:
            return None
        return AutoCompaction(policy, node, lambda: node.role == StateRole.LEADER, lambda: node.store.revision)

    def _make_watches_and_leases(self, devices: Devices) -> None:
        node, header = self.node, self.header
        self.watch_runner = WatchRunner()
        self.hub = WatchHub(
            self.store,
            lambda revision: header.encode(revision, node.term),
            self.watch_runner.wake,
            devices.cork,
            node.uses.weights,
        )
        self.throttle = Throttle(
            self.applier.limits,
            self.applier.auth,
            asyncio.get_running_loop().time,
            self.hub.counts.held,
            partial(setattr, self.admission, "throttle"),
            node.uses.weights,
        )
        self.hub.on_count = self.throttle.watches_changed
        self.leader_guard = LeaderGuard(node)
        self.lessor = Lessor(
            node, self.applier, ttl_min_s=self.config.lease_ttl_min_s, channel=self.peers.channel, cork=devices.cork
        )

    # -- subscriptions -----------------------------------------------------------------------------------------------

    def connect(
        self,
        *,
        graces: Graces | None = None,
        check_rights: Callable[[], None] | None = None,
        forget_tokens: Callable[[], None] | None = None,
        leader_changed: tuple[Callable[[], None], ...] = (),
        followers: tuple[Follow, ...] = (),
    ) -> None:
        """Make every subscription between the parts, which must not have started yet.

        Arguments:
            graces: leases that depend on their owner's connection; ``None``: there are no connections.
            check_rights: ends watches that have lost their rights; ``None``: callers are not authenticated.
            forget_tokens: called when passwords may have changed in entries that this member has never seen.
            leader_changed: called when a leader is found or lost, after the parts of the replica; the last logs it.
            followers: connections that follow the members, after those of ``Devices.peers``.
        """
        node, applier, hub, lessor = self.node, self.applier, self.hub, self.lessor

        # While an entry is applied: changes are recorded, nothing is sent yet.
        self.store.on_changes = hub.changed
        applier.leases.observer = lessor.times
        if graces is not None:
            lessor.on_end.append(graces.lease_ended)

        # After the entries of a turn are applied and their callers answered. Watchers come first: the event of a key
        # that was deleted with its lease is sent before the keep-alive of that lease is answered with TTL 0.
        self.watch_runner.hub = hub
        hub.on_damage = node.damaged
        # Before all of them, watches without rights are ended: their clients must not see writes after the change of
        # users.
        if check_rights is not None:
            node.on_applied.append(check_rights)
        node.on_applied += [hub.applied, lessor.applied]

        # The guard only starts or stops a timer. The lessor must know the new role before any other part acts on it:
        # from here on nothing is answered on behalf of a leadership that ended. The log comes last, so that it shows
        # the final state.
        node.on_leader_change += [self.leader_guard.leader_changed, lessor.leader_changed, *leader_changed]

        # First the responses that this member may still send, then the members that it connects to.
        node.on_conf_change += [self.admission.conf_changed, self.departure.conf_changed]
        self.admission.conf_changed()
        for follow in (self.peers.follow, *followers):
            node.on_conf_change.append(partial(_follow, follow, applier.membership))

        self._subscribe_to_databases(forget_tokens)

    def observe(self, leader_changed: Callable[[], None], members_changed: Callable[[], None]) -> None:
        """Notify a part that changes nothing here of leaders and members, after all parts that act on them."""
        self.node.on_leader_change.append(leader_changed)
        self.node.on_conf_change.append(members_changed)

    def _subscribe_to_databases(self, forget_tokens: Callable[[], None] | None) -> None:
        """Make all parts follow when a received database replaces the store's.

        The log is cut to the new database first. Then the state in memory that is derived from the store is read again,
        and only then are watchers served from the new history. There may be a million leases, which are read
        beforehand.
        """
        applier, installer = self.applier, self.installer
        state = (applier.membership, applier.alarms, applier.downgrade, applier.quotas, applier.limits, applier.auth)
        after: list[Callable[[], None] | None] = [part.reload for part in state]
        after += [applier.leases.reload, self.hub.restored, forget_tokens, self.hashes.forget]
        installer.on_received.append(applier.leases.receive)
        installer.on_swapped.append(lambda meta: _mark(self, meta))
        installer.on_swapped += [partial(_call, callback) for callback in after if callback is not None]

    # -- metrics -----------------------------------------------------------------------------------------------------

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics of all parts, as they are now, for ``/metrics``."""
        node, durable = self.node, self.durable
        times = node.applying.times
        for part in (self.defragmenter, self.damage, self.corruption):
            yield from part.collect()
        features = {
            "InitialCorruptCheck": self.config.initial_corrupt_check,
            "CompactHashCheck": self.config.compact_hash_check,
        }
        yield from server_metrics(node, self.changes, self.installer, self.config.quota_bytes or 0, features)
        yield from store_metrics(self.store, durable.backend.open_reads, times.txns)
        compactions, wal_bytes = self.housekeeping.compactions, durable.wal.written_bytes
        yield from work_metrics(times, node.reads.durations, compactions, wal_bytes)
        yield from self._durations()
        yield from transfer_metrics("send", self.snapshots.transfers)
        yield from transfer_metrics("receive", self.receiver.transfers)
        yield from watch_metrics(self.hub)
        yield from lease_metrics(self.lessor.times)
        yield from quota_metrics(self.applier.quotas)

    def _durations(self) -> Iterator[Metric]:
        hashes, receiver = self.hashes, self.receiver
        return durations(
            (
                ("disk_wal_fsync", "The latency distributions of fsync called by WAL.", self._syncs),
                ("disk_wal_write", "The latency distributions of write called by WAL.", self.disk.writes),
                ("disk_backend_commit", "The latency distributions of commit called by backend.", self._commits),
                ("disk_backend_defrag", "The latency distribution of backend defragmentation.", self._defragmentations),
                ("mvcc_hash", "The latency distribution of storage hash operation.", hashes.durations),
                (
                    "mvcc_hash_rev",
                    "The latency distribution of storage hash by revision operation.",
                    hashes.durations_at,
                ),
                ("snap_db_fsync", "The latency distributions of fsyncing .snap.db file", receiver.syncs),
                ("snap_db_save_total", "The total latency distributions of v3 snapshot save", receiver.saves),
            )
        )

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to take part in the cluster."""
        self.peers.follow(self.membership.members, self.membership.removed)
        self.node.start()
        self.lessor.start()
        if self.config.initial_election_tick_advance:
            self._advance_ticks()

    def _advance_ticks(self) -> None:
        """Skip most of the first election timeout: a newly started member need not wait for a leader."""
        if self.node.conf_state.voters == (self.durable.member_id,):
            self.node.campaign()
            return
        # Leave enough time for a heartbeat of an existing leader.
        for _ in range(self.config.election_ticks - 3):
            self.node.raw.tick()

    def leave(self) -> None:
        """Stop deciding, and end the streams of clients, before their connections are closed."""
        self.damage.close()
        self.departure.close()
        self.leader_guard.close()

    async def stop(self) -> None:
        """Stop all work; the disks stay open."""
        self.lessor.stop()
        self.node.stop()
        await self.installer.close()
        await self.defragmenter.close()
        await self.snapshots.close()
        self.receiver.close()

    # -- events ------------------------------------------------------------------------------------------------------

    def _found_damage(self, error: CorruptionError) -> None:
        self.damage.found(error)

    def _is_snapshot_wanted(self, message: Message) -> bool:
        return self.node.role == StateRole.LEADER and self.node.term == message.term

    def _is_served(self, peer_id: int, index: int) -> bool:
        return self.node.role != StateRole.LEADER or self.node.has_log(peer_id, index)


def _follow(follow: Follow, membership: Membership) -> None:
    follow(membership.members, membership.removed)


def _call(callback: Callable[[], None], _meta: SnapshotMeta) -> None:
    callback()


def _mark(replica: Replica, meta: SnapshotMeta) -> None:
    # A newer database may have arrived while this one was installed. Its marker is in the log already, and markers
    # never go back; the entries before them are dropped when that database is in place.
    if meta.index >= replica.node.log.snapshot().index:
        replica.disk.submit(Marker(meta, lambda: None))
