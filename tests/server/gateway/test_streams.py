"""Streams of the gateway: requests from a body, answers as lines, bounded by what the client reads."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from raftkv.loop.scheduler import Slices
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.rpc.framing import frame
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.http import HttpRequest, HttpResponse, close_body
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import ListenedCall, StreamCall
from raftkv.rpc.status import RpcError
from raftkv.server.gateway.encoder import encode
from raftkv.server.gateway.handler import Gateway
from tests.rpc.loop import until

WATCH = "/etcdserverpb.Watch/Watch"
KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
SNAPSHOT = "/etcdserverpb.Maintenance/Snapshot"
RANGE = "/etcdserverpb.KV/Range"


async def behind(request: HttpRequest) -> HttpResponse:
    return HttpResponse(404)


class KeepAlives:
    """Answers each request at once."""

    def __init__(self, call: ListenedCall, ended: list[str]) -> None:
        self._call = call
        self._ended = ended

    def receive(self, message: bytes) -> None:
        lease_id = rpc_pb2.LeaseKeepAliveRequest.FromString(message).ID
        self._call.send_nowait(rpc_pb2.LeaseKeepAliveResponse(ID=lease_id, TTL=5).SerializeToString())

    def half_closed(self) -> None:
        self._call.finish()

    def released(self) -> None:
        self._ended.append("released")


class World:
    """A server with streams, and its gateway."""

    def __init__(self, limits: ServerLimits | None = None) -> None:
        self.sent = 0
        self.ended: list[str] = []
        self.gateway = Gateway(behind, Slices())
        self.server = Server(limits)
        self.server.stream(WATCH, self._watch)
        self.refusal: RpcError | None = None
        self.on_keep_alive: Callable[[ListenedCall], None] = lambda call: None
        self.server.listened(KEEP_ALIVE, self._keep_alive)
        self.server.stream(SNAPSHOT, self._snapshot)
        self.gateway.serve(self.server)

    def _keep_alive(self, call: ListenedCall) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.on_keep_alive(call)
        call.listen(KeepAlives(call, self.ended))

    async def _watch(self, call: StreamCall) -> None:
        call.send_headers()
        try:
            while (message := await call.receive()) is not None:
                key = rpc_pb2.WatchRequest.FromString(message).create_request.key
                if key == b"frames":
                    call.send_frames_nowait(frame(b"") + frame(b""), 2)
                elif key.startswith(b"large"):
                    event = {"kv": {"key": b"a", "value": bytes(int(key[5:]))}}
                    await call.send(rpc_pb2.WatchResponse(events=[event]).SerializeToString())
                elif key == b"late":
                    await call.send(b"")
                    raise RpcError(14, "etcdserver: <stopped>")
            await asyncio.Event().wait()
        finally:
            self.ended.append("cancelled" if call.cancelled else "done")

    async def _snapshot(self, call: StreamCall) -> None:
        request = rpc_pb2.SnapshotRequest.FromString(await call.receive() or b"")
        assert request == rpc_pb2.SnapshotRequest()
        while True:
            await call.send(rpc_pb2.SnapshotResponse(blob=b"x" * 100_000).SerializeToString())
            self.sent += 1

    async def ask(self, path: str, body: bytes, **headers: str) -> HttpResponse:
        fields = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        return await self.gateway.handle(HttpRequest("POST", path, fields, body))


@pytest.fixture
@asynccontextmanager
async def world() -> AsyncIterator[World]:
    yield World()


def pieces(response: HttpResponse) -> AsyncIterator[bytes]:
    assert not isinstance(response.body, bytes)
    return response.body


def code_of(response: HttpResponse) -> int:
    assert isinstance(response.body, bytes)
    return int(json.loads(response.body)["code"])


async def everything(response: HttpResponse) -> bytes:
    return b"".join([piece async for piece in pieces(response)])


async def test_requests_are_the_objects_of_the_body_and_answers_are_lines(world: World) -> None:
    response = await world.ask("/v3/lease/keepalive", b'{"ID":1} {"ID":"2"}\n[]{"ID":3}')
    assert response.status == 200
    assert await everything(response) == (b'{"result":{"ID":"1","TTL":"5"}}\n{"result":{"ID":"2","TTL":"5"}}\n'), (
        "what cannot be read ends the requests, as in etcd"
    )
    assert not world.server.answers.accounts
    assert world.ended == ["released"]


async def test_a_call_may_be_refused_as_it_begins(world: World) -> None:
    world.refusal = RpcError(14, "etcdserver: no leader")
    response = await world.ask("/v3/lease/keepalive", b'{"ID":1}', grpc_timeout="20S")
    assert response.status == 503
    assert json.loads(await everything(response))["error"]["message"] == "etcdserver: no leader"
    assert not world.server.answers.accounts


@pytest.mark.parametrize(("body", "status"), [(b"x", 500), (b'{"ID":"x"}', 500)])
async def test_a_first_request_that_cannot_be_read_is_an_error(body: bytes, status: int) -> None:
    response = await World().ask("/v3/lease/keepalive", body)
    assert (response.status, code_of(response)) == (status, 2)


async def test_no_request_ends_a_call_that_waits_for_some() -> None:
    response = await World().ask("/v3/lease/keepalive", b"")
    assert response.headers == (("content-type", "application/json"),)
    assert await everything(response) == b""


async def test_each_message_is_a_separate_chunk() -> None:
    """A client that takes each chunk of HTTP/1.1 for a line, as etcd3gw does, finds one line in it."""
    response = await World().ask("/v3/watch", b'{"create_request":{"key":"ZnJhbWVz"}}')
    for _ in range(2):
        assert await anext(pieces(response)) == b'{"result":{}}\n'
    await close_body(response.body)


@pytest.mark.parametrize("size_bytes", [40_000, 3_000_000])
async def test_a_large_message_is_one_piece(size_bytes: int) -> None:
    body = b'{"create_request":{"key":"%s"}}' % base64.b64encode(b"large%d" % size_bytes)
    response = await World().ask("/v3/watch", body)
    line = await anext(pieces(response))
    assert line.endswith(b"}\n")
    (event,) = json.loads(line)["result"]["events"]
    assert base64.b64decode(event["kv"]["value"]) == bytes(size_bytes)
    await close_body(response.body)


async def test_an_error_is_the_last_line() -> None:
    response = await World().ask("/v3/watch", b'{"create_request":{"key":"bGF0ZQ=="}}')
    assert await everything(response) == (
        b'{"result":{}}\n{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: \\u003cstopped\\u003e",'
        b'"http_status":"Service Unavailable"}}'
    )


async def test_an_error_before_all_messages_is_the_status_too(world: World) -> None:
    async def refuse(call: StreamCall) -> None:
        raise RpcError(7, "etcdserver: permission denied")

    world.server = Server()
    world.server.stream(SNAPSHOT, refuse)
    world.gateway.serve(world.server)
    response = await world.ask("/v3/maintenance/snapshot", b"{}")
    assert (response.status, response.headers) == (403, (("content-type", "application/json"),))
    assert b'"grpc_code":7' in await everything(response)


async def test_a_stream_that_says_nothing_ends_at_its_timeout(world: World) -> None:
    response = await world.ask("/v3/watch", b"{}", grpc_timeout="5m")
    assert (response.status, code_of(response)) == (504, 4)
    assert not world.server.answers.accounts


async def test_a_client_that_leaves_ends_the_call(world: World) -> None:
    response = await world.ask("/v3/watch", b'{"create_request":{"key":"ZnJhbWVz"}}')
    await anext(pieces(response))
    await close_body(response.body)
    await until(lambda: world.ended == ["cancelled"])
    assert not world.server.answers.accounts
    assert world.server.answers.used_bytes == 0


async def test_a_client_that_leaves_before_the_first_message_ends_the_call(world: World) -> None:
    task = asyncio.create_task(world.ask("/v3/watch", b"{}"))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: world.ended == ["cancelled"])


async def test_a_client_that_does_not_read_stops_its_handler_alone() -> None:
    world = World(ServerLimits(stream_send_buffer_bytes=300_000))
    response = await world.ask("/v3/maintenance/snapshot", b"")
    body = pieces(response)
    for _ in range(50):
        await asyncio.sleep(0)
    sent = world.sent
    assert 3 <= sent <= 6
    text = b""
    while world.sent < sent + 5:
        text += await anext(body)
    line = text.partition(b"\n")[0]
    assert json.loads(line)["result"]["blob"] == "eHh4" * 33_333 + "eA=="
    await close_body(body)
    assert world.server.answers.used_bytes == 0


def kv(number: int, size_bytes: int) -> kv_pb2.KeyValue:
    return kv_pb2.KeyValue(key=b"k%d" % number, value=b"v" * size_bytes, version=number)


async def test_large_answers_are_the_same_as_small_ones_and_come_in_chunks() -> None:
    answers: dict[bytes, Any] = {
        b"kvs": rpc_pb2.RangeResponse(kvs=[kv(n, 50) for n in range(3000)], more=True, count=2**40),
        b"one": rpc_pb2.RangeResponse(kvs=[kv(1, 2_000_000)]),
        b"last": rpc_pb2.RangeResponse(header={"revision": 7}, kvs=[kv(1, 40_000), kv(2, 0)]),
    }
    world = World()

    def serve(call: Any, message: bytes) -> None:
        data = answers[rpc_pb2.RangeRequest.FromString(message).key].SerializeToString()
        call.reply_many([data[at : at + 10_007] for at in range(0, len(data), 10_007)])

    world.server = Server()
    world.server.unary(RANGE, serve)
    world.gateway.serve(world.server)
    for key, answer in answers.items():
        request = json.dumps({"key": list(key)}).encode()
        response = await world.ask("/v3/kv/range", request)
        parts = [part async for part in pieces(response)]
        assert b"".join(parts).decode() == encode(answer)
        assert len(parts) > 1 or key != b"kvs"
        assert not world.server.answers.accounts


async def test_large_answers_of_a_txn_are_walked_to_the_bottom() -> None:
    read = {"response_range": {"header": {"revision": 3}, "kvs": [kv(n, 100) for n in range(1000)], "count": 1}}
    answer = rpc_pb2.TxnResponse(succeeded=True, responses=[read, {"response_put": {}}, read])
    world = World()
    world.server = Server()
    world.server.unary("/etcdserverpb.KV/Txn", lambda call, _: call.reply(answer.SerializeToString()))
    world.gateway.serve(world.server)
    assert (await everything(await world.ask("/v3/kv/txn", b"{}"))).decode() == encode(answer)


async def test_unread_stream_is_closed_when_memory_is_needed(world: World) -> None:
    answer = rpc_pb2.RangeResponse(kvs=[kv(n, 1000) for n in range(1000)]).SerializeToString()
    world.server.unary(RANGE, lambda call, _: call.reply(answer))
    world.gateway.serve(world.server)
    large = await world.ask("/v3/kv/range", b"{}")
    stream = await world.ask("/v3/maintenance/snapshot", b"")
    for response in (large, stream):
        await anext(pieces(response))
    await until(lambda: world.server.answers.used_bytes > len(answer))
    for account in list(world.server.answers.accounts):
        account.end(b"responses_not_read")
    assert world.server.answers.used_bytes == 0
    with pytest.raises(RpcError, match="responses_not_read"):
        await anext(pieces(large))
    assert b'{"error":{"grpc_code":8' in await everything(stream)


async def test_a_call_that_waits_ends_when_its_account_does(world: World) -> None:
    world.server.unary(RANGE, lambda call, _: None)
    world.gateway.serve(world.server)
    task = asyncio.create_task(world.ask("/v3/kv/range", b"{}"))
    await until(lambda: bool(world.server.answers.accounts))
    for account in list(world.server.answers.accounts):
        account.end(b"responses_not_read")
    assert (await task).status == 429
