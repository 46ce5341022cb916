"""hashkv, defrag, migrate and wal of raftkvutl: what they print, and every bad input as one line and etcdutl's code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import google_crc32c
import pytest

from raftkv.apply.wire import Kind
from raftkv.offline.directory import held
from raftkv.pb import rpc_pb2
from raftkv.storage.hash import KVHash, hash_kv
from tests.cli.runner import Ran, run_ctl, run_utl
from tests.cli.test_programs import run
from tests.offline.directory import DataDirectory, put
from tests.offline.etcd.files import saved
from tests.offline.history import History
from tests.procs import RAFTKV, Cluster


@pytest.fixture
def member(tmp_path: Path) -> DataDirectory:
    made = DataDirectory(tmp_path / "m")
    made.write(put(b"k%d" % i, b"v" * 50) for i in range(100))
    made.hash = hash_kv(made.backend.begin_read, 101).hash
    return made.close()


def said(*words: object) -> str:
    ran = run_utl([str(word) for word in words])
    assert (ran.code, ran.errors) == (0, "")
    return ran.output.decode()


def test_hashkv_is_that_of_the_store(member: DataDirectory) -> None:
    assert said("hashkv", member.path) == f"{member.hash}, 101, -1\n"
    assert said("hashkv", member.snapshots / "db") == f"{member.hash}, 101, -1\n"
    assert json.loads(said("hashkv", member.path, "--rev=101", "-w", "json"))["hash"] == member.hash
    assert json.loads(said("hashkv", member.path, "--rev=50", "-w", "json"))["hash"] != member.hash
    for file in (member.path, member.snapshots / "db"):
        assert said("hashkv", file, "--rev=-2") == f"{google_crc32c.value(b'key')}, -2, -1\n"


@pytest.mark.parametrize("seed", [4, 5])
def test_hashkv_of_a_snapshot_file_is_that_of_its_database(seed: int, tmp_path: Path) -> None:
    history = History(seed, tmp_path, 200)
    history.store.commit()
    (tmp_path / "file.db").write_bytes(saved(history.backend))
    jobs: list[Callable[[], KVHash]] = []
    for revision in (0, history.store.revision - 3):
        history.store.hash_kv(revision, jobs.append)
        found = jobs[-1]()
        words = ["hashkv", tmp_path / "file.db", "--rev", revision]
        assert said(*words) == f"{found.hash}, {found.revision}, {found.compact_revision}\n"
    history.close()


@pytest.mark.parametrize("run", [run_utl, run_ctl])
def test_defrag_keeps_what_is_there(member: DataDirectory, run: Callable[[Sequence[str]], Ran]) -> None:
    assert run(["defrag", "--data-dir", str(member.path)]) == Ran(0, b"", "")
    assert said("hashkv", member.path) == f"{member.hash}, 101, -1\n"
    assert [path.name for path in member.snapshots.iterdir() if path.suffix == ".tmp"] == []


def test_defrag_by_root_leaves_the_database_to_its_owner(
    member: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that runs as another user could not open its database afterwards (etcd issue 12522)."""
    owner, given = (member.snapshots / "db").stat(), list[tuple[object, ...]]()
    monkeypatch.setattr(os, "geteuid", lambda: owner.st_uid + 1)
    monkeypatch.setattr(os, "chown", lambda *arguments: given.append(arguments))
    said("defrag", "--data-dir", member.path)
    assert given == [(member.snapshots / "db.tmp", owner.st_uid, owner.st_gid)]


def test_migrate_knows_one_version(member: DataDirectory) -> None:
    ran = run_utl(["migrate", "--data-dir", str(member.path), "--target-version", "3.7"])
    assert (ran.code, ran.errors) == (0, "storage version up-to-date: 3.7\n")


def test_dump_has_every_record_and_what_entries_ask_for(member: DataDirectory) -> None:
    text = said("wal", "dump", member.path)
    assert text.count("segment ") == len(member.segments) > 1
    assert 'entry 1/2 NORMAL 65 bytes: PUT id=2 key: "k0" value: "vvv' in text
    rows = [
        json.loads(line) for line in said("wal", "dump", member.path, "--json", "--start=3", "--end=5").splitlines()
    ]
    entries = [row for row in rows if row["record"] == "entry"]
    assert [(row["index"], row["kind"]) for row in entries] == [(3, "PUT"), (4, "PUT")]
    assert entries[0]["body"]["key"] == "azE="
    assert {"segment", "head", "metadata", "marker", "frame", "hardState", "tail"} <= {row["record"] for row in rows}


