"""Audit records of calls and of plain HTTP at each level, including refused and abandoned calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv.apply.wire import Caller
from raftkv.pb import rpc_pb2
from raftkv.rpc import Channel, Code, HttpRequest, HttpResponse, RpcError, Server, StreamCall, UnaryCall
from raftkv.rpc.server.router import Kind
from raftkv.server.audit import lines as audit_lines
from raftkv.server.audit.calls import HELD_BYTES_MAX, AuditCalls, Level
from raftkv.server.audit.trail import AuditTrail
from raftkv.server.tls.ports import FailureLog
from tests.rpc.loop import failure, until
from tests.rpc.services import channel_to

PUT, RANGE, TXN = "/etcdserverpb.KV/Put", "/etcdserverpb.KV/Range", "/etcdserverpb.KV/Txn"
LOGIN, WATCH = "/etcdserverpb.Auth/Authenticate", "/etcdserverpb.Watch/Watch"
SNAPSHOT = "/etcdserverpb.Maintenance/Snapshot"
HEADER = rpc_pb2.ResponseHeader(revision=9)


class Memory:
    trouble = ""

    def __init__(self) -> None:
        self.data = b""

    def write(self, lines: bytes) -> None:
        self.data += lines

    def close(self) -> None:
        pass

    def lines(self) -> list[dict[str, Any]]:
        """Return the parts of the lines that are equal in all runs."""
        found = [json.loads(line) for line in self.data.splitlines()]
        for line in found:
            assert line.pop("time")
            assert line.pop("member") == "m1"
            assert line.pop("remote").startswith("127.0.0.1:")
            assert line.pop("duration_ms", 1.0) >= 0
            assert line.pop("event") in ("call", "open", "request", "end", "http", "handshake", "refused")
        return found


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def trail(memory: Memory) -> AuditTrail:
    return AuditTrail(memory, "m1")


def guard(path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
    """Give alice all rights and others none, as in ``server.auth``."""

    def look(call: Any) -> None:
        name = call.metadata.get("user", "")
        if name:
            call.caller = Caller(name.encode(), 1)
        if path != LOGIN and name != "alice":
            raise RpcError(Code.PERMISSION_DENIED, "etcdserver: permission denied")

    def unary(call: UnaryCall, message: bytes) -> None:
        look(call)
        handler(call, message)

    async def stream(call: StreamCall) -> None:
        look(call)
        await handler(call)

    return unary if kind is Kind.UNARY else stream


async def _login(message: bytes, call: UnaryCall) -> bytes:
    raise RpcError(Code.INVALID_ARGUMENT, "etcdserver: authentication failed, invalid user ID or password")


async def _stream(call: StreamCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


@contextlib.asynccontextmanager
async def member(level: Level, memory: Memory) -> AsyncIterator[Channel]:
    trail = AuditTrail(memory, "m1")
    server = Server(around=(AuditCalls(trail, level).around, guard))
    server.unary(PUT, lambda call, _: call.reply(rpc_pb2.PutResponse(header=HEADER).SerializeToString()))
    server.unary(RANGE, lambda call, _: call.reply(rpc_pb2.RangeResponse(header=HEADER).SerializeToString()))
    server.unary_async(LOGIN, _login)
    server.stream(WATCH, _stream)
    server.stream(SNAPSHOT, _stream)
    with contextlib.closing(trail):
        async with channel_to(server) as channel:
            yield channel


async def use(channel: Channel) -> None:
    """Make one call of each kind by alice and by others."""
    alice, bob = (("user", "alice"),), (("user", "bob"),)
    put = rpc_pb2.PutRequest(key=b"k", value=b"s3cret").SerializeToString()
    await channel.unary(PUT, put, 20, metadata=alice)
    await channel.unary(RANGE, rpc_pb2.RangeRequest(key=b"r").SerializeToString(), 20, metadata=alice)
    await failure(channel.unary(PUT, put, 20, metadata=bob))
    await failure(channel.unary(RANGE, rpc_pb2.RangeRequest(key=b"r").SerializeToString(), 20))
    login = rpc_pb2.AuthenticateRequest(name="alice", password="s3cret").SerializeToString()
    await failure(channel.unary(LOGIN, login, 20))
    for path in (WATCH, SNAPSHOT):
        stream = channel.stream(path, metadata=alice)
        create = rpc_pb2.WatchCreateRequest(key=b"w/", range_end=b"w0")
        await stream.send(rpc_pb2.WatchRequest(create_request=create).SerializeToString() if path == WATCH else b"")
        await stream.receive()
        stream.half_close()
        assert await stream.receive() is None
    await failure(channel.stream(WATCH, metadata=bob).receive())


PUT_LINE = {"user": "alice", "method": PUT[1:], "request": {"key": "k"}, "outcome": "OK", "revision": 9}
RANGE_LINE = {**PUT_LINE, "method": RANGE[1:], "request": {"key": "r"}}
REFUSED_PUT = {"user": "bob", "method": PUT[1:], "request": {"key": "k"}, "outcome": "PERMISSION_DENIED"}
REFUSED_RANGE = {"user": None, "method": RANGE[1:], "request": {"key": "r"}, "outcome": "PERMISSION_DENIED"}
FAILED_LOGIN = {"user": None, "method": LOGIN[1:], "request": {"name": "alice"}, "outcome": "INVALID_ARGUMENT"}
WATCH_LINES = [
    {"user": "alice", "method": WATCH[1:]},
    {"user": "alice", "method": WATCH[1:], "request": {"create_request": {"prefix": "w/"}}},
    {"user": "alice", "method": WATCH[1:], "outcome": "OK"},
]
SNAPSHOT_LINES = [{"user": "alice", "method": SNAPSHOT[1:]}, {"user": "alice", "method": SNAPSHOT[1:], "outcome": "OK"}]
REFUSED_WATCH = {"user": "bob", "method": WATCH[1:], "outcome": "PERMISSION_DENIED"}


async def test_calls_recorded_by_each_level() -> None:
    expected = {
        Level.AUTH: [REFUSED_PUT, REFUSED_RANGE, FAILED_LOGIN, *SNAPSHOT_LINES, REFUSED_WATCH],
        Level.WRITES: [PUT_LINE, REFUSED_PUT, REFUSED_RANGE, FAILED_LOGIN, *SNAPSHOT_LINES, REFUSED_WATCH],
        Level.ALL: [
            *(PUT_LINE, RANGE_LINE, REFUSED_PUT, REFUSED_RANGE, FAILED_LOGIN),
            *(*WATCH_LINES, *SNAPSHOT_LINES, REFUSED_WATCH),
        ],
    }
    for level, lines in expected.items():
        memory = Memory()
        async with member(level, memory) as channel:
            await use(channel)
        assert memory.lines() == lines, level
        assert b"s3cret" not in memory.data


async def test_a_call_that_ends_without_an_answer_is_noted(memory: Memory) -> None:
    async with member(Level.ALL, memory) as channel:
        stream = channel.stream(WATCH, metadata=(("user", "alice"),))
        await stream.send(b"")
        await stream.receive()
        stream.cancel()
        await until(lambda: b"CANCELLED" in memory.data)
    assert memory.lines()[-1] == {"user": "alice", "method": WATCH[1:], "outcome": "CANCELLED"}


async def test_large_requests_and_passwords_do_not_wait_in_the_queue(trail: AuditTrail) -> None:
    """What waits may wait for long, and would be in a core dump."""
    trail.close()
    calls = AuditCalls(trail, Level.ALL)
    server = Server(around=(calls.around,))
    server.unary(PUT, lambda call, _: call.reply(b""))
    server.unary(LOGIN, lambda call, _: call.reply(b""))
    async with channel_to(server) as channel:
        put = rpc_pb2.PutRequest(key=b"k", value=bytes(HELD_BYTES_MAX)).SerializeToString()
        await channel.unary(PUT, put, 20)
        await channel.unary(LOGIN, rpc_pb2.AuthenticateRequest(name="a", password="p").SerializeToString(), 20)
    assert [record.request for record, _ in trail._records] == ['{"key":"k"}', '{"name":"a"}']


async def test_waiting_record_counts_by_its_kept_bytes(trail: AuditTrail) -> None:
    """A request of 32 operations is 20 KB of a line; a target may have as much as a header."""
    trail.close()
    calls = AuditCalls(trail, Level.ALL)
    server = Server(around=(calls.around,))
    server.unary(TXN, lambda call, _: call.reply(b""))
    server.router.on_refused = calls.refused
    deletion = rpc_pb2.RequestOp(
        request_delete_range=rpc_pb2.DeleteRangeRequest(key=b"\xfe" * 256, range_end=b"\xff" * 256)
    )
    async with channel_to(server) as channel:
        await channel.unary(TXN, rpc_pb2.TxnRequest(success=[deletion] * 32).SerializeToString(), 20)
        await failure(channel.unary("/" + "s" * 8000 + "/M", b"", 20, metadata=(("origin", "http://evil.example"),)))

    async def serve(request: HttpRequest) -> HttpResponse:
        return HttpResponse(403)

    await calls.http(serve)(HttpRequest("G" * 9000, "/" + "p" * 9000))
    for record, size_bytes in trail._records:
        assert size_bytes + audit_lines.TEXT_BYTES_MAX >= len(audit_lines.line(record, "m1"))
        assert len(record.method) <= audit_lines.TEXT_BYTES_MAX + 1
        assert isinstance(record.request, str | None)


async def test_an_interval_that_is_refused_waits_as_text(trail: AuditTrail) -> None:
    trail.close()
    call: Any = SimpleNamespace(peer=SimpleNamespace(address="127.0.0.1:1", certificate=None), caller=None, path=WATCH)
    AuditCalls(trail, Level.AUTH).watch_refused(call, b"a", b"b", "etcdserver: permission denied")
    ((record, _),) = trail._records
    assert record.request == '{"prefix":"a"}'


async def test_plain_http() -> None:
    async def serve(request: HttpRequest) -> HttpResponse:
        status = 403 if request.path in ("/no", "/v3/kv/put") else 200
        return HttpResponse(status, user=b"alice", is_call=request.path.startswith("/v3/"))

    for level, expected in (
        (Level.AUTH, [("GET /no", 403)]),
        (Level.WRITES, [("PUT /scope/key", 200), ("GET /no", 403)]),
        (Level.ALL, [("GET /health", 200), ("PUT /scope/key", 200), ("GET /no", 403)]),
    ):
        memory = Memory()
        trail = AuditTrail(memory, "m1")
        handle = AuditCalls(trail, level).http(serve)
        for method, target in (("GET", "/health?token=s3cret"), ("PUT", "/scope/key"), ("GET", "/no")):
            await handle(HttpRequest("POST", "/v3/kv/put"))  # the call has its own line
            await handle(HttpRequest(method, target, peer="127.0.0.1:1"))
        trail.close()
        assert [(line["method"], line["outcome"]) for line in memory.lines()] == expected
        assert {line["user"] for line in memory.lines()} == {"alice"}
        assert b"s3cret" not in memory.data


async def test_a_message_that_a_guard_has_looked_at_is_noted_once(memory: Memory, trail: AuditTrail) -> None:
    def looking(path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        async def stream(call: StreamCall) -> None:
            call.caller = Caller(b"alice", 1)
            message = await call.receive()
            assert message is not None
            call.put_back(message)
            await handler(call)

        return stream

    server = Server(around=(AuditCalls(trail, Level.ALL).around, looking))
    server.stream(WATCH, _stream)
    async with channel_to(server) as channel:
        stream = channel.stream(WATCH)
        for watch_id in (1, 2):
            cancel = rpc_pb2.WatchCancelRequest(watch_id=watch_id)
            await stream.send(rpc_pb2.WatchRequest(cancel_request=cancel).SerializeToString())
        stream.half_close()
        while await stream.receive() is not None:
            pass
    trail.close()
    cancels = [{"cancel_request": {"watch_id": watch_id}} for watch_id in (1, 2)]
    assert [line.get("request") for line in memory.lines()] == [None, *cancels, None]


async def test_a_call_of_a_web_page_is_noted_and_unknown_methods_are_not(memory: Memory, trail: AuditTrail) -> None:
    server = Server()
    server.router.on_refused = AuditCalls(trail, Level.AUTH).refused
    server.unary(PUT, lambda call, message: call.reply(message))
    async with channel_to(server) as channel:
        await channel.unary(PUT, b"", 20)
        await failure(channel.unary("/no.Such/Method", b"", 20))
        await failure(channel.unary(PUT, b"", 20, metadata=(("origin", "http://evil.example"),)))
    trail.close()
    assert memory.lines() == [{"user": None, "method": PUT[1:], "outcome": "PERMISSION_DENIED"}]


def test_a_refusal_before_a_call_is_noted_and_not_for_each_attempt(memory: Memory, trail: AuditTrail) -> None:
    failures = FailureLog("rejected %s: %s", lambda: 1.0)
    failures.listener = AuditCalls(trail, Level.AUTH).refused_handshake("peer")
    for _ in range(100):
        failures.note("127.0.0.1:5", "no certificate")
    trail.close()
    (line,) = memory.lines()
    assert line == {"user": None, "method": "peer port", "reason": "no certificate"}


async def test_denied_watch_is_logged_at_every_level(memory: Memory, trail: AuditTrail) -> None:
    calls = AuditCalls(trail, Level.AUTH)
    server = Server(around=(calls.around,))

    async def watch(call: StreamCall) -> None:
        call.caller = Caller(b"bob", 1)
        calls.watch_refused(call, b"k" * 10_000, b"", "etcdserver: permission denied")

    server.stream(WATCH, watch)
    async with channel_to(server) as channel:
        assert await channel.stream(WATCH).receive() is None
    trail.close()
    (line,) = memory.lines()
    assert (line["user"], line["method"], line["reason"]) == ("bob", WATCH[1:], "etcdserver: permission denied")
    assert set(line["request"]) == {"key", "key_bytes"}
