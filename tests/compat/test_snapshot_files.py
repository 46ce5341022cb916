"""Snapshot files between etcd 3.5 (3.5.1, and 3.5.30 where it is) and raftkv, both ways: users are not locked in.

    etcd --etcdctl save--> FILE 1 --raftkvutl restore--> raftkv --raftkvctl save--> FILE 2 --etcdutl restore--> etcd

Every key, revision, version, lease, user and the compacted revision must be the same at every stage, as clients see
them and byte for byte in the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from raftkv import connect
from raftkv.client.local import initial_cluster
from raftkv.offline.etcd.file import opened, snapshot_status
from raftkv.pb import rpc_pb2
from tests.cli.runner import run_ctl, run_utl
from tests.compat.ctl import debian_etcdctl
from tests.compat.store import compact, delete, get, put, txn
from tests.compat.wire import Wire
from tests.foreign import debian
from tests.procs import ETCD_FAST, ETCD_NEWER, RAFTKV, Cluster, Program, find_tool, wait_for

PASSWORD = "secret"
LEASE_IDS, TTL_S = (1_000_001, 1_000_002), 7_200
KEYS = int(os.environ.get("RAFTKV_TEST_KEYS", "400"))
"""``RAFTKV_TEST_KEYS=100000 pytest --all`` takes two minutes."""

BUCKETS = (b"key", b"lease", b"alarm", b"auth", b"authUsers", b"authRoles")
"""Those that must be the same in all files."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes longer than the two and five seconds of etcdctl."""
    monkeypatch.setenv("ETCDCTL_DIAL_TIMEOUT", "90s")
    monkeypatch.setenv("ETCDCTL_COMMAND_TIMEOUT", "90s")


