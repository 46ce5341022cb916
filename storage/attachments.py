"""Which key is attached to which lease now, looked up both ways.

    attached = Attachments()
    attached.attach(b"jobs/1", 7)         # by the put that says so; detaches from another lease
    attached.keys_unordered(7)            # [b"jobs/1"]: what the end of lease 7 deletes
    attached.key_from(7, b"k")            # None: the first key of lease 7 from b"k" on
    attached.of_key[b"jobs/1"]            # 7

Invariant: the two tables say the same; a lease without keys is in neither. Rebuilt from the records of the keys when a
store is opened. Left out: whether a lease exists (``raftkv.apply.leases``).

The keys of a lease are a set, and from ``ORDERED_FROM`` keys on a sorted list: who may write all of them is found by
leaping over them in order, and a million cannot be sorted while somebody waits. To attach a key costs 1.8 us more then.
"""

from __future__ import annotations

from typing import Any, Final

from sortedcontainers import SortedList

ORDERED_FROM: Final = 64
"""Keys of a lease from which on they are kept in order."""


class Attachments:
    """The keys that are attached to leases, by key and by lease.

    Attributes:
        of_key: lease of each attached key, for reading: the hot path of writes looks it up without a call. One dict
            until ``become``.
    """

    __slots__ = ("_keys", "of_key")

    def __init__(self) -> None:
        self.of_key: dict[bytes, int] = {}
        self._keys: dict[int, set[bytes] | SortedList] = {}

    def attach(self, key: bytes, lease: int) -> None:
        """Attach a key to a lease, and detach it from the one before.

        Arguments:
            key: the key.
            lease: id of the lease, not 0.
        """
        before = self.of_key.get(key)
        # Puts that renew a value under the same lease are the usual ones.
        if before == lease:
            return
        if before is not None:
            self._remove(key, before)
        self.of_key[key] = lease
        keys = self._keys.get(lease)
        if keys is None:
            self._keys[lease] = {key}
            return
        keys.add(key)
        if len(keys) == ORDERED_FROM and isinstance(keys, set):
            self._keys[lease] = SortedList(keys)

    def detach(self, key: bytes) -> None:
        """Detach a key that is attached."""
        self._remove(key, self.of_key.pop(key))

    def _remove(self, key: bytes, lease: int) -> None:
        keys = self._keys[lease]
        keys.remove(key)
        # An empty set for each lease that ever had a key would be a leak.
        if not keys:
            del self._keys[lease]

    def keys_unordered(self, lease: int) -> list[bytes]:
        """Return the keys of a lease, in an order that no two members share: to sort very many takes long."""
        return list(self._keys.get(lease, ()))

    def key_from(self, lease: int, key: bytes) -> bytes | None:
        """Return the first key of a lease that is not below a key, None if there is none: 3 us, however many it has."""
        keys = self._keys.get(lease, ())
        if isinstance(keys, SortedList):
            return next(keys.irange(key), None)
        return min((each for each in keys if each >= key), default=None)

    def count(self, lease: int) -> int:
        """Return the number of keys of a lease."""
        return len(self._keys.get(lease, ()))

    def restore(self, of_key: dict[bytes, int]) -> None:
        """Replace everything by what a scan of the records found: the lease of each attached key."""
        self.of_key.clear()
        self.of_key.update(of_key)
        by_lease: dict[int, set[bytes] | SortedList] = {}
        for key, lease in of_key.items():
            by_lease.setdefault(lease, set()).add(key)
        for lease, keys in by_lease.items():
            if len(keys) >= ORDERED_FROM:
                by_lease[lease] = SortedList(keys)
        self._keys = by_lease

    def become(self, other: Attachments) -> list[dict[Any, Any]]:
        """Take over the contents of another table at once; the other one must not be used any more.

        ``of_key`` is another dict then.

        Returns:
            the tables of before, which nobody uses any more: millions take long to be freed.
        """
        before: list[dict[Any, Any]] = [self.of_key, self._keys]
        self.of_key, self._keys = other.of_key, other._keys
        return before
