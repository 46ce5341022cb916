"""Closed-loop load on any etcd v3 endpoints: a number of clients with one concurrent call each.

Creates requests and counts answers. A client is a callback that starts its next call when the last one is answered,
without a separate task: the generator shares the machine with the server, so its own cost reduces the server's share.

    load = Load(endpoints, clients=100, connections=10)
    result = await load.run(puts(key_size=8, value_size=256), total=10_000)
    result.rate, result.percentile_s(99), result.errors
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Final

from raftkv.cli.program import on_signals
from raftkv.client import ClientOptions
from raftkv.client.rpc import methods
from raftkv.client.rpc.transport import channel_arguments
from raftkv.errors import RaftKVError
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.calls import UnaryFuture
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.framing import Metadata
from raftkv.rpc.status import RpcError
from raftkv.urls import Endpoint, parse_endpoints


class CallerChannel(Channel):
    """A channel whose call objects can be reused."""

    def make(self, caller: Caller, path: str, metadata: Metadata) -> None:
        """Start the caller's next call, or queue it until there is a connection with a free stream."""
        caller.headers = self._headers(path, None, metadata)
        self._start(caller, None, None)


def open_channel(endpoint: Endpoint, options: ClientOptions) -> CallerChannel:
    """Return a channel to an endpoint; it connects at the first call.

    Arguments:
        endpoint: endpoint to connect to.
        options: connection settings.
    """
    return CallerChannel(*channel_arguments(endpoint, options))


class Caller(UnaryFuture):
    """One client with one call in flight; it starts the next call when that one is answered.

    The object is reused for each of its calls. As a future it is never done: ``set_result`` ends one call instead. The
    callback that reads an answer also counts it and queues the next request: no future is completed, no callback is
    scheduled, and the loop makes no extra turn. This saves 2 to 4 us per put. With 100 clients, a call costs 17 us on
    10 connections, and 39 us on 100 connections, where each call has a separate read and write.

        Caller(run, open_channel(endpoint, options), metadata).start()
    """

    __slots__ = ("caller_channel", "metadata", "run", "started_at")

    def __init__(self, run: Run, channel: CallerChannel, metadata: Metadata) -> None:
        super().__init__(channel, asyncio.get_running_loop(), (), b"")
        self.caller_channel = channel
        self.metadata = metadata
        self.run = run
        self.started_at = 0.0

    def start(self) -> None:
        """Start the next call, if any is left."""
        self.run.start_next(self._send)

    def _send(self) -> None:
        path, self.request = next(self.run.requests)
        self.assembler = self.core = self.message = None
        self.refusals = 0
        self.started_at = time.perf_counter()
        self.caller_channel.make(self, path, self.metadata)

    def set_result(self, result: bytes) -> None:
        """Count an answer and continue."""
        run = self.run
        run.open -= 1
        run.latencies_s.append(time.perf_counter() - self.started_at)
        run.failed_in_a_row = 0
        self.start()
        run.ended()

    def set_exception(self, exception: BaseException | type[BaseException]) -> None:
        """Count a failure and continue, in the next turn of the loop, because a dead channel fails calls at once."""
        self.run.failed(str(exception))
        self.get_loop().call_soon(self._failed)

    def _failed(self) -> None:
        self.run.open -= 1
        self.start()
        self.run.ended()


class Chain:
    """One client whose calls have several steps; it starts the next call when the last one has ended."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.sent_at = 0.0

    def next(self) -> None:
        """Start the next call, if any is left."""
        self.run.start_next(self._begin)

    def _begin(self) -> None:
        self.sent_at = time.perf_counter()
        self.send()

    def send(self) -> None:
        """Start a call."""
        raise NotImplementedError

    def note_latency(self) -> None:
        """Record the latency of the measured answer."""
        self.run.latencies_s.append(time.perf_counter() - self.sent_at)

    def end(self, error: object = None, *, goes_on: bool = True) -> None:
        """End a call, and start the next one.

        Arguments:
            error: why the call failed; None or empty: it succeeded.
            goes_on: whether there may be a next call.
        """
        self.run.open -= 1
        if error:
            self.run.errors[str(error)] += 1
        if goes_on:
            self.next()
        self.run.ended()


FAILURES_MAX: Final = 1000
"""Consecutive failures after which a run is aborted, because its members are gone."""

Request = tuple[str, bytes]
"""Method path and encoded request."""

Starts = list[Callable[[], None]]
"""Functions that make the first call of each client."""

Make = Callable[["Load", "Run", list[CallerChannel], int], AbstractAsyncContextManager[Starts]]

PREPARED_MAX: Final = 100_000
"""Maximum number of requests encoded before a run starts; further ones are encoded during the run."""

REPORT_EVERY_MAX: Final = 250
"""Maximum number of answers between progress reports, so that a bar moves within a second."""

CONNECT_TIMEOUT_S: Final = 10.0
STALL_TIMEOUT_S: Final = 60.0
"""Seconds without an answer after which a run is aborted. Calls have no deadline, as in etcd's tool."""


