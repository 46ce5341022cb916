"""The load of Kubernetes: a small run of every row on both programs, and the table."""

from __future__ import annotations

import pytest

from bench.kubernetes import SHOWN, Measured, Sizes, run, table

SIZES = Sizes(nodes=3, pods=250, watches=120, seconds=0.5)


def test_figures_are_those_of_a_unit() -> None:
    figures = Measured([0.001] * 200, seconds=2.0, units=200).figures(cpu_s=0.1)
    assert figures == pytest.approx({"rate": 100.0, "p50_ms": 1.0, "p99_ms": 1.0, "cpu_us": 500.0}, rel=0.01)
    row = {name: {**figures, "p99_ms": 1.0 if name == "etcd" else 2.0} for name in ("etcd", "raftkv")}
    assert f"| renew | {SHOWN['p99_ms'][0]} | 1.0 | 2.0 | 2.00 |" in table({"renew": row}, SIZES, 1)


@pytest.mark.long
def test_every_row_is_measured() -> None:
    found = run(1, SIZES)
    assert list(found) == ["renew", "renew-max", "list", "watch", "memory"]
    for row, programs in found.items():
        assert set(programs) == {"etcd", "raftkv"}
        for figures in programs.values():
            assert all(value > 0 for name, value in figures.items() if name != "cpu_us"), row
