"""Data directories: made for their owner alone, refused when others may write to them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from raftkv.errors import StorageError
from raftkv.storage.datadir import ensure_private_directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_level_that_is_made_is_private_whatever_the_umask(tmp_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        assert ensure_private_directory(tmp_path / "a" / "b") == str(tmp_path / "a" / "b")
    finally:
        os.umask(old_umask)
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o700, 0o700)


@pytest.mark.parametrize("bits", [0o700, 0o750, 0o755])
def test_a_directory_that_others_may_only_read_is_kept(tmp_path: Path, bits: int) -> None:
    tmp_path.chmod(bits)
    ensure_private_directory(tmp_path)
    assert mode(tmp_path) == bits


@pytest.mark.parametrize("bits", [0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, bits: int) -> None:
    tmp_path.chmod(bits)
    with pytest.raises(StorageError, match=f"has mode {bits:04o}: group or others may write to it"):
        ensure_private_directory(tmp_path)


def test_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    file, dangling = tmp_path / "file", tmp_path / "dangling"
    file.touch()
    dangling.symlink_to(tmp_path / "nowhere")
    for path in (file, file / "below", file / "below" / "that"):
        with pytest.raises(StorageError, match=f"^{file} is not a directory$"):
            ensure_private_directory(path)
    for path in (dangling, dangling / "below"):
        with pytest.raises(StorageError, match=f"^{dangling} is a link to nothing$"):
            ensure_private_directory(path)


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StorageError, match=f"belongs to user {owner}, and this process runs as user {owner + 1}"):
        ensure_private_directory(tmp_path)
    assert ensure_private_directory(tmp_path, is_own=False) == str(tmp_path)


def test_a_file_system_that_is_mounted_read_only_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StorageError, match="is not readable and writable by this user"):
        ensure_private_directory(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(StorageError, match="is on a file system that is mounted read-only, as the kernel does"):
        ensure_private_directory(tmp_path)
