"""File descriptors: raising the limit, and the share of them that clients may use.

A member without free descriptors cannot start a new log segment, and must stop. So at start the soft limit is raised to
the hard limit, and ``RESERVED`` descriptors are kept for the member's own use (as many as in etcd); client connections
get the rest. The peer and metrics ports have small limits of their own within the reserve, so clients, however many,
cannot keep members apart. Nothing is imported after the start, since an import opens files.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import resource
from typing import Any, Final

from raftkv.errors import ConfigError

_log = logging.getLogger(__name__)

RESERVED: Final = 150
"""Descriptors kept for log segments, database, snapshots, listeners, standard streams, and the connections below."""

PEER_CONNECTIONS: Final = 64
"""Connections accepted at the peer port; a member opens a few to each other member."""

METRICS_CONNECTIONS: Final = 24
"""Connections accepted at a separate metrics port."""

LACK_LOG_INTERVAL_S: Final = 10.0

_ACCEPT_FAILED: Final = "socket.accept() out of system resource"
"""asyncio's message for EMFILE and similar errors."""

_SOFT_MAX: Final = 1_048_576
"""Soft limits are not raised beyond this if the hard limit is infinite."""


LATE_IMPORTS: Final = ("concurrent.futures.thread", "encodings.idna", "linecache", "traceback")
"""Modules that the standard library imports at first use: for a thread, a host name, an error."""


def import_early() -> None:
    """Import modules early: later there may be no free descriptor for it."""
    for name in LATE_IMPORTS:
        importlib.import_module(name)


def log_lack_in_a_line(loop: asyncio.AbstractEventLoop) -> None:
    """Log a lack of descriptors at accept as one line, at intervals. asyncio pauses accepting by itself."""
    silent_until_s = 0.0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal silent_until_s
        if context.get("message") != _ACCEPT_FAILED:
            loop.default_exception_handler(context)
        elif loop.time() >= silent_until_s:
            silent_until_s = loop.time() + LACK_LOG_INTERVAL_S
            _log.error("cannot accept connections, next attempt in a second: %s", context.get("exception"))

    loop.set_exception_handler(handle)


def raise_limit() -> int:
    """Raise the soft limit as far as possible, and return it.

    Raises:
        ConfigError: the limit is too low for a member.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _SOFT_MAX if hard == resource.RLIM_INFINITY else min(hard, _SOFT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    client_connections(1)
    return limit()


def limit() -> int:
    """Return the soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _SOFT_MAX if soft == resource.RLIM_INFINITY else soft


def client_connections(wanted: int) -> int:
    """Return the limit on client connections, at most ``wanted``.

    Raises:
        ConfigError: the limit of the process is too low for a member.
    """
    left = limit() - RESERVED
    if left <= 0:
        text = f"a limit of {limit()} file descriptors is too low: the member itself needs {RESERVED} (see ulimit -n)"
        raise ConfigError(text)
    return min(wanted, left)
