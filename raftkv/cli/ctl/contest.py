"""``lock``: hold a named lock until a signal, or while a command runs. ``elect``: campaign, or print the leader.
``lease``: grant, revoke, list, keep alive.

The holder's key is attached to a lease that is kept alive, and deleted on every way out; a command does not outlive the
lock (with etcdctl it does). The algorithm is the library's (``client.lock``), so that all etcd clients can compete for
the same name.
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
from raftkv.loop.outcomes import done_before
from raftkv.pb import rpc_pb2

T = TypeVar("T")

CANCELED = "context canceled"
REVOKE_TIMEOUT_S = 2.0
"""Longest wait for the revocation at the end of a command; without it, the lease expires."""


@asynccontextmanager
async def signals() -> AsyncIterator[asyncio.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets, instead of ending the process; a second one ends it."""
    stopped = asyncio.Event()
    with ExitStack() as hearing:

        def stop() -> None:
            stopped.set()
            hearing.close()

        hearing.enter_context(on_signals(stop))
        yield stopped


@dataclass
class Contest:
    """One command's candidacy for a name.

    Attributes:
        place: place in the queue.
        lease: lease of the key in the queue; revoked at the end.
        stopped: event that a signal sets.
        expired, fenced: texts of the errors when the lease, or the key in the queue, is lost.
    """

    place: Contender
    lease: Lease
    stopped: asyncio.Event
    expired: str
    fenced: str

    async def win(self, value: bytes) -> int:
        """Enter the queue and wait to be first; return the revision at which that was read.

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
        """Print the key, and hold it until a signal; ``gone`` is the text of the error if the key does not exist."""
        request = rpc_pb2.RangeRequest(key=self.place.guard_key)
        found = await client.call(methods.RANGE, request, timeout_s=session.timeout_s)
        if not found.kvs:
            raise CommandError(gone)
        _show(session, found)
        await self.hold(self.stopped.wait())

    async def hold(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine while the lease lives.

        Raises:
            CommandError: the lease has expired.
        """
        return await unless(work, (self.lease.lost, self.expired))

    async def leave(self) -> None:
        """Leave the queue, even after a failed wait."""
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
    """Create a candidacy for the block, and leave the queue at its end.

    The wait for a lock also waits for a cluster that does not answer, and reports the reason after
    ``--command-timeout``.

    Arguments:
        session: session of the command.
        client: client of the cluster.
        name: name of the lock or election.
        ttl_s: TTL of the lease, in seconds.
        expired: text of the error when the lease is lost.
        fenced: text of the error when the key in the queue is lost.

    Raises:
        CommandError: a signal came before the lease was granted.
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
    """Reports once on standard error why no member answers."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, error: StatusError | None) -> None:
        """Record the outcome of a call.

        Arguments:
            error: error of the call; None: it was answered.
        """
        if error is None or self._said:
            return
        self._said = True
        reasons = unanswered(error.failures) if isinstance(error, EndpointsFailed) else [str(error)]
        for line in (*reasons, "still trying; press Ctrl-C to stop"):
            remark(line)


async def unless(work: Coroutine[Any, Any, T], *events: tuple[asyncio.Event, str]) -> T:
    """Run a coroutine, unless one of the events comes first.

    Arguments:
        work: coroutine to run.
        events: events, each with the text of the error that ends the command.

    Raises:
        CommandError: an event came first; the coroutine was cancelled.
    """
    waits = [asyncio.ensure_future(event.wait()) for event, _ in events]
    try:
        if (done := await done_before(work, *waits)) is not None:
            return done.result()
        raise CommandError(next(text for (_, text), wait in zip(events, waits, strict=True) if wait.done()), ERROR)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)


LOCK_LOST = {"expired": "session expired", "fenced": "mutex: session is expired"}


def lock(invocation: Invocation) -> None:
    """Acquire, hold and release a lock."""
    if not invocation.arguments:
        raise CommandError("lock takes a lock name argument and an optional command to execute", BAD_ARGUMENTS)
    name, command = invocation.arguments[0], invocation.arguments[1:]
    session = open_session(invocation)
    # Go's clients treat a TTL of 0 as missing.
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
    """Run the command; signals are passed to it, and a lost lock ends it."""
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
    """Campaign, or observe."""
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
# Includes etcdctl's checks before a call, and its texts for refusals.


def grant(invocation: Invocation) -> None:
    """Grant a lease."""
    text = invocation.argument("lease grant command needs TTL argument")
    with refused(ValueError, BAD_ARGUMENTS, "bad TTL ({})"):
        ttl_s = pflag.parse_int(text, base=10)
    session = open_session(invocation)
    with _refusals("failed to grant lease ({})"):
        session.show("lease_grant", methods.LEASE_GRANT, rpc_pb2.LeaseGrantRequest(TTL=ttl_s))


def revoke(invocation: Invocation) -> None:
    """Revoke a lease and delete its keys."""
    lease_id = _lease_id(invocation, "lease revoke command needs 1 argument")
    session = open_session(invocation)
    with _refusals("failed to revoke lease ({})"):
        session.show("lease_revoke", methods.LEASE_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease_id), lease_id)


def time_to_live(invocation: Invocation) -> None:
    """Print the remaining time of a lease."""
    lease_id = _lease_id(invocation, "lease timetolive command needs lease ID as argument")
    session = open_session(invocation)
    request = rpc_pb2.LeaseTimeToLiveRequest(ID=lease_id, keys=invocation["keys"])
    with _refusals(code=BAD_CONNECTION):
        session.show("lease_time_to_live", methods.LEASE_TIME_TO_LIVE, request, invocation["keys"])


def list_leases(invocation: Invocation) -> None:
    """Print all leases."""
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
    """Convert refusals to errors with etcdctl's text and exit code; connection failures are not changed."""
    try:
        yield
    except CommandError as error:
        if error.code != ERROR:
            raise
        raise CommandError(frame.format(error), code, error.details) from None
