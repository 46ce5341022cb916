"""Leases that end soon after the connection of their owner breaks, on the member that their keep-alives come to.

A client may say with each keep-alive how long the lease shall outlive a broken connection (``disconnect_grace_ms``).
This member remembers it for each stream; when the connection of the last such stream breaks, it reports to the
leader:

    keep-alive with a grace, answered  -> the stream keeps that lease
    connection of the stream breaks    -> leases that no other stream here keeps are reported
    answer that comes after that       -> nothing: the leader has renewed the lease, which lasts its whole TTL again
    stream ends in any other way       -> forgotten: its client is alive, and may go on elsewhere

The end of a lease deletes its keys, which others may have attached since. So a report names the user who asked for
the grace, and the leader ends the lease as if that user had revoked it, under the rights of the last keep-alive.

Each report carries when the last answer was passed on, so that the leader knows whether another stream has kept the
lease alive since, for example the same client by way of another member. For a keep-alive that was still under way
when its connection broke, the order is unknown: the leader may take it after those by which the client went on
elsewhere. So it is not reported, and a lease ends late rather than early. Without I/O and without a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from raftkv.apply.leases import TTL_MAX_S
from raftkv.apply.wire import Caller

KEPT_MAX: Final = 100_000
"""Leases with a grace that one stream may have; the others end with their TTL."""


GRACE_MAX_MS: Final = 1000 * TTL_MAX_S
"""A longer grace means no more than this one: every lease has ended by then. Clients may ask for any 64-bit number."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """A lease whose owner's connection was lost.

    Attributes:
        lease_id: of the lease.
        grace_s: how long it shall live on.
        answered_at: loop time when the last keep-alive of its owner was answered here.
        caller: its owner, by the users and roles of that keep-alive; None: unknown.
    """

    lease_id: int
    grace_s: float
    answered_at: float
    caller: Caller | None = None


Report = Callable[[list[ConnectionLost]], None]


class Graces:
    """Remembers which streams keep which leases, and reports leases whose last connection was lost.

    Arguments:
        clock: loop time.
        report: called with leases that shall end soon.
    """

    def __init__(self, clock: Callable[[], float], report: Report) -> None:
        self._clock = clock
        self._report = report
        self._keepers: dict[int, dict[Hashable, ConnectionLost]] = {}
        self._kept: dict[Hashable, set[int]] = {}

    def __len__(self) -> int:
        return len(self._keepers)

    def answered(
        self, stream: Hashable, lease_id: int, grace_ms: int, ttl_s: int, caller: Caller | None = None
    ) -> None:
        """A keep-alive was answered.

        Arguments:
            stream: by which it came, and which has not ended.
            lease_id, ttl_s: as answered.
            grace_ms: as asked for; 0 or less: none.
            caller: who keeps the lease; None: unknown.
        """
        keepers = self._keepers.get(lease_id)
        if keepers is None and grace_ms <= 0:
            return  # what nearly all keep-alives are
        if ttl_s > 0:
            grace_s = min(grace_ms, GRACE_MAX_MS) / 1000
            self._remember(stream, ConnectionLost(lease_id, grace_s, self._clock(), caller))

    def _remember(self, stream: Hashable, entry: ConnectionLost) -> None:
        # Also without a grace: then this stream does nothing but hold back the others that keep the same lease.
        kept = self._kept.setdefault(stream, set())
        if len(kept) < KEPT_MAX:
            kept.add(entry.lease_id)
        if entry.lease_id in kept:
            self._keepers.setdefault(entry.lease_id, {})[stream] = entry

    def stream_ended(self, stream: Hashable, *, severed: bool) -> None:
        """Forget a stream; if its connection broke, report the leases that no other stream keeps.

        Arguments:
            stream: by which keep-alives came.
            severed: whether its connection broke, so that its client could not end it.
        """
        kept = self._kept.pop(stream, None)
        if kept is None:
            return  # what nearly all streams are
        lost = []
        for lease_id in kept:
            keepers = self._keepers[lease_id]
            entry = keepers.pop(stream)
            if not keepers:
                del self._keepers[lease_id]
                lost.append(entry)
        lost = [entry for entry in lost if entry.grace_s > 0]
        if severed and lost:
            self._report(lost)

    def lease_ended(self, lease_id: int) -> None:
        """Forget a lease."""
        for stream in self._keepers.pop(lease_id, ()):
            self._kept[stream].discard(lease_id)
