"""raftkv beside real etcd 3.5.1, on one machine, in one run.

    python -m bench.compare [--rounds 3] [--scale 1.0] [--rows put-c100,...] [--write]
    python -m bench.compare --tls --rows put-c100,range-linearizable-c100     all under TLS, with certificates

Each round starts a fresh cluster of three members of one program, measures every row and stops the cluster; then the
same with the other program, so that both meet similar conditions on the machine. The median over the rounds counts.
Both programs get the same flags, the same disk and the same load generator (`raftkvctl bench`), which runs on the same
cores. So absolute rates are those of this machine under all this load; only the ratios can be compared elsewhere.

`--write` updates `bench/results.json`, `docs/reference/bench.png` and the table of `docs/reference/performance.md`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import finish, keep, machine, markdown, medians, parser_of, plot_bars, write_table
from bench.stage import alternate, load, progress
from tests.procs import ROOT, Cluster, Program
from tests.secure import Files, secured

RESULTS = ROOT / "bench" / "results.json"
PLOT = ROOT / "docs" / "reference" / "bench.png"
FASTER, SLOWER = "#2a6f97", "#bc6c25"


@dataclass(frozen=True)
class Row:
    """One measurement: the arguments of `raftkvctl bench`, and the number of calls that take a few seconds.

    Attributes:
        kind: table that the row belongs to.
        rate, latency: name of the rate, and prefix of the latencies' names, in the generator's output.
    """

    name: str
    words: str
    clients: int
    connections: int
    processes: int
    total: int
    kind: str = "keys"
    rate: str = "rate"
    latency: str = ""


_MANY = "--streams 100 --watch-per-stream 100 --watched-key-total 10000"
_IDLE = "watch --idle --streams 1 --watch-per-stream 1 --watched-key-total 10000"
_WATCH_RATE = ("streams", "rate", "put_")
_PUT_RATE = ("streams", "put_rate", "put_")
ROWS = (
    Row("put-c1", "put", 1, 1, 1, 3_000),
    Row("put-c100", "put", 100, 10, 2, 40_000),
    Row("put-c1000", "put", 1000, 100, 2, 60_000),
    Row("range-linearizable-c100", "range --consistency l", 100, 10, 2, 60_000),
    Row("range-serializable-c100", "range --consistency s", 100, 10, 2, 80_000),
    Row("txn-c100", "txn-put", 100, 10, 2, 40_000),
    Row("mixed-c100", "mixed", 100, 10, 2, 50_000),
    Row("watch-1000-on-1-key", "watch --streams 100 --watch-per-stream 10", 16, 10, 2, 2_000, *_WATCH_RATE),
    Row("watch-10000-on-10000-keys", f"watch {_MANY}", 100, 10, 2, 40_000, *_WATCH_RATE),
    Row("put-with-1-idle-watcher", _IDLE, 100, 10, 2, 40_000, *_PUT_RATE),
    Row("put-with-10000-idle-watchers", f"watch --idle {_MANY}", 100, 10, 2, 40_000, *_PUT_RATE),
    Row("watch-latency-1-watcher", "watch-latency", 1, 1, 1, 2_000, "streams"),
    Row("lease-keepalive-c100", "lease-keepalive", 100, 10, 2, 100_000, "streams"),
    Row("lease-keepalive-c1000", "lease-keepalive", 1000, 100, 2, 150_000, "streams"),
    Row("lock-c10-on-10-names", "lock --locks 10", 10, 10, 1, 3_000, "streams"),
)


def measure(row: Row, endpoints: Sequence[str], scale: float, files: Files | None = None) -> dict[str, Any]:
    """Run one row against a cluster; return the generator's output."""
    flags = [f"--processes={row.processes}", *(files.client_flags if files else ())]
    flags += ["--val-size=256", "--key-size=8"] if row.kind == "keys" else []
    total = max(row.clients, int(row.total * scale))
    found = load(endpoints, row.words, *flags, clients=row.clients, connections=row.connections, total=total)
    return {
        "rate": found[row.rate],
        "errors": sum(found["errors"].values()),
        "units": found.get("events") or found.get("calls") or found["put_calls"],
        "generator_us": found["generator_us"],
        **{name: found[row.latency + name] for name in ("p50_ms", "p99_ms")},
    }


