"""Flags in the syntax of etcd's command line tool: long, short, anywhere between the arguments.

Defines only the grammar, no commands: ``parse`` turns words into flag values and arguments. The rules are those of the
POSIX-style Go library under etcdctl. They differ from Python's parsers in ways that scripts depend on:

- flags may stand before, between and after the arguments; ``--`` ends them;
- ``--name=value``, ``--name value``, ``-w json``, ``-w=json``, ``-wjson``;
- a boolean takes a value only after ``=`` (``--hex=false``), never the next word;
- names cannot be abbreviated; a list flag given twice accumulates.

>>> parsed = parse([Flag("rev", INT), Flag("prefix", BOOL)], ["foo", "--rev=3", "--prefix"])
>>> parsed.values["rev"], parsed.values["prefix"], parsed.arguments
(3, True, ['foo'])
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

# -- values ---------------------------------------------------------------------------------------------------------
#
# Values in the syntax of etcd's tools (programs in Go): durations, integers, booleans, quoted strings.
#
# Defines only the text forms. Scripts pass the same values to etcd and raftkv, so these functions accept exactly what
# Go's ``time.ParseDuration``, ``strconv.ParseInt(s, 0, 64)``, ``strconv.ParseBool`` and ``strconv.Unquote`` accept, and
# print what ``Duration.String`` and ``%q`` print.
#
# >>> parse_duration_ns("1m30s"), format_duration(1_500_000)
# (90000000000, '1.5ms')
# >>> quote(b'a"\xff'), unquote('"a\\xff"')
# ('"a\\"\\xff"', b'a\xff')
#
# Text that is not UTF-8 is kept in ``str`` with surrogate escapes, as in ``sys.argv``.

_UNITS_NS = {
    "ns": 1,
    "us": 1_000,
    "\u00b5s": 1_000,  # the micro sign
    "\u03bcs": 1_000,  # the Greek letter mu
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_INT64_MAX = 2**63 - 1
_DURATION_PART = re.compile(r"([0-9]*)(\.[0-9]*)?([^0-9.]*)", re.DOTALL)
_UNDERSCORED = re.compile(r"0[_0-9a-z]*|[1-9][_0-9]*", re.IGNORECASE)
_SIMPLE_ESCAPES = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92, '"': 34}
_ESCAPE_NAMES = {7: "a", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t", 11: "v", 92: "\\", 34: '"'}


def text_bytes(text: str) -> bytes:
    """Return the user's bytes: the UTF-8 encoding, with surrogate escapes decoded to the original bytes."""
    return text.encode("utf-8", "surrogateescape")


def parse_duration_ns(text: str) -> int:
    """Parse a Go duration such as ``1h2.5s``.

    Returns:
        Nanoseconds.

    Raises:
        ValueError: the text is malformed; the message is Go's.
    """
    body = text[1:] if text[:1] in ("+", "-") else text
    sign = -1 if text.startswith("-") else 1
    if body == "0":
        return 0
    if not body:
        raise ValueError(f"time: invalid duration {quote(text)}")
    total = 0
    while body:
        match = _DURATION_PART.match(body)
        whole, fraction, unit = (match.group(1), match.group(2) or "", match.group(3)) if match else ("", "", "")
        if not whole and fraction in ("", "."):
            raise ValueError(f"time: invalid duration {quote(text)}")
        if not unit:
            raise ValueError(f"time: missing unit in duration {quote(text)}")
        if unit not in _UNITS_NS:
            raise ValueError(f"time: unknown unit {quote(unit)} in duration {quote(text)}")
        scale = _UNITS_NS[unit]
        digits = fraction[1:]
        total += int(whole or "0") * scale + (int(digits) * scale // 10 ** len(digits) if digits else 0)
        body = body[len(whole) + len(fraction) + len(unit) :]
    if total > _INT64_MAX:
        raise ValueError(f"time: invalid duration {quote(text)}")
    return sign * total


def parse_duration_s(text: str) -> float:
    """Parse a Go duration into seconds; errors as ``parse_duration_ns``."""
    return parse_duration_ns(text) / 1e9


def format_duration(nanoseconds: int) -> str:
    """Return the shortest Go form of a duration: ``0s``, ``1.5ms``, ``2m0.25s``."""
    sign, value = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    if value == 0:
        return "0s"
    for unit, scale in (("ns", 1), ("µs", 1_000), ("ms", 1_000_000)):
        if value < scale * 1000:
            return f"{sign}{_decimal(value, scale)}{unit}"
    minutes, rest = divmod(value, 60_000_000_000)
    seconds = f"{_decimal(rest, 1_000_000_000)}s"
    if minutes == 0:
        return sign + seconds
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}h{minutes}m{seconds}" if hours else f"{sign}{minutes}m{seconds}"


