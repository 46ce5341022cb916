"""Membership changes on their way into the log: one at a time, those of followers behind this member's own.

Raft takes a change only when the one before it is applied on the leader, and makes an empty entry of any other; etcd's
client then waits until its own deadline. Here the leader keeps such a change back until its turn comes, so two that are
asked for at once are applied one after the other, each decided by the members that the one before it left.

    a member is asked    add -> queue --leader here, nothing pending--> log -> applied -> its waiter
                                \\-- leader elsewhere --> message --> forwarded -> queue of the leader

What was handed to the log, or passed on, is lost if its leader is, or the connection to it. So it is handed on again,
as long as a caller waits for it, once another leader is known or there is another connection:

- not before an entry of that leader is applied here, for what the one before it had in its log may be committed yet;
- not if a database was received since: what it did to the members, no entry tells;
- a leader takes a request once in its term, and only a leader takes one of others. A copy may come late all the
  same, to one that leads again; the members that it asks for are there or gone for good by then, so it is refused. Not
  so new URLs of a member, which would undo later ones: they are handed on once.
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
"""Changes that may wait for their turn; of more, this member's own are refused and those of others dropped."""

TAKEN_MAX: Final = 10_000
"""Requests of other members that a leader knows to have taken in its term."""

Way = tuple[int, int, float | None]
"""The leader to which a change was handed: its term, its id, and since when there is a connection to it."""


class _Handed(NamedTuple):
    """A change of this member's that is in a log, or on its way to one.

    Attributes:
        request_id: of the waiter.
        change: what was handed on.
        way: where to.
        applied: index up to which entries were applied here then.
    """

    request_id: int
    change: ConfChange
    way: Way
    applied: int


class ConfChanges:
    """Keeps changes until the core may take them.

    Arguments:
        raw: the core.
        is_wanted: whether a caller here still waits for a request id.
        check_way: raises ``ProposalDropped`` while what is passed on to the leader would be lost.
        connected_since: when the connection to a member began; None: there is none.
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
        """Raise ``TooManyRequestsError`` if no more may wait."""
        if len(self) >= WAITING_MAX:
            raise errors.TooManyRequestsError

    def add(self, request_id: int, change: ConfChange) -> None:
        """Queue a change that was asked for here.

        Arguments:
            request_id: of the waiter.
            change: with that id in its context.
        """
        self._own.append((request_id, change))

    def forwarded(self, entries: list[Entry]) -> int:
        """Queue what a follower passed on to this leader; how many were dropped."""
        if self._raw.raft.role != StateRole.LEADER:
            return len(entries)
        dropped = 0
        for entry in entries:
            try:
                change = confchange.decode(entry.data)
            except ConfChangeError:
                dropped += 1
                continue
            # Without a context it would change who votes alone, and ask for no right. Only Raft's own end of a joint
            # change is like that, which each leader proposes itself.
            if len(self) >= WAITING_MAX or not change.context:
                dropped += 1
            elif self._takes(_request_id(change)):
                self._forwarded.append((self._clock(), change))
        return dropped

    def _takes(self, request_id: int) -> bool:
        """Note a request of another member; False: this leader has taken it before."""
        term = self._raw.raft.term
        if term != self._taken_in_term or len(self._taken) >= TAKEN_MAX:
            self._taken_in_term = term
            self._taken.clear()
        if request_id in self._taken:
            return False
        if request_id:  # others have none
            self._taken.add(request_id)
        return True

    def propose(self) -> bool:
        """Hand the core what it may take now; whether that was anything."""
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
        """Send this follower's own to the leader."""
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
        """Queue again, in front, what may be lost, and certainly does not come by an earlier leader any more."""
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
    """Return whether what a member passes on has a change of members in it."""
    return any(map(confchange.is_conf_change, message.entries))


def _may_come_late(change: ConfChange) -> bool:
    """Return whether a second copy of one of this member's changes is refused, however late it comes."""
    record = raft_pb2.MembershipChange.FromString(change.context)
    return all(part.kind != raft_pb2.MemberChange.UPDATE for part in record.changes)


def _request_id(change: ConfChange) -> int:
    try:
        return int(raft_pb2.MembershipChange.FromString(change.context).request_id)
    except DecodeError:
        return 0


def hide_beginning(log: MemoryLog, conf_state: ConfState) -> None:
    """Have members without data be sent the database instead of the log from entry 1 on.

    The founders begin with members and a configuration (and, if they were restored from a backup, with keys) that are
    in no entry. A member that is added later has none of that, so the log alone would make another state of it.

    Arguments:
        log: in memory; entry 1 is applied.
        conf_state: the present configuration.
    """
    if log.first_index() == 1:
        if log.snapshot().index == 0:
            log.create_snapshot(1, conf_state)
        log.compact(1)
