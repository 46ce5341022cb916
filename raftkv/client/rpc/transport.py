"""The client's only way to the RPC layer.

Opens channels to endpoints. ``Transport`` is the interface that ``core`` needs of a channel, so that tests can
substitute it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import ssl
    import ssl as ssl_module

    from raftkv.client.rpc.core import ClientOptions
    from raftkv.rpc.client.stream import ClientStream
    from raftkv.rpc.framing import Metadata
    from raftkv.rpc.limits import ChannelOptions
    from raftkv.rpc.tls import Security
    from raftkv.urls import Endpoint


# -- certificates ---------------------------------------------------------------------------------------------------
#
# The certificates that a client trusts and presents, from files that may be replaced while it runs.

_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True)
class _Origin:
    """How a context was created, from which files, and the files' versions."""

    make: Callable[[], ssl.SSLContext]
    files: tuple[str, ...]
    stamp: _Stamp


_origins: WeakKeyDictionary[ssl.SSLContext, _Origin] = WeakKeyDictionary()
"""The origin of each context in use."""


def tls_context(ca_file: str = "", cert_file: str = "", key_file: str = "", *, verify: bool = True) -> ssl.SSLContext:
    """Return a context that verifies servers as Go's clients do.

    The host must be among the names or IP addresses in the server's certificate; the common name does not count. All
    certificates in the file of authorities are trusted, intermediate ones too.

    Arguments:
        ca_file: authorities; empty: this machine's.
        cert_file, key_file: certificate to present, and its key; empty: none.
        verify: False: accept any certificate.

    Raises:
        OSError: a file cannot be read or used; the text says which and why.
    """
    import ssl

    files = tuple(name for name in (ca_file, cert_file, key_file) if name)
    stamp = _stamp_of(files)
    for name in files:
        _check_readable(name)
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except ssl.SSLError:
        raise OSError(f"there is no certificate in PEM in {ca_file}") from None
    context.hostname_checks_common_name = False
    # Python 3.13 and later are strict by default, and refuse authorities as etcd and openssl have long created them.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if cert_file:
        _show(context, cert_file, key_file)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    make = partial(tls_context, ca_file, cert_file, key_file, verify=verify)
    _origins[context] = _Origin(make, files, stamp)
    return context


def _check_readable(name: str) -> None:
    """Open a file, because OpenSSL's error does not name the unreadable one of several files."""
    try:
        with open(name, "rb"):
            pass
    except OSError as error:
        raise OSError(f"{name}: {error.strerror}") from None


