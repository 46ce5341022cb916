"""The write transaction: all changes of one log entry under one new revision.

    txn = store.begin()
    previous = txn.put(b"k", b"v")        # revision main.0
    txn.delete_range(b"a", b"b")          # main.1, main.2 ...
    changes = txn.end()                   # the store is at revision main now

Rules, all etcd's: every change takes ``main = revision + 1`` and the next ``sub``; reads inside see the changes made
so far; without a change the revision stays. There is no roll-back: every reason to refuse a request is checked before
the first change, so a change never fails for a reason that a client could cause (errors from here are fatal).

This is the hot path: 10 puts cost less than one commit of the log. Hence one transaction object per store, used again
and again, fields encoded once per revision, and no object per change other than the record and one tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from sys import getrefcount
from typing import Any, Final

from google_crc32c import value as crc32c
from sortedcontainers import SortedList

from raftkv.errors import InvariantError
from raftkv.storage.index import Index
from raftkv.storage.key_value import (
    KEY_HEADS,
    VALUE_HEADS,
    VERSION_FIELDS,
    create_field,
    key_head,
    lease_field,
    mod_field,
    value_head,
    version_field,
)
from raftkv.storage.mvcc_range import RangeResult, Reader, check_revision
from raftkv.storage.overlay import FREED_AT_ONCE, Overlay
from raftkv.storage.revision import SUB_BITS, SUB_MASK, TOMBSTONE_MARK, pack_key, pack_seal
from raftkv.storage.selection import Pieces, Selection, no_limit

# -- attachments ----------------------------------------------------------------------------------------------------
#
# Attachments: which key is attached to which lease now, looked up both ways.
#
#     attached = Attachments()
#     attached.attach(b"jobs/1", 7)         # by the put that says so; detaches from another lease
#     attached.keys_unordered(7)            # [b"jobs/1"]: what the end of lease 7 deletes
#     attached.key_from(7, b"k")            # None: the first key of lease 7 from b"k" on
#     attached.of_key[b"jobs/1"]            # 7
#
# Invariant: the two tables say the same; a lease without keys is in neither. Rebuilt from the records of the keys when
# a store is opened. Left out: whether a lease exists (``raftkv.apply.leases``).
#
# The keys of a lease are a set, and from ``ORDERED_FROM`` keys on a sorted list: the check whether a user may write all
# of them leaps over them in order, and sorting a million at once would hold the loop. Attaching a key then costs 1.8 us
# more.

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
            the previous tables, unused now: millions take long to be freed.
        """
        before: list[dict[Any, Any]] = [self.of_key, self._keys]
        self.of_key, self._keys = other.of_key, other._keys
        return before


_SEPARATOR: Final = 0x5F  # "_"
_SMALL: Final = len(KEY_HEADS)
KEYS_PER_PIECE = 256
"""Keys deleted between two pauses of a long deletion: 2 ms."""

Change = tuple[bytes, bytes, bool, int]
"""(key, KeyValue of the event, whether it is a deletion, packed revision of the value before or 0)."""


