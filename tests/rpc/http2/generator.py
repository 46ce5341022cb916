"""Frames of a peer that keeps the rules, nearly keeps them, or does not: sequences for the differential.

Each seed is one connection. The generator knows which streams a peer would believe to be open, so that most frames mean
something to the state that the ones before them have made.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random

from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

from raftkv.rpc.http2 import Headers
from raftkv.rpc.http2.hpack import STATIC, number
from tests.rpc.http2.ends import HAS_PRIORITY, PADDED, PRIORITY, PUSH_PROMISE, REQUEST, RESPONSE, TRAILERS
from tests.rpc.raw import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

_PLACES = {field: place for place, field in enumerate(STATIC)}
HUFFMAN = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)

EXTRA: Headers = (
    (b"x", b"y"), (b"grpc-timeout", b"5S"), (b"content-type", b"application/grpc"), (b"user-agent", b"a b\tc"),
    (b"cookie", b"a=b"), (b"x-bin", b"\xff\x80"), (b"long", b"z" * 300), (b"empty", b""),
)  # fmt: skip
ODD: Headers = (
    (b"content-length", b"5"), (b"content-length", b"0"), (b"content-length", b"x"), (b"connection", b"close"),
    (b"te", b"gzip"), (b"X", b"y"), (b"x", b"a\nb"), (b"x", b" y"), (b"", b"y"), (b":path", b"/"),
    (b":status", b"200"), (b":foo", b"y"), (b":method", b""), (b":scheme", b"http"),
)  # fmt: skip
NUMBERS = (0, 1, 2, 100, 16_384, 65_535, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 1)


@lru_cache(maxsize=256)
def _huffman(text: bytes) -> bytes:
    octets = HUFFMAN.encode(text)
    return number(len(octets), 0x7F, 0x80) + octets


class Generator:
    """Makes the frames of one connection.

    Arguments:
        seed: of all.
        is_client: whose frames: a client's, or a server's, which answers ``asked`` streams.
        asked: ids that a client has opened.
    """

    def __init__(self, seed: int, is_client: bool, asked: tuple[int, ...] = ()) -> None:
        self._rng = Random(seed)
        self._is_client = is_client
        self._open = list(asked)
        self._begun: set[int] = set()
        self._next = 1
        self._entries = 0
        self._wild = self._rng.choice((0.0, 0.0, 0.01, 0.03, 0.2))
        self._kinds = (
            (self._request, self._body, self._body, self._body, self._trailers, self._trailers)
            + ((self._request,) * 2 if is_client else ())
            + (self._reset, self._update, self._settings, self._ping, self._other)
        )

    def frames(self, count: int) -> list[bytes]:
        """That many frames, or runs of frames that belong together."""
        return [self._one() for _ in range(count)]

    def _one(self) -> bytes:
        rng = self._rng
        is_idle = self._is_client and not self._open and rng.random() > self._wild
        made = self._request() if is_idle else rng.choice(self._kinds)()
        if rng.random() < self._wild:
            made = self._spoil(made)
        return made

    def _stream(self) -> int:
        rng = self._rng
        if self._open and rng.random() > self._wild:
            return rng.choice(self._open)
        return rng.choice((0, 1, 2, 3, 5, max(1, self._next - 2), self._next, self._next + 1, self._next + 20))

    # ---- messages

    def _request(self) -> bytes:
        rng = self._rng
        ends = rng.random() < 0.5
        if self._is_client:
            stream_id = self._next
            self._next += rng.choice((2, 2, 2, 2, 4))
            self._open.append(stream_id)
            fields: Headers = REQUEST
        else:
            stream_id = self._stream()
            if stream_id in self._begun and rng.random() > self._wild:
                return self._body()
            fields = ((b":status", b"103"),) if rng.random() < 0.1 else RESPONSE
            ends = ends and rng.random() < 0.3
            if len(fields) > 1:
                self._begun.add(stream_id)
        if ends and stream_id in self._open:
            self._open.remove(stream_id)
        return self._header(stream_id, self._fields(fields), ends)

    def _trailers(self) -> bytes:
        stream_id = self._stream()
        if self._is_early(stream_id):
            return self._request()
        if stream_id in self._open:
            self._open.remove(stream_id)
        return self._header(stream_id, self._fields(TRAILERS), self._rng.random() >= self._wild)

    def _is_early(self, stream_id: int) -> bool:
        """Whether a server would send its header first."""
        return not self._is_client and stream_id not in self._begun and self._rng.random() > self._wild / 4

    def _fields(self, fields: Headers) -> Headers:
        rng = self._rng
        found = list(fields)
        found += [rng.choice(EXTRA) for _ in range(rng.choice((0, 0, 1, 3)))]
        if rng.random() < self._wild:
            odd = ODD if fields is not TRAILERS else ODD[3:]  # nghttp2 looks at content-length even there
            found.insert(rng.randrange(len(found) + 1), rng.choice(odd))
        if rng.random() < self._wild / 2:
            del found[rng.randrange(len(found))]
        return tuple(found)

    def _header(self, stream_id: int, fields: Headers, ends: bool) -> bytes:
        rng = self._rng
        block, flags = self._block(fields), END_STREAM if ends else 0
        head = tail = b""
        if rng.random() < 0.1:
            flags |= PADDED
            tail = bytes(rng.choice((0, 1, 50)))
            head += bytes((len(tail),))
        if rng.random() < 0.1:
            flags |= HAS_PRIORITY
            head += b"\0\0\0\0\x10"
        if rng.random() < 0.9:
            return frame(HEADERS, flags | END_HEADERS, stream_id, head + block + tail)
        cuts = sorted(rng.randrange(len(block) + 1) for _ in range(rng.choice((1, 1, 2, 4))))
        pieces = [block[a:b] for a, b in zip([0, *cuts], [*cuts, len(block)], strict=True)]
        made = frame(HEADERS, flags, stream_id, head + pieces[0] + tail)
        for piece in pieces[1:-1]:
            made += frame(CONTINUATION, 0, stream_id, piece)
        return made + frame(CONTINUATION, END_HEADERS, stream_id, pieces[-1])

    def _block(self, fields: Headers) -> bytes:
        rng = self._rng
        out = []
        if rng.random() < 0.03:
            self._entries = 0
            out.append(number(rng.choice((0, 40, 100, 4096)), 0x1F, 0x20))
        for name, value in fields:
            if (name, value) in _PLACES and rng.random() < 0.8:
                out.append(bytes((0x81 + _PLACES[name, value],)))
            elif rng.random() < self._wild / 4 or (self._entries > 8 and rng.random() < 0.05):
                out.append(number(62 + rng.randrange(4), 0x7F, 0x80))  # any entry of the table
            else:
                pattern = rng.choice((0x40, 0, 0x10))
                self._entries += pattern == 0x40
                out.append(bytes((pattern,)) + self._string(name) + self._string(value))
        return b"".join(out)

    def _string(self, text: bytes) -> bytes:
        if self._rng.random() < 0.5:
            return number(len(text), 0x7F, 0) + text
        return _huffman(text)

    def _body(self) -> bytes:
        rng = self._rng
        stream_id, ends = self._stream(), rng.random() < 0.2
        if self._is_early(stream_id):
            return self._request()
        data = bytes(rng.choice((0, 1, 5, 5, 5, 100, 2000)))
        if ends and stream_id in self._open:
            self._open.remove(stream_id)
        flags = END_STREAM if ends else 0
        if rng.random() < 0.1:
            padding = rng.choice((0, 1, 200))
            return frame(DATA, flags | PADDED, stream_id, bytes((padding,)) + data + bytes(padding))
        return frame(DATA, flags, stream_id, data)

    # ---- other frames

    def _reset(self) -> bytes:
        stream_id = self._stream()
        if stream_id in self._open:
            self._open.remove(stream_id)
        return frame(RST_STREAM, 0, stream_id, self._rng.choice((0, 2, 8, 99)).to_bytes(4, "big"))

    def _update(self) -> bytes:
        rng = self._rng
        stream_id = 0 if rng.random() < 0.4 else self._stream()
        size = rng.choice(NUMBERS) if rng.random() < self._wild else rng.choice((1, 100, 65_535, 1 << 20))
        return frame(WINDOW_UPDATE, 0, stream_id, size.to_bytes(4, "big"))

    def _settings(self) -> bytes:
        rng = self._rng
        pairs = []
        for _ in range(rng.choice((0, 1, 1, 3))):
            key = rng.choice((1, 3, 4, 4, 5, 6, 99))
            value = {1: rng.choice((0, 100, 4096)), 5: 16_384, 4: rng.choice((0, 1, 100, 65_535, 1 << 20))}.get(
                key, 100
            )
            if rng.random() < self._wild:
                key, value = rng.randrange(8), rng.choice(NUMBERS)
            pairs.append(key.to_bytes(2, "big") + value.to_bytes(4, "big"))
        return frame(SETTINGS, 0, 0, b"".join(pairs))

    def _ping(self) -> bytes:
        return frame(PING, self._rng.choice((0, 0, 0, ACK)), 0, self._rng.randbytes(8))

    def _other(self) -> bytes:
        rng = self._rng
        if rng.random() < self._wild / 4:
            return frame(GOAWAY, 0, 0, rng.choice((0, 1, 5, 2**31 - 1)).to_bytes(4, "big") + bytes(4) + b"bye")
        if rng.random() < 0.3:
            return frame(PRIORITY, 0, max(1, self._stream()), bytes(4) + rng.randbytes(1))
        if rng.random() < self._wild / 4:
            return frame(PUSH_PROMISE, END_HEADERS, self._stream(), b"\0\0\0\2" + self._block(REQUEST))
        return frame(rng.choice((0x0B, 0x20, 0x77, 0xFF)), rng.randrange(256), self._stream(), rng.randbytes(3))

    def _spoil(self, made: bytes) -> bytes:
        """Change something: the length stays true, unless it is what is changed."""
        rng = self._rng
        head, payload = bytearray(made[:9]), made[9 : 9 + int.from_bytes(made[:3], "big")]
        rest = made[9 + len(payload) :]
        what = rng.randrange(8)
        if what == 0:
            head[3] = rng.randrange(12)
        elif what == 1:
            head[4] ^= 1 << rng.randrange(8)
        elif what == 2:
            head[5:9] = rng.choice((0, 1, 2, 3, self._next, 2**31 - 1, 2**31 + 1)).to_bytes(4, "big")
        elif what == 3:
            payload = payload[: rng.randrange(len(payload) + 1)]
        elif what == 4:
            payload += rng.randbytes(rng.choice((1, 1, 5)))
        elif what == 5 and payload:
            at = rng.randrange(len(payload))
            payload = payload[:at] + rng.randbytes(1) + payload[at + 1 :]
        elif what == 6:
            rest = b""
        else:
            rest += self._rng.choice((made, frame(PING, 0, 0, bytes(8))))
        return len(payload).to_bytes(3, "big") + bytes(head[3:]) + payload + rest