def _decimal(value: int, scale: int) -> str:
    whole, rest = divmod(value, scale)
    if rest == 0:
        return str(whole)
    return f"{whole}.{str(rest).zfill(len(str(scale)) - 1).rstrip('0')}"


def parse_int(text: str, *, base: int = 0, signed: bool = True) -> int:
    """Parse an integer of 64 bits as ``strconv.ParseInt`` (or ``ParseUint``) does.

    Arguments:
        text: digits; with base 0 also ``0x1f``, ``0b1``, ``0o7``, ``017`` and ``1_000``.
        base: 0, 10 or 16.
        signed: whether a minus sign is allowed.

    Raises:
        ValueError: the text is malformed or out of range; the message is Go's.
    """
    function = "ParseInt" if signed else "ParseUint"
    value = _integer(text, base, signed)
    if value is None:
        raise ValueError(f"strconv.{function}: parsing {quote(text)}: invalid syntax")
    low, high = (-(2**63), _INT64_MAX) if signed else (0, 2**64 - 1)
    if not low <= value <= high:
        raise ValueError(f"strconv.{function}: parsing {quote(text)}: value out of range")
    return value


def _integer(text: str, base: int, signed: bool) -> int | None:
    body = text[1:] if signed and text[:1] in ("+", "-") else text
    sign = -1 if signed and text.startswith("-") else 1
    if not body.isascii() or not body[:1].isalnum():
        return None
    if base != 0:
        pattern = "[0-9]+" if base == 10 else "[0-9a-fA-F]+"
        return sign * int(body, base) if re.fullmatch(pattern, body) else None
    if not _UNDERSCORED.fullmatch(body):
        return None
    if len(body) > 1 and body[0] == "0" and body[1] in "01234567_":
        body = "0o" + body[1:]
    try:
        return sign * int(body, 0)
    except ValueError:
        return None


_BOOLEANS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}


def parse_bool(text: str) -> bool:
    """Parse a boolean as ``strconv.ParseBool`` does.

    Raises:
        ValueError: the text is malformed; the message is Go's.
    """
    if text not in _BOOLEANS:
        raise ValueError(f"strconv.ParseBool: parsing {quote(text)}: invalid syntax")
    return _BOOLEANS[text]


def quote(data: bytes | str) -> str:
    """Return the ``%q`` form: double quotes, Go escapes, printable characters as they are."""
    text = data.decode("utf-8", "surrogateescape") if isinstance(data, bytes) else data
    return '"' + "".join(map(_quoted, text)) + '"'


