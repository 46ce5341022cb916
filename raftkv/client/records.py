"""Small JSON records as the values of keys, checked when they are read.

::

    @dataclass(frozen=True, slots=True)
    class Greeting(Record):
        NAME: ClassVar[str] = "greeting"
        text: str
        times: int = 1

    Greeting("hello").encode()                       # b'{"text":"hello"}'
    Greeting.decode(b'{"text":"hello","new":1}')     # unknown fields are ignored

    read(Greeting, item)                             # also checks that the record belongs to the item's key

A record is untrusted input: any client that may write the key chose its bytes. Each field is checked for its type and
size, each record for its values (``check``), and ``read`` checks its key (``belongs_to``), because a record is only
valid under its own key. An invalid record raises a ``RecordError`` of one line; nothing in it is executed. An older
raftkv can read the records of a newer one, as long as they contain the fields that it needs.

The records are defined by the parts that store them (``training.records``, ``checkpoint.records``).
"""

from __future__ import annotations

import json
import logging
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Final, Self, TypeVar

from raftkv.client.values import KeyValue
from raftkv.errors import ConfigError, RaftKVError, printable

_log = logging.getLogger(__name__)

_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "Mapping[str, str]": (dict,),
    "Mapping[str, float]": (dict,),
    "Mapping[str, Any]": (dict,),
    "Mapping[str, int]": (dict,),
    "tuple[str, ...]": (list,),
}
"""JSON types allowed by the annotation of a field."""
_NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON cannot express; they are written as strings, which every program can read."""
_USUAL: Final[dict[str, type]] = {"int": int, "float": float, "str": str}
_ITEMS: Final[dict[str, tuple[type, ...]]] = {
    "Mapping[str, str]": (str,),
    "Mapping[str, float]": (int, float),
    "Mapping[str, int]": (int,),
    "tuple[str, ...]": (str,),
}
NUMBER_MAX: Final = 2**64 - 1
Limits = Mapping[str, tuple[int, int]]
SIGNED: Final = (-NUMBER_MAX, NUMBER_MAX)
"""Limits of a whole number that may be negative."""
_UNSIGNED: Final = (0, NUMBER_MAX)
TIME_MAX_S: Final = 60_000_000_000.0
"""Limit of times, before and after 1970, within which every calendar and time zone has dates."""
SHOWN_MAX: Final = 400
"""Maximum length of an error's description, because an invalid value may be a megabyte long."""
SPOKEN_MAX: Final = 2000
"""Maximum length of a text for people."""
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_Layout = tuple[tuple[str, str, str, Any, type | None, float, float], ...]
"""For each field: its name, its name in JSON, its annotation, its default (``MISSING``: it is required), and the type
and limits of values that need no other check; a text of that type must be ASCII."""
_encoder: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class RecordError(RaftKVError):
    """A key does not contain a valid record of raftkv; ``why`` says what is wrong."""

    def __init__(self, record: str, why: str) -> None:
        line = printable(" ".join(why.split()))
        self.why = line if len(line) <= SHOWN_MAX else f"{line[:SHOWN_MAX]}..."
        super().__init__(f"not a {record} record: {self.why}")


@dataclass(frozen=True, slots=True)
class Record:
    """The base class of all records.

    Attributes:
        NAME: name of the kind of record, for errors.
        STORED_AS: fields that have another name in JSON.
        LIMITS: least and highest whole number of a field, by its name in JSON; the others are from 0 to ``NUMBER_MAX``.
        SPOKEN: texts for people, from any source, for example an exception: instead of being refused, they are
            truncated and made encodable.
        PARTS: fields that contain other records, by their names in JSON: an optional record, a tuple, or a table.
    """

    NAME: ClassVar[str] = "?"
    STORED_AS: ClassVar[Mapping[str, str]] = {}
    LIMITS: ClassVar[Limits] = {}
    SPOKEN: ClassVar[frozenset[str]] = frozenset()
    PARTS: ClassVar[Mapping[str, type[Record]]] = {}

    def check(self) -> None:
        """Check constraints beyond the types; subclasses extend this.

        Raises:
            RecordError, ConfigError: a value that raftkv never writes.
        """

    def belongs_to(self, key: str) -> bool:
        """Return whether this is the record of a key; records that contain their key override this."""
        return True

    def encode(self) -> bytes:
        """Encode the record as the value of its key; fields with their default are left out."""
        try:
            return _encoder.encode(self.plain()).encode()
        except UnicodeEncodeError:
            raise RecordError(self.NAME, "a text in it is not Unicode: half of a surrogate pair") from None

    def plain(self) -> dict[str, Any]:
        """Return the record as a JSON object, without fields that have their default."""
        found, spoken = {}, self.SPOKEN
        for attribute, name, _, default, usual, _, _ in _layout(type(self)):
            value = getattr(self, attribute)
            if attribute in spoken:
                value = value[:SPOKEN_MAX].encode(errors="replace").decode()
            if value != default:
                found[name] = value if usual is str else _plain(value)
        return found

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Decode the value of a key.

        Raises:
            RecordError: the value is not such a record.
        """
        try:
            plain = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RecordError(cls.NAME, f"{error}") from None
        return cls.from_plain(plain)

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Convert a decoded JSON object to a record.

        Raises:
            RecordError: a field is missing or has another type.
        """
        if not isinstance(plain, dict):
            raise RecordError(cls.NAME, f"{type(plain).__name__} instead of an object")
        values: dict[str, Any] = {}
        for attribute, name, kind, default, usual, least, most in _layout(cls):
            if name in plain:
                value = plain[name]
                # Thousands of ranks have a record each, and nearly all of their values are usual.
                is_usual = type(value) is usual
                if not is_usual or not (value.isascii() if usual is str else least <= value <= most):
                    value = cls.read_field(name, kind, value)
                values[attribute] = value
            elif default is MISSING:
                raise RecordError(cls.NAME, f"{name} is missing")
        try:
            record = cls(**values)
            record.check()
        except ConfigError as error:
            raise RecordError(cls.NAME, str(error)) from None
        return record

    @classmethod
    def read_field(cls, name: str, kind: str, value: object) -> object:
        """Check the value of a field in JSON; records with other types of fields extend this.

        Arguments:
            name: name in JSON.
            kind: annotation of the field.
            value: decoded value.
        """
        if (part := cls.PARTS.get(name)) is not None:
            return _parts(cls.NAME, name, kind, value, part)
        checked = _checked(cls.NAME, name, kind, value)
        least, most = cls.LIMITS.get(name, _UNSIGNED)
        if kind == "int" and not least <= checked <= most:
            raise RecordError(cls.NAME, f"{name} is {checked}")
        return checked


