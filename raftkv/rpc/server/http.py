"""Plain HTTP requests and responses as the HTTP handler sees them, for all HTTP versions."""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from typing import Any, Final

from raftkv.rpc.shares import Identity

HttpHeaders = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One complete request.

    Attributes:
        method: ``GET``, ``POST``, …
        target: path and query, as sent.
        headers: names in lower case, in order.
        body: whole body, at most ``ServerLimits.http_body_bytes``.
        peer: address of the client.
        tls: True if it arrived encrypted.
        loopback: True if it arrived at a loopback address of this machine.
        certificate: verified client certificate, as ``ssl.SSLSocket.getpeercert`` returns it; None: none.
        identity: identity of its connection (``raftkv.rpc.shares``).
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

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        """The target's query, without the question mark."""
        return self.target.partition("?")[2]

    def header(self, name: str, default: str = "") -> str:
        """Return the first header with a name.

        Arguments:
            name: in lower case.
            default: returned if there is no such header.
        """
        return next((value for key, value in self.headers if key == name), default)


_ABSOLUTE_FORM: Final = re.compile(r"https?://([^/?@]+)(.*)", re.IGNORECASE | re.DOTALL)


def origin_form(target: str, headers: HttpHeaders) -> tuple[str, HttpHeaders]:
    """Return the target of a request as path and query, and its headers with the host of the target.

    Clients send an absolute URL to a proxy, or to what they think is one. The host of the URL then overrides the
    ``Host`` header (RFC 9112, 3.2.2).

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
    """One response. If the body is an async iterator, its pieces are sent as they come. The date is added when sent.

    Attributes:
        user: user that the request was served for, for the audit log; not sent. Empty: no user.
        is_call: whether a method's handler was called, so that wrappers of calls (``router.Around``) have seen it.
    """

    status: int = 200
    body: bytes | AsyncIterator[bytes] = b""
    headers: HttpHeaders = field(default=(("content-type", "text/plain; charset=utf-8"),))
    user: bytes = b""
    is_call: bool = False


def http_date() -> str:
    """Return the current time as a ``Date`` field. Every answer has it (RFC 9110, 6.6.1)."""
    return _date_of(int(time.time()))


@lru_cache(1)
def _date_of(second: int) -> str:
    return formatdate(second, usegmt=True)


class Origins:
    """The origins whose web pages may call.

    A browser names the origin of a page in each request by which a page could do harm; no other client does.

    Arguments:
        allowed: ``scheme://host:port``, where the default port of the scheme may be left out; ``*``: all.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(map(_usual_origin, allowed))

    @property
    def all(self) -> bool:
        """Whether pages of every origin may call."""
        return "*" in self._allowed

    def allows(self, origin: str) -> bool:
        """Return whether pages of an origin may call; ``null`` is the origin of pages without one."""
        return self.all or _usual_origin(origin) in self._allowed


_SCHEME_PORTS = {"http": ":80", "https": ":443"}


def _usual_origin(origin: str) -> str:
    """Return an origin as browsers write it: in lower case, without the default port of its scheme."""
    origin = origin.lower()
    return origin.removesuffix(_SCHEME_PORTS.get(origin.partition(":")[0], ""))


class HostCheck:
    """Checks the host names of plain-text requests.

    Arguments:
        whitelist: names that pass at every address; ``*``: all. Empty: at loopback addresses only ``own`` names, IP
            addresses and localhost pass, elsewhere all.
        own: names of this member.
    """

    def __init__(self, whitelist: Iterable[str], own: Iterable[str] = ()) -> None:
        self._whitelist = frozenset(map(str.lower, whitelist))
        self._own = frozenset(map(str.lower, own))

    def allows(self, request: HttpRequest, name: str) -> bool:
        """Return whether a request with a host name is allowed."""
        name = name.lower()
        if request.tls or "*" in self._whitelist or name in self._whitelist:
            return True
        if self._whitelist:
            return False
        return not request.loopback or name in self._own or _is_nobodys(name)

    def proves(self, request: HttpRequest, name: str) -> bool:
        """Return whether the host name of a request is this member's, so that no stranger's page can have it."""
        name = name.lower()
        return request.tls or name in self._whitelist or name in self._own or _is_nobodys(name)


def _is_nobodys(name: str) -> bool:
    """Return whether no stranger, not even one on the local network (mDNS, DHCP), can point this name here."""
    if name in ("", "localhost", "localhost."):
        return True
    try:
        ipaddress.ip_address(name.removesuffix(".").replace("%25", "%", 1))
    except ValueError:
        return False
    return True


def host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets.

    >>> host_name("[::1]:2379"), host_name("a.example")
    ('::1', 'a.example')
    """
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        return name if not rest or rest.startswith(":") else host
    return host.partition(":")[0]


async def close_body(body: bytes | AsyncIterator[bytes]) -> None:
    """Close a body that is generated while it is sent: the client has all of it, or has left.

    Arguments:
        body: body of a response; nothing is done for bytes.
    """
    aclose = getattr(body, "aclose", None)
    if aclose is not None:
        await aclose()


HttpHandler = Callable[[HttpRequest], Awaitable[HttpResponse]]


def text_response(status: int, text: str) -> HttpResponse:
    """Return a short plain-text response.

    Arguments:
        status: HTTP status.
        text: the body.
    """
    return HttpResponse(status, text.encode() + b"\n")


def refuse_host(request: HttpRequest) -> HttpResponse | None:
    """Return the answer to a request with a host name that a stranger can point here; None: it may be answered.

    For listeners without a list of names: this machine's own passes.
    """
    if HostCheck((), own=(socket.gethostname(),)).allows(request, host_name(request.header("host"))):
        return None
    return text_response(421, "the Host header names another machine; ask by this one's name or address")
