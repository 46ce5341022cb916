"""Calls, failed ones too, are counted under the names of go-grpc-prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raftkv.replica.node.admission import Admission
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import Code, RpcError
from raftkv.server.metrics.calls import CallTimes, call_metrics
from tests.rpc.services import channel_to

PUT = "/etcdserverpb.KV/Put"
RANGE = "/etcdserverpb.KV/Range"
WATCH = "/etcdserverpb.Watch/Watch"
KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
AUTHENTICATE = "/etcdserverpb.Auth/Authenticate"


class World:
    """A server with a few methods, and a client."""

    def __init__(self, *arounds: Any) -> None:
        self.server = Server(around=arounds)
        self.waiting: asyncio.Queue[UnaryCall] = asyncio.Queue()
        self.server.unary(PUT, lambda call, message: call.reply(message))
        self.server.unary(RANGE, lambda call, message: self.waiting.put_nowait(call))
        self.server.unary(AUTHENTICATE, lambda call, message: call.fail(Code.INVALID_ARGUMENT, "wrong"))
        self.server.stream(WATCH, self.echo)
        self.server.stream(KEEP_ALIVE, self.echo)
        admission = cast(Admission, SimpleNamespace(client_versions={(True, b"3.5"): 1}))
        self.metrics = partial(call_metrics, self.server, admission)

    async def echo(self, call: StreamCall) -> None:
        async for message in call:
            if message == b"fail":
                raise RpcError(Code.UNAVAILABLE, "no leader")
            call.send_nowait(message)

    def samples(self) -> dict[tuple[str, ...], float]:
        """Samples by name and values of labels, those above 0."""
        found = [sample for family in self.metrics() for sample in family.samples]
        return {(sample.name, *sample.labels.values()): sample.value for sample in found if sample.value}


async def _cancelled(call: UnaryCall) -> None:
    over = asyncio.Event()
    call.on_cancel(over.set)
    await over.wait()


@asynccontextmanager
async def serving(*arounds: Any) -> AsyncIterator[tuple[World, Channel]]:
    world = World(*arounds)
    async with channel_to(world.server) as channel:
        yield world, channel


async def test_every_method_and_code_is_there_from_the_start() -> None:
    async with serving() as (world, _):
        families = {family.name: family.samples for family in world.metrics()}
        assert {sample.value for sample in families["grpc_server_handled"]} == {0.0}
        assert len(families["grpc_server_handled"]) == 5 * 17
        labels = families["grpc_server_started"][0].labels
        assert labels == {"grpc_method": "Put", "grpc_service": "etcdserverpb.KV", "grpc_type": "unary"}


async def test_unary_calls() -> None:
    async with serving() as (world, channel):
        for _ in range(3):
            await channel.unary(PUT, b"a")
        with pytest.raises(RpcError):
            await channel.unary(AUTHENTICATE, b"")
    found = world.samples()
    put = ("Put", "etcdserverpb.KV", "unary")
    assert found["grpc_server_started_total", *put] == 3
    assert found["grpc_server_handled_total", "OK", *put] == 3
    assert found["grpc_server_msg_received_total", *put] == found["grpc_server_msg_sent_total", *put] == 3
    login = ("Authenticate", "etcdserverpb.Auth", "unary")
    assert found["grpc_server_handled_total", "InvalidArgument", *login] == 1
    assert ("grpc_server_msg_sent_total", *login) not in found
    assert found["raftkv_auth_logins_total", "refused"] == 1
    assert found["etcd_server_client_requests_total", "unary", "3.5"] == 1
    assert found["etcd_server_client_requests_total", "unary", "unknown"] == 3
    assert found["etcd_network_client_grpc_received_bytes_total",] > 4 * 10
    assert found["etcd_network_client_grpc_sent_bytes_total",] > 4 * 10


async def test_calls_that_are_no_longer_awaited() -> None:
    async with serving() as (world, channel):
        call = channel.unary(RANGE, b"")
        served = await world.waiting.get()
        call.cancel()
        await _cancelled(served)
        served.reply(b"too late")
        with pytest.raises(RpcError):
            await channel.unary(RANGE, b"", 0.01)
        await _cancelled(await world.waiting.get())
    found = world.samples()
    range_ = ("Range", "etcdserverpb.KV", "unary")
    assert found["grpc_server_started_total", *range_] == 2
    codes = {key[1] for key in found if key[0] == "grpc_server_handled_total"}
    # The client gives up when its deadline passes, and so does the server: the first of them counts.
    assert codes <= {"Canceled", "DeadlineExceeded"}
    assert sum(value for key, value in found.items() if key[0] == "grpc_server_handled_total") == 2


async def test_streams_count_messages() -> None:
    async with serving() as (world, channel):
        stream = channel.stream(WATCH)
        for message in (b"one", b"two"):
            await stream.send(message)
            assert await stream.receive() == message
        stream.half_close()
        assert await stream.receive() is None
        stream = channel.stream(KEEP_ALIVE)
        await stream.send(b"fail")
        with pytest.raises(RpcError):
            await stream.receive()
    found = world.samples()
    watch = ("Watch", "etcdserverpb.Watch", "bidi_stream")
    assert found["grpc_server_msg_received_total", *watch] == found["grpc_server_msg_sent_total", *watch] == 2
    assert found["grpc_server_handled_total", "OK", *watch] == 1
    assert found["etcd_network_server_stream_failures_total", "lease-keepalive", "receive"] == 1
    assert ("etcd_network_server_stream_failures_total", "watch", "receive") not in found


async def test_durations_are_observed_when_enabled() -> None:
    times = CallTimes()
    async with serving(times.around) as (_, channel):
        await channel.unary(PUT, b"a")
        with pytest.raises(RpcError):
            await channel.unary(AUTHENTICATE, b"")
    family, requests = times.collect()
    asked = {(s.labels["type"], s.labels["success"]): s.value for s in requests.samples if s.name.endswith("_count")}
    assert asked == {("Put", "true"): 1, ("Authenticate", "false"): 1}
    counts = {s.labels["grpc_method"]: s.value for s in family.samples if s.name.endswith("_count")}
    assert counts == {"Put": 1, "Range": 0, "Authenticate": 1, "Watch": 0, "LeaseKeepAlive": 0}


async def test_earlier_observer_of_a_call_still_observes_it() -> None:
    seen: list[int] = []

    def outer(path: str, kind: Any, handler: Callable[..., Any]) -> Callable[..., Any]:
        def watched(call: UnaryCall, message: bytes) -> None:
            call.observer = lambda code, answer: seen.append(code)
            handler(call, message)

        return watched if path == PUT else handler

    async with serving(outer, CallTimes().around) as (_, channel):
        await channel.unary(PUT, b"a")
    assert seen == [Code.OK]
