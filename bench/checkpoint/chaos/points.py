"""Where a rank can be stopped while it saves a checkpoint.

A rank that reaches its point says so over its pipe and waits there: to be killed, to be frozen, or to go on.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Final

BEFORE_WRITE: Final = "before_write"
MID_WRITE: Final = "mid_write"
BEFORE_PREPARE: Final = "before_prepare"
AFTER_PREPARE: Final = "after_prepare"
BEFORE_COMMIT: Final = "before_commit"
MID_TRACKER: Final = "mid_tracker"
AFTER_COMMIT: Final = "after_commit"

POINTS: Final = (BEFORE_WRITE, MID_WRITE, BEFORE_PREPARE, AFTER_PREPARE, BEFORE_COMMIT, AFTER_COMMIT)
"""Nothing written; half of the shard; all bytes durable; prepared; manifest written, but not committed; committed."""
ALL_POINTS: Final = (*POINTS[:-1], MID_TRACKER, AFTER_COMMIT)
"""With the one that only tools with a tracker file have: it is truncated, and not written yet."""
COORDINATOR_POINTS: Final = (BEFORE_COMMIT, MID_TRACKER, AFTER_COMMIT)
"""Here the coordinator stops, whoever is to be killed: the others wait for it."""

AT: Final = "at"
BARRIER: Final = "barrier"
DONE: Final = "done"
FAILED: Final = "failed"
READY: Final = "ready"
"""What ranks say."""
GO: Final = "go"
BROKEN: Final = "broken"
"""What they are answered."""


class GroupBroken(Exception):
    """The process group of a rank is gone: a collective failed."""


class Points:
    """The point at which this rank is to stop.

    Arguments:
        link: to the driver.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        self.stop_at = ""

    def reach(self, point: str) -> None:
        """Stop here, if this is the point."""
        if point == self.stop_at:
            self.stop_at = ""
            self._link.send((AT, point))
            self._link.recv()

    def barrier(self) -> None:
        """Wait for all ranks of the generation.

        Raises:
            GroupBroken: one of them is gone.
        """
        self._link.send((BARRIER, ""))
        if self._link.recv() == BROKEN:
            raise GroupBroken
