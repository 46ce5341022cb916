"""The ports of a member: their limits, and how they are bound.

Owns what clients, other members and scrapers of metrics may take of a port (``rpc.limits`` has the defaults), and the
words of a port that cannot be bound, which a new member finds out before it makes any data. Leaves out which services
are on it (``server.member``).
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
from raftkv.server import descriptors

RECEIVE_OVERHEAD_BYTES: Final = 512 * 1024
"""What a message may be larger than max-request-bytes before it is refused unread (etcd: grpcOverheadBytes)."""

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

A member pings for two reasons that know nothing of each other, silence and the time of a round trip, and nothing comes
back on its stream that would forgive two pings at once: there is no shortest interval, only a rate.

A member that is cut off, or loses its power, leaves a connection behind, and no packet tells of its end. It has a
stream, so it is never idle, and each takes one of few places. As members ping every few seconds, silence tells of them
soon.
"""

METRICS_LIMITS: Final = ServerLimits(
    connections=descriptors.METRICS_CONNECTIONS, crowded_idle_s=0.0, goaway_notice_timeout_s=0.0
)
"""Connections are few, and a probe that finds no place has its member killed: a connection that asks something
takes the place of one that only holds on.
"""


def client_limits(config: ServerConfig) -> ServerLimits:
    """Return the limits of the client ports.

    Arguments:
        config: of the member.
    """
    default = ServerLimits()
    return ServerLimits(
        connections=descriptors.client_connections(default.connections),
        max_receive_message_bytes=config.max_request_bytes + RECEIVE_OVERHEAD_BYTES,
        # The largest request as JSON: base64 takes a third more, and names and numbers take more than their bytes.
        http_body_bytes=2 * (config.max_request_bytes + RECEIVE_OVERHEAD_BYTES),
        max_concurrent_streams=min(config.max_concurrent_streams, default.max_concurrent_streams),
        ping_interval_min_s=config.grpc_keepalive_min_time_s,
        keepalive_time_s=config.grpc_keepalive_interval_s or default.keepalive_time_s,
        keepalive_timeout_s=config.grpc_keepalive_timeout_s or default.keepalive_timeout_s,
    )


def peer_limits(config: ServerConfig) -> ServerLimits:
    """Return the limits of the peer ports.

    Arguments:
        config: of the member.
    """
    # One message holds at least one entry, however large requests may be here.
    message_bytes = max(PEER_LIMITS.max_receive_message_bytes, 2 * config.max_request_bytes)
    assembly_bytes = max(PEER_LIMITS.assembly_bytes, 4 * message_bytes)
    return replace(PEER_LIMITS, max_receive_message_bytes=message_bytes, assembly_bytes=assembly_bytes)


def addresses(urls: Iterable[str]) -> dict[str, bool]:
    """Return the URLs of clients that are to be bound, one of each address, and whether plain text is spoken there too.

    Arguments:
        urls: of clients; those of one address may differ in their schemes, as in etcd.
    """
    found: dict[tuple[bool, str, int | str], list[str]] = {}
    for url in dict.fromkeys(urls):
        scheme, host, port = cluster_id.split_url(url)
        # Port 0 is another one each time.
        is_file = scheme.startswith("unix")
        found.setdefault((is_file, host, port if port or is_file else url), []).append(url)
    return {max(same, key=_is_secure): len(set(map(_is_secure, same))) > 1 for same in found.values()}


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
        server: answers there.
        url: with scheme, host and port.
        ssl: for addresses whose scheme asks for TLS.
        accepting: whether connections are taken at once; else they queue in the kernel.
        plain_too, grpc_only: as of ``Server.listen``.

    Raises:
        ConfigError: the address cannot be bound; one line for the user.
    """
    scheme, host, port = cluster_id.split_url(url)
    try:
        # As in etcd, unix://NAME:PORT is a socket file of just that name.
        unix = host if scheme.startswith("unix") else None
        ssl = ssl if _is_secure(url) else None
        await server.listen(host, port, ssl, unix=unix, accepting=accepting, plain_too=plain_too, grpc_only=grpc_only)
    except OSError as error:
        raise _in_words(url, error) from error


def check_free(urls: Iterable[str]) -> None:
    """Bind addresses for a moment, before anything is done that a corrected start would meet.

    Arguments:
        urls: as of ``listen``; socket files are not looked at.

    Raises:
        ConfigError: as of ``listen``.
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
            # Bound, not listening: no client that waits for this member is taken and dropped.
            probe = bound.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise _in_words(url, error) from None


def _in_words(url: str, error: OSError) -> ConfigError:
    # asyncio puts the address into the text once more; names that cannot be resolved have numbers of their own.
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
    holder = holder_of(cluster_id.split_url(url)[2]) if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"cannot listen on {url}: {reason}{holder}")


_LISTEN: Final = "0A"
"""The state of a listening socket in ``/proc/net/tcp``."""


def holder_of(port: int) -> str:
    """Return `` by NAME (process ID)`` for the process that listens on a port; empty if ``/proc`` does not say.

    Arguments:
        port: of this machine, or of this network namespace.
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
