"""What a server does that has all the connections it may have: it makes room by letting idle ones go.

Connections for which nothing has been done for ``ServerLimits.crowded_idle_s`` are closed, the longest idle first: an
honest client that is idle opens another when it needs one, and whoever only holds connections loses them. One that can
be closed at once gives its place to the new one; one that speaks HTTP/2 is closed gracefully, and the new one is
refused with a GOAWAY, which clients answer by trying again a little later.
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
LOOK_S_PER_CONNECTION: Final = 1e-5
"""Rest between two looks at all connections, for each of them. A look takes 1 us for each, so all looks together take a
tenth of the time at most.
"""
LET_GO: Final = 32
"""Connections that one look asks to go at most, and never more than one of a hundred: each makes room for one only."""


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
        self._look_interval_s = LOOK_S_PER_CONNECTION * limits.connections
        self._let_go_max = max(1, min(LET_GO, limits.connections // 100))
        self._look_at_s = self._log_at_s = float("-inf")
        self._refused_unsaid = 0

    def make_room(self, connections: Iterable[Connection]) -> bool:
        """Find room for a connection that is one too many; False: it is to be refused.

        Arguments:
            connections: all that are open.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + self._look_interval_s
            if self._let_go(connections, now_s):
                return True
        self.refused_total += 1
        self._refused_unsaid += 1
        if now_s >= self._log_at_s:
            self._log_at_s = now_s + LOG_INTERVAL_S
            _log.warning(
                "refused %d connections: as many are open as may be; %d idle ones were closed so far",
                self._refused_unsaid,
                self.let_go_total,
            )
            self._refused_unsaid = 0
        return False

    def _let_go(self, connections: Iterable[Connection], now_s: float) -> bool:
        """Close some that are idle, and return whether one of them has gone at once."""
        since = [(one.idle_since_s, one) for one in connections]
        idle = [(since_s, one) for since_s, one in since if since_s is not None and now_s - since_s >= self._idle_s]
        idle.sort(key=lambda pair: pair[0])
        have_gone = [connection.make_way() for _, connection in idle[: self._let_go_max]]
        self.let_go_total += len(have_gone)
        return any(have_gone)
