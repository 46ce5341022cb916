"""The ``/v3`` paths: JSON in, the same handlers as gRPC, JSON out.

    POST /v3/kv/put {"key":"Zm9v"}  ->  binding -> decoder -> exchange: guard, audit, handler -> encoder -> 200 {...}

One handler serves all paths, which are declared in ``proto/`` (``raftkv.pb.bindings``). Statuses, bodies and headers of
answers are those of etcd 3.5, whose gateway is grpc-gateway 1.16. Other paths go to the next handler.

A call through the gateway is never identified by the certificate of its connection (CVE-2018-16886): it is marked as
forwarded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Final
from urllib.parse import quote, unquote

from raftkv.loop.scheduler import Slices
from raftkv.pb.bindings import BINDINGS
from raftkv.pb.services import Method
from raftkv.rpc.server.calls import Peer
from raftkv.rpc.server.http import HttpHandler, HttpRequest, HttpResponse
from raftkv.rpc.server.router import Route
from raftkv.rpc.server.server import Server
from raftkv.rpc.shares import Identity, queue_of
from raftkv.rpc.status import Code, Headers, RpcError
from raftkv.server.auth.callers import AUTHORIZATION, GATEWAY
from raftkv.server.gateway import openapi
from raftkv.server.gateway.decoder import JsonError, Requests, decode_base64
from raftkv.server.gateway.encoder import SMALL_BYTES, encode_large, encoder_of, error_body, http_status
from raftkv.server.gateway.exchange import Chunks, Exchange, LargeBody
from raftkv.server.gateway.streams import StreamBody, StreamExchange

PREFIX: Final = "/v3/"
_BETA: Final = "/v3beta/"
"""etcd serves everything at this prefix too."""

_METADATA: Final = "grpc-metadata-"
_TIMEOUT: Final = "grpc-timeout"
_TRACE: Final = frozenset(("traceparent", "tracestate"))
"""W3C Trace Context: headers that become gRPC metadata of the same names."""
_PASSED_ON: Final = ((GATEWAY, b"*/*"),)
_DIRTY: Final = re.compile(r"/(?:/|\.\.?(?:/|\Z))")
_PATH_SAFE: Final = "/!$&'()*+,;=:@~%"
PATH_CHARACTERS_MAX: Final = 256
"""Longer than the path of any method, however it is encoded."""

_TIMEOUT_TEXT: Final = re.compile(r"([+-]?[0-9]{1,19})([HMSmun])")
_UNIT_NS: Final = {"H": 3600 * 10**9, "M": 60 * 10**9, "S": 10**9, "m": 10**6, "u": 10**3, "n": 1}

FEW_PIECES: Final = 64
"""Most pieces of a small answer, such as a list of roles, whose total length is checked; more pieces count as large."""

_JSON: Final = (("content-type", "application/json"),)
_ANSWERED: Final = (*_JSON, ("grpc-metadata-content-type", "application/grpc"))
_PAGE: Final = (("content-type", "text/html; charset=utf-8"),)
_TEXT: Final = (("content-type", "text/plain; charset=utf-8"), ("x-content-type-options", "nosniff"))


class Gateway:
    """Answers the paths of the gateway; other paths go to another handler.

    Arguments:
        otherwise: answers paths that are not below ``/v3``.
        slices: runs the long work of the member.
    """

    def __init__(self, otherwise: HttpHandler, slices: Slices) -> None:
        self._otherwise = otherwise
        self._slices = slices
        self._methods: dict[str, tuple[Method, Route]] = {}
        self._server: Server | None = None

    def serve(self, server: Server) -> None:
        """Serve the methods of a server, which must all be registered.

        Arguments:
            server: server whose handlers are called.
        """
        routes: Mapping[bytes, Route] = server.router.routes
        self._server = server
        self._methods = {
            path: (method, routes[method.path.encode()])
            for path, method in BINDINGS.items()
            if method.path.encode() in routes
        }

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer one request.

        Arguments:
            request: request for any path.
        """
        path = request.path
        if path.startswith(_BETA):
            path = PREFIX + path[len(_BETA) :]
        if _DIRTY.search(path) is not None and path.startswith("/"):
            return _moved(clean(path), request)
        if not path.startswith(PREFIX):
            return _moved("/v3/", request) if path == "/v3" else await self._otherwise(request)
        found = self._methods.get(path)
        if found is None and len(path) <= PATH_CHARACTERS_MAX:
            found = self._methods.get(unquote(path))
        if found is None and path == openapi.PATH and request.method in ("GET", "HEAD"):
            return HttpResponse(200, openapi.document(), _JSON)
        if found is None:
            return HttpResponse(404, b"Not Found\n", _TEXT)
        if request.method == "HEAD":  # as etcd 3.7; 405 before
            return HttpResponse(400, b"", _JSON)
        if request.method != "POST":
            return HttpResponse(405, b"Method Not Allowed\n", _TEXT)
        method, route = found
        try:
            if method.server_streaming:
                return await self._stream(request, method, route)
            return await self._unary(request, method, route)
        except RpcError as error:
            return _failed(error)

    async def _unary(self, request: HttpRequest, method: Method, route: Route) -> HttpResponse:
        headers, timeout_s = call_headers(request.headers)
        message = await self._only_request(request, method)
        exchange = Exchange(self._called, _peer(request), headers)
        try:
            exchange.run(exchange.open(route, timeout_s), message)
            pieces = await exchange.outcome()
        except RpcError as error:
            exchange.close()
            return _failed(error, is_call=True)
        except BaseException:
            exchange.close()
            raise
        if len(pieces) <= FEW_PIECES and sum(map(len, pieces)) <= SMALL_BYTES:
            message = b"".join(pieces)  # ``close`` frees the pieces
            exchange.close()
            answer = method.response.FromString(message)
            body = encoder_of(method.response.DESCRIPTOR)(answer).encode()
            return HttpResponse(200, body, _ANSWERED, is_call=True)
        text = encode_large(method.response.DESCRIPTOR, pieces)
        return HttpResponse(
            200, LargeBody(exchange, Chunks(text, self._slices, exchange.queue)), _ANSWERED, is_call=True
        )

    async def _stream(self, request: HttpRequest, method: Method, route: Route) -> HttpResponse:
        headers, timeout_s = call_headers(request.headers)
        message: bytes | None
        rest: Requests | None = None
        if method.client_streaming:
            requests = Requests(request.body, self._slices, _queue(request))
            try:
                message = await requests.next(method)
            except JsonError as error:
                raise RpcError(Code.UNKNOWN, str(error)) from None
            rest = None if requests.are_over else requests
        else:
            message = await self._only_request(request, method)
        exchange = StreamExchange(self._called, _peer(request), headers)
        try:
            exchange.feed(exchange.open(route, timeout_s), message, rest, method)
            await exchange.begun()
            return self._begun(exchange, method)
        except BaseException:
            exchange.close()
            raise

    def _begun(self, exchange: StreamExchange, method: Method) -> HttpResponse:
        error = exchange.early_error
        if error is not None and error.code == Code.DEADLINE_EXCEEDED:
            exchange.close()
            return _failed(error, is_call=True)
        body = StreamBody(exchange, method.response, self._slices)
        status = 200 if error is None else http_status(error.code)
        return HttpResponse(status, body, _ANSWERED if exchange.has_sent else _JSON, is_call=True)

    async def _only_request(self, request: HttpRequest, method: Method) -> bytes:
        try:
            return await Requests(request.body, self._slices, _queue(request)).next(method) or b""
        except JsonError as error:
            raise RpcError(Code.INVALID_ARGUMENT, str(error)) from None

    @property
    def _called(self) -> Server:
        """The server whose methods are called."""
        if self._server is None:
            raise RuntimeError("the gateway serves no methods yet")
        return self._server


