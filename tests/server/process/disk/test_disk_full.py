"""A full disk: writes that grow the store are refused, reads and deletes continue, and the member recovers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftkv.pb import rpc_pb2
from raftkv.replica.snapshots.files import DISK_RESERVE_BYTES
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, Program, wait_for
from tests.server.process.process import (
    COMPACT,
    DELETE,
    NO_SPACE,
    alarms_of,
    disarm_all,
    hash_of,
    log_of,
    must_put,
    put,
    value_of,
)

NO_PORTS = (
    *("--listen-client-urls", "http://127.0.0.1:0", "--advertise-client-urls", "http://127.0.0.1:1"),
    *("--listen-peer-urls", "http://127.0.0.1:0"),
)
MOUNT_THEN_RUN = 'mkdir -m 700 "$PWD/disk" && mount -t tmpfs -o {},mode=700 none "$PWD/disk" && exec "$@"'


def _on_a_small_disk(program: Program, limits: str = "size=200m") -> Program:
    namespaces = ("-m",) if os.geteuid() == 0 else ("-Urm",)
    mount_then_run = MOUNT_THEN_RUN.format(limits)
    return Program(program.name, ("unshare", *namespaces, "sh", "-c", mount_then_run, "sh", *program.command))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One member, its data directory on the small disk."""
    with Cluster(_on_a_small_disk(RAFTKV), flags=["--data-dir", "disk/data"]) as cluster:
        yield cluster


def _disk(cluster: Cluster) -> Path:
    """The small disk, seen through the member's own eyes."""
    process = cluster.members[0].process
    assert process is not None
    path = Path(f"/proc/{process.pid}/root{cluster.directory}/disk")
    assert (path / "data" / "member").is_dir()
    return path


