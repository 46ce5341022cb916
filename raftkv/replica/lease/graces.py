"""Leases that end soon after the connection of their owner breaks, on the member that receives their keep-alives.

A client may state in each keep-alive how long the lease should outlive a broken connection (``disconnect_grace_ms``).
This member remembers that for each stream; when the connection of the last such stream breaks, it reports to the
leader:

    keep-alive with a grace, answered  -> the stream keeps that lease
    connection of the stream breaks    -> leases that no other stream here keeps, by a right of now, are reported
    answer that comes after that       -> nothing: the leader has renewed the lease, which lasts its whole TTL again
    stream ends in any other way       -> forgotten: its client is alive, and may continue elsewhere

The end of a lease deletes its keys, which others may have attached since. So a report names the user who requested the
grace, and the leader ends the lease as if that user had revoked it, with the rights at the last keep-alive.

Each report contains the time of the last answer, so that the leader knows whether another stream has kept the lease
alive since, for example the same client through another member. If a keep-alive was still unanswered when its
connection broke, the order is unknown: the leader may process it after those of the client's new connection. So such a
lease is not reported, and ends late rather than early. This module does no I/O and has no clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from raftkv.apply.leases import TTL_MAX_S
from raftkv.apply.wire import Caller
from raftkv.rpc.shares import Identity, Shares

KEPT_MAX: Final = 200_000
"""Leases that the streams of one identity keep here, each counted for each stream, 200 bytes or more; further ones end
with their TTL. Another seventh is for all other identities together."""


GRACE_MAX_MS: Final = 1000 * TTL_MAX_S
"""A longer grace has the same effect: every lease has ended by then. Clients may send any 64-bit number."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """A lease whose owner's connection was lost.

    Attributes:
        lease_id: id of the lease.
        grace_s: how long it should live on, in seconds.
        answered_at: loop time when the last keep-alive of its owner was answered here.
        caller: its owner, as of the users and roles at that keep-alive; ``None``: unknown.
    """

    lease_id: int
    grace_s: float
    answered_at: float
    caller: Caller | None = None


Report = Callable[[list[ConnectionLost]], None]


class Graces:
    """Remembers which streams keep which leases, and reports leases whose last connection was lost.

    Arguments:
        clock: returns the loop time.
        report: called with leases that should end soon.
        may_keep: returns whether the user of another stream may still keep the lease alive: any user may keep one
            without keys, and keys may have been attached since.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        report: Report,
        may_keep: Callable[[ConnectionLost], bool] = lambda kept: True,
    ) -> None:
        self._clock = clock
        self._report = report
        self._may_keep = may_keep
        self._keepers: dict[int, dict[Hashable, ConnectionLost]] = {}
        self._kept: dict[Hashable, tuple[Identity, set[int]]] = {}
        self.shares = Shares(KEPT_MAX)

    def __len__(self) -> int:
        return len(self._keepers)

    def answered(
        self,
        stream: Hashable,
        lease_id: int,
        grace_ms: int,
        ttl_s: int,
        caller: Caller | None = None,
        identity: Identity = "",
    ) -> None:
        """Record an answered keep-alive.

        Arguments:
            stream: stream of the keep-alive, which has not ended.
            lease_id, ttl_s: values of the answer.
            grace_ms: requested grace; 0 or less: none.
            caller: owner of the lease; ``None``: unknown.
            identity: in whose share the stream counts.
        """
        keepers = self._keepers.get(lease_id)
        if keepers is None and grace_ms <= 0:
            return  # nearly all keep-alives
        if ttl_s > 0:
            grace_s = min(grace_ms, GRACE_MAX_MS) / 1000
            self._remember(stream, ConnectionLost(lease_id, grace_s, self._clock(), caller), identity)

    def _remember(self, stream: Hashable, entry: ConnectionLost, identity: Identity) -> None:
        # Also without a grace: this stream then only prevents reports for other streams with the same lease.
        identity, kept = self._kept.get(stream) or (identity, set())
        if entry.lease_id not in kept:
            if not self.shares.has_room(identity, 1):
                return
            self.shares.take(identity, 1)
            kept.add(entry.lease_id)
            self._kept[stream] = identity, kept
        self._keepers.setdefault(entry.lease_id, {})[stream] = entry

    def stream_ended(self, stream: Hashable, *, severed: bool) -> None:
        """Forget a stream; if its connection broke, report the leases that no other stream keeps.

        Arguments:
            stream: stream of keep-alives.
            severed: whether its connection broke, so that its client could not end it.
        """
        identity, kept = self._kept.pop(stream, ("", set()))
        if not kept:
            return  # nearly all streams
        self.shares.give_back(identity, len(kept))
        lost = []
        for lease_id in kept:
            keepers = self._keepers[lease_id]
            entry = keepers.pop(stream)
            if severed and entry.grace_s > 0 and not any(map(self._may_keep, keepers.values())):
                lost.append(entry)
            if not keepers:
                del self._keepers[lease_id]
        if lost:
            self._report(lost)

    def lease_ended(self, lease_id: int) -> None:
        """Forget a lease."""
        for stream in self._keepers.pop(lease_id, ()):
            identity, kept = self._kept[stream]
            kept.discard(lease_id)
            self.shares.give_back(identity, 1)
