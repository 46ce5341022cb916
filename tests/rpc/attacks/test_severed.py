"""What a server can tell of the end of a call: the client let go, this end let go, or the connection broke."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable

import pytest

from raftkv.rpc import Channel, ServerLimits
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.conftest import Certificates
from tests.rpc.loop import until


@contextlib.asynccontextmanager
async def hanging(
    certificates: Certificates | None = None, limits: ServerLimits | None = None
) -> AsyncIterator[tuple[s.EchoServer, Channel, Callable[[], bool]]]:
    """A call of a channel that is never answered; the last says how it ended, once it has."""
    ours = None if certificates is None else certificates.server_context()
    theirs = None if certificates is None else certificates.client_context()
    async with s.echo_server(limits, ssl=ours) as echo, Channel(echo.target, theirs) as channel:
        call = channel.unary(s.HANG, b"")
        await until(lambda: echo.hanging)
        yield echo, channel, lambda: echo.hanging[0].severed
        assert echo.hanging[0].cancelled
        with contextlib.suppress(Exception):
            await call


def cut(channel: Channel, reset: bool = False) -> None:
    """What the kernel does with the connections of a process that is killed."""
    for connection in list(channel._connections):
        assert connection._transport is not None
        if reset:
            sock: socket.socket = connection._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.abort()


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_a_client_that_is_gone(certificates: Certificates, encrypted: bool, reset: bool) -> None:
    async with hanging(certificates if encrypted else None) as (echo, channel, severed):
        assert not severed(), "it is open"
        cut(channel, reset)
        await until(lambda: echo.cancelled)
        assert severed()


async def test_a_client_that_cancels() -> None:
    async with s.echo_server() as echo, Channel(echo.target) as channel:
        call = channel.unary(s.HANG, b"")
        await until(lambda: echo.hanging)
        call.cancel()
        await until(lambda: echo.cancelled)
        assert not echo.hanging[0].severed


async def test_a_client_that_closes_its_channel_has_ended_its_streams() -> None:
    async with s.echo_server() as echo, Channel(echo.target) as channel:
        stream = channel.stream(s.BIDI)
        await stream.send(b"x")
        await stream.receive()
        stream.cancel()
        await channel.close()
        await until(lambda: echo.cancelled)
        assert not echo.streams[0].severed


async def test_a_server_that_closes() -> None:
    async with hanging() as (echo, _, severed):
        await echo.server.close()
        assert echo.cancelled
        assert not severed()


async def test_a_client_that_is_thrown_out(echo: s.EchoServer) -> None:
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1) + raw.message(1, bytes(5), raw.END_STREAM))
    await until(lambda: echo.hanging)
    client.send(raw.frame(raw.DATA, 0, 0))  # a protocol error
    await until(lambda: echo.cancelled)
    assert not echo.hanging[0].severed
    client.close()


async def test_a_client_that_does_not_answer_pings() -> None:
    limits = ServerLimits(keepalive_time_s=0.05, keepalive_timeout_s=0.05)
    async with s.echo_server(limits) as echo:
        client = await raw.RawClient.connect(echo.target)
        client.send(raw.headers(1) + raw.message(1, bytes(5), raw.END_STREAM))
        await until(lambda: echo.cancelled)
        assert not echo.hanging[0].severed, "it is unknown whether it lives"
        client.close()