def _free_bytes(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def _fill(ballast: Path, leave_bytes: int = 0) -> None:
    """Write until no more than that is free: to the last page if 0."""
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        chunk = bytes(1 << 20)
        while _free_bytes(ballast) > leave_bytes:
            file.write(chunk)
    assert _free_bytes(ballast) <= leave_bytes


@pytest.mark.long
def test_first_start_on_a_full_disk_gives_the_reason(tmp_path: Path) -> None:
    filled = Program("a", ("sh", "-c", 'head -c 4096 /dev/zero > disk/ballast && exec "$@"', "sh", *RAFTKV.command))
    command = (*_on_a_small_disk(filled, "size=4k").command, "--data-dir", "disk/data", *NO_PORTS)
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 1, ended.stderr
    line = ended.stderr.splitlines()[-1]  # the log may tell of slow turns before
    assert line.startswith("raftkv: no room in the database disk/data/member/snap/db")
    assert line.endswith("No space left on device; free disk space, then start the member again")


@pytest.mark.long
def test_a_full_disk(cluster: Cluster) -> None:
    disk = _disk(cluster)
    ballast = disk / "ballast"
    with Wire(cluster.endpoints) as wire:
        for number in range(20):
            must_put(wire, f"a{number}", bytes(1000))
        # Refused while there is still room: for the log, and for the deletes that make more of it.
        _fill(ballast, DISK_RESERVE_BYTES - (10 << 20))
        wait_for(lambda: put(wire, "b").code != "OK", "a refusal")
        assert _free_bytes(disk) > 30 << 20
        _fill(ballast)
        wait_for(lambda: bool(alarms_of(wire)), "the alarm")
        refused = put(wire, "b", bytes(1000))
        assert (refused.code, refused.text) == NO_SPACE
        # Reads, deletes and compactions go on, though the database has no room to commit them now.
        assert value_of(wire, "a19") == bytes(1000)
        for number in range(10):
            deleted = wire.call(DELETE, rpc_pb2.DeleteRangeRequest(key=f"a{number}".encode()))
            assert deleted.message.deleted == 1
        assert value_of(wire, "a0") is None
        assert wire.call(COMPACT, rpc_pb2.CompactionRequest(revision=deleted.revision)).code == "OK"
        # With the ballast gone, only the alarm is in the way; it stays until it is disarmed.
        ballast.unlink()
        assert put(wire, "b").text == NO_SPACE[1]
        assert [name for _, name in alarms_of(wire)] == ["NOSPACE"]
        disarm_all(wire)
        revision = must_put(wire, "b", b"1")
        assert value_of(wire, "b") == b"1"
        assert alarms_of(wire) == []
        # A hash waits for the database: the commits that found no room have been made by then.
        assert hash_of(wire, 0, revision)
    log = log_of(cluster.members[0])
    assert "Traceback" not in log
    assert log.count("raising the NOSPACE alarm") == 1, "once, however often the database finds no room"


@pytest.mark.long
def test_a_disk_without_room_for_one_more_file() -> None:
    """All inodes are used: there is no next segment of the log, which is no reason to stop."""
    program = _on_a_small_disk(RAFTKV, "size=600m,nr_inodes=40")
    with Cluster(program, flags=["--data-dir", "disk/data"]) as cluster, Wire(cluster.endpoints) as wire:
        ballast = _disk(cluster) / "ballast"
        ballast.mkdir()
        with contextlib.suppress(OSError):
            for number in range(40):
                (ballast / str(number)).touch()
        for number in range(40):
            if put(wire, f"k{number}", bytes(1 << 20)).code != "OK":
                break
        wait_for(lambda: bool(alarms_of(wire)), "the alarm")
        assert put(wire, "k").text == NO_SPACE[1]
        shutil.rmtree(ballast)
        disarm_all(wire)
        must_put(wire, "k", b"1")
        log = log_of(cluster.members[0])
        assert "Traceback" not in log
        assert log.count("no room for one more file, of the write-ahead log, at ") == 1


@pytest.mark.long
def test_a_log_without_room_ends_the_member_with_one_line() -> None:
    """Deletions are taken on a full disk until the segment of the log is used up."""
    with (
        Cluster(_on_a_small_disk(RAFTKV), flags=["--data-dir", "disk/data"]) as cluster,
        Wire(cluster.endpoints) as wire,
    ):
        must_put(wire, "a", b"1")
        _fill(_disk(cluster) / "ballast")
        process = cluster.members[0].process
        assert process is not None
        for number in range(200):
            if process.poll() is not None:
                break
            wire.call(DELETE, rpc_pb2.DeleteRangeRequest(key=bytes(1_400_000) + str(number).encode()))
        wait_for(lambda: process.poll() is not None, "the end of the member")
        assert process.returncode == 1
        log = log_of(cluster.members[0])
        assert "Traceback" not in log
        assert re.search(
            r"raftkv: stopped: no room for \d+ bytes of write-ahead log at .*; free disk space, then start the", log
        )


SMALL_MAP = "import sys; from raftkv.replica.node import bootstrap; bootstrap.MAP_MIN_BYTES = 2 << 20; "
RUN = "sys.argv[0] = 'raftkv'; from raftkv.cli.main import main; sys.exit(main())"


@pytest.mark.long
def test_a_full_map_on_a_disk_with_room_fails_no_write() -> None:
    """Without a quota the database outgrows any map that was reserved for it."""
    program = Program("raftkv", (sys.executable, "-c", SMALL_MAP + RUN))
    with Cluster(program, flags=["--quota-backend-bytes", "-1"]) as cluster, Wire(cluster.endpoints) as wire:
        for number in range(30):
            revision = must_put(wire, f"k{number}", bytes(1 << 20))
        assert hash_of(wire, 0, revision), "everything is committed to the database"
        assert alarms_of(wire) == []
        deleted = wire.call(DELETE, rpc_pb2.DeleteRangeRequest(key=b"k", range_end=b"l"))
        assert deleted.message.deleted == 30
        assert wire.call(COMPACT, rpc_pb2.CompactionRequest(revision=deleted.revision, physical=True)).code == "OK"
        cluster.members[0].kill()
        cluster.members[0].restart()
        assert value_of(wire, "k7") is None
        must_put(wire, "k", bytes(1 << 20))
        assert alarms_of(wire) == []
