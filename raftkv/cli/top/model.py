"""What ``raftkvctl top`` knows of a member at two moments, and the row that follows from it.

Owns the arithmetic only; asks nobody. Rates are differences of counters, so a member that was started again between
two looks has none until the next.

    row = make_row(before, after, leader_index=after_of_leader.index)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

COUNTERS: Final[dict[str, tuple[str, ...]]] = {
    "reads_per_s": ("etcd_mvcc_range_total",),
    "events_per_s": ("etcd_debugging_mvcc_events_total",),
    "keepalives_per_s": ("etcd_debugging_lease_renewed_total",),
}
"""Rates and the counters that they are differences of; without the counter the rate is unknown."""

ANSWERING: Final = ("leader", "follower", "learner", "candidate")


@dataclass(frozen=True)
class Sample:
    """One member at one moment; ``error`` says why it did not answer."""

    name: str
    endpoint: str
    at_s: float
    member_id: int = 0
    role: str = "silent"
    version: str = ""
    term: int = 0
    index: int = 0
    applied: int = 0
    revision: int = 0
    db_size_bytes: int = 0
    alarms: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Row:
    """One member as shown; None is what is not known.

    Attributes:
        lag: entries that the member has to apply to be where the leader's log ends.
        writes_per_s: revisions, which all members count.
        reads_per_s, events_per_s, keepalives_per_s: of this member alone.
        watch_lag: revisions that the slowest watcher is behind.
    """

    name: str
    endpoint: str
    role: str
    version: str
    term: int | None
    index: int | None
    lag: int | None
    revision: int | None
    db_size_bytes: int | None
    writes_per_s: float | None
    reads_per_s: float | None
    events_per_s: float | None
    keepalives_per_s: float | None
    leader_changes: int | None
    watchers: int | None
    slow_watchers: int | None
    watch_lag: int | None
    leases: int | None
    alarms: tuple[str, ...]
    error: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for programs."""
        return {**asdict(self), "alarms": list(self.alarms)}


def make_rows(before: Mapping[str, Sample], after: Sequence[Sample]) -> list[Row]:
    """Return a row for each sample; ``before`` has the last ones by endpoint.

    Arguments:
        before: the last samples by endpoint, for rates.
        after: the samples of now.
    """
    end = max((sample.index for sample in after), default=0)
    return [_row(before.get(sample.endpoint), sample, end) for sample in after]


def _row(before: Sample | None, sample: Sample, log_end: int) -> Row:
    answered = sample.role in ANSWERING
    metrics = sample.metrics
    rates = {name: _counter_rate(before, sample, counters) for name, counters in COUNTERS.items()}
    return Row(
        name=sample.name,
        endpoint=sample.endpoint,
        role=sample.role,
        version=sample.version,
        term=sample.term if answered else None,
        index=sample.index if answered else None,
        lag=log_end - sample.applied if answered else None,
        revision=sample.revision if answered else None,
        db_size_bytes=sample.db_size_bytes if answered else None,
        writes_per_s=_write_rate(before, sample) if answered else None,
        **rates,
        leader_changes=_whole(metrics, "etcd_server_leader_changes_seen_total"),
        watchers=_whole(metrics, "etcd_debugging_mvcc_watcher_total"),
        slow_watchers=_whole(metrics, "etcd_debugging_mvcc_slow_watcher_total"),
        watch_lag=_whole(metrics, "raftkv_watch_lag_revisions"),
        leases=_whole(metrics, "raftkv_leases"),
        alarms=sample.alarms,
        error=sample.error,
    )


def _whole(metrics: Mapping[str, float], name: str) -> int | None:
    return int(metrics[name]) if name in metrics else None


def _write_rate(before: Sample | None, sample: Sample) -> float | None:
    if before is None or before.role not in ANSWERING:
        return None
    return _rate(before.at_s, before.revision, sample.at_s, sample.revision)


def _counter_rate(before: Sample | None, sample: Sample, names: Sequence[str]) -> float | None:
    for name in names:
        if before is not None and name in before.metrics and name in sample.metrics:
            return _rate(before.at_s, before.metrics[name], sample.at_s, sample.metrics[name])
    return None


def _rate(before_s: float, before: float, after_s: float, after: float) -> float | None:
    if after < before or after_s <= before_s:  # the member has begun again
        return None
    return round((after - before) / (after_s - before_s), 1)


def total(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the cluster in one row: who leads, who answers, rates of all members together."""
    leaders = [row.name for row in rows if row.role == "leader"]

    def together(name: str) -> float | None:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        return round(sum(known), 1) if known else None

    writes = [row.writes_per_s for row in rows if row.writes_per_s is not None]
    return {
        "leader": leaders[0] if len(leaders) == 1 else None,
        "answering": sum(row.role in ANSWERING for row in rows),
        "members": len(rows),
        "revision": max((row.revision or 0 for row in rows), default=0),
        "writes_per_s": max(writes, default=None),
        **{name: together(name) for name in COUNTERS},
        "watchers": together("watchers"),
        "alarms": sorted({alarm for row in rows for alarm in row.alarms}),
    }
