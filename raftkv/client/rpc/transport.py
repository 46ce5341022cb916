"""The client's only way to the RPC layer.

Owns the opening of a channel to an endpoint. ``Transport`` is what ``core`` needs of a channel, so that tests can
put anything there.
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
# The certificates that a client trusts and shows, from files that may be replaced while it runs.

_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True)
class _Origin:
    """How a context was made, from which files, and which they were then."""

    make: Callable[[], ssl.SSLContext]
    files: tuple[str, ...]
    stamp: _Stamp


_origins: WeakKeyDictionary[ssl.SSLContext, _Origin] = WeakKeyDictionary()
"""How each context was made that is in use."""


def tls_context(ca_file: str = "", cert_file: str = "", key_file: str = "", *, verify: bool = True) -> ssl.SSLContext:
    """Return a context that verifies servers as Go's clients do.

    The host must be among the names or IP addresses in the server's certificate (a common name is none), and what is
    in the file of authorities is one, an intermediate one too.

    Arguments:
        ca_file: authorities; empty: this machine's.
        cert_file, key_file: certificate to show, and its key; empty: none.
        verify: False: any certificate is taken.

    Raises:
        OSError: a file cannot be read or used; its text says which and why.
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
    # Strict checks are Python's default from 3.13 on; they refuse authorities that etcd and openssl have long made.
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
    """Open a file: OpenSSL does not say which one of several it could not read."""
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
        # A key with a password would ask for it on the terminal, in the middle of a program.
        context.load_cert_chain(cert_file, key_file, no_password)
    except ssl.SSLError as error:
        if asked:
            raise OSError(f"{key_file} is encrypted: only keys without a password can be used") from None
        if error.reason == "KEY_VALUES_MISMATCH":
            raise OSError(f"{key_file} is not the key of {cert_file}") from None
        raise OSError(f"{cert_file} and {key_file} are no certificate and its key in PEM") from None


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
    """Return what gives each handshake the files of its moment: certificates end before the programs that show them.

    Arguments:
        context: one of ``tls_context``; another one is returned as it is.
    """
    origin = _origins.get(context)
    return context if origin is None or not origin.files else _Renewed(context, origin)


class _Renewed:
    """A ``Security`` of files. While they cannot be used, as halfway through their renewal, the old ones go on."""

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
        """Take every server that the context accepted."""

    def opened(self, tls: ssl.SSLObject, address: str, cut: Callable[[], None]) -> Callable[[], None]:
        """Register nothing: a client has no lists of revoked certificates."""
        from raftkv.loop.cycle_free import nothing

        return nothing

    def failed(self, address: str, reason: str) -> None:
        """The call that wanted the connection fails with the reason."""


def for_http(context: ssl.SSLContext) -> ssl.SSLContext:
    """Return a context like one of ``tls_context``, for HTTP/1.1 beside it: a channel has that one speak HTTP/2 alone.

    Arguments:
        context: that a channel may have; one that ``tls_context`` did not make is returned as it is.

    Raises:
        OSError: a file cannot be read or used any more.
    """
    origin = _origins.get(context)
    return context if origin is None else origin.make()


RECONNECT_PAUSE_MAX_S = 1.0
"""A person waits at the other end: a member that comes back shall be found soon."""

PROBE_MIN_S = 10.0
"""Servers cut off clients that probe more often than every 5 s; Go's clients keep this distance."""


class Transport(Protocol):
    """A connection that makes calls."""

    def unary(
        self, path: str, message: bytes, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> Awaitable[bytes]:
        """Make a call; it fails with ``raftkv.rpc.RpcError``.

        Arguments:
            path: of the method.
            message: the request's bytes.
            timeout_s: deadline; None: none.
            metadata: sent with it.
        """

    def stream(self, path: str, metadata: Metadata = (), timeout_s: float | None = None) -> ClientStream:
        """Start a streaming call; what it receives fails with ``raftkv.rpc.RpcError``.

        Arguments:
            path: of the method.
            metadata: sent with it.
            timeout_s: for the whole stream; None: for ever.
        """

    async def first_attempt(self) -> bool:
        """Connect, and tell once the first attempt has ended whether there is a connection."""

    def reconnect_now(self) -> None:
        """If it waits before it connects again: wait no longer."""

    async def close(self) -> None:
        """Give the connection back."""


def open_transport(endpoint: Endpoint, options: ClientOptions) -> Transport:
    """Make a channel of ``raftkv.rpc`` to an endpoint; it connects at the first call.

    Arguments:
        endpoint: where to.
        options: how to connect.
    """
    from raftkv.rpc.client.channel import Channel

    return Channel(*channel_arguments(endpoint, options))


def channel_arguments(
    endpoint: Endpoint, options: ClientOptions
) -> tuple[str, ssl_module.SSLContext | Security | None, ChannelOptions]:
    """Return what a channel of ``raftkv.rpc`` is made with: target, TLS, settings.

    Arguments:
        endpoint: where to.
        options: how to connect.
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
        # For a frozen member the kernel takes connections: calls must have time left for the others.
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
# So an endpoint that says nothing, as of a frozen member or of a machine without power, costs a client its head start
# and not a dial timeout. The first endpoint wins whenever it is well.

HEAD_START_S: Final = 0.25


async def race(
    endpoints: Sequence[Endpoint], open_transport: Callable[[Endpoint], Transport]
) -> tuple[Endpoint | None, dict[Endpoint, Transport]]:
    """Return which endpoint has a connection first, and its transport; the others are closed.

    If none gets one, all transports are kept, for they know why; the winner is None.

    Arguments:
        endpoints: in order of preference.
        open_transport: makes the transport to one.
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
