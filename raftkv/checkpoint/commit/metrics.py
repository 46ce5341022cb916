"""Metrics that come after the commit: an evaluator adds them to the record, and the best is found by them.

    checkpoint = await set_metrics(control, "job", 100, DCP, {"eval/loss": 0.1})

Record, index and summary change in one txn, on condition of having been seen, so evaluators may run side by side, and a
copy that arrives late changes nothing. No claim is needed: a metric changes neither what is committed nor what is found
as the latest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from raftkv.checkpoint.commit.summary import METRICS_MAX, checked_metrics, edges, rearranged, reindexed
from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.keys import RegistryKeys, check_step
from raftkv.checkpoint.records import Checkpoint, Latest
from raftkv.client.control.control import Control, txn_until_answered, until_answered
from raftkv.client.control.records import read
from raftkv.client.kv.operations import get, mod_revision, put
from raftkv.errors import ConfigError


async def set_metrics(control: Control, run_id: str, step: int, kind: str, metrics: Mapping[str, object]) -> Checkpoint:
    """Add metrics to a committed checkpoint, or replace those of the same names; returns it as it is then.

    Arguments:
        control: the store.
        run_id, step, kind: of the checkpoint.
        metrics: name to number.

    Raises:
        CheckpointNotFound: there is no such checkpoint, or not any more.
        ConfigError: there are too many metrics, or one cannot be used; or it can be no step.
        StatusError: the cluster refused.
    """
    step, keys = check_step(step), RegistryKeys(run_id)
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
