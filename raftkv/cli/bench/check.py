"""``check perf`` and ``check datascale``: put a load of one of four sizes on a cluster, and report whether it passes.

The loads, the limits and the output are etcdctl's. The keys are deleted at the end. On a terminal, a progress bar is
shown on standard error.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from typing import Final, NoReturn

from raftkv.cli.bench.command import FAILURES, call_bar, fetch_token
from raftkv.cli.bench.load import Load, Request, Result
from raftkv.cli.command import Invocation
from raftkv.cli.ctl import top
from raftkv.cli.ctl.session import Session, open_session
from raftkv.cli.pflag import quote, text_bytes
from raftkv.cli.program import BAD_FEATURE, CTRL_C, ERROR, INVALID_INPUT, CommandError, refused
from raftkv.client import Client
from raftkv.client.rpc import methods
from raftkv.client.scope import prefix_end
from raftkv.errors import StatusError
from raftkv.pb import rpc_pb2

DURATION_S: Final = 60
CLEAN_UP_TIMEOUT_S: Final = 30.0
CLIENTS_PER_CONNECTION: Final = 10
SLOWEST_MAX_S: Final = 0.5
DEVIATION_MAX_S: Final = 0.1
THROUGHPUT_MIN: Final = 0.9
_SIZES: Final = {"s": "s", "small": "s", "m": "m", "medium": "m", "l": "l", "large": "l", "xl": "xl", "xLarge": "xl"}
_MEMORY: Final = "process_resident_memory_bytes"


PERF_LOADS: Final = {"s": (150, 50), "m": (1000, 200), "l": (8000, 500), "xl": (15000, 1000)}
"""Puts per second, and number of clients."""

DATA_LOADS: Final = {"s": (10_000, 50), "m": (100_000, 200), "l": (1_000_000, 500), "xl": (3_000_000, 1000)}
"""Total number of keys, and number of clients; key and value are 512 bytes each."""


def perf(invocation: Invocation) -> None:
    """Put at the load's rate for a minute; FAIL has exit code 1."""
    size = _size(invocation)
    session = open_session(invocation)
    _refuse_used_prefix(session, invocation["prefix"], quoted=True)
    rate, clients = PERF_LOADS[size]
    result = _run(session, invocation, clients, _requests(invocation, 256, 1024), rate * DURATION_S, rate)
    passed, lines = evaluate(result, rate)
    if result.interrupted:
        lines = [f"Interrupted after {result.seconds:.1f} of {DURATION_S} s; until then:", *lines[:-1]]
        _end_interrupted(session, invocation, lines)
    _clean_up(session, invocation)
    print("\n".join(lines))
    if not passed:
        raise CommandError("", ERROR)


def _end_interrupted(session: Session, invocation: Invocation, lines: list[str]) -> NoReturn:
    """Print the measurement until Ctrl-C, then delete the keys; a second Ctrl-C leaves them."""
    print("\n".join(lines), flush=True)
    _clean_up(session, invocation)
    raise CommandError("", CTRL_C)


def evaluate(result: Result, rate: int) -> tuple[bool, list[str]]:
    """Return whether a cluster passes, and the lines of the report.

    Arguments:
        result: result of the load.
        rate: requested puts per second.
    """
    lines = _complaints(result)
    latencies = result.latencies_s
    mean = sum(latencies) / max(1, len(latencies))
    deviation = math.sqrt(sum((value - mean) ** 2 for value in latencies) / max(1, len(latencies)))
    slowest = latencies[-1] if latencies else 0.0
    fast, steady, even = result.rate / rate > THROUGHPUT_MIN, slowest <= SLOWEST_MAX_S, deviation <= DEVIATION_MAX_S
    shown = f"{int(result.rate) + 1} writes/s"
    lines.append(f"PASS: Throughput is {shown}" if fast else f"FAIL: Throughput too low: {shown}")
    lines.append(f"{'PASS: Slowest request took' if steady else 'Slowest request took too long:'} {slowest:.6f}s")
    lines.append(f"{'PASS: Stddev is' if even else 'Stddev too high:'} {deviation:.6f}s")
    passed = fast and steady and even and not result.errors
    return passed, [*lines, "PASS" if passed else "FAIL"]


