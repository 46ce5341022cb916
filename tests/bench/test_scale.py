"""The played cost of front processes, and the table of memory: no process is started."""

from __future__ import annotations

import pytest

from bench.cores import Costs, Play, report
from bench.memory import table

COSTS = Costs(framing_us=20.0, core_us=20.0, crossing_us=2.0, turn_us=10.0)


def test_today_a_member_is_as_fast_as_one_core_however_many_there_are() -> None:
    rates = [Play(COSTS, fronts=0, cores=cores).run() for cores in (1, 4)]
    assert rates[0] == rates[1]
    assert rates[0] == pytest.approx(1e6 / 40, rel=0.05)


def test_fronts_gain_nothing_on_one_core_and_leave_the_core_process_as_the_limit_on_four() -> None:
    assert Play(COSTS, fronts=2, cores=1).run() < 1e6 / 40
    assert Play(COSTS, fronts=2, cores=4).run() == pytest.approx(1e6 / 22, rel=0.1)
    assert Play(COSTS, fronts=1, cores=4).run() == pytest.approx(1e6 / 22, rel=0.1)


def test_tables_show_both_programs() -> None:
    assert "| 4 |" in report({"read_us": 20.0, "put_us": 60.0, "crossing_10_us": 2.0}, 20.0)
    figures = {"bytes_each": 200.0, "RssAnon": 300.0, "VmHWM": 400.0}
    rows = {"keys": {"etcd": {**figures, "start_s": 2.0}, "raftkv": {**figures, "start_s": 1.0}}}
    assert "| keys | start s | 2.00 | 1.00 | 0.50 |" in table(rows)
    assert "start CPU s" not in table(rows)
