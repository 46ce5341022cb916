"""The index, rebuilt from the records on disk when a store is opened: one pass, every checksum verified.

A million records take about 1.2 s. They are read some hundreds at a time, so that nearly all of the work on them
(checksums, revisions) is done by loops in C; the common record (first version of its key, no lease) is recognised by
comparing bytes, the next version of a key by a search for its revision, all others are decoded. What is on disk after a
compaction is enough: the record of a put carries creation and version, and a tombstone without a put before it makes a
key that is only a deletion.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from raftkv.errors import CorruptionError, InvariantError
from raftkv.storage.backend.base import ReadTxn
from raftkv.storage.index import Index, KeyIndex
from raftkv.storage.key_value import KeyValueView, value_head, varint
from raftkv.storage.revision import KEY_BYTES, STEP_RECORDS, SUB_BITS, CorruptRecordError, checked_runs, describe

_FIRST_VERSION: Final = b"\x20\x01"
_NEVER: Final = b"\xff\xff"
"""Two bytes that no record has in the place of a tag."""
_REMEMBERED_BYTES: Final = 1 << 16
_SMALLEST_BYTES: Final = 3


class _Ends(dict[int, bytes]):
    """How a record goes on when so many bytes are left: with version 1 and a value that takes all the others.

    Then nothing else follows it, above all no lease.
    """

    def __missing__(self, left: int) -> bytes:
        size = left - len(_FIRST_VERSION)
        # A value whose length takes one byte less or more leaves some lengths that no record has.
        heads = (value_head(number) for number in range(size - 2, max(size - 6, 0), -1))
        head = next((head for head in heads if len(head) + _value_size(head) == size), _NEVER) if size else b""
        end = _FIRST_VERSION + head
        if left < _REMEMBERED_BYTES:
            self[left] = end
        return end


def _value_size(head: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(head[1:]))


_ENDS: Final = _Ends()


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


def scan_steps(read: ReadTxn) -> Generator[None, None, Restored]:
    """Read every record in order of revision, in steps of some milliseconds.

    Raises:
        CorruptRecordError: a record is not what was written; names its revision.
    """
    restored = Restored()
    revisions = [0]
    for revision_keys, revisions, datas in checked_runs(read):
        _restore_run(restored, revision_keys, revisions, datas)
        yield
    # Records come in order of revision, so the last one is the newest.
    restored.last_revision = revisions[-1] >> SUB_BITS
    return restored


def _restore_run(restored: Restored, revision_keys: Sequence[bytes], revisions: list[int], datas: list[bytes]) -> None:
    entries, ends = restored.entries, _ENDS
    # The shortest record is the deletion of a key of one byte; what is shorter is refused where it is decoded.
    if min(map(len, datas)) < _SMALLEST_BYTES:
        for item in zip(revision_keys, revisions, datas, strict=True):
            _restore_any(restored, *item)
        return
    # Of one width in nearly every run: the numbers of its plain records have this one, or are not recognised.
    width = len(varint(revisions[-1] >> SUB_BITS))
    for revision_key, revision, data in zip(revision_keys, revisions, datas, strict=True):
        # Of a record whose key is shorter than 128 bytes: key, 10 creation 18 modification, 20 01 value.
        end = data[1] + 2
        middle = end + width + 1
        after = middle + width + 1
        # Creation and modification are the same where both have the width: else the tag 20 of the version is in the
        # second slice where the first one has the tag 18. A tombstone ends before.
        if (
            data[end + 1 : middle] == data[middle + 1 : after]
            and data.startswith(ends[len(data) - after], after)
            and data[1] < 0x80
            # A plain record of a key seen before is a put after a deletion.
            and entries.setdefault(data[2:end], revision) == revision
        ):
            continue
        if not _restore_next(restored, revision, data):
            _restore_any(restored, revision_key, revision, data)


def _restore_next(restored: Restored, revision: int, data: bytes) -> bool:
    """Restore the next version of a living key that is not attached to a lease, if the record is one."""
    end = data[1] + 2
    entry = restored.entries.get(key := data[2:end]) if end < 0x82 else None
    modified = b"\x18" + varint(revision >> SUB_BITS) + b"\x20"
    # Within the eleven bytes of a creation before it, only the field itself can look like this.
    start = data.find(modified, end, end + 11 + len(modified))
    # A tombstone is a key alone.
    if entry is None or start < 0 or len(data) - start < len(modified) + 2:
        return False
    start += len(modified)
    # The version, of one byte or two; it is one more than the last.
    start += 1 if data[start] < 0x80 else 2
    # Behind it comes what would follow a first version.
    if data[start - 1] > 0x7F or not data.startswith(_ENDS[len(data) - start + 2][2:], start):
        return False
    if isinstance(entry, int):
        restored.entries[key] = KeyIndex(entry >> SUB_BITS, 2, [entry, revision])
    elif entry.revisions:
        entry.revisions.append(revision)
        entry.version += 1
    else:
        return False
    restored.leases.pop(key, None)
    return True


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