def _peer(request: HttpRequest) -> Peer:
    return Peer(request.peer, request.certificate, request.tls, request.loopback, identity=request.identity)


def call_headers(fields: tuple[tuple[str, str], ...]) -> tuple[Headers, float | None]:
    """Return the metadata of the call for an HTTP request, and its timeout in seconds, if it has one.

    Arguments:
        fields: headers of the request, names in lower case.

    Raises:
        RpcError: a forwarded field is invalid.
    """
    headers: list[tuple[bytes, bytes]] = []
    timeout_s: float | None = None
    for name, value in fields:
        if name == "authorization":
            headers.append((AUTHORIZATION, value.encode("latin-1")))
        elif name in _TRACE:
            headers.append((name.encode("ascii"), value.encode("latin-1")))
        elif name.startswith("grpc-"):
            if name.startswith(_METADATA):
                headers.append(_metadata(name, value))
            elif name == _TIMEOUT and timeout_s is None:
                timeout_s = _timeout(value)
    return (*_PASSED_ON, *headers), timeout_s


def _metadata(name: str, value: str) -> tuple[bytes, bytes]:
    raw = value.encode("latin-1")
    if name.endswith("-bin"):
        try:
            decode_base64(raw if len(raw) % 4 == 0 else raw + b"=" * (-len(raw) % 4))
        except JsonError as error:
            raise RpcError(Code.INVALID_ARGUMENT, f"invalid binary header {name.title()}: {error}") from None
    return name[len(_METADATA) :].encode("latin-1"), raw


def _timeout(value: str) -> float | None:
    """Return the seconds of a timeout header by Go's rules: 64-bit nanoseconds, and 0 means no limit.

    Raises:
        RpcError: it is not a timeout, or has passed.
    """
    match = _TIMEOUT_TEXT.fullmatch(value)
    number = int(match[1]) if match is not None else 1 << 63
    if match is None or not -(1 << 63) <= number < 1 << 63:
        if not value:
            return None
        raise RpcError(Code.INVALID_ARGUMENT, f"invalid grpc-timeout: {value}")
    nanoseconds = (number * _UNIT_NS[match[2]] + (1 << 63)) % (1 << 64) - (1 << 63)
    if nanoseconds < 0:
        raise RpcError(Code.DEADLINE_EXCEEDED, "context deadline exceeded")
    return nanoseconds / 1e9 or None


def clean(path: str) -> str:
    """Return a path without empty parts, ``.`` and ``..``, as in the redirects of Go's servers.

    >>> clean("//v3/./kv/../kv/range"), clean("/../v3//"), clean("/v3/.")
    ('/v3/kv/range', '/v3/', '/v3')
    """
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts) + ("/" if parts and path.endswith("/") else "")


def _failed(error: RpcError, *, is_call: bool = False) -> HttpResponse:
    return HttpResponse(http_status(error.code), error_body(error.code, error.text), _JSON, is_call=is_call)


def _moved(path: str, request: HttpRequest) -> HttpResponse:
    location = quote(path, _PATH_SAFE, encoding="latin-1")
    location = f"{location}?{request.query}" if request.query else location
    if request.method not in ("GET", "HEAD"):
        return HttpResponse(301, b"", (("location", location),))
    # The page of Go's servers.
    shown = escape(location).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
    body = f'<a href="{shown}">Moved Permanently</a>.\n\n'.encode() if request.method == "GET" else b""
    return HttpResponse(301, body, (("location", location), *_PAGE))


def _queue(request: HttpRequest) -> Identity:
    """Return the queue of a client whose user is not known yet."""
    return queue_of(request.identity)
