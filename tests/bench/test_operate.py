"""What the benchmark of operators' work reports, and a small run of every row: no bar of time, CI is busy."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench.operate.__main__ import parse, run
from bench.operate.report import Result, table
from bench.operate.rows import ROWS, Row
from bench.operate.scene import Scene, Sizes
from bench.operate.soak import Verdict


async def _nothing(scene: Scene) -> dict[str, float]:
    return {}


ROW = Row("row", "what is done", _nothing, ("took s",))


def _result(raftkv: list[float], etcd: list[float]) -> Result:
    rounds = {"raftkv": [{"took s": took} for took in raftkv], "etcd": [{"took s": took} for took in etcd]}
    return Result.of(ROW, rounds, {})


def test_the_bar_is_the_median_of_etcd() -> None:
    assert _result([1.0, 9.0, 2.0], [2.0, 1.0, 3.0]).misses == []
    assert _result([2.1], [2.0]).misses == ["took s: 1.05 times etcd's"]


def test_a_row_that_failed_is_missed_and_said_so() -> None:
    result = Result.of(ROW, {"etcd": [{"took s": 1.0}]}, {"raftkv": "it died"})
    assert result.misses == ["raftkv: it died"]
    assert "| row | raftkv: it died | | | |" in table([result], "facts")


def test_figures_without_a_bar_miss_nothing() -> None:
    row = Row("row", "what is done", _nothing, ())
    result = Result.of(row, {"raftkv": [{"took s": 9.0}], "etcd": [{"took s": 1.0}]}, {})
    assert result.misses == []
    assert "| row | took s | 1 | 9 | 9.00 |" in table([result], "facts")


def test_names_of_rows_differ() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_scale_keeps_at_least_something() -> None:
    assert Sizes().scaled(0.0) == Sizes(2, 2, 2, 2)


def test_the_verdict_of_a_soak_can_be_printed() -> None:
    verdict = Verdict(1, 2.0)
    verdict.done["kill"] += 1
    assert json.loads(json.dumps(verdict.as_json()))["done"] == {"kill": 1}


ROWS_OF_SECONDS = ("leader-killed", "compact")
"""The others wait for members to be taken for healthy, and are only run by hand."""


@pytest.mark.long
def test_rows_can_be_run() -> None:
    rows = [word for name in ROWS_OF_SECONDS for word in ("--row", name)]
    options = parse(["--programs", "raftkv", "--scale", "0.001", "--kills", "2", *rows])
    results = asyncio.run(run(options, print))
    for result in results:
        assert not result.problems
        assert result.figures["raftkv"].get("failed puts", 0.0) == 0.0, result
