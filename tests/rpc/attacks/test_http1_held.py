"""What connections of HTTP/1.1 hold while they are served: who holds most of it goes, not who comes next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from raftkv.rpc import HttpRequest, HttpResponse, ServerLimits
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.clock import Clock, on_clock
from tests.rpc.loop import on_loop, until

MIB = 1024 * 1024
LIMIT = 8 * MIB
ASK = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
SEND = b"PUT /wait HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (2 * MIB, bytes(2 * MIB))


class Handler:
    """Serves ``/wait`` for ever, as a watch is."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0

    async def answer(self, request: HttpRequest) -> HttpResponse:
        if request.path == "/wait":
            self.begun += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return HttpResponse(200, request.body)


@contextlib.asynccontextmanager
async def world(handler: Handler) -> AsyncIterator[tuple[s.EchoServer, str, int]]:
    async with s.echo_server(ServerLimits(process_assembly_bytes=LIMIT), handler.answer) as echo:
        host, _, port = echo.target.rpartition(":")
        yield echo, host, int(port)
    assert not echo.server.answers.held_bytes
    assert not echo.server.answers.holders


@pytest.mark.parametrize("is_body", [False, True], ids=["what follows a request", "its body"])
@on_loop
async def test_who_is_served_and_sends_much_is_cut_off_when_all_hold_too_much(is_body: bool) -> None:
    """Twenty connections of up to 2 MiB each, where four are allowed."""
    handler = Handler()
    async with world(handler) as (echo, host, port):
        honest = await raw.RawClient.connect(echo.target)
        honest.send(raw.headers(1, raw.grpc_headers(s.UNARY)) + raw.message(1, b"\0\0\0\0\x0a12345"))
        greedy = []
        for number in range(1, 21):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(SEND if is_body else ASK)
            greedy.append((reader, writer))
            await until(lambda number=number: handler.begun == number)
            assert echo.server.answers.held_bytes <= LIMIT + MIB // 4
            if not is_body:
                writer.write(bytes(3 * MIB))
        ends = [asyncio.create_task(reader.read()) for reader, _ in greedy]
        await until(lambda: handler.cancelled >= 16)
        assert echo.server.answers.held_bytes <= LIMIT
        # Others are served meanwhile, over both versions.
        honest.send(raw.message(1, b"67890", raw.END_STREAM))
        assert (await honest.until_frame(raw.DATA, 1))[3] == b"\0\0\0\0\x0a1234567890"
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"PUT /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nsm")
        writer.write(b"al")
        assert await reader.readuntil(b"smal")
        writer.close()
        assert honest.goaway is None
        honest.close()
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        for _, one in greedy:
            one.transport.abort()


@on_loop
async def test_who_is_in_the_middle_of_a_request_is_told_so() -> None:
    handler = Handler()
    async with world(handler) as (echo, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(SEND[: MIB + MIB // 2])
        await until(lambda: echo.server.answers.held_bytes > MIB)
        small = await raw.RawClient.connect(echo.target)
        echo.server.answers.held_bytes += LIMIT
        small.send(raw.headers(1, raw.grpc_headers(s.UNARY)) + raw.message(1, b"\0\0\0\0\x0a12345"))
        assert await reader.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
        echo.server.answers.held_bytes -= LIMIT
        writer.close()
        small.close()


@on_clock
async def test_who_is_not_read_any_more_and_is_written_nothing_is_cut(clock: Clock) -> None:
    """Cut it, for it may have left: what it has sent keeps the end of the connection from being seen."""
    handler = Handler()
    async with s.echo_server(ServerLimits(), handler.answer) as echo:
        host, _, port = echo.target.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(ASK)
        await until(lambda: handler.begun == 1)
        await clock.pass_s(300.0)
        assert len(echo.server.connections) == 1, "who waits for an answer, and says nothing, may"
        writer.write(bytes(3 * MIB))
        await until(lambda: echo.server.answers.held_bytes > 2 * MIB)
        await clock.pass_s(74.0)
        assert len(echo.server.connections) == 1
        await clock.pass_s(2.0)
        await until(lambda: not echo.server.connections)
        assert handler.cancelled == 1
        assert echo.server.answers.held_bytes == 0
        writer.transport.abort()
