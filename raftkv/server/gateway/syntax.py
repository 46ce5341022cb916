"""JSON as Go's ``encoding/json`` scans it: where a value ends, and the text of what is wrong with it.

    work = scan(b'{"key": tru}', 0)        # a generator: it pauses, so a large body does not hold the loop up
    -> JsonError: invalid character '}' in literal true (expecting 'e')

Only faults, and bodies that are large or odd, come here; usual ones are read by Python's own parser (``decoder``).
Nothing recurses, nesting is limited as in Go, and of containers only the two ends are kept.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Generator
from typing import Final

DEPTH_MAX: Final = 10_000
"""Containers within containers, as in Go."""

TOKENS_A_STEP: Final = 256
"""Tokens, of about a microsecond each, between two pauses."""

LARGE_BYTES: Final = 64 * 1024
"""Bounds what is read between pauses, up to a millisecond, also within a long string of escapes."""

Steps = Generator[None, None, "Value"]

_SPACE: Final = re.compile(rb"[ \t\r\n]*")
_ESCAPE: Final = rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
_PLAIN: Final = rb'[^"\\\x00-\x1f]*+'
_BEGIN: Final = re.compile(b'"' + _PLAIN)
_ESCAPES: Final = re.compile(b"(?:" + _ESCAPE + _PLAIN + b"){1,500}")
"""Matches some at a time: each escape is remembered, to come back to, in 180 bytes. A possessive group would remember
none, but ends in the wrong place before Python 3.11.5 (issue 106052)."""
_NUMBER: Final = re.compile(rb"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_EXPONENT: Final = re.compile(rb"[eE][+-]?")
_HEX: Final = b"0123456789abcdefABCDEF"
_LITERALS: Final = {ord("t"): b"true", ord("f"): b"false", ord("n"): b"null"}
_NUMERIC: Final = frozenset(b"-0123456789")

_OPEN: Final = {ord("{"): ord("}"), ord("["): ord("]")}


class JsonError(Exception):
    """A body that is no JSON, or not of this message; the text is Go's."""


class CutError(JsonError):
    """The body ends within a value."""

    def __init__(self) -> None:
        super().__init__("unexpected EOF")


class _LongStringError(Exception):
    """A string has more escapes than are read at once.

    Attributes:
        start: of the string.
    """

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start


class _Strings:
    """What is known of large strings.

    Attributes:
        ends: where those that were found whole end, by their starts.
        walked: where the characters end of those that were read with pauses.
    """

    __slots__ = ("ends", "walked")

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        self.walked: dict[int, int] = {}


class Value:
    """A value that was found whole.

    Attributes:
        start, end: where it lies in the body.
    """

    __slots__ = ("_ends", "_large", "_starts", "end", "start")

    def __init__(self, start: int, end: int, starts: array[int], ends: array[int], large: dict[int, int]) -> None:
        self.start = start
        self.end = end
        self._large = large
        self._starts = starts
        self._ends = ends

    def end_of(self, data: bytes, start: int) -> int:
        """Return where a value within this one ends.

        Arguments:
            data: the body.
            start: of the value.
        """
        first = data[start]
        if first in _OPEN:
            return self._ends[bisect_left(self._starts, start)]
        if first == ord('"'):
            return self._large.get(start) or _unquoted(data, start) + 1
        if first in _LITERALS:
            return start + len(_LITERALS[first])
        return _matched(_NUMBER, data, start)


def skip_space(data: bytes, at: int) -> int:
    """Return where something other than white space follows.

    Arguments:
        data: the body.
        at: where to begin.
    """
    return _matched(_SPACE, data, at)


def _matched(pattern: re.Pattern[bytes], data: bytes, at: int) -> int:
    match = pattern.match(data, at)
    return at if match is None else match.end()


def quoted(character: int) -> str:
    """Return a byte as Go's messages show it.

    >>> quoted(10), quoted(39), quoted(34), quoted(0xE4), quoted(0x80)
    ("'\\\\n'", "'\\\\\\\\''", '\\'"\\'', "'ä'", "'\\\\u0080'")
    """
    shown = {39: "\\'", 34: '"', 92: "\\\\", 7: "\\a", 8: "\\b", 12: "\\f", 10: "\\n", 13: "\\r", 9: "\\t", 11: "\\v"}
    text = shown.get(character)
    if text is None:
        if character < 0x20 or character == 0x7F:
            text = f"\\x{character:02x}"
        else:
            text = f"\\u{character:04x}" if 0x80 <= character <= 0xA0 or character == 0xAD else chr(character)
    return f"'{text}'"


def _fault(data: bytes, at: int, context: str) -> JsonError:
    if at >= len(data):
        return CutError()
    return JsonError(f"invalid character {quoted(data[at])} {context}")


