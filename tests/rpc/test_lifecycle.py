"""Calls and connections from beginning to end, both ends ours: answers late, twice or never; drain and close."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from raftkv.rpc import Channel, ChannelState, Code, RpcError, Server, ServerLimits, StreamCall, UnaryCall
from raftkv.rpc.framing import frame
from raftkv.rpc.server.calls import CallStateError
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from raftkv.rpc.shares import identity_of
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.loop import failure, until


async def test_an_answer_may_come_later_from_the_loop() -> None:
    async with s.pair() as (echo, channel):
        call = channel.unary(s.HANG, b"", 20)
        await until(lambda: echo.hanging)
        assert not call.done()
        echo.hanging[0].reply(b"late")
        assert await call == b"late"


async def test_answering_twice_is_a_bug_and_answering_too_late_is_not() -> None:
    async with s.pair() as (echo, channel):
        call = channel.unary(s.HANG, b"", 20)
        await until(lambda: echo.hanging)
        echo.hanging[0].reply(b"")
        with pytest.raises(CallStateError):
            echo.hanging[0].reply(b"")
        with pytest.raises(CallStateError):
            echo.hanging[0].fail(1)
        await call
        gone = channel.unary(s.HANG, b"")
        await until(lambda: len(echo.hanging) == 2)
        gone.cancel()
        await until(lambda: echo.hanging[1].cancelled)
        echo.hanging[1].reply(b"lost")
        echo.hanging[1].fail(1)


async def test_the_server_ends_calls_past_their_deadline_by_itself(echo: s.EchoServer) -> None:
    """A raw client does not enforce its own deadline."""
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1, raw.grpc_headers(s.HANG, (b"grpc-timeout", b"50m"))))
    client.send(raw.message(1, frame(b""), raw.END_STREAM))
    _, flags, _, block = await client.until_frame(raw.HEADERS, 1)
    assert flags & raw.END_STREAM
    assert raw.decode_block(block)[b"grpc-status"] == b"4"
    assert echo.cancelled == ["hang"]
    client.close()


async def test_deadline_of_a_stream_cancels_its_task(echo: s.EchoServer) -> None:
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1, raw.grpc_headers(s.BIDI, (b"grpc-timeout", b"50m"))))
    assert raw.decode_block((await client.until_frame(raw.HEADERS, 1))[3])[b"grpc-status"] == b"4"
    # The request was not finished: the server asks the client to stop sending it.
    assert (await client.until_frame(raw.RST_STREAM, 1))[3] == bytes(4)
    await until(lambda: not echo.server._tasks)
    assert echo.cancelled == ["bidi"]
    client.close()


@pytest.mark.parametrize(
    ("body", "flags", "text"),
    [
        (b"", raw.END_STREAM, "cardinality violation: received no request message from non-client-streaming RPC"),
        (
            frame(b"a") + frame(b"b"),
            raw.END_STREAM,
            "cardinality violation: received multiple request messages for non-client-streaming RPC",
        ),
        (b"\0\0\0\0\5abc", raw.END_STREAM, "unexpected EOF"),
        (b"\0\0", raw.END_STREAM, "unexpected EOF"),
        (b"\1\0\0\0\1a", 0, "grpc: compressed flag set with identity or empty encoding"),
    ],
)
async def test_unary_requests_that_break_the_protocol(echo: s.EchoServer, body: bytes, flags: int, text: str) -> None:
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1, raw.grpc_headers(s.HANG)) + raw.message(1, body, flags))
    answer = raw.decode_block((await client.until_frame(raw.HEADERS, 1))[3])
    assert (answer[b"grpc-status"], answer[b"grpc-message"]) == (b"13", text.encode())
    assert not echo.hanging
    client.close()


@pytest.mark.parametrize("content_type", [b"application/grpc+json", b"application/grpc;charset=utf-8"])
async def test_a_content_type_may_say_more_than_that_it_is_grpc(echo: s.EchoServer, content_type: bytes) -> None:
    fields = tuple((n, content_type if n == b"content-type" else v) for n, v in raw.grpc_headers(s.UNARY))
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1, fields) + raw.message(1, frame(b"hello"), raw.END_STREAM))
    assert (await client.until_frame(raw.DATA, 1))[3] == frame(b"hello")
    client.close()


@pytest.mark.parametrize(
    ("field", "http_status", "code"),
    [((b"grpc-timeout", b"soon"), b"200", b"13"), ((b"grpc-encoding", b"snappy"), b"200", b"12")],
)
async def test_headers_that_break_the_protocol(echo, field, http_status, code):
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1, raw.grpc_headers(s.UNARY, field)) + raw.message(1, frame(b""), raw.END_STREAM))
    answer = raw.decode_block((await client.until_frame(raw.HEADERS, 1))[3])
    assert (answer[b":status"], answer[b"grpc-status"]) == (http_status, code)
    client.close()


@pytest.mark.parametrize("path", [s.BIDI, s.COUNT, s.LATER])
async def test_a_call_whose_timeout_is_malformed_leaves_no_task(echo: s.EchoServer, path: str) -> None:
    """Its handler would wait for a request, for ever: also when the connection has gone."""
    client = await raw.RawClient.connect(echo.target)
    fields = raw.grpc_headers(path, (b"grpc-timeout", b"soon"))
    client.send(b"".join(raw.headers(one, fields) for one in range(1, 200, 2)))
    await client.until_frame(raw.HEADERS, 199)
    answers = raw.decode_headers(client.frames).values()
    assert {fields[b"grpc-message"] for fields in answers} == {b"malformed grpc-timeout: 'soon'"}
    await until(lambda: not echo.server._tasks)
    assert not echo.streams
    client.close()


async def test_connect_method_without_a_path_does_no_harm(echo: s.EchoServer) -> None:
    client = await raw.RawClient.connect(echo.target)
    fields = ((b":method", b"CONNECT"), (b":authority", b"x"), (b"content-type", b"application/grpc"))
    client.send(raw.headers(1, fields, raw.END_HEADERS | raw.END_STREAM))
    assert raw.decode_block((await client.until_frame(raw.HEADERS, 1))[3])[b":status"] == b"405"
    client.close()


async def test_reset_in_the_same_bytes_as_the_request_harms_no_other_call(echo: s.EchoServer) -> None:
    client = await raw.RawClient.connect(echo.target)
    for path in (s.UNARY, "/no/Such", s.BIDI, s.RAISE):
        odd = {s.UNARY: 1, "/no/Such": 3, s.BIDI: 5, s.RAISE: 7}[path]
        client.send(
            raw.headers(odd, raw.grpc_headers(path)) + raw.message(odd, frame(b"x"), raw.END_STREAM) + raw.reset(odd)
        )
    client.send(raw.headers(99, raw.grpc_headers(s.UNARY)) + raw.message(99, frame(b"good"), raw.END_STREAM))
    await client.until_frame(raw.HEADERS, 99)
    assert (await client.until_frame(raw.DATA, 99))[3] == frame(b"good")
    client.close()


async def test_a_connection_has_room_for_ten_thousand_calls_and_a_large_request(echo: s.EchoServer) -> None:
    """jetcd opens a stream for each watch: above the limit its further calls, puts too, wait in the client."""
    client = await raw.RawClient.connect(echo.target)
    for stream_id in range(1, 19_999, 2):
        client.send(raw.headers(stream_id) + raw.message(stream_id, frame(b""), raw.END_STREAM))
    await until(lambda: len(echo.hanging) == 9_999)
    large = frame(bytes(20_000))
    client.send(raw.headers(19_999, raw.grpc_headers(s.UNARY)) + raw.message(19_999, large[:16_000]))
    client.send(raw.message(19_999, large[16_000:], raw.END_STREAM))
    _, _, _, answer = await client.until_frame(raw.DATA, 19_999)
    assert answer == large[: len(answer)]
    client.close()


async def test_drain_lets_calls_finish_and_closes_after_the_last() -> None:
    async with s.pair() as (echo, channel):
        stream = channel.stream(s.BIDI)
        await stream.send(b"before")
        assert await stream.receive() == b"before"
        call = channel.unary(s.HANG, b"")
        await until(lambda: echo.hanging)
        echo.server.stop_listening()
        echo.server.drain()
        await until(lambda: channel.state is ChannelState.TRANSIENT_FAILURE)
        refused = await failure(channel.unary(s.UNARY, b""))
        assert (refused.code, refused.definite) == (Code.UNAVAILABLE, True)
        await stream.send(b"during")
        assert await stream.receive() == b"during"
        echo.hanging[0].reply(b"after")
        assert await call == b"after"
        assert echo.server.connections
        stream.half_close()
        assert await stream.receive() is None
        await until(lambda: not echo.server.connections)


async def test_drain_of_an_idle_connection_closes_it_and_a_client_that_ignores_it_is_cut() -> None:
    async with s.echo_server(ServerLimits(goaway_notice_timeout_s=0.05)) as echo:
        client = await raw.RawClient.connect(echo.target)
        await client.until_frame(raw.SETTINGS)
        echo.server.drain()
        await client.until_closed()
        goaways = [payload for kind, _, _, payload in client.frames if kind == raw.GOAWAY]
        assert [int.from_bytes(payload[:4], "big") for payload in goaways] == [2**31 - 1, 0]
        client.close()


async def test_close_gives_calls_their_grace_and_then_cuts() -> None:
    echo = s.EchoServer()
    ((host, port),) = await echo.server.listen("127.0.0.1", 0)
    async with Channel(f"{host}:{port}") as channel:
        quick, stuck = channel.unary(s.HANG, b""), channel.unary(s.HANG, b"")
        stream = channel.stream(s.BIDI)
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        await until(lambda: len(echo.hanging) == 2)
        closing = asyncio.create_task(echo.server.close(grace_s=0.2))
        echo.hanging[0].reply(b"in time")
        assert await quick == b"in time"
        error = await failure(stuck)
        assert (error.code, error.definite) == (Code.UNAVAILABLE, False)
        assert (await failure(stream.receive())).code is Code.UNAVAILABLE
        await closing
    assert sorted(echo.cancelled) == ["bidi", "hang"]
    assert not echo.server._tasks
    assert echo.reported == []


async def test_errors_are_translated_by_the_injected_table() -> None:
    class KnownError(Exception):
        pass

    reported: list[str] = []
    server = Server(
        report=lambda path, error: reported.append(path),
        translate=lambda error: RpcError(11, "known") if isinstance(error, KnownError) else None,
    )

    def raise_now(call: UnaryCall, message: bytes) -> None:
        raise KnownError

    async def raise_later(message: bytes, call: UnaryCall) -> bytes:
        raise KnownError

    async def raise_in_stream(call: StreamCall) -> None:
        raise KnownError

    server.unary("/a.B/Now", raise_now)
    server.unary_async("/a.B/Later", raise_later)
    server.stream("/a.B/Stream", raise_in_stream)
    ((host, port),) = await server.listen("127.0.0.1")
    async with Channel(f"{host}:{port}") as channel:
        for error in (
            await failure(channel.unary("/a.B/Now", b"")),
            await failure(channel.unary("/a.B/Later", b"")),
            await failure(channel.stream("/a.B/Stream").receive()),
        ):
            assert (error.code, error.text) == (Code.OUT_OF_RANGE, "known")
    await server.close()
    assert reported == []


async def test_calls_and_requests_have_the_identity_of_their_connection() -> None:
    async def handle(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, repr(request.identity).encode())

    server = Server(http_handler=handle, identify=lambda address, certificate: address.partition(":")[0].encode())
    server.unary(s.UNARY, lambda call, message: call.reply(repr(identity_of(call)).encode()))
    ((host, port),) = await server.listen("127.0.0.1")
    async with Channel(f"{host}:{port}") as channel:
        assert await channel.unary(s.UNARY, b"", 20) == b"b'127.0.0.1'"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).endswith(b"b'127.0.0.1'")
    writer.close()
    await server.close()


async def test_wildcard_of_ipv6_takes_ipv4() -> None:
    """Serve both with --listen-client-urls http://[::]:2379, as Go's listener does."""
    server = Server()
    server.unary(s.UNARY, lambda call, message: call.reply(str(call.peer).rpartition(":")[0].encode()))
    ((_, port, *_),) = await server.listen("::")
    for host in ("127.0.0.1", "[::1]"):
        async with Channel(f"{host}:{port}") as channel:
            assert await channel.unary(s.UNARY, b"", 20) == host.encode()
    await server.close()


