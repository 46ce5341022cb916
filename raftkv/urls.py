"""Parses URLs and addresses as Go's ``net/url`` and etcd's flags, calls and clients do.

>>> parse_url("http://[fe80::1%25eth0]:2380").host
'[fe80::1%eth0]:2380'
>>> split_url("unix://MySock:007")
('unix', 'MySock:007', 0)
>>> split_address("[::1]:2379"), join_address("::1", 2379)
(('::1', 2379), '[::1]:2379')
>>> parse_endpoint("127.0.0.1:2379")
Endpoint(text='127.0.0.1:2379', host='127.0.0.1', port=2379, secure=None, path='')
>>> parse_endpoint("https://[::1]").secure
True
>>> parse_endpoint("unix:///run/raftkv.sock:1").target
'unix:/run/raftkv.sock:1'

A text that Go refuses must not become a peer URL: a voter that no member can reach may cost a cluster its quorum.
Errors about members' URLs use Go's words. Two rules differ from etcd's: a port is at most 65535, and an endpoint must
not contain user info, which etcd's client silently drops.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from raftkv.errors import ConfigError

SCHEMES: Final = ("http", "https", "unix", "unixs")
PORT_MAX: Final = 65535
DEFAULT_CLIENT_PORT: Final = 2379

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_PORT: Final = re.compile(r"(:[0-9]*)?", re.ASCII)
_USER: Final = re.compile(r"[A-Za-z0-9\-._:~!$&'()*+,;=%@]*")
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2}).{0,2}", re.DOTALL)
_BAD_HOST_ESCAPE: Final = re.compile(r"%(?!25)[0-7][0-9A-Fa-f]")
_BAD_ZONE_ESCAPE: Final = re.compile(
    r"%(?!2[0-9A-Ca-cEe]|3[A-Ea-e]|[3][0-9]|4[1-9A-Fa-f]|5[0-9AaBbDdFf]|6[1-9A-Fa-f]|7[0-9AaEe])..", re.DOTALL
)
_BAD_HOST: Final = re.compile(r"""[^A-Za-z0-9\-_.~!$&'()*+,;=:\[\]<>"%\x80-\U0010ffff]""")
_SPACE: Final = (
    " \t\n\v\f\r\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)
"""Characters that Go's TrimSpace removes. Python's ``strip`` also removes some control characters."""


@dataclass(frozen=True, slots=True)
class URL:
    """The parts of a URL.

    Attributes:
        scheme: scheme in lower case; empty: none.
        host: host with its port, unescaped.
        path: path as written.
        has_user: whether the URL has user info (a part before ``@``).
        rest: text after the path, or the whole text of an opaque URL.
    """

    scheme: str = ""
    host: str = ""
    path: str = ""
    has_user: bool = False
    rest: str = ""


def parse_url(text: str) -> URL:
    """Parse a URL as Go does.

    Raises:
        ConfigError: the URL is malformed; the text is Go's.
    """
    before, _, fragment = text.partition("#")
    try:
        url = _parse(before)
        _check_escapes(fragment)
    except ValueError as error:
        raise ConfigError(f'parse "{text}": {error}') from None
    return url


def _parse(text: str) -> URL:
    if _CONTROL.search(text):
        raise ValueError("net/url: invalid control character in URL")
    match = _SCHEME.match(text)
    if match is None and text.startswith(":"):
        raise ValueError("missing protocol scheme")
    scheme = match[1].lower() if match else ""
    rest, _, query = text[match.end() if match else 0 :].partition("?")
    if not rest.startswith("/"):
        if scheme:
            return URL(scheme, rest=rest or query)
        if ":" in rest.partition("/")[0]:
            raise ValueError("first path segment in URL cannot contain colon")
    host, user, has_user = "", "", ""
    if rest.startswith("//") and (scheme or not rest.startswith("///")):
        authority, slash, path = rest[2:].partition("/")
        user, has_user, host = authority.rpartition("@")
        host, rest = _host(host), slash + path
        if not _USER.fullmatch(user):
            raise ValueError("net/url: invalid userinfo")
        _check_escapes(user)
    _check_escapes(rest)
    return URL(scheme, host, rest, bool(has_user), query)


def _host(text: str) -> str:
    """Return the host with its port, unescaped."""
    if text.startswith("["):
        inner, bracket, port = text.rpartition("]")
        if not bracket:
            raise ValueError("missing ']' in host")
    else:
        inner, colon, port = text.rpartition(":")
        port = colon + port if colon else ""
    if not _PORT.fullmatch(port):
        raise ValueError(f'invalid port "{port}" after host')
    zone = inner.find("%25") if text.startswith("[") else -1
    for part, bad_escape in (
        (text if zone < 0 else inner[:zone], _BAD_HOST_ESCAPE),
        ("" if zone < 0 else inner[zone:], _BAD_ZONE_ESCAPE),
    ):
        _check_escapes(part)
        if match := bad_escape.search(part):
            raise ValueError(f'invalid URL escape "{match[0]}"')
        if match := _BAD_HOST.search(part):
            raise ValueError(f'invalid character "{match[0]}" in host name')
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise ValueError("the host is not UTF-8") from None


def _check_escapes(text: str) -> None:
    if match := _BAD_ESCAPE.search(text):
        raise ValueError(f'invalid URL escape "{match[0]}"')


def split_host_port(text: str) -> tuple[str, str]:
    """Return the host, without brackets, and the port, which may be empty; as Go's ``net.SplitHostPort``.

    Raises:
        ValueError: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or any(map(inner.__contains__, "[]")) or (":" in inner and inner == host):
        raise ValueError('not "host:port"')
    return inner, port


def _is_port(text: str) -> bool:
    """Return whether a text is a port number. Unlike ``int``, accept only ASCII digits, in any number."""
    digits = text.lstrip("0") or "0"
    return bool(text) and text.isascii() and text.isdigit() and len(digits) <= 5 and int(digits) <= PORT_MAX


def split_address(text: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of ``host:port``; the host may be empty.

    Raises:
        ValueError: the text has another form.
    """
    host, port = split_host_port(text)
    if not _is_port(port):
        raise ValueError('not "host:port"')
    return host, int(port)


def join_address(host: str, port: int | str) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_url(text: str) -> str:
    """Return the URL of a member after checking it, in the same order as etcd.

    The URL of a socket file may be ``unix:///absolute/path``, as in etcd since 3.5.10.

    Raises:
        ConfigError: the URL is malformed; the text is etcd's.
    """
    url = parse_url(text)
    if url.scheme not in SCHEMES:
        raise ConfigError(f"URL scheme must be http, https, unix, or unixs: {text}")
    if url.scheme.startswith("unix") and not url.host and len(url.path) > 1:
        return text
    try:
        _, port = split_host_port(url.host)
    except ValueError:
        raise ConfigError(f'URL address does not have the form "host:port": {text}') from None
    if url.path:
        raise ConfigError(f"URL must not contain a path: {text}")
    if not url.scheme.startswith("unix") and not _is_port(port or "0"):
        raise ConfigError(f"the port of a URL is at most {PORT_MAX}: {text}")
    return text


def parse_urls(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of members' URLs.

    Returns:
        The URLs, sorted and without duplicates: ids are computed and lists are printed in this order.

    Raises:
        ConfigError: a URL is malformed; the text is etcd's.
    """
    check_unicode(text)
    return tuple(sorted({check_url(part.strip(_SPACE)) for part in text.split(",")}))


def check_unicode(*texts: str) -> None:
    """Refuse bytes of a command line that are not UTF-8: ids are hashes of texts, and members exchange the texts."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            shown = text.encode("utf-8", "backslashreplace").decode()
            raise ConfigError(f"URLs and names of members must be UTF-8: {shown}") from None


def split_url(url: str) -> tuple[str, str, int]:
    """Return the scheme, the host (in lower case, without brackets) and the port of a checked URL.

    For a socket file, the host is its path as written, and the port is 0.
    """
    parts = parse_url(url)
    if parts.scheme.startswith("unix"):
        return parts.scheme, parts.host or parts.path, 0
    try:
        host, port = split_host_port(parts.host)
    except ValueError:
        host, port = parts.host.strip("[]"), ""
    return parts.scheme, host.lower(), int(port or 0)


def comparable(url: str) -> tuple[str, str, int]:
    """Return a checked URL in a form for comparisons, in which localhost equals 127.0.0.1."""
    scheme, host, port = split_url(url)
    return scheme, "127.0.0.1" if host == "localhost" else host, port


# -- endpoints ------------------------------------------------------------------------------------------------------
#
# Addresses at which clients find members, parsed as etcd's client parses them.


@dataclass(frozen=True)
class Endpoint:
    """The address of a member, for clients.

    Attributes:
        text: address as written.
        host, port: host and port; ``localhost`` and 2379 for a socket file.
        secure: whether to use TLS; None if the text does not say: then the client's TLS settings decide.
        path: path of the socket file; empty: not a socket file.
    """

    text: str
    host: str
    port: int
    secure: bool | None
    path: str = ""

    @property
    def target(self) -> str:
        """``host:port``, or ``unix:`` and the path of a socket file."""
        return f"unix:{self.path}" if self.path else join_address(self.host, self.port)


def parse_endpoint(text: str) -> Endpoint:
    """Parse ``host:port``, ``host``, or an ``http://`` or ``https://`` URL of these; the default port is 2379.

    Like etcd's client, this also accepts ``unix:``, ``unixs:`` and ``unix://`` with the path of a socket file, and
    drops everything after the host and port of a URL.

    Raises:
        ConfigError: no host, a bad port, another scheme, or user info, which the text of the error does not repeat.
    """
    stripped = text.strip()
    scheme, separator, rest = stripped.partition(":")
    if separator and scheme in ("unix", "unixs"):
        path = rest.removeprefix("//")
        if not path or "\0" in path:
            raise ConfigError(f"endpoint {text!r} names no socket file")
        return Endpoint(text, "localhost", DEFAULT_CLIENT_PORT, True if scheme == "unixs" else None, path)
    _, at, host_port = re.split(r"[/?#]", stripped.partition("://")[2] or stripped, maxsplit=1)[0].rpartition("@")
    if at:
        raise ConfigError(f"endpoint {host_port}: user name and password are not part of an endpoint")
    scheme = ""
    if "://" in stripped:
        try:
            url = parse_url(stripped)
        except ConfigError as error:
            raise ConfigError(f"endpoint {text!r} has no valid host and port: {error}") from None
        scheme, host_port = url.scheme, url.host
        if scheme not in ("http", "https"):
            raise ConfigError(f"endpoint {text!r} is not host:port, http://, https:// or unix://")
    return Endpoint(text, *_host_and_port(text, host_port), scheme == "https" if scheme else None)


def _host_and_port(text: str, host_port: str) -> tuple[str, int]:
    has_port = bool(re.search(r":[^:\]]+$", host_port)) and (host_port.startswith("[") or host_port.count(":") == 1)
    try:
        host, port = split_address(host_port if has_port else f"{host_port.rstrip(':')}:{DEFAULT_CLIENT_PORT}")
    except ValueError:
        hint = ": an IPv6 address stands in brackets" if host_port.count(":") > 1 else ""
        raise ConfigError(f"endpoint {text!r} has no valid host and port{hint}") from None
    if not host or _CONTROL.search(host) or " " in host:
        raise ConfigError(f"endpoint {text!r} has no host")
    return host.lower(), port


def require_ports(endpoints: Iterable[Endpoint]) -> None:
    """Refuse an endpoint that is a bare word, which is more often a mistake than a host name.

    Raises:
        ConfigError: an endpoint is neither host:port nor a URL.
    """
    for endpoint in endpoints:
        if endpoint.secure is None and not endpoint.path and not endpoint.text.strip().endswith(f":{endpoint.port}"):
            example = f"HOST:PORT, as in {join_address(endpoint.host, DEFAULT_CLIENT_PORT)}"
            raise ConfigError(f"endpoint {endpoint.text!r} has no port: write {example}, or a URL")


def parse_endpoints(given: str | Iterable[str]) -> list[Endpoint]:
    """Parse endpoints from a comma-separated text or a list, without duplicates.

    Raises:
        ConfigError: there is no endpoint, or one is malformed.
        TypeError: an endpoint is not a string.
    """
    if not isinstance(given, Iterable):
        raise TypeError(f"endpoints are a text, or several in a list, not {given!r}")
    texts = given.split(",") if isinstance(given, str) else list(given)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"an endpoint is a text as HOST:PORT, not {text!r}")
    endpoints = {text.strip(): parse_endpoint(text) for text in texts if text.strip()}
    if not endpoints:
        raise ConfigError("at least one endpoint must be given")
    return list(endpoints.values())
