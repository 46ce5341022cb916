"""``raftkvctl bench``: measure any etcd v3 cluster.

Rates and latencies are those of a closed loop: every client waits for its answer before it asks again. The names of
flags and their meaning are those of etcd's own benchmark tool where it has them. Owns the commands that read and write
keys; those of watches, leases and locks are in the sections below.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Final

import click

from raftkv.cli.bench import load as bench_load
from raftkv.cli.bench.load import PREFIX, CallerChannel, Load, LoadError, Request, Result, Run, connections
from raftkv.cli.bench.options import (
    Measurement,
    call_bar,
    choose_members,
    client_options,
    end,
    example,
    failures_in_one_line,
    hear_parent,
    leave_terminal,
    number,
    print_result,
    run_load,
    shared_flags,
    signals_held_back,
    within,
    write_flags,
    writes,
)
from raftkv.cli.pflag import did_you_mean
from raftkv.client import ClientOptions
from raftkv.client.rpc import methods
from raftkv.client.rpc.transport import Transport
from raftkv.errors import RaftKVError
from raftkv.pb import lock_pb2, rpc_pb2
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.status import RpcError
from raftkv.urls import parse_endpoints

# -- recipes --------------------------------------------------------------------------------------------------------
#
# ``bench lease-keepalive`` and ``bench lock``: renewals on streams, and the churn of locks.

SETUP_TIMEOUT_S = 60.0
TTL_S = 3600
"""Longer than any run: nothing may expire while it is measured."""


@click.command("lease-keepalive", cls=Measurement, epilog=example("lease-keepalive --clients 100 --leases 1000"))
@shared_flags
@number("--leases", 0, 0, "number of leases in all; 0 means one for each client")
def lease_keepalive(leases: int, **shared: Any) -> None:
    """Renew leases.

    Each client is a stream with one renewal under way.
    """

    run_load("lease-keepalive", partial(_Renewals, leases / shared["clients"]), **shared)


@click.command(cls=Measurement, epilog=example("lock --clients 10 --locks 2"))
@shared_flags
@number("--locks", 1, 1, "number of names that the clients contend for")
def lock(locks: int, **shared: Any) -> None:
    """Acquire and release locks.

    The clients contend for --locks names, each process for its own. A call is an
    acquisition with the release that follows; its latency is that of the acquisition. No two clients may hold a name at
    the same time: that is checked.
    """

    run_load("lock", partial(_Locks, locks, shared["seed"]), **shared)


class _Renewals(Load):
    """Renewals on streams, as a load.

    Arguments:
        leases: of each client; less than 1: one.
    """

    def __init__(self, leases: float, endpoints: Sequence[str], *, clients: int, **more: Any) -> None:
        super().__init__(endpoints, clients=clients, **more)
        self._leases = max(clients, int(leases * clients))

    @asynccontextmanager
    async def starts(
        self, run: Run, channels: list[CallerChannel], clients: int
    ) -> AsyncIterator[list[Callable[[], None]]]:
        """Make the streams; see ``Load.starts``."""
        ids = await grant(channels, self._leases)
        made = [
            _Renewing(run, channels[number % len(channels)].stream(methods.LEASE_KEEP_ALIVE.path), ids_of)
            for number in range(clients)
            if (ids_of := ids[number :: self._clients])
        ]
        async with run.streaming([client.call for client in made]):
            yield [client.next for client in made]
        await revoke(channels, ids)


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


class _Locks(Load):
    """Contenders for so many names, as a load."""

    def __init__(self, names: int, seed: int, endpoints: Sequence[str], **more: Any) -> None:
        super().__init__(endpoints, **more)
        self._names = names
        self._seed = seed

    @asynccontextmanager
    async def starts(
        self, run: Run, channels: list[CallerChannel], clients: int
    ) -> AsyncIterator[list[Callable[[], None]]]:
        """Make the contenders; see ``Load.starts``."""
        ids = await grant(channels, clients)
        # A lease belongs to one process, so its id makes the names of this process its own.
        names = [f"bench-lock/{self._seed}/{ids[0]:x}/{number}".encode() for number in range(self._names)]
        holders = dict.fromkeys(names, 0)
        yield [
            _Contender(run, channels[number % len(channels)], names[number % len(names)], lease_id, holders).next
            for number, lease_id in enumerate(ids)
        ]
        await revoke(channels, ids)


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


# -- watch_commands -------------------------------------------------------------------------------------------------
#
# ``bench watch`` and ``bench watch-latency``: how many events a cluster delivers, and how soon.

# -- watch ----------------------------------------------------------------------------------------------------------
#
# Watchers that count: as many as wanted on as many streams, in a process of their own.
#
# Owns the receiving side of ``bench watch``. What a message holds is looked up by its bytes behind the watch id:
# these
# are the same for all watchers of a key, so a fan-out to a thousand costs one parse and a thousand look-ups. The
# generator shares the machine with what it measures.
#
# Each watcher's events are checked: revisions rise (none twice, none out of order), and their number is the number of
# puts to its key (none lost). Events that come after the last expected one are not waited for.

STALL_TIMEOUT_S: Final = 30.0
"""Without an event for so long the missing ones count as lost."""

CREATE_TIMEOUT_S: Final = 120.0
REMEMBERED_MAX: Final = 1024
_WATCH_ID_TAG: Final = 0x10
_HEADER_TAG: Final = 0x0A


@dataclass(frozen=True)
class WatchShare:
    """What one process watches.

    Attributes:
        endpoints: connections go to them in turn.
        connections: shared by the streams.
        streams: key of each watcher, for each stream.
        expected: events that each watcher must get, for each stream.
        options: how to connect.
    """

    endpoints: tuple[str, ...]
    connections: int
    streams: tuple[tuple[bytes, ...], ...]
    expected: tuple[tuple[int, ...], ...]
    options: ClientOptions


@dataclass
class WatchCount:
    """What came.

    Attributes:
        events: of all watchers.
        messages: that brought them.
        wrong: watchers that did not get as many events as were put.
        disordered: events whose revision was not above the one before.
        finished_at: when the last came, on the monotonic clock.
        processor_s: time of processors that counting them took.
    """

    events: int
    messages: int
    wrong: int
    disordered: int
    finished_at: float
    processor_s: float


class Arrivals:
    """What is still awaited by all streams of a process; ``changed`` is set when one of them is complete."""

    def __init__(self, watchers: int, events: int) -> None:
        self.watchers = watchers
        self.events = events
        self.error = ""
        self.changed = asyncio.Event()

    def fail(self, text: str) -> None:
        """Give the measurement up."""
        self.error = self.error or text
        self.changed.set()


class CountingStream:
    """The watchers of one stream; ids are 1, 2, 3 in the order of their keys."""

    def __init__(self, call: ClientStream, keys: Sequence[bytes], arrivals: Arrivals) -> None:
        self.call = call
        self.messages = 0
        self.disordered = 0
        self.counts = [0] * (len(keys) + 1)
        self._arrivals = arrivals
        self._latest = [0] * (len(keys) + 1)
        self._remembered: dict[bytes, tuple[int, int, int]] = {}
        call.deliver_to(self.take)
        for watch_id, key in enumerate(keys, 1):
            request = rpc_pb2.WatchCreateRequest(key=key, watch_id=watch_id)
            call.send_nowait(rpc_pb2.WatchRequest(create_request=request).SerializeToString())

    def take(self, message: bytes) -> None:
        """Count one message. Its header is shorter than 128 bytes: four numbers."""
        position = 2 + message[1] if message[0] == _HEADER_TAG else 0
        watch_id = 0
        if message[position] == _WATCH_ID_TAG:
            position += 1
            shift = 0
            while (byte := message[position]) & 0x80:
                watch_id |= (byte & 0x7F) << shift
                shift += 7
                position += 1
            watch_id |= byte << shift
            position += 1
        rest = message[position:]
        batch = self._remembered.get(rest)
        if batch is None:
            batch = self._parse(rest)
        count, first, last = batch
        if count:
            self.messages += 1
            self.counts[watch_id] += count
            if first <= self._latest[watch_id]:
                self.disordered += 1
            self._latest[watch_id] = last
            arrivals = self._arrivals
            arrivals.events -= count
            if not arrivals.events:
                arrivals.changed.set()

    def _parse(self, rest: bytes) -> tuple[int, int, int]:
        response = rpc_pb2.WatchResponse.FromString(rest)
        if response.canceled:
            self._arrivals.fail(f"a watcher was cancelled: {response.cancel_reason or response.compact_revision}")
        if response.created:
            self._arrivals.watchers -= 1
            if not self._arrivals.watchers:
                self._arrivals.changed.set()
        if not response.events:
            return 0, 0, 0
        revisions = [event.kv.mod_revision for event in response.events]
        rises = all(before < after for before, after in pairwise(revisions))
        self.disordered += not rises
        batch = len(revisions), revisions[0], revisions[-1]
        if len(self._remembered) >= REMEMBERED_MAX:
            self._remembered.clear()
        self._remembered[rest] = batch
        return batch


class WatcherProcess:
    """A process that watches; forked before its parent has a loop."""

    def __init__(self, share: WatchShare) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_run, args=(share, other), daemon=True)
        with signals_held_back():
            self._process.start()
        other.close()

    def wait_watching(self) -> None:
        """Wait until all watchers are made.

        Raises:
            LoadError: they could not be made.
        """
        self._receive()

    def result(self, *, at_once: bool = False) -> WatchCount:
        """Wait for the last event after the puts, or return at once what has come. LoadError as above."""
        self._pipe.send_bytes(b"stop" if at_once else b"done")
        count = WatchCount(**json.loads(self._receive()))
        self._process.join()
        return count

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()

    def _receive(self) -> bytes:
        try:
            answer = self._pipe.recv_bytes()
        except EOFError:
            raise LoadError("a watching process ended without an answer") from None
        if answer.startswith(b"error:"):
            raise LoadError(answer[6:].decode())
        return answer


def _run(share: WatchShare, pipe: Connection) -> None:
    leave_terminal()
    try:
        count = asyncio.run(_watch(share, pipe))
    except* EOFError:
        pass  # the parent was killed
    except* (RaftKVError, RpcError, OSError, TimeoutError) as group:
        error = group.exceptions[0]
        pipe.send_bytes(b"error:" + (str(error) or "the watchers could not be made in time").encode())
    else:
        pipe.send_bytes(json.dumps(asdict(count)).encode())


async def _watch(share: WatchShare, pipe: Connection) -> WatchCount:
    hear_parent()
    arrivals = Arrivals(sum(map(len, share.streams)), sum(map(sum, share.expected)))
    async with connections(parse_endpoints(share.endpoints), share.connections, share.options) as transports:
        streams = [
            CountingStream(transports[number % len(transports)].stream(methods.WATCH.path), keys, arrivals)
            for number, keys in enumerate(share.streams)
        ]
        async with asyncio.TaskGroup() as tasks:
            ends = [tasks.create_task(_note_end(stream, arrivals)) for stream in streams]
            await _wait(arrivals, lambda: not arrivals.watchers, CREATE_TIMEOUT_S)
            gc.collect()
            gc.disable()
            processor_before_s = time.process_time()
            pipe.send_bytes(b"ready")
            finished_at = await _wait_events(arrivals, pipe)
            processor_s = time.process_time() - processor_before_s
            for end in ends:
                end.cancel()
    return _count(streams, share, finished_at, processor_s)


async def _note_end(stream: CountingStream, arrivals: Arrivals) -> None:
    try:
        await stream.call.receive()
    except RpcError as error:
        arrivals.fail(str(error))
    else:
        arrivals.fail("a member has ended a watch stream")


async def _wait(arrivals: Arrivals, reached: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a condition that sets ``changed``. TimeoutError, and LoadError when something has failed."""
    async with asyncio.timeout(timeout_s):
        while not reached() and not arrivals.error:
            arrivals.changed.clear()
            await arrivals.changed.wait()
    if arrivals.error:
        raise LoadError(arrivals.error)


