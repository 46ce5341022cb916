"""HTTP/1.1 on the gRPC port: one request at a time, handed whole to the injected handler. Built on h11.

Left out on purpose: pipelining beyond what h11 buffers, upgrades, trailers, compression.
Limits: header bytes and time, body bytes, idle time; a connection that misbehaves gets its 4xx and is closed.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

import h11

from raftkv.rpc.gone import forget_frames
from raftkv.rpc.http import HttpHandler, HttpRequest, HttpResponse, text_response
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server_core import Peer


class Spawner(Protocol):
    """Runs tasks and takes reports; the server is one."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...  # noqa: D102
    def report(self, path: str, error: BaseException) -> None: ...  # noqa: D102


class Http1Protocol(asyncio.Protocol):
    """One HTTP/1.1 connection."""

    def __init__(
        self,
        handler: HttpHandler | None,
        limits: ServerLimits,
        transport: asyncio.Transport,
        peer: Peer,
        spawner: Spawner,
        released: Callable[[], None],
    ) -> None:
        self._handler = handler
        self._limits = limits
        self._transport = transport
        self._peer = peer
        self._spawner = spawner
        self._released = released
        self._loop = asyncio.get_running_loop()
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.http1_header_bytes)
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._draining = False
        self._early_bytes = 0
        self._finished = False
        self._timer = self._loop.call_later(limits.http1_header_timeout_s, self._timed_out)

    # ---- bytes in

    def data_received(self, data: bytes) -> None:
        """Take bytes; a complete request starts the handler."""
        if self._finished:
            return
        self._h11.receive_data(data)
        if self._task is None:
            self._read_events()
        else:
            self._count_early(len(data))

    def _count_early(self, size: int) -> None:
        """Bytes of the next requests are kept while one is answered, up to the size of one; reading on shows
        that the client has left."""
        self._early_bytes += size
        if self._early_bytes > self._limits.http_body_bytes:
            self._transport.pause_reading()

    def _read_events(self) -> None:
        try:
            while self._task is None and not self._finished:
                event = self._h11.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    return
                self._on_event(event)
        except h11.RemoteProtocolError as error:
            forget_frames(error)
            self._refuse(error.error_status_hint, "malformed request")

    def _on_event(self, event: object) -> None:
        match event:
            case h11.Request():
                self._request = event
                if self._h11.they_are_waiting_for_100_continue:
                    self._write(h11.InformationalResponse(status_code=100, headers=[]))
            case h11.Data():
                self._body += event.data
                if len(self._body) > self._limits.http_body_bytes:
                    self._refuse(413, "request body too large")
            case h11.EndOfMessage():
                self._start()
            case h11.ConnectionClosed():
                self._finish()

    def _start(self) -> None:
        self._timer.cancel()
        self._task = self._spawner.spawn(self._serve(self._take_request()))

    def _take_request(self) -> HttpRequest:
        head, self._request = self._request, None
        body, self._body = bytes(self._body), bytearray()
        if head is None:
            raise RuntimeError("a body ended without a request")
        return HttpRequest(
            method=head.method.decode("ascii"),
            target=head.target.decode("latin-1"),
            headers=tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers),
            body=body,
            peer=self._peer.address,
            tls=self._peer.tls,
        )

    # ---- the answer

    async def _serve(self, request: HttpRequest) -> None:
        response = await self._respond(request)
        try:
            await self._send(response, head_only=request.method == "HEAD")
        except asyncio.CancelledError:
            self._transport.abort()
            raise
        except Exception as error:
            self._spawner.report(request.path, error)
            self._transport.abort()
        self._next_request()

    async def _respond(self, request: HttpRequest) -> HttpResponse:
        if self._handler is None:
            return text_response(404, "not found")
        try:
            return await self._handler(request)
        except Exception as error:
            self._spawner.report(request.path, error)
            return text_response(500, "internal error")

    async def _send(self, response: HttpResponse, head_only: bool) -> None:
        body = response.body
        headers = [(_usual(name), value) for name, value in response.headers if name.lower() != "content-length"]
        if isinstance(body, bytes):
            headers.append(("Content-Length", str(len(body))))
        if self._draining:
            headers.append(("Connection", "close"))
        self._write(h11.Response(status_code=response.status, headers=headers, reason=_reason(response.status)))
        if not head_only:
            await self._send_body(body)
        self._write(h11.EndOfMessage())

    async def _send_body(self, body: bytes | AsyncIterator[bytes]) -> None:
        if isinstance(body, bytes):
            self._write(h11.Data(data=body))
            return
        async for piece in body:
            await self._writable.wait()
            self._write(h11.Data(data=piece))

    def _write(self, event: Any) -> None:
        data = self._h11.send(event)
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def _refuse(self, status: int, text: str) -> None:
        self._timer.cancel()
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = text.encode() + b"\n"
            headers = [("Content-Length", str(len(body))), ("Connection", "close"), ("Content-Type", "text/plain")]
            self._write(h11.Response(status_code=status, headers=headers, reason=_reason(status)))
            self._write(h11.Data(data=body))
            self._write(h11.EndOfMessage())
        self._finish()

    def _finish(self) -> None:
        """Take no more requests; what is written still goes out."""
        self._finished = True
        self._transport.close()

    def _next_request(self) -> None:
        if self._finished:
            return
        if self._draining or self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            self._transport.close()
            return
        self._h11.start_next_cycle()
        self._task = None
        self._timer = self._loop.call_later(self._limits.http1_idle_timeout_s, self._timed_out)
        if self._early_bytes > self._limits.http_body_bytes:
            self._transport.resume_reading()
        self._early_bytes = 0
        self._read_events()

    # ---- life

    def _timed_out(self) -> None:
        self._transport.close()

    def drain(self) -> None:
        """Close after the request under way, or now."""
        self._draining = True
        if self._task is None:
            self._transport.close()

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self._writable.clear()
        self._timer.cancel()
        self._timer = self._loop.call_later(self._limits.write_stall_timeout_s, self._transport.abort)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._timer.cancel()
        self._writable.set()

    def eof_received(self) -> bool | None:
        """A client that half-closes has left, as far as anybody can tell: its handler is cancelled."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport has gone."""
        self._timer.cancel()
        self._writable.set()
        self._finished = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
        self._released()


def _usual(name: str) -> str:
    """A header's name as nearly everybody writes it: there are clients that know no other, Horovod's for one."""
    return name.title()


def _reason(status: int) -> bytes:
    try:
        return http.HTTPStatus(status).phrase.encode("ascii")
    except ValueError:
        return b""
