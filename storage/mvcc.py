"""The MVCC store: every key with its history, in memory when it is applied and on disk soon after.

    store = Store.open(LMDBBackend(path), ThreadWriter(loop.call_soon_threadsafe))
    txn = store.begin()
    txn.put(b"k", b"v")
    changes = txn.end()                     # the store is at revision 2
    store.set_applied(index=7, term=1)                 # may submit a batch to the writer
    store.range(b"k").kvs                              # [serialized KeyValue]

One thread owns a store (the loop of the member) and makes every call. The write-ahead log provides durability: the
backend follows in batches (``overlay.py``), each with the index of the last log entry it contains, and after a crash
the log is replayed from the ``applied_index`` found on disk.

Duties of the owner:

1. Between ``begin`` and ``end``, only change and read; call ``set_applied`` once the whole entry is applied. If
   applying fails, call ``poison``. A commit or flush requested before ``set_applied`` happens right after it.
2. Call ``commit`` about every 100 ms.
3. Call ``compaction_step`` as long as it returns ``True``, with other work between the calls, and after each commit.
4. Stop the member when ``on_fatal`` is called, or when a call raises ``InvariantError`` or a subclass.

Invariants: ``revision`` grows by exactly one with each transaction that changes something and never goes back, even
after crashes and compactions; every revision from ``compact_revision`` on is readable.

Long intervals, also sorted and filtered ones, are read in pieces (``selection.py``); ``pin`` returns a view of the
present for such a read while writes and compactions continue.

Not here: watchers, leases, auth (they keep their state in their own buckets through ``meta_put``).

THE WRITE TRANSACTION (``WriteTxn``): all changes of one log entry under one new revision.

    txn = store.begin()
    previous = txn.put(b"k", b"v")        # revision main.0
    txn.delete_range(b"a", b"b")          # main.1, main.2 ...
    changes = txn.end()                   # the store is at revision main now

Rules, all etcd's: every change takes ``main = revision + 1`` and the next ``sub``; reads inside the transaction see its
changes so far; without a change the revision stays. There is no rollback: every reason to refuse a request is checked
before the first change, so a client cannot make a change fail (errors raised here are fatal).

This is the hot path: 10 puts cost less than one commit of the log. Therefore a store reuses one transaction object,
encodes fields once per revision, and creates no objects per change other than the record and one tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from sys import getrefcount
from typing import Any, Final, Protocol, TypeVar

from google_crc32c import value as crc32c
from mypy_extensions import mypyc_attr
from sortedcontainers import SortedList

from raftkv.errors import CompactedError, FutureRevisionError, InvariantError, StorageError
from raftkv.raft.types import ConfState
from raftkv.storage import schema
from raftkv.storage.backend.base import Backend, Defragmentation, ReadTxn, WriteBatch
from raftkv.storage.backend.lmdb import InlineWriter, Writer
from raftkv.storage.compaction import KEYS_PER_STEP, Compactor
from raftkv.storage.failpoints import failpoint
from raftkv.storage.hash import KVHash, hash_kv
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
from raftkv.storage.mvcc_range import PinnedView, RangeResult, Reader, check_revision
from raftkv.storage.overlay import FREED_AT_ONCE, Overlay
from raftkv.storage.restore import Restored, fill_index, fill_index_steps, scan_steps
from raftkv.storage.revision import (
    STEP_RECORDS,
    SUB_BITS,
    SUB_MASK,
    TOMBSTONE_MARK,
    after,
    pack,
    pack_key,
    pack_seal,
    to_key,
)
from raftkv.storage.selection import Pieces, Selection, finish, no_limit

# -- attachments ----------------------------------------------------------------------------------------------------
#
# Attachments: which key is attached to which lease now, in both directions.
#
#     attached = Attachments()
#     attached.attach(b"jobs/1", 7)         # called by the put; detaches the key from another lease
#     attached.keys_unordered(7)            # [b"jobs/1"]: the keys to delete at the end of lease 7
#     attached.key_from(7, b"k")            # None: the first key of lease 7 from b"k" on
#     attached.of_key[b"jobs/1"]            # 7
#
# Invariant: the two tables agree; a lease without keys is in neither. They are rebuilt from the records of the keys
# when a store is opened. Not here: whether a lease exists (``raftkv.apply.leases``).
#
# The keys of a lease are a set, and from ``ORDERED_FROM`` keys on a sorted list: the check whether a user may write all
# of them skips through them in order, and sorting a million at once would block the loop. Attaching a key to a sorted
# list costs 1.8 us more.

ORDERED_FROM: Final = 64
"""Number of keys of a lease from which they are kept in order."""


class Attachments:
    """The keys that are attached to leases, by key and by lease.

    Attributes:
        of_key: lease of each attached key, read only; the hot path of writes looks it up without a call. The same dict
            until ``become``.
    """

    def __init__(self) -> None:
        self.of_key: dict[bytes, int] = {}
        self._keys: dict[int, set[bytes] | SortedList] = {}

    def attach(self, key: bytes, lease: int) -> None:
        """Attach a key to a lease, and detach it from its previous lease.

        Arguments:
            key: the key.
            lease: id of the lease, not 0.
        """
        before = self.of_key.get(key)
        # Most puts renew a value under the same lease.
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
        """Detach an attached key."""
        self._remove(key, self.of_key.pop(key))

    def _remove(self, key: bytes, lease: int) -> None:
        keys = self._keys[lease]
        keys.remove(key)
        # Keeping an empty set for each lease that ever had a key would be a leak.
        if not keys:
            del self._keys[lease]

    def keys_unordered(self, lease: int) -> list[bytes]:
        """Return the keys of a lease in arbitrary order, which differs between members: sorting very many is slow."""
        return list(self._keys.get(lease, ()))

    def key_from(self, lease: int, key: bytes) -> bytes | None:
        """Return the first key of a lease at or after ``key``, ``None`` if there is none: 3 us for any number."""
        keys = self._keys.get(lease, ())
        if isinstance(keys, SortedList):
            return next(keys.irange(key), None)
        return min((each for each in keys if each >= key), default=None)

    def count(self, lease: int) -> int:
        """Return the number of keys of a lease."""
        return len(self._keys.get(lease, ()))

    def restore(self, of_key: dict[bytes, int]) -> None:
        """Replace the contents by the result of a scan of the records: the lease of each attached key."""
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
        """Take over the contents of another table at once; the other table must not be used afterwards.

        Afterwards ``of_key`` is a different dict.

        Returns:
            the previous tables, now unused: freeing millions of entries takes long.
        """
        before: list[dict[Any, Any]] = [self.of_key, self._keys]
        self.of_key, self._keys = other.of_key, other._keys
        return before


_SEPARATOR: Final = 0x5F  # "_"
_SMALL: Final = len(KEY_HEADS)
KEYS_PER_PIECE = 256
"""Keys deleted between two pauses of a long deletion: about 2 ms."""

Change = tuple[bytes, bytes, bool, int]
"""(key, KeyValue of the event, whether it is a deletion, packed revision of the previous value or 0)."""


class WriteTxn:
    """The write transaction of a store: one object, reopened by each ``Store.begin``."""

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
        self._mod_field = b""
        self._base = 0
        self._poisoned = False
        self.main = 0
        """Main revision of the changes of this transaction."""
        self.compact_revision = -1
        """Oldest main revision that reads inside this transaction may request."""
        self.changes: list[Change] = []
        """The changes so far, in order."""
        self.is_open = False
        self.deletes_total = 0
        """Range deletions so far, by all transactions."""
        self.put_bytes = 0
        """Bytes of keys and values written so far, by all transactions."""
        self.deleted_total = 0
        """Keys deleted so far, by all transactions."""

    def open(self, main: int, compact_revision: int) -> None:
        """Start again at a new revision. Only the store calls this.

        Arguments:
            main: main revision of the changes.
            compact_revision: oldest main revision that reads inside may request.

        Raises:
            InvariantError: the transaction is already open, or the store is poisoned.
        """
        if self.is_open:
            raise InvariantError("the store is poisoned" if self._poisoned else "a write transaction is open already")
        # Dropping the last reference to hundreds of thousands of tuples would block the loop for a tenth of a second.
        if len(self.changes) > FREED_AT_ONCE:
            self._free_changes()
        self.is_open = True
        self.main = main
        self.compact_revision = compact_revision
        # A new list, because the caller of ``end`` may still hold the previous one.
        self.changes = []
        self._base = main << SUB_BITS
        # Encoded at the first change: an entry without changes does not pay for it.
        self._mod_field = b""
        # The batch is not exchanged while a unit is open (``overlay.py``), so this reference stays valid for the whole
        # transaction.
        self._records = self._overlay.pending.records

    def _free_changes(self) -> None:
        """Free the changes of a long transaction gradually, if there is no other reference to them."""
        changes, self.changes = self.changes, []
        if getrefcount(changes) == 2:  # our variable, and the argument of the call
            self._overlay.free_later(changes)

    def replaced(self) -> None:
        """Forget the open transaction, whose effects the store's new state contains. Only the store calls this."""
        self.is_open = False
        self._leases = self._attachments.of_key

    def poison(self) -> None:
        """Refuse to be opened from now on. Only the store calls this."""
        self.is_open = self._poisoned = True

    @property
    def revision(self) -> int:
        """Main revision that reads of this transaction see: the new one once it has changes."""
        return self.main if self.changes else self.main - 1

    @property
    def bound(self) -> int:
        """Packed revision of the next change: what is visible before it can be read later (``PinnedView.at``)."""
        return self._base + len(self.changes)

    def _next_revision(self) -> int:
        # Each change is one tuple in ``changes``, so its position there is its sub-revision.
        sub = len(self.changes)
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
            the packed revision of the replaced value, 0 if the key did not exist; ``record`` reads it.
        """
        revision = self._next_revision()
        created, version, previous = self._index.put(key, revision)
        if not self._mod_field:
            self._mod_field = mod_field(self.main)
        key_size, value_size = len(key), len(value)
        self.put_bytes += key_size + value_size
        # ``key_value.encode`` spelled out: one join, the field that is the same for the whole transaction encoded once,
        # the short ones from tables.
        data = b"".join(
            (
                KEY_HEADS[key_size] if key_size < _SMALL else key_head(key_size),
                key,
                create_field(created),
                self._mod_field,
                VERSION_FIELDS[version] if version < _SMALL else version_field(version),
                VALUE_HEADS[value_size] if value_size < _SMALL else value_head(value_size),
                value,
                lease_field(lease) if lease else b"",
            )
        )
        revision_key = pack_key(self.main, _SEPARATOR, revision & SUB_MASK)
        # ``revision.seal`` inlined.
        self._records[revision_key] = pack_seal(crc32c(revision_key + data)) + data
        # As in etcd, a put sets the lease of the key: lease 0 detaches it from the previous one.
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
            key and packed revision of the deleted value, for each key; ``record`` reads it.
        """
        self.deletes_total += 1
        # Collected before the first deletion: the index must not change under its iterator. A lease ends key by key.
        if end:
            live = list(self._index.live(key, end))
        else:
            revision = self._index.latest(key)
            live = [(key, revision)] if revision else []
        for name, _ in live:
            self._delete(name)
        return live

    def delete_in_pieces(self, key: bytes, end: bytes) -> Iterator[int]:
        """Delete every key of an interval, in order, a piece at a time.

        Nothing else may change anything before the last piece.

        Arguments:
            key, end: the interval (``index.py``).

        Returns:
            the number of keys that each piece deleted, after the piece; 0 if all of its keys were deleted earlier.
        """
        self.deletes_total += 1
        # Search again for each piece: the deletions changed the index.
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
        # A key that does not exist has no lease.
        if self._leases and key in self._leases:
            self._attachments.detach(key)
        self.deleted_total += 1
        if not self._mod_field:
            self._mod_field = mod_field(self.main)
        # The event for watchers also has the mod revision, which the record does not need.
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
            key, range_end, revision, limit, count_only, keys_only: as in ``Store.range``, which also documents the
                errors.
        """
        current = self.revision
        # Changes of this transaction are already in the index, so its newest state is what the transaction must see.
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
        """Begin to read an interval in pieces; nothing may change between the pieces.

        Arguments:
            key, range_end, selection, revision, grow: as in ``Store.select``, which also documents the errors.
        """
        main = revision if revision > 0 else self.revision
        check_revision(main, self.revision, self.compact_revision)
        count = self._reader.count(key, range_end) if main == self.revision else None
        return self._reader.select(after(main), key, range_end, selection, count=count, grow=grow)

    def end(self) -> list[Change]:
        """Close the transaction: the store is at the new revision if anything changed. Return the changes in order.

        Raises:
            InvariantError: no transaction is open.
        """
        if not self.is_open:
            raise InvariantError("no write transaction is open")
        # Before the observers run: they read the store, which must show this transaction already.
        self.is_open = False
        if self.changes:
            self._on_changed(self.main, self.changes)
        return self.changes


OPERATIONS_MAX = 10_000
"""Number of changes at which a batch is sent without waiting for the owner's timer."""

