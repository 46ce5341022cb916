"""The large table beside etcd: each of its rows can be measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.compare import ROWS, run_round
from tests.procs import RAFTKV


@pytest.mark.long
def test_every_row_is_measured() -> None:
    rows = [*ROWS[:2], *(replace(row, processes=1) for row in ROWS[2:])]  # a process of the generator: 0.3 s
    found = run_round(RAFTKV, rows, 0.002)
    assert list(found) == [row.name for row in ROWS]
    for name, summary in found.items():
        assert not summary["errors"], name
        assert min(summary[key] for key in ("rate", "units", "generator_us", "p50_ms")) > 0, name
