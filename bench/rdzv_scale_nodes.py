"""Nodes of one run in one process, each on a thread of its own, as `bench.rdzv_scale` starts them.

    python -m bench.rdzv_scale_nodes \\
        '{"endpoints": ["127.0.0.1:2379"], "run": "r", "nodes": 1024, "first": 0, "count": 64, "ttl": 10}'

Every node has a client, hence a connection, of its own, and does what a training agent does: join, wait until the
generation is over, come back. Reads commands, one a line, and writes one JSON object a line:

    (start)    ->  {"event": "registered"} when all are; {"event": "world", "generation": 1, ...} when all are in it
    break      ->  the first node reports a fault; {"event": "broken"}; then {"event": "world", "generation": 2, ...}
    counts     ->  {"event": "counts", "calls": {"Txn": 64, ...}}
    (end)      ->  the process ends, and with it all leases

With ``{"c10d": {"nodes": 64, "rounds": 1, "limit_s": 60}}`` they are nodes of torch's own rendezvous, and all that is
told is ``{"event": "c10d", ...}``: seconds until the last node is in the world, for each round, and the store calls of
the rendezvous. The last-call time does not count: the maximum is always there.

Times are of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from typing import Any
from unittest import mock

import raftkv
from bench.stage import tell
from raftkv.client.rpc import core
from raftkv.errors import RaftKVError
from raftkv.training.config import RunConfig
from raftkv.training.records import Fault
from raftkv.training.rendezvous.sync_participant import Participant

WAIT_S = 600.0
CALLS: Counter[str] = Counter()


def count_calls() -> None:
    """Count what goes to the cluster: calls, streams that are opened, messages on them."""
    call, stream = core.Client._call, core.Client.stream
    send, send_nowait = core.Stream.send, core.Stream.send_nowait

    def counted_call(self: Any, endpoints: Any, method: Any, *more: Any) -> Any:
        CALLS[method.path.rpartition("/")[2]] += 1
        return call(self, endpoints, method, *more)

    def counted_stream(self: Any, method: Any, *more: Any, **named: Any) -> Any:
        CALLS[f"stream {method.path.rpartition('/')[2]}"] += 1
        return stream(self, method, *more, **named)

    def counted_send(self: Any, request: Any) -> Any:
        CALLS[_name(request)] += 1
        return send(self, request)

    def counted_send_nowait(self: Any, request: Any) -> None:
        CALLS[_name(request)] += 1
        send_nowait(self, request)

    mock.patch.multiple(core.Client, _call=counted_call, stream=counted_stream).start()
    mock.patch.multiple(core.Stream, send=counted_send, send_nowait=counted_send_nowait).start()


def _name(request: Any) -> str:
    kind = type(request).__name__
    return f"message watch {request.WhichOneof('request_union')}" if kind == "WatchRequest" else f"message {kind}"


class Nodes:
    """The nodes of this process, and what they have reached."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.memberships: list[Participant] = []
        self.threads = [
            threading.Thread(target=self._live, args=(number,), daemon=True) for number in range(task["count"])
        ]
        self._lock = threading.Lock()
        self._reached: Counter[str] = Counter()

    def _live(self, number: int) -> None:
        try:
            self._take_part(number)
        except RaftKVError as error:
            tell(event="failed", reason=f"node {self.task['first'] + number}: {error}")

    def _take_part(self, number: int) -> None:
        endpoints = self.task["endpoints"]
        place = (self.task["first"] + number) % len(endpoints)
        name = f"n{self.task['first'] + number:05d}"
        config = RunConfig(
            run_id=self.task["run"],
            min_nodes=self.task["nodes"],
            max_nodes=self.task["nodes"],
            lease_ttl_s=self.task["ttl"],
            join_timeout_s=WAIT_S,
            host=name,
        )
        changed = threading.Event()
        with raftkv.connect([*endpoints[place:], *endpoints[:place]], timeout_s=60.0) as kv:
            membership = Participant.open(kv, config)
            membership.on_change(lambda _: changed.set())
            with self._lock:
                self.memberships.append(membership)
            self._reach("registered")
            while True:
                world = membership.next_world()
                self._reach("world", generation=world.generation)
                while not membership.nodes_waiting:
                    changed.wait()
                    changed.clear()

    def _reach(self, event: str, **more: int) -> None:
        """Tell the parent when the last of the nodes has come so far."""
        now = time.monotonic()
        name = json.dumps([event, more])
        with self._lock:
            self._reached[name] += 1
            is_last = self._reached[name] == len(self.threads)
        if is_last:
            tell(event=event, time=now, calls=dict(CALLS), **more)

    def start(self) -> None:
        """Let all join."""
        for thread in self.threads:
            thread.start()

    def break_generation(self) -> None:
        """One node reports a fault: the generation is over for all."""
        one = self.memberships[0]
        if one.world is None:
            return
        tell(event="broken", time=time.monotonic())
        one.report(Fault(one.world.generation, one.node.id, one.node.host, rank=one.world.rank, exit_code=1))


# ---- torch's own dynamic rendezvous: one TCPStore, and a handler with a connection of its own on each thread, which is
# what `torchrun --rdzv-backend=c10d` has, without the processes


def _handler(port: int, nodes: int, limit_s: float) -> Any:
    """A handler as torch makes it, its calls of the store counted."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    store = TCPStore("127.0.0.1", port, is_master=False, multi_tenant=True)
    backend = C10dRendezvousBackend(store, "scale")
    for name in ("get_state", "set_state"):
        setattr(backend, name, _counted(name, getattr(backend, name)))
    parameters = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "scale", nodes, nodes, "127.0.0.1", join_timeout=int(limit_s)
    )
    return create_handler(store, backend, parameters)


def _counted(name: str, call: Any) -> Any:
    def counted(*arguments: Any) -> Any:
        CALLS[name] += 1
        return call(*arguments)

    return counted


def measure_c10d(nodes: int, rounds: int, limit_s: float) -> dict[str, Any]:
    """All rounds; stops at the first that takes too long."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    handlers = [_handler(server.port, nodes, limit_s) for _ in range(nodes)]
    measured: list[dict[str, Any]] = []
    for _ in range(rounds):
        CALLS.clear()
        started = time.monotonic()
        threads = [threading.Thread(target=handler.next_rendezvous, daemon=True) for handler in handlers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(started + limit_s - time.monotonic(), 0.0))
        finished = not any(thread.is_alive() for thread in threads)
        seconds = round(time.monotonic() - started, 3)
        measured.append({"seconds": seconds, "finished": finished, "calls_per_node": round(CALLS.total() / nodes, 2)})
        if not finished:
            break
    return {"nodes": nodes, "rounds": measured}


def main() -> None:
    task = json.loads(sys.argv[1])
    if "c10d" in task:
        tell(event="c10d", **measure_c10d(**task["c10d"]))
        os._exit(0)  # its keep-alive timers would go on
    count_calls()
    nodes = Nodes(task)
    nodes.start()
    for line in sys.stdin:
        command = line.strip()
        if command == "break":
            nodes.break_generation()
        elif command == "counts":
            tell(event="counts", calls=dict(CALLS))
    os._exit(0)  # the threads wait for a generation that will not come


if __name__ == "__main__":
    main()
