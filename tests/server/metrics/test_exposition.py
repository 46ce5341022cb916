"""The text of /metrics: Prometheus's format, in slices."""

from __future__ import annotations

import asyncio
import doctest
import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from raftkv import histograms
from raftkv.histograms import Buckets, counter, doubling, gauge, go_float, histogram_family
from raftkv.server.metrics.exposition import Exposition, text_of


def test_counters_keep_their_names() -> None:
    text = text_of(counter("etcd_server_health_success", "Successes", {(): 2}))
    assert text == "# HELP etcd_server_health_success Successes\n# TYPE etcd_server_health_success counter\n" + (
        "etcd_server_health_success 2\n"
    )
    assert "# TYPE a_total counter\n" in text_of(counter("a_total", "", {(): 0}))


def test_labels_and_help_are_escaped() -> None:
    values = ('quo"te', "back\\slash", "new\nline", "", "plain")
    text = text_of(gauge("a", "one\ntwo \\", {(value,): 1 for value in values}, ["key"]))
    [family] = text_string_to_metric_families(text)
    assert [sample.labels["key"] for sample in family.samples] == list(values)
    assert family.documentation == "one\ntwo \\"


def test_histograms_are_cumulative() -> None:
    buckets = Buckets(doubling(0.001, 3))
    for seconds, times in ((0.0005, 1), (0.001, 1), (0.003, 5), (1.0, 2)):
        buckets.observe(seconds, times)
    text = text_of(histogram_family("work_seconds", "Work", {("PUT",): buckets}, ["op"]))
    [family] = text_string_to_metric_families(text)
    found = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    assert [found["work_seconds_bucket", le] for le in ("0.001", "0.002", "0.004", "+Inf")] == [2, 2, 7, 9]
    assert found["work_seconds_count", None] == buckets.count == 9
    assert abs(found["work_seconds_sum", None] - 2.0165) < 1e-9


def test_numbers_are_written_as_by_go() -> None:
    tried = doctest.testmod(histograms)
    assert (tried.failed, tried.attempted) == (0, 1)
    assert [go_float(value) for value in (math.inf, -math.inf, math.nan)] == ["+Inf", "-Inf", "NaN"]
    values = [sign * 10.0**power * digit for sign in (1, -1) for power in range(-12, 40) for digit in (1, 1.5, 7 / 3)]
    assert [float(go_float(value)) for value in values] == values
    buckets = histogram_family("work", "", {(): Buckets((0.5, 1.0, 10.0))})
    assert [sample.labels["le"] for sample in buckets.samples if "le" in sample.labels] == ["0.5", "1", "10", "+Inf"]


class _Many(Collector):
    """Families so many that their text takes long."""

    def collect(self) -> Iterator[Metric]:
        for number in range(200):
            yield gauge(f"family_{number}", "", {(str(value),): value for value in range(100)}, ["number"])
        yield gauge("empty", "Without a sample", {}, ["number"])


async def test_scrape_does_not_block_other_work() -> None:
    registry, turns, loop = CollectorRegistry(), 0, asyncio.get_running_loop()
    registry.register(_Many())

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    turn()
    text = await Exposition(registry)()
    assert len(list(text_string_to_metric_families(text.decode()))) == 202
    assert turns > 5
    assert b"empty" not in text


async def test_scrapes_are_counted() -> None:
    exposition = Exposition(CollectorRegistry())
    await exposition()
    text = (await exposition()).decode()
    assert 'promhttp_metric_handler_requests_total{code="200"} 1\n' in text
    assert "promhttp_metric_handler_requests_in_flight 1\n" in text


class _Counted(Collector):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def collect(self) -> Iterator[Metric]:
        self.asked += 1
        yield gauge("asked", "", {(): self.asked})


async def test_very_many_scrapes_share_a_text() -> None:
    registry, counted = CollectorRegistry(), _Counted()
    registry.register(counted)
    registry.register(_Many())
    counted.asked = 0
    exposition = Exposition(registry)
    first = asyncio.create_task(exposition())
    while not counted.asked:  # noqa: ASYNC110  turns of the loop and no more: else the first text is done
        await asyncio.sleep(0)
    later = [asyncio.create_task(exposition()) for _ in range(100)]
    await asyncio.sleep(0)
    later[0].cancel()  # whose turn comes first
    texts, asked = ([await first, *await asyncio.gather(*later[1:])], counted.asked)
    assert asked == 2
    assert b"asked 1\n" in texts[0]
    assert all(b"asked 2\n" in text for text in texts[1:]), "as it is after the call, not before"
