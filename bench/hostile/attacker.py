"""The hostile client with which rows are built. It makes any request, and accepts every refusal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import raftkv.aio
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.framing import Metadata
from raftkv.rpc.limits import ChannelOptions
from raftkv.rpc.status import Headers, RpcError
from tests.rpc import raw

CALL_TIMEOUT_S: Final = 120.0
PUTS_PER_TXN: Final = 100
IN_FLIGHT: Final = 32
KV: Final = "/etcdserverpb.KV/"
AUTH: Final = "/etcdserverpb.Auth/"
ROOT_PASSWORD: Final = "root of the bench"

EVERYTHING: Final = b"\0"
"""Key and range end of the range of all keys."""


class UserChannel(Channel):
    """A connection whose calls all carry a token; empty: none."""

    def __init__(self, endpoint: str | list[str], token: str = "", options: ChannelOptions | None = None) -> None:
        super().__init__(endpoint, options=options)
        self._shown: Metadata = (("token", token),) if token else ()

    def _headers(self, path: str, timeout_s: float | None, metadata: Metadata) -> Headers:
        return super()._headers(path, timeout_s, (*metadata, *self._shown))


@dataclass
class Attacker:
    """The client of one row.

    Attributes:
        endpoints: endpoints of all members.
        target: number of the attacked member.
        scale: factor of all counts.
        until: end of the attack, by the monotonic clock; rounds in progress may last longer.
        refusals: the members' refusals, by text.
        token: token of root, if authentication is enabled.
    """

    endpoints: list[str]
    target: int
    scale: float = 1.0
    until: float = 0.0
    refusals: Counter[str] = field(default_factory=Counter)
    token: str = ""
    _channels: list[Channel] = field(default_factory=list)

    def count(self, full: int, least: int = 1) -> int:
        """Return a number of the row, scaled."""
        return max(least, int(full * self.scale))

    async def until_over(self) -> None:
        """Wait for the end of the attack."""
        await asyncio.sleep(max(0.0, self.until - monotonic()))

    @property
    def endpoint(self) -> str:
        """The endpoint of the attacked member."""
        return self.endpoints[self.target]

    def is_over(self) -> bool:
        """Whether the attack should end."""
        return monotonic() >= self.until

    def channel(self) -> Channel:
        """Return a new connection to the attacked member; it is closed with the attacker."""
        options = ChannelOptions(stream_window_bytes=4 << 20, connection_window_bytes=16 << 20)
        channel = UserChannel(self.endpoint, self.token, options)
        self._channels.append(channel)
        return channel

    async def close(self) -> None:
        """Close all connections."""
        for channel in self._channels:
            await channel.close()
        self._channels.clear()

    # ---- calls

    async def call(self, path: str, request: Any, channel: Channel | None = None) -> None:
        """Make one call, which may be refused, or not be answered in time."""
        try:
            await self._unary(path, request, channel)
        except RpcError as error:
            self.refused(str(error))

    def refused(self, text: str) -> None:
        """Count a refusal."""
        self.refusals[text[:100]] += 1

    async def must(self, path: str, request: Any) -> bytes:
        """Make a call of the preparation, which may be repeated and has to succeed."""
        for _ in range(5):
            with suppress(RpcError):
                return await self._unary(path, request)
            await asyncio.sleep(0.5)
        return await self._unary(path, request)

    async def _unary(self, path: str, request: Any, channel: Channel | None = None) -> bytes:
        channel = channel or (self._channels[0] if self._channels else self.channel())
        return await channel.unary(path, request.SerializeToString(), CALL_TIMEOUT_S)

    async def each(self, requests: Iterable[Callable[[], Awaitable[Any]]], in_flight: int = IN_FLIGHT) -> None:
        """Make all calls, ``in_flight`` of them concurrently."""
        remaining = iter(requests)

        async def work() -> None:
            for request in remaining:
                await request()

        await asyncio.gather(*[work() for _ in range(in_flight)])

    async def fill(self, count: int, prefix: bytes = b"fill/", value: bytes = b"v" * 16, lease: int = 0) -> None:
        """Write ``count`` keys, from ``fill/00000000`` on."""
        per_txn = max(1, min(PUTS_PER_TXN, (1 << 20) // (len(value) + 64)))

        def txn(start: int) -> Callable[[], Awaitable[Any]]:
            request = rpc_pb2.TxnRequest()
            for number in range(start, min(start + per_txn, count)):
                put = request.success.add().request_put
                put.key, put.value, put.lease = b"%s%08d" % (prefix, number), value, lease
            return lambda: self.must(KV + "Txn", request)

        in_flight = IN_FLIGHT if len(value) < 10_000 else 4
        await self.each((txn(start) for start in range(0, count, per_txn)), in_flight)

    @asynccontextmanager
    async def stream(self, path: str, channel: Channel | None = None) -> AsyncIterator[ClientStream]:
        """Open a stream for the block; its errors count as refusals."""
        try:
            async with (channel or self.channel()).stream(path) as stream:
                yield stream
        except RpcError as error:
            self.refused(str(error))

    # ---- hand-written frames

    async def connect(self, window_bytes: int | None = None) -> RawConnection:
        """Open a connection on which the row writes the frames itself.

        Arguments:
            window_bytes: window of each stream for answers; None: HTTP/2's 65,535.
        """
        host, _, port = self.endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        settings = raw.settings() if window_bytes is None else raw.settings((4, window_bytes))
        writer.write(raw.PREFACE + settings + raw.frame(raw.SETTINGS, raw.ACK, 0))
        return RawConnection(reader, writer)


class RawConnection:
    """A connection that sends given frames and discards received bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._draining: asyncio.Task[None] | None = None

    def discard_answers(self, bytes_per_s: float | None = None) -> None:
        """Read and discard what the member sends, at a limited rate if one is given."""
        self._draining = asyncio.create_task(self._drain(bytes_per_s))

    async def _drain(self, bytes_per_s: float | None) -> None:
        with suppress(OSError):
            while data := await self._reader.read(1 << 16):
                if bytes_per_s is not None:
                    await asyncio.sleep(len(data) / bytes_per_s)

    async def send(self, data: bytes) -> bool:
        """Write, waiting until the member accepts it; return False if the member has closed the connection."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError:
            return False
        return not self._writer.is_closing()

    async def send_until(self, pieces: Iterable[bytes], until: float) -> None:
        """Write pieces until a given time, or until the member stops accepting them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(until - monotonic()):
                for piece in pieces:
                    if not await self.send(piece):
                        return
                    await asyncio.sleep(0)

    def close(self) -> None:
        """Close the connection without a GOAWAY."""
        if self._draining is not None:
            self._draining.cancel()
        self._writer.transport.abort()


def grpc_request(stream_id: int, path: str, request: Any) -> bytes:
    """Return the frames of one unary call."""
    body = request.SerializeToString()
    message = b"\0" + len(body).to_bytes(4, "big") + body
    return raw.headers(stream_id, raw.grpc_headers(path)) + raw.message(stream_id, message, raw.END_STREAM)


async def secure(endpoint: str) -> str:
    """Enable authentication on a cluster; return a token of root."""
    async with raftkv.aio.connect(endpoint) as kv:
        await kv.users.add("root", ROOT_PASSWORD)
        await kv.roles.add("root")
        await kv.users.grant_role("root", "root")
        await kv.users.enable_auth()
    return await login(endpoint, "root", ROOT_PASSWORD)


async def login(endpoint: str, user: str, password: str) -> str:
    """Return a token of a user."""
    request = rpc_pb2.AuthenticateRequest(name=user, password=password).SerializeToString()
    async with Channel(endpoint) as channel:
        answer = await channel.unary(AUTH + "Authenticate", request, CALL_TIMEOUT_S)
    return rpc_pb2.AuthenticateResponse.FromString(answer).token
