"""Header compression (RFC 7541): blocks of octets to fields, and back.

``Decoder`` reports for each block whether the same octets will mean the same again. A block that only refers to table
entries leaves the tables unchanged, so its meaning can be remembered, and a client that repeats its headers is decoded
once. ``Encoder`` remembers blocks by their fields the same way. It puts only chosen fields into its table, so the table
settles after the first messages, and from then on encoding a header is one lookup.

Fields are checked for octets that no header may have (RFC 9113 section 8.2.1) here, where each string is seen once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import Final

from raftkv.rpc.http2.frames import ConnectionFailedError, ErrorCode, StreamFailedError

# -- tables ---------------------------------------------------------------------------------------------------------
#
# The static table of HPACK (RFC 7541 appendix A), and a dynamic one (section 2.3.2).

Field = tuple[bytes, bytes]
"""Name and value of one header field."""

FIELD_BYTES: Final = 32
"""Size of an entry beyond its octets (RFC 7541 section 4.1)."""

CAPACITY_BYTES: Final = 4096
"""Initial size of a dynamic table (RFC 9113 section 6.5.2, SETTINGS_HEADER_TABLE_SIZE). We never raise it."""

_WITH_VALUES: Final = (
    ":authority|:method GET|:method POST|:path /|:path /index.html|:scheme http|:scheme https|:status 200|:status 204|"
    ":status 206|:status 304|:status 400|:status 404|:status 500|accept-charset|accept-encoding gzip, deflate"
)
_NAMES: Final = (
    "accept-language accept-ranges accept access-control-allow-origin age allow authorization cache-control "
    "content-disposition content-encoding content-language content-length content-location content-range content-type "
    "cookie date etag expect expires from host if-match if-modified-since if-none-match if-range if-unmodified-since "
    "last-modified link location max-forwards proxy-authenticate proxy-authorization range referer refresh retry-after "
    "server set-cookie strict-transport-security transfer-encoding user-agent vary via www-authenticate"
)


def _static() -> tuple[Field, ...]:
    pairs = [entry.partition(" ") for entry in _WITH_VALUES.split("|")]
    fields = [(name.encode(), value.encode()) for name, _, value in pairs]
    return (*fields, *((name.encode(), b"") for name in _NAMES.split()))


STATIC: Final = _static()
"""The static table; its first entry has index 1."""

FIRST_DYNAMIC: Final = len(STATIC) + 1


class DynamicTable:
    """A dynamic table: the newest entry comes first, and the oldest are evicted when there is no space.

    Attributes:
        entries: entries, the newest first.
        size_bytes: size of all entries, as section 4.1 counts them.
        capacity_bytes: limit on ``size_bytes``.
    """

    __slots__ = ("capacity_bytes", "entries", "size_bytes")

    def __init__(self) -> None:
        self.entries: deque[Field] = deque()
        self.size_bytes = 0
        self.capacity_bytes = CAPACITY_BYTES

    def insert(self, field: Field) -> int:
        """Add an entry; an entry larger than the table empties it (section 4.4).

        Arguments:
            field: the new entry.

        Returns:
            Number of evicted entries.
        """
        size_bytes = len(field[0]) + len(field[1]) + FIELD_BYTES
        gone = self._shrink(self.capacity_bytes - size_bytes)
        if size_bytes <= self.capacity_bytes:
            self.entries.appendleft(field)
            self.size_bytes += size_bytes
        return gone

    def resize(self, capacity_bytes: int) -> int:
        """Change the capacity (section 4.3).

        Arguments:
            capacity_bytes: new capacity.

        Returns:
            Number of evicted entries.
        """
        self.capacity_bytes = capacity_bytes
        return self._shrink(capacity_bytes)

    def _shrink(self, size_bytes: int) -> int:
        gone = 0
        while self.entries and self.size_bytes > size_bytes:
            name, value = self.entries.pop()
            self.size_bytes -= len(name) + len(value) + FIELD_BYTES
            gone += 1
        return gone


# -- huffman --------------------------------------------------------------------------------------------------------
#
# The Huffman code of HPACK (RFC 7541 section 5.2 and appendix B).
#
# The code is canonical: it follows from the lengths of its codes, given here for all octets and the end of the string.
# Decoding takes one octet per step, in a table of the states between octets. The table is filled as it is used: clients
# need some hundred entries, and all 65,536 would take 10 MB. Encoding is left out: what this end sends is short or goes
# into the dynamic table, and plain octets cost no work.

LENGTHS: Final = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b080606060505050606060606"
    "060607080f060c0a0d06070707070707070707070707070707070707070707070807080d130d0e060f050605060506060605070706060605"
    "06070605050607070707070f0b0e0d1c14161414161616171617171717171817181816171817171717151617161717181615141616171715"
    "1716161815161717151516151716171714161616171616171a1a1413161716191a1a1a1b1b1a181913151a1b1b1a1b1815151a1a1c1b1b1b"
    "14181415161515171616191918181a171a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)
"""Length in bits of the code of each octet, and of the end of a string (256)."""

END: Final = 256
LITTLE_PADDING_BITS: Final = 7
"""Padding fills the last octet, so it is shorter than an octet."""


class HuffmanError(ValueError):
    """The octets are not a string in this code."""


def codes() -> list[tuple[int, int]]:
    """Return each symbol's code, and its length in bits."""
    found: list[tuple[int, int]] = [(0, 0)] * len(LENGTHS)
    code = before = 0
    for symbol in sorted(range(len(LENGTHS)), key=lambda one: (LENGTHS[one], one)):
        length = LENGTHS[symbol]
        code <<= length - before
        found[symbol] = (code, length)
        code, before = code + 1, length
    return found


