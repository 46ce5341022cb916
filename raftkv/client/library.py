"""The client for programs, assembled from its parts, and ``connect``, which creates it.

See ``raftkv.aio`` for a tour.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from raftkv.client.admin import Admin, Roles, Users
from raftkv.client.arguments import path, seconds, whole
from raftkv.client.cache import MAX_BYTES, Cache, IndexFunction
from raftkv.client.credentials import Given, Secret, client_settings, file_settings, password_of
from raftkv.client.endpoints import Endpoints
from raftkv.client.kv import Bulk, Txns
from raftkv.client.lease import LeaseKeeper, Leases, Sessions
from raftkv.client.lock import Elections, Locks
from raftkv.client.rpc.core import Client as Core
from raftkv.client.rpc.core import ClientOptions
from raftkv.client.rpc.transport import tls_context
from raftkv.client.scope import Scope, Space, Text, to_bytes
from raftkv.client.watch import Watches, WatchHub
from raftkv.errors import ConfigError
from raftkv.urls import require_ports


class Client(Bulk, Txns, Watches, Leases, Sessions, Locks, Elections, Admin):
    """A client of a cluster; created by ``connect`` and, for a part of the keys, by ``view``.

    Bound to the event loop of its first call, which also opens the connection.

    Attributes:
        scope: state shared by its parts.
        users, roles: methods for users and roles.
    """

    def __init__(self, scope: Scope, *, is_view: bool = False) -> None:
        super().__init__(scope)
        self.users = Users(scope)
        self.roles = Roles(scope)
        self._is_view = is_view

    def __repr__(self) -> str:
        prefix = self.scope.space.prefix
        return f"<raftkv {self.scope.core.describe()}{f', keys below {prefix!r}' if prefix else ''}>"

    def view(self, prefix: Text) -> Client:
        """Return a client for the keys with a prefix, which it adds and removes; it shares the connection."""
        return Client(self.scope.inside(prefix), is_view=True)

    def cache(
        self, prefix: Text, *, indexes: Mapping[str, IndexFunction] | None = None, max_bytes: int = MAX_BYTES
    ) -> Cache:
        """Return a local copy of all keys with a prefix, to be filled by ``async with`` or ``start()``.

        Arguments:
            prefix: prefix of the keys; ``""``: all keys.
            indexes: index functions by name; each returns the values under which a key is found.
            max_bytes: limit of keys and values, plus 400 bytes for each key and for each of its index entries; a larger
                cache ends with ``CacheTooLarge``.
        """
        return Cache(self, prefix, indexes or {}, max_bytes)

    def endpoints(self, service: str) -> Endpoints:
        """Return the servers of a service, to register, list and follow them."""
        return Endpoints(self.scope, service)

    async def close(self) -> None:
        """Close the connection; remaining leases, locks and watches are lost. Does nothing for a view."""
        if self._is_view:
            return
        scope = self.scope
        if scope.core.is_stranded:  # its loop has ended, and everything with it
            scope.core.begin_close()
            return
        scope.core.check_loop()
        await scope.hub.close()
        scope.core.begin_close()
        await scope.keeper.close()
        await scope.core.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _new_scope(core: Core, space: Space, timeout_s: float) -> Scope:
    keeper = LeaseKeeper(core)
    return Scope(core, space, timeout_s, WatchHub(core, heard_of=keeper.heard_of), keeper)


@asynccontextmanager
async def open_scope(core: Core, timeout_s: float) -> AsyncIterator[Scope]:
    """Create a scope of all keys for the block; its watches and keep-alives end with the block, the core stays open.

    Arguments:
        core: calls with failover.
        timeout_s: default time limit of a call.
    """
    scope = _new_scope(core, Space(), timeout_s)
    try:
        yield scope
    finally:
        await scope.hub.close()
        await scope.keeper.close()


def connect(
    endpoints: str | Iterable[str] = "127.0.0.1:2379",
    *,
    user: str | None = None,
    password: Given | Secret = "",
    token: Given | Secret = "",
    tls: ssl.SSLContext | bool | None = None,
    ca_file: str = "",
    cert_file: str = "",
    key_file: str = "",
    timeout_s: float = 5.0,
    namespace: Text = b"",
    dial_timeout_s: float = 2.0,
    keepalive_time_s: float | None = 10.0,
    keepalive_timeout_s: float = 5.0,
    max_request_bytes: int = ClientOptions.max_request_bytes,
    tracing: bool | None = None,
) -> Client:
    """Create a client of a cluster; nothing is sent before its first call.

    Arguments:
        endpoints: addresses of members, as a list or separated by commas: ``host:port``, or a URL.
        user: user to log in as; None, without a token: taken from ``RAFTKV_USER`` and related variables; empty: the
            name in the certificate, or none.
        password: password of the user: a text, or a ``Path`` or a function that is read or called at each login.
        token: JWT from another source, in the same forms; replaces user and password.
        tls: a context; True: this machine's authorities; False: plain TCP; None: as the endpoints or files below say,
            and without files ``RAFTKV_CACERT``, ``RAFTKV_CERT`` and ``RAFTKV_KEY``.
        ca_file: authorities to trust, PEM.
        cert_file, key_file: this client's certificate, PEM.
        timeout_s: default time limit of a call, all attempts together.
        namespace: prefix added to all keys and hidden from the program.
        dial_timeout_s: time limit of one connection attempt.
        keepalive_time_s: idle time after which the connection is probed, at least 10; None: never.
        keepalive_timeout_s: time limit of the answer to a probe.
        max_request_bytes: size limit of requests; members have a separate limit.
        tracing: whether to trace calls with OpenTelemetry and send the context to members; None: if the program has
            imported ``opentelemetry.trace`` by then.
    Raises:
        ConfigError: an endpoint or a setting cannot be used.
    """
    who = _who(user, Secret(password), Secret(token))
    del password, token  # keep the secrets out of tracebacks that show local variables
    if seconds(timeout_s, "timeout_s") <= 0:
        raise ConfigError(f"timeout_s must be positive, not {timeout_s:g}")
    if tls is None and not (ca_file or cert_file or key_file):
        files = file_settings(os.environ)
        ca_file, cert_file, key_file = (files.get(name, "") for name in ("ca_file", "cert_file", "key_file"))
    options = ClientOptions(
        tls=_tls(tls, path(ca_file, "ca_file"), path(cert_file, "cert_file"), path(key_file, "key_file")),
        user=who[0],
        password=who[1],
        token=who[2],
        dial_timeout_s=dial_timeout_s,
        keepalive_time_s=keepalive_time_s,
        keepalive_timeout_s=keepalive_timeout_s,
        max_request_bytes=whole(max_request_bytes, "max_request_bytes"),
        tracing=tracing,
        explain=True,
    )
    core = Core(endpoints, options)
    require_ports(core.endpoints)
    return Client(_new_scope(core, Space(to_bytes(namespace)), timeout_s))


def _who(user: str | None, password: Secret, token: Secret) -> tuple[str, Secret, Secret]:
    """Return user, password and token: the given ones, or those of the environment."""
    if user is None and not password and not token:
        found = client_settings(os.environ)
        user, password, token = found.get("user", ""), found.get("password", password), found.get("token", token)
    elif user and not password and not token:
        password = password_of(user, os.environ)
    if password and not user:
        raise ConfigError("a password needs a user")
    password.check()
    token.check()
    return user or "", password, token


def _tls(tls: ssl.SSLContext | bool | None, ca_file: str, cert_file: str, key_file: str) -> ssl.SSLContext | None:
    """Return the TLS context of the settings; None: plain TCP, unless an endpoint says https."""
    files = " ".join(filter(None, (ca_file, cert_file, key_file)))
    if isinstance(tls, ssl.SSLContext):
        if files:
            raise ConfigError(f"give tls a context or files, not both: {files}")
        return tls
    if tls is False or not (tls or files):
        return None
    if bool(cert_file) != bool(key_file):
        raise ConfigError(f"cert_file and key_file belong together; only one is given: {cert_file or key_file}")
    try:
        return tls_context(ca_file, cert_file, key_file)
    except OSError as error:
        raise ConfigError(f"cannot use the certificates: {error}") from None
