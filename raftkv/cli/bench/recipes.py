"""``bench lease-keepalive`` and ``bench lock``: renewals on streams, and the churn of locks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import click

from raftkv.cli.bench.load import LoadError, Request, Result, Run, connections
from raftkv.cli.bench.options import Measurement, Share, client_options, example, number, run_load, shared_flags
from raftkv.client.rpc import methods
from raftkv.client.rpc.transport import Transport
from raftkv.pb import lock_pb2, rpc_pb2
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.status import RpcError
from raftkv.urls import parse_endpoints

SETUP_TIMEOUT_S = 60.0
TTL_S = 3600
"""Longer than any run: nothing may expire while it is measured."""


def _no_requests(rank: int) -> Iterator[Request]:
    return iter(())


@click.command("lease-keepalive", cls=Measurement, epilog=example("lease-keepalive --clients 100 --leases 1000"))
@shared_flags
@number("--leases", 0, 0, "number of leases in all; 0 means one for each client")
def lease_keepalive(leases: int, **shared: Any) -> None:
    """Renew leases.

    Each client is a stream with one renewal under way.
    """

    def make(share: Share) -> _Renewals:
        # Leases are shared out as the clients are.
        count = max(share.clients, leases * share.clients // shared["clients"])
        return _Renewals(share, count)

    run_load("lease-keepalive", make, _no_requests, **shared)


@click.command(cls=Measurement, epilog=example("lock --clients 10 --locks 2"))
@shared_flags
@number("--locks", 1, 1, "number of names that the clients contend for")
def lock(locks: int, **shared: Any) -> None:
    """Acquire and release locks.

    The clients contend for --locks names, each process for its own. A call is an
    acquisition with the release that follows; its latency is that of the acquisition. No two clients may hold a name at
    the same time: that is checked.
    """

    def make(share: Share) -> _Locks:
        return _Locks(share, locks, shared["seed"])

    run_load("lock", make, _no_requests, **shared)


class _Renewals:
    """Renewals on streams, as a load."""

    def __init__(self, share: Share, leases: int) -> None:
        self._share = share
        self._leases = leases

    async def run(
        self, requests: Iterator[Request], *, total: int, when_connected: Callable[[], object] = lambda: None
    ) -> Result:
        """Measure as ``Load.run`` does; the requests are its own."""
        share = self._share
        async with connections(parse_endpoints(share.endpoints), share.connections, client_options()) as transports:
            ids = await grant(transports, self._leases)
            run = Run(iter(()), total, share.on_progress)
            clients = [
                _Renewing(run, transports[number % len(transports)].stream(methods.LEASE_KEEP_ALIVE.path), ids_of)
                for number in range(min(share.clients, total))
                if (ids_of := ids[number :: share.clients])
            ]
            when_connected()
            async with run.streaming([client.call for client in clients]):
                started_at = time.perf_counter()
                for client in clients:
                    client.next()
                await run.wait_finished()
                seconds = time.perf_counter() - started_at
            await revoke(transports, ids)
            return run.result(seconds)


class _Renewing:
    """One client: renew a lease, wait for the answer, renew the next."""

    def __init__(self, run: Run, call: ClientStream, ids: list[int]) -> None:
        self.call = call
        self._run = run
        self._requests = [rpc_pb2.LeaseKeepAliveRequest(ID=lease_id).SerializeToString() for lease_id in ids]
        self._next = 0
        self._sent_at = 0.0
        call.deliver_to(self._take)

    def next(self) -> None:
        """Make the next renewal, if any is left."""
        if self._run.take() is None:
            return
        self._next = (self._next + 1) % len(self._requests)
        self._sent_at = time.perf_counter()
        try:
            self.call.send_nowait(self._requests[self._next])
        except RpcError as error:
            self._run.errors[str(error)] += 1
            self._run.open -= 1
            self._run.ended()

    def _take(self, message: bytes) -> None:
        run = self._run
        run.open -= 1
        if rpc_pb2.LeaseKeepAliveResponse.FromString(message).TTL > 0:
            run.latencies_s.append(time.perf_counter() - self._sent_at)
        else:
            run.errors["the lease has expired"] += 1
        self.next()
        run.ended()


class _Locks:
    """Contenders, as a load."""

    def __init__(self, share: Share, names: int, seed: int) -> None:
        self._share = share
        self._names = names
        self._seed = seed

    async def run(
        self, requests: Iterator[Request], *, total: int, when_connected: Callable[[], object] = lambda: None
    ) -> Result:
        """Measure as ``Load.run`` does; the requests are its own."""
        share = self._share
        async with connections(parse_endpoints(share.endpoints), share.connections, client_options()) as transports:
            ids = await grant(transports, min(share.clients, total))
            run = Run(iter(()), total, share.on_progress)
            # A lease belongs to one process, so its id makes the names of this process its own.
            names = [f"bench-lock/{self._seed}/{ids[0]:x}/{number}".encode() for number in range(self._names)]
            holders = dict.fromkeys(names, 0)
            contenders = [
                _Contender(run, transports[number % len(transports)], names[number % len(names)], lease_id, holders)
                for number, lease_id in enumerate(ids)
            ]
            when_connected()
            started_at = time.perf_counter()
            for contender in contenders:
                contender.next()
            await run.wait_finished()
            seconds = time.perf_counter() - started_at
            await revoke(transports, ids)
            return run.result(seconds)


class _Contender:
    """One client: acquire, release, again."""

    def __init__(self, run: Run, transport: Transport, name: bytes, lease_id: int, holders: dict[bytes, int]) -> None:
        self._run = run
        self._transport = transport
        self._name = name
        self._holders = holders
        self._request = lock_pb2.LockRequest(name=name, lease=lease_id).SerializeToString()
        self._asked_at = 0.0

    def next(self) -> None:
        """Ask for the lock, if any acquisition is left."""
        if self._run.take() is None:
            return
        self._asked_at = time.perf_counter()
        future: Any = self._transport.unary(methods.LOCK.path, self._request)
        future.add_done_callback(self._acquired)

    def _acquired(self, future: asyncio.Future[bytes]) -> None:
        error = future.exception()
        if error is not None:
            self._end(str(error))
            return
        self._run.latencies_s.append(time.perf_counter() - self._asked_at)
        if self._holders[self._name]:
            self._run.errors["two clients hold one lock"] += 1
        self._holders[self._name] += 1
        # Held until the loop's next turn: a second acquisition that came with this one is seen above.
        asyncio.get_running_loop().call_soon(self._release, lock_pb2.LockResponse.FromString(future.result()).key)

    def _release(self, key: bytes) -> None:
        self._holders[self._name] -= 1
        request = lock_pb2.UnlockRequest(key=key).SerializeToString()
        unlock: Any = self._transport.unary(methods.UNLOCK.path, request)
        unlock.add_done_callback(self._released)

    def _released(self, future: asyncio.Future[bytes]) -> None:
        error = future.exception()
        self._end("" if error is None else str(error))

    def _end(self, error: str) -> None:
        run = self._run
        run.open -= 1
        if error:
            run.errors[error] += 1
        self.next()
        run.ended()


async def grant(transports: Sequence[Transport], count: int) -> list[int]:
    """Grant so many leases, and return their ids.

    Arguments:
        transports: connections to the members.
        count: of leases.
    """
    request = rpc_pb2.LeaseGrantRequest(TTL=TTL_S).SerializeToString()
    answers = await _all(transports, methods.LEASE_GRANT.path, [request] * count)
    return [rpc_pb2.LeaseGrantResponse.FromString(answer).ID for answer in answers]


async def revoke(transports: Sequence[Transport], ids: list[int]) -> None:
    """Revoke the leases of a run, if the cluster is still there.

    Arguments:
        transports: connections to the members.
        ids: of the leases.
    """
    requests = [rpc_pb2.LeaseRevokeRequest(ID=lease_id).SerializeToString() for lease_id in ids]
    with suppress(LoadError):
        await _all(transports, methods.LEASE_REVOKE.path, requests)


async def _all(transports: Sequence[Transport], path: str, requests: list[bytes]) -> list[bytes]:
    calls = [
        transports[number % len(transports)].unary(path, request, SETUP_TIMEOUT_S)
        for number, request in enumerate(requests)
    ]
    try:
        return list(await asyncio.gather(*calls))
    except RpcError as error:
        raise LoadError(f"the leases of the run: {error}") from None
