"""All disks are lost; a backup and the archived log give the cluster back, to any revision and time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import raftkv
from raftkv.cli.backup import Place
from tests.cli.runner import run_ctl, run_server, run_utl
from tests.long import long_except
from tests.procs import RAFTKV, Cluster, Member, wait_for

SIZES = {1: "one member", 3: "three members"}


@pytest.fixture(params=long_except(list(SIZES), {1}))
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    flags = ["--wal-archive-dir", str(tmp_path / "archive"), "--wal-archive-timeout", "1s"]
    with Cluster(RAFTKV, request.param, flags) as running:
        yield running


def wait_archived(cluster: Cluster, archive: Path) -> None:
    """Wait until all that is applied now is in closed segments, and those are in the archive."""
    with raftkv.connect(cluster.endpoints) as kv:
        index = max(one.raft_applied_index for one in kv.status())

    def is_archived() -> bool:
        there = {path.name for path in archive.rglob("*.wal")}
        for member in cluster.members:
            *closed, last = sorted(path.name for path in (member.data_dir / "member" / "wal").glob("*.wal"))
            if int(last[17:33], 16) > index and there.issuperset(closed):
                return True
        return False

    wait_for(is_archived, f"entry {index} in the archive")


def write(cluster: Cluster, first: int, last: int) -> int:
    with raftkv.connect(cluster.endpoints) as kv:
        for number in range(first, last):
            kv.put(f"k{number % 7}", str(number))
        return kv.status()[0].revision


def hash_at(cluster: Cluster, revision: int) -> int:
    words = ["endpoint", "hashkv", "--rev", str(revision), "-w", "json", "--endpoints", cluster.endpoints[0]]
    return json.loads(run_ctl(words).output)[0]["HashKV"]["hash"]


def restore(cluster: Cluster, url: str, *words: str) -> None:
    for member in cluster.members:
        own = ["--name", member.name, "--initial-cluster", member.initial_cluster, "--data-dir", str(member.data_dir)]
        peer = ["--initial-advertise-peer-urls", f"http://127.0.0.1:{member.peer_port}"]
        ran = run_server(["backup", "restore", url, *own, *peer, *words])
        assert (ran.code, ran.errors) == (0, "")


def lose(member: Member) -> None:
    member.kill()
    shutil.rmtree(member.data_dir)


@pytest.mark.long
def test_everything_is_lost_and_comes_back_as_it_was(cluster: Cluster, tmp_path: Path) -> None:
    url, archive = str(tmp_path / "backups"), tmp_path / "archive"
    write(cluster, 0, 20)
    assert run_server(["backup", url, "--once", "--endpoints", ",".join(cluster.endpoints)]).code == 0
    middle = write(cluster, 20, 45)
    wait_archived(cluster, archive)
    noon = datetime.now(UTC).isoformat()
    last = write(cluster, 45, 60)
    wait_archived(cluster, archive)
    # Nothing of what the only backup needs goes.
    pruning = ["--prune-wal-archive", str(archive), "--keep", "9", "--endpoints", ",".join(cluster.endpoints)]
    assert run_server(["backup", str(tmp_path / "backups"), "--once", *pruning]).code == 0
    Place(url).remove(Place(url).backups()[-1])
    hashes = {revision: hash_at(cluster, revision) for revision in (middle - 3, middle, last)}
    for member in cluster.members:
        lose(member)
    targets = {("--to-revision", str(middle - 3)): middle - 3, ("--to-time", noon): middle, (): last}
    for words, revision in targets.items():
        for member in cluster.members:
            shutil.rmtree(member.data_dir, ignore_errors=True)
        restore(cluster, url, "--wal-archive-dir", str(archive), *words)
        for member in cluster.members:
            found = json.loads(run_utl(["hashkv", str(member.data_dir), "-w", "json"]).output)
            assert (found["hashRevision"], found["hash"]) == (revision, hashes[revision])
    for member in cluster.members:
        member.start()
    cluster.wait_ready()
    with raftkv.connect(cluster.endpoints) as kv:
        assert kv.get("k3").value == b"59"
        kv.put("after", "1")
    wait_for(lambda: len(list(archive.iterdir())) == 2 * len(cluster.members), "archives beside the old ones")
