"""A channel takes the time of a round trip on its connection, beside keepalive and calls."""

from __future__ import annotations

import asyncio

from raftkv.rpc.client.channel import Channel
from raftkv.rpc.limits import ChannelOptions
from raftkv.rpc.server.server import Server


def test_the_time_of_a_ping_is_told_once() -> None:
    async def main() -> list[float]:
        server = Server()
        server.unary("/pkg.Echo/Say", lambda call, message: call.reply(message))
        [(host, port)] = await server.listen("127.0.0.1")
        found: list[float] = []
        options = ChannelOptions(keepalive_time_s=0.01)
        async with Channel(f"{host}:{port}", options=options) as channel:
            channel.time_ping(found.append)  # no connection: nothing happens
            await channel.unary("/pkg.Echo/Say", b"")
            answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            channel.time_ping(answered.set_result)
            found.append(await answered)
            await channel.unary("/pkg.Echo/Say", b"")
        await server.close()
        return found

    found = asyncio.run(asyncio.wait_for(main(), 120))
    assert len(found) == 1
    assert 0 < found[0] < 60
