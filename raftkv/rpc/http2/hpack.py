"""Header compression (RFC 7541): blocks of octets to fields, and back.

``Decoder`` says of a block whether the same octets will mean the same again: a block that names only what the tables
have leaves them as they are, so its meaning can be remembered, and a client that repeats its headers is decoded once.
``Encoder`` remembers blocks by their fields the same way, and puts only those fields into its table that it is asked
to: they settle after the first messages, and from then on a header is one lookup.

Fields are checked for octets that no header may have (RFC 9113 section 8.2.1) here, where each string is seen once.

Leaves out: what a message of such fields must have (``fields``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from typing import Final

from raftkv.rpc.http2 import huffman
from raftkv.rpc.http2.errors import ConnectionFailedError, ErrorCode
from raftkv.rpc.http2.tables import CAPACITY_BYTES, FIELD_BYTES, FIRST_DYNAMIC, STATIC, DynamicTable, Field

Headers = tuple[Field, ...]

INTEGER_MAX: Final = 2**32
"""Larger numbers name nothing that could be there (section 5.1)."""

REMEMBERED_MAX: Final = 64
BLOCK_BYTES_MAX: Final = 512
"""Blocks of one connection that the encoder remembers, and their octets."""

LONGEST_STATIC_BYTES: Final = max(len(name) + len(value) for name, value in STATIC) + FIELD_BYTES

_name = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_value = re.compile(rb"(?:[^\x00-\x20\x7f](?:[^\x00-\x08\x0a-\x1f\x7f]*[^\x00-\x20\x7f])?)?").fullmatch


def _broken(text: str) -> ConnectionFailedError:
    return ConnectionFailedError(ErrorCode.COMPRESSION_ERROR, f"header block: {text}")


def is_sound(field: Field) -> bool:
    """Return whether name and value have only octets that a header may have (RFC 9113 section 8.2.1)."""
    return _name(field[0]) is not None and _value(field[1]) is not None


class Decoder:
    """The receiving end of one connection's headers.

    Arguments:
        list_bytes_max: of the fields of a block, counted as section 4.1 does; a larger one ends the connection.
        count_max: fields of a block.
    """

    __slots__ = ("_count_max", "_has_flaws", "_list_bytes_max", "_longest_bytes", "_table")

    def __init__(self, list_bytes_max: int, count_max: int) -> None:
        self._table = DynamicTable()
        self._list_bytes_max = list_bytes_max
        self._count_max = count_max
        self._has_flaws = False
        """An entry of the table is not sound: all blocks are looked at whole from now on."""
        self._longest_bytes = LONGEST_STATIC_BYTES
        """No field counts more that is in the tables, or was in a block: few blocks need their sizes added up."""

    def decode(self, block: bytes) -> tuple[Headers, bool, bool]:
        """Return the fields of a block.

        Arguments:
            block: whole.

        Returns:
            The fields, whether all have sound octets, and whether these octets will mean the same again.

        Raises:
            ConnectionFailedError: the block is no header block, or has too much in it.
        """
        try:
            fields, is_sound_, is_stable = self._decode(block)
        except IndexError:
            raise _broken("it ends too early, or names an entry that is not there") from None
        except huffman.HuffmanError as error:
            raise _broken(str(error)) from None
        if len(fields) > self._count_max or len(fields) * self._longest_bytes > self._list_bytes_max:
            self._check_size(fields)
        if self._has_flaws:
            is_sound_ = all(map(is_sound, fields))
        return tuple(fields), is_sound_, is_stable

    def _check_size(self, fields: list[Field]) -> None:
        size_bytes = sum(map(len, chain.from_iterable(fields))) + FIELD_BYTES * len(fields)
        if size_bytes > self._list_bytes_max or len(fields) > self._count_max:
            raise ConnectionFailedError(ErrorCode.ENHANCE_YOUR_CALM, "too many header fields, or too large ones")

    def _decode(self, block: bytes) -> tuple[list[Field], bool, bool]:
        fields: list[Field] = []
        entries = self._table.entries
        all_sound = is_stable = True
        position, end = 0, len(block)
        while position < end:
            first = block[position]
            if first & 0x80:  # section 6.1: an entry
                index = first & 0x7F
                if 0 < index < 0x7F:
                    position += 1
                    fields.append(STATIC[index - 1] if index < FIRST_DYNAMIC else entries[index - FIRST_DYNAMIC])
                else:
                    index, position = _integer(block, position, 0x7F)
                    fields.append(self._entry(index))
            elif first & 0xE0 == 0x20:  # section 6.3: a new size
                capacity, position = _integer(block, position, 0x1F)
                self._resize(capacity, fields)
                is_stable = False
            else:  # section 6.2: a literal
                field, position, sound = self._literal(block, position, 0x3F if first & 0x40 else 0x0F)
                all_sound = all_sound and sound
                size_bytes = len(field[0]) + len(field[1]) + FIELD_BYTES
                if size_bytes > self._longest_bytes:
                    self._longest_bytes = size_bytes
                if first & 0x40:
                    self._table.insert(field)
                    is_stable = False
                    self._has_flaws = self._has_flaws or not sound
                fields.append(field)
        return fields, all_sound, is_stable

    def _entry(self, index: int) -> Field:
        if index < FIRST_DYNAMIC:
            if not index:
                raise _broken("entry 0")
            return STATIC[index - 1]
        return self._table.entries[index - FIRST_DYNAMIC]

    def _literal(self, block: bytes, position: int, mask: int) -> tuple[Field, int, bool]:
        """The field at a position, the position after it, and whether it is sound as far as the table's name is."""
        index = block[position] & mask
        if index < mask:
            position += 1
        else:
            index, position = _integer(block, position, mask)
        if not index:
            name, position = self._string(block, position)
            value, position = self._string(block, position)
            field = (name, value)
            return field, position, is_sound(field)
        value, position = self._string(block, position)
        sound = value.isalnum() or _value(value) is not None  # the first is quicker, and says so of most
        return (self._entry(index)[0], value), position, sound

    def _string(self, block: bytes, position: int) -> tuple[bytes, int]:
        """Return the string at a position (section 5.2), and the position after it."""
        first = block[position]
        length = first & 0x7F
        if length < 0x7F:
            position += 1
        else:
            length, position = _integer(block, position, 0x7F)
        end = position + length
        if end > len(block):
            raise _broken("a string ends too early")
        octets = block[position:end]
        if first < 0x80:
            return octets, end
        return huffman.decode(octets), end

    def _resize(self, capacity_bytes: int, before: list[Field]) -> None:
        if before:
            raise _broken("a new table size after a field")  # section 4.2
        if capacity_bytes > CAPACITY_BYTES:
            raise _broken(f"table size {capacity_bytes} is above {CAPACITY_BYTES}")
        self._table.resize(capacity_bytes)


