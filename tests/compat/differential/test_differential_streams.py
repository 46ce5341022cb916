"""The differential test of streams: one program of watches, leases, locks and elections on etcd 3.5.1 and on raftkv."""

from __future__ import annotations

import pytest

from tests.compat.differential.stream_programs import EPISODE_OPS, Player
from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, ETCD_NEWER, RAFTKV, Cluster, Program

SEED = 20_261_121
SHORT = 1
"""Episodes of the run in `make test`: too few for every kind of event to come up."""


LENGTHS = [(ETCD_FAST, 3, SHORT), (ETCD_FAST, 3, 4), *([] if ETCD_NEWER is None else [(ETCD_NEWER, 1, SHORT)])]


@pytest.mark.long
@pytest.mark.parametrize(("program", "members", "episodes"), LENGTHS)
def test_raftkv_streams_as_etcd_does(program: Program, members: int, episodes: int) -> None:
    with (
        Cluster(program) as etcd,
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
