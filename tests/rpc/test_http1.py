"""HTTP/1.1 on the gRPC port, and plain requests over HTTP/2: the same handler, with every limit."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from raftkv.rpc import HttpRequest, HttpResponse, ServerLimits
from raftkv.rpc.framing import frame
from raftkv.rpc.server.http import Origins
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.loop import until

LIMITS = ServerLimits(http_body_bytes=1000, http1_header_bytes=4000)


async def handler(request: HttpRequest) -> HttpResponse:
    match request.path:
        case "/echo":
            return HttpResponse(200, request.body)
        case "/show":
            shown = f"{request.method} {request.query} {request.header('x-y')} {request.header('no', '-')}"
            return HttpResponse(200, shown.encode(), (("X-Made", "yes"),))
        case "/host" | "/":
            return HttpResponse(200, f"{request.header('host')} {request.target}".encode())
        case "/stream":
            return HttpResponse(200, pieces())
        case "/broken-stream":
            return HttpResponse(200, broken())
        case "/raise":
            raise ZeroDivisionError("secret")
    return HttpResponse(404, b"nothing here\n")


async def pieces() -> AsyncIterator[bytes]:
    for number in range(3):
        await asyncio.sleep(0)
        yield b"piece %d\n" % number


async def broken() -> AsyncIterator[bytes]:
    yield b"first"
    raise ZeroDivisionError("secret")


async def exchange(target: str, request: bytes) -> bytes:
    """Send bytes, return everything the server says until it closes."""
    host, _, port = target.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await reader.read(-1)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.fixture
@asynccontextmanager
async def echo() -> AsyncIterator[s.EchoServer]:
    async with s.echo_server(LIMITS, handler) as echo:
        yield echo


CLOSE = b"Host: x\r\nConnection: close\r\n"


async def test_get(echo: s.EchoServer) -> None:
    answer = await exchange(echo.target, b"GET /show?a=1&b HTTP/1.1\r\nX-Y: z\r\n" + CLOSE + b"\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"X-Made: yes" in head
    assert body == b"GET a=1&b z -"


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        (b"http://a.example:23/host?a=/b", b"a.example:23 /host?a=/b"),
        (b"HTTPS://[::1]/host", b"[::1] /host"),
        (b"http://a.example", b"a.example /"),
        (b"http://a.example?host", b"a.example /?host"),
        (b"/host?http://a.example/", b"x /host?http://a.example/"),
        (b"http://a:b@c.example/host", b"nothing here\n"),
    ],
)
async def test_a_target_in_absolute_form_names_the_host(echo: s.EchoServer, target: bytes, seen: bytes) -> None:
    """RFC 9112, 3.2.2: clients that take this server for their proxy send it, and the Host header counts no more."""
    for head in (b"Host: x\r\n", CLOSE):  # the first may become known
        begin = b"GET %s HTTP/1.1\r\n" % target
        answer = await exchange(echo.target, begin + head + b"\r\n" + begin + CLOSE + b"\r\n")
        assert answer.endswith(b"\r\n\r\n" + seen)


@pytest.mark.parametrize(
    "request_",
    [
        *(b"GET %s HTTP/1.1\r\n" % path + CLOSE + b"\r\n" for path in (b"/show", b"/stream", b"/raise", b"/none")),
        b"HEAD /show HTTP/1.1\r\n" + CLOSE + b"\r\n",
        b"GET /show HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET /show HTTP/1.1\r\n" + CLOSE + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
    ids=["plain", "in pieces", "failed", "not found", "HEAD", "one after another", "refused"],
)
async def test_every_answer_has_a_date(echo: s.EchoServer, request_: bytes) -> None:
    """RFC 9110, 6.6.1: an origin server that has a clock sends one, once."""
    before = int(time.time())
    answer = await exchange(echo.target, request_)
    echo.reported.clear()
    dates = re.findall(rb"\r\nDate: ([^\r]+)\r\n", answer)
    assert len(dates) == answer.count(b"HTTP/1.1 ")
    for date in dates:
        assert before <= parsedate_to_datetime(date.decode()).timestamp() <= time.time()
        assert date.endswith(b" GMT")


async def test_head_has_the_length_and_no_body(echo: s.EchoServer) -> None:
    answer = await exchange(echo.target, b"HEAD /show HTTP/1.1\r\n" + CLOSE + b"\r\n")
    assert answer.endswith(b"\r\n\r\n")
    assert b"content-length: 8" in answer.lower()


async def test_bodies_by_length_and_in_chunks(echo: s.EchoServer) -> None:
    post = b"POST /echo HTTP/1.1\r\n" + CLOSE
    assert (await exchange(echo.target, post + b"Content-Length: 5\r\n\r\nhello")).endswith(b"\r\n\r\nhello")
    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
    assert (await exchange(echo.target, chunked)).endswith(b"\r\n\r\nhello")


async def test_requests_follow_each_other_on_one_connection(echo: s.EchoServer) -> None:
    one = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n"
    answer = await exchange(echo.target, one + b"a" + one + b"b" + b"GET /show HTTP/1.1\r\n" + CLOSE + b"\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.index(b"\r\n\r\na") < answer.index(b"\r\n\r\nb")


async def test_streamed_answer(echo: s.EchoServer) -> None:
    answer = await exchange(echo.target, b"GET /stream HTTP/1.1\r\n" + CLOSE + b"\r\n")
    assert b"chunked" in answer
    assert [b"piece %d" % number in answer for number in range(3)] == [True] * 3
    assert answer.endswith(b"0\r\n\r\n")


async def test_streamed_answer_that_breaks_is_cut_not_ended(echo: s.EchoServer) -> None:
    answer = await exchange(echo.target, b"GET /broken-stream HTTP/1.1\r\n" + CLOSE + b"\r\n")
    assert not answer.endswith(b"0\r\n\r\n")
    assert [type(error) for _, error in echo.reported] == [ZeroDivisionError]


async def test_exception_is_500_and_says_nothing(echo: s.EchoServer) -> None:
    answer = await exchange(echo.target, b"GET /raise HTTP/1.1\r\n" + CLOSE + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 500 Internal Server Error")
    assert b"secret" not in answer
    assert [(path, type(error)) for path, error in echo.reported] == [("/raise", ZeroDivisionError)]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n" + bytes(1001), b"413"),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n500\r\n" + bytes(1280), b"413"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"v" * 5000, b"431"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 128 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\n\r\n", b"417"),
        (b"GARBAGE\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    ],
)
async def test_requests_that_are_refused(echo: s.EchoServer, request_bytes: bytes, status: bytes) -> None:
    answer = await exchange(echo.target, request_bytes)
    assert answer.startswith(b"HTTP/1.1 " + status)
    await until(lambda: not echo.server.connections)
    assert echo.reported == []


async def test_without_a_handler_everything_is_404() -> None:
    async with s.echo_server(LIMITS) as echo:
        assert (await exchange(echo.target, b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n")).startswith(b"HTTP/1.1 404")


async def test_expect_continue(echo: s.EchoServer) -> None:
    host, _, port = echo.target.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /echo HTTP/1.1\r\n" + CLOSE + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
    writer.write(b"ok")
    assert (await reader.read(-1)).endswith(b"\r\n\r\nok")
    writer.close()


async def test_idle_connections_are_closed() -> None:
    async with s.echo_server(ServerLimits(http1_idle_timeout_s=0.05), handler) as echo:
        answer = await exchange(echo.target, b"GET /show HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")


async def test_drain_closes_after_the_request_under_way() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: HttpRequest) -> HttpResponse:
        started.set()
        await go_on.wait()
        return HttpResponse(200, b"done")

    async with s.echo_server(LIMITS, slow) as echo:
        task = asyncio.create_task(exchange(echo.target, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
        await started.wait()
        echo.server.drain()
        go_on.set()
        answer = await task
    assert answer.endswith(b"done")
    assert b"connection: close" in answer.lower()


@pytest.mark.long
async def test_client_that_leaves_cancels_its_handler() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(request: HttpRequest) -> HttpResponse:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return HttpResponse()

    async with s.echo_server(LIMITS, endless) as echo:
        host, _, port = echo.target.partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await started.wait()
        writer.transport.abort()
        await cancelled.wait()
        assert echo.reported == []


async def half_closed(target: str, octets: bytes) -> bytes:
    """What a client gets that sends octets, ends its half of the connection, and reads to the end."""
    host, _, port = target.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(octets)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


LATE = b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n"
IN_CHUNKS = b"POST /late HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("octets", "answers"),
    [
        (LATE, [b"late"]),
        (LATE * 3, [b"late"] * 3),
        (LATE.replace(b"1.1", b"1.0"), [b"late"]),
        (LATE + b"GET /la", [b"late"]),
        (IN_CHUNKS, [b"late ab"]),
        (b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", [bytes(5_000_000)]),
        (b"GET /la", []),
        (b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab", []),
        (b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n", []),
    ],
    ids=["one", "several", "1.0", "one and a part", "chunks", "large", "part of a head", "part of a body", "never"],
)
async def test_a_half_closed_connection_gets_its_answer(octets: bytes, answers: list[bytes]) -> None:
    """Ask as BusyBox's nc, which is the only client of HTTP in many images, and asks there for ``/health``."""
    cancelled = []

    async def late(request: HttpRequest) -> HttpResponse:
        if request.path == "/large":
            return HttpResponse(200, bytes(5_000_000))
        try:
            await asyncio.sleep(0.05 if request.path == "/late" else 3600)
        except asyncio.CancelledError:
            cancelled.append(request.path)
            raise
        return HttpResponse(200, b"late" + (b" " + request.body if request.body else b""))

    limit_s = 3.0 if answers else 0.3  # an answer may be late on a busy machine
    async with s.echo_server(ServerLimits(http1_half_closed_s=limit_s), late) as echo:
        got = await half_closed(echo.target, octets)
        assert [one.partition(b"\r\n\r\n")[2] for one in got.split(b"HTTP/1.1 200 ")[1:]] == answers
        await until(lambda: not echo.server.connections)
        assert cancelled == (["/never"] if b"/never" in octets else [])
        assert echo.server.answers.held_bytes == 0
        assert echo.reported == []


