"""A bound on lines that another machine can cause as often as it likes: so many of each place in the sources.

A request of an administrator, a message of a member, a stranger's attempt may each have a line, which tells an operator
what happened, and nobody wants a million of them, nor a full disk. So each place has ``BURST`` lines at once, and one
each ``INTERVAL_S`` after that; the next that is written says how many were left out. What is below INFO is for whoever
asked for it, and the last words of a member are always written.

Compiled code has no frames: all that it logs seems to come from the interpreted line that called it, such as one of the
event loop. So the text before its values are filled in, which no two places of raftkv's share, belongs to the place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Final

BURST: Final = 50
"""Lines of one place at once: as many as a large cluster has members that are lost and found in one moment."""

INTERVAL_S: Final = 1.0

PLACES_MAX: Final = 10_000
"""Places that texts distinguish, far more than there are: a text that others make up would be one more."""

_OWN: Final = "raftkv"


class Repeats(logging.Filter):
    """What one handler has written.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int, str, str], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is written; its attribute ``more`` then says what was left out before it.

        Arguments:
            record: any.
        """
        record.more = ""
        if not logging.INFO <= record.levelno < logging.CRITICAL:
            return True
        place = self._place(record)
        now_s = self._clock()
        # The time up to which its lines are spent: in the past, it has all of them.
        spent_s = max(place.spent_s, now_s) + INTERVAL_S
        if spent_s > now_s + BURST * INTERVAL_S:
            place.left_out += 1
            return False
        place.spent_s = spent_s
        if place.left_out:
            record.more = f" ({place.left_out} more like it were left out before)"
            place.left_out = 0
        return True

    def _place(self, record: logging.LogRecord) -> _Place:
        # Other people's texts without values have them in the text.
        text = str(record.msg) if record.args or record.name.startswith(_OWN) else ""
        key = (record.pathname, record.lineno, record.name, text)
        if key not in self._places and len(self._places) >= PLACES_MAX:
            key = (record.pathname, record.lineno, record.name, "")
        return self._places.setdefault(key, _Place())


class _Place:
    """A line of the sources that logs."""

    __slots__ = ("left_out", "spent_s")

    def __init__(self) -> None:
        self.spent_s = float("-inf")
        self.left_out = 0
