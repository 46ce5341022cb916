"""HTTP/1.1 on the gRPC port: one request at a time, passed whole to the HTTP handler. Built on h11.

Every wait of the connection has its own limit (``limits``), and one timer looks after all:

    header (from connection, or from the first byte of a next request) -> body -> (the handler) -> idle -> header ...

Requests that arrive while one is being answered wait unparsed, up to the size of one body; then the socket is not read.
A client in that state that is sent nothing for as long as it may idle is disconnected.
A client that reads no answers is disconnected by ``protocol``, even without another timer; a slow reader is not. Unread
answers count with those of all connections (``budget``): a whole answer is counted when it is made, pieces wait for
room.
Requests with a known head, and plain answers, bypass h11 (``known_heads``).
A connection that misbehaves gets a 4xx answer and is closed; an idle one is closed without an answer.

Left out on purpose: answering pipelined requests concurrently, upgrades, trailers, compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import h11

from raftkv.loop.cycle_free import forget_frames
from raftkv.loop.fair import Identity
from raftkv.rpc.protocol import StallGuard
from raftkv.rpc.server.budget import NOT_FINISHED, RELIEF_INTERVAL_S, AnswerAccount
from raftkv.rpc.server.calls import Peer
from raftkv.rpc.server.http import (
    HttpHeaders,
    HttpRequest,
    HttpResponse,
    close_body,
    http_date,
    origin_form,
    text_response,
)
from raftkv.rpc.server.known_heads import KnownHeads, head_bytes, response_head
from raftkv.rpc.shares import queue_of

if TYPE_CHECKING:
    from raftkv.rpc.server.server import Server

_PIECE_BYTES = 64 * 1024
"""Most bytes passed to h11 at once."""

READ_S = 0.005
"""Time for parsing the bytes of one read with h11, which takes 10 us for a chunk of one byte; the rest waits."""

_BODILESS = frozenset((*range(100, 200), 204, 304))
"""Statuses whose answers have no body and no Content-Length."""

_PROBES = tuple(getattr(socket, name) for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL") if hasattr(socket, name))

_HEADER_TOO_LARGE = 431
_HEADER_TEXT = "request header too large"

_FRAMINGS = frozenset((b"content-length", b"transfer-encoding"))
"""A request with both is refused: a proxy on the way may read it differently (RFC 9112 section 6.3)."""


class Http1Protocol(asyncio.Protocol):
    """One HTTP/1.1 connection."""

    def __init__(
        self, server: Server, transport: asyncio.Transport, peer: Peer, released: Callable[[], None], since_s: float
    ) -> None:
        self._server = server
        self._handler = server.http_handler
        self._limits = limits = server.limits
        self._budget = budget = server.answers
        self._account = AnswerAccount(budget, limits, asyncio.get_running_loop().time, self, peer.identity)
        self._account.buffered_size = transport.get_write_buffer_size
        self._held_bytes = 0
        """Bytes counted in the budget."""
        self._served_bytes = 0
        """Body size of the request being served."""
        self._head_bytes = 0
        """Size of the header that is being received or served."""
        self._transport = transport
        self._peer = peer
        self._released = released
        self._loop = asyncio.get_running_loop()
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.http1_header_bytes)
        self._inbox = bytearray()
        """Received bytes not passed to h11 yet."""
        self._is_behind = False
        """Whether parsing has used its time: it continues in a later turn, and the socket is not read until then."""
        self._is_full = False
        """Whether reading is stopped because too much has arrived behind the request being served."""
        self._fed_bytes = 0
        """Bytes passed to h11 since the end of the last request."""
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._room = asyncio.Event()
        """Set when the budget of all clients has room again."""
        self._unread_since_s = 0.0
        self._stall = StallGuard(self._loop, limits.write_stall_timeout_s)
        self._draining = False
        self._finished = False
        self._last_read_s = self._wrote_s = self._loop.time()
        self._idle = False
        self._idle_since_s = self._header_since_s = since_s
        self._ended_s: float | None = None
        """When the client has ended its half."""
        self._heads = KnownHeads()
        self._raw_head = b""
        """The head of the request that h11 parses, if it may become a known one."""
        _probe(transport, limits.http1_probe_s)
        self._timer: asyncio.TimerHandle | None = None
        self._watch()

    # ---- bytes in

    def data_received(self, data: bytes) -> None:
        """Take bytes. A complete request starts the handler."""
        if self._finished:
            return
        self._inbox += data
        self._last_read_s = self._loop.time()
        if self._is_behind:
            pass  # these bytes were decrypted together with those that wait
        elif self._task is None and not self._begin_known():
            if self._idle:
                self._await_header(self._last_read_s)
            self._read_events()
        elif len(self._inbox) > self._limits.http_body_bytes:  # reading on until then shows that the client has left
            self._transport.pause_reading()
            self._is_full = True
            self._watch()
        self._hold()
        if self._budget.held_bytes > self._budget.held_limit_bytes and self._held_bytes:
            self._budget.drop_greediest()

    def _hold(self) -> None:
        """Count request bytes in memory with the unfinished messages of all connections."""
        budget, before = self._budget, self._held_bytes
        size = len(self._inbox) + self._head_bytes + len(self._body) + self._served_bytes
        budget.held_bytes += size - before
        self._held_bytes = size

    def held_size(self) -> int:
        """Return the request bytes in memory: unfinished, being served, or next."""
        return self._held_bytes

    @property
    def queue(self) -> Identity:
        """The queue in which input of the connection waits for its turn."""
        return queue_of(self._peer.identity)

    def queued_size(self) -> int:
        """Return 0: all answer bytes are with the transport."""
        return 0

    def queued_by_streams(self) -> list[int]:
        """Return nothing, for the same reason."""
        return []

    def give_up(self, reason: bytes) -> None:
        """End the connection: others need its memory. If no request is being served, an answer says so."""
        if self._task is None and reason == NOT_FINISHED:
            self._refuse(503, "too many bytes of unfinished requests")
        else:
            self._cut()

    def wake(self) -> None:
        """Continue: the budget has room again."""
        self._room.set()

    def _cut(self) -> None:
        """Abort the connection in the middle of an answer."""
        self._served_bytes = self._head_bytes = 0
        self._finish()
        self._transport.abort()

    def _begin_known(self) -> bool:
        """Start the handler on a request with a known head; False: h11 has to parse it."""
        if self._fed_bytes or self._request is not None or self._draining:
            return False
        head = self._heads.find(self._inbox)
        if head is None or head.body_bytes > self._limits.http_body_bytes:
            return False
        whole = head.size_bytes + head.body_bytes
        raw = bytes(self._inbox[:whole])
        del self._inbox[:whole]
        self._idle = False
        self._served_bytes = head.body_bytes
        request = self._make_request(head.method, head.target, head.headers, raw[head.size_bytes :])
        self._task = self._server.spawn(self._serve_known(request, raw))
        return True

    def _read_events(self) -> None:
        if not self._fed_bytes:
            self._raw_head = head_bytes(self._inbox)
        until_s = self._loop.time() + READ_S
        try:
            while self._task is None and not self._finished:
                event = self._h11.next_event()
                if event is h11.PAUSED or (event is h11.NEED_DATA and not self._feed()):
                    return
                if event is not h11.NEED_DATA:
                    self._on_event(event)
                if self._loop.time() > until_s and self._task is None and not self._finished:
                    self._fall_behind()
                    return
        except h11.RemoteProtocolError as error:
            forget_frames(error)
            too_long = error.error_status_hint == _HEADER_TOO_LARGE and self._request is None
            self._refuse(error.error_status_hint, _HEADER_TEXT if too_long else "malformed request")

    def _fall_behind(self) -> None:
        """Continue in a later turn."""
        self._is_behind = True
        self._transport.pause_reading()
        self._server.backlog().add(self.go_on, self.queue)

    def go_on(self) -> None:
        """Continue to parse received bytes: it is this connection's turn."""
        self._is_behind = False
        if self._finished:
            return
        self._read_events()
        self._hold()
        if not self._is_behind and not self._is_full and not self._finished:
            self._read_on()

    def _read_on(self) -> None:
        """Resume reading. If the client has ended its half, and no request is being served, close instead."""
        if self._ended_s is None:
            self._transport.resume_reading()
        elif self._task is None:
            self._finish()

    def _feed(self) -> bool:
        """Pass a piece of the input to h11; False if there is none."""
        if not self._inbox:
            return False
        piece = bytes(self._inbox[:_PIECE_BYTES])
        del self._inbox[:_PIECE_BYTES]
        self._fed_bytes += len(piece)
        if self._request is None:
            self._head_bytes = self._fed_bytes
        self._h11.receive_data(piece)
        return True

    def _unread_bytes(self) -> int:
        """Return the bytes that h11 has not parsed; at most a piece and a header, so h11's copy of them is cheap."""
        return len(self._h11.trailing_data[0])

    def _on_event(self, event: object) -> None:
        match event:
            case h11.Request():
                # h11 limits incomplete headers only: a header that arrived in one piece is checked here.
                size = self._fed_bytes - self._unread_bytes()
                if size > self._limits.http1_header_bytes or len(event.headers) > self._limits.header_count:
                    self._refuse(_HEADER_TOO_LARGE, _HEADER_TEXT)
                    return
                if not _FRAMINGS.difference(name for name, _ in event.headers):
                    self._refuse(400, "both Content-Length and Transfer-Encoding")
                    return
                if _has_unknown_expectation(event.headers):
                    self._refuse(417, "only 100-continue can be expected")
                    return
                self._request, self._head_bytes = event, size
                if self._raw_head and size == len(self._raw_head):
                    self._heads.learn(self._raw_head, event)
                self._watch()
                if self._h11.they_are_waiting_for_100_continue:
                    self._write(h11.InformationalResponse(status_code=100, headers=[], reason=_reason(100)))
            case h11.Data():
                self._body += event.data
                if len(self._body) > self._limits.http_body_bytes:
                    self._refuse(413, "request body too large")
            case h11.EndOfMessage():
                self._task = self._server.spawn(self._serve(self._take_request()))
            case h11.ConnectionClosed():
                self._finish()

    def _take_request(self) -> HttpRequest:
        head, self._request = self._request, None
        body, self._body = bytes(self._body), bytearray()
        self._served_bytes = len(body)
        if head is None:
            raise RuntimeError("a body ended without a request")
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers)
        return self._make_request(head.method.decode("ascii"), head.target.decode("latin-1"), headers, body)

    def _make_request(self, method: str, target: str, headers: HttpHeaders, body: bytes) -> HttpRequest:
        if not target.startswith("/"):
            target, headers = origin_form(target, headers)
        return HttpRequest(
            method=method,
            target=target,
            headers=headers,
            body=body,
            peer=self._peer.address,
            tls=self._peer.tls,
            loopback=self._peer.loopback,
            certificate=self._peer.certificate,
            identity=self._peer.identity,
        )

    # ---- the answer

    async def _serve_known(self, request: HttpRequest, raw: bytes) -> None:
        """Serve a request that bypassed h11. If the answer is not a plain one, h11 parses the request now."""
        response = await self._respond(request)
        body = response.body
        if not isinstance(body, bytes) or response.status in _BODILESS or request.method == "HEAD" or self._draining:
            self._h11.receive_data(raw)
            while isinstance(self._h11.next_event(), (h11.Request, h11.Data)):
                pass  # until the end of the message, which has arrived
            await self._answer(request, response)
            return
        try:
            if not self._transport.is_closing():
                self._put(_plain_answer(response, body))
        except h11.LocalProtocolError as error:
            self._server.report(request.path, error)
            self._transport.abort()
        if not self._writable.is_set():
            await self._writable.wait()
        self._served_bytes = 0
        if not self._finished:
            self._task = None
            self._go_on()

    async def _serve(self, request: HttpRequest) -> None:
        await self._answer(request, await self._respond(request))

    async def _answer(self, request: HttpRequest, response: HttpResponse) -> None:
        try:
            try:
                await self._send(response, head_only=request.method == "HEAD")
            finally:
                await close_body(response.body)
        except asyncio.CancelledError:
            self._transport.abort()
            raise
        except Exception as error:
            self._server.report(request.path, error)
            self._transport.abort()
        # Answers must not pile up for a client that sends requests and reads nothing; a client that reads is not idle.
        await self._writable.wait()
        self._next_request()

    async def _respond(self, request: HttpRequest) -> HttpResponse:
        if self._handler is None:
            return text_response(404, "not found")
        try:
            response = await self._handler(request)
        except Exception as error:
            self._server.report(request.path, error)
            return text_response(500, "internal error")
        body = response.body
        if isinstance(body, bytes) and len(body) > self._account.room:
            refusal = self._account.ask(len(body))
            if refusal is not None:
                return text_response(503, refusal.text)
        return response

    async def _send(self, response: HttpResponse, head_only: bool) -> None:
        body = response.body
        headers = [(_usual(name), value) for name, value in response.headers if name.lower() != "content-length"]
        if isinstance(body, bytes):
            headers.append(("Content-Length", str(len(body))))
        headers.append(("Date", http_date()))
        if self._draining:
            headers.append(("Connection", "close"))
        self._write(h11.Response(status_code=response.status, headers=headers, reason=_reason(response.status)))
        if isinstance(body, bytes) and not head_only:
            self._write(h11.Data(data=body))
        elif not isinstance(body, bytes) and not head_only:
            await self._send_pieces(body)
        self._write(h11.EndOfMessage())

    async def _send_pieces(self, body: AsyncIterator[bytes]) -> None:
        """Send pieces as the client reads them, and as the budget of all clients has room."""
        account = self._account
        async for piece in body:
            await self._writable.wait()
            while len(piece) > account.room and account.budget.short:
                await self._wait_for_room()
            self._write(h11.Data(data=piece))

    async def _wait_for_room(self) -> None:
        """Wait until the budget has room, or until it is time to look again for clients that do not read."""
        budget = self._budget
        budget.relieve(self._loop.time())
        self._room.clear()
        budget.wait(self._account)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(budget.grace_s, RELIEF_INTERVAL_S) if budget.short else 0):
                await self._room.wait()

    def _write(self, event: Any) -> None:
        data = self._h11.send(event)
        if data and not self._transport.is_closing():
            self._wrote_s = self._loop.time()
            self._put(data)

    # ---- what leaves

    def _put(self, data: bytes) -> None:
        """Write, and count the bytes that the client does not read at once."""
        self._account.left_bytes += len(data)
        self._transport.write(data)
        self._count_unread()

    def all_sent(self) -> None:
        """Count no longer what the socket has taken."""
        self._account.settle(0)

    def _count_unread(self) -> None:
        buffered = self._transport.get_write_buffer_size()
        if buffered or self._account.reported:
            self._account.settle(buffered)

    def _refuse(self, status: int, text: str) -> None:
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = text.encode() + b"\n"
            headers = [("Content-Length", str(len(body))), ("Connection", "close"), ("Content-Type", "text/plain")]
            headers.append(("Date", http_date()))
            self._write(h11.Response(status_code=status, headers=headers, reason=_reason(status)))
            self._write(h11.Data(data=body))
            self._write(h11.EndOfMessage())
        self._finish()

    def _finish(self) -> None:
        """Take no more requests. Written bytes still leave, if the peer reads them."""
        self._finished = True
        self._inbox.clear()
        self._body.clear()
        self._head_bytes = 0
        self._hold()
        if not self._transport.is_closing():  # asyncio's TLS transport breaks when it is closed twice
            self._transport.close()
        self._stall.arm(self._transport, self._transport.abort)

    def _next_request(self) -> None:
        self._served_bytes = self._head_bytes = 0
        self._hold()
        if self._finished:
            return
        if self._draining or self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            self._finish()
            return
        self._h11.start_next_cycle()
        self._task = None
        self._fed_bytes = self._unread_bytes()
        self._go_on()

    def _go_on(self) -> None:
        """Take the next request, if it has arrived."""
        self._idle_since_s = self._loop.time()
        if not self._begin_known():
            if self._fed_bytes or self._inbox:
                self._await_header(self._idle_since_s)
                self._read_events()
            else:
                self._idle = True
                self._watch()
        self._hold()
        if len(self._inbox) <= self._limits.http_body_bytes and not self._finished:
            self._is_full = False
            if not self._is_behind:
                self._read_on()

    # ---- time

    def _waits(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yield until when each of the present waits may last, and what to do then."""
        limits, last_read_s = self._limits, self._last_read_s
        # While output waits, its reading is watched elsewhere (``protocol``).
        unread_s = 0.0 if self._writable.is_set() else self._loop.time()
        if self._ended_s is not None:
            yield max(self._ended_s, unread_s) + limits.http1_half_closed_s, self._cut
        if self._task is not None:
            if self._is_full:  # the client may have left unnoticed
                yield max(self._wrote_s, last_read_s, unread_s) + limits.http1_idle_timeout_s, self._cut
        elif self._request is not None:
            stopped = partial(self._refuse, 408, "request body stopped coming")
            yield last_read_s + limits.http1_body_stall_timeout_s, stopped
        elif self._idle:
            yield self._idle_since_s + limits.http1_idle_timeout_s, self._finish
        else:
            late = partial(self._refuse, 408, "request header came too slowly")
            yield self._header_since_s + limits.http1_header_timeout_s, late

    def _watch(self) -> None:
        """Call ``_look`` at the end of the first wait, or earlier: so one timer serves many requests."""
        until_s = min((until_s for until_s, _ in self._waits()), default=inf)
        if not self._finished and until_s < (inf if self._timer is None else self._timer.when()):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(until_s, self._look)

    def _look(self) -> None:
        """End the waits that are over, and go on watching the others."""
        self._timer = None
        for until_s, end in self._waits():
            if until_s <= self._loop.time() and not self._finished:
                end()
        self._watch()

    def _await_header(self, since_s: float) -> None:
        self._idle, self._header_since_s = False, since_s
        self._watch()

    # ---- life

    @property
    def idle_since_s(self) -> float | None:
        """Loop time since which the connection is idle or its answer is unread; None: a request is being served."""
        if self._task is None:
            return self._idle_since_s
        return None if self._writable.is_set() else self._unread_since_s

    def drain(self) -> None:
        """Close now, or after the request being served."""
        self._draining = True
        if self._task is None:
            self._finish()

    def pause_writing(self) -> None:
        """Stop writing: the client does not keep up."""
        self._writable.clear()
        self._unread_since_s = self._loop.time()
        self._stall.arm(self._transport, self._transport.abort)

    def resume_writing(self) -> None:
        """Continue writing: the client has caught up."""
        self._writable.set()
        self._count_unread()
        if not self._finished:
            self._stall.disarm()

    def eof_received(self) -> bool | None:
        """Keep serving for a while: a client that has ended its half may still read, or may have left."""
        if self._finished or (self._task is None and not self._is_behind):
            return False
        if self._ended_s is None:
            self._ended_s = self._loop.time()
            self._watch()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything: the transport is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stall.disarm()
        self._account.close()
        self._writable.set()
        self._finished = True
        task, self._task = self._task, None  # a cancelled task holds frames that refer to this object
        if task is not None and not task.done():
            task.cancel()
        self._inbox.clear()
        self._body.clear()
        self._served_bytes = self._head_bytes = 0
        self._hold()
        self._released()


def _has_unknown_expectation(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether the client expects something other than 100-continue (RFC 9110, 10.1.1)."""
    expected = b",".join(value for name, value in headers if name == b"expect")
    return expected.strip() != b"" and b"100-continue" not in map(bytes.strip, expected.lower().split(b","))


def _probe(transport: asyncio.Transport, interval_s: int) -> None:
    """Make the kernel probe the client's machine, to find out that it has gone without closing."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in _PROBES:
            sock.setsockopt(socket.IPPROTO_TCP, option, interval_s)


def _plain_answer(response: HttpResponse, body: bytes) -> bytes:
    """Return a whole answer. Raises h11.LocalProtocolError: its headers are not valid."""
    names = tuple((_usual(name), value) for name, value in response.headers if name.lower() != "content-length")
    head = response_head(response.status, names, _reason(response.status))
    return b"%b%d\r\nDate: %b\r\n\r\n%b" % (head, len(body), http_date().encode("ascii"), body)


def _usual(name: str) -> str:
    """Return a header name in its usual spelling: some clients, such as Horovod's, accept no other."""
    return name.title()


def _reason(status: int) -> bytes:
    try:
        return http.HTTPStatus(status).phrase.encode("ascii")
    except ValueError:
        return b""
