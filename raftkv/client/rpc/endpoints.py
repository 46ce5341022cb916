"""Where a cluster is: endpoints as people write them.

>>> parse_endpoint("127.0.0.1:2379")
Endpoint(text='127.0.0.1:2379', host='127.0.0.1', port=2379, secure=None, path='')
>>> parse_endpoint("https://[::1]").secure
True
>>> parse_endpoint("unix:///run/raftkv.sock:1").target
'unix:/run/raftkv.sock:1'
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from raftkv.errors import ConfigError

DEFAULT_PORT = 2379


@dataclass(frozen=True)
class Endpoint:
    """One address of a member.

    Attributes:
        text: as it was written.
        host, port: of a socket file: what it is for other purposes, this machine.
        secure: None when the text does not say: then the client's TLS settings decide.
        path: of the socket file; empty: it is none.
    """

    text: str
    host: str
    port: int
    secure: bool | None
    path: str = ""

    @property
    def target(self) -> str:
        """``host:port`` for a socket, an IPv6 address in brackets, or ``unix:`` and the path of a socket file."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Read ``host:port``, ``host``, or an ``http://`` or ``https://`` URL of these; the port is 2379 if none is named.

    As etcd's client, it also reads ``unix://`` and ``unixs://`` with the path of a socket file.

    Raises:
        ConfigError: no host, a bad port, another scheme, or a user's name, which is not said here.
    """
    stripped = text.strip()
    scheme, separator, path = stripped.partition("://")
    if separator and scheme in ("unix", "unixs"):
        if not path or "\0" in path:
            raise ConfigError(f"endpoint {text!r} names no socket file")
        return Endpoint(text, "localhost", DEFAULT_PORT, True if scheme == "unixs" else None, path)
    if separator and scheme not in ("http", "https"):
        raise ConfigError(f"endpoint {text!r} is not host:port, http://, https:// or unix://")
    try:
        parts = urlsplit(stripped if separator else f"//{stripped}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"endpoint {text!r} has no valid host and port") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"endpoint {parts.hostname}: user name and password are not part of an endpoint")
    if not host:
        raise ConfigError(f"endpoint {text!r} has no host")
    return Endpoint(text, host, DEFAULT_PORT if port is None else port, scheme == "https" if separator else None)


def require_ports(endpoints: Iterable[Endpoint]) -> None:
    """Refuse a bare word, which is more often a mistake than the name of a machine.

    Raises:
        ConfigError: one is neither host:port nor a URL.
    """
    for endpoint in endpoints:
        if endpoint.secure is None and not endpoint.path and not endpoint.text.strip().endswith(f":{endpoint.port}"):
            example = f"HOST:PORT, as in {endpoint.host}:{DEFAULT_PORT}"
            raise ConfigError(f"endpoint {endpoint.text!r} has no port: write {example}, or a URL")


def parse_endpoints(given: str | Iterable[str]) -> list[Endpoint]:
    """Read endpoints from a comma-separated text or a list; equal ones once.

    Raises:
        ConfigError: there is none, or one is malformed.
        TypeError: one is no text.
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
