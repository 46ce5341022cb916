"""Records: encoded and decoded; forged ones refused by offset."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.raft.types import ConfState, Entry, EntryType, HardState, SnapshotMeta
from raftkv.storage.wal import record as recording
from raftkv.storage.wal.record import (
    Metadata,
    Record,
    RecordError,
    SegmentHead,
    decode_records,
    encode_entries,
    encode_hard_state,
    encode_metadata,
    encode_segment_head,
    encode_snapshot,
)

u64 = st.integers(0, 2**64 - 1)
ids = st.lists(u64, max_size=4).map(tuple)
conf_states = st.builds(ConfState, ids, ids, ids, ids, st.booleans())
records = st.one_of(
    st.builds(Entry, u64, u64, st.binary(), st.sampled_from(EntryType)),
    st.builds(HardState, u64, u64, u64),
    st.builds(SnapshotMeta, u64, u64, conf_states),
    st.builds(SegmentHead, u64, u64, st.integers(0, 2**32 - 1)),
    st.builds(Metadata, st.binary()),
)


def encode(record: Record) -> bytes:
    match record:
        case Entry():
            parts: list[bytes] = []
            encode_entries([record], parts)
            return b"".join(parts)
        case HardState():
            return encode_hard_state(record)
        case SnapshotMeta():
            return encode_snapshot(record)
        case SegmentHead():
            return encode_segment_head(record)
        case Metadata():
            return encode_metadata(record.data)


@given(st.lists(records))
def test_records_read_back_in_order_with_their_offsets(written: list[Record]) -> None:
    body = b"".join(map(encode, written))
    read = list(decode_records(body))
    assert [record for _offset, record in read] == written
    ends = [sum(len(encode(record)) for record in written[:count]) for count in range(len(written))]
    assert [offset for offset, _record in read] == ends


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"\x01\x02\x03", "record header beyond the end"),
        (struct.pack("<IBBH", 2**32 - 1, recording.ENTRY, 0, 0) + bytes(40), "record of 4294967295 bytes beyond"),
        (struct.pack("<IBBH", 8, recording.ENTRY, 0, 0) + bytes(8), "too short"),
        (struct.pack("<IBBHQQ", 16, recording.ENTRY, 99, 0, 1, 1), "record of kind 4 cannot be read"),
        (struct.pack("<IBBH", 8, recording.HARD_STATE, 0, 0) + bytes(8), "record of kind 3 cannot be read"),
        (struct.pack("<IBBH", 0, 77, 0, 0), "unknown kind"),
        (struct.pack("<IBBHQQ4HQ", 32, recording.SNAPSHOT, 0, 0, 1, 1, 9, 9, 9, 9, 0), "record of kind 5"),
    ],
)
def test_a_record_that_cannot_be_one_names_its_offset(bad: bytes, reason: str) -> None:
    good = encode_hard_state(HardState(1, 2, 3))
    with pytest.raises(RecordError, match=reason) as caught:
        list(decode_records(good + bad))
    assert caught.value.offset == len(good)