async def _wait_events(arrivals: Arrivals, pipe: Connection) -> float:
    """Wait until the puts are done and all events have come, or none for a long time, or until it is stopped.

    Returns:
        When the last came.
    """
    loop = asyncio.get_running_loop()
    puts = loop.run_in_executor(None, pipe.recv_bytes)
    puts.add_done_callback(lambda _: arrivals.changed.set())
    finished_at = 0.0

    def is_stopped() -> bool:
        return puts.done() and puts.result() == b"stop"

    while arrivals.events > 0 or not puts.done():
        left = arrivals.events
        goal = puts.done if left <= 0 else lambda: arrivals.events <= 0 or is_stopped()
        try:
            await _wait(arrivals, goal, STALL_TIMEOUT_S)
        except TimeoutError:
            if puts.done() and arrivals.events == left:
                break
        if left > 0:
            finished_at = time.perf_counter()
        if is_stopped():
            break
    return finished_at


def _count(streams: list[CountingStream], share: WatchShare, finished_at: float, processor_s: float) -> WatchCount:
    wrong = 0
    for stream, expected in zip(streams, share.expected, strict=True):
        wrong += sum(got != wanted for got, wanted in zip(stream.counts[1:], expected, strict=True))
    return WatchCount(
        events=sum(map(sum, (stream.counts for stream in streams))),
        messages=sum(stream.messages for stream in streams),
        wrong=wrong,
        disordered=sum(stream.disordered for stream in streams),
        finished_at=finished_at,
        processor_s=processor_s,
    )


