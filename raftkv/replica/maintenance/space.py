"""Reacts to a full disk: cancels copies that can be made again, and raises the NOSPACE alarm.

At most one proposal of the alarm is in progress. ``node.admission`` (quota, free disk space) and
``node.housekeeping`` (failed commits of the database) decide when there is no space.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from raftkv.apply.alarms import Alarms
from raftkv.apply.wire import MEMBER, Kind
from raftkv.errors import StatusError
from raftkv.loop.fair import MEMBER as OWN
from raftkv.pb import rpc_pb2
from raftkv.pb.enums import alarm_name
from raftkv.replica.node.waits import AwaitableNode
from raftkv.replica.snapshots import SnapshotReceiver, SnapshotSender

_log = logging.getLogger(__name__)


_MEANINGS: Final[dict[int, str]] = {
    rpc_pb2.NOSPACE: "all members refuse writes that need space; free space",
    rpc_pb2.CORRUPT: "all members refuse all writes; find the member that differs "
    "(raftkvctl endpoint hashkv --cluster) and replace it",
}


def tell_alarm(member_id: int, kind: int, is_raised: bool) -> None:
    """Log an alarm of any member in the log of this one: its clients are refused, so its operator looks here.

    Arguments:
        member_id, kind, is_raised: as in ``apply.alarms.OnChange``.
    """
    name = alarm_name(kind)
    if not is_raised:
        _log.info("the %s alarm of member %x is disarmed", name, member_id)
        return
    meaning = _MEANINGS.get(kind, "its kind is unknown to this version of raftkv")
    _log.warning("the %s alarm of member %x is raised: %s, then run raftkvctl alarm disarm", name, member_id, meaning)


async def raise_alarm(node: AwaitableNode, member_id: int, kind: rpc_pb2.AlarmType) -> None:
    """Propose an alarm in the name of this member.

    Arguments:
        node: node of this member.
        member_id: member that the alarm is about.
        kind: kind of the alarm.

    Raises:
        StatusError: the alarm may not have been raised.
    """
    request = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=member_id, alarm=kind)
    await node.propose(Kind.ALARM, request.SerializeToString(), request, MEMBER, identity=OWN)


class Space:
    """Frees space, and raises the alarm when there is none.

    Arguments:
        node, alarms: parts of the member.
        sent, received: database transfers.
    """

    def __init__(self, node: AwaitableNode, alarms: Alarms, sent: SnapshotSender, received: SnapshotReceiver) -> None:
        self._node = node
        self._alarms = alarms
        self._sent = sent
        self._received = received
        self._raising: asyncio.Task[None] | None = None
        self._is_told = False

    def make_room(self) -> bool:
        """Cancel all copies of databases: they are made again later, and writes must continue.

        Returns:
            Whether there were any.
        """
        given_up = self._sent.give_up("the disk is full")
        return self._received.give_up() or given_up

    def raise_no_space(self, reason: str) -> None:
        """Raise the NOSPACE alarm, unless this member has raised it already or is doing so.

        Arguments:
            reason: for the log, which has one line per alarm, however often it is retried.
        """
        if self._alarms.is_raised(self._node.settings.member_id, rpc_pb2.NOSPACE):
            return
        if self._raising is not None and not self._raising.done():
            return
        if not self._is_told:
            self._is_told = True
            _log.warning("%s; raising the NOSPACE alarm: free space, then run raftkvctl alarm disarm", reason)
        self._raising = asyncio.get_running_loop().create_task(self._propose())

    async def _propose(self) -> None:
        with contextlib.suppress(StatusError):  # the next write without space raises it again
            await raise_alarm(self._node, self._node.settings.member_id, rpc_pb2.NOSPACE)
            self._is_told = False
