"""Runs the golden scenarios: each file of ``testdata/`` is a protocol scenario, described by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.raft import golden
from tests.raft.scenario import Scenario

STORIES = sorted((Path(__file__).parent / "testdata").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_story(path: Path, rewrite: bool) -> None:
    golden.run(path, Scenario().execute, rewrite)


def test_there_are_stories() -> None:
    assert len(STORIES) >= 30


def test_a_wrong_expectation_fails(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("cluster 1\nraft\n----\n1: leader\n")
    with pytest.raises(AssertionError, match=r"story\.txt:1"):
        golden.run(path, Scenario().execute, rewrite=False)
    golden.run(path, Scenario().execute, rewrite=True)
    golden.run(path, Scenario().execute, rewrite=False)
    assert path.read_text() == "cluster 1\nraft\n----\n1: follower term=0 last=0/0 commit=0 applied=0\n"
