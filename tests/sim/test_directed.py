"""Step-by-step schedules that random runs do not find, each run also against its mutant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replica.lease import test_story
from tests.replica.snapshots import test_sender
from tests.sim.clients.history import Status, ViolationError
from tests.sim.directed import Stage
from tests.sim.mutants import MUTANTS


def figure_eight(checks_disabled: tuple[str, ...] = ()) -> Stage:
    """Figure 8 of the Raft paper: an entry of an old term reaches a majority, then its leader dies.

    Messages carry one entry, so that the old entry spreads without the new leader's own one.
    """
    stage = Stage(5, checks_disabled, max_size_per_message_bytes=0)
    stage.elect(1, voters=(2, 3))  # (a) 1 leads term 2; its entry 2 reaches only 2
    stage.deliver(1, 2, 1)
    stage.crash(1)
    stage.drop()
    stage.elect(5, voters=(3, 4))  # (b) 5 leads term 3 with another entry 2, which reaches no other member
    stage.crash(5)
    stage.drop()
    stage.start(1)
    stage.elect(1, voters=(2, 3))  # (c) 1 leads term 4 and brings its old entry to 3: now a majority has it
    stage.deliver(1, 2, 1)
    stage.deliver(1, 3, 1)
    stage.deliver(1, 3, 1)
    stage.crash(1)
    stage.drop()
    stage.start(5)
    stage.elect(5, voters=(3, 4))  # (d) 5 leads term 5, and overwrites it everywhere
    for follower in (2, 3, 4):
        for _ in range(4):
            stage.deliver(5, follower)
    return stage


def test_figure_eight_commits_nothing_of_an_old_term() -> None:
    stage = figure_eight()
    terms = [stage.cluster.members[member].term_at(2) for member in (2, 3, 4, 5)]
    assert terms == [3, 3, 3, 3]


@pytest.mark.interpreted
def test_figure_eight_catches_commit_by_counting() -> None:
    with (
        MUTANTS["old term's entry committed by counting"].planted(),
        pytest.raises(ViolationError, match="R7: leader 1 of term 4 commits 2 of term 2"),
    ):
        figure_eight()


@pytest.mark.interpreted
def test_figure_eight_needs_the_commit_rule() -> None:
    """Without the direct check: a committed entry is missing in a later leader's log."""
    with (
        MUTANTS["old term's entry committed by counting"].planted(),
        pytest.raises(ViolationError, match="R3: leader 5 of term 5"),
    ):
        figure_eight(checks_disabled=("R7",))


@pytest.fixture(autouse=True)
def _end_of_stages() -> Iterator[None]:
    yield
    Stage.close_all()


def divergent_tail() -> Stage:
    """Five members: 1 fills 3 with a long tail in term 2; 2 leads term 3 without it, commits, compacts, and sends 3 a
    snapshot that ends inside the tail's range. Then 3 crashes and reads its disk."""
    stage = Stage(5, snapshot_entries=2, catch_up_entries=0)
    stage.elect(1, voters=(2, 3))
    for _ in range(6):
        stage.write(1)
    for _ in range(3):
        stage.deliver(1, 3)
    stage.crash(1)
    stage.drop()
    stage.elect(2, voters=(4, 5))
    for _ in range(2):
        stage.write(2)
    for follower in (4, 5):
        for _ in range(3):
            stage.deliver(2, follower)
    stage.drop()
    stage.commit_database(2)
    stage.settle()
    stage.tick(2)
    for _ in range(3):
        stage.deliver(2, 3)
    member = stage.cluster.members[3]
    if member.applied < 3:
        raise RuntimeError(f"no snapshot arrived: {stage.cluster.describe()}")
    stage.restart(3)
    return stage


def test_snapshot_replaces_the_tail_of_another_history() -> None:
    stage = divergent_tail()
    assert stage.cluster.members[3].last_index() == stage.cluster.members[3].applied


def test_snapshot_over_a_tail_that_is_read_back_is_caught() -> None:
    mutant = MUTANTS["log keeps a tail behind a received snapshot"]
    with mutant.planted(), pytest.raises(ViolationError, match="D6: read back"):
        divergent_tail()


def test_read_at_a_deposed_leader_waits_for_its_quorum() -> None:
    stage = Stage(3)
    stage.elect(1, voters=(2, 3))
    for follower in (2, 3):
        for _ in range(3):
            stage.deliver(1, follower)
    stage.elect(2, voters=(3,))
    write = stage.write(2)
    for _ in range(4):
        stage.deliver(2, 3)
    read = stage.read(1)
    assert write.status is Status.OK
    assert read.status is Status.UNKNOWN
    stage.check()


@pytest.mark.interpreted
def test_read_at_a_deposed_leader_without_quorum_is_caught() -> None:
    with MUTANTS["read without a quorum"].planted():
        stage = Stage(3)
        stage.elect(1, voters=(2, 3))
        for follower in (2, 3):
            for _ in range(3):
                stage.deliver(1, follower)
        stage.elect(2, voters=(3,))
        stage.write(2)
        for _ in range(4):
            stage.deliver(2, 3)
        stage.read(1)
        with pytest.raises(ViolationError, match="K3: stale"):
            stage.check()


def crash_in_a_compaction() -> Stage:
    """A put is on disk, its deletion in memory; a compaction drops both, and the member dies after a commit. What
    the next put makes of the key shows what the member knows of it."""
    stage = Stage(1)
    stage.elect(1, voters=())
    stage.write(1)
    stage.commit_database(1)
    stage.delete(1)
    last = stage.write(1).outcome
    assert last is not None
    stage.compact(1, last.revision)
    store = stage.cluster.members[1].store
    stage.do(1, store.compaction_step, 1)
    stage.do(1, store.commit)
    stage.settle(1.0)
    stage.restart(1)
    stage.elect(1, voters=())
    stage.write(1)
    return stage


def test_a_crash_in_a_compaction_brings_nothing_back() -> None:
    stage = crash_in_a_compaction()
    assert stage.cluster.members[1].store.applied_index == stage.cluster.checkers.replay.index


def test_records_forgotten_before_older_ones_are_deleted_are_caught() -> None:
    mutant = MUTANTS["forgotten in memory before it is deleted on disk"]
    with mutant.planted(), pytest.raises(ViolationError, match="R4"):
        crash_in_a_compaction()


def test_the_decision_of_a_deposed_leader_is_caught() -> None:
    """Expiries enter the log as soon as they are decided, so hardly one reaches the next leader's log."""
    mutant = MUTANTS["decision of a deposed leader carried out"]
    with mutant.planted(), pytest.raises(AssertionError):
        test_story.test_the_end_that_a_deposed_leader_decided_has_no_effect(test_story.led_by(0))


async def test_a_copy_made_before_a_member_joined_is_caught(tmp_path: Path) -> None:
    mutant = MUTANTS["a copy made before a member joined"]
    with mutant.planted(), pytest.raises(AssertionError):
        async with test_sender.world_in(tmp_path) as world:
            await test_sender.test_a_member_newer_than_the_kept_copy_is_sent_another(world)
