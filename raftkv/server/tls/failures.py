"""A line in the log for connections that failed over TLS, and not one for each: anybody can make them fail.

Budgets: one line for a remote host and reason in ``INTERVAL_S``, which says how many more there were, and
``REMEMBERED_MAX`` of these pairs, beyond which failures share a line. All are counted in the metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)

INTERVAL_S: Final = 10.0
REMEMBERED_MAX: Final = 256
_OTHERS: Final = ("", "")


class FailureLog:
    """Failed handshakes of one kind of port.

    Arguments:
        text: the line, with ``%s`` for the address and for the reason.
        clock: monotonic seconds.

    Attributes:
        count: of all failures.
        listener: hears of each that has a line, address and reason; None: nobody does.
    """

    def __init__(self, text: str, clock: Callable[[], float]) -> None:
        self._text = text
        self._clock = clock
        self._seen: dict[tuple[str, str], list[float]] = {}
        self.count = 0
        self.listener: Callable[[str, str], None] | None = None

    def note(self, address: str, reason: str) -> None:
        """Count a failure, and tell of it unless the same was told a moment ago.

        Arguments:
            address: of the other end.
            reason: in a few words.
        """
        self.count += 1
        now_s = self._clock()
        key = (address.rpartition(":")[0], reason)
        if key not in self._seen and len(self._seen) >= REMEMBERED_MAX:
            self._forget(now_s)
        if key not in self._seen and len(self._seen) >= REMEMBERED_MAX:
            key, address, reason = _OTHERS, "other addresses", "many reasons"
        told = self._seen.get(key)
        if told is not None and now_s - told[0] < INTERVAL_S:
            told[1] += 1
            return
        more = f" ({told[1]:.0f} more like it since the last line)" if told is not None and told[1] else ""
        self._seen[key] = [now_s, 0]
        _log.warning(self._text + "%s", address, reason, more)
        if self.listener is not None:
            self.listener(address, reason + more)

    def _forget(self, now_s: float) -> None:
        for key in [key for key, told in self._seen.items() if now_s - told[0] >= INTERVAL_S]:
            del self._seen[key]
