"""The load of a large Kubernetes cluster on raftkv and on real etcd 3.5.1, in one run.

    python -m bench.kubernetes                   5,000 nodes, 150,000 pods, 30,000 watches; about 15 minutes
    python -m bench.kubernetes --scale 0.02      a quick look, under two minutes
    python -m bench.kubernetes --write           put the table into docs/reference/kubernetes.md

Requests are those of API servers: objects change by a txn on their mod_revision, whose failure branch reads; lists come
in pages of one revision; each watch is on one object, with a hundred watches on each stream. Three members and the load
generator share the cores of this machine, the programs take turns, and the median over the rounds counts. Rows, in
order:

    renew      each node's lease object is renewed every 10 s; latency counts from the time when a renewal was due
    renew-max  the same, with 100 concurrent renewals, as fast as possible
    list       all pods in pages of 10,000, as an API server fills its cache, while leases are renewed
    watch      pods change, 100 concurrently; latency is from the request until the watch has the event
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from bench.report import Figures, beside, finish, latencies_ms, machine, medians, parser_of
from bench.stage import alternate, memory_mib, open_watches, pids_of, processor_s, progress
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.limits import ChannelOptions
from tests.procs import Cluster, Program

LEASE_BYTES, POD_BYTES = 400, 1_000
RENEW_EVERY_S: Final = 10.0
PAGE: Final = 10_000
AT_A_TIME: Final = 100
"""Number of concurrent calls, of puts in a txn that fills the store, and of watches on a stream."""
CONNECTIONS: Final = 12
EVENTS_TIMEOUT_S: Final = 120.0
ANSWER_MAX_BYTES: Final = 256 * 1024 * 1024
PODS, PODS_END = b"/registry/pods/default/", b"/registry/pods/default0"


@dataclass
class Measured:
    """The results of a row: the duration of each call, the duration of the row, and the number of units."""

    times_s: list[float]
    seconds: float
    units: int

    def figures(self, cpu_s: float) -> Figures:
        """Return the rate, the slowest hundredth, and the members' processor time per unit."""
        times = latencies_ms(self.times_s)
        rate, cpu_us = self.units / self.seconds, cpu_s / self.units * 1e6
        return {"rate": rate, "p50_ms": times["p50_ms"], "p99_ms": times["p99_ms"], "cpu_us": cpu_us}


@dataclass(frozen=True)
class Sizes:
    """The size of the cluster, and the duration of a row."""

    nodes: int
    pods: int
    watches: int
    seconds: float

    @classmethod
    def scaled(cls, scale: float) -> Sizes:
        """Return the largest cluster that Kubernetes supports, times a factor."""
        nodes, pods, watches = (max(1, int(size * scale)) for size in (5_000, 150_000, 30_000))
        return cls(nodes, pods, watches, max(2.0, 20.0 * min(1.0, scale * 5)))


class Objects:
    """Objects of one kind, each with the revision known to the API server."""

    def __init__(self, prefix: bytes, count: int, size_bytes: int) -> None:
        self.keys = [prefix + b"object-%06d" % number for number in range(count)]
        self.revisions = [0] * count
        self._size_bytes = size_bytes

    def put(self, number: int) -> rpc_pb2.RequestOp:
        """Return the put of an object's next value, which contains the time and padding."""
        value = (b"%020d" % time.monotonic_ns()).ljust(self._size_bytes, b"v")
        return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=self.keys[number], value=value))

    def update(self, number: int) -> bytes:
        """Return the txn that changes an object if its revision is still the known one."""
        key = self.keys[number]
        same = rpc_pb2.Compare(key=key, target=rpc_pb2.Compare.MOD, mod_revision=self.revisions[number])
        read = rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))
        return rpc_pb2.TxnRequest(compare=[same], success=[self.put(number)], failure=[read]).SerializeToString()


