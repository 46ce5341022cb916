"""Watchers that count: as many as wanted on as many streams, in a process of their own.

Owns the receiving side of ``bench watch``. What a message holds is looked up by its bytes behind the watch id: these
are the same for all watchers of a key, so a fan-out to a thousand costs one parse and a thousand look-ups. The
generator shares the machine with what it measures.

Each watcher's events are checked: revisions rise (none twice, none out of order), and their number is the number of
puts to its key (none lost). Events that come after the last expected one are not waited for.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Final

from raftkv.cli.bench.load import LoadError, connections
from raftkv.cli.bench.processes import hear_parent, leave_terminal, signals_held_back
from raftkv.client import ClientOptions
from raftkv.client.rpc import methods
from raftkv.errors import RaftKVError
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.status import RpcError
from raftkv.urls import parse_endpoints

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
        for number, key in enumerate(keys, 1):
            request = rpc_pb2.WatchCreateRequest(key=key, watch_id=number)
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
