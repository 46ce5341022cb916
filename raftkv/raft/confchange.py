"""Membership changes: which ones are legal, as arithmetic on sets of ids; and their encoding in entries.

A ``Configuration`` has the voters, during joint consensus also the outgoing voters, the learners, and the future
learners (``learners_next``): voters of the outgoing half that become learners when the joint configuration is left.

Invariants of a configuration

1. A learner is not a voter of either half.
2. ``learners_next`` is a subset of the outgoing voters, and none of them is a learner yet.
3. Without outgoing voters there is no ``learners_next`` and no ``auto_leave``.
4. There is at least one voter, unless there are no members at all (before bootstrap).

Example, demoting 3 and adding 4 at once (thesis section 4.3, etcd-io/raft ConfChangeV2)::

    voters={1 2 3}
       │ learner 3, voter 4
       ▼
    voters={1 2 4}  outgoing={1 2 3}  learners_next={3}
       │ leave
       ▼
    voters={1 2 4}  learners={3}

One change at a time needs no joint configuration, because old and new majorities then always overlap (section 4.1).
The leader's knowledge of each member is in ``tracker.py``, which follows the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .errors import ConfChangeError
from .types import ConfChange, ConfChangeSingle, ConfChangeTransition, ConfChangeType, ConfState, Entry, EntryType

_EMPTY: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Configuration:
    """The voters and learners of a group. Immutable: each legal change creates a new one."""

    voters: frozenset[int] = _EMPTY
    outgoing: frozenset[int] = _EMPTY
    learners: frozenset[int] = _EMPTY
    learners_next: frozenset[int] = _EMPTY
    auto_leave: bool = False

    @property
    def joint(self) -> bool:
        """Whether decisions need two majorities."""
        return bool(self.outgoing)

    def all_voters(self) -> frozenset[int]:
        """Return the voters of either half."""
        return self.voters | self.outgoing

    def members(self) -> frozenset[int]:
        """Return all members to which entries are sent."""
        return self.voters | self.outgoing | self.learners

    def conf_state(self) -> ConfState:
        """Return the configuration as stored in snapshots and status, ids ascending."""
        return ConfState(
            voters=tuple(sorted(self.voters)),
            learners=tuple(sorted(self.learners)),
            voters_outgoing=tuple(sorted(self.outgoing)),
            learners_next=tuple(sorted(self.learners_next)),
            auto_leave=self.auto_leave,
        )


@dataclass(slots=True)
class _Draft:
    """A configuration while changes are applied to its incoming half."""

    voters: set[int]
    outgoing: frozenset[int]
    learners: set[int] = field(default_factory=set)
    learners_next: set[int] = field(default_factory=set)

    def make_voter(self, id: int) -> None:
        self.learners.discard(id)
        self.learners_next.discard(id)
        self.voters.add(id)

    def make_learner(self, id: int) -> None:
        if id in self.learners:
            return
        self.voters.discard(id)
        # Still a voter of the outgoing half: it may become a learner only after that half is left (invariant 1).
        if id in self.outgoing:
            self.learners_next.add(id)
        else:
            self.learners.add(id)

    def remove(self, id: int) -> None:
        self.voters.discard(id)
        self.learners.discard(id)
        self.learners_next.discard(id)

    def freeze(self, auto_leave: bool) -> Configuration:
        return Configuration(
            voters=frozenset(self.voters),
            outgoing=self.outgoing,
            learners=frozenset(self.learners),
            learners_next=frozenset(self.learners_next),
            auto_leave=auto_leave,
        )


def check(config: Configuration) -> None:
    """Refuse a configuration that breaks one of the invariants above.

    Raises:
        ConfChangeError: an invariant is broken.
    """
    both = config.learners & config.all_voters()
    if both:
        raise ConfChangeError(f"{min(both)} is both learner and voter")
    stray = config.learners_next - config.outgoing
    if stray:
        raise ConfChangeError(f"{min(stray)} is in learners_next, but is no outgoing voter")
    if not config.outgoing and (config.learners_next or config.auto_leave):
        raise ConfChangeError("learners_next and auto_leave belong to a joint configuration")
    if not config.voters and config.members():
        raise ConfChangeError("removed all voters")
    if 0 in config.members():
        raise ConfChangeError("0 is no member id")


def _apply_steps(draft: _Draft, changes: Iterable[ConfChangeSingle]) -> None:
    for change in changes:
        # Id 0 marks a step that the caller decided, deterministically, to skip (as etcd does).
        if change.node_id == 0:
            continue
        if change.type == ConfChangeType.ADD_NODE:
            draft.make_voter(change.node_id)
        elif change.type == ConfChangeType.ADD_LEARNER_NODE:
            draft.make_learner(change.node_id)
        elif change.type == ConfChangeType.REMOVE_NODE:
            draft.remove(change.node_id)
        elif change.type != ConfChangeType.UPDATE_NODE:
            raise ConfChangeError(f"unexpected conf change type {change.type}")
    if not draft.voters:
        raise ConfChangeError("removed all voters")


def simple(config: Configuration, changes: Iterable[ConfChangeSingle]) -> Configuration:
    """Return the configuration after a change that needs no joint consensus (thesis section 4.1).

    Arguments:
        config: the current one, not joint.
        changes: steps that add or remove at most one voter.

    Raises:
        ConfChangeError: the change is illegal here.
    """
    if config.joint:
        raise ConfChangeError("can't apply simple config change in joint config")
    draft = _Draft(set(config.voters), _EMPTY, set(config.learners), set())
    _apply_steps(draft, changes)
    if len(config.voters ^ draft.voters) > 1:
        raise ConfChangeError("more than one voter changed without entering joint config")
    return _checked(draft.freeze(auto_leave=False))


def enter_joint(config: Configuration, auto_leave: bool, changes: Iterable[ConfChangeSingle]) -> Configuration:
    """Return the joint configuration of the current voters (outgoing) and the changed ones (incoming) (thesis section
    4.3).

    Arguments:
        config: the current one, not joint.
        auto_leave: whether the leader proposes to leave it as soon as it is applied.
        changes: steps, applied in order to the incoming half.

    Raises:
        ConfChangeError: the change is illegal in this configuration.
    """
    if config.joint:
        raise ConfChangeError("config is already joint")
    if not config.voters:
        raise ConfChangeError("can't make a zero-voter config joint")
    draft = _Draft(set(config.voters), config.voters, set(config.learners), set())
    _apply_steps(draft, changes)
    return _checked(draft.freeze(auto_leave))


def leave_joint(config: Configuration) -> Configuration:
    """Return the configuration without its outgoing half; staged learners become learners.

    Raises:
        ConfChangeError: the current configuration is not joint.
    """
    if not config.joint:
        raise ConfChangeError("can't leave a non-joint config")
    return _checked(Configuration(voters=config.voters, learners=config.learners | config.learners_next))


def _checked(config: Configuration) -> Configuration:
    check(config)
    return config


def leaves_joint(change: ConfChange) -> bool:
    """Return whether a change is the empty one that leaves a joint configuration."""
    return not change.changes and change.transition == ConfChangeTransition.AUTO


def apply(config: Configuration, change: ConfChange) -> Configuration:
    """Return the configuration after a change.

    Several steps, or an explicit transition, use joint consensus; only with JOINT_EXPLICIT must the caller leave it.

    Arguments:
        config: the current one.
        change: the committed change.

    Raises:
        ConfChangeError: the change is illegal in this configuration.
    """
    if leaves_joint(change):
        return leave_joint(config)
    if len(change.changes) > 1 or change.transition != ConfChangeTransition.AUTO:
        auto_leave = change.transition != ConfChangeTransition.JOINT_EXPLICIT
        return enter_joint(config, auto_leave, change.changes)
    return simple(config, change.changes)


def restore(state: ConfState) -> Configuration:
    """Return the configuration stored in a snapshot or on disk.

    Raises:
        ConfChangeError: the stored state is not a valid configuration.
    """
    for ids in (state.voters, state.learners, state.voters_outgoing, state.learners_next):
        if len(set(ids)) != len(ids):
            raise ConfChangeError(f"duplicate ids in {state}")
    return _checked(
        Configuration(
            voters=frozenset(state.voters),
            outgoing=frozenset(state.voters_outgoing),
            learners=frozenset(state.learners),
            learners_next=frozenset(state.learners_next),
            auto_leave=state.auto_leave,
        )
    )


# The encoding of a change in an entry: empty for the plain "leave joint" (so that its size is 0 and no size limit can
# refuse it); else version 1, transition, count (2 bytes, big-endian), per step type and id (1 + 8 bytes), the context.
_VERSION = 1
_HEADER_BYTES = 4
_STEP_BYTES = 9


def encode(change: ConfChange) -> bytes:
    """Return the data of a membership entry."""
    if not change.changes and not change.context and change.transition == ConfChangeTransition.AUTO:
        return b""
    steps = b"".join(bytes((step.type,)) + step.node_id.to_bytes(8, "big") for step in change.changes)
    header = bytes((_VERSION, change.transition)) + len(change.changes).to_bytes(2, "big")
    return header + steps + change.context


def decode(data: bytes) -> ConfChange:
    """Return the change in a membership entry.

    Raises:
        ConfChangeError: the bytes are not a valid encoding.
    """
    if not data:
        return ConfChange()
    if len(data) < _HEADER_BYTES or data[0] != _VERSION:
        raise ConfChangeError("conf change entry of unknown form")
    end = _HEADER_BYTES + int.from_bytes(data[2:4], "big") * _STEP_BYTES
    if len(data) < end:
        raise ConfChangeError("conf change entry is cut short")
    try:
        changes = tuple(
            ConfChangeSingle(ConfChangeType(data[at]), int.from_bytes(data[at + 1 : at + _STEP_BYTES], "big"))
            for at in range(_HEADER_BYTES, end, _STEP_BYTES)
        )
        return ConfChange(changes, ConfChangeTransition(data[1]), data[end:])
    except ValueError as error:
        raise ConfChangeError(f"conf change entry with unknown values: {error}") from error


def entry_type(change: ConfChange) -> EntryType:
    """Return the type of the entry for a change: one step with AUTO is etcd's V1 entry, everything else its V2."""
    one = len(change.changes) == 1 and change.transition == ConfChangeTransition.AUTO
    return EntryType.CONF_CHANGE if one else EntryType.CONF_CHANGE_V2


def is_conf_change(entry: Entry) -> bool:
    """Return whether an entry carries a membership change."""
    return entry.type != EntryType.NORMAL
