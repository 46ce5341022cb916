"""Websockets on the HTTP/1.1 port: frames both ways, their limits, and who is cut."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.rpc import HttpRequest, HttpResponse, ServerLimits
from raftkv.rpc.server.websocket import FRAGMENTS_MAX, WebSocket, accepted, handshake_refusal, is_handshake
from tests import websocket as ws
from tests.rpc import services as s
from tests.rpc.loop import until

LIMIT_BYTES = 100_000
LIMITS = ServerLimits(http_body_bytes=LIMIT_BYTES, http1_half_closed_s=1000)


# -- frames ----------------------------------------------------------------------------------------------------------


def read(data: bytes, socket: WebSocket | None = None) -> tuple[WebSocket, bytes]:
    """Read all frames; return the socket and what it says of its own accord."""
    socket = WebSocket(LIMIT_BYTES) if socket is None else socket
    inbox, said = bytearray(data), b""
    while socket.read_frame(inbox):
        said += socket.take_control()
    return socket, said


async def messages_of(socket: WebSocket) -> list[bytes]:
    found = []
    while socket.held_bytes:
        found.append(await socket.take() or b"")
    return found


@given(
    st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=4), max_size=6),
    st.integers(1, 50),
    st.binary(min_size=4, max_size=4),
)
def test_messages_arrive_whole_however_they_are_cut(messages: list[list[bytes]], step: int, mask: bytes) -> None:
    sent = b""
    for parts in messages:
        for at, part in enumerate(parts):
            is_last = at == len(parts) - 1
            sent += ws.frame(ws.CONTINUATION if at else ws.BINARY, part, is_final=is_last, mask=mask)
            sent += ws.frame(ws.PING, b"between")
    socket, inbox = WebSocket(LIMIT_BYTES), bytearray()
    for at in range(0, len(sent), step):
        inbox += sent[at : at + step]
        while socket.read_frame(inbox):
            pass
    assert asyncio.run(messages_of(socket)) == [b"".join(parts) for parts in messages]
    assert not inbox


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, LIMIT_BYTES])
def test_lengths_of_all_three_forms_are_read_and_written(size: int) -> None:
    payload = b"a" * size
    socket, said = read(ws.frame(ws.TEXT, payload))
    assert asyncio.run(messages_of(socket)) == [payload]
    assert said == b""
    assert ws.take_frame(socket.frame(payload + b"\n")) == (ws.Frame(ws.TEXT, True, payload), b"")


def test_an_answer_in_pieces_is_one_message_up_to_its_line_feed() -> None:
    socket = WebSocket(LIMIT_BYTES)
    frames = [ws.take_frame(socket.frame(piece)) for piece in (b"one", b"two", b"three\n", b"next\n")]
    assert [found and found[0] for found in frames] == [
        ws.Frame(ws.TEXT, False, b"one"),
        ws.Frame(ws.CONTINUATION, False, b"two"),
        ws.Frame(ws.CONTINUATION, True, b"three"),
        ws.Frame(ws.TEXT, True, b"next"),
    ]


FRAGMENTS = ws.frame(ws.TEXT, is_final=False) + ws.frame(ws.CONTINUATION, is_final=False) * FRAGMENTS_MAX


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (ws.frame(ws.TEXT, b"x", mask=b""), 1002),
        (b"\xc1" + ws.frame(ws.TEXT, b"x")[1:], 1002),
        (ws.frame(3, b"x"), 1002),
        (ws.frame(11, b"x"), 1002),
        (ws.frame(ws.CONTINUATION, b"x"), 1002),
        (ws.frame(ws.TEXT, is_final=False) + ws.frame(ws.TEXT), 1002),
        (ws.frame(ws.PING, is_final=False), 1002),
        (ws.frame(ws.PING, b"x" * 126), 1002),
        (ws.frame(ws.TEXT, b"\xff"), 1007),
        (ws.frame(ws.TEXT, b"\xe2\x82", is_final=False) + ws.frame(ws.CONTINUATION, b"x"), 1007),
        (FRAGMENTS, 1008),
        (ws.frame(ws.TEXT, b"x" * (LIMIT_BYTES + 1)), 1009),
        (ws.frame(ws.TEXT, b"x" * (LIMIT_BYTES + 1))[:10], 1009),
        (b"\x81\xff" + b"\xff" * 8, 1009),
        (ws.frame(ws.TEXT, b"x", is_final=False) + ws.frame(ws.CONTINUATION, b"x" * LIMIT_BYTES)[:10], 1009),
    ],
    ids=[
        "no mask", "reserved bits", "unknown kind", "unknown control", "continues nothing", "begins within",
        "ping in fragments", "long ping", "no text", "no text in fragments", "fragments", "too large",
        "too large, begun", "endless", "too large in fragments",
    ],
)  # fmt: skip
def test_a_fault_of_the_client_closes_with_its_code(data: bytes, code: int) -> None:
    socket, said = read(data + ws.frame(ws.PING))
    found = ws.take_frame(said)
    assert found is not None
    assert (ws.close_code(found[0]), found[1]) == (code, b""), "nothing is read or said after a close"
    assert socket.held_bytes == 0
    assert asyncio.run(socket.take()) is None


@pytest.mark.parametrize(
    ("payload", "code"),
    [(b"", 1000), (b"\x03\xe8", 1000), (b"\x03\xe9bye", 1001), (b"\x0b\xb8", 3000), (b"\x03", 1002)]
    + [(number.to_bytes(2, "big"), 1002) for number in (0, 999, 1005, 1006, 1015, 2999, 5000)],
)
def test_a_close_is_answered_with_its_code_if_that_is_one(payload: bytes, code: int) -> None:
    _, said = read(ws.frame(ws.CLOSE, payload))
    found = ws.take_frame(said)
    assert found is not None
    assert ws.close_code(found[0]) == code


def test_of_pings_that_wait_for_a_reader_the_newest_is_answered() -> None:
    socket, inbox = WebSocket(LIMIT_BYTES), bytearray(b"".join(ws.frame(ws.PING, b"%d" % n) for n in range(1000)))
    while socket.read_frame(inbox):
        pass
    assert ws.take_frame(socket.take_control()) == (ws.Frame(ws.PONG, True, b"999"), b"")
    assert socket.take_control() == b""


def test_no_more_is_read_than_may_wait_for_the_handler() -> None:
    inbox = bytearray(ws.frame(ws.TEXT) * (LIMIT_BYTES // 10))
    socket = WebSocket(LIMIT_BYTES)
    while socket.read_frame(inbox):
        pass
    assert LIMIT_BYTES <= socket.held_bytes < LIMIT_BYTES + 100, "empty messages count too"
    assert inbox
    asyncio.run(socket.take())
    assert socket.read_frame(inbox)


# -- handshakes ------------------------------------------------------------------------------------------------------


def asked(*more: tuple[str, str], method: str = "GET", can_switch: bool = True) -> HttpRequest:
    return HttpRequest(method, "/", tuple({**dict(ws.HANDSHAKE), **dict(more)}.items()), can_switch=can_switch)


@pytest.mark.parametrize(
    ("request_", "is_asked", "is_sound"),
    [
        (asked(), True, True),
        (asked(("upgrade", "h2c, WebSocket")), True, True),
        (asked(("upgrade", "h2c")), False, True),
        (asked(method="POST"), False, True),
        (asked(("sec-websocket-key", " ")), True, False),
        (asked(("sec-websocket-version", "8")), True, False),
        (asked(can_switch=False), True, False),
    ],
    ids=["sound", "of two", "another protocol", "POST", "no key", "another version", "HTTP/2"],
)
def test_handshakes_are_told_from_other_requests(request_: HttpRequest, is_asked: bool, is_sound: bool) -> None:
    assert is_handshake(request_) == is_asked
    refusal = handshake_refusal(request_)
    assert (refusal is None) == is_sound
    assert refusal is None or (refusal.status, dict(refusal.headers)["sec-websocket-version"]) == (400, "13")
    assert dict(accepted(asked()))["sec-websocket-accept"] == ws.ACCEPT == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


# -- connections -----------------------------------------------------------------------------------------------------


class Echo:
    """Answers each message by itself, and knows what it took and whether it has ended."""

    def __init__(self) -> None:
        self.taken = 0
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.flood = self.flooded = 0
        self.ended = asyncio.Event()
        self.sockets: list[weakref.ref[WebSocket]] = []

    async def handle(self, request: HttpRequest) -> HttpResponse:
        if not is_handshake(request):
            return HttpResponse(200, b"plain")
        refusal = handshake_refusal(request)
        if refusal is not None:
            return refusal
        socket = WebSocket(LIMIT_BYTES)
        self.sockets.append(weakref.ref(socket))
        return HttpResponse(101, self._answers(socket), accepted(request), socket=socket)

    async def _answers(self, socket: WebSocket) -> AsyncIterator[bytes]:
        try:
            for _ in range(self.flood):
                self.flooded += 1
                yield b"x" * 65_536 + b"\n"
            await self.may_take.wait()
            while (message := await socket.take()) is not None:
                self.taken += 1
                if message == b"end":
                    return
                yield message + b"\n"
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def opened(
    echo: Echo, limits: ServerLimits = LIMITS, first: bytes = b""
) -> AsyncIterator[tuple[s.EchoServer, asyncio.StreamReader, asyncio.StreamWriter]]:
    async with s.echo_server(limits, echo.handle) as server:
        host, _, port = server.target.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(ws.handshake("/") + first)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        try:
            yield server, reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def frame_of(reader: asyncio.StreamReader) -> ws.Frame:
    data = await reader.readexactly(2)
    if data[1] > 125:
        data += await reader.readexactly(2 if data[1] == 126 else 8)
    size = data[1] if len(data) == 2 else int.from_bytes(data[2:], "big")
    found = ws.take_frame(data + await reader.readexactly(size))
    assert found is not None
    return found[0]


async def test_frames_right_behind_the_handshake_are_read() -> None:
    async with opened(Echo(), first=ws.frame(ws.TEXT, b"early")) as (_, reader, writer):
        assert await frame_of(reader) == ws.Frame(ws.TEXT, True, b"early")
        writer.write(ws.frame(ws.PING, b"?") + ws.frame(ws.TEXT, b"late"))
        assert await frame_of(reader) == ws.Frame(ws.PONG, True, b"?")
        assert await frame_of(reader) == ws.Frame(ws.TEXT, True, b"late")


async def test_the_end_of_the_answers_closes_the_websocket() -> None:
    async with opened(Echo(), first=ws.frame(ws.TEXT, b"end")) as (server, reader, _):
        assert ws.close_code(await frame_of(reader)) == 1000
        assert await reader.read() == b""
        await until(lambda: not server.server.connections)


@pytest.mark.parametrize("last", [ws.frame(ws.CLOSE), b"", ws.frame(3)], ids=["closed", "gone", "fault"])
async def test_a_client_that_leaves_ends_the_handler_and_leaves_no_cycle(last: bytes) -> None:
    echo = Echo()
    gc.collect()
    gc.disable()
    try:
        async with opened(echo) as (server, _, writer):
            writer.write(last)
            writer.close()
            await echo.ended.wait()
            await until(lambda: not server.server.connections)
            await until(lambda: echo.sockets[0]() is None)
            assert server.server.answers.held_bytes == 0
    finally:
        gc.enable()


async def test_a_fault_ends_the_connection_and_the_handler() -> None:
    echo = Echo()
    async with opened(echo, first=ws.frame(3)) as (_, reader, _writer):
        assert ws.close_code(await frame_of(reader)) == 1002
        assert await reader.read() == b""
        await echo.ended.wait()


async def test_a_client_is_read_no_further_than_its_handler_follows() -> None:
    echo = Echo()
    echo.may_take.clear()
    async with opened(echo) as (server, reader, writer):
        count, message = 800, ws.frame(ws.TEXT, b"m" * 20_000)  # more than the kernel keeps
        sent = asyncio.create_task(_send(writer, message, count))
        answers = server.server.answers
        await until(lambda: answers.held_bytes > LIMIT_BYTES)
        assert answers.held_bytes < LIMIT_BYTES + 600_000, "one read more, at most"
        assert not sent.done()
        echo.may_take.set()
        for _ in range(count):
            assert len((await frame_of(reader)).payload) == 20_000
        await sent
        await until(lambda: answers.held_bytes < 1_000)  # the handshake


async def _send(writer: asyncio.StreamWriter, data: bytes, count: int) -> None:
    for _ in range(count):
        writer.write(data)
        await writer.drain()


async def test_many_small_frames_do_not_hold_up_the_loop() -> None:
    """They are read in slices of 5 ms, in turn with other connections."""
    echo = Echo()
    count = 20_000
    async with opened(echo, ServerLimits()) as (server, reader, writer):
        writer.write(ws.frame(ws.TEXT, b"x") * count)
        seen = 0
        while echo.taken < count:
            await asyncio.sleep(0)
            seen += 1
        assert seen > 2
        assert not server.reported
        assert await frame_of(reader) == ws.Frame(ws.TEXT, True, b"x")


async def test_answers_leave_as_they_are_read() -> None:
    """The member makes no more than the client's kernel and its own buffer take, and pings bring no more."""
    echo = Echo()
    echo.flood = 1000
    async with opened(echo) as (_, reader, writer):
        writer.write(ws.frame(ws.PING, b"?") * 1000 + ws.frame(ws.TEXT, b"end"))
        while (frame := await frame_of(reader)).kind == ws.PONG:
            assert frame.payload == b"?"
        assert 0 < echo.flooded < echo.flood
        sizes = [len(frame.payload)]
        while (frame := await frame_of(reader)).kind != ws.CLOSE:
            sizes += [len(frame.payload)] if frame.kind == ws.TEXT else []
        assert sizes == [65_536] * echo.flood


async def test_a_server_that_goes_says_so() -> None:
    async with opened(Echo()) as (server, reader, _):
        server.server.drain()
        assert ws.close_code(await frame_of(reader)) == 1001
        assert await reader.read() == b""


async def test_a_refused_handshake_leaves_a_plain_connection() -> None:
    async with s.echo_server(LIMITS, Echo().handle) as server:
        host, _, port = server.target.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(ws.handshake("/", ("sec-websocket-version", "8")) + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"Bad Request\n")).startswith(b"HTTP/1.1 400 ")
        assert (await reader.readuntil(b"plain")).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await writer.wait_closed()