def scan(data: bytes, start: int) -> Steps:
    """Find the value that begins at ``start``; what follows it is not looked at.

    Arguments:
        data: the body.
        start: of the value, not of white space before it.

    Raises:
        JsonError: there is none.
    """
    starts, ends = array("Q"), array("Q")
    numbers: list[int] = []
    """Indexes in ``starts`` of the containers that are open, the outermost first."""
    strings = _Strings()
    at = paused_at = start
    tokens = 0
    is_open = True
    """Whether a value begins next, and not what follows one."""
    while is_open or numbers:
        try:
            if is_open:
                at, is_open = _begin(data, at, numbers, starts, ends, strings)
            else:
                at, is_open = _after(data, at, numbers, starts, ends, strings)
        except _LongStringError as long:
            yield from _walk(data, long.start, strings)
            continue
        tokens += is_open
        if tokens >= TOKENS_A_STEP or at - paused_at > LARGE_BYTES:
            yield
            tokens, paused_at = 0, at
    return Value(start, at, starts, ends, strings.ends)


def _walk(data: bytes, start: int, strings: _Strings) -> Generator[None, None, None]:
    """Find where the characters of a long string end, with pauses."""
    at = paused_at = _matched(_BEGIN, data, start)
    while (more := _ESCAPES.match(data, at)) is not None:
        at = more.end()
        if at - paused_at > LARGE_BYTES:
            yield
            paused_at = at
    strings.walked[start] = at


def _begin(
    data: bytes, at: int, numbers: list[int], starts: array[int], ends: array[int], strings: _Strings
) -> tuple[int, bool]:
    """Read what begins a value; returns where to go on, and whether a value begins there."""
    at = _matched(_SPACE, data, at)
    first = data[at] if at < len(data) else -1
    if first in _OPEN:
        if len(numbers) >= DEPTH_MAX:
            raise _fault(data, at, "exceeded max depth")
        inner = _matched(_SPACE, data, at + 1)
        is_empty = inner < len(data) and data[inner] == _OPEN[first]
        following = _key(data, inner, strings) if first == ord("{") and not is_empty else inner
        numbers.append(len(starts))
        starts.append(at)
        ends.append(0)
        return (_close(inner, numbers, ends), False) if is_empty else (following, True)
    if first == ord('"'):
        return _string(data, at, strings), False
    if first in _LITERALS:
        return _literal(data, at, _LITERALS[first]), False
    if first in _NUMERIC:
        return _number(data, at), False
    raise _fault(data, at, "looking for beginning of value")


def _after(
    data: bytes, at: int, numbers: list[int], starts: array[int], ends: array[int], strings: _Strings
) -> tuple[int, bool]:
    """Read what follows a value in its container."""
    at = _matched(_SPACE, data, at)
    opening = data[starts[numbers[-1]]]
    following = data[at] if at < len(data) else -1
    if following == _OPEN[opening]:
        return _close(at, numbers, ends), False
    is_object = opening == ord("{")
    if following != ord(","):
        raise _fault(data, at, "after object key:value pair" if is_object else "after array element")
    at = _matched(_SPACE, data, at + 1)
    return (_key(data, at, strings) if is_object else at), True


def _close(at: int, numbers: list[int], ends: array[int]) -> int:
    ends[numbers.pop()] = at + 1
    return at + 1


def _key(data: bytes, at: int, strings: _Strings) -> int:
    """Read a name and its colon; returns where the value may begin."""
    if at >= len(data) or data[at] != ord('"'):
        raise _fault(data, at, "looking for beginning of object key string")
    at = _matched(_SPACE, data, _string(data, at, strings))
    if at >= len(data) or data[at] != ord(":"):
        raise _fault(data, at, "after object key")
    return at + 1


def _unquoted(data: bytes, at: int) -> int:
    """Return where what may stand in a string ends."""
    end = begun = _matched(_BEGIN, data, at)
    while (more := _ESCAPES.match(data, end)) is not None:
        end = more.end()
        if end - begun > LARGE_BYTES:
            raise _LongStringError(at)
    return end


def _string(data: bytes, at: int, strings: _Strings) -> int:
    end = strings.walked.get(at) or _unquoted(data, at)
    if end < len(data) and data[end] == ord('"'):
        if end - at >= LARGE_BYTES:
            strings.ends[at] = end + 1
        return end + 1
    if end < len(data) and data[end] == ord("\\"):
        if end + 1 >= len(data) or data[end + 1] != ord("u"):
            raise _fault(data, end + 1, "in string escape code")
        wrong = next((one for one in range(end + 2, end + 6) if one >= len(data) or data[one] not in _HEX), end + 6)
        raise _fault(data, wrong, "in \\u hexadecimal character escape")
    raise _fault(data, end, "in string literal")


def _literal(data: bytes, at: int, literal: bytes) -> int:
    for offset, expected in enumerate(literal[1:], 1):
        if at + offset >= len(data) or data[at + offset] != expected:
            context = f"in literal {literal.decode()} (expecting {quoted(expected)})"
            raise _fault(data, at + offset, context)
    return at + len(literal)


def _number(data: bytes, at: int) -> int:
    match = _NUMBER.match(data, at)
    if match is None:  # a minus alone
        raise _fault(data, at + 1, "in numeric literal")
    end = match.end()
    following = data[end] if end < len(data) else -1
    if following == ord(".") and match[1] is None and match[2] is None:
        raise _fault(data, end + 1, "after decimal point in numeric literal")
    exponent = _EXPONENT.match(data, end)
    if exponent is not None and match[2] is None:
        raise _fault(data, exponent.end(), "in exponent of numeric literal")
    return end
