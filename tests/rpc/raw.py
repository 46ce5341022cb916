"""A hostile HTTP/2 client: frames written by hand, on a plain socket, and what the server says to them."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field

import ngh2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4

GRPC_HEADERS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/test.Echo/Hang"),
    (b":authority", b"x"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def _integer(value: int, bits: int) -> bytes:
    top = (1 << bits) - 1
    if value < top:
        return bytes((value,))
    out, value = [top], value - top
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes((*out, value))


def header_block(fields: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """HPACK, each field a literal that is not indexed."""
    return b"".join(b"\0" + _integer(len(n), 7) + n + _integer(len(v), 7) + v for n, v in fields)


def headers(stream_id: int, fields: tuple[tuple[bytes, bytes], ...] = GRPC_HEADERS, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags, stream_id, header_block(fields))


def grpc_headers(path: str, *extra: tuple[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((n, path.encode() if n == b":path" else v) for n, v in GRPC_HEADERS) + extra


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def reset(stream_id: int, code: int = 8) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def message(stream_id: int, body: bytes, flags: int = 0) -> bytes:
    return frame(DATA, flags, stream_id, body)


def decode_block(block: bytes) -> dict[bytes, bytes]:
    """Decode the first header block of a connection (an empty dynamic table is assumed)."""
    client = ngh2.Connection(ngh2.Role.CLIENT)
    client.initiate_connection()
    stream_id = client.send_request(GRPC_HEADERS, end_stream=True)
    client.data_to_send()
    client.receive_data(settings() + frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block))
    (response,) = [event for event in client.events() if isinstance(event, ngh2.ResponseReceived)]
    return dict(response.headers)


def decode_headers(frames: list[tuple[int, int, int, bytes]]) -> dict[int, dict[bytes, bytes]]:
    """Decode the last header block of each stream out of all frames of a connection, in the order they came."""
    client = ngh2.Connection(ngh2.Role.CLIENT)
    client.initiate_connection()
    for _ in range(max(stream_id for _, _, stream_id, _ in frames) // 2 + 1):
        client.send_request(GRPC_HEADERS, end_stream=True)
    client.data_to_send()
    client.receive_data(settings())
    found: dict[int, dict[bytes, bytes]] = {}
    for kind, flags, stream_id, payload in frames:
        if kind == HEADERS:
            client.receive_data(frame(kind, flags, stream_id, payload))
            for event in client.events():
                if isinstance(event, ngh2.ResponseReceived | ngh2.TrailersReceived):
                    found[event.stream_id] = dict(event.headers)
    return found


@dataclass
class RawClient:
    """A connection whose frames the test writes and reads itself."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    frames: list[tuple[int, int, int, bytes]] = field(default_factory=list)

    @classmethod
    async def connect(cls, target: str, first: bytes | None = None, local_host: str | None = None) -> RawClient:
        host, _, port = target.rpartition(":")
        local = None if local_host is None else (local_host, 0)
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=local)
        client = cls(reader, writer)
        client.send(PREFACE + settings() + frame(SETTINGS, ACK, 0) if first is None else first)
        return client

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def next_frame(self) -> tuple[int, int, int, bytes]:
        """Return kind, flags, stream and payload; EOFError when the server has closed."""
        try:
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error
        got = (head[3], head[4], int.from_bytes(head[5:9], "big"), payload)
        self.frames.append(got)
        return got

    async def until_frame(self, kind: int, stream_id: int | None = None) -> tuple[int, int, int, bytes]:
        while True:
            got = await self.next_frame()
            if got[0] == kind and stream_id in (None, got[2]):
                return got

    async def until_closed(self) -> None:
        """Read to the end of the connection."""
        try:
            while True:
                await self.next_frame()
        except EOFError:
            pass

    @property
    def goaway(self) -> tuple[int, bytes] | None:
        """Error code and debug data of the last GOAWAY read."""
        for kind, _, _, payload in reversed(self.frames):
            if kind == GOAWAY:
                return int.from_bytes(payload[4:8], "big"), payload[8:]
        return None

    def close(self) -> None:
        self.writer.transport.abort()