@lru_cache(maxsize=1)
def _tree() -> tuple[list[list[int]], frozenset[int]]:
    """Return the code as a tree whose nodes are states, and the states in which a string may end.

    In those states fewer than eight one bits have followed the last symbol.
    """
    tree: list[list[int]] = [[-1, -1]]  # children: of an inner node its number, of a leaf -2 - symbol
    for symbol, (code, length) in enumerate(codes()):
        node = 0
        for bit in range(length - 1, 0, -1):
            side = code >> bit & 1
            if tree[node][side] < 0:
                tree.append([-1, -1])
                tree[node][side] = len(tree) - 1
            node = tree[node][side]
        tree[node][code & 1] = -2 - symbol
    accepting, node = [0], 0
    for _ in range(LITTLE_PADDING_BITS):
        node = tree[node][1]
        accepting.append(node)
    return tree, frozenset(accepting)


_steps: Final[dict[int, tuple[int, bytes]]] = {}
"""By state and octet: the next state, and the symbols that the octet completes."""


def _step(key: int) -> tuple[int, bytes]:
    """Follow the eight bits of an octet from a state, and store the result."""
    tree, _ = _tree()
    state, octet, out = key >> 8, key & 0xFF, b""
    for bit in range(7, -1, -1):
        state = tree[state][octet >> bit & 1]
        if state == -2 - END:  # section 5.2
            raise HuffmanError("the end of a string within a string")
        if state < 0:
            out, state = out + bytes((-2 - state,)), 0
    _steps[key] = state, out
    return state, out


def decode(data: bytes) -> bytes:
    """Decode a string.

    Raises:
        HuffmanError: the octets contain the end of a string, or are padded with more than 7 bits or with zero bits.
    """
    known = _steps.get
    state = 0
    out: list[bytes] = []
    for octet in data:
        key = state << 8 | octet
        step = known(key) or _step(key)
        state = step[0]
        out.append(step[1])
    if state and state not in _tree()[1]:
        raise HuffmanError("invalid padding of a string")
    return b"".join(out)


Headers = tuple[Field, ...]

INTEGER_MAX: Final = 2**32
"""Larger numbers cannot be valid here (section 5.1)."""

REMEMBERED_MAX: Final = 64
BLOCK_BYTES_MAX: Final = 512
"""Blocks of one connection that the encoder remembers, and their largest size."""

LONGEST_STATIC_BYTES: Final = max(len(name) + len(value) for name, value in STATIC) + FIELD_BYTES

_name = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_value = re.compile(rb"(?:[^\x00-\x20\x7f](?:[^\x00-\x08\x0a-\x1f\x7f]*[^\x00-\x20\x7f])?)?").fullmatch


def _broken(text: str) -> ConnectionFailedError:
    return ConnectionFailedError(ErrorCode.COMPRESSION_ERROR, f"header block: {text}")


