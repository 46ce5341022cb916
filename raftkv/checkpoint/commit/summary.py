"""Keys that change with every commit, metric and deletion: the summary of a kind (``latest``), the index of metrics.

::

    advanced(latest, checkpoint), indexed(run, checkpoint)          # a commit
    edges(run, kind, names) -> rearranged(...)                      # a changed metric, a deleted checkpoint

Invariant: every change of the index also writes ``latest``, with its previous revision as the condition. So a writer
that has read both at one revision, and writes on the condition that ``latest`` is unchanged, knows the current index.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.keys import (
    METRICS_MAX,
    RegistryKeys,
    check_durable,
    check_metric,
    check_step,
    from_ordered,
    is_comparable,
    step_of,
)
from raftkv.checkpoint.records import Checkpoint, Extremes, Latest
from raftkv.client.control import Control, txn_until_answered, until_answered
from raftkv.client.operations import Operation, delete, get, get_range, mod_revision, put
from raftkv.client.records import read
from raftkv.client.values import RangeResult
from raftkv.errors import ConfigError

SUMMARY_METRICS_MAX: Final = 100
"""Names in the summary of a kind, so that ``latest`` stays small however many names a program has. The best of a run
is found in the index by every name; a search across runs knows the first hundred names of each."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A metric with the step of the model on which it was measured; it is not recorded for other steps.

    For programs that keep the values of their last validation, as the frameworks do.

    Attributes:
        value: a number, as for a metric without a step.
        step: training step.
    """

    value: object
    step: int


def measured_at(metrics: Mapping[str, object], step: int) -> dict[str, object]:
    """Return the values that were measured at a step; those without a step were."""
    return {
        name: value.value if isinstance(value, Measured) else value
        for name, value in metrics.items()
        if not isinstance(value, Measured) or value.step == step
    }


def checked_metrics(metrics: Mapping[str, object] | None, step: int) -> dict[str, float]:
    """Return metrics of a step that can be stored, as numbers of Python: those of numpy and torch are numbers too.

    Arguments:
        metrics: name to number; those that were measured at another step (``Measured``) are left out.
        step: step of the checkpoint.

    Raises:
        ConfigError: there are too many, or a name or value cannot be used.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"metrics are a mapping of names to numbers, not {metrics!r}")
    own = measured_at(metrics or {}, step)
    checked = {check_metric(name): _number(name, value) for name, value in own.items()}
    if len(checked) > METRICS_MAX:
        raise ConfigError(f"{len(checked)} metrics are too many for one checkpoint: at most {METRICS_MAX}")
    return checked


