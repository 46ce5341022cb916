"""Retention policies: each rule by example, and what holds for all of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.checkpoint.keys import DCP, FILES
from raftkv.checkpoint.records import Checkpoint, Reference
from raftkv.checkpoint.retention.policy import Best, Decision, Policy, ages_of, decide
from raftkv.errors import ConfigError

HOUR_S = 3600.0
NOW = 1_800_000_000.0


def checkpoint(step: int, *, kind: str = FILES, time: float = 0.0, size: int = 10, **metrics: float) -> Checkpoint:
    return Checkpoint("job", step, 1, step, kind, 1, f"u{step}", "", "", 1, size, None, metrics, {}, "", time)


def every_hour(count: int, **more: Any) -> list[Checkpoint]:
    """Checkpoints of steps 100, 200, ...: one an hour, the last one now."""
    return [checkpoint(100 * n, time=NOW - (count - n) * HOUR_S, **more) for n in range(1, count + 1)]


def decisions(
    policy: Policy, checkpoints: Collection[Checkpoint], held: Collection[Reference] = (), now: float = NOW
) -> list[Decision]:
    latest: dict[str, int] = {}
    for each in checkpoints:
        latest[each.kind] = max(latest.get(each.kind, 0), each.step)
    return decide(policy, checkpoints, latest=latest, held={each: ["pin reader"] for each in held}, now=now)


def kept(policy: Policy, checkpoints: Collection[Checkpoint], **more: Any) -> list[int]:
    return [each.checkpoint.step for each in decisions(policy, checkpoints, **more) if each.is_kept]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (Policy(), [100, 200, 300, 400, 500, 600]),
        (Policy(keep_last=2), [500, 600]),
        (Policy(keep_last=99), [100, 200, 300, 400, 500, 600]),
        (Policy(keep_every=300), [100, 300, 600]),
        (Policy(keep_every=150), [100, 200, 300, 500, 600]),
        (Policy(keep_last=2, keep_every=300), [100, 300, 500, 600]),
        (Policy(keep_for_s=2.5 * HOUR_S), [300, 400, 500, 600]),
        (Policy(max_age_s=2.5 * HOUR_S), [300, 400, 500, 600]),
        (Policy(max_age_s=0), [500, 600]),  # 500 was the newest until now
        (Policy(keep_every=300, max_age_s=0), [100, 300, 500, 600]),
        (Policy(max_bytes=35), [400, 500, 600]),
        (Policy(max_bytes=0), [600]),
        (Policy(keep_every=300, max_bytes=35), [100, 300, 600]),
        (Policy(keep_every=300, max_bytes=45), [100, 300, 500, 600]),
        (Policy(keep_last=3, max_bytes=10_000), [100, 200, 300, 400, 500, 600]),
        (Policy(keep_last=3, max_bytes=1), [400, 500, 600]),
    ],
)
def test_checkpoints_that_policies_keep(policy: Policy, steps: Sequence[int]) -> None:
    assert kept(policy, every_hour(6)) == steps


def test_best_are_kept_and_of_equal_ones_the_oldest_and_the_newest() -> None:
    some = [
        checkpoint(1, loss=3.0), checkpoint(2, loss=1.0), checkpoint(3, loss=1.0), checkpoint(4, loss=math.nan),
        checkpoint(5), checkpoint(6, loss=-math.inf), checkpoint(7, loss=9.0),
    ]  # fmt: skip
    assert kept(Policy(keep_best=(Best("loss"),)), some) == [6, 7]
    assert kept(Policy(keep_best=(Best("loss", count=2),)), some) == [2, 3, 6, 7]
    assert kept(Policy(keep_best=(Best("loss", "max", 2),)), some) == [1, 7]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_value_repeated_at_later_steps_displaces_no_best(mode: str) -> None:
    """File the last validation's value with every save, as older versions of the callbacks did."""
    sign = -1.0 if mode == "max" else 1.0
    some = [checkpoint(step, loss=sign * loss) for step, loss in ((1, 1.0), (2, 0.5), (3, 0.5), (4, 0.5), (5, 2.0))]
    assert {2, 4, 5} == set(kept(Policy(keep_best=(Best("loss", mode),)), some))
    assert {1, 2, 3, 4, 5} == set(kept(Policy(keep_best=(Best("loss", mode, 2),)), some))


