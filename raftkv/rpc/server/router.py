"""Routes from paths to handlers, and refusals of requests without a route.

Texts and codes of refusals are grpc-go's (``server.go`` handleStream, ``internal/transport/http2_server.go``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from raftkv.rpc.framing import ENCODINGS, decompressor_missing
from raftkv.rpc.server.http import Origins
from raftkv.rpc.status import Code, Headers, RpcError, status_headers

SHOWN_BYTES = 200
"""Bytes of a field that a refusal repeats at most: a client can send 4 KB with one octet, and need not read."""

_GRPC = b"application/grpc"
_GRPC_AND_MORE = (b"application/grpc+", b"application/grpc;")


def is_grpc(content_type: bytes) -> bool:
    """Return whether a content type is gRPC's. As in grpc-go any subtype is accepted; messages are always protobuf.

    Arguments:
        content_type: value of the request; empty: none.
    """
    return content_type == _GRPC or content_type.startswith(_GRPC_AND_MORE)


ACCEPTED: Headers = ((b"grpc-accept-encoding", b"identity,gzip"),)
"""Sent to a client that uses another encoding, as gRPC's protocol requires; grpc-go leaves it out."""


class Kind(Enum):
    """How a handler is called: ``handler(call, message)``, ``await handler(call)``, or ``handler(call)`` at the start.

    A unary method with a coroutine is called like any other unary method: the call starts the task.
    """

    UNARY = "unary"
    STREAM = "stream"
    LISTENED = "listened"


Around = Callable[[str, Kind, Callable[..., Any]], Callable[..., Any]]
"""``around(path, kind, handler)`` returns a wrapper of the handler. The wrapper may refuse a call by raising
``RpcError`` (or an error that the server translates); otherwise it calls ``handler`` the same way."""


class CallCounts:
    """How often a method was called, and how its calls ended: plain integers, two increments per call on the hot path.

    Attributes:
        started: calls whose headers have arrived.
        answered: calls that ended with OK.
        received, sent: messages of streams. A unary call has one of each, which are not counted here.
        failed: calls that ended otherwise, by gRPC code; see ``count_failure``.
    """

    __slots__ = ("answered", "failed", "received", "sent", "started")

    def __init__(self) -> None:
        self.started = self.answered = self.received = self.sent = 0
        self.failed: dict[int, int] = {}

    def count_failure(self, code: int) -> None:
        """Count a call that ended with a code other than OK.

        Arguments:
            code: gRPC code; unknown codes count as UNKNOWN.
        """
        code = code if 0 < code <= Code.UNAUTHENTICATED else Code.UNKNOWN
        self.failed[code] = self.failed.get(code, 0) + 1


@dataclass(frozen=True, slots=True)
class Route:
    """One method.

    Attributes:
        path: ``/package.Service/Method``.
        open: creates the call object: ``open(core, stream_id, headers, route)``.
        handler: run by the call object.
        counts: counts of its calls.
        is_packed: whether messages of the call may be compressed.
    """

    path: str
    open: Callable[..., Any]
    handler: Callable[..., Any]
    counts: CallCounts = field(default_factory=CallCounts, compare=False)
    is_packed: bool = False


@dataclass(slots=True)
class Router:
    """The methods of a server, its plain HTTP handler, and the web pages that may call.

    Attributes:
        routes, packed_routes: routes by path; the second for calls whose messages may be compressed.
        on_refused: called for calls that reach no handler, with peer, path and gRPC code.
    """

    routes: dict[bytes, Route] = field(default_factory=dict)
    packed_routes: dict[bytes, Route] = field(default_factory=dict)
    services: set[str] = field(default_factory=set)
    http: Route | None = None
    origins: Origins = field(default_factory=Origins)
    on_refused: Callable[[Any, str, int], None] | None = None

    def add(self, route: Route) -> None:
        """Register a method. Raises ValueError if the path is taken or is not a gRPC path."""
        service, slash, method = route.path[1:].rpartition("/")
        key = route.path.encode("ascii")
        if not (route.path.startswith("/") and service and slash and method):
            raise ValueError(f"not a gRPC path: {route.path!r}")
        if key in self.routes:
            raise ValueError(f"{route.path} is registered already")
        self.routes[key] = route
        self.packed_routes[key] = replace(route, is_packed=True)
        self.services.add(service)

    def unknown(self, path: bytes) -> RpcError:
        """Return the UNIMPLEMENTED error for a path without a route."""
        before, slash, last = path.removeprefix(b"/").rpartition(b"/")
        if not slash or not path.startswith(b"/"):
            return RpcError(Code.UNIMPLEMENTED, f'malformed method name: "{_shown(path, "utf-8")}"')
        service = _shown(before, "utf-8")
        if service in self.services:
            return RpcError(Code.UNIMPLEMENTED, f"unknown method {_shown(last, 'utf-8')} for service {service}")
        return RpcError(Code.UNIMPLEMENTED, f"unknown service {service}")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A response to a request that reaches no handler: HTTP status, gRPC status, and further header fields."""

    http_status: int
    error: RpcError
    fields: Headers = ()

    def headers(self) -> Headers:
        """Return the trailers-only response."""
        head = ((b":status", b"%d" % self.http_status), (b"content-type", b"application/grpc"))
        return head + self.fields + status_headers(self.error.code, self.error.text)


def refuse(fields: dict[bytes, bytes], route: Route | None, router: Router) -> Refusal | None:
    """Return why a gRPC request is refused; None: it is valid. The order is grpc-go's, which does not check origins.

    Arguments:
        fields: headers of the request, by name.
        route: route of its path, or None.
        router: router of the server.
    """
    content_type = fields.get(b"content-type", b"")
    if not is_grpc(content_type):
        text = f'invalid gRPC request content-type "{_shown(content_type)}"'
        return Refusal(415, RpcError(Code.INVALID_ARGUMENT, text))
    method = fields[b":method"]
    if method != b"POST":
        text = f'Received a HEADERS frame with :method "{_shown(method)}" which should be POST'
        return Refusal(405, RpcError(Code.INTERNAL, text))
    origin = fields.get(b"origin")
    if origin is not None and not router.origins.allows(origin.decode("latin-1")):
        text = f'web pages may not call this server: origin "{_shown(origin)}" is not allowed'
        return Refusal(403, RpcError(Code.PERMISSION_DENIED, text))
    if route is None:
        return Refusal(200, router.unknown(fields.get(b":path", b"")))
    encoding = fields.get(b"grpc-encoding", b"identity")
    if encoding not in ENCODINGS:
        return Refusal(200, decompressor_missing(encoding[:SHOWN_BYTES]), ACCEPTED)
    return None


def _shown(value: bytes, encoding: str = "latin-1") -> str:
    return value[:SHOWN_BYTES].decode(encoding, "replace")
