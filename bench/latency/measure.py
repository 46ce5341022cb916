"""Puts by one client, each timed, to the leader of three members that take stamps."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.latency.stages import Span, Stamps, medians_us
from bench.report import machine
from raftkv.cli.bench.load import connections
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.urls import parse_endpoints
from tests.compat.wire import Wire
from tests.procs import Cluster, Program
from tests.server.process.process import leader_of

STAMPED = Program("raftkv", (sys.executable, "-m", "bench.latency.member"), ("--log-level", "error"))
WARM_UP = 200
PUT = rpc_pb2.PutRequest(key=b"latency/key", value=bytes(256)).SerializeToString()


async def _put(endpoint: str, count: int) -> list[Span]:
    puts: list[Span] = []
    async with connections(parse_endpoints([endpoint]), 1) as (transport,):
        for _ in range(WARM_UP + count):
            began_at = perf_counter()
            await transport.unary(methods.PUT.path, PUT)
            puts.append((began_at, perf_counter()))
    return puts[WARM_UP:]


def measure(count: int, fastest: float = 1.0) -> dict[str, Any]:
    """Make puts, one after the other; return the stages of their median.

    Arguments:
        count: of puts.
        fastest: share of them that is looked at: on a busy machine the fastest tenth is what nobody else held up.
    """
    facts = machine()
    with Cluster(STAMPED, size=3) as cluster:
        with Wire(cluster.endpoints) as wire:
            leader = leader_of(wire)
        puts = asyncio.run(_put(cluster.endpoints[leader], count))
        pids = [member.process.pid for member in cluster.members if member.process is not None]
        for member in cluster.members:
            member.stop()
        stamps = [_read(cluster.directory / f"stamps-{pid}.json") for pid in pids]
    followers = [each for position, each in enumerate(stamps) if position != leader]
    puts = sorted(sorted(puts, key=lambda put: put[1] - put[0])[: max(1, int(count * fastest))])
    took_us = sorted((end - begin) * 1e6 for begin, end in puts)
    return {
        "machine": facts,
        "puts": len(puts),
        "of_puts": count,
        "p50_us": round(statistics.median(took_us), 1),
        "p90_us": round(took_us[len(took_us) * 9 // 10], 1),
        "stages": medians_us(puts, stamps[leader], followers),
    }


def _read(path: Path) -> Stamps:
    noted = json.loads(path.read_text(encoding="ascii"))
    # A function that was called within another of its name has ended before it.
    return {name: sorted((begin, end) for begin, end in spans) for name, spans in noted.items()}
