"""Known HTTP/1.1 heads: requests and answers of a kept-alive connection repeat theirs byte for byte.

    heads = KnownHeads()
    heads.learn(head, event)            # store the result of h11 for these bytes
    heads.find(inbox)                   # the same bytes again: return that result without parsing
    response_head(200, headers)         # the output of h11 for these headers

Nothing is parsed here: equal bytes have the meaning that h11 found before. Only heads that are followed by nothing but
a body of known length are stored. An unknown head goes to h11 (``http1``), which costs ten times as much.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import h11

from raftkv.rpc.server.http import HttpHeaders

HEAD_BYTES_MAX: Final = 1024
HEADS_MAX: Final = 8
"""Heads stored per connection, each at most ``HEAD_BYTES_MAX`` long: 8 KiB."""

FIELDS_MAX: Final = 32
"""Fields of a stored head: a field of four bytes takes a hundred here."""

RESPONSE_HEADS_MAX: Final = 128
"""Answer heads stored by the process."""

_END: Final = b"\r\n\r\n"
_CHANGING: Final = frozenset((b"connection", b"expect", b"te", b"trailer", b"transfer-encoding", b"upgrade"))
"""Fields that announce more than a body, or another protocol, or nothing."""


class Head(NamedTuple):
    """A parsed head.

    Attributes:
        method, target, headers: content of the request.
        size_bytes: size of the head.
        body_bytes: size of the body that follows.
    """

    method: str
    target: str
    headers: HttpHeaders
    size_bytes: int
    body_bytes: int


class KnownHeads:
    """Heads received on one connection."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}

    def find(self, inbox: bytearray) -> Head | None:
        """Return the head at the front, if it is known and its body is complete.

        Arguments:
            inbox: begins with a request.
        """
        end = inbox.find(_END, 0, HEAD_BYTES_MAX) + len(_END)
        if end < len(_END):
            return None
        head = self._heads.get(bytes(inbox[:end]))
        return head if head is not None and len(inbox) >= end + head.body_bytes else None

    def learn(self, raw: bytes, event: h11.Request) -> Head | None:
        """Store the result of h11, if the same bytes always mean the same.

        Arguments:
            raw: head, with the empty line at its end.
            event: h11's result for exactly these bytes.
        """
        names = [name for name, _ in event.headers]
        if (
            len(names) > FIELDS_MAX
            or event.http_version != b"1.1"
            or event.method == b"CONNECT"
            or not _CHANGING.isdisjoint(names)
        ):
            return None
        if len(self._heads) >= HEADS_MAX:
            del self._heads[next(iter(self._heads))]
        lengths = [int(value) for name, value in event.headers if name == b"content-length"]
        head = self._heads[raw] = Head(
            event.method.decode("ascii"),
            event.target.decode("latin-1"),
            tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers),
            len(raw),
            lengths[0] if lengths else 0,
        )
        return head


def head_bytes(inbox: bytearray) -> bytes:
    """Return the head at the front, with the empty line at its end; empty if it is too long or incomplete.

    Arguments:
        inbox: begins with a request.
    """
    end = inbox.find(_END, 0, HEAD_BYTES_MAX)
    return bytes(inbox[: end + len(_END)]) if end >= 0 else b""


_response_heads: dict[tuple[int, HttpHeaders], bytes] = {}


def response_head(status: int, headers: HttpHeaders, reason: bytes) -> bytes:
    """Return the head of an answer, up to its Content-Length, as h11 writes and checks it.

    Arguments:
        status, headers, reason: content of the answer, without a length.

    Raises:
        h11.LocalProtocolError: the headers are invalid.
    """
    key = (status, headers)
    head = _response_heads.get(key)
    if head is None:
        scratch = h11.Connection(h11.SERVER)
        scratch.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        scratch.next_event()
        event = h11.Response(status_code=status, headers=[*headers, ("Content-Length", "0")], reason=reason)
        written = scratch.send(event) or b""
        if len(_response_heads) >= RESPONSE_HEADS_MAX:
            _response_heads.clear()
        head = _response_heads[key] = written[: written.rindex(b"0\r\n\r\n")]
    return head
