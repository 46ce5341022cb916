"""The granted leases: which exist, and for how long each was granted.

Owns the lease bucket: id to TTL. Pure like all of applying: an entry grants, revokes, renews or ends leases, and does
so on every member alike. *When* a lease ends is decided by the leader, which puts the decision into the log; nothing
here knows what time it is. Whoever does is told of each change (``LeaseObserver``).

    grant(7, 10) ... put(key, lease=7) ... end([7]): deletes the key, in one revision of its own

Decisions of a leader, to end leases and to renew them, carry its term and have no effect under another: within one
term one member decides, in order, so no lease is ended after a renewal that its decider did not know of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from raftkv import errors
from raftkv.apply.alarms import MetaStore
from raftkv.storage import schema

_ID: Final = struct.Struct(">q")
TTL_MAX_S: Final = 9_000_000_000
"""Longest TTL that is granted (etcd: lease.MaxLeaseTTL)."""


class WriteTxn(Protocol):
    """The part of a write txn that deletes the keys of a lease."""

    def delete_range(self, key: bytes, end: bytes = b"") -> object:
        """Delete a key."""

    def end(self) -> object:
        """Make it visible."""


class LeaseStore(MetaStore, Protocol):
    """The part of the store used here."""

    def begin(self) -> WriteTxn:
        """Open a write txn."""

    def lease_keys(self, lease: int) -> list[bytes]:
        """The keys attached to a lease, in order."""


class LeaseObserver(Protocol):
    """Told of changes as they are applied. Must not change any state that applying reads."""

    def granted(self, lease_id: int, ttl_s: int) -> None:
        """A lease exists now."""

    def renewed(self, lease_ids: Sequence[int]) -> None:
        """Leases were renewed; some may be gone."""

    def ended(self, lease_id: int, *, expired: bool) -> None:
        """A lease is gone: it was revoked, or found expired."""

    def reloaded(self, granted: dict[int, int]) -> None:
        """Everything was replaced by a snapshot."""


class _Nobody:
    def granted(self, lease_id: int, ttl_s: int) -> None:
        pass

    def renewed(self, lease_ids: Sequence[int]) -> None:
        pass

    def ended(self, lease_id: int, *, expired: bool) -> None:
        pass

    def reloaded(self, granted: dict[int, int]) -> None:
        pass


class Leases:
    """The leases that exist.

    Arguments:
        store: where they and their keys are kept.

    Attributes:
        granted: id to TTL (seconds).
        observer: told of changes.
    """

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self.granted: dict[int, int] = {}
        self.observer: LeaseObserver = _Nobody()
        self.reload()

    def reload(self) -> None:
        """Read the leases back from the store: at start, and after a snapshot replaced it."""
        items = self._store.meta_items(schema.LEASE)
        self.granted = {_ID.unpack(key)[0]: _ID.unpack(value)[0] for key, value in items}
        self.observer.reloaded(self.granted)

    def exists(self, lease_id: int) -> bool:
        """Whether the lease is granted and has not ended."""
        return lease_id in self.granted

    def grant(self, lease_id: int, ttl_s: int) -> None:
        """Add a lease.

        Raises:
            LeaseExistsError: the id is in use.
            LeaseNotFoundError: the id is 0.
            LeaseTTLTooLargeError: above ``TTL_MAX_S``.
        """
        if lease_id == 0:
            raise errors.LeaseNotFoundError
        if lease_id in self.granted:
            raise errors.LeaseExistsError
        if ttl_s > TTL_MAX_S:
            raise errors.LeaseTTLTooLargeError
        self.granted[lease_id] = ttl_s
        self._store.meta_put(schema.LEASE, _ID.pack(lease_id), _ID.pack(ttl_s))
        self.observer.granted(lease_id, ttl_s)

    def revoke(self, lease_id: int) -> None:
        """End a lease because somebody asked for it: its keys are deleted, in order, in one revision.

        Raises:
            LeaseNotFoundError: there is no such lease.
        """
        if lease_id not in self.granted:
            raise errors.LeaseNotFoundError
        self._end(lease_id, expired=False)

    def expire(self, lease_ids: Iterable[int]) -> None:
        """End those of the leases that exist, each in a revision of its own (none, if it has no keys)."""
        for lease_id in lease_ids:
            if lease_id in self.granted:
                self._end(lease_id, expired=True)

    def renew(self, lease_ids: Sequence[int]) -> None:
        """Note that leases were renewed. The state stays as it is: time is nothing that members agree on."""
        self.observer.renewed(lease_ids)

    def _end(self, lease_id: int, *, expired: bool) -> None:
        keys = self._store.lease_keys(lease_id)
        if keys:
            write = self._store.begin()
            for key in keys:
                write.delete_range(key)
            write.end()
        del self.granted[lease_id]
        self._store.meta_delete(schema.LEASE, _ID.pack(lease_id))
        self.observer.ended(lease_id, expired=expired)
