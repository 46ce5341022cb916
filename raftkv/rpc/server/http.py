"""Plain HTTP requests and responses, as the injected handler sees them, whichever HTTP version carried them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

HttpHeaders = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request, whole.

    Attributes:
        method: ``GET``, ``POST``, …
        target: request target as sent: path and query.
        headers: names in lower case, in order.
        body: whole body, at most ``ServerLimits.http_body_bytes``.
        peer: address of the client.
        tls: True if it came encrypted.
    """

    method: str
    target: str
    headers: HttpHeaders = ()
    body: bytes = b""
    peer: str = ""
    tls: bool = False

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        """The target's query, without the question mark."""
        return self.target.partition("?")[2]

    def header(self, name: str, default: str = "") -> str:
        """Return the first header of that (lower-case) name.

        Args:
            name: in lower case.
            default: returned where there is none.
        """
        return next((value for key, value in self.headers if key == name), default)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One response. A body that is an async iterator is sent piece by piece as it comes."""

    status: int = 200
    body: bytes | AsyncIterator[bytes] = b""
    headers: HttpHeaders = field(default=(("content-type", "text/plain; charset=utf-8"),))


HttpHandler = Callable[[HttpRequest], Awaitable[HttpResponse]]


def text_response(status: int, text: str) -> HttpResponse:
    """Return a short plain-text response.

    Args:
        status: of HTTP.
        text: the body.
    """
    return HttpResponse(status, text.encode() + b"\n")
