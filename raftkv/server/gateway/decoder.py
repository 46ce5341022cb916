"""JSON to messages, with the rules of grpc-gateway 1.16 (Go's jsonpb).

    reader = Reader(body)
    yield from reader.next(rpc_pb2.PutRequest)      # the message, or None at the end of the body
    requests = Requests(body, slices)               # the same, serialized for the handlers of gRPC
    await requests.next(method)

Both spellings of a name are accepted (``range_end``, ``rangeEnd``; if both are there, the second counts). Numbers may
be strings, enums names or numbers. Unknown names and nulls are ignored. Python's own JSON parser reads a body. It
cannot pause, so a body may have at most ``PARTS_MAX`` parts, which take 30 ms in the worst case. The fields are then
converted with pauses, in the order of ``proto/``. Errors have Go's texts, but not all of their variants.
"""

from __future__ import annotations

import json
import re
from binascii import a2b_base64
from collections.abc import Callable, Generator
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple, NoReturn

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from raftkv.loop.fair import Identity
from raftkv.loop.scheduler import Slices
from raftkv.pb.services import Method
from raftkv.storage.selection import finish

MESSAGES_DEEP_MAX: Final = 90
"""Nesting of messages. The limit of protobuf is 100, and the messages of an answer may be a few levels deeper."""

COUNTED_BYTES: Final = 64 * 1024
"""Parts of shorter bodies are not counted: there are fewer than ``PARTS_MAX``, or about as many."""

PARTS_MAX: Final = 50_000
"""Members and elements in one body. A Txn has 128 operations, so no request needs as many."""

PARTS_A_STEP: Final = 128
"""Elements of a list between two pauses."""

SHOWN_CHARACTERS_MAX: Final = 4096
"""Longer texts are never numbers. An error message shows at most this much of a value."""

DIGITS_MAX: Final = 32
"""Numbers with more digits are out of every range, and parsing takes the square of their length."""

_KINDS: Final[dict[type, str]] = {str: "string", dict: "object", list: "array", bool: "bool"}
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: ("int32", range(-(2**31), 2**31)),
    FieldDescriptor.CPPTYPE_INT64: ("int64", range(-(2**63), 2**63)),
    FieldDescriptor.CPPTYPE_UINT32: ("uint32", range(2**32)),
    FieldDescriptor.CPPTYPE_UINT64: ("uint64", range(2**64)),
    FieldDescriptor.CPPTYPE_ENUM: ("protoreflect.EnumNumber", range(-(2**31), 2**31)),
}
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_HALVES: Final = re.compile("[\ud800-\udfff]")
_SIXES: Final = re.compile(rb"[A-Za-z0-9+/\r\n]*={0,2}")

_CONTEXTS: Final = {
    "Expecting value": "looking for beginning of value",
    "Expecting property name enclosed in double quotes": "looking for beginning of object key string",
    "Illegal trailing comma before end of object": "looking for beginning of object key string",
    "Expecting ':' delimiter": "after object key",
    "Expecting ',' delimiter": "after object key:value pair or array element",
    "Invalid control character at": "in string literal",
    "Invalid \\escape": "in string escape code",
    "Invalid \\uXXXX escape": "in \\u hexadecimal character escape",
}
"""Python's error texts for malformed JSON, and Go's."""

_LITERALS: Final = {"t": "true", "f": "false", "n": "null"}

Steps = Generator[None, None, None]


class JsonError(Exception):
    """A body that is not JSON, or not this message; the text is Go's."""


class Number(str):
    """A number, as written, that is not a whole number or has too many digits."""


def _int(text: str) -> int | Number:
    return Number(text) if len(text) > DIGITS_MAX or text == "-0" else int(text)


def _constant(name: str) -> NoReturn:
    raise JsonError(f"invalid character '{name.lstrip('-')[0]}' looking for beginning of value")


_decode: Final = json.JSONDecoder(parse_int=_int, parse_float=Number, parse_constant=_constant).raw_decode


def parse(text: str, start: int = 0, *, cut: str = "unexpected EOF") -> tuple[Any, int]:
    """Parse the value that begins at ``start``; what follows it is not checked.

    Arguments:
        text: JSON.
        start: position of the value, or of white space before it.
        cut: error text if the value is incomplete.

    Returns:
        The value, whose numbers may be ``Number``, and the position of the next character that is not white space.

    Raises:
        JsonError: there is no valid value.
    """
    try:
        value, end = _decode(text, skip_space(text, start))
    except json.JSONDecodeError as error:
        raise JsonError(_fault(text, error, cut)) from None
    except RecursionError:
        raise JsonError("values are nested too deep") from None
    return value, skip_space(text, end)


def _fault(text: str, error: json.JSONDecodeError, cut: str) -> str:
    """Return Go's error text for malformed JSON."""
    at, context = error.pos, _CONTEXTS.get(error.msg, _CONTEXTS["Expecting value"])
    literal = _LITERALS.get(text[at : at + 1], "") if error.msg == "Expecting value" else ""
    for expected in literal:
        if text[at : at + 1] != expected:
            context = f"in literal {literal} (expecting '{expected}')"
            break
        at += 1
    if error.msg.startswith("Illegal trailing comma"):  # as of Python 3.13
        at = skip_space(text, at + 1)
    if at >= len(text) or error.msg.startswith("Unterminated"):
        return cut
    if text[at] == "\\":
        at += 1  # Python reports the position of the backslash
    return f"invalid character {_quoted(text[at : at + 1])} {context}"


