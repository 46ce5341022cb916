"""Ranks, coordinators and leaders die or freeze at named points of a save; the next start finds whole checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from raftkv.checkpoint import Checkpoint, FileRecord, digest
from raftkv.checkpoint.commit.manifest import NAME, Manifest
from raftkv.checkpoint.records import AttemptRecord, Prepared
from tests.checkpoint.chaos.points import (
    AFTER_COMMIT,
    AFTER_PREPARE,
    BEFORE_COMMIT,
    BEFORE_PREPARE,
    MID_WRITE,
    POINTS,
    Shard,
    State,
    read_shard,
    strays,
    write_shard,
)
from tests.checkpoint.chaos.processes import DCP_ASYNC
from tests.checkpoint.chaos.registry_ranks import problems_of
from tests.checkpoint.chaos.trial import COORDINATOR, FREEZE, LEADER, LEADER_AND_COORDINATOR, RANK, Cell, chaos


def _nothing() -> None:
    pass


@pytest.mark.long
def test_a_trial_at_every_point_holds() -> None:
    cells = [Cell(kill, point, 1) for point, kill in zip(POINTS, itertools.cycle((RANK, FREEZE, COORDINATOR)))]
    cells += [Cell(LEADER, BEFORE_COMMIT, 1), Cell(LEADER_AND_COORDINATOR, AFTER_PREPARE, 1)]
    tallies = list(chaos(cells))
    assert [tally.problems for tally in tallies] == [[]] * len(cells)
    assert sum(tally.new_step + tally.previous_step for tally in tallies) == len(cells)
    assert min(tally.zombie_writes for tally in tallies) > 0


@pytest.mark.long
def test_asynchronous_saves_of_torch_hold_too() -> None:
    """Rank 0 is killed before it prepares and after it commits, or frozen before; another one while it writes."""
    cells = [
        Cell(RANK, MID_WRITE, 1),
        Cell(COORDINATOR, BEFORE_PREPARE, 1),
        Cell(COORDINATOR, AFTER_COMMIT, 1),
        Cell(FREEZE, BEFORE_COMMIT, 1),
    ]
    tallies = list(chaos(cells, writer=DCP_ASYNC))
    assert [tally.problems for tally in tallies] == [[]] * len(cells)
    assert [tally.new_step for tally in tallies] == [0, 0, 1, 1]


def _committed(directory: Path) -> Checkpoint:
    """A checkpoint of one rank that is as it should be."""
    attempt = AttemptRecord(10, 3, 1, "files", 1, str(directory))
    data = write_shard(directory / "rank-0.bin", Shard(0, 10, 3), _nothing, fsync=False)
    part = Prepared(0, (FileRecord("rank-0.bin", len(data), digest.of_bytes(data)),))
    manifest = Manifest.of(attempt, {0: part})
    (directory / NAME).write_bytes(manifest.encoded)
    return Checkpoint(
        "run", 10, 3, 1, "files", 1, str(directory), manifest.digest, manifest.root, 1, manifest.size_bytes
    )


def test_a_shard_that_is_cut_off_or_of_another_generation_is_found(tmp_path: Path) -> None:
    checkpoint = _committed(tmp_path)
    assert problems_of(checkpoint) == []
    path = tmp_path / "rank-0.bin"
    write_shard(path, Shard(0, 10, 4), _nothing, fsync=False)
    assert read_shard(path) == Shard(0, 10, 4)  # a loader would take it
    assert [text.partition(": ")[2] for text in problems_of(checkpoint)] == ["rank-0.bin is not what was prepared"]
    path.write_bytes(path.read_bytes()[:-1])
    assert read_shard(path) is None
    assert len(problems_of(checkpoint)) == 1
    (tmp_path / NAME).write_bytes(b"")
    assert [text.partition(": ")[2] for text in problems_of(checkpoint)] == ["the manifest is not what was committed"]


def test_a_takeover_must_commit_what_is_whole_and_nothing_else(tmp_path: Path) -> None:
    assert State(frozenset({10}), 10, ((20, 1, True),), frozenset()).expected == 20
    assert State(frozenset({10}), 10, ((20, 1, False),), frozenset()).expected == 10
    (tmp_path / "step-1").mkdir()
    assert strays(State(frozenset(), 0, (), frozenset({"step-1"})), tmp_path) == []
    assert strays(State(frozenset(), 0, (), frozenset()), tmp_path) == ["step-1"]