def test_all_stay_while_no_checkpoint_has_the_metric() -> None:
    """A misspelt name, or an evaluator that has not reported yet, must not cost the best."""
    policy = Policy(keep_last=1, keep_best=(Best("accuracy", "max"),))
    some = [checkpoint(1, acc=1.0), checkpoint(2, acc=0.5), checkpoint(3, accuracy=math.nan)]
    assert kept(policy, some) == [1, 2, 3]
    assert decisions(policy, some)[0].why == ("no checkpoint has the metric accuracy yet",)
    assert kept(policy, [*some, checkpoint(4, kind=DCP, accuracy=0.1)]) == [4, 3]
    assert kept(replace(policy, max_bytes=0), some) == [1, 2, 3]


def test_each_kind_has_its_own_rules_and_all_share_the_bytes() -> None:
    some = [*every_hour(4), *every_hour(4, kind=DCP)]
    assert kept(Policy(keep_last=2), some) == [300, 400, 300, 400]
    assert kept(Policy(max_bytes=60), some) == [200, 300, 400, 200, 300, 400]
    assert kept(Policy(max_bytes=50), some) == [300, 400, 200, 300, 400]  # the older first, of equal ones by kind


def test_why_is_said() -> None:
    found = decisions(Policy(keep_last=1, keep_every=300, max_bytes=0), every_hour(3), [Reference("job", FILES, 200)])
    assert [each.why for each in found] == [
        ("every 300",), ("held: pin reader",), ("latest", "last 1", "every 300"),
    ]  # fmt: skip
    assert decisions(Policy(max_age_s=1), every_hour(3))[0].why == ("older than 1 s",)
    assert decisions(Policy(max_bytes=10), every_hour(2))[0].why == ("more than 10 bytes in all",)
    assert decisions(Policy(keep_last=1), every_hour(2))[0].why == ("no rule keeps it",)
    assert decisions(Policy(max_bytes=99), every_hour(2))[0].why == ("no rule deletes it",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": -1}, {"keep_every": -5}, {"keep_for_s": -0.5}, {"max_age_s": math.nan}, {"max_bytes": -1},
        {"keep_best": (Best("loss", "least"),)}, {"keep_best": (Best("loss", count=0),)},
    ],
)  # fmt: skip
def test_rules_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Policy(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 1.5},
        {"keep_last": math.inf},
        {"keep_every": 0.5},
        {"keep_every": "9"},
        {"keep_best": (Best("a", count=1.5),)},
    ],
)
def test_counts_that_are_no_whole_numbers_are_refused_before_anything_is_collected(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="is a whole number, not"):
        Policy(**wrong)


def test_the_age_counts_from_the_next_checkpoint() -> None:
    some = every_hour(4)
    assert list(ages_of(some, NOW).values()) == [2 * HOUR_S, HOUR_S, 0.0, 0.0]
    assert ages_of(some, NOW + 1e6) == ages_of(some, NOW)  # a run that has ended does not age


@given(count=st.integers(1, 6), whose=st.integers(0, 6), wrong_s=st.floats(-1e6, 1e6), late_s=st.floats(0, 1e6))
def test_one_wrong_clock_makes_nothing_look_older(count: int, whose: int, wrong_s: float, late_s: float) -> None:
    """Whether it is the clock of one of those who committed, or the collector's."""
    some = every_hour(count)
    now = NOW + late_s
    right = ages_of(some, now)
    true_ages = {each.reference: now - each.time for each in some}
    assert all(right[each.reference] <= true_ages[each.reference] for each in some)
    if whose < count:
        some[whose] = replace(some[whose], time=some[whose].time + wrong_s)
    else:
        now += wrong_s
    assert all(age <= true_ages[reference] for reference, age in ages_of(some, now).items())


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf])
def test_times_that_are_none_delete_nothing(time: float) -> None:
    some = every_hour(3)
    for at in range(3):
        odd = [replace(each, time=time) if index == at else each for index, each in enumerate(some)]
        assert all(age <= 2 * HOUR_S for age in ages_of(odd, NOW).values())


