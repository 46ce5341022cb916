"""Very much that one read makes due: requests completed by their last octets, calls that end together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import h11
import pytest

from raftkv.rpc import HttpRequest, HttpResponse, Server, UnaryCall
from raftkv.rpc.framing import frame as message_of
from raftkv.rpc.server.core import RECEIVE_S
from raftkv.rpc.server.server import BEGUN_IN_A_TURN, BYTES_AS_A_CALL
from raftkv.rpc.server.stream import StreamCall
from tests.rpc import raw
from tests.rpc.conftest import Certificates
from tests.rpc.loop import until

WORK_S = 0.002
"""What one request costs."""
REQUESTS = 60
FRAME_BYTES = 16_384
WORKED, HUNG = "/test.Work/Work", "/test.Work/Hang"
WITH_TASKS = ("/test.Work/Task", "/test.Work/Stream")
IN_A_TURN_MAX = 2 * (RECEIVE_S / WORK_S + 2)
"""A pass over the sockets and the backlog: each ends with the request that it is late with."""


class Turns:
    """Numbers the turns of the loop while it runs."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._next)

    def _next(self) -> None:
        self.number += 1
        self._handle = self._loop.call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


def held_back(count: int, path: str = WORKED, request: bytes = b"work") -> tuple[bytes, bytes]:
    """Requests without their last octet, and these."""
    body = message_of(request)
    fields = raw.grpc_headers(path)
    streams = range(1, 2 * count, 2)
    pieces = [body[at : at + FRAME_BYTES] for at in range(0, len(body) - 1, FRAME_BYTES)]
    pieces[-1] = pieces[-1].removesuffix(body[-1:])
    first = b"".join(
        raw.headers(one, fields) + b"".join(raw.message(one, piece) for piece in pieces) for one in streams
    )
    return first, b"".join(raw.message(one, body[-1:], raw.END_STREAM) for one in streams)


