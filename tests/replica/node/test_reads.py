"""Linearizable reads share rounds, but never one that began before they arrived."""

from __future__ import annotations

import asyncio
import weakref
from itertools import count, pairwise

import pytest

from raftkv import errors
from raftkv.replica.node.reads import READERS_AT_ONCE, RETRY_S, ReadQueue
from tests.replica.node.node_world import Reader, World

TIMEOUT_S = 7.0


@pytest.fixture
def asked() -> list[bytes]:
    return []


@pytest.fixture
def queue(asked: list[bytes]) -> ReadQueue:
    return ReadQueue(asked.append, count(1), TIMEOUT_S, lambda: None)


def test_readers_of_one_moment_share_a_round(queue: ReadQueue, asked: list[bytes]) -> None:
    readers = [Reader() for _ in range(3)]
    for reader in readers:
        queue.add(reader, 0.0)
    queue.start(0.0)
    assert len(asked) == 1
    queue.confirm(asked[0], index=5, applied=5, now=0.1)
    assert [reader.outcome for reader in readers] == ["served"] * 3


def test_reader_of_departed_caller_is_dropped_during_round(queue: ReadQueue, asked: list[bytes]) -> None:
    """Without a leader, calls that were opened and reset over and over were kept for the time of a round."""
    readers = [Reader() for _ in range(9)]
    for group, index in ((readers[:3], 9), (readers[3:6], 0), (readers[6:], 0)):
        for reader in group:
            queue.add(reader, 0.0)
        queue.start(0.0)
        if index:
            queue.confirm(asked[0], index=9, applied=7, now=0.0)
    left = [weakref.ref(reader) for reader in readers[::2]]
    for reader in readers[::2]:
        reader.is_over = True
    stayed = readers[1::2]
    del readers, group, reader
    queue.tick(0.1)
    assert [one() for one in left] == [None] * 5
    queue.applied(9)
    queue.confirm(asked[1], index=9, applied=9, now=0.2)
    queue.confirm(asked[2], index=9, applied=9, now=0.3)
    assert [reader.outcome for reader in stayed] == ["served"] * 4


def test_reader_does_not_join_round_in_progress(queue: ReadQueue, asked: list[bytes]) -> None:
    early, late = Reader(), Reader()
    queue.add(early, 0.0)
    queue.start(0.0)
    queue.add(late, 0.1)
    queue.start(0.1)
    queue.confirm(asked[0], index=5, applied=5, now=0.2)
    assert (early.outcome, late.outcome) == ("served", None)
    assert len(asked) == 2, "the round of the late reader begins when the first ends"
    queue.confirm(asked[1], index=6, applied=6, now=0.3)
    assert late.outcome == "served"


def test_a_confirmed_read_waits_for_the_applied_index(queue: ReadQueue, asked: list[bytes]) -> None:
    reader = Reader()
    queue.add(reader, 0.0)
    queue.start(0.0)
    queue.confirm(asked[0], index=9, applied=7, now=0.1)
    queue.applied(8)
    assert reader.outcome is None
    queue.applied(9)
    assert reader.outcome == "served"


def test_a_round_is_asked_again_under_a_fresh_id(queue: ReadQueue, asked: list[bytes]) -> None:
    reader = Reader()
    queue.add(reader, 0.0)
    queue.start(0.0)
    queue.tick(RETRY_S + 0.01)
    assert len(set(asked)) == 2
    assert queue.rounds_retried == 1
    queue.confirm(asked[0], index=1, applied=1, now=1.0)
    assert reader.outcome == "served", "an answer to any question of the round will do"
    queue.confirm(asked[1], index=1, applied=1, now=1.1)  # the second answer finds no reader


def test_an_answer_to_another_round_serves_no_read(queue: ReadQueue, asked: list[bytes]) -> None:
    reader = Reader()
    queue.add(reader, 0.0)
    queue.start(0.0)
    queue.confirm(b"somebody else", index=1, applied=1, now=0.1)
    assert reader.outcome is None


def test_a_new_leader_is_asked_at_once(queue: ReadQueue, asked: list[bytes]) -> None:
    queue.add(Reader(), 0.0)
    queue.start(0.0)
    queue.leader_changed(0.1)
    assert len(asked) == 2


def test_unconfirmed_reads_time_out_as_etcd_says(queue: ReadQueue) -> None:
    reader, waiting = Reader(), Reader()
    queue.add(reader, 0.0)
    queue.start(0.0)
    queue.add(waiting, 0.0)
    queue.tick(TIMEOUT_S + 0.1)
    assert isinstance(reader.outcome, errors.RequestTimeoutError)
    assert isinstance(waiting.outcome, errors.RequestTimeoutError)
    assert queue.reads_failed == 2


