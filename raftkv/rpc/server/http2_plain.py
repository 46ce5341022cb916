"""Plain HTTP requests over HTTP/2 (a browser after ALPN), served by the same handler as HTTP/1.1.

If the server has an HTTP handler, requests whose content type is not gRPC's are served here. Unsent bytes of an answer
count with the answers of calls (``budget``): a whole answer is counted when it is made, one in pieces waits for room.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from raftkv.rpc.http2 import ErrorCode, H2Error
from raftkv.rpc.server.calls import ANSWERED, CANCELLED, OPEN, ServerCall
from raftkv.rpc.server.http import HttpHandler, HttpRequest, HttpResponse, close_body, http_date, text_response
from raftkv.rpc.server.router import Route
from raftkv.rpc.status import Headers, RpcError

if TYPE_CHECKING:
    from raftkv.rpc.server.core import ServerCore

_PSEUDO = {b":authority": "host"}


def http_route(handler: HttpHandler) -> Route:
    """Return the route that passes requests to ``handler``."""
    return Route("(http)", PlainCall, handler)


class PlainCall(ServerCall):
    """One plain request. Its body is collected, then a task runs the handler."""

    __slots__ = ("_body", "_core", "_drained", "_sent_headers", "_task")

    def __init__(self, core: ServerCore, stream_id: int, headers: Headers, route: Route) -> None:
        super().__init__(core, stream_id, headers, route)
        self._core = core
        self._body = bytearray()
        self._drained: asyncio.Future[None] | None = None
        self._sent_headers = False
        self._task: asyncio.Task[None] | None = None

    def on_data(self, data: bytes, end_stream: bool) -> None:
        """Collect the body, and start the handler at its end."""
        core = self._core
        core.consume(self.stream_id, len(data))
        self.request_done = end_stream
        if self._state != OPEN:
            return
        if len(self._body) + len(data) > core.limits.http_body_bytes:
            self._send_whole(text_response(413, "request body too large"), b"request body too large\n")
            return
        core.hold(len(data))
        self._body += data
        try:
            core.check_held()
        except RpcError as error:
            self._send_whole(text_response(503, error.text), error.text.encode() + b"\n")
        if end_stream and self._state == OPEN:
            self._task = core.spawn(self._run())

    def released(self) -> None:
        """Drop the body; stop the handler of a cancelled request."""
        self._core.hold(-len(self._body))
        self._body = bytearray()
        if self._state == ANSWERED and self.sent_bytes:
            self._core.account.leave(self.stream_id, self.send_buffer_size)
        self.drained()
        task, self._task = self._task, None  # a cancelled task holds frames that refer to this call
        if self._state == CANCELLED and task is not None and not task.done():
            task.cancel()

    def fail(self, code: int, text: str = "", *, details: bytes = b"", trailers: Headers = ()) -> None:
        """Answer 500: plain HTTP has no gRPC status."""
        del code, details, trailers
        self._send_whole(text_response(500, text), text.encode())

    def _request(self) -> HttpRequest:
        fields = dict(self.headers)
        named = ((_PSEUDO.get(name, name.decode("latin-1")), value.decode("latin-1")) for name, value in self.headers)
        return HttpRequest(
            method=fields[b":method"].decode("latin-1"),
            target=fields.get(b":path", b"").decode("latin-1"),
            headers=tuple((name, value) for name, value in named if not name.startswith(":")),
            body=bytes(self._body),
            peer=self.peer.address,
            tls=self.peer.tls,
            loopback=self.peer.loopback,
            certificate=self.peer.certificate,
            identity=self.peer.identity,
        )

    async def _run(self) -> None:
        try:
            response = await self.route.handler(self._request())
            try:
                await self._send(response)
            finally:
                await close_body(response.body)
        except asyncio.CancelledError:
            raise
        except H2Error:
            return  # the stream's close is about to be reported
        except Exception as error:
            self._core.report(self.route.path, error)
            self._fail_late()

    def _fail_late(self) -> None:
        if self._sent_headers:
            self._core.h2.reset(self.stream_id, ErrorCode.INTERNAL_ERROR)
            self._core.wake()
        else:
            self._send_whole(text_response(500, "internal error"), b"internal error\n")

    async def _send(self, response: HttpResponse) -> None:
        if isinstance(response.body, bytes) or self._headers_method() == b"HEAD":
            self._send_whole(response, response.body if isinstance(response.body, bytes) else b"")
            return
        self._send_head(response)
        pieces = aiter(response.body)
        while True:
            # Before a piece is made: what waits outside the queue is not counted.
            while self._state == OPEN and not self._core.account.has_room(self.send_buffer_size):
                await self._wait_drained()
            piece = await anext(pieces, None)
            if self._state != OPEN:
                return
            if piece is None:
                break
            self._core.h2.send_data(self.stream_id, piece)
            self.sent_bytes += len(piece)
            self._core.account.queue(len(piece))
            self._core.answered()
            del piece
        self._end()

    def _send_whole(self, response: HttpResponse, body: bytes) -> None:
        if self._state != OPEN:
            return
        body = b"" if self._headers_method() == b"HEAD" else body
        account = self._core.account
        refusal = account.ask(len(body)) if len(body) > account.room else None
        if self._state != OPEN:
            return  # this connection may be one of those that were ended to make room
        if refusal is not None:
            body = refusal.text.encode() + b"\n"
            response = text_response(503, refusal.text)
        account.room -= len(body)
        account.answers[self.stream_id] = len(body)
        try:
            self._send_head(response)
            if body:
                self._core.h2.send_data(self.stream_id, body)
        except H2Error:
            account.closed(self.stream_id)  # the stream's close is about to be reported
        self._end()

    def _send_head(self, response: HttpResponse) -> None:
        head = ((b":status", b"%d" % response.status),)
        fields = tuple((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in response.headers)
        date = ((b"date", http_date().encode("ascii")),)
        self._sent_headers = True
        self._core.h2.send_headers(self.stream_id, head + fields + date)
        self._core.answered()

    def _headers_method(self) -> bytes:
        return dict(self.headers)[b":method"]

    def _end(self) -> None:
        if self._state != OPEN:
            return
        self._state = ANSWERED
        self._core.finished(self)
        try:
            self._core.h2.end_stream(self.stream_id)
        except H2Error:
            pass  # as above

    @property
    def send_buffer_size(self) -> int:
        """Bytes queued for this stream."""
        return self._core.h2.queued_body_size(self.stream_id)

    def drained(self) -> None:
        """Wake the sender: the send buffer has space."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def _wait_drained(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()
        self._core.drain_watch.add(self)
        try:
            await self._drained
        finally:
            self._drained = None
            self._core.drain_watch.discard(self)
