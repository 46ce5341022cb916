"""raftkv's client library beside other people's, on the same raftkv cluster, in one run.

    python -m bench.clients [--rounds 5] [--seconds 2] [--rows sync-put-1,...] [--json] [--dry-run]

Each library runs in its own environment (`make foreign` makes them) and its own process; all do the same calls to the
leader of one cluster of three. Every round measures every library in every row, and who goes first changes from round
to round; the median over the rounds counts. Members and callers share the machine's cores: only the ratios mean
something elsewhere.

Writes `bench/clients.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import raftkv
from bench.client_load import KEYS, VALUE
from bench.report import keep, machine, markdown, medians, names_of, parser_of
from bench.stage import in_turn, leader_of, progress
from tests.foreign.environments import InstallError, interpreter
from tests.procs import RAFTKV, ROOT, Cluster

LOAD = ROOT / "bench" / "client_load.py"
RESULTS = ROOT / "bench" / "clients.json"


@dataclass(frozen=True)
class Library:
    """A client library: how it is called, its name in ``client_load``, the environment it lives in ("" is this one)."""

    name: str
    api: str
    key: str
    environment: str = ""


LIBRARIES = (
    Library("raftkv", "sync", "raftkv"),
    Library("etcd3 0.12", "sync", "etcd3", "etcd3"),
    Library("raftkv", "async", "raftkv-aio"),
    Library("aetcd 1.0", "async", "aetcd", "aetcd"),
    Library("etcd-client-py 0.5", "async", "etcd_client", "etcd_client"),
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


def measure(library: Library, row: Row, endpoint: str, seconds: float) -> dict[str, float]:
    """Run one library; rate and latencies."""
    program = interpreter(library.environment) if library.environment else sys.executable
    command = [program, "-P", LOAD, library.key, endpoint, row.operation, str(row.callers), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"{library.name}, {row.name}: {done.stderr.strip() or done.stdout.strip()}")
    summary = json.loads(done.stdout)
    return {"rate": summary["calls"] / summary["seconds"], "p50_ms": summary["p50_ms"], "p99_ms": summary["p99_ms"]}


def compare(rounds: int, rows: list[Row], seconds: float) -> dict[str, Any]:
    """All rounds on one cluster."""
    seen: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    with Cluster(RAFTKV.with_flags("--log-level", "error"), size=3) as cluster:
        endpoint = leader_of(cluster).endpoint
        with raftkv.connect(endpoint) as kv:
            kv.put_many((key, VALUE) for key in KEYS)
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for row in rows:
                for library in in_turn(row.libraries(), number):
                    seen[row.name][library.name].append(measure(library, row, endpoint, seconds))
    lines = [make_row(row, seen[row.name]) for row in rows]
    return {"machine": machine(), "rounds": rounds, "seconds": seconds, "rows": lines}


def make_row(row: Row, seen: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of one row. ``ratio``: raftkv's rate as a multiple of the best of the others."""
    summary = {name: {key: round(value, 3) for key, value in medians(found).items()} for name, found in seen.items()}
    best = max(one["rate"] for name, one in summary.items() if name != "raftkv")
    return {"row": row.name, "libraries": summary, "ratio": round(summary["raftkv"]["rate"] / best, 2)}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown, the fastest of each row in bold."""
    names = list(dict.fromkeys(library.name for library in LIBRARIES))
    lines = []
    for row in results["rows"]:
        best = max(one["rate"] for one in row["libraries"].values())
        cells = [_cell(row["libraries"].get(name), best) for name in names]
        lines.append((row["row"], *cells, f"{row['ratio']:.2f}"))
    facts = results["machine"]
    return (
        f"{markdown(('calls/s', *names, 'raftkv / best other'), lines)}\n\n"
        f"One raftkv cluster of three members, its leader called, on {facts['cores']} shared cores, 256-byte values, "
        f"fsync on, linearizable reads, median of {results['rounds']} rounds of {results['seconds']:g} s, "
        f"{facts['date']}."
    )


def _cell(one: dict[str, float] | None, best: float) -> str:
    if one is None:
        return "-"
    rate = f"{one['rate']:,.0f}"
    return f"**{rate}**" if one["rate"] == best else rate


def main() -> None:
    """Measure and write everything."""
    parser, names = parser_of(__doc__), [row.name for row in ROWS]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement, after a warm-up")
    parser.add_argument("--rows", type=names_of(names), help=f"comma-separated; all: {','.join(names)}")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    parser.add_argument("--dry-run", action="store_true", help="print and write no file")
    given = parser.parse_args()
    rows = [row for row in ROWS if row.name in (given.rows or names)]
    try:
        results = compare(given.rounds, rows, given.seconds)
    except InstallError as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(results, indent=2) if given.json else table(results))
    if not (given.dry_run or given.rows):
        keep(RESULTS, results)


if __name__ == "__main__":
    main()
