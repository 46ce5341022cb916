"""The granted leases: their ids, TTLs, and owners.

The lease bucket maps an id to the TTL, followed by the name of the user if authentication was enabled. Like all of
applying, this is deterministic: an entry grants, revokes, renews or ends leases, in the same way on every member. The
leader decides *when* a lease ends, and puts the decision into the log; nothing here reads a clock. A
``LeaseObserver``, which does, is notified of each change.

    grant(7, 10) ... put(key, lease=7) ... end([7]): deletes the key, in one revision of its own

Decisions of a leader to end or renew leases carry its term and have no effect in another term: within one term one
member decides, in order, so no lease is ended after a renewal that the leader did not know of.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable, Sequence
from heapq import merge
from typing import Final, Protocol

from raftkv import errors
from raftkv.storage import schema
from raftkv.storage.backend.base import ReadTxn
from raftkv.storage.mvcc import Store

_ID: Final = struct.Struct(">q")
_RUN_KEYS: Final = 4096
"""Keys sorted at once: about 1 ms."""
_KEYS_PER_PIECE: Final = 256
_LEASES_PER_PIECE: Final = 2_000
"""Leases of a received database read in one step: 2 ms."""
TTL_MAX_S: Final = 9_000_000_000
"""Longest TTL that is granted, in seconds (etcd: lease.MaxLeaseTTL)."""


class LeaseObserver(Protocol):
    """An observer of the leases of a member, called as entries are applied; it must not change any state that applying
    reads.
    """

    def granted(self, lease_id: int, ttl_s: int) -> None:
        """Called when a lease was granted.

        Arguments:
            lease_id: id of the lease.
            ttl_s: its TTL in seconds.
        """

    def renewed(self, lease_ids: Sequence[int]) -> None:
        """Called when leases were renewed; some may no longer exist."""

    def ended(self, lease_id: int, *, expired: bool) -> None:
        """Called when a lease has ended.

        Arguments:
            lease_id: id of the lease.
            expired: whether it expired; otherwise it was revoked.
        """

    def receive(self, granted: dict[int, int]) -> Generator[None, None, None]:
        """Prepare, in steps, for ``reloaded`` with the same leases."""

    def reloaded(self, granted: dict[int, int]) -> None:
        """Called when a snapshot replaced everything: ``granted`` has the TTL in seconds of each lease."""


class _NoObserver:
    def granted(self, lease_id: int, ttl_s: int) -> None:
        pass

    def renewed(self, lease_ids: Sequence[int]) -> None:
        pass

    def ended(self, lease_id: int, *, expired: bool) -> None:
        pass

    def receive(self, granted: dict[int, int]) -> Generator[None, None, None]:
        yield from ()

    def reloaded(self, granted: dict[int, int]) -> None:
        pass


class _Read:
    """The contents of the bucket."""

    def __init__(self) -> None:
        self.granted: dict[int, int] = {}
        self.owners: dict[int, bytes] = {}
        self._names: dict[bytes, bytes] = {}

    def add(self, key: bytes, value: bytes) -> None:
        """Add a record."""
        (lease_id,) = _ID.unpack(key)
        (self.granted[lease_id],) = _ID.unpack_from(value)
        if len(value) > _ID.size:
            owner = value[_ID.size :]
            self.owners[lease_id] = self._names.setdefault(owner, owner)  # a million leases may belong to one user


class Leases:
    """The leases that exist, by id.

    Arguments:
        store: store of the leases and their keys.

    Attributes:
        granted: id to TTL in seconds.
        owners: id to the name of the user to whom the lease was granted; no entry if there was no user.
        observer: notified of each change.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.granted: dict[int, int] = {}
        self.owners: dict[int, bytes] = {}
        self.observer: LeaseObserver = _NoObserver()
        self._received: _Read | None = None
        self.reload()

    def receive(self, read: ReadTxn) -> Generator[None, None, None]:
        """Read the leases of a database that will replace the store, in steps; ``reload`` must follow.

        There may be a million, which takes seconds.

        Arguments:
            read: the database. No entry may be applied until ``reload``.
        """
        received = _Read()
        with schema.reading(schema.LEASE):
            for number, (key, value) in enumerate(read.items(schema.LEASE), 1):
                received.add(key, value)
                if number % _LEASES_PER_PIECE == 0:
                    yield
        yield from self.observer.receive(received.granted)
        self._received = received

    def reload(self) -> None:
        """Use the received leases, or read them from the store: after a snapshot replaced it, and at start."""
        read, self._received = self._received, None
        if read is None:
            read = _Read()
            with schema.reading(schema.LEASE):
                for key, value in self._store.meta_items(schema.LEASE):
                    read.add(key, value)
        self.granted, self.owners = read.granted, read.owners
        self.observer.reloaded(self.granted)

    def exists(self, lease_id: int) -> bool:
        """Return whether a lease was granted and has not ended."""
        return lease_id in self.granted

    def grant(self, lease_id: int, ttl_s: int, owner: bytes = b"") -> None:
        """Add a lease.

        Arguments:
            lease_id: its id, not 0.
            ttl_s: its TTL in seconds, at most ``TTL_MAX_S``.
            owner: user to whom it is granted; empty: none.

        Raises:
            LeaseExistsError: the id is in use.
            LeaseNotFoundError: the id is 0.
            LeaseTTLTooLargeError: the TTL is above ``TTL_MAX_S``.
        """
        if lease_id == 0:
            raise errors.LeaseNotFoundError
        if lease_id in self.granted:
            raise errors.LeaseExistsError
        if ttl_s > TTL_MAX_S:
            raise errors.LeaseTTLTooLargeError
        self.granted[lease_id] = ttl_s
        if owner:
            self.owners[lease_id] = owner
        self._store.meta_put(schema.LEASE, _ID.pack(lease_id), _ID.pack(ttl_s) + owner)
        self.observer.granted(lease_id, ttl_s)

    def check(self, lease_id: int) -> None:
        """Refuse a lease that does not exist.

        Raises:
            LeaseNotFoundError: the lease does not exist.
        """
        if lease_id not in self.granted:
            raise errors.LeaseNotFoundError

    def end(self, lease_ids: Iterable[int], changes_max: int, *, expired: bool) -> Generator[None, None, None]:
        """End the leases that exist, with a pause after each piece.

        The keys of a lease are deleted, in order, in a revision of their own: none if there are no keys, several
        revisions if there are more than ``changes_max``.

        Arguments:
            lease_ids: the leases.
            changes_max: maximum number of keys deleted in one revision.
            expired: whether they expired; otherwise they were revoked.
        """
        for lease_id in lease_ids:
            if lease_id in self.granted:
                yield from self._delete_keys(lease_id, changes_max)
                del self.granted[lease_id]
                self.owners.pop(lease_id, None)
                self._store.meta_delete(schema.LEASE, _ID.pack(lease_id))
                self.observer.ended(lease_id, expired=expired)

    def _delete_keys(self, lease_id: int, changes_max: int) -> Generator[None, None, None]:
        names = self._store.attachments.keys_unordered(lease_id)
        # Sorted in runs with pauses in between, then merged: sorting a million keys at once would block the loop.
        runs = []
        for start in range(0, len(names), _RUN_KEYS):
            runs.append(sorted(names[start : start + _RUN_KEYS]))
            yield
        keys, left = merge(*runs), len(names)
        while left > 0:
            write = self._store.begin()
            for number in range(1, min(left, changes_max) + 1):
                write.delete_range(next(keys))
                if number % _KEYS_PER_PIECE == 0:
                    yield
            # Let the quotas count the remaining changes before the end of the revision.
            yield
            write.end()
            left -= changes_max

    def renew(self, lease_ids: Sequence[int]) -> None:
        """Report renewed leases to the observer. The state does not change: members do not agree on time."""
        self.observer.renewed(lease_ids)
