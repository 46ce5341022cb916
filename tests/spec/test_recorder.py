"""Traces for TLC: recording changes nothing, and a window is a run of whole steps. TLC runs in ``make prove``."""

from __future__ import annotations

import pytest

from tests.checkpoint.sim.swarm import run_seed as run_checkpoints
from tests.sim.swarm import run_seed
from tests.spec import checkpoints, generations, leases
from tests.spec.recorder import LINES_MAX, literal, recording
from tests.spec.tlc import SPECS, changed
from tests.training.sim.swarm import run_seed as run_generations

pytestmark = pytest.mark.interpreted


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("of", "run", "seed", "expected"),
    [
        (checkpoints, run_checkpoints, 2, "claim begin prepare commit delete sweep pin unpin clean"),
        (generations, run_generations, 4, "register office begin start break stop declare lose write"),
    ],
    ids=["checkpoints", "generations"],
)
def test_recording_of_runs_changes_nothing_and_gives_windows(of, run, seed, expected):
    plain = run(seed)
    with of.recording() as traces:
        recorded = run(seed)
    assert recorded.log == plain.log
    steps = {line["op"] for window in traces.windows for line in window["lines"]}
    assert set(expected.split()) <= steps
    assert "Traces ==" in traces.module()


def test_recording_of_leases_changes_nothing_and_gives_windows() -> None:
    plain = leases.run(3)
    with leases.recording() as traces:
        recorded = leases.run(3)
    assert recorded.digest == plain.digest
    steps = {line["op"] for window in traces.windows for line in window["lines"]}
    assert steps == {"append", "apply", "elect", "lead", "starts", "keep", "renew", "expire"}
    assert all(0 < len(window["lines"]) <= LINES_MAX for window in traces.windows)


def test_rules_are_taken_out_of_configurations() -> None:
    config = (SPECS / "Rendezvous.cfg").read_text()
    broken = changed(config, 'Without = "arbiter", LossesMax = 2')
    assert '\n          Without = "arbiter"\n' in broken
    assert "\n          LossesMax = 2\n" in broken
    with pytest.raises(AssertionError):
        changed(config, "Nothing = 2")
