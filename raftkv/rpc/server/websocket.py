"""WebSockets on the HTTP/1.1 port (RFC 6455): the server half of one, without its connection.

    refusal = handshake_refusal(request)       # None: the handshake is valid
    socket = WebSocket(limit_bytes)
    HttpResponse(101, lines, accepted(request), socket=socket)

    while socket.read_frame(inbox):            # for the connection (``http1``): takes one frame off the front
        send(socket.take_control())            # pongs, and the final close frame
    send(socket.frame(b"{}\\n"))                # a message, whole or in pieces; a line feed ends the last piece
    await socket.take()                        # for the handler: the client's next message, None at the end

Invariants:

1. A message, whole or in fragments, has at most ``limit_bytes``. The limit is checked before the message has arrived.
2. While that many bytes of messages wait for the handler, no frame is read, and thus in the end no socket.
3. At most one pong waits: a client that pings and reads nothing gets the answer to its newest ping.
4. After either side's close frame no frame is read or written.

Leaves out: extensions (such as compression) and pings by the server: the kernel probes the client's machine.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

from raftkv.loop.cycle_free import nothing
from raftkv.rpc.server.http import HttpHeaders, HttpRequest, HttpResponse

VERSION: Final = "13"
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_FINAL: Final = 0x80
_MASKED: Final = 0x80
_MASK_BYTES: Final = 4
_CONTROL_BYTES_MAX: Final = 125
_TWO_BYTES, _EIGHT_BYTES = struct.Struct(">H"), struct.Struct(">Q")

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
PROTOCOL_ERROR: Final = 1002
NOT_TEXT: Final = 1007
POLICY: Final = 1008
TOO_LARGE: Final = 1009

FRAGMENTS_MAX: Final = 4096
"""Frames of one message: a client that sends 1 MiB in writes of 256 bytes needs this many."""

KEPT_BYTES: Final = 64
"""Memory of a waiting message beyond its bytes."""


def is_handshake(request: HttpRequest) -> bool:
    """Return whether a request is a websocket handshake, valid or not.

    Arguments:
        request: any request.
    """
    upgrades = request.header("upgrade").lower().split(",")
    return request.method == "GET" and "websocket" in map(str.strip, upgrades)


def handshake_refusal(request: HttpRequest) -> HttpResponse | None:
    """Return the answer to an invalid handshake, which is etcd's; None: the handshake is valid.

    Arguments:
        request: a websocket handshake.
    """
    is_sound = request.can_switch and request.header("sec-websocket-key").strip() != ""
    if is_sound and request.header("sec-websocket-version").strip() == VERSION:
        return None
    fields = (("content-type", "text/plain; charset=utf-8"), ("sec-websocket-version", VERSION))
    return HttpResponse(400, b"Bad Request\n", (*fields, ("x-content-type-options", "nosniff")))


def accepted(request: HttpRequest) -> HttpHeaders:
    """Return the headers that accept a handshake.

    Arguments:
        request: valid handshake.
    """
    digest = hashlib.sha1(request.header("sec-websocket-key").strip().encode("latin-1") + _GUID, usedforsecurity=False)
    fields = (("upgrade", "websocket"), ("connection", "Upgrade"))
    return (*fields, ("sec-websocket-accept", base64.b64encode(digest.digest()).decode()))


class _FaultError(Exception):
    """The client broke the protocol.

    Attributes:
        code: code of the close frame.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class WebSocket:
    """One websocket, after its handshake.

    Arguments:
        limit_bytes: limit on one message of the client, and on all messages that wait for the handler.

    Attributes:
        held_bytes: bytes of messages that wait for the handler, and of an unfinished message.
        is_over: whether one side has closed: nothing more is read or written.
        on_taken: called when the handler has taken a message.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.held_bytes = 0
        self.is_over = False
        self.on_taken: Callable[[], None] = nothing
        self._limit_bytes = limit_bytes
        self._messages: deque[bytes] = deque()
        self._begun = bytearray()
        self._fragments = 0
        """Frames of the unfinished message; 0: there is none."""
        self._is_text = False
        self._control = b""
        self._is_answering = False
        self._waiter: asyncio.Future[None] | None = None

    # ---- input

    @property
    def is_full(self) -> bool:
        """Whether so much waits for the handler that nothing more is read."""
        return self.held_bytes - len(self._begun) >= self._limit_bytes

    def read_frame(self, inbox: bytearray) -> bool:
        """Take one frame off the front.

        Arguments:
            inbox: received bytes that have not been read.

        Returns:
            False: no complete frame is there, none may be read now, or the websocket has ended.
        """
        if self.is_over or self.is_full:
            return False
        try:
            return self._read_frame(inbox)
        except _FaultError as fault:
            self._end(fault.code, str(fault))
            return True

    def _read_frame(self, inbox: bytearray) -> bool:
        if len(inbox) < 2:
            return False
        head, short = inbox[0], inbox[1]
        kind, size, at = head & 0x0F, short & ~_MASKED, 2
        if head & 0x70:
            raise _FaultError(PROTOCOL_ERROR, "RSV bits are set")
        if not short & _MASKED:
            raise _FaultError(PROTOCOL_ERROR, "incorrect mask flag")
        if kind >= _CLOSE and (not head & _FINAL or size > _CONTROL_BYTES_MAX):
            raise _FaultError(PROTOCOL_ERROR, "a long or fragmented control frame")
        if size > _CONTROL_BYTES_MAX:
            length = _TWO_BYTES if size == _CONTROL_BYTES_MAX + 1 else _EIGHT_BYTES
            if len(inbox) < at + length.size:
                return False
            (size,) = length.unpack_from(inbox, at)
            at += length.size
        if kind < _CLOSE and len(self._begun) + size > self._limit_bytes:
            raise _FaultError(TOO_LARGE, f"a message of more than {self._limit_bytes} bytes")
        end = at + _MASK_BYTES + size
        if len(inbox) < end:
            return False
        payload = _unmasked(inbox[at + _MASK_BYTES : end], inbox[at : at + _MASK_BYTES])
        del inbox[:end]
        if kind < _CLOSE:
            self._on_data(kind, payload, bool(head & _FINAL))
        else:
            self._on_control(kind, payload)
        return True

    def _on_data(self, kind: int, payload: bytes, is_final: bool) -> None:
        if kind > _BINARY or (kind == _CONTINUATION) != bool(self._fragments):
            raise _FaultError(PROTOCOL_ERROR, f"unexpected opcode {kind}")
        if kind != _CONTINUATION:
            self._is_text = kind == _TEXT
        self._fragments += 1
        if self._fragments > FRAGMENTS_MAX:
            raise _FaultError(POLICY, f"a message of more than {FRAGMENTS_MAX} frames")
        self._begun += payload
        self.held_bytes += len(payload)
        if is_final:
            self._queue()

    def _queue(self) -> None:
        if self._is_text:
            try:
                self._begun.decode()
            except UnicodeDecodeError:
                raise _FaultError(NOT_TEXT, "a text that is not UTF-8") from None
        message, self._begun, self._fragments = bytes(self._begun), bytearray(), 0
        self._messages.append(message)
        self.held_bytes += KEPT_BYTES
        self._wake()

    def _on_control(self, kind: int, payload: bytes) -> None:
        if kind == _PING:
            self._control = _frame(_PONG, payload)
        elif kind == _CLOSE:
            code = _TWO_BYTES.unpack_from(payload)[0] if len(payload) >= _TWO_BYTES.size else NORMAL
            is_known = code in range(1000, 1004) or code in range(1007, 1015) or code in range(3000, 5000)
            self._end(code if is_known and len(payload) != 1 else PROTOCOL_ERROR)
        elif kind != _PONG:
            raise _FaultError(PROTOCOL_ERROR, f"unexpected opcode {kind}")

    async def take(self) -> bytes | None:
        """Wait for the client's next message.

        Returns:
            The message; None: there are no more messages.
        """
        while not self._messages:
            if self.is_over:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None  # a cancelled future holds the frame that refers to this
        message = self._messages.popleft()
        self.held_bytes -= len(message) + KEPT_BYTES
        self.on_taken()
        return message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- output

    def take_control(self) -> bytes:
        """Return pending control frames: a pong, or the close frame."""
        control, self._control = self._control, b""
        return control

    def frame(self, piece: bytes) -> bytes:
        """Return the frame of a text message, or of a part of one.

        Arguments:
            piece: not empty; a trailing line feed ends the message and is not sent.
        """
        is_last = piece.endswith(b"\n")
        kind = _CONTINUATION if self._is_answering else _TEXT
        self._is_answering = not is_last
        return _frame(kind, piece[:-1] if is_last else piece, is_last)

    def close(self, code: int) -> None:
        """Close from this side; ``take_control`` returns the close frame.

        Arguments:
            code: close code of RFC 6455 section 7.4.
        """
        if not self.is_over:
            self._end(code)

    def _end(self, code: int, reason: str = "") -> None:
        self.is_over = True
        self.held_bytes -= len(self._begun)
        self._begun = bytearray()
        self._control = _frame(_CLOSE, _TWO_BYTES.pack(code) + reason.encode())
        self._wake()


def _unmasked(payload: bytearray, mask: bytearray) -> bytes:
    """Unmask a client's payload as one large number, a hundred times faster than byte by byte."""
    size = len(payload)
    key = int.from_bytes((bytes(mask) * (size // _MASK_BYTES + 1))[:size], "little")
    return (int.from_bytes(payload, "little") ^ key).to_bytes(size, "little")


def _frame(kind: int, payload: bytes, is_final: bool = True) -> bytes:
    size, head = len(payload), kind | (_FINAL if is_final else 0)
    if size <= _CONTROL_BYTES_MAX:
        return bytes((head, size)) + payload
    if size < 1 << 16:
        return bytes((head, _CONTROL_BYTES_MAX + 1)) + _TWO_BYTES.pack(size) + payload
    return bytes((head, _CONTROL_BYTES_MAX + 2)) + _EIGHT_BYTES.pack(size) + payload
