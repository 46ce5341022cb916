"""A replacement for Horovod's workers: replays a recorded worker's rendezvous requests to members."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

TRACE = Path(__file__).with_name("testdata") / "horovod_two_ranks.txt"
POLL_S = 0.01
PATIENCE_S = 120.0


class Step(NamedTuple):
    """One line of the trace."""

    rank: int
    verb: str
    path: str
    size_bytes: int


def trace() -> list[Step]:
    """The recorded steps of both ranks."""
    steps = []
    for line in TRACE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            rank, verb, path, *size = line.split()
            steps.append(Step(int(rank), verb, path, int(size[0]) if size else 0))
    return steps


def ask(
    endpoint: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """One request to one member: status and body."""
    connection = http.client.HTTPConnection(endpoint, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        # Horovod's HTTP client knows no other spelling, and without a length it waits for the end of the connection.
        assert "Content-Length" in [name for name, _ in answer.getheaders()]
        return answer.status, answer.read()
    finally:
        connection.close()


class Worker:
    """One rank.

    Arguments:
        endpoints: members to ask, the first until it fails.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.endpoints = list(endpoints)
        self.asked: Counter[str] = Counter()

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Ask until there is an answer that Horovod would take."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                status, found = ask(self.endpoints[0], method, path, body)
            except (OSError, http.client.HTTPException) as error:
                status, found = 0, repr(error).encode()
            if status in (200, 404):
                self.asked[method] += 1
                return status, found
            assert time.monotonic() < until, (method, path, status, found)
            self.endpoints.append(self.endpoints.pop(0))
            pause()

    def take(self, step: Step) -> None:
        """Do what one line says, and look at the answer."""
        value = _value(step)
        if step.verb in ("PUT", "DELETE"):
            assert self.ask(step.verb, step.path, value if step.verb == "PUT" else None) == (200, b""), step
            return
        status, found = self.ask("GET", step.path)
        until = time.monotonic() + PATIENCE_S
        while step.verb == "WAIT" and status == 404:
            assert time.monotonic() < until, step
            pause()
            status, found = self.ask("GET", step.path)
        assert (status, found) == (200, value) or (step.verb == "PEEK" and status == 404), (step, status, found)


def _value(step: Step) -> bytes:
    """What stands under a path; long ones are all different."""
    return step.path.encode().ljust(step.size_bytes, b".")[-step.size_bytes :] if step.size_bytes else b""


def pause() -> None:
    """Between two looks."""
    threading.Event().wait(POLL_S)


def replay(endpoints: Sequence[Sequence[str]]) -> Counter[str]:
    """Play all ranks at the same time, each at its members; how often each method was answered."""
    workers = [Worker(list(own)) for own in endpoints]

    def run(rank: int) -> None:
        for step in trace():
            if step.rank == rank:
                workers[rank].take(step)

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(run, range(len(workers))))
    return sum((worker.asked for worker in workers), Counter())
