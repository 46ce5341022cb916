"""The differential test: the same seeded KV requests on etcd 3.5.1 and on raftkv, every answer compared.

Prints the counts; on a difference seed, step, request, both answers and a shrunk history (see `requests.py`, which is
also a command: `python -m tests.compat.differential.requests --help`). Long runs: on three members, on one beside etcd
3.5.30, and on members that are killed (`kill -9`) and restarted every 60 requests. A short one is part of `make test`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compat.differential.requests import Player, Report
from tests.compat.wire import Wire
from tests.long import long_except
from tests.procs import ETCD_FAST, ETCD_NEWER, RAFTKV, Cluster, Program

SEED = 20_261_121
STEPS_ON_THREE_MEMBERS = 1_000
STEPS_IN_SHORT = 150
STEPS_WITH_KILLS = 360
STEPS_BEFORE_HASH = 500


def _check(report: Report, steps: int) -> None:
    print(report.describe())
    assert report.differences == [], report.describe()
    assert report.steps >= steps
    assert report.codes["OK"] > steps // 2  # most requests are valid, so that the stores get deep


LENGTHS = [
    (ETCD_FAST, 3, STEPS_IN_SHORT),
    (ETCD_FAST, 3, STEPS_ON_THREE_MEMBERS),
    *([] if ETCD_NEWER is None else [(ETCD_NEWER, 1, STEPS_IN_SHORT)]),
]


@pytest.mark.parametrize(("program", "members", "steps"), long_except(LENGTHS, LENGTHS[:1]))
def test_raftkv_answers_as_etcd_does(program: Program, members: int, steps: int) -> None:
    with (
        Cluster(program) as etcd,
        Cluster(RAFTKV, size=members) as raftkv,
        Wire(etcd.endpoints) as oracle,
        Wire(raftkv.endpoints) as tested,
    ):
        player = Player(oracle, tested, SEED + members)
        player.run(steps)
        hashes = player.hashes_of_one_history(min(steps, STEPS_BEFORE_HASH))
    _check(player.report, steps)
    assert len(player.report.codes) >= (6 if steps == STEPS_IN_SHORT else 9)  # of ten kinds of answers
    assert len(set(hashes)) == 1, f"HashKV of etcd, then of each member: {hashes}"


def _kills(cluster: Cluster) -> Callable[[], None]:
    """Return what kills the next member in turn, restarts it and waits for all."""
    killed = 0

    def trouble() -> None:
        nonlocal killed
        member = cluster.members[killed % len(cluster.members)]
        killed += 1
        member.kill()
        member.restart()
        cluster.wait_ready()

    return trouble


@pytest.mark.long
def test_kills_change_no_answer() -> None:
    with (
        Cluster(ETCD_FAST) as etcd,
        Cluster(RAFTKV, size=3) as raftkv,
        Wire(etcd.endpoints) as oracle,
        Wire(raftkv.endpoints) as tested,
    ):
        player = Player(oracle, tested, SEED + 13, trouble=_kills(raftkv), trouble_every=60)
        player.run(STEPS_WITH_KILLS)
    _check(player.report, STEPS_WITH_KILLS)
