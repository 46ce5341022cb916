"""What a member does when it finds no room: give up what can come again, and raise the NOSPACE alarm.

Owns the one proposal of the alarm that may be under way. When there is no room is decided by ``node.admission``
(quota, free disk) and ``node.housekeeping`` (commits of the database that fail).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from raftkv.apply.alarms import Alarms
from raftkv.apply.auth.caller import MEMBER
from raftkv.apply.request import Kind
from raftkv.errors import StatusError
from raftkv.pb import rpc_pb2
from raftkv.server.node.surroundings import MemberLoop

_log = logging.getLogger(__name__)


class CopiesSent(Protocol):
    """Databases on their way to other members."""

    def give_up(self, reason: str) -> bool:
        """End them; whether there were any.

        Arguments:
            reason: for the log.
        """


class CopiesReceived(Protocol):
    """Databases on their way to this member."""

    def give_up(self) -> bool:
        """End them; whether there were any."""


class Space:
    """Makes room, and tells the cluster when there is none.

    Arguments:
        node, alarms: of the member.
        sent, received: databases on their way.
    """

    def __init__(self, node: MemberLoop, alarms: Alarms, sent: CopiesSent, received: CopiesReceived) -> None:
        self._node = node
        self._alarms = alarms
        self._sent = sent
        self._received = received
        self._raising: asyncio.Task[None] | None = None
        self._is_told = False

    def make_room(self) -> bool:
        """Give up copies of databases, whoever they are for: they come again, and writes must go on.

        Returns:
            Whether there was anything to give up.
        """
        given_up = self._sent.give_up("the disk is full")
        return self._received.give_up() or given_up

    def raise_no_space(self, reason: str) -> None:
        """Raise the NOSPACE alarm, unless this member has raised it already or that is under way.

        Arguments:
            reason: for the log, which has one line for an alarm, however often it is tried.
        """
        if self._alarms.is_raised(self._node.settings.member_id, rpc_pb2.NOSPACE):
            return
        if self._raising is not None and not self._raising.done():
            return
        if not self._is_told:
            self._is_told = True
            _log.warning("%s; raising the NOSPACE alarm: make room, then raftkvctl alarm disarm", reason)
        self._raising = asyncio.get_running_loop().create_task(self._propose())

    async def _propose(self) -> None:
        request = rpc_pb2.AlarmRequest(
            action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=self._node.settings.member_id, alarm=rpc_pb2.NOSPACE
        )
        with contextlib.suppress(StatusError):  # what finds no space next raises it again
            await self._node.propose(Kind.ALARM, request.SerializeToString(), request, MEMBER)
            self._is_told = False
