"""Messages to an unreachable peer are dropped and reported, and never disturb the loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from raftkv.pb import rpc_pb2
from raftkv.raft.types import Message, MessageType
from raftkv.rpc.client import channel
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import Code, RpcError
from raftkv.server.listening import PEER_LIMITS
from raftkv.server.peer import transport
from raftkv.server.peer.transport import Peer, Transport
from tests.rpc import raw
from tests.rpc.loop import until

BEAT = Message(MessageType.HEARTBEAT, to=2, from_=1, term=1)


class Stream:
    """A stream to a peer that takes so many batches and then breaks."""

    def __init__(self, takes: int, buffered: int = 0) -> None:
        self.takes = takes
        self.send_buffer_size = buffered
        self.done = False
        self.sent: list[bytes] = []

    def send_at_once(self, messages: list[bytes]) -> None:
        if len(self.sent) == self.takes:
            raise RpcError(Code.UNAVAILABLE, "error reading from server: EOF")
        self.sent += messages


def _nothing(peer_id: int) -> None:
    """Ignore the call."""


def _send_over(stream: Stream | None) -> tuple[Peer, list[int]]:
    unreachable: list[int] = []

    async def scenario() -> Peer:
        network = Transport(1, 1, None, unreachable.append, lambda message: None)
        peer = Peer(network, 2, ["http://127.0.0.1:1"], ())
        peer._stream = stream
        network.peers[2] = peer
        network.send([BEAT, Message(MessageType.HEARTBEAT, to=9, from_=1)])
        await peer.channel.close()
        return peer

    return asyncio.run(scenario()), unreachable


def test_messages_of_one_turn_for_a_peer_are_one_batch() -> None:
    stream = Stream(takes=5)
    peer, unreachable = _send_over(stream)
    assert len(stream.sent) == 1
    assert peer.sent_bytes == len(stream.sent[0])
    assert unreachable == []


@pytest.mark.parametrize("stream", [None, Stream(takes=0)], ids=["none", "broken"])
def test_without_a_stream_messages_are_dropped_and_reported(stream: Stream | None) -> None:
    peer, unreachable = _send_over(stream)
    assert unreachable == [2]
    assert peer.send_failures == 1


def test_a_peer_that_does_not_keep_up_is_treated_as_away() -> None:
    stream = Stream(takes=5, buffered=transport.SEND_BUFFER_MAX_BYTES + 1)
    _, unreachable = _send_over(stream)
    assert unreachable == [2]
    assert stream.sent == []


async def test_snapshots_take_another_way() -> None:
    sent: list[Message] = []
    network = Transport(1, 1, None, _nothing, sent.append)
    message = Message(MessageType.SNAPSHOT, to=2, from_=1)
    network.send([message])
    assert sent == [message]


async def test_a_peer_that_ends_the_stream_without_a_word_is_connected_to_again() -> None:
    opened = asyncio.Event()
    attempts = 0

    async def refuse_first(call: StreamCall) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            return
        await call.send(b"")
        opened.set()
        await call.receive()

    server = Server()
    server.stream(transport.RAFT_PATH, refuse_first)
    ((_, port),) = await server.listen("127.0.0.1", 0)
    network = Transport(1, 1, None, _nothing, lambda message: None)
    peer = Peer(network, 2, [f"http://127.0.0.1:{port}"], ())
    peer.start()
    await asyncio.wait_for(opened.wait(), 90)
    await peer.close()
    await server.close()


async def test_a_member_may_ping_as_often_as_its_two_clocks_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepalive and the time of a round trip meet every few seconds; the fourth meeting once ended the connection."""
    monkeypatch.setattr(transport, "PEER_CHANNEL", replace(transport.PEER_CHANNEL, keepalive_time_s=0.001))
    monkeypatch.setattr(transport, "PROBE_S", 0.001)
    streams = 0

    async def take(call: StreamCall) -> None:
        nonlocal streams
        streams += 1
        await call.send(b"")
        await call.receive()

    server = Server(limits=PEER_LIMITS)
    server.stream(transport.RAFT_PATH, take)
    ((_, port),) = await server.listen("127.0.0.1", 0)
    network = Transport(1, 1, None, _nothing, lambda message: None)
    peer = Peer(network, 2, [f"http://127.0.0.1:{port}"], ())
    peer.start()
    await until(lambda: peer.round_trips.count >= 50)
    assert (streams, peer.disconnects) == (1, 0)
    await peer.close()
    await server.close()


