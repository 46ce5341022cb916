"""The time of one put by stage, in microseconds, on three members with one client.

    python -m bench.latency measure --puts 3000 --out before.json
    python -m bench.latency draw before.json after.json --picture docs/images/put-latency.svg

`draw` takes any number of results, names each after its file, and draws them one below the other; it needs matplotlib.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.latency.stages import STAGES, Span, Stamps, medians_us
from bench.report import drawing, keep, machine, parser_of
from bench.stage import number_of_leader
from raftkv.cli.bench.load import connections
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.urls import parse_endpoints
from tests.procs import ROOT, Cluster, Program

PICTURE = ROOT / "docs" / "images" / "put-latency.svg"
STAMPED = Program("raftkv", (sys.executable, "-m", "bench.latency.member"), ("--log-level", "error"))
WARM_UP = 200
PUT = rpc_pb2.PutRequest(key=b"latency/key", value=bytes(256)).SerializeToString()
COLOURS = {"between processes": "#b0b7bf", "leader": "#2a6f97", "follower": "#61a5c2", "disk": "#e09f3e"}


async def _put(endpoint: str, count: int) -> list[Span]:
    puts: list[Span] = []
    async with connections(parse_endpoints([endpoint]), 1) as (channel,):
        for _ in range(WARM_UP + count):
            began_at = perf_counter()
            await channel.unary(methods.PUT.path, PUT)
            puts.append((began_at, perf_counter()))
    return puts[WARM_UP:]


def measure(count: int, fastest: float = 1.0) -> dict[str, Any]:
    """Make sequential puts to the leader of members that record stamps; return the medians of the stages.

    Arguments:
        count: number of puts.
        fastest: share of the puts to evaluate; on a busy machine, other work delays all but the fastest tenth.
    """
    facts = machine()
    with Cluster(STAMPED, size=3) as cluster:
        leader = number_of_leader(cluster)
        puts = asyncio.run(_put(cluster.endpoints[leader], count))
        pids = [member.process.pid for member in cluster.members]
        for member in cluster.members:
            member.stop()
        stamps = [_read(cluster.directory / f"stamps-{pid}.json") for pid in pids]
    followers = [each for position, each in enumerate(stamps) if position != leader]
    puts = sorted(sorted(puts, key=lambda put: put[1] - put[0])[: max(1, int(count * fastest))])
    took_us = sorted((end - begin) * 1e6 for begin, end in puts)
    p50_us, p90_us = statistics.median(took_us), took_us[len(took_us) * 9 // 10]
    stages = medians_us(puts, stamps[leader], followers)
    times = {"p50_us": round(p50_us, 1), "p90_us": round(p90_us, 1)}
    return {"machine": facts, "puts": len(puts), "of_puts": count, **times, "stages": stages}


def _read(path: Path) -> Stamps:
    noted = json.loads(path.read_text(encoding="ascii"))
    # A function called within another one of the same name ends first.
    return {name: sorted((begin, end) for begin, end in spans) for name, spans in noted.items()}


# ---- output


def lines(name: str, result: Mapping[str, Any]) -> list[str]:
    """Return the duration of each stage as text."""
    head = f"{name}: one put {result['p50_us']:,.0f} us (90 % below {result['p90_us']:,.0f}), {_of(result)}"
    rows = [
        f"  {stage.name:40} {stage.who:18} {found['p50_us']:8,.0f} us  from {found['begin_us']:8,.0f} us"
        for stage in STAGES
        if (found := result["stages"].get(stage.name)) is not None
    ]
    return [head, *rows]


def _of(result: Mapping[str, Any]) -> str:
    """Return a description of the evaluated puts."""
    puts, of_puts = result["puts"], result["of_puts"]
    return f"{puts:,} puts" if puts == of_puts else f"the fastest {puts:,} of {of_puts:,} puts"


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw each result as a bar of stages on a time axis, one result below the other."""
    with drawing(path, "", 3.4 * len(results), panels=len(results)) as panels:
        for axes, (name, result) in zip(panels, results.items(), strict=True):
            for position, stage in enumerate(STAGES):
                found = result["stages"][stage.name]
                axes.barh(position, found["p50_us"], left=found["begin_us"], color=COLOURS[stage.who], height=0.7)
                axes.text(found["end_us"], position, f" {found['p50_us']:,.0f}", va="center")
            axes.set_yticks(range(len(STAGES)), [stage.name for stage in STAGES])
            axes.invert_yaxis()
            axes.axvline(result["p50_us"], color="#888888", linewidth=1, linestyle="--")
            axes.set_title(
                f"{name}: a put takes {result['p50_us']:,.0f} us at one client (median of {_of(result)})", fontsize=8
            )
            axes.margins(x=0.08)
        panels[-1].set_xlabel("microseconds since the client sent the put")
        for who, colour in COLOURS.items():
            panels[0].barh(0, 0, color=colour, label=who)
        panels[0].legend(loc="lower left")


def main(words: Sequence[str]) -> int:
    """Run the command line."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="measure, and print each stage")
    measuring.add_argument("--puts", type=int, default=3000)
    measuring.add_argument("--fastest", type=float, default=1.0, help="share of the puts to look at, on a busy machine")
    measuring.add_argument("--out", type=Path, help="keep the result in this file")
    shown = commands.add_parser("draw", help="draw results that were kept")
    shown.add_argument("results", type=Path, nargs="+")
    shown.add_argument("--picture", type=Path, default=PICTURE, help="SVG or PNG, by its ending")
    options = parser.parse_args(words)
    if options.command == "draw":
        paths = {path.stem: path for path in options.results}
        if len(paths) < len(options.results):
            raise SystemExit("bench: two results have the same name")
        draw({name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}, options.picture)
        return 0
    result = measure(options.puts, options.fastest)
    print("\n".join(lines(options.out.stem if options.out else "raftkv", result)))
    if options.out is not None:
        keep(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