def _quoted(character: str) -> str:
    point = ord(character)
    if 0xDC80 <= point <= 0xDCFF:  # a byte of invalid UTF-8
        return f"\\x{point - 0xDC00:02x}"
    if point in _ESCAPE_NAMES:
        return "\\" + _ESCAPE_NAMES[point]
    if character.isprintable():
        return character
    if point < 0x80:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|([abfnrtv\\\"]))|([^\\\"\n]+)", re.DOTALL
)


def unquote(literal: str) -> bytes:
    """Return the bytes of a Go string literal, in double quotes or back quotes.

    Raises:
        ValueError: ``invalid syntax``.
    """
    if len(literal) < 2 or literal[0] != literal[-1] or literal[0] not in '`"':
        raise ValueError("invalid syntax")
    body = literal[1:-1]
    if literal[0] == "`":
        if "`" in body:
            raise ValueError("invalid syntax")
        return text_bytes(body.replace("\r", ""))
    out, position = bytearray(), 0
    while position < len(body):
        match = _ESCAPE.match(body, position)
        if not match:
            raise ValueError("invalid syntax")
        out += _unescaped(match)
        position = match.end()
    return bytes(out)


def _unescaped(match: re.Match[str]) -> bytes:
    byte, short, long, octal, simple, plain = match.groups()
    if plain:
        return text_bytes(plain)
    if simple:
        return bytes([_SIMPLE_ESCAPES[simple]])
    if byte or octal:
        value = int(byte, 16) if byte else int(octal, 8)
        if value > 255:
            raise ValueError("invalid syntax")
        return bytes([value])
    point = int(short or long, 16)
    if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
        raise ValueError("invalid syntax")
    return chr(point).encode()


STRING: Final = "string"
BOOL: Final = "bool"
INT: Final = "int"
UINT: Final = "uint"
FLOAT: Final = "float"
DURATION: Final = "duration"
LIST: Final = "strings"


@dataclass(frozen=True)
class Flag:
    """One flag of a command.

    It has a name, kind, default (parsed; a duration in seconds), one line of help, short name, allowed words,
    environment variable (empty: none), and whether it is raftkv's own flag. For an own flag, an invalid value, or one
    not between ``least`` and ``most``, is refused in plain words instead of etcdctl's.
    """

    name: str
    kind: str = STRING
    default: Any = None
    usage: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    variable: str = ""
    ours: bool = False
    least: float = -math.inf
    most: float = math.inf

    @property
    def shown_default(self) -> str:
        """The default as a user would write it; empty if it is not worth showing."""
        value = self.initial()
        return self.written(value) if value or self.kind != BOOL else ""

    def written(self, value: Any) -> str:
        """Return a value of the flag as a user would write it."""
        if self.kind == DURATION:
            return format_duration(round(value * 1e9))
        if self.kind == BOOL:
            return str(value).lower()
        return ",".join(value) if self.kind == LIST else str(value)

    def initial(self) -> Any:
        """Return the value of the flag when it is not given."""
        return KINDS[self.kind].initial if self.default is None else self.default


HELP: Final = Flag("help", BOOL, short="h")
"""A flag of every command that defines no other of its names."""


class FlagError(Exception):
    """An unknown flag, or an invalid value; the text is etcdctl's."""


class HelpRequested(Exception):
    """``--help`` or ``-h`` was given."""


@dataclass
class Parsed:
    """The parsed words: the value of every flag, the names given explicitly, the arguments.

    ``before_dash`` is the number of arguments before ``--``; None without ``--``.
    """

    values: dict[str, Any]
    changed: set[str] = field(default_factory=set)
    arguments: list[str] = field(default_factory=list)
    before_dash: int | None = None


def parse_list(text: str) -> tuple[str, ...]:
    """Split one comma-separated value; double quotes protect commas.

    Raises:
        ValueError: a line ends between the quotes and the next comma, or a part is longer than 128 KiB.
    """
    if not text:
        return ()
    if '"' not in text:
        return tuple(text.split(","))
    import csv

    try:
        return tuple(next(csv.reader([text])))
    except csv.Error as error:
        raise ValueError(f"parsing {text[:64]!r}: {error}") from None


class Kind(NamedTuple):
    """A kind of flag: its parser, its value when the flag is missing, and its name in help pages and errors."""

    convert: Callable[[str], Any]
    initial: Any
    metavar: str
    words: str = ""


KINDS: Final = {
    STRING: Kind(str, "", "TEXT"),
    BOOL: Kind(parse_bool, False, "", "true or false"),
    INT: Kind(parse_int, 0, "N", "a whole number"),
    UINT: Kind(partial(parse_int, signed=False), 0, "N", "a whole number"),
    FLOAT: Kind(float, 0.0, "X", "a number"),
    DURATION: Kind(parse_duration_s, 0.0, "DURATION", "a duration such as 300ms, 1.5s or 2m"),
    LIST: Kind(parse_list, (), "LIST", "a list separated by commas"),
}


def assign(parsed: Parsed, flag: Flag, text: str) -> None:
    """Set the value of a flag.

    Arguments:
        parsed: result to update.
        flag: flag to set.
        text: value as given.

    Raises:
        ValueError: the text is not a valid value of the flag.
    """
    value = KINDS[flag.kind].convert(text)
    if flag.ours and flag.kind in (INT, UINT, FLOAT, DURATION) and not flag.least <= value <= flag.most:
        raise ValueError("value out of range")
    if flag.kind == LIST and flag.name in parsed.changed:
        value = parsed.values[flag.name] + value
    parsed.values[flag.name] = value
    parsed.changed.add(flag.name)


def parse(flags: Iterable[Flag], words: Sequence[str]) -> Parsed:
    """Parse the words of one command.

    Arguments:
        flags: flags of the command.
        words: words after the command's name.

    Raises:
        FlagError: an unknown flag, a flag without its value, or an invalid value.
        HelpRequested: ``-h`` or ``--help`` precedes any such error.
    """
    return _Parser(flags).run(words)


def did_you_mean(word: str, known: Iterable[str], dashes: str = "") -> str:
    """Return a suggestion for an unknown word, to append to the error: the similar known word, or an empty string.

    Arguments:
        word: word as given.
        known: words that would be valid.
        dashes: prefix of the suggested word.
    """
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f" (did you mean {dashes}{near[0]}?)" if near else ""


def _wanted(flag: Flag) -> str:
    least = max(flag.least, 0) if flag.kind == UINT else flag.least
    if flag.most < math.inf:
        return f"{KINDS[flag.kind].words} from {least:g} to {flag.most:g}"
    shown = format_duration(round(least * 1e9)) if flag.kind == DURATION and flag.least >= 0 else f"{least:g}"
    return KINDS[flag.kind].words + (f", {shown} or more" if least > -math.inf else "")


class _Parser:
    def __init__(self, flags: Iterable[Flag]) -> None:
        self.long = {flag.name: flag for flag in flags}
        self.short = {flag.short: flag for flag in self.long.values() if flag.short}
        self.parsed = Parsed({flag.name: flag.initial() for flag in self.long.values()})
        self.words: list[str] = []

    def run(self, words: Sequence[str]) -> Parsed:
        self.words = list(reversed(words))  # a stack: the next word is last
        while self.words:
            word = self.words.pop()
            if word == "--":
                self.parsed.before_dash = len(self.parsed.arguments)
                self.parsed.arguments += reversed(self.words)
                break
            if word.startswith("--"):
                self._long(word)
            elif word.startswith("-") and word != "-":
                self._short(word)
            else:
                self.parsed.arguments.append(word)
        return self.parsed

    def _long(self, word: str) -> None:
        name, separator, value = word[2:].partition("=")
        if not name or name.startswith("-"):
            raise FlagError(f"bad flag syntax: {word}")
        flag = self.long.get(name) or (HELP if name == HELP.name else None)
        if flag is None:
            raise FlagError(f"unknown flag: --{name}" + did_you_mean(name, self.long, "--"))
        if not separator:
            value = "true" if flag.kind == BOOL else self._next(f"flag needs an argument: --{name}")
        self._set(flag, value)

    def _short(self, word: str) -> None:
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            flag = self.short.get(letter) or (HELP if letter == HELP.short else None)
            if flag is None:
                raise FlagError(f"unknown shorthand flag: '{letter}' in -{letter}{letters}")
            if len(letters) > 1 and letters[0] == "=":
                value, letters = letters[1:], ""
            elif flag.kind == BOOL:
                value = "true"
            elif letters:
                value, letters = letters, ""
            else:
                value = self._next(f"flag needs an argument: '{letter}' in -{letter}")
            self._set(flag, value)

    def _next(self, complaint: str) -> str:
        if not self.words:
            raise FlagError(complaint)
        return self.words.pop()

    def _set(self, flag: Flag, value: str) -> None:
        try:
            if flag is not HELP:
                assign(self.parsed, flag, value)
            elif parse_bool(value):
                raise HelpRequested
        except ValueError as error:
            if flag.ours:
                raise FlagError(f"--{flag.name} must be {_wanted(flag)} (set to {value!r})") from None
            name = f"-{flag.short}, --{flag.name}" if flag.short else f"--{flag.name}"
            raise FlagError(f'invalid argument {quote(value)} for "{name}" flag: {error}') from None
