"""The metrics of a member for Prometheus, under etcd's names, so that etcd's dashboards and alerts work.

Values are read from the member's own counters when scraped: the hot path counts with plain integers and takes no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from raftkv.server import ETCD_CLUSTER_VERSION, ETCD_VERSION
from raftkv.server.lease.times import TTL_BUCKETS_S, LeaseTimes
from raftkv.server.node.node import Node
from raftkv.server.peer.transport import Transport
from raftkv.server.watch.hub import WatchHub
from raftkv.storage.mvcc import Store

_go_float: Callable[[float], str] = floatToGoString
_DISK_BUCKETS_S: Final = tuple(0.001 * 2**power for power in range(14))


class DiskHistogram(Collector):
    """Durations of one kind of disk work. Observed by one thread at a time, so it needs no lock."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._counts = [0] * (len(_DISK_BUCKETS_S) + 1)
        self._sum_s = 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(_DISK_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        yield histogram_family(self._name, self._text, _DISK_BUCKETS_S, self._counts, self._sum_s)


def histogram_family(name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    """Make a histogram family of counts for each bucket.

    Arguments:
        name, text: of the family.
        bounds: upper bounds of the buckets, ascending.
        counts: for each bucket, and one more for what is above all bounds.
        total: sum of all observed values.
    """
    names = [*map(_go_float, bounds), "+Inf"]
    buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=total)


def wal_sync_histogram(registry: CollectorRegistry) -> DiskHistogram:
    """Durations of the log's syncs."""
    text = "The latency distributions of fsync called by WAL."
    return DiskHistogram("etcd_disk_wal_fsync_duration_seconds", text, registry)


class MemberCollector(Collector):
    """Reads a member's state at each scrape."""

    def __init__(self, node: Node, store: Store, transport: Transport, quota_bytes: int) -> None:
        self._node = node
        self._store = store
        self._transport = transport
        self._quota_bytes = quota_bytes

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._server()
        yield from self._store_sizes()
        yield from self._operations()
        yield from self._peers()
        for name, label, value in (
            ("etcd_server_version", "server_version", ETCD_VERSION),
            ("etcd_cluster_version", "cluster_version", ETCD_CLUSTER_VERSION),
            ("etcd_server_id", "server_id", f"{self._node.settings.member_id:x}"),
        ):
            family = GaugeMetricFamily(name, f"Which {label} is running.", labels=[label])
            family.add_metric([value], 1)
            yield family

    def _server(self) -> Iterator[Metric]:
        node = self._node
        gauges: dict[str, tuple[str, float]] = {
            "etcd_server_has_leader": ("Whether or not a leader exists.", node.leader != 0),
            "etcd_server_is_leader": ("Whether this member leads.", node.leader == node.settings.member_id),
            "etcd_server_is_learner": (
                "Whether this member is a learner.",
                node.settings.member_id in node.conf_state.learners,
            ),
            "etcd_server_proposals_committed_total": ("Consensus proposals committed.", node.committed),
            "etcd_server_proposals_applied_total": ("Consensus proposals applied.", node.applied),
            "etcd_server_proposals_pending": ("Proposals waiting to be committed.", len(node.proposals)),
            "etcd_server_quota_backend_bytes": ("Backend storage quota.", self._quota_bytes),
        }
        yield from (GaugeMetricFamily(name, text, float(value)) for name, (text, value) in gauges.items())
        counters = {
            "etcd_server_leader_changes_seen": ("Leader changes seen.", node.leader_changes),
            "etcd_server_proposals_failed": ("Failed proposals seen.", node.proposals.failed),
            "etcd_server_slow_read_indexes": ("Read rounds asked again.", node.reads.rounds_retried),
            "etcd_server_read_indexes_failed": ("Reads that timed out.", node.reads.reads_failed),
        }
        yield from (CounterMetricFamily(name, text, float(value)) for name, (text, value) in counters.items())

    def _store_sizes(self) -> Iterator[Metric]:
        store = self._store
        gauges = {
            "etcd_mvcc_db_total_size_in_bytes": ("Size of the database on disk.", store.size_bytes),
            "etcd_mvcc_db_total_size_in_use_in_bytes": ("Part of it in use.", store.size_in_use_bytes),
            "etcd_debugging_mvcc_current_revision": ("The current revision.", store.revision),
            "etcd_debugging_mvcc_compact_revision": ("The compact revision.", store.compact_revision),
            "etcd_debugging_mvcc_keys_total": ("Keys.", store.key_count),
        }
        yield from (GaugeMetricFamily(name, text, float(value)) for name, (text, value) in gauges.items())

    def _operations(self) -> Iterator[Metric]:
        store = self._store
        counters = {
            "etcd_mvcc_put": ("Puts seen by this member.", store.puts_total),
            "etcd_mvcc_delete": ("Deletes seen by this member.", store.deletes_total),
            "etcd_mvcc_range": ("Ranges seen by this member.", store.ranges_total),
        }
        yield from (CounterMetricFamily(name, text, float(value)) for name, (text, value) in counters.items())

    def _peers(self) -> Iterator[Metric]:
        sent = CounterMetricFamily("etcd_network_peer_sent_bytes", "Bytes sent to peers.", labels=["To"])
        failures = CounterMetricFamily("etcd_network_peer_sent_failures", "Batches dropped.", labels=["To"])
        active = GaugeMetricFamily("etcd_network_active_peers", "Connected peers.", labels=["Local", "Remote"])
        lost = CounterMetricFamily(
            "etcd_network_disconnected_peers", "Lost connections to peers.", labels=["Local", "Remote"]
        )
        local = f"{self._node.settings.member_id:x}"
        for peer_id, peer in sorted(self._transport.peers.items()):
            remote = f"{peer_id:x}"
            sent.add_metric([remote], peer.sent_bytes)
            failures.add_metric([remote], peer.send_failures)
            active.add_metric([local, remote], float(peer.active_since is not None))
            lost.add_metric([local, remote], peer.disconnects)
        yield from (sent, failures, active, lost)


class WatchCollector(Collector):
    """Reads the watches at each scrape."""

    def __init__(self, hub: WatchHub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        """All families."""
        hub = self._hub
        gauges = {
            "etcd_debugging_mvcc_watch_stream_total": ("Watch streams.", len(hub.streams)),
            "etcd_debugging_mvcc_watcher_total": ("Watchers.", hub.watcher_count),
            "etcd_debugging_mvcc_slow_watcher_total": ("Watchers that are behind.", hub.unsynced_count),
            "raftkv_watch_lag_revisions": ("How far the slowest watcher is behind.", hub.lag_revisions),
        }
        yield from (GaugeMetricFamily(name, text, float(value)) for name, (text, value) in gauges.items())
        yield CounterMetricFamily("etcd_debugging_mvcc_events", "Events sent to watchers.", float(hub.events_total))


class LeaseCollector(Collector):
    """Reads what happened to leases at each scrape.

    Arguments:
        times: of the member.
    """

    def __init__(self, times: LeaseTimes) -> None:
        self._times = times

    def collect(self) -> Iterator[Metric]:
        """All families; every member counts what it applied, only the leader renewals."""
        times = self._times
        counters = {
            "etcd_debugging_lease_granted": ("The total number of granted leases.", times.granted_total),
            "etcd_debugging_lease_revoked": ("The total number of revoked leases.", times.revoked_total),
            "etcd_debugging_lease_renewed": ("The number of renewed leases seen by the leader.", times.renewed_total),
            "etcd_debugging_server_lease_expired": ("The total number of expired leases.", times.expired_total),
        }
        yield from (CounterMetricFamily(name, text, float(value)) for name, (text, value) in counters.items())
        text = "Bucketed histogram of lease TTLs."
        yield histogram_family("etcd_debugging_lease_ttl_total", text, TTL_BUCKETS_S, times.ttl_counts, times.ttl_sum_s)
        yield GaugeMetricFamily("raftkv_leases", "Leases that exist now.", float(len(times)))


def new_registry() -> CollectorRegistry:
    """A registry with what is known of the process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry) -> Callable[[], bytes]:
    """The text that /metrics answers."""
    return lambda: generate_latest(registry)
