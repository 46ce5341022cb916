"""`raftkvutl snapshot restore` with archived segments: to a revision, to a time; refusals make nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import Ran, run_utl
from tests.offline.history import TIME_0_S, History, write_archive


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    made = History(6, tmp_path_factory.mktemp("history"), 80)
    write_archive(made.entries, made.path / "archive", made.rng)
    yield made
    made.close()


def restore(history: History, target: Path, *words: str) -> Ran:
    base = str(history.bases[min(history.bases)])
    words = ("--skip-hash-check", "--data-dir", str(target), *words)
    return run_utl(["snapshot", "restore", base, *words])


def archive_of(history: History) -> tuple[str, str]:
    return "--wal-archive-dir", str(history.path / "archive")


def revision_of(data_dir: Path) -> int:
    return json.loads(run_utl(["hashkv", str(data_dir), "-w", "json"]).output)["hashRevision"]


def test_to_a_revision_to_a_time_and_to_the_end(history: History, tmp_path: Path) -> None:
    last = history.store.revision
    at = len(history.entries) - 2
    for name, words, revision in [
        ("a", ("--to-revision", str(last - 1)), last - 1),
        ("b", ("--to-time", "2023-11-14T22:13:20Z"), None),
        ("c", ("--to-time", f"2023-11-14T22:{13 + (20 + at) // 60}:{(20 + at) % 60:02}Z"), history.at_index[at][0]),
        ("d", (), last),
    ]:
        ran = restore(history, tmp_path / name, *archive_of(history), *words)
        if revision is None:
            assert (ran.code, "the archive begins at" in ran.errors) == (1, True)
            assert not (tmp_path / name).exists()
        else:
            assert ran.code == 0, ran.errors
            assert revision_of(tmp_path / name) == revision


def test_a_time_after_the_archive_is_remarked_upon(history: History, tmp_path: Path) -> None:
    ran = restore(history, tmp_path / "m", *archive_of(history), "--to-time", "2030-01-01T00:00:00+01:00")
    assert ran.code == 0
    assert ran.errors.startswith("raftkv: the archive ends at 2023-11-14T22:1")
    assert revision_of(tmp_path / "m") == history.store.revision
    assert TIME_0_S == 1_700_000_000


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("--to-revision 9", 128, "--to-revision and --to-time need --wal-archive-dir"),
        ("--wal-archive-dir x --bump-revision 1 --mark-compacted", 128,
         "--bump-revision and --wal-archive-dir exclude each other"),
        ("--wal-archive-dir /nowhere", 1,
         "there is no archive at /nowhere: a member makes it when it first closes a segment, or stops"),
        ("--wal-archive-dir x --to-revision=-1", 128, "--to-revision must not be negative (set to -1)"),
    ],
)  # fmt: skip
def test_refusals_make_nothing(words: str, code: int, line: str, history: History, tmp_path: Path) -> None:
    ran = restore(history, tmp_path / "m", *words.split())
    assert (ran.code, ran.output, ran.errors) == (code, b"", f"Error: {line}\n")
    assert list(tmp_path.iterdir()) == []


def test_an_archive_of_which_a_part_cannot_be_read_is_refused(history, tmp_path, monkeypatch):
    """A directory of another user's was passed over: the restore ended where the others end, and said that all is."""
    archive, real = tmp_path / "archive", os.scandir
    (archive / "another").mkdir(parents=True)
    shutil.copytree(history.path / "archive", archive / "one")

    def scandir(path: str = ".") -> Any:
        if str(path).endswith("another"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    ran = restore(history, tmp_path / "m", "--wal-archive-dir", str(archive))
    assert (ran.code, ran.errors) == (1, f"Error: cannot read the archive {archive}/another: Permission denied\n")
    assert not (tmp_path / "m").exists()