EVENT_TIMEOUT_S = 30.0
VALUE_FLAG = number("--val-size", 256, 0, "size of a value in bytes")
PUT_RATE_FLAG = click.option(
    "--put-rate",
    default=0.0,
    show_default=True,
    type=within(float, 0),
    metavar="N",
    help="largest number of puts a second; 0 means as fast as they are answered",
)


@click.command(cls=Measurement, epilog=example("watch --streams 10 --watch-per-stream 100 --total 1000"))
@shared_flags
@writes
@VALUE_FLAG
@number("--streams", 10, 1, "number of watch streams")
@number("--watch-per-stream", 100, 1, "number of watchers on each stream")
@number("--watched-key-total", 1, 1, "number of different keys that are watched, in turn")
@PUT_RATE_FLAG
@click.option("--idle", is_flag=True, help="put keys without watchers")
def watch(
    streams: int,
    watch_per_stream: int,
    watched_key_total: int,
    put_rate: float,
    idle: bool,
    val_size: int,
    **shared: Any,
) -> None:
    """Put keys and deliver each event to all its watchers.

    Every watcher is checked. --clients are the puts under way (from the main process), --conns the connections of the
    watchers, which live in --processes of their own. The rate is that of events, from the first put to the last event.
    """
    keys = [PREFIX + b"watch/%08d" % number for number in range(watched_key_total)]
    with failures_in_one_line():
        members = choose_members(shared["endpoints"], shared["target_leader"])
        puts = {} if idle else _puts_per_key(keys, shared["total"])
        layout = _layout(keys, streams, watch_per_stream)
        workers = [WatcherProcess(part) for part in _split(members, layout, puts, shared["conns"], shared["processes"])]
        try:
            requests = _puts([key.replace(b"/watch/", b"/idle/") for key in keys] if idle else keys, val_size)
            started_at, result = _run_puts(members, requests, workers, put_rate, **shared)
            counts = [worker.result(at_once=result.interrupted) for worker in workers]
        finally:
            for worker in workers:
                worker.stop()
    summary = _summary(counts, started_at, result, len(layout) * watch_per_stream, idle)
    expected = sum(puts.get(key, 0) for stream in layout for key in stream)
    _print_watch({**summary, "expected": expected}, shared["as_json"])
    end(result, failed=bool(summary["wrong"] or summary["disordered"] or result.errors))