def run(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fill(endpoint: str) -> None:
    """Puts, overwrites, deletions, keys that come back, leases, large values, a compaction in the middle of it."""
    with Wire([endpoint]) as wire:
        for lease_id in LEASE_IDS:
            wire.call("etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=TTL_S))
        wire.call("etcdserverpb.KV/Put", put(b"large", b"\xff" * 1_400_000))
        wire.call("etcdserverpb.KV/Put", put(b"k" * 30_000, b"of a long name", lease=LEASE_IDS[1]))
        with connect(endpoint) as kv:
            kv.put_many((f"key/{number:06}", b"first %d" % number) for number in range(KEYS))
            kv.put_many((f"key/{number:06}", b"second") for number in range(0, KEYS, 3))
        wire.call("etcdserverpb.KV/DeleteRange", delete(b"key/000010", b"key/000050"))
        wire.call(
            "etcdserverpb.KV/Txn", txn(then=[put(b"key/000011", b"back"), put(b"key/000012"), delete(b"key/000013")])
        )
        now = wire.call("etcdserverpb.KV/Put", put(b"leased", b"v", lease=LEASE_IDS[0])).revision
        wire.call("etcdserverpb.KV/Compact", compact(now - KEYS // 10, physical=True))
        with connect(endpoint) as kv:
            kv.put_many((f"key/{number:06}", b"third") for number in range(0, KEYS, 7))
        wire.call("etcdserverpb.KV/DeleteRange", delete(b"key/000100", b"key/000110"))


def add_users(endpoint: str) -> None:
    ctl = [find_tool("etcdctl"), "--endpoints", endpoint]
    for words in (
        f"user add root:{PASSWORD}", f"user add joe:{PASSWORD}", "role add some",
        "role grant-permission some readwrite a z", "user grant-role joe some", "user grant-role root root",
        "auth enable",
    ):  # fmt: skip
        run(*ctl, *words.split())


def check_users(endpoint: str) -> None:
    """Users log in with the passwords that they had, and may do what they might."""
    ctl = [find_tool("etcdctl"), "--endpoints", endpoint]
    assert run(*ctl, "--user", f"root:{PASSWORD}", "user", "list") == "joe\nroot\n"
    assert run(*ctl, "--user", f"joe:{PASSWORD}", "get", "leased", "--print-value-only") == "v\n"
    for words, reason in (
        ([f"joe:{PASSWORD}", "get", "z"], "etcdserver: permission denied"),
        (["joe:other", "get", "leased"], "etcdserver: authentication failed, invalid user ID or password"),
    ):
        refused = subprocess.run([*ctl, "--user", *words], capture_output=True, text=True, check=False)
        assert refused.returncode != 0
        assert reason in refused.stderr
    anonymous = subprocess.run([*ctl, "get", "leased"], capture_output=True, text=True, check=False)
    assert "etcdserver: user name is empty" in anonymous.stderr


def observed(endpoint: str, user: str = "", *, is_etcd: bool = False) -> dict[str, Any]:
    """What clients see, as a user perhaps: the present, old revisions, history as events, leases with their keys."""
    ctl = [find_tool("etcdctl"), "--endpoints", endpoint, *(["--user", user] if user else [])]
    present = json.loads(run(*ctl, "get", "", "--prefix", "-w", "json"))
    newest = present["header"]["revision"]
    seen: dict[str, Any] = {"present": present["kvs"], "revision": newest}
    refusal = subprocess.run([*ctl, "get", "leased", "--rev", "2"], capture_output=True, text=True, check=False)
    seen["compacted"] = refusal.stderr.strip().splitlines()[-1]
    for back in (1, KEYS // 20):
        answer = json.loads(run(*ctl, "get", "key/", "--prefix", f"--rev={newest - back}", "-w", "json"))
        seen[f"{back} before"] = answer["kvs"]
    seen["leases"] = sorted(run(*ctl, "lease", "list").splitlines())
    for lease_id in LEASE_IDS:
        info = json.loads(run(*ctl, "lease", "timetolive", f"{lease_id:x}", "--keys", "-w", "json"))
        assert TTL_S - 600 < info["ttl"] <= TTL_S
        seen[f"lease {lease_id}"] = info["granted-ttl"], info["keys"]
    if not user or not is_etcd:
        with connect(endpoint, **({"user": "root", "password": PASSWORD} if user else {})) as kv:
            events = kv.watch("key/", prefix=True, start_revision=newest - KEYS // 20)
            first = [next(events) for _ in range(20)]
            seen["events"] = [(event.type, event.key, event.value, event.revision) for event in first]
    return seen


def contents(path: Path) -> dict[bytes, dict[bytes, bytes]]:
    with opened(path) as file:
        return {bucket: dict(file.items(bucket)) for bucket in BUCKETS}


def compacted_in(path: Path) -> bytes:
    with opened(path) as file:
        return dict(file.items(b"meta"))[b"scheduledCompactRev"]


def restored(path: Path, program: Program, size: int, *flags: str) -> Cluster:
    """A cluster whose members have their data from a file, not started yet."""
    cluster = Cluster(program, size)
    for member in cluster.members:
        words = [
            "snapshot", "restore", str(path), "--data-dir", str(member.data_dir), "--name", member.name,
            "--initial-cluster", initial_cluster(cluster.members), "--initial-cluster-token", member.token,
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{member.peer_port}", *flags,
        ]  # fmt: skip
        if program is RAFTKV:
            ran = run_utl(words)
            assert ran.code == 0, ran.errors
        else:
            run(etcdutl_of(program), *words)
    return cluster


def etcdutl_of(program: Program) -> str:
    """The etcdutl that belongs to a server of etcd."""
    return find_tool("etcdutl") if program is ETCD_FAST else (debian.newer_etcd("etcdutl") or "")


ETCDS = [one for one in (ETCD_FAST, ETCD_NEWER) if one is not None]


def check_status(path: Path) -> None:
    """All tools say the same of a file: its hash, revision and size. What they count as keys differs by version."""
    ours = json.loads(run_utl(["snapshot", "status", str(path), "-w", "json"]).output)
    for program in (*map(etcdutl_of, ETCDS), debian_etcdctl()):
        theirs = json.loads(run(program, "snapshot", "status", path, "-w", "json"))
        for name in ("hash", "revision", "totalSize"):
            assert theirs[name] == ours[name]


def round_trip(tmp_path: Path) -> dict[str, float]:
    """The whole way, from etcd to etcd; returns seconds by step."""
    first, second, took = tmp_path / "first", tmp_path / "second", dict[str, float]()

    def timed(step: str, started: float) -> None:
        took[step] = round(time.monotonic() - started, 2)

    with Cluster(ETCD_FAST) as etcd:
        fill(etcd.endpoints[0])
        expected = observed(etcd.endpoints[0])
        add_users(etcd.endpoints[0])
        run(
            find_tool("etcdctl"),
            "--endpoints",
            etcd.endpoints[0],
            "--user",
            f"root:{PASSWORD}",
            "snapshot",
            "save",
            first,
        )
    check_status(first)
    started = time.monotonic()
    snapshot_status(first)
    timed("status", started)
    started = time.monotonic()
    raftkv = restored(first, RAFTKV, 3)
    timed("restore of three members", started)
    with raftkv:
        for endpoint in raftkv.endpoints:
            assert observed(endpoint, f"root:{PASSWORD}") == expected
        check_users(raftkv.endpoints[0])
        started = time.monotonic()
        words = ["--endpoints", raftkv.endpoints[1], "--user", f"root:{PASSWORD}", "snapshot", "save", str(second)]
        ran = run_ctl(words)
        timed("save", started)
        assert (ran.code, ran.output.decode()) == (0, f"Snapshot saved at {second}\nServer version 3.7.0\n"), ran.errors
    check_status(second)
    assert contents(second) == contents(first)
    assert compacted_in(second) == compacted_in(first)
    with restored(second, ETCD_FAST, 1) as etcd:
        assert observed(etcd.endpoints[0], f"root:{PASSWORD}", is_etcd=True) == {
            name: value for name, value in expected.items() if name != "events"
        }
        check_users(etcd.endpoints[0])
        # Writes go on where the history ended, and the database stands a defragmentation.
        ctl = [find_tool("etcdctl"), "--endpoints", etcd.endpoints[0], "--user", f"root:{PASSWORD}"]
        put_answer = json.loads(run(*ctl, "put", "new", "1", "-w", "json"))
        assert put_answer["header"]["revision"] == expected["revision"] + 1
        run(*ctl, "defrag")
        assert run(*ctl, "get", "new", "--print-value-only") == "1\n"
        assert run(*ctl, "user", "list") == "joe\nroot\n"
    return took


@pytest.mark.long
def test_from_etcd_to_raftkv_and_back(tmp_path: Path) -> None:
    took = round_trip(tmp_path)
    print(f"{KEYS} keys with history: {took}")


@pytest.mark.long
@pytest.mark.parametrize("oracle", ETCDS, ids=lambda program: program.name)
def test_from_raftkv_to_etcd_and_back(tmp_path: Path, oracle: Program) -> None:
    """The other way: what was written here is the same there, and here again after the revision was bumped."""
    first, second, bumped = tmp_path / "first", tmp_path / "second", 1_000_000
    with Cluster(RAFTKV, 3) as raftkv:
        fill(raftkv.endpoints[0])
        expected = observed(raftkv.endpoints[0])
        # By the tools of others, each of which checks what it gets.
        run(find_tool("etcdctl"), "--endpoints", raftkv.endpoints[0], "snapshot", "save", first)
        assert observed(raftkv.endpoints[2]) == expected

        def is_same() -> bool:
            run(debian_etcdctl(), "--endpoints", raftkv.endpoints[2], "snapshot", "save", second)
            return contents(second) == contents(first)

        # Each member carries the compaction out in its own time.
        wait_for(is_same, "the compaction of another member")
    check_status(first)
    check_status(second)
    with restored(first, oracle, 1) as etcd:
        assert observed(etcd.endpoints[0]) == expected
        assert run_ctl(["--endpoints", etcd.endpoints[0], "snapshot", "save", str(second)]).code == 0
    # A server of etcd that starts writes the revision of its users, of which there are none.
    assert contents(second) == contents(first) | {b"auth": {b"authRevision": bytes(7) + b"\x01"}}
    with (
        restored(second, RAFTKV, 1, "--bump-revision", str(bumped), "--mark-compacted") as raftkv,
        Wire(raftkv.endpoints) as wire,
    ):
        answer = wire.call("etcdserverpb.KV/Range", get(b"leased"))
        assert answer.revision == expected["revision"] + bumped
        old = wire.call("etcdserverpb.KV/Range", get(b"leased", revision=expected["revision"]))
        assert old.text == "etcdserver: mvcc: required revision has been compacted"
        assert wire.call("etcdserverpb.KV/Put", put(b"new")).revision == expected["revision"] + bumped + 1
        everything = wire.call("etcdserverpb.KV/Range", get(b"\0", b"\0", count_only=True))
        assert everything.message.count == len(expected["present"]) + 1


@pytest.mark.long
def test_debians_etcdctl_restores_a_file_of_raftkv(tmp_path: Path) -> None:
    """etcd 3.4 does not know all that is in the file, and takes it all the same."""
    path = tmp_path / "file"
    with Cluster(RAFTKV) as raftkv:
        fill(raftkv.endpoints[0])
        run(find_tool("etcdctl"), "--endpoints", raftkv.endpoints[0], "snapshot", "save", path)
    run(debian_etcdctl(), "snapshot", "restore", path, "--data-dir", tmp_path / "data")
    with opened(tmp_path / "data" / "member" / "snap" / "db") as file:
        assert dict(file.items(b"key")) == contents(path)[b"key"]