_times = st.floats(NOW - 1e6, NOW + 1e6)
_checkpoints = st.lists(
    st.builds(
        lambda step, kind, time, size, loss: checkpoint(step, kind=kind, time=time, size=size, loss=loss),
        st.integers(0, 40), st.sampled_from([FILES, DCP]), _times, st.integers(0, 50),
        st.floats(allow_nan=True, allow_infinity=True),
    ),
    max_size=12, unique_by=lambda each: each.reference,
)  # fmt: skip
_keeping = {
    "keep_last": st.integers(0, 4),
    "keep_every": st.integers(0, 10),
    "keep_best": st.lists(
        st.builds(Best, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)), max_size=2
    ),
    "keep_for_s": st.floats(0, 1e6),
}
_limits = {"max_age_s": st.none() | st.floats(0, 1e6), "max_bytes": st.none() | st.integers(0, 300)}
_policies = st.builds(Policy, **_keeping, **_limits)


def _references(found: Sequence[Decision], *, kept: bool) -> set[Reference]:
    return {each.checkpoint.reference for each in found if each.is_kept == kept}


@settings(max_examples=50)
@given(_policies, _checkpoints, st.data())
def test_the_latest_and_what_is_held_always_stays(policy: Policy, some: list[Checkpoint], data: st.DataObject) -> None:
    held = data.draw(st.sets(st.sampled_from([each.reference for each in some]))) if some else set()
    found = decisions(policy, some, held)
    assert len(found) == len(some)
    newest = {kind: max(each.step for each in some if each.kind == kind) for kind in {each.kind for each in some}}
    assert not {each for each in _references(found, kept=False) if each in held or each.step == newest[each.kind]}


@settings(max_examples=50)
@given(_policies, _checkpoints, st.randoms())
def test_order_is_no_matter_and_a_second_time_deletes_nothing(policy, some, random):
    found = decisions(policy, some)
    random.shuffle(some)
    assert decisions(policy, some) == found
    left = [each.checkpoint for each in found if each.is_kept]
    if not policy.keep_for_s and policy.max_age_s is None:  # ages shrink when the next checkpoint goes
        assert _references(decisions(policy, left), kept=False) == set()


@settings(max_examples=50)
@given(st.fixed_dictionaries(_keeping), st.fixed_dictionaries(_limits), _checkpoints)
def test_a_limit_deletes_nothing_that_a_rule_keeps(keeping: dict[str, Any], limits: dict[str, Any], some: Any) -> None:
    rules = Policy(**keeping)
    if rules.is_empty:
        return
    protected = _references(decisions(rules, some), kept=True)
    assert protected <= _references(decisions(Policy(**keeping, **limits), some), kept=True)


@settings(max_examples=50)
@given(_policies, _checkpoints)
def test_no_more_bytes_than_the_limit_unless_rules_keep_them(policy: Policy, some: list[Checkpoint]) -> None:
    if policy.max_bytes is None:
        return
    found = decisions(policy, some)
    left = sum(each.checkpoint.size_bytes for each in found if each.is_kept)
    free = [each for each in found if each.is_kept and each.why == ("no rule deletes it",)]
    assert left <= policy.max_bytes or not free


@settings(max_examples=50)
@given(_checkpoints, st.integers(0, 300))
def test_bytes_go_from_the_oldest_on(some: list[Checkpoint], limit: int) -> None:
    found = decisions(Policy(max_bytes=limit), some)
    ages = ages_of(sorted(some, key=lambda each: (each.kind, each.step)), NOW)
    gone = [ages[each] for each in _references(found, kept=False)]
    free = [ages[each.checkpoint.reference] for each in found if each.is_kept and "latest" not in each.why]
    assert not gone or not free or min(gone) >= max(free)
