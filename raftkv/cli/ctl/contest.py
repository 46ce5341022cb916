"""What ``lock`` and ``elect`` share: a lease for the time of the command, and the signals that end the wait.

The recipe itself is the library's (``client.lock.contender``), and so all clients of etcd may meet on one name.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from raftkv.cli.ctl.session import Session, failed, remark, unanswered
from raftkv.cli.exits import ERROR, CommandError
from raftkv.client import Client
from raftkv.client.errors import EndpointsFailed, FenceLost, LeaseLost
from raftkv.client.lease.lease import Lease
from raftkv.client.library import open_scope
from raftkv.client.lock.contender import Contender
from raftkv.client.rpc.retry import until_answered
from raftkv.errors import StatusError

T = TypeVar("T")

CANCELED = "context canceled"
REVOKE_TIMEOUT_S = 2.0
"""A member that is gone must not hold up the end of a command for longer: the lease will expire."""


@asynccontextmanager
async def signals() -> AsyncIterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets, instead of ending the process; a second one ends it."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        stopped.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class Contest:
    """One command's part in the contest for a name.

    Attributes:
        place: in the queue.
        lease: of the key in the queue; revoked at the end.
        stopped: set by a signal.
    """

    def __init__(self, place: Contender, lease: Lease, stopped: asyncio.Event, expired: str) -> None:
        self.place = place
        self.lease = lease
        self.stopped = stopped
        self._expired = expired

    async def win(self, value: bytes) -> int:
        """Enter the queue and wait for the turn; returns the revision as of which it has come.

        Raises:
            CommandError: a signal came first, or the lease or key is gone.
        """

        async def wait() -> int:
            await self.place.enqueue(value)
            return await self.place.wait_turn()

        try:
            return await unless(wait(), (self.stopped, CANCELED), (self.lease.lost, self._expired))
        except LeaseLost:
            raise CommandError(self._expired) from None

    async def hold(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something for as long as the lease lives.

        Raises:
            CommandError: it has expired.
        """
        return await unless(work, (self.lease.lost, self._expired))

    async def leave(self) -> None:
        """Leave the queue, whatever has become of the wait."""
        if self.lease.lost.is_set():
            return
        try:
            await self.place.leave()
        except StatusError as error:
            raise failed(error) from None


@asynccontextmanager
async def contest(session: Session, client: Client, name: bytes, *, ttl_s: int, expired: str) -> AsyncIterator[Contest]:
    """Take part in the contest for a name for the time of the block; leaves the queue at its end.

    Who waits for a lock also waits for a cluster that does not answer, and says why after ``--command-timeout``.

    Arguments:
        session: of the command.
        client: of the cluster.
        name: of the lock or election.
        ttl_s: of the lease, in seconds.
        expired: text of the error when the lease is lost.

    Raises:
        CommandError: a signal came before the lease.
        StatusError: the lease was refused.
    """
    async with signals() as stopped, open_scope(client, session.timeout_s) as scope:
        lease = Lease(scope, ttl_s, interrupt=False)
        try:
            granting = until_answered(lambda: lease.grant(session.timeout_s), on_trouble=Remarks())
            await unless(granting, (stopped, CANCELED))
            part = Contest(Contender(scope, name, lease, FenceLost), lease, stopped, expired)
            try:
                yield part
            finally:
                await part.leave()
        finally:
            with suppress(StatusError):
                await lease.revoke(REVOKE_TIMEOUT_S)


class Remarks:
    """Say once on standard error why nobody answers."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, error: StatusError | None) -> None:
        """Take note of a failure; None: an answer.

        Arguments:
            error: how a call failed.
        """
        if error is None or self._said:
            return
        self._said = True
        reasons = unanswered(error.failures) if isinstance(error, EndpointsFailed) else [str(error)]
        for line in (*reasons, "still trying; Ctrl-C ends it"):
            remark(line)


async def unless(work: Coroutine[Any, Any, T], *events: tuple[asyncio.Event, str]) -> T:
    """Do something, unless one of the events comes first.

    Arguments:
        work: what to do.
        events: each with the text of the error that ends the command.

    Raises:
        CommandError: an event came first; the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    waits = [asyncio.ensure_future(event.wait()) for event, _ in events]
    try:
        await asyncio.wait([task, *waits], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        texts = [text for (_, text), wait in zip(events, waits, strict=True) if wait.done()]
        raise CommandError(texts[0], ERROR)
    finally:
        for pending in (task, *waits):
            pending.cancel()
        await asyncio.wait([task, *waits])
