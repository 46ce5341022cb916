"""Quotas of prefixes: limits on the number of keys with a prefix, and on their bytes in the database.

    quotas.check_put(request)             # refuses a put that would grow a prefix beyond its limits
    ... the store changes ...
    quotas.account(changes)               # called by the store: updates the use

Keys count while they exist. Bytes count for each revision that is kept (``kept_bytes``): a put adds its revision, and a
compaction subtracts the revisions that were superseded up to it. So a deletion subtracts its keys at once, but its
bytes only with a later compaction. A compaction counts when its entry is applied, although each member deletes at its
own time. Prefixes may overlap; a key counts for all prefixes with which it begins. A txn is accepted or refused as a
whole, by the keys that exist before and after it, and by the bytes that it puts. A prefix that is over its limits (they
were set below its use) refuses growth, and accepts everything else, including deletions.

Limits and use are stored in the cluster bucket, in the batch of the entries that changed them: they survive a restart,
come with a received database, and are not counted again.

    raftkv_quota/<prefix>  ->  bytes_max u64, keys_max u64 (0: none), bytes_used u64, keys_used u64,
                               after u64, size u32, cursor, (due u64, bytes u64) for each run of the history

Setting a quota counts the existing keys, in parts over many entries, so that no write waits for all of it: entries that
request the next part (``COUNT_ON``), and entries that change a key. Keys before the cursor are counted and kept up to
date by the changes; keys after it will be counted as they are then.

Invariants: use depends only on the entries, so it is the same on every member after the same entry, and never below the
result of a count. Without quotas a put costs only one test of ``is_active``.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Generator
from typing import Final

from sortedcontainers import SortedList

from raftkv import errors
from raftkv.apply.txn import Path
from raftkv.pb import admin_pb2, rpc_pb2
from raftkv.storage import schema
from raftkv.storage.index import TO_THE_LAST
from raftkv.storage.key_value import KeyValueView, key_of
from raftkv.storage.mvcc import Change, Store
from raftkv.storage.selection import Selection, finish

QUOTAS_MAX: Final = 1_000
REMOVE: Final = -1
"""Value of both limits in an entry that removes a quota."""
COUNT_ON: Final = -2
"""Value of both limits in an entry that counts the next part of the keys that existed when the quota was set."""
COUNTED_BY_ENTRY: Final = 1024 * 1024
COUNTED_BY_CHANGE: Final = 16 * 1024
"""The part that one entry counts, in bytes as ``_Pace`` counts them: 10 ms by COUNT_ON, 0.1 ms by a change of a key."""

BYTES_PER_PIECE: Final = 256 * 1024
"""Bytes of values read between two pauses. The size of a value is known only after reading it, and each may be as large
as a request.
"""
KEY_COST_BYTES: Final = 1024
"""Bytes that a key counts for in addition to its value."""

_RECORD: Final = struct.Struct(">QQQQ")
_CURSOR: Final = struct.Struct(">QI")
_DONE: Final = object()
_COUNTED: Final = (1 << 64) - 1
"""In place of a revision: everything is counted."""

REVISION_COST_BYTES: Final = 64
"""Bytes that a revision takes in the database besides its key and value: other fields, checksum, node of the tree."""
LARGE_BYTES: Final = 2_000
PAGE_BYTES: Final = 4_096
"""Revisions larger than ``LARGE_BYTES`` take whole pages of the database."""
RUNS: Final = 64
"""Number of parts in which a history is subtracted."""

ABSENT: Final = -1
"""Size of a key that does not exist."""

Growth = dict[bytes, int]
"""Prefix to the keys by which it grows (or shrinks, if negative)."""


class History:
    """Bytes of superseded revisions, by the compaction that subtracts them.

    Consecutive changes are combined into runs, each up to about 1/``RUNS`` of the total. A run is subtracted when a
    compaction reaches its last change, so a compaction subtracts a little less than it deletes, never more.

    Arguments:
        dues: last main revision of each run, at or after which a compaction subtracts it; ascending.
        sizes: bytes of each run.
    """

    __slots__ = ("_dues", "_sizes", "size_bytes")

    def __init__(self, dues: list[int], sizes: list[int]) -> None:
        self._dues = dues
        self._sizes = sizes
        self.size_bytes = sum(sizes)

    def add(self, due: int, size_bytes: int) -> None:
        """Add a superseded revision.

        Arguments:
            due: the main revision whose compaction deletes it.
            size_bytes: its size.
        """
        dues, sizes = self._dues, self._sizes
        if dues and due <= dues[-1]:
            sizes[bisect_left(dues, due)] += size_bytes
        elif dues and sizes[-1] * RUNS < self.size_bytes:
            dues[-1] = due
            sizes[-1] += size_bytes
        else:
            if len(dues) == 2 * RUNS:
                dues[:] = dues[1::2]
                sizes[:] = map(sum, zip(sizes[::2], sizes[1::2], strict=True))
            dues.append(due)
            sizes.append(size_bytes)
        self.size_bytes += size_bytes

    def compact(self, revision: int) -> int:
        """Subtract the runs that a compaction at a main revision deletes; return their bytes."""
        count = bisect_right(self._dues, revision)
        given_bytes = sum(self._sizes[:count])
        del self._dues[:count], self._sizes[:count]
        self.size_bytes -= given_bytes
        return given_bytes

    def encode(self) -> bytes:
        """Return the form on disk."""
        numbers = [number for run in zip(self._dues, self._sizes, strict=True) for number in run]
        return struct.pack(f">{len(numbers)}Q", *numbers)

    @classmethod
    def between(cls, compacted: int, revision: int) -> History:
        """Return an empty history for revisions due after ``compacted`` and up to ``revision``."""
        span = revision - compacted
        dues = sorted({compacted - -(number + 1) * span // RUNS for number in range(RUNS)})
        return cls(dues, [0] * len(dues))

    @classmethod
    def decode(cls, data: bytes) -> History:
        """Return the history that ``encode`` wrote."""
        numbers = struct.unpack(f">{len(data) // 16 * 2}Q", data)
        return cls(list(numbers[::2]), list(numbers[1::2]))


class Quota:
    """Limits of a prefix (0: none), and its use.

    Attributes:
        history: superseded revisions.
        cursor, after: keys from ``cursor`` on are not counted yet, except the revisions of the first one up to the
            packed revision ``after``; ``None``: everything is counted.
    """

    __slots__ = ("after", "bytes_max", "bytes_used", "cursor", "history", "keys_max", "keys_used", "prefix")

    def __init__(self, prefix: bytes, history: History, limits_and_use: tuple[int, int, int, int]) -> None:
        self.prefix = prefix
        self.history = history
        self.bytes_max, self.keys_max, self.bytes_used, self.keys_used = limits_and_use
        self.cursor: bytes | None = None
        self.after = 0

    @classmethod
    def decode(cls, prefix: bytes, record: bytes) -> Quota:
        """Return the quota that ``encode`` wrote."""
        start = _RECORD.size + _CURSOR.size
        after, size = _CURSOR.unpack_from(record, _RECORD.size)
        quota = cls(prefix, History.decode(record[start + size :]), _RECORD.unpack_from(record))
        quota.after, quota.cursor = after, None if after == _COUNTED else record[start : start + size]
        if quota.cursor is not None and not quota.cursor.startswith(prefix):
            raise ValueError(f"the quota of {prefix!r} counts from {quota.cursor!r} on")
        return quota

    def encode(self) -> bytes:
        """Return the form on disk."""
        record = _RECORD.pack(self.bytes_max, self.keys_max, self.bytes_used, self.keys_used)
        cursor, after = (b"", _COUNTED) if self.cursor is None else (self.cursor, self.after)
        return record + _CURSOR.pack(after, len(cursor)) + cursor + self.history.encode()

    def change(self, before: int, after: int, key_bytes: int, main: int) -> None:
        """Record a change of the size of a key.

        Arguments:
            before, after: bytes of key and value; ``ABSENT``: the key does not exist.
            key_bytes: bytes of the key alone, which its tombstone keeps.
            main: the main revision of the change.
        """
        self.keys_used += (after != ABSENT) - (before != ABSENT)
        history = self.history
        if before != ABSENT:
            history.add(main, kept_bytes(before))
        if after != ABSENT:
            self.bytes_used += kept_bytes(after)
        else:
            # Reads at the compact revision still see a tombstone exactly at it.
            self.bytes_used += kept_bytes(key_bytes)
            history.add(main + 1, kept_bytes(key_bytes))

    def compact(self, revision: int) -> bool:
        """Record that a compaction at a main revision was applied; return whether that subtracted anything."""
        given_bytes = self.history.compact(revision)
        self.bytes_used -= given_bytes
        return given_bytes > 0

    def refusal(self, size_bytes: int, keys: int) -> errors.QuotaExceededError | None:
        """Return the refusal of a growth beyond the limits; ``None`` if the growth is allowed."""
        if self.keys_max and keys > 0 and self.keys_used + keys > self.keys_max:
            return self._refusal(self.keys_used, self.keys_max, keys, "keys")
        if self.bytes_max and size_bytes > 0 and self.bytes_used + size_bytes > self.bytes_max:
            return self._refusal(self.bytes_used, self.bytes_max, size_bytes, "bytes")
        return None

    def _refusal(self, used: int, most: int, more: int, unit: str) -> errors.QuotaExceededError:
        name = self.prefix.decode("utf-8", "backslashreplace")
        if unit == "bytes" and self.history.size_bytes:
            unit = f"bytes used, {self.history.size_bytes} of them by old revisions until a compaction"
        else:
            unit += " used"
        return errors.QuotaExceededError(
            f"{errors.NoSpaceError.text} (raftkv: quota of prefix {name!r} exceeded: "
            f"{used} of {most} {unit}, {more} more wanted)"
        )

    def message(self) -> admin_pb2.PrefixQuota:
        """Return the quota as shown to clients."""
        return admin_pb2.PrefixQuota(
            prefix=self.prefix,
            bytes_max=self.bytes_max,
            keys_max=self.keys_max,
            bytes_used=self.bytes_used,
            keys_used=self.keys_used,
            bytes_history=self.history.size_bytes,
            is_counting=self.cursor is not None,
        )


class Quotas:
    """The quotas of a cluster.

    Arguments:
        store: store of the quotas and of the counted keys.

    Attributes:
        is_active: whether there are any quotas.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._quotas: dict[bytes, Quota] = {}
        self._lengths: tuple[int, ...] = ()
        self._unsaved: dict[bytes, Quota] = {}
        self._counting: dict[bytes, Quota] = {}
        self._owed: Generator[None, None, None] | None = None
        """The rest of the part that the last change is counting; ``None`` if done."""
        self._accounted = 0
        self.is_active = False
        self.reload()

    def reload(self) -> None:
        """Read the quotas from the store: at start, and after a snapshot replaced it."""
        self._quotas, self._unsaved, self._owed = {}, {}, None
        self._accounted = 0
        with schema.reading(schema.CLUSTER):
            for key, value in self._store.meta_items(schema.CLUSTER):
                if key.startswith(schema.CLUSTER_QUOTA_PREFIX):
                    prefix = key.removeprefix(schema.CLUSTER_QUOTA_PREFIX)
                    self._quotas[prefix] = Quota.decode(prefix, value)
        self._changed()

    def _changed(self) -> None:
        self._counting = {prefix: quota for prefix, quota in self._quotas.items() if quota.cursor is not None}
        self._lengths = tuple(sorted({len(prefix) for prefix in self._quotas}))
        self.is_active = bool(self._quotas)
        self._store.accountant = self if self.is_active else None

    def by_prefix(self) -> list[Quota]:
        """Return all quotas, in order of prefix."""
        return [self._quotas[prefix] for prefix in sorted(self._quotas)]

    def is_counting(self, prefix: bytes) -> bool:
        """Return whether the keys that existed when the quota of a prefix was set are not all counted yet."""
        return prefix in self._counting

    @property
    def passes_over_keys(self) -> bool:
        """Whether a change may have to skip very many keys, so that its entry must be applied in pieces."""
        return bool(self._counting) and self._store.is_compacting

    def _of(self, key: bytes) -> list[Quota]:
        """Return the quotas for which a key counts."""
        quotas, size = self._quotas, len(key)
        found = []
        for length in self._lengths:
            if length > size:
                break
            quota = quotas.get(key[:length])
            if quota is not None:
                found.append(quota)
        return found

    # Setting.

    def execute(self, request: admin_pb2.QuotaSetRequest) -> Generator[None, None, Quota | None]:
        """Set or remove a quota, or continue counting; with a pause after each piece.

        Arguments:
            request: the limits.

        Returns:
            the quota; ``None`` if it was removed.

        Raises:
            InvalidQuotaError: the prefix is too long, or a limit is invalid.
            QuotaNotFoundError: there is no quota to remove.
            TooManyQuotasError: there are ``QUOTAS_MAX`` quotas.
        """
        prefix = request.prefix
        if len(prefix) > schema.QUOTA_PREFIX_BYTES_MAX:
            raise errors.InvalidQuotaError
        if request.bytes_max == request.keys_max == REMOVE:
            self._remove(prefix)
            return None
        quota = self._quotas.get(prefix)
        if request.bytes_max == request.keys_max == COUNT_ON:
            if quota is None:
                raise errors.QuotaNotFoundError
            yield from self._count_on(quota, COUNTED_BY_ENTRY)
            return quota
        if request.bytes_max < 0 or request.keys_max < 0:
            raise errors.InvalidQuotaError
        if quota is None and len(self._quotas) >= QUOTAS_MAX:
            raise errors.TooManyQuotasError
        if quota is None:
            quota = self._begin_count(prefix)
        quota.bytes_max, quota.keys_max = request.bytes_max, request.keys_max
        self._quotas[prefix] = quota
        self._save(quota)
        self._changed()
        yield from self._count_on(quota, COUNTED_BY_ENTRY)
        return quota

    def _remove(self, prefix: bytes) -> None:
        if self._quotas.pop(prefix, None) is None:
            raise errors.QuotaNotFoundError
        self._unsaved.pop(prefix, None)
        self._store.meta_delete(schema.CLUSTER, schema.CLUSTER_QUOTA_PREFIX + prefix)
        self._changed()

    def _begin_count(self, prefix: bytes) -> Quota:
        # Kept revisions are due after the last compaction, and a deletion made now with the next revision.
        store = self._store
        quota = Quota(prefix, History.between(max(store.compact_revision, 0), store.revision + 1), (0, 0, 0, 0))
        quota.cursor = prefix
        return quota

    def _count_on(self, quota: Quota, size_bytes: int) -> Generator[None, None, None]:
        """Count the next part of a prefix, with a pause after each piece; nothing if all is counted.

        Arguments:
            quota: quota of the prefix.
            size_bytes: size of the part, as ``_Pace`` counts it.
        """
        if quota.cursor is None:
            return
        pace = _Pace()
        left_bytes = size_bytes
        for key, revision, is_deletion, due in self._store.kept(quota.cursor, prefix_end(quota.prefix), quota.after):
            if not revision:
                if pace.is_over(ABSENT):
                    yield
                continue
            size = len(key) if is_deletion else _size_of(self._store.reader.record(revision))
            quota.bytes_used += kept_bytes(size)
            if due:
                quota.history.add(due, kept_bytes(size))
                quota.cursor, quota.after = key, revision
            else:
                quota.keys_used += 1
                quota.cursor, quota.after = key + b"\0", 0
            left_bytes -= KEY_COST_BYTES + size
            if left_bytes <= 0:
                break
            if pace.is_over(size):
                yield
        else:
            quota.cursor = None
            self._counting.pop(quota.prefix, None)
        self._unsaved[quota.prefix] = quota

    def _save(self, quota: Quota) -> None:
        self._unsaved.pop(quota.prefix, None)
        self._store.meta_put(schema.CLUSTER, schema.CLUSTER_QUOTA_PREFIX + quota.prefix, quota.encode())

    def take_records(self) -> dict[tuple[bytes, bytes], bytes | None]:
        """Return the records that changed since the last call, for the batch with the entries that changed them."""
        unsaved, self._unsaved = self._unsaved, {}
        return {
            (schema.CLUSTER, schema.CLUSTER_QUOTA_PREFIX + prefix): quota.encode() for prefix, quota in unsaved.items()
        }

    def compact(self, revision: int) -> None:
        """Subtract the revisions deleted by a compaction at a main revision, whose entry is being applied."""
        self._unsaved.update({quota.prefix: quota for quota in self._quotas.values() if quota.compact(revision)})

    # Refusing.

    def check_put(self, request: rpc_pb2.PutRequest) -> None:
        """Refuse a put that would grow a prefix beyond its limits.

        Raises:
            QuotaExceededError: a limit would be exceeded; the message names the prefix.
        """
        quotas = self._of(request.key)
        if quotas:
            before, after = _sizes(self._store, request)
            for quota in quotas:
                refusal = quota.refusal(kept_bytes(after), int(before == ABSENT))
                if refusal is not None:
                    raise refusal

    def _add_growth(self, grown: Growth, key: bytes, before: int, after: int) -> None:
        for quota in self._of(key):
            grown[quota.prefix] = grown.get(quota.prefix, 0) + (after != ABSENT) - (before != ABSENT)

    def _refusal(self, grown: Growth, kept: dict[bytes, int]) -> errors.QuotaExceededError | None:
        """Return the refusal of a txn, by the keys by which each prefix grows, and by the bytes of its puts."""
        for prefix, keys in grown.items():
            refusal = self._quotas[prefix].refusal(kept.get(prefix, 0), keys)
            if refusal is not None:
                return refusal
        return None

    def check_path(self, path: Path) -> Generator[None, None, None]:
        """Refuse a txn that would grow a prefix beyond its limits, with a pause after each piece.

        Arguments:
            path: path to execute.

        Raises:
            QuotaExceededError: a limit would be exceeded; the message names the prefix.
        """
        sizes: dict[bytes, tuple[int, int]] = {}
        kept: dict[bytes, int] = {}
        intervals: list[tuple[bytes, bytes]] = []
        yield from self._replay(path, sizes, kept, intervals, SortedList(), _Pace())
        grown: Growth = {}
        for number, (key, (before, after)) in enumerate(sizes.items(), 1):
            self._add_growth(grown, key, before, after)
            if number % (BYTES_PER_PIECE // KEY_COST_BYTES) == 0:
                yield
        if self._refusal(grown, kept) is None:
            return
        # The keys that it only deletes make room; they may be all keys, so they are counted only if that decides.
        for low, high in _joined(intervals):
            for kvs in self._store.select(low, high, Selection()):
                for kv in kvs:
                    key = key_of(kv)
                    if key not in sizes:
                        self._add_growth(grown, key, _size_of(kv), ABSENT)
                yield
        refusal = self._refusal(grown, kept)
        if refusal is not None:
            raise refusal

    def _replay(
        self,
        path: Path,
        sizes: dict[bytes, tuple[int, int]],
        kept: dict[bytes, int],
        intervals: list[tuple[bytes, bytes]],
        live: SortedList,
        pace: _Pace,
    ) -> Generator[None, None, None]:
        """Collect what a path puts below the prefixes, and the intervals that it deletes.

        Arguments:
            path: the path.
            sizes: filled with the size of each key that it puts, before and after it.
            kept: filled with the bytes of its puts, by prefix.
            intervals: filled with what it deletes.
            live: the keys that were put and not deleted since. A deletion looks only at these, and at each once:
                otherwise the time would grow with the product of puts and deletions, which may be thousands each.
            pace: decides when to pause.
        """
        nested = iter(path.nested)
        for kind, request in path.operations:
            before = ABSENT
            if kind == "request_txn":
                yield from self._replay(next(nested), sizes, kept, intervals, live, pace)
            elif kind == "request_put" and (quotas := self._of(request.key)):
                before, after = _sizes(self._store, request)
                sizes[request.key] = before, after
                for quota in quotas:
                    kept[quota.prefix] = kept.get(quota.prefix, 0) + kept_bytes(after)
                if request.key not in live:
                    live.add(request.key)
            elif kind == "request_delete_range":
                low, high = _interval(request)
                intervals.append((low, high))
                end = None if high == TO_THE_LAST else high
                gone = [] if end is not None and end <= low else list(live.irange(low, end, (True, False)))
                for key in gone:
                    sizes[key] = sizes[key][0], ABSENT
                    live.remove(key)
            if pace.is_over(before):
                yield

    # Accounting.

    def account(self, main: int, changes: list[Change]) -> None:
        """Record the growth and shrinkage of a finished transaction, as far as it is not recorded yet.

        Arguments:
            main: its main revision.
            changes: all its changes.
        """
        while self._accounted < len(changes):
            self._account_some(main, changes)
        self._accounted = 0
        if self._counting:
            finish(self.count_owed())
            # The same quota on all members, however long they have been running.
            work = self._count_on(self._counting[min(self._counting)], COUNTED_BY_CHANGE)
            if next(work, _DONE) is not _DONE:
                self._owed = work

    def count_owed(self) -> Generator[None, None, None]:
        """Finish the part that the last change has begun to count, before anything else is applied."""
        work, self._owed = self._owed, None
        if work is not None:
            yield from work

    def account_unfinished(self, changes: list[Change]) -> Generator[None, None, None]:
        """Record the changes of an unfinished transaction, so that its end takes no longer than one piece; with pauses.

        Arguments:
            changes: all its changes so far.
        """
        while self._accounted < len(changes):
            self._account_some(self._store.revision + 1, changes)
            yield

    def _account_some(self, main: int, changes: list[Change]) -> None:
        pace = _Pace()
        number = self._accounted
        while number < len(changes):
            key, data, is_deletion, previous = changes[number]
            number += 1
            quotas = self._of(key)
            if not quotas:
                continue
            before = _size_of(self._store.reader.record(previous)) if previous else ABSENT
            after = ABSENT if is_deletion else _size_of(data)
            for quota in quotas:
                if quota.cursor is None or key < quota.cursor:
                    quota.change(before, after, len(key), main)
                    self._unsaved[quota.prefix] = quota
            if pace.is_over(before):
                break
        self._accounted = number


class _Pace:
    """Decides when to pause in a loop over many keys."""

    __slots__ = ("_left_bytes",)

    def __init__(self) -> None:
        self._left_bytes = BYTES_PER_PIECE

    def is_over(self, size_bytes: int) -> bool:
        """Count a key that was looked at; return whether it is time to pause.

        Arguments:
            size_bytes: number of bytes read for it; ``ABSENT``: none.
        """
        self._left_bytes -= KEY_COST_BYTES + size_bytes
        if self._left_bytes > 0:
            return False
        self._left_bytes = BYTES_PER_PIECE
        return True


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the interval of all keys that begin with a prefix."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,)) if stripped else TO_THE_LAST


def kept_bytes(size_bytes: int) -> int:
    """Return the approximate size of a revision in the database: the same on all members, even if their pages differ.

    Arguments:
        size_bytes: size of its key and value.
    """
    size_bytes += REVISION_COST_BYTES
    if size_bytes <= LARGE_BYTES:
        return size_bytes
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _size_of(kv: bytes) -> int:
    """Return the bytes of key and value of a KeyValue; 0 if both are empty, as in entries that no service checked."""
    view = KeyValueView(kv)
    return len(view.key) + view.value_end - view.value_start


def _sizes(store: Store, request: rpc_pb2.PutRequest) -> tuple[int, int]:
    """Return the size of a key before a put and after it."""
    found = store.get(request.key)
    before = ABSENT if found is None else _size_of(found)
    return before, before if request.ignore_value else len(request.key) + len(request.value)


def _interval(request: rpc_pb2.DeleteRangeRequest) -> tuple[bytes, bytes]:
    """Return the interval that a deletion empties: first key, and the key before which it ends or ``TO_THE_LAST``."""
    return request.key, request.range_end or request.key + b"\0"


def _joined(intervals: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the same keys as intervals that do not overlap."""
    joined: list[tuple[bytes, bytes]] = []
    for low, high in sorted(intervals):
        if joined and (joined[-1][1] == TO_THE_LAST or low <= joined[-1][1]):
            last_low, last_high = joined[-1]
            is_open = TO_THE_LAST in (last_high, high)
            joined[-1] = last_low, TO_THE_LAST if is_open else max(last_high, high)
        elif high == TO_THE_LAST or low < high:
            joined.append((low, high))
    return joined
