"""``lock``: hold a named lock until a signal comes, or while a command runs.

Owns the holder's duties: the key stands under a lease that is kept alive; it is deleted on every way out; a command
does not outlive the lock (etcdctl lets it run on).
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from raftkv.cli.ctl import children
from raftkv.cli.ctl.contest import Contest, contest
from raftkv.cli.ctl.session import Session, open_session
from raftkv.cli.exits import BAD_ARGUMENTS, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.goflags.values import text_bytes
from raftkv.client import Client
from raftkv.client.errors import FenceLost
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2

EXPIRED = "session expired"


def lock(invocation: Invocation) -> None:
    """Acquire, hold, release."""
    if not invocation.arguments:
        raise CommandError("lock takes a lock name argument and an optional command to execute", BAD_ARGUMENTS)
    name, command = invocation.arguments[0], invocation.arguments[1:]
    session = open_session(invocation)
    # Go's clients take a TTL of 0 for "none given".
    ttl_s = invocation["ttl"] if invocation["ttl"] > 0 else 60

    async def hold(client: Client) -> None:
        async with contest(session, client, text_bytes(name), ttl_s=ttl_s, expired=EXPIRED) as part:
            try:
                revision = await part.win(b"")
            except FenceLost:
                raise CommandError("mutex: session is expired") from None
            if command:
                await _run(command, part, revision)
            else:
                await _wait(session, client, part)

    session.run(hold)


async def _wait(session: Session, client: Client, part: Contest) -> None:
    found = await client.call(
        methods.RANGE, rpc_pb2.RangeRequest(key=part.place.guard_key), timeout_s=session.timeout_s
    )
    if not found.kvs:
        raise CommandError("lock lost on init")
    session.printer.get(found)
    sys.stdout.flush()
    await part.hold(part.stopped.wait())


async def _run(command: list[str], part: Contest, revision: int) -> None:
    """Run the command; a signal to us is for it, and a lost lock ends it."""
    variables = {"ETCD_LOCK_KEY": part.place.key.decode("utf-8", "surrogateescape"), "ETCD_LOCK_REV": str(revision)}
    try:
        child = await children.start(command, variables)
        told = asyncio.create_task(_tell(child, part.stopped))
        try:
            await part.hold(children.finish(child))
        finally:
            told.cancel()
            if child.returncode is None:
                child.terminate()
                await child.wait()
    except children.ChildFailed as error:
        raise CommandError(str(error), error.code) from None


async def _tell(child: asyncio.subprocess.Process, stopped: asyncio.Event) -> None:
    await stopped.wait()
    with suppress(ProcessLookupError):
        child.terminate()
