"""What connections of HTTP/1.1 hold while they are served: the one that holds most ends, not the next one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from raftkv.rpc import HttpRequest, HttpResponse, ServerLimits
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.clock import Clock, on_clock
from tests.rpc.loop import until

MIB = 1024 * 1024
LIMIT = 8 * MIB
ANSWER = 6 * MIB
ANSWERS = 32 * MIB
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
    assert not echo.server.answers.accounts


@pytest.mark.parametrize("is_whole", [False, True], ids=["unfinished", "served"])
async def test_headers_count_until_their_request_is_answered(is_whole: bool) -> None:
    """10,000 connections with headers of 31 KB took 0.4 GB unfinished, and 0.5 GB while served: nothing was counted."""
    handler = Handler()
    async with world(handler) as (echo, host, port):
        writers = []
        for _ in range(10):
            _, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /wait HTTP/1.1\r\nHost: x\r\nx: " + b"v" * 31_000 + b"\r\n" * (2 * is_whole))
            writers.append(writer)
        await until(lambda: handler.begun == 10 * is_whole and echo.server.answers.held_bytes >= 10 * 31_000)
        for writer in writers:
            writer.close()
        await until(lambda: not echo.server.answers.held_bytes)


@pytest.mark.parametrize("is_body", [False, True], ids=["what follows a request", "its body"])
async def test_senders_of_much_are_cut_off_when_all_hold_too_much(is_body: bool) -> None:
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


async def test_a_connection_cut_amid_a_request_is_answered_503() -> None:
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
async def test_a_connection_neither_read_nor_written_is_cut(clock: Clock) -> None:
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


class Answers:
    """Answers with megabytes at once, or in large pieces."""

    async def answer(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, bytes(ANSWER) if request.path == "/whole" else self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        for _ in range(4):
            yield bytes(ANSWER)


def _unread_bytes(echo: s.EchoServer) -> int:
    transports = [one._transport for one in echo.server.connections]
    return sum(transport.get_write_buffer_size() for transport in transports if transport is not None)


def _slow_reader(target: str, path: str) -> socket.socket:
    """A client that reads nothing, and whose kernel takes little for it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, _, port = target.rpartition(":")
    sock.connect((host, int(port)))
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return sock


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
async def test_unread_answers_count_with_all_others(path: str) -> None:
    """Twenty connections, of which four are allowed to have so much wait beside what their kernels take."""
    limits = ServerLimits(process_send_buffer_bytes=ANSWERS, reading_grace_s=1000)
    async with s.echo_server(limits, Answers().answer) as echo:
        socks = []
        for number in range(1, 21):
            socks.append(await asyncio.to_thread(_slow_reader, echo.target, path))
            await until(lambda number=number: len(echo.server.connections) == number)
            assert _unread_bytes(echo) <= ANSWERS
        await until(lambda: echo.server.answers.used_bytes >= ANSWERS // 2)
        for sock in socks:
            sock.close()
        await until(lambda: echo.server.answers.used_bytes == 0)


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
@on_clock
async def test_connections_that_do_not_read_end_when_the_process_is_short(clock: Clock, path: str) -> None:
    limits = ServerLimits(process_send_buffer_bytes=ANSWERS, reading_grace_s=5.0)
    async with s.echo_server(limits, Answers().answer) as echo:
        socks = [await asyncio.to_thread(_slow_reader, echo.target, path) for _ in range(20)]
        for sock in socks:
            await asyncio.to_thread(sock.recv, 1, socket.MSG_PEEK)
        assert echo.server.answers.short
        await clock.pass_s(5.1)
        host, _, port = echo.target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        reading = asyncio.create_task(reader.read())
        while not reading.done():
            await clock.pass_s(0.05)
        whole = reading.result()
        assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
        assert len(whole) > ANSWER * (1 if path == "/whole" else 4)
        assert echo.server.answers.ended_total
        writer.close()
        for sock in socks:
            sock.close()