def _puts_per_key(keys: Sequence[bytes], total: int) -> dict[bytes, int]:
    return {key: total // len(keys) + (number < total % len(keys)) for number, key in enumerate(keys)}


def _layout(keys: Sequence[bytes], streams: int, per_stream: int) -> list[tuple[bytes, ...]]:
    """Return the key of each watcher of each stream: the keys in turn."""
    return [
        tuple(keys[(stream * per_stream + number) % len(keys)] for number in range(per_stream))
        for stream in range(streams)
    ]


def _split(
    members: list[str], layout: list[tuple[bytes, ...]], puts: dict[bytes, int], conns: int, processes: int
) -> Iterator[WatchShare]:
    for rank in range(min(processes, len(layout))):
        turned = members[rank % len(members) :] + members[: rank % len(members)]
        streams = tuple(layout[rank::processes])
        expected = tuple(tuple(puts.get(key, 0) for key in stream) for stream in streams)
        yield WatchShare(tuple(turned), max(1, conns // processes), streams, expected, client_options())


def _puts(keys: Sequence[bytes], value_size: int) -> Iterator[Request]:
    value = bytes(value_size)
    requests = [rpc_pb2.PutRequest(key=key, value=value).SerializeToString() for key in keys]
    while True:
        for request in requests:
            yield methods.PUT.path, request


def _run_puts(
    members: list[str],
    requests: Iterator[Request],
    workers: list[WatcherProcess],
    put_rate: float,
    *,
    clients: int,
    total: int,
    as_json: bool,
    **_: Any,
) -> tuple[float, Result]:
    started_at = 0.0

    def begin() -> None:
        nonlocal started_at
        for worker in workers:
            worker.wait_watching()
        started_at = time.perf_counter()

    with call_bar(total, hidden=as_json) as on_progress:
        load = Load(
            members[:1],
            clients=clients,
            connections=1,
            options=client_options(),
            rate=put_rate,
            on_progress=on_progress,
        )
        result = asyncio.run(load.run(requests, total=total, when_connected=begin))
    return started_at, result


def _summary(counts: list[WatchCount], started_at: float, puts: Result, watchers: int, idle: bool) -> dict[str, Any]:
    events = sum(count.events for count in counts)
    processor_s = puts.processor_s + sum(count.processor_s for count in counts)
    seconds = puts.seconds if idle else max(max(count.finished_at for count in counts) - started_at, 1e-9)
    return {
        "name": "watch (idle)" if idle else "watch",
        "rate": round(events / seconds, 1),
        "events": events,
        "seconds": round(seconds, 3),
        "watchers": watchers,
        "messages": sum(count.messages for count in counts),
        "generator_us": round(processor_s / max(1, events or len(puts.latencies_s)) * 1e6, 3),
        "wrong": 0 if puts.interrupted else sum(count.wrong for count in counts),
        "disordered": sum(count.disordered for count in counts),
        **{f"put_{name}": value for name, value in puts.summary().items() if name not in ("errors", "interrupted")},
        "errors": dict(puts.errors),
        **({"interrupted": True} if puts.interrupted else {}),
    }


def _print_watch(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(summary))
        return
    click.echo(
        f"{summary['name']}: {summary['rate']:,.0f} events/s, {summary['events']:,} of {summary['expected']:,} events "
        f"to {summary['watchers']:,} watchers in {summary['seconds']:.2f} s"
        + (" (interrupted)" if summary.get("interrupted") else "")
    )
    click.echo(
        f"  puts {summary['put_rate']:,.0f}/s  p50 {summary['put_p50_ms']:.2f} ms  p99 {summary['put_p99_ms']:.2f} ms"
    )
    if summary["wrong"] or summary["disordered"]:
        click.echo(f"  {summary['wrong']} watchers miss events or got some twice, {summary['disordered']} out of order")
    for text, count in summary["errors"].items():
        click.echo(f"  {count} puts failed: {text}")


@click.command("watch-latency", cls=Measurement, epilog=example("watch-latency --clients 10 --put-rate 500"))
@shared_flags
@writes
@VALUE_FLAG
@PUT_RATE_FLAG
@click.option("--watch-endpoints", default="", help="members to watch at, if not those that the puts go to")
def watch_latency(put_rate: float, watch_endpoints: str, val_size: int, **shared: Any) -> None:
    """Measure the time from a put to its event.

    Each client has a key and a watcher.
    """
    with failures_in_one_line():
        members = choose_members(shared["endpoints"], shared["target_leader"])
        watched = watch_endpoints.split(",") if watch_endpoints else members
        with call_bar(shared["total"], hidden=shared["as_json"]) as on_progress:
            load = _Latency(
                watched,
                val_size,
                members,
                clients=shared["clients"],
                connections=shared["conns"],
                options=client_options(),
                rate=put_rate,
                on_progress=on_progress,
            )
            result = asyncio.run(load.run(iter(()), total=shared["total"]))
    print_result("watch-latency", result, shared["as_json"])
    end(result, failed=bool(result.errors))


class _Latency(Load):
    """Puts that wait for their events, as a load."""

    def __init__(self, watched: list[str], value_size: int, endpoints: Sequence[str], **more: Any) -> None:
        super().__init__(endpoints, **more)
        self._watched = parse_endpoints(watched)
        self._value_size = value_size

    @asynccontextmanager
    async def starts(
        self, run: Run, channels: list[CallerChannel], clients: int
    ) -> AsyncIterator[list[Callable[[], None]]]:
        """Make the watchers; see ``Load.starts``."""
        async with connections(self._watched, len(channels), self._options) as watching:
            chains = [
                _Chain(run, channels[at % len(channels)], watching[at % len(channels)], at, self._value_size)
                for at in range(clients)
            ]
            async with asyncio.timeout(EVENT_TIMEOUT_S):
                await asyncio.gather(*(chain.watching for chain in chains))
            async with run.streaming([chain.call for chain in chains]):
                yield [chain.next for chain in chains]


class _Chain:
    """One key: put, wait for the event, put again."""

    def __init__(self, run: Run, puts: Transport, watches: Transport, number: int, value_size: int) -> None:
        self._run = run
        self._puts = puts
        self._loop = asyncio.get_running_loop()
        self.watching: asyncio.Future[None] = self._loop.create_future()
        key = PREFIX + b"latency/%d" % number
        self._request = rpc_pb2.PutRequest(key=key, value=bytes(value_size)).SerializeToString()
        self._sent_at = 0.0
        self.call = watches.stream(methods.WATCH.path)
        self.call.deliver_to(self._take)
        self.call.send_nowait(
            rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=key)).SerializeToString()
        )

    def _take(self, message: bytes) -> None:
        arrived_at = time.perf_counter()
        response = rpc_pb2.WatchResponse.FromString(message)
        if response.created:
            self.watching.set_result(None)
            return
        for _ in response.events:
            self._run.latencies_s.append(arrived_at - self._sent_at)
            self._run.open -= 1
            self.next()
            self._run.ended()

    def next(self) -> None:
        """Make the next put, if any is left."""
        delay_s = self._run.take()
        if delay_s:
            self._loop.call_later(delay_s, self._send)
        elif delay_s is not None:
            self._send()

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        future: Any = self._puts.unary(methods.PUT.path, self._request)
        future.add_done_callback(self._answered)

    def _answered(self, future: asyncio.Future[bytes]) -> None:
        error = future.exception()
        if error is not None:  # its event never comes: the chain ends here
            self._run.errors[str(error)] += 1
            self._run.open -= 1
            self._run.ended()


class _Measurements(Measurement, click.Group):
    command_class = Measurement

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            near = did_you_mean(args[0], self.commands)
            ctx.fail(f'unknown command "{args[0]}" for "{ctx.command_path}"{near}')
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Measurements,
    context_settings={"help_option_names": ["-h", "--help"]},
    options_metavar="",
    subcommand_metavar="COMMAND [options]",
)
def bench() -> None:
    """Measure a cluster: raftkv, etcd, or anything that speaks the etcd v3 API."""


