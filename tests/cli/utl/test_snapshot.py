"""snapshot status and restore, of both programs: etcd's output, and every bad input as one line and etcd's code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from raftkv.cli.server_options import read_options
from raftkv.storage.wal import WAL
from tests.cli.runner import Ran, run_ctl, run_utl
from tests.offline.etcd.files import file_of, make_database, saved


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    with closing(make_database(tmp_path / "source")) as backend:
        path.write_bytes(saved(backend))
    return path


def said(*words: object) -> str:
    ran = run_utl([str(word) for word in words])
    assert (ran.code, ran.errors) == (0, "")
    return ran.output.decode()


def test_status_in_each_format(tmp_path: Path, file: Path) -> None:
    fields = json.loads(said("snapshot", "status", file, "-w", "json"))
    assert (fields["revision"], fields["totalKey"], fields["version"]) == (9, 5, "3.7.0")
    assert fields["totalSize"] == file.stat().st_size - 32
    text = f"{fields['hash']:x}"
    assert said("snapshot", "status", file) == f"{text}, 9, 5, 1.5 MB, 3.7.0\n"
    assert f"| {text} |        9 |" in said("snapshot", "status", file, "-w", "table")
    assert said("snapshot", "status", file, "-w", "fields").startswith(f'"Hash" : {fields["hash"]}\n"Revision" : 9\n')


def test_status_refuses_what_restore_would(file: Path) -> None:
    """One bit of a value: the tree is sound, and only the hash behind it tells. The member that gave it may be gone."""
    data = bytearray(file.read_bytes())
    data[data.index(b"x" * 1_000) + 500] ^= 1
    file.write_bytes(data)
    ran = run_utl(["snapshot", "status", str(file)])
    assert (ran.code, ran.output, ran.errors.count("\n")) == (1, b"", 1)
    assert ran.errors.startswith(f"Error: {file} was changed or damaged since it was saved: expected sha256 [")
    file.write_bytes(data[:-32])
    assert run_utl(["snapshot", "status", str(file)]).code == 0


BOTH = pytest.mark.parametrize("run", [run_utl, run_ctl])
"""The two programs that have these commands."""


@BOTH
def test_restore_says_what_it_made(tmp_path: Path, file: Path, run: Callable[[Sequence[str]], Ran]) -> None:
    ran = run(["snapshot", "restore", str(file), "--data-dir", str(tmp_path / "data")])
    assert (ran.code, ran.output) == (0, b"")
    assert f"restored {file} to {tmp_path}/data: member 8e9e05c52164694d of cluster" in ran.errors
    assert "users and roles are kept, and users are asked for" in ran.errors
    assert WAL.exists(str(tmp_path / "data" / "member" / "wal"))


def test_a_directory_may_have_a_name_that_is_not_utf_8(tmp_path: Path, file: Path) -> None:
    """LMDB's binding takes no such text: restore, and a member with such a --data-dir, ended with a traceback."""
    made = tmp_path / os.fsdecode(b"d\xff")
    assert run_utl(["snapshot", "restore", str(file), "--data-dir", str(made)]).code == 0
    assert said("hashkv", made) == said("hashkv", file)
    said("defrag", "--data-dir", made)


@pytest.mark.parametrize("wal_dir", ["data/member/wal", "data/log/of/it", "./data/../data/log", "apart"])
def test_the_log_may_be_inside_the_data_directory(tmp_path, monkeypatch, file, wal_dir):
    """The log took its place first, and the directory with everything else then found its own taken."""
    monkeypatch.chdir(tmp_path)
    ran = run_utl(["snapshot", "restore", str(file), "--data-dir", "data", "--wal-dir", wal_dir])
    assert ran.code == 0, ran.errors
    assert WAL.exists(wal_dir)
    assert run_utl(["hashkv", "data"]).code == 0
    assert list(tmp_path.glob("**/*restoring*")) == []


@pytest.mark.parametrize("name", [[], ["--name", "b", "--initial-cluster", "b=http://localhost:2380"]])
def test_a_member_finds_what_is_restored(tmp_path, monkeypatch, file, name):
    """Both without --data-dir: if one looked elsewhere, the member would start with nothing."""
    monkeypatch.chdir(tmp_path)
    assert run_utl(["snapshot", "restore", str(file), *name]).code == 0
    member = read_options(name, {}).config
    assert WAL.exists(str(tmp_path / member.data_dir / "member" / "wal"))


@BOTH
@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ("status", 128, "snapshot status requires exactly one argument"),
        ("status none", 1, "stat none: no such file or directory"),
        ("status full", 1, "full is a directory, not a snapshot file"),
        ("restore full", 1, "full is a directory, not a snapshot file"),
        ("status pipe", 1, "pipe is a pipe or a device, not a snapshot file"),
        ("restore pipe", 1, "pipe is a pipe or a device, not a snapshot file"),
        ("status foreign", 1, "foreign is not a sound database of etcd: invalid database"),
        (
            "status short",
            1,
            "short is not a sound database of etcd: 1504 bytes are too short for 4 pages of 4096 bytes",
        ),
        ("status sound -w protobuf", 4, "protobuf not supported as output format"),
        ("status sound -w xml", 4, "unsupported output format"),
        ("restore", 128, "snapshot restore requires exactly one argument"),
        ("restore a b", 128, "snapshot restore requires exactly one argument"),
        ("restore sound --bump-revision 5", 128, "--mark-compacted required if --revision-bump > 0"),
        ("restore sound --mark-compacted", 128, "--mark-compacted required if --revision-bump > 0"),
        ("restore none", 1, "stat none: no such file or directory"),
        ("restore foreign", 1, "snapshot missing hash but --skip-hash-check=false"),
        ("restore foreign --skip-hash-check", 1, "foreign is not a sound database of etcd: invalid database"),
        ("restore sound --data-dir full", 1, 'data-dir "full" not empty or could not be read'),
        ("restore sound --wal-dir full", 1, 'wal-dir "full" exists'),
        (
            "restore sound --data-dir new --wal-dir new",
            1,
            'wal-dir "new" is data-dir, or holds it: the log needs a directory of its own',
        ),
        (
            "restore sound --data-dir new/member --wal-dir ./new",
            1,
            'wal-dir "new" is data-dir, or holds it: the log needs a directory of its own',
        ),
        ("restore sound --name x", 1, 'couldn\'t find local name "x" in the initial cluster configuration'),
        ("restore sound --initial-advertise-peer-urls x", 1, "URL scheme must be http, https, unix, or unixs: x"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, words, code, reason, run):
    monkeypatch.chdir(tmp_path)
    data = file_of({b"key": {}})
    (tmp_path / "sound").write_bytes(data)
    (tmp_path / "short").write_bytes(data[:1504])
    (tmp_path / "foreign").write_bytes(b"PK\x03\x04" * 1_000)
    (tmp_path / "full").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "full" / "x").touch()
    before = sorted(tmp_path.rglob("*"))
    ran = run(["snapshot", *words.split()])
    assert (ran.code, ran.output, ran.errors) == (code, b"", f"Error: {reason}\n")
    assert sorted(tmp_path.rglob("*")) == before
