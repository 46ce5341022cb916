"""The rendezvous in the simulator: one fault at a time, many seeds, and the seeds that once found something."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftkv.training.records import CLOSED
from raftkv.training.rendezvous.participant import Participant
from tests.long import long_except
from tests.training.sim import faults
from tests.training.sim.__main__ import main, summary
from tests.training.sim.agent import Agent, Habits
from tests.training.sim.run import CALM
from tests.training.sim.scenarios import CALLS_PER_GENERATION, Broken, Directed, scenario
from tests.training.sim.swarm import draw, run_seed
from tests.virtual_store.network import Weather

ROOT = Path(__file__).resolve().parents[2]
SEEDS_COUNT = 150
SHORT_SEEDS_COUNT = 25
CHUNK_SIZE = 25

REGRESSIONS = {
    70: "a worker wrote after the run was closed, and its keys stayed",
    869: "a declaration that was applied late undid a later one, and the run waited for the node for ever",
    2045: "two registrations at once: the arbiter's key hung on a lease that the node had forgotten and kept alive",
    3493: "the same, before the first generation",
    4405: "the same, after a freeze",
    703: "a run with live members was taken over by another job with the same id: two worlds",
    1474: "a run was taken over as it had been before it was looked at: the state went back a generation",
    6408: "a node without a lease was given a world by a late watch, and registered as if it ran nothing: two worlds",
}
"""Seeds that found a bug, and which."""


@pytest.mark.parametrize("first", long_except(range(1, SEEDS_COUNT + 1, CHUNK_SIZE), range(SHORT_SEEDS_COUNT)))
def test_seeds(first: int) -> None:
    outcomes = [run_seed(seed) for seed in range(first, first + CHUNK_SIZE)]
    print(summary(outcomes))
    bad = [f"{outcome.violation}\n  replay: {outcome.replay_command}" for outcome in outcomes if outcome.violation]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_seeds_that_found_bugs(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.violation is None, f"again: {REGRESSIONS[seed]}\n{outcome.replay_command}"


def test_seeds_reach_every_fault_and_size() -> None:
    drawn = [draw(seed) for seed in range(1, SEEDS_COUNT + 1)]
    assert {name for settings in drawn for name in settings.faults} == {*faults.ALL, "leave", "come_other"}
    assert {settings.machines for settings in drawn} == {2, 3, 4, 5, 8}
    assert any(settings.faults == faults.STORE_ONLY for settings in drawn)
    assert any(settings.finishes for settings in drawn)


def test_replay_does_not_depend_on_hash_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "17", "--trace"]) == 0
    here = capsys.readouterr().out
    assert " starts generation 1 as node " in here
    command = [sys.executable, "-m", "tests.training.sim", "--seed", "17", "--trace"]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert there == here


@pytest.fixture
def run() -> Iterator[Directed]:
    """A run of three machines in its first generation."""
    with scenario(3) as run:
        run.forms(3)
        yield run


# ---- P4: one fault, one generation


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_worker_that_fails_costs_one_generation(run: Directed, index: int) -> None:
    with run.generations(1):
        run.node(index).fails = True
    assert len(run.members) == 3


def test_fault_reaches_all_nodes_before_its_reporter_has_stopped() -> None:
    with scenario(3, habits=Habits(stop_s=(5.0, 5.0))) as run:
        run.forms(3)
        run.node(1).fails = True
        run.pass_time(1.0)
        assert run.checker.state is not None
        assert (run.checker.state.phase, run.checker.state.cause) == ("broken", "exit")
        assert all(agent.told for agent in run.live if agent is not run.node(1))


def test_survivors_keep_their_order_in_every_generation() -> None:
    for seed in range(1, 6):
        with scenario(5, seed=seed) as run:
            run.forms(5)
            before = [member.id for member in run.checker.generations[0].round.members]
            run.node(2).fails = True
            run.pass_time(10.0, lambda run=run: run.checker.generation == 2 and len(run.members) == 5)
            run.node(1).kill()
            run.forms(4)
            assert [member.id for member in run.checker.generations[-1].round.members] == [before[0], *before[2:]]


def test_workers_that_fail_in_the_same_instant_cost_one_generation() -> None:
    with scenario(4) as run:
        run.forms(4)
        with run.generations(1):
            for agent in run.members:
                agent.fails = True


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("grace_s", [0.0, 0.1])
def test_a_node_that_is_killed_costs_one_generation(index: int, grace_s: float) -> None:
    with scenario(3, disconnect_grace_s=grace_s) as run:
        run.forms(3)
        began = run.now
        with run.generations(1):
            run.node(index).kill()
            run.pass_time(10.0, lambda: len(run.checker.generations) == 2)
            assert run.now - began < (0.8 if grace_s else 1.8)
        assert len(run.members) == 2


@pytest.mark.parametrize("killed", [1, 2])
def test_the_arbiter_killed_alone_or_with_another_costs_one_generation(killed: int) -> None:
    with scenario(4) as run:
        run.forms(4)
        with run.generations(1):
            run.deciding.kill()
            for agent in run.members[: killed - 1]:
                agent.kill()


def test_the_arbiter_that_fails_and_is_killed_in_the_middle_of_the_generation() -> None:
    with scenario(4) as run:
        run.forms(4)
        with run.generations(1):
            run.node(1).fails = True
            run.pass_time(5.0, lambda: run.checker.state is not None and run.checker.state.phase == "broken")
            run.deciding.kill()


def test_a_frozen_node_costs_one_generation_and_another_when_it_is_back() -> None:
    with scenario(3) as run:
        run.forms(3)
        frozen = run.node(1)
        with run.generations(1):
            run.faults.freeze(frozen)
            run.pass_time(10.0, lambda: len(run.checker.generations) == 2)
            frozen.kill("is buried")
        assert len(run.members) == 2
    with scenario(3) as run:
        run.forms(3)
        frozen = run.node(1)
        run.faults.freeze(frozen)
        run.pass_time(10.0, lambda: len(run.checker.generations) == 2)
        with run.generations(1):
            run.faults.heal()
        assert len(run.members) == 3


def test_a_frozen_node_that_thaws_in_time_costs_nothing(run: Directed) -> None:
    with run.generations(0):
        run.faults.freeze(run.node(1))
        run.pass_time(0.5)
        run.faults.heal()


def test_a_newcomer_costs_one_generation_and_a_standby_none() -> None:
    with scenario(3, max_nodes=4) as run:
        run.forms(3)
        with run.generations(1):
            run.add_agent()
        assert len(run.members) == 4
        with run.generations(0):
            standby = run.add_agent()
        assert standby.waiting
        with run.generations(1):
            run.node(2).kill()
        assert standby in run.members


def test_a_standby_takes_a_place_however_long_it_has_waited() -> None:
    with scenario(3, max_nodes=3, join_timeout_s=8.0) as run:
        run.forms(3)
        standby = run.add_agent()
        run.pass_time(20.0)
        assert standby.waiting
        with run.generations(1):
            run.node(2).kill()
        assert standby in run.members


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_node_that_leaves_costs_one_generation(index: int) -> None:
    for seed in range(1, 6):
        with scenario(3, seed=seed) as run:
            run.forms(3)
            with run.generations(1):
                agent = run.node(index)
                agent.leaves = True
                run.pass_time(5.0, lambda agent=agent: bool(agent.exited))
            assert agent.exited == "left"
            assert len(run.members) == 2


def test_short_lived_node_costs_only_its_own_generations() -> None:
    for pause_s in (0.0, 0.001, 0.003, 0.01, 0.1, 0.5):
        with scenario(3, max_nodes=4) as run:
            run.forms(3)
            before = run.checker.generation
            agent = run.add_agent()
            run.pass_time(pause_s)
            agent.kill()
            run.forms(3)
            run.require(run.checker.generation - before <= 2, "more than two generations")


def test_an_agent_restarted_at_once_costs_one_generation_or_two(run: Directed) -> None:
    before = run.checker.generation
    run.node(1).kill()
    run.add_agent("h1")
    run.forms(3)
    # The others may have gone on without it first, if it is back only after they were.
    assert run.checker.generation - before <= 2


def one_fault(run: Directed, kind: str) -> None:
    if kind == "a worker":
        run.random.choice(run.members).fails = True
    elif kind == "two workers":
        for agent in run.random.sample(run.members, 2):
            agent.fails = True
    elif kind == "two nodes":
        for agent in run.random.sample(run.members, 2):
            agent.kill()
    elif kind == "the arbiter":
        run.deciding.kill()
    else:
        run.add_agent()


STORM = Weather((0.0005, 0.03), loss=0.15, late=0.5)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["a worker", "two workers", "two nodes", "the arbiter", "a newcomer"])
def test_one_fault_is_one_generation_in_any_weather(kind: str) -> None:
    for seed in range(1, 7):
        weather = [CALM, Weather((0.001, 0.4)), STORM][seed % 3]
        habits = Habits(stop_s=[(0.0, 0.0), (0.1, 3.0)][seed % 2])
        with scenario(4, seed=seed, weather=weather, habits=habits, max_nodes=4 + (kind == "a newcomer")) as run:
            run.forms(4)
            with run.generations(1, limit_s=40.0):
                one_fault(run, kind)
                run.pass_time(8.0)


# ---- P7: the store alone


@pytest.mark.long
@pytest.mark.parametrize("duration_s", [0.05, 0.9, 3.0, 30.0, 600.0])
@pytest.mark.parametrize("kind", ["outage", "election"])
def test_losing_the_store_ends_nothing(kind: str, duration_s: float) -> None:
    with scenario(4) as run:
        run.forms(4)
        with run.generations(0):
            getattr(run.cluster, kind)(duration_s)
            run.pass_time(duration_s + 5.0)
        assert all(agent.last_generation == 1 and agent.workers for agent in run.members)


def test_fault_during_an_outage_costs_one_generation(run: Directed) -> None:
    with run.generations(1, limit_s=60.0):
        run.cluster.outage(20.0)
        run.pass_time(5.0)
        run.node(2).fails = True
        run.pass_time(25.0)
    assert len(run.members) == 3


@pytest.mark.long
@pytest.mark.parametrize("duration_s", [0.9, 2.0, 10.0, 100.0])
def test_losing_the_way_to_the_store_ends_nothing_either(duration_s: float) -> None:
    """The store is well and lets every lease end: the node that is back first gives the others time."""
    for seed in range(1, 4):
        with scenario(4, seed=seed) as run:
            run.forms(4)
            with run.generations(0):
                for agent in run.live:
                    run.faults.cut(agent)
                run.pass_time(duration_s)
                run.faults.heal()
                run.pass_time(10.0)
            assert all(agent.last_generation == 1 and agent.workers for agent in run.members)


# ---- P9: calls and revisions


def calls(run: Directed) -> int:
    return run.calls().total()


@pytest.mark.long
def test_a_generation_takes_few_calls_and_an_idle_run_none() -> None:
    with scenario(8, habits=None) as run:
        for agent in run.agents:
            agent.random.random = lambda: 1.0  # no agent writes
        run.forms(8)
        run.require(calls(run) <= CALLS_PER_GENERATION * 8, f"{calls(run)} calls for the first generation")
        before = calls(run)
        run.node(3).fails = True
        run.pass_time(5.0)
        assert run.checker.generation == 2
        run.require(calls(run) - before <= CALLS_PER_GENERATION * 8, f"{calls(run) - before} calls for a generation")
        run.idle(600.0)


# ---- limits, closing, two jobs


def test_nothing_starts_before_the_minimum_is_there() -> None:
    with scenario(2, min_nodes=3, max_nodes=4) as run:
        run.pass_time(60.0)
        assert not run.checker.generations
        assert not any(agent.workers for agent in run.live)
        run.add_agent()
        run.forms(3)
        run.node(0).kill()
        run.pass_time(30.0)
        assert run.checker.generation == 1
        assert not any(agent.workers for agent in run.live)


def test_first_generation_waits_for_last_call_or_expected_nodes() -> None:
    with scenario(2, max_nodes=4, last_call_timeout_s=7.0) as run:
        run.pass_time(6.5)
        assert not run.checker.generations
        run.forms(2)
    with scenario(2, max_nodes=4, last_call_timeout_s=7.0, expected_nodes=2) as run:
        run.pass_time(0.5)
        assert run.checker.generation == 1


def test_a_run_that_is_closed_leaves_its_generation_and_nothing_else(run: Directed) -> None:
    run.close_run()
    run.check()
    assert not run.live
    run.add_agent()
    run.add_agent()
    run.forms(2)
    assert run.checker.generation == 2, "generations do not begin again with a run of the same id"


def test_another_job_with_the_same_id_is_refused(run: Directed) -> None:
    with run.generations(0):
        other = run.add_agent("other", min_nodes=5, max_nodes=6)
        run.pass_time(10.0)
        assert other.exited == "conflict"


def test_another_job_with_the_same_id_and_limits_is_a_newcomer_or_a_standby(run: Directed) -> None:
    with run.generations(0):
        others = [run.add_agent() for _ in range(3)]
    assert all(agent.waiting for agent in others)


def test_a_job_that_comes_back_to_a_run_of_another_is_told(run: Directed) -> None:
    first = list(run.live)
    for agent in first:
        run.faults.freeze(agent)
    run.pass_time(6.0)
    other = run.add_agent("other", min_nodes=1, max_nodes=1)
    run.pass_time(6.0, lambda: bool(other.workers))
    run.faults.heal()
    run.pass_time(20.0)
    assert [agent.exited for agent in first] == ["conflict"] * 3
    assert other.workers == {(2, 0)}


# ---- nodes finish at different times


def finish(run: Directed, *agents: Agent) -> None:
    for agent in agents:
        agent.finishes = True
    run.pass_time(20.0, lambda: not any(agent.alive for agent in agents))


@pytest.mark.parametrize("barrier_s", [0.0, 30.0])
@pytest.mark.parametrize("what", ["leaves", "is killed in the barrier", "freezes in the barrier", "is joined"])
@pytest.mark.parametrize("decides", [False, True])
def test_a_node_that_finished_breaks_no_generation(barrier_s: float, what: str, decides: bool) -> None:
    with scenario(3, habits=Habits(barrier_s=barrier_s), max_nodes=4, expected_nodes=3) as run:
        run.forms(3)
        first = next(agent for agent in run.members if (agent is run.deciding) == decides)
        first.finishes = True
        run.pass_time(5.0, lambda: bool(first.finished_generation) and not first.workers)
        run.pass_time(0.5)
        if what == "is killed in the barrier" and first.alive:
            first.kill()
        elif what == "freezes in the barrier":
            run.faults.freeze(first)
        elif what == "is joined":
            run.add_agent()
        run.pass_time(10.0)
        run.require(run.checker.generation == 1 and len(run.members) == 2, "the others were disturbed")
        others = list(run.members)
        finish(run, *others)
        run.require(run.checker.state.phase == CLOSED and run.checker.state.reason == "finished", "not closed")


@pytest.mark.parametrize("barrier_s", [0.0, 30.0])
def test_workers_that_fail_after_others_have_finished_are_started_again(barrier_s: float) -> None:
    with scenario(3, habits=Habits(barrier_s=barrier_s)) as run:
        run.forms(3)
        first, *others = run.members
        first.finishes = True
        run.pass_time(5.0, lambda: bool(first.finished_generation) and not first.workers)
        run.pass_time(0.5)
        others[0].fails = True
        run.pass_time(20.0, lambda: run.checker.generation == 2 and len(run.members) == 2)
        run.require(run.members == others, "no restart")
        finish(run, *others)
        run.require(run.checker.state.phase == CLOSED and run.checker.state.reason == "finished", "not closed")


def test_a_failed_job_is_never_recorded_as_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the first to finish closes the run."""
    monkeypatch.setattr(Participant, "finish", Participant.close)

    def finish_one() -> None:
        with scenario(3) as run:
            run.forms(3)
            finish(run, run.members[0])

    with pytest.raises(Broken, match="P10"):
        finish_one()


