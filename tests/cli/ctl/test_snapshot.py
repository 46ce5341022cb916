"""snapshot save of raftkvctl: what cannot be saved is one line, etcdctl's code, and leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.runner import run_ctl
from tests.procs import RAFTKV, Cluster


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ("", 128, "snapshot save expects one argument"),
        ("a b", 128, "snapshot save expects one argument"),
        (
            "f --endpoints 127.0.0.1:1,127.0.0.1:2",
            5,
            "snapshot must be requested to one selected node, not multiple [127.0.0.1:1 127.0.0.1:2]",
        ),
        (". --endpoints 127.0.0.1:1", 5, "could not open '.' (is a directory)"),
        ("/ --endpoints 127.0.0.1:1", 5, "could not open '/' (is a directory)"),
        ("none/f --endpoints 127.0.0.1:1", 5, "could not open none/f.part (no such file or directory)"),
    ],
)
def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int, reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run_ctl(["snapshot", "save", *words.split()])
    assert (ran.code, ran.output, ran.errors) == (code, b"", f"Error: {reason}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_member_that_is_not_there(tmp_path: Path) -> None:
    ran = run_ctl(["snapshot", "save", str(tmp_path / "f"), "--endpoints", "127.0.0.1:1"])
    assert (ran.code, ran.output) == (5, b"")
    reason = "raftkvctl: no answer from 127.0.0.1:1: connect: connection refused"
    assert ran.errors.splitlines() == ["Error: context deadline exceeded", reason]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "directory"])
def test_target_that_is_no_file_is_kept(tmp_path: Path, kind: str) -> None:
    """Root's ``snapshot save /dev/null`` replaced the device by a file, which then took all output of the machine."""
    place = tmp_path / "place"
    if kind == "directory":
        place.mkdir()
    else:
        os.mkfifo(place)
    shown = place
    if kind.startswith("link"):
        shown = tmp_path / "link"
        shown.symlink_to(place)
    before = os.lstat(place).st_mode, sorted(tmp_path.iterdir())
    with Cluster(RAFTKV) as cluster:
        ran = run_ctl(["snapshot", "save", str(shown), "--endpoints", cluster.endpoints[0]])
    why = "is a directory" if kind == "directory" else "not a regular file, which the snapshot would replace"
    assert (ran.code, ran.output, ran.errors) == (5, b"", f"Error: could not open {shown} ({why})\n")
    assert (os.lstat(place).st_mode, sorted(tmp_path.iterdir())) == before


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    """The name of the newest backup may lead to another disk, which has the room."""
    (tmp_path / "large").mkdir()
    link, behind = tmp_path / "backup.db", tmp_path / "large" / "backup.db"
    link.symlink_to(behind)
    with Cluster(RAFTKV) as cluster:
        for _ in range(2):
            ran = run_ctl(["snapshot", "save", str(link), "--endpoints", cluster.endpoints[0]])
            assert (ran.code, ran.errors) == (0, "")
    assert link.is_symlink()
    assert sorted(tmp_path.rglob("*")) == [link, tmp_path / "large", behind]
    assert run_ctl(["snapshot", "status", str(link)]).code == 0
