"""Clusters whose slots runs share, as families of metrics: slots, grants, and the runs that wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raftkv.training.scheduling.view import ClusterView

_CLUSTER: Final = ("cluster",)


class QueueMetrics(Collector):
    """The clusters that are known.

    Attributes:
        views: of each, by name, as of the last look.
    """

    def __init__(self) -> None:
        self.views: dict[str, ClusterView] = {}

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for name, text, values in (
            ("slots", "Slots of the hosts.", {n: sum(h.slots for h in v.hosts) for n, v in self.views.items()}),
            (
                "free_slots",
                "Slots that nobody holds.",
                {n: sum(h.free for h in v.hosts) for n, v in self.views.items()},
            ),
            ("admitted", "Runs that have slots.", {n: len(v.grants) for n, v in self.views.items()}),
            ("queued", "Runs that wait for slots.", {n: len(v.queue) for n, v in self.views.items()}),
            (
                "denied_hosts",
                "Hosts that are left out.",
                {n: sum(bool(h.denied) for h in v.hosts) for n, v in self.views.items()},
            ),
        ):
            family = GaugeMetricFamily(f"raftkv_run_cluster_{name}", text, labels=_CLUSTER)
            for cluster, value in values.items():
                family.add_metric((cluster,), value)
            yield family
        text = "Place of a run that waits for slots, from 1; 0: it cannot be served."
        places = GaugeMetricFamily("raftkv_run_queue_place", text, labels=("cluster", "run"))
        text = "How often others were served that came behind a waiting run."
        passed = GaugeMetricFamily("raftkv_run_queue_passed", text, labels=("cluster", "run"))
        for cluster, view in self.views.items():
            for waiting in view.queue:
                places.add_metric((cluster, waiting.run), waiting.place)
                passed.add_metric((cluster, waiting.run), waiting.passed)
        yield from (places, passed)