def datascale(invocation: Invocation) -> None:
    """Write the load's keys and compare the first endpoint's memory before and after."""
    size = _size(invocation)
    session = open_session(invocation)
    _refuse_used_prefix(session, invocation["prefix"], quoted=False)
    keys, clients = DATA_LOADS[size]
    before = _memory_bytes(session, "before")
    what = f"{keys} key-value pairs, 1024 bytes per key-value, {clients} concurrent clients"
    print(f"Start data scale check for work load [{what}].", flush=True)
    result = _run(session, invocation, clients, _requests(invocation, 512, 512), keys, 0)
    after = _memory_bytes(session, "after")
    if result.interrupted:
        how_far = f"Interrupted after {len(result.latencies_s)} of {keys} keys"
        used = f"approximate system memory used: {(after - before) / 2**20:.2f} MB."
        _end_interrupted(session, invocation, [f"{how_far}; {used}"])
    _clean_up(session, invocation)
    if result.errors:
        print("\n".join(_complaints(result)))
        raise CommandError("", ERROR)
    print(f"PASS: Approximate system memory used : {(after - before) / 2**20:.2f} MB.")


def _complaints(result: Result) -> list[str]:
    if not result.errors:
        return []
    return ["FAIL: too many errors", *(f"FAIL: ERROR({text}) -> {count}" for text, count in result.errors.items())]


def _size(invocation: Invocation) -> str:
    if invocation["load"] not in _SIZES:
        raise CommandError(f"unknown load option {invocation['load']}", BAD_FEATURE)
    return _SIZES[invocation["load"]]


def _refuse_used_prefix(session: Session, prefix: str, *, quoted: bool) -> None:
    key = text_bytes(prefix)
    request = rpc_pb2.RangeRequest(key=key, range_end=prefix_end(key), limit=1)
    if session.call(methods.RANGE, request).kvs:
        remedy = f"etcdctl del --prefix {prefix}"
        remedy = f"'{remedy}'" if quoted else remedy
        raise CommandError(f"prefix {quote(prefix)} has keys. Delete with {remedy} first", INVALID_INPUT)


def _requests(invocation: Invocation, key_size: int, value_size: int) -> Iterator[Request]:
    """Yield puts of random keys below the prefix."""
    prefix, value = text_bytes(invocation["prefix"]), bytes(value_size)
    rng = random.Random()
    while True:
        key = prefix + rng.randbytes(10) + bytes(key_size - 10)
        yield methods.PUT.path, rpc_pb2.PutRequest(key=key, value=value).SerializeToString()


def _run(
    session: Session, invocation: Invocation, clients: int, requests: Iterator[Request], total: int, rate: int
) -> Result:
    """Make the calls; with a rate, only for the duration of the check."""
    with refused(FAILURES), call_bar(total, hidden=False) as on_progress:
        load = Load(
            session.endpoints,
            clients=clients,
            connections=max(1, clients // CLIENTS_PER_CONNECTION),
            options=session.options,
            rate=rate,
            duration_s=DURATION_S if rate else 0.0,
            token=fetch_token(session),
            on_progress=on_progress,
        )
        return asyncio.run(load.run(requests, total=total))


def _clean_up(session: Session, invocation: Invocation) -> None:
    key = text_bytes(invocation["prefix"])

    async def clean(client: Client) -> None:
        delete = rpc_pb2.DeleteRangeRequest(key=key, range_end=prefix_end(key))
        answer = await client.call(methods.DELETE_RANGE, delete, timeout_s=CLEAN_UP_TIMEOUT_S)
        if invocation["auto-compact"]:
            revision = answer.header.revision
            print(f"Compacting with revision {revision}", flush=True)
            request = rpc_pb2.CompactionRequest(revision=revision, physical=True)
            await client.call(methods.COMPACT, request, timeout_s=CLEAN_UP_TIMEOUT_S)
            print(f"Compacted with revision {revision}", flush=True)
        if invocation["auto-defrag"]:
            await _defragment(client, session.endpoints)

    session.run(clean)


async def _defragment(client: Client, endpoints: list[str]) -> None:
    for endpoint in endpoints:
        print(f"Defragmenting {quote(endpoint)}", flush=True)
        try:
            await client.call_at(
                endpoint, methods.DEFRAGMENT, rpc_pb2.DefragmentRequest(), timeout_s=CLEAN_UP_TIMEOUT_S
            )
        except StatusError as error:
            raise CommandError(f"defragmenting {endpoint}: {error}", ERROR) from None
        print(f"Defragmented {quote(endpoint)}", flush=True)


def _memory_bytes(session: Session, when: str) -> float:
    try:
        samples = top.fetch(session.endpoints[0], session.options.tls, session.timeout_s)
    except OSError:
        samples = {}
    if not (value := samples.get(_MEMORY, 0.0)):
        print(f"FAIL: Could not read {_MEMORY} {when} the put operations.")
        raise CommandError("", ERROR)
    return value
