"""The race of the endpoints for a client's first connection."""

from __future__ import annotations

import asyncio
import socket

import pytest

from raftkv.client import Client, ClientOptions
from raftkv.client.rpc import methods
from raftkv.client.rpc import transport as racing
from raftkv.client.rpc.transport import race
from raftkv.errors import ContextDeadlineExceededError, StatusError
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError
from raftkv.urls import parse_endpoints
from tests.client.waiting import until

READ = rpc_pb2.RangeRequest(key=b"k")
GOT = rpc_pb2.RangeResponse(count=1).SerializeToString()


class Runner:
    """A transport whose first attempt ends when its test says so."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.closed = False
        self.calls = 0

    async def first_attempt(self):
        return await self.outcome

    async def unary(self, path, message, timeout_s=None, metadata=()):
        self.calls += 1
        if not self.outcome.done():
            raise RpcError(4, "context deadline exceeded", definite=True)
        return GOT

    async def close(self):
        self.closed = True


class Field:
    """The endpoints of a race, opened in turn; ``ends`` are attempts with an immediate outcome."""

    def __init__(self, **ends: bool) -> None:
        self.ends = ends
        self.opened: list[tuple[str, Runner]] = []

    def open(self, endpoint, options=None):
        runner = Runner()
        if endpoint.host in self.ends:
            runner.outcome.set_result(self.ends[endpoint.host])
        self.opened.append((endpoint.host, runner))
        return runner

    @property
    def names(self):
        return [name for name, _ in self.opened]

    def __getitem__(self, host):
        return dict(self.opened)[host]


ABC = parse_endpoints("a,b,c")


async def test_the_first_wins_alone_if_it_is_well():
    field = Field(a=True, b=True)
    winner, kept = await race(ABC, field.open)
    assert (winner, list(kept), field.names) == (ABC[0], [ABC[0]], ["a"])
    assert not field["a"].closed


async def test_refused_endpoint_costs_no_head_start(monkeypatch):
    monkeypatch.setattr(racing, "HEAD_START_S", 3600.0)
    field = Field(a=False, b=False, c=True)
    winner, kept = await race(ABC, field.open)
    assert (winner, list(kept)) == (ABC[2], [ABC[2]])
    assert [runner.closed for _, runner in field.opened] == [True, True, False]


async def test_silent_ones_are_left_and_closed(monkeypatch):
    monkeypatch.setattr(racing, "HEAD_START_S", 0.0)
    field = Field(c=True)
    winner, _ = await race(ABC, field.open)
    assert winner == ABC[2]
    assert [runner.closed for _, runner in field.opened] == [True, True, False]


async def test_simultaneous_answers_go_to_first_endpoint(monkeypatch):
    monkeypatch.setattr(racing, "HEAD_START_S", 0.0)
    field = Field()

    def open_next(endpoint):
        runner = field.open(endpoint)
        if endpoint.host == "c":
            for _, each in reversed(field.opened):
                each.outcome.set_result(True)
        return runner

    winner, _ = await race(ABC, open_next)
    assert winner == ABC[0]
    assert [runner.closed for _, runner in field.opened] == [False, True, True]


async def test_if_none_can_be_reached_their_transports_know_why():
    field = Field(a=False, b=False, c=False)
    winner, kept = await race(ABC, field.open)
    assert (winner, list(kept)) == (None, ABC)
    assert not any(runner.closed for _, runner in field.opened)


async def test_concurrent_calls_share_one_race_and_calls_to_one_endpoint_take_no_part(monkeypatch):
    monkeypatch.setattr(racing, "HEAD_START_S", 0.0)
    field = Field(b=True)
    async with Client("a,b", open_transport=field.open) as client:
        read = [client.call(methods.RANGE, READ, timeout_s=30) for _ in range(3)]
        alone = client.call_at("b", methods.RANGE, READ, timeout_s=30)
        answers = await asyncio.gather(*read, alone)
        assert [answer.count for answer in answers] == [1] * 4
        assert client.endpoint == "b"
        assert sorted(field.names) == ["a", "b", "b"]
        # One connection in the end.
        assert [runner.closed for _, runner in field.opened].count(False) == 1
    assert all(runner.closed for _, runner in field.opened)


async def test_call_timeout_does_not_end_the_race():
    field = Field()
    async with Client("a,b", open_transport=field.open) as client:
        with pytest.raises(ContextDeadlineExceededError, match=r"^context deadline exceeded$"):
            await client.call(methods.RANGE, READ, timeout_s=0.01)
        for _, runner in list(field.opened):
            if not runner.outcome.done():
                runner.outcome.set_result(True)
        assert (await client.call(methods.RANGE, READ, timeout_s=30)).count == 1


async def test_a_client_that_is_closed_while_its_endpoints_race_ends_all():
    field = Field()
    client = Client("a,b", open_transport=field.open)
    waiting = asyncio.ensure_future(client.call(methods.RANGE, READ, timeout_s=30))
    await until(lambda: field.opened)
    await client.close()
    with pytest.raises(StatusError, match="the client is closed"):
        await waiting
    assert all(runner.closed for _, runner in field.opened)


@pytest.fixture
def frozen():
    """Endpoints of frozen members: the kernel accepts connections, and no process reads them."""
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=8) for _ in range(3)]
    yield [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    for listener in listeners:
        listener.close()


@pytest.mark.long
async def test_frozen_members_before_a_live_one_do_not_cost_a_dial_timeout_each(member, frozen):
    options = ClientOptions(dial_timeout_s=60.0)
    async with Client([*frozen, *member.endpoints], options) as client:
        await client.call(methods.RANGE, READ, timeout_s=10)
        assert client.endpoint in member.endpoints
    async with Client([*frozen, *member.endpoints], options) as client, await client.stream(methods.WATCH) as stream:
        create = rpc_pb2.WatchCreateRequest(key=b"k")
        await stream.send(rpc_pb2.WatchRequest(create_request=create))
        assert (await stream.receive()).created


@pytest.mark.long
async def test_only_frozen_members_are_named_with_their_reason(frozen):
    options = ClientOptions(dial_timeout_s=0.2, explain=True)
    async with Client(frozen, options) as client:
        with pytest.raises(ContextDeadlineExceededError, match="timed out connecting"):
            await client.call(methods.RANGE, READ, timeout_s=1)
