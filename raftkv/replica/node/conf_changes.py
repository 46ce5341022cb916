"""Proposes membership changes one at a time; a leader's own changes come before those of followers.

Raft accepts a change only after the previous one is applied on the leader, and turns any other into an empty entry;
etcd's client then waits until its own deadline. Here the leader keeps such a change until its turn comes. So two
concurrent changes are applied one after the other, and each is checked against the members that the previous one left.

    request on a member  add -> queue --leader here, nothing pending--> log -> applied -> its waiter
                                \\-- leader elsewhere --> message --> forwarded -> queue of the leader

A proposed or forwarded change is lost together with its leader, or with the connection to it. So it is sent again, as
long as a caller waits for it, when there is another leader or a new connection:

- not before an entry of that leader is applied here, because entries in the previous leader's log may still be
  committed;
- not if a database was received since, because then no entry shows its effect on the members;
- a leader accepts a request only once in its term, and only a leader accepts forwarded ones. A copy may still arrive
  late, at a member that leads again; by then the members that it names exist or are gone for good, so it is refused.
  The exception are new URLs of a member, which would undo later ones: they are sent only once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.pb import raft_pb2
from raftkv.raft import confchange
from raftkv.raft.core import RawNode
from raftkv.raft.errors import ConfChangeError, ProposalDropped
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import NONE, ConfChange, ConfState, Entry, Message, StateRole

WAITING_MAX: Final = 100
"""Maximum number of waiting changes; beyond it, this member's own are refused and forwarded ones are dropped."""

TAKEN_MAX: Final = 10_000
"""Number of forwarded requests that a leader remembers to have accepted in its term."""

Way = tuple[int, int, float | None]
"""The leader to which a change was sent: its term, its id, and the start time of the connection to it."""


class _Handed(NamedTuple):
    """A change of this member that is in a log, or being sent to one.

    Attributes:
        request_id: id of the waiter.
        change: the change.
        way: the leader to which it was sent.
        applied: index up to which entries were applied here at that time.
    """

    request_id: int
    change: ConfChange
    way: Way
    applied: int


