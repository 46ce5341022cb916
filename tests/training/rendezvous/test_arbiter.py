"""The arbiter's rules: in any view a generation begins safely, and it begins when it can."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.training.records import (
    BROKEN,
    CLOSED,
    GATHERING,
    HEARTBEAT_LOST,
    PHASES,
    RUNNING,
    Fault,
    GenerationRecord,
    Node,
    State,
)
from raftkv.training.rendezvous.arbiter import (
    AHEAD_MAX,
    RETURNED,
    SCALE_UP,
    Arbiter,
    Begin,
    Break,
    Evict,
    Finish,
    Present,
    View,
    by_place,
    new_state,
)

NOW = 1000.0


def node(name: str, want: int = 1, running: int = 0, **more: str) -> Node:
    return Node(f"{name}-1", more.get("host", name), want=want, running=running, topology=more.get("topology", ""))


def view(phase: str, generation: int, members: str, there: list[Node], limits: tuple[int, int] = (1, 4)) -> View:
    """Members are named by letters; ``there`` came in its order."""
    rounds = GenerationRecord(generation, tuple(node(name).member for name in members))
    state = State(generation, phase, min_nodes=limits[0], max_nodes=limits[1])
    return View(rounds, state, {one.id: Present(one, since) for since, one in enumerate(there, 10)})


def order(decision: object) -> str:
    assert isinstance(decision, Begin), decision
    return "".join(member.host for member in decision.members)


def cause(decision: object) -> str:
    assert isinstance(decision, Break), decision
    return decision.cause


# ---- when a generation is over


def test_a_generation_that_is_whole_goes_on() -> None:
    arbiter = Arbiter(5.0)
    assert arbiter.decide(view(RUNNING, 1, "ab", [node("a"), node("b")], (1, 2)), NOW) is None
    assert arbiter.look_again_at is None


def test_a_member_that_is_lost_ends_it_and_is_named() -> None:
    decision = Arbiter(5.0).decide(view(RUNNING, 1, "abc", [node("a")]), NOW)
    assert isinstance(decision, Break)
    assert (decision.cause, decision.node) == (HEARTBEAT_LOST, "b-1")
    assert [member.host for member in decision.lost] == ["b", "c"]
    assert decision.reason == "lost 2 of 3: b, c"


def test_a_member_that_came_back_by_itself_ends_it() -> None:
    assert cause(Arbiter(5.0).decide(view(RUNNING, 1, "ab", [node("a"), node("b", want=2)]), NOW)) == RETURNED


def test_a_fault_ends_it_before_anything_else_and_says_why() -> None:
    seen = view(RUNNING, 1, "ab", [node("a", want=2)])
    seen.faults = [Fault(1, "a-1", "a", rank=0, exit_code=3), Fault(1, "b-1", "b", rank=1)]
    decision = Arbiter(5.0).decide(seen, NOW)
    assert isinstance(decision, Break)
    assert (decision.cause, decision.node, decision.reason) == ("exit", "a-1", "rank 0 on a exited with 3")
    assert [member.host for member in decision.lost] == ["b"]


def test_a_newcomer_ends_it_if_there_is_room() -> None:
    there = [node("a"), node("b"), node("c")]
    assert cause(Arbiter(5.0).decide(view(RUNNING, 1, "ab", there, (1, 3)), NOW)) == SCALE_UP
    assert Arbiter(5.0).decide(view(RUNNING, 1, "ab", there, (1, 2)), NOW) is None


@pytest.mark.parametrize(
    ("there", "finished", "decision"),
    [("b", {0}, None), ("bc", {0}, None), ("", {0}, HEARTBEAT_LOST), ("b", {0, 1}, Finish()), ("", {0, 1}, Finish())],
)
def test_a_member_that_has_finished_is_not_lost_and_the_last_ends_the_run(there, finished, decision):
    seen = view(RUNNING, 1, "ab", [node(name, running=1 if name in "ab" else 0) for name in there])
    seen.finished = frozenset(finished)
    found = Arbiter(5.0).decide(seen, NOW)
    assert (found.cause if isinstance(found, Break) else found) == decision


def test_a_newcomer_that_is_denied_or_still_runs_something_is_not_waited_for() -> None:
    denied = view(RUNNING, 1, "a", [node("a"), node("c")])
    denied.denied = frozenset("c")
    assert Arbiter(5.0).decide(denied, NOW) is None
    assert Arbiter(5.0).decide(view(RUNNING, 2, "a", [node("a"), node("c", want=1, running=1)]), NOW) is None


def test_members_are_not_taken_for_lost_before_they_had_time_to_come_back() -> None:
    arbiter = Arbiter(5.0)
    arbiter.postponed_until = NOW + 3
    seen = view(RUNNING, 1, "ab", [node("a")])
    assert arbiter.decide(seen, NOW) is None
    assert arbiter.look_again_at == NOW + 3
    assert cause(arbiter.decide(seen, NOW + 3)) == HEARTBEAT_LOST


def test_nothing_happens_in_a_closed_run() -> None:
    assert Arbiter(0.0).decide(view(CLOSED, 1, "ab", [node("c"), node("a", want=2)]), NOW) is None


# ---- who is in the next one


def test_the_next_generation_waits_for_every_member_that_is_there() -> None:
    there = [node("a", want=2), node("b", want=1), node("c", want=1)]
    assert Arbiter(0.0).decide(view(BROKEN, 1, "ab", there), NOW) is None
    there[1] = node("b", want=2)
    assert order(Arbiter(99.0).decide(view(BROKEN, 1, "ab", there), NOW)) == "abc"


def test_a_member_that_does_not_come_back_is_evict_if_the_others_can_go_on() -> None:
    arbiter = Arbiter(0.0, return_timeout_s=30.0)
    there = [node("a", want=2), node("b", want=1), node("c", want=2)]
    seen = view(BROKEN, 1, "abc", there, (2, 3))
    assert (arbiter.decide(seen, NOW), arbiter.look_again_at) == (None, NOW + 30.0)
    assert arbiter.decide(seen, NOW + 30.0) == Evict((seen.nodes["b-1"],))
    assert order(arbiter.decide(view(BROKEN, 1, "abc", [there[0], there[2]], (2, 3)), NOW + 30.0)) == "ac"
    assert arbiter.decide(view(BROKEN, 1, "abc", there, (3, 3)), NOW + 99.0) is None
    assert Arbiter(0.0).decide(seen, NOW + 99.0) is None


def test_a_node_far_ahead_of_the_run_moves_no_generation() -> None:
    arbiter, there = Arbiter(0.0), [node("a", 5), node("b", 5)]
    for want in (4 + AHEAD_MAX + 1, 2**64 - 1):
        begun = arbiter.decide(view(BROKEN, 4, "ab", [*there, node("c", want)]), NOW)
        assert (order(begun), isinstance(begun, Begin) and begun.generation) == ("ab", 5)
        ended = arbiter.decide(view(RUNNING, 4, "abc", [node("a", 4), node("b", 4), node("c", want)]), NOW)
        assert isinstance(ended, Break)
        begun = arbiter.decide(view(BROKEN, 4, "abc", [*there, node("c", want)], (2, 3)), NOW)
        assert (order(begun), isinstance(begun, Begin) and begun.generation) == ("ab", 5)


def test_after_a_restore_the_next_generation_is_above_all_that_nodes_have_seen() -> None:
    """The store knows generation 1 again; a and b were in 4, c is new. Who runs 4 still is waited for."""
    arbiter = Arbiter(0.0)
    assert arbiter.decide(view(BROKEN, 1, "ab", [node("a", 5), node("b", 4, running=4), node("c")]), NOW) is None
    begun = arbiter.decide(view(BROKEN, 1, "ab", [node("a", 5), node("b", 5), node("c")]), NOW)
    assert (order(begun), isinstance(begun, Begin) and begun.generation) == ("abc", 5)


def test_survivors_keep_order_and_newcomers_follow_by_arrival() -> None:
    there = [node("x"), node("d", want=2), node("w"), node("b", want=2), node("v")]
    assert order(Arbiter(0.0).decide(view(BROKEN, 1, "abcd", there, (1, 4)), NOW)) == "bdxw"


def test_fill_puts_newcomers_into_the_places_of_those_that_are_gone() -> None:
    there = [node("x"), node("d", want=2), node("b", want=2)]
    policy = Arbiter(0.0, rank_policy="fill")
    assert order(policy.decide(view(BROKEN, 1, "abcd", there, (1, 4)), NOW)) == "xbd"
    there += [node("y"), node("z")]
    assert order(policy.decide(view(BROKEN, 1, "abcd", there, (1, 4)), NOW)) == "xbyd"
    assert (
        order(policy.decide(view(BROKEN, 1, "ab", [node("b", want=2), *there[3:], node("u")], (1, 4)), NOW)) == "ybzu"
    )


def test_topology_puts_neighbours_side_by_side() -> None:
    there = [
        node("a", want=2, topology="rack1"),
        node("b", want=2, topology="rack2"),
        node("c", topology="rack1"),
        node("d", topology="rack2"),
    ]
    assert order(Arbiter(0.0).decide(view(BROKEN, 1, "ab", there), NOW)) == "abcd"
    assert order(Arbiter(0.0, rank_policy="topology").decide(view(BROKEN, 1, "ab", there), NOW)) == "acbd"


def test_nodes_of_one_host_stand_side_by_side() -> None:
    nodes = [Node("a-1", "a"), Node("b-1", "b"), Node("a-2", "a")]
    assert [each.id for each in by_place(nodes)] == ["a-1", "a-2", "b-1"]


def test_nothing_begins_before_the_minimum_is_there() -> None:
    arbiter = Arbiter(0.0)
    assert arbiter.decide(view(BROKEN, 1, "abc", [node("a", want=2)], (2, 4)), NOW) is None
    assert arbiter.is_short
    assert order(arbiter.decide(view(BROKEN, 1, "abc", [node("a", want=2), node("x")], (2, 4)), NOW)) == "ax"


def test_a_host_that_is_denied_is_left_out_and_not_counted() -> None:
    seen = view(BROKEN, 1, "abc", [node("a", want=2), node("b", want=2), node("c", want=2)], (2, 4))
    seen.denied = frozenset("b")
    assert order(Arbiter(0.0).decide(seen, NOW)) == "ac"
    seen.denied = frozenset("bc")
    assert Arbiter(0.0).decide(seen, NOW) is None


def test_a_node_that_may_still_run_an_older_generation_is_in_none() -> None:
    there = [node("a", want=3), node("z", want=1, running=1)]
    assert order(Arbiter(0.0).decide(view(BROKEN, 2, "a", there), NOW)) == "a"


def test_the_next_generation_too_forgives_members_that_could_not_be_there() -> None:
    arbiter = Arbiter(0.0)
    arbiter.postponed_until = NOW + 2
    seen = view(BROKEN, 1, "ab", [node("a", want=2)])
    assert arbiter.decide(seen, NOW) is None
    assert arbiter.look_again_at == NOW + 2
    assert order(arbiter.decide(seen, NOW + 2)) == "a"


# ---- the last call


def test_the_first_generation_waits_for_the_last_call() -> None:
    arbiter = Arbiter(5.0)
    seen = view(GATHERING, 0, "", [node("a"), node("b")], (2, 4))
    assert arbiter.decide(seen, NOW) is None
    assert arbiter.look_again_at == NOW + 5
    assert arbiter.decide(seen, NOW + 4.9) is None
    assert order(arbiter.decide(seen, NOW + 5)) == "ab"


def test_the_last_call_begins_anew_when_the_minimum_is_lost() -> None:
    arbiter = Arbiter(5.0)
    seen = view(GATHERING, 0, "", [node("a"), node("b")], (2, 4))
    assert arbiter.decide(seen, NOW) is None
    assert arbiter.decide(view(GATHERING, 0, "", [node("a")], (2, 4)), NOW + 3) is None
    assert arbiter.decide(seen, NOW + 4) is None
    assert arbiter.look_again_at == NOW + 9


@pytest.mark.parametrize(("expected", "there"), [(0, "abcd"), (3, "abc"), (1, "ab"), (9, "abcd")])
def test_last_call_ends_when_all_nodes_are_there(expected: int, there: str) -> None:
    seen = view(GATHERING, 0, "", [node(name) for name in there], (2, 4))
    assert order(Arbiter(5.0, expected).decide(seen, NOW)) == there


def test_a_new_state_keeps_the_limits_and_the_generation() -> None:
    seen = view(RUNNING, 7, "a", [], (2, 4))
    assert new_state(seen, phase=BROKEN, reason="x") == State(7, BROKEN, reason="x", min_nodes=2, max_nodes=4)


# ---- any view

NAMES = "abcdefg"


@st.composite
def views(draw: st.DrawFn) -> View:
    generation = draw(st.integers(0, 3))
    members = draw(st.permutations(NAMES))[: draw(st.integers(0, 5)) if generation else 0]
    smallest = draw(st.integers(1, 4))
    there = [
        node(name, want=draw(st.integers(0, generation + 2)), running=draw(st.integers(0, generation)))
        for name in draw(st.permutations(NAMES))[: draw(st.integers(0, 7))]
    ]
    seen = view(draw(st.sampled_from(PHASES)), generation, "".join(members), there, (smallest, draw(st.integers(5, 6))))
    if draw(st.booleans()):
        seen.state = replace(seen.state, generation=max(generation - 1, 0))
    seen.denied = frozenset(draw(st.sets(st.sampled_from(NAMES), max_size=2)))
    seen.admitted = draw(st.none() | st.frozensets(st.sampled_from([f"{name}-1" for name in NAMES])))
    seen.faults = [Fault(generation, "a-1", "a")] * draw(st.integers(0, 1))
    return seen


ARBITERS = st.builds(
    Arbiter,
    st.sampled_from([0.0, 5.0]),
    st.integers(0, 6),
    st.sampled_from(["append", "fill"]),
    st.sampled_from([0.0, 7.0]),
)


@given(views(), ARBITERS)
def test_a_generation_begins_only_with_nodes_that_run_nothing(seen: View, arbiter: Arbiter) -> None:
    decision = arbiter.decide(seen, NOW)
    if not isinstance(decision, Begin):
        return
    assert seen.state.phase != CLOSED
    assert seen.state.phase != RUNNING or seen.state.generation != seen.generation
    ids = [member.id for member in decision.members]
    assert len(set(ids)) == len(ids)
    assert seen.state.min_nodes <= len(ids) <= seen.state.max_nodes
    before = {member.id for member in seen.round.members}
    for node_id in ids:
        one = seen.nodes[node_id].node
        assert one.want > seen.generation if node_id in before else one.running == 0
        assert one.host not in seen.denied
        assert seen.admitted is None or node_id in seen.admitted
    assert all(seen.nodes[node_id].node.want > seen.generation for node_id in before if node_id in seen.nodes)


@given(views(), ARBITERS)
def test_remaining_members_precede_newcomers_in_order(seen: View, arbiter: Arbiter) -> None:
    decision = arbiter.decide(seen, NOW)
    if not isinstance(decision, Begin):
        return
    before = [member.id for member in seen.round.members]
    ids = [member.id for member in decision.members]
    stayed = [node_id for node_id in ids if node_id in before]
    assert stayed == [node_id for node_id in before if node_id in ids]
    may = {one.id for one in seen.survivors()}
    assert may <= set(ids), "no survivor is evicted for a newcomer"


@given(views(), ARBITERS)
def test_a_generation_is_over_only_for_a_reason(seen: View, arbiter: Arbiter) -> None:
    decision = arbiter.decide(seen, NOW)
    if isinstance(decision, Break):
        assert (seen.state.phase, seen.state.generation) == (RUNNING, seen.generation)
        assert seen.faults or seen.lost() or seen.survivors() or seen.newcomers() or _somebody_came_back(seen)
        assert decision.cause
        assert decision.reason


def _somebody_came_back(seen: View) -> bool:
    members = {member.id for member in seen.round.members}
    return any(one.node.want > seen.generation for node_id, one in seen.nodes.items() if node_id in members)


@given(views(), ARBITERS)
def test_undecided_arbiter_has_a_next_look_or_waits_for_an_event(seen: View, arbiter: Arbiter) -> None:
    first = arbiter.decide(seen, NOW)
    again_at, count = arbiter.look_again_at, len(seen.survivors()) + len(seen.newcomers())
    assert arbiter.decide(seen, NOW) == first, "the same view at the same time is the same decision"
    if first is None and again_at is not None:
        assert NOW < again_at < math.inf
        assert arbiter.decide(seen, again_at) is not None or count < seen.state.min_nodes
    if first is None and again_at is None and seen.state.phase in (BROKEN, GATHERING):
        assert any(seen.still_out()) or count < seen.state.min_nodes


@given(views(), ARBITERS)
def test_a_decision_that_is_carried_out_is_not_made_again(seen: View, arbiter: Arbiter) -> None:
    decision = arbiter.decide(seen, NOW)
    if isinstance(decision, Break):
        seen.state = new_state(seen, phase=BROKEN)
        assert not isinstance(arbiter.decide(seen, NOW), Break)
    elif isinstance(decision, Begin):
        seen.round = GenerationRecord(seen.generation + 1, decision.members)
        seen.state = new_state(seen, phase=RUNNING)
        seen.faults = []
        assert not isinstance(arbiter.decide(seen, NOW), Begin)
