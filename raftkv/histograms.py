"""Histograms that the parts of a member fill: plain integers, no lock, read at each scrape.

    syncs = Buckets(DISK_S)
    syncs.observe(0.0012)
    histogram_family("etcd_disk_wal_fsync_duration_seconds", "…", {(): syncs})

A part of the member owns a ``Buckets``; only one thread may observe at a time. ``histogram_family`` turns it into a
Prometheus metric family. One observation costs 0.4 us; a value shared by many requests of a turn is observed once, with
their number.

The metric families are defined in ``server.metrics``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeVar

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Values = TypeVar("Values", bound=tuple[str, ...])
"""Label values, in the order of the labels."""

_library_text: Callable[[float], str] = floatToGoString


def go_float(value: float) -> str:
    """Format a number as etcd does. The Prometheus library would write 1.0 for 1, and 1e+010 for 1e+10.

    >>> [go_float(value) for value in (0.0, 1, -2.0, 0.25, 1e-05, 999_999.0, 1_000_000.0, 12_345_678_901.0, 1e30)]
    ['0', '1', '-2', '0.25', '1e-05', '999999', '1e+06', '1.2345678901e+10', '1e+30']
    """
    if -1e6 < value < 1e6:
        return str(int(value)) if value == int(value) else repr(float(value))
    if value < 0:
        return f"-{go_float(-value).removeprefix('+')}"
    text = _library_text(value)
    return text if value < 1e10 else text.replace("e+0", "e+")


def doubling(first: float, count: int) -> tuple[float, ...]:
    """Return bucket bounds, each twice the one before.

    Arguments:
        first: lowest bound.
        count: number of bounds.
    """
    return tuple(first * 2**power for power in range(count))


DISK_S: Final = doubling(0.001, 14)
"""Bucket bounds of etcd's histograms of disk operations, in seconds."""


class Buckets:
    """The number of observed values in each bucket.

    Attributes:
        bounds: upper bounds of the buckets, ascending.
        counts: number of values in each bucket, and in one more bucket for values above all bounds.
        total: sum of all observed values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value.

        Arguments:
            value: observed value, in the unit of the bounds.
            times: number of times to count it.
        """
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self.counts)


def histogram_family(name: str, text: str, found: Mapping[Values, Buckets], labels: Sequence[str] = ()) -> Metric:
    """Return a Prometheus histogram family.

    Arguments:
        name, text: name and help text of the family.
        found: buckets for each tuple of label values.
        labels: label names.
    """
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, buckets in found.items():
        names = [*map(go_float, buckets.bounds), "+Inf"]
        sums = list(zip(names, map(float, accumulate(buckets.counts)), strict=True))
        family.add_metric(values, sums, buckets.total)
    return family


Row = tuple[str, str, float]
"""Name, help text, value."""


def gauges(*rows: Row) -> Iterator[Metric]:
    """Yield a gauge for each row."""
    for name, text, value in rows:
        yield GaugeMetricFamily(name, text, float(value))


def counters(*rows: Row) -> Iterator[Metric]:
    """Yield a counter for each row."""
    for name, text, value in rows:
        yield counter(name, text, {(): value})


def counter(name: str, text: str, found: Mapping[Values, float], labels: Sequence[str] = ()) -> Metric:
    """Return a counter.

    Arguments:
        name: name as shown in /metrics.
        text: help text.
        found: value for each tuple of label values.
        labels: label names.
    """
    family = Metric(name.removesuffix("_total"), text, "counter")
    for values, value in found.items():
        family.add_sample(name, dict(zip(labels, values, strict=True)), float(value))
    return family


def gauge(name: str, text: str, found: Mapping[Values, float], labels: Sequence[str] = ()) -> Metric:
    """Return a gauge with labels; the arguments are the same as for ``counter``."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in found.items():
        family.add_metric(values, float(value))
    return family
