"""Small JSON records as the values of keys, checked when they are read.

::

    @dataclass(frozen=True, slots=True)
    class Greeting(Record):
        NAME: ClassVar[str] = "greeting"
        text: str
        times: int = 1

    Greeting("hello").encode()                       # b'{"text":"hello"}'
    Greeting.decode(b'{"text":"hello","new":1}')     # fields that are not known are left out

    read(Greeting, item)                             # of a key: it must also be the key of this record

A record is input: any client that may write its key chose its bytes. Each field is checked for its type and size, each
record for its values (``check``), and ``read`` for its owner (``belongs_to``): a record speaks for its own key alone.
A wrong record raises a ``RecordError`` of one line; nothing in it is executed. An older raftkv reads the records of a
newer one, as long as the fields that it needs are there.

Leaves out which records there are: each part that keeps some says so (``training.records``, ``checkpoint.records``).
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
from raftkv.errors import ConfigError, RaftKVError

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
"""Types in JSON that an annotation of a field admits."""
_NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON has no words for these numbers; as texts every program can read them."""
_ITEMS: Final[dict[str, tuple[type, ...]]] = {
    "Mapping[str, str]": (str,),
    "Mapping[str, float]": (int, float),
    "Mapping[str, int]": (int,),
    "tuple[str, ...]": (str,),
}
NUMBER_MAX: Final = 2**64 - 1
TIME_MAX_S: Final = 60_000_000_000.0
"""So far from 1970, before and after, every calendar and time zone has dates."""
SHOWN_MAX: Final = 400
"""Characters of what is wrong: a value of a megabyte makes no line of a megabyte."""
SPOKEN_MAX: Final = 2000
"""Characters of a text for people."""
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_Layout = tuple[tuple[str, str, str, Any], ...]
"""Each field: its name, its name in JSON, its annotation, and its default (``MISSING``: it must be there)."""
_encoder: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class RecordError(RaftKVError):
    """A key does not hold what raftkv writes there; ``why`` says what is wrong."""

    def __init__(self, record: str, why: str) -> None:
        line = " ".join(why.split())
        self.why = line if len(line) <= SHOWN_MAX else f"{line[:SHOWN_MAX]}..."
        super().__init__(f"not a {record} record: {self.why}")


@dataclass(frozen=True, slots=True)
class Record:
    """The base of all records.

    Attributes:
        NAME: of the kind of record, in errors.
        STORED_AS: fields that have another name in JSON.
        SIGNED: whole numbers that may be negative.
        SPOKEN: texts for people, from any source, as of an exception: they are cut, and made such that they can be
            written, instead of refused.
        PARTS: fields that hold other records, by their names in JSON: one, or None; a tuple; or a table of them.
    """

    NAME: ClassVar[str] = "?"
    STORED_AS: ClassVar[Mapping[str, str]] = {}
    SIGNED: ClassVar[frozenset[str]] = frozenset()
    SPOKEN: ClassVar[frozenset[str]] = frozenset()
    PARTS: ClassVar[Mapping[str, type[Record]]] = {}

    def check(self) -> None:
        """Check what the types do not say; records with more to check extend this.

        Raises:
            RecordError, ConfigError: no raftkv writes such a value.
        """

    def belongs_to(self, key: str) -> bool:
        """Return whether this is the record of a key; records that name their key extend this."""
        return True

    def encode(self) -> bytes:
        """Encode as the value of its key; fields that hold their default are left out."""
        try:
            return _encoder.encode(self.plain()).encode()
        except UnicodeEncodeError:
            raise RecordError(self.NAME, "a text in it is not Unicode: half of a surrogate pair") from None

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it: a table of what is not a default."""
        found = {}
        for attribute, name, _, default in _layout(type(self)):
            value = getattr(self, attribute)
            if attribute in self.SPOKEN:
                value = value[:SPOKEN_MAX].encode(errors="replace").decode()
            if value != default:
                found[name] = _plain(value)
        return found

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Decode the value of a key.

        Raises:
            RecordError: it holds something else.
        """
        try:
            plain = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RecordError(cls.NAME, f"{error}") from None
        return cls.from_plain(plain)

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Make the record of a JSON object.

        Raises:
            RecordError: a field is missing, or has another type.
        """
        if not isinstance(plain, dict):
            raise RecordError(cls.NAME, f"{type(plain).__name__} instead of an object")
        values: dict[str, Any] = {}
        for attribute, name, kind, default in _layout(cls):
            if name in plain:
                values[attribute] = cls.read_field(name, kind, plain[name])
            elif default is MISSING:
                raise RecordError(cls.NAME, f"{name} is missing")
        record = cls(**values)
        try:
            record.check()
        except ConfigError as error:
            raise RecordError(cls.NAME, str(error)) from None
        return record

    @classmethod
    def read_field(cls, name: str, kind: str, value: object) -> object:
        """Check the value of a field in JSON; records with fields of another kind extend this.

        Arguments:
            name: in JSON.
            kind: the annotation of the field.
            value: out of JSON.
        """
        if (part := cls.PARTS.get(name)) is not None:
            return _parts(cls.NAME, name, kind, value, part)
        checked = _checked(cls.NAME, name, kind, value)
        if kind == "int" and checked < 0 and name not in cls.SIGNED:
            raise RecordError(cls.NAME, f"{name} is {checked}")
        return checked


R = TypeVar("R", bound=Record)


def read(kind: type[R], item: KeyValue) -> R:
    """Return the record in a key.

    Raises:
        RecordError: it holds something else, or the record of another key; the text names the key.
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
    """Return the records in some keys: one that cannot be read hides no other, and is named in the log."""
    found = []
    for item in items:
        try:
            found.append(read(kind, item))
        except RecordError as error:
            _log.warning("raftkv: passed over: %s", error)
    return found


def number_in(text: str, most: int = NUMBER_MAX) -> int | None:
    """Return the whole number that a text of another client says in decimal digits; None: it is none, or larger."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(NUMBER_MAX))  # Python reads no 5000 digits
    return number if is_number and (number := int(text)) <= most else None


_layouts: Final[dict[type[Record], _Layout]] = {}


def _layout(cls: type[Record]) -> _Layout:
    """Return the layout of a class, which is made when it is first asked for."""
    known = _layouts.get(cls)
    if known is None:
        known = _layouts[cls] = tuple(
            (
                item.name,
                cls.STORED_AS.get(item.name, item.name),
                str(item.type),
                item.default if item.default_factory is MISSING else item.default_factory(),
            )
            for item in fields(cls)
        )
    return known


def _parts(record: str, name: str, kind: str, value: object, part: type[Record]) -> object:
    """Return the records in a field: one that may be absent, a tuple of them, or a table."""
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
    """Return whether a value can be used as what its type says: written, printed, and computed with."""
    if isinstance(value, str):
        return value.isascii() or not _LONE_SURROGATE.search(value)
    if isinstance(value, int | float) and (name == "time" or name.endswith("_s")):
        return abs(value) <= TIME_MAX_S  # not NaN either
    return not isinstance(value, int) or abs(value) <= NUMBER_MAX


def _numbers(value: object, kind: str) -> object:
    """Read the texts that stand for numbers which JSON has no word for."""
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
