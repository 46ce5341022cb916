"""The differential test of streams: one program of watches, leases, locks and elections on etcd 3.5.1 and on raftkv.

Prints the counts; on a difference seed, operation and a shrunk program (`stream_programs.py`, which is a command
too). Two runs: over three members of raftkv, and on one.
"""

from __future__ import annotations

import pytest

from tests.compat.differential.stream_programs import EPISODE_OPS, Player
from tests.compat.wire import Wire
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster

SEED = 20_261_121
SHORT = 2
"""Episodes of the run in `make test`: too few for every kind of event to come up."""


@pytest.mark.parametrize(("members", "episodes"), long_except([(3, SHORT), (3, 6), (1, 4)], [(3, SHORT)]))
def test_raftkv_streams_as_etcd_does(members: int, episodes: int) -> None:
    with (
        Cluster(ETCD_FAST) as etcd,
        Cluster(RAFTKV, size=members) as raftkv,
        Wire(etcd.endpoints) as oracle,
        Wire(raftkv.endpoints) as tested,
    ):
        report = Player(oracle, tested, SEED + members).run(episodes)
    print(report.describe())
    assert report.differences == [], report.describe()
    assert report.operations >= episodes * EPISODE_OPS
    if episodes == SHORT:
        return
    # Everything came up, and the streams were alive.
    assert len(report.kinds) == 15
    assert len(report.codes) >= 8
    assert min(report.seen[kind] for kind in ("created", "canceled", "progress", "leader", "turn")) > 0
    assert report.seen["events"] > report.operations // 3
