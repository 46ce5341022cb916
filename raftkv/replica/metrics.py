"""Metrics of a replica: cluster state, store, watches, leases, quotas and database transfers; metrics of the process;
and the durations of the replica's own work. Each function yields the families of one part as they are when it is
called; ``Replica.metrics`` calls them all.

For metric families that etcd has too, the texts are etcd's.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from raftkv.apply.quotas import Quotas
from raftkv.apply.wire import Kind
from raftkv.config import ETCD_VERSION, FEATURES
from raftkv.histograms import Buckets, counter, counters, gauge, gauges, histogram_family
from raftkv.pb.enums import alarm_name
from raftkv.replica.lease.times import LeaseTimes
from raftkv.replica.membership.changes import Changes
from raftkv.replica.node.applying import ApplyTimes
from raftkv.replica.node.housekeeping import CompactionTimes
from raftkv.replica.node.node import Node
from raftkv.replica.snapshots import Installer
from raftkv.replica.snapshots.files import Transfers
from raftkv.replica.watch.hub import WatchHub
from raftkv.storage.mvcc import Store

T = TypeVar("T")

_ALL_FEATURES: Final = FEATURES | {"AllAlpha": (False, "ALPHA"), "AllBeta": (False, "BETA")}
_DESCRIPTORS: Final = Path("/proc/self/fd")


def new_registry() -> CollectorRegistry:
    """Return a new registry with the metrics of the process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(Collecting(process_limits))
    return registry


