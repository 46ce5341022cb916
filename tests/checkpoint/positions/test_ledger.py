"""Ranks that take ranges: in committed history every sample is used once, though ranks die and answers get lost."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.checkpoint import positions
from raftkv.checkpoint.commit.claim import Claim, claim_generation
from raftkv.checkpoint.errors import FenceBroken
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.positions import AsyncLedger as Ledger
from raftkv.checkpoint.positions import Position, RangeLost, State, TakenRange, Used, overlaps, size
from raftkv.client.operations import put
from raftkv.client.records import RecordError
from raftkv.client.sync.loop import LoopThread
from raftkv.errors import ConfigError
from tests.virtual_store.direct import StoreWorld

RUN = "job"


class Story:
    """A run of some ranks, with a model that counts how often each sample went into it."""

    def __init__(self, seed: int, length: int, range_size: int, lost: float) -> None:
        self.rng = random.Random(seed)
        self.world = StoreWorld()
        self.control = self.world.control(seed, lost)
        self.ledger = Ledger(self.control, RUN)
        self.range_size = range_size
        self.length = length
        self.model = [0] * length
        self.saved = (Used.begin(length), list(self.model))
        self.ranges: dict[int, TakenRange | None] = {}
        self.claims: list[Claim] = []

    @property
    def claim(self) -> Claim:
        return self.claims[-1]

    async def begin(self, world_size: int) -> None:
        """A new generation goes on from the checkpoint: all its ranks open the ledger."""
        source = f"round/{len(self.claims)}"
        self.claims.append(await claim_generation(self.control, RUN, source, now=lambda: 0.0))
        used, model = self.saved
        self.model = list(model)
        self.ranges = dict.fromkeys(range(world_size))
        again = Used.decode(used.encode())
        await asyncio.gather(
            *(self.ledger.open(self.claim, again, range_size=self.range_size) for _ in range(world_size))
        )

    async def work(self, rank: int) -> None:
        taken = self.ranges[rank]
        if taken is None or taken.done == taken.end:
            self.ranges[rank] = await self.ledger.take(self.claim, rank)
            return
        if self.rng.random() < 0.1:
            self.ranges[rank] = None
            await self.ledger.give_back(self.claim, taken)
            return
        upto = self.rng.randint(taken.done + 1, taken.end)
        for sample in range(taken.done, upto):
            self.model[sample] += 1
        self.ranges[rank] = await self.ledger.mark(self.claim, taken, upto)

    async def step(self) -> None:
        """Several ranks work side by side."""
        ranks = self.rng.sample(sorted(self.ranges), self.rng.randint(1, len(self.ranges)))
        await asyncio.gather(*(self.work(rank) for rank in ranks))

    async def commit(self) -> None:
        self.saved = (await self.ledger.used(), list(self.model))
        assert size(self.saved[0].done) == sum(self.model)

    async def zombie(self) -> None:
        """A rank of a generation that is over wakes up: it changes nothing."""
        old = self.rng.choice(self.claims[:-1])
        before = dict(self.world.store.items)
        with pytest.raises(FenceBroken):
            await self.rng.choice(
                [
                    lambda: self.ledger.take(old, 0),
                    lambda: self.ledger.mark(old, TakenRange(0, 5, 0, 0, 0), 5),
                    lambda: self.ledger.give_back(old, TakenRange(0, 5, 0, 0, 0)),
                    lambda: self.ledger.open(old, Used.begin(self.length), range_size=1),
                    lambda: self.ledger.next_epoch(old, 5),
                ]
            )()
        assert self.world.store.items == before

    def check(self) -> None:
        """Free, taken and done ranges are the epoch, and do not overlap."""
        base = f"{RegistryKeys(RUN).base}position/train/"
        items = {key.decode(): item.value for key, item in self.world.store.items.items()}
        state = State.decode(items[f"{base}state"])
        taken = [TakenRange.decode(value) for key, value in items.items() if key.startswith(f"{base}taken/")]
        all_ranges = [*state.free, *state.done, *((one.first, one.end) for one in taken)]
        assert not overlaps(all_ranges)
        assert size(all_ranges) == state.length
        assert max(self.model, default=0) <= 1


async def _run(seed: int, length: int, range_size: int, lost: float = 0.0) -> None:
    story = Story(seed, length, range_size, lost)
    await story.begin(story.rng.randint(1, 5))
    for _ in range(story.rng.randint(0, 60)):
        event = story.rng.random()
        if event < 0.1:
            await story.commit()
        elif event < 0.18:
            await story.begin(story.rng.randint(1, 5))
        elif event < 0.22 and len(story.claims) > 1:
            await story.zombie()
        else:
            await story.step()
        story.check()
    while not await story.ledger.is_over():
        await story.step()
    await story.commit()
    assert story.model == [1] * length
    assert story.saved[0].remaining == 0
    await asyncio.gather(*(story.ledger.next_epoch(story.claim, 1) for _ in story.ranges))
    assert await story.ledger.used() == Used(1, length, ())
    for late in list(story.world.sent):  # copies of everything that was ever sent arrive again
        late()
    assert await story.ledger.used() == Used(1, length, ())
    story.model = [0] * length
    story.check()


@pytest.mark.long
@settings(max_examples=40)
@given(st.integers(0, 10**9), st.integers(0, 60), st.integers(1, 12))
def test_every_sample_of_the_committed_history_is_used_once(seed: int, length: int, range_size: int) -> None:
    asyncio.run(_run(seed, length, range_size))


@pytest.mark.parametrize("seed", range(3))
def test_lost_answers_use_nothing_twice(seed: int) -> None:
    asyncio.run(_run(seed, 30, 6, lost=0.03))


def _alone(act: Any) -> None:
    async def run() -> None:
        control = StoreWorld().control()
        claim = await claim_generation(control, RUN, "claim/a", now=lambda: 0.0)
        await act(Ledger(control, RUN), claim)

    asyncio.run(run())


def test_a_range_that_was_given_back_is_lost() -> None:
    async def act(ledger: Ledger, claim: Claim) -> None:
        await ledger.open(claim, Used.begin(10), range_size=6)
        taken = await ledger.take(claim, 3)
        assert taken is not None
        half = await ledger.mark(claim, taken, 4)
        assert await ledger.mark(claim, taken, 4) == half  # as after a lost answer
        await ledger.give_back(claim, half)
        for attempt in (ledger.mark(claim, half, 5), ledger.mark(claim, half, 6), ledger.give_back(claim, half)):
            with pytest.raises(RangeLost, match="samples 0 to 6 of epoch 0 are not rank 3's"):
                await attempt
        assert (await ledger.used()).done == ((0, 4),)
        again = await ledger.take(claim, 1)
        assert again is not None
        assert (again.first, again.end) == (4, 10)

    _alone(act)


async def test_mark_that_comes_while_a_range_is_given_back_is_not_taken_again() -> None:
    world = StoreWorld()
    ledger, other = Ledger(slow := world.control(), RUN), Ledger(world.control(), RUN)
    claim = await claim_generation(slow, RUN, "claim/a", now=lambda: 0.0)
    await ledger.open(claim, Used.begin(10), range_size=10)
    taken = await ledger.take(claim, 0)
    assert taken is not None
    txn, calls = slow.txn, 0

    async def marked_before_the_second(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            await other.mark(claim, taken, 4)
        return await txn(*arguments)

    slow.txn = marked_before_the_second
    with pytest.raises(RangeLost):
        await ledger.give_back(claim, taken)
    assert (await ledger.used()).done == ((0, 4),)


async def _cancelled(control: Any, call: Any, *, is_applied: bool) -> None:
    """Cancel a call at its last txn that writes, before the store has it or before the answer comes."""
    txn = control.txn

    async def cut(compares: Any, then: Any, otherwise: Any = ()) -> Any:
        if not any(operation.writes for operation in then):
            return await txn(compares, then, otherwise)
        if is_applied:
            await txn(compares, then, otherwise)
        raise asyncio.CancelledError

    control.txn = cut
    try:
        with pytest.raises(asyncio.CancelledError):
            await call
    finally:
        control.txn = txn


@pytest.mark.parametrize("is_applied", [False, True])
async def test_call_that_was_cancelled_can_be_made_again(is_applied: bool) -> None:
    """A range whose end was marked was told to be lost; one that was taken was lost for its epoch."""
    control = StoreWorld().control()
    ledger = Ledger(control, RUN)
    claim = await claim_generation(control, RUN, "claim/a", now=lambda: 0.0)
    await ledger.open(claim, Used.begin(20), range_size=10)
    await _cancelled(control, ledger.take(claim, 3), is_applied=is_applied)
    first = await ledger.take(claim, 3)
    assert first is not None
    assert (first.first, first.end) == (0, 10)
    await _cancelled(control, ledger.mark(claim, first, 4), is_applied=is_applied)
    half = await ledger.mark(claim, first, 6)
    await _cancelled(control, ledger.mark(claim, half, 8), is_applied=is_applied)
    await _cancelled(control, ledger.mark(claim, half, 10), is_applied=is_applied)
    assert (await ledger.mark(claim, half, 10)).done == 10
    with pytest.raises(RangeLost):
        await ledger.give_back(claim, half)
    second = await ledger.take(claim, 3)
    assert second is not None
    await _cancelled(control, ledger.mark(claim, second, 15), is_applied=is_applied)
    await _cancelled(control, ledger.give_back(claim, second), is_applied=is_applied)
    await ledger.give_back(claim, second)
    with pytest.raises(RangeLost):
        await ledger.mark(claim, second, 20)
    assert (await ledger.used()).done == ((0, 15 if is_applied else 10),)
    while (left := await ledger.take(claim, 3)) is not None:
        await ledger.mark(claim, left, left.end)
    assert await ledger.is_over()


def test_impossible_ledgers_are_refused_in_one_line() -> None:
    async def act(ledger: Ledger, claim: Claim) -> None:
        with pytest.raises(ConfigError, match=r"not open: call open\(\)"):
            await ledger.take(claim, 0)
        with pytest.raises(ConfigError, match="at least one sample"):
            await ledger.open(claim, Used.begin(10), range_size=0)
        with pytest.raises(TypeError, match="range_size is a whole number"):  # which could not be read then
            await ledger.open(claim, Used.begin(10), range_size=6.0)
        with pytest.raises(TypeError, match="used is a Used"):
            await ledger.open(claim, Position.begin(10), range_size=6)
        with pytest.raises(ConfigError, match=r"could not be read again: .* length is -1"):
            await ledger.open(claim, Used.begin(-1), range_size=6)
        await ledger.open(claim, Used.begin(10), range_size=6)
        taken = await ledger.take(claim, 0)
        assert taken is not None
        with pytest.raises(TypeError, match="rank is a whole number"):
            await ledger.take(claim, 0.0)
        with pytest.raises(ConfigError, match=r"could not be read again: .* rank is -1"):  # as without RANK
            await ledger.take(claim, -1)
        with pytest.raises(TypeError, match="done is a whole number"):
            await ledger.mark(claim, taken, 2.0)
        assert (await ledger.used()).done == ()
        for upto in (-1, 7):
            with pytest.raises(ConfigError, match="used up to 0"):
                await ledger.mark(claim, taken, upto)
        with pytest.raises(ConfigError, match="10 samples are left"):
            await ledger.next_epoch(claim, 1)
        with pytest.raises(TypeError, match="length is a whole number"):
            await ledger.next_epoch(claim, 1, 7.0)
        while taken is not None:
            await ledger.mark(claim, taken, taken.end)
            taken = await ledger.take(claim, 0)
        with pytest.raises(ConfigError, match=r"could not be read again: .* length is -1"):
            await ledger.next_epoch(claim, 1, -1)

    _alone(act)
    with pytest.raises(ConfigError):
        Ledger(StoreWorld().control(), RUN, "a/..")


def test_programs_without_an_event_loop_have_the_same() -> None:
    loop = LoopThread("ledger")
    control = StoreWorld().control()
    registry: Any = SimpleNamespace(target=lambda: (loop, SimpleNamespace(control=control, run_id=RUN)))
    claim = loop.run(claim_generation(control, RUN, "claim/a", now=lambda: 0.0))
    ledger = positions.Ledger(registry, "train")
    ledger.open(claim, Used.begin(10), range_size=4)
    found = []
    while (taken := ledger.take(claim, 0)) is not None:
        found.append((taken.first, ledger.mark(claim, taken, taken.end).done))
    assert found == [(0, 4), (4, 8), (8, 10)]
    assert ledger.is_over()
    ledger.next_epoch(claim, 1, 7, "v2")
    assert ledger.used() == Used(1, 7, (), "v2")
    loop.close()


@pytest.mark.parametrize(
    "done", ["7", "[[0]]", "[[0,1,2]]", "[[3,2]]", "[[-1,2]]", "[[0,3],[2,4]]", '[["a",2]]', "[[0,99]]", "[[true,2]]"]
)
def test_used_samples_that_cannot_be_are_refused(done: str) -> None:
    with pytest.raises(RecordError):
        Used.decode(f'{{"epoch":0,"length":10,"done":{done}}}'.encode())


@pytest.mark.parametrize(
    ("key", "record"),
    [
        ("taken/000000000000005", TakenRange(0, 4, 4, 0, 7)),  # of another key
        ("taken/000000000000005", TakenRange(5, 9, 12, 0, 7)),  # more is done than was taken
        ("taken/000000000000005", TakenRange(5, 4, 4, 0, 7)),
        ("state", State(0, 10, 2, 1, ((0, 12),))),  # beyond the epoch
        ("state", State(0, 10, 2, 1, ((0, 6),), ((4, 8),))),  # free and done
    ],
)
async def test_record_that_cannot_be_true_is_refused_and_not_counted(key: str, record: Any) -> None:
    world = StoreWorld()
    control = world.control(0, 0.0)
    ledger = Ledger(control, RUN)
    claim = await claim_generation(control, RUN, "round/1", now=lambda: 0.0)
    await ledger.open(claim, Used.begin(10), range_size=2)
    world.store.txn((), (put(f"{RegistryKeys(RUN).base}position/train/{key}", record.encode()),))
    for refused in (ledger.used, lambda: ledger.take(claim, 0)):
        with pytest.raises(RecordError, match=key):
            await refused()
    with pytest.raises(ConfigError, match="beyond"):
        await ledger.open(claim, Used(0, 10, ((0, 12),)), range_size=2)
