"""The ports of a member: their limits, and how they are bound.

Owns the limits for clients, other members and metrics scrapers (``rpc.limits`` has the defaults), and the error text of
a port that cannot be bound, which a new member checks before it creates any data. Leaves out the services on a port
(``server.member``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from raftkv import cluster_id
from raftkv.config import ServerConfig
from raftkv.errors import ConfigError
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.server import Server
from raftkv.rpc.tls import Security
from raftkv.server import descriptors, memory

RECEIVE_OVERHEAD_BYTES: Final = 512 * 1024
"""Allowance above max-request-bytes for a message before it is refused unread (etcd: grpcOverheadBytes)."""

PEER_LIMITS: Final = ServerLimits(
    max_receive_message_bytes=64 * 1024 * 1024,
    assembly_bytes=256 * 1024 * 1024,
    process_assembly_bytes=1024 * 1024 * 1024,
    stream_window_bytes=16 * 1024 * 1024,
    connection_window_bytes=32 * 1024 * 1024,
    ping_interval_min_s=0.0,
    connections=descriptors.PEER_CONNECTIONS,
    keepalive_time_s=10.0,
    keepalive_timeout_s=10.0,
)
"""Members trust each other's volume, not each other's bytes.

``ping_interval_min_s`` is 0: a member pings for two independent reasons, silence and measuring the round trip. Nothing
is sent back on its stream that would forgive two pings in a row, so only the rate of pings is limited.

``keepalive_time_s`` is short: a member that is cut off, or loses its power, leaves a connection behind, and no packet
tells of its end. Such a connection has a stream, so it is never idle, and it takes one of few places. Members ping
every few seconds, so silence reveals it soon.
"""

METRICS_LIMITS: Final = ServerLimits(
    connections=descriptors.METRICS_CONNECTIONS, crowded_idle_s=0.0, goaway_notice_timeout_s=0.0
)
"""There are few connections, and a probe that gets none has its member killed. So a connection with a request takes the
place of an idle one.
"""


def client_limits(config: ServerConfig) -> ServerLimits:
    """Return the limits of the client ports.

    Arguments:
        config: settings of the member.
    """
    default = ServerLimits()
    answers_bytes = memory.share_bytes(4, default.process_send_buffer_bytes)
    requests_bytes = memory.share_bytes(8, default.process_assembly_bytes)
    return ServerLimits(
        connections=descriptors.client_connections(default.connections),
        process_send_buffer_bytes=answers_bytes,
        connection_send_buffer_bytes=min(default.connection_send_buffer_bytes, answers_bytes),
        process_assembly_bytes=requests_bytes,
        assembly_bytes=min(default.assembly_bytes, requests_bytes),
        max_receive_message_bytes=config.max_request_bytes + RECEIVE_OVERHEAD_BYTES,
        # The largest request as JSON: base64 adds a third, and names and numbers take more than their binary form.
        http_body_bytes=2 * (config.max_request_bytes + RECEIVE_OVERHEAD_BYTES),
        max_concurrent_streams=min(config.max_concurrent_streams, default.max_concurrent_streams),
        ping_interval_min_s=config.grpc_keepalive_min_time_s,
        keepalive_time_s=config.grpc_keepalive_interval_s or default.keepalive_time_s,
        keepalive_timeout_s=config.grpc_keepalive_timeout_s or default.keepalive_timeout_s,
    )


def peer_limits(config: ServerConfig) -> ServerLimits:
    """Return the limits of the peer ports.

    Arguments:
        config: settings of the member.
    """
    # One message holds at least one entry, however large requests may be.
    message_bytes = max(PEER_LIMITS.max_receive_message_bytes, 2 * config.max_request_bytes)
    assembly_bytes = max(PEER_LIMITS.assembly_bytes, 4 * message_bytes)
    return replace(PEER_LIMITS, max_receive_message_bytes=message_bytes, assembly_bytes=assembly_bytes)


def addresses(urls: Iterable[str]) -> dict[str, bool]:
    """Return the client URLs to bind, one for each address, and whether plain text is accepted there beside TLS.

    Arguments:
        urls: client URLs; those of one address may have different schemes, as in etcd.
    """
    found: dict[tuple[bool, str, int | str], list[str]] = {}
    for url in dict.fromkeys(urls):
        scheme, host, port = cluster_id.split_url(url)
        # Port 0 is a different port each time.
        is_file = scheme.startswith("unix")
        found.setdefault((is_file, host, port if port or is_file else url), []).append(url)
    return {
        max(same, key=_is_secure): len(set(map(_is_secure, same))) > 1 for same in sorted(found.values(), key=_is_both)
    }


def _is_both(urls: list[str]) -> bool:
    return "://[::]:" in urls[0]  # binds 0.0.0.0 too, unless that is bound already


def _is_secure(url: str) -> bool:
    return cluster_id.split_url(url)[0] in ("https", "unixs")


async def listen(
    server: Server,
    url: str,
    ssl: Security | None,
    *,
    accepting: bool = True,
    plain_too: bool = False,
    grpc_only: bool = False,
) -> None:
    """Bind an address.

    Arguments:
        server: serves the address.
        url: scheme, host and port.
        ssl: used if the scheme requires TLS.
        accepting: whether connections are accepted at once; otherwise they queue in the kernel.
        plain_too, grpc_only: as in ``Server.listen``.

    Raises:
        ConfigError: the address cannot be bound; a one-line message for the user.
    """
    scheme, host, port = cluster_id.split_url(url)
    try:
        # As in etcd, unix://NAME:PORT is a socket file with exactly that name.
        unix = host if scheme.startswith("unix") else None
        ssl = ssl if _is_secure(url) else None
        await server.listen(host, port, ssl, unix=unix, accepting=accepting, plain_too=plain_too, grpc_only=grpc_only)
    except OSError as error:
        raise _in_words(url, error) from error


def check_free(urls: Iterable[str]) -> None:
    """Bind addresses for a moment, before anything is created that would disturb a start with corrected flags.

    Arguments:
        urls: as in ``listen``; socket files are skipped.

    Raises:
        ConfigError: as in ``listen``.
    """
    seen: set[tuple[str, int]] = set()
    with contextlib.ExitStack() as bound:
        for url in urls:
            scheme, host, port = cluster_id.split_url(url)
            if scheme.startswith("unix"):
                continue
            if port and (host, port) in seen:
                raise _in_words(url, OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)))
            seen.add((host, port))
            # Bound but not listening: no client that waits for this member is accepted and dropped.
            try:
                family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                probe = bound.enter_context(socket.socket(family, kind))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
            except OSError as error:
                raise _in_words(url, error) from None


def _in_words(url: str, error: OSError) -> ConfigError:
    # asyncio repeats the address in the text; errors of name resolution have numbers outside of errno.
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
    holder = holder_of(cluster_id.split_url(url)[2]) if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"cannot listen on {url}: {reason}{holder}")


_LISTEN: Final = "0A"
"""The state of a listening socket in ``/proc/net/tcp``."""


def holder_of(port: int) -> str:
    """Return `` by NAME (process ID)`` for the process that listens on a port; empty if ``/proc`` does not show it.

    Arguments:
        port: TCP port of this machine, or of this network namespace.
    """
    try:
        rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTEN and row[1].endswith(f":{port:04X}")}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended, or belongs to another user
                if any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                    return f" by {(process / 'comm').read_text().strip()} (process {process.name})"
    except OSError:
        pass  # no /proc
    return ""
