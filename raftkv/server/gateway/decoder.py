"""JSON to messages, exactly as grpc-gateway 1.16 (Go's jsonpb) takes it.

    reader = Reader(body)
    yield from reader.next(rpc_pb2.PutRequest)      # the message, or None at the end of the body
    requests = Requests(body, slices)               # the same, serialized for the handlers of gRPC
    await requests.next(method)

Both spellings of a name are known (``range_end``, ``rangeEnd``), numbers may be strings, enums names or numbers;
unknown names and nulls are left out. Usual bodies are read by Python's own parser and a plan of each message type. A
body that does not fit there (``_OddError``) is read again, step by step, with Go's rules and texts
(``json_to_message``).
"""

from __future__ import annotations

import json
import re
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Callable, Generator
from typing import Any, Final, NoReturn

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from raftkv.loop.fair import Identity
from raftkv.loop.scheduler import Slices
from raftkv.pb.services import Method
from raftkv.server.gateway.json_to_message import MESSAGES_DEEP_MAX, read_message
from raftkv.server.gateway.syntax import scan, skip_space

SIMPLE_BYTES: Final = 16 * 1024
SIMPLE_PARTS: Final = 4_000
"""Larger bodies of more members and elements are read in steps: Python's parser cannot pause."""

DIGITS_USUAL: Final = 32

Set = Callable[[Any, Any, int], None]
Into = Callable[[Any, dict[str, Any], int], None]

_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: range(-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT64: range(-(2**63), 2**63),
    FieldDescriptor.CPPTYPE_UINT32: range(2**32),
    FieldDescriptor.CPPTYPE_UINT64: range(2**64),
}


class _OddError(Exception):
    """The message is not what most clients send: it is read again in Go's way."""


def _odd(*_: object) -> NoReturn:
    raise _OddError


def _int(text: str) -> int:
    """Return a whole number; what is out of every range is odd: to read it takes the square of its length."""
    if len(text) > DIGITS_USUAL:
        raise _OddError
    return int(text)


_parse: Final = json.JSONDecoder(parse_constant=_odd, parse_int=_int).decode


