"""Other people's clients as users, on raftkv and on real etcd 3.5.1: the same observations."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import raftkv
from raftkv import errors
from raftkv.client.library import connect
from raftkv.client.rpc.transport import tls_context
from tests.cli.runner import run_ctl
from tests.foreign.sessions import play
from tests.foreign.test_foreign import TESTDATA, USERS, write_down
from tests.procs import ETCD_FAST, RAFTKV, Cluster
from tests.rpc.loop import run_async
from tests.secure import secured
from tests.server.tls.room import Room

PLAIN = ("aetcd", "etcd_client")
"""Clients without TLS."""
FAST = ("--bcrypt-cost=4",)
Clusters = tuple[Cluster, Cluster]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    """Certificates: of the server, of the user alice, and of a client that is no user."""
    room = Room(tmp_path_factory.mktemp("certificates"))
    for name in ("server", "alice", "nobody"):
        room.issue(name)
    return room


async def ask_for_users(endpoint: str, room: Room | None) -> None:
    """Make root and alice, who has the keys from ``a`` to ``z``."""
    tls = None
    if room is not None:
        endpoint = f"https://{endpoint}"
        tls = tls_context(room.path("ca.crt"), room.path("nobody.crt"), room.path("nobody.key"))
    async with connect(endpoint, tls=tls, user="") as kv:
        for name in ("root", "alice"):
            await kv.users.add(name, f"{name}-pw")
        await kv.users.grant_role("root", "root")
        await kv.roles.add("own")
        await kv.roles.grant("own", "readwrite", "a", "z")
        await kv.users.grant_role("alice", "own")
        await kv.users.enable_auth()


@pytest.fixture(scope="module")
def plain() -> Iterator[Clusters]:
    with Cluster(ETCD_FAST, flags=FAST) as etcd, Cluster(RAFTKV, flags=FAST) as raftkv:
        for cluster in (etcd, raftkv):
            run_async(ask_for_users(cluster.endpoints[0], None))
        yield etcd, raftkv


@pytest.fixture(scope="module")
def with_tls(room: Room) -> Iterator[Clusters]:
    files = {"cert-file": "server.crt", "key-file": "server.key", "trusted-ca-file": "ca.crt"}
    flags = [f"--{kind}{flag}={room.path(name)}" for flag, name in files.items() for kind in ("", "peer-")]
    flags += ["--client-cert-auth", "--peer-client-cert-auth", *FAST]
    with secured(Cluster(ETCD_FAST, flags=flags)) as etcd, secured(Cluster(RAFTKV, flags=flags)) as raftkv:
        for cluster in (etcd, raftkv):
            run_async(ask_for_users(cluster.endpoints[0], room))
        yield etcd, raftkv


@pytest.mark.long
@pytest.mark.parametrize("script", USERS, ids=lambda script: script.name)
def test_a_foreign_client_with_users_sees_no_difference(script, room, request, monkeypatch, rewrite):
    clusters: Clusters = request.getfixturevalue("plain" if script.environment in PLAIN else "with_tls")
    monkeypatch.setenv("FOREIGN_CERTS", str(Path(room.path("ca.crt")).parent))
    with ThreadPoolExecutor(max_workers=2) as pool:
        etcd, raftkv = pool.map(lambda one: write_down(play(script, one, one.endpoints)), clusters)
    golden = TESTDATA / f"{script.name}.txt"
    if rewrite:
        assert "RAISED" not in etcd, etcd
        golden.write_text(etcd, encoding="utf-8")
    assert etcd == golden.read_text(encoding="utf-8"), "real etcd tells something else than expected"
    assert raftkv == etcd, f"raftkv differs from etcd\n{clusters[1].logs()}"


def test_raftkvs_own_clients_are_whom_their_certificate_names(with_tls: Clusters, room: Room) -> None:
    """On both servers; a token, if there is one, counts before the certificate."""
    files = {"ca_file": room.path("ca.crt"), "cert_file": room.path("alice.crt"), "key_file": room.path("alice.key")}
    for cluster in with_tls:
        endpoint = f"https://{cluster.endpoints[0]}"
        with raftkv.connect(endpoint, user="", **files) as kv:
            kv.put("own", "1")
            with pytest.raises(errors.PermissionDeniedError):
                kv.get("~others")
            with pytest.raises(errors.PermissionDeniedError):
                kv.users.list()
            assert kv.users.get("alice") == ["own"]
        with raftkv.connect(endpoint, user="root", password="root-pw", **files) as kv:
            assert kv.users.list() == ["alice", "root"]
        words = [
            f"--{flag}={files[f'{name}_file']}" for flag, name in (("cacert", "ca"), ("cert", "cert"), ("key", "key"))
        ]
        at = ["--endpoints", endpoint, *words]
        assert run_ctl([*at, "get", "own"]).output == b"own\n1\n"
        assert run_ctl([*at, "get", "~others"]).errors == "Error: etcdserver: permission denied\n"
