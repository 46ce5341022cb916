"""The collector of a member: no pass over everything that the store holds, however large that is."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from raftkv.loop.cycle_free import GC_THRESHOLDS, PUTS_A_PASS, collect_in_small_passes, look_at_young_objects
from tests.rpc.loop import until

KEPT = 400_000
YOUNG_MAX = GC_THRESHOLDS[0] * (GC_THRESHOLDS[1] + 3)


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """Objects that each collection has looked at, or may have, under the settings of a member."""
    before, callbacks, seen = gc.get_threshold(), list(gc.callbacks), []

    def look(phase: str, collection: dict[str, int]) -> None:
        if phase == "start":
            seen.append(sum(len(gc.get_objects(young)) for young in range(collection["generation"] + 1)))

    gc.collect()
    collect_in_small_passes()
    gc.callbacks.insert(0, look)
    yield seen
    gc.set_threshold(*before)
    gc.callbacks[:] = callbacks  # what is frozen stays so, as tests/conftest.py has it


def test_lasting_objects_are_examined_at_most_twice(passes: list[int]) -> None:
    kept = [[number] for number in range(KEPT)]
    assert len(passes) > 10
    assert max(passes) <= YOUNG_MAX
    assert len(kept) == KEPT


class _Cycle:
    """An object that only a collector frees; it counts those that are left."""

    left = 0

    def __init__(self) -> None:
        self.own = self
        _Cycle.left += 1

    def __del__(self) -> None:
        _Cycle.left -= 1


@pytest.mark.long
def test_young_cycles_are_freed(passes: list[int]) -> None:
    for _ in range(KEPT):
        _Cycle()
    assert len(passes) > 10
    assert _Cycle.left <= 2 * GC_THRESHOLDS[0]


def _is_young(one: object) -> bool:
    return any(one is other for generation in range(3) for other in gc.get_objects(generation))


@pytest.mark.long
async def test_growing_heap_is_examined_early(passes: list[int]) -> None:
    """A list grows while hardly an object is made, as the revisions of a key do: its content would be followed once."""
    gc.disable()  # nothing but the timer collects
    try:
        grows: list[int] = []
        puts, asked = [7], [0]

        def count_puts() -> int:
            asked[0] += 1
            return puts[0]

        with look_at_young_objects(asyncio.get_running_loop(), count_puts):
            puts[0] += PUTS_A_PASS - 1
            await until(lambda: asked[0] > 2)
            assert _is_young(grows), "a cycle that is under way now should be freed when it is over"
            puts[0] += 1
            await until(lambda: not _is_young(grows))
            passed = len(passes)
            await until(lambda: asked[0] > 5)
            assert len(passes) == passed
        again: list[int] = []
        count = len(passes)
        await asyncio.sleep(0)
        assert (_is_young(again), len(passes)) == (True, count), "nothing is left of the timer"
    finally:
        gc.enable()