def parse_whole(text: str) -> Any:
    """Parse a text that must be one value.

    Raises:
        JsonError: it is not one value.
    """
    value, end = parse(text, cut="unexpected end of JSON input")
    if end < len(text):
        raise JsonError(f"invalid character {_quoted(text[end])} after top-level value")
    return value


def skip_space(text: str, at: int) -> int:
    """Return the position of the next character that is not white space.

    Arguments:
        text: text of the body.
        at: position to begin at.
    """
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _quoted(character: str) -> str:
    """Return a character as Go's messages show it: its first byte, in single quotes."""
    first = chr(character.encode("utf-8", "replace")[0]) if character else "\\"
    return "'\\''" if first == "'" else repr(first)


class Reader:
    """Reads the values of a body, one after the other.

    The text is decoded with the first value: it may take five times the body, and thousands of bodies may wait.

    Arguments:
        body: complete body.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._text = ""
        self._at = 0
        self._is_large = len(body) > COUNTED_BYTES
        self._is_counted = False

    def next(self, message_type: type[Any]) -> Generator[None, None, Any | None]:
        """Read the next value, with pauses. What follows it is not checked.

        Arguments:
            message_type: type of the message.

        Returns:
            The message; None at the end of the body.

        Raises:
            JsonError: the value is not JSON, or not this message.
        """
        if self._body:
            self._text, self._body = self._body.decode("utf-8", "replace"), b""
            self._at = skip_space(self._text, 0)
        if self.is_at_end:
            return None
        if self._is_large and not self._is_counted:
            if sum(map(self._text.count, ",[{")) > PARTS_MAX:
                raise JsonError(f"a body of more than {PARTS_MAX} members and elements")
            self._is_counted = True
            yield
        found, self._at = parse(self._text, self._at)
        if self._is_large:
            yield
        message = message_type()
        yield from read_message(found, message)
        return message

    @property
    def is_at_end(self) -> bool:
        """Whether only white space is left."""
        return not self._body and self._at >= len(self._text)


def read_message(found: Any, message: Any, depth: int = 0) -> Steps:
    """Fill a message from a value.

    Arguments:
        found: parsed value.
        message: message to fill.
        depth: number of enclosing messages.

    Raises:
        JsonError: the value does not fit the message.
    """
    if found is None:
        return
    if type(found) is not dict:
        raise _mismatch(found, "map[string]json.RawMessage")
    if depth > MESSAGES_DEEP_MAX:
        raise JsonError(f"messages are nested more than {MESSAGES_DEEP_MAX} deep")
    for name, json_name, is_repeated, convert in _fields_of(message.DESCRIPTOR):
        value = found[json_name] if json_name in found else found.get(name)
        if value is None:
            continue
        if not is_repeated:
            if convert is not None:
                setattr(message, name, convert(value))
                continue
            part = getattr(message, name)
            part.SetInParent()
            yield from read_message(value, part, depth + 1)
            continue
        if type(value) is not list:
            raise _mismatch(value, "[]json.RawMessage")
        values = getattr(message, name)
        for count, element in enumerate(value, 1):
            if convert is not None:
                values.append(convert(element))
            else:
                yield from read_message(element, values.add(), depth + 1)
            if count % PARTS_A_STEP == 0:
                yield


class _Field(NamedTuple):
    """Properties of a field; ``convert`` is None if the field is a message."""

    name: str
    json_name: str
    is_repeated: bool
    convert: Callable[[Any], Any] | None


_known: dict[str, list[_Field]] = {}


def _fields_of(descriptor: Descriptor) -> list[_Field]:
    known = _known.get(descriptor.full_name)
    if known is None:
        known = _known[descriptor.full_name] = [
            _Field(field.name, field.json_name, field.is_repeated, _converter(field)) for field in descriptor.fields
        ]
    return known


def _converter(field: FieldDescriptor) -> Callable[[Any], Any] | None:
    if field.type == FieldDescriptor.TYPE_ENUM:
        return _enum_converter(field)
    if field.cpp_type in _RANGES:
        return lambda value: _integer(_unquoted(field, value), *_RANGES[field.cpp_type])
    return _CONVERTERS.get(field.type)


def _mismatch(value: Any, go_type: str, number: str = "") -> JsonError:
    kind = _KINDS.get(type(value), "number") + number
    return JsonError(f"json: cannot unmarshal {kind} into Go value of type {go_type}")


def _unquoted(field: FieldDescriptor, value: Any) -> Any:
    """Return the value of a number that is written as a string."""
    if type(value) is not str or len(value) > SHOWN_CHARACTERS_MAX:
        return value
    return parse_whole(value)


def _integer(value: Any, go_type: str, allowed: range) -> int:
    if value is None or (value == "-0" and type(value) is Number and allowed.start < 0):
        return 0
    whole = _whole(value) if type(value) is Number and value != "-0" else value
    if type(whole) is int and whole in allowed:
        return whole
    is_number = isinstance(value, int | Number) and type(value) is not bool
    raise _mismatch(value, go_type, f" {value}"[: SHOWN_CHARACTERS_MAX + 1] if is_number else "")


def _whole(number: Number) -> int | None:
    """Return a whole number that has a point or an exponent, as etcd from 3.6 on; None: not whole, or too large."""
    try:
        value = Decimal(number if len(number) <= DIGITS_MAX else "nan")
    except InvalidOperation:  # the exponent is too large
        return None
    is_small = value.is_finite() and value.adjusted() < DIGITS_MAX
    return int(value) if is_small and value == value.to_integral_value() else None


def _enum_converter(field: FieldDescriptor) -> Callable[[Any], int]:
    enum: Any = field.enum_type
    numbers: dict[str, int] = {value.name: value.number for value in enum.values}

    def convert(value: Any) -> int:
        if type(value) is not str:
            return _integer(value, *_RANGES[FieldDescriptor.CPPTYPE_ENUM])
        if value not in numbers:
            shown = json.dumps(json.dumps(value[:SHOWN_CHARACTERS_MAX]))
            raise JsonError(f"unknown value {shown} for enum {enum.full_name}")
        return numbers[value]

    return convert


def _bool(value: Any) -> bool:
    if type(value) is not bool and value is not None:
        raise _mismatch(value, "bool")
    return bool(value)


def _string(value: Any) -> str:
    if type(value) is not str and value is not None:
        raise _mismatch(value, "string")
    text: str = value or ""
    if text.isascii():
        return text
    if len(text) > COUNTED_BYTES:  # half of it may be surrogates: no field takes such a long text
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return _HALVES.sub("\ufffd", text)


def _bytes(value: Any) -> bytes:
    if type(value) is list:
        return bytes([_integer(one, "uint8", range(256)) for one in value])
    if type(value) is not str and value is not None:
        raise _mismatch(value, "[]uint8")
    return _decode_either(value or "")


_NO_LINE_ENDS: Final = str.maketrans("", "", "\r\n")
_URL_TO_STANDARD: Final = str.maketrans("-_", "+/")
_CONVERTERS: Final[dict[int, Callable[[Any], Any]]] = {
    FieldDescriptor.TYPE_BOOL: _bool,
    FieldDescriptor.TYPE_STRING: _string,
    FieldDescriptor.TYPE_BYTES: _bytes,
}


def decode_base64(text: str | bytes) -> bytes:
    """Decode base64 like Go's ``base64.StdEncoding``: line ends are skipped, padding is required.

    >>> decode_base64("Zm9v\\n")
    b'foo'

    Raises:
        JsonError: names the first invalid byte.
    """
    try:
        return a2b_base64(text, strict_mode=True)
    except ValueError:
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    try:
        return a2b_base64(data.translate(None, b"\r\n"), strict_mode=True)
    except ValueError:
        match = _SIXES.match(data)
        end = 0 if match is None else match.end()
        offset = end - end % 4 if end == len(data) else end
        raise JsonError(f"illegal base64 data at input byte {offset}") from None


def _decode_either(text: str) -> bytes:
    """Decode base64 of the standard or the URL alphabet, padded or not, as etcd from 3.6 on.

    >>> _decode_either("_-8")
    b'\\xff\\xef'

    Raises:
        JsonError: it is neither, with the text for the standard one.
    """
    try:
        return decode_base64(text)
    except JsonError:
        data = text.translate(_NO_LINE_ENDS)
        if "-" in data or "_" in data:
            data = "*" if "+" in data or "/" in data else data.translate(_URL_TO_STANDARD)
        if "=" not in data:
            data += "=" * (-len(data) % 4)
        try:
            return a2b_base64(data, strict_mode=True)
        except ValueError:
            pass  # told with the text of the first attempt
        raise


SMALL_BYTES = 256
"""Bodies up to this size are parsed at once, however many arrive in one loop turn."""

BYTES_A_KEY = 64
"""Bytes of a body that count as one key for the slices."""


class Requests:
    """Reads a body; a large one in the member's time for long work.

    Arguments:
        body: complete body.
        slices: runs the long work of the member.
        queue: queue of the client (``rpc/shares``).
    """

    def __init__(self, body: bytes, slices: Slices, queue: Identity) -> None:
        self._queue = queue
        self._size_bytes = len(body)
        self._reader = Reader(body)
        self._slices = slices

    async def next(self, method: Method) -> bytes | None:
        """Return the next request; None at the end.

        Arguments:
            method: method of the request.

        Raises:
            JsonError: the value is not a request.
        """
        work = self._reader.next(method.request)
        message: Any
        if self._size_bytes > SMALL_BYTES:
            message = await self._slices.result(lambda: work, self._size_bytes // BYTES_A_KEY, self._queue)
        else:
            message = finish(work)
        return None if message is None else message.SerializeToString()

    @property
    def are_over(self) -> bool:
        """Whether nothing is left."""
        return self._reader.is_at_end
