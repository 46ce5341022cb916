"""From one generation to the next by its head: every reader comes to what is recorded, or says that it cannot."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.client.operations import Delete, Put
from raftkv.client.records import RecordError
from raftkv.client.values import PUT, Event, KeyValue
from raftkv.training.records import BROKEN, CLOSED, RUNNING, GenerationRecord, Head, Member, RunKeys, State
from raftkv.training.rendezvous.world import HEAD_MAX_BYTES, RecordCache, Roster, World, new_head
from tests.virtual_store.direct import StoreWorld

from .test_record_cache import Watched

KEYS = RunKeys("job")
TEXTS = st.text(max_size=6)
MEMBERS = st.lists(
    st.builds(Member, st.text(min_size=1, max_size=6), TEXTS, TEXTS, st.integers(1, 9), TEXTS),
    max_size=12,
    unique_by=lambda member: member.id,
).map(tuple)


def node(number: int, **changes: Any) -> Member:
    return Member(
        **{"id": f"n{number:05d}-0123abcd", "host": f"n{number:05d}", "address": f"10.0.0.{number}", **changes}
    )


def cache_of(members: tuple[Member, ...], revision: int = 5, watched: Any = None) -> RecordCache:
    """A cache that has read a generation, over a watch that a test feeds."""
    cache = RecordCache(watched or Watched(), "job", lambda: None)
    record = GenerationRecord(7, members, 1.0).encode()
    cache.load([KeyValue(KEYS.round.encode(), record, 1, 1, revision, 0)], revision)
    return cache


@given(MEMBERS, MEMBERS, st.randoms(use_true_random=False))
def test_head_leads_from_any_generation_to_the_next_or_says_that_it_does_not(before, after, rng):
    mixed = list({member.id: member for member in (*before, *after)}.values())
    rng.shuffle(mixed)
    for members in (after, before, tuple(mixed)):
        head = new_head(Roster(before), members, State(8, RUNNING))
        assert len(head.encode()) <= HEAD_MAX_BYTES
        found = Roster(before).after(Head.decode(head.encode()))
        if found is not None:
            assert (found.members, found.marks, found.digest) == (members, Roster(members).marks, head.digest)
        else:
            assert Roster(before).changes(members) is None


@given(MEMBERS, MEMBERS)
def test_rosters_have_one_digest_only_if_they_are_equal(one: tuple[Member, ...], other: tuple[Member, ...]) -> None:
    assert (Roster(one).digest == Roster(other).digest) == (one == other)


def test_members_of_other_fields_or_order_have_other_digests() -> None:
    first = Member("ab", "c", "d", 1, "e")
    others = [Member("a", "bc", "d", 1, "e"), Member("ab", "cd", "", 1, "e"), Member("ab", "c", "d", 11, "e")]
    digests = {Roster((one, node(1))).digest for one in [first, *others]} | {Roster((node(1), first)).digest}
    assert len(digests) == 5


@pytest.mark.parametrize("nodes", [64, 1024, 12_500])
def test_head_of_one_fault_has_the_same_size_for_any_number_of_nodes(nodes: int) -> None:
    before = Roster(tuple(map(node, range(nodes))))
    survivors = before.members[: nodes // 2] + before.members[nodes // 2 + 1 :]
    state = State(1000, RUNNING, min_nodes=10_000, max_nodes=12_500, time=1764390000.123)
    lost = new_head(before, survivors, state)
    assert len(KEYS.state) + len(lost.encode()) <= 200
    replaced = new_head(before, (*survivors, node(nodes)), state)
    assert len(replaced.encode()) <= 300


def test_change_of_many_nodes_is_left_to_the_whole_record() -> None:
    few, many, state = tuple(map(node, range(20))), tuple(map(node, range(100))), State(8, RUNNING)
    assert Roster(few).after(new_head(Roster(few), few[::-1], state)) is None
    assert len(new_head(Roster(), few, state).added) == 20
    gathered = new_head(Roster(), many, state)
    assert (gathered.added, gathered.digest) == ((), Roster(many).digest)
    assert Roster().after(gathered) is None


@pytest.mark.parametrize(
    "value",
    [
        b'{"epoch":1,"phase":"running","digest":1}',
        b'{"epoch":1,"phase":"running","digest":"a","left":{}}',
        b'{"epoch":1,"phase":"running","digest":"a","left":[-1]}',
        b'{"epoch":1,"phase":"running","digest":"a","left":[true]}',
        b'{"epoch":1,"phase":"running","digest":"a","added":[1]}',
        b'{"epoch":1,"phase":"running","digest":"a","added":[["x",{"id":"a","host":"b"}]]}',
        b'{"epoch":1,"phase":"running","digest":"a","added":[[0,{"id":"a"}]]}',
    ],
)
def test_head_that_no_arbiter_writes_is_refused(value: bytes) -> None:
    with pytest.raises(RecordError):
        Head.decode(value)


THREE = tuple(map(node, range(3)))
NEXT = GenerationRecord(8, (THREE[0], THREE[2], node(3)), 2.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": "0" * 16},
        {"digest": ""},
        {"left": (0,)},
        {"left": (1, 1)},
        {"left": (99,)},
        {"left": (-1,)},
        {"added": ()},
        {"added": ((0, node(3)),)},
        {"added": ((2, node(4)),)},
    ],
    ids=str,
)
def test_wrong_head_costs_a_read_and_leads_to_what_is_recorded(wrong: dict[str, Any]) -> None:
    asyncio.run(begin_next(wrong))


def test_right_head_is_followed_without_a_read() -> None:
    asyncio.run(begin_next({}))


async def begin_next(wrong: dict[str, Any]) -> None:
    """Begin a generation with a head, and look at what a follower makes of it."""
    world = StoreWorld()
    first = GenerationRecord(7, THREE, 1.0)
    world.store.txn((), [Put(KEYS.round, first.encode()), Put(KEYS.state, State(7, RUNNING).encode())])
    cache = RecordCache(world.control(), "job", lambda: None)
    cache.start()
    await cache.ready()
    state = State(8, RUNNING, time=NEXT.time)
    head = replace(new_head(cache.roster, NEXT.members, state), **wrong)
    reads = world.txns
    done = world.store.txn((), [Put(KEYS.round, NEXT.encode()), Put(KEYS.state, head.encode())])
    await cache.reached(done.revision)
    assert (cache.round, cache.roster.members, cache.round_revision) == (NEXT, NEXT.members, done.revision)
    assert cache.state == state
    assert world.txns - reads == bool(wrong)
    cache.close()


async def test_generation_of_a_version_without_heads_is_read() -> None:
    world = StoreWorld()
    cache = RecordCache(world.control(), "job", lambda: None)
    cache.start()
    await cache.ready()
    for number, members in enumerate((THREE, NEXT.members), 1):
        state = State(number, RUNNING)
        record = GenerationRecord(number, members)
        done = world.store.txn((), [Put(KEYS.round, record.encode()), Put(KEYS.state, state.encode())])
        await cache.reached(done.revision)
        assert (cache.round, cache.state, cache.round_revision) == (record, state, done.revision)
    done = world.store.txn((), [Delete(key) for key in (KEYS.round, KEYS.state)])
    await cache.reached(done.revision)
    assert (cache.round, cache.state, cache.round_revision, cache.roster.members) == (None, None, 0, ())
    cache.close()


def feed(watched: Watched, head: Head, revision: int) -> None:
    """A generation begins: the watch brings its head."""
    watched.on_events(revision, [Event(PUT, KeyValue(KEYS.state.encode(), head.encode(), 1, 1, revision, 0))])


def test_heads_are_taken_one_after_the_other_and_each_once() -> None:
    watched = Watched()
    cache = cache_of(THREE, watched=watched)
    heads = []
    for number in range(8, 12):
        members = (*cache.roster.members[1:], node(number))
        state = State(number, RUNNING, time=float(number))
        heads.append((new_head(cache.roster, members, state), 2 * number))
        feed(watched, *heads[-1])
        assert cache.round == GenerationRecord(number, members, float(number))
        assert (cache.round_revision, cache.roster.members) == (2 * number, members)
    for head, revision in heads:
        feed(watched, head, revision)  # as a watch may that has begun anew
    assert (cache.round, cache.round_revision) == (GenerationRecord(11, members, 11.0), 22)


@pytest.mark.parametrize(
    ("revision", "state", "why"),
    [
        (9, Head(8, RUNNING, digest="d"), None),
        (9, State(8, RUNNING), None),
        (12, State(8, RUNNING), None),
        (12, Head(9, RUNNING, digest="d"), "another generation has begun"),
        (12, State(9, RUNNING), "another generation has begun"),
        (12, Head(8, RUNNING, digest="d"), "another generation has begun"),
        (4, State(7, RUNNING), "another generation has begun"),
        (0, None, "another generation has begun"),
        (12, State(8, BROKEN, "lost 1 of 3"), "lost 1 of 3"),
        (12, State(8, CLOSED, "finished"), "finished"),
    ],
    ids=str,
)
def test_fence_tells_the_end_of_its_generation(revision, state, why):
    fence = World("job", 8, NEXT.members, 0, 9).fence
    assert fence.watched.parts == ((KEYS.state, ""),)  # not the round, which is large
    items = {}
    if state is not None:
        items[KEYS.state.encode()] = KeyValue(b"", state.encode(), 1, 1, revision, 0)
    assert fence.why_over(items) == why
