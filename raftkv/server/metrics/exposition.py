"""The text of /metrics, built in slices (2,000 samples at once would hold the loop for 10 ms).

The format is Prometheus's, as in its library's ``generate_latest``, with two differences that etcd has. A counter's
name is written as given: the library adds ``_total``, which ``etcd_server_health_success`` must not have, so families
of counters are made by hand (``raftkv.histograms``). And whole numbers have no fraction: 1, not 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from raftkv.histograms import counter, gauge, go_float
from raftkv.loop.limiter import SharedText


class Exposition:
    """Answers scrapes.

    Arguments:
        registry: registry of the collectors.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._under_way = 0
        self._done = 0
        self._text = SharedText(self._families)

    async def __call__(self) -> bytes:
        """Return the text of all families, as of this call or later."""
        self._under_way += 1
        try:
            text = await self._text()
            self._done += 1
            return text
        finally:
            self._under_way -= 1

    def _families(self) -> Iterator[str]:
        for family in chain(self._scrapes(), self._registry.collect()):
            if family.samples:
                yield text_of(family)

    def _scrapes(self) -> tuple[Metric, Metric]:
        name, text = "promhttp_metric_handler_requests", "Total number of scrapes by HTTP status code."
        found = {("200",): self._done, ("500",): 0, ("503",): 0}
        return (
            gauge(f"{name}_in_flight", "Current number of scrapes being served.", {(): self._under_way}),
            counter(f"{name}_total", text, found, ["code"]),
        )


def text_of(family: Metric) -> str:
    """Return the text of one family."""
    name = family.name
    if family.type == "counter" and any(sample.name == f"{name}_total" for sample in family.samples):
        name += "_total"
    text = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
    kind = "untyped" if family.type == "unknown" else family.type
    lines = [f"# HELP {name} {text}\n# TYPE {name} {kind}\n"]
    for sample in family.samples:
        value = go_float(sample.value)
        if sample.labels:
            labels = ",".join([f'{label}="{_escaped(given)}"' for label, given in sample.labels.items()])
            lines.append(f"{sample.name}{{{labels}}} {value}\n")
        else:
            lines.append(f"{sample.name} {value}\n")
    return "".join(lines)


def _escaped(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