def plain(method: bytes, path: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return ((b":method", method), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"))


async def answer_over_http2(client: raw.RawClient, stream_id: int) -> bytes:
    await client.until_frame(raw.HEADERS, stream_id)
    body = b""
    while True:
        _, flags, _, payload = await client.until_frame(raw.DATA, stream_id)
        body += payload
        if flags & raw.END_STREAM:
            return body


async def test_plain_requests_over_http2(echo: s.EchoServer) -> None:
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1, plain(b"GET", b"/show?q"), raw.END_HEADERS | raw.END_STREAM))
    assert await answer_over_http2(client, 1) == b"GET q  -"
    client.send(
        raw.headers(3, plain(b"POST", b"/echo")) + raw.message(3, b"hel") + raw.message(3, b"lo", raw.END_STREAM)
    )
    assert await answer_over_http2(client, 3) == b"hello"
    client.send(raw.headers(5, plain(b"GET", b"/stream"), raw.END_HEADERS | raw.END_STREAM))
    assert await answer_over_http2(client, 5) == b"piece 0\npiece 1\npiece 2\n"
    client.send(raw.headers(7, plain(b"GET", b"/raise"), raw.END_HEADERS | raw.END_STREAM))
    assert await answer_over_http2(client, 7) == b"internal error\n"
    client.send(raw.headers(9, plain(b"POST", b"/echo")) + raw.message(9, bytes(1001)))
    assert await answer_over_http2(client, 9) == b"request body too large\n"
    client.send(raw.headers(11, plain(b"GET", b"/broken-stream"), raw.END_HEADERS | raw.END_STREAM))
    assert (await client.until_frame(raw.RST_STREAM, 11))[3] == (2).to_bytes(4, "big")
    client.close()


