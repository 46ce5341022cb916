"""RFC 9113 sections 3.4, 4 and 6: what each frame must be, as a server and as a client meet it."""

from __future__ import annotations

import pytest

from raftkv.rpc.http2 import PREFACE
from tests.rpc.http2.ends import (
    HAS_PRIORITY,
    PADDED,
    PRIORITY,
    PUSH_PROMISE,
    REQUEST,
    RESPONSE,
    SETTLED,
    TRAILERS,
    ClientEnd,
    Row,
    ServerEnd,
    ending,
    headers,
    judge,
)
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
    header_block,
    settings,
)

BLOCK = header_block(REQUEST)
PROTOCOL, SIZE, FLOW = "connection PROTOCOL_ERROR", "connection FRAME_SIZE_ERROR", "connection FLOW_CONTROL_ERROR"
COMPRESSION, CALM = "connection COMPRESSION_ERROR", "connection ENHANCE_YOUR_CALM"
PRIORITY_UPDATE = 16

EITHER = [
    Row("4.1: an unknown kind is left alone", frame(0x77, 0xFF, 0, b"any"), "taken", ()),
    Row("4.1: so on a stream", frame(0xFE, 0, 1, bytes(100)), "taken", ()),
    Row("4.1: so on a stream that is idle", frame(0xFE, 0, 999, b""), "taken", ()),
    Row("4.1: the reserved bit is left alone", frame(PING, 0, 1 << 31, bytes(8)), "taken", (("ping",),)),
    Row("4.1: flags that a kind does not have are left alone", frame(PING, 0xFE, 0, bytes(8)), "taken", (("ping",),)),
    Row("4.2: the largest frame is taken", frame(0x77, 0, 0, bytes(16_384)), "taken", ()),
    Row("4.2: a larger one is not", frame(0x77, 0, 0, bytes(16_385)), SIZE),
    Row("4.2: it is seen by its head alone", frame(DATA, 0, 1, bytes(16_385))[:9], SIZE),
    Row("4.2: so the largest head", b"\xff" * 9, SIZE),
    Row("6.1: DATA of stream 0", frame(DATA, 0, 0, b"x"), PROTOCOL),
    Row("6.2: HEADERS of stream 0", frame(HEADERS, END_HEADERS, 0, BLOCK), PROTOCOL),
    Row("6.3: PRIORITY of stream 0", frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL),
    Row("6.3: PRIORITY of an idle stream", frame(PRIORITY, 0, 77, bytes(5)), "taken", ()),
    Row("6.3: PRIORITY on itself is left alone", frame(PRIORITY, 0, 77, b"\0\0\0\x4d\1"), "taken", ()),
    Row("6.3: a size that is not 5, of an idle stream, which takes no RST_STREAM", frame(PRIORITY, 0, 77, b"x"), SIZE),
    Row("6.4: RST_STREAM of stream 0", frame(RST_STREAM, 0, 0, bytes(4)), PROTOCOL),
    Row("6.4: RST_STREAM of an idle stream", frame(RST_STREAM, 0, 77, bytes(4)), PROTOCOL),
    Row("6.4: RST_STREAM of 3 octets", frame(RST_STREAM, 0, 1, bytes(3)), SIZE),
    Row("6.4: RST_STREAM of 5 octets", frame(RST_STREAM, 0, 1, bytes(5)), SIZE),
    Row("6.5: SETTINGS of a stream", frame(SETTINGS, 0, 1), PROTOCOL),
    Row("6.5: an acknowledgement with octets", frame(SETTINGS, ACK, 0, bytes(6)), SIZE),
    Row("6.5: SETTINGS of 5 octets", frame(SETTINGS, 0, 0, bytes(5)), SIZE),
    Row("6.5: SETTINGS of 7 octets", frame(SETTINGS, 0, 0, bytes(7)), SIZE),
    Row("6.5.3: an acknowledgement without cause", frame(SETTINGS, ACK, 0), PROTOCOL),
    Row("6.5.2: an unknown setting is left alone", settings((0x4242, 7)), "taken", (("settings",),)),
    Row("6.5.2: ENABLE_PUSH 2", settings((2, 2)), PROTOCOL),
    Row("6.5.2: ENABLE_PUSH 0", settings((2, 0)), "taken"),
    Row("6.5.2: INITIAL_WINDOW_SIZE 2^31", settings((4, 1 << 31)), FLOW),
    Row("6.5.2: INITIAL_WINDOW_SIZE 2^32-1", settings((4, 2**32 - 1)), FLOW),
    Row("6.5.2: INITIAL_WINDOW_SIZE 2^31-1 and 0", settings((4, 2**31 - 1), (4, 0)), "taken"),
    Row("6.5.2: MAX_FRAME_SIZE 16,383", settings((5, 16_383)), PROTOCOL),
    Row("6.5.2: MAX_FRAME_SIZE 2^24", settings((5, 1 << 24)), PROTOCOL),
    Row("6.5.2: MAX_FRAME_SIZE at both ends", settings((5, 16_384), (5, 2**24 - 1)), "taken"),
    Row("6.5.2: others have no bounds", settings((1, 2**32 - 1), (3, 0), (6, 0), (6, 2**32 - 1)), "taken"),
    Row("6.5.3: a value twice, in order", settings((5, 2**24 - 1), (5, 0)), PROTOCOL),
    Row("6.6: PUSH_PROMISE", frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2" + BLOCK), PROTOCOL),
    Row("6.7: PING of a stream", frame(PING, 0, 1, bytes(8)), PROTOCOL),
    Row("6.7: PING of 7 octets", frame(PING, 0, 0, bytes(7)), SIZE),
    Row("6.7: PING of 9 octets", frame(PING, 0, 0, bytes(9)), SIZE),
    Row("6.7: an answer is not answered", frame(PING, ACK, 0, b"abcdefgh"), "taken", ()),
    Row("6.8: GOAWAY of a stream", frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    Row("6.8: GOAWAY of 7 octets", frame(GOAWAY, 0, 0, bytes(7)), SIZE),
    Row("6.8: an unknown code", frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff\0\0\1\0x"), "taken"),
    Row("6.9: WINDOW_UPDATE of 3 octets", frame(WINDOW_UPDATE, 0, 0, bytes(3)), SIZE),
    Row("6.9: WINDOW_UPDATE of 5 octets", frame(WINDOW_UPDATE, 0, 1, bytes(5)), SIZE),
    Row("6.9: by 0, of the connection", frame(WINDOW_UPDATE, 0, 0, bytes(4)), PROTOCOL),
    Row("6.9: by 0 and a reserved bit", frame(WINDOW_UPDATE, 0, 0, b"\x80\0\0\0"), PROTOCOL),
    Row("6.9: of an idle stream", frame(WINDOW_UPDATE, 0, 77, b"\0\0\0\1"), PROTOCOL),
    Row("6.10: CONTINUATION of nothing", frame(CONTINUATION, END_HEADERS, 1, b""), PROTOCOL),
    Row("6.10: CONTINUATION of stream 0", frame(CONTINUATION, END_HEADERS, 0, b""), PROTOCOL),
    Row("9218 7.1: PRIORITY_UPDATE of a stream", frame(PRIORITY_UPDATE, 0, 1, b"\0\0\0\1u=1"), PROTOCOL),
    Row("9218 7.1: PRIORITY_UPDATE", frame(PRIORITY_UPDATE, 0, 0, b"\0\0\0\1u=1"), "taken", ()),
]
"""Stream 1 is closed or half-closed at the client, and idle at the server, for all of these."""

_PADDED = frame(DATA, PADDED, 1, b"\3abc\0\0\0")
_WITH_PRIORITY = frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, b"\0\0\0\0\x10" + BLOCK)
_ALL = frame(HEADERS, END_HEADERS | HAS_PRIORITY | PADDED, 1, b"\4" + b"\0\0\0\1\x10" + BLOCK + bytes(4))
_TAKEN = (("request", 1, REQUEST, False),)


def _cut(*sizes: int, flags: int = 0) -> bytes:
    """A request in a HEADERS frame and so many CONTINUATION frames."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(BLOCK[at : at + size])
        at += size
    pieces.append(BLOCK[at:])
    middle = [frame(CONTINUATION, 0, 1, piece) for piece in pieces[1:-1]]
    last = frame(CONTINUATION, END_HEADERS, 1, pieces[-1])
    return frame(HEADERS, flags, 1, pieces[0]) + b"".join(middle) + last


AT_SERVER = [
    Row("6.1: padding is no content", headers(1) + _PADDED, "taken", (*_TAKEN, ("data", 1, b"abc", False))),
    Row("6.1: nothing but padding", headers(1) + frame(DATA, PADDED, 1, b"\2\0\0"), "taken"),
    Row("6.1: as much padding as payload", headers(1) + frame(DATA, PADDED, 1, b"\3\0\0"), PROTOCOL),
    Row("6.1: more padding than payload", headers(1) + frame(DATA, PADDED, 1, b"\xffabc"), PROTOCOL),
    Row("4.2: too small for a length of padding", headers(1) + frame(DATA, PADDED, 1), SIZE),
    Row("6.1: DATA without octets", headers(1) + frame(DATA, 0, 1), "taken", (*_TAKEN, ("data", 1, b"", False))),
    Row("6.2: a priority is left alone", _WITH_PRIORITY, "taken", _TAKEN),
    Row("6.2: priority and padding", _ALL, "taken", _TAKEN),
    Row("6.2: padding that leaves nothing", frame(HEADERS, END_HEADERS | PADDED, 1, b"\x05abcd"), PROTOCOL),
    Row("6.2: padding beyond what priority leaves", frame(HEADERS, END_HEADERS | 40, 1, b"\6" + bytes(10)), PROTOCOL),
    Row("4.2: too small for a length of padding", frame(HEADERS, END_HEADERS | PADDED, 1), SIZE),
    Row("4.2: too small for a priority", frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, bytes(4)), SIZE),
    Row("4.2: too small for both", frame(HEADERS, END_HEADERS | HAS_PRIORITY | PADDED, 1, bytes(5)), SIZE),
    Row("6.2: END_STREAM", ending(1), "taken", (("request", 1, REQUEST, True),)),
    Row("6.3: a size that is not 5", headers(1) + frame(PRIORITY, 0, 1, bytes(4)), "stream 1 FRAME_SIZE_ERROR"),
    Row("6.3: larger than 5", headers(1) + frame(PRIORITY, 0, 1, bytes(6)), "stream 1 FRAME_SIZE_ERROR"),
    Row("6.4: an unknown code", headers(1) + frame(RST_STREAM, 0, 1, b"\0\1\0\0"), "taken"),
    Row("6.9: by 0", headers(1) + frame(WINDOW_UPDATE, 0, 1, bytes(4)), "stream 1 PROTOCOL_ERROR"),
    Row("6.10: in two", _cut(5), "taken", _TAKEN),
    Row("6.10: in five, two of them empty", _cut(0, 5, 0, 9), "taken", _TAKEN),
    Row("6.10: within a field", _cut(1, 1, 1), "taken", _TAKEN),
    Row("6.10: END_STREAM is of HEADERS", _cut(5, flags=END_STREAM), "taken", (("request", 1, REQUEST, True),)),
    Row("6.10: as many as there may be", _cut(*[1] * 8), "taken", _TAKEN),
    Row("10.5.1: one more", _cut(*[1] * 9), CALM),
    Row("6.10: a PING between", frame(HEADERS, 0, 1, BLOCK) + frame(PING, 0, 0, bytes(8)), PROTOCOL),
    Row("6.10: DATA between", frame(HEADERS, 0, 1, BLOCK) + frame(DATA, 0, 1, b"x"), PROTOCOL),
    Row("6.10: HEADERS between", frame(HEADERS, 0, 1, BLOCK) + headers(1), PROTOCOL),
    Row("6.10: an unknown kind between", frame(HEADERS, 0, 1, BLOCK) + frame(0x77, 0, 1), PROTOCOL),
    Row("6.10: of another stream", frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, END_HEADERS, 3), PROTOCOL),
    Row("6.10: after the end", headers(1) + frame(CONTINUATION, END_HEADERS, 1), PROTOCOL),
    Row("6.10: after DATA", headers(1) + frame(DATA, 0, 1) + frame(CONTINUATION, END_HEADERS, 1), PROTOCOL),
    Row("8.4: a client pushes nothing", headers(1) + frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2"), PROTOCOL),
    Row("4.3: a block that is no block", frame(HEADERS, END_HEADERS, 1, b"\xbe"), COMPRESSION),
    Row("4.3: so of trailers", headers(1) + frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x80"), COMPRESSION),
    Row("10.5.1: too long a list", headers(1, (*REQUEST, *(((b"x", b"y" * 8100),) * 2))), CALM),
    Row("10.5.1: too many fields", headers(1, (*REQUEST, *(((b"x", b""),) * 124))), CALM),
    Row("10.5.1: as many as there may be", headers(1, (*REQUEST, *(((b"x", b""),) * 123))), "taken"),
    Row("6.5: SETTINGS of too many entries", settings(*[(7, 7)] * 33), CALM),
    Row("6.5: as many as there may be", settings(*[(7, 7)] * 32), "taken"),
]

_CUT = header_block(RESPONSE)
_Y = frame(CONTINUATION, 0, 1, b"y" * 16_000)
_LONG = frame(HEADERS, 0, 1, _CUT + header_block(((b"x", bytes(80_000)),))[:-80_000]) + _Y * 5
_LONG += frame(CONTINUATION, END_HEADERS, 1)
AT_CLIENT = [
    Row("6.10: a response in two", frame(HEADERS, 0, 1, _CUT[:4]) + frame(CONTINUATION, 4, 1, _CUT[4:]), "taken"),
    Row("6.10: a PING between", frame(HEADERS, 0, 1, _CUT) + frame(PING, 0, 0, bytes(8)), PROTOCOL),
    Row("6.10: of another stream", frame(HEADERS, 0, 1, _CUT) + frame(CONTINUATION, 4, 3), PROTOCOL),
    Row("6.5.2: a server with ENABLE_PUSH 1", settings((2, 1)), PROTOCOL),
    Row("6.9: by 0", frame(WINDOW_UPDATE, 0, 3, bytes(4)), "stream 3 PROTOCOL_ERROR"),
    Row("6.3: a size that is not 5", frame(PRIORITY, 0, 3, bytes(4)), "stream 3 FRAME_SIZE_ERROR"),
    Row("6.1: as much padding as payload", headers(1, RESPONSE) + frame(DATA, PADDED, 1, b"\3\0\0"), PROTOCOL),
    Row("6.1: padding", headers(1, RESPONSE) + _PADDED + ending(1, TRAILERS), "taken"),
    Row("4.3: a block that is no block", frame(HEADERS, END_HEADERS, 1, b"\xbe"), COMPRESSION),
    Row("10.5.1: too long a list", _LONG, CALM),
]


def test_server() -> None:
    for row in EITHER + AT_SERVER:
        judge(row, ServerEnd)


def test_client() -> None:
    for row in EITHER + AT_CLIENT:
        judge(row, ClientEnd)


FIRST = [
    Row("3.4: no preface", b"GET / HTTP/1.1\r\n\r\n", PROTOCOL),
    Row("3.4: a preface with one other octet", PREFACE[:-1] + b"\r", PROTOCOL),
    Row("3.4: no SETTINGS after it", PREFACE + frame(PING, 0, 0, bytes(8)), PROTOCOL),
    Row("3.4: an acknowledgement is not SETTINGS", PREFACE + frame(SETTINGS, ACK, 0), PROTOCOL),
    Row("3.4: a request before SETTINGS", PREFACE + headers(1), PROTOCOL),
    Row("3.4: DATA before SETTINGS", PREFACE + frame(DATA, 0, 1), PROTOCOL),
    Row("3.4: an unknown kind before SETTINGS", PREFACE + frame(0x77, 0, 0), PROTOCOL),
    Row("3.4: GOAWAY before SETTINGS", PREFACE + frame(GOAWAY, 0, 0, bytes(8)), PROTOCOL),
    Row("3.4: preface and SETTINGS", PREFACE + SETTLED, "taken", (("settings",),)),
]


@pytest.mark.parametrize("row", FIRST, ids=str)
def test_first_frames_at_a_server(row: Row) -> None:
    judge(row, lambda: ServerEnd(start=b""))


@pytest.mark.parametrize("row", [Row(r.rule, r.sent.removeprefix(PREFACE), r.seen) for r in FIRST[2:]], ids=str)
def test_first_frames_at_a_client(row: Row) -> None:
    judge(row, lambda: ClientEnd(start=b""))


def test_settings_are_acknowledged_once_each_in_order() -> None:
    end = ServerEnd()
    end.feed(settings((3, 1)) + frame(PING, 0, 0, b"12345678") + settings((3, 2)))
    assert end.said == [(SETTINGS, ACK, 0, b""), (PING, ACK, 0, b"12345678"), (SETTINGS, ACK, 0, b"")]
    assert end.connection.peer_settings[3] == 2


def test_a_listener_that_ends_the_connection_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 5.4.1: one GOAWAY, though the frame that it ended over breaks a rule besides."""
    end = ServerEnd()
    monkeypatch.setattr(end.recorder, "on_oddity", lambda: end.connection.fail(11, b"enough"))
    end.feed(frame(PRIORITY, 0, 77, b"x") + frame(PING, 0, 0, bytes(8)))
    assert end.verdict == CALM


def test_first_frames_of_each_end() -> None:
    """Section 3.4: SETTINGS is the first frame, behind the client's preface."""
    assert ClientEnd().greeting.startswith(PREFACE)
    assert ClientEnd().greeting[len(PREFACE) + 3] == SETTINGS
    assert ServerEnd().greeting[3] == SETTINGS
