"""When a client may ping: each frame that leaves as part of an answer forgives its pings, and nothing else does.

grpc-go sends a ping for its bandwidth estimate each time DATA arrives and no such ping is under way, so a large
answer is met by as many pings as it needs windows. A client like that is played here frame by frame, without a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import ngh2
import pytest

from raftkv.loop.timers import DeadlineWheel
from raftkv.rpc import Server, StreamCall
from raftkv.rpc.framing import frame
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.calls import Environment, Peer
from raftkv.rpc.server.core import ServerCore
from raftkv.rpc.server.http import HttpRequest, HttpResponse

UNARY, STREAM, WATCH, ECHO = (f"/test.Large/{name}" for name in ("Unary", "Stream", "Watch", "Echo"))
LARGE = bytes(300_000)
GO_WINDOW = 65_535
"""What grpc-go opens a stream with; it grows by the very estimate that the pings are for."""


async def _answer_http(request: HttpRequest) -> HttpResponse:
    return HttpResponse(body=LARGE)


async def _stream(call: StreamCall) -> None:
    for start in range(0, len(LARGE), 1000):
        call.send_nowait(LARGE[start : start + 1000])


@dataclass
class Connection:
    """A server's core and a client's engine, joined by hand; the time is the test's."""

    now: float = 0.0
    received: int = 0
    ended: bool = False
    goaway: bytes | None = None
    watches: list[StreamCall] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        server = Server(http_handler=_answer_http)
        server.unary(UNARY, lambda call, message: call.reply(LARGE))
        server.unary(ECHO, lambda call, message: call.reply(message))
        server.stream(STREAM, _stream)
        server.stream(WATCH, self._watch)
        environment = Environment(
            clock=lambda: self.now,
            wheel=DeadlineWheel(lambda when: None),
            spawn=self._spawn,
            report=lambda path, error: pytest.fail(f"{path}: {error}"),
            translate=lambda error: None,
            answers=server.answers,
        )
        self.core = ServerCore(server.router, ServerLimits(), environment, Peer(identity="address 127.0.0.1"))
        self.client = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=False))
        self.client.initiate_connection({int(ngh2.Setting.INITIAL_WINDOW_SIZE): GO_WINDOW})
        self.exchange()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.get_running_loop().create_task(coroutine))
        return self.tasks[-1]

    async def _watch(self, call: StreamCall) -> None:
        self.watches.append(call)
        await call.receive()

    async def ask(self, path: str) -> int:
        """Send a request and let its handler run; return the stream."""
        kind = (b"content-type", b"text/plain" if path == "/" else b"application/grpc")
        method = (b":method", b"GET" if path == "/" else b"POST")
        head = (method, (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x"), kind)
        stream_id = self.client.send_request(head, end_stream=path == "/")
        if path != "/":
            self.client.send_data(stream_id, frame(b""), end_stream=path != WATCH)
        self.exchange()
        for _ in range(5):
            await asyncio.sleep(0)
        self.exchange()
        return stream_id

    def exchange(self) -> int:
        """Carry bytes both ways until both are silent; return how many bytes of answers came."""
        before = self.received
        while True:
            out = self.client.data_to_send()
            if out:
                self.core.receive(out)
            back = self.core.pull(1 << 20)
            if back:
                self.client.receive_data(back)
            for event in self.client.events():
                self._note(event)
            if not out and not back:
                return self.received - before

    def _note(self, event: ngh2.Event) -> None:
        match event:
            case ngh2.DataReceived():
                self.received += len(event.data)
            case ngh2.GoAwayReceived():
                self.goaway = event.debug_data
            case ngh2.StreamClosed():
                self.ended = True

    def open_window(self, amount: int, stream_id: int) -> None:
        """Have the client read ``amount`` bytes."""
        self.client.acknowledge_received_data(amount, stream_id)

    def ping(self) -> None:
        """Have the client ping, as grpc-go does at DATA."""
        self.client.ping(b"bandwidt")


@pytest.mark.parametrize("path", [UNARY, STREAM, "/"])
async def test_a_client_may_ping_once_for_each_frame_that_leaves(path: str) -> None:
    client = Connection()
    stream_id = await client.ask(path)
    unread, pings = client.received, 0
    while unread and client.goaway is None:
        client.ping()
        pings += 1
        client.open_window(unread, stream_id)
        unread = client.exchange()
    assert (client.goaway, client.ended) == (None, True)
    assert client.received >= len(LARGE)
    assert pings > 2 * ServerLimits().ping_strikes_max


async def test_a_client_may_ping_once_for_every_small_answer() -> None:
    client = Connection()
    for _ in range(20):
        await client.ask(ECHO)
        client.ping()
        client.exchange()
    assert (client.goaway, client.ended) == (None, True)


async def test_an_answer_that_cannot_leave_forgives_nothing() -> None:
    client = Connection()
    await client.ask(UNARY)
    for _ in range(1 + 1 + ServerLimits().ping_strikes_max):
        assert client.goaway is None
        client.ping()
        assert client.exchange() == 0
    client.ping()
    client.exchange()
    assert client.goaway == b"too_many_pings"


@pytest.mark.parametrize("path", [UNARY, STREAM, "/"])
async def test_an_answer_that_waits_for_its_reader_is_still_a_call(path: str) -> None:
    """A reader that lets an answer wait for minutes asks by keepalive pings whether the server is still there."""
    client = Connection()
    stream_id = await client.ask(path)
    for _ in range(20):
        client.now += 10.0
        client.ping()
        client.exchange()
    assert client.goaway is None
    unread = client.received
    while unread:
        client.open_window(unread, stream_id)
        unread = client.exchange()
    assert (client.goaway, client.ended) == (None, True)


async def test_a_watch_forgives_as_its_events_leave() -> None:
    client = Connection()
    stream_id = await client.ask(WATCH)
    (watch,) = client.watches
    unread = 0
    for number in range(100):
        if number % 3 == 0:
            watch.send_nowait(bytes(100_000))
        client.open_window(unread, stream_id)
        unread = client.exchange()
        if unread:
            client.ping()
            unread += client.exchange()
    assert client.goaway is None