def _number(name: str, value: Any) -> float:
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53:
        return value
    try:
        if not isinstance(value, bool | str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise ConfigError(f"metric {name!r} is {value!r}, which is not a number")


def usable(values: Mapping[str, object], named: Collection[str] = ()) -> dict[str, float]:
    """Return those of some values that can be metrics, finite numbers, under names that can be used.

    Arguments:
        values: name to anything.
        named: names that a policy knows: these come first, as they are; of others a slash becomes an underscore.

    >>> usable({"eval/loss": 0.5, "name": "x", "bad": float("nan"), "val/acc": 1}, ["val/acc"])
    {'val/acc': 1.0, 'eval_loss': 0.5}
    """
    found: dict[str, float] = {}
    for name, value in sorted(values.items(), key=lambda item: item[0] not in named):
        stored = name if name in named else name.replace("/", "_")
        if isinstance(value, int | float) and not isinstance(value, bool) and _is_name(stored):
            number = float(str(value))  # an integer may be too large for a number of the machine: infinite then
            if math.isfinite(number):
                found.setdefault(stored, number)
    return found


def _is_name(name: str) -> bool:
    try:
        check_metric(name)
    except ConfigError:
        return False
    return True


def advanced(latest: Latest | None, checkpoint: Checkpoint) -> Latest:
    """Return the summary of a kind with one more checkpoint, the newest."""
    before = latest or Latest(checkpoint.step, checkpoint.generation)
    return replace(
        before,
        step=checkpoint.step,
        generation=checkpoint.generation,
        count=before.count + 1,
        size_bytes=before.size_bytes + checkpoint.size_bytes,
        best=with_metrics(before.best, checkpoint.metrics, checkpoint.step),
        time=checkpoint.time,
    )


def with_metrics(best: Mapping[str, Extremes], metrics: Mapping[str, float], step: int) -> dict[str, Extremes]:
    """Return the extremes of all metrics with those of one more step; NaN has no place there."""
    after = dict(best)
    for name, value in metrics.items():
        if is_comparable(value) and (name in after or len(after) < SUMMARY_METRICS_MAX):
            known = after.get(name, Extremes(value, step, value, step))
            after[name] = known.with_value(value, step)
    return after


def indexed(run: RegistryKeys, checkpoint: Checkpoint) -> list[Operation]:
    """Return the puts of a checkpoint's metrics into the index; NaN has no place there."""
    return [put(key) for key in _index_keys(run, checkpoint)]


def reindexed(run: RegistryKeys, before: Checkpoint, after: Checkpoint) -> list[Operation]:
    """Return what changes in the index when a checkpoint gets other metrics."""
    old, new = set(_index_keys(run, before)), set(_index_keys(run, after))
    return [*(delete(key) for key in sorted(old - new)), *(put(key) for key in sorted(new - old))]


def _index_keys(run: RegistryKeys, checkpoint: Checkpoint) -> list[str]:
    items = [(name, value) for name, value in checkpoint.metrics.items() if is_comparable(value)]
    return [run.metric(checkpoint.kind, name, value, checkpoint.step) for name, value in items]


def edges(run: RegistryKeys, kind: str, names: Iterable[str]) -> list[Operation]:
    """Return the reads of the two lowest and the two highest values of each metric: one of them may be going."""
    return [
        get_range(run.metric_of(kind, name), prefix=True, limit=2, keys_only=True, descending=descending)
        for name in names
        for descending in (False, True)
    ]


def rearranged(
    best: Mapping[str, Extremes],
    names: Sequence[str],
    found: Sequence[RangeResult],
    step: int,
    metrics: Mapping[str, float],
) -> dict[str, Extremes]:
    """Return the extremes of all metrics after those of one step have changed or gone.

    Arguments:
        best: the extremes before.
        names: names of the changed metrics.
        found: what ``edges`` of these names have read, at the revision of ``best``.
        step: step whose metrics change.
        metrics: new metrics.
    """
    after = {name: extremes for name, extremes in best.items() if name not in names}
    for name, low, high in zip(names, found[::2], found[1::2], strict=True):
        values = [item for item in (*_values(low), *_values(high)) if item[1] != step]
        if is_comparable(metrics.get(name, math.nan)):
            values.append((metrics[name], step))
        if values and (name in best or len(after) < SUMMARY_METRICS_MAX):
            lowest = min(values, key=lambda item: (item[0], -item[1]))
            after[name] = Extremes(*lowest, *max(values))
    return after


def _values(found: RangeResult) -> list[tuple[float, int]]:
    """Return value and step of keys of the index; foreign keys are skipped."""
    values = []
    for item in found.items:
        step = step_of(item.key)
        with contextlib.suppress(ValueError):
            value = from_ordered(item.key.split(b"/")[-2].decode())
            if step is not None:
                values.append((value, step))
    return values


# ---- metrics that come after the commit
#
# Record, index and summary change in one txn that compares all of them, so evaluators may run side by side, and a late
# copy of the txn changes nothing. No claim is needed: a metric changes neither the commit nor the latest.


async def set_metrics(control: Control, run_id: str, step: int, kind: str, metrics: Mapping[str, object]) -> Checkpoint:
    """Add metrics to a committed checkpoint, or replace those of the same names; returns it as it is then.

    Arguments:
        control: the store.
        run_id, step, kind: run, step and kind of the checkpoint.
        metrics: name to number.

    Raises:
        CheckpointNotFound: the checkpoint does not exist, or was deleted.
        ConfigError: there are too many metrics, or one cannot be used; or it can be no step.
        StatusError: the cluster refused.
    """
    step, keys = check_step(step), RegistryKeys(run_id)
    check_durable(kind)
    new = checked_metrics(metrics, step)
    reads = [get(keys.record(kind, step)), get(keys.latest(kind)), *edges(keys, kind, new)]
    while True:
        seen = await until_answered(lambda: control.txn((), reads))
        record, newest, *found = seen.results
        if record is None or newest is None:
            raise CheckpointNotFound(f"run {run_id!r} has no checkpoint of step {step} of kind {kind}")
        before, latest = read(Checkpoint, record), read(Latest, newest)
        after = replace(before, metrics={**before.metrics, **new})
        if len(after.metrics) > METRICS_MAX:
            raise ConfigError(f"{len(after.metrics)} metrics are too many for one checkpoint: at most {METRICS_MAX}")
        if after.encode() == before.encode():
            return before
        best = rearranged(latest.best, list(new), found, step, new)
        as_seen = [mod_revision(item.key) == item.mod_revision for item in (record, newest)]
        changes = [
            put(record.key, after.encode()),
            put(newest.key, replace(latest, best=best).encode()),
            *reindexed(keys, before, after),
        ]
        done = await txn_until_answered(control, as_seen, changes)
        if done.succeeded:
            return after
