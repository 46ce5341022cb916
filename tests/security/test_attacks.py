"""The table of attacks, against raftkv, which resists, and against etcd 3.5.1, which shows that the attacks work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, RAFTKV, Cluster, Program, free_port
from tests.security import surface
from tests.security.attack import FALLS, RESISTS, Attack, Stage
from tests.security.certificates import Files, make


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("certificates"))


def _stage(program: Program, files: Files) -> Iterator[Stage]:
    """A member that serves in clear on one client port, and with TLS on another."""
    cluster = Cluster(program)
    (member,) = cluster.members
    tls_port = free_port()
    member.flags += [
        f"--listen-client-urls=http://{member.endpoint},https://127.0.0.1:{tls_port}",
        f"--cert-file={files('member.crt')}",
        f"--key-file={files('member.key')}",
    ]
    with cluster, Wire(cluster.endpoints) as wire:
        yield Stage(cluster, wire, {}, f"127.0.0.1:{tls_port}")


@pytest.fixture(scope="module")
def raftkv(files: Files) -> Iterator[Stage]:
    yield from _stage(RAFTKV, files)


@pytest.fixture(scope="module")
def one_etcd(files: Files) -> Iterator[Stage]:
    yield from _stage(ETCD_FAST, files)


@pytest.fixture
def etcd(one_etcd: Stage) -> Stage:
    """The etcd, started again if the attack before has ended it."""
    (member,) = one_etcd.cluster.members
    if not member.is_running():
        member.restart()
    return one_etcd


def _rows(attacks: tuple[Attack, ...]) -> list[object]:
    return [pytest.param(attack, id=attack.id, marks=[pytest.mark.long] if attack.slow else []) for attack in attacks]


@pytest.mark.parametrize("attack", _rows(surface.ATTACKS))
def test_raftkv_resists(raftkv: Stage, attack: Attack) -> None:
    assert not attack.run(raftkv), attack.what
    assert raftkv.cluster.members[0].is_running(), "the member has stopped"


@pytest.mark.long
@pytest.mark.parametrize(
    "attack", [one for one in surface.ATTACKS if one.etcd in (FALLS, RESISTS)], ids=lambda one: one.id
)
def test_etcd(etcd: Stage, attack: Attack) -> None:
    assert attack.run(etcd) == (attack.etcd == FALLS), attack.what
