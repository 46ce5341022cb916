"""The HTTP/2 engine below gRPC: octets of either end in pieces of any size; header blocks beside hyper's ``hpack``."""

from __future__ import annotations

from collections.abc import Callable

import hpack

from raftkv.rpc.http2 import ConnectionFailedError
from raftkv.rpc.http2.hpack import Decoder, Encoder
from tests.fuzz.target import Target
from tests.rpc.http2.ends import REQUEST, RESPONSE, ClientEnd, End, ServerEnd
from tests.rpc.http2.generator import Generator

SAMPLES = 12
LIST_BYTES = 1 << 15
ASKED = (1, 3)


def _frames(make: Callable[[], End]) -> Callable[[bytes], str]:
    """Input: octets of the peer. At once and in pieces they come to the same, and no window is lost."""

    def play(data: bytes) -> str:
        whole, pieces = make(), make()
        whole.feed(data)
        pieces.feed(data, 1 + len(data) // 9)
        assert whole.verdict.split(",")[0] == pieces.verdict.split(",")[0]
        assert whole.events == pieces.events
        for end in (whole, pieces):
            connection = end.connection
            if not connection.has_failed:
                assert connection._credit + connection._returned == connection._window_bytes
            assert connection.unread_bytes <= 9 + 16_384
            assert len(connection._resets) <= 256
            assert len(connection._known) <= 64
            assert connection.queued_body_size() == 0
        return whole.verdict[:40]

    return play


def _sequences(is_client: bool) -> list[bytes]:
    made = (Generator(seed, is_client, () if is_client else ASKED).frames(12) for seed in range(SAMPLES))
    return [b"".join(frames) for frames in made]


class _Blocks:
    """Input: two header blocks of one connection, cut at the length in the first octet."""

    def __call__(self, data: bytes) -> str:
        ours, theirs = Decoder(LIST_BYTES, 1000), hpack.Decoder(max_header_list_size=LIST_BYTES)
        cut = 1 + data[0] if data else 1
        found = 0
        for block in (data[1:cut], data[cut:]):
            try:
                fields, _, is_stable = ours.decode(block)
            except ConnectionFailedError:
                self._refuses(theirs, block)
                raise
            assert [(bytes(a), bytes(b)) for a, b in theirs.decode(block, raw=True)] == [*fields]
            assert not is_stable or ours.decode(block)[0] == fields
            again = Encoder([name for name, _ in fields[:3]])
            decoder = hpack.Decoder(max_header_list_size=4 * LIST_BYTES)
            for _ in range(2):
                assert [(bytes(a), bytes(b)) for a, b in decoder.decode(again.encode(fields), raw=True)] == [*fields]
            found += len(fields)
        return str(found)

    @staticmethod
    def _refuses(theirs: hpack.Decoder, block: bytes) -> None:
        """What we refuse is refused by others too, or is a number of more octets than any client needs."""
        try:
            theirs.decode(block, raw=True)
        except (hpack.HPACKError, UnicodeDecodeError):
            return
        assert b"\x80\x80\x80\x80" in block or b"\xff\xff\xff\xff" in block, "others take it"


def _blocks() -> list[bytes]:
    maker = Generator(7, is_client=True)
    made = [(maker._block(REQUEST), maker._block(RESPONSE)) for _ in range(SAMPLES)]
    return [bytes((len(first) % 256,)) + first + second for first, second in made]


TOKENS = (
    b"\0\0\x04\x08\0\0\0\0\0\0\0\0\1", b"\0\0\0\x04\x01\0\0\0\0", b"\0\0\x06\x04\0\0\0\0\0\0\x04\x7f\xff\xff\xff",
    b"\0\0\x04\x03\0\0\0\0\1\0\0\0\x08", b"\0\0\x01\x09\x04\0\0\0\1\x82", b"\x20", b"\x3f\xe1\x1f", b"\x40\1x\1y",
    b"\xbe", b"\xff\xff\xff\xff", b"\x82\x84\x86",
)  # fmt: skip
TARGETS = (
    Target("http2-engine-server", lambda directory: _frames(ServerEnd), lambda: _sequences(True), tokens=TOKENS),
    Target("http2-engine-client", lambda directory: _frames(ClientEnd), lambda: _sequences(False), tokens=TOKENS),
    Target("hpack", lambda directory: _Blocks(), _blocks, (ConnectionFailedError,), tokens=TOKENS[5:], examples=300),
)
