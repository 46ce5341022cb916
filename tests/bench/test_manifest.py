"""The benchmark of manifests: a small run of it meets all bars that are no matter of time."""

from __future__ import annotations

import pytest

from bench.dataset.manifest import entries, measure, with_one_more


def test_published_entries_are_sorted() -> None:
    found = [entry.path for entry in entries(3000)]
    assert found == sorted(set(found))
    more = [entry.path for entry in with_one_more(3000)]
    assert more == sorted(set(more))
    assert len(more) == 3001


@pytest.mark.long
def test_a_small_run_meets_its_bars() -> None:
    verdicts = measure(20_000, 2)
    assert len(verdicts) == 17
    assert [verdict for verdict in verdicts if not verdict.is_met and not verdict.what.endswith(", s")] == []
