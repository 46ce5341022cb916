"""Five rules of the core whose absence random schedules do not find in time, each tested step by step, and again
with the rule removed, which the same steps must detect.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from raftkv.raft import confchange
from raftkv.raft.core import RawNode
from raftkv.raft.log import MemoryLog
from raftkv.raft.tracker import SNAPSHOT
from raftkv.raft.types import (
    ConfChange,
    ConfChangeSingle,
    ConfChangeTransition,
    ConfChangeType,
    ConfState,
    Entry,
    EntryType,
    HardState,
    Message,
    MessageType,
    RaftConfig,
    SnapshotMeta,
    StateRole,
)
from tests.sim.mutants import MUTANTS

ADD, REMOVE = ConfChangeType.ADD_NODE, ConfChangeType.REMOVE_NODE


def member(entries: list[Entry], commit: int, *voters: int) -> RawNode:
    """Member 1 of term 1 with a log, nothing of which is applied."""
    log = MemoryLog(HardState(1, 0, commit), ConfState(voters=voters))
    log.append(entries)
    return RawNode(RaftConfig(id=1, pre_vote=False), log, random.Random(1))


def change(index: int, *steps: ConfChangeSingle, transition: ConfChangeTransition = ConfChangeTransition.AUTO) -> Entry:
    """A membership change in the log."""
    made = ConfChange(steps, transition)
    return Entry(1, index, confchange.encode(made), confchange.entry_type(made))


def settle(node: RawNode) -> None:
    """Carry out all pending work at once."""
    while node.has_ready():
        ready = node.ready()
        node.raft.log.reader.append(ready.entries)
        node.on_append_durable(ready)
        for entry in ready.committed_entries:
            if entry.type is not EntryType.NORMAL:
                node.apply_conf_change(confchange.decode(entry.data))
            node.on_applied(entry.index)


def answer(node: RawNode, kind: MessageType, source: int, **fields: object) -> None:
    """A message of another member, in this one's term."""
    node.step(Message(kind, to=1, from_=source, term=node.raft.term, **fields))


def lead(node: RawNode, *voters: int) -> None:
    """Apply committed entries, then win an election."""
    settle(node)
    node.campaign()
    settle(node)
    for voter in voters:
        answer(node, MessageType.VOTE_RESPONSE, voter)
    settle(node)
    assert node.raft.role is StateRole.LEADER


def joint_configuration_is_left_once() -> None:
    """A new leader finds a change that enters a joint configuration, and behind it the one by which its predecessor
    meant to leave it. It must not propose to leave as well before it has applied that."""
    enter = change(1, ConfChangeSingle(ADD, 4), transition=ConfChangeTransition.JOINT_IMPLICIT)
    node = member([enter, change(2)], 1, 1, 2, 3)
    lead(node, 2, 3)
    assert node.raft.tracker.config.auto_leave
    node.on_applied(node.raft.log.applied)
    settle(node)
    own = node.raft.log.entries(3, node.raft.log.last_index + 1, 1 << 20)
    assert [entry.type for entry in own] == [EntryType.NORMAL], f"it proposed {own[1:]} before it had applied entry 2"


def snapshot_waits_for_changes_being_applied() -> None:
    """A change was handed out and is not applied yet when a snapshot with a later configuration arrives."""
    node = member([change(1, ConfChangeSingle(ADD, 4))], 1, 1, 2, 3)
    ready = node.ready()
    assert [entry.index for entry in ready.committed_entries] == [1]
    meta = SnapshotMeta(9, 1, ConfState(voters=(1, 2, 5)))
    answer(node, MessageType.SNAPSHOT, 2, snapshot=meta)
    node.apply_conf_change(confchange.decode(ready.committed_entries[0].data))
    assert node.raft.tracker.config.voters == {1, 2, 3, 4}, "a change met a configuration that contains it"


def candidate_applies_what_it_learns() -> None:
    """A candidate learns from a refused vote that a change of the voters is committed: votes counted by the old
    configuration must not make it a leader."""
    node = member([change(1, ConfChangeSingle(REMOVE, 2))], 0, 1, 2, 3)
    node.campaign()
    settle(node)
    answer(node, MessageType.VOTE_RESPONSE, 3, reject=True, commit=1, log_term=1)
    answer(node, MessageType.VOTE_RESPONSE, 2)
    assert node.raft.role is not StateRole.LEADER, "elected by a member that was removed"


def smaller_quorum_commits_at_once() -> None:
    """A leader of two removes the other, and has an entry behind the change that only itself has: from then on it is
    the whole quorum, and no member is left whose answer could move the commit index."""
    node = member([Entry(1, 1)], 1, 1, 2)
    lead(node, 2)
    answer(node, MessageType.APPEND_RESPONSE, 2, index=2)
    settle(node)
    node.propose_conf_change(ConfChange((ConfChangeSingle(REMOVE, 2),)))
    node.propose(b"behind it")
    settle(node)
    answer(node, MessageType.APPEND_RESPONSE, 2, index=3)
    settle(node)
    assert (node.raft.log.committed, node.raft.log.applied) == (4, 4), "the entry behind the change is not committed"


def late_rejection_changes_nothing_during_a_snapshot() -> None:
    """A follower is sent a snapshot, and refuses once more a probe from before: what comes next must stay behind the
    snapshot."""
    node = member([Entry(1, index) for index in range(1, 6)], 5, 1, 2)
    lead(node, 2)
    progress = node.raft.tracker.progress[2]
    progress.become_snapshot(5)
    answer(node, MessageType.APPEND_RESPONSE, 2, index=5, reject=True, reject_hint=1, log_term=1)
    assert progress.state is SNAPSHOT
    assert progress.next == 6, "the next entry is one that the snapshot contains"


CASES: dict[str, Callable[[], None]] = {
    "joint configuration left before it is applied": joint_configuration_is_left_once,
    "snapshot restored under a pending apply": snapshot_waits_for_changes_being_applied,
    "candidate goes on with an unapplied change": candidate_applies_what_it_learns,
    "nothing committed by a change": smaller_quorum_commits_at_once,
    "rejection heeded while a snapshot is on its way": late_rejection_changes_nothing_during_a_snapshot,
}


@pytest.mark.parametrize("name", CASES)
def test_rule_holds(name: str) -> None:
    CASES[name]()


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CASES)
def test_rule_is_missed_when_it_is_gone(name: str) -> None:
    with MUTANTS[name].planted(), pytest.raises(AssertionError):
        CASES[name]()
