"""File descriptors: how many there are, and how many of them clients may take.

A member that has none left cannot cut a segment of its log, and must stop. So the soft limit is raised to the hard one
at start, ``RESERVED`` descriptors are kept for what the member itself opens (etcd keeps as many), and client
connections get what is left. Ports of other members and of metrics have small limits of their own, inside the reserve,
so that no number of clients keeps members apart. Nothing is imported after the start: an import opens files.
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
"""Connections that the peer port accepts; a member opens a few to each other one."""

METRICS_CONNECTIONS: Final = 24
"""Connections that a metrics port of its own accepts."""

LACK_LOG_INTERVAL_S: Final = 10.0

_ACCEPT_FAILED: Final = "socket.accept() out of system resource"
"""asyncio's words for EMFILE and its like."""

_SOFT_MAX: Final = 1_048_576
"""Where nothing is limited, soft limits are not raised beyond this."""


LATE_IMPORTS: Final = ("concurrent.futures.thread", "encodings.idna", "linecache", "traceback")
"""What the standard library imports when it first needs it: for a thread, for the name of a host, for an error."""


def import_early() -> None:
    """Import what would be imported later, when there may be no descriptor for it."""
    for name in LATE_IMPORTS:
        importlib.import_module(name)


def log_lack_in_a_line(loop: asyncio.AbstractEventLoop) -> None:
    """Have a lack of descriptors at accept logged in a line now and then; asyncio pauses accepting by itself."""
    silent_until_s = 0.0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal silent_until_s
        if context.get("message") != _ACCEPT_FAILED:
            loop.default_exception_handler(context)
        elif loop.time() >= silent_until_s:
            silent_until_s = loop.time() + LACK_LOG_INTERVAL_S
            _log.error("cannot accept connections for a second: %s", context.get("exception"))

    loop.set_exception_handler(handle)


def raise_limit() -> int:
    """Raise the soft limit as far as it may go, and return it.

    Raises:
        ConfigError: that is too low for a member at all.
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
    """Return how many client connections may be open, at most ``wanted``.

    Raises:
        ConfigError: the limit of the process is too low for a member at all.
    """
    left = limit() - RESERVED
    if left <= 0:
        text = f"a limit of {limit()} file descriptors is too low: the member itself needs {RESERVED} (see ulimit -n)"
        raise ConfigError(text)
    return min(wanted, left)