@dataclass
class Result:
    """The measurement of a run.

    Attributes:
        latencies_s: latencies of the successful calls, sorted.
        seconds: duration of the run.
        errors: number of failures by text.
        interrupted: whether a signal ended the run before all calls were made.
        processor_s: processor time of the generator during the run.
    """

    latencies_s: list[float]
    seconds: float
    errors: Counter[str] = field(default_factory=Counter)
    interrupted: bool = False
    processor_s: float = 0.0

    @classmethod
    def merged(cls, results: Sequence[Result]) -> Result:
        """Merge the results of concurrent runs."""
        latencies = sorted(latency for result in results for latency in result.latencies_s)
        errors = sum((result.errors for result in results), Counter[str]())
        interrupted = any(result.interrupted for result in results)
        processor_s = sum(result.processor_s for result in results)
        return cls(latencies, max(result.seconds for result in results), errors, interrupted, processor_s)

    @property
    def rate(self) -> float:
        """Successful calls per second."""
        return len(self.latencies_s) / self.seconds if self.seconds else 0.0

    def percentile_s(self, percent: float) -> float:
        """Return the latency that ``percent`` per cent of the calls do not exceed; 0 without calls."""
        if not self.latencies_s:
            return 0.0
        return self.latencies_s[min(len(self.latencies_s) - 1, int(len(self.latencies_s) * percent / 100))]

    @property
    def generator_us(self) -> float:
        """Processor time of the generator per call, in microseconds."""
        return round(self.processor_s / max(1, len(self.latencies_s)) * 1e6, 1)

    def summary(self) -> dict[str, Any]:
        """Return rate, latencies in milliseconds, the generator's own cost and errors, for JSON output."""
        return {
            "rate": round(self.rate, 1),
            "calls": len(self.latencies_s),
            "seconds": round(self.seconds, 3),
            **{f"p{percent}_ms": round(self.percentile_s(percent) * 1000, 3) for percent in (50, 90, 99)},
            "generator_us": self.generator_us,
            "errors": dict(self.errors),
            **({"interrupted": True} if self.interrupted else {}),
        }


def _keys(size: int, space: int, sequential: bool, rng: random.Random) -> Iterator[bytes]:
    number = -1
    width = max(8, size)
    while True:
        number = (number + 1) % space if sequential else int(rng.random() * space)
        # The number comes last, so that keys of any size are spread evenly.
        yield number.to_bytes(width, "big")[-size:]


PREFIX: Final = b"raftkv-bench/"
"""Prefix of all keys that ``raftkvctl bench`` writes; the keys of applications are never touched."""


def puts(*, key_size: int, value_size: int, key_space: int, sequential: bool, seed: int) -> Iterator[Request]:
    """Yield puts of random bytes below ``PREFIX``.

    Arguments:
        key_size, value_size: sizes in bytes, without the prefix.
        key_space: number of different keys.
        sequential: whether to use the keys in order; if False, at random.
        seed: seed of the random choices.
    """
    rng = random.Random(seed)
    # A message is the concatenation of its fields, so the bytes around the key are encoded once, not for each put.
    before = rpc_pb2.PutRequest(key=PREFIX + bytes(key_size)).SerializeToString()[:-key_size]
    after = [rpc_pb2.PutRequest(value=rng.randbytes(value_size)).SerializeToString() for _ in range(64)]
    path = methods.PUT.path
    for key in _keys(key_size, key_space, sequential, rng):
        yield path, before + key + after[key[-1] & 63]


