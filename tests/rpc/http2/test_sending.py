"""What we send keeps the rules too: windows, blocks, ends of streams, ids (RFC 9113 sections 4.3, 5, 6.9, 8)."""

from __future__ import annotations

import hpack
import pytest

from raftkv.rpc.http2.frames import ConnectionGoneError, StreamGoneError
from raftkv.rpc.limits import ServerLimits
from tests.rpc.http2.ends import REQUEST, RESPONSE, TRAILERS, ClientEnd, End, ServerEnd, ending, headers
from tests.rpc.raw import (
    CONTINUATION,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    RST_STREAM,
    WINDOW_UPDATE,
    frame,
    reset,
    settings,
)


def _update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def _body(end: End, stream_id: int) -> int:
    """Octets of DATA that leave now on a stream."""
    end.said += end.flush()
    size = sum(len(payload) for kind, _, one, payload in end.said if kind == DATA and one == stream_id)
    end.forget()
    return size


def _asked(*stream_ids: int) -> ServerEnd:
    end = ServerEnd()
    for stream_id in stream_ids:
        end.feed(ending(stream_id))
        end.connection.send_headers(stream_id, RESPONSE)
    return end


def test_the_connection_and_each_stream_have_windows() -> None:
    end = _asked(1, 3)
    end.connection.send_data(1, bytes(100_000))
    end.connection.send_data(3, bytes(100_000))
    assert end.connection.queued_body_size() == 200_000
    assert sum(len(payload) for kind, *_, payload in end.flush() if kind == DATA) == 65_535
    assert end.connection.send_window == 0
    end.feed(_update(0, 300_000))
    assert end.connection.queued_body_size() == 200_000 - 2 * 65_535
    end.feed(_update(1, 40_000))
    end.feed(_update(3, 40_000))
    assert end.connection.queued_body_size() == 0
    assert end.connection.send_window == 65_535 + 300_000 - 200_000


def test_settings_move_windows_of_open_streams() -> None:
    """Section 6.9.2: below nothing too, and then more is needed before anything leaves."""
    end = _asked(1)
    end.feed(_update(0, 1 << 20))
    end.connection.send_data(1, bytes(60_000))
    assert _body(end, 1) == 60_000
    end.feed(settings((4, 10_000)))
    end.connection.send_data(1, bytes(1000))
    assert _body(end, 1) == 0
    end.feed(_update(1, 50_000))
    assert _body(end, 1) == 0
    end.feed(_update(1, 1))
    assert _body(end, 1) == 1
    end.feed(settings((4, 10_500)))
    assert _body(end, 1) == 500
    end.feed(settings((4, 65_535)))
    assert _body(end, 1) == 499


def test_new_streams_begin_with_the_setting() -> None:
    end = ServerEnd()
    end.feed(settings((4, 7)) + ending(1))
    end.connection.send_headers(1, RESPONSE)
    end.connection.send_data(1, bytes(10))
    assert _body(end, 1) == 7


@pytest.mark.parametrize(
    ("sent", "verdict"),
    [
        (_update(0, 2**31 - 1 - 65_535), "taken"),
        (_update(0, 2**31 - 65_535), "connection FLOW_CONTROL_ERROR"),
        (_update(0, 1 << 30) * 2, "connection FLOW_CONTROL_ERROR"),
        (_update(1, 2**31 - 1 - 65_535), "taken"),
        (_update(1, 2**31 - 65_535), "stream 1 FLOW_CONTROL_ERROR"),
        (_update(1, 1) + settings((4, 2**31 - 1)), "connection FLOW_CONTROL_ERROR"),
        (settings((4, 2**31 - 1)) + _update(1, 1), "stream 1 FLOW_CONTROL_ERROR"),
        (settings((4, 0)) + _update(1, 2**31 - 1), "taken"),
        (settings((4, 0)) + _update(1, 2**31 - 1) + settings((4, 1)), "connection FLOW_CONTROL_ERROR"),
    ],
)
def test_no_window_is_above_its_maximum(sent: bytes, verdict: str) -> None:
    """Sections 6.9.1 and 6.9.2."""
    end = _asked(1)
    end.flush()
    end.forget()
    end.feed(sent)
    assert end.verdict == verdict


