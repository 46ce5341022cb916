"""Would a member gain from more cores: front processes that own framing and TLS, one core process that decides.

    python -m bench.cores [--calls 40000] [--json]

Not built: docs/contributing/decisions/0006-one-loop.md says why. This measures the parts and plays the whole:

1. what a put, and a serializable read of nothing, cost the leader of three members today, in processor microseconds
   (100 clients). The read is framing, HTTP/2 and system calls nearly alone: that is what a front process would take.
2. what it costs to hand requests and answers from process to process: frames on a socket pair, one ``send`` a turn.
3. the puts a second of one member, by numbers of cores and fronts: a closed loop of clients, turn by turn; a process
   handles together what waits for it, as members do today. The other members are elsewhere.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from bench.gateway import leader_of
from bench.memory import processor_s
from tests.procs import RAFTKV, Cluster

CLIENTS: Final = 100
FRAME: Final = struct.Struct("<IIIB")
"""Size of the rest, connection, stream, kind: what goes before each body."""
BODY: Final = bytes(300)
CLIENTS_PLAYED: Final = 400
TURN_CALLS_MAX: Final = 50
QUORUM_US, NETWORK_US = 300.0, 100.0
"""From the decision of a put to its commit, and from an answer to the next request: nobody's processor time."""
APPLY_US: Final = 2.8
"""What a read of nothing costs beside framing: ``apply/ranges``."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor microseconds of one call.

    Attributes:
        framing_us: of a request and its answer, on its connection.
        core_us: of everything else.
        crossing_us: of handing a request over and its answer back, for each of the two processes.
        turn_us: of one turn of a process, whatever it does.
    """

    framing_us: float
    core_us: float
    crossing_us: float
    turn_us: float


# ---- measuring


