"""The hand-written KeyValue codec against protobuf's own, and the seal over it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.errors import CorruptionError
from raftkv.pb import kv_pb2
from raftkv.storage.key_value import KeyValueView, encode, varint
from raftkv.storage.revision import CorruptRecordError, pack, seal, to_key, unseal

INT64 = st.integers(-(2**63), 2**63 - 1)
REVISIONS = st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1))
SIZED = st.one_of(st.binary(max_size=300), st.integers(120, 1100).map(lambda size: b"x" * size))


@given(SIZED, REVISIONS, REVISIONS, REVISIONS, SIZED, st.one_of(st.just(0), INT64))
def test_encoding_is_protobuf_s_canonical_one(key, create, mod, version, value, lease):
    if not key:
        key = b"k"
    message = kv_pb2.KeyValue(
        key=key, create_revision=create, mod_revision=mod, version=version, value=value, lease=lease
    )
    data = encode(key, create, mod, version, value, lease)
    assert data == message.SerializeToString(deterministic=True)
    view = KeyValueView(data)
    assert (view.key, view.create_revision, view.mod_revision) == (key, create, mod)
    assert (view.version, view.value, view.lease) == (version, value, lease)
    message.ClearField("value")
    assert view.without_value() == message.SerializeToString(deterministic=True)


def test_varint_at_every_size() -> None:
    for number in {2**bits + more for bits in range(63) for more in (-1, 0, 1)} - {0}:
        assert varint(number) == kv_pb2.KeyValue(version=number).SerializeToString()[1:], number


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x05abc", b"\x10\x80", b"\x38\x01", b"\x12\x00", b"\x2a\x7f"])
def test_invalid_key_value_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        KeyValueView(data)


@given(st.binary(min_size=1, max_size=60), st.data())
def test_every_flipped_bit_breaks_the_seal(data: bytes, draw: st.DataObject) -> None:
    key = to_key(pack(7, 3))
    record = bytearray(seal(key, data))
    assert unseal(key, bytes(record)) == data
    bit = draw.draw(st.integers(0, len(record) * 8 - 1))
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptRecordError, match=r"7\.3"):
        unseal(key, bytes(record))


def test_a_record_belongs_to_its_revision() -> None:
    record = seal(to_key(pack(7, 3)), b"data")
    with pytest.raises(CorruptRecordError, match=r"7\.4 is corrupt"):
        unseal(to_key(pack(7, 4)), record)
    with pytest.raises(CorruptRecordError, match=r"7\.3 is missing"):
        unseal(to_key(pack(7, 3)), None)
    with pytest.raises(CorruptRecordError, match="is corrupt"):
        unseal(to_key(pack(7, 3)), record[:3])