def ranges(*, keys: Sequence[bytes], range_end: bytes, limit: int, serializable: bool) -> Iterator[Request]:
    """Yield reads of the given keys, in order.

    Arguments:
        keys: keys to read.
        range_end: etcd's range end; empty: single keys.
        limit: maximum number of keys per answer; 0: all.
        serializable: whether to read from one member without consulting the others.
    """
    requests = [
        rpc_pb2.RangeRequest(key=key, range_end=range_end, limit=limit, serializable=serializable).SerializeToString()
        for key in keys
    ]
    while True:
        for request in requests:
            yield methods.RANGE.path, request


def txns(*, key_size: int, value_size: int, key_space: int, operations: int, seed: int) -> Iterator[Request]:
    """Yield txns of puts to different keys below ``PREFIX``, without compares, as in etcd's own benchmark.

    Arguments:
        key_size, value_size: sizes in bytes, without the prefix.
        key_space: number of different keys.
        operations: number of puts per txn.
        seed: seed of the random choices.
    """
    rng = random.Random(seed)
    value = rng.randbytes(value_size)
    keys = _keys(key_size, key_space, True, rng)
    while True:
        success = [
            rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=PREFIX + next(keys), value=value))
            for _ in range(operations)
        ]
        yield methods.TXN.path, rpc_pb2.TxnRequest(success=success).SerializeToString()


def mixed(reads: Iterator[Request], writes: Iterator[Request], read_share: float, seed: int) -> Iterator[Request]:
    """Yield a random mixture of reads and writes.

    Arguments:
        reads, writes: requests to choose from.
        read_share: share of reads, 0 to 1.
        seed: seed of the choice.
    """
    rng = random.Random(seed)
    while True:
        yield next(reads if rng.random() < read_share else writes)


class LoadError(RaftKVError):
    """A measurement that was not possible; the text is one line."""


def metadata_of(token: str) -> Metadata:
    """Return the metadata with a user's token; empty without a token."""
    return (("token", token),) if token else ()


@asynccontextmanager
async def callers(load: Load, run: Run, channels: list[CallerChannel], clients: int) -> AsyncIterator[Starts]:
    """Create the clients of a load for the block; other kinds of clients are functions with these arguments.

    Arguments:
        load: endpoints, settings and metadata.
        run: counts their calls.
        channels: open connections.
        clients: number of clients.
    """
    yield [Caller(run, channels[number % len(channels)], load.metadata).start for number in range(clients)]


