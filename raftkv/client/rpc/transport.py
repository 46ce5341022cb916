"""The client's only way to the RPC layer.

Owns the opening of a channel to an endpoint. ``Transport`` is what ``core`` needs of a channel, so that tests can
put anything there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from raftkv.client.rpc.certificates import renewed, tls_context

if TYPE_CHECKING:
    import ssl as ssl_module

    from raftkv.client.rpc.core import ClientOptions
    from raftkv.client.rpc.endpoints import Endpoint
    from raftkv.rpc.client.stream import ClientStream
    from raftkv.rpc.framing import Metadata
    from raftkv.rpc.limits import ChannelOptions
    from raftkv.rpc.tls import Security

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
        ...

    def stream(self, path: str, metadata: Metadata = (), timeout_s: float | None = None) -> ClientStream:
        """Start a streaming call; what it receives fails with ``raftkv.rpc.RpcError``.

        Arguments:
            path: of the method.
            metadata: sent with it.
            timeout_s: for the whole stream; None: for ever.
        """
        ...

    async def first_attempt(self) -> bool:
        """Connect, and tell once the first attempt has ended whether there is a connection."""
        ...

    def reconnect_now(self) -> None:
        """If it waits before it connects again: wait no longer."""
        ...

    async def close(self) -> None:
        """Give the connection back."""
        ...


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