# ---- zombies


@pytest.mark.parametrize("weather", [CALM, Weather(delay_s=(0.001, 0.4))])
def test_a_zombie_writes_nothing(weather: Weather) -> None:
    with scenario(3, weather=weather) as run:
        run.forms(3)
        zombie = run.node(0)
        run.faults.freeze(zombie)
        run.pass_time(10.0, lambda: len(run.checker.generations) == 2)
        written = run.checker.fenced_writes
        for _ in range(5):
            zombie.haunt()
        zombie.link.loop.thaw()
        run.pass_time(0.05)
        accepted = [event for event in run.cluster.store.history if f"sync/1/{zombie.number}-".encode() in event.key]
        late = [
            event for event in accepted if event.revision > run.checker.generations[1].revision and event.type == "PUT"
        ]
        assert not late
        assert run.checker.fenced_writes >= written
        run.forms(3)


# ---- bugs that seeds have found, in slow motion


def test_a_declaration_that_arrives_late_does_not_undo_a_later_one() -> None:
    with scenario(3, habits=Habits(stop_s=(0.0, 0.0), fenced_write=0.0)) as run:
        run.forms(3)
        late, other, slow = (agent for agent in sorted(run.members, key=lambda agent: agent is run.deciding))
        asked = late.link.calls["txn"]
        late.link.weather = Weather(loss=1.0, late=1.0)
        other.fails = True
        run.pass_time(5.0, lambda: late.link.calls["txn"] > asked)
        late.link.weather = CALM
        run.pass_time(5.0, lambda: run.checker.generation == 2 and len(run.members) == 3)
        slow.habits = Habits(stop_s=(6.0, 6.0), fenced_write=0.0)
        other.fails = True
        run.pass_time(10.0, lambda: run.checker.generation == 3)
        run.forms(3)


