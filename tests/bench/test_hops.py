"""Hops are changes of file between calls."""

from __future__ import annotations

import pytest

from bench.hops import hops_of


@pytest.mark.parametrize(
    ("calls", "hops"), [([], 0), (["a:f"], 0), (["a:f", "a:g", "b:f", "b:f", "a:f"], 2), (["a:f", "b:f", "c:f"], 2)]
)
def test_a_call_into_another_file_is_a_hop(calls: list[str], hops: int) -> None:
    assert hops_of(calls) == hops