class Load:
    """The API servers of one etcd or raftkv cluster.

    Arguments:
        channels: channels to all members.
        sizes: size of the Kubernetes cluster.
    """

    def __init__(self, channels: Sequence[Channel], sizes: Sizes) -> None:
        self.sizes = sizes
        self.leases = Objects(b"/registry/leases/kube-node-lease/", sizes.nodes, LEASE_BYTES)
        self.pods = Objects(PODS, sizes.pods, POD_BYTES)
        self._channels = channels
        self._event_s: list[float] = []
        self._readers: list[asyncio.Task[None]] = []

    async def fill(self) -> None:
        """Create all objects, a hundred in each txn."""
        for objects in (self.leases, self.pods):
            for first in range(0, len(objects.keys), AT_A_TIME):
                numbers = range(first, min(first + AT_A_TIME, len(objects.keys)))
                request = rpc_pb2.TxnRequest(success=map(objects.put, numbers)).SerializeToString()
                data = await self._channels[0].unary(methods.TXN.path, request)
                revision = rpc_pb2.TxnResponse.FromString(data).header.revision
                objects.revisions[first : first + AT_A_TIME] = [revision] * len(numbers)

    async def _update(self, objects: Objects, number: int) -> None:
        data = await self._channels[number % CONNECTIONS].unary(methods.TXN.path, objects.update(number))
        answer = rpc_pb2.TxnResponse.FromString(data)
        if not answer.succeeded:
            raise SystemExit(f"bench: {objects.keys[number]!r} was changed by another: the answer is wrong")
        objects.revisions[number] = answer.header.revision

    async def renew(self) -> Measured:
        """Renew leases when due, for the duration of a row."""
        times: list[float] = []
        rate = self.sizes.nodes / RENEW_EVERY_S
        begun = time.perf_counter()

        async def renew(number: int, due: float) -> None:
            await self._update(self.leases, number)
            times.append(time.perf_counter() - due)

        async with asyncio.TaskGroup() as renewals:
            for number in range(max(1, min(self.sizes.nodes, int(self.sizes.seconds * rate)))):
                due = begun + number / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                renewals.create_task(renew(number, due))
        return Measured(times, time.perf_counter() - begun, len(times))

    async def change(self, objects: Objects, count: int) -> Measured:
        """Change the first ``count`` objects in turn, a hundred concurrently; never one object twice at once."""
        times: list[float] = []
        begun = time.perf_counter()
        end = begun + self.sizes.seconds
        workers = min(AT_A_TIME, count)

        async def work(worker: int) -> None:
            number = worker
            while (started := time.perf_counter()) < end:
                await self._update(objects, number)
                times.append(time.perf_counter() - started)
                number = number + workers if number + workers < count else worker

        await asyncio.gather(*map(work, range(workers)))
        return Measured(times, time.perf_counter() - begun, len(times))

    async def list(self) -> Measured:
        """List all pods repeatedly; the rate counts pods, the latencies are those of pages."""
        times: list[float] = []
        renewals = asyncio.create_task(self.renew())
        begun, pods = time.perf_counter(), 0
        while not pods or time.perf_counter() - begun < self.sizes.seconds:
            key, revision, more, found = PODS, 0, True, 0
            while more:
                request = rpc_pb2.RangeRequest(key=key, range_end=PODS_END, limit=PAGE, revision=revision)
                started = time.perf_counter()
                data = await self._channels[pods % CONNECTIONS].unary(methods.RANGE.path, request.SerializeToString())
                times.append(time.perf_counter() - started)
                page = rpc_pb2.RangeResponse.FromString(data)
                found += len(page.kvs)
                key, revision, more = page.kvs[-1].key + b"\0", revision or page.header.revision, page.more
            if found != self.sizes.pods:
                raise SystemExit(f"bench: a list had {found} of {self.sizes.pods} pods: the answer is wrong")
            pods += found
        seconds = time.perf_counter() - begun
        await renewals
        return Measured(times, seconds, pods)

    async def open_watches(self, stack: AsyncExitStack) -> None:
        """Open all watches, one for each pod."""
        watched = self.pods.keys[: self.sizes.watches]
        for first in range(0, len(watched), AT_A_TIME):
            channel, keys = self._channels[first // AT_A_TIME % CONNECTIONS], watched[first : first + AT_A_TIME]
            events = await open_watches(stack, channel, keys, prev_kv=True, progress_notify=True)
            self._readers.append(asyncio.create_task(self._read(events)))
        stack.callback(lambda: [reader.cancel() for reader in self._readers])

    async def _read(self, responses: AsyncIterator[bytes]) -> None:
        async for data in responses:
            for event in rpc_pb2.WatchResponse.FromString(data).events:
                self._event_s.append((time.monotonic_ns() - int(event.kv.value[:20])) / 1e9)

    async def watch(self) -> Measured:
        """Change watched pods."""
        self._event_s.clear()
        changes = await self.change(self.pods, self.sizes.watches)
        begun = time.perf_counter()
        while len(self._event_s) < changes.units:
            if time.perf_counter() - begun > EVENTS_TIMEOUT_S:
                raise SystemExit(f"bench: {len(self._event_s)} of {changes.units} events came")
            await asyncio.sleep(0.01)
        return Measured(self._event_s, changes.seconds + time.perf_counter() - begun, changes.units)


async def _measure(cluster: Cluster, sizes: Sizes) -> dict[str, Figures]:
    """Return the results of all rows against a fresh cluster."""
    rows: dict[str, Figures] = {}
    async with AsyncExitStack() as stack:
        options = ChannelOptions(max_receive_message_bytes=ANSWER_MAX_BYTES)
        endpoints = [cluster.endpoints[number % len(cluster.endpoints)] for number in range(CONNECTIONS)]
        load = Load([await stack.enter_async_context(Channel(one, options=options)) for one in endpoints], sizes)
        await load.fill()
        await load.open_watches(stack)
        calls = (load.renew, lambda: load.change(load.leases, sizes.nodes), load.list, load.watch)
        for name, row in zip(("renew", "renew-max", "list", "watch"), calls, strict=True):
            before_s = sum(map(processor_s, pids_of(cluster)))
            measured = await row()
            rows[name] = measured.figures(sum(map(processor_s, pids_of(cluster))) - before_s)
            progress(f"  {cluster.program.name:7} {name:10} {rows[name]['rate']:>10,.0f}/s")
        memory = [memory_mib(pid) for pid in pids_of(cluster)]
    rows["memory"] = {name: max(one[name] for one in memory) for name in ("RssAnon", "VmHWM")}
    return rows


def run(rounds: int, sizes: Sizes) -> dict[str, dict[str, Figures]]:
    """Return the medians of all rounds: row, program, figures."""

    def measure(program: Program) -> dict[str, Figures]:
        with Cluster(program, size=3) as cluster:
            return asyncio.run(_measure(cluster, sizes))

    seen = alternate(rounds, measure)
    rows = seen["raftkv"][0]
    return {row: {name: medians([one[row] for one in found]) for name, found in seen.items()} for row in rows}


SHOWN: Final = {
    "rate": ("rate, 1/s", ",.1f"),
    "p50_ms": ("p50, ms", ",.1f"),
    "p99_ms": ("p99, ms", ",.1f"),
    "cpu_us": ("CPU of all members for one, us", ",.1f"),
    "RssAnon": ("largest member, its own, MiB", ",.1f"),
    "VmHWM": ("largest member, peak with files, MiB", ",.1f"),
}


def table(rows: dict[str, dict[str, Figures]], sizes: Sizes, rounds: int) -> str:
    """Return the rows as Markdown."""
    facts = machine()
    return (
        f"{beside(rows, SHOWN)}\n\n"
        f"{sizes.nodes:,} nodes, {sizes.pods:,} pods of {POD_BYTES:,} bytes, {sizes.watches:,} watches; three members "
        f"and the load generator on {facts['cores']} shared cores, hot path {facts['hot_path']}, median of {rounds} "
        f"alternating rounds, {facts['date']}."
    )


def main(words: Sequence[str] | None = None) -> None:
    """Measure both programs."""
    parser = parser_of(__doc__, rounds=1, writes="the table of docs/reference/kubernetes.md")
    parser.add_argument("--scale", type=float, default=1.0, help="share of 5,000 nodes, 150,000 pods, 30,000 watches")
    options = parser.parse_args(words)
    sizes = Sizes.scaled(options.scale)
    rows = run(options.rounds, sizes)
    finish(table(rows, sizes, options.rounds), table="kubernetes" if options.write else "")


if __name__ == "__main__":
    main()
