"""Plain HTTP requests and responses, as the injected handler sees them, whichever HTTP version carried them."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final

from raftkv.rpc.shares import Identity

if TYPE_CHECKING:
    from raftkv.rpc.server.websocket import WebSocket

HttpHeaders = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request, whole.

    Attributes:
        method: ``GET``, ``POST``, …
        target: path and query, as sent.
        headers: names in lower case, in order.
        body: whole body, at most ``ServerLimits.http_body_bytes``.
        peer: address of the client.
        tls: True if it came encrypted.
        loopback: True if it came to a loopback address of this machine.
        certificate: verified, that the client has shown, as ``ssl.SSLSocket.getpeercert`` gives it; None: none.
        identity: of its connection (``raftkv.rpc.shares``).
        can_switch: whether its connection can become another protocol's, for which the client has asked.
    """

    method: str
    target: str
    headers: HttpHeaders = ()
    body: bytes = b""
    peer: str = ""
    tls: bool = False
    loopback: bool = False
    certificate: dict[str, Any] | None = field(default=None, repr=False)
    identity: Identity = ""
    can_switch: bool = False

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

        Arguments:
            name: in lower case.
            default: returned where there is none.
        """
        return next((value for key, value in self.headers if key == name), default)


_ABSOLUTE_FORM: Final = re.compile(r"https?://([^/?@]+)(.*)", re.IGNORECASE | re.DOTALL)


def origin_form(target: str, headers: HttpHeaders) -> tuple[str, HttpHeaders]:
    """Return the target of a request as path and query, and its headers with the host that the target names.

    Clients send a whole URL to what they take for a proxy, and its host counts, not the header's (RFC 9112, 3.2.2).

    Arguments:
        target, headers: as sent; a target of another form (``*``) stays as it is.
    """
    absolute = _ABSOLUTE_FORM.fullmatch(target)
    if absolute is None:
        return target, headers
    host, rest = absolute.groups()
    others = tuple(field for field in headers if field[0] != "host")
    return rest if rest.startswith("/") else "/" + rest, (("host", host), *others)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One response. A body that is an async iterator is sent piece by piece as it comes. Its date is added.

    Attributes:
        user: on whose behalf it was made, for the audit log; not sent. Empty: no user.
        is_call: whether a method's handler was asked: what looks at calls (``router.Around``) has seen it.
        socket: takes the connection over, with the body as its messages; of an answer 101 to a request that
            ``can_switch``.
    """

    status: int = 200
    body: bytes | AsyncIterator[bytes] = b""
    headers: HttpHeaders = field(default=(("content-type", "text/plain; charset=utf-8"),))
    user: bytes = b""
    is_call: bool = False
    socket: WebSocket | None = None


class HttpDate:
    """The present as the field ``Date`` has it, written once a second; every answer has one (RFC 9110, 6.6.1)."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def __call__(self) -> str:
        """Return the present, to the second."""
        second = int(time.time())
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True)
        return self._text


http_date: Final = HttpDate()


class Origins:
    """The origins whose web pages may call.

    A browser names the origin of the page with each request by which a page could do harm; no other client does.

    Arguments:
        allowed: ``scheme://host:port``, where a scheme's own port may be left out; ``*``: all.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(map(_usual_origin, allowed))

    @property
    def all(self) -> bool:
        """Whether pages of every origin may call."""
        return "*" in self._allowed

    def allows(self, origin: str) -> bool:
        """Return whether the pages of an origin may call; ``null`` is the origin of pages that have none."""
        return self.all or _usual_origin(origin) in self._allowed


_SCHEME_PORTS = {"http": ":80", "https": ":443"}


def _usual_origin(origin: str) -> str:
    """Return an origin as browsers write it: lower case, without the port of its scheme."""
    origin = origin.lower()
    return origin.removesuffix(_SCHEME_PORTS.get(origin.partition(":")[0], ""))


async def close_body(body: bytes | AsyncIterator[bytes]) -> None:
    """End a body that is made as it is sent: the client has it all, or has left.

    Arguments:
        body: of a response; one of bytes needs no end.
    """
    aclose = getattr(body, "aclose", None)
    if aclose is not None:
        await aclose()


HttpHandler = Callable[[HttpRequest], Awaitable[HttpResponse]]


def text_response(status: int, text: str) -> HttpResponse:
    """Return a short plain-text response.

    Arguments:
        status: of HTTP.
        text: the body.
    """
    return HttpResponse(status, text.encode() + b"\n")
