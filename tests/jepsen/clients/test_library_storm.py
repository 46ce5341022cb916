"""Retries, watches and locks of the client library while members are killed, paused and cut off (``library``)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from jepsen import runner
from jepsen.db import Settings
from jepsen.runner import Options, run
from tests.jepsen.clients.library import Beside, LibraryClient
from tests.jepsen.test_kill_storm import RATE

STORMS = {"pause-leader,offline-leader": 1, "kill,pause,network": 4}
"""Faults, and how many of them."""


@pytest.mark.long
@pytest.mark.parametrize("nemesis", STORMS)
def test_guarantees_hold_under_faults(nemesis: str, tmp_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runner.WORKLOADS, "library", Beside)
    monkeypatch.setattr(runner, "CLUSTER_CLIENTS", 100)
    options = Options(
        Settings(), "library", nemesis, seed=5, faults=STORMS[nemesis] * (nemesis.count(",") + 1), time_s=None,
        compact_every=150, rate=RATE, runs=tmp_runs, client_class=LibraryClient,
    )  # fmt: skip
    report = asyncio.run(run(options))
    assert report.verdict.lines() == []
    assert report.figures["fenced"]
