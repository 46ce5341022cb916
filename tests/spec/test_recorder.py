"""Traces for TLC: recording changes nothing, and a window is a run of whole steps. TLC runs in ``make prove``."""

from __future__ import annotations

import pytest

from tests.sim.swarm import run_seed
from tests.spec.recorder import LINES_MAX, literal, recording

pytestmark = pytest.mark.interpreted


def test_recording_changes_nothing_and_gives_windows() -> None:
    plain = run_seed(4)
    with recording(skips=0) as recorder:
        recorded = run_seed(4)
    assert recorded.digest == plain.digest
    steps = {line["a"] for window in recorder.windows for line in window.lines}
    assert {"leader", "vote", "candidate", "receive", "send", "propose", "commit", "write", "durable"} <= steps
    assert all(0 < len(window.lines) <= LINES_MAX for window in recorder.windows)


def test_values_are_written_as_tla_writes_them() -> None:
    value = {"a": [1, True], "b": {2}, "c": {1: 0, 2: 5}, "d": {"x": "y"}}
    assert literal(value) == '[a |-> <<1, TRUE>>, b |-> {2}, c |-> (1 :> 0 @@ 2 :> 5), d |-> [x |-> "y"]]'