def is_sound(field: Field) -> bool:
    """Return whether name and value have only octets that a header may have (RFC 9113 section 8.2.1)."""
    return _name(field[0]) is not None and _value(field[1]) is not None


class Decoder:
    """Decodes the headers received on one connection.

    Arguments:
        list_bytes_max: limit on the fields of a block, counted as in section 4.1; a larger block ends the connection.
        count_max: limit on the number of fields of a block.
    """

    __slots__ = ("_count_max", "_has_flaws", "_list_bytes_max", "_longest_bytes", "_table")

    def __init__(self, list_bytes_max: int, count_max: int) -> None:
        self._table = DynamicTable()
        self._list_bytes_max = list_bytes_max
        self._count_max = count_max
        self._has_flaws = False
        """Whether an entry of the table is not sound: all fields of later blocks are checked."""
        self._longest_bytes = LONGEST_STATIC_BYTES
        """No field in the tables or in an earlier block is larger: few blocks need their sizes added up."""

    def decode(self, block: bytes) -> tuple[Headers, bool, bool]:
        """Return the fields of a block.

        Arguments:
            block: complete block.

        Returns:
            The fields, whether all have sound octets, and whether the same octets will mean the same again.

        Raises:
            ConnectionFailedError: the block is malformed, or has too many or too large fields.
        """
        try:
            fields, is_sound_, is_stable = self._decode(block)
        except IndexError:
            raise _broken("it ends too early, or names an unknown entry") from None
        except HuffmanError as error:
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
        """Return the field at a position, the position after it, and whether its own octets are sound."""
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
        sound = value.isalnum() or _value(value) is not None  # the first test is quicker, and true for most
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
        return decode(octets), end

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
"""Secrets: proxies must not put them into a table either (section 7.1.3)."""

_STATIC_FIELDS: Final = {field: index for index, field in reversed(list(enumerate(STATIC, start=1)))}
_STATIC_NAMES: Final = {name: index for index, (name, _) in reversed(list(enumerate(STATIC, start=1)))}


class Encoder:
    """Encodes the headers sent on one connection.

    Arguments:
        indexed: names whose fields go into the table. Values that change with each message would only evict others.

    Attributes:
        changes: number of changes of the table so far: a block stays valid until it changes.
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
        """Apply the peer's SETTINGS_HEADER_TABLE_SIZE. The next block announces the new size (section 4.2).

        Arguments:
            capacity_bytes: largest table of the peer.
        """
        capacity_bytes = min(capacity_bytes, CAPACITY_BYTES)
        if capacity_bytes != self._table.capacity_bytes:
            lowest = capacity_bytes if self._lowest_bytes is None else min(capacity_bytes, self._lowest_bytes)
            self._lowest_bytes = lowest
            self._forget(self._table.resize(capacity_bytes))
            self._blocks.clear()
            self.changes += 1

    def encode(self, fields: Headers) -> bytes:
        """Return the block of fields. Blocks must be sent in the order in which they were encoded.

        Arguments:
            fields: fields in order; pseudo-headers first.
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
        """Forget the oldest entries, which have left the table."""
        for field in list(self._numbers)[:gone]:
            del self._numbers[field]


def _literal(name: bytes, value: bytes, mask: int, pattern: int) -> bytes:
    index = _STATIC_NAMES.get(name, 0)
    head = number(index, mask, pattern)
    return head + (b"" if index else _octets(name)) + _octets(value)


def _octets(data: bytes) -> bytes:
    return number(len(data), 0x7F, 0) + data


def number(value: int, mask: int, pattern: int) -> bytes:
    """Return a number after the pattern of its first octet (section 5.1)."""
    if value < mask:
        return bytes((pattern | value,))
    out, value = bytearray((pattern | mask,)), value - mask
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# -- fields ---------------------------------------------------------------------------------------------------------
#
# Rules for the fields of a message (RFC 9113 sections 8.2 and 8.3): a malformed message ends its stream.
#
# Octets are checked where they are decoded (``Decoder``). Pseudo-header fields, and fields that belong to one
# connection only, are checked here.

_OF_CONNECTION: Final = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
"""Fields of one connection only (section 8.2.2)."""