async def test_unix_sockets(tmp_path: Path) -> None:
    server = Server()
    server.unary(s.UNARY, lambda call, message: call.reply(str(call.peer).encode()))
    await server.listen(None, unix=str(tmp_path / "socket"))
    async with Channel(f"unix:{tmp_path}/socket") as channel:
        assert await channel.unary(s.UNARY, b"", 20) == b"unix:"
    await server.close()


@pytest.mark.interpreted
async def test_answers_of_one_turn_leave_in_one_write() -> None:
    async with s.pair() as (echo, channel):
        calls = [channel.unary(s.HANG, b"") for _ in range(50)]
        await until(lambda: len(echo.hanging) == 50)
        (connection,) = echo.server.connections
        writes: list[int] = []
        transport = connection._h2.transport
        original = transport.write
        transport.write = lambda data: (writes.append(len(data)), original(data))[1]
        for call in echo.hanging:
            call.reply(b"")
        await asyncio.gather(*calls)
        assert len(writes) == 1


@pytest.mark.parametrize("family", ["tcp", "unix"])
async def test_connections_wait_until_the_server_accepts(tmp_path: Path, family: str) -> None:
    server = Server()
    server.unary("/t.Echo/Say", lambda call, message: call.reply(message))
    path = str(tmp_path / "socket") if family == "unix" else None
    ((host, port),) = await server.listen("127.0.0.1", unix=path, accepting=False)
    if family == "tcp":
        with pytest.raises(OSError, match="in use"):
            await Server().listen("127.0.0.1", port)
    async with Channel([f"unix:{host}" if path else f"{host}:{port}"]) as channel:
        call = channel.unary("/t.Echo/Say", b"early", 20, wait_for_ready=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(call), 0.2)
        assert not server.connections
        server.start_accepting()
        assert await call == b"early"
        assert await channel.unary("/t.Echo/Say", b"late", 20) == b"late"
    await server.close()