def run_round(
    program: Program, rows: Sequence[Row], scale: float, files: Files | None = None
) -> dict[str, dict[str, Any]]:
    """Run all rows against a fresh cluster of one program; with certificates, everything runs under TLS."""
    results = {}
    with secured(Cluster(program, 3, files.server_flags)) if files else Cluster(program, 3) as cluster:
        for row in rows:
            found = results[row.name] = measure(row, cluster.endpoints, scale, files)
            progress(f"  {program.name:7} {row.name:28} {found['rate']:>9,.0f}/s  p50 {found['p50_ms']:.2f} ms")
    return results


def compare(rounds: int, rows: Sequence[Row], measure_round: Any) -> dict[str, Any]:
    """Return the medians of all rounds, and their ratios: above 1, raftkv is better."""
    seen = alternate(rounds, measure_round)
    found = []
    for row in rows:
        by = {name: medians([one[row.name] for one in each]) for name, each in seen.items()}
        figures = {f"{name}_{key}": by[name][key] for name in by for key in ("p50_ms", "p99_ms")}
        rates = {name: round(by[name]["rate"], 1) for name in by}
        ratio = round(by["raftkv"]["rate"] / by["etcd"]["rate"], 2)
        errors = sum(one[row.name]["errors"] for each in seen.values() for one in each)
        found.append({"row": row.name, "kind": row.kind, **rates, "ratio": ratio, **figures, "errors": errors})
    return {"machine": machine(), "rounds": rounds, "rows": found}


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown: one table for keys, one for watches, leases and locks."""
    headings = ("row", "etcd 3.5.1", "raftkv", "ratio", "p50 etcd / raftkv", "p99 etcd / raftkv")
    texts = []
    for kind in ("keys", "streams"):
        lines = []
        for row in (each for each in results["rows"] if each["kind"] == kind):
            latencies = (f"{row[f'etcd_{p}_ms']:.1f} / {row[f'raftkv_{p}_ms']:.1f} ms" for p in ("p50", "p99"))
            rates = (f"{row['etcd']:,.0f}/s", f"{row['raftkv']:,.0f}/s", f"**{row['ratio']:.2f}**")
            lines.append((row["row"], *rates, *latencies))
        texts += [markdown(headings, lines)] if lines else []
    facts = results["machine"]
    about = (
        f"Three members and the load generator on {facts['cores']} shared cores, 256-byte values, fsync on, "
        f"median of {results['rounds']} alternating rounds, {facts['date']}. Rates of watches are events, and their "
        f"latencies those of the puts meanwhile; with idle watchers the rate is that of puts."
    )
    return "\n\n".join([*texts, about])


def plot(results: dict[str, Any]) -> None:
    """Draw the ratios as bars that start at etcd's value: to the right faster, to the left slower."""
    what = "rate of raftkv as a multiple of etcd's (1 is etcd; left of it etcd is faster)"
    ratios = {row["row"]: row["ratio"] for row in results["rows"]}
    bars = [(name, ratio, f"{ratio:.2f}", FASTER if ratio >= 1 else SLOWER) for name, ratio in ratios.items()]
    plot_bars(PLOT, "raftkv beside etcd 3.5.1, in one run", what, bars, start=1.0)


def main() -> None:
    """Measure, print and write."""
    kept = "the results, the plot and the table of the page"
    parser = parser_of(__doc__, [row.name for row in ROWS], rounds=3, writes=kept)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the calls of each row")
    parser.add_argument("--tls", action="store_true", help="all under TLS, with certificates of clients and members")
    given = parser.parse_args()
    rows = [row for row in ROWS if row.name in given.rows]
    with tempfile.TemporaryDirectory(prefix="raftkv-bench-") as folder:
        files = Files.make(Path(folder)) if given.tls else None
        one = partial(run_round, rows=rows, scale=given.scale, files=files)
        results = compare(given.rounds, rows, one)
    if given.write:
        keep(RESULTS, results)
        write_table(table(results), "bench")
        plot(results)  # the last, because it fails without matplotlib
    finish(table(results))


if __name__ == "__main__":
    main()
