"""The scan of a database: recognising records by their bytes gives the same result as decoding every field."""

from __future__ import annotations

from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from raftkv.storage import schema
from raftkv.storage.backend.base import RUN_BYTES_MAX, WriteBatch
from raftkv.storage.index import KeyIndex
from raftkv.storage.key_value import KeyValueView, encode
from raftkv.storage.restore import Restored, scan_steps
from raftkv.storage.revision import pack, seal, to_key, to_tombstone_key
from raftkv.storage.selection import finish
from tests.storage.memory import MemoryBackend

WIDTHS = (1, 126, 127, 128, 129, 16_382, 16_383, 16_384, 2_097_150, 2_097_151, 2_097_152, 1 << 40)
"""Revisions around which a number takes one byte more."""

VALUES = st.one_of(
    st.sampled_from([0, 1, 122, 123, 127, 128, 129, 16_000, 16_383, 16_384, 70_000]).map(lambda size: b"v" * size),
    # What stands behind a key in a record, in the value: it must not be taken for the record's own.
    st.tuples(st.sampled_from(WIDTHS), st.integers(1, 3), st.binary(max_size=6)).map(
        lambda parts: encode(b"", parts[0], parts[0], parts[1], parts[2])
    ),
    st.binary(max_size=300),
)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from([b"k", b"\x20\x01", b"K" * 127, b"K" * 128, b"K" * 300, b"other"]),
        st.sampled_from(["put", "put", "put", "delete", "leased"]),
        VALUES,
    ),
    max_size=30,
)


def expected(backend: MemoryBackend) -> Restored:
    """The same from every field of every record, decoded."""
    found = Restored()
    histories: dict[bytes, KeyIndex] = {}
    for revision_key, record in backend.buckets[schema.KEY].items():
        view = KeyValueView(record[4:])
        main, sub = int.from_bytes(revision_key[:8], "big"), int.from_bytes(revision_key[9:17], "big")
        found.last_revision = main
        found.leases.pop(view.key, None)
        if len(revision_key) > 17:
            if view.key in histories:
                histories[view.key].tombstone(pack(main, sub))
            else:
                histories[view.key] = KeyIndex.from_tombstone(pack(main, sub))
            continue
        history = histories.setdefault(view.key, KeyIndex(view.create_revision, view.version - 1))
        if history.version and not history.closed:
            history.revisions = [*history.revisions, pack(main, sub)]
            history.version += 1
        else:
            history.put(pack(main, sub))
        if view.lease:
            found.leases[view.key] = view.lease
    found.entries = dict(histories)
    return found


def plain(entries: dict[bytes, int | KeyIndex]) -> dict[bytes, object]:
    return {
        key: (entry >> 24, 1, [entry], [])
        if isinstance(entry, int)
        else (entry.created, entry.version, list(entry.revisions), list(entry.closed))
        for key, entry in entries.items()
    }


@given(CHANGES, st.sampled_from(WIDTHS), st.integers(1, 3), st.integers(0, 12), st.sampled_from([1, 126, 16_382]))
def test_scan_finds_every_field(changes, first, step, dropped, version):
    batch = WriteBatch()
    created: dict[bytes, tuple[int, int]] = {}
    for number, (key, kind, value) in enumerate(changes):
        # Two changes in some transactions.
        revision = pack(first + number * step // 2, number)
        if kind == "delete":
            if created.pop(key, None) is not None:
                revision_key = to_tombstone_key(revision)
                batch.records[revision_key] = seal(revision_key, encode(key, 0, 0, 0, b""))
            continue
        # A key whose first versions a compaction dropped has any version in its first record.
        create, last = created.get(key, (revision >> 24, 0) if number > dropped else (1, version))
        created[key] = create, last + 1
        revision_key = to_key(revision)
        lease = 7 if kind == "leased" else 0
        batch.records[revision_key] = seal(revision_key, encode(key, create, revision >> 24, last + 1, value, lease))
    check(batch)


def check(batch: WriteBatch) -> None:
    backend = MemoryBackend()
    backend.commit(batch)
    with closing(backend.begin_read()) as read:
        found, wanted = finish(scan_steps(read)), expected(backend)
    assert plain(found.entries) == plain(wanted.entries)
    assert found.leases == wanted.leases
    assert found.last_revision == wanted.last_revision


def records(*puts: tuple[bytes, int, int, int, bytes]) -> WriteBatch:
    """Key, creation, modification, version and value of each."""
    batch = WriteBatch()
    for key, create, modified, version, value in puts:
        revision_key = to_key(pack(modified, 0))
        batch.records[revision_key] = seal(revision_key, encode(key, create, modified, version, value))
    return batch


def test_a_value_does_not_pass_for_the_first_version_of_its_key() -> None:
    # Of 32 (hexadecimal 20) bytes: with its length before it, it reads like version 1 and a value of 29 bytes.
    check(records((b"k", 5, 2_097_155, 2, b"\x01\x2a\x1d" + b"v" * 29)))


def test_a_long_key_does_not_pass_for_what_stands_behind_a_short_one() -> None:
    # Its length, 300, is ac 02. As one byte it would be 172, and the rest of the key would be numbers and value.
    check(records((b"K" * 175 + b"\x20\x01\x2a\x81\x01" + b"K" * 120, 5, 5, 1, b"v")))
    known = b"\x02" + b"K" * 171
    key = b"K" * 172 + b"\x18\x06\x20\x02\x2a\x82\x01" + b"K" * 121
    check(records((known, 5, 5, 1, b"v"), (key, 6, 6, 1, b"v")))


def test_large_records_are_read_few_at_a_time() -> None:
    """A thousand of a megabyte, twice, were in memory at a start, and read in a turn of an installation."""
    backend = MemoryBackend()
    batch = WriteBatch()
    size_bytes = 300_000
    for main in range(2, 102):
        key = to_key(pack(main, 0))
        batch.records[key] = seal(key, encode(b"k%d" % main, main, main, 1, bytes(size_bytes)))
    backend.commit(batch)
    with closing(backend.begin_read()) as read:
        runs = list(read.runs(schema.KEY, 1000))
        assert sum(map(len, runs)) == 100
        assert max(len(run) * size_bytes for run in runs) <= 3 * RUN_BYTES_MAX
        assert len(finish(scan_steps(read)).entries) == 100
