"""``run grant``, ``run revoke``: two teams on one cluster, of which one tries all against the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import raftkv
import raftkv.training
from raftkv import errors
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.cli.runs import Pattern, needs
from raftkv.client.rpc import methods
from raftkv.dataset.keys import DatasetKeys
from raftkv.pb import rpc_pb2
from raftkv.training.api import generation
from raftkv.training.records import RunKeys
from tests.cli.runner import run_ctl
from tests.procs import ETCD_FAST, RAFTKV, Cluster

RUN = "job-a1"


@pytest.fixture(scope="module", params=[pytest.param("etcd", marks=pytest.mark.long), "raftkv"])
def teams(request: pytest.FixtureRequest) -> Iterator[str]:
    """A cluster that asks for users; alice has job-a*, bob job-b*, carol may look at job-a*."""
    program = ETCD_FAST if request.param == "etcd" else RAFTKV
    with Cluster(program, flags=("--bcrypt-cost=4",)) as cluster:
        endpoint = cluster.endpoints[0]
        with raftkv.connect(endpoint) as kv:
            for name in ("root", "alice", "bob", "carol"):
                kv.users.add(name, f"{name}-pw")
            kv.users.grant_role("root", "root")
            kv.users.enable_auth()
        for words in (
            "alice job-a* --cluster gpu --dataset images",
            "bob job-b* --cluster gpu",
            "carol job-a* --cluster gpu --read",
        ):
            assert ctl(endpoint, f"run grant {words}").code == 0
        yield endpoint


def ctl(endpoint, words, user="root"):
    return run_ctl(["--endpoints", endpoint, *words.split()], b"", {"ETCDCTL_USER": f"{user}:{user}-pw"})


def connect(endpoint, user):
    return raftkv.connect(endpoint, user=user, password=f"{user}-pw")


def join(endpoint, user, run_id, directory, **options):
    client = {"user": user, "password": f"{user}-pw"}
    return raftkv.training.join(
        run_id, endpoints=endpoint, client=client, min_nodes=1, lease_ttl_s=60, checkpoints=str(directory), **options
    )


@pytest.mark.long
def test_a_whole_run_needs_no_more_than_its_role(teams, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "TTL_S", 60)  # of a leadership
    with join(teams, "alice", RUN, tmp_path, cluster="gpu", host_slots=1) as run:
        assert run.broadcast("config", b"x") == b"x"
        assert run.counter("samples").add(1) == 1
        with run.elect("writer"):
            run.barrier("first")
        with run.checkpoint(1, metrics={"loss": 1.0}) as saving:
            saving.write("model.bin", b"weights")
        with run.resume() as last:
            assert last.read("model.bin") == b"weights"
        with connect(teams, "bob") as bob, connect(teams, "alice") as alice:
            kept = alice.range(RunKeys(RUN).base, prefix=True).items
            assert len(kept) > 2
            hostile(bob, max(item.lease for item in kept))
            assert {item.key for item in alice.range(RunKeys(RUN).base, prefix=True).items} >= {i.key for i in kept}
        # Who may look sees it, and changes nothing.
        assert RUN.encode() in ctl(teams, f"run show {RUN}", "carol").output
        assert ctl(teams, f"checkpoint list {RUN}", "carol").code == 0
        for words in (f"run delete {RUN} --yes --force", f"checkpoint tag {RUN} mine 1"):
            assert "permission denied" in ctl(teams, words, "carol").errors
        # Both share the ledger; neither may read the nodes of the other.
        with join(teams, "bob", "job-b1", tmp_path, cluster="gpu", host_slots=2) as other:
            assert other.world_size == 1
            assert b"2 runs admitted" in ctl(teams, "run queue gpu", "bob").output


def hostile(bob, lease_id):
    """Every way into the keys of alice's run: alone, in intervals that touch them, in txns, by leases, by watches."""
    mine = raftkv.put("/raftkv/train/job-b1/x", b"v")
    for permission in needs(Pattern.of_runs(RUN)):
        key, end = permission.key + b"x", permission.range_end
        intervals = ((key, None), (permission.key, end), (b"/raftkv/", b"/raftkv0"), (b"", b"\0"), (key, b"\0"))
        for first, last in intervals:
            denied(lambda first=first, last=last: bob.range(first or b"\0", last))
            denied(lambda first=first, last=last: bob.count(first or b"\0", last))
            denied(lambda first=first, last=last: bob.delete(first or b"\0", last))
            denied(lambda first=first, last=last: bob.watch(first or b"\0", last))
        denied(lambda key=key: bob.put(key, b"v"))
        for bad in (raftkv.put(key, b"v"), raftkv.get(key), raftkv.delete(key)):
            for then, otherwise in itertools.permutations(([mine], [mine, bad]), 2):
                denied(lambda a=then, b=otherwise: bob.txn().then(*a).otherwise(*b).commit())
        denied(lambda key=key: bob.txn().when(bob.version(key) == 0).then(mine).commit())
    denied(lambda: bob.revoke(lease_id))
    denied(lambda: bob.put("/raftkv/train/job-b1/x", b"v", lease=lease_id))
    denied(lambda: bob.roles.grant("run:job-b*", "readwrite", "", prefix=True))
    denied(lambda: bob.users.grant_role("bob", "run:job-a*"))
    denied(lambda: bob.users.change_password("alice", "x"))
    denied(bob.users.disable_auth)
    denied(bob.users.list)


