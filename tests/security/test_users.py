"""The table of attacks of users on each other, against raftkv and against etcd 3.5.1."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, RAFTKV, Cluster, Program
from tests.security import users
from tests.security.attack import FALLS, Attack, Stage


def _stage(program: Program, *flags: str) -> Iterator[Stage]:
    with Cluster(program, flags=flags) as cluster, Wire(cluster.endpoints) as wire:
        yield Stage(cluster, wire, users.make_users(wire))


@pytest.fixture(scope="module")
def raftkv() -> Iterator[Stage]:
    yield from _stage(RAFTKV, "--auth-min-password-length=8", "--bcrypt-cost=4")


@pytest.fixture(scope="module")
def etcd() -> Iterator[Stage]:
    yield from _stage(ETCD_FAST)


@pytest.mark.parametrize("attack", users.ATTACKS, ids=lambda one: one.id)
def test_raftkv_resists(raftkv: Stage, attack: Attack) -> None:
    assert not attack.run(raftkv), attack.what
    assert raftkv.cluster.members[0].is_running(), "the member has stopped"


@pytest.mark.long
def test_etcd(etcd: Stage) -> None:
    """One test, since an attack that etcd falls for leaves rights behind that a later one would have."""
    assert [(one.what, one.run(etcd)) for one in users.ATTACKS] == [
        (one.what, one.etcd == FALLS) for one in users.ATTACKS
    ]
