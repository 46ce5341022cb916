"""The way of a question about leases to the one member that can answer it: the leader.

Owns who waits for a leader, and what is under way to another member. An *errand* is served here when this member leads
and its leadership was confirmed since the errand came; else it is passed on over the peer port, at most once; else it
waits until there is a leader. What fails on the way is tried again until the errand's deadline, then it gets the error
that etcd gives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.raft.types import NONE
from raftkv.rpc.client.calls import UnaryFuture
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError
from raftkv.server.node.node import Node

RETRY_S: Final = 0.05
"""Rest before the leader is asked again after a failure."""

CALL_MIN_S: Final = 0.1

CONFIRMED_MAX_S: Final = 0.05
CONFIRMED_ELECTIONS: Final = 0.25
"""How long a confirmed leader need not ask again before it answers keep-alives: at most so long, and so much of the
election timeout. The quorum that confirmed it elects nobody else for nearly a whole one. (etcd asks only when its own
loop has stood still; server/etcdserver/v3_server.go, ensureLeadership.)"""


class Errand(Protocol):
    """Something that only the leader can do."""

    @property
    def deadline(self) -> float:
        """Loop time after which nobody wants it any more."""

    @property
    def is_local(self) -> bool:
        """Whether it came from a client here; what another member passed on is not passed on again."""

    @property
    def trusts_recent(self) -> bool:
        """Whether leadership that was confirmed a moment ago is good enough."""

    @property
    def path(self) -> str:
        """Method of the peer service that does it."""

    def serve(self) -> None:
        """Do it: this member leads, confirmed since the errand came."""

    def request(self) -> bytes:
        """The request for the other member."""

    def take(self, response: bytes) -> None:
        """The leader did it. Raises DecodeError, ValueError: that is no answer."""

    def fail(self, error: errors.StatusError) -> None:
        """It will not be done."""


class _Confirmation:
    """Waits until the leadership of this member is confirmed."""

    __slots__ = ("asked_at", "errand", "router")

    def __init__(self, router: Router, errand: Errand, asked_at: float) -> None:
        self.router = router
        self.errand = errand
        self.asked_at = asked_at

    def ready(self) -> None:
        self.router.confirmed(self.errand, self.asked_at)

    def fail(self, error: errors.StatusError) -> None:
        self.router.give_up(self.errand, error)


class Router:
    """See the module.

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
        self._waiting: dict[Errand, None] = {}
        self._trusted_s = min(CONFIRMED_MAX_S, CONFIRMED_ELECTIONS * node.settings.election_s)
        self._trusted_until = 0.0
        self._calls: dict[UnaryFuture, Errand] = {}

    def route(self, errand: Errand) -> None:
        """Have an errand done."""
        node = self._node
        self._waiting.pop(errand, None)
        if node.stopped:
            errand.fail(errors.StoppedError())
        elif errand.deadline <= self._loop.time():
            self.give_up(errand, errors.RequestTimeoutError())
        elif self._is_primary():
            now = self._loop.time()
            if errand.trusts_recent and now < self._trusted_until and self._is_settled():
                errand.serve()
            else:
                node.read(_Confirmation(self, errand, now))
        elif node.leader in (NONE, node.settings.member_id):
            self._waiting[errand] = None
        elif errand.is_local:
            self._pass_on(errand, node.leader)
        else:
            errand.fail(errors.NotLeaderError())

    def _is_settled(self) -> bool:
        """Whether a leader that was confirmed a moment ago may answer without asking again.

        All that is committed must be applied, else a lease that was just granted would not be known here. And a leader
        that hands over has itself made it possible that another is elected at once.
        """
        node = self._node
        return node.applied == node.committed and not node.is_transferring

    def confirmed(self, errand: Errand, asked_at: float) -> None:
        """This member's state is as new as the errand; serve it, if this member still leads."""
        if self._is_primary():
            self._trusted_until = asked_at + self._trusted_s
            errand.serve()
        else:
            self.route(errand)

    def give_up(self, errand: Errand, error: errors.StatusError) -> None:
        """Time is up. Without a leader that is the reason, whatever the errand waited for."""
        no_leader = self._node.leader == NONE and not isinstance(error, errors.StoppedError)
        errand.fail(errors.NoLeaderError() if no_leader else error)

    def _pass_on(self, errand: Errand, leader: int) -> None:
        channel = self._channel(leader)
        if channel is None:
            self._retry_later(errand)
            return
        timeout_s = max(CALL_MIN_S, errand.deadline - self._loop.time())
        metadata = self._introduction(leader)
        call = channel.unary(errand.path, errand.request(), round(timeout_s, 1), metadata, wait_for_ready=False)
        self._calls[call] = errand
        call.add_done_callback(self._returned)

    def _returned(self, call: asyncio.Future[bytes]) -> None:
        errand = self._calls.pop(call, None)  # type: ignore[call-overload]
        if errand is None or call.cancelled():
            return
        try:
            errand.take(call.result())
        except (RpcError, DecodeError, ValueError):
            self._retry_later(errand)

    def _retry_later(self, errand: Errand) -> None:
        self._waiting[errand] = None
        self._loop.call_later(RETRY_S, partial(self._retry, errand))

    def _retry(self, errand: Errand) -> None:
        if errand in self._waiting:
            self.route(errand)

    def retry_all(self) -> None:
        """The leader changed: nothing that went to the old one needs to be waited for, and what waited may go."""
        self._trusted_until = 0.0
        calls, self._calls = self._calls, {}
        for call in calls:
            call.cancel()
        for errand in [*self._waiting, *calls.values()]:
            self.route(errand)

    def tick(self) -> None:
        """Give up on what waited too long."""
        now = self._loop.time()
        for errand in [errand for errand in self._waiting if errand.deadline <= now]:
            del self._waiting[errand]
            self.give_up(errand, errors.RequestTimeoutError())

    def close(self) -> None:
        """Fail everything: the member stops."""
        calls, self._calls = self._calls, {}
        waiting, self._waiting = self._waiting, {}
        for call in calls:
            call.cancel()
        for errand in [*waiting, *calls.values()]:
            errand.fail(errors.StoppedError())
