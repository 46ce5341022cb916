"""Settings and data with which a member refuses to start: one clear line, non-zero status, no traceback."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from tests.procs import ETCD_FAST, Cluster, free_port
from tests.server.process.process import addresses, run_to_end


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        flags = [*addresses(), "--data-dir", str(tmp_path / "data")]
        client = run_to_end(*flags, "--listen-client-urls", url)
        metrics = run_to_end(*flags, "--listen-metrics-urls", url)
        peer = run_to_end(*flags, "--listen-peer-urls", url)
    holder = f"{Path('/proc/self/comm').read_text().strip()} (process {os.getpid()})"
    for ended in (client, metrics, peer):
        assert ended.one_line() == f"raftkv: cannot listen on {url}: Address already in use by {holder}"
    # Nothing is left of it: the ids of this cluster of one would refuse the corrected start of three.
    assert not (tmp_path / "data").exists()


def test_a_data_directory_that_others_may_write(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    directory.chmod(0o777)
    line = run_to_end(*addresses(), "--data-dir", str(directory)).one_line()
    assert line == f"raftkv: directory {directory} has mode 0777: group or others may write to it; use chmod 0700"
    assert list(directory.iterdir()) == []


def test_a_data_directory_that_cannot_be_one(tmp_path: Path) -> None:
    """The tests may run as root, for whom no directory is closed: a file stands in the way instead."""
    file = tmp_path / "file"
    file.write_text("not a directory")
    line = run_to_end(*addresses(), "--data-dir", str(file)).one_line()
    assert line == f"raftkv: {file} is not a directory"
    below = file / "data"
    line = run_to_end(*addresses(), "--data-dir", str(below)).one_line()
    assert line == f"raftkv: {file} is not a directory"
    assert file.read_text() == "not a directory"


def test_a_log_directory_that_cannot_be_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    line = run_to_end(*addresses(), "--data-dir", str(tmp_path / "data"), "--wal-dir", str(file)).one_line()
    assert str(file) in line


@pytest.fixture(scope="module")
def etcd_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What etcd 3.5.1 leaves behind."""
    with Cluster(ETCD_FAST) as cluster:
        return shutil.copytree(cluster.members[0].data_dir, tmp_path_factory.mktemp("etcd") / "data")


@pytest.mark.long
@pytest.mark.parametrize("missing", ["", "member/wal", "member/snap"])
def test_the_data_directory_of_etcd_is_told_by_name(etcd_data: Path, tmp_path: Path, missing: str) -> None:
    directory = shutil.copytree(etcd_data, tmp_path / "data")
    if missing:
        shutil.rmtree(directory / missing)
    before = sorted(directory.rglob("*"))
    assert run_to_end(*addresses(), "--data-dir", str(directory)).one_line() == (
        f"raftkv: {directory} is the data directory of an etcd member, which raftkv cannot read: give raftkv a "
        "--data-dir of its own, and copy the keys with `raftkvctl make-mirror` while both run"
    )
    assert sorted(directory.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "status", "line"),
    [
        (["--colour", "blue"], 2, "raftkv: flag provided but not defined: -colour; see raftkv --help"),
        (["--heartbeat-interval", "soon"], 2, 'invalid value "soon" for flag -heartbeat-interval: parse error'),
        (["--name", "other"], 1, 'raftkv: couldn\'t find local name "other" in the initial cluster configuration'),
        (["--initial-cluster", "default={peer},b={peer}"], 1, "has duplicate url"),
        (["--initial-cluster", "default={peer},default=http://127.0.0.1:1"], 1, "missing from --initial-advertise"),
        (["--initial-cluster", "default=http://127.0.0.1:1"], 1, "missing from --initial-advertise-peer-urls"),
        (["--initial-cluster-state", "existing"], 1, "--initial-cluster names no other member"),
        (["--force-new-cluster"], 1, "raftkv: --force-new-cluster: there is no data of a member in"),
        (["--log-outputs", "/nowhere/log"], 1, "cannot write the log to /nowhere/log: No such file or directory"),
        (["--cert-file", "/nowhere/c", "--key-file", "/nowhere/k"], 1, "cannot use certificate /nowhere/c"),
        (["--audit-log", "/nowhere/log"], 1, "cannot write the audit log to /nowhere/log: No such file or directory"),
        (["--auth-token", "jwt,pub-key=/nowhere/k,sign-method=RS256"], 1, "--auth-token: /nowhere/k: No such file"),
    ],
)
def test_flags(tmp_path: Path, flags: list[str], status: int, line: str) -> None:
    peer = f"http://127.0.0.1:{free_port()}"
    given = [flag.format(peer=peer) for flag in flags]
    secure = ["--listen-client-urls", f"https://127.0.0.1:{free_port()}"] if "--cert-file" in flags else []
    urls = ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    ended = run_to_end(*addresses(), *urls, "--data-dir", str(tmp_path / "data"), "--initial-cluster",
                       f"default={peer}", *secure, *given)  # fmt: skip
    assert line in ended.one_line(status)
    # Nothing is left of it: the ids of these flags would be those of a start with others.
    assert not (tmp_path / "data" / "member").exists()


@pytest.mark.long
def test_joining_through_a_dead_member_names_it_once(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ended = run_to_end("join", url, "--data-dir", str(tmp_path / "data"), "--insecure-peers")
    assert ended.one_line(1) == f"raftkv: join: {url}: connect: connection refused"