def test_reader_that_joins_during_a_lost_round_waits_for_the_next(queue: ReadQueue, asked: list[bytes]) -> None:
    """A read that came a moment before the leader did was told that it had timed out, after no time at all."""
    first, second, last = Reader(), Reader(), Reader()
    queue.add(first, 0.0)
    queue.start(0.0)
    queue.add(second, 0.05)
    queue.tick(0.1)
    queue.add(last, TIMEOUT_S)
    queue.tick(TIMEOUT_S + 0.08)
    assert [type(reader.outcome) for reader in (first, second)] == [errors.RequestTimeoutError] * 2
    assert last.outcome is None
    queue.confirm(asked[-1], index=5, applied=5, now=TIMEOUT_S + 0.09)
    assert last.outcome == "served"


def test_a_reader_waits_no_longer_than_allowed_over_all_rounds(queue: ReadQueue, asked: list[bytes]) -> None:
    came_at = {Reader(): moment for moment in (0.01, 2.95, 5.95, 8.95)}
    failed_at: dict[Reader, float] = {}
    for tick in range(1, 250):
        now = tick * 0.1
        for reader, moment in came_at.items():
            if now - 0.1 < moment <= now:
                queue.add(reader, moment)
        queue.start(now)
        queue.tick(now)
        for reader in came_at:
            if reader.outcome is not None:
                failed_at.setdefault(reader, now)
    waited = [failed_at[reader] - moment for reader, moment in came_at.items()]
    assert min(waited) >= TIMEOUT_S
    assert max(waited) <= TIMEOUT_S + 0.3


def test_confirmed_reads_time_out_waiting_for_apply(queue: ReadQueue, asked: list[bytes]) -> None:
    reader = Reader()
    queue.add(reader, 0.0)
    queue.start(0.0)
    queue.confirm(asked[0], index=9, applied=1, now=0.1)
    queue.tick(TIMEOUT_S + 0.1)
    assert isinstance(reader.outcome, errors.WaitAppliedTimeoutError)


def test_stopping_fails_everything(queue: ReadQueue, asked: list[bytes]) -> None:
    confirmed, asking, waiting = Reader(), Reader(), Reader()
    queue.add(confirmed, 0.0)
    queue.start(0.0)
    queue.add(asking, 0.0)
    queue.confirm(asked[0], index=9, applied=1, now=0.1)
    queue.add(waiting, 0.2)
    queue.close()
    assert all(isinstance(reader.outcome, errors.StoppedError) for reader in (confirmed, asking, waiting))


@pytest.mark.parametrize("end", ["served", "failed", "closed"])
def test_very_many_readers_are_served_or_failed_some_a_turn(queue: ReadQueue, asked: list[bytes], end: str) -> None:
    # A round that was slow for seconds served all that had gathered meanwhile in one turn of the loop.
    readers = [Reader() for _ in range(2 * READERS_AT_ONCE + 1)]
    for reader in readers:
        queue.add(reader, 0.0)
    queue.start(0.0)
    if end == "failed":
        queue.tick(TIMEOUT_S + 1)
    else:
        queue.confirm(asked[0], index=5, applied=5, now=0.1)
    done = [sum(reader.outcome is not None for reader in readers)]
    if end == "closed":
        queue.close()
        stopped = [reader for reader in readers if isinstance(reader.outcome, errors.StoppedError)]
        assert len(stopped) == len(readers) - done[0]
    for _ in range(2):
        queue.serve()
        done.append(sum(reader.outcome is not None for reader in readers))
    if end != "closed":
        assert done == [READERS_AT_ONCE, 2 * READERS_AT_ONCE, len(readers)]
    assert all(reader.outcome is not None for reader in readers)


async def test_a_node_serves_them_turn_by_turn() -> None:
    world = World((1,))
    world.node.raw.campaign()
    world.node._wake()
    await world.turns()
    readers = [Reader() for _ in range(3 * READERS_AT_ONCE)]
    for reader in readers:
        world.node.read(reader)
    served = [0]
    while served[-1] < len(readers):
        await asyncio.sleep(0)
        served.append(sum(reader.outcome == "served" for reader in readers))
        assert len(served) < 100
    assert max(after - before for before, after in pairwise(served)) <= READERS_AT_ONCE