WAIT_S = 0.01
"""Seconds between two checks whether a commit has ended."""

FIRST_REVISION = 1
"""The revision of a store without changes; the first change makes revision 2."""


Beside = Callable[[ReadTxn], Generator[None, None, None]]
"""A reader of a database that works in steps of a few milliseconds."""


class Accountant(Protocol):
    """Counts existing keys and their sizes, for quotas."""

    def account(self, main: int, changes: list[Change]) -> None:
        """Record the changes of a finished transaction, and its main revision."""

    def take_records(self) -> dict[tuple[bytes, bytes], bytes | None]:
        """Return the values to write for the changes recorded since the last call, by bucket and key."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Store:
    """The replicated key-value state of one member, with its history. Use ``Store.open`` to create one."""

    def __init__(
        self, backend: Backend, writer: Writer, operations_max: int, on_fatal: Callable[[BaseException], None]
    ) -> None:
        self.backend = backend
        self._operations_max = operations_max
        self._overlay = Overlay(backend, writer, self._stamp, on_fatal)
        self.attachments = Attachments()
        """The keys that are attached to leases now."""
        # One of each for the life of the store, sharing tables: on the hot path only the record and its change are
        # created.
        self._index = Index()
        self.reader = Reader(self._index, self._overlay, self.attachments.of_key)
        """Reads the store at any revision."""
        self._txn = WriteTxn(self._index, self._overlay, self.reader, self.attachments, self._changed)
        self._compactor = Compactor(self._index, self._overlay)
        self.revision = FIRST_REVISION
        """Main revision of the last transaction that changed something."""
        self.compact_revision = -1
        """Oldest readable main revision; -1 if never compacted."""
        self.applied_index = 0
        """Index of the last log entry applied."""
        self.applied_term = 0
        """Term of that entry."""
        self.durable_index = 0
        """Index of the last log entry whose changes are in the backend: the log may drop all entries up to it."""
        self._durable_put_bytes = 0
        self.unwritten_bytes = 0
        """Bytes of keys and values in memory that the database does not have yet."""
        self.changes_total = 0
        """Changes made since the store was opened."""
        self.on_changes: Callable[[int, list[Change]], None] | None = None
        """Called after each transaction that changed something, with its main revision and its changes in order."""
        self.accountant: Accountant | None = None
        """Called with the changes of each transaction at its end, before ``on_changes``; part of applying."""
        self.conf_state = ConfState()
        """Members of the cluster as of ``applied_index``."""
        try:
            self._load()
        except BaseException:
            self._overlay.close()
            raise

    @classmethod
    def open(
        cls,
        backend: Backend,
        writer: Writer | None = None,
        *,
        operations_max: int = OPERATIONS_MAX,
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> Store:
        """Rebuild the state that a backend holds and continue from there.

        Arguments:
            backend: the engine; closed by its owner, after the store.
            writer: carries out commits; the default one commits inside each call.
            operations_max: number of changes at which ``set_applied`` sends a batch without waiting for ``commit``.
            on_fatal: called with the error of a failed commit (the default raises it in the thread of the owner).

        Raises:
            CorruptRecordError: a record on disk is damaged; the message names its revision.
            StorageError: the database has another format.
        """
        writer = InlineWriter() if writer is None else writer
        return cls(backend, writer, operations_max, on_fatal or _raise)

    def _load(self) -> None:
        """Load the state from the database."""
        # Before anything else is decoded: another format may mean other bytes under the same names.
        schema.check_format(self._overlay.value(schema.META, schema.META_FORMAT_VERSION), "the database")
        with closing(self.backend.begin_read()) as read:
            restored = finish(scan_steps(read))
        fill_index(self._index, restored.entries)
        self.attachments.restore(restored.leases)
        self._adopt(restored)

    def _adopt(self, restored: Restored) -> None:
        """Take over the numbers of the database, after its index is in place."""
        get = self._overlay.value
        # "Scheduled" is in effect for readers from the requesting entry on, whether the work was finished or not.
        scheduled, finished = schema.read_compact_revisions(get)
        self.compact_revision = max(scheduled, finished)
        # As in etcd: the revision never goes back below a compaction, or a later put would reuse a revision that a
        # client has already seen.
        self.revision = max(FIRST_REVISION, restored.last_revision, self.compact_revision)
        self.applied_index = schema.decode_integer(get(schema.META, schema.META_CONSISTENT_INDEX)) or 0
        self.applied_term = schema.decode_integer(get(schema.META, schema.META_TERM)) or 0
        self.conf_state = schema.decode_conf_state(get(schema.META, schema.META_CONF_STATE))
        # All of this comes from the disk.
        self.durable_index = self.applied_index
        waiting = self._compactor.reset()
        # A crash interrupted the work of a compaction, or the received database has an unfinished one. Callers that
        # waited for an earlier compaction wait for this one, which includes theirs.
        if scheduled > finished:
            self._compactor.schedule(scheduled, partial(_call_all, waiting))
        else:
            _call_all(waiting)

    def _stamp(self, batch: WriteBatch) -> Callable[[], None]:
        index = self.applied_index
        if self.accountant is not None:
            batch.values.update(self.accountant.take_records())
        # In the same transaction as the data it describes: a replay from ``index`` then skips nothing and repeats
        # nothing (see etcd issue 13766 for the opposite).
        batch.values.update(
            {
                (schema.META, schema.META_CONSISTENT_INDEX): schema.encode_integer(index),
                (schema.META, schema.META_TERM): schema.encode_integer(self.applied_term),
                (schema.META, schema.META_CONF_STATE): schema.encode_conf_state(self.conf_state),
                (schema.META, schema.META_FORMAT_VERSION): schema.encode_integer(schema.FORMAT_VERSION),
            }
        )
        return partial(self._durable, index, self._txn.put_bytes)

    def _durable(self, index: int, put_bytes: int) -> None:
        self._durable_put_bytes = put_bytes
        self.unwritten_bytes = self._txn.put_bytes - put_bytes
        # The log may be released up to here: a replay begins after this index.
        self.durable_index = index
        # Changes made during the commit already fill a batch: do not let it wait for the owner's timer.
        if self._overlay.pending.operations() >= self._operations_max:
            self._overlay.commit_next()

    # Changes.

    def begin(self) -> WriteTxn:
        """Open the write transaction of one log entry (only one at a time); ``WriteTxn.end`` closes it."""
        txn = self._txn
        # The next revision is only reserved: an entry that changes nothing leaves ``revision`` as it is.
        txn.open(self.revision + 1, self.compact_revision)
        self._overlay.is_changing = True
        return txn

    @property
    def is_changing(self) -> bool:
        """Whether there are changes after the last ``set_applied``: an entry, or a run of entries, is in progress."""
        return self._overlay.is_changing

    def poison(self) -> None:
        """Stop all commits and refuse every change, because applying an entry failed halfway."""
        # Both: pending changes must not reach the disk, and no further change may be made.
        self._overlay.poison()
        self._txn.poison()

    def _changed(self, main: int, changes: list[Change]) -> None:
        # The revision first: observers may read the store at it.
        self.revision = main
        self.changes_total += len(changes)
        self.unwritten_bytes = self._txn.put_bytes - self._durable_put_bytes
        if self.accountant is not None:
            self.accountant.account(main, changes)
        if self.on_changes is not None:
            self.on_changes(main, changes)

    def set_applied(self, index: int, term: int) -> None:
        """Record that everything up to a log entry is applied; called once per entry or per run of entries.

        Arguments:
            index: index of the entry, at least the previous one.
            term: term of the entry.

        Raises:
            InvariantError: the index goes back, or a transaction is still open.
        """
        if index < self.applied_index or self._txn.is_open:
            raise InvariantError(f"applied index {index} after {self.applied_index}, open: {self._txn.is_open}")
        # Set the index before ending the unit: a commit that waited for the end stamps its batch with this index.
        self.applied_index = index
        self.applied_term = term
        overlay = self._overlay
        overlay.end_unit()
        # ``operations`` would add up three lengths; most operations are records, and this runs after every entry.
        if len(overlay.pending.records) >= self._operations_max and not overlay.is_busy:
            overlay.commit()

    def set_conf_state(self, conf_state: ConfState) -> None:
        """Record the members of the cluster, as part of the entry being applied."""
        # Part of the unit like any change, so that it is not committed with the index of the previous entry.
        self._overlay.is_changing = True
        self.conf_state = conf_state

    def meta_put(self, bucket: bytes, key: bytes, value: bytes) -> None:
        """Write a value of another bucket, in the batch of the entry being applied.

        Arguments:
            bucket: one of ``schema.BUCKETS`` other than ``key`` and ``meta``.
            key: 1 to ``schema.META_KEY_BYTES_MAX`` bytes.
            value: any bytes.
        """
        self._overlay.is_changing = True
        self._overlay.pending.values[self._checked(bucket, key)] = value

    def meta_delete(self, bucket: bytes, key: bytes) -> None:
        """Delete a value of another bucket, if it exists.

        Arguments:
            bucket, key: as in ``meta_put``.
        """
        self._overlay.is_changing = True
        self._overlay.pending.values[self._checked(bucket, key)] = None

    @staticmethod
    def _checked(bucket: bytes, key: bytes) -> tuple[bytes, bytes]:
        # ``key`` and ``meta`` are reserved: they must agree with the index and with the stamp of each batch.
        if bucket not in schema.BUCKETS or bucket in (schema.KEY, schema.META):
            raise InvariantError(f"bucket {bucket!r} is not open to others")
        if not 0 < len(key) <= schema.META_KEY_BYTES_MAX:
            raise InvariantError(f"a key of {len(key)} bytes does not fit in bucket {bucket!r}")
        return bucket, key

    # Reads.

    def meta_get(self, bucket: bytes, key: bytes) -> bytes | None:
        """Return the current value in another bucket; ``None`` if there is none.

        Arguments:
            bucket, key: as in ``meta_put``.
        """
        return self._overlay.value(bucket, key)

    def meta_items(self, bucket: bytes) -> list[tuple[bytes, bytes]]:
        """Return all keys and values of another bucket, in order of key."""
        return self._overlay.values(bucket)

    def get(self, key: bytes) -> bytes | None:
        """Return the current serialized KeyValue of a key, ``None`` if it does not exist: the fastest read."""
        # The index already has changes of the open transaction: ``range`` reads as of the last finished one.
        if self._txn.is_open:
            return next(iter(self.range(key).kvs), None)
        return self.reader.get(key)

    def check(self) -> None:
        """Do nothing: the present state of the store is always readable (``PinnedView.check`` may raise)."""

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
        """Read an interval.

        Arguments:
            key, range_end: as on the wire (``index.py``).
            revision: main revision to read at; 0 or less is the present.
            limit: maximum number of KeyValues to return; 0 or less is no limit. ``count`` ignores it.
            count_only: return no KeyValues.
            keys_only: leave values and leases out.

        Raises:
            FutureRevisionError, CompactedError: the revision cannot be read.
            CorruptRecordError: a record is damaged.
        """
        current = self.revision
        if self._txn.is_open:
            # The index already has changes of the open transaction: read as of the last finished one.
            revision = revision if revision > 0 else current
        # The current revision given as a number is the present: the fast path, with counts that need no iteration.
        elif revision == current:
            revision = 0
        if revision <= 0:
            kvs, count = self.reader.latest(key, range_end, limit, count_only, keys_only)
        else:
            check_revision(revision, current, self.compact_revision)
            kvs, count = self.reader.at(revision, key, range_end, limit, count_only, keys_only)
        return RangeResult(kvs, count, current)

    def small_range(
        self, key: bytes, range_end: bytes, limit: int, keys_max: int, size_bytes_max: int
    ) -> RangeResult | None:
        """Read an interval of the present at once, unless that is too much work.

        Arguments:
            key, range_end: the interval, as on the wire (``index.py``).
            limit: maximum number of KeyValues to return; 0 or less is no limit.
            keys_max: number of known keys of the interval above which it is too much work.
            size_bytes_max: bytes of KeyValues above which it is too much work.

        Returns:
            the result, or ``None`` if it is too much work or a transaction is open: use ``select`` then.
        """
        # The index already has changes of the open transaction, and this path reads the newest state of the index.
        if self.is_writing:
            return None
        found = self.reader.small(key, range_end, limit, keys_max, size_bytes_max)
        return None if found is None else RangeResult(*found, self.revision)

    def select(
        self,
        key: bytes,
        range_end: bytes,
        selection: Selection,
        *,
        revision: int = 0,
        grow: Callable[[int], None] = no_limit,
    ) -> Pieces:
        """Begin to read an interval in pieces (``selection.py``); raises like ``range``.

        Finish the read before anything else happens to the store; a view from ``pin`` may be read over a longer time.

        Arguments:
            key, range_end: the interval, as on the wire (``index.py``).
            selection: filters, order and limit.
            revision: main revision to read at; 0 or less is the present.
            grow: called with the number of bytes that the read holds besides what it has yielded; may raise to refuse.
        """
        main = revision if revision > 0 else self.revision
        check_revision(main, self.revision, self.compact_revision)
        # While a transaction is open, the index also counts keys that the present does not have yet.
        count = None if main != self.revision or self.is_writing else self.reader.count(key, range_end)
        return self.reader.select(after(main), key, range_end, selection, count=count, grow=grow)

    @property
    def unfinished_changes(self) -> list[Change]:
        """Return the changes of the open write transaction so far; empty if none is open."""
        return self._txn.changes if self._txn.is_open else []

    @property
    def is_writing(self) -> bool:
        """Whether a write transaction is open; its changes are already in the index."""
        return self._txn.is_open

    def pin(self) -> PinnedView:
        """Return a view of the present for long reads; the caller must call its ``let_go``."""
        return PinnedView(self, self.reader, self._compactor.hold(self.compact_revision))

    def known_count(self, key: bytes, range_end: bytes) -> int:
        """Return the number of keys of an interval that the store knows, live or not: the cost of reading it.

        The cost is logarithmic in the size of the store.

        Arguments:
            key, range_end: the interval, as on the wire (``index.py``).
        """
        return self._index.known_count(key, range_end)

    def kept(self, key: bytes, range_end: bytes, after: int) -> Iterator[tuple[bytes, int, bool, int]]:
        """Iterate over the revisions of an interval that all compactions so far keep, finished or not.

        Part of the entry being applied: compaction work waits, and nothing may change before the end.

        Arguments:
            key, range_end: the interval, as on the wire (``index.py``).
            after: packed revision; revisions of the first key up to this one are skipped.

        Returns:
            key, packed revision (0: no revision of this key), whether it is a deletion, and the first main revision
            whose compaction drops it (0: none, because it is the current value of the key).
        """
        self._overlay.is_changing = True
        return self._index.kept(key, range_end, self.compact_revision, after)

    def history(self, first: int, last: int, *, sub: int = 0) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the changes of main revisions ``first..last``, oldest first.

        A deletion has an 18-byte revision key and a KeyValue of the key alone. Revisions before ``compact_revision``
        may have gaps. The caller must finish before anything else happens to the store.

        Arguments:
            first, last: main revisions, both included.
            sub: the first change of ``first`` to return, for a reader that continues where it stopped.

        Returns:
            pairs of revision key and serialized KeyValue.
        """
        return self._overlay.records(to_key(pack(max(first, 0), sub)), to_key(pack(last + 1, 0)))

    # Durability.

    def commit(self) -> None:
        """Submit the changes so far to the writer without waiting for it (duty 2 of the owner)."""
        self._overlay.commit()

    def flush(self, on_durable: Callable[[], None]) -> None:
        """Commit, and call back once everything written so far is on disk."""
        self._overlay.flush(on_durable)

    @property
    def space_error(self) -> StorageError | None:
        """The error of the last commit if the disk was full (the batch is kept and retried); otherwise ``None``."""
        return self._overlay.space_error

    @property
    def deletes_total(self) -> int:
        """Range deletions since the store was opened."""
        return self._txn.deletes_total

    @property
    def puts_total(self) -> int:
        """Keys written since the store was opened."""
        return self.changes_total - self._txn.deleted_total

    @property
    def put_bytes_total(self) -> int:
        """Bytes of keys and values written since the store was opened."""
        return self._txn.put_bytes

    @property
    def dropped_total(self) -> int:
        """Revisions that compactions dropped since the store was opened."""
        return self._compactor.dropped_total

    @property
    def key_count(self) -> int:
        """Number of keys that exist now."""
        return self._index.live_count

    # Compaction and hashes.

    def compact(self, revision: int, on_done: Callable[[], None] | None = None) -> None:
        """Make a main revision the oldest readable one; ``compaction_step`` does the work later.

        Arguments:
            revision: the main revision.
            on_done: called when all dropped revisions are also deleted on disk (``physical``).

        Raises:
            CompactedError: the revision is not after the current compact revision.
            FutureRevisionError: after the present revision.
        """
        if revision <= self.compact_revision:
            raise CompactedError(self.compact_revision)
        if revision > self.revision:
            raise FutureRevisionError
        self._overlay.is_changing = True
        # In effect at once, on every member at the same entry: all members refuse the same reads, however much of the
        # work is done.
        self.compact_revision = revision
        # In the batch of the requesting entry: after a crash the same reads are refused again.
        scheduled = schema.encode_integer(revision)
        self._overlay.pending.values[schema.META, schema.META_SCHEDULED_COMPACT] = scheduled
        self._compactor.schedule(revision, on_done)

    def compaction_step(self, keys_max: int = KEYS_PER_STEP) -> bool:
        """Do about a millisecond of compaction.

        Arguments:
            keys_max: keys to visit at most.

        Returns:
            ``False`` when nothing can be done before the next commit or entry.
        """
        # Not while a unit is open: an entry that is applied in slices reads and changes the index between its slices.
        return not self._overlay.is_changing and self._compactor.step(keys_max)

    @property
    def is_compacting(self) -> bool:
        """Whether a compaction is unfinished or not yet durable."""
        return not self._compactor.is_idle

    def hash_kv(self, revision: int, on_ready: Callable[[Callable[..., KVHash]], None]) -> None:
        """Hash the history up to a main revision.

        Arguments:
            revision: the main revision; 0 is the present, a negative one is before all history.
            on_ready: called with a job once the revision is on disk. The job computes the hash on any thread; it takes
                an optional event that cancels it.

        Raises:
            FutureRevisionError, CompactedError: at once, or from the job if the revision was compacted meanwhile.
        """
        # Fixed now: the present changes during the commit.
        revision = revision or self.revision
        if revision > 0:
            check_revision(revision, self.revision, self.compact_revision)
        # The hash reads only the disk, so that it can run on any thread.
        self.flush(lambda: on_ready(partial(hash_kv, self.backend.begin_read, revision)))

    def install_steps(self, received: Path, beside: Iterable[Beside] = ()) -> Generator[float, None, None]:
        """Replace the state by a received database, made by ``copy_to`` on another member and verified.

        Each step takes a few milliseconds and yields the number of seconds to wait before the next. Until the last
        step the present state stays readable but must not be changed; the last step exchanges files and index. Changes
        that are not committed yet, and an entry abandoned halfway, are dropped: the received state contains them.
        Before the last step the database is unchanged; the caller can start again after a crash, or cancel by closing
        the iterator.

        Arguments:
            received: the database file; it no longer exists afterwards.
            beside: readers that take their part from the received database, also in steps.

        Raises:
            CorruptRecordError: the received database is damaged.
            StorageError: the database could not be replaced.
            InvariantError: the received state is older than the present one.
        """
        with closing(self.backend.open_copy(received)) as copy, closing(copy.begin_read()) as read:
            schema.check_format(read.get(schema.META, schema.META_FORMAT_VERSION), "the received database")
            applied = schema.decode_integer(read.get(schema.META, schema.META_CONSISTENT_INDEX)) or 0
            # Clients have seen the applied state; an older state would take it back.
            if applied < self.applied_index:
                raise InvariantError(f"a snapshot of entry {applied} for the state of entry {self.applied_index}")
            restored = yield from _paced(scan_steps(read))
            for reading in beside:
                yield from _paced(reading(read))
        # Built separately, while the old index and attachments serve the present state.
        index, attachments = Index(), Attachments()
        yield from _paced(fill_index_steps(index, restored))
        for count, (key, lease) in enumerate(restored.leases.items(), 1):
            attachments.attach(key, lease)
            if not count % STEP_RECORDS:
                yield 0.0
        # The new index is complete but not in use. After this wait there is no further yield, so no reader sees the
        # files of one database with the index of the other. (A running hash or copy continues on the old file.)
        while self._overlay.is_busy:
            yield WAIT_S
        failpoint("applyBeforeOpenSnapshot")
        self._overlay.exchange(partial(self.backend.replace, received))
        unused = [self._index.become(index), *self.attachments.become(attachments)]
        self._txn.replaced()
        self.reader.use_leases(self.attachments.of_key)
        self._durable_put_bytes, self.unwritten_bytes = self._txn.put_bytes, 0
        self._adopt(restored)
        for table in unused:
            if len(table) > FREED_AT_ONCE:
                self._overlay.free_later(table)
        # Last, because the waiters may read, commit, or request exclusive use of the writer.
        self._overlay.exchanged()

    def finish_defragmentation(
        self, defragmentation: Defragmentation, on_done: Callable[[BaseException | None], None]
    ) -> None:
        """Switch to a compact copy of the database that is nearly up to date.

        Commits wait in memory while the writer copies the last changes. Then the copy is in use.

        Arguments:
            defragmentation: copied and caught up; the caller closes it.
            on_done: called at the end, with the error if it failed. The database is then unchanged, except after an
                InvariantError, which is also passed to ``on_fatal``.
        """

        def begin() -> None:
            self._overlay.exclusive(defragmentation.finish, defragmentation.adopt, on_done)

        # No batch may be in flight.
        self.flush(begin)

    def close(self) -> None:
        """Stop the store; the log has everything that is not committed. The backend stays open."""
        self._overlay.close()


T = TypeVar("T")


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _paced(steps: Generator[None, None, T]) -> Generator[float, None, T]:
    """Yield a pause of 0 seconds after each step."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        yield 0.0


def _raise(error: BaseException) -> None:
    raise error
