"""raftkv's client library beside other people's, on the same raftkv cluster, in one run.

    python -m bench.clients [--rounds 5] [--seconds 2] [--rows sync-put-1,...] [--json] [--dry-run]

Each library runs in its own environment (`make foreign` makes them) and its own process; all do the same calls to the
leader of one cluster of three. Every round measures every library in every row, and who goes first changes from round
to round; the median over the rounds counts. Members and callers share the machine's cores: only the ratios mean
something elsewhere.

Writes `bench/clients.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raftkv
from bench.client_loads.load import KEYS, VALUE
from bench.report import machine
from tests.foreign.environments import InstallError, interpreter
from tests.procs import RAFTKV, Cluster

ROOT = Path(__file__).resolve().parents[1]
LOADS = ROOT / "bench" / "client_loads"
RESULTS = ROOT / "bench" / "clients.json"


@dataclass(frozen=True)
class Library:
    """A client library: how it is called, the environment it lives in ("" is this one), and its version."""

    name: str
    api: str
    environment: str
    script: str

    def command(self) -> list[str]:
        program = interpreter(self.environment) if self.environment else sys.executable
        return [str(program), str(LOADS / f"{self.script}.py")]


LIBRARIES = (
    Library("raftkv", "sync", "", "raftkv_sync"),
    Library("etcd3 0.12", "sync", "etcd3", "etcd3_sync"),
    Library("raftkv", "async", "", "raftkv_async"),
    Library("aetcd 1.0", "async", "aetcd", "aetcd_async"),
    Library("etcd-client-py 0.5", "async", "etcd_client", "etcd_client_async"),
)


@dataclass(frozen=True)
class Row:
    """What all libraries of one API do."""

    api: str
    operation: str
    callers: int

    @property
    def name(self) -> str:
        return f"{self.api}-{self.operation}-{self.callers}"

    def libraries(self) -> list[Library]:
        return [library for library in LIBRARIES if library.api == self.api]


ROWS = tuple(
    Row(api, operation, callers) for api in ("sync", "async") for operation in ("put", "get") for callers in (1, 64)
)

Seen = dict[str, dict[str, list[dict[str, float]]]]


def leader_of(cluster: Cluster) -> str:
    """The endpoint of the leader: one that every library can be given."""
    with raftkv.connect(cluster.endpoints) as kv:
        return next(member.endpoint for member in kv.status() if member.is_leader)


def measure(library: Library, row: Row, endpoint: str, seconds: float) -> dict[str, float]:
    """Run one library; rate and latencies."""
    command = [*library.command(), endpoint, row.operation, str(row.callers), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"{library.name}, {row.name}: {done.stderr.strip() or done.stdout.strip()}")
    summary = json.loads(done.stdout)
    return {"rate": summary["calls"] / summary["seconds"], "p50_ms": summary["p50_ms"], "p99_ms": summary["p99_ms"]}


def compare(rounds: int, rows: tuple[Row, ...], seconds: float) -> dict[str, Any]:
    """All rounds on one cluster."""
    seen: Seen = defaultdict(lambda: defaultdict(list))
    with Cluster(RAFTKV.with_flags("--log-level", "error"), size=3) as cluster:
        endpoint = leader_of(cluster)
        fill(endpoint)
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            for row in rows:
                for library in in_turn(row.libraries(), number):
                    seen[row.name][library.name].append(measure(library, row, endpoint, seconds))
    return {
        "machine": machine(),
        "rounds": rounds,
        "seconds": seconds,
        "rows": [make_row(row, seen[row.name]) for row in rows],
    }


def fill(endpoint: str) -> None:
    """Write every key that is read later."""
    with raftkv.connect(endpoint) as kv:
        kv.put_many((key, VALUE) for key in KEYS)


def in_turn(libraries: list[Library], number: int) -> list[Library]:
    """Who goes first changes, so that a drift of the machine favours nobody."""
    first = number % len(libraries)
    return libraries[first:] + libraries[:first]


def make_row(row: Row, seen: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of one row. ``ratio``: raftkv's rate as a multiple of the best of the others."""

    def median(name: str, key: str) -> float:
        return round(float(statistics.median(one[key] for one in seen[name])), 3)

    summary = {name: {key: median(name, key) for key in ("rate", "p50_ms", "p99_ms")} for name in seen}
    best = max(one["rate"] for name, one in summary.items() if name != "raftkv")
    return {"row": row.name, "libraries": summary, "ratio": round(summary["raftkv"]["rate"] / best, 2)}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown, the fastest of each row in bold."""
    names = list(dict.fromkeys(library.name for library in LIBRARIES))
    lines = [f"| calls/s | {' | '.join(names)} | raftkv / best other |", f"|---|{'---:|' * (len(names) + 1)}"]
    for row in results["rows"]:
        best = max(one["rate"] for one in row["libraries"].values())
        cells = [_cell(row["libraries"].get(name), best) for name in names]
        lines.append(f"| {row['row']} | {' | '.join(cells)} | {row['ratio']:.2f} |")
    facts = results["machine"]
    lines += [
        "",
        f"One raftkv cluster of three members, its leader called, on {facts['cores']} shared cores, 256-byte values, "
        f"fsync on, linearizable reads, median of {results['rounds']} rounds of {results['seconds']:g} s, "
        f"{facts['date']}.",
    ]
    return "\n".join(lines)


def _cell(one: dict[str, float] | None, best: float) -> str:
    if one is None:
        return "-"
    rate = f"{one['rate']:,.0f}"
    return f"**{rate}**" if one["rate"] == best else rate


def main() -> None:
    """Measure and write everything."""
    parser = argparse.ArgumentParser(description="raftkv's client library beside other people's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement, after a warm-up")
    parser.add_argument("--rows", default="", help="names, comma-separated; default: all")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    parser.add_argument("--dry-run", action="store_true", help="print and write no file")
    arguments = parser.parse_args()
    names = set(filter(None, arguments.rows.split(",")))
    rows = tuple(row for row in ROWS if not names or row.name in names)
    if not rows:
        parser.error(f"--rows takes {', '.join(row.name for row in ROWS)}")
    try:
        results = compare(arguments.rounds, rows, arguments.seconds)
    except InstallError as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(results, indent=2) if arguments.json else table(results))
    if not (arguments.dry_run or names):
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
