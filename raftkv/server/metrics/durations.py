"""Histograms of a member's own work: disk, database, applying, reading, hashing, compacting.

    member_durations = Durations()
    member_durations.add("etcd_disk_wal_fsync_duration_seconds", "…", syncs)

Most have one set of buckets; what is applied has one for each kind of entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from raftkv.apply.request import Kind
from raftkv.histograms import Buckets, histogram_family
from raftkv.server.metrics.exposition import gauges
from raftkv.server.node.applying import ApplyTimes
from raftkv.server.node.housekeeping import CompactionTimes

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
    Kind.PREFIX_QUOTA: "PrefixQuotaSet",
    Kind.HISTORY_QUOTA: "PrefixQuotaSet",
    Kind.LIMIT: "LimitSet",
    Kind.DOWNGRADE: "DowngradeInfoSet",
    Kind.AUTH: "Auth",
}
"""Kinds of entries, as etcd names what it applies. Changes of members are no requests there, and are not counted."""


class Durations(Collector):
    """Histograms with one set of buckets each."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, Buckets]] = {}

    def add(self, name: str, text: str, buckets: Buckets) -> Buckets:
        """Show buckets under a name; they are returned.

        Arguments:
            name, text: of the family.
            buckets: filled by the part that they belong to.
        """
        self._found[name] = (text, buckets)
        return buckets

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for name, (text, buckets) in self._found.items():
            yield histogram_family(name, text, {(): buckets})


class WorkMetrics(Collector):
    """Applying, reading and compacting.

    Arguments:
        applied: how long entries took.
        ranges: how long reads took.
        compactions: how long compactions took.
        wal_bytes: written to the log since the start.
    """

    def __init__(
        self, applied: ApplyTimes, ranges: Buckets, compactions: CompactionTimes, wal_bytes: Callable[[], int]
    ) -> None:
        self._applied = applied
        self._ranges = ranges
        self._compactions = compactions
        self._wal_bytes = wal_bytes

    def collect(self) -> Iterator[Metric]:
        """All families."""
        applied = {
            ("v3", OPERATIONS[abs(kind)], "true" if kind > 0 else "false"): buckets
            for kind, buckets in self._applied.buckets.items()
            if abs(kind) in OPERATIONS
        }
        text = "The latency distributions of v2 apply called by backend."
        yield histogram_family("etcd_server_apply_duration_seconds", text, applied, ["version", "op", "success"])
        text = "The latency distributions of txn.Range"
        yield histogram_family("etcd_server_range_duration_seconds", text, {("true",): self._ranges}, ["success"])
        compactions = self._compactions
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
            ("etcd_disk_wal_write_bytes_total", "Total number of bytes written in WAL.", self._wal_bytes()),
        )
