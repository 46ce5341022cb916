"""The simulated unreliable disk: which writes of a program a power loss may undo, and which it must keep."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jepsen.faults.power import NAMES, OPENS, SHORT, SYNCS, WRITES, Loss, LyingDisk

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None and "CI" not in os.environ, reason="needs Debian's gcc")

BEGIN = """
import ctypes, mmap, os, signal, sys
from raftkv.storage.wal.disk import KernelSync
def new(name, flags=0):
    return os.open(name, os.O_RDWR | os.O_CREAT | flags, 0o600)
def settle():
    here = os.open(".", os.O_RDONLY)
    os.fsync(here)
"""
DIE = "\nos.kill(os.getpid(), signal.SIGKILL)\n"
A, B = b"a" * 512, b"b" * 512
NOTHING, ALL = Loss(), Loss(1.0, 1.0, True)


def play(tmp_path: Path, program: str, loss: Loss | None = NOTHING, seed: int = 1, **faults: int) -> Path:
    """Run a program on the disk, lose power after its end, and return the folder of its files."""
    root = tmp_path / "data"
    root.mkdir(parents=True)
    disk = LyingDisk(tmp_path / "disk", root)
    disk.set(**faults)  # type: ignore[arg-type]
    text = BEGIN + "A, B = b'a' * 512, b'b' * 512\n" + textwrap.dedent(program) + DIE
    environment = {**os.environ, **disk.environment(), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", text], cwd=root, env=environment, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr.decode()
    disk.lose_power(random.Random(seed), loss)
    return root


SYNCED = {
    "fdatasync": "fd = new('f'); os.pwrite(fd, A, 0); os.fdatasync(fd); settle()",
    "fsync": "fd = new('f'); os.write(fd, A); os.fsync(fd); settle()",
    "O_DSYNC": "fd = new('f', os.O_DSYNC); os.write(fd, A); settle()",
    "RWF_DSYNC": "fd = new('f'); os.pwritev(fd, [A], 0, os.RWF_DSYNC); settle()",
    "the kernel": "fd = new('f'); os.writev(fd, [A]); k = KernelSync.open(); k.start(fd); k.finish(); settle()",
}


@pytest.mark.parametrize("name", SYNCED)
def test_only_synced_data_survives_power_loss(tmp_path: Path, name: str) -> None:
    unsynced = "\nfd = new('f'); os.pwrite(fd, B, 0); os.pwritev(fd, [B, B], 512); new('g'); os.rename('f', 'h')"
    root = play(tmp_path, SYNCED[name] + unsynced)
    assert {path.name: path.read_bytes() for path in root.iterdir()} == {"f": A}


@pytest.mark.parametrize("name", SYNCED)
def test_all_is_lost_on_a_disk_whose_syncs_are_lies(tmp_path: Path, name: str) -> None:
    assert list(play(tmp_path, SYNCED[name], lies=True).iterdir()) == []


def test_all_may_outlive_power(tmp_path: Path) -> None:
    root = play(tmp_path, "fd = new('f'); os.write(fd, A + B); os.rename('f', 'g')", ALL)
    assert (root / "g").read_bytes() == A + B


def test_a_removed_or_replaced_file_comes_back_unless_its_directory_was_synced(tmp_path: Path) -> None:
    program = """
        for name, data in (("f", A), ("g", B)):
            fd = new(name); os.write(fd, data); os.fsync(fd)
        os.mkdir("sub"); settle(); os.unlink("f"); {}
        os.replace("g", "sub/h")
    """
    root = play(tmp_path / "1", program.format(""))
    assert {path.name for path in root.rglob("*") if path.is_file()} == {"f", "g"}
    root = play(tmp_path / "2", program.format("settle()"))
    assert {path.name for path in root.rglob("*") if path.is_file()} == {"g"}


def test_a_mapped_page_may_be_as_old_as_when_it_was_mapped(tmp_path: Path) -> None:
    program = "fd = new('f'); os.write(fd, A); os.fsync(fd); settle(); mmap.mmap(fd, 512)[:] = B; os.fsync(fd)"
    assert (play(tmp_path / "1", program) / "f").read_bytes() == A
    assert (play(tmp_path / "2", program, ALL) / "f").read_bytes() == B


def test_sectors_are_torn_and_reordered_each_by_itself(tmp_path: Path) -> None:
    program = """
        fd = new('f'); os.write(fd, A * 8); os.fsync(fd); settle(); os.pwrite(fd, B * 4, 100)
        new('f'); os.pwrite(fd, b'c' * 512 * 4, 2048)
    """
    found = {(play(tmp_path / str(n), program, Loss(0.5), n) / "f").read_bytes() for n in range(4)}
    assert len(found) > 1
    for data in found:
        assert set(data[2560:]) <= set(b"ac")
        assert all(len(set(data[at : at + 512])) == 1 for at in range(2560, 4096, 512)), "a sector is a mixture"


def test_the_length_of_an_unsynced_file_may_outlive_its_bytes(tmp_path: Path) -> None:
    program = "fd = new('f'); os.fsync(fd); settle(); os.posix_fallocate(fd, 0, 2048); os.pwrite(fd, A, 512)"
    assert (play(tmp_path / "1", program) / "f").read_bytes() == b""
    assert (play(tmp_path / "2", program, Loss(lengths=True)) / "f").read_bytes() == bytes(2048)


@pytest.mark.parametrize(
    ("calls", "error", "program"),
    [
        (SYNCS, errno.EIO, "os.fdatasync(fd)"),
        (WRITES, errno.ENOSPC, "os.pwrite(fd, A, 0)"),
        (WRITES, errno.EDQUOT, "os.posix_fallocate(fd, 0, 512)"),
        (OPENS, errno.EROFS, "new('g')"),
        (NAMES, errno.EIO, "os.rename('f', 'g')"),
    ],
)
def test_calls_fail_as_told(tmp_path: Path, calls: int, error: int, program: str) -> None:
    text = f"""
        import struct
        control = mmap.mmap(os.open(os.environ["RAFTKV_DISK"] + "/control", os.O_RDWR), 20)
        fd = new('f')
        control[:] = struct.pack("5I", 0, 0, {calls}, {error}, 1_000_000)
        try:
            {program}
        except OSError as found:
            assert found.errno == {error}
        else:
            sys.exit("it did not fail")
    """
    play(tmp_path, text)


def test_a_write_is_cut_short_as_told(tmp_path: Path) -> None:
    play(tmp_path, "fd = new('f'); assert os.pwrite(fd, A, 0) == 256", calls=WRITES, error=SHORT)


def test_the_directory_itself_is_durable_when_the_one_above_it_was_synced(tmp_path: Path) -> None:
    program = """
        here = os.getcwd(); os.chdir(".."); os.rmdir(here); os.mkdir(here)
        {}; os.chdir(here); fd = new("f"); os.fsync(fd); settle()
    """
    assert not play(tmp_path / "1", program.format("pass")).exists()
    assert [path.name for path in play(tmp_path / "2", program.format("settle()")).iterdir()] == ["f"]


def test_the_databases_of_lmdb_are_seen_whole(tmp_path: Path) -> None:
    """Each byte of a database on a lying disk is undone: the shim misses no write."""
    program = """
        import lmdb
        store = lmdb.open("db", subdir=False, map_size=1 << 24)
        for n in range(40):
            with store.begin(write=True) as txn:
                for m in range(50):
                    txn.put(b"%d" % (m * 31 % 50), b"v" * (n * m))
    """
    root = play(tmp_path, program, Loss(names=1.0, lengths=True), lies=True)
    assert not any((root / "db").read_bytes())
