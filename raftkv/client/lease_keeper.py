"""Keeping leases alive: all leases of a client on one stream.

Owns when a keep-alive is sent (every third of the TTL), and what an answer is worth: the lease is good until the TTL
has passed *since the keep-alive was sent*, by this machine's monotonic clock. A lease has one question under way at
most, so an answer is to that question.

A member that has not answered by the time of the next keep-alive is left for the next endpoint, where all leases are
asked for at once. So a member that is killed, paused or cut off costs a third of a TTL; leases are told to be lost only
by the cluster, or by their own deadline.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING, Final

from raftkv.client import methods
from raftkv.client.backoff import Backoff
from raftkv.errors import StatusError
from raftkv.pb import rpc_pb2

if TYPE_CHECKING:
    from raftkv.client.core import Client
    from raftkv.client.lease import Lease
    from raftkv.client.streams import Stream

SENDS_PER_TTL: Final = 3
"""Keep-alives in the time of one TTL: two may be lost."""
RETRY_MAX_S: Final = 0.25
"""Longest wait before the next endpoint is tried: a TTL may be a second."""
_HAS_LEADER: Final = (("hasleader", "true"),)


class LeaseKeeper:
    """The keep-alives of one client.

    Arguments:
        core: the way to the cluster.
    """

    def __init__(self, core: Client) -> None:
        self.last_failure = ""
        """Why the last stream ended; empty while one works."""
        self._core = core
        self._leases: dict[int, Lease] = {}
        self._due: list[tuple[float, int]] = []
        self._sent_at: dict[int, float] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, lease: Lease) -> None:
        """Keep a lease alive that has just been granted."""
        loop = asyncio.get_running_loop()
        self._leases[lease.id] = lease
        heapq.heappush(self._due, (loop.time() + lease.ttl / SENDS_PER_TTL, lease.id))
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())

    def remove(self, lease: Lease) -> None:
        """Keep it alive no longer."""
        if self._leases.get(lease.id) is lease:
            del self._leases[lease.id]
            self._wake.set()

    async def close(self) -> None:
        """Keep none alive any longer; every one that was is lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for lease in list(self._leases.values()):
            lease.lose("the client was closed")

    async def _run(self) -> None:
        backoff = Backoff(max_s=RETRY_MAX_S)
        while self._leases:
            endpoint = self._core.endpoint
            try:
                stream = await self._core.stream(methods.LEASE_KEEP_ALIVE, endpoint, metadata=_HAS_LEADER)
                async with stream:
                    await self._serve(stream, backoff)
                self.last_failure = "the member has ended the stream"
            except StatusError as error:
                self._core.forget_token(error)
                self.last_failure = str(error)
            if self._leases:
                self._core.next_endpoint(endpoint)
                await backoff.wait()

    async def _serve(self, stream: Stream[rpc_pb2.LeaseKeepAliveResponse], backoff: Backoff) -> None:
        """Ask for all leases at once, then for each when it is due; until the stream ends or there are none."""
        now = asyncio.get_running_loop().time()
        self._sent_at.clear()
        self._due = [(now, lease_id) for lease_id in sorted(self._leases)]
        sending = asyncio.get_running_loop().create_task(self._send(stream))
        try:
            while (answer := await stream.receive()) is not None:
                self._on_answer(answer)
                backoff.reset()
                self.last_failure = ""
        finally:
            sending.cancel()

    async def _send(self, stream: Stream[rpc_pb2.LeaseKeepAliveResponse]) -> None:
        loop = asyncio.get_running_loop()
        while self._leases and not stream.done:
            self._wake.clear()
            if not self._send_due(stream, loop.time()):
                break
            try:
                async with asyncio.timeout_at(self._due[0][0] if self._due else None):
                    await self._wake.wait()
            except TimeoutError:
                pass
        # Nothing to keep, or a member that does not answer: the reader of the stream is woken by its end.
        stream.cancel()

    def _send_due(self, stream: Stream[rpc_pb2.LeaseKeepAliveResponse], now: float) -> bool:
        """Send what is due; False: a question of last time is still open, or the stream has ended."""
        while self._due and self._due[0][0] <= now:
            lease_id = heapq.heappop(self._due)[1]
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease_id in self._sent_at:
                return False
            self._sent_at[lease_id] = now
            heapq.heappush(self._due, (now + lease.ttl / SENDS_PER_TTL, lease_id))
            try:
                stream.send_nowait(rpc_pb2.LeaseKeepAliveRequest(ID=lease_id))
            except StatusError:
                return False
        return True

    def _on_answer(self, answer: rpc_pb2.LeaseKeepAliveResponse) -> None:
        sent_at = self._sent_at.pop(answer.ID, None)
        lease = self._leases.get(answer.ID)
        if lease is None or sent_at is None:
            return
        if answer.TTL > 0:
            lease.renewed(answer.TTL, sent_at)
        else:
            lease.lose("the cluster does not know it any more")