class Reader:
    """Reads the values of a body, one after the other.

    Arguments:
        body: whole.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def next(self, message_type: type[Any], *, is_last: bool = False) -> Generator[None, None, Any | None]:
        """Read the next value; pauses now and then.

        Arguments:
            message_type: of what it becomes.
            is_last: what follows is left alone.

        Returns:
            The message; None at the end of the body.

        Raises:
            JsonError: it is no JSON, or not of this message.
        """
        if self._at == 0 and is_last:
            message = read_usual(self._body, message_type)
            if message is not None:
                return message
        self._at = start = skip_space(self._body, self._at)
        if start >= len(self._body):
            return None
        value = yield from scan(self._body, start)
        self._at = value.end
        message = message_type()
        yield from read_message(self._body, value, start, message)
        return message

    @property
    def is_at_end(self) -> bool:
        """Whether nothing but white space is left."""
        return skip_space(self._body, self._at) >= len(self._body)


def read_usual(body: bytes, message_type: type[Any]) -> Any | None:
    """Return the message of a usual body; None: it must be read in Go's way.

    Arguments:
        body: whole.
        message_type: of what it becomes.
    """
    if len(body) > SIMPLE_BYTES and body.count(b",") + body.count(b"[") + body.count(b"{") > SIMPLE_PARTS:
        return None
    try:
        found = _parse(body.decode())
        if type(found) is not dict:
            return None
        message = message_type()
        into(message_type.DESCRIPTOR)(message, found, 0)
    except (_OddError, ValueError, RecursionError):
        return None
    return message


_plans: dict[str, Into] = {}


def into(descriptor: Descriptor) -> Into:
    """Return what fills a message of a type from a parsed object, within so many messages.

    Arguments:
        descriptor: of the type.
    """
    known = _plans.get(descriptor.full_name)
    if known is not None:
        return known
    setters: dict[str, tuple[Set, str]] = {}
    exclusive: list[frozenset[str]] = []

    def fill(message: Any, found: dict[str, Any], depth: int) -> None:
        if depth > MESSAGES_DEEP_MAX:
            raise _OddError
        for name, value in found.items():
            setter = setters.get(name)
            if setter is not None and value is not None:
                if setter[1] in found:
                    raise _OddError
                setter[0](message, value, depth)
        for names in exclusive:
            if len(names & found.keys()) > 1:
                raise _OddError

    _plans[descriptor.full_name] = fill  # first: types may hold themselves
    for field in descriptor.fields:
        setter = _setter(field)
        other = field.json_name if field.json_name != field.name else "\0"
        setters[field.name] = (setter, other)
        if other != "\0":
            setters[field.json_name] = (setter, field.name)
    exclusive += [
        frozenset(name for field in oneof.fields for name in (field.name, field.json_name))
        for oneof in descriptor.oneofs
    ]
    return fill


def _setter(field: FieldDescriptor) -> Set:
    name = field.name
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        message_type: Any = field.message_type
        return _message_setter(name, into(message_type), field.is_repeated)
    take = _taker(field)
    if not field.is_repeated:
        return lambda message, value, _depth: setattr(message, name, take(value))

    def set_all(message: Any, values: Any, _depth: int) -> None:
        if type(values) is not list:
            raise _OddError
        getattr(message, name).extend(map(take, values))

    return set_all


def _message_setter(name: str, fill: Into, is_repeated: bool) -> Set:
    def set_one(message: Any, value: Any, depth: int) -> None:
        if type(value) is not dict:
            raise _OddError
        part = getattr(message, name)
        part.SetInParent()
        fill(part, value, depth + 1)

    def set_all(message: Any, values: Any, depth: int) -> None:
        if type(values) is not list:
            raise _OddError
        parts = getattr(message, name)
        for value in values:
            if type(value) is not dict:
                raise _OddError
            fill(parts.add(), value, depth + 1)

    return set_all if is_repeated else set_one


def _taker(field: FieldDescriptor) -> Callable[[Any], Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes
    if field.type == FieldDescriptor.TYPE_STRING:
        return _string
    if field.type == FieldDescriptor.TYPE_BOOL:
        return _bool
    if field.type == FieldDescriptor.TYPE_ENUM:
        return _enum_taker(field)
    allowed = _RANGES[field.cpp_type]
    is_unsigned = allowed.start == 0

    def take(value: Any) -> int:
        if type(value) is str and _INTEGER.fullmatch(value):
            value = int(value)
        # It may have been -0, which Go refuses where there is no sign.
        if type(value) is not int or value not in allowed or (value == 0 and is_unsigned):
            raise _OddError
        return value

    return take


def _bytes(value: Any) -> bytes:
    if type(value) is not str:
        raise _OddError
    try:
        return a2b_base64(value, strict_mode=True)
    except Base64Error:
        raise _OddError from None


def _string(value: Any) -> str:
    if type(value) is not str:
        raise _OddError
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _OddError
    return value


def _enum_taker(field: FieldDescriptor) -> Callable[[Any], int]:
    enum: Any = field.enum_type
    numbers = {value.name: value.number for value in enum.values}

    def take(value: Any) -> int:
        number = numbers.get(value, value) if type(value) is str else value
        if type(number) is not int or not -(2**31) <= number < 2**31:
            raise _OddError
        return number

    return take


SMALL_BYTES = 256
"""Bodies up to this size are read at once, however many have come in one turn of the loop."""

BYTES_A_KEY = 64
"""Bytes of a body that count as one key for the slices."""


class Requests:
    """Reads a body; a large or odd one in the time that the member gives to long work.

    Arguments:
        body: whole.
        slices: the long work of the member.
        queue: of the client (``rpc/shares``).
    """

    def __init__(self, body: bytes, slices: Slices, queue: Identity) -> None:
        self._queue = queue
        self._body = body
        self._reader = Reader(body)
        self._slices = slices

    async def only(self, method: Method) -> bytes:
        """Return the one request; empty if there is none. The rest of the body is ignored.

        Arguments:
            method: takes it.

        Raises:
            JsonError: it is none.
        """
        message = await self._read(method, is_last=True)
        return b"" if message is None else message.SerializeToString()

    async def next(self, method: Method) -> bytes | None:
        """Return the next request; None at the end.

        Arguments:
            method: takes it.

        Raises:
            JsonError: it is none.
        """
        message = await self._read(method, is_last=False)
        return None if message is None else message.SerializeToString()

    @property
    def are_over(self) -> bool:
        """Whether nothing is left."""
        return self._reader.is_at_end

    async def _read(self, method: Method, is_last: bool) -> Any:
        work = self._reader.next(method.request, is_last=is_last)
        if len(self._body) <= SMALL_BYTES:
            try:
                next(work)  # usual bodies are read here, without a pause
            except StopIteration as done:
                return done.value
        return await self._slices.result(lambda: work, len(self._body) // BYTES_A_KEY, self._queue)
