"""One stream of a connection (RFC 9113 section 5.1), and what waits to be sent on it."""

from __future__ import annotations

from collections import deque

from raftkv.rpc.http2.hpack import Headers


class Stream:
    """A stream that is open, or closed by one end only.

    Attributes:
        credit: body octets that the peer may still send (section 5.2).
        send_extra: body octets that we may still send, beyond what the peer's SETTINGS_INITIAL_WINDOW_SIZE is now.
            That setting moves the windows of all streams (section 6.9.2): so it costs nothing a stream.
        returned: octets that were taken and of which the peer does not know yet.
        content_left: body octets that are to come as content-length has it; None: it says nothing.
        has_headers: the first header of the peer's message has come, those of 1xx aside.
        is_remote_closed: the peer sends nothing more.
        is_local_closed: we send nothing more; what waits in ``outbox`` goes first.
        outbox: what waits; None: nothing does.
    """

    __slots__ = (
        "content_left",
        "credit",
        "has_headers",
        "is_local_closed",
        "is_remote_closed",
        "outbox",
        "returned",
        "send_extra",
        "stream_id",
    )

    def __init__(self, stream_id: int, credit: int) -> None:
        self.stream_id = stream_id
        self.credit = credit
        self.send_extra = 0
        self.returned = 0
        self.content_left: int | None = None
        self.has_headers = False
        self.is_remote_closed = False
        self.is_local_closed = False
        self.outbox: Outbox | None = None


class Outbox:
    """Output that waits: a header block, body octets in the pieces in which they came, and what ends them.

    Attributes:
        head: fields of a header block that goes before the octets; None: it has left.
        size_bytes: of all pieces.
        trailers: fields to send after them; None: an empty DATA frame ends the stream, or nothing yet.
        ends: whether the stream ends after them.
    """

    __slots__ = ("_at", "_pieces", "ends", "head", "size_bytes", "trailers")

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._at = 0
        self.head: Headers | None = None
        self.size_bytes = 0
        self.trailers: Headers | None = None
        self.ends = False

    def add(self, piece: bytes) -> None:
        """Queue a piece; it is kept whole until its last octet is taken."""
        if piece:
            self._pieces.append(piece)
            self.size_bytes += len(piece)

    def take(self, size_bytes: int) -> bytes:
        """Take so many octets, which are there."""
        self.size_bytes -= size_bytes
        parts: list[bytes] = []
        while size_bytes:
            piece = self._pieces[0]
            part = piece[self._at : self._at + size_bytes]
            size_bytes -= len(part)
            self._at += len(part)
            if self._at == len(piece):
                self._pieces.popleft()
                self._at = 0
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def drop_some(self, size_bytes: int) -> int:
        """Drop pieces of so many octets, or of a few more; returns how many."""
        before = self.size_bytes
        while self.size_bytes and before - self.size_bytes < size_bytes:
            self.drop()
        return before - self.size_bytes

    def drop(self) -> int:
        """Drop the first piece; returns how many octets of it were left."""
        freed = len(self._pieces.popleft()) - self._at
        self._at = 0
        self.size_bytes -= freed
        return freed
