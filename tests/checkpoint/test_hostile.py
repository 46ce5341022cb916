"""Keys and values that are not raftkv's: no call of the registry fails with anything but an error of one line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields, replace
from typing import Any, Final

import pytest

from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.retention.policy import Policy
from raftkv.checkpoint.storage.verify import verify
from raftkv.errors import RaftKVError
from tests.checkpoint.retention.kept import Kept
from tests.checkpoint.world import KEYS, KIND, World, play, prepared, saved
from tests.spoiled import FEW, SAMPLES, Sample, spoiled

VALUES: Final = (
    b"", b"\xff", b"null", b"[]", b"{}", b'{"step":null}', b"[" * 5000, b'{"step":1e999,"generation":-1}',
    b'{"uri":7,"run_id":{},"kind":"x"}', b"1" * 5000,
)  # fmt: skip
NAMES: Final = (
    "", "/", "x", "x/y", "x/y/z", "dcp/x", f"{KIND}/1", f"{KIND}/000000000001x", f"{KIND}/1.1", f"{KIND}/1.1.1/head",
    f"{KIND}/000000000009.1.1/rank/x", f"{KIND}/000000000009.1.1", f"{KIND}/000000000009.1.1/head", "\udcff/\udcff",
    f"{KIND}/99999999999999999999.1.1/head", f"{KIND}/1/pin", f"{KIND}/000000000001/pin/%zz", f"{KIND}/loss/z/x",
    f"{KIND}/loss/-000000000000001/000000000002", f"{KIND}/{'9' * 5000}/pin/x", "\udcff/x/rank/0",
)  # fmt: skip

PREFIXES: Final = (
    KEYS.latest_all, KEYS.records, KEYS.attempts, KEYS.deletings, KEYS.holds, KEYS.tags, f"{KEYS.base}metric/",
    RegistryKeys("%zz").latest_all, "/raftkv/checkpoint/latest/",
)  # fmt: skip

Ask = Callable[[Registry], Awaitable[Any]]

ALWAYS: Final[dict[str, Ask]] = {
    "latest": lambda registry: registry.latest(KIND),
    "at": lambda registry: registry.at(2, KIND),
    "best": lambda registry: registry.best("loss", kind=KIND),
    "checkpoints": lambda registry: registry.checkpoints(KIND),
    "runs": lambda registry: registry.runs(),
    "set_metrics": lambda registry: registry.set_metrics(2, KIND, {"loss": 0.0}),
}
"""They find what is there all the same."""
ANSWERED: Final[dict[str, Ask]] = {
    "latest of any kind": lambda registry: registry.latest(),
    "tagged": lambda registry: registry.tagged("x"),
    "holds": lambda registry: registry.holds(),
    "tags": lambda registry: registry.tags(),
    "collect": lambda registry: registry.collect(Policy(keep_last=1)),
}
"""They may refuse, in one line."""


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_calls_survive_what_others_wrote(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        world = World()
        registry = world.registry()
        claim = await registry.claim()
        for step in (1, 2):
            await saved(registry, claim, step, {"loss": 1.0})
        await prepared(registry, claim, 3)
        for prefix in PREFIXES:
            for name in NAMES:
                key = f"{prefix}{name}".encode(errors="surrogateescape")
                if key not in world.store.items:
                    world.put(key, value)
        for name, ask in ALWAYS.items():
            assert await ask(registry) is not None, name
        commits = registry.watch(KIND, start_revision=1)
        assert [(await anext(commits)).checkpoint.step for _ in range(2)] == [1, 2]
        commits.cancel()
        for ask in ANSWERED.values():
            with contextlib.suppress(RaftKVError):
                await ask(registry)
        taken = await registry.take_over(await registry.claim())
        assert [each.attempt.step for each in taken] == [3]
        assert (await registry.latest(KIND)).step == 3

    with caplog.at_level(logging.CRITICAL):
        play(story())


OF_THE_RUN: Final = [sample for sample in SAMPLES if sample.key.startswith(tuple(KEYS.prefixes))]
PLANTED: Final = (
    "latest", "at", "tagged", "best", "checkpoints", "runs", "holds", "tags", "collect", "set_metrics",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("sample", OF_THE_RUN, ids=lambda sample: type(sample.record).__name__)
def test_a_spoiled_record_changes_nothing_outside_its_run_and_place(sample, tmp_path, caplog):
    """Spoil each field in each way: what every call then does, it does to this run alone, or says why not in a line."""

    async def story() -> None:
        world = Kept(tmp_path)
        theirs = [await world.save(step, {"loss": 1.0}, run_id="victim") for step in (1, 2)]
        saved = [await world.save(step, {"loss": 1.0}) for step in (1, 2)]
        await world.registry("victim").tag("release", theirs[0])
        child = await world.save(3, run_id="tuned", parent=theirs[0].reference)
        registry, others, said = world.registry(), _others(world), list[str]()
        for value in (*spoiled(sample.record.encode(), FEW), *_stolen(sample, saved, [*theirs, child])):
            before = world.store.items.get(sample.key.encode())
            world.put(sample.key, value)
            for name in PLANTED:
                said += await _error_of((ALWAYS | ANSWERED)[name](registry))
            said += await _error_of(_take_over(registry))
            world.delete(sample.key)
            if before is not None:
                world.put(sample.key, before.value)
            assert _others(world) == others
            assert all(verify(each).is_whole for each in (*theirs, child))
        assert [line for line in said if "\n" in line or len(line) > 1500] == []

    with caplog.at_level(logging.CRITICAL):
        play(story())


async def _take_over(registry: Registry) -> None:
    await registry.take_over(await registry.claim())


async def _error_of(call: Awaitable[Any]) -> list[str]:
    try:
        await call
    except RaftKVError as error:
        return [str(error)]
    return []


def _others(world: Kept) -> dict[bytes, bytes]:
    own = tuple(prefix.encode() for prefix in KEYS.prefixes)
    return {key: item.value for key, item in world.store.items.items() if not key.startswith(own)}


def _stolen(sample: Sample, saved: list[Checkpoint], theirs: list[Checkpoint]) -> Iterator[bytes]:
    """Yield the record with the place, the manifest, the parent and the name of each checkpoint of others."""
    names = {each.name for each in fields(sample.record)}
    for one in (*theirs, *saved):
        facts = {"uri": one.uri, "manifest": one.manifest, "parent": one.reference, "run_id": one.run_id}
        for name, value in facts.items():
            if name in names:
                yield replace(sample.record, **{name: value}).encode()
        yield replace(sample.record, **{name: value for name, value in facts.items() if name in names}).encode()
        yield one.encode()
