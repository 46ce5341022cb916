"""RFC 9113 section 8: which requests and responses are malformed; each ends its stream, and nothing else."""

from __future__ import annotations

import pytest

from raftkv.rpc.http2 import Headers
from tests.rpc.http2.ends import REQUEST, RESPONSE, TRAILERS, ClientEnd, End, Row, ServerEnd, ending, headers, judge
from tests.rpc.raw import DATA, END_HEADERS, END_STREAM, HEADERS, PING, frame

BAD = "stream 1 PROTOCOL_ERROR"
METHOD, SCHEME, PATH, AUTHORITY, TE = REQUEST


def _ok(rule: str, *fields: tuple[bytes, bytes]) -> Row:
    return Row(rule, ending(1, fields), "taken", (("request", 1, fields, True),))


def _bad(rule: str, *fields: tuple[bytes, bytes]) -> Row:
    return Row(rule, ending(1, fields), BAD, ())


def _named(names: list[bytes]) -> list[Row]:
    return [_bad(f"8.2.1: name {name!r}", *REQUEST, (name, b"v")) for name in names]


def _valued(values: list[bytes]) -> list[Row]:
    return [_bad(f"8.2.1: value {value!r}", *REQUEST, (b"x", value)) for value in values]


FIELDS = [
    _ok("8.2: all octets of names", *REQUEST, (b"!#$%&'*+-.^_`|~0123456789abcxyz", b"v")),
    _ok("8.2: all octets of values", *REQUEST, (b"x", bytes(range(0x21, 0x7F)) + b" \t" + bytes(range(0x80, 0x100)))),
    _ok("8.2: an empty value", *REQUEST, (b"x", b"")),
    _ok("8.2: a field twice", *REQUEST, (b"x", b"1"), (b"x", b"2")),
    *_named([b"", b"X", b"a b", b"a\0", b"a\x7f", b"a\x80", b"a:b", b"a\r\nb", b" a", b"a\t", b"\xc3\xa4", b":"]),
    *_valued([b"\0", b"a\rb", b"a\nb", b"a\r\n b", b" a", b"a ", b"\ta", b"a\t", b" ", b"\t", b"a\0b"]),
    _bad("8.2.1: a value of a pseudo-header field", METHOD, SCHEME, (b":path", b"/a\0b")),
    _bad("8.2.1: with blanks around", METHOD, SCHEME, (b":path", b" /a")),
    *[
        _bad(f"8.2.2: {name.decode()}", *REQUEST, (name, b"x"))
        for name in (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
    ],
    _bad("8.2.2: te other than trailers", METHOD, SCHEME, PATH, (b"te", b"gzip")),
    _bad("8.2.2: te with more than trailers", METHOD, SCHEME, PATH, (b"te", b"trailers, gzip")),
    _bad("8.2.2: an empty te", METHOD, SCHEME, PATH, (b"te", b"")),
    _ok("8.2.2: te in capitals (RFC 9110 section 10.1.4)", METHOD, SCHEME, PATH, (b"te", b"Trailers")),
]

PSEUDO = [
    _ok("8.3.1: the least", METHOD, SCHEME, PATH),
    _ok("8.3.1: in another order", PATH, AUTHORITY, SCHEME, METHOD),
    _ok("8.3.1: host instead of :authority", METHOD, SCHEME, PATH, (b"host", b"x")),
    _ok("8.3.1: OPTIONS of a server", (b":method", b"OPTIONS"), SCHEME, (b":path", b"*")),
    _bad("8.3: a field before a pseudo-header field", METHOD, SCHEME, TE, PATH),
    _bad("8.3: one that is not defined", *REQUEST[:4], (b":foo", b"x")),
    _bad("8.3: one of responses", *REQUEST[:4], (b":status", b"200")),
    _bad("8.3: nothing but one of responses", (b":status", b"200")),
    *[_bad(f"8.3: {field[0].decode()} twice", *REQUEST[:4], field) for field in REQUEST[:4]],
    *[
        _bad(f"8.3.1: without {left[0].decode()}", *[field for field in REQUEST if field != left])
        for left in (METHOD, SCHEME, PATH)
    ],
    *[
        _bad(f"8.3.1: an empty {gone[0].decode()}", *[(name, b"" if name == gone[0] else v) for name, v in REQUEST])
        for gone in (METHOD, SCHEME, PATH)
    ],
    *[_bad(f"8.3.1: :path {path!r}", METHOD, SCHEME, (b":path", path)) for path in (b"*", b"s/m", b"x://y/", b"?")],
    *[_bad(f"8.3.1: :path {path!r}", METHOD, SCHEME, (b":path", path)) for path in (b"/a b", b"/a\tb", b"/\x7f")],
    _ok("8.3.1: a path in UTF-8", METHOD, SCHEME, (b":path", b"/\xc3\xa9?q=#")),
    *[_bad(f"8.3.1: :method {name!r}", (b":method", name), SCHEME, PATH) for name in (b"A B", b"G\x80", b"(")],
    *[_bad(f"8.3.1: :scheme {name!r}", METHOD, (b":scheme", name), PATH) for name in (b"ht tp", b"1", b"h:")],
    *[
        _bad(f"8.3.1: :authority {name!r}", METHOD, SCHEME, PATH, (b":authority", name))
        for name in (b"a b", b"\xaa", b"a?b", b'a"b')
    ],
    *[
        _ok(f"8.3.1: :authority {name!r}", METHOD, SCHEME, PATH, (b":authority", name))
        for name in (
            b"",
            b"[::1]:2379",
            b"a.example:1",
            b"%2Frun%2Fx.sock",
            b"A_b~c",
            b"#initially=[http://127.0.0.1:2379;b:1]",
        )
    ],
    _ok("8.3.1: other methods and schemes", (b":method", b"M-SEARCH"), (b":scheme", b"coap+tcp"), PATH),
    _bad("8.3.1: no fields at all"),
    _ok("8.5: CONNECT", (b":method", b"CONNECT"), AUTHORITY),
    _bad("8.5: CONNECT without :authority", (b":method", b"CONNECT")),
    _bad("8.5: CONNECT with :path", (b":method", b"CONNECT"), AUTHORITY, PATH),
    _bad("8.5: CONNECT with :scheme", (b":method", b"CONNECT"), AUTHORITY, SCHEME),
    _bad("8441 4: :protocol without leave", (b":method", b"CONNECT"), *REQUEST[1:4], (b":protocol", b"websocket")),
]


def _long(length: bytes, *rest: bytes, flags: int = 0, more: Headers = ()) -> bytes:
    return headers(1, (*REQUEST, (b"content-length", length), *more), flags) + b"".join(rest)


_BODY, _LAST = frame(DATA, 0, 1, b"hello"), frame(DATA, END_STREAM, 1, b"hello")
_END = ending(1, TRAILERS)
BODIES = [
    Row("8.1: trailers", headers(1) + _BODY + _END, "taken"),
    Row("8.1: trailers without a body", headers(1) + _END, "taken"),
    Row("8.1: empty trailers", headers(1) + frame(HEADERS, END_HEADERS | END_STREAM, 1), "taken"),
    Row("8.1: trailers that do not end the stream", headers(1) + _BODY + headers(1, TRAILERS), BAD),
    Row("8.1: a pseudo-header field among trailers", headers(1) + ending(1, REQUEST), BAD),
    Row("8.1: so a single one", headers(1) + ending(1, ((b":status", b"200"),)), BAD),
    Row("8.2.1: trailers in capitals", headers(1) + ending(1, ((b"Grpc-Status", b"0"),)), BAD),
    Row("8.2.2: trailers of a connection", headers(1) + ending(1, ((b"connection", b"close"),)), BAD),
    Row("8.1.1: content-length", _long(b"5", _LAST), "taken"),
    Row("8.1.1: of two frames", _long(b"10", _BODY, _LAST), "taken"),
    Row("8.1.1: and trailers", _long(b"5", _BODY, _END), "taken"),
    Row("8.1.1: padding does not count", _long(b"3", frame(DATA, 9, 1, b"\2abc\0\0")), "taken"),
    Row("8.1.1: 0 and no body", _long(b"0", flags=END_STREAM), "taken"),
    Row("8.1.1: 0 and an empty body", _long(b"0", frame(DATA, END_STREAM, 1)), "taken"),
    Row("8.1.1: and no body", _long(b"5", flags=END_STREAM), BAD),
    Row("8.1.1: less than it says", _long(b"6", _LAST), BAD),
    Row("8.1.1: less, and trailers", _long(b"6", _BODY, _END), BAD),
    Row("8.1.1: nothing, and trailers", _long(b"6", _END), BAD),
    Row("8.1.1: more than it says", _long(b"4", _LAST), BAD),
    Row("8.1.1: more, before the end", _long(b"4", _BODY), BAD),
    Row("8.1.1: more, in the second frame", _long(b"5", _BODY, frame(DATA, 0, 1, b"x")), BAD),
    Row("8.1.1: twice the same", _long(b"5", _LAST, more=((b"content-length", b"5"),)), "taken"),
    Row("8.1.1: twice, another", _long(b"5", _LAST, more=((b"content-length", b"6"),)), BAD),
    *[
        Row(f"8.1.1: content-length {value!r}", _long(value, _LAST), BAD)
        for value in (b"", b"-5", b"+5", b"5,5", b"0x5", b"5 5", b"\xd9\xa5", b"9" * 19, b"5.0")
    ],
]


@pytest.mark.parametrize("rows", [FIELDS, PSEUDO, BODIES], ids=["fields", "pseudo-header fields", "bodies"])
def test_request(rows: list[Row]) -> None:
    for row in rows:
        judge(row, ServerEnd)


@pytest.mark.parametrize("index", [True, False])
def test_fields_that_come_out_of_the_table_are_looked_at_too(index: bool) -> None:
    """A field that was refused once is refused wherever it is named again, and no other is."""
    end = ServerEnd()
    kind = b"\x40" if index else b"\0"
    plain = headers(1)[9:]
    end.feed(frame(HEADERS, END_HEADERS, 1, plain + kind + b"\1X\1v" + b"\x40\1y\1z"))
    end.feed(frame(HEADERS, END_HEADERS, 3, plain + b"\xbe"))
    if index:
        end.feed(frame(HEADERS, END_HEADERS, 5, plain + b"\xbf") * 1 + headers(7))
        end.feed(frame(HEADERS, END_HEADERS, 9, plain + b"\x0f\x30\0"))
    bad = [1, 5, 9] if index else [1]
    assert end.verdict == ", ".join(f"stream {stream_id} PROTOCOL_ERROR" for stream_id in bad)
    assert ("request", 3, (*REQUEST, (b"y", b"z")), False) in end.events


STATUS, TYPE = RESPONSE


def _client_ok(rule: str, *fields: tuple[bytes, bytes]) -> Row:
    return Row(rule, headers(1, fields), "taken", (("response", 1, fields, False),))


def _client_bad(rule: str, *fields: tuple[bytes, bytes]) -> Row:
    return Row(rule, headers(1, fields), BAD, (("closed", 1, 1),))


def _answer(length: bytes, *rest: bytes, flags: int = 0, status: bytes = b"200") -> bytes:
    return headers(1, ((b":status", status), (b"content-length", length)), flags) + b"".join(rest)


_INTERIM = headers(1, ((b":status", b"103"), (b"link", b"x")))
_ANSWER = headers(1, RESPONSE)
RESPONSES = [
    _client_ok("8.3.2: the least", STATUS),
    _client_ok("8.3.2: an unknown status", (b":status", b"799")),
    _client_bad("8.3.2: no status", TYPE),
    _client_bad("8.3.2: no fields at all"),
    _client_bad("8.3.2: two of them", STATUS, STATUS),
    _client_bad("8.3.2: status after a field", TYPE, STATUS),
    _client_bad("8.3: one of requests", STATUS, PATH),
    _client_bad("8.3: one that is not defined", STATUS, (b":foo", b"x")),
    *[
        _client_bad(f"8.3.2: status {value!r}", (b":status", value))
        for value in (b"", b"20", b"2000", b"abc", b"+20", b"099", b"000", b"20\xb2")
    ],
    _client_bad("8.6: status 101", (b":status", b"101")),
    _client_bad("8.2.1: a name in capitals", STATUS, (b"Content-Type", b"x")),
    _client_bad("8.2.1: a value with a line feed", STATUS, (b"x", b"a\nb")),
    _client_bad("8.2.2: of a connection", STATUS, (b"connection", b"close")),
    Row("8.1: interim responses", _INTERIM * 3 + _ANSWER, "taken", (("response", 1, RESPONSE, False),)),
    Row("8.1: an interim response that ends the stream", ending(1, ((b":status", b"100"),)), BAD),
    Row("8.1: an interim response after the final one", _ANSWER + _INTERIM, BAD),
    Row("8.1: DATA after an interim response", _INTERIM + frame(DATA, 0, 1, b"x"), BAD),
    Row("8.1: trailers", _ANSWER + _BODY + _END, "taken"),
    Row("8.1: trailers that do not end the stream", _ANSWER + headers(1, TRAILERS), BAD),
    Row("8.1: a pseudo-header field among trailers", _ANSWER + ending(1, RESPONSE), BAD),
    Row("8.1.1: content-length", _answer(b"5", _LAST), "taken"),
    Row("8.1.1: and trailers", _answer(b"5", _BODY, _END), "taken"),
    Row("8.1.1: less than it says", _answer(b"6", _LAST), BAD),
    Row("8.1.1: more than it says", _answer(b"4", _BODY), BAD),
    Row("8.1.1: less, and trailers", _answer(b"6", _BODY, _END), BAD),
    Row("8.1.1: no body", _answer(b"6", flags=END_STREAM), BAD),
    Row("8.1.1: 304 has none", _answer(b"6", flags=END_STREAM, status=b"304"), "taken"),
    Row("8.1.1: 204 has none", _answer(b"6", flags=END_STREAM, status=b"204"), "taken"),
    Row("8.1.1: no number", _answer(b"x"), BAD),
    Row("8.1: an end without trailers", _ANSWER + _LAST, "taken"),
]


def test_response() -> None:
    for row in RESPONSES:
        judge(row, ClientEnd)


@pytest.mark.parametrize("make", [ServerEnd, ClientEnd])
def test_octets_of_malformed_messages_are_given_back(make: type[End]) -> None:
    """Section 6.9: every octet of DATA counts for the connection, also of messages that are refused."""
    end = make()
    fields = REQUEST if make is ServerEnd else RESPONSE
    whole = end.connection._credit
    for padding in (b"", b"\0" * 9):
        body = bytes((len(padding),)) + b"hello" + padding
        stream_id = 1 if not padding else 3
        end.feed(headers(stream_id, (*fields, (b"content-length", b"4"))) + frame(DATA, 8, stream_id, body) * 3)
    assert end.verdict == "stream 1 PROTOCOL_ERROR, stream 3 PROTOCOL_ERROR"
    assert end.connection._credit + end.connection._returned == whole


def test_the_same_header_again_is_judged_the_same() -> None:
    """What is remembered of a block is its meaning, not its stream."""
    end = ServerEnd()
    bad = (*REQUEST, (b"connection", b"close"))
    for stream_id in range(1, 9, 4):
        end.feed(headers(stream_id, bad) + ending(stream_id + 2, (*REQUEST, (b"content-length", b"1"))))
    assert end.verdict == ", ".join(f"stream {stream_id} PROTOCOL_ERROR" for stream_id in (1, 3, 5, 7))
    end.feed(ending(9))
    end.feed(frame(PING, 0, 0, bytes(8)))
    assert ("request", 9, REQUEST, True) in end.events
