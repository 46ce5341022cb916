"""Lookups beside writers: a checkpoint that was among the best all the time is in every answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.registry import Registry
from raftkv.client.values import TxnResult
from tests.checkpoint.world import KIND, World, saved

Between = Callable[[], Awaitable[Any]]


def interrupt(registry: Registry, at: Mapping[int, Between]) -> None:
    """Let something happen before the n-th txn of a registry, counted from 1."""
    control: Any = registry.control
    txn, calls = control.txn, 0

    async def counted(*arguments: Any) -> TxnResult:
        nonlocal calls
        calls += 1
        if calls in at:
            await at[calls]()
        return await txn(*arguments)

    control.txn = counted


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
@pytest.mark.parametrize(
    ("values", "changes", "best"),
    [
        ((10, 9, 8, 1), {2: (2, 8.5)}, [1, 2, 3]),  # stays within the part that was read
        ((10, 9, 8, 1), {2: (2, 8)}, [1, 3, 2]),
        ((10, 9, 8, 1), {2: (2, 0)}, [1, 3, 4]),  # falls behind it
        ((10, 9, 8, 1), {2: (2, 11)}, [2, 1, 3]),
        ((10, 8, 7, 5, 1), {2: (2, 0), 3: (4, 9)}, [1, 4, 3]),  # rises to the part that was read before
    ],
)
async def test_best_keeps_a_checkpoint_whose_metric_changes_meanwhile(world, mode, sign, values, changes, best):
    writer, reader = world.registry(), world.registry()
    claim = await writer.claim()
    for step, value in enumerate(values, 1):
        await saved(writer, claim, step, {"loss": sign * value})

    def change(step: int, value: float) -> Between:
        return lambda: writer.set_metrics(step, KIND, {"loss": sign * value})

    interrupt(reader, {call: change(*what) for call, what in changes.items()})
    found = await reader.lookup.best(reader.run_id, "loss", mode, kind=KIND, count=3)
    steps = [each.step for each in found]
    older_first = best == [1, 3, 2] and mode == "min"  # of equal ones
    assert steps == ([1, 2, 3] if older_first else best)


@pytest.mark.parametrize("change", ["metric", "deletion"])
async def test_best_of_all_keeps_a_run_whose_best_changes_meanwhile(world: World, change: str) -> None:
    writer, other, reader = world.registry(), world.registry("other"), world.registry()
    claim = await writer.claim()
    for step, value in ((1, 0.1), (2, 0.2)):
        await saved(writer, claim, step, {"loss": value})
    await saved(other, await other.claim(), 7, {"loss": 0.5})

    async def happen() -> None:
        if change == "metric":
            await writer.set_metrics(1, KIND, {"loss": 0.3})
        else:
            world.delete(RegistryKeys(writer.run_id).record(KIND, 1))

    interrupt(reader, {2: happen})
    found = await reader.lookup.best_of_all("loss", "min", count=2)
    assert [(each.run_id, each.step) for each in found] == [("job", 2), ("other", 7)]
