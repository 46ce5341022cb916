"""Which handler a path has, and how a request that has none is refused.

Texts and codes of refusals are grpc-go's (``server.go`` handleStream, ``internal/transport/http2_server.go``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raftkv.rpc.framing import decompressor_missing
from raftkv.rpc.status import Code, Headers, RpcError, status_headers

GRPC_CONTENT_TYPES = frozenset((b"application/grpc", b"application/grpc+proto"))


@dataclass(frozen=True, slots=True)
class Route:
    """One method.

    Attributes:
        path: ``/package.Service/Method``.
        open: makes the call object: ``open(core, stream_id, headers, route)``.
        handler: what the call object runs.
    """

    path: str
    open: Callable[..., Any]
    handler: Callable[..., Any]


@dataclass(slots=True)
class Router:
    """The methods of a server, and its plain HTTP handler."""

    routes: dict[bytes, Route] = field(default_factory=dict)
    services: set[str] = field(default_factory=set)
    http: Route | None = None

    def add(self, route: Route) -> None:
        """Register a method; ValueError if the path is taken or is not a gRPC path."""
        service, slash, method = route.path[1:].rpartition("/")
        key = route.path.encode("ascii")
        if not (route.path.startswith("/") and service and slash and method):
            raise ValueError(f"not a gRPC path: {route.path!r}")
        if key in self.routes:
            raise ValueError(f"{route.path} is registered already")
        self.routes[key] = route
        self.services.add(service)

    def unknown(self, path: bytes) -> RpcError:
        """Return the UNIMPLEMENTED error for a path without a route."""
        text = path.decode("utf-8", "replace")
        service, slash, method = text.removeprefix("/").rpartition("/")
        if not slash or not text.startswith("/"):
            return RpcError(Code.UNIMPLEMENTED, f'malformed method name: "{text}"')
        if service in self.services:
            return RpcError(Code.UNIMPLEMENTED, f"unknown method {method} for service {service}")
        return RpcError(Code.UNIMPLEMENTED, f"unknown service {service}")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A response to a request that no handler sees: HTTP status and gRPC status."""

    http_status: int
    error: RpcError

    def headers(self) -> Headers:
        """Return the trailers-only response."""
        head = ((b":status", b"%d" % self.http_status), (b"content-type", b"application/grpc"))
        return head + status_headers(self.error.code, self.error.text)


def refuse(fields: dict[bytes, bytes], route: Route | None, router: Router) -> Refusal | None:
    """Say what is wrong with a gRPC request, in grpc-go's order; None if nothing is.

    Args:
        fields: headers of the request, by name.
        route: of its path; None: there is none.
        router: knows all of them.
    """
    content_type = fields.get(b"content-type", b"")
    if content_type not in GRPC_CONTENT_TYPES:
        text = f'invalid gRPC request content-type "{content_type.decode("latin-1")}"'
        return Refusal(415, RpcError(Code.INVALID_ARGUMENT, text))
    method = fields[b":method"]
    if method != b"POST":
        text = f'Received a HEADERS frame with :method "{method.decode("latin-1")}" which should be POST'
        return Refusal(405, RpcError(Code.INTERNAL, text))
    if route is None:
        return Refusal(200, router.unknown(fields.get(b":path", b"")))
    encoding = fields.get(b"grpc-encoding", b"identity")
    if encoding != b"identity":
        return Refusal(200, decompressor_missing(encoding))
    return None
