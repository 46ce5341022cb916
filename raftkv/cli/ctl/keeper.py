"""Leases that a command keeps alive, whatever becomes of the member that it talks to.

Owns the renewing loop: one stream at a time, a renewal every third of the TTL, another endpoint when the member is
lost. A lease counts as lost once its TTL has passed since the last answered renewal *was asked for*: the cluster may
only be later than that.

    async with kept_lease(client, ttl_s=10, timeout_s=5.0) as lease:
        await lease.lost.wait()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from raftkv.client import Client
from raftkv.client.errors import EndpointsFailed
from raftkv.client.rpc import methods
from raftkv.client.rpc.streams import Stream
from raftkv.errors import (
    DEADLINE_EXCEEDED,
    INTERNAL,
    UNAVAILABLE,
    UNKNOWN,
    ContextDeadlineExceededError,
    StatusError,
)
from raftkv.pb import rpc_pb2

_PASSING = (UNAVAILABLE, DEADLINE_EXCEEDED, INTERNAL, UNKNOWN)
"""Failures that another member, or the same one a moment later, may not have; UNKNOWN is a leader that steps down."""

RETRY_PAUSE_S = 0.1
ATTEMPT_SHARE = 1 / 3
"""How much of the time that is left one member may take: a member that is silent must not cost the lease."""
REVOKE_TIMEOUT_S = 2.0
"""A member that is gone must not hold up the end of a command for longer: the lease will expire."""


@dataclass
class KeptLease:
    """A lease under renewal; ``lost`` is set when it has expired or was revoked."""

    id: int
    lost: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def kept_lease(client: Client, *, ttl_s: int, timeout_s: float) -> AsyncIterator[KeptLease]:
    """Grant a lease, keep it alive, revoke it at the end.

    Arguments:
        client: of the cluster.
        ttl_s: time to live in seconds.
        timeout_s: for the grant.

    Raises:
        StatusError: the grant was refused, or nobody answered.
    """
    granted = await client.call(methods.LEASE_GRANT, rpc_pb2.LeaseGrantRequest(TTL=ttl_s), timeout_s=timeout_s)
    lease = KeptLease(granted.ID)
    task = asyncio.create_task(_keep(client, lease, granted.TTL))
    try:
        yield lease
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if not lease.lost.is_set():
            with suppress(StatusError):
                request = rpc_pb2.LeaseRevokeRequest(ID=lease.id)
                await client.call(methods.LEASE_REVOKE, request, timeout_s=REVOKE_TIMEOUT_S)


async def _keep(client: Client, lease: KeptLease, ttl_s: int) -> None:
    try:
        with suppress(StatusError):
            async for _ in renewals(client, lease.id, float(ttl_s)):
                pass
    finally:
        lease.lost.set()


async def renewals(
    client: Client, lease_id: int, first_timeout_s: float
) -> AsyncIterator[rpc_pb2.LeaseKeepAliveResponse]:
    """Renew a lease until it is gone, and tell each renewal.

    Arguments:
        client: of the cluster.
        lease_id: the lease.
        first_timeout_s: how long the first answer may take, over all attempts.

    Raises:
        StatusError: a member refused.
        EndpointsFailed: nobody answered in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + first_timeout_s
    failures: dict[str, str] = {}
    while True:
        stream = await client.stream(methods.LEASE_KEEP_ALIVE)
        try:
            async with stream:
                while True:
                    asked_at = loop.time()
                    response = await _renew(stream, lease_id, asked_at + (deadline - asked_at) * ATTEMPT_SHARE)
                    if response.TTL <= 0:
                        return
                    deadline = asked_at + response.TTL
                    failures.clear()
                    yield response
                    await asyncio.sleep(asked_at + response.TTL / 3 - loop.time())
        except StatusError as error:
            if error.code not in _PASSING and not client.forget_token(error):
                raise
            failures[stream.endpoint] = str(error)
        if loop.time() + RETRY_PAUSE_S >= deadline:
            raise EndpointsFailed(failures, first_timeout_s, definite=False, explain=False)
        client.next_endpoint(stream.endpoint)
        await asyncio.sleep(RETRY_PAUSE_S)


async def _renew(
    stream: Stream[rpc_pb2.LeaseKeepAliveResponse], lease_id: int, until: float
) -> rpc_pb2.LeaseKeepAliveResponse:
    try:
        async with asyncio.timeout_at(until):
            await stream.send(rpc_pb2.LeaseKeepAliveRequest(ID=lease_id))
            response = await stream.receive()
    except TimeoutError:
        raise ContextDeadlineExceededError from None
    if response is None:
        raise StreamEnded
    return response


class StreamEnded(StatusError):
    """The member ended the stream without an error: it is going down."""

    code = UNAVAILABLE
    text = "the member has ended the stream"
