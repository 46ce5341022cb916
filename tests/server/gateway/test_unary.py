"""Unary paths of the gateway: one handler, the handlers of gRPC, statuses and headers of etcd 3.5."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from raftkv.loop.scheduler import Slices
from raftkv.pb import rpc_pb2
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.calls import KEPT_TIMES, UnaryCall
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from raftkv.rpc.server.router import Kind
from raftkv.rpc.server.server import Server
from raftkv.rpc.status import RpcError
from raftkv.server.gateway.handler import Gateway
from tests.rpc.loop import until

RANGE = "/etcdserverpb.KV/Range"
PUT = "/etcdserverpb.KV/Put"
LOCK = "/v3lockpb.Lock/Lock"


async def behind(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, b"behind " + request.path.encode())


async def body_of(response: HttpResponse) -> bytes:
    return response.body if isinstance(response.body, bytes) else b"".join([piece async for piece in response.body])


class World:
    """A server with a few methods, and its gateway."""

    def __init__(self, limits: ServerLimits | None = None) -> None:
        self.calls: list[UnaryCall] = []
        self.around: list[str] = []
        self.gateway = Gateway(behind, Slices())
        self.server = Server(limits, around=(self._around,))
        self.server.unary(RANGE, self._range)
        self.server.unary(PUT, self._put)
        self.server.unary_async(LOCK, self._lock)
        self.gateway.serve(self.server)

    def _around(self, path: str, kind: Kind, handler: Any) -> Any:
        def handle(call: UnaryCall, message: bytes) -> None:
            self.around.append(f"{kind.value} {call.path}")
            handler(call, message)

        return handle

    def _range(self, call: UnaryCall, message: bytes) -> None:
        self.calls.append(call)
        request = rpc_pb2.RangeRequest.FromString(message)
        if request.key == b"bad":
            raise RpcError(9, "etcdserver: not today")
        if request.key == b"bug":
            raise ZeroDivisionError("secret")
        if request.key == b"pieces":
            kv = rpc_pb2.RangeResponse(kvs=[{"key": b"a"}]).SerializeToString()
            call.reply_many([kv, kv])
        elif request.key != b"later":
            call.reply(rpc_pb2.RangeResponse(count=7).SerializeToString())

    def _put(self, call: UnaryCall, message: bytes) -> None:
        self.calls.append(call)

    async def _lock(self, message: bytes, call: UnaryCall) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def ask(self, target: str, body: bytes = b"{}", method: str = "POST", **headers: str) -> HttpResponse:
        """Answer of one request."""
        fields = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        return await self.gateway.handle(HttpRequest(method, target, fields, body, certificate={"subject": ()}))


@pytest.fixture
@asynccontextmanager
async def world() -> AsyncIterator[World]:
    yield World()


async def test_answers_come_from_the_handler_of_grpc_within_what_is_around_it(world: World) -> None:
    response = await world.ask("/v3/kv/range", b'{"key":"Zm9v"}')
    assert (response.status, response.body) == (200, b'{"count":"7"}')
    assert response.headers == (
        ("content-type", "application/json"),
        ("grpc-metadata-content-type", "application/grpc"),
    )
    assert world.around == [f"unary {RANGE}"]
    assert not world.server.answers.accounts, "nothing is left"


async def test_an_answer_in_pieces_is_one_message() -> None:
    response = await World().ask("/v3/kv/range", b'{"key":"cGllY2Vz"}')
    assert await body_of(response) == b'{"kvs":[{"key":"YQ=="},{"key":"YQ=="}]}'


async def test_request_log_learns_that_a_request_became_a_call(world: World) -> None:
    for body, is_call in (
        (b'{"key":"Zm9v"}', True),
        (b'{"key":"YmFk"}', True),
        (b'{"key":"cGllY2Vz"}', True),
        (b"x", False),
    ):
        assert (await world.ask("/v3/kv/range", body)).is_call is is_call
    assert (await world.ask("/v3/kv/put", grpc_timeout="5m")).is_call


async def test_errors_have_etcds_status_and_body(world: World) -> None:
    response = await world.ask("/v3/kv/range", b'{"key":"YmFk"}')
    text = b"etcdserver: not today"
    assert (response.status, response.body) == (400, b'{"error":"%s","code":9,"message":"%s"}' % (text, text))
    assert response.headers == (("content-type", "application/json"),)
    response = await world.ask("/v3/kv/range", b'{"key":"Ynn=')
    assert (response.status, response.body) == (400, b'{"error":"unexpected EOF","code":3,"message":"unexpected EOF"}')


async def test_messages_nested_too_deep_are_refused(world: World) -> None:
    world.server.unary("/etcdserverpb.KV/Txn", world._put)
    world.gateway.serve(world.server)
    body = b'{"success":[{"requestTxn":' * 2000 + b"{}" + b"}]}" * 2000
    response = await world.ask("/v3/kv/txn", body)
    assert (response.status, b"nested" in bytes(response.body)) == (400, True)


async def test_a_fault_of_a_handler_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    response = await World().ask("/v3/kv/range", b'{"key":"YnVn"}')
    assert (response.status, response.body) == (500, b'{"error":"internal error","code":13,"message":"internal error"}')


async def test_paths_and_methods(world: World) -> None:
    assert (await world.ask("/v3beta/kv/range")).status == 200
    assert (await world.ask("/v3/kv/%72ange?x=y")).status == 200
    for path in ("/v3/kv/range/", "/v3/kv/nothing", "/v3/kv/rangestream", "/v3/"):
        response = await world.ask(path)
        assert (response.status, response.body) == (404, b"Not Found\n"), path
    for method, status in (("GET", 405), ("PUT", 405), ("HEAD", 400), ("DELETE", 405)):
        assert (await world.ask("/v3/kv/range", method=method)).status == status
    for path in ("/v3alpha/kv/range", "/version", "/v3beta", "/v3x"):
        assert (await world.ask(path)).body == b"behind " + path.encode()
    moved = (("/v3", "/v3/"), ("/v3//kv///range", "/v3/kv/range"), ("/v3//kv/range?x=//y", "/v3/kv/range?x=//y"))
    moved += (("//v3/kv/range", "/v3/kv/range"), ("/v3/./kv/../kv/range?x", "/v3/kv/range?x"), ("//health", "/health"))
    moved += (("/../v3/kv/range/.", "/v3/kv/range"), ("/v3//kv/%C3%A4\xe4", "/v3/kv/%C3%A4%E4"))
    for path, target in moved:
        response = await world.ask(path)
        assert (response.status, response.headers) == (301, (("location", target),))


async def test_the_document_of_the_paths_is_served(world: World) -> None:
    response = await world.ask("/v3/openapi.json", b"", "GET")
    assert (response.status, bytes(response.body)[:19]) == (200, b'{"openapi":"3.0.3",')
    assert (await world.ask("/v3/openapi.json")).status == 404


async def test_binary_metadata_is_looked_at(world: World) -> None:
    response = await world.ask("/v3/kv/range", grpc_metadata_a_bin="%%%")
    text = b"invalid binary header Grpc-Metadata-A-Bin: illegal base64 data at input byte 0"
    assert (response.status, response.body) == (400, b'{"error":"%s","code":3,"message":"%s"}' % (text, text))
    assert (await world.ask("/v3/kv/range", grpc_metadata_a_bin="YQ")).status == 200
    assert world.calls[0].metadata["a-bin"] == b"a"


async def test_forwarded_parts_of_the_request(world: World) -> None:
    await world.ask("/v3/kv/range", authorization="secret", grpc_metadata_hasleader="true", user_agent="curl")
    assert world.calls[0].headers == (
        (b"grpcgateway-accept", b"*/*"),
        (b"authorization", b"secret"),
        (b"hasleader", b"true"),
    )


async def test_an_unanswered_call_ends_at_its_timeout(world: World) -> None:
    response = await world.ask("/v3/kv/put", grpc_timeout="5m")
    assert response.status == 504
    assert b"context deadline exceeded" in bytes(response.body)


async def test_timeouts_are_read_as_go_reads_them(world: World) -> None:
    for wrong in ("5x", "5", "S", "5 S", "0x5S", "1_0S", "5.0S", "9223372036854775808S", "1" * 10_000 + "S"):
        assert (await world.ask("/v3/kv/range", grpc_timeout=wrong)).status == 400, wrong
    for passed in ("-1S", "2562048H"):
        response = await world.ask("/v3/kv/range", grpc_timeout=passed)
        assert (response.status, json.loads(bytes(response.body))["code"]) == (504, 4), passed
    for far in ("+5S", "100000000S", "9223372036854775807n", "-0S"):
        assert (await world.ask("/v3/kv/range", grpc_timeout=far)).status == 200, far
    task = asyncio.create_task(world.ask("/v3/kv/put", grpc_timeout="0S"))
    await until(lambda: world.calls[-1].path == PUT)
    assert world.calls[-1].deadline is None, "0 is no limit"
    task.cancel()


def _nested(depth: int) -> bytes:
    txn: dict[str, Any] = {"success": [{"request_range": {"key": "Zm9v"}}]}
    for _ in range(depth):
        txn = {"success": [{"request_txn": txn}]}
    return json.dumps(txn).encode()


async def test_messages_are_nested_as_deep_as_they_and_their_answers_can_be_read(world: World) -> None:
    """Parsers of messages stop at 100; a txn just below was done, and its answer could not be written."""
    taken: list[bytes] = []

    def txn(call: UnaryCall, message: bytes) -> None:
        taken.append(message)
        call.reply(b"")

    world.server.unary("/etcdserverpb.KV/Txn", txn)
    world.gateway.serve(world.server)
    deepest = 0
    for depth in range(40, 64):
        response = await world.ask("/v3/kv/txn", _nested(depth))
        if response.status == 200:
            deepest = depth
            continue
        text = "messages are nested more than 90 deep"
        assert response.status == 400
        assert json.loads(bytes(response.body)) == {"error": text, "code": 3, "message": text}
    assert len(taken) == deepest - 39
    rpc_pb2.TxnRequest.FromString(taken[-1])
    answer = rpc_pb2.TxnResponse(responses=[{"response_range": {"kvs": [{"key": b"k"}]}}])
    for _ in range(deepest):
        answer = rpc_pb2.TxnResponse(header={}, responses=[{"response_txn": answer}])
    rpc_pb2.TxnResponse.FromString(answer.SerializeToString())


async def test_a_client_that_leaves_cancels_its_call(world: World) -> None:
    task = asyncio.create_task(world.ask("/v3/kv/put"))
    await until(lambda: bool(world.calls))
    told: list[bool] = []
    world.calls[0].on_cancel(lambda: told.append(world.calls[0].severed))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == [False]
    assert world.calls[0].cancelled
    world.calls[0].reply(b"")
    assert not world.server.answers.accounts


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_large_answer_is_freed_in_steps(world: World, is_read: bool) -> None:
    # All of it was kept until its end, and freed then in one turn: 0.1 s for 512 MiB.
    kv = rpc_pb2.RangeResponse(kvs=[{"key": b"a", "value": bytes(1 << 20)}]).SerializeToString()
    pieces = [kv[:-1] + bytes([number]) for number in range(20)]
    task = asyncio.ensure_future(world.ask("/v3/kv/range", b'{"key":"bGF0ZXI="}'))
    await until(lambda: bool(world.calls))
    world.calls[0].reply_many(pieces)
    response = await task
    body: Any = response.body
    if is_read:
        assert len(await body_of(response)) > 20 << 20
    else:
        await body.aclose()
    left = [len(pieces)]
    while pieces:
        await asyncio.sleep(0)
        left.append(len(pieces))
        assert len(left) < 1000
    assert max(before - after for before, after in pairwise(left)) <= 4


async def test_calls_that_wait_are_counted_and_give_way_to_others() -> None:
    """Count what is kept of a request: thousands of clients may wait for locks with long names."""

    world = World(ServerLimits(process_assembly_bytes=1 << 20))
    body = json.dumps({"name": b64encode(bytes(100_000)).decode()}).encode()
    first, second, third = (asyncio.ensure_future(world.ask("/v3/lock/lock", body)) for _ in range(3))
    assert (await first).status == 429
    answers = world.server.answers
    assert 2 * KEPT_TIMES * 100_000 < answers.held_bytes < 3 * KEPT_TIMES * 100_000
    second.cancel()
    third.cancel()
    await until(lambda: answers.held_bytes == 0)
