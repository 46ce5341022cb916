"""The doctor's look at this machine, at directories and at certificates: nothing is left behind, nothing is changed."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from raftkv.cli import doctor as command
from raftkv.cli.backup import Manifest, name_of
from raftkv.cli.doctor import Finding, Level, check_certificates, check_files
from raftkv.cli.main import main as raftkv
from raftkv.cli.program import CommandError
from raftkv.config import ServerConfig, TLSFiles
from raftkv.pb import raft_pb2
from raftkv.raft.types import Entry, HardState
from raftkv.storage.applied_mark import MARK_NAME, AppliedMark
from raftkv.storage.wal import WAL
from tests.offline.directory import DataDirectory, put


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SYNCS", 5)


def by_subject(found) -> dict[str, tuple[Level, str]]:
    return {one.subject: (one.level, one.figure) for one in found}


def test_a_directory_is_tried_without_a_trace(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    before = os.stat(data).st_mtime_ns
    found = by_subject(command.check_disk(str(data)))
    assert found["data directory"] == (Level.OK, f"{data}, mode 0700")
    assert found["data directory: fdatasync"][1].endswith(" of 5 syncs")
    assert list(data.iterdir()) == []
    assert os.stat(data).st_mtime_ns == before


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.open

    def without(path, flags, *rest, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", without)
    assert len(command.sync_times_ms(tmp_path)) == 5
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_is_mounted_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(command, "_nameless", refused)
    assert command.check_latency("sync", tmp_path) == Finding(
        "sync",
        Level.FAILURE,
        "cannot write there: Read-only file system",
        "no member can start there: the kernel mounts a disk read-only after an error (see dmesg)",
    )


def test_rights_of_a_directory(tmp_path: Path):
    tmp_path.chmod(0o702)
    assert by_subject(command.check_disk(str(tmp_path)))["data directory"][0] == Level.FAILURE
    tmp_path.chmod(0o755)
    assert by_subject(command.check_disk(str(tmp_path)))["data directory"][0] == Level.WARNING
    there = by_subject(command.check_disk(str(tmp_path / "not" / "there")))
    assert there["data directory"][0] == Level.SKIPPED
    assert there["data directory: free space"][1]


def test_a_directory_without_a_member_in_it_is_named(tmp_path: Path):
    tmp_path.chmod(0o700)
    (tmp_path / "member").mkdir()
    level, figure = by_subject(command.check_disk(str(tmp_path)))["data directory: member"]
    assert (level, "\n" in figure) == (Level.FAILURE, False)


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        (found,) = command.check_disk(str(path))
        assert (found.level, found.figure) == (Level.FAILURE, f"{file} is not a directory")


def test_a_damaged_log_is_found_before_the_next_start(tmp_path: Path):
    data = tmp_path / "data"
    snap, log = data / "member" / "snap", data / "member" / "wal"
    snap.mkdir(parents=True)
    (snap / "db").write_bytes(bytes(4096))
    log.mkdir(mode=0o700)
    assert by_subject(command.check_disk(str(data)))["data directory: member"][0] == Level.FAILURE
    log.rmdir()
    wal = WAL.create(str(log), raft_pb2.WALMetadata(cluster_id=1, member_id=2).SerializeToString(), segment_bytes=8192)
    for index in range(1, 9):
        wal.append(HardState(1, 1, index - 1), [Entry(1, index, b"x" * 200)])
        wal.sync()
    running = by_subject(command.check_disk(str(data)))
    wal.close()
    whole = by_subject(command.check_disk(str(data)))
    expected = (Level.OK, "entries 1 to 8 in 8.2 kB, all checksums correct")
    assert running["data directory: log"] == whole["data directory: log"] == expected
    segment = next(log.glob("*.wal"))
    damaged = bytearray(segment.read_bytes())
    damaged[600] ^= 1
    segment.write_bytes(damaged)
    level, figure = by_subject(command.check_disk(str(data)))["data directory: log"]
    assert (level, "\n" in figure) == (Level.FAILURE, False)
    assert figure.startswith(f"write-ahead log {segment} is damaged at offset ")


def test_a_damaged_database_is_found_before_the_next_start(tmp_path: Path):
    directory = DataDirectory(tmp_path / "data")
    directory.write(put(b"key %d" % number, b"needle") for number in range(9))
    running = by_subject(command.check_disk(str(directory.path)))["data directory: database"]
    assert running == (Level.SKIPPED, "the member runs: it checks its database itself")
    directory.close()
    whole = by_subject(command.check_disk(str(directory.path)))["data directory: database"]
    assert whole == (Level.OK, "revision 10, all checksums correct")
    database = directory.snapshots / "db"
    damaged = bytearray(database.read_bytes())
    damaged[damaged.rindex(b"needle")] ^= 1
    database.write_bytes(damaged)
    level, figure = by_subject(command.check_disk(str(directory.path)))["data directory: database"]
    assert (level, figure) == (Level.FAILURE, "record of revision 2.0 is corrupt: its checksum is wrong")


def test_a_log_that_ends_before_its_database_is_found_before_the_next_start(tmp_path: Path):
    """The end of the log was lost, or an older copy of it was put in its place: a start refuses it."""
    directory = DataDirectory(tmp_path / "data")
    directory.write(put(b"key %d" % number, b"v") for number in range(9))
    directory.close()
    log = directory.path / "member" / "wal"
    shutil.rmtree(log)
    wal = WAL.create(str(log), raft_pb2.WALMetadata(cluster_id=1, member_id=2).SerializeToString())
    wal.append(HardState(1, 1, 1), [Entry(1, 1, b"")])
    wal.sync()
    wal.close()
    found = by_subject(command.check_disk(str(directory.path)))["data directory: database"]
    assert found == (Level.FAILURE, "the log ends at 1, but entries up to 10 were applied")


@pytest.mark.parametrize("name", ["snap/applied", "snap/db", "snap/db-lock", "wal/lock"])
def test_a_directory_in_the_place_of_a_file_is_no_reason_to_remove_the_member(tmp_path: Path, name: str):
    directory = DataDirectory(tmp_path / "data").close()
    place = Path(directory.path, "member", name)
    place.unlink(missing_ok=True)
    place.mkdir()
    found = next(one for one in command.check_disk(str(directory.path)) if one.level is Level.FAILURE)
    assert found.subject == "data directory: member"
    assert found.figure == f"{place} is not a file, and raftkv keeps one there: move it elsewhere, then start again"
    assert "remove" not in found.advice


def test_an_applied_mark_beyond_the_log_is_found_before_the_next_start(tmp_path: Path):
    directory = DataDirectory(tmp_path / "data").close()
    mark = AppliedMark(directory.snapshots / MARK_NAME)
    mark.note(7, 1)
    mark.close()
    found = by_subject(command.check_disk(str(directory.path)))["data directory: database"]
    assert found == (Level.FAILURE, "the log ends at 1, but entries up to 7 were applied")


@pytest.mark.parametrize(
    ("mounts", "kind"),
    [
        ("1 0 9:9 / / rw - ext4 /dev/sda rw\n", "ext4"),
        ("1 0 9:9 / / rw - ext4 /dev/sda rw\n2 1 9:8 / {above} rw shared:1 - tmpfs tmpfs rw\n", "tmpfs"),
        ("1 0 9:9 / / rw - ext4 /dev/sda rw\n2 1 9:8 / {above}x rw - nfs4 host rw\n", "ext4"),
        ("", ""),
    ],
)
def test_kinds_of_file_systems(tmp_path: Path, mounts: str, kind: str):
    listed = tmp_path / "mountinfo"
    listed.write_text(mounts.replace("{above}", os.path.realpath(tmp_path)))
    assert command.kind_of(tmp_path, listed) == kind


def test_machines(tmp_path: Path):
    (tmp_path / "proc").mkdir()
    huge = tmp_path / "sys/kernel/mm/transparent_hugepage"
    huge.mkdir(parents=True)
    (huge / "enabled").write_text("[always] madvise never\n")
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 1000000 kB\nMemAvailable: 1000 kB\nSwapTotal: 2000000 kB\nSwapFree: 1000 kB\n"
    )
    found = by_subject(command.check_machine(tmp_path))
    assert [found[name][0] for name in ("memory", "swap", "transparent huge pages")] == [Level.WARNING] * 3
    nothing = by_subject(command.check_machine(tmp_path / "nothing"))
    assert [nothing[name][0] for name in ("memory", "swap", "transparent huge pages")] == [Level.SKIPPED] * 3
    assert nothing["libraries"][0] == Level.OK


def test_clocks_and_files():
    assert command.check_clock(lambda: (0, 1500)).figure == "yes, within 1.5 ms"
    assert command.check_clock(lambda: (5, 0)).level == Level.WARNING
    assert command.check_clock(lambda: (-1, 0)).level == Level.SKIPPED
    assert [command.check_descriptors(hard).level for hard in (-1, 1024, 65536)] == [Level.OK, Level.WARNING, Level.OK]


def test_versions_of_libraries():
    def version_of(name: str) -> str:
        if name == "lmdb":
            raise importlib.metadata.PackageNotFoundError
        return "0.15.0"

    wanted = ["h11<1,>=0.16", "lmdb>=1", "click>=0.15", 'torch>=2; extra == "torch"', "rich"]
    _, libraries = command.check_versions((3, 11), wanted, version_of)
    assert (libraries.level, libraries.figure) == (Level.FAILURE, "h11 0.15.0 is older than 0.16; lmdb is missing")
    assert libraries.advice == "pip install --upgrade h11 lmdb"
    assert command.check_versions((3, 10), [], version_of)[0].level == Level.FAILURE


def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert raftkv(["certs", str(tmp_path / "tls"), "a=10.0.0.1", "--days", "60"]) == 0
    capsys.readouterr()
    folder = tmp_path / "tls" / "members" / "a"
    names = {path.name: str(path) for path in folder.iterdir()}
    files = TLSFiles(names["server.crt"], names["server.key"], trusted_ca_file=names["ca.crt"])
    assert {level for level, _ in by_subject(check_files("x", files, ["10.0.0.1", "localhost"])).values()} == {Level.OK}
    assert by_subject(check_files("x", files, ["10.0.0.2"]))["x: names"][0] == Level.FAILURE
    now = time.time()
    for days, level in ((40, Level.WARNING), (61, Level.FAILURE)):
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda days=days: now + days * 86_400)
            assert by_subject(check_files("x", files))["x: certificate"][0] == level
    os.chmod(names["server.key"], 0o644)
    (private,) = (one for one in check_files("x", files) if one.subject == "x: key")
    assert (private.level, private.advice) == (Level.WARNING, f"chmod 0600 {names['server.key']}")
    (missing,) = check_files("x", TLSFiles("/nowhere", "/nowhere"))
    assert missing.level == Level.FAILURE
    assert check_certificates(ServerConfig()) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    tmp_path.chmod(0o700)
    assert command.main(["--data-dir", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["level"] in ("ok", "warning")
    assert {"subject", "level", "figure", "advice"} == set(report["findings"][0])
    tmp_path.chmod(0o777)
    assert command.main(["--data-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"chmod 0700 {tmp_path}" in printed
    assert "\n1 failure, " in printed
    settings = tmp_path / "raftkv.yml"
    settings.write_text(
        f"data-dir: {tmp_path}/d\nclient-transport-security:\n  cert-file: /no.crt\n  key-file: /no.key\n"
    )
    monkeypatch.setattr(command, "_check_cluster", lambda *given: [])
    assert command.main([f"--config-file={settings}"]) == 1
    assert "/no.crt" in capsys.readouterr().out
    for words in (["--nothing"], ["--config-file=/nowhere"], ["word"]):
        with pytest.raises(CommandError) as raised:
            command.main(words)
        assert raised.value.code == 2
    assert command.main(["--help"]) == 0


def test_backups(tmp_path: Path):
    empty = command._check_backup(str(tmp_path))
    assert (empty.level, empty.figure) == (Level.FAILURE, f"no backup in {tmp_path}")


@pytest.mark.parametrize(
    ("age_s", "level", "figure"),
    [
        (3600, Level.OK, "the last of 1 is 1.0 h old"),
        (3 * 86_400, Level.WARNING, "the last of 1 is 72.0 h old"),
        (-86_400, Level.WARNING, "the last of 1 is dated 24.0 h in the future"),
    ],
)
def test_the_age_of_the_last_backup(age_s: float, level: Level, figure: str, tmp_path: Path):
    taken_s = time.time() - age_s
    one = Manifest(name_of(taken_s, 1), taken_s, 1, -1, 7, 1, 3, "ab", 1, 2, "h:1", taken_s)
    (tmp_path / f"{one.name}.db").write_bytes(b"abc")
    (tmp_path / f"{one.name}.json").write_bytes(one.encode())
    found = command._check_backup(str(tmp_path))
    assert (found.level, found.figure) == (level, figure)
