"""``raftkvctl bench``: measure any etcd v3 cluster.

Rates and latencies are those of a closed loop: every client waits for its answer before it asks again. The names of
flags and their meaning are those of etcd's own benchmark tool where it has them. Owns the commands that read and write
keys; those of watches, leases and locks are in ``bench.watch_commands`` and ``bench.recipes``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import click

from raftkv.cli.bench import load as bench_load
from raftkv.cli.bench.load import PREFIX, Load, Request
from raftkv.cli.bench.options import (
    Measurement,
    client_options,
    example,
    number,
    run_calls,
    shared_flags,
    within,
    write_flags,
)
from raftkv.cli.bench.recipes import lease_keepalive, lock
from raftkv.cli.bench.watch_commands import watch, watch_latency
from raftkv.cli.goflags.pflag import did_you_mean
from raftkv.errors import RaftKVError
from raftkv.rpc.status import RpcError


class _Measurements(Measurement, click.Group):
    command_class = Measurement

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            near = did_you_mean(args[0], self.commands)
            ctx.fail(f'unknown command "{args[0]}" for "{ctx.command_path}"{near}')
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Measurements,
    context_settings={"help_option_names": ["-h", "--help"]},
    options_metavar="",
    subcommand_metavar="COMMAND [options]",
)
def bench() -> None:
    """Measure a cluster: raftkv, etcd, or anything that speaks the etcd v3 API."""


for _command in (watch, watch_latency, lease_keepalive, lock):
    bench.add_command(_command)


@bench.command(epilog=example("put", "put --clients 100 --conns 10 --total 100000 --val-size 1024"))
@shared_flags
@write_flags
@click.option("--sequential-keys", is_flag=True, help="go through the keys in order")
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

    run_calls("put", requests, **shared)


@bench.command("range", epilog=example("range --clients 100 --consistency s", "range jobs/ jobs0 --limit 10"))
@shared_flags
@write_flags
@click.argument("key", required=False)
@click.argument("end", required=False, default="")
@click.option(
    "--consistency",
    type=click.Choice(["l", "s"]),
    default="l",
    show_default=True,
    help="read consistency: l is linearizable, s is serializable",
)
@number("--limit", 0, 0, "largest number of keys that one read returns; 0 means all")
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
    """Read keys.

    Each read is of KEY (to END); without KEY, of single keys of a space that is written first.
    """
    keys = [key.encode()] if key is not None else _fill(shared["endpoints"], key_size, val_size, key_space_size)

    def requests(rank: int) -> Iterator[Request]:
        return bench_load.ranges(keys=keys, range_end=end.encode(), limit=limit, serializable=consistency == "s")

    run_calls(f"range ({'serializable' if consistency == 's' else 'linearizable'})", requests, **shared)


@bench.command("txn-put", epilog=example("txn-put --txn-ops 10 --clients 100"))
@shared_flags
@write_flags
@click.option(
    "--txn-ops", default=1, show_default=True, type=within(int, 1, 128), metavar="N", help="number of puts in a txn"
)
def txn_put(txn_ops: int, key_size: int, val_size: int, key_space_size: int, **shared: Any) -> None:
    """Put keys in txns."""

    def requests(rank: int) -> Iterator[Request]:
        seed = shared["seed"] + rank
        return bench_load.txns(
            key_size=key_size, value_size=val_size, key_space=key_space_size, operations=txn_ops, seed=seed
        )

    run_calls("txn-put", requests, **shared)


@bench.command("mixed", epilog=example("mixed --read-share 0.9 --clients 100"))
@shared_flags
@write_flags
@click.option(
    "--read-share", default=0.75, show_default=True, type=within(float, 0, 1), metavar="X", help="share of reads"
)
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

    run_calls("mixed", requests, **shared)


def _fill(endpoints: str, key_size: int, value_size: int, key_space: int) -> list[bytes]:
    """Write a space of keys, and name them in random order."""
    requests = bench_load.puts(key_size=key_size, value_size=value_size, key_space=key_space, sequential=True, seed=1)
    load = Load(endpoints.split(","), clients=min(256, key_space), connections=4, options=client_options())
    try:
        result = asyncio.run(load.run(requests, total=key_space))
    except (RaftKVError, RpcError, OSError) as error:
        raise click.ClickException(str(error)) from None
    if result.errors:
        raise click.ClickException(f"writing the keys to read failed: {result.errors.most_common(1)[0][0]}")
    keys = [PREFIX + number.to_bytes(max(8, key_size), "big")[-key_size:] for number in range(key_space)]
    random.Random(1).shuffle(keys)
    return keys