class WriteTxn:
    """The write transaction of a store: one object, opened again and again by ``Store.begin``."""

    __slots__ = (
        "_attachments",
        "_base",
        "_create_field",
        "_index",
        "_leases",
        "_mod_field",
        "_on_changed",
        "_overlay",
        "_poisoned",
        "_reader",
        "_records",
        "changes",
        "compact_revision",
        "deleted_total",
        "deletes_total",
        "is_open",
        "main",
        "put_bytes",
    )

    def __init__(
        self,
        index: Index,
        overlay: Overlay,
        reader: Reader,
        attachments: Attachments,
        on_changed: Callable[[int, list[Change]], None],
    ) -> None:
        self._on_changed = on_changed
        self._index = index
        self._overlay = overlay
        self._reader = reader
        self._attachments = attachments
        self._leases = attachments.of_key
        self._records: dict[bytes, bytes] = {}
        self._create_field = self._mod_field = b""
        self._base = 0
        self._poisoned = False
        self.main = 0
        """Main revision that changes of this transaction take."""
        self.compact_revision = -1
        """Oldest main revision that reads of this transaction may ask for."""
        self.changes: list[Change] = []
        """The changes so far, in order."""
        self.is_open = False
        self.deletes_total = 0
        """Deletions of intervals so far, by all transactions."""
        self.put_bytes = 0
        """Keys and values written so far."""
        self.deleted_total = 0
        """Keys that they deleted."""

    def open(self, main: int, compact_revision: int) -> None:
        """Start over at a new revision. For the store only.

        Arguments:
            main: main revision that the changes take.
            compact_revision: oldest main revision that reads inside may ask for.

        Raises:
            InvariantError: it is open already, or the store is poisoned.
        """
        if self.is_open:
            raise InvariantError("the store is poisoned" if self._poisoned else "a write transaction is open already")
        # To drop the last reference to hundreds of thousands of tuples would hold the loop for a tenth of a second.
        if len(self.changes) > FREED_AT_ONCE:
            self._free_changes()
        self.is_open = True
        self.main = main
        self.compact_revision = compact_revision
        # A new list, because the caller of ``end`` may hold the last one.
        self.changes = []
        self._base = main << SUB_BITS
        # Encoded at the first change: an entry without one does not pay for it.
        self._mod_field = b""
        # The batch cannot be exchanged while a unit is open (``overlay.py``), so its table may be held for the
        # transaction.
        self._records = self._overlay.pending.records

    def _free_changes(self) -> None:
        """Free the changes of a long transaction little by little, if no other owner has them."""
        changes, self.changes = self.changes, []
        if getrefcount(changes) == 2:  # ours, and the argument of the question
            self._overlay.free_later(changes)

    def replaced(self) -> None:
        """Forget what was under way, which the store's new state contains. Only the store calls this."""
        self.is_open = False
        self._leases = self._attachments.of_key

    def poison(self) -> None:
        """Refuse to be opened from now on. For the store only."""
        self.is_open = self._poisoned = True

    @property
    def revision(self) -> int:
        """Main revision that reads of this transaction see: the new one once something changed."""
        return self.main if self.changes else self.main - 1

    def _next_revision(self) -> int:
        # Each change is one tuple in ``changes``, so its number there is its sub-revision.
        sub = len(self.changes)
        if not self._mod_field:
            self._mod_field = mod_field(self.main)
            self._create_field = create_field(self.main)
        if sub > SUB_MASK or not self.is_open:
            raise InvariantError(f"change {sub} of revision {self.main}, transaction open: {self.is_open}")
        return self._base + sub

    def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Write one key.

        Arguments:
            key: not empty.
            value: any bytes.
            lease: id of the lease to attach the key to; 0 detaches it.

        Returns:
            the packed revision of the value replaced, 0 if the key did not exist; ``record`` reads it.
        """
        revision = self._next_revision()
        created, version, previous = self._index.put(key, revision)
        key_size, value_size = len(key), len(value)
        self.put_bytes += key_size + value_size
        # ``key_value.encode`` spelled out: one join, the fields that are the same for the whole transaction encoded
        # once, the short ones from tables.
        data = b"".join(
            (
                KEY_HEADS[key_size] if key_size < _SMALL else key_head(key_size),
                key,
                # A key created by this very transaction has the transaction's own revision.
                self._create_field if created == self.main else create_field(created),
                self._mod_field,
                VERSION_FIELDS[version] if version < _SMALL else version_field(version),
                VALUE_HEADS[value_size] if value_size < _SMALL else value_head(value_size),
                value,
                lease_field(lease) if lease else b"",
            )
        )
        revision_key = pack_key(self.main, _SEPARATOR, revision & SUB_MASK)
        # ``record.seal`` without its call.
        self._records[revision_key] = pack_seal(crc32c(revision_key + data)) + data
        # As in etcd, a put says which lease the key has from now on: none detaches it from the one before.
        if lease:
            self._attachments.attach(key, lease)
        # The first test spares stores without leases the lookup.
        elif self._leases and key in self._leases:
            self._attachments.detach(key)
        self.changes.append((key, data, False, previous))
        return previous

    def delete_range(self, key: bytes, end: bytes = b"") -> list[tuple[bytes, int]]:
        """Delete every key of an interval, in order.

        Arguments:
            key, end: the interval (``index.py``).

        Returns:
            key and packed revision of the value deleted, for each; ``record`` reads it.
        """
        self.deletes_total += 1
        # Collected before the first deletion: the index must not change under its iterator.
        live = list(self._index.live(key, end))
        for name, _ in live:
            self._delete(name)
        return live

    def delete_in_pieces(self, key: bytes, end: bytes) -> Iterator[int]:
        """Delete every key of an interval, in order, a piece at a time.

        Nothing else may change anything before the last piece.

        Arguments:
            key, end: the interval (``index.py``).

        Returns:
            the number of keys that each piece deleted, after the piece; 0 where all of its keys were deleted before.
        """
        self.deletes_total += 1
        # Searched anew for each piece: the deletions changed the index.
        while piece := list(islice(self._index.keys(key, end), KEYS_PER_PIECE)):
            live = [name for name in piece if self._index.latest(name)]
            for name in live:
                self._delete(name)
            yield len(live)
            if not end:
                return
            # The next possible key in byte order.
            key = piece[-1] + b"\x00"

    def _delete(self, key: bytes) -> None:
        revision = self._next_revision()
        previous = self._index.tombstone(key, revision)
        key_size = len(key)
        # etcd stores a tombstone as a KeyValue of the key alone, and the hash of the history covers these bytes.
        data = (KEY_HEADS[key_size] if key_size < _SMALL else key_head(key_size)) + key
        revision_key = pack_key(self.main, _SEPARATOR, revision & SUB_MASK) + TOMBSTONE_MARK
        self._records[revision_key] = pack_seal(crc32c(revision_key + data)) + data
        # A key that does not exist is attached to nothing.
        if self._leases and key in self._leases:
            self._attachments.detach(key)
        self.deleted_total += 1
        # The event that watchers get says when: it has the mod revision, which the record does not need.
        self.changes.append((key, data + self._mod_field, True, previous))

    def range(
        self,
        key: bytes,
        range_end: bytes = b"",
        *,
        revision: int = 0,
        limit: int = 0,
        count_only: bool = False,
        keys_only: bool = False,
    ) -> RangeResult:
        """Read an interval; the present is this transaction's.

        Arguments:
            key, range_end, revision, limit, count_only, keys_only: as of ``Store.range``, which also says what is
                raised.
        """
        current = self.revision
        # Changes of this transaction are in the index already, so its newest state is what the transaction must see.
        if revision <= 0 or revision == current:
            kvs, count = self._reader.latest(key, range_end, limit, count_only, keys_only)
        else:
            check_revision(revision, current, self.compact_revision)
            kvs, count = self._reader.at(revision, key, range_end, limit, count_only, keys_only)
        return RangeResult(kvs, count, current)

    def select(
        self,
        key: bytes,
        range_end: bytes,
        selection: Selection,
        *,
        revision: int = 0,
        grow: Callable[[int], None] = no_limit,
    ) -> Pieces:
        """Begin to read an interval in pieces, between which nothing may change.

        Arguments:
            key, range_end, selection, revision, grow: as of ``Store.select``, which also says what is raised.
        """
        main = revision if revision > 0 else self.revision
        check_revision(main, self.revision, self.compact_revision)
        return self._reader.select(main, key, range_end, selection, is_present=main == self.revision, grow=grow)

    def end(self) -> list[Change]:
        """Close the transaction: the store is at the new revision if anything changed. Return the changes in order.

        Raises:
            InvariantError: no transaction is open.
        """
        if not self.is_open:
            raise InvariantError("no write transaction is open")
        # Before the observers run: they read the store, which must show this transaction then.
        self.is_open = False
        if self.changes:
            self._on_changed(self.main, self.changes)
        return self.changes
