"""``lock``: hold a named lock until a signal comes, or while a command runs. ``elect``: campaign, or print who leads.

Owns the holder's duties: its key stands under a lease that is kept alive; the key is deleted on every way out; a
command does not outlive the lock (etcdctl lets it run on). The recipe itself is the library's
(``client.lock``), so that all clients of etcd may meet on one name.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from raftkv.cli import pflag
from raftkv.cli.command import Invocation
from raftkv.cli.ctl.session import Session, failed, open_session, remark, unanswered
from raftkv.cli.ctl.watch import ChildFailed, finish_child, start_child, tell_outages
from raftkv.cli.pflag import text_bytes
from raftkv.cli.program import BAD_ARGUMENTS, BAD_CONNECTION, ERROR, CommandError, on_signals, refused
from raftkv.client import Client
from raftkv.client.errors import EndpointsFailed, FenceLost, LeaseLost, WatchCanceled
from raftkv.client.lease import Lease, renewals
from raftkv.client.library import open_scope
from raftkv.client.lock import Contender, observations
from raftkv.client.rpc import methods
from raftkv.client.rpc.retry import until_answered
from raftkv.errors import StatusError
from raftkv.pb import rpc_pb2

T = TypeVar("T")

CANCELED = "context canceled"
REVOKE_TIMEOUT_S = 2.0
"""Longest wait for the revocation at the end of a command: without it the lease expires."""


@asynccontextmanager
async def signals() -> AsyncIterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets, instead of ending the process; a second one ends it."""
    stopped = asyncio.Event()
    with ExitStack() as hearing:

        def stop() -> None:
            stopped.set()
            hearing.close()

        hearing.enter_context(on_signals(stop))
        yield stopped


