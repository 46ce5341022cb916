"""snapshot save of raftkvctl: what cannot be saved is one line, etcdctl's code, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runner import run_ctl


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
    assert ran.errors.splitlines() == [reason, "Error: context deadline exceeded"]
    assert list(tmp_path.iterdir()) == []
