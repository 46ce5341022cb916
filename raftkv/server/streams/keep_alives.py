"""Keep-alives that wait for an answer: those of a client's stream, and those that another member passed on.

A stream has no task that waits for each message: requests are handed to a callback, and all answers that a turn has
for a stream leave in one write.

    bytes of a request -> KeepAliveStream.receive -> lessor.keep_alive -> answer -> end of the turn: flush

Leaves out: how a keep-alive is answered (``lessor``), and what the bytes of a request mean (``service``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from raftkv import errors
from raftkv.apply.auth.rights import Left
from raftkv.apply.auth.store import AuthStore
from raftkv.apply.leases import TTL_MAX_S
from raftkv.apply.request import Caller
from raftkv.apply.response import integer
from raftkv.loop.cork import Cork
from raftkv.replica.lease.renewals import PendingKeepAlive
from raftkv.replica.node.leader_guard import LeaderGuard
from raftkv.rpc.framing import PREFIX
from raftkv.rpc.server.calls import ServerCall
from raftkv.rpc.server.stream import ListenedCall
from raftkv.rpc.shares import Identity, Shares, identity_of, refusal
from raftkv.rpc.status import RpcError

# -- graces ---------------------------------------------------------------------------------------------------------
#
# Graces: leases that end soon after the connection of their owner breaks, on the member that their keep-alives come to.
#
# A client may say with each keep-alive how long the lease shall outlive a broken connection (``disconnect_grace_ms``).
# This member remembers it for each stream; when the connection of the last such stream breaks, it reports to the
# leader:
#
#     keep-alive with a grace, answered  -> the stream keeps that lease
#     connection of the stream breaks    -> leases that no other stream here keeps are reported
#     answer that comes after that       -> nothing: the leader has renewed the lease, which lasts its whole TTL again
#     stream ends in any other way       -> forgotten: its client is alive, and may go on elsewhere
#
# The end of a lease deletes its keys, which others may have attached since. So a report names the user who asked for
# the grace, and the leader ends the lease as if that user had revoked it, under the rights of the last keep-alive.
#
# Each report carries when the last answer was passed on, so that the leader knows whether another stream has kept the
# lease alive since, for example the same client by way of another member. For a keep-alive that was still under way
# when its connection broke, the order is unknown: the leader may take it after those by which the client went on
# elsewhere. So it is not reported, and a lease ends late rather than early. Without I/O and without a clock of its own.

KEPT_MAX: Final = 100_000
"""Leases with a grace that one stream may have; the others end with their TTL."""


GRACE_MAX_MS: Final = 1000 * TTL_MAX_S
"""A longer grace means no more than this one: every lease has ended by then. Clients may ask for any 64-bit number."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """A lease whose owner's connection was lost.

    Attributes:
        lease_id: of the lease.
        grace_s: how long it shall live on.
        answered_at: loop time when the last keep-alive of its owner was answered here.
        caller: its owner, by the users and roles of that keep-alive; None: unknown.
    """

    lease_id: int
    grace_s: float
    answered_at: float
    caller: Caller | None = None


Report = Callable[[list[ConnectionLost]], None]


class Graces:
    """Remembers which streams keep which leases, and reports leases whose last connection was lost.

    Arguments:
        clock: loop time.
        report: called with leases that shall end soon.
    """

    def __init__(self, clock: Callable[[], float], report: Report) -> None:
        self._clock = clock
        self._report = report
        self._keepers: dict[int, dict[Hashable, ConnectionLost]] = {}
        self._kept: dict[Hashable, set[int]] = {}

    def __len__(self) -> int:
        return len(self._keepers)

    def answered(
        self, stream: Hashable, lease_id: int, grace_ms: int, ttl_s: int, caller: Caller | None = None
    ) -> None:
        """A keep-alive was answered.

        Arguments:
            stream: by which it came, and which has not ended.
            lease_id, ttl_s: as answered.
            grace_ms: as asked for; 0 or less: none.
            caller: who keeps the lease; None: unknown.
        """
        keepers = self._keepers.get(lease_id)
        if keepers is None and grace_ms <= 0:
            return  # what nearly all keep-alives are
        if ttl_s > 0:
            grace_s = min(grace_ms, GRACE_MAX_MS) / 1000
            self._remember(stream, ConnectionLost(lease_id, grace_s, self._clock(), caller))

    def _remember(self, stream: Hashable, entry: ConnectionLost) -> None:
        # Also without a grace: then this stream does nothing but hold back the others that keep the same lease.
        kept = self._kept.setdefault(stream, set())
        if len(kept) < KEPT_MAX:
            kept.add(entry.lease_id)
        if entry.lease_id in kept:
            self._keepers.setdefault(entry.lease_id, {})[stream] = entry

    def stream_ended(self, stream: Hashable, *, severed: bool) -> None:
        """Forget a stream; if its connection broke, report the leases that no other stream keeps.

        Arguments:
            stream: by which keep-alives came.
            severed: whether its connection broke, so that its client could not end it.
        """
        kept = self._kept.pop(stream, None)
        if kept is None:
            return  # what nearly all streams are
        lost = []
        for lease_id in kept:
            keepers = self._keepers[lease_id]
            entry = keepers.pop(stream)
            if not keepers:
                del self._keepers[lease_id]
                lost.append(entry)
        lost = [entry for entry in lost if entry.grace_s > 0]
        if severed and lost:
            self._report(lost)

    def lease_ended(self, lease_id: int) -> None:
        """Forget a lease."""
        for stream in self._keepers.pop(lease_id, ()):
            self._kept[stream].discard(lease_id)


_pack: Final = PREFIX.pack
UNANSWERED_MAX: Final = 100_000
"""Keep-alives that one stream may have under way."""

WAITING_MAX: Final = 200_000
"""Keep-alives of one identity that wait for the leader or for an entry of the log, 210 bytes each; all identities
together have a seventh more."""

UNREAD_BYTES_MAX: Final = 16 * 1024 * 1024
"""Answers that may wait for a client that does not read."""


class Requests(Protocol):
    """The service, as a stream needs it."""

    auth: AuthStore
    cork: Cork
    graces: Graces
    header: Callable[[], bytes]
    """The header of a response about this moment."""
    known: dict[bytes, tuple[int, bytes, int]]
    """Requests parsed before."""
    leader_guard: LeaderGuard
    waiting: Shares
    """Keep-alives that are not answered at once, and not yet."""

    def renew_at_once(self, lease_id: int) -> int:
        """Renew a lease if this member can do so alone: its TTL in seconds, or 0."""

    def keep_alive(self, pending: PendingKeepAlive) -> None:
        """Renew a lease, and answer."""

    def parse_keep_alive(self, data: bytes) -> tuple[int, bytes, int]:
        """Lease id of a request, the field of the response that repeats it, and the grace that it asks for."""

    def check_lease(self, call: ServerCall, lease_id: int) -> Left:
        """Refuse to keep a lease alive where users are asked for. Raises StatusError; returns what is left to check."""

    def when_checked(
        self,
        left: Generator[None, None, None],
        done: Callable[[], None],
        failed: Callable[[errors.StatusError], None],
    ) -> None:
        """Do what is left of a check."""


class _ClientKeepAlive(PendingKeepAlive):
    """One request of a stream."""

    __slots__ = ("grace_ms", "head", "stream")

    def __init__(self, lease_id: int, grace_ms: int, stream: KeepAliveStream, head: bytes) -> None:
        self.lease_id = lease_id
        self.grace_ms = grace_ms
        self.stream = stream
        self.head = head

    def answer(self, ttl_s: int) -> None:
        self.stream.settled()
        self.stream.kept(self.lease_id, self.grace_ms, ttl_s)
        self.stream.answer(self.head + integer(3, ttl_s))

    def fail(self, error: errors.StatusError) -> None:
        self.stream.settled()
        self.stream.fail(error)


class KeepAliveStream:
    """One client's stream of keep-alives.

    Arguments:
        service: knows requests, and renews leases.
        call: the RPC, which this is the listener of.
    """

    def __init__(self, service: Requests, call: ListenedCall) -> None:
        self._auth = service.auth
        self._service = service
        self._call = call
        self._unanswered = 0
        self._identity: Identity = identity_of(call)
        self._half_closed = False
        self._ended = False
        self._out: list[bytes] = []

    def receive(self, data: bytes) -> None:
        """Take one request.

        Raises:
            RpcError: the bytes are no request, or this one is too many.
        """
        if self._unanswered >= UNANSWERED_MAX:
            raise RpcError(errors.RESOURCE_EXHAUSTED, f"more than {UNANSWERED_MAX} keep-alives await their answers")
        service = self._service
        lease_id, id_field, grace_ms = service.known.get(data) or service.parse_keep_alive(data)
        left = self._check_lease(lease_id) if self._auth.is_enabled else None
        self._unanswered += 1
        if left is None:
            self._renew(lease_id, id_field, grace_ms)
        else:
            service.when_checked(left, partial(self._renew, lease_id, id_field, grace_ms), self.fail)

    def _renew(self, lease_id: int, id_field: bytes, grace_ms: int) -> None:
        if self._ended:
            return
        service = self._service
        # The header says how things stood before the renewal, as etcd's does.
        head = service.header() + id_field
        ttl_s = service.renew_at_once(lease_id)
        if ttl_s:
            self.kept(lease_id, grace_ms, ttl_s)
            self.answer(head + integer(3, ttl_s))
            return
        if not service.waiting.has_room(self._identity, 1):
            text = refusal(self._identity, f"{service.waiting.limit} keep-alives that may wait at one member")
            self.fail(errors.ShareError(text))
            return
        service.waiting.take(self._identity, 1)
        service.keep_alive(_ClientKeepAlive(lease_id, grace_ms, self, head))

    def _check_lease(self, lease_id: int) -> Left:
        if self._call.done:  # and what the client has shown is known no more
            return None
        try:
            return self._service.check_lease(self._call, lease_id)
        except errors.StatusError as error:
            raise RpcError(error.code, str(error)) from None

    def settled(self) -> None:
        """Note that a keep-alive waits no more."""
        self._service.waiting.give_back(self._identity, 1)

    def kept(self, lease_id: int, grace_ms: int, ttl_s: int) -> None:
        """Note that a keep-alive is about to be answered.

        Arguments:
            lease_id, ttl_s: as answered.
            grace_ms: as asked for, in milliseconds.
        """
        if not self._ended:
            self._service.graces.answered(self, lease_id, grace_ms, ttl_s, self._call.caller)

    def released(self) -> None:
        """The call is over, in any way. A client that had sent all before it left is not missed."""
        self._ended = True
        self._service.leader_guard.forget(self._call)
        self._service.graces.stream_ended(self, severed=self._call.severed and not self._half_closed)

    def answer(self, message: bytes) -> None:
        """Queue one response; it leaves at the end of the turn."""
        if not self._out:
            self._service.cork.touch(self)
        self._out.append(_pack(0, len(message)) + message)

    def flush(self) -> None:
        """Send what the turn has gathered."""
        out, self._out = self._out, []
        if not out:
            return
        self._unanswered -= len(out)
        frames = b"".join(out)
        if self._half_closed and not self._unanswered:
            self._call.finish(frames, len(out))
            return
        self._call.send_frames_nowait(frames, len(out))
        if self._call.send_buffer_size > UNREAD_BYTES_MAX:
            text = f"more than {UNREAD_BYTES_MAX} bytes of answers are not read"
            self._call.fail_with(RpcError(errors.RESOURCE_EXHAUSTED, text))

    def fail(self, error: errors.StatusError) -> None:
        """End the stream: what one request met, the others would meet too."""
        if self._ended:
            return
        self.flush()
        self._ended = True
        self._call.fail_with(RpcError(error.code, str(error)))

    def half_closed(self) -> None:
        """The client has said all."""
        self._half_closed = True
        if not self._unanswered:
            self._call.finish()


class MemberBatch:
    """Keep-alives that another member passed on: answered together.

    Arguments:
        lease_ids: in the order of the request.
    """

    def __init__(self, lease_ids: Sequence[int]) -> None:
        self.pending: list[PendingKeepAlive] = [
            _MemberKeepAlive(lease_id, self, position) for position, lease_id in enumerate(lease_ids)
        ]
        self.answered: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        """The TTLs, in the same order."""
        self._ttls = [0] * len(lease_ids)
        self._unanswered = len(lease_ids)

    def answer(self, position: int, ttl_s: int) -> None:
        """Note the answer to one of them; all are answered with the last."""
        self._ttls[position] = ttl_s
        self._unanswered -= 1
        if not self._unanswered and not self.answered.done():
            self.pending = []  # each of which holds this
            self.answered.set_result(self._ttls)

    def fail(self, error: errors.StatusError) -> None:
        """Fail all of them: what one met, the others would meet too."""
        if not self.answered.done():
            self.pending = []
            self.answered.set_exception(error)


class _MemberKeepAlive(PendingKeepAlive):
    """One keep-alive that another member passed on."""

    __slots__ = ("batch", "position")

    is_local = False

    def __init__(self, lease_id: int, batch: MemberBatch, position: int) -> None:
        self.lease_id = lease_id
        self.batch = batch
        self.position = position

    def answer(self, ttl_s: int) -> None:
        self.batch.answer(self.position, ttl_s)

    def fail(self, error: errors.StatusError) -> None:
        self.batch.fail(error)