class Collecting(Collector):
    """Collects what a function yields when it is called.

    Arguments:
        families: yields metric families.
    """

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return all metric families."""
        return self._families()


def process_limits() -> Iterator[Metric]:
    """Yield limits of the process that Prometheus's own collector lacks, and descriptors under etcd's names."""
    memory, descriptors = resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    memory = memory if memory >= 0 else 2**64 - 1  # as Go's client has "unlimited"
    yield from gauges(
        ("process_virtual_memory_max_bytes", "Maximum amount of virtual memory available in bytes.", memory),
        ("os_fd_limit", "The file descriptor limit.", descriptors),
        ("os_fd_used", "The number of used file descriptors.", _used_descriptors()),
    )


def _used_descriptors() -> int:
    """Return the number of open descriptors of this process; 0 where the system does not report it."""
    return len(os.listdir(_DESCRIPTORS)) if _DESCRIPTORS.exists() else 0


def server_metrics(
    node: Node, changes: Changes, installer: Installer, quota_bytes: int, features: Mapping[str, bool]
) -> Iterator[Metric]:
    """Yield the metrics of the member in its cluster.

    Arguments:
        node: node of the member.
        changes: membership changes.
        installer: installer of received databases.
        quota_bytes: quota of the database; 0: none.
        features: feature gates that are settings here, and whether they are on.
    """
    yield from _state(node, installer, quota_bytes)
    yield from _counters(node, changes)
    yield from _versions(node)
    yield gauge(
        "etcd_server_feature_enabled",
        "Whether or not a feature is enabled. 1 is enabled, 0 is not.",
        {(name, stage): features.get(name, is_on) for name, (is_on, stage) in _ALL_FEATURES.items()},
        ["name", "stage"],
    )
    server_id = f"{node.settings.member_id:x}"
    raised = {(alarm_name(one.alarm), f"{one.memberID:x}"): 1 for one in node.applier.alarms.raised()}
    yield gauge(
        "etcd_debugging_server_alarms",
        "Alarms for every member in cluster. 1 for 'server_id' label with current ID. 2 for 'alarm_type' label "
        "with type of this alarm",
        {(member, alarm): 1 for alarm, member in raised},
        ["server_id", "alarm_type"],
    )
    yield gauge(
        "etcd_server_id",
        "Server or member ID in hexadecimal format. 1 for 'server_id' label with current ID.",
        {(server_id,): 1},
        ["server_id"],
    )


def _state(node: Node, installer: Installer, quota_bytes: int) -> Iterator[Metric]:
    own = node.settings.member_id
    applied = "The total number of consensus proposals applied."
    return gauges(
        ("etcd_server_has_leader", "Whether or not a leader exists. 1 is existence, 0 is not.", node.leader != 0),
        ("etcd_server_is_leader", "Whether or not this member is a leader. 1 if is, 0 otherwise.", node.leader == own),
        (
            "etcd_server_is_learner",
            "Whether or not this member is a learner. 1 if is, 0 otherwise.",
            own in node.conf_state.learners,
        ),
        ("etcd_server_proposals_committed_total", "The total number of consensus proposals committed.", node.committed),
        ("etcd_server_proposals_applied_total", applied, node.applied),
        ("etcd_server_proposals_pending", "The current number of pending proposals to commit.", len(node.proposals)),
        ("etcd_server_quota_backend_bytes", "Current backend storage quota size in bytes.", quota_bytes),
        (
            "etcd_server_snapshot_apply_in_progress_total",
            "1 if the server is applying the incoming snapshot. 0 if none.",
            installer.is_installing,
        ),
    )


def _counters(node: Node, changes: Changes) -> Iterator[Metric]:
    reads = node.reads
    return counters(
        ("etcd_server_leader_changes_seen_total", "The number of leader changes seen.", node.leader_changes),
        ("etcd_server_proposals_failed_total", "The total number of failed proposals seen.", node.proposals.failed),
        (
            "etcd_server_heartbeat_send_failures_total",
            "The total number of leader heartbeat send failures (likely overloaded from slow disk).",
            node.late_heartbeats,
        ),
        (
            "etcd_server_slow_apply_total",
            "The total number of slow apply requests (likely overloaded from slow disk).",
            node.applying.times.slow,
        ),
        (
            "etcd_server_slow_read_indexes_total",
            "The total number of pending read indexes not in sync with leader's or timed out read index requests.",
            reads.rounds_retried,
        ),
        ("etcd_server_read_indexes_failed_total", "The total number of failed read indexes seen.", reads.reads_failed),
        (
            "etcd_server_learner_promote_successes",
            "The total number of successful learner promotions while this member is leader.",
            changes.promotions,
        ),
    )


def _versions(node: Node) -> Iterator[Metric]:
    cluster_version = node.applier.downgrade.cluster_version.removesuffix(".0")
    for name, label, text, version in (
        ("etcd_server_version", "server_version", "current version", ETCD_VERSION),
        ("etcd_cluster_version", "cluster_version", "current cluster version", cluster_version),
    ):
        yield gauge(name, f"Which version is running. 1 for '{label}' label with {text}", {(version,): 1}, [label])


def store_metrics(store: Store, open_reads: int, txns: int) -> Iterator[Metric]:
    """Yield the sizes of a store, and the counts of operations on it.

    Arguments:
        store: store of the member.
        open_reads: number of open read transactions of the database.
        txns: number of applied txns.
    """
    yield from gauges(
        (
            "etcd_mvcc_db_total_size_in_bytes",
            "Total size of the underlying database physically allocated in bytes.",
            store.backend.size_bytes,
        ),
        (
            "etcd_mvcc_db_total_size_in_use_in_bytes",
            "Total size of the underlying database logically in use in bytes.",
            store.backend.size_in_use_bytes,
        ),
        ("etcd_mvcc_db_open_read_transactions", "The number of currently open read transactions", open_reads),
        ("etcd_debugging_mvcc_current_revision", "The current revision of store.", store.revision),
        (
            "etcd_debugging_mvcc_compact_revision",
            "The revision of the last compaction in store.",
            store.compact_revision,
        ),
        ("etcd_debugging_mvcc_keys_total", "Total number of keys.", store.key_count),
        (
            "etcd_debugging_mvcc_total_put_size_in_bytes",
            "The total size of put kv pairs seen by this member.",
            store.put_bytes_total,
        ),
    )
    ranges = "Total number of ranges seen by this member."
    yield from counters(
        ("etcd_mvcc_put_total", "Total number of puts seen by this member.", store.puts_total),
        ("etcd_mvcc_delete_total", "Total number of deletes seen by this member.", store.deletes_total),
        ("etcd_mvcc_txn_total", "Total number of txns seen by this member.", txns),
        ("etcd_mvcc_range_total", ranges, store.reader.ranges_total),
        ("etcd_debugging_mvcc_range_total", ranges, store.reader.ranges_total),
        ("etcd_debugging_mvcc_db_compaction_keys_total", "Total number of db keys compacted.", store.dropped_total),
    )


_RUNNING: Final = "duration in seconds of running through the"
_SEND_TIMES: Final = (
    ("watch_stream_duration", f"The total {_RUNNING} send loop watch stream response all events."),
    ("watch_stream_duration_per_event", f"The average {_RUNNING} send loop watch stream response, per event."),
    ("control_stream_duration", f"The total {_RUNNING} send loop control stream response."),
    ("progress_duration", f"The total {_RUNNING} progress loop control stream response."),
)
"""Middle parts of metric names, and texts, as in etcd 3.7."""


def watch_metrics(hub: WatchHub) -> Iterator[Metric]:
    """Yield the metrics of a member's watches.

    Arguments:
        hub: watch hub of the member.
    """
    yield from gauges(
        ("etcd_debugging_mvcc_watch_stream_total", "Total number of watch streams.", len(hub.streams)),
        ("etcd_debugging_mvcc_watcher_total", "Total number of watchers.", hub.watcher_count),
        ("etcd_debugging_mvcc_slow_watcher_total", "Total number of unsynced slow watchers.", hub.unsynced_count),
        ("etcd_debugging_mvcc_pending_events_total", "Total number of pending events to be sent.", hub.pending_count),
        ("etcd_debugging_store_watchers", "Count of currently active watchers.", 0),  # of the v2 store
        ("raftkv_watch_lag_revisions", "How far the slowest watcher is behind.", hub.lag_revisions),
    )
    text = "Total number of events sent by this member."
    yield from counters(("etcd_debugging_mvcc_events_total", text, hub.events_total))
    times = hub.send_times
    found = (times.responses, times.events, times.control, times.progress)
    for (name, text), buckets in zip(_SEND_TIMES, found, strict=True):
        yield histogram_family(f"etcd_debugging_server_watch_send_loop_{name}_seconds", text, {(): buckets})


def lease_metrics(times: LeaseTimes) -> Iterator[Metric]:
    """Yield counts of leases. Every member counts the leases that it applied; only the leader counts renewals.

    Arguments:
        times: lease times of the member.
    """
    yield from counters(
        ("etcd_debugging_lease_granted_total", "The total number of granted leases.", times.granted_total),
        ("etcd_debugging_lease_revoked_total", "The total number of revoked leases.", times.revoked_total),
        ("etcd_debugging_lease_renewed_total", "The number of renewed leases seen by the leader.", times.renewed_total),
        ("etcd_debugging_server_lease_expired_total", "The total number of expired leases.", times.expired_total),
    )
    text = "Bucketed histogram of lease TTLs."
    yield histogram_family("etcd_debugging_lease_ttl_total", text, {(): times.ttls})
    yield from gauges(("raftkv_leases", "Leases that exist now.", len(times)))


def quota_metrics(quotas: Quotas) -> Iterator[Metric]:
    """Yield the quotas of prefixes, of which there are only a few.

    Arguments:
        quotas: quotas of the cluster.
    """
    shown = {(one.prefix.decode("utf-8", "backslashreplace"),): one for one in quotas.by_prefix()}
    for unit in ("bytes", "keys"):
        used = {prefix: getattr(one, f"{unit}_used") for prefix, one in shown.items()}
        text = f"What a prefix uses of its quota, in {unit}."
        yield gauge(f"raftkv_prefix_quota_used_{unit}", text, used, ["prefix"])
        most = {prefix: getattr(one, f"{unit}_max") for prefix, one in shown.items()}
        limits = {prefix: limit for prefix, limit in most.items() if limit}
        yield gauge(f"raftkv_prefix_quota_limit_{unit}", f"Quota of a prefix, in {unit}.", limits, ["prefix"])


def transfer_metrics(way: str, transfers: Transfers) -> Iterator[Metric]:
    """Yield the metrics of database transfers in one direction.

    Arguments:
        way: ``send`` or ``receive``.
        transfers: transfers in that direction.
    """
    verb, label = ("sends", ["To"]) if way == "send" else ("receives", ["From"])
    prefix = f"etcd_network_snapshot_{way}"
    text = f"Total number of inflight snapshot {verb}"
    yield gauge(f"{prefix}_inflights_total", text, _named(transfers.under_way), label)
    text = f"Total number of successful snapshot {verb}"
    yield counter(f"{prefix}_success", text, _named(transfers.succeeded), label)
    yield counter(f"{prefix}_failures", f"Total number of snapshot {way} failures", _named(transfers.failed), label)
    text = f"Total latency distributions of v3 snapshot {verb}"
    yield histogram_family(f"{prefix}_total_duration_seconds", text, _named(transfers.durations), label)


def _named(found: Mapping[int, T]) -> dict[tuple[str, ...], T]:
    return {(f"{peer_id:x}",): one for peer_id, one in sorted(found.items())}


OPERATIONS: Final[Mapping[int, str]] = {
    Kind.PUT: "Put",
    Kind.DELETE_RANGE: "DeleteRange",
    Kind.TXN: "Txn",
    Kind.COMPACT: "Compaction",
    Kind.ALARM: "Alarm",
    Kind.MEMBER_ATTRIBUTES: "ClusterMemberAttrSet",
    Kind.LEASE_GRANT: "LeaseGrant",
    Kind.LEASE_REVOKE: "LeaseRevoke",
    Kind.LEASE_EXPIRE: "LeaseExpire",
    Kind.LEASE_RENEW: "LeaseRenew",
    Kind.HISTORY_QUOTA: "PrefixQuotaSet",
    Kind.LIMIT: "LimitSet",
    Kind.DOWNGRADE: "DowngradeInfoSet",
    Kind.AUTH: "Auth",
}
"""Kinds of entries, as etcd names them. etcd does not count membership changes as requests; neither does this."""


def durations(rows: Iterable[tuple[str, str, Buckets]]) -> Iterator[Metric]:
    """Yield histograms of durations, each with one set of buckets.

    Arguments:
        rows: the middle of a metric's name, its text, and its buckets.
    """
    for name, text, buckets in rows:
        yield histogram_family(f"etcd_{name}_duration_seconds", text, {(): buckets})


def work_metrics(
    applied: ApplyTimes, ranges: Buckets, compactions: CompactionTimes, wal_bytes: int
) -> Iterator[Metric]:
    """Yield the durations of applying, reading and compacting.

    Arguments:
        applied: durations of applying entries.
        ranges: durations of reads.
        compactions: durations of compactions.
        wal_bytes: bytes written to the log since the start.
    """
    times = {
        ("v3", OPERATIONS[abs(kind)], "true" if kind > 0 else "false"): buckets
        for kind, buckets in applied.buckets.items()
        if abs(kind) in OPERATIONS
    }
    text = "The latency distributions of v2 apply called by backend."
    yield histogram_family("etcd_server_apply_duration_seconds", text, times, ["version", "op", "success"])
    text = "The latency distributions of txn.Range"
    yield histogram_family("etcd_server_range_duration_seconds", text, {("true",): ranges}, ["success"])
    text = "Bucketed histogram of db compaction pause duration."
    name = "etcd_debugging_mvcc_db_compaction_pause_duration_milliseconds"
    yield histogram_family(name, text, {(): compactions.slices})
    text = "Bucketed histogram of db compaction total duration."
    name = "etcd_debugging_mvcc_db_compaction_total_duration_milliseconds"
    yield histogram_family(name, text, {(): compactions.wholes})
    yield from gauges(
        (
            "etcd_debugging_mvcc_db_compaction_last",
            "The unix time of the last db compaction. Resets to 0 on start.",
            compactions.ended_at,
        ),
        ("etcd_disk_wal_write_bytes_total", "Total number of bytes written in WAL.", wal_bytes),
    )
