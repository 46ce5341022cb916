"""Keep-alives of a lease that somebody else was granted, with the answers as members sent them.

    async with aclosing(renewals(scope, lease_id, first_answer_s=5.0)) as answers:
        async for answer in answers: print(answer.TTL)         # ends when the cluster does not know the lease

For programs that pass the answers on; whoever owns a lease uses ``lease``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from raftkv.client.errors import EndpointsFailed
from raftkv.client.lease import clock
from raftkv.client.lease.lease import Lease

if TYPE_CHECKING:
    from raftkv.client.scope import Scope
    from raftkv.errors import StatusError
    from raftkv.pb import rpc_pb2


class _Adopted(Lease):
    """A lease that was granted elsewhere; its TTL is known from the first answer on."""

    def __init__(self, scope: Scope, lease_id: int, first_answer_s: float) -> None:
        super().__init__(scope, max(first_answer_s, 0.001), id=lease_id, interrupt=False)
        self.answers: asyncio.Queue[rpc_pb2.LeaseKeepAliveResponse | StatusError | None] = asyncio.Queue()
        self._granted = True
        self._is_known = False
        self._first_answer_s = first_answer_s
        self._deadline = clock.now() + first_answer_s
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
