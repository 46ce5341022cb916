"""Serialized ``mvccpb.KeyValue``: encoded and decoded by hand, and passed on without parsing where possible.

The store keeps and returns these bytes, and a Range response is their concatenation with a field tag before each, so a
read needs no protobuf work. The encoding is canonical: fields in number order, zero values left out. etcd's generated
code writes the same bytes; the hash of the history (``hash.py``) depends on every byte.

    field   1 key   2 create_revision   3 mod_revision   4 version   5 value   6 lease
    tag     0a      10                  18               20          2a        30

``KeyValueView`` finds the fields without copying the value.
"""

from __future__ import annotations

from typing import Final

from raftkv.errors import CorruptionError

_KEY_TAG, _CREATE_TAG, _MOD_TAG, _VERSION_TAG, _VALUE_TAG, _LEASE_TAG = 0x0A, 0x10, 0x18, 0x20, 0x2A, 0x30
_U64_MASK: Final = (1 << 64) - 1
_SIGN_BIT: Final = 1 << 63


_PAIR: Final = 1 << 14
_MORE: Final = tuple(bytes((number | 0x80,)) for number in range(0x80))
_LAST: Final = tuple(bytes((number,)) for number in range(0x80))
_PAIRS: Final = tuple(low + high for high in _MORE for low in _MORE)
"""The first two bytes of every longer varint, by its low 14 bits."""
_SHORT: Final = (*_LAST, *(low + high for high in _LAST[1:] for low in _MORE))
"""The varints of one and two bytes."""


def varint(number: int) -> bytes:
    """Return the protobuf varint of an integer; negative ones as 64-bit two's complement.

    Encodes two bytes per step, from tables, because every put and every response writes several varints.
    """
    if 0 <= number < _PAIR:
        return _SHORT[number]
    if _PAIR <= number < 0x10000000:
        return _PAIRS[number & 0x3FFF] + _SHORT[number >> 14]
    number &= _U64_MASK
    return _PAIRS[number & 0x3FFF] + varint(number >> 14)


_SMALL: Final = 1024
KEY_HEADS: Final = tuple(b"\x0a" + varint(size) for size in range(_SMALL))
VALUE_HEADS: Final = (b"", *(b"\x2a" + varint(size) for size in range(1, _SMALL)))
VERSION_FIELDS: Final = (b"", *(b"\x20" + varint(number) for number in range(1, _SMALL)))


def key_head(size_bytes: int) -> bytes:
    """Return the tag and length that precede a key."""
    return KEY_HEADS[size_bytes] if size_bytes < _SMALL else b"\x0a" + varint(size_bytes)


def value_head(size_bytes: int) -> bytes:
    """Return the tag and length that precede a value; empty for an empty value, which is left out."""
    return VALUE_HEADS[size_bytes] if size_bytes < _SMALL else b"\x2a" + varint(size_bytes)


def version_field(version: int) -> bytes:
    """Return the field ``version``."""
    return VERSION_FIELDS[version] if version < _SMALL else b"\x20" + varint(version)


def create_field(revision: int) -> bytes:
    """Return the field ``create_revision`` (main revision)."""
    return b"\x10" + varint(revision) if revision else b""


def mod_field(revision: int) -> bytes:
    """Return the field ``mod_revision`` (main revision)."""
    return b"\x18" + varint(revision) if revision else b""


def lease_field(lease: int) -> bytes:
    """Return the field ``lease``; empty for 0."""
    return b"\x30" + varint(lease) if lease else b""


def encode(
    key: bytes, create_revision: int, mod_revision: int, version: int, value: bytes = b"", lease: int = 0
) -> bytes:
    """Return one serialized KeyValue.

    Arguments:
        key: not empty.
        create_revision, mod_revision: main revisions.
        version: puts since the creation, including this one.
        value: any bytes.
        lease: id of its lease, 0 for none.
    """
    return b"".join(
        (
            key_head(len(key)),
            key,
            create_field(create_revision),
            mod_field(mod_revision),
            version_field(version),
            value_head(len(value)),
            value,
            lease_field(lease),
        )
    )


def key_of(data: bytes) -> bytes:
    """Return the key of a serialized KeyValue, without decoding the rest."""
    # The key is field 1, so it comes first: tag, length, bytes. Nearly all keys are shorter than 128 bytes.
    if data[1] < 0x80:
        return data[2 : 2 + data[1]]
    size, start = _read_varint(data, 1)
    return data[start : start + size]


def value_bytes(data: bytes) -> int:
    """Return the size of the value of a serialized KeyValue."""
    view = KeyValueView(data)
    return view.value_end - view.value_start


class KeyValueView:
    """The fields of one serialized KeyValue: numbers decoded, the value still in place.

    >>> view = KeyValueView(encode(b"k", 5, 7, 2, b"v", 9))
    >>> view.key, view.create_revision, view.mod_revision, view.version, view.value, view.lease
    (b'k', 5, 7, 2, b'v', 9)
    """

    __slots__ = ("create_revision", "data", "key", "lease", "mod_revision", "value_end", "value_start", "version")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.key = b""
        self.create_revision = self.mod_revision = self.version = self.lease = 0
        self.value_start = self.value_end = 0
        self._scan(data)

    def _scan(self, data: bytes) -> None:
        position, size = 0, len(data)
        try:
            while position < size:
                tag = data[position]
                number, position = _read_varint(data, position + 1)
                if tag in (_KEY_TAG, _VALUE_TAG):
                    self._set_bytes(tag, position, position + number)
                    position += number
                else:
                    self._set_integer(tag, number)
        # A field runs beyond the end.
        except IndexError:
            position = -1
        if position != size:
            raise CorruptionError(f"not a KeyValue: {data[:64].hex()}")

    def _set_bytes(self, tag: int, start: int, end: int) -> None:
        if tag == _KEY_TAG:
            self.key = self.data[start:end]
        else:
            # A value may be a megabyte, and most callers do not need it: note its position, copy nothing.
            self.value_start, self.value_end = start, end

    def _set_integer(self, tag: int, number: int) -> None:
        if tag == _CREATE_TAG:
            self.create_revision = number
        elif tag == _MOD_TAG:
            self.mod_revision = number
        elif tag == _VERSION_TAG:
            self.version = number
        elif tag == _LEASE_TAG:
            # An int64 on the wire: negative ids are in two's complement.
            self.lease = number - (1 << 64) if number & _SIGN_BIT else number
        else:
            raise CorruptionError(f"KeyValue has a field with tag {tag:#x}")

    @property
    def value(self) -> bytes:
        """A copy of the value."""
        return self.data[self.value_start : self.value_end]

    def without_value(self) -> bytes:
        """Return the same serialized KeyValue without its value."""
        return encode(self.key, self.create_revision, self.mod_revision, self.version, b"", self.lease)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    # Lengths and versions are nearly always below 128: one byte.
    byte = data[position]
    if byte < 0x80:
        return byte, position + 1
    number, shift = byte & 0x7F, 7
    while True:
        position += 1
        byte = data[position]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position + 1
        shift += 7
