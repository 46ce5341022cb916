"""A generation costs a survivor the same for any number of nodes, and no mistake in a head gives a wrong rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from raftkv.training.records import GenerationRecord, Head, Member, RunKeys, State
from raftkv.training.rendezvous import arbiter_driver, world
from raftkv.training.rendezvous.world import RecordCache, Roster, new_head
from tests.long import long_except
from tests.training.sim.agent import Habits
from tests.training.sim.run import RUN_ID
from tests.training.sim.scenarios import Broken, Directed, scenario

KEYS = RunKeys(RUN_ID)
CALLS_MAX = 2
HEAD_MAX_BYTES = 200
NEWS_MAX_BYTES = 350
"""Keys and values of all that a survivor hears of: the generation is over, and the next one."""
QUIET = Habits(poll_s=0.5, stop_s=(0.0, 0.3), fenced_write=0.0)


def costs_of_a_fault(nodes: int) -> set[tuple[int, int]]:
    """Calls, and bytes received, of each survivor from the death of a node to the next generation."""
    with scenario(nodes, habits=QUIET, lease_ttl_s=3) as run:
        run.pass_time(8.0)
        run.check()
        arbiter = run.deciding
        before = {agent.number: (agent.link.calls.total(), agent.link.received_bytes) for agent in run.live}
        next(agent for agent in run.members if agent is not arbiter).kill()
        run.pass_time(8.0)
        run.check()
        assert (run.checker.generation, len(run.members)) == (2, nodes - 1)
        head = run.cluster.store.items[KEYS.state.encode()]
        assert Head.decode(head.value).digest
        assert len(head.key) + len(head.value) <= HEAD_MAX_BYTES
        costs = set()
        for agent in run.members:
            if agent is not arbiter:
                calls, received = before[agent.number]
                costs.add((agent.link.calls.total() - calls, agent.link.received_bytes - received))
        return costs


@pytest.mark.parametrize("nodes", long_except((16, 64, 256), (16, 64)))
def test_calls_and_bytes_of_a_survivor_do_not_grow_with_the_nodes(nodes: int) -> None:
    ((calls, received),) = costs_of_a_fault(nodes)
    assert calls <= CALLS_MAX
    assert received <= NEWS_MAX_BYTES


def test_reports_of_progress_get_rarer_with_the_nodes_that_receive_them() -> None:
    """Sent once a second, the reports kept 12,500 nodes from gathering."""
    with (
        mock.patch.object(arbiter_driver, "NODES_TOLD_PER_S", 10),
        scenario(100, habits=QUIET, min_nodes=200, max_nodes=200) as run,
    ):
        run.pass_time(12.0)
        state = run.cluster.store.items[KEYS.state.encode()]
        assert State.decode(state.value).joined == 100
        for _ in range(20):
            run.add_agent()
            run.pass_time(1.0)
        assert run.cluster.store.items[KEYS.state.encode()].version <= state.version + 3
        run.pass_time(12.0)
        assert State.decode(run.cluster.store.items[KEYS.state.encode()].value).joined == 120
        run.check()


def test_few_nodes_ask_for_the_place_of_an_arbiter_that_dies_in_the_gathering() -> None:
    """No node has a rank yet: all asked at once."""
    with scenario(100, habits=QUIET, min_nodes=200, max_nodes=200) as run:
        run.pass_time(6.0)
        before = {agent: agent.link.calls.total() for agent in run.live}
        run.deciding.kill()
        assert run.pass_time(30.0, lambda: run.faults.arbiter() in run.live)
        run.pass_time(0.5)  # later, each node checks once that the arbiter is a node
        run.check()
        assert sum(agent.link.calls.total() > before[agent] for agent in run.live) <= 25


def churn() -> None:
    """Two nodes of three die one after the other, and standbys take their places."""
    with scenario(3) as run:
        run.forms(3)
        for _ in range(2):
            run.add_agent()
        run.settle()
        for place in (1, 0):
            with run.generations(1):
                run.node(place).kill()
            run.require(len(run.members) == 3, "a place stays empty")


def wrong_place(current: Roster, members: tuple[Member, ...], state: State) -> Head:
    """Name the neighbour of the member that left."""
    head = new_head(current, members, state)
    return replace(head, left=tuple((place + 1) % len(current.members) for place in head.left))


def stale_parent() -> Callable[[Roster, tuple[Member, ...], State], Head]:
    """Compute the change from the generation before the present one."""
    known = [Roster()]

    def make(current: Roster, members: tuple[Member, ...], state: State) -> Head:
        left, added = known[0].changes(members) or ((), ())
        known[0] = current
        return replace(new_head(current, members, state), left=left, added=added)

    return make


def applied_twice(original: Callable[[Roster, Head], Roster | None]) -> Callable[[Roster, Head], Roster | None]:
    def after(self: Roster, head: Head) -> Roster | None:
        found = original(self, head)
        return None if found is None else original(found, head) if head.left else found

    return after


PLANTED = {
    "the wrong place": lambda: mock.patch.object(arbiter_driver, "new_head", wrong_place),
    "a stale parent": lambda: mock.patch.object(arbiter_driver, "new_head", stale_parent()),
    "applied twice": lambda: mock.patch.object(Roster, "after", applied_twice(Roster.after)),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_mistake_in_a_head_costs_a_read_and_no_rank(bug: str) -> None:
    with PLANTED[bug]():
        churn()


@pytest.mark.parametrize("bug", PLANTED)
def test_simulator_sees_a_mistake_that_the_digest_does_not_cover(bug: str) -> None:
    with mock.patch.object(Roster, "digest", "the same for all"):
        churn()
        with PLANTED[bug](), pytest.raises(Broken, match=r"P[236] "):
            churn()


def test_simulator_sees_a_world_with_the_fence_of_the_one_before() -> None:
    original = RecordCache._begin

    def keep_revision(self: RecordCache, record: GenerationRecord, roster: Roster | None, revision: int) -> None:
        original(self, record, roster, revision if roster is None else self.round_revision)

    with mock.patch.object(RecordCache, "_begin", keep_revision), pytest.raises(Broken, match=r"P[36] "):
        churn()


def test_simulator_sees_a_state_that_is_taken_without_its_generation() -> None:
    def lead_on(self: RecordCache, events: object) -> bool:
        return True

    with mock.patch.object(RecordCache, "_lead_on", lead_on), pytest.raises(Broken, match=r"P[56] "):
        churn()


def versions_meet(*, arbiter_is_earlier: bool) -> Directed:
    """Nodes of both versions gather, one of each dies, and others come."""
    with scenario(1, earlier_share=float(arbiter_is_earlier), min_nodes=2, max_nodes=4, expected_nodes=4) as run:
        run.pass_time(1.0)
        for share in (0.0, 1.0, float(not arbiter_is_earlier)):
            run.settings = replace(run.settings, earlier_share=share)
            run.add_agent()
        run.forms(4)
        for is_earlier in (False, True):
            with run.generations(1):
                next(one for one in run.members if one.is_earlier == is_earlier and one is not run.deciding).kill()
        with run.generations(1):
            run.add_agent()
        with run.generations(1):
            run.deciding.kill()
        run.add_agent()
        run.forms(3)
        return run


@pytest.mark.parametrize("arbiter_is_earlier", [False, True])
def test_nodes_of_versions_with_and_without_heads_form_one_world(arbiter_is_earlier: bool) -> None:
    run = versions_meet(arbiter_is_earlier=arbiter_is_earlier)
    assert {agent.is_earlier for agent in run.agents} == {False, True}


def test_simulator_sees_a_node_that_overlooks_a_generation_without_a_head() -> None:
    with mock.patch.object(world, "_generation_of", return_value=0), pytest.raises(Broken, match=r"P[56] |not settled"):
        versions_meet(arbiter_is_earlier=True)
