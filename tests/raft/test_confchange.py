"""Membership changes: a simple model, properties of quorums, the encoding in entries, and the table of refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.raft import confchange
from raftkv.raft.confchange import Configuration
from raftkv.raft.errors import ConfChangeError
from raftkv.raft.types import ConfChange, ConfChangeSingle, ConfChangeTransition, ConfChangeType, ConfState, EntryType

ADD, REMOVE = ConfChangeType.ADD_NODE, ConfChangeType.REMOVE_NODE
UPDATE, LEARN = ConfChangeType.UPDATE_NODE, ConfChangeType.ADD_LEARNER_NODE

singles = st.builds(ConfChangeSingle, st.sampled_from(ConfChangeType), st.integers(0, 6))
changes = st.builds(
    ConfChange, st.lists(singles, max_size=4).map(tuple), st.sampled_from(ConfChangeTransition), st.binary(max_size=5)
)
START = Configuration(voters=frozenset({1, 2, 3}))


def _role_after(steps: tuple[ConfChangeSingle, ...], member: int, role: str) -> str:
    """The simple model: the role of one member after the steps, regardless of other members."""
    for step in steps:
        if step.node_id == member and step.node_id != 0:
            role = {ADD: "voter", LEARN: "learner", REMOVE: "none", UPDATE: role}[step.type]
    return role


def _role(config: Configuration, member: int) -> str:
    if member in config.voters:
        return "voter"
    return "learner" if member in config.learners | config.learners_next else "none"


@given(st.lists(changes, max_size=6))
def test_role_follows_last_change_step(history: list[ConfChange]) -> None:
    config = START
    for change in history:
        try:
            after = confchange.apply(config, change)
        except ConfChangeError:
            continue
        for member in range(1, 7):
            assert _role(after, member) == _role_after(change.changes, member, _role(config, member))
        config = after


@given(st.lists(changes, max_size=6))
def test_configurations_stay_sound_and_survive_their_form_on_disk(history: list[ConfChange]) -> None:
    config = START
    for change in history:
        try:
            config = confchange.apply(config, change)
        except ConfChangeError:
            continue
        confchange.check(config)
        assert config.voters
        assert confchange.restore(config.conf_state()) == config


@given(st.lists(changes, max_size=6))
def test_neighbouring_configurations_have_no_disjoint_quorums(history: list[ConfChange]) -> None:
    """R9: a quorum before and a quorum after a change always meet, by brute force over who is up."""
    config = START
    members = range(1, 7)
    for change in history:
        try:
            after = confchange.apply(config, change)
        except ConfChangeError:
            continue
        for mask in range(1 << len(members)):
            side = {member for member in members if mask >> (member - 1) & 1}
            rest = set(members) - side
            assert not (_decides(config, side) and _decides(after, rest))
        config = after


def _decides(config: Configuration, members: set[int]) -> bool:
    halves = [half for half in (config.voters, config.outgoing) if half]
    return all(len(half & members) > len(half) // 2 for half in halves)


@given(changes)
def test_a_change_survives_its_form_in_the_entry(change: ConfChange) -> None:
    assert confchange.decode(confchange.encode(change)) == change


def test_leaving_weighs_nothing() -> None:
    assert confchange.encode(ConfChange()) == b""
    assert confchange.entry_type(ConfChange()) is EntryType.CONF_CHANGE_V2
    one = ConfChange((ConfChangeSingle(ADD, 4),))
    assert confchange.entry_type(one) is EntryType.CONF_CHANGE
    assert len(confchange.encode(one)) == 13


def _change(*steps: tuple[ConfChangeType, int], explicit: bool = False) -> ConfChange:
    transition = ConfChangeTransition.JOINT_EXPLICIT if explicit else ConfChangeTransition.AUTO
    return ConfChange(tuple(ConfChangeSingle(*step) for step in steps), transition)


JOINT = confchange.apply(START, _change((REMOVE, 3), (ADD, 4), explicit=True))


@pytest.mark.parametrize(
    ("config", "change", "text"),
    [
        (START, _change(), "can't leave a non-joint config"),
        (JOINT, _change((ADD, 5)), "can't apply simple config change in joint config"),
        (JOINT, _change((ADD, 5), (ADD, 6)), "config is already joint"),
        (Configuration(), _change((ADD, 1), (ADD, 2)), "can't make a zero-voter config joint"),
        (Configuration(voters=frozenset({1})), _change((REMOVE, 1)), "removed all voters"),
        (Configuration(voters=frozenset({1})), _change((LEARN, 1)), "removed all voters"),
        (START, _change((REMOVE, 1), (REMOVE, 2), (REMOVE, 3)), "removed all voters"),
    ],
)
def test_refused(config: Configuration, change: ConfChange, text: str) -> None:
    with pytest.raises(ConfChangeError, match=text):
        confchange.apply(config, change)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (ConfState(voters=(1, 2), learners=(2,)), "both learner and voter"),
        (ConfState(voters=(1,), learners_next=(1,), voters_outgoing=(2,)), "no outgoing voter"),
        (ConfState(voters=(1,), auto_leave=True), "belong to a joint configuration"),
        (ConfState(learners=(1,)), "removed all voters"),
        (ConfState(voters=(1, 1)), "duplicate ids"),
        (ConfState(voters=(0, 1)), "0 is no member id"),
    ],
)
def test_invalid_conf_state_is_refused(state: ConfState, text: str) -> None:
    with pytest.raises(ConfChangeError, match=text):
        confchange.restore(state)


def test_update_never_promotes_a_learner() -> None:
    """R9, etcd's bug of 2026: updating a member changes nothing about its vote."""
    config = Configuration(voters=frozenset({1, 2}), learners=frozenset({3}))
    assert confchange.apply(config, _change((UPDATE, 3))) == config


def test_auto_leave_unless_explicit() -> None:
    assert confchange.apply(START, _change((ADD, 4), (ADD, 5))).auto_leave
    assert not JOINT.auto_leave
    implicit = ConfChange((ConfChangeSingle(ADD, 4),), ConfChangeTransition.JOINT_IMPLICIT)
    assert confchange.apply(START, implicit).auto_leave