@pytest.mark.parametrize("path", [b"/show", b"/stream"])
async def test_an_answer_to_head_over_http2_has_no_body(echo: s.EchoServer, path: bytes) -> None:
    """RFC 9110, 9.3.2; one that never ends, such as the dashboard's figures, would never end either."""
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1, plain(b"HEAD", path), raw.END_HEADERS | raw.END_STREAM))
    assert await answer_over_http2(client, 1) == b""
    client.close()


async def test_an_answer_over_http2_has_a_date(echo: s.EchoServer) -> None:
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1, plain(b"GET", b"/show"), raw.END_HEADERS | raw.END_STREAM))
    _, _, _, block = await client.until_frame(raw.HEADERS, 1)
    assert raw.decode_block(block)[b"date"].endswith(b" GMT")
    client.close()


async def test_content_type_that_is_not_grpc_without_a_handler_is_415() -> None:
    async with s.echo_server() as echo:
        client = await raw.RawClient.connect(echo.target)
        client.send(raw.headers(1, plain(b"GET", b"/"), raw.END_HEADERS | raw.END_STREAM))
        _, flags, _, block = await client.until_frame(raw.HEADERS, 1)
        assert flags & raw.END_STREAM
        assert raw.decode_block(block)[b":status"] == b"415"
        client.close()