@pytest.mark.parametrize("way", ["connection", "stream", "settings"])
def test_the_end_of_a_stream_needs_no_window(way: str) -> None:
    """Section 6.9.1: an empty DATA frame and trailers leave though nothing else may."""
    end = _asked(1, 3, 5)
    end.flush()
    if way == "settings":
        end.feed(settings((4, 0)))
        end.connection.send_data(1, b"x")
    else:
        end.feed(_update(0, 1 << 20) if way == "stream" else b"")
        end.connection.send_data(1, bytes(70_000))
    end.flush()
    end.connection.send_data(3, b"", end_stream=True)
    end.connection.send_headers(5, TRAILERS, end_stream=True)
    said = {(kind, flags & END_STREAM, stream_id) for kind, flags, stream_id, _ in end.flush()}
    assert said == {(DATA, 1, 3), (HEADERS, 1, 5)}


def test_trailers_wait_for_the_body() -> None:
    end = _asked(1)
    end.flush()
    end.connection.send_data(1, bytes(65_536))
    end.connection.send_headers(1, TRAILERS, end_stream=True)
    assert [kind for kind, *_ in end.flush()] == [DATA] * 4
    end.feed(_update(0, 1))
    assert end.said == []
    end.feed(_update(1, 1))
    assert [(kind, flags) for kind, flags, *_ in end.said] == [(DATA, 0), (HEADERS, 5)]
    assert end.events[-1] == ("closed", 1, 0)


def test_no_frame_is_larger_than_peers_must_take() -> None:
    end = _asked(1)
    end.feed(settings((5, 1 << 20)) + _update(0, 1 << 20) + _update(1, 1 << 20))
    end.connection.send_data(1, bytes(200_000))
    assert max(len(payload) for *_, payload in end.flush()) == 16_384


def test_large_headers_continue() -> None:
    """Section 6.10: one run of frames, whose last has END_HEADERS."""
    end = ServerEnd()
    end.feed(ending(1))
    fields = (*RESPONSE, *((b"x%d" % number, b"y" * 10_000) for number in range(5)))
    end.connection.send_headers(1, fields, end_stream=True)
    said = end.flush()
    assert [(kind, flags) for kind, flags, *_ in said] == [(HEADERS, 1)] + [(CONTINUATION, 0)] * 2 + [(CONTINUATION, 4)]
    decoder = hpack.Decoder(max_header_list_size=1 << 20)
    found = decoder.decode(b"".join(payload for *_, payload in said), raw=True)
    assert tuple((bytes(name), bytes(value)) for name, value in found) == fields


def test_streams_take_turns() -> None:
    end = _asked(1, 3)
    end.flush()
    end.connection.is_blocked = True
    for stream_id in (1, 3):
        end.connection.send_data(stream_id, bytes(30_000), end_stream=True)
    order = [stream_id for _, _, stream_id, _ in end.flush()]
    assert order == [1, 3, 1, 3]


def test_an_answer_before_the_end_of_the_request() -> None:
    """Section 8.1: RST_STREAM with NO_ERROR asks the client to stop, after the answer is whole."""
    end = ServerEnd()
    end.feed(headers(1))
    end.connection.send_headers(1, RESPONSE)
    end.connection.send_headers(1, TRAILERS, end_stream=True)
    said = end.flush()
    assert [kind for kind, *_ in said] == [HEADERS, HEADERS, RST_STREAM]
    assert said[-1][3] == bytes(4)


@pytest.mark.parametrize("how", ["reset by us", "reset by the peer", "ended"])
def test_nothing_follows_the_end(how: str) -> None:
    """Section 5.1: on a closed stream, and on one whose own end has ended, nothing is sent."""
    end = _asked(1)
    end.connection.send_data(1, bytes(100_000))
    if how == "reset by us":
        end.connection.reset(1, 8)
    elif how == "reset by the peer":
        end.feed(reset(1))
    else:
        end.connection.end_stream(1)
    end.flush()
    end.forget()
    for send in (end.connection.send_data, end.connection.send_headers):
        with pytest.raises(StreamGoneError):
            send(1, b"x" if send == end.connection.send_data else TRAILERS)
    end.feed(_update(0, 1 << 20))
    if how != "ended":
        assert not end.said
        assert end.connection.queued_body_size() == 0


