"""What a server does that has all the connections it may have: it makes room by letting idle ones go.

A new connection is refused with a GOAWAY, which clients answer by trying again a little later. Meanwhile connections
that have no call and have been silent for ``ServerLimits.crowded_idle_s`` are closed gracefully, the longest silent
first: an honest client that is idle opens another when it needs one, and whoever only holds connections loses them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from raftkv.rpc.limits import ServerLimits

if TYPE_CHECKING:
    from raftkv.rpc.server.accept import Connection

_log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 10.0
LOOK_INTERVAL_S: Final = 0.1
LET_GO: Final = 32
"""Connections that are asked to go at a time."""


class Crowd:
    """Makes room for connections of one server when there are too many.

    Attributes:
        refused_total: connections that were refused.
        let_go_total: idle connections that were closed for others.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.refused_total = 0
        self.let_go_total = 0
        self._idle_s = limits.crowded_idle_s
        self._look_at_s = self._log_at_s = float("-inf")
        self._refused_unsaid = 0

    def refused(self, connections: Iterable[Connection]) -> None:
        """A connection is being refused."""
        self.refused_total += 1
        self._refused_unsaid += 1
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_INTERVAL_S
            self._let_go(connections, now_s)
        if now_s >= self._log_at_s:
            self._log_at_s = now_s + LOG_INTERVAL_S
            _log.warning(
                "refused %d connections: as many are open as may be; %d idle ones were closed so far",
                self._refused_unsaid,
                self.let_go_total,
            )
            self._refused_unsaid = 0

    def _let_go(self, connections: Iterable[Connection], now_s: float) -> None:
        silent = [(one.idle_since_s, one) for one in connections]
        idle = [(since_s, one) for since_s, one in silent if since_s is not None and now_s - since_s >= self._idle_s]
        idle.sort(key=lambda pair: pair[0])
        for _, connection in idle[:LET_GO]:
            self.let_go_total += 1
            connection.drain()