async def test_a_call_from_a_web_page_reaches_no_handler(echo: s.EchoServer) -> None:
    """Over both versions of HTTP: a browser names the page's origin, a client of gRPC never does."""
    client = await raw.RawClient.connect(echo.target)
    frames = []
    for stream_id, path in ((1, s.UNARY), (3, s.BIDI), (5, "/test.Echo/Nothing")):
        fields = raw.grpc_headers(path, (b"origin", b"http://evil.example"))
        client.send(raw.headers(stream_id, fields) + raw.message(stream_id, frame(b"x"), raw.END_STREAM))
        frames.append(await client.until_frame(raw.HEADERS, stream_id))
        assert frames[-1][1] & raw.END_STREAM
    assert echo.streams == []
    echo.server.router.origins = Origins(("http://good.example",))
    fields = raw.grpc_headers(s.UNARY, (b"origin", b"http://good.example"))
    client.send(raw.headers(7, fields) + raw.message(7, frame(b"x"), raw.END_STREAM))
    frames.append(await client.until_frame(raw.HEADERS, 7))
    client.close()
    answers = raw.decode_headers(frames)
    for stream_id in (1, 3, 5):
        answer = answers[stream_id]
        assert (answer[b":status"], answer[b"grpc-status"]) == (b"403", b"7")
        assert b"http://evil.example" in answer[b"grpc-message"]
    assert answers[7][b":status"] == b"200"
    head = b"POST /test.Echo/Unary HTTP/1.1\r\nContent-Type: application/grpc\r\nContent-Length: 5\r\n" + CLOSE
    assert (await exchange(echo.target, head + b"\r\n" + frame(b""))).startswith(b"HTTP/1.1 404 ")


async def test_a_handler_knows_whether_the_request_came_to_a_loopback_address() -> None:
    seen: list[bool] = []

    async def look(request: HttpRequest) -> HttpResponse:
        seen.append(request.loopback)
        return HttpResponse()

    async with s.echo_server(LIMITS, look) as echo:
        await exchange(echo.target, b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n")
        client = await raw.RawClient.connect(echo.target)
        client.send(raw.headers(1, plain(b"GET", b"/"), raw.END_HEADERS | raw.END_STREAM))
        await client.until_frame(raw.HEADERS, 1)
        client.close()
    assert seen == [True, True]


async def test_the_kernel_asks_for_clients_that_say_nothing(echo: s.EchoServer) -> None:
    host, _, port = echo.target.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    (connection,) = echo.server.connections
    http1: Any = connection._http1
    sock = http1._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == LIMITS.http1_probe_s
    writer.close()
