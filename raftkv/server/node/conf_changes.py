"""Membership changes on their way into the log: one at a time, those of followers behind this member's own.

Raft takes a change only when the one before it is applied on the leader, and makes an empty entry of any other; etcd's
client then waits until its own deadline. Here the leader keeps such a change back until its turn comes, so two that are
asked for at once are applied one after the other, each decided by the members that the one before it left.

    a member is asked    add -> queue --leader here, nothing pending--> log -> applied -> its waiter
                                \\-- leader elsewhere --> message --> forwarded -> queue of the leader

A follower passes a change on once; if that is lost, or the leader is, who asked gets "request timed out", as for a
write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from raftkv import errors
from raftkv.raft import confchange
from raftkv.raft.errors import ConfChangeError, ProposalDropped
from raftkv.raft.memory_log import MemoryLog
from raftkv.raft.raw_node import RawNode
from raftkv.raft.types import ConfChange, ConfState, Entry, StateRole

WAITING_MAX: Final = 100
"""Changes that may wait for their turn; of more, this member's own are refused and those of others dropped."""


class ConfChanges:
    """Keeps changes until the core may take them.

    Arguments:
        raw: the core.
        is_wanted: whether somebody here still waits for a request id.
    """

    def __init__(self, raw: RawNode, is_wanted: Callable[[int], bool]) -> None:
        self._raw = raw
        self._is_wanted = is_wanted
        self._own: deque[tuple[int, ConfChange]] = deque()
        self._forwarded: deque[ConfChange] = deque()

    def __len__(self) -> int:
        return len(self._own) + len(self._forwarded)

    def check_room(self) -> None:
        """Raise ``TooManyRequestsError`` if no more may wait."""
        if len(self) >= WAITING_MAX:
            raise errors.TooManyRequestsError

    def add(self, request_id: int, change: ConfChange) -> None:
        """Queue a change that was asked for here.

        Arguments:
            request_id: of who waits for it.
            change: with that id in its context.
        """
        self._own.append((request_id, change))

    def forwarded(self, entries: list[Entry]) -> int:
        """Queue what a follower passed on to this leader; how many were dropped."""
        dropped = 0
        for entry in entries:
            try:
                change = confchange.decode(entry.data)
            except ConfChangeError:
                dropped += 1
                continue
            if len(self) >= WAITING_MAX:
                dropped += 1
            else:
                self._forwarded.append(change)
        return dropped

    def propose(self) -> bool:
        """Hand the core what it may take now; whether that was anything."""
        raft = self._raw.raft
        if raft.role != StateRole.LEADER:
            self._forwarded.clear()
            return self._pass_on()
        if raft.pending_conf_index > raft.log.applied or raft.tracker.config.joint:
            return False
        self._forget_unwanted()
        queue = self._own or self._forwarded
        if not queue:
            return False
        change = self._own[0][1] if self._own else self._forwarded[0]
        try:
            self._raw.propose_conf_change(change)
        except ProposalDropped:
            return False
        queue.popleft()
        return True

    def _pass_on(self) -> bool:
        """Send this follower's own to the leader."""
        self._forget_unwanted()
        passed_on = False
        while self._own:
            try:
                self._raw.propose_conf_change(self._own[0][1])
            except ProposalDropped:
                break
            self._own.popleft()
            passed_on = True
        return passed_on

    def _forget_unwanted(self) -> None:
        while self._own and not self._is_wanted(self._own[0][0]):
            self._own.popleft()


def hide_beginning(log: MemoryLog, conf_state: ConfState) -> None:
    """Have whoever has nothing be sent the database instead of the log from entry 1 on.

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