def _integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Return the number at a position (section 5.1), and the position after it."""
    value = block[position] & mask
    position += 1
    if value < mask:
        return value, position
    shift = 0
    while True:
        octet = block[position]
        position += 1
        value += (octet & 0x7F) << shift
        if value > INTEGER_MAX or shift > 28:
            raise _broken("a number is too large")
        if not octet & 0x80:
            return value, position
        shift += 7


NEVER_INDEXED: Final = frozenset((b"authorization", b"cookie", b"proxy-authorization", b"set-cookie", b"token"))
"""Secrets: no proxy may put them into a table either (section 7.1.3)."""

_STATIC_FIELDS: Final = {field: index for index, field in reversed(list(enumerate(STATIC, start=1)))}
_STATIC_NAMES: Final = {name: index for index, (name, _) in reversed(list(enumerate(STATIC, start=1)))}


class Encoder:
    """The sending end of one connection's headers.

    Arguments:
        indexed: names whose fields go into the table. Values that change with each message would only push out others.

    Attributes:
        changes: of the table, so far: a block that changed nothing is good until the next one.
    """

    __slots__ = ("_blocks", "_indexed", "_inserted", "_lowest_bytes", "_numbers", "_table", "changes")

    def __init__(self, indexed: Iterable[bytes]) -> None:
        self._indexed = frozenset(indexed)
        self._table = DynamicTable()
        self._inserted = 0
        self.changes = 0
        self._numbers: dict[Field, int] = {}
        self._blocks: dict[Headers, bytes] = {}
        self._lowest_bytes: int | None = None

    def limit(self, capacity_bytes: int) -> None:
        """Obey the peer's SETTINGS_HEADER_TABLE_SIZE: the next block says so (section 4.2).

        Arguments:
            capacity_bytes: most that the peer keeps.
        """
        capacity_bytes = min(capacity_bytes, CAPACITY_BYTES)
        if capacity_bytes != self._table.capacity_bytes:
            lowest = capacity_bytes if self._lowest_bytes is None else min(capacity_bytes, self._lowest_bytes)
            self._lowest_bytes = lowest
            self._forget(self._table.resize(capacity_bytes))
            self._blocks.clear()
            self.changes += 1

    def encode(self, fields: Headers) -> bytes:
        """Return the block of fields; blocks must be sent in the order in which they were made.

        Arguments:
            fields: in order; pseudo-headers first.
        """
        block = self._blocks.get(fields)
        if block is not None:
            return block
        changes, sizes = self.changes, self._new_sizes()
        block = sizes + b"".join(map(self._field, fields))
        if changes == self.changes and not sizes and len(block) <= BLOCK_BYTES_MAX:
            if len(self._blocks) >= REMEMBERED_MAX:
                self._blocks.clear()
            self._blocks[fields] = block
        return block

    def _new_sizes(self) -> bytes:
        if self._lowest_bytes is None:
            return b""
        lowest, self._lowest_bytes = self._lowest_bytes, None
        self.changes += 1
        sizes = (lowest,) if lowest == self._table.capacity_bytes else (lowest, self._table.capacity_bytes)
        return b"".join(number(size, 0x1F, 0x20) for size in sizes)

    def _field(self, field: Field) -> bytes:
        index = _STATIC_FIELDS.get(field) if field[1] else None
        if index is None and field in self._numbers:
            index = FIRST_DYNAMIC + self._inserted - self._numbers[field]
        if index is not None:
            return number(index, 0x7F, 0x80)
        name, value = field
        if name in self._indexed and len(name) + len(value) + FIELD_BYTES <= self._table.capacity_bytes // 4:
            octets = _literal(name, value, 0x3F, 0x40)
            self._forget(self._table.insert(field))
            self._inserted += 1
            self.changes += 1
            self._numbers[field] = self._inserted
            self._blocks.clear()
            return octets
        return _literal(name, value, 0x0F, 0x10 if name in NEVER_INDEXED else 0)

    def _forget(self, gone: int) -> None:
        """Entries have left the table, the oldest ones."""
        for field in list(self._numbers)[:gone]:
            del self._numbers[field]


def _literal(name: bytes, value: bytes, mask: int, pattern: int) -> bytes:
    index = _STATIC_NAMES.get(name, 0)
    head = number(index, mask, pattern)
    return head + (b"" if index else _octets(name)) + _octets(value)


def _octets(data: bytes) -> bytes:
    return number(len(data), 0x7F, 0) + data


def number(value: int, mask: int, pattern: int) -> bytes:
    """Return a number behind the pattern of its first octet (section 5.1)."""
    if value < mask:
        return bytes((pattern | value,))
    out, value = bytearray((pattern | mask,)), value - mask
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
