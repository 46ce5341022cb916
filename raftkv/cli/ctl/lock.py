"""``lock``: hold a named lock until a signal comes, or while a command runs.

Owns the holder's duties: the key stands under a lease that is kept alive; it is deleted on every way out; a command
does not outlive the lock (etcdctl lets it run on).
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass

from raftkv.cli.ctl import children
from raftkv.cli.ctl.keeper import KeptLease
from raftkv.cli.ctl.queueing import CALL_TIMEOUT_S, CANCELED, enqueue, leased, unless, wait_first
from raftkv.cli.ctl.session import Session, failed, open_session
from raftkv.cli.exits import BAD_ARGUMENTS, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.goflags.values import text_bytes
from raftkv.client import Client
from raftkv.client.rpc import methods
from raftkv.errors import StatusError
from raftkv.pb import rpc_pb2

EXPIRED = "session expired"


@dataclass(frozen=True)
class Held:
    """A lock that is ours: its key, and the revision at which we learned of it."""

    key: bytes
    revision: int


def lock(invocation: Invocation) -> None:
    """Acquire, hold, release."""
    if not invocation.arguments:
        raise CommandError("lock takes a lock name argument and an optional command to execute", BAD_ARGUMENTS)
    name, command = invocation.arguments[0], invocation.arguments[1:]
    session = open_session(invocation)
    prefix = text_bytes(name) + b"/"
    # Go's clients take a TTL of 0 for "none given".
    ttl_s = invocation["ttl"] if invocation["ttl"] > 0 else 60

    async def hold(client: Client) -> None:
        async with leased(session, client, ttl_s) as (stopped, lease):
            try:
                held = await unless(_acquire(client, prefix, lease), (stopped, CANCELED), (lease.lost, EXPIRED))
                if command:
                    await _run(command, held, lease, stopped)
                else:
                    await _wait(session, client, held, lease, stopped)
            finally:
                await _release(client, prefix, lease, session.timeout_s)

    session.run(hold)


async def _acquire(client: Client, prefix: bytes, lease: KeptLease) -> Held:
    key, answer = await enqueue(client, prefix, lease.id, b"")
    mine = answer.header.revision if answer.succeeded else answer.responses[0].response_range.kvs[0].create_revision
    owner = answer.responses[1].response_range.kvs
    if not owner or owner[0].create_revision == mine:
        return Held(key, answer.header.revision)
    await wait_first(client, prefix, mine)
    # The wait may have outlasted the lease: the key tells.
    found = await client.call(methods.RANGE, rpc_pb2.RangeRequest(key=key), timeout_s=CALL_TIMEOUT_S)
    if not found.kvs or found.kvs[0].create_revision != mine:
        raise CommandError("mutex: session is expired")
    return Held(key, found.header.revision)


async def _wait(session: Session, client: Client, held: Held, lease: KeptLease, stopped: asyncio.Event) -> None:
    found = await client.call(methods.RANGE, rpc_pb2.RangeRequest(key=held.key), timeout_s=session.timeout_s)
    if not found.kvs:
        raise CommandError("lock lost on init")
    session.printer.get(found)
    sys.stdout.flush()
    await unless(stopped.wait(), (lease.lost, EXPIRED))


async def _run(command: list[str], held: Held, lease: KeptLease, stopped: asyncio.Event) -> None:
    """Run the command; a signal to us is for it, and a lost lock ends it."""
    variables = {"ETCD_LOCK_KEY": held.key.decode("utf-8", "surrogateescape"), "ETCD_LOCK_REV": str(held.revision)}
    try:
        child = await children.start(command, variables)
        told = asyncio.create_task(_tell(child, stopped))
        try:
            await unless(children.finish(child), (lease.lost, EXPIRED))
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


async def _release(client: Client, prefix: bytes, lease: KeptLease, timeout_s: float) -> None:
    if lease.lost.is_set():
        return
    request = rpc_pb2.DeleteRangeRequest(key=prefix + f"{lease.id:x}".encode())
    try:
        await client.call(methods.DELETE_RANGE, request, timeout_s=timeout_s)
    except StatusError as error:
        raise failed(error) from None
