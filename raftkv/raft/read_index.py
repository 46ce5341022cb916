"""Linearizable reads without writing to the log (thesis section 6.4, etcd's ReadOnlySafe).

A read notes the commit index at its arrival and is answered once a quorum has confirmed, *after* that arrival, that
this member still leads. The confirmations ride on heartbeats: reads get positions 1, 2, 3, ... in order of arrival,
a heartbeat carries the last position handed out, and who answers it confirms every read up to there. So one round
serves any number of reads, and equal contexts of two requests can never be confused::

    read a (1)   read b (2)   heartbeat ctx=2   answer ctx=2 from a quorum  ->  a and b are confirmed

Reads that reach a leader before it has committed an entry of its own term wait aside (``deferred``): until then it
cannot know what its predecessors committed.

Invariant: ``confirmed + len(queue)`` is the last position handed out. One queue lives as long as one leadership, so
answers of another term (which the term rule drops) never meet it.
"""

from __future__ import annotations

from collections import deque

from . import quorum
from .confchange import Configuration

_POSITION_BYTES = 8


class ReadRequest:
    """One read: the member that asked, its context, and the commit index when the read was noted."""

    __slots__ = ("context", "from_", "index")

    def __init__(self, from_: int, context: bytes, index: int = 0) -> None:
        self.from_ = from_
        self.context = context
        self.index = index


class ReadIndexQueue:
    """The reads that wait for the confirmation of one leadership."""

    __slots__ = ("_acked", "_queue", "confirmed", "deferred")

    def __init__(self) -> None:
        self._acked: dict[int, int] = {}
        self._queue: deque[ReadRequest] = deque()
        # Reads that were confirmed and have left the queue.
        self.confirmed = 0
        # Reads that arrived before the first commit of the term.
        self.deferred: list[ReadRequest] = []

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, leader: int, request: ReadRequest, committed: int) -> None:
        """Queue a read at the present commit index. The leader confirms itself.

        Arguments:
            leader: id of this member.
            request: the read; its index is set here.
            committed: the commit index.
        """
        request.index = committed
        self._queue.append(request)
        self._acked[leader] = self.confirmed + len(self._queue)

    def context(self) -> bytes:
        """Return what a heartbeat carries to confirm every read in the queue; empty when there is none."""
        if not self._queue:
            return b""
        return (self.confirmed + len(self._queue)).to_bytes(_POSITION_BYTES, "big")

    def acknowledge(self, id: int, context: bytes) -> None:
        """Note that a member answered a heartbeat.

        Arguments:
            id: of the member.
            context: what its answer carries; anything but a position is ignored.
        """
        if len(context) == _POSITION_BYTES:
            position = int.from_bytes(context, "big")
            if self._acked.get(id, 0) < position <= self.confirmed + len(self._queue):
                self._acked[id] = position

    def take_confirmed(self, config: Configuration) -> list[ReadRequest]:
        """Take the reads that a quorum of ``config`` has confirmed out of the queue, oldest first."""
        if not self._queue:
            return []
        position = quorum.joint_committed_index(config.voters, config.outgoing, self._acked)
        count = min(position - self.confirmed, len(self._queue))
        if count <= 0:
            return []
        self.confirmed += count
        return [self._queue.popleft() for _ in range(count)]

    def take_deferred(self) -> list[ReadRequest]:
        """Take the reads that waited for the first commit of the term."""
        deferred, self.deferred = self.deferred, []
        return deferred