@dataclass
class Contest:
    """One command's part in the contest for a name.

    Attributes:
        place: in the queue.
        lease: of the key in the queue; revoked at the end.
        stopped: set by a signal.
        expired, fenced: texts of the errors when the lease, or the key in the queue, is lost.
    """

    place: Contender
    lease: Lease
    stopped: asyncio.Event
    expired: str
    fenced: str

    async def win(self, value: bytes) -> int:
        """Enter the queue and wait for the turn; returns the revision as of which it has come.

        Raises:
            CommandError: a signal came first, or the lease or key is gone.
        """

        async def wait() -> int:
            await self.place.enqueue(value)
            return await self.place.wait_turn()

        try:
            return await unless(wait(), (self.stopped, CANCELED), (self.lease.lost, self.expired))
        except LeaseLost:
            raise CommandError(self.expired) from None
        except FenceLost:
            raise CommandError(self.fenced) from None

    async def show_and_hold(self, session: Session, client: Client, gone: str) -> None:
        """Print the key, and hold it until a signal comes; ``gone`` is the text of the error where it is not there."""
        request = rpc_pb2.RangeRequest(key=self.place.guard_key)
        found = await client.call(methods.RANGE, request, timeout_s=session.timeout_s)
        if not found.kvs:
            raise CommandError(gone)
        _show(session, found)
        await self.hold(self.stopped.wait())

    async def hold(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something for as long as the lease lives.

        Raises:
            CommandError: it has expired.
        """
        return await unless(work, (self.lease.lost, self.expired))

    async def leave(self) -> None:
        """Leave the queue, also after a failed wait."""
        if self.lease.lost.is_set():
            return
        try:
            await self.place.leave()
        except StatusError as error:
            raise failed(error) from None


@asynccontextmanager
async def contest(
    session: Session, client: Client, name: bytes, *, ttl_s: int, expired: str, fenced: str
) -> AsyncIterator[Contest]:
    """Take part in the contest for a name for the time of the block; leaves the queue at its end.

    The wait for a lock also waits for a cluster that does not answer, and tells why after ``--command-timeout``.

    Arguments:
        session: of the command.
        client: of the cluster.
        name: of the lock or election.
        ttl_s: of the lease, in seconds.
        expired: text of the error when the lease is lost.
        fenced: text of the error when the key in the queue is.

    Raises:
        CommandError: a signal came before the lease.
        StatusError: the lease was refused.
    """
    async with signals() as stopped, open_scope(client, session.timeout_s) as scope:
        lease = Lease(scope, ttl_s, interrupt=False)
        try:
            granting = until_answered(lambda: lease.grant(session.timeout_s), on_trouble=Remarks())
            await unless(granting, (stopped, CANCELED))
            part = Contest(Contender(scope, name, lease, FenceLost), lease, stopped, expired, fenced)
            try:
                yield part
            finally:
                await part.leave()
        finally:
            with suppress(StatusError):
                await lease.revoke(REVOKE_TIMEOUT_S)


class Remarks:
    """Say once on standard error why no member answers."""

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


LOCK_LOST = {"expired": "session expired", "fenced": "mutex: session is expired"}


def lock(invocation: Invocation) -> None:
    """Acquire, hold, release."""
    if not invocation.arguments:
        raise CommandError("lock takes a lock name argument and an optional command to execute", BAD_ARGUMENTS)
    name, command = invocation.arguments[0], invocation.arguments[1:]
    session = open_session(invocation)
    # Go's clients take a TTL of 0 for "none given".
    ttl_s = invocation["ttl"] if invocation["ttl"] > 0 else 60

    async def hold(client: Client) -> None:
        async with contest(session, client, text_bytes(name), ttl_s=ttl_s, **LOCK_LOST) as part:
            revision = await part.win(b"")
            if command:
                await _run(command, part, revision)
            else:
                await part.show_and_hold(session, client, "lock lost on init")

    session.run(hold)


async def _run(command: list[str], part: Contest, revision: int) -> None:
    """Run the command; a signal to us is for it, and a lost lock ends it."""
    variables = {"ETCD_LOCK_KEY": part.place.key.decode("utf-8", "surrogateescape"), "ETCD_LOCK_REV": str(revision)}
    try:
        child = await start_child(command, variables)
        told = asyncio.create_task(_tell(child, part.stopped))
        try:
            await part.hold(finish_child(child))
        finally:
            told.cancel()
            if child.returncode is None:
                child.terminate()
                await child.wait()
    except ChildFailed as error:
        raise CommandError(str(error), error.code) from None


async def _tell(child: asyncio.subprocess.Process, stopped: asyncio.Event) -> None:
    await stopped.wait()
    with suppress(ProcessLookupError):
        child.terminate()


ELECTION_TTL_S = 60
ELECTION_EXPIRED = "elect: session expired"
ELECTION_LOST = {"expired": ELECTION_EXPIRED, "fenced": ELECTION_EXPIRED}


def elect(invocation: Invocation) -> None:
    """Take part, or observe."""
    arguments, listen = invocation.arguments, invocation["listen"]
    if len(arguments) not in (1, 2):
        text = "elect takes one election name argument and an optional proposal argument"
        raise CommandError(text, BAD_ARGUMENTS)
    if len(arguments) == 1 and not listen:
        raise CommandError("no proposal argument but -l not set", BAD_ARGUMENTS)
    if len(arguments) == 2 and listen:
        raise CommandError("proposal given but -l is set", BAD_ARGUMENTS)
    session = open_session(invocation)
    name = text_bytes(arguments[0])
    if listen:
        session.run(lambda client: _listen(client, session, name))
    else:
        session.run(lambda client: _campaign(client, session, name, text_bytes(arguments[1])))


async def _campaign(client: Client, session: Session, name: bytes, proposal: bytes) -> None:
    async with contest(session, client, name, ttl_s=ELECTION_TTL_S, **ELECTION_LOST) as part:
        await part.win(proposal)
        await part.show_and_hold(session, client, ELECTION_EXPIRED)


async def _listen(client: Client, session: Session, name: bytes) -> None:
    async with signals() as stopped:
        try:
            await unless(_observe(client, session, name), (stopped, ""))
        except CommandError as error:
            if str(error):
                raise


async def _observe(client: Client, session: Session, name: bytes) -> None:
    async with (
        open_scope(client, session.timeout_s) as scope,
        aclosing(observations(scope, name, on_trouble=Remarks())) as answers,
    ):
        tell_outages(scope.hub)
        try:
            async for answer in answers:
                _show(session, answer)
        except WatchCanceled:
            raise CommandError("elect: observer lost") from None


def _show(session: Session, response: rpc_pb2.RangeResponse) -> None:
    session.printer.show("get", response)
    sys.stdout.flush()


# -- lease ----------------------------------------------------------------------------------------------------------
#
# ``lease grant|revoke|timetolive|list|keep-alive``.
#
# Owns what etcdctl checks before it asks and how it words refusals.


def grant(invocation: Invocation) -> None:
    """Make a lease."""
    text = invocation.argument("lease grant command needs TTL argument")
    with refused(ValueError, BAD_ARGUMENTS, "bad TTL ({})"):
        ttl_s = pflag.parse_int(text, base=10)
    session = open_session(invocation)
    with _refusals("failed to grant lease ({})"):
        session.show("lease_grant", methods.LEASE_GRANT, rpc_pb2.LeaseGrantRequest(TTL=ttl_s))


def revoke(invocation: Invocation) -> None:
    """End a lease and delete its keys."""
    lease_id = _lease_id(invocation, "lease revoke command needs 1 argument")
    session = open_session(invocation)
    with _refusals("failed to revoke lease ({})"):
        session.show("lease_revoke", methods.LEASE_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease_id), lease_id)


def time_to_live(invocation: Invocation) -> None:
    """Print what is left of a lease."""
    lease_id = _lease_id(invocation, "lease timetolive command needs lease ID as argument")
    session = open_session(invocation)
    request = rpc_pb2.LeaseTimeToLiveRequest(ID=lease_id, keys=invocation["keys"])
    with _refusals(code=BAD_CONNECTION):
        session.show("lease_time_to_live", methods.LEASE_TIME_TO_LIVE, request, invocation["keys"])


def list_leases(invocation: Invocation) -> None:
    """Print the leases that a member knows."""
    session = open_session(invocation)
    with _refusals(code=BAD_CONNECTION):
        session.show("lease_list", methods.LEASE_LEASES, rpc_pb2.LeaseLeasesRequest())


def keep_alive(invocation: Invocation) -> None:
    """Renew a lease until it is gone, or once."""
    lease_id = _lease_id(invocation, "lease keep-alive command needs lease ID as argument")
    session = open_session(invocation)
    printed = 0

    async def renew(client: Client) -> None:
        nonlocal printed
        async with (
            open_scope(client, session.timeout_s) as scope,
            aclosing(renewals(scope, lease_id, session.timeout_s)) as answers,
        ):
            async for response in answers:
                session.printer.show("lease_keep_alive", response)
                printed += 1
                if invocation["once"]:
                    return

    with _refusals(code=BAD_CONNECTION):
        session.run(renew)
    if invocation["once"] and not printed:
        raise CommandError("etcdserver: requested lease not found", BAD_CONNECTION)
    if not invocation["once"] and session.printer.name == "simple":
        print(f"lease {lease_id:016x} expired or revoked.")


def _lease_id(invocation: Invocation, complaint: str) -> int:
    text = invocation.argument(complaint)
    with refused(ValueError, BAD_ARGUMENTS, "bad lease ID arg ({}), expecting ID in Hex"):
        return pflag.parse_int(text, base=16)


@contextmanager
def _refusals(frame: str = "{}", code: int = ERROR) -> Iterator[None]:
    """Give refusals the frame that etcdctl gives them, and its code; trouble with the connection stays as it is."""
    try:
        yield
    except CommandError as error:
        if error.code != ERROR:
            raise
        raise CommandError(frame.format(error), code, error.details) from None