class ConfChanges:
    """Queues changes until the core accepts them.

    Arguments:
        raw: the core.
        is_wanted: returns whether a caller here still waits for a request id.
        check_way: raises ``ProposalDropped`` while a message to the leader would be lost.
        connected_since: returns the start time of the connection to a member; ``None``: not connected.
        clock: seconds, monotonic.
        patience_s: how long members wait for the outcome: what others passed on is dropped then, as ``Forwarded``.
    """

    def __init__(
        self,
        raw: RawNode,
        is_wanted: Callable[[int], bool],
        check_way: Callable[[], None],
        connected_since: Callable[[int], float | None],
        clock: Callable[[], float],
        patience_s: float,
    ) -> None:
        self._raw = raw
        self._is_wanted = is_wanted
        self._check_way = check_way
        self._connected_since = connected_since
        self._clock = clock
        self._patience_s = patience_s
        self._own: deque[tuple[int, ConfChange]] = deque()
        self._handed: list[_Handed] = []
        self._forwarded: deque[tuple[float, ConfChange]] = deque()
        """Those of others, and when they came."""
        self._taken: set[int] = set()
        self._taken_in_term = 0

    def __len__(self) -> int:
        return len(self._own) + len(self._handed) + len(self._forwarded)

    def check_room(self) -> None:
        """Raise ``TooManyRequestsError`` if the queue is full."""
        if len(self) >= WAITING_MAX:
            raise errors.TooManyRequestsError

    def add(self, request_id: int, change: ConfChange) -> None:
        """Queue a change that was requested on this member.

        Arguments:
            request_id: id of the waiter.
            change: the change, with that id in its context.
        """
        self._own.append((request_id, change))

    def forwarded(self, entries: list[Entry]) -> int:
        """Queue changes that a follower forwarded to this leader; return the number of dropped ones."""
        if self._raw.raft.role != StateRole.LEADER:
            return len(entries)
        dropped = 0
        for entry in entries:
            try:
                change = confchange.decode(entry.data)
            except ConfChangeError:
                dropped += 1
                continue
            # Without a context it would only change the voters, without a check of rights. Only Raft's own entry that
            # leaves a joint configuration is like that, and each leader proposes that itself.
            if len(self) >= WAITING_MAX or not change.context:
                dropped += 1
            elif self._takes(_request_id(change)):
                self._forwarded.append((self._clock(), change))
        return dropped

    def _takes(self, request_id: int) -> bool:
        """Remember a request of another member; return False if this leader has accepted it before."""
        term = self._raw.raft.term
        if term != self._taken_in_term or len(self._taken) >= TAKEN_MAX:
            self._taken_in_term = term
            self._taken.clear()
        if request_id in self._taken:
            return False
        if request_id:  # other requests have no id
            self._taken.add(request_id)
        return True

    def propose(self) -> bool:
        """Propose the changes that the core may accept now; return whether there were any."""
        raft = self._raw.raft
        self._hand_on_again()
        self._forget_unwanted()
        if raft.role != StateRole.LEADER:
            self._forwarded.clear()
            return self._pass_on()
        if raft.pending_conf_index > raft.log.applied or raft.tracker.config.joint:
            return False
        if not self._own and not self._forwarded:
            return False
        try:
            if self._own:
                self._hand_on()
            else:
                self._raw.propose_conf_change(self._forwarded[0][1])
                self._forwarded.popleft()
        except ProposalDropped:
            return False
        return True

    def _pass_on(self) -> bool:
        """Send this follower's own changes to the leader."""
        passed_on = False
        while self._own:
            try:
                self._check_way()
                self._hand_on()
            except ProposalDropped:
                break
            passed_on = True
        return passed_on

    def _hand_on(self) -> None:
        request_id, change = self._own[0]
        self._raw.propose_conf_change(change)
        self._own.popleft()
        if _may_come_late(change):
            self._handed.append(_Handed(request_id, change, self._way(), self._raw.raft.log.applied))

    def _way(self) -> Way:
        raft = self._raw.raft
        return raft.term, raft.leader, self._connected_since(raft.leader)

    def _hand_on_again(self) -> None:
        """Queue again, in front, changes that may be lost and can no longer be committed by an earlier leader."""
        if not self._handed:
            return
        raft, way = self._raw.raft, self._way()
        self._handed = [each for each in self._handed if self._is_wanted(each.request_id)]
        if raft.leader == NONE or raft.log.term_or_zero(raft.log.applied) != raft.term:
            return
        first = raft.log.first_index()
        lost = [each for each in self._handed if way != each.way and first <= each.applied + 1]
        if lost:
            self._handed = [each for each in self._handed if each not in lost]
            self._own.extendleft((each.request_id, each.change) for each in reversed(lost))

    def _forget_unwanted(self) -> None:
        while self._own and not self._is_wanted(self._own[0][0]):
            self._own.popleft()
        while self._forwarded and self._forwarded[0][0] <= self._clock() - self._patience_s:
            self._forwarded.popleft()


def has_change(message: Message) -> bool:
    """Return whether a forwarded message contains a membership change."""
    return any(map(confchange.is_conf_change, message.entries))


def _may_come_late(change: ConfChange) -> bool:
    """Return whether a second copy of one of this member's changes is refused, however late it arrives."""
    record = raft_pb2.MembershipChange.FromString(change.context)
    return all(part.kind != raft_pb2.MemberChange.UPDATE for part in record.changes)


def _request_id(change: ConfChange) -> int:
    try:
        return int(raft_pb2.MembershipChange.FromString(change.context).request_id)
    except DecodeError:
        return 0


def hide_beginning(log: MemoryLog, conf_state: ConfState) -> None:
    """Make members without data receive the database instead of the log from entry 1 on.

    The founders begin with members and a configuration (and, after a restore from a backup, with keys) that are in no
    entry. A member that is added later lacks these, so the log alone would give it a different state.

    Arguments:
        log: log in memory; entry 1 is applied.
        conf_state: the current configuration.
    """
    if log.first_index() == 1:
        if log.snapshot().index == 0:
            log.create_snapshot(1, conf_state)
        log.compact(1)
