"""Watches and keep-alives over websockets: JSON messages in both directions, as in etcd (its grpc-websocket-proxy).

    GET /v3/watch, Upgrade: websocket   ->  101, then the call of POST /v3/watch, whose body never ends

Each message of the client is one or more JSON values; each answer is one text message. Web pages cannot set headers
here, so their token is a subprotocol, ``Bearer, TOKEN``, or the cookie ``token``; other programs may send
``Authorization``. Pages are admitted if ``http.access`` allows them to change something: a browser opens a websocket
without a preflight request.

Leaves out, as etcd does: metadata and timeouts of the handshake.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from time import perf_counter
from typing import Final

from raftkv.loop.fair import Identity
from raftkv.loop.scheduler import Slices
from raftkv.pb.services import Method
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from raftkv.rpc.server.router import Route
from raftkv.rpc.server.websocket import WebSocket, accepted, handshake_refusal
from raftkv.rpc.shares import queue_of
from raftkv.rpc.status import Code, Headers
from raftkv.server.auth.callers import AUTHORIZATION, GATEWAY
from raftkv.server.gateway.decoder import JsonError, Requests
from raftkv.server.gateway.encoder import error_body
from raftkv.server.gateway.streams import StreamBody, StreamExchange, cede

_BEARER: Final = "Bearer"
_PASSED_ON: Final = ((GATEWAY, b"*/*"),)
_COOKIE: Final = "token"


class Sockets:
    """Answers handshakes for streaming calls.

    Arguments:
        limits: returns the limits of the server whose methods are called.
        open_exchange: creates the carrier of a call from its handshake and metadata.
        slices: runs the long work of the member.
    """

    def __init__(
        self,
        limits: Callable[[], ServerLimits],
        open_exchange: Callable[[HttpRequest, Headers], StreamExchange],
        slices: Slices,
    ) -> None:
        self._limits = limits
        self._open = open_exchange
        self._slices = slices

    def answer(self, request: HttpRequest, method: Method, route: Route) -> HttpResponse:
        """Accept or refuse one handshake.

        Arguments:
            request: websocket handshake.
            method, route: method and route of the path; the client streams.
        """
        refusal = handshake_refusal(request)
        if refusal is not None:
            return refusal
        headers = accepted(request)
        if request.header("sec-websocket-protocol").startswith(_BEARER):
            headers = (*headers, ("sec-websocket-protocol", _BEARER))
        socket = WebSocket(self._limits().http_body_bytes)
        body = self._answers(request, socket, method, route)
        return HttpResponse(101, body, headers, is_call=True, socket=socket)

    async def _answers(
        self, request: HttpRequest, socket: WebSocket, method: Method, route: Route
    ) -> AsyncIterator[bytes]:
        """Yield the lines of the call, which begins with the first request: nothing is held for it before."""
        requests = SocketRequests(socket, self._slices, queue_of(request.identity))
        try:
            async with asyncio.timeout(self._limits().http1_idle_timeout_s):
                message = await requests.next(method)
        except JsonError as error:
            yield error_body(Code.UNKNOWN, str(error)) + b"\n"
            return
        except TimeoutError:  # the client has sent no request
            return
        if message is None:
            return
        exchange = self._open(request, (*_PASSED_ON, *_authorization(request)))
        body = StreamBody(exchange, method.response, self._slices)
        try:
            exchange.feed(exchange.open(route, None), message, requests, method)
            async for line in body:
                yield line
        finally:
            await body.aclose()


class SocketRequests:
    """Requests of a client on a websocket, read like those of a body (``Requests``).

    Arguments:
        socket: provides the messages.
        slices: runs the long work of the member.
        queue: queue of the client (``rpc/shares``).
    """

    def __init__(self, socket: WebSocket, slices: Slices, queue: Identity) -> None:
        self._socket = socket
        self._slices = slices
        self._queue = queue
        self._requests: Requests | None = None

    async def next(self, method: Method) -> bytes | None:
        """Return the next request; None at the end.

        Arguments:
            method: method of the request.

        Raises:
            JsonError: the message is invalid.
        """
        while True:
            await cede(self._slices, self._queue)  # thousands may wait
            if self._requests is None or self._requests.are_over:
                message = await self._socket.take()
                if message is None:
                    return None
                self._requests = Requests(message, self._slices, self._queue)
            began_s = perf_counter()
            found = await self._requests.next(method)
            self._slices.spend(perf_counter() - began_s)
            if found is not None:
                return found


def _authorization(request: HttpRequest) -> Headers:
    """Return the token of a handshake as metadata: from its cookie, else its subprotocol, else its header."""
    value = request.header("authorization")
    _, is_named, token = request.header("sec-websocket-protocol").partition(_BEARER + ",")
    if is_named:
        value = f"{_BEARER} {token.strip()}"
    # As in Go, each part is read separately: other programs on the host may set cookies of any kind.
    for cookie in request.header("cookie").split(";"):
        name, _, text = cookie.partition("=")
        if name.strip() == _COOKIE:
            value = " ".join((_BEARER, text.strip().strip('"')))
            break
    return ((AUTHORIZATION, value.encode("latin-1", "replace")),) if value else ()
