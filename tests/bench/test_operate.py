"""What the benchmark of operators' work reports: which figures of two programs miss a bar, and their table."""

from __future__ import annotations

import pytest

from bench import operate
from bench.operate import ROWS, measure
from bench.report import beside, missed

BARS = {"row": ("took s",)}


@pytest.mark.parametrize(
    ("raftkv", "etcd", "problems"),
    [
        ({"took s": 2.0}, {"took s": 2.0}, []),
        ({"took s": 2.1}, {"took s": 2.0}, ["row: took s: 1.05 times etcd's"]),
        ({"other s": 9.0}, {"other s": 1.0}, []),
        ({}, {"took s": 1.0}, []),
    ],
)
def test_bar_is_the_figure_of_etcd(raftkv: dict[str, float], etcd: dict[str, float], problems: list[str]) -> None:
    assert missed({"row": {"raftkv": raftkv, "etcd": etcd}}, BARS) == problems


def test_table_shows_bars_in_bold_and_programs_without_figures() -> None:
    rows = {
        "row": {"raftkv": {"took s": 9.0, "b": 1.0}, "etcd": {"took s": 3.0, "b": 2.0}},
        "fails": {"etcd": {"c": 1}},
    }
    lines = beside(rows, {"b": ("bytes", ".1f")}, BARS).splitlines()[2:]
    assert lines == [
        "| row | took s | 3 | 9 | **3.00** |",
        "| row | bytes | 2.0 | 1.0 | 0.50 |",
        "| fails | c | 1 | - |  |",
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("QUIET_S", "DOWN_S", "SETTLE_S"):
        monkeypatch.setattr(operate, pause, 0.2)
    monkeypatch.setattr(operate, "MISSED_ENTRIES", 11_000)  # just more than the log keeps
    problems: list[str] = []
    found = measure(name, 1, 0.001, problems)
    assert problems == []
    assert all(found[program] for program in ("etcd", "raftkv"))
