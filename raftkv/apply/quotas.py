"""Quotas of prefixes: how many keys, and bytes of keys and values, may exist below a prefix.

    quotas.check_put(request)             # refuses what would grow a prefix beyond its limits
    ... the store changes ...
    quotas.account(changes)               # called by the store: what was taken and given back

Only what exists now counts: a deletion, of whatever kind, gives its room back at once, and the history counts nothing.
Prefixes may overlap; a key counts for all that it begins with. A txn is taken or refused as a whole, by what is there
before it and after it. A prefix that is over its limits (they were set below what was there) takes no growth, and
everything else.

Limits and use lie in the cluster bucket, written with the entry that changes them: a restart or a received database
has both, and nothing is counted again. Setting a quota counts what is there, in pieces.

    raftkv_quota/<prefix>  ->  bytes_max u64, keys_max u64 (0: none), bytes_used u64, keys_used u64

Invariants: use is what a count of the present keys would give, on every member after the same entry. Without quotas
the cost of a put is one test of ``is_active``.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from typing import Final, Protocol

from sortedcontainers import SortedList

from raftkv import errors
from raftkv.apply.alarms import MetaStore
from raftkv.apply.txn import Path
from raftkv.pb import admin_pb2, rpc_pb2
from raftkv.storage import schema
from raftkv.storage.index import TO_THE_LAST
from raftkv.storage.key_value import KeyValueView, key_of
from raftkv.storage.mvcc import Accountant
from raftkv.storage.mvcc_txn import Change
from raftkv.storage.selection import Pieces, Selection

PREFIX_BYTES_MAX: Final = 256
QUOTAS_MAX: Final = 1_000
LIMIT_MAX: Final = (1 << 63) - 1
REMOVE: Final = -1
"""What both limits are in an entry that removes a quota."""

BYTES_PER_PIECE: Final = 256 * 1024
"""Bytes of values that are read between two pauses. The size of a value is known only once it is read, and each may be
as large as a request.
"""
KEY_COST_BYTES: Final = 1024
"""Bytes that a key counts for beside its value."""

KEY_PREFIX: Final = b"raftkv_quota/"
"""Begins the keys of quotas in ``cluster``: the prefix follows, and the value begins with its two limits."""
_RECORD: Final = struct.Struct(">QQQQ")

ABSENT: Final = -1
"""Size of a key that does not exist."""

Growth = dict[bytes, list[int]]
"""Prefix to the bytes and keys that it grows by, or shrinks."""


class Quota:
    """Limits of a prefix (0: none), and what is used."""

    __slots__ = ("bytes_max", "bytes_used", "keys_max", "keys_used", "prefix")

    def __init__(self, prefix: bytes, bytes_max: int, keys_max: int, bytes_used: int = 0, keys_used: int = 0) -> None:
        self.prefix = prefix
        self.bytes_max = bytes_max
        self.keys_max = keys_max
        self.bytes_used = bytes_used
        self.keys_used = keys_used

    def refusal(self, size_bytes: int, keys: int) -> errors.QuotaExceededError | None:
        """Return why so much more is too much, if it is."""
        if self.keys_max and keys > 0 and self.keys_used + keys > self.keys_max:
            return self._refusal(self.keys_used, self.keys_max, keys, "keys")
        if self.bytes_max and size_bytes > 0 and self.bytes_used + size_bytes > self.bytes_max:
            return self._refusal(self.bytes_used, self.bytes_max, size_bytes, "bytes")
        return None

    def _refusal(self, used: int, most: int, more: int, unit: str) -> errors.QuotaExceededError:
        name = self.prefix.decode("utf-8", "backslashreplace")
        return errors.QuotaExceededError(
            f"{errors.NoSpaceError.text} (raftkv: quota of prefix {name!r} exceeded: "
            f"{used} of {most} {unit} used, {more} more wanted)"
        )

    def message(self) -> admin_pb2.PrefixQuota:
        """Return it as clients are shown it."""
        return admin_pb2.PrefixQuota(
            prefix=self.prefix,
            bytes_max=self.bytes_max,
            keys_max=self.keys_max,
            bytes_used=self.bytes_used,
            keys_used=self.keys_used,
        )


class Store(MetaStore, Protocol):
    """The part of the store that quotas need."""

    accountant: Accountant | None

    def get(self, key: bytes) -> bytes | None:
        """Return the current KeyValue of a key."""

    def record(self, revision: int) -> bytes:
        """Return the KeyValue put at a packed revision."""

    def select(self, key: bytes, range_end: bytes, selection: Selection) -> Pieces:
        """Begin to read an interval in pieces."""


class Quotas:
    """The quotas of a cluster.

    Arguments:
        store: where they are kept, and what is counted.

    Attributes:
        is_active: whether there are any.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._quotas: dict[bytes, Quota] = {}
        self._lengths: tuple[int, ...] = ()
        self._accounted = 0
        self.is_active = False
        self.reload()

    def reload(self) -> None:
        """Read them back from the store: at start, and after a snapshot replaced it."""
        self._quotas = {}
        self._accounted = 0
        with schema.reading(schema.CLUSTER):
            for key, value in self._store.meta_items(schema.CLUSTER):
                if key.startswith(KEY_PREFIX):
                    prefix = key.removeprefix(KEY_PREFIX)
                    self._quotas[prefix] = Quota(prefix, *_RECORD.unpack(value))
        self._changed()

    def _changed(self) -> None:
        self._lengths = tuple(sorted({len(prefix) for prefix in self._quotas}))
        self.is_active = bool(self._quotas)
        self._store.accountant = self if self.is_active else None

    def by_prefix(self) -> list[Quota]:
        """Return all, in order of prefix."""
        return [self._quotas[prefix] for prefix in sorted(self._quotas)]

    def _of(self, key: bytes) -> list[Quota]:
        """Return the quotas that a key counts for."""
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
        """Set or remove a quota; a new one is counted, with a pause after each piece.

        Returns:
            the quota; None if it was removed.

        Raises:
            InvalidQuotaError: the prefix is too long, or a limit is no limit.
            QuotaNotFoundError: there is none to remove.
            TooManyQuotasError: there are ``QUOTAS_MAX``.
        """
        prefix = request.prefix
        if len(prefix) > PREFIX_BYTES_MAX:
            raise errors.InvalidQuotaError
        if request.bytes_max == request.keys_max == REMOVE:
            self._remove(prefix)
            return None
        if request.bytes_max < 0 or request.keys_max < 0:
            raise errors.InvalidQuotaError
        quota = self._quotas.get(prefix)
        if quota is None:
            if len(self._quotas) >= QUOTAS_MAX:
                raise errors.TooManyQuotasError
            quota = yield from self._count(prefix)
        quota.bytes_max, quota.keys_max = request.bytes_max, request.keys_max
        self._quotas[prefix] = quota
        self._save(quota)
        self._changed()
        return quota

    def _remove(self, prefix: bytes) -> None:
        if self._quotas.pop(prefix, None) is None:
            raise errors.QuotaNotFoundError
        self._store.meta_delete(schema.CLUSTER, KEY_PREFIX + prefix)
        self._changed()

    def _count(self, prefix: bytes) -> Generator[None, None, Quota]:
        quota = Quota(prefix, 0, 0)
        for kvs in self._store.select(prefix, prefix_end(prefix), Selection()):
            quota.keys_used += len(kvs)
            quota.bytes_used += sum(map(_size_of, kvs))
            yield
        return quota

    def _save(self, quota: Quota) -> None:
        record = _RECORD.pack(quota.bytes_max, quota.keys_max, quota.bytes_used, quota.keys_used)
        self._store.meta_put(schema.CLUSTER, KEY_PREFIX + quota.prefix, record)

    # Refusing.

    def check_put(self, request: rpc_pb2.PutRequest) -> None:
        """Refuse a put that would grow a prefix beyond its limits.

        Raises:
            QuotaExceededError: names the prefix.
        """
        quotas = self._of(request.key)
        if quotas:
            before, after = _sizes(self._store, request)
            size_bytes, keys = after - max(before, 0), int(before == ABSENT)
            for quota in quotas:
                refusal = quota.refusal(size_bytes, keys)
                if refusal is not None:
                    raise refusal

    def _growth(self, sizes: dict[bytes, tuple[int, int]]) -> Generator[None, None, Growth]:
        """What each prefix grows by when keys of one size become keys of another, with a pause after each piece."""
        grown: Growth = {}
        for number, (key, (before, after)) in enumerate(sizes.items(), 1):
            self._add_growth(grown, key, before, after)
            if number % (BYTES_PER_PIECE // KEY_COST_BYTES) == 0:
                yield
        return grown

    def _add_growth(self, grown: Growth, key: bytes, before: int, after: int) -> None:
        for quota in self._of(key):
            more = grown.setdefault(quota.prefix, [0, 0])
            more[0] += max(after, 0) - max(before, 0)
            more[1] += (after != ABSENT) - (before != ABSENT)

    def _refuse(self, grown: Growth) -> None:
        for prefix, (size_bytes, keys) in grown.items():
            refusal = self._quotas[prefix].refusal(size_bytes, keys)
            if refusal is not None:
                raise refusal

    def check_path(self, path: Path) -> Generator[None, None, None]:
        """Refuse a txn that would grow a prefix beyond its limits, with a pause after each piece.

        Arguments:
            path: that would be executed.

        Raises:
            QuotaExceededError: names the prefix.
        """
        # What is put and nothing deleted is the most that a txn can take. That is enough nearly always.
        sizes: dict[bytes, tuple[int, int]] = {}
        pace = _Pace()
        for request in _puts(path):
            if self._of(request.key):
                before, after = _sizes(self._store, request)
                sizes[request.key] = before, max(before, after)
                if pace.is_over(before):
                    yield
        grown = yield from self._growth(sizes)
        try:
            self._refuse(grown)
        except errors.QuotaExceededError:
            yield from self._check_exactly(path)

    def _check_exactly(self, path: Path) -> Generator[None, None, None]:
        """Take into account what the txn deletes: it may be everything, so only what it puts is kept one by one."""
        sizes: dict[bytes, tuple[int, int]] = {}
        intervals: list[tuple[bytes, bytes]] = []
        yield from self._replay(path, sizes, intervals, SortedList(), _Pace())
        grown = yield from self._growth(sizes)
        for low, high in _joined(intervals):
            for kvs in self._store.select(low, high, Selection()):
                for kv in kvs:
                    key = key_of(kv)
                    if key not in sizes:
                        self._add_growth(grown, key, _size_of(kv), ABSENT)
                yield
        self._refuse(grown)

    def _replay(
        self,
        path: Path,
        sizes: dict[bytes, tuple[int, int]],
        intervals: list[tuple[bytes, bytes]],
        live: SortedList,
        pace: _Pace,
    ) -> Generator[None, None, None]:
        """Note the sizes of the keys that a path puts, before it and after it, and the intervals that it deletes.

        Arguments:
            path: the path.
            sizes, intervals: are filled.
            live: those keys that were put and not deleted since. A deletion looks at these alone, and at each once:
                else thousands of puts and deletions would take time by their product.
            pace: says when to pause.
        """
        nested = iter(path.nested)
        for kind, request in path.operations:
            before = ABSENT
            if kind == "request_txn":
                yield from self._replay(next(nested), sizes, intervals, live, pace)
            elif kind == "request_put":
                before, after = _sizes(self._store, request)
                sizes[request.key] = before, after
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

    def account(self, changes: list[Change]) -> None:
        """Note what a transaction that has ended took and gave back, as far as that is not noted yet."""
        while self._accounted < len(changes):
            self._account_some(changes)
        self._accounted = 0

    def account_unfinished(self, changes: list[Change]) -> Generator[None, None, None]:
        """Note what a transaction has done so far, so that its end is no more work than a piece of it; with pauses.

        Arguments:
            changes: all of them.
        """
        while self._accounted < len(changes):
            self._account_some(changes)
            yield

    def _account_some(self, changes: list[Change]) -> None:
        touched: dict[bytes, Quota] = {}
        pace = _Pace()
        number = self._accounted
        while number < len(changes):
            key, data, is_deletion, previous = changes[number]
            number += 1
            quotas = self._of(key)
            if not quotas:
                continue
            before = _size_of(self._store.record(previous)) if previous else ABSENT
            after = ABSENT if is_deletion else _size_of(data)
            for quota in quotas:
                quota.bytes_used += max(after, 0) - max(before, 0)
                quota.keys_used += (after != ABSENT) - (before != ABSENT)
                touched[quota.prefix] = quota
            if pace.is_over(before):
                break
        self._accounted = number
        for quota in touched.values():
            self._save(quota)


class _Pace:
    """Says after which keys of many it is time to pause."""

    __slots__ = ("_left_bytes",)

    def __init__(self) -> None:
        self._left_bytes = BYTES_PER_PIECE

    def is_over(self, size_bytes: int) -> bool:
        """Note that a key was looked at; whether it is time to pause.

        Arguments:
            size_bytes: of what was read for it; ``ABSENT``: nothing.
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


def _size_of(kv: bytes) -> int:
    """Bytes of the key and the value of a KeyValue; 0 if both are empty, as in entries that no service has checked."""
    view = KeyValueView(kv)
    return len(view.key) + view.value_end - view.value_start


def _sizes(store: Store, request: rpc_pb2.PutRequest) -> tuple[int, int]:
    """Return the size of a key before a put and after it."""
    found = store.get(request.key)
    before = ABSENT if found is None else _size_of(found)
    return before, before if request.ignore_value else len(request.key) + len(request.value)


def _puts(path: Path) -> Iterator[rpc_pb2.PutRequest]:
    for kind, request in path.operations:
        if kind == "request_put":
            yield request
    for nested in path.nested:
        yield from _puts(nested)


def _interval(request: rpc_pb2.DeleteRangeRequest) -> tuple[bytes, bytes]:
    """The interval that a deletion empties: its first key, and the key before which it ends, or ``TO_THE_LAST``."""
    return request.key, request.range_end or request.key + b"\0"


def _joined(intervals: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the same keys in intervals that do not overlap."""
    joined: list[tuple[bytes, bytes]] = []
    for low, high in sorted(intervals):
        if joined and (joined[-1][1] == TO_THE_LAST or low <= joined[-1][1]):
            last_low, last_high = joined[-1]
            is_open = TO_THE_LAST in (last_high, high)
            joined[-1] = last_low, TO_THE_LAST if is_open else max(last_high, high)
        elif high == TO_THE_LAST or low < high:
            joined.append((low, high))
    return joined
