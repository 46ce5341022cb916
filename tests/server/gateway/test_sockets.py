"""Calls over websockets: tokens, allowed messages, and ends of calls."""

from __future__ import annotations

import asyncio
import json

import pytest

from raftkv.loop.scheduler import Slices
from raftkv.pb.bindings import BINDINGS
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from raftkv.rpc.server.websocket import WebSocket
from raftkv.rpc.status import RpcError
from raftkv.server.gateway.sockets import SocketRequests
from tests import websocket as ws
from tests.server.gateway.test_streams import World, everything, pieces

KEEP_ALIVES = "/v3/lease/keepalive"


async def shake(world: World, path: str, *more: tuple[str, str], can_switch: bool = True) -> HttpResponse:
    fields = tuple({**dict(ws.HANDSHAKE), **dict(more)}.items())
    return await world.gateway.handle(HttpRequest("GET", path, fields, can_switch=can_switch))


def socket_of(response: HttpResponse) -> WebSocket:
    assert response.status == 101
    assert response.socket is not None
    return response.socket


def say(socket: WebSocket, *messages: str) -> None:
    inbox = bytearray(b"".join(ws.frame(ws.TEXT, message.encode()) for message in messages))
    while socket.read_frame(inbox):
        pass


def leave(socket: WebSocket) -> None:
    socket.read_frame(bytearray(ws.frame(ws.CLOSE)))


@pytest.mark.parametrize("path", [KEEP_ALIVES, "/v3beta/lease/keepalive"])
async def test_each_message_is_one_or_more_requests(path: str) -> None:
    world = World()
    response = await shake(world, path)
    socket = socket_of(response)
    say(socket, '{"ID":1}', "", ' {"ID":"2"}\n{"ID":3}')
    answers = pieces(response)
    lines = [await anext(answers) for _ in range(3)]
    assert lines == [b'{"result":{"ID":"%d","TTL":"5"}}\n' % number for number in (1, 2, 3)]
    say(socket, '{"ID":4}')
    assert json.loads(await anext(answers))["result"]["ID"] == "4"
    leave(socket)
    assert await everything(response) == b""
    assert world.ended == ["released"]
    assert not world.server.answers.accounts


async def test_requests_that_cannot_be_read_end_there_as_in_a_body() -> None:
    world = World()
    response = await shake(world, KEEP_ALIVES)
    say(socket_of(response), '{"ID":1}', '{"ID":', '{"ID":2}')
    assert await everything(response) == b'{"result":{"ID":"1","TTL":"5"}}\n'


@pytest.mark.parametrize("message", ["x", '{"ID":"x"}'])
async def test_a_first_request_that_cannot_be_read_is_the_answer(message: str) -> None:
    response = await shake(World(), KEEP_ALIVES)
    say(socket_of(response), message)
    assert json.loads(await everything(response))["code"] == 2


async def test_a_refused_call_says_so_in_a_message() -> None:
    world = World()
    world.refusal = RpcError(14, "etcdserver: no leader")
    response = await shake(world, KEEP_ALIVES)
    say(socket_of(response), '{"ID":1}')
    assert json.loads(await everything(response))["error"]["message"] == "etcdserver: no leader"


async def test_idle_client_is_disconnected() -> None:
    response = await shake(World(ServerLimits(http1_idle_timeout_s=0.0)), KEEP_ALIVES)
    assert await everything(response) == b""


async def test_a_client_that_leaves_before_it_asks_leaves_nothing() -> None:
    world = World()
    response = await shake(world, KEEP_ALIVES)
    leave(socket_of(response))
    assert await everything(response) == b""
    assert world.ended == []


@pytest.mark.parametrize(
    ("fields", "token", "protocol"),
    [
        ((), None, None),
        ((("sec-websocket-protocol", "Bearer, tok"),), b"Bearer tok", "Bearer"),
        ((("sec-websocket-protocol", "Bearer,tok"),), b"Bearer tok", "Bearer"),
        ((("sec-websocket-protocol", "chat"),), None, None),
        ((("authorization", "tok"),), b"tok", None),
        ((("authorization", "no"), ("sec-websocket-protocol", "Bearer, tok")), b"Bearer tok", "Bearer"),
        ((("sec-websocket-protocol", "Bearer, no"), ("cookie", "a=b; token=tok")), b"Bearer tok", "Bearer"),
        ((("cookie", "a=b"),), None, None),
        ((("cookie", 'prefs={"dark":true,"n":[1]};  token="tok" ; _ga[x]=1'),), b"Bearer tok", None),
        ((("cookie", "plain; token=tok; token=of-another-path"),), b"Bearer tok", None),
        ((("grpc-metadata-token", "tok"), ("grpc-timeout", "0n")), None, None),
    ],
    ids=[
        "none",
        "subprotocol",
        "without space",
        "another",
        "header",
        "of two",
        "cookie",
        "another cookie",
        "of all sorts",
        "nameless",
        "metadata",
    ],
)
async def test_the_token_of_a_handshake_is_that_of_the_call(fields, token, protocol):
    world, seen = World(), []
    world.on_keep_alive = lambda call: seen.append(dict(call.headers))
    response = await shake(world, KEEP_ALIVES, *fields)
    assert dict(response.headers).get("sec-websocket-protocol") == protocol
    say(socket_of(response), '{"ID":1}')
    leave(socket_of(response))
    await everything(response)
    (headers,) = seen
    assert headers.pop(b"grpcgateway-accept") == b"*/*", "never the certificate's user"
    assert headers == ({} if token is None else {b"authorization": token})


@pytest.mark.parametrize(
    ("path", "status"), [("/v3/watch", 101), ("/v3/maintenance/snapshot", 405), ("/v3/nothing", 404)]
)
async def test_only_paths_whose_client_streams_become_websockets(path: str, status: int) -> None:
    assert (await shake(World(), path)).status == status


async def test_over_http2_there_are_no_websockets() -> None:
    assert (await shake(World(), KEEP_ALIVES, can_switch=False)).status == 400


async def test_thousands_of_requests_leave_turns_to_others() -> None:
    count, turns = 3000, 0
    socket = WebSocket(1 << 20)
    say(socket, *['{"ID":1}'] * count)
    requests = SocketRequests(socket, Slices(), "someone")

    async def read_all() -> None:
        for _ in range(count):
            await requests.next(BINDINGS[KEEP_ALIVES])

    reading = asyncio.create_task(read_all())
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 4