def denied(action):
    with pytest.raises(errors.PermissionDeniedError):
        action()


def test_shared_prefixes_of_teams_are_named(teams):
    with connect(teams, "root") as root:
        base = DatasetKeys("images").base
        root.put(f"{base}head", b"1")
    with connect(teams, "alice") as alice, connect(teams, "bob") as bob:
        assert alice.get(f"{base}head").value == b"1"
        denied(lambda: alice.put(f"{base}head", b"2"))
        denied(lambda: bob.get(f"{base}head"))
        bob.put("/raftkv/train-cluster/gpu/x", b"")  # the ledger is for all who share the cluster
        denied(lambda: bob.put("/raftkv/train-cluster/other/x", b""))


def test_a_grant_is_put_right_and_taken_back(teams):
    with connect(teams, "root") as root:
        root.users.add("dora", "dora-pw")
        root.roles.add("run:own-1")
        root.roles.grant("run:own-1", "read", "", prefix=True)  # added by hand
    for _ in range(2):
        assert ctl(teams, "run grant dora own-1").code == 0
    with connect(teams, "dora") as dora:
        dora.put("/raftkv/train/own-1/x", b"")
        denied(lambda: dora.get("/raftkv/train/own-12/x"))
        for base in (prefix for run_id in ("own-1", "own-1/a") for prefix in RegistryKeys(run_id).prefixes):
            dora.put(f"{base}x", b"")
        for base in RegistryKeys("own-12").prefixes:
            denied(lambda base=base: dora.get(f"{base}x"))
        denied(lambda: dora.get("anything"))
        for _ in range(2):
            assert ctl(teams, "run revoke dora own-1").code == 0
        denied(lambda: dora.put("/raftkv/train/own-1/x", b""))
    with connect(teams, "root") as root:
        assert "run:own-1" not in root.roles.list()
    assert "user name not found" in ctl(teams, "run grant nobody own-1").errors


@pytest.mark.parametrize("words", ["run grant alice", "run grant alice a*b", "run grant alice /x"])
def test_wrong_words_are_refused_before_anything_is_asked(words):
    ran = run_ctl(["--endpoints", "127.0.0.1:1", *words.split()])
    assert ran.code == 128


def test_a_right_that_is_taken_ends_a_watch_and_a_new_one_is_refused(teams):
    """raftkv ends the watch; etcd 3.5.1 lets a watch go on that was once allowed, which is its own."""
    with connect(teams, "root") as root:
        is_raftkv = raftkv_serves(root)
        root.users.add("eve", "eve-pw")
    ctl(teams, "run grant eve eve-*")
    with connect(teams, "eve") as eve, eve.watch("/raftkv/train/eve-1/", prefix=True) as watch:
        eve.put("/raftkv/train/eve-1/a", b"1")
        assert next(iter(watch)).value == b"1"
        ctl(teams, "run revoke eve eve-*")
        if is_raftkv:
            with pytest.raises(errors.PermissionDeniedError):
                next(iter(watch))
        denied(lambda: eve.watch("/raftkv/train/eve-1/", prefix=True))


def raftkv_serves(kv) -> bool:
    (status,) = kv.status()
    return status.version != "3.5.1"


async def test_tokens_of_a_restarted_member_are_renewed_under_a_watch(teams):
    """The password is changed under a client, as a restart would do to its token: it goes on without a gap."""
    settings = {"user": "alice", "password": "alice-pw"}
    async with (
        raftkv.aio.connect(teams, **settings) as kv,
        raftkv.aio.connect(teams, user="root", password="root-pw") as root,
    ):
        key = f"/raftkv/train/{RUN}/sync/9/x"
        async with kv.watch(key) as watch, kv.lease(ttl=5) as lease:
            for number in range(3):
                await kv.put(key, str(number), lease=lease)
                await root.users.change_password("alice", "alice-pw")
            assert [(await anext(watch)).value for _ in range(3)] == [b"0", b"1", b"2"]
            request = rpc_pb2.LeaseTimeToLiveRequest(ID=lease.id)
            assert (await kv.scope.call(methods.LEASE_TIME_TO_LIVE, request)).TTL > 0
