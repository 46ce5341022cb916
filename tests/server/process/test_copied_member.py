"""A member with connected clients receives a database: their watches and leases continue."""

from __future__ import annotations

import asyncio
import signal

import pytest

from raftkv import aio
from tests.procs import RAFTKV, Cluster, Member
from tests.rpc.loop import until
from tests.server.process.process import log_of

pytestmark = pytest.mark.long

FLAGS = ("--snapshot-count", "50", "--snapshot-catchup-entries", "10")
WRITES = 300
TTL_S = 600
LOST = "lost the connection to"


async def _is_leader(endpoint: str) -> bool:
    async with aio.connect(endpoint) as kv:
        (status,) = await kv.status()
        return status.member_id == status.leader_id


class Copied:
    """A member that stands still while the others write, and is sent the database when it goes on."""

    def __init__(self, member: Member, leader: Member, writer: aio.Client) -> None:
        self.member = member
        self.leader = leader
        self.writer = writer
        self.written = 0

    def _signal(self, number: signal.Signals) -> None:
        assert self.member.process is not None
        self.member.process.send_signal(number)

    async def write(self, count: int) -> int:
        """More values; the last revision."""
        revision = 0
        for _ in range(count):
            self.written += 1
            revision = (await self.writer.put("k", str(self.written))).revision
        return revision

    async def miss(self, *, compact: bool = False) -> int:
        """Stand still for many writes, and wait for the database; the revision that was compacted, if asked for."""
        installed = log_of(self.member).count("installed a snapshot (entry")
        lost = log_of(self.leader).count(LOST)
        self._signal(signal.SIGSTOP)
        try:
            # What is sent before that, the member finds in its socket when it goes on.
            await until(lambda: log_of(self.leader).count(LOST) > lost)
            revision = await self.write(WRITES)
            if compact:
                await self.writer.compact(revision, physical=True)
        finally:
            self._signal(signal.SIGCONT)
        await until(lambda: log_of(self.member).count("installed a snapshot (entry") > installed)
        return revision


async def _scenario(cluster: Cluster) -> None:
    leads = [await _is_leader(endpoint) for endpoint in cluster.endpoints]
    leader, follower = leads.index(True), leads.index(False)
    async with aio.connect(cluster.endpoints[leader]) as writer, aio.connect(cluster.endpoints[follower]) as reader:
        copied = Copied(cluster.members[follower], cluster.members[leader], writer)
        lease = await reader.lease(TTL_S).grant()
        await reader.put("leased", "x", lease=lease)
        seen: list[int] = []

        async def follow() -> None:
            async with reader.watch("k", start_revision=1) as events:
                while True:
                    seen.extend(int(event.value) for event in await events.next_batch())

        following = asyncio.create_task(follow())
        await copied.write(20)
        await until(lambda: len(seen) == 20)
        await copied.miss()
        await copied.write(20)
        await until(lambda: len(seen) >= copied.written)
        assert seen == list(range(1, copied.written + 1))
        left = await reader.lease_info(lease.id, keys=True)
        assert TTL_S - 120 < left.ttl <= TTL_S
        assert left.keys == (b"leased",)
        # History that the member never had, and that is gone.
        compacted = await copied.miss(compact=True)
        with pytest.raises(aio.Compacted) as ended:
            await following
        assert ended.value.revision == compacted
        assert seen == list(range(1, len(seen) + 1))


def test_watches_and_leases_survive_database_replacement() -> None:
    with Cluster(RAFTKV, size=3, flags=FLAGS) as cluster:
        asyncio.run(asyncio.wait_for(_scenario(cluster), 120))
