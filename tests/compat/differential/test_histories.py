"""Long histories, watched from anywhere after compactions, beside etcd 3.5.1 (``histories``)."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.compat.differential.histories import HistoryPlayer
from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, RAFTKV, Cluster

SEED, ROUNDS = 20_261_133, 6


@pytest.mark.long
def test_watches_get_the_same_history() -> None:
    with (
        Cluster(ETCD_FAST) as etcd,
        Cluster(RAFTKV, size=3) as raftkv,
        Wire(etcd.endpoints) as oracle,
        Wire(raftkv.endpoints) as tested,
        closing(HistoryPlayer(oracle, tested, SEED)) as player,
    ):
        player.run(ROUNDS)
    print(player.report.describe())
    assert player.report.differences == [], player.report.describe()
    assert player.report.events > 0
    assert player.report.seen.keys() >= {"OK", "NOT_FOUND", "FAILED_PRECONDITION", "INVALID_ARGUMENT"}
    assert player.report.seen["fragments"] > 0
    assert player.report.seen["compacted"] > 0
