"""The lines of the audit log: the fields of a request that are shown, and their format.

Bytes from clients are escaped as in Python (``\\x00``; a backslash is doubled), so a line is always ASCII, and two
different keys never look alike. Long values are cut, and their size is added. A range is shown as ``prefix`` if it
is one, otherwise as ``key`` and ``range_end``.

>>> subject(rpc_pb2.DeleteRangeRequest(key=b"a/", range_end=b"a0"))
{'prefix': 'a/'}
>>> subject(rpc_pb2.PutRequest(key=b"k\\xff", value=b"secret", lease=7))
{'key': 'k\\\\xff', 'lease': 7}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES, Method
from raftkv.rpc.status import Code
from raftkv.rpc.tls import common_name_of

SHOWN: Final = frozenset(
    {
        *("key", "range_end", "prefix", "name", "role", "user", "peerURLs", "service"),
        *("ID", "lease", "TTL", "revision", "rev", "physical", "watch_id", "start_revision", "isLearner"),
        *("targetID", "action", "memberID", "alarm", "version", "permType", "old_id", "new_id"),
        *("bytes_max", "keys_max", "no_password"),
    }
)
"""Names of the fields that a line may show. All others are left out: values, passwords, fields of later versions."""

TEXT_BYTES_MAX: Final = 256
"""Longer keys and names are cut; ``..._bytes`` next to them is their size."""

ITEMS_MAX: Final = 32
"""Operations, compares and texts of one request that are shown; ``omitted`` counts the others."""

_encoded: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_quoted: Final = json.encoder.encode_basestring_ascii

METHODS: Final[dict[str, Method]] = {
    method.path: method for methods in SERVICES.values() for method in methods.values()
}


class Record(NamedTuple):
    """The content of a future line, as the loop queues it.

    Attributes:
        time_s: wall clock time of the event.
        event: subject of the line: call, open, request, refused, end, http, handshake, dropped.
        remote: address of the client.
        user: name of the user; empty: none.
        method: path of the method, or a description in its place.
        request: serialized request, or the text that is shown of it; None: it is not shown.
        code: gRPC code; None: not ended. For ``http`` the HTTP status.
        answer: first bytes of the answer, for its revision.
        duration_s: seconds since the request came.
        reason: human-readable reason.
        certificate: certificate of the client, from ``certificate_text``; empty: none.
    """

    time_s: float
    event: str
    remote: str = ""
    user: bytes = b""
    method: str = ""
    request: bytes | str | None = None
    code: int | None = None
    answer: bytes = b""
    duration_s: float | None = None
    reason: str = ""
    certificate: str = ""


def line(record: Record, member: str) -> bytes:
    """Return the line of a record, with its line feed; empty for a request without anything to show.

    Arguments:
        record: record of one event.
        member: name of the member.
    """
    request = record.request
    if isinstance(request, bytes):
        request = shown_of(record.method, request)
    if not request and record.event == "request":
        return b""
    second = int(record.time_s)
    parts = [
        f'{{"time":"{_second(second)}.{int((record.time_s - second) * 1e6):06d}Z"',
        _constant(member, record.event),
    ]
    if record.remote:
        parts.append(f'"remote":{_quoted(record.remote)}')
    if record.event != "dropped":
        parts.append(f'"user":{_quoted(record.user.decode("utf-8", "backslashreplace")) if record.user else "null"}')
    if record.certificate:
        parts.append(f'"certificate":{record.certificate}')
    if record.method:
        parts.append(f'"method":{_quoted(_text(record.method.removeprefix("/")))}')
    if request:
        parts.append(f'"request":{request}')
    if record.code is not None:
        parts.append(f'"outcome":{record.code}' if record.event == "http" else f'"outcome":"{_outcome(record.code)}"')
    revision = _revision(record.answer)
    if revision:
        parts.append(f'"revision":{revision}')
    if record.duration_s is not None:
        parts.append(f'"duration_ms":{record.duration_s * 1000:.3f}')
    if record.reason:
        parts.append(f'"reason":{_quoted(_text(record.reason))}')
    return ",".join(parts).encode("ascii") + b"}\n"


@lru_cache(32)
def _constant(member: str, event: str) -> str:
    return f'"member":{_quoted(member)},"event":"{event}"'


@lru_cache(4)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def certificate_text(certificate: Mapping[str, Any] | None) -> str:
    """Return the name and serial number of a certificate as JSON: the whole may be 100 KB, and would wait in the queue.

    Arguments:
        certificate: certificate as ``ssl`` returns it, or None.
    """
    if not certificate:
        return ""
    serial = str(certificate.get("serialNumber", ""))
    return _encoded({"name": _text(common_name_of(certificate)), "serial": _text(serial)})


def parsed(path: str, request: bytes) -> dict[str, Any]:
    """Return the shown fields of a serialized request.

    Arguments:
        path: path of the method.
        request: received bytes, which may be malformed.
    """
    method = METHODS.get(path)
    if method is None:
        return {}
    try:
        return subject(method.request.FromString(request))
    except DecodeError:
        return {"malformed_bytes": len(request)}


def shown_of(path: str, request: bytes) -> str:
    """Return the shown fields as JSON, which takes a fifth of the memory; empty for nothing."""
    return text_of(parsed(path, request))


def text_of(shown: dict[str, Any]) -> str:
    """Return shown fields as JSON; empty for nothing.

    >>> text_of({"key": "a"}), text_of({})
    ('{"key":"a"}', '')
    """
    return _encoded(shown) if shown else ""


def subject(message: Message) -> dict[str, Any]:
    """Return the shown fields of a request.

    Arguments:
        message: parsed request.
    """
    budget = _Budget()
    found = _subject(message, budget)
    if budget.omitted:
        found["omitted"] = budget.omitted
    return found


@dataclass(slots=True)
class _Budget:
    left: int = ITEMS_MAX
    omitted: int = 0

    def take(self, items: Any) -> Iterator[Any]:
        """Yield items while there is room; the others are counted, not read."""
        for number, item in enumerate(items):
            if self.left <= 0:
                self.omitted += len(items) - number
                return
            self.left -= 1
            yield item


def _subject(message: Message, budget: _Budget) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, repeated, nested in _plan(message.DESCRIPTOR):
        name = field.name
        if not nested:
            value = getattr(message, name)
            if value:
                _show(found, field, list(budget.take(value)) if repeated else value)
        elif repeated:
            items = [_subject(item, budget) for item in budget.take(getattr(message, name))]
            if items:
                found[name] = items
        elif message.HasField(name):
            inner = _subject(getattr(message, name), budget)
            if inner:
                found[name] = inner
    _show_prefix(message, found)
    return found


@cache
def _plan(descriptor: Descriptor) -> tuple[tuple[FieldDescriptor, bool, bool], ...]:
    """Return the fields of a message that are read: the field, whether it repeats, whether it is a message."""
    plan = ((field, field.is_repeated, field.message_type is not None) for field in descriptor.fields)
    return tuple((field, repeated, nested) for field, repeated, nested in plan if nested or field.name in SHOWN)


def _show(found: dict[str, Any], field: FieldDescriptor, value: Any) -> None:
    name = field.name
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        found[name] = known.name if known is not None else value
    elif isinstance(value, bytes | str):
        found[name] = _text(value)
        size = len(value.encode()) if isinstance(value, str) else len(value)
        if size > TEXT_BYTES_MAX:
            found[f"{name}_bytes"] = size
    elif isinstance(value, list):
        found[name] = [_text(item) for item in value]
    else:
        found[name] = value


def _text(value: bytes | str) -> str:
    """Return a client's text or bytes in printable form, cut to a limit."""
    if isinstance(value, str):
        return value[:TEXT_BYTES_MAX]
    return repr(value[:TEXT_BYTES_MAX])[2:-1]


def _show_prefix(message: Any, found: dict[str, Any]) -> None:
    """Show a range of all keys with a prefix as that prefix."""
    if "key" in found and "range_end" in found:
        key, end = message.key, message.range_end
        if key and key[-1] < 0xFF and end == key[:-1] + bytes((key[-1] + 1,)):
            shown = {"prefix" + name[3:]: found.pop(name) for name in ("key", "key_bytes") if name in found}
            del found["range_end"]
            found.pop("range_end_bytes", None)
            found.update(shown)


def _outcome(code: int) -> str:
    try:
        return Code(code).name
    except ValueError:
        return str(code)


def _revision(answer: bytes) -> int:
    """Return the revision in the header at the start of an answer; 0: there is none."""
    if len(answer) < 2 or answer[0] != 0x0A or answer[1] > 0x7F:
        return 0
    try:
        return rpc_pb2.ResponseHeader.FromString(answer[2 : 2 + answer[1]]).revision
    except DecodeError:
        return 0
