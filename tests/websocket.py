"""The client side of a websocket for tests: hand-written frames of RFC 6455, and a blocking client."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import struct
from typing import Any, Final, NamedTuple

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
KEY: Final = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT: Final = base64.b64encode(hashlib.sha1(KEY.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()).decode()
MASK: Final = b"\x12\x34\x56\x78"
TIMEOUT_S: Final = 90.0

HANDSHAKE: Final = (
    ("host", "localhost"),
    ("upgrade", "websocket"),
    ("connection", "Upgrade"),
    ("sec-websocket-key", KEY),
    ("sec-websocket-version", "13"),
)


def handshake(path: str, *more: tuple[str, str]) -> bytes:
    """Return the bytes of a handshake; a repeated header replaces the first one."""
    fields = {**dict(HANDSHAKE), **dict(more)}
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value), "", ""]
    return "\r\n".join(lines).encode()


def frame(kind: int, payload: bytes = b"", *, is_final: bool = True, mask: bytes = MASK) -> bytes:
    """Return one frame; an empty mask: unmasked."""
    size, masked = len(payload), 0x80 if mask else 0
    if size < 126:
        length = bytes((masked | size,))
    elif size < 1 << 16:
        length = struct.pack(">BH", masked | 126, size)
    else:
        length = struct.pack(">BQ", masked | 127, size)
    if mask:
        payload = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return bytes((kind | (0x80 if is_final else 0),)) + length + mask + payload


class Frame(NamedTuple):
    """A frame of the server."""

    kind: int
    is_final: bool
    payload: bytes


def take_frame(data: bytes) -> tuple[Frame, bytes] | None:
    """Return the first frame and the bytes after it; None: it is incomplete."""
    if len(data) < 2:
        return None
    assert not data[0] & 0x70
    assert not data[1] & 0x80, "servers mask nothing"
    size, at = data[1], 2
    if size > 125:
        length = struct.Struct(">H" if size == 126 else ">Q")
        at += length.size
        if len(data) < at:
            return None
        (size,) = length.unpack_from(data, 2)
    if len(data) < at + size:
        return None
    return Frame(data[0] & 15, bool(data[0] & 0x80), data[at : at + size]), data[at + size :]


def close_code(frame: Frame) -> int:
    """Return the reason of a close frame."""
    assert frame.kind == CLOSE
    return int.from_bytes(frame.payload[:2], "big")


class Client:
    """A websocket to a server."""

    def __init__(self, host: str, port: int, path: str, *more: tuple[str, str]) -> None:
        self._socket = socket.create_connection((host, port), TIMEOUT_S)
        self._socket.sendall(handshake(path, *more))
        self._data = b""
        while b"\r\n\r\n" not in self._data:
            self._read()
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        self.status = int(status.split()[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    def _read(self) -> None:
        data = self._socket.recv(65536)
        if not data:
            raise EOFError(self._data)
        self._data += data

    def send(self, message: Any) -> None:
        """Send a JSON message."""
        self.send_frame(TEXT, json.dumps(message).encode())

    def send_frame(self, kind: int, payload: bytes = b"", **how: Any) -> None:
        """Send a frame."""
        self._socket.sendall(frame(kind, payload, **how))

    def frame(self) -> Frame:
        """Return the server's next frame."""
        while (found := take_frame(self._data)) is None:
            self._read()
        self._data = found[1]
        return found[0]

    def receive(self) -> Any:
        """Return the server's next JSON message."""
        parts = [self.frame()]
        while not parts[-1].is_final:
            parts.append(self.frame())
        assert parts[0].kind == TEXT, parts[0]
        return json.loads(b"".join(part.payload for part in parts))

    def close(self) -> None:
        """Close the connection without a close frame."""
        self._socket.close()
