"""Writes leaders found and lost to the log, and how long there has been none.

Owns the words and how often they come: a line for each change of the leader, and while there is none a reminder with
what is missing, first after ``REMINDER_FIRST_S``, then at twice the interval each time. Nothing here runs while
requests are served.

    LeaderLog(node, loop, name_of, is_connected).start()

Leaves out: connections to other members, which ``transport`` logs, and snapshots (``snapshots``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from raftkv.raft.types import NONE
from raftkv.replica.node.node import Node

_log = logging.getLogger(__name__)

REMINDER_FIRST_S: Final = 5.0
REMINDER_MAX_S: Final = 300.0


class LeaderLog:
    """Follows one node.

    Arguments:
        node: whose leader it follows.
        loop: that the node runs on.
        name_of: how people know a member.
        is_connected: whether the stream to another member stands.
    """

    def __init__(
        self,
        node: Node,
        loop: asyncio.AbstractEventLoop,
        name_of: Callable[[int], str],
        is_connected: Callable[[int], bool],
    ) -> None:
        self._node = node
        self._loop = loop
        self._name_of = name_of
        self._is_connected = is_connected
        self._leader = NONE
        self._lost_at = loop.time()
        self._reminder: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to remind."""
        if self._leader == NONE:
            self._lost_at = self._loop.time()
            self.stop()
            self._remind_in(REMINDER_FIRST_S)

    def stop(self) -> None:
        """Remind no more."""
        if self._reminder is not None:
            self._reminder.cancel()

    def leader_changed(self) -> None:
        """Write a line about the leader that was found or lost."""
        node, before = self._node, self._leader
        self._leader, term = node.leader, node.raw.raft.term
        self.stop()
        if node.leader == NONE:
            self._lost_at = self._loop.time()
            self._remind_in(REMINDER_FIRST_S)
            _log.info("no leader in term %d: %s is lost or has stepped down", term, self._name_of(before))
            return
        took_s = self._loop.time() - self._lost_at
        after = f"after {took_s:.2f} s without a leader" if before == NONE else f"in place of {self._name_of(before)}"
        if node.leader == node.settings.member_id:
            _log.info("this member leads in term %d, %s", term, after)
        else:
            _log.info("%s leads in term %d, %s", self._name_of(node.leader), term, after)

    def _remind_in(self, delay_s: float) -> None:
        self._reminder = self._loop.call_later(delay_s, self._remind, delay_s)

    def _remind(self, delay_s: float) -> None:
        node = self._node
        voters = node.conf_state.voters
        away = [self._name_of(voter) for voter in voters if not self._is_there(voter)]
        missing = f"; not connected: {', '.join(away)}" if away else ""
        _log.warning(
            "no leader for %.0f s: writes and linearizable reads wait; %d of %d members are connected, %d are needed%s",
            self._loop.time() - self._lost_at,
            len(voters) - len(away),
            len(voters),
            len(voters) // 2 + 1,
            missing,
        )
        self._remind_in(min(2 * delay_s, REMINDER_MAX_S))

    def _is_there(self, member_id: int) -> bool:
        return member_id == self._node.settings.member_id or self._is_connected(member_id)