def _show(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    import ssl

    asked = False

    def no_password() -> bytes:
        nonlocal asked
        asked = True
        return b""

    try:
        # An encrypted key would prompt for its password on the terminal, in the middle of a program.
        context.load_cert_chain(cert_file, key_file, no_password)
    except ssl.SSLError as error:
        if asked:
            raise OSError(f"{key_file} is encrypted: only keys without a password can be used") from None
        if error.reason == "KEY_VALUES_MISMATCH":
            raise OSError(f"{key_file} is not the key of {cert_file}") from None
        raise OSError(f"{cert_file} and {key_file} are not a certificate and its key in PEM") from None


def _stamp_of(files: tuple[str, ...]) -> _Stamp:
    stamp: list[tuple[int, int, int] | None] = []
    for name in files:
        try:
            found = os.stat(name)
        except OSError:
            stamp.append(None)
        else:
            stamp.append((found.st_ino, found.st_mtime_ns, found.st_size))
    return tuple(stamp)


def renewed(context: ssl.SSLContext) -> ssl.SSLContext | Security:
    """Return a ``Security`` that reloads changed files at each handshake, because programs outlive their certificates.

    Arguments:
        context: context of ``tls_context``; any other one is returned unchanged.
    """
    origin = _origins.get(context)
    return context if origin is None or not origin.files else _Renewed(context, origin)


class _Renewed:
    """A ``Security`` of files. While they are unusable, e.g. halfway through a renewal, the old ones stay in use."""

    def __init__(self, context: ssl.SSLContext, origin: _Origin) -> None:
        self._use(context)
        self._origin = origin
        self._stamp = origin.stamp

    def _use(self, context: ssl.SSLContext) -> None:
        from raftkv.rpc.tls import CLIENT_PROTOCOLS

        context.set_alpn_protocols(list(CLIENT_PROTOCOLS))
        self._context = context

    def context(self) -> ssl.SSLContext:
        """Return the context of the next handshake."""
        stamp = _stamp_of(self._origin.files)
        if stamp != self._stamp:
            with contextlib.suppress(OSError):
                self._use(self._origin.make())
                self._stamp = stamp
        return self._context

    async def admit(self, tls: ssl.SSLObject, address: str) -> None:
        """Accept every server that the context accepted."""

    def opened(self, tls: ssl.SSLObject, address: str, cut: Callable[[], None]) -> Callable[[], None]:
        """Register nothing: a client has no lists of revoked certificates."""
        from raftkv.loop.cycle_free import nothing

        return nothing

    def failed(self, address: str, reason: str) -> None:
        """Do nothing: the call that wanted the connection fails with the reason."""


def for_http(context: ssl.SSLContext) -> ssl.SSLContext:
    """Return a copy of a context for HTTP/1.1, because a channel restricts its context to HTTP/2.

    Arguments:
        context: context that a channel may use; one not created by ``tls_context`` is returned unchanged.

    Raises:
        OSError: a file cannot be read or used any more.
    """
    origin = _origins.get(context)
    return context if origin is None else origin.make()


RECONNECT_PAUSE_MAX_S = 1.0
"""Longest pause before reconnecting: people wait for the client, so it must soon find a member that has returned."""

PROBE_MIN_S = 10.0
"""Shortest interval between probes, as in Go's clients: servers disconnect clients that probe more than every 5 s."""


class Transport(Protocol):
    """The interface of a connection that makes calls."""

    def unary(
        self, path: str, message: bytes, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> Awaitable[bytes]:
        """Make a call; it fails with ``raftkv.rpc.RpcError``.

        Arguments:
            path: method path.
            message: encoded request.
            timeout_s: time limit; None: none.
            metadata: metadata of the call.
        """

    def stream(self, path: str, metadata: Metadata = (), timeout_s: float | None = None) -> ClientStream:
        """Start a streaming call; receiving fails with ``raftkv.rpc.RpcError``.

        Arguments:
            path: method path.
            metadata: metadata of the call.
            timeout_s: limit for the whole stream; None: no limit.
        """

    async def first_attempt(self) -> bool:
        """Connect; return whether there is a connection after the first attempt."""

    def reconnect_now(self) -> None:
        """End the pause before the next connection attempt, if there is one."""

    async def close(self) -> None:
        """Close the connection."""


def open_transport(endpoint: Endpoint, options: ClientOptions) -> Transport:
    """Return a channel of ``raftkv.rpc`` to an endpoint; it connects at the first call.

    Arguments:
        endpoint: endpoint to connect to.
        options: connection settings.
    """
    from raftkv.rpc.client.channel import Channel

    return Channel(*channel_arguments(endpoint, options))


def channel_arguments(
    endpoint: Endpoint, options: ClientOptions
) -> tuple[str, ssl_module.SSLContext | Security | None, ChannelOptions]:
    """Return the arguments for a channel of ``raftkv.rpc``: target, TLS, settings.

    Arguments:
        endpoint: endpoint to connect to.
        options: connection settings.
    """
    from raftkv.rpc.limits import ChannelOptions

    secure = options.tls is not None if endpoint.secure is None else endpoint.secure
    context = options.tls
    if secure and context is None:
        context = tls_context()
    settings = ChannelOptions(
        authority=options.server_name,
        max_receive_message_bytes=options.max_response_bytes,
        connect_timeout_s=options.dial_timeout_s,
        # The kernel accepts connections for a frozen member, so calls must have time left for the other endpoints.
        settings_timeout_s=options.dial_timeout_s,
        backoff_max_s=RECONNECT_PAUSE_MAX_S,
        keepalive_time_s=None if options.keepalive_time_s is None else max(options.keepalive_time_s, PROBE_MIN_S),
        keepalive_timeout_s=options.keepalive_timeout_s,
    )
    return endpoint.target, renewed(context) if secure and context is not None else None, settings


# -- race -----------------------------------------------------------------------------------------------------------
#
# The first connection of a client: endpoints race for it, each with a head start on the next (RFC 8305, section 5).
#
# So a silent endpoint, for example of a frozen member or of a machine without power, delays a client by only its head
# start instead of a dial timeout. The first endpoint always wins if it is healthy.

HEAD_START_S: Final = 0.25


async def race(
    endpoints: Sequence[Endpoint], open_transport: Callable[[Endpoint], Transport]
) -> tuple[Endpoint | None, dict[Endpoint, Transport]]:
    """Return the first connected endpoint, and the transports that were opened; the losers' transports are closed.

    If no endpoint connects, the winner is None and all transports are kept, because they hold the reasons.

    Arguments:
        endpoints: endpoints in order of preference.
        open_transport: opens the transport to an endpoint.
    """
    opened: dict[Endpoint, Transport] = {}
    attempts: dict[Endpoint, asyncio.Task[bool]] = {}
    keep: set[Endpoint] = set()
    waiting = list(endpoints)
    try:
        while waiting or any(not attempt.done() for attempt in attempts.values()):
            if waiting:
                endpoint = waiting.pop(0)
                opened[endpoint] = open_transport(endpoint)
                attempts[endpoint] = asyncio.ensure_future(opened[endpoint].first_attempt())
            pending = [attempt for attempt in attempts.values() if not attempt.done()]
            await asyncio.wait(pending, timeout=HEAD_START_S if waiting else None, return_when=asyncio.FIRST_COMPLETED)
            for endpoint, attempt in attempts.items():
                if attempt.done() and attempt.result():
                    keep.add(endpoint)
                    return endpoint, {endpoint: opened[endpoint]}
        keep.update(opened)
        return None, opened
    finally:
        for attempt in attempts.values():
            attempt.cancel()
        for endpoint in opened.keys() - keep:
            await opened[endpoint].close()
