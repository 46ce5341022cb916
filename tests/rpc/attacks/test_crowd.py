"""A port with few connections, all of which are taken by clients that only hold them: one that asks is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from raftkv.rpc import HttpRequest, HttpResponse, Server, ServerLimits
from raftkv.server.listening import METRICS_LIMITS
from tests.rpc import raw
from tests.rpc.loop import until

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
UNREAD = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
GREETING = raw.PREFACE + raw.settings() + raw.frame(raw.SETTINGS, raw.ACK, 0)
CONNECTIONS = METRICS_LIMITS.connections


async def handler(request: HttpRequest) -> HttpResponse:
    if request.path == "/wait":
        await asyncio.Event().wait()
    return HttpResponse(200, bytes(20_000_000) if request.path == "/large" else b"well")


@contextlib.asynccontextmanager
async def serving(limits: ServerLimits) -> AsyncIterator[tuple[Server, int]]:
    server = Server(limits, handler)
    [(_, port)] = await server.listen("127.0.0.1")
    try:
        yield server, port
    finally:
        await server.close()


async def hold(port: int, first: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(first)
    return writer


async def ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    try:
        return await reader.readuntil(b"well")
    finally:
        writer.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "first",
    [b"", GET[:9], GET, UNREAD, GREETING],
    ids=["says nothing", "half a header", "kept alive", "reads nothing", "HTTP/2"],
)
async def test_a_request_is_served_though_all_connections_are_held(first: bytes) -> None:
    async with serving(METRICS_LIMITS) as (server, port):
        held = [await hold(port, first) for _ in range(CONNECTIONS)]
        await until(lambda: len(server.connections) == CONNECTIONS)
        if first:
            await until(lambda: all(connection.idle_since_s for connection in server.connections))
        for _ in range(3):
            assert (await ask(port)).startswith(b"HTTP/1.1 200")
            held.append(await hold(port, first))
        assert len(server.connections) <= CONNECTIONS
        for writer in held:
            writer.transport.abort()


async def test_a_connection_being_served_is_kept() -> None:
    async with serving(METRICS_LIMITS) as (server, port):
        held = [await hold(port, b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(CONNECTIONS)]
        await until(lambda: len(server.connections) == CONNECTIONS)
        await until(lambda: all(connection.idle_since_s is None for connection in server.connections))
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await ask(port)
        assert len(server.connections) == CONNECTIONS
        for writer in held:
            writer.transport.abort()
