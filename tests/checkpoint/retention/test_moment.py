"""A collection deletes nothing that its policy keeps at the moment of the deletion, while others change the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from raftkv.checkpoint.keys import DCP, FILES
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.retention.policy import Best, Policy
from raftkv.client.operations import Compare, Operation
from raftkv.client.values import DELETE, Event, TxnResult
from tests.checkpoint.retention.kept import FILE_BYTES, Kept
from tests.checkpoint.world import KEYS, play

BESTS = (Best("loss", "min"), Best("loss", "max", 2), Best("acc", "max"))
_number = st.sampled_from([0.0, -0.0, 1.0, 2.0, math.nan, math.inf, -math.inf])
_metrics = st.dictionaries(st.sampled_from(["loss", "acc"]), _number)
_policy = st.builds(
    Policy,
    keep_last=st.integers(0, 2),
    keep_every=st.sampled_from([0, 3]),
    keep_best=st.sets(st.sampled_from(BESTS), max_size=2).map(tuple),
    keep_for_s=st.sampled_from([0.0, 100.0]),
    max_age_s=st.sampled_from([None, None, 100.0]),
    max_bytes=st.sampled_from([None, None, 2 * FILE_BYTES, 3 * FILE_BYTES]),
)
_kind = st.sampled_from([FILES, DCP])
_place = st.tuples(_kind, st.integers(0, 4))
"""A checkpoint that exists: kind, and how many newer ones of the kind there are."""
_change = st.one_of(
    st.tuples(st.just("save"), _kind, _metrics),
    st.tuples(st.just("measure"), _place, _metrics),
    st.tuples(st.just("tag"), _place),
    st.tuples(st.just("untag")),
    st.tuples(st.just("resume")),
)
_clock = st.sampled_from([0.0, 0.0, -90.0, 500.0])
_collect = st.tuples(st.just("collect"), _policy, _clock, st.just(()))
_beside = st.tuples(
    st.just("collect"),
    _policy,
    _clock,
    st.lists(st.tuples(st.integers(0, 12), st.one_of(_change, _collect)), max_size=3),
)
_acts = st.lists(st.one_of(_change, _change, _beside), max_size=25)


def may_go(policy: Policy, gone: Checkpoint, there: Sequence[Checkpoint], held: set[str], now: float) -> bool:
    """Whether the documented rules let a checkpoint go, of those that are there."""
    kind = sorted((each for each in there if each.kind == gone.kind), key=lambda each: each.step)
    place = kind.index(gone)
    values = [[each.metrics.get(best.metric, math.nan) for each in kind] for best in policy.keep_best]
    kept = [
        policy.is_empty,
        place == len(kind) - 1,
        f"{gone.kind}@{gone.step}" in held,
        place >= len(kind) - policy.keep_last,
        policy.keep_every
        and not any(each.step // policy.keep_every == gone.step // policy.keep_every for each in kind[:place]),
        _age(gone, kind, now) < policy.keep_for_s,
        *(all(math.isnan(each.metrics.get(best.metric, math.nan)) for each in there) for best in policy.keep_best),
        *(_is_best(best, own, place) for best, own in zip(policy.keep_best, values, strict=True)),
    ]
    over_age = policy.max_age_s is not None and _age(gone, kind, now) > policy.max_age_s
    over_bytes = policy.max_bytes is not None and sum(each.size_bytes for each in there) > policy.max_bytes
    is_limited = policy.max_age_s is not None or policy.max_bytes is not None
    return not any(kept) and (over_age or over_bytes or not is_limited)


def _is_best(best: Best, values: Sequence[float], place: int) -> bool:
    value = values[place]
    better = [other for other in values if (other < value if best.mode == "min" else other > value)]
    equal = [number for number, other in enumerate(values) if other == value]
    return (
        not math.isnan(value)
        and len(better) < best.count
        and place in (equal[0], equal[-1], *equal[: best.count - len(better)])
    )


def _age(gone: Checkpoint, kind: Sequence[Checkpoint], now: float) -> float:
    place = kind.index(gone)
    followed = max(each.time for each in kind[: place + 2])
    return max(0.0, min(now, kind[-1].time) - followed)


@dataclass
class Interrupted:
    """A ``Control`` that lets others act between the txns of a collection."""

    world: Watched
    policy: Policy
    clock_s: float
    beside: dict[int, list[Any]]
    count: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world.control(), name)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        self.count += 1
        self.world.time_s -= self.clock_s  # others have other clocks
        for act in self.beside.pop(self.count, ()):
            await self.world.act(*act)
        self.world.time_s += self.clock_s
        self.world.collecting = self
        try:
            return await self.world.control().txn(compares, then, otherwise)
        finally:
            self.world.collecting = None


class Watched(Kept):
    """Registries on a store where each deletion of a record is compared with the rules."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.collecting: Interrupted | None = None
        self.step = 0
        self.there: dict[bytes, Checkpoint] = {}
        self.held: set[str] = set()
        self.wrong: list[str] = []
        self.store.on_commit.append(self._look)

    def _look(self, revision: int, events: list[Event]) -> None:
        records = KEYS.records.encode()
        for event in events:
            if not event.key.startswith(records):
                continue
            if event.type == DELETE:
                gone, by = self.there[event.key], self.collecting
                assert by is not None
                if not may_go(by.policy, gone, list(self.there.values()), self.held, self.time_s):
                    there = [(each.kind, each.step, each.metrics, each.time) for each in self.there.values()]
                    self.wrong.append(f"{gone.kind}@{gone.step} went by {by.policy} at {self.time_s}: {there}")
                del self.there[event.key]
            else:
                self.there[event.key] = Checkpoint.decode(event.value)

    def _at(self, place: tuple[str, int]) -> Checkpoint | None:
        kind = [each for each in self.there.values() if each.kind == place[0]]
        return sorted(kind, key=lambda each: -each.step)[min(place[1], len(kind) - 1)] if kind else None

    async def act(self, act: str, *words: Any) -> None:
        registry = self.registry()
        if act == "save":
            self.step += 1
            await self.save(self.step, words[1], kind=words[0])
        elif act == "measure" and (found := self._at(words[0])):
            await registry.set_metrics(found.step, found.kind, words[1])
        elif act == "tag" and (found := self._at(words[0])):
            await registry.tag("t", found)
            self.held = {f"{found.kind}@{found.step}"}
        elif act == "untag":
            await registry.untag("t")
            self.held = set()
        elif act == "resume":
            await self.next_generation()
        elif act == "collect":
            policy, clock_s, beside = words
            places: dict[int, list[Any]] = {}
            for number, inner in beside:
                places.setdefault(number, []).append(inner)
            self.time_s += clock_s
            await self.collect(policy, control=Interrupted(self, policy, clock_s, places))
            self.time_s -= clock_s


async def _play(acts: list[tuple[Any, ...]], path: Path) -> None:
    world = Watched(path)
    for act in acts:
        await world.act(*act)
        assert not world.wrong, world.wrong


_BOTH = [("save", FILES, {"acc": 1.0}), ("save", FILES, {}), ("save", DCP, {}), ("save", DCP, {})]
_MOST = 3 * FILE_BYTES


@settings(max_examples=12)
@given(_acts)
@example(
    [
        *_BOTH,
        (
            "collect",
            Policy(max_bytes=_MOST),
            0.0,
            [(4, ("collect", Policy(max_bytes=_MOST, keep_best=(BESTS[2],)), 0.0, ()))],
        ),
    ]
)
@example([*_BOTH, ("collect", Policy(keep_best=(BESTS[2],)), 0.0, [(4, ("measure", (FILES, 1), {"acc": math.nan}))])])
def test_nothing_goes_that_the_rules_keep_at_that_moment(tmp_path_factory: Any, acts: list[tuple[Any, ...]]) -> None:
    play(_play(acts, tmp_path_factory.mktemp("place")))
