"""gRPC servers that clients find by their service's name, while servers come, are killed, and come again.

Servers register themselves under a lease (``kv.endpoints``), in the format of etcd's Go client. grpcio takes no
resolver of one's own, so ``ServiceChannel`` makes a channel to all addresses at once (``ipv4:a,b,c``, calls go round),
and another one when they change; connections that both have are kept by grpcio. Stubs work on it as on any channel.

Needs grpcio.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

import raftkv
import raftkv.aio

SERVICE, METHOD = "greeter", "/example.Greeter/Hello"
POLICY = {
    "loadBalancingConfig": [{"round_robin": {}}],
    # A call whose server has died is made again at another one: good for calls that may be made twice.
    "methodConfig": [
        {
            "name": [{}],
            "waitForReady": True,
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.02s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
GRACE_S = 30.0


class ServiceChannel:
    """A channel to the servers that a service has; made by ``dial``.

    Each call goes over the channel of the moment; one that is replaced is closed when its calls have ended.
    """

    def __init__(self) -> None:
        self.addresses: frozenset[str] = frozenset()
        self.changed = asyncio.Condition()
        self._channel: grpc.aio.Channel | None = None
        self._ready = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    async def use(self, addresses: Iterable[str]) -> None:
        """Send calls to these addresses from now on; without any, calls wait."""
        before, self._channel = self._channel, None
        self.addresses = frozenset(addresses)
        if self.addresses:
            options = [("grpc.service_config", json.dumps(POLICY)), ("grpc.enable_retries", 1)]
            target = "ipv4:" + ",".join(sorted(self.addresses))
            self._channel = grpc.aio.insecure_channel(target, options=options)
            self._ready.set()
        else:
            self._ready.clear()
        if before is not None:
            task = asyncio.create_task(before.close(GRACE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        async with self.changed:
            self.changed.notify_all()

    def unary_unary(self, method: str, *serializers: Any, **more: Any) -> Callable[..., Any]:
        """Return a call of one request and one answer, as a stub makes it; the other kinds are alike."""

        async def call(request: Any, **options: Any) -> Any:
            while self._channel is None:
                await self._ready.wait()
            return await self._channel.unary_unary(method, *serializers, **more)(request, **options)

        return call

    async def close(self) -> None:
        """Close it."""
        await self.use(())
        await asyncio.gather(*self._closing)


@asynccontextmanager
async def dial(kv: raftkv.aio.Client, service: str) -> Any:
    """Open a channel to a service for a block."""
    channel = ServiceChannel()

    async def follow() -> None:
        async for servers in kv.endpoints(service).watch():
            await channel.use(server.addr for server in servers.values())

    following = asyncio.create_task(follow())
    try:
        yield channel
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        await channel.close()


async def serve(endpoint: str) -> None:
    """Run a server: it answers with its address, and says where it is as long as it lives."""

    async def hello(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return address.encode()

    server = grpc.aio.server()
    service, method = METHOD.strip("/").split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(hello)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with raftkv.aio.connect(endpoint) as kv, kv.endpoints(SERVICE).register(address, ttl=5):
        await stop.wait()
    await server.stop(GRACE_S)  # clients know that it goes: calls under way end, and no new ones come


async def call(endpoint: str) -> None:
    """Call the service while its servers change."""
    processes = [start(endpoint) for _ in range(3)]
    async with raftkv.aio.connect(endpoint) as kv, dial(kv, SERVICE) as channel:

        async def servers_are(count: int) -> None:
            async with channel.changed:
                await channel.changed.wait_for(lambda: len(channel.addresses) == count)

        async def servers_that_answer(count: int) -> set[bytes]:
            """Call until so many different servers have answered; a call that fails ends the program."""
            found: set[bytes] = set()
            while len(found) < count:
                found.add(await hello(b"", timeout=30))
            return found

        hello = channel.unary_unary(METHOD)
        await servers_are(3)
        print("servers that answer:", len(await servers_that_answer(3)))
        processes[0].kill()
        answers = [await hello(b"", timeout=30) for _ in range(300)]
        print("one is killed, calls that failed:", 300 - len(answers))
        await servers_are(2)
        print("its lease has ended, servers that answer:", len(await servers_that_answer(2)))
        processes.append(start(endpoint))
        await servers_are(3)
        print("a new one came, servers that answer:", len(await servers_that_answer(3)))
        for process in processes:
            process.terminate()
        await servers_are(0)
        print("all have left:", [process.wait() for process in processes[1:]])


def start(endpoint: str) -> subprocess.Popen[bytes]:
    """Start a server as a process of its own."""
    return subprocess.Popen([sys.executable, __file__, "serve", endpoint])


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(sys.argv[2]))
    else:
        with raftkv.local(flags=["--lease-min-ttl=1"]) as cluster:
            asyncio.run(call(cluster.endpoints[0]))
