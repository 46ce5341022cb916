"""The duration of a rendezvous of many nodes, and its cost for the cluster: raftkv beside torch.

    python -m bench.rdzv_scale [--agents 64,256,1024] [--rounds 3] [--c10d 64]

Three real members with fsync. All nodes of a run share one event loop, so that the store and the protocol are measured
rather than the nodes' Python: every node is a complete ``Participant`` with a lease, a key, two watches, and a separate
view of the run. The nodes share one connection per member. They also share work that each would do on a separate
machine: decoding a record, and computing the members of a head. So a read of ``round`` by all nodes, as at the first
gathering, is not measured here. A round: one node leaves; *again* is the time until the last survivor is in the next
generation. *cpu* is the processor time of the nodes' process and of the members, first for registering and gathering,
then for one round (on a machine shared with other work, the time alone means little). *calls* and *bytes* are the
maximum that a survivor needs.

For torch's dynamic rendezvous (one TCPStore without replication; also without processes), it measures rounds of
``next_rendezvous`` of all nodes, and counts their store calls.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, ClassVar
from unittest import mock

import raftkv.aio
from bench.report import finish, markdown, parser_of
from bench.stage import Worker, allow_many_files, pids_of, processor_s, progress, tell
from raftkv.client.control import ClientControl, OnEvents, OnLost
from raftkv.client.operations import Compare, GetRange, Operation
from raftkv.client.scope import Text
from raftkv.client.values import Event, RangeResult, TxnResult
from raftkv.loop.outcomes import outcome_of
from raftkv.training.config import RunConfig
from raftkv.training.records import GenerationRecord, Head
from raftkv.training.rendezvous.participant import Participant
from raftkv.training.rendezvous.world import Roster
from tests.procs import RAFTKV, Cluster

CALLS_MAX = 6
"""Maximum number of store calls of a survivor in one round."""
LEASE_TTL_S = 60
"""All nodes share a process here: with a short TTL, their keep-alives would be most of its work, and some too late."""
C10D_LIMIT_S = 60.0
RUN = "scale"
AT_ONCE = 128
"""Number of nodes that register concurrently."""
ROUND_LIMIT_S = 300.0


class Counted(ClientControl):
    """A node's connection to the store, which counts calls and bytes; concurrent equal reads are made only once."""

    under_way: ClassVar[dict[tuple[int, tuple[Operation, ...]], asyncio.Task[TxnResult]]] = {}

    def __init__(self, kv: raftkv.aio.Client) -> None:
        super().__init__(kv, is_patient=True)
        self.calls: Counter[str] = Counter()

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        self.calls["calls"] += 1
        if not compares and all(isinstance(operation, GetRange) for operation in then):
            result = await self._shared(tuple(then))
        else:
            result = await super().txn(compares, then, otherwise)
        pages = [page for page in result.results if isinstance(page, RangeResult)]
        self.calls["bytes"] += sum(len(item.key) + len(item.value) for page in pages for item in page)
        return result

    async def _shared(self, then: tuple[Operation, ...]) -> TxnResult:
        key = (id(self._kv), then)
        task = self.under_way.get(key)
        if task is None:
            task = self.under_way[key] = asyncio.ensure_future(super().txn((), then))
            task.add_done_callback(lambda _: self.under_way.pop(key, None))
        return await outcome_of(task)

    def watch(
        self, key: Text, end: Text, start_revision: int, on_events: OnEvents, on_lost: OnLost, **options: Any
    ) -> Callable[[], None]:
        def counted(revision: int, events: Sequence[Event]) -> None:
            self.calls["bytes"] += sum(len(event.kv.key) + len(event.kv.value) for event in events)
            on_events(revision, events)

        return super().watch(key, end, start_revision, counted, on_lost, **options)


