"""Errors as processes hand them to each other."""

from __future__ import annotations

import copy

import pytest

from raftkv.checkpoint.errors import DigestMismatch, FenceBroken, RanksMissing
from raftkv.errors import ConfigError, NoLeaderError, RaftKVError
from raftkv.training import BarrierTimeout, GenerationOver, RunClosed

ERRORS = [
    FenceBroken("job", 7),
    RanksMissing("step 1", 2.0, [3, 4]),
    DigestMismatch("step 1", "a.bin", "is missing"),
    GenerationOver("job", 7, "host gone"),
    BarrierTimeout("barrier", 1.0, [1]),
    RunClosed("job", "done"),
    ConfigError("no"),
    NoLeaderError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_can_be_made_again_from_their_parts(error: RaftKVError) -> None:
    """Collectives of torch hand a rank's error to the others: one that cannot be read there leaves them waiting."""
    again = copy.copy(error)  # which takes the way of pickle
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
