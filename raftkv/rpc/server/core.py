"""One server connection, sans-IO: bytes in, calls to handlers, bytes out.

Owns the table of open calls and the rules of the connection: routing, deadlines, limits, ping policing, graceful
close. It has no socket and no clock: ``Environment`` provides time and tasks.

Duties of its shell, ``ServerH2Protocol``:

1. pass received bytes to ``receive``;
2. after ``wake()`` was called, and after ``receive``, send what ``pull`` returns, once per loop turn;
3. after ``on_held`` was called, read nothing, and call ``go_on`` in a later turn;
4. close the transport once ``closing`` is true and ``pull`` returns nothing more;
5. call ``lost`` when the transport is gone, then ``close_calls`` until it returns False: a connection may have
   thousands of calls with a task each, and other connections may have been lost at the same time.

Leaves out: HTTP/1.1 (``http1``), sockets (``sockets``), the meaning of handlers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from raftkv.loop.cork import Cork
from raftkv.loop.cycle_free import FREE_BYTES_PER_STEP, free_in_steps, nothing
from raftkv.loop.limiter import Backlog
from raftkv.loop.timers import forget
from raftkv.rpc.framing import ENCODINGS, GZIP, PIECE_BYTES_MIN, PREFIX, PREFIX_BYTES, MessageAssembler, PackedAssembler
from raftkv.rpc.http2 import (
    CLOSED,
    RESPONSE_HEADERS,
    ConnectionFailedError,
    ErrorCode,
    H2Error,
    Request,
    ServerConnection,
    goaway_frame,
)
from raftkv.rpc.http2.connection import Outbox
from raftkv.rpc.limits import PingPolicy, ResetAllowance, ServerLimits, TokenBucket, UpdateAllowance
from raftkv.rpc.protocol import KEEPALIVE_PING, H2Protocol, Keepalive
from raftkv.rpc.server.budget import CONNECTION_FULL, NOT_READ, StallWatch
from raftkv.rpc.server.calls import Carrier, Environment, Peer, ServerCall, UnaryCall
from raftkv.rpc.server.router import Refusal, Route, Router, is_grpc, refuse
from raftkv.rpc.shares import Identity, queue_of
from raftkv.rpc.status import Code, Headers, RpcError, status_headers

_unpack: Final = PREFIX.unpack_from
_GOAWAY_PING = b"goawayok"
_AGE_MASK: Final = 0x3F
"""The start time of one call in 32 is noted: streams of clients have odd ids."""

LATE_S: Final = 1e-5
"""A call with less time is answered at once: it was longer on its way."""
MOVED_AS_ONE: Final = 128
"""Waiting answers whose windows one SETTINGS frame may open as one control frame: that takes 0.3 ms."""
OPEN_CALLS_FREE: Final = 16
RECEIVE_S: Final = 0.005
"""How long the requests of one read may take in one turn; the rest waits (``backlog``)."""
RECEIVE_SHARED_S: Final = 0.0005
"""The same if another connection was served since this one: its put takes four turns."""
CALL_BYTES: Final = 8 * 1024
"""Approximate memory of an open call: engine, usual headers, call, task, and the part of its answer that is neither
sent nor counted elsewhere. Of the first ``OPEN_CALLS_FREE`` calls of a connection only large headers are counted."""


class ServerCore(Carrier):
    """The server end of one HTTP/2 connection."""

    def __init__(self, router: Router, limits: ServerLimits, environment: Environment, peer: Peer) -> None:
        super().__init__(limits, environment, peer)
        self.h2 = ServerConnection(self, limits)
        self.closing = False
        self.drop_unsent = False
        self.settled = False
        self.held_bytes = 0
        self._calls_bytes = self._unread_bytes = 0
        self._heads: dict[int, int] = {}
        """Memory of the large headers of open calls."""
        self._heads_bytes = 0
        self._traffic = environment.traffic
        self._uses = environment.answers.uses
        self._begun = self._charged_calls = self._charged_bytes = self._stray_resets = 0
        self._serves = self._traffic.serves
        """Number of the last time that this connection was served, among all connections."""
        self._wake: Callable[[], None] = nothing
        self._on_held: Callable[[], None] = nothing
        self._router = router
        self._routes = router.routes
        self._calls: dict[int, ServerCall] = {}
        self._lost_calls: deque[ServerCall] = deque()
        self._dirty = False
        self._drained = False
        self._overloaded = False
        self._last_words = b""
        self._said = False
        self._queued_bytes = 0
        self._until_s = 0.0
        self._holds = True
        self._busy_call: ServerCall | None = None
        self._busy_ends = False
        self._freeing: list[Outbox] = []
        self._stalls = StallWatch(limits.send_stall_timeout_s)
        self._pings = PingPolicy(
            limits.ping_interval_min_s,
            limits.ping_interval_min_s if limits.ping_permit_without_stream else limits.ping_interval_idle_min_s,
            limits.ping_strikes_max,
        )
        self._updates = UpdateAllowance(limits.control_burst)
        self._control = TokenBucket(limits.control_burst, limits.control_per_s)
        self._resets = ResetAllowance(limits.reset_burst, limits.reset_per_s, limits.reset_free_after_s)
        self._oddities = TokenBucket(limits.glitch_burst, limits.glitch_per_s)
        self.on_ping_acknowledged: Callable[[bytes], None] | None = None

    # ---- bytes in

    def receive(self, data: bytes | memoryview) -> None:
        """Take bytes from the peer. The shell pulls afterwards."""
        self._traffic.received_bytes += len(data)
        self._serve(bytes(data))

    def go_on(self) -> None:
        """Continue with input left by ``receive``: it waits while ``h2.is_held``."""
        self._serve(b"")

    def _serve(self, data: bytes) -> None:
        """Handle frames for as long as one read may take, and charge the client for the time.

        Arguments:
            data: received bytes; empty: continue with the input that was left.
        """
        h2, account, traffic, began_s = self.h2, self.account, self._traffic, self.clock()
        # Whether so many answer bytes wait for the client that no new call should be accepted.
        self._overloaded = account.allowance - account.room > self.limits.connection_send_buffer_bytes
        self._until_s = began_s + (RECEIVE_S if traffic.serves == self._serves else RECEIVE_SHARED_S)
        traffic.serves += 1
        self._serves = traffic.serves
        if data:
            h2.receive(data)
        else:
            if self._busy_call is not None:
                self._unpack(self._busy_call, self._busy_ends)
            if self._busy_call is None:
                h2.go_on()
        if h2.unread_bytes != self._unread_bytes:
            self._count_unread(h2.unread_bytes)
        if h2.open_streams > OPEN_CALLS_FREE or self._calls_bytes or self._heads_bytes:
            self._count_calls()
        if self.closing or h2.want_write:
            self.wake()
        # The bytes that the client has taken since the last time count too.
        size_bytes = len(data) + account.left_bytes - self._charged_bytes
        self._charged_bytes = account.left_bytes
        begun, self._charged_calls = self._begun - self._charged_calls, self._begun
        self._uses.charge(account.identity, self.clock() - began_s, begun, size_bytes)

    def _look_at_clock(self) -> None:
        """Stop handling frames if the requests of this read have used their time."""
        if self.clock() > self._until_s:
            self._hold()

    def _hold(self) -> None:
        if self.h2 is not CLOSED:
            self.h2.is_held = True
            self._on_held()

    def _count_unread(self, size_bytes: int) -> None:
        """Count an incomplete frame with the unfinished messages."""
        counted, self._unread_bytes = self._unread_bytes, size_bytes
        self.hold(size_bytes - counted)

    def _count_calls(self) -> None:
        """Count open calls with the unfinished messages: from before their first message until all is sent."""
        size = CALL_BYTES * max(0, self.h2.open_streams - OPEN_CALLS_FREE) + self._heads_bytes
        counted, self._calls_bytes = self._calls_bytes, size
        self.hold(size - counted)
        budget = self._environment.answers
        if size > counted and budget.held_bytes > budget.held_limit_bytes:
            budget.drop_greediest()

    def prepare(self, fields: Headers) -> Route | None:
        """Return the route for the headers of a request; None: the call is unusual, and is checked in detail later."""
        found = dict(fields)
        encoding = found.get(b"grpc-encoding", b"identity")
        routes = self._router.packed_routes if encoding == GZIP else self._routes
        route = routes.get(found.get(b":path", b""))
        is_usual = (
            route is not None
            and is_grpc(found.get(b"content-type", b""))
            and found[b":method"] == b"POST"
            and encoding in ENCODINGS
            and (b"origin" not in found or self._router.origins.allows(found[b"origin"].decode("latin-1")))
        )
        return route if is_usual else None

    def on_request(self, stream_id: int, request: Request, end_stream: bool) -> None:
        """Begin a call."""
        self._begun += 1
        if stream_id & _AGE_MASK == 1:
            self._resets.begun(stream_id, self._environment.clock())
        route: Route | None = request.prepared
        if route is None or self._overloaded:
            self._on_odd_request(stream_id, request, end_stream)
            self._look_at_clock()
            return
        call: ServerCall
        if route.open is UnaryCall:
            call = UnaryCall(self, stream_id, request.fields, route)
        else:
            call = route.open(self, stream_id, request.fields, route)
            if call.done:
                return  # refused by its handler
        self._calls[stream_id] = call
        if request.kept_bytes:
            self._keep_head(stream_id, request.kept_bytes)
        if request.timeout_s is not None and request.timeout_s >= LATE_S:
            now = self.clock()
            self._environment.wheel.add(call, now + request.timeout_s, now)
        elif request.timeout_s is not None:
            call.expire()
        elif request.malformed_timeout is not None:
            text = f"malformed grpc-timeout: {request.malformed_timeout.decode('latin-1')!r}"
            call.abort(RpcError(Code.INTERNAL, text))  # the task of a stream waits already
        if end_stream:
            call.on_data(b"", True)
        if end_stream or type(call) is not UnaryCall:
            self._look_at_clock()

    def on_closed(self, stream_id: int, code: int) -> None:
        """Drop a closed stream: its call has ended, and nothing of its answer waits."""
        del code
        size = self.account.answers.pop(stream_id, 0)
        if size:
            self.account.room += size
        left_behind = self.h2.left_behind
        if left_behind:
            self.h2.left_behind = []
            if not self._freeing:
                self.spawn(free_in_steps(partial(drop_outboxes, self._freeing)))
            self._freeing += left_behind
        call = self._calls.pop(stream_id, None)
        if call is not None:
            if self._heads:
                self._heads_bytes -= self._heads.pop(stream_id, 0)
            call.closed()

    def _keep_head(self, stream_id: int, size_bytes: int) -> None:
        """Count the large header of an open call."""
        self._heads[stream_id] = size_bytes
        self._heads_bytes += size_bytes

    def _on_odd_request(self, stream_id: int, request: Request, end_stream: bool) -> None:
        fields = dict(request.fields)
        if self._router.http is not None and not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            http_route = self._router.http
            self._calls[stream_id] = call = http_route.open(self, stream_id, request.fields, http_route)
            if request.kept_bytes:
                self._keep_head(stream_id, request.kept_bytes)
            if end_stream:
                call.on_data(b"", True)
            return
        refusal = refuse(fields, self._routes.get(fields.get(b":path", b"")), self._router)
        if refusal is None:
            refusal = Refusal(200, RpcError(Code.RESOURCE_EXHAUSTED, CONNECTION_FULL))
        if self._router.on_refused is not None:
            path = fields.get(b":path", b"").decode("latin-1")
            self._router.on_refused(self.peer, path, refusal.error.code)
        self.h2.send_headers(stream_id, refusal.headers(), end_stream=True)
        self._said = True

    def on_data(self, stream_id: int, data: bytes, end_stream: bool) -> None:
        """Take a piece of a request."""
        call = self._calls.get(stream_id)
        if type(call) is not UnaryCall or not end_stream or call.assembler is not None or len(data) < PREFIX_BYTES:
            self._on_data_slow(call, stream_id, data, end_stream)
            return
        flag, length = _unpack(data)
        if flag or length != len(data) - PREFIX_BYTES or length > self.limits.max_receive_message_bytes:
            self._on_data_slow(call, stream_id, data, end_stream)
            return
        call.request_done = True
        call.run(data[PREFIX_BYTES:])
        if self.clock() > self._until_s:
            self._hold()
        self.h2.acknowledge(len(data), stream_id)

    def _on_data_slow(self, call: ServerCall | None, stream_id: int, data: bytes, end_stream: bool) -> None:
        if call is None:
            self.consume(stream_id, len(data))
            self.on_stray_data(len(data), end_stream)
            return
        if not data and not end_stream:
            self._count_control()
        call.on_data(data, end_stream)
        if self.held_bytes:
            if call.is_busy:
                self._unpack(call, end_stream)
            elif call.crumbled:
                self.abort(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_small_frames")
        self._look_at_clock()

    def _unpack(self, call: ServerCall, end_stream: bool) -> None:
        """Continue with the compressed messages of a call until the time is used; no frame is read before the last one.

        Arguments:
            call: call with compressed messages to unpack.
            end_stream: whether its request ends with them.
        """
        self._busy_call = None
        # Unpacking may end the connection: its calls are over then, and are released in a later turn.
        while call.is_busy and self.h2 is not CLOSED:
            if self._environment.clock() > self._until_s:
                self._busy_call, self._busy_ends = call, end_stream
                self._hold()
                return
            call.on_data(b"", end_stream)

    # ---- frames that are not calls

    def on_ping(self) -> None:
        """Count a ping. Too many early pings end the connection."""
        if self.limits.ping_interval_min_s == 0:
            self._count_control()
        elif self._pings.too_many(self._environment.clock(), bool(self._calls) or self.h2.queued_body_size() > 0):
            self.abort(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings")

    def on_pong(self, opaque: bytes) -> None:
        """Take the acknowledgement of a ping."""
        if opaque == _GOAWAY_PING:
            self.finish_drain()
        elif self.on_ping_acknowledged is not None:
            self.on_ping_acknowledged(opaque)

    def on_settings(self) -> None:
        """Note that the client's SETTINGS have arrived."""
        self.settled = True
        moved, self.h2.moved_streams = self.h2.moved_streams, 0
        self._count_control(1 + moved // MOVED_AS_ONE)

    def on_window_update(self) -> None:
        """Count a WINDOW_UPDATE; the client may send them in proportion to what it has read."""
        if not self._updates.take(self.account.left_bytes, next(reversed(self._calls), 0)):
            self._count_control()

    def on_priority(self) -> None:
        """Count a priority frame."""
        self._count_control()

    def on_stray_data(self, size_bytes: int, end_stream: bool) -> None:
        """Count data of a request that is answered already: the client may not know yet, so only small frames count."""
        if size_bytes < PIECE_BYTES_MIN and not end_stream:
            self._count_control()

    def on_reset(self, stream_id: int) -> None:
        """Count an open stream that the client reset (CVE-2023-44487), or made us reset (CVE-2025-8671)."""
        if not self._resets.take(stream_id, self._environment.clock()):
            self.abort(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_resets")
        self._look_at_clock()

    def on_stray_reset(self) -> None:
        """Count the reset of a call that is answered: no work is abandoned, and each call may be reset once.

        After a common deadline gRPC's core sends the calls that waited for a stream, and resets each at once.
        """
        self._stray_resets += 1
        if self._stray_resets > self._begun:
            self.on_oddity()
        self._look_at_clock()

    def on_oddity(self) -> None:
        """Count a useless frame."""
        if not self._oddities.take(self._environment.clock()):
            self.abort(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_useless_frames")

    def on_goaway(self, last_stream_id: int, code: int, debug_data: bytes) -> None:
        """Ignore it: the client opens no more streams."""

    def on_failed(self, error: ConnectionFailedError) -> None:
        """Close the connection: the client broke a rule, and the GOAWAY is queued."""
        self.closing = True

    def _count_control(self, count: int = 1) -> None:
        if not self._control.take(self._environment.clock(), count):
            self.abort(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_control_frames")

    def abort(self, error_code: int, reason: bytes) -> None:
        """End the connection at once with a GOAWAY that gives the reason.

        Arguments:
            error_code: HTTP/2 error code.
            reason: human-readable, in ASCII.
        """
        if not self.closing:
            self.h2.fail(error_code, reason)
            self.closing = True
            self.wake()

    # ---- graceful close

    def begin_drain(self) -> None:
        """Ask the client to open no more calls; open calls continue. ``finish_drain`` follows automatically."""
        if not self.closing and not self._drained:
            self._drained = True
            self.h2.send_shutdown_notice()
            self.ping(_GOAWAY_PING)

    def finish_drain(self) -> None:
        """Send the final GOAWAY; the connection closes with its last call."""
        if not self.closing:
            self.h2.send_goaway(ErrorCode.NO_ERROR)
            self.wake()

    def ping(self, opaque: bytes) -> None:
        """Ping the client with eight bytes."""
        self.h2.ping(opaque)
        self.wake()

    # ---- bytes out

    def pull(self, amount: int) -> bytes:
        """Return at most ``amount`` bytes to send; call again while it returns that many."""
        self._dirty = False
        h2 = self.h2
        data = h2.take(amount)
        # Answer bytes that leave forgive the client's pings, each time again. Headers leave with the first pull after
        # they were queued; DATA has left if less is queued than before.
        queued_bytes = h2.queued_body_size()
        if self._said or queued_bytes < self._queued_bytes:
            self._said = False
            self._pings.forgiven = True
        self._queued_bytes = queued_bytes
        if self.drain_watch and len(data) < amount:
            self._wake_drained()
            data += h2.take(amount - len(data))
        if self._calls_bytes:
            self._count_calls()
        self.account.left_bytes += len(data)
        self._traffic.sent_bytes += len(data)
        if h2.is_over:
            self.closing = True
        if self._last_words:
            data, self._last_words = data + self._last_words, b""
        return data

    def block(self, is_blocked: bool) -> None:
        """Note whether the socket is full. While it is, answers wait where they are counted."""
        self.h2.is_blocked = is_blocked

    def _wake_drained(self) -> None:
        if self.account.crowded and self.account.budget.short:
            return  # the budget wakes this connection
        room = self.limits.stream_send_buffer_bytes
        for call in [one for one in self.drain_watch if one.send_buffer_size <= room]:
            call.drained()

    def attach(self, wake: Callable[[], None], on_held: Callable[[], None]) -> None:
        """Set the callbacks of the shell.

        Arguments:
            wake: asks the shell to pull in this turn.
            on_held: tells the shell that input is left for ``go_on``.
        """
        self._wake, self._on_held = wake, on_held

    def wake(self) -> None:
        """Ask the shell to pull in this turn."""
        if not self._dirty:
            self._dirty = True
            self._wake()

    def lost(self) -> None:
        """End every open call, and drop all state: the transport is lost. ``close_calls`` then cancels the calls."""
        self.closing = True
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.cut()
        self._lost_calls += calls
        self._busy_call = None
        if self.h2.queued_body_size() > FREE_BYTES_PER_STEP:
            self.spawn(free_in_steps(self.h2.drop))
        self.drain_watch.clear()
        self.h2.stop()
        self.hold(-self.held_bytes)
        self.keep(-self._kept_bytes)
        self._holds = False
        self._heads.clear()
        self._calls_bytes = self._unread_bytes = self._heads_bytes = 0
        self.account.close()
        self.h2 = CLOSED

    def close_calls(self) -> bool:
        """Cancel calls of the lost connection for a few milliseconds. Returns whether more are left."""
        lost, clock = self._lost_calls, self._environment.clock
        until_s = clock() + RECEIVE_S
        while lost:
            lost.popleft().closed()
            if clock() > until_s:
                break
        return bool(lost)

    def released(self) -> None:
        """Drop the references to the shell."""
        self._wake = self._on_held = nothing

    # ---- called by the account of its answers

    def held_size(self) -> int:
        """Return the bytes of unfinished messages, and of large requests without an answer."""
        return self.held_bytes + self._kept_bytes

    def queued_size(self) -> int:
        """Return the bytes of bodies that have not left."""
        return self.h2.queued_body_size()

    def queued_by_streams(self) -> list[int]:
        """Return the waiting bytes of each streaming call that has any."""
        sizes = (self.h2.queued_body_size(call.stream_id) for call in self._calls.values() if call.sent_bytes)
        return [size for size in sizes if size]

    def end_stalled(self, now_s: float) -> None:
        """Reset the streams that made no progress for too long. The shell calls this regularly while bytes wait."""
        ended = self._stalls.expired(self._progress(), now_s)
        if not ended:
            return
        if self.h2.send_window <= 0:
            self.give_up(NOT_READ)
            return
        for stream_id in ended:
            self.h2.reset(stream_id, ErrorCode.ENHANCE_YOUR_CALM)
        self.wake()

    def _progress(self) -> dict[int, int]:
        """Return, for each stream with bytes that wait for a window, a number that grows as they leave.

        Bytes that wait only for the socket are not included: ``protocol`` watches the connection as a whole.
        """
        queued, is_held_up = self.h2.queued_body_size, self.h2.is_held_up
        made = [(call.stream_id, call.sent_bytes) for call in self._calls.values() if call.sent_bytes]
        waiting = ((stream_id, size, queued(stream_id)) for stream_id, size in (*made, *self.account.answers.items()))
        return {stream_id: size - left for stream_id, size, left in waiting if left and is_held_up(stream_id)}

    def give_up(self, reason: bytes) -> None:
        """Drop all waiting bytes, and end the connection with a GOAWAY that gives the reason."""
        if not self.closing:
            self._last_words = goaway_frame(ErrorCode.ENHANCE_YOUR_CALM, reason)
        self.drop_unsent = True
        self.lost()
        self.wake()

    # ---- called by calls

    @property
    def stall_interval_s(self) -> float:
        """How often to look for streams that make no progress."""
        return self._stalls.interval_s

    @property
    def open_calls(self) -> int:
        """Number of calls that are not yet answered or cancelled."""
        return len(self._calls)

    def answered(self) -> None:
        """Note that a part of an answer was queued."""
        self._said = True
        if not self._dirty:
            self._dirty = True
            self._wake()

    def finished(self, call: ServerCall) -> None:
        """Release a call: its whole answer is queued."""
        self._calls.pop(call.stream_id, None)
        if self._heads:
            self._heads_bytes -= self._heads.pop(call.stream_id, 0)
        if call.bucket is not None:
            forget(call)
        if type(call) is not UnaryCall or call.assembler is not None or call.kept_bytes:
            call.released()  # most unary calls hold nothing
        self._said = True
        if not self._dirty:
            self._dirty = True
            self._wake()

    def send_status(self, call: ServerCall, error: RpcError) -> None:
        """Queue a status: as trailers if the header was sent, else as a trailers-only response."""
        fields = status_headers(error.code, error.text, error.details, error.trailers)
        try:
            head = () if call.headers_sent() else RESPONSE_HEADERS
            self.h2.send_headers(call.stream_id, head + fields, end_stream=True)
        except H2Error:
            return  # the connection has failed

    def answer(self, stream_id: int, body: bytes, has_prefix: bool = False) -> bool:
        """Send a whole answer, if it may leave at once. Returns whether it was sent."""
        return self.h2.answer(stream_id, body, has_prefix)

    def answer_later(self, stream_id: int, pieces: Sequence[bytes], trailers: Headers = ()) -> None:
        """Queue a whole answer. Raises H2Error if the stream or its connection is gone."""
        self.h2.answer_later(stream_id, pieces, trailers)

    def send_headers(self, stream_id: int, fields: Headers, end_stream: bool) -> None:
        """Queue a header, or trailers. Raises H2Error as ``answer_later``."""
        self.h2.send_headers(stream_id, fields, end_stream)

    def send_data(self, stream_id: int, frames: bytes) -> None:
        """Queue messages with their prefixes. Raises H2Error as ``answer_later``."""
        self.h2.send_data(stream_id, frames)

    def send_in_slices(self, stream_id: int, message: bytes) -> None:
        """Queue a large message, without its prefix. Raises H2Error as ``answer_later``."""
        self.h2.send_in_slices(stream_id, message)

    def queued_size_of(self, stream_id: int) -> int:
        """Return the bytes of a stream's body that have not left."""
        return self.h2.queued_body_size(stream_id)

    def consume(self, stream_id: int, amount: int) -> None:
        """Return received bytes to the client's windows."""
        if amount:
            self.h2.acknowledge(amount, stream_id)
            if self.h2.want_write:
                self.wake()

    def assembler(self, is_packed: bool) -> MessageAssembler:
        """Return an assembler with this server's message limit.

        Arguments:
            is_packed: whether the messages may be compressed.
        """
        limit_bytes = self.limits.max_receive_message_bytes
        return PackedAssembler(limit_bytes) if is_packed else MessageAssembler(limit_bytes)

    def hold(self, amount: int) -> None:
        """Account for bytes of unfinished messages. After the connection is lost, nothing is counted."""
        if not self._holds:
            return
        self.held_bytes += amount
        self._environment.answers.held_bytes += amount

    def keep(self, amount: int) -> None:
        """Account for bytes of large requests. After the connection is lost, nothing is counted."""
        if self._holds:
            super().keep(amount)

    def check_held(self) -> None:
        """Raise RESOURCE_EXHAUSTED if the connection has too many bytes of unfinished messages."""
        if self.held_bytes - self._calls_bytes > self.limits.assembly_bytes:
            raise RpcError(Code.RESOURCE_EXHAUSTED, "too many bytes of unfinished messages on this connection")
        budget = self._environment.answers
        if budget.held_bytes > budget.held_limit_bytes:
            budget.drop_greediest()


def drop_outboxes(outboxes: list[Outbox], size_bytes: int) -> bool:
    """Drop about ``size_bytes`` of closed streams. Returns whether more is left.

    Arguments:
        outboxes: emptied from the end.
        size_bytes: bytes of one step.
    """
    while outboxes and size_bytes > 0:
        size_bytes -= outboxes[-1].drop_some(size_bytes)
        if not outboxes[-1].size_bytes:
            outboxes.pop()
    return bool(outboxes)


class ServerH2Protocol(H2Protocol[ServerCore]):
    """Connects a core with its transport: owns the timers, and flushes the core's output at the end of each turn.

    Arguments:
        core: core of the connection; this object becomes its only owner.
        transport: transport of the socket, or of TLS.
        cork: flushes the connection at the end of a turn with output.
        released: called when the connection is lost.
        backlog: queue for a connection with more input than one turn may handle.
    """

    def __init__(
        self, core: ServerCore, transport: asyncio.Transport, cork: Cork, released: Callable[[], None], backlog: Backlog
    ) -> None:
        limits = core.limits
        loop = asyncio.get_running_loop()
        super().__init__(
            core,
            transport,
            loop,
            buffer_bytes=limits.transport_buffer_bytes,
            blocked_input_bytes=limits.blocked_input_bytes,
            write_stall_timeout_s=limits.write_stall_timeout_s,
        )
        self._released = released
        self._backlog = backlog
        self._waits = False
        self._drain_timer: asyncio.TimerHandle | None = None
        self._preface_timer = loop.call_later(limits.preface_timeout_s, self._check_preface)
        self._keepalive = Keepalive(
            loop,
            limits.keepalive_time_s,
            limits.keepalive_timeout_s,
            last_read_s=lambda: self.last_read_s,
            active=lambda: True,
            ping=partial(self.core.ping, KEEPALIVE_PING),
            dead=self.abort,
        )
        self._check_timer: asyncio.TimerHandle | None = None
        core.account.buffered_size = transport.get_write_buffer_size
        core.attach(partial(cork.mark, self), self._held)

    @property
    def queue(self) -> Identity:
        """The queue in which input of the connection waits for its turn."""
        return queue_of(self.core.account.identity)

    def _held(self) -> None:
        """Continue in later turns, and read nothing until then: the core has used its time."""
        if not self.ended_here:
            self.transport.pause_reading()
            self._wait()

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._backlog.add(self.go_on, self.queue)

    def go_on(self) -> None:
        """Continue with the input that the core has left."""
        self._waits = False
        if self.ended_here:
            if self.core.close_calls():
                self._wait()
            return
        self.core.go_on()
        if self.writable or self._blocked_input <= self._blocked_input_bytes:
            self._read_on()

    def _read_on(self) -> None:
        if not self._waits and not self.ended_here:
            self.transport.resume_reading()

    def flush(self) -> None:
        """Send the core's output, and update the account.

        An error ends this connection only, since turns of the member's node flush connections too.
        """
        try:
            super().flush()
            account, buffered = self.core.account, self.transport.get_write_buffer_size()
            if buffered or account.room != account.allowance or account.reported:
                account.settle(buffered)
                if account.reported and self._check_timer is None:
                    self._check_timer = self._loop.call_later(self.core.stall_interval_s, self._check_stalled)
        except Exception as error:
            context = {"message": "a connection could not be flushed", "exception": error}
            self._loop.call_exception_handler(context)
            self.abort()

    def all_sent(self) -> None:
        """Count no longer what the socket has taken."""
        self.core.account.settle(0)

    def _check_stalled(self) -> None:
        """End streams without progress; called while bytes wait for the client."""
        self._check_timer = None
        self.core.end_stalled(self._loop.time())
        self.flush()

    def _check_preface(self) -> None:
        """Abort if the client's SETTINGS have not arrived in time."""
        if not self.core.settled:
            self.abort()

    @property
    def draining(self) -> bool:
        """True once the client was asked to leave."""
        return self._drain_timer is not None

    def drain(self) -> None:
        """Close gracefully: see ``ServerCore.begin_drain``."""
        if self._drain_timer is None:
            self.core.begin_drain()
            timeout_s = self.core.limits.goaway_notice_timeout_s
            self._drain_timer = self._loop.call_later(timeout_s, self.core.finish_drain)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything: the transport is gone."""
        self._preface_timer.cancel()
        self._keepalive.close()
        for timer in (self._drain_timer, self._check_timer):
            if timer is not None:
                timer.cancel()
        self.core.severed = not self.ended_here
        super().connection_lost(exc)
        self._wait()  # to cancel the lost calls in later turns
        self.core.released()
        self._released()
        self._released = nothing
