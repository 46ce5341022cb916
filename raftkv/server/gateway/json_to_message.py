"""Values that were found whole to messages, field by field, with Go's conversions, their order and their texts.

    yield from read_message(body, value, value.start, message)

A value is looked at where it lies in the body. Fields are converted in the order of ``proto/``, so that of several
faults the same one is named; names are compared whole; of a field in both spellings, ``camelCase`` counts.
"""

from __future__ import annotations

import json
import re
from binascii import a2b_base64
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from raftkv.server.gateway.syntax import LARGE_BYTES, CutError, JsonError, Value, quoted, scan, skip_space

MESSAGES_DEEP_MAX: Final = 90
"""Messages within messages; deeper ones than 100 cannot be sent on, and those of an answer may be deeper by a few."""

PARTS_A_STEP: Final = 128
"""Members or elements between two pauses."""

PARTS_MAX: Final = 100_000
"""Elements of one list. A Txn has 128 operations, so no request needs as many; each costs a microsecond."""

EXACT_CHARACTERS_MAX: Final = 64 * 1024
INNER_BYTES_MAX: Final = 4096
"""Longer texts are never numbers; and an error message shows no more of a value."""

Steps = Generator[None, None, None]

_KINDS: Final = {ord('"'): "string", ord("{"): "object", ord("["): "array", ord("t"): "bool", ord("f"): "bool"}
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_SIXES: Final = re.compile(rb"[A-Za-z0-9+/\r\n]*")
_BREAKS: Final = re.compile(rb"[\r\n]*")
_WIDTHS: Final = {
    FieldDescriptor.CPPTYPE_INT32: ("int32", -(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT64: ("int64", -(2**63), 2**63),
    FieldDescriptor.CPPTYPE_UINT32: ("uint32", 0, 2**32),
    FieldDescriptor.CPPTYPE_UINT64: ("uint64", 0, 2**64),
    FieldDescriptor.CPPTYPE_ENUM: ("protoreflect.EnumNumber", -(2**31), 2**31),
}
_BYTE: Final = ("uint8", 0, 2**8)
_WHOLE: Final = re.compile(r"-?[0-9]+")
DIGITS_MAX: Final = 4000
"""Numbers of more digits are out of every range; Python refuses to read them."""


def read_message(data: bytes, whole: Value, start: int, message: Any, depth: int = 0) -> Steps:
    """Fill a message from the value at ``start``.

    Arguments:
        data: the body.
        whole: a value that was found, around this one.
        start: of this one.
        message: to fill.
        depth: messages around it.

    Raises:
        JsonError: the value is not of this message.
    """
    first = data[start]
    if first == ord("n"):
        return
    if first != ord("{"):
        raise _mismatch(first, "map[string]json.RawMessage")
    if depth > MESSAGES_DEEP_MAX:
        raise JsonError(f"messages are nested more than {MESSAGES_DEEP_MAX} deep")
    fields, names = _fields_of(message.DESCRIPTOR)
    found: dict[str, int] = {}
    paused_at = start
    for count, (name, at) in enumerate(_members(data, whole, start), 1):
        if name in names:
            found[name] = at
        if count % PARTS_A_STEP == 0 or at - paused_at > LARGE_BYTES:
            yield
            paused_at = at
    for field in fields:
        value_at = found.get(field.json_name, found.get(field.name))
        if value_at is not None and data[value_at] != ord("n"):
            if len(data) > LARGE_BYTES:
                yield  # one value may be as large as the body
            yield from _read_field(data, whole, value_at, message, field, depth)


_known: dict[str, tuple[list[FieldDescriptor], frozenset[str]]] = {}


def _fields_of(descriptor: Descriptor) -> tuple[list[FieldDescriptor], frozenset[str]]:
    """Return the fields of a message type, and their names in both spellings."""
    known = _known.get(descriptor.full_name)
    if known is None:
        fields = list(descriptor.fields)
        names = frozenset(name for field in fields for name in (field.name, field.json_name))
        known = _known[descriptor.full_name] = (fields, names)
    return known


def _read_field(data: bytes, whole: Value, at: int, message: Any, field: FieldDescriptor, depth: int) -> Steps:
    if not field.is_repeated:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            part = getattr(message, field.name)
            part.SetInParent()
            yield from read_message(data, whole, at, part, depth + 1)
        elif field.type == FieldDescriptor.TYPE_BYTES and data[at] == ord("["):
            setattr(message, field.name, (yield from _bytes_of_array(data, whole, at)))
        else:
            setattr(message, field.name, convert(field, data[at : whole.end_of(data, at)]))
        return
    if data[at] != ord("["):
        raise _mismatch(data[at], "[]json.RawMessage")
    values = getattr(message, field.name)
    paused_at = at
    for count, element_at in enumerate(_elements(data, whole, at), 1):
        if count > PARTS_MAX:
            raise JsonError(f"a list of more than {PARTS_MAX} elements")
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from read_message(data, whole, element_at, values.add(), depth + 1)
        else:
            values.append(convert(field, data[element_at : whole.end_of(data, element_at)]))
        if count % PARTS_A_STEP == 0 or element_at - paused_at > LARGE_BYTES:
            yield
            paused_at = element_at


def _members(data: bytes, whole: Value, start: int) -> Iterator[tuple[str, int]]:
    at = skip_space(data, start + 1)
    while data[at] != ord("}"):
        end = whole.end_of(data, at)
        name = text_of(data[at:end])
        at = skip_space(data, skip_space(data, end) + 1)
        yield name, at
        at = skip_space(data, whole.end_of(data, at))
        if data[at] == ord(","):
            at = skip_space(data, at + 1)


def _elements(data: bytes, whole: Value, start: int) -> Iterator[int]:
    at = skip_space(data, start + 1)
    while data[at] != ord("]"):
        yield at
        at = skip_space(data, whole.end_of(data, at))
        if data[at] == ord(","):
            at = skip_space(data, at + 1)


def text_of(literal: bytes) -> str:
    r"""Return the text of a string literal, with U+FFFD for what is no character.

    >>> text_of(b'"a\\ud800b\\u00e4"')
    'a\ufffdb\xe4'
    """
    if len(literal) > EXACT_CHARACTERS_MAX:
        text = literal.decode("utf-8", "replace")  # no field takes it: about one character for each byte that is none
    else:
        text = _replaced(literal.decode("utf-8", "surrogateescape"))
    return _replaced(json.loads(text)) if "\\" in text else text[1:-1]


def _replaced(text: str) -> str:
    """Return a text with U+FFFD for each surrogate; in a long one, which no field takes, for about each."""
    if text.isascii():
        return text
    if len(text) > EXACT_CHARACTERS_MAX:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return _SURROGATES.sub("\ufffd", text)


def _mismatch(first: int, go_type: str, number: str = "") -> JsonError:
    kind = _KINDS.get(first, "number") + number
    return JsonError(f"json: cannot unmarshal {kind} into Go value of type {go_type}")


_EMPTY: Final = {FieldDescriptor.TYPE_BOOL: False, FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: b""}
"""The value of null; the default of a repeated field would be a list."""


def convert(field: FieldDescriptor, raw: bytes) -> Any:
    """Return the value of a field that is no message.

    Arguments:
        field: whose.
        raw: its JSON.

    Raises:
        JsonError: it is of another kind, or out of range.
    """
    if field.type == FieldDescriptor.TYPE_ENUM and raw[:1] == b'"':
        return _enum_number(field, raw)
    if field.cpp_type in _WIDTHS:
        if field.type != FieldDescriptor.TYPE_ENUM and len(raw) >= 2 and raw[:1] == raw[-1:] == b'"':
            if len(raw) > INNER_BYTES_MAX:
                raise _mismatch(raw[0], _WIDTHS[field.cpp_type][0])
            raw = _inner_literal(raw[1:-1])
        return _number(raw, *_WIDTHS[field.cpp_type])
    if raw == b"null":
        return _EMPTY[field.type]
    return _CONVERTERS[field.type](raw)


def _enum_number(field: FieldDescriptor, raw: bytes) -> int:
    enum: Any = field.enum_type
    number: int | None = {value.name: value.number for value in enum.values}.get(raw[1:-1].decode("latin-1"))
    if number is None:
        raise JsonError(f"unknown value {_go_quoted(raw[:INNER_BYTES_MAX])} for enum {enum.full_name}")
    return number


def _go_quoted(raw: bytes) -> str:
    """Bytes as Go's ``%q`` shows them."""
    shown = []
    for character in raw.decode("utf-8", "surrogateescape"):
        code = ord(character)
        if 0xDC80 <= code <= 0xDCFF:
            shown.append(f"\\x{code - 0xDC00:02x}")
        elif character in '"\\':
            shown.append("\\" + character)
        elif code == 0x7F or code < 0x20:
            shown.append(f"\\x{code:02x}")
        else:
            shown.append(character if character.isprintable() else f"\\u{code:04x}")
    return '"' + "".join(shown) + '"'


def _inner_literal(inner: bytes) -> bytes:
    """Return the one value within the quotes of a number that is a string."""
    start = skip_space(inner, 0)
    try:
        if start >= len(inner):
            raise CutError
        steps = scan(inner, start)
        while True:
            next(steps)
    except CutError:
        raise JsonError("unexpected end of JSON input") from None
    except StopIteration as done:
        end = done.value.end
    rest = skip_space(inner, end)
    if rest < len(inner):
        raise JsonError(f"invalid character {quoted(inner[rest])} after top-level value")
    return inner[start:end]


def _number(raw: bytes, go_type: str, low: int, high: int) -> int:
    first = raw[0]
    if first == ord("n"):
        return 0
    if first in _KINDS:
        raise _mismatch(first, go_type)
    text = raw.decode("ascii")
    if len(text) > DIGITS_MAX or not _WHOLE.fullmatch(text) or not low <= int(text) < high:
        raise _mismatch(first, go_type, f" {text[:INNER_BYTES_MAX]}")
    if low == 0 and first == ord("-"):
        raise _mismatch(first, go_type, f" {text}")
    return int(text)


def _bool(raw: bytes) -> bool:
    if raw[0] not in b"tf":
        raise _mismatch(raw[0], "bool")
    return raw == b"true"


def _string(raw: bytes) -> str:
    if raw[:1] != b'"':
        raise _mismatch(raw[0], "string")
    return text_of(raw)


def _bytes(raw: bytes) -> bytes:
    if raw[:1] != b'"':
        raise _mismatch(raw[0], "[]uint8")
    return decode_base64(text_of(raw).encode())


def _bytes_of_array(data: bytes, whole: Value, at: int) -> Generator[None, None, bytes]:
    found = bytearray()
    for element_at in _elements(data, whole, at):
        found.append(_number(data[element_at : whole.end_of(data, element_at)], *_BYTE))
        if len(found) % PARTS_A_STEP == 0:
            yield
    return bytes(found)


_CONVERTERS: Final[dict[int, Callable[[bytes], Any]]] = {
    FieldDescriptor.TYPE_BOOL: _bool,
    FieldDescriptor.TYPE_STRING: _string,
    FieldDescriptor.TYPE_BYTES: _bytes,
}


def decode_base64(text: bytes) -> bytes:
    """Return what a text encodes, as Go's ``base64.StdEncoding``: line ends are skipped, padding is asked for.

    >>> decode_base64(b"Zm9v\\n")
    b'foo'

    Raises:
        JsonError: names the byte where it goes wrong.
    """
    match = _SIXES.match(text)
    end = 0 if match is None else match.end()
    quantum = (end - text.count(b"\r", 0, end) - text.count(b"\n", 0, end)) % 4
    if end == len(text):
        if quantum:
            raise _illegal(end - quantum)
    elif text[end] != ord("="):
        raise _illegal(end)
    else:
        _check_padding(text, end + 1, quantum)
    return a2b_base64(text.translate(None, b"\r\n"))


def _check_padding(text: bytes, at: int, quantum: int) -> None:
    """Check what stands from the first ``=`` on."""
    if quantum < 2:
        raise _illegal(at - 1)
    if quantum == 2:
        at = _skip_breaks(text, at)
        if at == len(text):
            raise _illegal(len(text))
        if text[at] != ord("="):
            raise _illegal(at - 1)
        at += 1
    at = _skip_breaks(text, at)
    if at < len(text):
        raise _illegal(at)


def _skip_breaks(text: bytes, at: int) -> int:
    match = _BREAKS.match(text, at)
    return at if match is None else match.end()


def _illegal(offset: int) -> JsonError:
    return JsonError(f"illegal base64 data at input byte {offset}")
