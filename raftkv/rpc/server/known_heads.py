"""Heads of HTTP/1.1 that came before: on a kept-alive connection requests and answers repeat theirs byte for byte.

    heads = KnownHeads()
    heads.learn(head, event)            # what h11 has read from these bytes
    heads.find(inbox)                   # the same bytes again: what they say, without reading them anew
    response_head(200, headers)         # what h11 has written for these headers

Nothing is parsed here: equal bytes mean what h11 found them to mean, and only for heads after which nothing but a body
of known length follows. An unknown head goes to h11 (``http1``), which costs ten times as much.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import h11

from raftkv.rpc.server.http import HttpHeaders

HEAD_BYTES_MAX: Final = 1024
HEADS_MAX: Final = 8
"""Heads that a connection remembers, each of so many bytes at most: 8 KiB."""

FIELDS_MAX: Final = 32
"""Fields of a head that is remembered: one of four bytes takes a hundred here."""

RESPONSE_HEADS_MAX: Final = 128
"""Heads of answers that the process remembers."""

_END: Final = b"\r\n\r\n"
_CHANGING: Final = frozenset((b"connection", b"expect", b"te", b"trailer", b"transfer-encoding", b"upgrade"))
"""Fields after which more follows than a body, or another protocol, or nothing."""


class Head(NamedTuple):
    """The meaning of a head.

    Attributes:
        method, target, headers: of the request.
        size_bytes: of the head.
        body_bytes: that follow.
    """

    method: str
    target: str
    headers: HttpHeaders
    size_bytes: int
    body_bytes: int


class KnownHeads:
    """The heads that one connection has sent."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}

    def find(self, inbox: bytearray) -> Head | None:
        """Return what the head at the front says, if it is known and its body is whole.

        Arguments:
            inbox: begins with a request.
        """
        end = inbox.find(_END, 0, HEAD_BYTES_MAX) + len(_END)
        if end < len(_END):
            return None
        head = self._heads.get(bytes(inbox[:end]))
        return head if head is not None and len(inbox) >= end + head.body_bytes else None

    def learn(self, raw: bytes, event: h11.Request) -> Head | None:
        """Remember what h11 has read, if the same bytes always mean the same.

        Arguments:
            raw: the head, with the empty line at its end.
            event: what h11 made of exactly these bytes.
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
    """Return the head at the front, with the empty line at its end; empty if it is long or not whole.

    Arguments:
        inbox: begins with a request.
    """
    end = inbox.find(_END, 0, HEAD_BYTES_MAX)
    return bytes(inbox[: end + len(_END)]) if end >= 0 else b""


_response_heads: dict[tuple[int, HttpHeaders], bytes] = {}


def response_head(status: int, headers: HttpHeaders, reason: bytes) -> bytes:
    """Return the head of an answer, up to its Content-Length, as h11 writes and checks it.

    Arguments:
        status, headers, reason: of the answer; without a length.

    Raises:
        h11.LocalProtocolError: the headers are none.
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
