"""RFC 9113 sections 5.1, 5.4, 6.4 and 6.8: each frame in each state of a stream, ids of streams, and the end of all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftkv.rpc.http2.connection import RESETS_REMEMBERED
from raftkv.rpc.limits import ServerLimits
from tests.rpc.http2.ends import (
    PRIORITY,
    PUSH_PROMISE,
    REQUEST,
    RESPONSE,
    TRAILERS,
    ClientEnd,
    End,
    Row,
    ServerEnd,
    ending,
    headers,
    judge,
)
from tests.rpc.raw import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    WINDOW_UPDATE,
    frame,
    header_block,
    reset,
)

PROTOCOL, CLOSED = "connection PROTOCOL_ERROR", "connection STREAM_CLOSED"
STREAM_CLOSED = "stream 1 STREAM_CLOSED"
UPDATE = frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1")

FRAMES = {
    "DATA": frame(DATA, 0, 1, b"hello"),
    "the last DATA": frame(DATA, END_STREAM, 1, b"hello"),
    "HEADERS": headers(1),
    "trailers": ending(1, TRAILERS),
    "PRIORITY": frame(PRIORITY, 0, 1, bytes(5)),
    "RST_STREAM": reset(1),
    "PUSH_PROMISE": frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2"),
    "WINDOW_UPDATE": UPDATE,
    "CONTINUATION": frame(CONTINUATION, END_HEADERS, 1),
    "unknown": frame(0x77, 0, 1),
}


def _server(*sent: bytes, answer: str = "") -> Callable[[], End]:
    def make() -> End:
        end = ServerEnd()
        end.feed(b"".join(sent))
        if answer == "whole":
            end.connection.send_headers(1, RESPONSE, end_stream=True)
        elif answer == "reset":
            end.connection.reset(1, 8)
        elif answer:
            end.connection.send_headers(1, RESPONSE)
        end.flush()
        end.forget()
        return end

    return make


def _client(*sent: bytes, asks: bool = True, ends: bool = False, resets: bool = False) -> Callable[[], End]:
    def make() -> End:
        end = ClientEnd(start=b"")
        end.feed(frame(4, 0, 0))
        if asks:
            end.connection.send_request(REQUEST)
        if ends:
            end.connection.send_data(1, b"", end_stream=True)
        end.flush()
        end.feed(b"".join(sent))
        if resets:
            end.connection.reset(1, 8)
        end.flush()
        end.forget()
        return end

    return make


STATES: dict[str, tuple[Callable[[], End], dict[str, str]]] = {
    # What is not named is taken. Where 5.1 asks for an error of the stream, 5.4.1 lets it end the connection.
    "server, idle": (
        ServerEnd,
        {
            "DATA": PROTOCOL,
            "the last DATA": PROTOCOL,
            "trailers": "stream 1 PROTOCOL_ERROR",
            "RST_STREAM": PROTOCOL,
            "WINDOW_UPDATE": PROTOCOL,
        },
    ),
    "server, open": (_server(headers(1)), {"HEADERS": "stream 1 PROTOCOL_ERROR"}),
    "server, open and answering": (_server(headers(1), answer="head"), {"HEADERS": "stream 1 PROTOCOL_ERROR"}),
    "server, half-closed (remote)": (
        _server(ending(1)),
        {"DATA": STREAM_CLOSED, "the last DATA": STREAM_CLOSED, "HEADERS": CLOSED, "trailers": CLOSED},
    ),
    "server, closed by both": (
        _server(ending(1), answer="whole"),
        {"DATA": STREAM_CLOSED, "the last DATA": STREAM_CLOSED, "HEADERS": CLOSED, "trailers": CLOSED},
    ),
    "server, closed by the client's RST_STREAM": (
        _server(headers(1), reset(1)),
        {"DATA": STREAM_CLOSED, "the last DATA": STREAM_CLOSED, "HEADERS": CLOSED, "trailers": CLOSED},
    ),
    "server, closed by our RST_STREAM": (_server(headers(1), answer="reset"), {}),
    "server, answered before the request has ended": (_server(headers(1), answer="whole"), {}),
    "server, reset for its header": (_server(headers(1, TRAILERS)), {}),
    "server, reset for its body": (_server(headers(1), frame(WINDOW_UPDATE, 0, 1, bytes(4))), {}),
    "client, idle": (
        _client(asks=False),
        dict.fromkeys(("DATA", "the last DATA", "HEADERS", "trailers", "RST_STREAM", "WINDOW_UPDATE"), PROTOCOL),
    ),
    "client, open": (
        _client(),
        {
            "DATA": "stream 1 PROTOCOL_ERROR",
            "the last DATA": "stream 1 PROTOCOL_ERROR",
            "HEADERS": "stream 1 PROTOCOL_ERROR",
            "trailers": "stream 1 PROTOCOL_ERROR",
        },
    ),
    "client, open and answered": (_client(headers(1, RESPONSE)), {"HEADERS": "stream 1 PROTOCOL_ERROR"}),
    "client, half-closed (local)": (_client(headers(1, RESPONSE), ends=True), {"HEADERS": "stream 1 PROTOCOL_ERROR"}),
    "client, half-closed (remote)": (
        _client(ending(1, RESPONSE)),
        {"DATA": STREAM_CLOSED, "the last DATA": STREAM_CLOSED, "HEADERS": STREAM_CLOSED, "trailers": STREAM_CLOSED},
    ),
    "client, closed by both": (
        _client(ending(1, RESPONSE), ends=True),
        {"DATA": STREAM_CLOSED, "the last DATA": STREAM_CLOSED, "HEADERS": STREAM_CLOSED, "trailers": STREAM_CLOSED},
    ),
    "client, closed by the server's RST_STREAM": (
        _client(reset(1)),
        {"DATA": STREAM_CLOSED, "the last DATA": STREAM_CLOSED, "HEADERS": STREAM_CLOSED, "trailers": STREAM_CLOSED},
    ),
    "client, closed by our RST_STREAM": (_client(resets=True), {}),
}
ALWAYS = {"PUSH_PROMISE": PROTOCOL, "CONTINUATION": PROTOCOL}


@pytest.mark.parametrize("state", STATES)
def test_frame_in_state(state: str) -> None:
    make, seen = STATES[state]
    for name, sent in FRAMES.items():
        judge(Row(f"5.1: {name}, {state}", sent, seen.get(name, ALWAYS.get(name, "taken"))), make)


IDS = [
    Row("5.1.1: ids grow", ending(1) + ending(5) + ending(7), "taken"),
    Row("5.1.1: a client's id is odd", ending(2), PROTOCOL),
    Row("5.1.1: so below one that was used", ending(5) + ending(2), PROTOCOL),
    Row("5.1.1: one that was left out is closed", ending(5) + ending(3), CLOSED),
    Row("5.1.1: one that was used", ending(5) + ending(5), CLOSED),
    Row("5.1.1: the last one there is", ending(2**31 - 1), "taken"),
    Row("5.1.1: DATA of one that was left out", ending(5) + frame(DATA, 0, 3, b"x"), "stream 3 STREAM_CLOSED"),
    Row("5.1.1: an update of one that was left out", ending(5) + frame(WINDOW_UPDATE, 0, 3, b"\0\0\0\1"), "taken"),
    Row("5.1.1: an update of an even one", ending(5) + frame(WINDOW_UPDATE, 0, 2, b"\0\0\0\1"), PROTOCOL),
    Row("5.1.1: RST_STREAM of an even one", ending(5) + reset(2), PROTOCOL),
    Row("5.1.2: one more than there may be", headers(1) + headers(3) + headers(5), "stream 5 REFUSED_STREAM"),
    Row("5.1.2: half-closed ones count", ending(1) + ending(3) + ending(5), "stream 5 REFUSED_STREAM"),
    Row("5.1.2: closed ones do not", headers(1) + reset(1) + headers(3) + headers(5), "taken"),
    Row("5.1.2: idle ones with a priority do not", frame(PRIORITY, 0, 9, bytes(5)) * 9 + headers(1), "taken"),
    Row(
        "5.1.2: what comes of a refused one is left alone",
        ending(1) + ending(3) + headers(5) + frame(DATA, 0, 5, b"hello") + ending(5, TRAILERS),
        "stream 5 REFUSED_STREAM",
    ),
]


@pytest.mark.parametrize("row", IDS, ids=str)
def test_ids(row: Row) -> None:
    few = 2 if row.rule.startswith("5.1.2") else 100
    judge(row, lambda: ServerEnd(ServerLimits(max_concurrent_streams=few)))


@pytest.mark.parametrize(
    "row",
    [
        Row("5.1.1: a server's stream", headers(2, RESPONSE), PROTOCOL),
        Row("5.1.1: one that we have not opened", headers(5, RESPONSE), PROTOCOL),
        Row("5.1.1: DATA of one that we have not opened", frame(DATA, 0, 5, b"x"), PROTOCOL),
        Row("5.1.1: an update of one that we have not opened", frame(WINDOW_UPDATE, 0, 5, b"\0\0\0\1"), PROTOCOL),
        Row("5.1.1: RST_STREAM of an even one", reset(2), PROTOCOL),
    ],
    ids=str,
)
def test_ids_at_a_client(row: Row) -> None:
    judge(row, ClientEnd)


def test_a_header_of_a_stream_that_was_reset_keeps_the_tables_in_step() -> None:
    """Section 4.3: blocks of streams that are gone are decoded all the same."""
    end = ServerEnd()
    end.feed(headers(1))
    end.connection.reset(1, 8)
    new = b"\x40\x01x\x01y"  # into the dynamic table
    end.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, new))
    end.forget()
    end.feed(frame(HEADERS, END_HEADERS | END_STREAM, 3, header_block(REQUEST) + b"\xbe"))
    assert end.events[0] == ("request", 3, (*REQUEST, (b"x", b"y")), True)


def test_a_refused_header_keeps_the_tables_in_step() -> None:
    end = ServerEnd(ServerLimits(max_concurrent_streams=1))
    end.feed(headers(1) + frame(HEADERS, END_HEADERS, 3, header_block(REQUEST) + b"\x40\x01x\x01y") + reset(1))
    assert end.verdict == "stream 3 REFUSED_STREAM"
    end.forget()
    end.feed(frame(HEADERS, END_HEADERS, 5, header_block(REQUEST) + b"\xbe"))
    assert end.events == [("request", 5, (*REQUEST, (b"x", b"y")), False)]


@pytest.mark.parametrize("count", [RESETS_REMEMBERED, RESETS_REMEMBERED + 1, 2000])
def test_streams_that_we_reset_may_still_speak(count: int) -> None:
    """Section 5.1, closed: what was under way when our RST_STREAM left is taken as nothing, however much it is."""
    server, client = ServerEnd(), ClientEnd()
    server.feed(b"".join(headers(stream_id) for stream_id in range(1, 2 * count, 2)))
    for _ in range(count):
        client.connection.send_request(REQUEST)
    for stream_id in range(1, 2 * count + 4, 2):
        server.connection.reset(stream_id, 8)
        client.connection.reset(stream_id, 8)
    for end, fields in ((server, TRAILERS), (client, RESPONSE)):
        end.flush()
        end.forget()
        end.feed(b"".join(ending(stream_id, fields) for stream_id in range(1, 2 * count, 2)))
        assert "connection" not in end.verdict
        assert not end.events


def test_goaway_never_names_a_higher_stream_than_before() -> None:
    """Section 6.8: streams that came after it are left alone, and no later GOAWAY speaks for them."""
    end = ServerEnd()
    end.feed(headers(1))
    end.connection.send_shutdown_notice()
    end.connection.send_goaway(0)
    end.feed(headers(3) + frame(DATA, END_STREAM, 3, b"hello") + headers(5) + reset(5))
    assert [event for event in end.events if event[0] == "request"] == [("request", 1, REQUEST, False)]
    end.connection.send_goaway(0)
    end.feed(frame(PING, 0, 1, bytes(8)))
    lasts = [int.from_bytes(payload[:4], "big") for kind, _, _, payload in end.said if kind == GOAWAY]
    assert lasts == [2**31 - 1, 1, 1, 1]


def test_streams_go_on_after_goaway() -> None:
    end = ServerEnd()
    end.feed(headers(1))
    end.connection.send_goaway(0)
    assert not end.connection.is_over
    end.feed(frame(DATA, END_STREAM, 1, b"hello"))
    end.connection.send_headers(1, RESPONSE, end_stream=True)
    assert end.connection.is_over
    assert end.events[-1] == ("closed", 1, 0)


def test_goaway_ends_the_calls_that_the_server_has_not_seen() -> None:
    """Section 6.8, at a client: also if the end of one resets another."""
    end = ClientEnd()
    end.connection.send_request(REQUEST)
    end.recorder.then["closed"] = lambda stream_id: end.connection.reset(5, 8)
    end.feed(frame(GOAWAY, 0, 0, b"\0\0\0\1" + bytes(4)))
    assert [event for event in end.events if event[0] == "closed"] == [("closed", 3, 7), ("closed", 5, 8)]
    end.feed(ending(1, RESPONSE))
    assert end.events[-2:] == [("response", 1, RESPONSE, True), ("closed", 1, 0)]
    assert end.connection.is_over


def test_rst_stream_is_sent_once_and_answers_nothing() -> None:
    """Section 5.4.2: no RST_STREAM answers an RST_STREAM, and one is enough for all that comes of a stream."""
    end = ServerEnd()
    end.feed(headers(1) + reset(1) + reset(1))
    assert end.verdict == "taken"
    end.feed(headers(3, TRAILERS) + frame(DATA, 0, 3, b"x") * 3 + ending(3, TRAILERS) + reset(3))
    assert end.verdict == "stream 3 PROTOCOL_ERROR"
    end.forget()
    end.feed(frame(DATA, 0, 1, b"x") * 3)
    assert end.verdict == STREAM_CLOSED


def test_events_come_in_order_and_close_last() -> None:
    end = ServerEnd()
    end.feed(headers(1) + frame(DATA, 0, 1, b"a") + ending(1, TRAILERS))
    end.connection.send_headers(1, RESPONSE)
    end.connection.send_data(1, b"b")
    end.connection.send_headers(1, TRAILERS, end_stream=True)
    assert end.events == [
        ("request", 1, REQUEST, False),
        ("data", 1, b"a", False),
        ("data", 1, b"", True),
        ("closed", 1, 0),
    ]
    assert [(kind, flags) for kind, flags, *_ in end.flush()] == [(HEADERS, 4), (DATA, 0), (HEADERS, 5)]


@pytest.mark.parametrize("event", ["request", "data"])
def test_a_listener_may_reset_the_stream_that_it_hears_of(event: str) -> None:
    end = ServerEnd()
    end.recorder.then[event] = lambda stream_id: end.connection.reset(stream_id, 8)
    end.feed(headers(1) + frame(DATA, 0, 1, b"a") + ending(1, TRAILERS) + ending(3))
    assert end.said.count((RST_STREAM, 0, 1, b"\0\0\0\x08")) == 1
    assert ("request", 3, REQUEST, True) in end.events
    assert end.events.count(("closed", 1, 8)) == 1