def _bench(endpoint: str, words: tuple[str, ...], calls: int) -> None:
    command = [sys.executable, "-m", "raftkv.cli.ctl", "bench", *words, "--json", "--endpoints", endpoint]
    command += ["--clients", str(CLIENTS), "--conns", str(CLIENTS), "--total", str(calls)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure_calls(calls: int) -> tuple[float, float]:
    """Microseconds of a serializable read of nothing and of a put, of the member that leads."""
    with Cluster(RAFTKV, size=3) as cluster:
        endpoint = leader_of(cluster)
        leader = next(member for member in cluster.members if member.endpoint == endpoint)
        found: list[float] = []
        for words in (("range", "nothing", "--consistency", "s"), ("put",)):
            _bench(endpoint, words, calls // 10)
            before_s = processor_s(leader)
            _bench(endpoint, words, calls)
            found.append((processor_s(leader) - before_s) / calls * 1e6)
    return found[0], found[1]


def measure_crossing(batch: int, rounds: int = 3_000) -> float:
    """Microseconds that it costs one process to write a message and read its answer, so many at a time."""
    near, far = socket.socketpair()
    child = os.fork()
    if not child:
        near.close()
        _echo(far)
        os._exit(0)
    far.close()
    frames = b"".join(FRAME.pack(len(BODY), number, number, 1) + BODY for number in range(batch))
    began_s = time.process_time()
    for _ in range(rounds):
        near.send(b"".join([frames[start : start + len(frames) // batch] for start in _starts(frames, batch)]))
        _parse(_receive(near, len(frames)))
    took_s = time.process_time() - began_s
    near.close()
    os.waitpid(child, 0)
    return took_s / rounds / batch * 1e6


def _starts(frames: bytes, batch: int) -> range:
    return range(0, len(frames), len(frames) // batch)


def _receive(end: socket.socket, size: int) -> bytes:
    data = end.recv(1 << 20)
    while len(data) < size and (more := end.recv(1 << 20)):
        data += more
    return data


def _parse(data: bytes) -> list[tuple[int, int, bytes]]:
    found, offset = [], 0
    while offset < len(data):
        size, connection, stream, _kind = FRAME.unpack_from(data, offset)
        offset += FRAME.size + size
        found.append((connection, stream, data[offset - size : offset]))
    return found


def _echo(end: socket.socket) -> None:
    while data := end.recv(1 << 20):
        end.sendall(data)


# ---- playing


@dataclass(slots=True, eq=False)
class Process:
    """One process of a member: a turn handles what waits for it.

    Attributes:
        call_us: what a call costs it, each time that it passes.
        waiting: clients whose calls wait.
        is_busy: a turn is under way.
    """

    call_us: float
    waiting: list[int] = field(default_factory=list)
    is_busy: bool = False


class Play:
    """A closed loop: each client sends, waits for the answer, and sends again.

    Arguments:
        costs: of a call.
        fronts: front processes; 0 is a member of today.
        cores: on which all share; a turn that finds none free waits for one.
    """

    def __init__(self, costs: Costs, fronts: int, cores: int) -> None:
        self._turn_us, self._free_cores = costs.turn_us, cores
        # A call passes its front twice, on its way in and out.
        self._fronts = [Process((costs.framing_us + costs.crossing_us) / 2) for _ in range(fronts)]
        self._core = Process(costs.core_us + (costs.crossing_us if fronts else costs.framing_us))
        self._decided: set[int] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now_us = 0.0
        self._answered = 0

    def run(self, seconds: float = 0.5) -> float:
        """Calls a second."""
        for client in range(CLIENTS_PLAYED):
            self._after(client, partial(self._send, client))
        while self._now_us < seconds * 1e6:
            self._now_us, _, happens = heapq.heappop(self._events)
            happens()
        return self._answered / seconds

    def _after(self, us: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_us + us, next(self._order), happens))

    def _send(self, client: int) -> None:
        self._arrive(self._fronts[client % len(self._fronts)] if self._fronts else self._core, client)

    def _arrive(self, process: Process, client: int) -> None:
        process.waiting.append(client)
        self._begin(process)

    def _begin(self, process: Process) -> None:
        if process.is_busy or not process.waiting or not self._free_cores:
            return
        # Not all that waits: else one front and the core would pass the same calls to and fro, and wait for each other.
        turn, process.waiting = process.waiting[:TURN_CALLS_MAX], process.waiting[TURN_CALLS_MAX:]
        process.is_busy = True
        self._free_cores -= 1
        self._after(self._turn_us + process.call_us * len(turn), partial(self._end, process, turn))

    def _end(self, process: Process, turn: list[int]) -> None:
        process.is_busy = False
        self._free_cores += 1
        for client in turn:
            if process is self._core:
                self._after(QUORUM_US, partial(self._decide, client))
            elif client in self._decided:
                self._decided.remove(client)
                self._answer(client)
            else:
                self._arrive(self._core, client)
        for each in (self._core, *self._fronts):
            self._begin(each)

    def _decide(self, client: int) -> None:
        if not self._fronts:
            self._answer(client)
            return
        self._decided.add(client)
        self._send(client)

    def _answer(self, client: int) -> None:
        self._answered += 1
        self._after(NETWORK_US, partial(self._send, client))


# ---- the command


def measure(calls: int) -> dict[str, float]:
    """All measured figures."""
    read_us, put_us = measure_calls(calls)
    crossings = {f"crossing_{batch}_us": measure_crossing(batch) for batch in (1, 10, 50)}
    return {"read_us": read_us, "put_us": put_us} | crossings


def report(figures: dict[str, float], framing_us: float) -> str:
    """The tables."""
    lines = ["| measured | us |", "|---|---:|", *(f"| {name} | {value:.1f} |" for name, value in figures.items()), ""]
    costs = Costs(framing_us, figures["put_us"] - framing_us, figures["crossing_10_us"], 20.0)
    lines += ["| cores | today | 1 front | 2 fronts | 3 fronts |", "|---:|---:|---:|---:|---:|"]
    for cores in (1, 2, 4):
        lines.append(
            f"| {cores} | " + " | ".join(f"{Play(costs, fronts, cores).run():,.0f}/s" for fronts in range(4)) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and play."""
    parser = argparse.ArgumentParser(description="what front processes would gain")
    parser.add_argument("--calls", type=int, default=40_000)
    parser.add_argument("--framing-us", type=float, help="played instead of what the read says")
    parser.add_argument("--json", action="store_true", help="print the measured figures alone, as one JSON object")
    options = parser.parse_args()
    figures = measure(options.calls)
    framing_us = options.framing_us or figures["read_us"] - APPLY_US
    print(json.dumps(figures) if options.json else report(figures, framing_us))


if __name__ == "__main__":
    main()