R = TypeVar("R", bound=Record)


def encoded(record: Record) -> bytes:
    """Return the bytes of a record with values of a caller, which every reader takes.

    Raises:
        ConfigError: no reader would take them.
    """
    data = record.encode()
    try:
        type(record).decode(data)
    except RecordError as error:
        raise ConfigError(f"nothing is written that could not be read again: {error}") from None
    return data


def read(kind: type[R], item: KeyValue) -> R:
    """Return the record in a key.

    Raises:
        RecordError: the value is not such a record, or is the record of another key; the text names the key.
    """
    key = item.key.decode(errors="backslashreplace")
    try:
        found = kind.decode(item.value)
        if not found.belongs_to(key):
            raise RecordError(kind.NAME, "it is the record of another key")
    except RecordError as error:
        raise RecordError(kind.NAME, f"{key}: {error.why}") from None
    return found


def readable(kind: type[R], items: Iterable[KeyValue]) -> list[R]:
    """Return the records of some keys; an invalid record is skipped and logged."""
    found = []
    for item in items:
        try:
            found.append(read(kind, item))
        except RecordError as error:
            _log.warning("raftkv: skipped an unreadable record: %s", error)
    return found


def number_in(text: str, most: int = NUMBER_MAX) -> int | None:
    """Parse a whole number that another client wrote in decimal digits; None: malformed, or larger than ``most``."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(NUMBER_MAX))  # Python refuses 5000 digits
    return number if is_number and (number := int(text)) <= most else None


_layouts: Final[dict[type[Record], _Layout]] = {}


def _layout(cls: type[Record]) -> _Layout:
    """Return the layout of a class, created at its first use."""
    known = _layouts.get(cls)
    if known is None:
        known = _layouts[cls] = tuple(
            (
                item.name,
                name := cls.STORED_AS.get(item.name, item.name),
                kind := str(item.type),
                item.default if item.default_factory is MISSING else item.default_factory(),
                _USUAL.get(kind),
                *_limits(cls, name, kind),
            )
            for item in fields(cls)
        )
    return known


def _limits(cls: type[Record], name: str, kind: str) -> tuple[float, float]:
    least, most = cls.LIMITS.get(name, _UNSIGNED) if kind == "int" else (-math.inf, math.inf)
    return (max(least, -TIME_MAX_S), min(most, TIME_MAX_S)) if _is_time(name) else (least, most)


def _is_time(name: str) -> bool:
    return name == "time" or name.endswith("_s")


def _parts(record: str, name: str, kind: str, value: object, part: type[Record]) -> object:
    """Return the records in a field: an optional record, a tuple, or a table."""
    if kind.endswith("| None"):
        return None if value is None else part.from_plain(value)
    if kind.startswith("Mapping["):
        return {key: part.from_plain(item) for key, item in _checked(record, name, "Mapping[str, Any]", value).items()}
    if not isinstance(value, list):
        raise RecordError(record, f"{name} is {reprlib.repr(value)}")
    return tuple(part.from_plain(item) for item in value)


def _checked(record: str, name: str, kind: str, value: object) -> Any:
    value = _numbers(value, kind)
    if not isinstance(value, _KINDS[kind]) or isinstance(value, bool) or not _is_sound(name, value):
        raise RecordError(record, f"{name} is {reprlib.repr(value)}")
    if isinstance(value, dict) and not all(_is_sound("", key) and _is_item(item, kind) for key, item in value.items()):
        raise RecordError(record, f"{name} is not a table of {'texts' if kind.endswith('str]') else 'numbers'}")
    if isinstance(value, list):
        if not all(_is_item(item, kind) for item in value):
            raise RecordError(record, f"{name} is {reprlib.repr(value)}")
        return tuple(value)
    return value


def _is_item(value: object, kind: str) -> bool:
    return isinstance(value, _ITEMS.get(kind, object)) and not isinstance(value, bool) and _is_sound("", value)


def _is_sound(name: str, value: object) -> bool:
    """Return whether a string is encodable, and a number within the limits."""
    if isinstance(value, str):
        return value.isascii() or not _LONE_SURROGATE.search(value)
    if isinstance(value, int | float) and _is_time(name):
        return abs(value) <= TIME_MAX_S  # False for NaN too
    return not isinstance(value, int) or abs(value) <= NUMBER_MAX


def _numbers(value: object, kind: str) -> object:
    """Convert strings to the numbers that JSON cannot express."""
    if kind == "float":
        return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
    if kind == "Mapping[str, float]" and isinstance(value, dict):
        return {name: _numbers(item, "float") for name, item in value.items()}
    return value


def _plain(value: object) -> object:
    if type(value) in (str, int):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Record):
        return value.plain()
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, Mapping) else value
