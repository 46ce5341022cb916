"""The status of a member, and membership changes as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .tracker import Progress, ProgressState
from .types import ConfChange, ConfChangeTransition, ConfChangeType, ConfState, StateRole

if TYPE_CHECKING:
    from .core import Raft

STEP_LETTERS = {
    ConfChangeType.ADD_NODE: "v",
    ConfChangeType.ADD_LEARNER_NODE: "l",
    ConfChangeType.REMOVE_NODE: "r",
    ConfChangeType.UPDATE_NODE: "u",
}


def describe_conf_change(change: ConfChange) -> str:
    """Return the steps as in ``v2 l3 r1``, then the transition unless it is AUTO, then the context if there is one."""
    words = [f"{STEP_LETTERS[step.type]}{step.node_id}" for step in change.changes]
    if change.transition != ConfChangeTransition.AUTO:
        words.append(change.transition.name.lower())
    if change.context:
        words.append(f"context={describe_data(change.context)}")
    return " ".join(words) or "leave-joint"


def describe_data(data: bytes) -> str:
    """Return bytes in quotation marks."""
    return '"' + data.decode("ascii", "backslashreplace") + '"'


@dataclass(frozen=True, slots=True)
class ProgressStatus:
    """A copy of a leader's ``Progress`` of one member."""

    match: int
    next: int
    state: ProgressState
    paused: bool
    pending_snapshot: int
    recent_active: bool
    is_learner: bool
    inflight_messages: int
    inflight_bytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """The state of one member at one moment. ``progress`` is empty unless the member leads."""

    id: int
    term: int
    vote: int
    commit: int
    applied: int
    last_index: int
    leader: int
    role: StateRole
    transferee: int
    conf: ConfState
    progress: Mapping[int, ProgressStatus]


def status_of(raft: Raft) -> Status:
    """Return the status of a member now."""
    leads = raft.role == StateRole.LEADER
    return Status(
        id=raft.id,
        term=raft.term,
        vote=raft.vote,
        commit=raft.log.committed,
        applied=raft.log.applied,
        last_index=raft.log.last_index,
        leader=raft.leader,
        role=raft.role,
        transferee=raft.transferee,
        conf=raft.tracker.config.conf_state(),
        progress={member: _progress(each) for member, each in raft.tracker.progress.items()} if leads else {},
    )


def _progress(progress: Progress) -> ProgressStatus:
    return ProgressStatus(
        match=progress.match,
        next=progress.next,
        state=progress.state,
        paused=progress.is_paused(),
        pending_snapshot=progress.pending_snapshot,
        recent_active=progress.recent_active,
        is_learner=progress.is_learner,
        inflight_messages=len(progress.inflights),
        inflight_bytes=progress.inflights.bytes,
    )
