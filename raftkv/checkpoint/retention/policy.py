"""Which checkpoints a retention policy would delete; pure.

::

    policy = Policy(keep_last=3, keep_every=1000, keep_best=(Best("loss"),), max_bytes=2 << 40)
    for decision in decide(policy, checkpoints, latest, held, now):
        decision.is_kept, decision.why

The rules

- ``keep_...`` rules protect. A checkpoint stays if any of them names it.
- ``max_...`` are limits. With a limit, an unprotected checkpoint stays until the limit is exceeded; without a limit it
  is deleted at once. ``max_age_s`` deletes older checkpoints; ``max_bytes`` deletes the oldest unprotected ones until
  the rest fits. A limit never deletes a protected checkpoint, so more than ``max_bytes`` may stay.
- The latest of each kind stays under every policy, and so does a checkpoint with a hold (a pin, a tag, a child).
- A policy without any rule deletes nothing.
- The best by a metric stays while ``keep_best`` names it. If a program repeats the value of an older validation at
  later steps, the oldest and the newest checkpoint with each of the best values stay. If no checkpoint of the run has
  the metric, the best is unknown, and all stay.
- A checkpoint whose files are gone stays, and counts for no rule: an older store, restored from a backup, has records
  of checkpoints that were deleted since.

``keep_...`` rules apply to each kind of checkpoint separately, ``max_bytes`` to all checkpoints of a run together.
``keep_every=1000`` keeps the first checkpoint of each thousand steps: those at multiples of 1000, if they exist.

Age. Times are the wall clocks of the committing processes, which may be hours off, but the order of steps is certain. A
checkpoint's age counts from when the next one followed it (the latest commit time up to that one), to the
earlier of the newest checkpoint's time and the collector's clock. So one wrong clock, fast or slow, can only make
checkpoints look younger. Checkpoints of an ended run do not age further.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Final

from raftkv.checkpoint.find import MAX, MIN, check_mode
from raftkv.checkpoint.keys import is_comparable
from raftkv.checkpoint.records import Checkpoint, Reference
from raftkv.client.arguments import instance, whole
from raftkv.errors import ConfigError

LATEST: Final = "latest"
HELD: Final = "held"
UNRULED: Final = ("no rule deletes it",)


@dataclass(frozen=True, slots=True)
class Best:
    """Rule that keeps the best checkpoints by a metric.

    Attributes:
        metric: metric name.
        mode: ``min`` or ``max``: which values are better.
        count: number kept; of more equal ones than that, the oldest ones and the newest.
    """

    metric: str
    mode: str = MIN
    count: int = 1


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules that keep checkpoints; see the module.

    Attributes:
        keep_last: number of newest checkpoints to keep.
        keep_every: keep the first checkpoint of every interval of this many steps.
        keep_best: keep the best by these metrics.
        keep_for_s: checkpoints younger than this are kept.
        max_age_s: older checkpoints are deleted unless a rule protects them; None: no limit.
        max_bytes: the oldest unprotected checkpoints are deleted until the rest is at most this size; None: no limit.

    Raises:
        ConfigError: a number is negative, or a mode is unknown.
        TypeError: a count is not an integer.
    """

    keep_last: int = 0
    keep_every: int = 0
    keep_best: Sequence[Best] = ()
    keep_for_s: float = 0.0
    max_age_s: float | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            whole(getattr(self, name), f"{name} of a retention policy")
        for name in ("keep_last", "keep_every", "keep_for_s", "max_age_s", "max_bytes"):
            number = getattr(self, name)
            if number is not None and not number >= 0:  # NaN is not
                raise ConfigError(f"{name} of a retention policy cannot be {number}; give 0 or more")
        for best in self.keep_best:
            instance(best, Best, "a rule of keep_best")
            check_mode(best.mode)
            if whole(best.count, "the count of a rule of keep_best") < 1:
                raise ConfigError(f"the best {best.count} by {best.metric} cannot be kept; give 1 or more")

    @property
    def is_empty(self) -> bool:
        """Whether the policy has no rule, and so deletes nothing."""
        return not (self.keep_last or self.keep_every or self.keep_best or self.keep_for_s or self.has_limit)

    @property
    def has_limit(self) -> bool:
        """Whether unprotected checkpoints stay until a limit is exceeded."""
        return self.max_age_s is not None or self.max_bytes is not None

    def with_best(self, best: Best) -> Policy:
        """Return this policy with one more ``keep_best``; a policy without rules is returned unchanged."""
        if self.is_empty or best in self.keep_best:
            return self
        return replace(self, keep_best=(*self.keep_best, best))


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on one checkpoint.

    Attributes:
        checkpoint: checkpoint.
        is_kept: whether the checkpoint is kept.
        why: rules that keep it, or the rule that deletes it; for people.
    """

    checkpoint: Checkpoint
    is_kept: bool
    why: tuple[str, ...]


def decide(
    policy: Policy,
    checkpoints: Collection[Checkpoint],
    *,
    latest: Mapping[str, int],
    held: Mapping[Reference, Sequence[str]],
    now: float,
    lost: Collection[Reference] = (),
) -> list[Decision]:
    """Return the decision for each checkpoint of a run, by kind and step.

    Arguments:
        policy: the rules.
        checkpoints: all committed checkpoints, of all kinds.
        latest: kind to the step of its newest.
        held: the holds on each checkpoint, by their names.
        now: the collector's wall clock, in seconds.
        lost: checkpoints whose files are gone.
    """
    every = sorted(checkpoints, key=lambda each: (each.kind, each.step))
    ordered = [each for each in every if each.reference not in lost]
    newest = {each.kind: each.step for each in ordered}
    ages = ages_of(ordered, now)
    why: dict[Reference, list[str]] = {each.reference: [] for each in ordered}
    for each in ordered:
        why[each.reference] += [f"{HELD}: {name}" for name in held.get(each.reference, ())]
        if min(latest.get(each.kind, each.step), newest[each.kind]) <= each.step:
            why[each.reference].append(LATEST)
    for _, group in groupby(ordered, key=lambda each: each.kind):
        for reference, rule in _protected(policy, list(group), ages):
            why[reference].append(rule)
    for metric in unmeasured(policy, ordered):
        for rules in why.values():
            rules.append(f"no checkpoint has the metric {metric} yet")
    gone = {} if policy.is_empty else _gone(policy, ordered, why, ages)
    why |= {reference: ["its files are gone"] for reference in lost}
    return [
        Decision(each, each.reference not in gone, (gone[each.reference],) if each.reference in gone
                 else tuple(why[each.reference]) or UNRULED)
        for each in every
    ]  # fmt: skip


def unmeasured(policy: Policy, checkpoints: Collection[Checkpoint]) -> list[str]:
    """Return the metrics of ``keep_best`` that no checkpoint of a run has, so that the best is unknown."""
    return [
        best.metric
        for best in policy.keep_best
        if not any(is_comparable(each.metrics.get(best.metric, math.nan)) for each in checkpoints)
    ]


def ages_of(ordered: Sequence[Checkpoint], now: float) -> dict[Reference, float]:
    """Return the age of each checkpoint in seconds, as the module defines it.

    Arguments:
        ordered: checkpoints by kind and step.
        now: the collector's wall clock.
    """
    found: dict[Reference, float] = {}
    for _, group in groupby(ordered, key=lambda each: each.kind):
        kind = list(group)
        times = [each.time if math.isfinite(each.time) else now for each in kind]
        until = min(now, times[-1])
        known = -math.inf
        for each, own, following in zip(kind, times, [*times[1:], times[-1]], strict=True):
            known = max(known, own, following)
            found[each.reference] = max(0.0, until - known)
    return found


def _protected(
    policy: Policy, kind: Sequence[Checkpoint], ages: Mapping[Reference, float]
) -> list[tuple[Reference, str]]:
    """Return the checkpoints of one kind that the rules keep, each with its rule."""
    found = [(each.reference, f"last {policy.keep_last}") for each in kind[max(0, len(kind) - policy.keep_last) :]]
    if policy.keep_every:
        for _, group in groupby(kind, key=lambda each: each.step // policy.keep_every):
            found.append((next(group).reference, f"every {policy.keep_every}"))
    for best in policy.keep_best:
        measured = [each for each in kind if is_comparable(each.metrics.get(best.metric, math.nan))]
        sign = -1.0 if best.mode == MAX else 1.0
        ranked = sorted(measured, key=lambda each: (each.metrics[best.metric] * sign, each.step))
        kept = {each.reference for each in ranked[: best.count]}
        for _, group in islice(groupby(ranked, key=lambda each: each.metrics[best.metric]), best.count):
            equal = list(group)
            kept |= {equal[0].reference, equal[-1].reference}
        found += [(reference, f"best {best.count} by {best.metric}") for reference in kept]
    if policy.keep_for_s:
        young = [each for each in kind if ages[each.reference] < policy.keep_for_s]
        found += [(each.reference, f"younger than {policy.keep_for_s:g} s") for each in young]
    return found


def _gone(
    policy: Policy,
    ordered: Sequence[Checkpoint],
    why: Mapping[Reference, Sequence[str]],
    ages: Mapping[Reference, float],
) -> dict[Reference, str]:
    """Return the checkpoints to delete, each with its rule."""
    free = [each for each in ordered if not why[each.reference]]
    if not policy.has_limit:
        return {each.reference: "no rule keeps it" for each in free}
    gone: dict[Reference, str] = {}
    if policy.max_age_s is not None:
        old = [each for each in free if ages[each.reference] > policy.max_age_s]
        gone = {each.reference: f"older than {policy.max_age_s:g} s" for each in old}
    if policy.max_bytes is not None:
        left = [each for each in ordered if each.reference not in gone]
        total = sum(each.size_bytes for each in left)
        for each in sorted(left, key=lambda each: (-ages[each.reference], each.step, each.kind)):
            if total <= policy.max_bytes:
                break
            if not why[each.reference]:
                gone[each.reference] = f"more than {policy.max_bytes} bytes in all"
                total -= each.size_bytes
    return gone