def test_dump_shows_a_txn_of_single_keys(tmp_path: Path) -> None:
    """Show a txn that is executed in a form which is no message."""
    operation = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"a", value=b"b"))
    made = DataDirectory(tmp_path / "m")
    made.write([(Kind.TXN, rpc_pb2.TxnRequest(success=[operation]).SerializeToString())])
    path = made.close().path
    assert 'TXN id=2 success { request_put { key: "a" value: "b" } }' in said("wal", "dump", path)
    rows = map(json.loads, said("wal", "dump", path, "--json").splitlines())
    (body,) = (row["body"] for row in rows if row["record"] == "entry" and row["kind"] == "TXN")
    assert body == {"success": [{"Request": {"request_put": {"key": "YQ==", "value": "Yg=="}}}]}


def test_verify_says_what_the_log_is(member: DataDirectory) -> None:
    row = json.loads(said("wal", "verify", member.path, "-w", "json"))
    assert (row["clusterId"], row["memberId"], row["firstIndex"], row["lastIndex"]) == (7, 8, 1, 101)
    assert (row["segments"], row["commit"], row["torn"]) == (len(member.segments), 101, "")


def test_verify_finds_one_flipped_bit_and_says_where(member: DataDirectory) -> None:
    path = member.segments[1]
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)
    ran = run_utl(["wal", "verify", str(member.path)])
    assert (ran.code, ran.output) == (1, b"")
    assert re.fullmatch(rf"Error: write-ahead log {path} is damaged at offset 1\d+: .*\n", ran.errors)


def test_verify_tells_of_a_torn_end_and_leaves_it(member: DataDirectory) -> None:
    path = member.segments[-1]
    data = bytearray(path.read_bytes())
    end = len(bytes(data).rstrip(b"\0"))
    data[end - 20 : end] = bytes(20)
    path.write_bytes(data)
    assert "torn" not in said("wal", "verify", member.path, "-w", "simple").split(", ")[-1]
    assert json.loads(said("wal", "verify", member.path, "-w", "json"))["torn"]
    assert path.read_bytes() == data


def test_verify_finds_a_missing_segment(member: DataDirectory) -> None:
    member.segments[1].unlink()
    ran = run_utl(["wal", "verify", str(member.path)])
    assert (ran.code, ran.errors.count("\n")) == (1, 1)
    assert "missing" in ran.errors


COMMANDS = ["hashkv {}", "defrag --data-dir {}", "migrate --data-dir {} --target-version 3.6", "wal verify {}",
            "wal dump {}"]  # fmt: skip


def refused(command: str, path: Path) -> str:
    ran: Ran = run_utl(command.format(path).split())
    assert (ran.code, ran.output, ran.errors.count("\n")) == (1, b"", 1), ran
    assert ran.errors.startswith("Error: ")
    return ran.errors


