"""Keeping leases alive: all leases of a client on one stream.

Owns when a keep-alive is sent (every third of the TTL), and what an answer is worth: the lease is good until the TTL
has passed *since the keep-alive was sent*, by this machine's monotonic clock. A lease has one question under way at
most, so an answer is to that question.

A member that has not answered by the time of the next keep-alive is left for the next endpoint, where all leases are
asked for at once. So a member that is paused or cut off costs a third of a TTL, one that cannot be connected to
``CONNECT_MAX_S``; when none has answered, the next round comes within ``RETRY_MAX_S``. A lease is lost only by word of
the cluster, or by its own deadline.

A lease whose keys the client may not write any more ends the stream, for members name none: then they are asked for one
by one, and the one to whose question the stream ends is lost; the others go on.

A lease with a grace (``disconnect_grace_ms``) is asked for as soon as it is granted, so that the member knows of it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

from raftkv.client.errors import EndpointsFailed
from raftkv.client.lease.lease import Lease, lease_now
from raftkv.client.rpc import methods
from raftkv.client.rpc.retry import Backoff, is_transient
from raftkv.errors import PERMISSION_DENIED, StatusError
from raftkv.pb import rpc_pb2

if TYPE_CHECKING:
    from raftkv.client.rpc.core import Client, Stream
    from raftkv.client.scope import Scope

SENDS_PER_TTL: Final = 3
"""Keep-alives in the time of one TTL: two may be lost."""
RETRY_MAX_S: Final = 0.25
"""Longest wait before all endpoints are tried again: a TTL may be a second; a new leader waits for us twice as long."""
ONE_MAX_S: Final = 1.0
"""How long an answer may take while leases are asked for one by one."""
CONNECT_MAX_S: Final = 0.1
"""How long an endpoint may take to connect before the next is tried; it goes on connecting and is found ready later."""
_HAS_LEADER: Final = (("hasleader", "true"),)


class LeaseKeeper:
    """The keep-alives of one client.

    Arguments:
        core: the way to the cluster.
    """

    def __init__(self, core: Client) -> None:
        self.failures: dict[str, str] = {}
        """Endpoint to why its last stream ended, the latest last; empty while one works."""
        self._core = core
        self._leases: dict[int, Lease] = {}
        self._due: list[tuple[float, int]] = []
        self._sent_at: dict[int, float] = {}
        self._wake = asyncio.Event()
        self._given_up = ""
        self._is_emptied = False
        self._streams_failed = 0
        self._one_by_one = False
        self._look_again_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def add(self, lease: Lease) -> None:
        """Keep a lease alive that has just been granted."""
        loop = asyncio.get_running_loop()
        self._leases[lease.id] = lease
        first_s = 0.0 if lease.disconnect_grace_ms else lease.ttl / SENDS_PER_TTL
        heapq.heappush(self._due, (loop.time() + first_s, lease.id))
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
            endpoint, token = self._core.endpoint, ""
            self._given_up, self._is_emptied = "", False
            self._streams_failed += 1
            try:
                stream = await self._core.stream(methods.LEASE_KEEP_ALIVE, endpoint, metadata=_HAS_LEADER, eager=True)
                token = stream.token
                async with stream:
                    await self._serve(stream, backoff)
                self._note_failure(endpoint, "the member has ended the stream")
            except StatusError as error:
                if self._is_emptied:
                    continue  # it was ended here; perhaps another lease has come since
                self._note_failure(endpoint, self._given_up or str(error))
                if not self._core.forget_token(error, token):
                    self._on_refusal(error)
            if self._leases:
                self._core.next_endpoint(endpoint)
                if self._streams_failed % len(self._core.endpoints) == 0:  # a round is over
                    await backoff.wait()

    def _on_refusal(self, error: StatusError) -> None:
        if error.code == PERMISSION_DENIED and self._sent_at:
            self._find_denied(error)
        elif not self._given_up and not is_transient(error):
            for lease in list(self._leases.values()):
                lease.refused(error)

    def _find_denied(self, error: StatusError) -> None:
        """End the lease whose keys this client may not write any more: members end the stream, and name none."""
        suspects = [lease for lease_id in self._sent_at if (lease := self._leases.get(lease_id)) is not None]
        self._one_by_one = len(suspects) > 1
        if len(suspects) == 1:
            suspects[0].refused(error)
            suspects[0].lose(str(error))

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
                self._streams_failed = 0
                self.failures.clear()
        finally:
            sending.cancel()

    async def _send(self, stream: Stream[rpc_pb2.LeaseKeepAliveResponse]) -> None:
        loop = asyncio.get_running_loop()
        connected_by = loop.time() + CONNECT_MAX_S
        while self._leases and not stream.done:
            self._wake.clear()
            if not stream.connected and loop.time() >= connected_by:
                self._given_up = f"no connection to {stream.endpoint} within {CONNECT_MAX_S:g} s"
                break
            if not self._send_due(stream, loop.time()):
                break
            try:
                async with asyncio.timeout_at(self._next_look(stream, connected_by)):
                    await self._wake.wait()
            except TimeoutError:
                pass
        # Nothing to keep, or a member that does not answer: the reader of the stream is woken by its end.
        self._is_emptied = not self._leases
        stream.cancel()

    def _next_look(self, stream: Stream[rpc_pb2.LeaseKeepAliveResponse], connected_by: float) -> float | None:
        due_at = self._due[0][0] if self._due else None
        if self._one_by_one and self._sent_at:
            return self._look_again_at
        if stream.connected:
            return due_at
        return connected_by if due_at is None else min(due_at, connected_by)

    def _send_due(self, stream: Stream[rpc_pb2.LeaseKeepAliveResponse], now: float) -> bool:
        """Send what is due; False: a question of last time is still open, or the stream has ended."""
        if self._one_by_one and self._sent_at:
            if now < self._look_again_at:
                return True
            self._given_up = f"{stream.endpoint} did not answer a keep-alive in time"
            return False
        while self._due and self._due[0][0] <= now:
            lease_id = heapq.heappop(self._due)[1]
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease_id in self._sent_at:
                self._given_up = f"{stream.endpoint} did not answer a keep-alive in time"
                return False
            self._sent_at[lease_id] = lease_now()
            heapq.heappush(self._due, (now + lease.ttl / SENDS_PER_TTL, lease_id))
            try:
                request = rpc_pb2.LeaseKeepAliveRequest(ID=lease_id, disconnect_grace_ms=lease.disconnect_grace_ms)
                stream.send_nowait(request)
            except StatusError:
                return False
            if self._one_by_one:
                self._look_again_at = now + ONE_MAX_S
                return True
        self._one_by_one = False
        return True

    def _on_answer(self, answer: rpc_pb2.LeaseKeepAliveResponse) -> None:
        sent_at = self._sent_at.pop(answer.ID, None)
        lease = self._leases.get(answer.ID)
        if self._one_by_one:
            self._wake.set()
        if lease is None or sent_at is None:
            return
        if 0 < answer.TTL != lease.ttl:
            self._move(lease.id, answer.TTL / SENDS_PER_TTL - (lease_now() - sent_at))
        lease.answered(answer, sent_at)

    def _move(self, lease_id: int, wait_s: float) -> None:
        """Send the next keep-alive of a lease at another time: its TTL has changed, which is rare."""
        due_at = asyncio.get_running_loop().time() + wait_s
        self._due = [entry for entry in self._due if entry[1] != lease_id]
        heapq.heapify(self._due)
        heapq.heappush(self._due, (due_at, lease_id))
        self._wake.set()

    def _note_failure(self, endpoint: str, reason: str) -> None:
        self.failures.pop(endpoint, None)
        self.failures[endpoint] = reason


# -- renewals -------------------------------------------------------------------------------------------------------
#
# Keep-alives of a lease of another client, with the answers as members sent them.
#
#     async with aclosing(renewals(scope, lease_id, first_answer_s=5.0)) as answers:
#         async for answer in answers: print(answer.TTL)         # ends when the cluster does not know the lease
#
# For programs that pass the answers on; the owner of a lease uses ``lease``.


class _Adopted(Lease):
    """A lease that was granted elsewhere; its TTL is known from the first answer on."""

    def __init__(self, scope: Scope, lease_id: int, first_answer_s: float) -> None:
        super().__init__(scope, max(first_answer_s, 0.001), id=lease_id, interrupt=False)
        self.answers: asyncio.Queue[rpc_pb2.LeaseKeepAliveResponse | StatusError | None] = asyncio.Queue()
        self._granted = True
        self._is_known = False
        self._first_answer_s = first_answer_s
        self._deadline = lease_now() + first_answer_s
        self._watch_deadline()
        scope.keeper.add(self)

    def answered(self, answer: rpc_pb2.LeaseKeepAliveResponse, asked_at: float) -> None:
        if not self._is_known and answer.TTL > 0:
            self._is_known, self._deadline = True, asked_at + answer.TTL
            if self._timer is not None:
                self._timer.cancel()
            self._watch_deadline()
        super().answered(answer, asked_at)
        self.answers.put_nowait(answer if answer.TTL > 0 else None)

    def refused(self, error: StatusError) -> None:
        self.stop(str(error))
        self.answers.put_nowait(error)

    def _expire(self) -> None:
        failed = EndpointsFailed(self._scope.keeper.failures, self._first_answer_s, definite=False, explain=False)
        super()._expire()
        self.answers.put_nowait(failed)


async def renewals(
    scope: Scope, lease_id: int, first_answer_s: float
) -> AsyncGenerator[rpc_pb2.LeaseKeepAliveResponse, None]:
    """Keep a lease alive until it is gone, and give out each answer of a member.

    Arguments:
        scope: of the client.
        lease_id: which lease.
        first_answer_s: how long the first answer may take, over all endpoints; from then on the TTL counts.

    Raises:
        EndpointsFailed: no member answered in time.
        StatusError: a member refused.
    """
    lease = _Adopted(scope, lease_id, first_answer_s)
    try:
        while (answer := await lease.answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer
    finally:
        lease.stop()
