"""The index, rebuilt from the records on disk when a store is opened: one pass, every checksum verified.

The pass costs about 2 us a record, so a million keys open in seconds; the common record (first version of its key,
no lease) is recognised by comparing bytes, all others are decoded. What is on disk after a compaction is enough: the
record of a put carries creation and version, and a tombstone without a put before it makes a key that is only a
deletion.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from raftkv.errors import CorruptionError, InvariantError
from raftkv.storage import schema
from raftkv.storage.backend.base import ReadTxn
from raftkv.storage.index import Index
from raftkv.storage.key_index import KeyIndex
from raftkv.storage.key_value import VALUE_HEADS, KeyValueView, varint
from raftkv.storage.record import CorruptRecordError, unseal
from raftkv.storage.revision import KEY_BYTES, SUB_BITS, describe, from_key

STEP_RECORDS: Final = 1_000
"""Records or keys of one step: about 3 ms."""

_FIRST_VERSION = b"\x20\x01"
_SMALL = len(VALUE_HEADS)


@dataclass(slots=True)
class Restored:
    """The result of a scan: what the index and the attachments begin with.

    Attributes:
        entries: the history of each key, as the index keeps it.
        leases: the lease of each attached key.
    """

    entries: dict[bytes, int | KeyIndex] = field(default_factory=dict)
    leases: dict[bytes, int] = field(default_factory=dict)
    last_revision: int = 0
    """Newest main revision of any record."""


def scan(read: ReadTxn) -> Restored:
    """Read every record in order of revision; raises like ``scan_steps``."""
    steps = scan_steps(read)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            restored: Restored = end.value
            return restored


def scan_steps(read: ReadTxn) -> Generator[None, None, Restored]:
    """Read every record in order of revision, in steps of some milliseconds.

    Raises:
        CorruptRecordError: a record is not what was written; names its revision.
    """
    restored = Restored()
    entries = restored.entries
    revision = 0
    for count, (revision_key, record) in enumerate(read.items(schema.KEY), 1):
        if not count % STEP_RECORDS:
            yield
        # Every record, read anyway: damage is found at the start, not when a client asks for the key.
        data = unseal(revision_key, record)
        revision = from_key(revision_key)
        # A record of 18 bytes of key is a tombstone; a plain record of a key seen before is a put after a deletion.
        key = _key_of_plain_record(data, revision >> SUB_BITS) if len(revision_key) == KEY_BYTES else None
        if key is None or key in entries:
            _restore_any(restored, revision_key, revision, data)
        else:
            entries[key] = revision
    # Records come in order of revision, so the last one is the newest.
    restored.last_revision = revision >> SUB_BITS
    return restored


def _key_of_plain_record(data: bytes, main: int) -> bytes | None:
    """The key, when the record is the first version of a short key and has a short value and no lease."""
    size = data[1]
    if size > 0x7F:
        return None
    end = 2 + size
    # Everything before the value of such a record is known from its revision: compare, do not decode.
    number = varint(main)
    middle = b"\x10" + number + b"\x18" + number + _FIRST_VERSION
    position = end + len(middle)
    rest = len(data) - position
    # Nothing but a value may follow: its length must be what is left after its tag and the length itself.
    if 2 < rest < _SMALL and data.startswith(middle + VALUE_HEADS[rest - (2 if rest < 0x82 else 3)], end):
        return data[2:end]
    return None


def _restore_any(restored: Restored, revision_key: bytes, revision: int, data: bytes) -> None:
    try:
        view = KeyValueView(data)
        if len(revision_key) > KEY_BYTES:
            _restore_tombstone(restored, view.key, revision)
        else:
            _restore_put(restored, view, revision)
    # A history in an order that no store writes: damage that no checksum shows.
    except InvariantError as error:
        raise CorruptRecordError(f"record of revision {describe(revision_key)}: {error}") from error


def _restore_put(restored: Restored, view: KeyValueView, revision: int) -> None:
    key = view.key
    # The checksum covers the revision key, so this is a fault of the program that wrote it; refuse it all the same.
    if view.mod_revision != revision >> SUB_BITS:
        raise CorruptionError(f"claims revision {view.mod_revision}")
    entry = restored.entries.get(key)
    if entry is None:
        # The first put that is left may be a later version: a compaction dropped the ones before. The record says how
        # many there were.
        plain = view.version == 1 and view.create_revision == view.mod_revision
        restored.entries[key] = revision if plain else KeyIndex(view.create_revision, view.version, [revision])
    else:
        _widened(restored, key, entry).put(revision)
    # The last record of a key says what it is attached to; an earlier one may have said something else.
    if view.lease:
        restored.leases[key] = view.lease
    else:
        restored.leases.pop(key, None)


def _restore_tombstone(restored: Restored, key: bytes, revision: int) -> None:
    restored.leases.pop(key, None)
    entry = restored.entries.get(key)
    # A compaction exactly at this deletion dropped the puts before it.
    if entry is None:
        restored.entries[key] = KeyIndex.from_tombstone(revision)
    else:
        _widened(restored, key, entry).tombstone(revision)


def _widened(restored: Restored, key: bytes, entry: int | KeyIndex) -> KeyIndex:
    if isinstance(entry, int):
        entry = restored.entries[key] = KeyIndex(entry >> SUB_BITS, 1, [entry])
    return entry


def fill_index(index: Index, entries: dict[bytes, int | KeyIndex]) -> None:
    """Fill an index with scanned entries, all at once.

    Arguments:
        index: replaced by what was scanned.
        entries: the history of each key; the index takes the dict over.
    """
    # Nearly all entries are integers: alive, and with nothing to compact.
    histories = [(key, entry) for key, entry in entries.items() if isinstance(entry, KeyIndex)]
    index.restore(
        entries,
        dead=(key for key, entry in histories if not entry.is_live()),
        dirty=(key for key, entry in histories if entry.needs_compaction()),
    )


def fill_index_steps(index: Index, restored: Restored) -> Generator[None, None, None]:
    """Fill a fresh index with scanned entries, in steps; it is whole after the last of them.

    This costs more in sum than ``fill_index``, which sorts all keys in one go.

    Arguments:
        index: a fresh one.
        restored: the result of a scan; the index takes its entries over.
    """
    keys = iter(restored.entries.items())
    while part := list(islice(keys, STEP_RECORDS)):
        index.restore_part(part)
        yield
    index.restored(restored.entries)
