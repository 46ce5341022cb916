"""Random users, roles, requests and watches on etcd 3.5.1 and on raftkv: the same answers, but for the holes of 3.5.1.

The holes are listed in ``auth_requests.HOLES``. A large run, of 20,000 requests and more, is that module as a command.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.compat.differential.auth_requests import HOLES, AuthPlayer
from tests.compat.differential.auth_watches import WatchPlayer
from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, RAFTKV, Cluster

SEED = 20_261_123
SHORT, WATCHED, LONG = 150, 300, 800
CHEAP = ("--bcrypt-cost", "4")


@contextmanager
def both(members: int) -> Iterator[tuple[Wire, Wire]]:
    """Run one member of etcd and some of raftkv."""
    with (
        Cluster(ETCD_FAST.with_flags(*CHEAP)) as etcd,
        Cluster(RAFTKV.with_flags(*CHEAP), size=members) as raftkv,
        Wire(etcd.endpoints) as oracle,
        Wire(raftkv.endpoints) as tested,
    ):
        yield oracle, tested


@pytest.mark.long
@pytest.mark.parametrize(("members", "steps"), [(1, SHORT), (3, LONG)])
def test_users_are_answered_as_by_etcd(members: int, steps: int) -> None:
    with both(members) as (oracle, tested):
        player = AuthPlayer(oracle, tested, SEED + members)
        player.run(steps)
    report = player.report
    print(report.describe())
    assert report.differences == [], report.describe()
    assert report.codes["OK "] > steps // 5
    assert report.codes["PERMISSION_DENIED etcdserver: permission denied"] > steps // 20
    assert report.holes.keys() <= HOLES.keys()
    if steps == LONG:
        assert len(report.holes) > len(HOLES) // 2


@pytest.mark.long
@pytest.mark.parametrize(("members", "steps"), [(1, WATCHED), (3, LONG)])
def test_watches_end_with_their_right_and_lose_nothing_before(members: int, steps: int) -> None:
    with both(members) as (oracle, tested), closing(WatchPlayer(oracle, tested, SEED + members)) as player:
        player.run(steps)
    print(player.report.describe(), dict(player.seen))
    assert player.report.differences == [], player.report.describe()
    assert player.seen.keys() >= {"created", "refused", "ended"}