async def test_a_listener_that_accepts_at_once_does_not_open_one_that_waits() -> None:
    server = Server()
    server.unary("/t.Echo/Say", lambda call, message: call.reply(message))
    ((_, waiting),) = await server.listen("127.0.0.1", accepting=False)
    ((_, open_now),) = await server.listen("127.0.0.1")
    async with Channel(f"127.0.0.1:{waiting}") as later, Channel(f"127.0.0.1:{open_now}") as now:
        call = later.unary("/t.Echo/Say", b"early", 20, wait_for_ready=True)
        assert await now.unary("/t.Echo/Say", b"now", 20) == b"now"
        assert len(server.connections) == 1
        assert not call.done()
        server.start_accepting()
        assert await call == b"early"
    await server.close()


async def test_a_connection_that_has_no_streams_left_is_replaced() -> None:
    """Ids of streams only grow, up to 2^31; calls under way go on."""
    async with s.pair() as (echo, channel):
        assert await channel.unary(s.UNARY, b"first", 20) == b"first"
        (connection,) = channel._connections
        connection.core.h2._next_id = 2**31 - 5
        lasting = channel.stream(s.BIDI)
        await lasting.send(b"before")
        assert await lasting.receive() == b"before"
        for number in range(4):
            assert await channel.unary(s.UNARY, b"%d" % number, 20) == b"%d" % number
        assert len(echo.server.connections) == 2
        await lasting.send(b"after")
        assert await lasting.receive() == b"after"
        lasting.cancel()