@contextmanager
def shared_decoding() -> Iterator[None]:
    """Let the nodes of this process share the results of decoding and computation that are equal for all."""
    decode, after = functools.lru_cache(4)(GenerationRecord.decode), Roster.after
    rosters: dict[tuple[str, str], Roster | None] = {}
    by_members: dict[int, Roster] = {}

    def roster_of(members: tuple[Any, ...] = (), marks: bytes | None = None) -> Roster:
        if marks is not None or not members:
            return Roster(members, marks)
        return by_members.setdefault(id(members), Roster(members))

    def follow(self: Roster, head: Head) -> Roster | None:
        key = (self.digest, head.digest)
        if key not in rosters:
            rosters[key] = after(self, head)
        return rosters[key]

    world = "raftkv.training.rendezvous.world"
    with (
        mock.patch.object(GenerationRecord, "decode", decode),
        mock.patch.object(Roster, "after", follow),
        mock.patch(f"{world}.Roster", roster_of),
    ):
        yield


class Agents:
    """All nodes, and their progress."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.controls: list[Counted] = []
        self.participants: list[Participant] = []
        self.reached: Counter[int] = Counter()
        self.wanted = (0, 0)
        self.done = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def register(self, clients: Sequence[raftkv.aio.Client]) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with gate:
                control = Counted(clients[number % len(clients)])
                config = RunConfig(
                    run_id=RUN, min_nodes=1, max_nodes=self.nodes, expected_nodes=self.nodes, host=f"n{number:05d}",
                    lease_ttl_s=LEASE_TTL_S, join_timeout_s=3600.0, last_call_timeout_s=3600.0, connect_timeout_s=600.0,
                )  # fmt: skip
                participant = await Participant.start(control, config)
            self.controls.append(control)
            self.participants.append(participant)

        await asyncio.gather(*(one(number) for number in range(self.nodes)))

    def live(self) -> None:
        self.tasks = [asyncio.ensure_future(self._live(one)) for one in self.participants]

    async def _live(self, participant: Participant) -> None:
        changed = asyncio.Event()
        participant.on_change(lambda _: changed.set())
        while True:
            world = await participant.next_world()
            self.reached[world.generation] += 1
            if (world.generation, self.reached[world.generation]) == self.wanted:
                self.done.set()
            while not participant.nodes_waiting:
                changed.clear()
                await changed.wait()

    async def wait_for(self, generation: int, nodes: int) -> None:
        self.wanted = (generation, nodes)
        if self.reached[generation] < nodes:
            self.done.clear()
            await asyncio.wait_for(self.done.wait(), ROUND_LIMIT_S)

    def spent(self) -> list[Counter[str]]:
        return [Counter(control.calls) for control in self.controls]


async def _measure(cluster: Cluster, nodes: int, rounds: int) -> tuple[Any, ...]:
    agents, seconds, costs = Agents(nodes), [], []
    processor: list[tuple[float, float]] = []

    def used() -> tuple[float, float]:
        return time.process_time(), sum(map(processor_s, pids_of(cluster)))

    async with AsyncExitStack() as stack:
        places = [cluster.endpoints[at:] + cluster.endpoints[:at] for at in range(len(cluster.endpoints))]
        clients = [await stack.enter_async_context(raftkv.aio.connect(each, timeout_s=600.0)) for each in places]
        began, at_first = time.monotonic(), used()
        await agents.register(clients)
        registered = time.monotonic()
        agents.live()
        await agents.wait_for(1, nodes)
        gathered, at_gathering = time.monotonic(), used()
        for number in range(rounds):
            agents.tasks.pop().cancel()  # the arbiter is among the first
            leaving, _ = agents.participants.pop(), agents.controls.pop()
            before, cpu, started = agents.spent(), used(), time.monotonic()
            await leaving.leave()
            await agents.wait_for(number + 2, nodes - number - 1)
            seconds.append(time.monotonic() - started)
            processor.append((used()[0] - cpu[0], used()[1] - cpu[1]))
            spent = [now - then for now, then in zip(agents.spent(), before, strict=True)]
            costs += sorted(spent, key=lambda cost: cost["bytes"])[:-1]  # all but the arbiter
        for task in agents.tasks:
            task.cancel()
    own, theirs = (statistics.median(column) for column in zip(*processor, strict=True))
    gathering = (now - then for now, then in zip(at_gathering, at_first, strict=True))
    times = (
        registered - began,
        gathered - registered,
        *gathering,
        statistics.median(seconds),
        max(seconds),
        own,
        theirs,
    )
    calls, size = (max(cost[name] for cost in costs) for name in ("calls", "bytes"))
    return (nodes, *(f"{each:.2f} s" for each in times), calls, size)


def measure(nodes: int, rounds: int) -> tuple[Any, ...]:
    """Return the row of one size, measured on a fresh cluster."""
    with Cluster(RAFTKV.with_flags("--log-level", "error", "--lease-min-ttl=1"), size=3) as cluster, shared_decoding():
        return asyncio.run(_measure(cluster, nodes, rounds))


# ---- torch's own dynamic rendezvous: one TCPStore, and a handler with a separate connection on each thread


def c10d_rounds(nodes: int, rounds: int) -> None:
    """Report the duration of each round, up to the first that takes too long."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    calls: Counter[str] = Counter()

    def handler(port: int) -> Any:
        store = TCPStore("127.0.0.1", port, is_master=False, multi_tenant=True)
        backend: Any = C10dRendezvousBackend(store, "scale")
        backend.get_state = counted("get", backend.get_state)
        backend.set_state = counted("set", backend.set_state)
        limits = {"join_timeout": int(C10D_LIMIT_S)}
        place = RendezvousParameters("c10d", f"127.0.0.1:{port}", "scale", nodes, nodes, "127.0.0.1", **limits)
        return create_handler(store, backend, place)

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_count(*arguments: Any) -> Any:
            calls[name] += 1
            return call(*arguments)

        return call_and_count

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    handlers = [handler(server.port) for _ in range(nodes)]
    for _ in range(rounds):
        calls.clear()
        started = time.monotonic()
        threads = [threading.Thread(target=each.next_rendezvous, daemon=True) for each in handlers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(started + C10D_LIMIT_S - time.monotonic(), 0.0))
        is_over = not any(thread.is_alive() for thread in threads)
        seconds = f"{time.monotonic() - started:.2f} s" if is_over else f"not within {C10D_LIMIT_S:g} s"
        tell(seconds=seconds, calls=round(calls.total() / nodes, 1))
        if not is_over:
            return


