"""Short ways to make families: rows of (name, text, value).

    yield from gauges(("etcd_server_has_leader", "Whether or not a leader exists.", 1.0))

Names of counters are written as they stand in /metrics. Prometheus's own library adds ``_total`` to a counter's name;
some of etcd's have none (``etcd_server_health_success``), so families of counters are made by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric

Values = TypeVar("Values", bound=tuple[str, ...])
"""Values of labels, in their order."""

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
