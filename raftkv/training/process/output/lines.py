"""Lines out of pieces of bytes. Pure.

>>> lines = Lines()
>>> lines.feed(b"one\\ntw"), lines.feed(b"o\\r\\n"), lines.rest()
([b'one'], [b'two'], [])
>>> lines.feed(b"\\r 10%\\r 20%"), lines.rest()          # a progress bar: each of its states is a line
([b' 10%'], [b' 20%'])
"""

from __future__ import annotations

import re
from typing import Final

LINE_MAX_BYTES: Final = 64 * 1024
"""A longer line is passed on in parts: it must not be kept whole in memory."""

_END: Final = re.compile(rb"(\r\n|\r|\n)")


class Lines:
    """Cuts the bytes of one stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._returned = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without their ends."""
        if self._returned and data[:1] == b"\n":
            data = data[1:]  # the other half of a \r\n whose line was passed on
        if data:
            self._returned = False
        *pairs, self._rest = _END.split(self._rest + data)
        found = []
        for text, end in zip(pairs[::2], pairs[1::2], strict=True):
            if text or end != b"\r":  # a progress bar begins with a return: there is nothing before it
                found.append(text)
        if pairs and not self._rest and pairs[-1] == b"\r":
            self._returned = bool(pairs[-2])
            self._rest = b"" if self._returned else b"\r"  # an empty line if \n follows, nothing otherwise
        while len(self._rest) > LINE_MAX_BYTES:
            found.append(self._rest[:LINE_MAX_BYTES])
            self._rest = self._rest[LINE_MAX_BYTES:]
        return found

    def rest(self) -> list[bytes]:
        """Return what is left at the end of the stream: a line without its end, or nothing."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest] if rest else []
