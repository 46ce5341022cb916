"""Handshakes that never end, come all at once, or speak something else."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest

from raftkv.rpc import Channel, ServerLimits
from raftkv.rpc.server import accept
from raftkv.rpc.server.accept import Handshakes
from raftkv.rpc.tls import RefusedPeerError
from tests.rpc.loop import failure, until
from tests.server.tls.room import Room, Serving, asked, serving


def _connect(served: Serving) -> socket.socket:
    host, _, port = served.target.rpartition(":")
    return socket.create_connection((host, int(port)))


def _reasons(served: Serving) -> set[str]:
    return {reason for _, reason in served.security.rejected._seen}


@pytest.mark.long
@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00"])
async def test_half_open_handshakes_end(room: Room, sent: bytes) -> None:
    """GHSA-6vch-q96h-7gc3: a client that says nothing more must not keep a descriptor for ever."""
    async with serving(room.security("server"), ServerLimits(tls_handshake_timeout_s=1.0)) as served:
        with _connect(served) as half_open:
            half_open.sendall(sent)
            await until(lambda: len(served.server.handshakes) == 1)
            await until(lambda: not served.server.connections)
            assert _reasons(served) == {"the handshake was not finished in time"}
            assert len(served.server.handshakes) == 0
        assert await asked(served.target, room.security("server").dialing) == "server"


def test_the_limits_are_named() -> None:
    assert ServerLimits().tls_handshake_timeout_s == 5.0
    assert ServerLimits().unfinished_handshakes == 1000


async def test_the_oldest_of_too_many_unfinished_handshakes_goes(room: Room) -> None:
    async with serving(room.security("server"), ServerLimits(unfinished_handshakes=4)) as served:
        half_open = [_connect(served) for _ in range(4)]
        half_open[2].sendall(b"\x16")
        await until(lambda: len(served.server.handshakes) == 4)
        # Who means it gets in, though all places are taken.
        assert await asked(served.target, room.security("server").dialing) == "server"
        await until(lambda: len(served.server.handshakes) == 3)
        assert await asyncio.to_thread(half_open[0].recv, 1) == b""
        assert _reasons(served) == {"more than 4 handshakes are unfinished, and this is the oldest"}
        for connection in half_open:
            connection.close()
        await until(lambda: not served.server.connections)


async def test_early_cancelled_handshake_leaves_nothing(room: Room) -> None:
    """One in thirty half-open connections to a peer port, which takes 64, stayed for ever: members could not come."""
    async with serving(room.security("server")) as served:
        with _connect(served) as half_open:
            await until(lambda: len(served.server.handshakes) == 1)
            (connection,) = served.server.connections
            half_open.sendall(b"\x16\x03\x01")
            for _ in iter(lambda: connection._handshake is None, False):  # its task begins in the turn after this one
                await asyncio.sleep(0)
            connection.give_up(TimeoutError())
            await until(lambda: not served.server.connections)
            assert _reasons(served) == {"the handshake was not finished in time"}


async def test_unfinished_handshakes_leave_room_at_any_limit_of_connections(room: Room) -> None:
    """The peer port takes 64 connections: who knows no certificate must not keep members apart by holding them."""
    async with serving(room.security("server"), ServerLimits(connections=8)) as served:
        half_open = []
        for _ in range(20):
            half_open.append(_connect(served))
            await until(lambda: len(served.server.connections) >= min(len(half_open), 4))
        assert await asked(served.target, room.security("server").dialing) == "server"
        assert len(served.server.connections) <= 4
        for connection in half_open:
            connection.close()
        await until(lambda: not served.server.connections)


async def test_few_steps_of_handshakes_are_done_in_one_turn() -> None:
    """A thousand that come at once would hold the loop for a second."""
    waiting, turn = Handshakes(100), [0]
    begun: list[int] = []
    for _ in range(50):
        waiting.take_turn(lambda: begun.append(turn[0]))
    while len(begun) < 50:
        turn[0] += 1
        await asyncio.sleep(0)
    assert max(map(begun.count, begun)) <= accept.STEPS_A_TURN


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "the client speaks plain HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "the other end does not speak TLS"),
        (b"\x16\x03\x01\x00\x04junk", ""),
    ],
)
async def test_plain_text_on_a_tls_port_is_logged_as_that(room: Room, sent: bytes, reason: str) -> None:
    async with serving(room.security("server")) as served:
        with _connect(served) as stranger:
            stranger.sendall(sent)
            await until(lambda: served.security.rejected.count)
        await until(lambda: not served.server.connections)
        (found,) = _reasons(served)
        assert reason in found
        assert "_ssl.c" not in found


async def test_connections_that_only_probe_the_port_are_not_logged(room: Room) -> None:
    async with serving(room.security("server")) as served:
        for _ in range(3):
            _connect(served).close()
        await until(lambda: not served.server.connections)
        assert served.security.rejected.count == 0


async def test_without_h2_in_alpn_the_first_bytes_decide(room: Room) -> None:
    """A client that offers only another protocol, or none, is not turned away by the handshake."""
    security = room.security("server")
    async with serving(security) as served:
        for offered in ([], ["foo"], ["h2", "foo"]):
            context = security.client
            context.set_alpn_protocols(offered or ["h2"])
            if not offered:
                context = ssl.create_default_context(cafile=room.path("ca.crt"))
                context.load_cert_chain(room.path("server.crt"), room.path("server.key"))
            host, _, port = served.target.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            frame = await reader.readexactly(9)
            assert frame[3:5] == b"\4\0", "SETTINGS"
            writer.close()


def test_an_evicted_handshake_ends_with_a_reason() -> None:
    """The oldest of the address that has most, in any state."""
    ended: list[tuple[str, str]] = []

    class Ending:
        def __init__(self, queue: str) -> None:
            self.queue = queue

        def give_up(self, error: Exception) -> None:
            assert isinstance(error, RefusedPeerError)
            ended.append((self.queue, str(error)))

    waiting = Handshakes(3)
    for name in ("alice", "mallory", "mallory", "mallory", "mallory", "bob", "bob"):
        waiting.add(Ending(name))
    text = "more than 3 handshakes are unfinished, and this is the oldest"
    assert ended == [("mallory", text)] * 3 + [("bob", text)], "its own, when no other has more"
    assert len(waiting) == 3


async def test_a_refused_client_gets_the_reason_from_tls_itself(room: Room) -> None:
    """An alert, as Go sends it: without one all a client sees is a connection that ends."""
    room.issue("old", days=0)
    room.issue("stranger", by="other")
    for name, text in (
        ("", "the other end requires a certificate, and none was shown"),
        ("stranger", "the other end does not know the authority of our certificate"),
        ("old", "the other end says that our certificate has expired"),
    ):
        async with serving(room.security("server")) as served:
            error = await failure(asked(served.target, room.security(name).dialing))
            assert text in error.text
    # And the other way: a server learns why a client went.
    room.issue("server", ["10.9.9.9"])
    async with serving(room.security("server")) as served:
        await failure(asked(served.target, room.security("server").dialing))
        await until(lambda: served.security.rejected.count)
        assert _reasons(served) == {"the other end refused our certificate"}


async def test_large_messages_both_ways(room: Room) -> None:
    """Many records in one read, and writes that the socket does not take at once."""
    async with serving(room.security("server")) as served:
        served.server.unary("/test.Echo/Back", lambda call, message: call.reply(message))
        async with Channel(served.target, room.security("server").dialing) as channel:
            sizes = (0, 1, 16_383, 16_384, 16_385, 262_143, 1_900_000)
            found = await asyncio.gather(*(channel.unary("/test.Echo/Back", bytes(size), 30) for size in sizes))
            assert [len(answer) for answer in found] == list(sizes)
