"""The Lease service: grant, revoke, keep alive, time to live, leases.

Owns the way of a request through this member; the lessor does the work. A stream of keep-alives has no task that waits
for each message: requests are handed to a callback, and all answers that a turn has for a stream leave in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.apply.request import Kind
from raftkv.apply.response import field, integer
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.cork import Cork
from raftkv.rpc.framing import PREFIX
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import RpcError
from raftkv.server.lease.forwarded import Shortening, TimeToLive
from raftkv.server.lease.graces import Graces, Orphan
from raftkv.server.lease.lessor import Lessor
from raftkv.server.lease.renewals import Ticket
from raftkv.server.node.slices import RUN_ITEMS, Work, in_order
from raftkv.server.services.kv import PendingWrite, Responder, fail, parse
from raftkv.server.services.leader_guard import LeaderGuard

T = TypeVar("T", bound=Any)

_METHODS: Final = SERVICES["etcdserverpb.Lease"]
_EMPTY: Final = raft_pb2.Empty().SerializeToString()
_pack: Final = PREFIX.pack
KNOWN_MAX: Final = 100_000
"""Requests whose meaning is remembered: a client sends the same few bytes again and again."""

KNOWN_BYTES_MAX: Final = 1 + 10 + 2 + 5
"""An id, and a grace of up to months, each behind its tag: what a request has unless somebody put more into it."""

UNANSWERED_MAX: Final = 100_000
"""Keep-alives that one stream may have under way."""

UNREAD_BYTES_MAX: Final = 16 * 1024 * 1024
"""Answers that may wait for a client that does not read."""


class _KeepAlive(Ticket):
    """One request of a stream."""

    __slots__ = ("grace_ms", "head", "stream")

    def __init__(self, lease_id: int, grace_ms: int, stream: _KeepAliveStream, head: bytes) -> None:
        self.lease_id = lease_id
        self.grace_ms = grace_ms
        self.stream = stream
        self.head = head

    def answer(self, ttl_s: int) -> None:
        self.stream.kept(self.lease_id, self.grace_ms, ttl_s)
        self.stream.answer(self.head + integer(3, ttl_s))

    def fail(self, error: errors.StatusError) -> None:
        self.stream.fail(error)


class _KeepAliveStream:
    """One client's stream of keep-alives.

    Arguments:
        service: whose stream it is.
        call: the RPC.
        end: resolved when the client has said all and got all, or failed with what ends the stream.
    """

    def __init__(self, service: LeaseService, call: StreamCall, end: asyncio.Future[None]) -> None:
        self._service = service
        self._call = call
        self._end = end
        self._unanswered = 0
        self._half_closed = False
        self._ended = self._severed = False
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
        self._unanswered += 1
        # The header says how things stood before the renewal, as etcd's does.
        service.lessor.keep_alive(_KeepAlive(lease_id, grace_ms, self, service.header() + id_field))

    def kept(self, lease_id: int, grace_ms: int, ttl_s: int) -> None:
        """A keep-alive is about to be answered."""
        if self._severed or not self._ended:
            self._service.graces.answered(self, lease_id, grace_ms, ttl_s, severed=self._severed)

    def ended(self) -> None:
        """The stream has ended, in whatever way. A client that had said all before it was gone is not missed."""
        self._ended = True
        self._severed = self._call.severed and not self._half_closed
        self._service.graces.stream_ended(self, severed=self._severed)

    def answer(self, message: bytes) -> None:
        """Queue one response; it leaves at the end of the turn."""
        if not self._out:
            self._service.cork.touch(self)
        self._out.append(_pack(0, len(message)) + message)

    def flush(self) -> None:
        """Send what the turn has gathered."""
        out, self._out = self._out, []
        if out:
            self._unanswered -= len(out)
            self._call.send_frames_nowait(b"".join(out))
            if self._call.send_buffer_size > UNREAD_BYTES_MAX and not self._end.done():
                text = f"more than {UNREAD_BYTES_MAX} bytes of answers are not read"
                self._end.set_exception(RpcError(errors.RESOURCE_EXHAUSTED, text))
            self._end_if_done()

    def fail(self, error: errors.StatusError) -> None:
        """End the stream: what one request met, the others would meet too."""
        if not self._end.done():
            self.flush()
        if not self._end.done():
            self._end.set_exception(RpcError(error.code, str(error)))

    def half_closed(self) -> None:
        """The client has said all."""
        self._half_closed = True
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._half_closed and not self._unanswered and not self._end.done():
            self._end.set_result(None)


class _Group:
    """Keep-alives that another member passed on: answered together."""

    def __init__(self, call: UnaryCall, count: int) -> None:
        self._call = call
        self._ttls = [0] * count
        self._unanswered = count

    def answer(self, position: int, ttl_s: int) -> None:
        """One of them."""
        self._ttls[position] = ttl_s
        self._unanswered -= 1
        if not self._unanswered and not self._call.done:
            self._call.reply(raft_pb2.LeaseRenewResponse(ttls=self._ttls).SerializeToString())

    def fail(self, error: errors.StatusError) -> None:
        """All of them."""
        if not self._call.done:
            fail(self._call, error)


class _PassedOn(Ticket):
    """One keep-alive that another member passed on."""

    __slots__ = ("group", "position")

    is_local = False

    def __init__(self, lease_id: int, group: _Group, position: int) -> None:
        self.lease_id = lease_id
        self.group = group
        self.position = position

    def answer(self, ttl_s: int) -> None:
        self.group.answer(self.position, ttl_s)

    def fail(self, error: errors.StatusError) -> None:
        self.group.fail(error)


class LeaseService:
    """Handlers of etcdserverpb.Lease, and of what other members pass on.

    Arguments:
        responder: the member's shared parts.
        lessor: of the member.
        guard: ends streams that insist on a leader.
        cork: flushes streams at the end of a turn.
    """

    def __init__(self, responder: Responder, lessor: Lessor, guard: LeaderGuard, cork: Cork) -> None:
        self.cork = cork
        self.lessor = lessor
        self.known: dict[bytes, tuple[int, bytes, int]] = {}
        self._responder = responder
        self._admission = responder.admission
        self._guard = guard
        self._loop = asyncio.get_running_loop()
        self.graces = Graces(self._loop.time, lessor.orphaned)
        self._header = b""
        self._header_of = (-1, -1)

    def register(self, server: Server) -> None:
        """Serve clients."""
        server.unary(_METHODS["LeaseGrant"].path, self.grant)
        server.unary(_METHODS["LeaseRevoke"].path, self.revoke)
        server.unary(_METHODS["LeaseTimeToLive"].path, self.time_to_live)
        server.unary(_METHODS["LeaseLeases"].path, self.leases)
        server.stream(_METHODS["LeaseKeepAlive"].path, self.keep_alive)

    # -- writes ------------------------------------------------------------------------------------------------------

    def grant(self, call: UnaryCall, data: bytes) -> None:
        """Grant a lease."""
        asked = parse(call, rpc_pb2.LeaseGrantRequest, data)
        if asked is None:
            return
        try:
            self._admission.check_write(call, Kind.LEASE_GRANT, data, asked)
            request = self.lessor.grant_request(asked.TTL, asked.ID, exact=asked.exact_ttl)
        except errors.StatusError as error:
            fail(call, error)
            return
        waiter = PendingWrite(self._responder, call, request)
        self._responder.propose(call, Kind.LEASE_GRANT, request.SerializeToString(), waiter)

    def revoke(self, call: UnaryCall, data: bytes) -> None:
        """End a lease and delete its keys."""
        request = parse(call, rpc_pb2.LeaseRevokeRequest, data)
        if request is not None:
            self._responder.propose(call, Kind.LEASE_REVOKE, data, PendingWrite(self._responder, call, request))

    # -- questions ---------------------------------------------------------------------------------------------------

    def time_to_live(self, call: UnaryCall, data: bytes) -> None:
        """How long a lease has left, and its keys: as the leader sees it."""
        request = parse(call, rpc_pb2.LeaseTimeToLiveRequest, data)
        if request is None:
            return

        def done(body: bytes, is_whole: bool) -> None:
            head = self._responder.header.encode(self._responder.revision(), self._responder.node.term)
            self._answer_time_to_live(call, request.ID, head + body, is_whole)

        try:
            self._admission.check_read(call, serializable=False)
        except errors.StatusError as error:
            fail(call, error)
            return
        self.lessor.ask(
            TimeToLive(self.lessor, request, is_local=True, done=done, failed=lambda error: fail(call, error))
        )

    def leases(self, call: UnaryCall, data: bytes) -> None:
        """The ids of all leases, as this member knows them, the first to end first."""
        if parse(call, rpc_pb2.LeaseLeasesRequest, data) is None:
            return
        try:
            self._admission.check_read(call, serializable=False)
        except errors.StatusError as error:
            fail(call, error)
            return
        head = self._responder.header.encode(self._responder.revision(), self._responder.node.term)
        times = self.lessor.times
        self._answer_in_slices(call, head, times.ends(), _lease_status, len(times))

    def _answer_time_to_live(self, call: UnaryCall, lease_id: int, message: bytes, is_whole: bool) -> None:
        """Answer with what a leader said, and with the keys of the lease where they were left out."""
        if is_whole:
            call.reply(message)
        else:
            keys = self._responder.applier.store.lease_keys_unordered(lease_id)
            self._answer_in_slices(call, message, keys, _lease_key, len(keys))

    def _answer_in_slices(
        self, call: UnaryCall, head: bytes, items: Iterable[T], encode: Callable[[T], bytes], size: int
    ) -> None:
        """Answer with a list of any length, sorted: the head of the message, then each item."""

        def work() -> Work[None]:
            ordered = yield from in_order(items)
            pieces = [head]
            while some := list(islice(ordered, RUN_ITEMS)):
                pieces.append(b"".join([encode(item) for item in some]))
                yield
            call.reply_many(pieces)

        job = self._responder.slices.run(work, partial(self._responder.refuse_read, call), size)
        if not job.is_over:
            call.on_cancel(job.cancel)

    # -- keep-alives -------------------------------------------------------------------------------------------------

    async def keep_alive(self, call: StreamCall) -> None:
        """Renew leases until the client has said all."""
        self._check_stream(call)
        end = self._guard.until_leader_lost(call)
        stream = _KeepAliveStream(self, call, end)
        call.deliver_to(stream.receive)
        reader = self._loop.create_task(_read_to_end(call, stream))
        try:
            await end
        finally:
            stream.ended()
            reader.cancel()
            await asyncio.wait([reader])

    def _check_stream(self, call: StreamCall) -> None:
        try:
            self._admission.check_read(call, serializable=False)
        except errors.StatusError as error:
            raise RpcError(error.code, str(error)) from None

    def parse_keep_alive(self, data: bytes) -> tuple[int, bytes, int]:
        """Lease id of a request, the field of the response that repeats it, and the grace that it asks for.

        Raises:
            RpcError: the bytes are no request.
        """
        try:
            request = rpc_pb2.LeaseKeepAliveRequest.FromString(data)
        except DecodeError as error:
            raise RpcError(errors.INTERNAL, f"grpc: error unmarshalling request: {error}") from None
        parsed = request.ID, integer(2, request.ID), request.disconnect_grace_ms
        if len(self.known) >= KNOWN_MAX:
            self.known.clear()
        if len(data) <= KNOWN_BYTES_MAX:
            self.known[data] = parsed
        return parsed

    def header(self) -> bytes:
        """The header of a response about this moment."""
        now = (self._responder.revision(), self._responder.node.term)
        if now != self._header_of:
            self._header_of = now
            self._header = self._responder.header.encode(*now)
        return self._header

    # -- for other members -------------------------------------------------------------------------------------------

    def renew_for_member(self, call: UnaryCall, data: bytes) -> None:
        """Keep-alives that came to another member."""
        request = parse(call, raft_pb2.LeaseRenewRequest, data)
        if request is None:
            return
        group = _Group(call, len(request.ids))
        for position, lease_id in enumerate(request.ids):
            self.lessor.keep_alive(_PassedOn(lease_id, group, position))

    def shorten_for_member(self, call: UnaryCall, data: bytes) -> None:
        """Leases whose owner's connection to another member broke."""
        request = parse(call, raft_pb2.LeaseShortenRequest, data)
        if request is None:
            return
        now = self._loop.time()
        orphans = [
            Orphan(lease_id, grace_ms / 1000, now - age_us / 1_000_000)
            for lease_id, grace_ms, age_us in zip(request.ids, request.graces_ms, request.ages_us, strict=False)
        ]

        def settled(error: errors.StatusError | None) -> None:
            if call.done:
                return
            if error is None:
                call.reply(_EMPTY)
            else:
                fail(call, error)

        self.lessor.ask(Shortening(self.lessor, orphans, is_local=False, settled=settled))

    def time_to_live_for_member(self, call: UnaryCall, data: bytes) -> None:
        """A question that came to another member."""
        request = parse(call, rpc_pb2.LeaseTimeToLiveRequest, data)
        if request is None:
            return

        def done(body: bytes, is_whole: bool) -> None:
            if not call.done:
                self._answer_time_to_live(call, request.ID, body, is_whole)

        def failed(error: errors.StatusError) -> None:
            if not call.done:
                fail(call, error)

        self.lessor.ask(TimeToLive(self.lessor, request, is_local=False, done=done, failed=failed))


def _lease_status(end: tuple[float, int]) -> bytes:
    """An element of field 2 of a LeaseLeasesResponse."""
    return field(2, integer(1, end[1]))


def _lease_key(key: bytes) -> bytes:
    """An element of field 5 of a LeaseTimeToLiveResponse."""
    return field(5, key)


async def _read_to_end(call: StreamCall, stream: _KeepAliveStream) -> None:
    """Messages go to the callback; what comes here is their end."""
    await call.receive()
    stream.half_closed()
