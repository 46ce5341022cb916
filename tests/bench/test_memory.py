"""The table of memory, without a process."""

from __future__ import annotations

from bench.memory import table


def test_table_of_memory_shows_both_programs() -> None:
    figures = {"bytes_each": 200.0, "RssAnon": 300.0, "VmHWM": 400.0}
    rows = {"keys": {"etcd": {**figures, "start_s": 2.0}, "raftkv": {**figures, "start_s": 1.0}}}
    assert "| keys | start s | 2.00 | 1.00 | 0.50 |" in table(rows)
    assert "start CPU s" not in table(rows)
