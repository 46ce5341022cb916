"""The file of the audit log: permissions, rotation, disk errors, and interference by other processes."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from raftkv.errors import ConfigError
from raftkv.server.audit.trail import open_destination
from raftkv.server.logs.files import LineStream


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    umask = os.umask(0)
    try:
        file = open_destination(str(path), 10, 10)
        file.write(b"first line\n")
        file.write(b"second line\n")
        file.close()
        assert [mode(one) for one in tmp_path.iterdir()] == [0o600, 0o600]
    finally:
        os.umask(umask)
    path.chmod(0o644)
    open_destination(str(path), 0, 0).close()
    assert mode(path) == 0o600


def test_audit_file_rotates_by_size_and_drops_oldest(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    for number in range(8):  # each end waits until the older files are deleted
        file = open_destination(str(path), 20, 2)
        file.write(b"line %04d\n" % number)
        file.close()
    assert path.read_bytes() == b"line 0006\nline 0007\n"
    older = sorted(one for one in tmp_path.iterdir() if one != path)
    assert [one.read_bytes() for one in older] == [b"line 0002\nline 0003\n", b"line 0004\nline 0005\n"]


def test_audit_file_without_size_never_rotates(tmp_path: Path) -> None:
    file = open_destination(str(tmp_path / "a"), 0, 0)
    file.write(b"x" * 100_000 + b"\n")
    file.write(b"y\n")
    file.close()
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_moved_or_deleted_file_is_reopened(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    file = open_destination(str(path), 0, 0)
    file.write(b"1\n")
    path.rename(tmp_path / "moved")
    file.write(b"2\n")
    path.unlink()
    file.write(b"3\n")
    file.close()
    assert (path.read_bytes(), (tmp_path / "moved").read_bytes()) == (b"3\n", b"1\n")


def test_non_file_at_the_path_loses_no_line(tmp_path: Path) -> None:
    """The thread of the file meets an error that passes, as of a full disk: another would end its thread for good."""
    path = tmp_path / "audit.log"
    file = open_destination(str(path), 0, 0)
    file.write(b"1\n")
    for put in (lambda: path.symlink_to("/dev/null"), path.mkdir):
        path.rename(tmp_path / "moved")
        put()
        file.write(b"2\n")
        assert re.search("it is not a file|Is a directory", file.trouble)
        path.rename(tmp_path / f"was {put.__name__}")
        file.write(b"3\n")
        assert (path.read_bytes(), (tmp_path / "moved").read_bytes()[2:], file.trouble) == (b"3\n", b"2\n", "")
    file.close()


def test_line_cut_by_a_full_disk_is_completed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.log"
    file = open_destination(str(path), 1000, 10)
    room = [5]

    def write(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = min(room[0], len(data))
        room[0] -= size
        return os_write(descriptor, data[:size])

    os_write = os.write
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space"):
        file.write(b"first line\n")
    with pytest.raises(OSError, match="No space"):
        file.write(b"second line\n")
    room[0] = 1000
    file.write(b"third line\n")
    file.close()
    assert path.read_bytes() == b"first line\nsecond line\nthird line\n"


def test_impossible_file_is_refused_in_a_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "such", "No such file or directory"),
        (tmp_path / "fifo", "No such device or address"),
        (Path("/dev/null"), "it is not a file"),
    ):
        with pytest.raises(ConfigError) as caught:
            open_destination(str(name), 0, 1)
        assert str(caught.value) == f"cannot write the audit log to {name}: {reason}"


def test_standard_output_and_error() -> None:
    assert isinstance(open_destination("-", 0, 0), LineStream)
    assert isinstance(open_destination("stderr", 0, 0), LineStream)
    reader, writer = os.pipe()
    stream = LineStream(writer)
    stream.write(b"line\n")
    stream.close()
    assert os.read(reader, 100) == b"line\n"
    os.close(reader)
    os.close(writer)