def measure_c10d(nodes: int, rounds: int) -> list[tuple[Any, ...]]:
    """Return a row for each of torch's rounds; its process is then killed, because keep-alive timers continue."""
    worker = Worker("bench.rdzv_scale", "--c10d-worker", str(nodes), "--rounds", str(rounds))
    rows: list[tuple[Any, ...]] = []
    try:
        while len(rows) < rounds and not (rows and rows[-1][2].startswith("not")):
            told = worker.answer()
            rows.append((nodes, len(rows) + 1, told["seconds"], told["calls"]))
    except SystemExit as error:
        progress(f"c10d with {nodes} nodes: {error}")
    finally:
        worker.end()
    return rows


def _sizes(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    """Measure all sizes, and exit with 1 if a survivor needs too many calls."""
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--agents", type=_sizes, default="64,256,1024", help="numbers of nodes, comma-separated")
    parser.add_argument("--c10d", type=_sizes, default="64", help="sizes for torch's own rendezvous; empty: none")
    parser.add_argument("--c10d-worker", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    allow_many_files()
    if given.c10d_worker:
        c10d_rounds(given.c10d_worker, given.rounds)
        sys.stdin.read()
        return
    gc.disable()  # it would visit the objects of all nodes again and again, which have separate processes in a real run
    rows = [measure(nodes, given.rounds) for nodes in given.agents]
    cpu = ("cpu of nodes", "cpu of members")
    headings = ("nodes", "register", "gather", *cpu, "again", "again (max)", *cpu, "calls of a survivor", "bytes")
    text = markdown(headings, rows)
    others = [row for nodes in given.c10d for row in measure_c10d(nodes, given.rounds)]
    text += "\n\n" + markdown(("nodes, c10d", "round", "seconds", "store calls of a node"), others)
    finish(text, [f"{row[0]} nodes: {row[-2]} calls of a survivor" for row in rows if row[-2] > CALLS_MAX])


if __name__ == "__main__":
    main()
