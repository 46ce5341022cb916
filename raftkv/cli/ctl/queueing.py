"""The queue behind a lock or an election: keys under one prefix, served in the order of their creation.

Owns the steps that ``lock`` and ``elect`` share, which are those of etcd's recipes, so that all their clients may meet
on one name: a key ``NAME/LEASE``, made once, and the wait until all older keys of the prefix are gone.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from raftkv.cli.ctl.keeper import KeptLease, kept_lease
from raftkv.cli.ctl.session import Session, remark, unanswered
from raftkv.cli.ctl.watching import Watching
from raftkv.cli.exits import ERROR, CommandError
from raftkv.client import Client
from raftkv.client.errors import EndpointsFailed
from raftkv.client.keys import prefix_end
from raftkv.client.rpc import methods
from raftkv.pb import kv_pb2, rpc_pb2

T = TypeVar("T")

CANCELED = "context canceled"
CALL_TIMEOUT_S = 24 * 3600.0
"""Steps of a wait have no deadline of their own: who waits for a lock also waits for a cluster without a leader."""


async def enqueue(client: Client, prefix: bytes, lease_id: int, value: bytes) -> tuple[bytes, rpc_pb2.TxnResponse]:
    """Make our key unless it is there, and read the oldest key of the prefix.

    Returns:
        Our key, and the answer: whether it was made; ours (if it was there already); the owner's.
    """
    key = prefix + f"{lease_id:x}".encode()
    absent = rpc_pb2.Compare(key=key, target=rpc_pb2.Compare.CREATE, result=rpc_pb2.Compare.EQUAL, create_revision=0)
    make = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value, lease=lease_id))
    read = rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))
    owner = rpc_pb2.RequestOp(request_range=oldest(prefix))
    request = rpc_pb2.TxnRequest(compare=[absent], success=[make, owner], failure=[read, owner])
    return key, await client.call(methods.TXN, request, timeout_s=CALL_TIMEOUT_S)


def oldest(prefix: bytes, *, below_revision: int = 0) -> rpc_pb2.RangeRequest:
    """Read the first-made key of a prefix; with a bound, the last-made of those that were made before it."""
    order = rpc_pb2.RangeRequest.DESCEND if below_revision else rpc_pb2.RangeRequest.ASCEND
    return rpc_pb2.RangeRequest(
        key=prefix,
        range_end=prefix_end(prefix),
        limit=1,
        sort_target=rpc_pb2.RangeRequest.CREATE,
        sort_order=order,
        max_create_revision=max(below_revision - 1, 0),
    )


async def wait_first(client: Client, prefix: bytes, create_revision: int) -> None:
    """Wait until no key of the prefix is older than ours."""
    while True:
        request = oldest(prefix, below_revision=create_revision)
        answer = await client.call(methods.RANGE, request, timeout_s=CALL_TIMEOUT_S)
        if not answer.kvs:
            return
        await _wait_deleted(client, answer.kvs[0].key, answer.header.revision)


async def _wait_deleted(client: Client, key: bytes, since_revision: int) -> None:
    async with Watching(client) as watching:
        async for answer in watching.add(key, start_revision=since_revision + 1):
            if answer.compact_revision:
                return  # too late to see it; the caller reads again
            if answer.cancel_reason:
                raise CommandError(answer.cancel_reason)
            if any(event.type == kv_pb2.Event.DELETE for event in answer.events):
                return


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


@asynccontextmanager
async def leased(session: Session, client: Client, ttl_s: int) -> AsyncIterator[tuple[asyncio.Event, KeptLease]]:
    """A lease for the time of the block, and the event that a signal sets; a signal also ends the wait for the lease.

    Who waits for a lock also waits for a cluster that does not answer, and is told why after ``--command-timeout``.

    Raises:
        CommandError: a signal came first.
        StatusError: the grant was refused.
    """
    async with signals() as stopped, AsyncExitStack() as stack:
        granting = _insist(
            lambda: stack.enter_async_context(kept_lease(client, ttl_s=ttl_s, timeout_s=session.timeout_s))
        )
        yield stopped, await unless(granting, (stopped, CANCELED))


async def _insist(step: Callable[[], Awaitable[T]]) -> T:
    told = False
    while True:
        try:
            return await step()
        except EndpointsFailed as error:
            for line in () if told else (*unanswered(error.failures), "still trying; Ctrl-C ends it"):
                remark(line)
            told = True


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
