"""Makes the collectors of a member and registers them: the one place that knows which part counts what.

register(registry, Sources(durable=durable, node=node, ...))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from raftkv.apply.applier import Applier
from raftkv.histograms import DISK_S, Buckets
from raftkv.rpc.server.budget import AnswerBudget
from raftkv.rpc.server.server import Server
from raftkv.server.auth.users import Users
from raftkv.server.http.routes import HttpService
from raftkv.server.lease.times import LeaseTimes
from raftkv.server.maintenance.hashes import Hashes
from raftkv.server.maintenance.snapshot import SnapshotService
from raftkv.server.membership.changes import Changes
from raftkv.server.metrics.budgets import BudgetMetrics
from raftkv.server.metrics.calls import CallMetrics
from raftkv.server.metrics.durations import Durations, WorkMetrics
from raftkv.server.metrics.member import ServerMetrics, StoreMetrics
from raftkv.server.metrics.parts import AuthMetrics, HealthMetrics, LeaseMetrics, QuotaMetrics, WatchMetrics
from raftkv.server.metrics.peers import PeerMetrics, TransferMetrics
from raftkv.server.node.admission import Admission
from raftkv.server.node.bootstrap import Durable
from raftkv.server.node.disk import Disk
from raftkv.server.node.housekeeping import Housekeeping
from raftkv.server.node.node import Node
from raftkv.server.peer.service import PeerService
from raftkv.server.peer.transport import Transport
from raftkv.server.snapshots import Installer, SnapshotReceiver, SnapshotSender
from raftkv.server.watch.hub import WatchHub


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The parts of a member that count.

    Attributes:
        durable: what is on disk.
        node, applier, admission, disk, housekeeping: of the loop.
        quota_bytes: of the database; 0: none.
        features: feature gates that are settings here, and whether they are on.
        syncs, defragmentations: durations, in seconds.
        hashes, snapshot_service: of maintenance.
        snapshots, receiver, installer: databases that go to or come from members.
        transport, peer_service: messages to members, and from them.
        changes: of the members.
        hub, lease_times, users, http: of what clients use.
        answers: the budget of all connections.
        servers: the ports, by name; ``client`` is one.
    """

    durable: Durable
    node: Node
    applier: Applier
    admission: Admission
    quota_bytes: int
    features: Mapping[str, bool]
    disk: Disk
    syncs: Buckets
    defragmentations: Buckets
    hashes: Hashes
    snapshot_service: SnapshotService
    housekeeping: Housekeeping
    snapshots: SnapshotSender
    receiver: SnapshotReceiver
    installer: Installer
    transport: Transport
    peer_service: PeerService
    changes: Changes
    hub: WatchHub
    lease_times: LeaseTimes
    users: Users
    http: HttpService
    answers: AnswerBudget
    servers: dict[str, Server]


def register(registry: CollectorRegistry, of: Sources) -> None:
    """Show what the parts of a member count.

    Arguments:
        registry: whose families /metrics has.
        of: the parts.
    """
    node, durable = of.node, of.durable
    wal, backend = durable.wal, durable.backend
    work = WorkMetrics(
        node.applying.times, node.reads.durations, of.housekeeping.compactions, lambda: wal.written_bytes
    )
    for collector in (
        ServerMetrics(node, of.changes, of.installer, of.quota_bytes, of.features),
        StoreMetrics(durable.store, lambda: backend.open_reads, lambda: work.txns),
        work,
        _durations(of),
        CallMetrics(of.servers["client"], of.admission),
        PeerMetrics(durable.member_id, of.transport, of.peer_service),
        TransferMetrics("send", of.snapshots.transfers),
        TransferMetrics("receive", of.receiver.transfers),
        WatchMetrics(of.hub),
        LeaseMetrics(of.lease_times),
        AuthMetrics(of.applier.auth, of.users),
        QuotaMetrics(of.applier.quotas),
        HealthMetrics(of.http),
        BudgetMetrics(of.answers, of.servers, node, of.hub, of.admission, of.transport),
    ):
        registry.register(collector)


def _durations(of: Sources) -> Durations:
    durations, commits = Durations(), Buckets(DISK_S)
    of.durable.backend.observe_commit = commits.observe
    for name, text, buckets in (
        ("disk_wal_fsync", "The latency distributions of fsync called by WAL.", of.syncs),
        ("disk_wal_write", "The latency distributions of write called by WAL.", of.disk.writes),
        ("disk_backend_commit", "The latency distributions of commit called by backend.", commits),
        ("disk_backend_defrag", "The latency distribution of backend defragmentation.", of.defragmentations),
        ("disk_backend_snapshot", "The latency distribution of backend snapshots.", of.snapshot_service.durations),
        ("mvcc_hash", "The latency distribution of storage hash operation.", of.hashes.durations),
        (
            "mvcc_hash_rev",
            "The latency distribution of storage hash by revision operation.",
            of.hashes.durations_at,
        ),
        ("snap_db_fsync", "The latency distributions of fsyncing .snap.db file", of.receiver.syncs),
        ("snap_db_save_total", "The total latency distributions of v3 snapshot save", of.receiver.saves),
    ):
        durations.add(f"etcd_{name}_duration_seconds", text, buckets)
    return durations