class Worker:
    """A server whose handler takes its time, and notes in which turn of the loop it did."""

    def __init__(self, turns: Turns) -> None:
        self.by_turn: Counter[int] = Counter()
        self._turns = turns
        self.port = 0
        self.server = Server()
        self.server.unary(WORKED, self._work)
        self.server.unary_async(WITH_TASKS[0], self._task)
        self.server.stream(WITH_TASKS[1], self._stream)
        self.server.unary(HUNG, lambda call, message: call.on_cancel(self._spin))

    def _work(self, call: UnaryCall, message: bytes) -> None:
        self._spin()
        call.reply(message)

    async def _task(self, message: bytes, call: UnaryCall) -> bytes:
        self.by_turn[self._turns.number] += 1
        return message

    async def _stream(self, call: StreamCall) -> None:
        self.by_turn[self._turns.number] += 1

    def _spin(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + WORK_S
        while loop.time() < until_s:
            pass
        self.by_turn[self._turns.number] += 1


@pytest.fixture
@asynccontextmanager
async def worker() -> AsyncIterator[Worker]:
    turns = Turns()
    made = Worker(turns)
    [(_, made.port)] = await made.server.listen("127.0.0.1")
    yield made
    turns.stop()
    await made.server.close()


async def connect(port: int, certificates: Certificates | None = None) -> raw.RawClient:
    context = None
    if certificates is not None:
        context = certificates.client_context()
        context.set_alpn_protocols(["h2"])
    client = raw.RawClient(*await asyncio.open_connection("127.0.0.1", port, ssl=context))
    client.send(raw.PREFACE + raw.settings() + raw.frame(raw.SETTINGS, raw.ACK, 0))
    return client


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
async def test_a_turn_does_a_few_of_the_requests_that_one_read_completes(worker, is_secure, certificates):
    context = certificates.server_context() if is_secure else None
    [(_, port)] = await worker.server.listen("127.0.0.1", 0, context)
    clients = [await connect(port, certificates if is_secure else None) for _ in range(3)]
    first, last = held_back(REQUESTS)
    for client in clients:
        client.send(first)
        client.send(raw.frame(raw.PING, 0, 0, bytes(8)))
        await client.until_frame(raw.PING)
        client.send(last)
    await until(lambda: worker.by_turn.total() == len(clients) * REQUESTS)
    assert max(worker.by_turn.values()) <= IN_A_TURN_MAX
    for client in clients:
        await client.until_frame(raw.DATA, 2 * REQUESTS - 1)
        client.close()


@pytest.mark.parametrize("path", WITH_TASKS)
async def test_a_turn_begins_a_few_of_the_calls_whose_tasks_one_read_makes(worker: Worker, path: str) -> None:
    """To make a task takes little, so that hundreds were made in a pass: their first steps were one turn of 0.17 s."""
    clients = [await connect(worker.port) for _ in range(3)]
    first, last = held_back(10 * REQUESTS, path)
    for client in clients:
        client.send(first if path == WITH_TASKS[0] else b"")
        client.send(raw.frame(raw.PING, 0, 0, bytes(8)))
        await client.until_frame(raw.PING)
        client.send(last if path == WITH_TASKS[0] else first)
    await until(lambda: worker.by_turn.total() == len(clients) * 10 * REQUESTS)
    assert max(worker.by_turn.values()) <= 2 * BEGUN_IN_A_TURN  # the number of the turn may change between two of them
    for client in clients:
        client.close()


async def test_a_large_request_counts_as_many_calls(worker: Worker) -> None:
    client = await connect(worker.port)
    first, last = held_back(4, WITH_TASKS[0], bytes(BYTES_AS_A_CALL * BEGUN_IN_A_TURN // 2))
    client.send(first)
    client.send(raw.frame(raw.PING, 0, 0, bytes(8)))
    await client.until_frame(raw.PING)
    client.send(last)
    await until(lambda: worker.by_turn.total() == 4)
    assert len(worker.by_turn) > 1
    client.close()


async def test_a_connection_that_goes_while_it_waits_is_forgotten(worker: Worker) -> None:
    client = await connect(worker.port)
    client.send(b"".join(held_back(REQUESTS)))
    await until(lambda: worker.by_turn.total() > 0)
    for connection in list(worker.server.connections):
        connection.abort()
    await until(lambda: not worker.server.connections)
    done = worker.by_turn.total()
    again = await connect(worker.port)
    again.send(raw.frame(raw.PING, 0, 0, bytes(8)))
    await again.until_frame(raw.PING)
    assert worker.by_turn.total() <= done + 1 < REQUESTS
    for one in (client, again):
        one.close()


@pytest.mark.parametrize("are_reset", [False, True], ids=["connection", "reset"])
async def test_a_turn_ends_a_few_of_the_calls_that_clients_leave_together(worker: Worker, are_reset: bool) -> None:
    clients = [await connect(worker.port) for _ in range(3)]
    streams = range(1, 2 * REQUESTS, 2)
    fields = raw.grpc_headers(HUNG)
    for client in clients:
        calls = (raw.headers(one, fields) + raw.message(one, message_of(b""), raw.END_STREAM) for one in streams)
        client.send(b"".join(calls))
        client.send(raw.frame(raw.PING, 0, 0, bytes(8)))
        await client.until_frame(raw.PING)
    assert sum(connection.open_calls for connection in worker.server.connections) == len(clients) * REQUESTS
    for client in clients:
        if are_reset:
            client.send(b"".join(map(raw.reset, streams)))
        else:
            client.close()
    await until(lambda: worker.by_turn.total() == len(clients) * REQUESTS)
    assert max(worker.by_turn.values()) <= IN_A_TURN_MAX
    assert worker.server.answers.held_bytes == 0
    for client in clients:
        client.close()


async def _echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, request.body)


async def test_a_turn_reads_a_few_of_the_chunks_of_a_body(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may hold 5,000 chunks of one byte. What is behind them, and who comes meanwhile, is served as ever."""
    server = Server(http_handler=_echo)
    [(host, port)] = await server.listen("127.0.0.1")
    next_event = h11.Connection.next_event

    def slow(self: h11.Connection) -> object:
        worker._spin()
        return next_event(self)

    monkeypatch.setattr(h11.Connection, "next_event", slow)
    chunked = (
        b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * REQUESTS + b"0\r\n\r\n"
    )
    behind = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nlast"
    clients = [await asyncio.open_connection(host, port) for _ in range(3)]
    for _, writer in clients[:2]:
        writer.write(chunked + behind)
    await until(lambda: worker.by_turn.total() > 0)
    clients[2][1].write(behind)
    clients[0][1].write(behind)
    for (reader, _), bodies in zip(
        clients, (["x" * REQUESTS, "last", "last"], ["x" * REQUESTS, "last"], ["last"]), strict=True
    ):
        for body in bodies:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(len(body)) == body.encode()
    assert max(worker.by_turn.values()) <= IN_A_TURN_MAX
    assert server.answers.held_bytes == 0
    # One that leaves while its chunks wait is forgotten.
    clients[1][1].write(chunked)
    await until(lambda: any(one._http1 is not None and one._http1._is_behind for one in server.connections))
    for _, writer in clients:
        writer.transport.abort()
    await until(lambda: not server.connections)
    assert server.answers.held_bytes == 0
    await server.close()