async def test_a_dead_connection_gives_its_place_back() -> None:
    """Such have a stream, so they count as used: after 64 within two hours the port took no member any more."""
    limits = replace(
        PEER_LIMITS,
        keepalive_time_s=PEER_LIMITS.keepalive_time_s / 200,
        keepalive_timeout_s=PEER_LIMITS.keepalive_timeout_s / 200,
    )
    taken = asyncio.Event()

    async def take(call: StreamCall) -> None:
        taken.set()
        await call.receive()

    server = Server(limits=limits)
    server.stream(transport.RAFT_PATH, take)
    ((_, port),) = await server.listen("127.0.0.1", 0)
    silent = await raw.RawClient.connect(f"127.0.0.1:{port}")
    silent.send(raw.headers(1, raw.grpc_headers(transport.RAFT_PATH)))
    await taken.wait()
    await until(lambda: not server.connections)
    silent.close()
    await server.close()


async def test_a_member_that_is_killed_is_known_to_be_gone_and_found_again_at_once(monkeypatch):
    # Waits that would outlast the test, so that it is what the member hears that ends them.
    monkeypatch.setattr(transport, "RECONNECT_MAX_S", 1000.0)
    options = replace(transport.PEER_CHANNEL, backoff_base_s=1000.0, backoff_max_s=1000.0)
    monkeypatch.setattr(transport, "PEER_CHANNEL", options)
    monkeypatch.setattr(channel, "_STEADY_S", 0.0)
    opened = asyncio.Event()
    gone: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def take(call: StreamCall) -> None:
        await call.send(b"")
        opened.set()
        await call.receive()

    async def serve(port: int) -> tuple[Server, int]:
        server = Server()
        server.stream(transport.RAFT_PATH, take)
        ((_, port),) = await server.listen("127.0.0.1", port)
        return server, port

    server, port = await serve(0)
    network = Transport(1, 1, None, _nothing, lambda message: None, on_gone=gone.set_result)
    network.add_peer(2, [f"http://127.0.0.1:{port}"])
    await asyncio.wait_for(opened.wait(), 90)
    assert not gone.done()
    server.stop_listening()
    await server.close(0.0)
    assert await asyncio.wait_for(gone, 90) == 2
    opened.clear()
    server, _ = await serve(port)
    network.heard_of(2)
    await asyncio.wait_for(opened.wait(), 90)
    network.heard_of(2)
    network.heard_of(9)
    await network.close()
    await server.close()


async def test_a_member_that_moves_is_reached_by_its_old_stream_until_that_ends(monkeypatch):
    """Keep the stream by which alone it hears of its move: one that was closed at once left it without the entry."""
    monkeypatch.setattr(transport, "RECONNECT_MAX_S", 1000.0)
    ends: asyncio.Queue[tuple[int, asyncio.Event]] = asyncio.Queue()

    async def serve() -> tuple[Server, int]:
        async def take(call: StreamCall) -> None:
            end = asyncio.Event()
            await call.send(b"")
            ends.put_nowait((port, end))
            await end.wait()

        server = Server()
        server.stream(transport.RAFT_PATH, take)
        ((_, port),) = await server.listen("127.0.0.1", 0)
        return server, port

    def at(*ports: int) -> dict[int, rpc_pb2.Member]:
        return {2: rpc_pb2.Member(ID=2, peerURLs=[f"http://127.0.0.1:{port}" for port in ports])}

    (old, old_port), (new, new_port) = await serve(), await serve()
    network = Transport(1, 1, None, _nothing, lambda message: None)
    network.follow(at(old_port))
    reached, end = await asyncio.wait_for(ends.get(), 90)
    assert reached == old_port
    await until(lambda: network.connected_since(2) is not None)
    for _ in range(2):
        network.follow(at(new_port))
        assert network.connected_since(2) is not None
    network.follow(at(old_port))  # and back: nothing is left to do
    network.follow(at(new_port))
    end.set()
    reached, end = await asyncio.wait_for(ends.get(), 90)
    assert reached == new_port
    # Without a stream there is nothing to wait for.
    end.set()
    await until(lambda: network.connected_since(2) is None)
    network.follow(at(old_port))
    reached, end = await asyncio.wait_for(ends.get(), 90)
    assert reached == old_port
    # Who leaves while it moves is not connected to anew.
    await until(lambda: network.connected_since(2) is not None)
    network.follow(at(new_port))
    network.follow({})
    end.set()
    await until(lambda: network.connected_since(2) is None)
    assert network.peers[2].urls == (f"http://127.0.0.1:{old_port}",)
    await network.close()
    for server in (old, new):
        await server.close()
