"""The static table of HPACK (RFC 7541 appendix A), and a dynamic one (section 2.3.2)."""

from __future__ import annotations

from collections import deque
from typing import Final

Field = tuple[bytes, bytes]
"""Name and value of one header field."""

FIELD_BYTES: Final = 32
"""What an entry counts beside its octets (RFC 7541 section 4.1)."""

CAPACITY_BYTES: Final = 4096
"""Size of a dynamic table, until SETTINGS_HEADER_TABLE_SIZE changes it (RFC 9113 section 6.5.2). We never raise it."""

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
"""Entry 1 is the first of them."""

FIRST_DYNAMIC: Final = len(STATIC) + 1


class DynamicTable:
    """The newest entry comes first; the oldest go when there is no room.

    Attributes:
        entries: the newest first.
        size_bytes: of all, as section 4.1 counts them.
        capacity_bytes: most that ``size_bytes`` may be.
    """

    __slots__ = ("capacity_bytes", "entries", "size_bytes")

    def __init__(self) -> None:
        self.entries: deque[Field] = deque()
        self.size_bytes = 0
        self.capacity_bytes = CAPACITY_BYTES

    def insert(self, field: Field) -> int:
        """Add an entry; one that is larger than the table empties it (section 4.4).

        Arguments:
            field: the new entry.

        Returns:
            How many entries had to go.
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
            capacity_bytes: the new one.

        Returns:
            How many entries had to go.
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
