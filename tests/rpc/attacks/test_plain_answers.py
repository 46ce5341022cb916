"""Answers of plain HTTP over HTTP/2 that no client reads: they count with those of gRPC, and wait no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from raftkv.rpc import HttpRequest, HttpResponse, ServerLimits
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.attacks.test_answer_budget import CLOSED_WINDOWS, MIB, WIDE_WINDOWS
from tests.rpc.loop import until

PIECE = bytes(64 * 1024)
PIECES = 40


class Handler:
    """Answers with a body of a megabyte, or with one that is made as it is sent."""

    def __init__(self) -> None:
        self.made = 0
        self.ended = 0

    async def answer(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, bytes(MIB) if request.path == "/whole" else self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            for _ in range(PIECES):
                self.made += len(PIECE)
                yield PIECE
        finally:
            self.ended += 1


def ask(path: bytes, count: int, method: bytes = b"GET") -> bytes:
    fields = ((b":method", method), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"))
    ends = raw.END_HEADERS | raw.END_STREAM
    return b"".join(raw.headers(one, fields, ends) for one in range(1, 2 * count, 2))


def queued_bytes(echo: s.EchoServer) -> int:
    """What waits in the engines of all connections."""
    cores = [one._h2.core for one in echo.server.connections if one._h2 is not None]
    return sum(core.queued_size() for core in cores)


async def test_whole_answers_are_refused_beyond_the_limit_of_a_connection() -> None:
    handler = Handler()
    limits = ServerLimits(connection_send_buffer_bytes=8 * MIB)
    async with s.echo_server(limits, handler.answer) as echo:
        client = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        client.send(ask(b"/whole", 100))
        answered = 0
        while answered < 100:
            answered += (await client.next_frame())[0] == raw.HEADERS
        statuses = [fields[b":status"] for fields in raw.decode_headers(client.frames).values()]
        assert statuses.count(b"200") == 8
        assert statuses.count(b"503") == 92
        assert queued_bytes(echo) < 8.1 * MIB
        assert 8 * MIB <= echo.server.answers.used_bytes < 8.1 * MIB
        client.close()
        await until(lambda: echo.server.answers.used_bytes == 0)


async def test_answers_in_pieces_wait_when_their_connection_has_enough() -> None:
    """Thirty answers of 2.5 MiB, which each stream alone would let wait up to a megabyte."""
    handler = Handler()
    limits = ServerLimits(connection_send_buffer_bytes=4 * MIB)
    async with s.echo_server(limits, handler.answer) as echo:
        client = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        client.send(ask(b"/pieces", 30))
        made = -1
        while made != handler.made or not made:
            made = handler.made
            for _ in range(50):
                await asyncio.sleep(0.001)
        assert queued_bytes(echo) <= 5 * MIB, "half the limit, and a piece of each stream"
        assert handler.made - queued_bytes(echo) < len(PIECE), "a piece that waits is not counted"
        assert handler.ended == 0
        wide = raw.settings((4, 2**31 - 1)) + raw.frame(raw.WINDOW_UPDATE, 0, 0, (2**31 - 65_536).to_bytes(4, "big"))
        client.send(wide)
        ended = 0
        while ended < 30:
            kind, flags, _, _ = await client.next_frame()
            ended += kind == raw.DATA and flags & raw.END_STREAM
        assert handler.ended == 30
        assert sum(len(payload) for kind, _, _, payload in client.frames if kind == raw.DATA) == handler.made
        await until(lambda: echo.server.answers.used_bytes == 0)
        client.close()


@pytest.mark.parametrize("path", [b"/whole", b"/pieces"])
async def test_unread_answers_are_reset(path: bytes) -> None:
    handler = Handler()
    limits = ServerLimits(send_stall_timeout_s=0.2)
    async with s.echo_server(limits, handler.answer) as echo:
        client = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        client.send(ask(path, 3))
        reset = set()
        while reset != {1, 3, 5}:
            kind, _, stream_id, _ = await client.next_frame()
            if kind == raw.RST_STREAM:
                reset.add(stream_id)
        assert queued_bytes(echo) == 0
        await until(lambda: handler.ended == (0 if path == b"/whole" else 3))
        await until(lambda: echo.server.answers.used_bytes == 0)
        client.close()


async def test_the_connection_that_does_not_read_goes_when_the_process_is_short() -> None:
    handler = Handler()
    limits = ServerLimits(process_send_buffer_bytes=16 * MIB, reading_grace_s=0.0, send_stall_timeout_s=4.0)
    async with s.echo_server(limits, handler.answer) as echo:
        hog = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
        hog.send(ask(b"/whole", 13))
        await hog.until_closed()
        assert hog.goaway == (11, b"responses_not_read")
        hog.close()
        honest = await raw.RawClient.connect(echo.target, WIDE_WINDOWS)
        honest.send(ask(b"/whole", 4))
        ended = 0
        while ended < 4:
            kind, flags, _, _ = await honest.next_frame()
            ended += kind == raw.DATA and flags & raw.END_STREAM
        honest.close()
        await until(lambda: echo.server.answers.used_bytes == 0)


@pytest.mark.parametrize("path", [b"/whole", b"/pieces"])
async def test_head_has_no_body(path: bytes) -> None:
    handler = Handler()
    async with s.echo_server(ServerLimits(), handler.answer) as echo:
        client = await raw.RawClient.connect(echo.target)
        client.send(ask(path, 1, b"HEAD"))
        _, flags, _, payload = await client.until_frame(raw.DATA, 1)
        assert (flags & raw.END_STREAM, payload) == (raw.END_STREAM, b"")
        client.close()
