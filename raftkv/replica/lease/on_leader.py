"""Have the leader do what only the leader can: here if this member leads, else over the peer port.

    response = await on_leader.ask(Question(RENEW, encode, parse, deadline))
    if response is None:
        ...                    # this member leads, and a quorum has confirmed that since the call: do it here

A failed call is tried again until the question's deadline. A question goes over the peer port at most once: the member
that gets it does not pass it on again.

    this member leads           -> confirmed by a quorum                          -> None
    another member leads        -> call over the peer port, again after RETRY_S   -> its response
    there is no leader          -> wait for the next change of the leader
    the leader changes          -> what went to the old one is given up, and goes to the next

Leaves out: what is asked (``lessor``), and how the peer port answers it (``LeaseService.for_members``).
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
"""Rest before the leader is asked again after a failure."""

CALL_MIN_S: Final = 0.1

WOKEN_AT_ONCE: Final = 100
"""Questions that are asked again in a turn of the loop after a change of the leader: about 10 ms."""

CONFIRMED_MAX_S: Final = 0.05
CONFIRMED_ELECTIONS: Final = 0.25
"""How long a confirmed leader need not ask again before it answers keep-alives: at most so long, and so much of the
election timeout. The quorum that confirmed it elects no other member for nearly a whole one. (etcd asks only when its
own loop has stood still; server/etcdserver/v3_server.go, ensureLeadership.)"""


@dataclass(frozen=True, slots=True)
class Question:
    """Something to be done by the leader.

    Attributes:
        method: of the peer service that does it.
        encode: makes the request for another member, at the moment when it leaves.
        parse: makes the response of its bytes; raises DecodeError or ValueError if they are none.
        deadline: loop time after which it is no longer wanted.
        is_local: whether it came from a client here; what another member passed on is not passed on again.
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
        is_primary: whether this member decides about leases.
        channel: to a member, None if it is unknown.
        introduction: metadata that a member wants to see.
    """

    def __init__(
        self,
        node: Node,
        is_primary: Callable[[], bool],
        channel: Callable[[int], Channel | None],
        introduction: Callable[[int], tuple[tuple[str, str], ...]],
    ) -> None:
        self._node = node
        self._is_primary = is_primary
        self._channel = channel
        self._introduction = introduction
        self._loop = asyncio.get_running_loop()
        self._recent_s = min(CONFIRMED_MAX_S, CONFIRMED_ELECTIONS * node.settings.election_s)
        self._recent_until = 0.0
        self._sleep = SuspendClock()
        self._changes = 0
        # In order of their begin, not of their addresses: what a change of the leader wakes is the same in each replay.
        self._calls: dict[UnaryFuture, None] = {}
        self._pauses: dict[asyncio.Future[None], None] = {}
        self._waking = Limiter(WOKEN_AT_ONCE)
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_closed = False

    def is_recent(self, now: float) -> bool:
        """Return whether this member leads, and was confirmed so lately that it may answer without asking again.

        All that is committed must be applied, else a lease that was just granted would not be known here. And a leader
        that hands over has itself made it possible that another is elected at once. A machine that sleeps hears of no
        election, however long it sleeps, and the loop's clock leaves that time out.

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
        """Have a question answered by the leader.

        Returns:
            The response of another member that leads. None if this member does, confirmed since the call (or, if only
            keep-alives hang on it, a moment before): the caller has to act at once, before it awaits anything.

        Raises:
            NotLeaderError: another member passed it on, and this one does not lead.
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
        """Return whether this member still leads when a quorum has said so since the call."""
        asked_at = self._loop.time()
        # A TTL that is read must be that of the leader; to renew or shorten a lease does no harm for a moment longer.
        if question.method is not TIME_TO_LIVE and self.is_recent(asked_at):
            return True
        self._sleep.has_slept()  # from here on it is of interest
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
        """Ask another member; None if that failed, or the leader changed meanwhile."""
        channel = self._channel(leader)
        if channel is None:
            return None
        metadata = self._introduction(leader)
        timeout_s = round(max(CALL_MIN_S, timeout_s), 1)
        call = channel.unary(question.method.path, question.encode(), timeout_s, metadata, wait_for_ready=False)
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
        """Wait, at most until the leader changes."""
        over: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_later(seconds, _end, over)
        self._pauses[over] = None
        try:
            await over
        finally:
            timer.cancel()
            self._pauses.pop(over, None)

    def leader_changed(self) -> None:
        """Wait no longer for what went to the old leader, and try again what waited for a new one."""
        self._recent_until = 0.0
        self._changes += 1
        self._waking.begin([*[call.cancel for call in self._calls], *[partial(_end, over) for over in self._pauses]])

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a background task. An error that it lets escape stops the member."""
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
        """Fail everything that waits: the member stops."""
        self._is_closed = True
        self.leader_changed()


def _end(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
