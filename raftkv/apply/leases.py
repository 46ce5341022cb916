"""The granted leases: which exist, for how long each was granted, and to whom.

Owns the lease bucket: id to TTL, and behind it the name of the user, if users were asked for. Pure like all of
applying: an entry grants, revokes, renews or ends leases, and does so on every member alike. *When* a lease ends is
decided by the leader, which puts the decision into the log; nothing here reads a clock. A ``LeaseObserver``, which
does, hears of each change.

    grant(7, 10) ... put(key, lease=7) ... end([7]): deletes the key, in one revision of its own

Decisions of a leader, to end leases and to renew them, carry its term and have no effect under another: within one
term one member decides, in order, so no lease is ended after a renewal that its decider did not know of.
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
"""Keys sorted at once: about a millisecond."""
_KEYS_PER_PIECE: Final = 256
_LEASES_PER_PIECE: Final = 2_000
"""Leases of a received database that are read in one step, which takes 2 ms."""
TTL_MAX_S: Final = 9_000_000_000
"""Longest TTL that is granted (etcd: lease.MaxLeaseTTL)."""


class LeaseObserver(Protocol):
    """A listener to the leases of a member, called as entries are applied; it must not change any state that applying
    reads.
    """

    def granted(self, lease_id: int, ttl_s: int) -> None:
        """Note that a lease exists now.

        Arguments:
            lease_id: its id.
            ttl_s: its TTL in seconds.
        """

    def renewed(self, lease_ids: Sequence[int]) -> None:
        """Note that leases were renewed; some may be gone."""

    def ended(self, lease_id: int, *, expired: bool) -> None:
        """Note that a lease is gone.

        Arguments:
            lease_id: its id.
            expired: whether it expired; else it was revoked.
        """

    def receive(self, granted: dict[int, int]) -> Generator[None, None, None]:
        """Get ready, in steps, for ``reloaded`` with the same leases."""

    def reloaded(self, granted: dict[int, int]) -> None:
        """Note that everything was replaced by a snapshot: ``granted`` is the TTL in seconds of each lease."""


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
    """What the bucket holds."""

    def __init__(self) -> None:
        self.granted: dict[int, int] = {}
        self.owners: dict[int, bytes] = {}
        self._names: dict[bytes, bytes] = {}

    def add(self, key: bytes, value: bytes) -> None:
        """Take a record."""
        (lease_id,) = _ID.unpack(key)
        (self.granted[lease_id],) = _ID.unpack_from(value)
        if len(value) > _ID.size:
            owner = value[_ID.size :]
            self.owners[lease_id] = self._names.setdefault(owner, owner)  # a million leases may be of one user


class Leases:
    """The leases that exist, by id.

    Arguments:
        store: where they and their keys are kept.

    Attributes:
        granted: id to TTL (seconds).
        owners: id to the name of the user that it was granted to; without an entry, it was granted to no user.
        observer: called with each change.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.granted: dict[int, int] = {}
        self.owners: dict[int, bytes] = {}
        self.observer: LeaseObserver = _NoObserver()
        self._received: _Read | None = None
        self.reload()

    def receive(self, read: ReadTxn) -> Generator[None, None, None]:
        """Read the leases of a database that is about to take the place of the store, in steps; ``reload`` follows.

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
        """Take what was received, or read the leases back from the store: after a snapshot replaced it, at a start."""
        read, self._received = self._received, None
        if read is None:
            read = _Read()
            with schema.reading(schema.LEASE):
                for key, value in self._store.meta_items(schema.LEASE):
                    read.add(key, value)
        self.granted, self.owners = read.granted, read.owners
        self.observer.reloaded(self.granted)

    def exists(self, lease_id: int) -> bool:
        """Return whether a lease is granted and has not ended."""
        return lease_id in self.granted

    def grant(self, lease_id: int, ttl_s: int, owner: bytes = b"") -> None:
        """Add a lease.

        Arguments:
            lease_id: its id, not 0.
            ttl_s: its TTL in seconds, at most ``TTL_MAX_S``.
            owner: the user to whom it is granted; empty: none.

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
        if owner:
            self.owners[lease_id] = owner
        self._store.meta_put(schema.LEASE, _ID.pack(lease_id), _ID.pack(ttl_s) + owner)
        self.observer.granted(lease_id, ttl_s)

    def check(self, lease_id: int) -> None:
        """Refuse a lease that does not exist.

        Raises:
            LeaseNotFoundError: there is no such lease.
        """
        if lease_id not in self.granted:
            raise errors.LeaseNotFoundError

    def end(self, lease_ids: Iterable[int], changes_max: int, *, expired: bool) -> Generator[None, None, None]:
        """End those of the leases that exist, with a pause after each piece.

        The keys of a lease are deleted, in order, in a revision of its own: none if it has none, several if it has more
        than ``changes_max``.

        Arguments:
            lease_ids: the leases.
            changes_max: keys deleted in one revision.
            expired: whether they expired; else they were revoked.
        """
        for lease_id in lease_ids:
            if lease_id in self.granted:
                yield from self._delete_keys(lease_id, changes_max)
                del self.granted[lease_id]
                self.owners.pop(lease_id, None)
                self._store.meta_delete(schema.LEASE, _ID.pack(lease_id))
                self.observer.ended(lease_id, expired=expired)

    def _delete_keys(self, lease_id: int, changes_max: int) -> Generator[None, None, None]:
        names = self._store.lease_keys_unordered(lease_id)
        # Sorted in runs with pauses between, then merged: to sort a million keys at once would hold the loop.
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
            # Quotas count what is left of the revision before its end.
            yield
            write.end()
            left -= changes_max

    def renew(self, lease_ids: Sequence[int]) -> None:
        """Pass on to the observer that leases were renewed. The state stays as it is: members do not agree on time."""
        self.observer.renewed(lease_ids)
