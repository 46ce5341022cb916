"""Who sends the calls of a row: h2load where it is installed, else the client of this repository with the same bytes.

A generator shares the cores with the members, so what it costs itself stands beside each figure.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from bench.neutral import h2load
from bench.neutral.rows import Calls
from raftkv.cli.bench.load import Load

_HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")


@dataclass(frozen=True)
class Sent:
    """What a generator measured.

    Attributes:
        rate: calls a second that were answered.
        generator_s: processor time of the generator, in seconds.
        data_bytes: bodies of all answers; None: it checks the status of each call itself.
    """

    rate: float
    generator_s: float
    data_bytes: int | None = None


Send = Callable[[Calls, str, int], Sent]
"""Sends so many calls of a row to an endpoint."""


def by_h2load(row: Calls, endpoint: str, calls: int) -> Sent:
    """Send with h2load, in one thread."""
    with tempfile.NamedTemporaryFile(prefix="raftkv-bench-") as body:
        body.write(row.body)
        body.flush()
        before = _children_s()
        load = h2load.send(
            f"http://{endpoint}{row.path}",
            Path(body.name),
            requests=calls,
            connections=row.connections,
            streams=row.streams,
            flags=_HEADERS,
        )
    return Sent(load.rate, _children_s() - before, load.data_bytes)


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def by_raftkvctl(row: Calls, endpoint: str, calls: int) -> Sent:
    """Send with the generator of `raftkvctl bench`, in this process.

    Raises:
        SystemExit: a call has failed.
    """
    load = Load([endpoint], clients=row.clients, connections=row.connections)
    result = asyncio.run(load.run(repeat((row.path, row.message)), total=calls))
    if result.errors:
        raise SystemExit(f"bench: {row.name}: {result.errors.most_common(1)[0][0]}")
    return Sent(result.rate, result.processor_s)


GENERATORS: dict[str, Send] = {"h2load": by_h2load, "raftkvctl": by_raftkvctl}


def can_send(generator: str, row: Calls) -> bool:
    """Tell whether a generator can send a row: our own has no calls of several requests that are sent at once."""
    return generator == "h2load" or not row.messages


def usual() -> str:
    """Name the generator of these calls on this machine."""
    return "h2load" if h2load.is_installed() else "raftkvctl"