async def test_a_handler_that_only_sends_pauses_when_its_call_is_over(echo: s.EchoServer) -> None:
    """A connection may be ended in the turn in which it woke the handler, and the cancellation come in a later one."""
    sent = 0

    async def endless(call: StreamCall) -> None:
        nonlocal sent
        await call.send(b"first")
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        call.cut()
        for _ in range(10_000):
            sent += 1
            await call.send(b"lost")

    echo.server.stream("/test.Echo/Endless", endless)
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1, raw.grpc_headers("/test.Echo/Endless")))
    await until(lambda: sent and not echo.server._tasks)
    assert sent == 1
    client.close()


class _Failing(asyncio.Transport):
    """Cannot be written to."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        raise RuntimeError("this connection is beyond use")

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self._transport.abort()


async def test_failed_flush_ends_that_connection_alone() -> None:
    """The member's node flushes all connections, and an error in its turn stops the member."""
    failed: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["message"]))
    async with s.pair() as (echo, channel), Channel(echo.target) as other:
        calls = [one.unary(s.HANG, b"x", 10) for one in (channel, other)]
        await until(lambda: len(echo.hanging) == 2)
        broken = next(one for one in echo.server.connections if one._h2 and one._h2.core is echo.hanging[0]._carrier)
        assert broken._h2 is not None
        broken._h2.transport = _Failing(broken._h2.transport)
        with echo.server.cork:
            for call in echo.hanging:
                call.reply(b"answer")
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(map(str, ends)) == sorted([str(b"answer"), "UNAVAILABLE: error reading from server: EOF"])
        await until(lambda: len(echo.server.connections) == 1)
    assert failed == ["a connection could not be flushed"]
