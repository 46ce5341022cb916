"""Queries that only the leader can answer: answered here if this member leads, otherwise sent over the peer port.

    response = await on_leader.ask(Question(RENEW, encode, parse, deadline))
    if response is None:
        ...                    # this member leads, and a quorum has confirmed that since the call: do it here

A failed call is retried until the question's deadline. A question goes over the peer port at most once: the receiving
member does not forward it again.

    this member leads           -> confirmed by a quorum                          -> None
    another member leads        -> call over the peer port, again after RETRY_S   -> its response
    there is no leader          -> wait for the next change of the leader
    the leader changes          -> calls to the old one are cancelled and repeated to the new one

Not here: the content of questions (``lessor``), and how the peer port answers them (``LeaseService.for_members``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.loop.limiter import Limiter
from raftkv.pb.services import SERVICES, Method
from raftkv.raft.types import NONE
from raftkv.replica.node.node import Node
from raftkv.rpc.client.calls import UnaryFuture
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError
from raftkv.suspend_clock import SuspendClock

_PEER: Final = SERVICES["raftkvpb.Peer"]
RENEW: Final = _PEER["LeaseRenew"]
TIME_TO_LIVE: Final = _PEER["LeaseTimeToLive"]
SHORTEN: Final = _PEER["LeaseShorten"]

RETRY_S: Final = 0.05
"""Pause in seconds before the leader is asked again after a failure."""

CALL_MIN_S: Final = 0.1

WOKEN_AT_ONCE: Final = 100
"""Questions that are asked again in one turn of the loop after a change of the leader: about 10 ms."""

CONFIRMED_MAX_S: Final = 0.05
CONFIRMED_ELECTIONS: Final = 0.25
"""Fraction of the election timeout for which a confirmed leader may answer keep-alives without asking again (with an
absolute maximum). The quorum that confirmed it elects no other member for nearly a whole timeout. (etcd asks only when
its own loop was suspended; server/etcdserver/v3_server.go, ensureLeadership.)"""


@dataclass(frozen=True, slots=True)
class Question:
    """A request for the leader.

    Attributes:
        method: method of the peer service.
        encode: returns the request for another member; called when it is sent.
        parse: decodes the response; raises DecodeError or ValueError if it is malformed.
        deadline: loop time after which the response is useless.
        is_local: whether it came from a client here; a request forwarded by another member is not forwarded again.
    """

    method: Method
    encode: Callable[[], bytes]
    parse: Callable[[bytes], Any]
    deadline: float
    is_local: bool = True


class OnLeader:
    """Asks the leader, which may be this member.

    Arguments:
        node: knows the leader, confirms leadership.
        is_primary: returns whether this member decides about leases.
        channel: returns the connection to a member, ``None`` if it is unknown.
    """

    def __init__(self, node: Node, is_primary: Callable[[], bool], channel: Callable[[int], Channel | None]) -> None:
        self._node = node
        self._is_primary = is_primary
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._recent_s = min(CONFIRMED_MAX_S, CONFIRMED_ELECTIONS * node.settings.election_s)
        self._recent_until = 0.0
        self._sleep = SuspendClock()
        self._changes = 0
        # Ordered by start, not by address, so that a change of the leader wakes them in the same order in each replay.
        self._calls: dict[UnaryFuture, None] = {}
        self._pauses: dict[asyncio.Future[None], None] = {}
        self._waking = Limiter(WOKEN_AT_ONCE)
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_closed = False

    def is_recent(self, now: float) -> bool:
        """Return whether this member leads, and was confirmed recently enough to answer without asking again.

        All committed entries must be applied; otherwise a newly granted lease would be unknown here. A leader that
        hands over has itself allowed another to be elected at once. A suspended machine learns of no election, however
        long it is suspended, and the loop's clock does not count that time.

        Arguments:
            now: loop time.
        """
        node = self._node
        if now >= self._recent_until:
            return False
        if self._sleep.has_slept():
            self._recent_until = 0.0
            return False
        return node.applied == node.committed and self._is_primary() and not node.is_transferring

    async def ask(self, question: Question) -> Any:
        """Get an answer from the leader.

        Returns:
            The response of another member that leads. ``None`` if this member leads, confirmed since the call (or, if
            only keep-alives depend on it, shortly before): the caller must act at once, before it awaits anything.

        Raises:
            NotLeaderError: another member forwarded it, and this one does not lead.
            NoLeaderError: the deadline has passed, and there is no leader.
            RequestTimeoutError: the deadline has passed.
            StoppedError: the member stops.
        """
        node, loop = self._node, self._loop
        while not self._is_closed and not node.stopped:
            left_s = question.deadline - loop.time()
            if left_s <= 0:
                raise errors.NoLeaderError if node.leader == NONE else errors.RequestTimeoutError
            if self._is_primary():
                if await self._is_confirmed(question):
                    return None
            elif node.leader in (NONE, node.settings.member_id):
                await self._pause(left_s)
            elif not question.is_local:
                raise errors.NotLeaderError
            else:
                changes = self._changes
                response = await self._call(question, node.leader, left_s)
                if response is not None:
                    return response
                if changes == self._changes:
                    await self._pause(RETRY_S)
        raise errors.StoppedError

    async def _is_confirmed(self, question: Question) -> bool:
        """Return whether a quorum has confirmed since the call that this member still leads."""
        asked_at = self._loop.time()
        # A TTL that is read must be the leader's; renewing or shortening a lease shortly afterwards is harmless.
        if question.method is not TIME_TO_LIVE and self.is_recent(asked_at):
            return True
        self._sleep.has_slept()  # count suspensions from here on
        try:
            await self._node.confirm_read()
        except errors.StoppedError:
            raise
        except errors.StatusError:
            if self._node.leader == NONE:
                raise errors.NoLeaderError from None
            raise
        if self._is_primary():
            self._recent_until = asked_at + self._recent_s
            return True
        return False

    async def _call(self, question: Question, leader: int, timeout_s: float) -> Any:
        """Ask another member; return ``None`` if that failed, or the leader changed meanwhile."""
        channel = self._channel(leader)
        if channel is None:
            return None
        timeout_s = round(max(CALL_MIN_S, timeout_s), 1)
        call = channel.unary(question.method.path, question.encode(), timeout_s, wait_for_ready=False)
        self._calls[call] = None
        try:
            return question.parse(await call)
        except (RpcError, DecodeError, ValueError):
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return None  # cancelled by ``leader_changed``
        finally:
            self._calls.pop(call, None)

    async def _pause(self, seconds: float) -> None:
        """Wait, but only until the leader changes."""
        over: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_later(seconds, _end, over)
        self._pauses[over] = None
        try:
            await over
        finally:
            timer.cancel()
            self._pauses.pop(over, None)

    def leader_changed(self) -> None:
        """Stop waiting for the old leader, and retry questions that waited for a new one."""
        self._recent_until = 0.0
        self._changes += 1
        self._waking.begin([*[call.cancel for call in self._calls], *[partial(_end, over) for over in self._pauses]])

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a background task. An error that escapes from it stops the member."""
        task = self._loop.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._node.fatal(error)

    def close(self) -> None:
        """Fail all waiting questions, because the member stops."""
        self._is_closed = True
        self.leader_changed()


def _end(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