for _command in (watch, watch_latency, lease_keepalive, lock):
    bench.add_command(_command)


@bench.command(epilog=example("put", "put --clients 100 --conns 10 --total 100000 --val-size 1024"))
@shared_flags
@write_flags
@click.option("--sequential-keys", is_flag=True, help="go through the keys in order")
def put(key_size: int, val_size: int, key_space_size: int, sequential_keys: bool, **shared: Any) -> None:
    """Put keys."""

    def requests(rank: int) -> Iterator[Request]:
        return bench_load.puts(
            key_size=key_size,
            value_size=val_size,
            key_space=key_space_size,
            sequential=sequential_keys,
            seed=shared["seed"] + rank,
        )

    run_load("put", Load, requests, **shared)


@bench.command("range", epilog=example("range --clients 100 --consistency s", "range jobs/ jobs0 --limit 10"))
@shared_flags
@write_flags
@click.argument("key", required=False)
@click.argument("end", required=False, default="")
@click.option(
    "--consistency",
    type=click.Choice(["l", "s"]),
    default="l",
    show_default=True,
    help="read consistency: l is linearizable, s is serializable",
)
@number("--limit", 0, 0, "largest number of keys that one read returns; 0 means all")
def range_(
    key: str | None,
    end: str,
    consistency: str,
    limit: int,
    key_size: int,
    val_size: int,
    key_space_size: int,
    **shared: Any,
) -> None:
    """Read keys.

    Each read is of KEY (to END); without KEY, of single keys of a space that is written first.
    """
    keys = [key.encode()] if key is not None else _fill(shared["endpoints"], key_size, val_size, key_space_size)

    def requests(rank: int) -> Iterator[Request]:
        return bench_load.ranges(keys=keys, range_end=end.encode(), limit=limit, serializable=consistency == "s")

    run_load(f"range ({'serializable' if consistency == 's' else 'linearizable'})", Load, requests, **shared)


