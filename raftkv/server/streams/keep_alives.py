"""Keep-alives that wait for an answer: those of a client's stream, and those forwarded by another member.

A stream needs no task that waits for each message: requests are passed to a callback, and all answers of a turn for a
stream leave in one write.

    bytes of a request -> KeepAliveStream.receive -> lessor.keep_alive -> answer -> end of the turn: flush

Leaves out: how a keep-alive is answered (``lessor``), and how requests are parsed (``lease``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from raftkv import errors
from raftkv.apply.auth.rights import Left
from raftkv.apply.wire import integer
from raftkv.replica.lease.renewals import PendingKeepAlive
from raftkv.rpc.framing import PREFIX
from raftkv.rpc.server.stream import ListenedCall
from raftkv.rpc.shares import Identity, identity_of, queue_of, refusal
from raftkv.rpc.status import RpcError

if TYPE_CHECKING:
    from raftkv.server.streams.lease import LeaseService

_pack: Final = PREFIX.pack
UNANSWERED_MAX: Final = 100_000
"""Unanswered keep-alives of one stream."""

WAITING_MAX: Final = 200_000
"""Keep-alives of one identity that wait for the leader or for an entry of the log, 210 bytes each. Another seventh is
for all other identities together."""

UNREAD_BYTES_MAX: Final = 16 * 1024 * 1024
"""Answers that may wait for a client that does not read, in bytes."""


class _ClientKeepAlive(PendingKeepAlive):
    """One request of a stream."""

    __slots__ = ("auth_revision", "grace_ms", "head", "stream")

    def __init__(self, lease_id: int, grace_ms: int, stream: KeepAliveStream, head: bytes) -> None:
        self.lease_id = lease_id
        self.grace_ms = grace_ms
        self.stream = stream
        self.head = head
        self.auth_revision = stream.auth_revision
        """Revision of the users and roles under which it was admitted."""

    def refusal(self) -> errors.StatusError | None:
        """Check the right again if users or roles have changed."""
        revision = self.stream.auth_revision
        if self.auth_revision == revision:
            return None
        self.auth_revision = revision
        return self.stream.refusal(self.lease_id)

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
        service: parses requests, and renews leases.
        call: stream that this object listens to.
    """

    def __init__(self, service: LeaseService, call: ListenedCall) -> None:
        self._auth = service.auth
        self._service = service
        self._call = call
        self._unanswered = 0
        self._identity: Identity = identity_of(call)
        self._half_closed = False
        self._ended = False
        self._out: list[bytes] = []

    @property
    def auth_revision(self) -> int:
        """Return the revision of users and roles; 0: authentication is off."""
        return self._auth.revision if self._auth.is_enabled else 0

    def refusal(self, lease_id: int) -> errors.StatusError | None:
        """Return why a lease may no longer be kept alive; None: it may."""
        if self._call.done:  # and the client's credential is gone
            return errors.PermissionDeniedError()
        try:
            left = self._service.check_lease(self._call, lease_id)
        except errors.StatusError as error:
            return error
        return None if left is None else errors.AuthOldRevisionError()  # it takes long: the client may ask again

    def receive(self, data: bytes) -> None:
        """Take one request.

        Raises:
            RpcError: the bytes are not a request, or too many requests are unanswered.
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
            renew = partial(self._renew, lease_id, id_field, grace_ms)
            service.when_checked(left, renew, self.fail, queue_of(self._identity))

    def _renew(self, lease_id: int, id_field: bytes, grace_ms: int) -> None:
        if self._ended:
            return
        service = self._service
        # The header has the state before the renewal, as etcd's does.
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
        if self._call.done:  # and the client's credential is gone
            return None
        try:
            return self._service.check_lease(self._call, lease_id)
        except errors.StatusError as error:
            raise RpcError(error.code, str(error)) from None

    def settled(self) -> None:
        """Note that a keep-alive no longer waits."""
        self._service.waiting.give_back(self._identity, 1)

    def kept(self, lease_id: int, grace_ms: int, ttl_s: int) -> None:
        """Note that a keep-alive is about to be answered.

        Arguments:
            lease_id, ttl_s: values of the answer.
            grace_ms: requested grace in milliseconds.
        """
        if not self._ended:
            self._service.graces.answered(self, lease_id, grace_ms, ttl_s, self._call.caller, self._identity)

    def released(self) -> None:
        """End: the call is over. The grace does not begin if the client had sent all its requests before it left."""
        self._ended = True
        self._service.leader_guard.forget(self._call)
        self._service.graces.stream_ended(self, severed=self._call.severed and not self._half_closed)

    def answer(self, message: bytes) -> None:
        """Queue one response, which leaves at the end of the turn."""
        if not self._out:
            self._service.cork.touch(self)
        self._out.append(_pack(0, len(message)) + message)

    def flush(self) -> None:
        """Send the responses of this turn."""
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
        """End the stream: the other requests would fail for the same reason."""
        if self._ended:
            return
        self.flush()
        self._ended = True
        self._call.fail_with(RpcError(error.code, str(error)))

    def half_closed(self) -> None:
        """Note that the client sends no more requests."""
        self._half_closed = True
        if not self._unanswered:
            self._call.finish()


class MemberBatch:
    """Keep-alives forwarded by another member, which are answered together.

    Arguments:
        lease_ids: leases in the order of the request.
        refusal: returns why they may no longer be renewed; None: they may.
    """

    def __init__(
        self, lease_ids: Sequence[int], refusal: Callable[[], errors.StatusError | None] = lambda: None
    ) -> None:
        self.refusal = refusal
        self.pending: list[PendingKeepAlive] = [
            _MemberKeepAlive(lease_id, self, position) for position, lease_id in enumerate(lease_ids)
        ]
        self.answered: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        """The TTLs, in the same order."""
        self._ttls = [0] * len(lease_ids)
        self._unanswered = len(lease_ids)

    def answer(self, position: int, ttl_s: int) -> None:
        """Store the answer to one of them; the batch is answered with the last."""
        self._ttls[position] = ttl_s
        self._unanswered -= 1
        if not self._unanswered and not self.answered.done():
            self.pending = []  # they refer to this batch
            self.answered.set_result(self._ttls)

    def fail(self, error: errors.StatusError) -> None:
        """Fail all of them: the others would fail for the same reason."""
        if not self.answered.done():
            self.pending = []
            self.answered.set_exception(error)


class _MemberKeepAlive(PendingKeepAlive):
    """One keep-alive forwarded by another member."""

    __slots__ = ("batch", "position")

    is_local = False

    def __init__(self, lease_id: int, batch: MemberBatch, position: int) -> None:
        self.lease_id = lease_id
        self.batch = batch
        self.position = position

    def refusal(self) -> errors.StatusError | None:
        """Ask the batch."""
        return self.batch.refusal()

    def answer(self, ttl_s: int) -> None:
        self.batch.answer(self.position, ttl_s)

    def fail(self, error: errors.StatusError) -> None:
        self.batch.fail(error)
