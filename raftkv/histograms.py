"""Histograms that the parts of a member fill themselves: plain integers, no lock, read when scraped.

    syncs = Buckets(DISK_S)
    syncs.observe(0.0012)
    histogram_family("etcd_disk_wal_fsync_duration_seconds", "…", {(): syncs})

``Buckets`` is what a part holds; one thread at a time observes. ``histogram_family`` makes a family of Prometheus of
them. An observation costs 0.4 us; what many requests of a turn have in common is observed once, with their number.

Leaves out: which families there are (``server.metrics``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeVar

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Values = TypeVar("Values", bound=tuple[str, ...])
"""Values of labels, in their order."""

_library_text: Callable[[float], str] = floatToGoString


def go_float(value: float) -> str:
    """Write a number as etcd does: the library writes 1.0 for 1, and 1e+010 for 1e+10.

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
    """Return bounds of which each is twice the one before.

    Arguments:
        first: the lowest bound.
        count: how many.
    """
    return tuple(first * 2**power for power in range(count))


DISK_S: Final = doubling(0.001, 14)
"""Bounds of etcd's histograms of disk work, in seconds."""


class Buckets:
    """Counts of values, by the bucket that each falls into.

    Attributes:
        bounds: upper bounds of the buckets, ascending.
        counts: for each bucket, and one more for what is above all bounds.
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
            value: in the unit of the bounds.
            times: how often it was met.
        """
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


def histogram_family(name: str, text: str, found: Mapping[Values, Buckets], labels: Sequence[str] = ()) -> Metric:
    """Make a histogram family.

    Arguments:
        name, text: of the family.
        found: the buckets for each tuple of label values.
        labels: names of the labels.
    """
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, buckets in found.items():
        names = [*map(go_float, buckets.bounds), "+Inf"]
        sums = list(zip(names, map(float, accumulate(buckets.counts)), strict=True))
        family.add_metric(values, sums, buckets.total)
    return family


Row = tuple[str, str, float]
"""Name, text, value."""


def gauges(*rows: Row) -> Iterator[Metric]:
    """Make a gauge of each row."""
    for name, text, value in rows:
        yield GaugeMetricFamily(name, text, float(value))


def counters(*rows: Row) -> Iterator[Metric]:
    """Make a counter of each row."""
    for name, text, value in rows:
        yield counter(name, text, {(): value})


def counter(name: str, text: str, found: Mapping[Values, float], labels: Sequence[str] = ()) -> Metric:
    """Make a counter.

    Arguments:
        name: as it stands in /metrics.
        text: what it counts.
        found: the value for each tuple of label values.
        labels: names of the labels.
    """
    family = Metric(name.removesuffix("_total"), text, "counter")
    for values, value in found.items():
        family.add_sample(name, dict(zip(labels, values, strict=True)), float(value))
    return family


def gauge(name: str, text: str, found: Mapping[Values, float], labels: Sequence[str] = ()) -> Metric:
    """Make a gauge with labels; the arguments are those of ``counter``."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in found.items():
        family.add_metric(values, float(value))
    return family
