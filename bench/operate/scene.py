"""Three members of one program with data in them, what an operator can ask of them, and a writer that is held up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from bench.hostile.stage import HonestProcess, leader_number
from bench.stage import fill
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError
from tests.procs import Cluster, Member, free_port

PUTS_PER_S: Final = 1_000
QUIET_S: Final = 2.0
"""The writer alone, before what is measured, and after it."""
CALL_TIMEOUT_S: Final = 300.0
POLL_S: Final = 0.01
CAUGHT_UP_TIMEOUT_S: Final = 300.0
HEALTHY_TIMEOUT_S: Final = 30.0

Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything; ``scale`` of the command line multiplies it.

    Attributes:
        keys: of the rows about many keys, 256 bytes of value each.
        revisions: of the row about a long history.
        copied_bytes: of the database that an empty member gets, in values of 1 KiB.
    """

    keys: int = 1_000_000
    revisions: int = 1_000_000
    copied_bytes: int = 1 << 30

    def scaled(self, scale: float) -> Sizes:
        """The same times a factor."""
        sizes = (self.keys, self.revisions, self.copied_bytes)
        return Sizes(*(max(2, int(size * scale)) for size in sizes))


class Scene:
    """One cluster, running.

    Arguments:
        cluster: its members, three of them.
        sizes: how much data a row makes.
    """

    def __init__(self, cluster: Cluster, sizes: Sizes) -> None:
        self.cluster = cluster
        self.sizes = sizes

    def fill(self, keys: int, value_bytes: int = 256, *, total: int | None = None) -> None:
        """Put every key once, or as often as it takes to make so many puts in all."""
        fill(self.first.endpoint, keys, total or 0, value_bytes=value_bytes)

    # ---- asking

    @property
    def first(self) -> Member:
        """The first member that runs."""
        return next(member for member in self.cluster.members if member.is_running())

    async def call(self, method: str, request: Message, answer: type[Answer], member: Member | None = None) -> Answer:
        """Ask a member, the first that runs if none is named; ``method`` is ``Service/Method`` of etcdserverpb."""
        async with Channel((member or self.first).endpoint) as channel:
            data = await channel.unary(f"/etcdserverpb.{method}", request.SerializeToString(), CALL_TIMEOUT_S)
        found = answer()
        found.ParseFromString(data)
        return found

    async def leader(self) -> Member:
        """Who leads, once somebody does."""
        while True:
            try:
                return self.cluster.members[await leader_number(self.cluster)]
            except (RuntimeError, RpcError):
                await asyncio.sleep(POLL_S)

    async def follower(self) -> Member:
        """Somebody who follows."""
        leader = await self.leader()
        return next(member for member in self.cluster.members if member is not leader)

    async def status(self, member: Member) -> rpc_pb2.StatusResponse:
        """What a member says of itself."""
        return await self.call("Maintenance/Status", rpc_pb2.StatusRequest(), rpc_pb2.StatusResponse, member)

    async def revision(self) -> int:
        """The present one."""
        found = await self.call("KV/Range", rpc_pb2.RangeRequest(key=b"x"), rpc_pb2.RangeResponse)
        return found.header.revision

    # ---- waiting

    async def first_read(self, member: Member) -> None:
        """Wait for the answer of a member to a linearizable read."""
        while True:
            try:
                await self.call("KV/Range", rpc_pb2.RangeRequest(key=b"x"), rpc_pb2.RangeResponse, member)
                return
            except (RpcError, OSError):
                await asyncio.sleep(POLL_S)

    async def caught_up(self, member: Member, source: Member) -> None:
        """Wait until a member has applied what another has applied now."""
        wanted = (await self.status(source)).raftAppliedIndex
        async with asyncio.timeout(CAUGHT_UP_TIMEOUT_S):
            while True:
                try:
                    if (await self.status(member)).raftAppliedIndex >= wanted:
                        return
                except (RpcError, OSError):
                    pass
                await asyncio.sleep(POLL_S)

    async def writer_during(self, work: Callable[[], Awaitable[Any]]) -> dict[str, float]:
        """Do something while the writer writes to all that run; what the writer saw, and how long it took."""
        endpoints = [member.endpoint for member in self.cluster.members if member.is_running()]
        writer = HonestProcess(endpoints, puts_per_s=PUTS_PER_S)
        try:
            await asyncio.sleep(QUIET_S)
            writer.mark()
            await asyncio.sleep(QUIET_S)
            before = (await writer.tell())["put"]
            writer.mark()
            began = monotonic()
            await work()
            took_s = monotonic() - began
            await asyncio.sleep(QUIET_S)
            seen = await writer.tell()
        finally:
            writer.end()
        put = seen["put"]
        return {
            "longest stall ms": put["max_ms"],
            "p99 ms": put["p99_ms"],
            "p99 before ms": before["p99_ms"],
            "took s": round(took_s, 2),
            "failed puts": float(seen["errors"]),
        }

    # ---- members that come and go

    async def add(self, member: Member) -> None:
        """Add a member to the cluster, once that is healthy, and start it; it is empty."""
        request = rpc_pb2.MemberAddRequest(peerURLs=[member.peer_url])
        await self._once_healthy("Cluster/MemberAdd", request, rpc_pb2.MemberAddResponse)
        member.flags = [*member.flags, "--initial-cluster-state", "existing"]
        await asyncio.to_thread(member.start)

    async def _once_healthy(
        self, method: str, request: Message, answer: type[Answer], member: Member | None = None
    ) -> Answer:
        """Ask until the cluster is found healthy: its members must have been connected for some seconds."""
        async with asyncio.timeout(HEALTHY_TIMEOUT_S):
            while True:
                try:
                    return await self.call(method, request, answer, member)
                except RpcError as error:
                    if "unhealthy" not in error.text:
                        raise
                await asyncio.sleep(POLL_S)

    def new_member(self) -> Member:
        """One more, which nobody knows yet and which the cluster's end will end."""
        first = self.cluster.members[0]
        member = Member(
            name=f"m{len(self.cluster.members)}",
            directory=self.cluster.directory,
            client_port=free_port(),
            peer_port=free_port(),
            flags=list(first.flags),
            server=first.server,
            environment=first.environment,
        )
        member.initial_cluster = f"{first.initial_cluster},{member.name}={member.peer_url}"
        self.cluster.members.append(member)
        return member