@pytest.mark.parametrize("command", COMMANDS)
class TestBadInput:
    def test_missing(self, command: str, tmp_path: Path) -> None:
        assert "no such file or directory" in refused(command, tmp_path / "nothing")
        assert list(tmp_path.iterdir()) == []

    def test_not_a_data_directory(self, command: str, tmp_path: Path) -> None:
        refused(command, tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_another_file(self, command: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("something else " * 1000)
        refused(command, tmp_path / "file")

    @pytest.mark.parametrize("place", ["", "member/snap/db"])
    def test_pipes_in_the_place_of_files(self, command: str, place: str, member: DataDirectory) -> None:
        """Each of them waited for a writer."""
        for path in (member.snapshots / "db", *member.segments):
            path.unlink()
            os.mkfifo(path)
        refused(command, member.path / place)

    def test_of_etcd(self, command: str, tmp_path: Path) -> None:
        (tmp_path / "member" / "wal").mkdir(parents=True)
        (tmp_path / "member" / "snap").mkdir()
        (tmp_path / "member" / "snap" / "db").write_bytes(bytes(16) + b"\xed\xda\x0c\xed" + bytes(4076))
        (tmp_path / "member" / "wal" / "0-0.wal").write_bytes(bytes(8) + b"\x08\x04" + bytes(100))
        assert "etcd member" in refused(command, tmp_path)


@pytest.mark.parametrize("command", COMMANDS[:3])
@pytest.mark.parametrize("cut_bytes", [100, 4096, 9000])
def test_a_database_cut_short(command: str, cut_bytes: int, member: DataDirectory) -> None:
    database = member.snapshots / "db"
    database.write_bytes(database.read_bytes()[:cut_bytes])
    refused(command, member.path)


def test_a_database_of_a_later_format(member: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftkv.offline.database.STORAGE_VERSIONS", {2: "3.7"})
    assert "has format 1, and this program reads 2" in refused("hashkv {}", member.path)


def test_a_log_in_another_order(member: DataDirectory) -> None:
    shutil.copy(member.segments[0], member.segments[1])
    assert "its head says that it is" in refused("wal verify {}", member.path)
    ran = run_utl(["wal", "dump", str(member.path)])
    assert (ran.code, ran.errors.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("hashkv", 1, "accepts 1 arg(s), received 0"),
        ("hashkv a b", 1, "accepts 1 arg(s), received 2"),
        ("hashkv {} --rev 102", 1, "mvcc: required revision is a future revision"),
        ("hashkv {} -w yaml", 4, "unsupported output format"),
        ("hashkv {} -w protobuf", 4, "protobuf not supported as output format"),
        ("defrag", 1, 'required flag(s) "data-dir" not set'),
        ("migrate --force", 1, 'required flag(s) "data-dir", "target-version" not set'),
        ("migrate --data-dir {} --target-version 3", 128, 'wrong target version format, expected "X.Y", got "3"'),
        ("migrate --data-dir {} --target-version 3.x", 128,
         "failed to parse target version: 3.x.0 is not in dotted-tri format"),
        ("migrate --data-dir {} --target-version 3.4", 128, 'target version "3.4" not supported. Minimal "3.5"'),
        ("wal dump", 1, "accepts 1 arg(s), received 0"),
    ],
)  # fmt: skip
def test_bad_words(words: str, code: int, line: str, member: DataDirectory) -> None:
    ran = run_utl(words.format(member.path).split())
    assert (ran.code, ran.output, ran.errors) == (code, b"", f"Error: {line}\n")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV) as running:
        yield running


@pytest.mark.long
def test_a_running_member_is_left_alone(cluster: Cluster) -> None:
    (endpoint,), path = cluster.endpoints, cluster.members[0].data_dir
    assert run_ctl(["put", "a", "b", "--endpoints", endpoint]).code == 0
    for words in ("hashkv {}", "defrag --data-dir {}", "migrate --data-dir {} --target-version 3.6"):
        done = run("raftkvutl", *words.format(path).split())
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "is in use by a running member" in done.stderr
    assert run("raftkvutl", "wal", "verify", str(path)).returncode == 0
    assert 'key: "a" value: "b"' in run("raftkvutl", "wal", "dump", str(path)).stdout
    assert run_ctl(["get", "a", "--endpoints", endpoint]).output == b"a\nb\n"


def test_a_log_that_grows_while_it_is_read_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look meets a frame half written, as beside a running member; the next one does not."""
    running = DataDirectory(tmp_path / "m")
    running.write(put(b"k%d" % i) for i in range(10))
    path = running.segments[-1]
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))
    looks = iter([whole[: end - 60] + b"\x01" * 60 + whole[end:], whole])

    def read(self: object, fd: int, size: int, offset: int) -> bytes:
        return next(looks)

    monkeypatch.setattr("raftkv.storage.wal.disk.RealDisk.read", read)
    said("wal", "verify", running.path)
    monkeypatch.undo()
    running.close()


def test_a_start_during_a_change_waits_where_the_log_lies_elsewhere(member: DataDirectory, tmp_path: Path) -> None:
    """A supervisor may start the member again meanwhile: it would go on in a file that has no name any more."""
    shutil.move(member.path / "member" / "wal", tmp_path / "log")
    as_lmdb = (
        "import fcntl, sys\nwith open(sys.argv[1], 'r+b') as file: fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)"
    )

    def may_open() -> bool:
        command = [sys.executable, "-c", as_lmdb, f"{member.snapshots}/db-lock"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    with held(str(member.path)):
        assert not may_open()
    assert may_open()
    said("defrag", "--data-dir", member.path)