@bench.command("txn-put", epilog=example("txn-put --txn-ops 10 --clients 100"))
@shared_flags
@write_flags
@click.option(
    "--txn-ops", default=1, show_default=True, type=within(int, 1, 128), metavar="N", help="number of puts in a txn"
)
def txn_put(txn_ops: int, key_size: int, val_size: int, key_space_size: int, **shared: Any) -> None:
    """Put keys in txns."""

    def requests(rank: int) -> Iterator[Request]:
        seed = shared["seed"] + rank
        return bench_load.txns(
            key_size=key_size, value_size=val_size, key_space=key_space_size, operations=txn_ops, seed=seed
        )

    run_load("txn-put", Load, requests, **shared)


@bench.command("mixed", epilog=example("mixed --read-share 0.9 --clients 100"))
@shared_flags
@write_flags
@click.option(
    "--read-share", default=0.75, show_default=True, type=within(float, 0, 1), metavar="X", help="share of reads"
)
def mixed(read_share: float, key_size: int, val_size: int, key_space_size: int, **shared: Any) -> None:
    """Read (linearizably) and put single keys."""
    keys = _fill(shared["endpoints"], key_size, val_size, key_space_size)

    def requests(rank: int) -> Iterator[Request]:
        seed = shared["seed"] + rank
        reads = bench_load.ranges(keys=keys, range_end=b"", limit=0, serializable=False)
        writes = bench_load.puts(
            key_size=key_size, value_size=val_size, key_space=key_space_size, sequential=False, seed=seed
        )
        return bench_load.mixed(reads, writes, read_share, seed)

    run_load("mixed", Load, requests, **shared)


def _fill(endpoints: str, key_size: int, value_size: int, key_space: int) -> list[bytes]:
    """Write a space of keys, and name them in random order."""
    requests = bench_load.puts(key_size=key_size, value_size=value_size, key_space=key_space, sequential=True, seed=1)
    load = Load(endpoints.split(","), clients=min(256, key_space), connections=4, options=client_options())
    try:
        result = asyncio.run(load.run(requests, total=key_space))
    except (RaftKVError, RpcError, OSError) as error:
        raise click.ClickException(str(error)) from None
    if result.errors:
        raise click.ClickException(f"writing the keys to read failed: {result.errors.most_common(1)[0][0]}")
    keys = [PREFIX + number.to_bytes(max(8, key_size), "big")[-key_size:] for number in range(key_space)]
    random.Random(1).shuffle(keys)
    return keys