def test_blocks_leave_in_the_order_in_which_they_change_the_table() -> None:
    """Section 4.3: of many streams, some of whose trailers wait for windows, through a table of any size."""
    for size_bytes in (0, 60, 100, 176, 200, 240, 300, 4096):
        end = ServerEnd()
        decoder = hpack.Decoder()
        end.feed(settings((1, size_bytes)))
        stream_ids = range(1, 400, 2)
        found = {}
        for stream_id in stream_ids:
            end.feed(ending(stream_id))
            if stream_id % 3 == 0 or not end.connection.answer(stream_id, b"hello"):
                end.connection.send_headers(stream_id, RESPONSE)
                end.connection.send_data(stream_id, bytes(stream_id % 7 * 1000))
                status = ((b"grpc-status", b"%d" % (stream_id % 17)), (b"grpc-message", b"%d" % stream_id))
                end.connection.send_headers(stream_id, status, end_stream=True)
            if stream_id % 10 == 1:
                end.feed(_update(0, 20_000))
            for kind, _, one, payload in [*end.said, *end.flush()]:
                if kind == HEADERS:
                    found[one] = [(bytes(n), bytes(v)) for n, v in decoder.decode(payload, raw=True)]
            end.forget()
        assert all(dict(found[one]).keys() & {b"grpc-status", b":status"} for one in found), size_bytes
        for stream_id in stream_ids:
            if stream_id in found and b"grpc-message" in dict(found[stream_id]):
                assert dict(found[stream_id])[b"grpc-status"] == b"%d" % (stream_id % 17), size_bytes


def test_an_answer_after_failures_through_a_small_table() -> None:
    """The blocks of a usual answer are those that were sent: none may change the table and stay here."""
    end = ServerEnd()
    decoder = hpack.Decoder()
    end.feed(settings((1, 240)))
    for stream_id in range(1, 25, 2):
        end.feed(ending(stream_id))
        if stream_id < 9:
            end.connection.send_headers(stream_id, RESPONSE)
            status = ((b"grpc-status", b"%d" % stream_id),)
            end.connection.send_headers(stream_id, status, end_stream=True)
        else:
            status = TRAILERS
            assert end.connection.answer(stream_id, b"hello")
        blocks = [payload for kind, _, _, payload in end.flush() if kind == HEADERS]
        assert [decoder.decode(block, raw=True) for block in blocks] == [list(RESPONSE), list(status)]


def test_a_client_opens_no_stream_after_goaway() -> None:
    """Section 6.8."""
    end = ClientEnd()
    end.feed(frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff" + bytes(4)))
    with pytest.raises(ConnectionGoneError):
        end.connection.send_request(REQUEST)


def test_a_client_has_so_many_ids() -> None:
    """Section 5.1.1."""
    end = ClientEnd()
    end.connection._next_id = 2**31 - 1
    assert end.connection.send_request(REQUEST) == 2**31 - 1
    with pytest.raises(ConnectionGoneError):
        end.connection.send_request(REQUEST)


def test_own_settings_are_sent_and_enforced() -> None:
    """Section 6.9: both windows, to the octet, and what was given back."""
    limits = ServerLimits(stream_window_bytes=70_000, connection_window_bytes=100_000)
    end = ServerEnd(limits)
    end.recorder.keeps = True
    end.feed(headers(1) + headers(3) + frame(DATA, 0, 1, bytes(10_000)) * 7)
    assert end.verdict == "taken"
    end.feed(frame(DATA, 0, 1, b"x"))
    assert end.verdict == "stream 1 FLOW_CONTROL_ERROR"
    end.feed(frame(DATA, 0, 3, bytes(10_000)) * 2 + frame(DATA, 0, 3, bytes(9_999)))
    assert end.verdict == "stream 1 FLOW_CONTROL_ERROR"
    end.forget()
    end.connection.acknowledge(70_000, 1)
    end.connection.acknowledge(29_999, 3)
    back = sum(int.from_bytes(p, "big") for kind, _, one, p in end.flush() if kind == WINDOW_UPDATE and one == 0)
    assert back + end.connection._returned == 100_000


def test_more_than_the_connection_takes_ends_it() -> None:
    limits = ServerLimits(stream_window_bytes=65_535, connection_window_bytes=65_535)
    end = ServerEnd(limits)
    end.recorder.keeps = True
    end.feed(headers(1) + headers(3) + frame(DATA, 0, 1, bytes(16_000)) * 4 + frame(DATA, 0, 3, bytes(1536)))
    assert end.verdict == "connection FLOW_CONTROL_ERROR"
