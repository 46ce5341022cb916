"""Orders: every number once, the same everywhere, and few chunks at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.dataset.shuffle import ChunkOrder, Permutation
from raftkv.errors import ConfigError


@given(st.integers(0, 700), st.integers())
def test_a_permutation_has_every_number_once(size: int, key: int) -> None:
    order = Permutation(size, key)
    assert sorted(order) == list(range(size))
    if size:
        assert order[-1] == order[size - 1]
        assert order[1:5] == [order[at] for at in range(*slice(1, 5).indices(size))]
    with pytest.raises(IndexError):
        order[size]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(0, 5), st.integers(0, 5), st.integers(1, 8))
def test_a_chunk_order_has_every_entry_once_and_needs_a_window_at_a_time(counts, seed, epoch, window):
    order = ChunkOrder(counts, seed=seed, epoch=epoch, window=window)
    found = list(order)
    assert sorted(found) == list(range(sum(counts)))
    owner = [chunk for chunk, count in enumerate(counts) for _ in range(count)]
    at = 0
    for members in order.windows():
        size = sum(counts[chunk] for chunk in members)
        assert {owner[number] for number in found[at : at + size]} == set(members)
        assert len(members) <= window
        at += size
    if found:
        again = ChunkOrder(counts, seed=seed, epoch=epoch, window=window)
        middle = len(found) // 2
        assert again[middle:] == found[middle:]


def test_orders_are_the_same_with_every_version() -> None:
    # These numbers may never change: a pass that began before an upgrade goes on behind it.
    assert list(Permutation(12, ("seed", 7))) == [2, 5, 11, 1, 9, 4, 7, 8, 3, 6, 0, 10]
    assert list(ChunkOrder([3, 4, 5], seed=1, epoch=2, window=2)) == [2, 9, 8, 10, 7, 0, 11, 1, 3, 6, 5, 4]


def test_seed_and_epoch_change_the_order() -> None:
    orders = {tuple(ChunkOrder([10] * 10, seed=seed, epoch=epoch, window=4)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    moved = sum(at != number for at, number in enumerate(Permutation(10_000, 1)))
    assert moved > 9_900
    # Neighbours are torn apart: no arithmetic pattern is left.
    order = list(Permutation(4096, "x"))
    assert len({later - earlier for earlier, later in pairwise(order)}) > 2000


class Told(list[int]):
    """Call a function whenever it is read, as if another thread came in between."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__(counts)
        self.between: Callable[[], object] = lambda: None

    def __getitem__(self, at: Any) -> Any:
        self.between()
        return super().__getitem__(at)


def test_threads_that_share_an_order_do_not_mix_its_windows() -> None:
    """Give each its own sample: where one opened a window while another did, samples came twice and were left out."""
    counts, wanted = Told([4] * 12), list(ChunkOrder([4] * 12, window=2))
    order = ChunkOrder(counts, window=2)

    def come_between() -> None:
        counts.between = lambda: None
        assert order[-1] == wanted[-1]

    found = []
    for position in range(len(wanted)):
        counts.between = come_between
        assert order[len(wanted) // 2] == wanted[len(wanted) // 2]
        counts.between = come_between
        found.append(order[position])
    assert found == wanted


def test_numbers_of_numpy_are_numbers() -> None:
    """Order by what they are, not by how a version of numpy writes them; and count as Python does."""
    plain, seeded = ChunkOrder([3, 4, 5], seed=1, epoch=2, window=2), Permutation(1000, ("seed", 7))
    assert list(ChunkOrder([3, 4, 5], seed=numpy.int64(1), epoch=numpy.uint8(2), window=2)) == list(plain)
    assert list(Permutation(1000, ("seed", numpy.int32(7)))) == list(seeded)
    assert list(Permutation(numpy.int64(1000), ("seed", 7))) == list(seeded)
    assert list(ChunkOrder(numpy.array([3, 4, 5]), seed=1, epoch=2, window=2)) == list(plain)
    positions = numpy.arange(12)
    assert [plain[at] for at in positions] == list(plain)
    assert [seeded[at] for at in positions] == seeded[:12]
    assert {type(plain[at]) for at in positions} == {type(seeded[at]) for at in positions} == {int}
    for wrong in (1.0, "1", None):
        for order in (plain, seeded):
            with pytest.raises(TypeError):
                order[wrong]


def test_a_window_has_chunks() -> None:
    with pytest.raises(ConfigError, match="at least one chunk"):
        ChunkOrder([1], window=0)
