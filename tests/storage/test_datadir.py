"""Data directories: created for their owner only, refused when others may write to them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv.errors import StorageError
from raftkv.storage.datadir import ensure_private_directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_created_level_is_private_under_any_umask(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("bits", [0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, bits: int) -> None:
    tmp_path.chmod(bits)
    with pytest.raises(StorageError, match=f"has mode {bits:04o}: group or others may write to it"):
        ensure_private_directory(tmp_path)


def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str | None, *members: str, primary: int = -1) -> None:
    """Give the group of a directory a name (None: unknown) and a number of users."""
    gid, user = tmp_path.stat().st_gid, SimpleNamespace(pw_name="raftkv", pw_uid=os.geteuid(), pw_gid=-1)
    found = {} if name is None else {gid: SimpleNamespace(gr_name=name, gr_mem=list(members))}
    monkeypatch.setattr(grp, "getgrgid", found.__getitem__)
    other = SimpleNamespace(pw_name="ann", pw_uid=user.pw_uid + 1, pw_gid=gid if primary > 0 else -1)
    monkeypatch.setattr(pwd, "getpwall", lambda: [user, other])


@pytest.mark.parametrize(("name", "members"), [(None, ()), ("raftkv", ()), ("raftkv", ("raftkv",))])
@pytest.mark.parametrize("bits", [0o770, 0o2770, 0o2775])
def test_a_directory_that_a_group_without_others_may_write_is_kept(tmp_path, monkeypatch, bits, name, members):
    """A kubelet gives the group of a volume (fsGroup) every right, at each start of a pod; umask 002 makes such too."""
    tmp_path.chmod(bits)
    groups(monkeypatch, tmp_path, name, *members)
    ensure_private_directory(tmp_path)
    assert mode(tmp_path) == bits


@pytest.mark.parametrize(
    ("name", "members", "primary"), [("staff", (), -1), ("raftkv", ("raftkv", "ann"), -1), ("raftkv", (), 1)]
)
def test_a_directory_that_a_group_with_others_may_write_is_refused(tmp_path, monkeypatch, name, members, primary):
    tmp_path.chmod(0o770)
    groups(monkeypatch, tmp_path, name, *members, primary=primary)
    with pytest.raises(StorageError, match="has mode 0770: group or others may write to it"):
        ensure_private_directory(tmp_path)


def owned_by(monkeypatch: pytest.MonkeyPatch, path: Path, owner: int, bits: int) -> None:
    """Have a directory belong to that user, with these rights."""
    found, os_stat = list(path.stat()), os.stat
    found[stat.ST_MODE], found[stat.ST_UID] = stat.S_IFDIR | bits, owner

    def patched(of: Any, **options: Any) -> os.stat_result:
        return os.stat_result(found) if of == str(path) else os_stat(of, **options)

    monkeypatch.setattr(os, "stat", patched)


@pytest.mark.parametrize(("owner", "is_kept"), [(0, True), (12345, False)])
def test_a_volume_of_root_that_this_user_may_write_is_kept(tmp_path, monkeypatch, owner, is_kept):
    """A kubelet makes a volume that root owns and the group of the pod may write to."""
    monkeypatch.setattr(os, "geteuid", lambda: 65532)
    groups(monkeypatch, tmp_path, None)
    owned_by(monkeypatch, tmp_path, owner, 0o2775)
    if is_kept:
        ensure_private_directory(tmp_path)
    else:
        with pytest.raises(StorageError, match="belongs to user 12345, and this process runs as user 65532"):
            ensure_private_directory(tmp_path)


def test_path_that_is_not_a_directory_is_named(tmp_path: Path) -> None:
    file, dangling = tmp_path / "file", tmp_path / "dangling"
    file.touch()
    dangling.symlink_to(tmp_path / "nowhere")
    for path in (file, file / "below", file / "below" / "that"):
        with pytest.raises(StorageError, match=f"^{file} is not a directory$"):
            ensure_private_directory(path)
    for path in (dangling, dangling / "below"):
        with pytest.raises(StorageError, match=f"^{dangling} is a link to nothing$"):
            ensure_private_directory(path)


def test_a_directory_of_another_user_is_refused_unless_that_is_allowed(tmp_path, monkeypatch):
    owner = os.geteuid() + 1
    owned_by(monkeypatch, tmp_path, owner, 0o700)
    with pytest.raises(StorageError, match=f"belongs to user {owner}, and this process runs as user {owner - 1}"):
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