_OF_REQUEST: Final = frozenset((b":method", b":scheme", b":authority", b":path"))
_WITHOUT_BODY: Final = frozenset((b"204", b"304"))
"""Statuses whose content-length describes another response (RFC 9110 section 8.6)."""

_is_token: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_is_scheme: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.\-]*").fullmatch
_is_path: Final = re.compile(rb"/[^\x00-\x20\x7f]*").fullmatch
"""RFC 3986 section 3.3 allows fewer octets; those that would end a word of a request line are excluded."""
_is_authority: Final = re.compile(rb"[!#$%&'()*+,\-./0-9:;=@A-Z\[\]_a-z~]*").fullmatch
"""Octets of RFC 3986 section 3.2, and two more: etcd's client 3.5.0 sends ``#initially=[http://host:port]``."""

_NEEDED: Final = frozenset((b":method", b":scheme", b":path"))


def malformed(text: str) -> StreamFailedError:
    """Return the error for a malformed message (section 8.1.1)."""
    return StreamFailedError(ErrorCode.PROTOCOL_ERROR, f"malformed message: {text}")


def check_request(fields: Headers) -> int | None:
    """Check the fields of a request (section 8.3.1).

    Arguments:
        fields: fields with sound octets.

    Returns:
        The value of content-length, or None.

    Raises:
        StreamFailedError: the fields are not those of a request.
    """
    pseudo = _pseudo(fields)
    names = pseudo.keys()
    if not names <= _OF_REQUEST:
        raise malformed("a pseudo-header field that requests do not have")
    if pseudo.get(b":method") == b"CONNECT":
        if names != {b":method", b":authority"}:
            raise malformed("CONNECT has a method and an authority")
    elif not names >= _NEEDED:
        raise malformed("a request needs :method, :scheme and :path")
    elif not _is_token(pseudo[b":method"]) or not _is_scheme(pseudo[b":scheme"]) or not _is_target(pseudo):
        raise malformed("an invalid method, scheme or path")
    if not _is_authority(pseudo.get(b":authority", b"")):
        raise malformed("an invalid authority")
    return _content_length(fields)


def _is_target(pseudo: dict[bytes, bytes]) -> bool:
    """Return whether the path is absolute, or the asterisk of OPTIONS."""
    path = pseudo[b":path"]
    return _is_path(path) is not None or (path == b"*" and pseudo[b":method"] == b"OPTIONS")


def check_response(fields: Headers) -> tuple[int, int | None]:
    """Check the fields of a response (section 8.3.2).

    Arguments:
        fields: fields with sound octets.

    Returns:
        The status, and the length of the body according to content-length; None: it is unknown.

    Raises:
        StreamFailedError: the fields are not those of a response.
    """
    pseudo = _pseudo(fields)
    status = pseudo.get(b":status", b"")
    if len(pseudo) != 1 or len(status) != 3 or not status.isdigit() or status[:1] == b"0" or status == b"101":
        raise malformed("a response needs a :status of three digits, and nothing else that begins with a colon")
    length = _content_length(fields)
    return int(status), None if status in _WITHOUT_BODY else length


def check_trailers(fields: Headers) -> None:
    """Check the fields at the end of a message: no pseudo-header fields (section 8.1).

    Arguments:
        fields: fields with sound octets.

    Raises:
        StreamFailedError: the fields are not trailers.
    """
    if _pseudo(fields):
        raise malformed("a pseudo-header field among trailers")


def _pseudo(fields: Headers) -> dict[bytes, bytes]:
    """Return the pseudo-header fields, and check all others."""
    found: dict[bytes, bytes] = {}
    is_past = False
    for name, value in fields:
        if name[:1] == b":":
            if is_past or name in found:
                raise malformed("a pseudo-header field twice, or after other fields")
            found[name] = value
            continue
        is_past = True
        if name in _OF_CONNECTION or (name == b"te" and value.lower() != b"trailers"):
            raise malformed(f"{name.decode('ascii')} belongs to connections of HTTP/1.1")
    return found


def _content_length(fields: Headers) -> int | None:
    """Return the value of content-length: DATA frames must add up to it (section 8.1.1). None: there is none."""
    found = {value for name, value in fields if name == b"content-length"}
    if not found:
        return None
    value = found.pop()
    if found or not value.isdigit() or len(value) > 18:
        raise malformed("content-length is one number")
    return int(value)