def test_a_node_that_stands_still_while_it_registers_has_one_lease_afterwards() -> None:
    for seed in range(1, 25):
        with scenario(1, seed=seed, max_nodes=2, weather=Weather((0.001, 0.4))) as run:
            late = run.agents[0]
            run.pass_time(1.0, lambda late=late: late.link.calls["grant"] > 0)
            run.faults.freeze(late)
            run.pass_time(4.0)
            run.faults.heal()
            run.pass_time(1.0, lambda late=late: bool(late.link.grants))
            late.link.reset()  # so that the lease is asked for, and told to be gone, while the node registers with it
            run.pass_time(30.0, lambda run=run: bool(run.members))
            run.pass_time(5.0)
            run.require(bool(run.members), "no node runs")
            assert len(run.cluster.leases) == 1


@pytest.mark.long
def test_a_node_that_was_cut_off_is_not_given_a_world_that_went_on_without_it() -> None:
    for seed in range(1, 41):
        with scenario(3, seed=seed, habits=Habits(stop_s=(0.0, 0.0)), disconnect_grace_s=0.0) as run:
            run.forms(3)
            late, other, slow = sorted(run.agents, key=lambda agent: agent is run.deciding)
            slow.habits = Habits(stop_s=(0.5, 0.5))
            other.fails = True
            run.pass_time(5.0, lambda late=late: late.waiting)
            run.pass_time(0.1)
            run.faults.cut(late)
            run.pass_time(6.0, lambda run=run: run.checker.generation == 3)
            late.habits = Habits(stop_s=(3.0, 3.0))
            late.link.weather = Weather((0.001, 0.2))
            run.faults.heal()
            run.forms(3)


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003, 0.006, 0.01])
def test_the_office_is_taken_even_if_the_store_goes_away_as_it_falls_vacant(run: Directed, delay_s: float) -> None:
    run.deciding.kill()
    run.pass_time(5.0, lambda: run.checker.arbiter == -1)
    run.pass_time(delay_s)
    run.cluster.outage(12.0)
    run.pass_time(12.0)
    run.forms(2)
