"""``raftkvctl bench``: measure any etcd v3 cluster.

Rates and latencies are those of a closed loop: every client waits for an answer before its next request. Flags have the
names and the meaning of etcd's own benchmark tool, if it has them; ``cli.ctl.tree`` describes them. This module
contains the load processes and ``Bench``, which all commands share; then the commands: reads and writes of keys, leases
and locks, watches.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, pairwise
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from raftkv.cli.bench import load as bench_load
from raftkv.cli.bench.load import (
    PREFIX,
    CallerChannel,
    Chain,
    Load,
    LoadError,
    Make,
    Request,
    Result,
    Run,
    Starts,
    callers,
    connections,
    metadata_of,
)
from raftkv.cli.command import Invocation
from raftkv.cli.ctl.kv import is_serializable
from raftkv.cli.ctl.session import Session, open_library, remark
from raftkv.cli.pflag import text_bytes
from raftkv.cli.program import CTRL_C, ERROR, CommandError, refused
from raftkv.cli.table import progress_bar
from raftkv.client import Client
from raftkv.client.rpc import methods
from raftkv.client.rpc.transport import Transport
from raftkv.client.scope import prefix_end
from raftkv.errors import RaftKVError
from raftkv.pb import lock_pb2, rpc_pb2
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.framing import Metadata
from raftkv.rpc.status import RpcError
from raftkv.urls import parse_endpoints

# -- processes ------------------------------------------------------------------------------------------------------
#
# Load from several processes, because one Python process is too slow for a fast cluster.
#
# The parent forks before it has threads or a loop. Each child connects, reports this, waits for the parent's word, and
# sends its measurement back through a pipe; a child that fails sends the reason instead. Only the parent handles
# Ctrl-C, and passes it on once; children then send the measurement so far. Signals are blocked while processes are
# forked, so that none arrives before its handler is installed.

PROGRESS_S: Final = 0.2
_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)

Work = Callable[[Connection], Awaitable[object]]
"""What a child does; takes its end of the pipe, and returns the answer."""


class Child:
    """A process that measures; must be created inside ``signals_held_back``."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_run_child, args=(work, other), daemon=True)
        self.process.start()
        other.close()

    def receive(self) -> Any:
        """Wait for the child's next message and return it.

        Raises:
            LoadError: the child could not measure.
        """
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise LoadError("a process of the measurement ended without an answer") from None
        if isinstance(answer, LoadError):
            raise answer
        return answer

    def stop(self) -> None:
        """Kill the process, if it is running."""
        self.process.kill()
        self.process.join()


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Block SIGINT and SIGTERM until the end of the block; a child forked in it unblocks them in ``_run_child``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_child(work: Work, pipe: Connection) -> None:
    """Run the work in a child until it has sent its answer, or until the parent has ended.

    The terminal's Ctrl-C is ignored here. The parent passes it on, and it is handled once there is a loop: an interrupt
    while the loop is being created would leave it incomplete and print a traceback.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    async def heard() -> object:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)
        return await work(pipe)

    answer: object = LoadError("interrupted")
    with suppress(KeyboardInterrupt):
        try:
            answer = asyncio.run(heard())
        except* (RaftKVError, RpcError, OSError, EOFError) as group:
            answer = LoadError(str(group.exceptions[0]) or "a process could not begin in time")
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # do not interrupt the sending of the answer
    with suppress(BrokenPipeError):  # the parent was killed
        pipe.send(answer)


def run_in_processes(
    make_load: Callable[[int, Callable[[int], None]], Load],
    make_requests: Callable[[int], Iterator[Request]],
    total: int,
    processes: int,
    on_progress: Callable[[int], None] = lambda answered: None,
) -> Result:
    """Make ``total`` calls from several processes.

    Arguments:
        make_load, make_requests: create the load and the requests of a process by its rank; ``make_load`` also receives
            a callback for progress.
        total: number of calls of all processes together.
        processes: number of processes.
        on_progress: called repeatedly with the number of answered calls.

    Raises:
        LoadError: a process could not measure.
    """
    answered = multiprocessing.get_context("fork").Array("q", processes, lock=False)

    async def measure(rank: int, pipe: Connection) -> Result:
        load = make_load(rank, lambda count: answered.__setitem__(rank, count))
        share = total // processes + (rank < total % processes)
        return await load.run(make_requests(rank), total=share, when_connected=lambda: _await_word(pipe))

    with ExitStack() as stack:
        with signals_held_back():
            children = [Child(partial(measure, rank)) for rank in range(processes)]
            for child in children:
                stack.callback(child.stop)
            stack.enter_context(_passing_on_signals(children))
        for child in children:
            child.receive()
        for child in children:
            child.pipe.send("begin")
        pipes = [child.pipe for child in children]
        while waiting := [pipe for pipe in pipes if not pipe.poll()]:
            wait(waiting, PROGRESS_S)
            on_progress(sum(answered))
        return Result.merged([child.receive() for child in children])


def _await_word(pipe: Connection) -> None:
    pipe.send("ready")
    pipe.recv()


@contextmanager
def _passing_on_signals(children: list[Child]) -> Iterator[None]:
    """Pass the first SIGINT or SIGTERM to the children; a second one ends this process."""
    before = [signal.getsignal(number) for number in _NUMBERS]

    def pass_on(number: int, frame: object) -> None:
        restore()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child.process.pid or 0, signal.SIGINT)

    def restore() -> None:
        for number, handler in zip(_NUMBERS, before, strict=True):
            signal.signal(number, handler)

    for number in _NUMBERS:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        restore()


# -- measurements ---------------------------------------------------------------------------------------------------


class Bench:
    """One measurement.

    Arguments:
        invocation: parsed command line.

    Attributes:
        session: session of the command.
        as_json: whether to print JSON.
        members: endpoints to measure.
        token: token of the user; empty: no user.
    """

    def __init__(self, invocation: Invocation) -> None:
        gc.enable()  # a measurement runs for a long time
        self._invocation = invocation
        self.session, self.as_json = open_library(invocation)
        self.members = self.session.endpoints
        self.token = fetch_token(self.session)

    def __getitem__(self, flag: str) -> Any:
        return self._invocation[flag]

    def load(self, members: list[str], **more: Any) -> Load:
        """Return the clients of one process, for the user of the session."""
        return Load(members, options=self.session.options, token=self.token, **more)

    def members_of(self, rank: int) -> list[str]:
        """Return the members for a process of this rank, in order; each rank starts with another member."""
        first = rank % len(self.members)
        return self.members[first:] + self.members[:first]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Allow a measurement to write below ``PREFIX``: announce this first, and delete the keys afterwards."""
        self.session.run(lambda client: _delete_keys(client, self.session, limit=0))  # fails early without a cluster
        keeps, prefix = self["keep-keys"], PREFIX.decode()
        if not self.as_json:
            end = "the keys stay" if keeps else "the keys are deleted at the end"
            remark(f"writes below {prefix}; {end}, their history is compacted later")
        try:
            yield
        finally:
            if not keeps:
                try:
                    self.session.run(lambda client: _delete_keys(client, self.session))
                except CommandError as error:  # the measurement's own error must be the last line
                    remark(f"the keys below {prefix} were not deleted: {error}")

    def run(
        self,
        name: str,
        requests: Callable[[int], Iterator[Request]] = lambda rank: iter(()),
        make: Make = callers,
        *,
        rate: float = 0.0,
        is_strict: bool = False,
    ) -> None:
        """Measure and print.

        Arguments:
            name: name of the measurement.
            requests: returns the requests of a process by its rank.
            make, rate: as for ``Load``.
            is_strict: whether one failed call makes the command fail; if False, only if all calls failed.

        Raises:
            CommandError: the measurement failed, or was interrupted.
        """
        processes, total = self["processes"], self["total"]

        def share(rank: int, on_progress: Callable[[int], None]) -> Load:
            clients = max(1, self["clients"] // processes + (rank < self["clients"] % processes))
            sizes = {"clients": clients, "connections": max(1, self["conns"] // processes)}
            return self.load(self.members_of(rank), **sizes, rate=rate, make=make, on_progress=on_progress)

        with refused(FAILURES), call_bar(total, hidden=self.as_json) as on_progress:
            if processes > 1:
                result = run_in_processes(share, requests, total, processes, on_progress)
            else:
                result = asyncio.run(share(0, on_progress).run(requests(0), total=total))
        self._print(name, result)
        end(result, failed=bool(result.errors) if is_strict else not result.latencies_s)

    def _print(self, name: str, result: Result) -> None:
        """Print rate and latencies, for people or as one JSON object."""
        summary = result.summary()
        if self.as_json:
            print(json.dumps({"name": name, **summary}))
            return
        note = " (interrupted)" if result.interrupted else ""
        print(f"{name}: {summary['rate']:,.0f}/s, {summary['calls']:,} calls in {summary['seconds']:.2f} s{note}")
        latencies = "  ".join(f"p{percent} {summary[f'p{percent}_ms']:.2f} ms" for percent in (50, 90, 99))
        print(f"  {latencies}  generator {summary['generator_us']:.0f} us of processor time a call")
        for text, count in result.errors.most_common(5):
            print(f"  {count} failed: {text}")


async def _delete_keys(client: Client, session: Session, limit: int = 10_000) -> None:
    """Delete all keys of measurements, ``limit`` at a time; with limit 0, only check that they can be read."""
    end = prefix_end(PREFIX)
    while True:
        request = rpc_pb2.RangeRequest(key=PREFIX, range_end=end, limit=limit, keys_only=True, count_only=not limit)
        found = await client.call(methods.RANGE, request, timeout_s=session.timeout_s)
        if not found.kvs:
            return
        delete = rpc_pb2.DeleteRangeRequest(key=PREFIX, range_end=found.kvs[-1].key + b"\0")
        await client.call(methods.DELETE_RANGE, delete, timeout_s=session.timeout_s)


def fetch_token(session: Session) -> str:
    """Return the client's token, because the load makes calls without the client."""
    return session.run(lambda client: client.fetch_token(session.timeout_s))


def end(result: Result, *, failed: bool) -> None:
    """Raise an error after a measurement that was interrupted or failed; otherwise do nothing.

    Arguments:
        result: result of the measurement.
        failed: whether calls failed.

    Raises:
        CommandError: with the exit code, and without text.
    """
    if result.interrupted or failed:
        raise CommandError("", CTRL_C if result.interrupted else ERROR)


FAILURES: Final = (RaftKVError, RpcError, OSError)
"""The errors that a load can raise."""


@contextmanager
def call_bar(total: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal during the block; yield a function that takes the number of answered calls."""
    with progress_bar("calls", ("MofNComplete", "TimeRemaining"), total, hidden=hidden) as update:
        yield lambda answered: update(completed=answered)


# -- reads and writes --------------------------------------------------------------------------------------------------


def put(invocation: Invocation) -> None:
    """Put keys."""
    bench = Bench(invocation)
    sequential = bench["sequential-keys"]
    with bench.writing():
        bench.run("put", lambda rank: bench_load.puts(**_sizes(bench), sequential=sequential, seed=rank))


def read(invocation: Invocation) -> None:
    """Read keys."""
    bench = Bench(invocation)
    serializable = is_serializable(invocation)
    key, end = [*map(text_bytes, invocation.arguments), None, b""][:2]
    limits = {"range_end": end or b"", "limit": bench["limit"], "serializable": serializable}
    with bench.writing():
        keys = [key] if key is not None else _fill(bench)
        name = f"range ({'serializable' if serializable else 'linearizable'})"
        bench.run(name, lambda rank: bench_load.ranges(keys=keys, **limits))


def txn_put(invocation: Invocation) -> None:
    """Put keys in txns."""
    bench = Bench(invocation)
    count = bench["txn-ops"]
    with bench.writing():
        bench.run("txn-put", lambda rank: bench_load.txns(**_sizes(bench), operations=count, seed=rank))


def mixed(invocation: Invocation) -> None:
    """Read (linearizably) and put single keys."""
    bench = Bench(invocation)
    with bench.writing():
        keys = _fill(bench)

        def requests(rank: int) -> Iterator[Request]:
            reads = bench_load.ranges(keys=keys, range_end=b"", limit=0, serializable=False)
            writes = bench_load.puts(**_sizes(bench), sequential=False, seed=rank)
            return bench_load.mixed(reads, writes, bench["read-share"], rank)

        bench.run("mixed", requests)


def _sizes(bench: Bench) -> dict[str, int]:
    return {"key_size": bench["key-size"], "value_size": bench["val-size"], "key_space": bench["key-space-size"]}


def _fill(bench: Bench) -> list[bytes]:
    """Write a set of keys; return them in random order."""
    space, size = bench["key-space-size"], bench["key-size"]
    load = bench.load(bench.session.endpoints, clients=min(256, space), connections=4)
    with refused(FAILURES):
        result = asyncio.run(load.run(bench_load.puts(**_sizes(bench), sequential=True, seed=1), total=space))
    if result.errors:
        raise CommandError(f"writing the keys to read failed: {result.errors.most_common(1)[0][0]}", ERROR)
    keys = [PREFIX + number.to_bytes(max(8, size), "big")[-size:] for number in range(space)]
    random.Random(1).shuffle(keys)
    return keys


# -- leases and locks -----------------------------------------------------------------------------------------------
#
# ``bench lease-keepalive`` and ``bench lock``: renewals on streams, and repeated acquisition of locks.

SETUP_TIMEOUT_S: Final = 60.0
TTL_S: Final = 3600
"""Longer than any run, so that no lease expires during the measurement."""


def lease_keepalive(invocation: Invocation) -> None:
    """Renew leases."""
    bench = Bench(invocation)
    bench.run("lease-keepalive", make=partial(_renewals, bench["leases"] / bench["clients"]))


def lock(invocation: Invocation) -> None:
    """Acquire and release locks."""
    bench = Bench(invocation)
    bench.run("lock", make=partial(_locks, bench["locks"]))


@asynccontextmanager
async def _renewals(
    leases: float, load: Load, run: Run, channels: list[CallerChannel], clients: int
) -> AsyncIterator[Starts]:
    """Create streams that renew leases: a number for each client, at least one."""
    ids = await grant(channels, load.metadata, max(clients, int(leases * clients)))
    made = [
        _Renewing(run, channels[number % len(channels)].stream(methods.LEASE_KEEP_ALIVE.path, load.metadata), ids_of)
        for number in range(clients)
        if (ids_of := ids[number::clients])
    ]
    async with run.streaming([client.call for client in made]):
        yield [client.next for client in made]
    await revoke(channels, load.metadata, ids)


class _Renewing(Chain):
    """One client: renews a lease, waits for the answer, renews the next."""

    def __init__(self, run: Run, call: ClientStream, ids: list[int]) -> None:
        super().__init__(run)
        self.call = call
        self._requests = cycle(rpc_pb2.LeaseKeepAliveRequest(ID=lease_id).SerializeToString() for lease_id in ids)
        call.deliver_to(self._take)

    def send(self) -> None:
        """Implement ``Chain.send``."""
        try:
            self.call.send_nowait(next(self._requests))
        except RpcError as error:
            self.end(error, goes_on=False)

    def _take(self, message: bytes) -> None:
        lives = rpc_pb2.LeaseKeepAliveResponse.FromString(message).TTL > 0
        if lives:
            self.note_latency()
        self.end("" if lives else "the lease has expired")


@asynccontextmanager
async def _locks(
    count: int, load: Load, run: Run, channels: list[CallerChannel], clients: int
) -> AsyncIterator[Starts]:
    """Create contenders for a number of lock names."""
    ids = await grant(channels, load.metadata, clients)
    # A lease belongs to one process, so its id makes the lock names unique to this process.
    names = [f"bench-lock/{ids[0]:x}/{number}".encode() for number in range(count)]
    holders = dict.fromkeys(names, 0)
    made = []
    for number, lease_id in enumerate(ids):
        call = partial(channels[number % len(channels)].unary, metadata=load.metadata)
        made.append(_Contender(run, call, names[number % len(names)], lease_id, holders).next)
    yield made
    await revoke(channels, load.metadata, ids)


class _Contender(Chain):
    """One client: acquires and releases locks repeatedly."""

    def __init__(
        self, run: Run, call: Callable[..., Any], name: bytes, lease_id: int, holders: dict[bytes, int]
    ) -> None:
        super().__init__(run)
        self._call = call
        self._name = name
        self._holders = holders
        self._request = lock_pb2.LockRequest(name=name, lease=lease_id).SerializeToString()

    def send(self) -> None:
        """Implement ``Chain.send``."""
        self._call(methods.LOCK.path, self._request).add_done_callback(self._acquired)

    def _acquired(self, future: asyncio.Future[bytes]) -> None:
        error = future.exception()
        if error is not None:
            self.end(error)
            return
        self.note_latency()
        if self._holders[self._name]:
            self.run.errors["two clients hold one lock"] += 1
        self._holders[self._name] += 1
        # Released only in the loop's next turn, so that a second acquisition arriving together with this one is
        # detected above.
        asyncio.get_running_loop().call_soon(self._release, lock_pb2.LockResponse.FromString(future.result()).key)

    def _release(self, key: bytes) -> None:
        self._holders[self._name] -= 1
        request = lock_pb2.UnlockRequest(key=key).SerializeToString()
        self._call(methods.UNLOCK.path, request).add_done_callback(lambda future: self.end(future.exception()))


async def grant(transports: Sequence[Transport], metadata: Metadata, count: int) -> list[int]:
    """Grant ``count`` leases, and return their ids."""
    request = rpc_pb2.LeaseGrantRequest(TTL=TTL_S).SerializeToString()
    answers = await _all(transports, metadata, methods.LEASE_GRANT.path, [request] * count)
    return [rpc_pb2.LeaseGrantResponse.FromString(answer).ID for answer in answers]


async def revoke(transports: Sequence[Transport], metadata: Metadata, ids: list[int]) -> None:
    """Revoke the leases of a run, if the cluster still answers."""
    requests = [rpc_pb2.LeaseRevokeRequest(ID=lease_id).SerializeToString() for lease_id in ids]
    with suppress(LoadError):
        await _all(transports, metadata, methods.LEASE_REVOKE.path, requests)


async def _all(transports: Sequence[Transport], metadata: Metadata, path: str, requests: list[bytes]) -> list[bytes]:
    calls = [
        transports[number % len(transports)].unary(path, request, SETUP_TIMEOUT_S, metadata)
        for number, request in enumerate(requests)
    ]
    try:
        return list(await asyncio.gather(*calls))
    except RpcError as error:
        raise LoadError(f"the leases of the run: {error}") from None


# -- watches --------------------------------------------------------------------------------------------------------
#
# ``bench watch`` and ``bench watch-latency``: the rate and latency of event delivery.
#
# Counting watchers: any number of watchers on any number of streams, in a separate process.
#
# This is the receiving side of ``bench watch``. The content of a message is looked up by its bytes after the watch id.
# These are the same for all watchers of a key, so a fan-out to a thousand watchers costs one parse and a thousand
# look-ups. This matters because the generator shares the machine with the cluster.
#
# Each watcher's events are checked: revisions increase (none repeated or out of order), and their number is the number
# of puts to its key (none lost). Events after the last expected one are not awaited.

STALL_TIMEOUT_S: Final = 30.0
"""Time without an event after which the missing events count as lost."""

CREATE_TIMEOUT_S: Final = 120.0
REMEMBERED_MAX: Final = 1024
_WATCH_ID_TAG: Final = 0x10
_HEADER_TAG: Final = 0x0A


@dataclass
class WatchCount:
    """The events received by one process.

    Attributes:
        events: number of events of all watchers.
        messages: number of messages with these events.
        wrong: watchers whose number of events differs from the number of puts.
        disordered: events whose revision was not above the previous one.
        finished_at: time of the last event, on the monotonic clock.
        processor_s: processor time of the counting.
    """

    events: int
    messages: int
    wrong: int
    disordered: int
    finished_at: float
    processor_s: float


class Arrivals:
    """The events still expected by all streams of a process; ``changed`` is set when a stream is complete."""

    def __init__(self, watchers: int, events: int) -> None:
        self.watchers = watchers
        self.events = events
        self.error = ""
        self.changed = asyncio.Event()

    def fail(self, text: str) -> None:
        """Abort the measurement."""
        self.error = self.error or text
        self.changed.set()


class CountingStream:
    """The watchers of one stream; their ids are 1, 2, 3 in the order of their keys."""

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
        """Count one message. Its header is shorter than 128 bytes, because it consists of four numbers."""
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


async def _watch(
    bench: Bench, rank: int, keys_of: list[tuple[bytes, ...]], expected: list[list[int]], pipe: Connection
) -> WatchCount:
    """Report that all watchers exist, count until the puts are done and all events have come; return the count.

    Arguments:
        bench: the measurement.
        rank: rank of this process.
        keys_of: for each stream, the key of each watcher.
        expected: for each stream, the number of events that each watcher must get.
        pipe: the child's end of the pipe.
    """
    arrivals = Arrivals(sum(map(len, keys_of)), sum(map(sum, expected)))
    endpoints, metadata = parse_endpoints(bench.members_of(rank)), metadata_of(bench.token)
    count = max(1, bench["conns"] // bench["processes"])
    async with connections(endpoints, count, bench.session.options, metadata) as transports:
        streams = [
            CountingStream(transports[number % len(transports)].stream(methods.WATCH.path, metadata), keys, arrivals)
            for number, keys in enumerate(keys_of)
        ]
        async with asyncio.TaskGroup() as tasks:
            ends = [tasks.create_task(_note_end(stream, arrivals)) for stream in streams]
            await _wait(arrivals, lambda: not arrivals.watchers, CREATE_TIMEOUT_S)
            gc.collect()
            gc.disable()
            processor_before_s = time.process_time()
            pipe.send("ready")
            finished_at = await _wait_events(arrivals, pipe)
            processor_s = time.process_time() - processor_before_s
            for end in ends:
                end.cancel()
    return _count(streams, expected, finished_at, processor_s)


async def _note_end(stream: CountingStream, arrivals: Arrivals) -> None:
    try:
        await stream.call.receive()
    except RpcError as error:
        arrivals.fail(str(error))
    else:
        arrivals.fail("a member has ended a watch stream")


async def _wait(arrivals: Arrivals, reached: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a condition that sets ``changed``. Raises TimeoutError, and LoadError when something has failed."""
    async with asyncio.timeout(timeout_s):
        while not reached() and not arrivals.error:
            arrivals.changed.clear()
            await arrivals.changed.wait()
    if arrivals.error:
        raise LoadError(arrivals.error)


async def _wait_events(arrivals: Arrivals, pipe: Connection) -> float:
    """Wait until the puts are done and all events have come, none came for a long time, or a signal stops it.

    Returns:
        The time of the last event.
    """
    loop = asyncio.get_running_loop()
    puts = loop.run_in_executor(None, pipe.recv)
    puts.add_done_callback(lambda _: arrivals.changed.set())
    finished_at = 0.0

    def is_stopped() -> bool:
        return puts.done() and puts.result() == "stop"

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


def _count(
    streams: list[CountingStream], expected: list[list[int]], finished_at: float, processor_s: float
) -> WatchCount:
    wrong = 0
    for stream, numbers in zip(streams, expected, strict=True):
        wrong += sum(got != wanted for got, wanted in zip(stream.counts[1:], numbers, strict=True))
    return WatchCount(
        events=sum(map(sum, (stream.counts for stream in streams))),
        messages=sum(stream.messages for stream in streams),
        wrong=wrong,
        disordered=sum(stream.disordered for stream in streams),
        finished_at=finished_at,
        processor_s=processor_s,
    )


EVENT_TIMEOUT_S: Final = 30.0


def watch(invocation: Invocation) -> None:
    """Put keys and deliver each event to all its watchers."""
    bench = Bench(invocation)
    keys = [PREFIX + b"watch/%08d" % number for number in range(bench["watched-key-total"])]
    total, idle = bench["total"], bench["idle"]
    puts = {} if idle else {key: total // len(keys) + (at < total % len(keys)) for at, key in enumerate(keys)}
    layout = _layout(keys, bench["streams"], bench["watch-per-stream"])
    children: list[Child] = []
    with bench.writing(), refused(FAILURES):
        try:
            with signals_held_back():
                children += map(Child, _shares(bench, layout, puts))
            started_at, result = _run_puts(bench, keys, children)
            counts = []
            for child in children:
                child.pipe.send("stop" if result.interrupted else "done")
                counts.append(child.receive())
        finally:
            for child in children:
                child.stop()
        summary = _summary(counts, started_at, result, len(layout) * bench["watch-per-stream"], idle)
        expected = sum(puts.get(key, 0) for stream in layout for key in stream)
        _print_watch({**summary, "expected": expected}, bench.as_json)
        end(result, failed=bool(summary["wrong"] or summary["disordered"] or result.errors))


def _layout(keys: Sequence[bytes], streams: int, per_stream: int) -> list[tuple[bytes, ...]]:
    """Return the keys of each stream's watchers, assigning the keys in turn."""
    return [
        tuple(keys[(stream * per_stream + number) % len(keys)] for number in range(per_stream))
        for stream in range(streams)
    ]


def _shares(bench: Bench, layout: list[tuple[bytes, ...]], puts: dict[bytes, int]) -> Iterator[Work]:
    """Yield the work of each process: its share of the streams."""
    processes = bench["processes"]
    for rank in range(min(processes, len(layout))):
        streams = layout[rank::processes]
        yield partial(_watch, bench, rank, streams, [[puts.get(key, 0) for key in stream] for stream in streams])


def _run_puts(bench: Bench, keys: Sequence[bytes], children: Sequence[Child]) -> tuple[float, Result]:
    """Put the keys in turn; return the start time and the result."""
    started_at = 0.0

    def begin() -> None:
        nonlocal started_at
        for child in children:
            child.receive()
        started_at = time.perf_counter()

    written = [key.replace(b"/watch/", b"/idle/") for key in keys] if bench["idle"] else keys
    requests = (rpc_pb2.PutRequest(key=key, value=bytes(bench["val-size"])).SerializeToString() for key in written)
    with call_bar(bench["total"], hidden=bench.as_json) as on_progress:
        sizes = {"clients": bench["clients"], "connections": 1, "rate": bench["put-rate"]}
        load = bench.load(bench.members[:1], **sizes, on_progress=on_progress)
        puts = ((methods.PUT.path, request) for request in cycle(requests))
        result = asyncio.run(load.run(puts, total=bench["total"], when_connected=begin))
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
        print(json.dumps(summary))
        return
    print(
        f"{summary['name']}: {summary['rate']:,.0f} events/s, {summary['events']:,} of {summary['expected']:,} events "
        f"to {summary['watchers']:,} watchers in {summary['seconds']:.2f} s"
        + (" (interrupted)" if summary.get("interrupted") else "")
    )
    print(
        f"  puts {summary['put_rate']:,.0f}/s  p50 {summary['put_p50_ms']:.2f} ms  p99 {summary['put_p99_ms']:.2f} ms"
    )
    if summary["wrong"] or summary["disordered"]:
        print(f"  {summary['wrong']} watchers miss events or got some twice, {summary['disordered']} out of order")
    for text, count in summary["errors"].items():
        print(f"  {count} puts failed: {text}")


def watch_latency(invocation: Invocation) -> None:
    """Measure the time from a put to its event."""
    bench = Bench(invocation)
    with bench.writing():
        puts = partial(_watched_puts, bench["val-size"])
        bench.run("watch-latency", make=puts, rate=bench["put-rate"], is_strict=True)


@asynccontextmanager
async def _watched_puts(
    value_size: int, load: Load, run: Run, channels: list[CallerChannel], clients: int
) -> AsyncIterator[Starts]:
    """Create clients that put a key, and wait for its event."""
    async with connections(load.endpoints, len(channels), load.options, load.metadata) as watching:
        chains = []
        for number in range(clients):
            at, key = number % len(channels), PREFIX + b"latency/%d/%d" % (os.getpid(), number)
            call = watching[at].stream(methods.WATCH.path, load.metadata)
            put = partial(channels[at].unary, metadata=load.metadata)
            chains.append(_PutAndEvent(run, put, call, key, value_size))
        async with asyncio.timeout(EVENT_TIMEOUT_S):
            await asyncio.gather(*(chain.watching for chain in chains))
        async with run.streaming([chain.call for chain in chains]):
            yield [chain.next for chain in chains]


class _PutAndEvent(Chain):
    """One key: puts, waits for the event, puts again."""

    def __init__(self, run: Run, put: Callable[..., Any], call: ClientStream, key: bytes, value_size: int) -> None:
        super().__init__(run)
        self.watching: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call = call
        self._put = put
        self._request = rpc_pb2.PutRequest(key=key, value=bytes(value_size)).SerializeToString()
        call.deliver_to(self._take)
        request = rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=key))
        call.send_nowait(request.SerializeToString())

    def send(self) -> None:
        """Implement ``Chain.send``."""
        self._put(methods.PUT.path, self._request).add_done_callback(self._answered)

    def _answered(self, future: asyncio.Future[bytes]) -> None:
        if error := future.exception():  # its event never comes, so the chain ends here
            self.end(error, goes_on=False)

    def _take(self, message: bytes) -> None:
        response = rpc_pb2.WatchResponse.FromString(message)
        if response.created:
            self.watching.set_result(None)
            return
        for _ in response.events:
            self.note_latency()
            self.end()
