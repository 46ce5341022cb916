"""TLS over a transport: what a peer may make it do without sending data, and the end of connections."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from raftkv.rpc import Channel
from raftkv.rpc.tls import ANSWERS_MAX_BYTES, READ_MAX_BYTES, EncryptedTransport
from tests.rpc import services as s
from tests.rpc.conftest import Certificates
from tests.rpc.loop import failure, until


def _tls_of(echo: s.EchoServer) -> EncryptedTransport:
    (connection,) = echo.server.connections
    transport: Any = connection._transport
    assert isinstance(transport, EncryptedTransport)
    return transport


@asynccontextmanager
async def connected(certificates: Certificates) -> AsyncIterator[tuple[s.EchoServer, EncryptedTransport]]:
    """A server that has answered a call, and its end of the connection."""
    async with (
        s.echo_server(ssl=certificates.server_context()) as echo,
        Channel(echo.target, certificates.client_context()) as channel,
    ):
        assert await channel.unary(s.UNARY, b"x", 10) == b"x"
        yield echo, _tls_of(echo)


async def test_a_read_full_of_what_is_no_data_ends_the_connection(certificates, monkeypatch):
    """Act as a flood of changes of keys: thousands in one read, each some microseconds of OpenSSL's."""
    async with connected(certificates) as (echo, tls):
        monkeypatch.setattr(tls, "_deliver", lambda: READ_MAX_BYTES // 8 - 1)
        tls.buffer_updated(READ_MAX_BYTES - 1)  # less than a full read may be the half of a record
        assert not tls.is_closing()
        tls.buffer_updated(READ_MAX_BYTES)
        assert tls.is_closing()
        await until(lambda: not echo.server.connections)


async def test_answers_of_tls_itself_do_not_pile_up(certificates, monkeypatch):
    async with connected(certificates) as (_, tls):
        monkeypatch.setattr(tls, "get_write_buffer_size", lambda: 1)
        for _ in range(ANSWERS_MAX_BYTES // 1000):
            tls._outgoing.write(bytes(1000))
            assert not tls.is_closing()
            tls._answer()
        tls._outgoing.write(bytes(1000))
        tls._answer()
        assert tls.is_closing()


async def test_a_change_of_keys_is_answered(certificates: Certificates) -> None:
    """openssl's ``K``: new keys, and a wish for new ones in return."""
    async with s.echo_server(ssl=certificates.server_context()) as echo:
        words = ["openssl", "s_client", "-connect", echo.target, "-tls1_3", "-alpn", "http/1.1"]
        client = await asyncio.create_subprocess_exec(
            *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert client.stdin is not None
        assert client.stdout is not None
        await client.stdout.readuntil(b"SSL handshake")
        for _ in range(3):
            client.stdin.write(b"K\n")
            await client.stdin.drain()
            await client.stdout.readuntil(b"KEYUPDATE")
        client.stdin.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await client.stdout.readuntil(b"HTTP/1.1 ")
        client.kill()
        await client.wait()


async def test_a_connection_that_is_cut_within_tls_fails_its_calls(certificates: Certificates) -> None:
    async with (
        s.echo_server(ssl=certificates.server_context()) as echo,
        Channel(echo.target, certificates.client_context()) as channel,
    ):
        call = channel.unary(s.HANG, b"x", 10)
        await until(lambda: echo.hanging)
        _tls_of(echo)._below.write(bytes(100))  # no record of TLS
        error = await failure(call)
        assert error.code == 14
        await until(lambda: not echo.server.connections)


async def test_nothing_is_written_after_what_is_no_record(certificates: Certificates) -> None:
    """Answers leave within turns of the member's node, which must not fail there for what a client has broken."""
    async with connected(certificates) as (echo, tls):
        tls._buffer[:100] = bytes(100)
        tls.buffer_updated(100)
        assert tls.is_closing()
        tls.write(b"an answer")
        await until(lambda: not echo.server.connections)


class _Breaking:
    """Stands for an object of OpenSSL that decrypts a record, and finds that the next is none."""

    def __init__(self) -> None:
        self._records: list[bytes | ssl.SSLError] = [b"sound", ssl.SSLError(1, "bad record mac")]

    def read(self, size: int, buffer: memoryview) -> int:
        record = self._records.pop(0)
        if isinstance(record, ssl.SSLError):
            raise record
        buffer[: len(record)] = record
        return len(record)

    def pending(self) -> int:
        return 1


class _Hearing(asyncio.Protocol):
    """Notes the data and the end of its connection."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def data_received(self, data: bytes) -> None:
        self.heard.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.append(type(exc))


async def test_bytes_before_a_broken_record_are_delivered(certificates: Certificates) -> None:
    """Hand over the answer to a call that has come whole, before the connection fails."""
    async with connected(certificates) as (echo, tls):
        below, above, stand_in = tls._protocol, _Hearing(), _Breaking()
        real, breaking = tls._tls, cast(Any, stand_in)
        tls._tls = breaking
        tls.set_protocol(above)
        tls.buffer_updated(100)
        assert above.heard == [b"sound"]
        assert tls.is_closing()
        tls._tls = real
        await until(lambda: above.heard == [b"sound", ssl.SSLError])
        assert below is not None
        below.connection_lost(None)
        await until(lambda: not echo.server.connections)


@pytest.mark.interpreted
async def test_a_broken_tls_connection_that_is_not_read_is_cut(certificates, monkeypatch):
    """A connection that is closing waits for what it has to send; of a broken one nothing watched that it leaves."""
    async with connected(certificates) as (echo, tls):
        monkeypatch.setattr(tls._below, "get_write_buffer_size", lambda: 1)
        closed: list[str] = []
        monkeypatch.setattr(tls._below, "close", lambda: closed.append("close"))
        tls._buffer[:100] = bytes(100)
        tls.buffer_updated(100)
        await until(lambda: not echo.server.connections)


class _Refusing:
    """Stands for an object of OpenSSL that is beyond use."""

    def write(self, data: bytes) -> int:
        raise ssl.SSLError(1, "beyond use")


async def test_failed_encryption_ends_the_connection(certificates: Certificates) -> None:
    async with connected(certificates) as (echo, tls):
        stand_in: Any = _Refusing()
        tls._tls = stand_in
        tls.write(b"an answer")
        assert tls.is_closing()
        await until(lambda: not echo.server.connections)
