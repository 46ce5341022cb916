"""TLS: ALPN chooses the protocol, client certificates reach handlers, bad or silent clients are turned away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import grpc
import pytest

from raftkv.rpc import Channel, ChannelOptions, Code, HttpRequest, HttpResponse, ServerLimits, UnaryCall
from tests.rpc import services as s
from tests.rpc.conftest import Certificates
from tests.rpc.loop import failure, until


async def test_grpcio_client(certificates: Certificates) -> None:
    async with s.echo_server(ssl=certificates.server_context()) as echo:

        def use() -> None:
            credentials = grpc.ssl_channel_credentials(certificates.read("ca.crt"))
            with grpc.secure_channel(echo.target, credentials) as channel:
                assert channel.unary_unary(s.UNARY)(bytes(500_000), timeout=60) == bytes(500_000)
                assert list(channel.stream_stream(s.BIDI)(iter([b"a", b"b"]), timeout=60)) == [b"a", b"b"]

        await asyncio.to_thread(use)


async def test_grpcio_server(certificates: Certificates) -> None:
    credentials = grpc.ssl_server_credentials([(certificates.read("server.key"), certificates.read("server.crt"))])
    with s.grpcio_server(tls=credentials) as server:
        async with Channel(server.target, certificates.client_context()) as channel:
            assert await channel.unary(s.UNARY, bytes(500_000), 20) == bytes(500_000)


async def test_both_ours_with_client_certificate(certificates: Certificates) -> None:
    seen: list[UnaryCall] = []
    async with s.echo_server(ssl=certificates.server_context(ask_client=True)) as echo:

        def who(call: UnaryCall, message: bytes) -> None:
            seen.append(call)
            call.reply(b"you")

        echo.server.unary("/test.Who/Am", who)
        async with Channel(echo.target, certificates.client_context("client")) as channel:
            assert await channel.unary("/test.Who/Am", b"", 20) == b"you"
    assert seen[0].peer.tls
    assert seen[0].peer.certificate is not None
    assert (("commonName", "client"),) in seen[0].peer.certificate["subject"]


async def test_plain_text_and_tls_on_one_port(echo: s.EchoServer, certificates: Certificates) -> None:
    ((host, port),) = await echo.server.listen("127.0.0.1", 0, certificates.server_context(), plain_too=True)
    for context in (None, certificates.client_context()):
        async with Channel(f"{host}:{port}", context) as channel:
            assert await channel.unary(s.UNARY, bytes(100_000), 20) == bytes(100_000)


async def test_plain_http_is_refused_where_grpc_is_alone(echo: s.EchoServer) -> None:
    ((host, port),) = await echo.server.listen("127.0.0.1", 0, grpc_only=True)
    async with Channel(f"{host}:{port}") as channel:
        assert await channel.unary(s.UNARY, b"a", 20) == b"a"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("name", [None, "stranger"])
async def test_clients_without_a_good_certificate_are_refused(certificates: Certificates, name: str | None) -> None:
    async with s.echo_server(ssl=certificates.server_context(ask_client=True)) as echo:
        async with Channel(echo.target, certificates.client_context(name)) as channel:
            error = await failure(channel.unary(s.UNARY, b"", 20))
            assert (error.code, error.definite) == (Code.UNAVAILABLE, True)
        await until(lambda: not echo.server.connections)
        assert echo.reported == []


async def test_our_client_does_not_trust_strangers(certificates: Certificates) -> None:
    async with (
        s.echo_server(ssl=certificates.server_context()) as echo,
        Channel(echo.target, ssl.create_default_context()) as channel,
    ):
        error = await failure(channel.unary(s.UNARY, b"", 20))
        assert (error.code, error.definite) == (Code.UNAVAILABLE, True)
        assert "certificate" in error.text


async def test_http1_by_alpn_and_without_alpn_on_the_same_port(certificates: Certificates) -> None:
    async def handler(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, f"{request.path} {request.tls}".encode())

    async with s.echo_server(http_handler=handler, ssl=certificates.server_context()) as echo:
        host, _, port = echo.target.partition(":")
        for protocols in (["http/1.1"], []):
            context = certificates.client_context()
            if protocols:
                context.set_alpn_protocols(protocols)
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await reader.read(-1)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"\r\n\r\n/health True")
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_half_open_and_plain_connections_to_a_tls_port_end(certificates: Certificates, first: bytes) -> None:
    limits = ServerLimits(tls_handshake_timeout_s=0.1)
    async with s.echo_server(limits, ssl=certificates.server_context()) as echo:
        host, _, port = echo.target.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(first)
        try:
            await reader.read(-1)
        except ConnectionError:
            pass
        await until(lambda: not echo.server.connections)
        writer.close()


async def test_unfinished_handshakes_count_as_connections(certificates: Certificates) -> None:
    async with s.echo_server(ServerLimits(connections=1), ssl=certificates.server_context()) as echo:
        host, _, port = echo.target.partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        await until(lambda: echo.server.connections)
        options = ChannelOptions(connect_timeout_s=5)
        async with Channel(echo.target, certificates.client_context(), options) as channel:
            assert (await failure(channel.unary(s.UNARY, b"", 20))).code is Code.UNAVAILABLE
        writer.close()
        await until(lambda: not echo.server.connections)


@pytest.mark.parametrize("secure", [True, False])
async def test_a_busy_server_may_take_longer_to_greet_than_its_kernel_to_connect(certificates, secure):
    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection(*echo.target.split(":"))
        await asyncio.gather(pass_on(reader, to_server[1]), pass_on(to_server[0], writer))

    limit_s = 0.2
    options = ChannelOptions(connect_timeout_s=limit_s, backoff_base_s=60, backoff_max_s=60)
    trust, own = (certificates.client_context(), certificates.server_context()) if secure else (None, None)
    async with s.echo_server(ssl=own) as echo:
        listener = socket.create_server(("127.0.0.1", 0))
        target = "{}:{}".format(*listener.getsockname())
        async with Channel(target, trust, options) as channel:
            answer = channel.unary(s.UNARY, b"late", 20, wait_for_ready=True)
            late = asyncio.Event()
            asyncio.get_running_loop().call_later(2 * limit_s, late.set)
            await late.wait()
            server = await asyncio.start_server(lead, sock=listener)
            assert await answer == b"late"
        server.close()


async def test_plain_client_on_a_tls_port_and_tls_client_on_a_plain_port_fail_cleanly(certificates):
    async with s.echo_server(ssl=certificates.server_context()) as echo, Channel(echo.target) as channel:
        assert (await failure(channel.unary(s.UNARY, b"", 20))).definite
    async with s.echo_server() as echo, Channel(echo.target, certificates.client_context()) as channel:
        assert (await failure(channel.unary(s.UNARY, b"", 20))).definite


async def test_close_while_a_handshake_hangs(certificates: Certificates) -> None:
    async with s.echo_server(ssl=certificates.server_context()) as echo:
        host, _, port = echo.target.partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        await until(lambda: echo.server.connections)
        await echo.server.close()
        assert not echo.server.connections
        writer.close()


async def test_the_end_of_one_connection_disturbs_no_other(certificates: Certificates) -> None:
    """A client's goodbye closes the transport before we do; closing it twice breaks it."""
    trouble: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: trouble.append(context["message"]))
    async with s.echo_server(ssl=certificates.server_context()) as echo:
        for _ in range(20):
            async with Channel(echo.target, certificates.client_context()) as channel:
                assert await channel.unary(s.UNARY, b"x", 10) == b"x"
                stream = channel.stream(s.BIDI)
                await stream.send(b"x")
                assert await stream.receive() == b"x"
                stream.cancel()
            await until(lambda: not echo.server.connections)
    assert trouble == []
