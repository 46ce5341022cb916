"""``raftkvctl bench``: measure any etcd v3 cluster.

Rates and latencies are those of a closed loop: every client waits for its answer before it asks again. The names of
flags and their meaning are those of etcd's own benchmark tool where it has them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from raftkv.cli import bench_load
from raftkv.cli.bench_load import Load, Request, Result
from raftkv.cli.bench_processes import MakeLoad, MakeRequests, run_in_processes
from raftkv.client import Client, methods
from raftkv.errors import RaftKVError
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError

F = TypeVar("F", bound=Callable[..., Any])
SETUP_TIMEOUT_S = 10.0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure a cluster: raftkv, etcd, or anything that speaks the etcd v3 API."""


def _shared(function: F) -> F:
    """The flags that every measurement has."""
    default = os.environ.get("ETCDCTL_ENDPOINTS", "127.0.0.1:2379")
    options = (
        click.option("--endpoints", default=default, show_default=True, help="Members, comma-separated."),
        click.option("--clients", default=1, show_default=True, type=click.IntRange(1), help="Calls under way."),
        click.option("--conns", default=1, show_default=True, type=click.IntRange(1), help="Connections."),
        click.option("--processes", default=1, show_default=True, type=click.IntRange(1), help="Load processes."),
        click.option("--total", default=10_000, show_default=True, type=click.IntRange(1), help="Calls to make."),
        click.option("--target-leader", is_flag=True, help="Connect to the leader alone."),
        click.option("--seed", default=1, show_default=True, help="Seed of keys and values."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _writes(function: F) -> F:
    """The flags of measurements that write."""
    options = (
        click.option("--key-size", default=8, show_default=True, type=click.IntRange(1), help="Bytes of a key."),
        click.option("--val-size", default=256, show_default=True, type=click.IntRange(0), help="Bytes of a value."),
        click.option("--key-space-size", default=10_000, show_default=True, type=click.IntRange(1), help="Keys."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@bench.command()
@_shared
@_writes
@click.option("--sequential-keys", is_flag=True, help="Go through the keys in order.")
def put(key_size: int, val_size: int, key_space_size: int, sequential_keys: bool, **shared: Any) -> None:
    """Put keys."""

    def requests(rank: int) -> Iterator[Request]:
        return bench_load.puts(
            key_size=key_size,
            value_size=val_size,
            key_space=key_space_size,
            sequential=sequential_keys,
            seed=shared["seed"] + rank,
        )

    _run("put", requests, **shared)


@bench.command("range")
@_shared
@_writes
@click.argument("key", required=False)
@click.argument("end", required=False, default="")
@click.option("--consistency", type=click.Choice(["l", "s"]), default="l", show_default=True, help="Kind of read.")
@click.option("--limit", default=0, type=click.IntRange(0), help="Most keys that one read returns.")
def range_(
    key: str | None,
    end: str,
    consistency: str,
    limit: int,
    key_size: int,
    val_size: int,
    key_space_size: int,
    **shared: Any,
) -> None:
    """Read KEY (to END); without KEY, single keys of a space that is written first."""
    keys = [key.encode()] if key is not None else _fill(shared["endpoints"], key_size, val_size, key_space_size)

    def requests(rank: int) -> Iterator[Request]:
        return bench_load.ranges(keys=keys, range_end=end.encode(), limit=limit, serializable=consistency == "s")

    _run(f"range ({'serializable' if consistency == 's' else 'linearizable'})", requests, **shared)


@bench.command("txn-put")
@_shared
@_writes
@click.option("--txn-ops", default=1, show_default=True, type=click.IntRange(1, 128), help="Puts in a txn.")
def txn_put(txn_ops: int, key_size: int, val_size: int, key_space_size: int, **shared: Any) -> None:
    """Put keys in txns."""

    def requests(rank: int) -> Iterator[Request]:
        seed = shared["seed"] + rank
        return bench_load.txns(
            key_size=key_size, value_size=val_size, key_space=key_space_size, operations=txn_ops, seed=seed
        )

    _run("txn-put", requests, **shared)


@bench.command("mixed")
@_shared
@_writes
@click.option("--read-share", default=0.75, show_default=True, type=click.FloatRange(0, 1), help="Reads among calls.")
def mixed(read_share: float, key_size: int, val_size: int, key_space_size: int, **shared: Any) -> None:
    """Read (linearizably) and put single keys."""
    keys = _fill(shared["endpoints"], key_size, val_size, key_space_size)

    def requests(rank: int) -> Iterator[Request]:
        seed = shared["seed"] + rank
        reads = bench_load.ranges(keys=keys, range_end=b"", limit=0, serializable=False)
        writes = bench_load.puts(
            key_size=key_size, value_size=val_size, key_space=key_space_size, sequential=False, seed=seed
        )
        return bench_load.mixed(reads, writes, read_share, seed)

    _run("mixed", requests, **shared)


def _run(
    name: str,
    requests: MakeRequests,
    *,
    endpoints: str,
    clients: int,
    conns: int,
    processes: int,
    total: int,
    target_leader: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Measure and print; failures end the program in one line."""
    members = endpoints.split(",")
    try:
        if target_leader:
            members = [asyncio.run(_leader(members))]
        if processes > 1:
            result = run_in_processes(_shares(members, clients, conns, processes), requests, total, processes)
        else:
            with _Progress(total, as_json) as progress:
                load = Load(members, clients=clients, connections=conns, on_progress=progress.update)
                result = asyncio.run(load.run(requests(0), total=total))
    except (RaftKVError, RpcError, OSError) as error:
        raise click.ClickException(str(error)) from None
    _print(name, result, as_json)
    if not result.latencies_s:
        raise click.exceptions.Exit(1)


def _shares(members: list[str], clients: int, connections: int, processes: int) -> MakeLoad:
    """The clients of each process: an equal share, and each begins with another member."""

    def make(rank: int) -> Load:
        turned = members[rank % len(members) :] + members[: rank % len(members)]
        share = clients // processes + (rank < clients % processes)
        return Load(turned, clients=max(1, share), connections=max(1, connections // processes))

    return make


class _Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int, quiet: bool) -> None:
        self._total = total
        self._bar: Any = None
        self._task: Any = None
        self._visible = sys.stderr.isatty() and not quiet

    def __enter__(self) -> _Progress:
        if self._visible:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("calls", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, answered: int) -> None:
        """So many calls are answered."""
        if self._bar is not None:
            self._bar.update(self._task, completed=answered)


def _print(name: str, result: Result, as_json: bool) -> None:
    summary = result.summary()
    if as_json:
        click.echo(json.dumps({"name": name, **summary}))
        return
    click.echo(f"{name}: {summary['rate']:,.0f}/s, {summary['calls']:,} calls in {summary['seconds']:.2f} s")
    click.echo("  " + "  ".join(f"p{percent} {summary[f'p{percent}_ms']:.2f} ms" for percent in (50, 90, 99)))
    for text, count in result.errors.most_common(5):
        click.echo(f"  {count} failed: {text}")


async def _leader(endpoints: list[str]) -> str:
    """The endpoint whose member leads."""
    async with Client(endpoints) as client:
        for endpoint in endpoints:
            status = await client.call_at(endpoint, methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=SETUP_TIMEOUT_S)
            if status.leader == status.header.member_id:
                return endpoint
    raise RaftKVError("none of the endpoints is the leader")


def _fill(endpoints: str, key_size: int, value_size: int, key_space: int) -> list[bytes]:
    """Write a space of keys, and name them in random order."""
    requests = bench_load.puts(key_size=key_size, value_size=value_size, key_space=key_space, sequential=True, seed=1)
    load = Load(endpoints.split(","), clients=min(256, key_space), connections=4)
    try:
        result = asyncio.run(load.run(requests, total=key_space))
    except (RaftKVError, RpcError, OSError) as error:
        raise click.ClickException(str(error)) from None
    if result.errors:
        raise click.ClickException(f"writing the keys to read failed: {result.errors.most_common(1)[0][0]}")
    keys = [number.to_bytes(max(8, key_size), "big")[-key_size:] for number in range(key_space)]
    random.Random(1).shuffle(keys)
    return keys
