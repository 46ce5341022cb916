"""Rebuilds the index from the records on disk when a store is opened: one pass, every checksum verified.

A million records take about 1.2 s. They are read a few hundred at a time, so that loops in C do nearly all of the work
(checksums, revisions). The common record (first version of its key, no lease) is recognised by comparing bytes, the
next version of a key by a search for its revision; all others are decoded. The records that a compaction leaves are
sufficient: the record of a put has creation revision and version, and a tombstone without an earlier put makes a key
whose only revision is a deletion.
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
"""Two bytes that no record has at the position of a tag."""
_REMEMBERED_BYTES: Final = 1 << 16
_SMALLEST_BYTES: Final = 3


class _Ends(dict[int, bytes]):
    """The expected end of a record by its length: version 1, then a value that takes all remaining bytes.

    A record with this end has no other fields, in particular no lease.
    """

    def __missing__(self, left: int) -> bytes:
        size = left - len(_FIRST_VERSION)
        # Some lengths are impossible: where the length varint of the value grows by one byte.
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
    """The result of a scan: the initial contents of the index and the attachments.

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
        CorruptRecordError: a record is damaged; the message names its revision.
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
    # The shortest record is the deletion of a key of one byte; shorter ones are refused when they are decoded.
    if min(map(len, datas)) < _SMALLEST_BYTES:
        for item in zip(revision_keys, revisions, datas, strict=True):
            _restore_any(restored, *item)
        return
    # In nearly every run all revisions have the same varint width: plain records of another width are not recognised.
    width = len(varint(revisions[-1] >> SUB_BITS))
    for revision_key, revision, data in zip(revision_keys, revisions, datas, strict=True):
        # The fields of a record whose key is shorter than 128 bytes: key, 10 creation 18 modification, 20 01 value.
        end = data[1] + 2
        middle = end + width + 1
        after = middle + width + 1
        # If the two slices are equal, creation and modification are the same revision of this width: with other widths
        # the second slice has the tag 20 of the version where the first has the tag 18. A tombstone ends before them.
        if (
            data[end + 1 : middle] == data[middle + 1 : after]
            and data.startswith(ends[len(data) - after], after)
            and data[1] < 0x80
            # A plain record of a key that was seen before is a put after a deletion.
            and entries.setdefault(data[2:end], revision) == revision
        ):
            continue
        if not _restore_next(restored, revision, data):
            _restore_any(restored, revision_key, revision, data)


def _restore_next(restored: Restored, revision: int, data: bytes) -> bool:
    """Restore the next version of a living key without a lease; return whether the record is one."""
    end = data[1] + 2
    entry = restored.entries.get(key := data[2:end]) if end < 0x82 else None
    modified = b"\x18" + varint(revision >> SUB_BITS) + b"\x20"
    # Within the eleven bytes of the creation revision, only the modification field itself can match.
    start = data.find(modified, end, end + 11 + len(modified))
    # A tombstone has only a key.
    if entry is None or start < 0 or len(data) - start < len(modified) + 2:
        return False
    start += len(modified)
    # The version has one or two bytes, and must be one more than the last.
    start += 1 if data[start] < 0x80 else 2
    # After it comes the same end as after a first version.
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
    # The history has an order that no store writes: damage that no checksum shows.
    except InvariantError as error:
        raise CorruptRecordError(f"record of revision {describe(revision_key)}: {error}") from error


def _restore_put(restored: Restored, view: KeyValueView, revision: int) -> None:
    key = view.key
    # The checksum covers the revision key, so this is a bug of the program that wrote the record; refuse it too.
    if view.mod_revision != revision >> SUB_BITS:
        raise CorruptionError(f"claims revision {view.mod_revision}")
    entry = restored.entries.get(key)
    if entry is None:
        # The first remaining put may be a later version: a compaction dropped the earlier ones. The record says how
        # many there were.
        plain = view.version == 1 and view.create_revision == view.mod_revision
        restored.entries[key] = revision if plain else KeyIndex(view.create_revision, view.version, [revision])
    else:
        _widened(restored, key, entry).put(revision)
    # The last record of a key determines its lease; an earlier one may have had another.
    if view.lease:
        restored.leases[key] = view.lease
    else:
        restored.leases.pop(key, None)


def _restore_tombstone(restored: Restored, key: bytes, revision: int) -> None:
    restored.leases.pop(key, None)
    entry = restored.entries.get(key)
    # A compaction exactly at this deletion dropped the earlier puts.
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
        index: index whose contents are replaced.
        entries: history of each key; the index takes the dict over.
    """
    # Nearly all entries are integers: alive, and nothing to compact.
    histories = [(key, entry) for key, entry in entries.items() if isinstance(entry, KeyIndex)]
    index.restore(
        entries,
        dead=(key for key, entry in histories if not entry.is_live()),
        dirty=(key for key, entry in histories if entry.needs_compaction()),
    )


def fill_index_steps(index: Index, restored: Restored) -> Generator[None, None, None]:
    """Fill a fresh index with scanned entries, in steps; it may be used after the last step.

    In total this costs more than ``fill_index``, which sorts all keys at once.

    Arguments:
        index: a fresh index.
        restored: result of a scan; the index takes its entries over.
    """
    keys = iter(restored.entries.items())
    while part := list(islice(keys, STEP_RECORDS)):
        index.restore_part(part)
        yield
    index.restored(restored.entries)