class Load:
    """Clients on connections.

    Arguments:
        endpoints: endpoints, used by the connections in turn.
        clients: number of concurrent calls.
        connections: number of connections shared by the clients.
        options: connection settings.
        rate: maximum number of calls started per second; 0: no limit.
        duration_s: time after which no call is started; 0: no limit.
        token: token of the user, if the cluster requires one.
        on_progress: called repeatedly with the number of answered calls.
        make: creates the clients; see ``callers``.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        clients: int,
        connections: int,
        options: ClientOptions | None = None,
        rate: float = 0.0,
        duration_s: float = 0.0,
        token: str = "",
        on_progress: Callable[[int], None] | None = None,
        make: Make = callers,
    ) -> None:
        self.endpoints = parse_endpoints(endpoints)
        self._clients = clients
        self._connections = connections
        self.options = options or ClientOptions()
        self._rate = rate
        self._duration_s = duration_s
        self.metadata = metadata_of(token)
        self._on_progress = on_progress
        self._make = make

    async def run(
        self, requests: Iterator[Request], *, total: int, when_connected: Callable[[], object] = lambda: None
    ) -> Result:
        """Make ``total`` calls and measure them; ``when_connected`` is called before the clock starts."""
        # Most requests are encoded before the clock starts: encoding costs as much as sending.
        prepared = chain(list(islice(requests, min(total, PREPARED_MAX))), requests)
        async with connections(self.endpoints, self._connections, self.options, self.metadata) as channels:
            run = Run(prepared, total, self._on_progress, self._rate)
            async with self._make(self, run, channels, min(self._clients, total)) as starts:
                when_connected()
                return await self._measure(run, starts)

    async def _measure(self, run: Run, starts: Starts) -> Result:
        gc.collect()
        collects = gc.isenabled()
        gc.disable()  # calls leave no cycles, and a collection would count as the server's time
        try:
            started = run.begin()
            if self._duration_s:
                asyncio.get_running_loop().call_later(self._duration_s, run.stop)
            for start in starts:
                start()
            await run.wait_finished()
            seconds = time.perf_counter() - started
        finally:
            if collects:
                gc.enable()
        return run.result(seconds)


@asynccontextmanager
async def connections(
    endpoints: Sequence[Endpoint], count: int, options: ClientOptions | None = None, metadata: Metadata = ()
) -> AsyncIterator[list[CallerChannel]]:
    """Yield connections to the endpoints in turn, all of them open before the block starts.

    Arguments:
        endpoints: endpoints to connect to.
        count: number of connections.
        options: connection settings.
        metadata: metadata of the first call of each connection.
    """
    transports = [
        open_channel(endpoints[number % len(endpoints)], options or ClientOptions()) for number in range(count)
    ]
    request = rpc_pb2.StatusRequest().SerializeToString()
    try:
        await asyncio.gather(
            *(transport.unary(methods.STATUS.path, request, CONNECT_TIMEOUT_S, metadata) for transport in transports)
        )
        yield transports
    finally:
        await asyncio.gather(*(transport.close() for transport in transports))


@dataclass
class Run:
    """The calls of one run: those still to be made, and the results of the others."""

    requests: Iterator[Request]
    left: int
    on_progress: Callable[[int], None] | None = None
    rate: float = 0.0
    open: int = 0
    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    failed_in_a_row: int = 0
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.report_every = min(max(1, self.left // 100), REPORT_EVERY_MAX)
        self._interval_s = 1 / self.rate if self.rate else 0.0
        self._next_at = self._processor_before_s = 0.0

    def begin(self) -> float:
        """Start the clocks; earlier work is not part of the result."""
        self._processor_before_s = time.process_time()
        self._next_at = time.perf_counter()
        return self._next_at

    def stop(self) -> None:
        """Start no more calls."""
        self.left = 0

    def interrupt(self) -> None:
        """End the measurement after a signal; the result is what was measured so far."""
        self.interrupted = True
        self.left = 0
        if not self.finished.done():
            self.finished.set_result(None)

    def result(self, seconds: float) -> Result:
        """Return the measurement; calls still in progress are not counted."""
        processor_s = time.process_time() - self._processor_before_s
        return Result(sorted(self.latencies_s), seconds, Counter(self.errors), self.interrupted, processor_s)

    def start_next(self, send: Callable[[], None]) -> None:
        """Start the next call, if one is left: at once, or when the rate allows it."""
        if self.left == 0:
            return
        self.left -= 1
        self.open += 1
        if self._interval_s:
            now = time.perf_counter()
            # A stall is not followed by a burst: the rate is an upper limit.
            self._next_at = max(now - self._interval_s, self._next_at) + self._interval_s
            if self._next_at > now:
                self.finished.get_loop().call_later(self._next_at - now, send)
                return
        send()

    async def wait_finished(self) -> None:
        """Wait for the last answer, or for a signal that ends the run.

        Raises:
            LoadError: no answer for a long time, or a stream has ended.
        """
        open_before = -1
        with on_signals(self.interrupt):
            while not self.finished.done():
                answered = len(self.latencies_s) + self.errors.total()
                if answered == open_before:
                    raise LoadError(f"nothing was answered for {STALL_TIMEOUT_S:.0f} s")
                open_before = answered
                await asyncio.wait([self.finished], timeout=STALL_TIMEOUT_S)
        self.finished.result()

    def failed(self, text: str) -> None:
        """Count a failed call; abort the run after too many consecutive failures."""
        self.errors[text] += 1
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= FAILURES_MAX:
            self.fail(f"{FAILURES_MAX} calls in a row have failed: {text}")

    def fail(self, text: str) -> None:
        """Abort the run; ``wait_finished`` raises the error."""
        self.left = 0
        if not self.finished.done():
            self.finished.set_exception(LoadError(text))

    @asynccontextmanager
    async def streaming(self, calls: Sequence[ClientStream]) -> AsyncIterator[None]:
        """Fail the run when one of the streams ends during the block; cancel the streams at the end of the block."""
        ends = [asyncio.ensure_future(self._fail_with(call)) for call in calls]
        try:
            yield
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*ends)

    async def _fail_with(self, call: ClientStream) -> None:
        try:
            await call.receive()
        except RpcError as error:
            self.fail(str(error))
        else:
            self.fail("a member has ended a stream")

    def ended(self) -> None:
        """Count a call that has ended."""
        answered = len(self.latencies_s)
        if self.on_progress is not None and answered % self.report_every == 0:
            self.on_progress(answered)
        if self.left == 0 and self.open == 0 and not self.finished.done():
            self.finished.set_result(None)
