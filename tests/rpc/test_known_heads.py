"""Heads that came before: one that is read without h11 means what h11 reads in it."""

from __future__ import annotations

import asyncio
import re
from itertools import permutations, product

import h11
import pytest

from raftkv.rpc import HttpRequest, HttpResponse, ServerLimits
from raftkv.rpc.server.known_heads import FIELDS_MAX, HEADS_MAX, KnownHeads, head_bytes, response_head
from tests.rpc import services as s

FIELDS = [
    b"Content-Length: 3", b"Content-Length: 4", b"Transfer-Encoding: chunked", b"Connection: close",
    b"Connection: keep-alive", b"Expect: 100-continue", b"Upgrade: websocket", b"X-Y: a b",
]  # fmt: skip


def read(data: bytes) -> tuple[list[object], bytes, bool]:
    """What a fresh h11 makes of some bytes, what it leaves, and whether another request may follow."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    events: list[object] = []
    try:
        while isinstance(event := connection.next_event(), (h11.Request, h11.Data, h11.EndOfMessage)):
            events.append(event)
            if isinstance(event, h11.EndOfMessage):
                break
    except h11.RemoteProtocolError:
        events.append("refused")
    waits = connection.they_are_waiting_for_100_continue
    return events, connection.trailing_data[0], connection.our_state is h11.SEND_RESPONSE and not waits


RESTS = [b"", b"abc", b"abcGET / HTTP/1.1\r\n", b"3\r\nabc\r\n0\r\n\r\n"]


@pytest.mark.parametrize("method", [b"GET", b"POST", b"HEAD", b"CONNECT"])
def test_known_heads_mean_what_h11_reads(method: bytes) -> None:
    for version, end, rest in product((b"HTTP/1.1", b"HTTP/1.0"), (b"\r\n", b"\n"), RESTS):
        for count in range(3):
            for fields in permutations(FIELDS, count):
                check_that_it_means_the_same(method, version, fields, end, rest)


def check_that_it_means_the_same(
    method: bytes, version: bytes, fields: tuple[bytes, ...], end: bytes, rest: bytes
) -> None:
    inbox = bytearray(end.join([method + b" /p?q " + version, b"Host: x", *fields, b"", b""]) + rest)
    head = head_bytes(inbox)
    events, beyond, _ = read(head)
    known = KnownHeads()
    if head and not beyond and isinstance(events[0], h11.Request):
        known.learn(head, events[0])
    found = known.find(inbox)
    if found is None:
        return
    again, left, goes_on = read(bytes(inbox))
    request, *data, last = again
    assert goes_on
    assert not {name for name, _ in found.headers} & {"connection", "expect", "upgrade", "transfer-encoding"}
    assert isinstance(request, h11.Request)
    assert isinstance(last, h11.EndOfMessage)
    assert (found.method.encode(), found.target.encode()) == (request.method, request.target)
    assert [(name.encode(), value.encode()) for name, value in found.headers] == list(request.headers)
    body = b"".join(bytes(event.data) for event in data if isinstance(event, h11.Data))
    assert bytes(inbox[found.size_bytes :][: found.body_bytes]) == body
    assert bytes(inbox[found.size_bytes + found.body_bytes :]) == left


def test_few_heads_are_kept_and_long_ones_are_not() -> None:
    known = KnownHeads()
    heads = [b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(HEADS_MAX + 1)]
    for head in heads:
        event = read(head)[0][0]
        assert isinstance(event, h11.Request)
        known.learn(head, event)
    assert known.find(bytearray(heads[0])) is None
    assert known.find(bytearray(heads[-1])) is not None
    assert head_bytes(bytearray(b"GET / HTTP/1.1\r\nHost: " + b"x" * 2000 + b"\r\n\r\n")) == b""


@pytest.mark.parametrize("value", ["a\r\nSet-Cookie: b", "a\nb", "a\0b"])
def test_headers_of_answers_are_checked_by_h11(value: str) -> None:
    with pytest.raises(h11.LocalProtocolError):
        response_head(200, (("Location", value),), b"OK")


async def _handle(request: HttpRequest) -> HttpResponse:
    if request.path == "/bad":
        return HttpResponse(200, b"", (("location", "a\r\nb"),))
    return HttpResponse(204 if request.path == "/none" else 200, b"" if request.path == "/none" else request.body)


async def test_known_requests_are_answered_as_unknown_ones() -> None:
    """The second request of each kind is known; a body that is cut in two is not."""
    async with s.echo_server(ServerLimits(), _handle) as echo:
        reader, writer = await asyncio.open_connection(*echo.target.split(":"))
        for request, ending in (
            (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", b"\r\n\r\nabc"),
            (b"HEAD /echo HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n\r\n"),
            (b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n\r\n"),
        ):
            answers = []
            for cut in (0, 0, 20, len(request) - 1, 0):
                writer.write(request[:cut])
                await asyncio.sleep(0)
                writer.write(request[cut:])
                answers.append(re.sub(rb"\r\nDate: [^\r]+", b"\r\nDate: @", await reader.readuntil(ending)))
            assert len(set(answers)) == 1
        writer.write(b"GET /bad HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        assert await reader.read() == b"", "headers that are none end the connection"
        writer.close()
        assert len(echo.reported) == 1
        echo.reported.clear()


def test_heads_of_many_fields_are_not_remembered() -> None:
    """Kept as objects, 1 KB of fields of five bytes is 13 KB, and a connection had eight of them."""
    for fields, is_known in ((FIELDS_MAX - 1, True), (FIELDS_MAX, False)):
        head = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"aa:\r\n" * fields + b"\r\n"
        known = KnownHeads()
        event = read(head)[0][0]
        assert isinstance(event, h11.Request)
        assert (known.learn(head, event) is not None) == is_known
        assert (known.find(bytearray(head)) is not None) == is_known
