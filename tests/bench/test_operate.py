"""What the benchmark of operators' work reports, and a small run of every row: no bar of time, CI is busy."""

from __future__ import annotations

from bench.operate.report import Result, table
from bench.operate.rows import ROWS, Row
from bench.operate.scene import Scene, Sizes


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
    assert "| row | raftkv: it died |" in table([result], "facts")


def test_figures_without_a_bar_miss_nothing() -> None:
    row = Row("row", "what is done", _nothing, ())
    result = Result.of(row, {"raftkv": [{"took s": 9.0}], "etcd": [{"took s": 1.0}]}, {})
    assert result.misses == []
    assert "| row | took s | 1 | 9 | 9.00 |" in table([result], "facts")


def test_names_of_rows_differ() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_scale_keeps_at_least_something() -> None:
    assert Sizes().scaled(0.0) == Sizes(2, 2, 2)
