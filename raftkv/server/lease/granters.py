"""Who had this member grant how many leases: a share for each identity (``rpc/shares``).

    granters.admit(lease_id, identity)     # before the grant is proposed; ShareError: it has its share
    granters.ended(lease_id)               # every lease that is gone

A lease is not stored with its granter, so this is counted where a client asks, and forgotten with the process: leases
that other members granted, or this one before its start, count as taken, and as those of others. So an identity that
goes to each member, or comes again after each restart, gets seven eighths of what is left each time, and something
is left for those who come after it. No lease is taken back: keys hang on it.

Bounded: one entry for each lease, and one for each grant whose outcome may still come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from raftkv import errors
from raftkv.rpc.shares import Identity, Shares, refusal

LEASES_MAX: Final = 1_000_000
"""Leases that one identity alone may have; all together have a seventh more. etcd has no limit but its memory."""

UNKNOWN_MAX_S: Final = 60.0
"""A grant that is not applied after so long is counted no more."""

_LOOKED_AT: Final = 2
"""Grants that each further one has looked at, whether they were applied: more than come."""


class Leases(Protocol):
    """Leases that exist."""

    def __len__(self) -> int: ...

    def ttl_s(self, lease_id: int) -> int:
        """Return the seconds that a lease was granted for; 0: there is none."""


class Granters:
    """Counts leases by who had them granted here.

    Arguments:
        leases: as applied.
        clock: seconds, monotonic.
    """

    def __init__(self, leases: Leases, clock: Callable[[], float]) -> None:
        self._leases = leases
        self._clock = clock
        self._identities: dict[int, Identity] = {}
        self._proposed: deque[tuple[float, int]] = deque()
        self.shares = Shares(LEASES_MAX)

    def admit(self, lease_id: int, identity: Identity) -> None:
        """Count a lease that is about to be granted.

        Arguments:
            lease_id: of the lease.
            identity: who asks for it.

        Raises:
            ShareError: it has its share.
        """
        now = self._clock()
        self._forget_unapplied(now)
        if lease_id in self._identities or self._leases.ttl_s(lease_id):
            return  # it is refused when it is applied
        others = max(0, len(self._leases) - self.shares.used)
        if not self.shares.has_room(identity, 1, others):
            raise errors.ShareError(refusal(identity, f"{self.shares.limit} leases that a cluster has for one client"))
        self._identities[lease_id] = identity
        self.shares.take(identity, 1)
        self._proposed.append((now, lease_id))

    def ended(self, lease_id: int) -> None:
        """Count a lease no more, if it was counted."""
        identity = self._identities.pop(lease_id, None)
        if identity is not None:
            self.shares.give_back(identity, 1)

    def _forget_unapplied(self, now: float) -> None:
        for _ in range(_LOOKED_AT):
            if not self._proposed or now - self._proposed[0][0] < UNKNOWN_MAX_S:
                return
            _, lease_id = self._proposed.popleft()
            if not self._leases.ttl_s(lease_id):
                self.ended(lease_id)
