"""raftkv beside real etcd 3.5.1, on one machine, in one run.

    python -m bench.compare [--rounds 3] [--scale 1.0] [--rows put-c100,...]
    python -m bench.compare --tls --rows put-c100,range-linearizable-c100     all under TLS, with certificates

Each round starts a fresh cluster of three members of one program, measures every row, stops it, and does the same with
the other program, so that both meet the same moods of the machine; the median over the rounds counts. Both programs
get the same flags, the same disk and the same load generator (`raftkvctl bench`), which runs on the same cores: rates
are those of this machine with all that on it, and only the ratios mean something elsewhere.

Writes `bench/results.json`, `docs/reference/bench.png` and the table between the markers of
`docs/reference/performance.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from raftkv.native import is_compiled
from tests.procs import ETCD, RAFTKV, Cluster, Program
from tests.secure import Files, secured

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results.json"
PLOT = ROOT / "docs" / "reference" / "bench.png"
TABLES = {
    "bench": ROOT / "docs" / "reference" / "performance.md",
    "checkpoint-chaos": ROOT / "docs" / "training" / "checkpoints-chaos.md",
    "kubernetes": ROOT / "docs" / "reference" / "kubernetes.md",
    "neutral": ROOT / "docs" / "reference" / "performance.md",
    "neutral-compiled": ROOT / "docs" / "reference" / "performance.md",
    "operate": ROOT / "docs" / "reference" / "performance.md",
    "registry": ROOT / "docs" / "training" / "checkpoints.md",
    "restart": ROOT / "docs" / "training" / "index.md",
}
"""Where the table of each benchmark stands, between markers of its name."""
# The members of both programs get the same settings; etcd's log is quiet so that it costs nothing.
PROGRAMS = (ETCD, RAFTKV.with_flags("--log-level", "error"))


@dataclass(frozen=True)
class Row:
    """One measurement: a name, the words of `raftkvctl bench`, and how many calls make a few seconds of it."""

    name: str
    words: tuple[str, ...]
    clients: int
    connections: int
    processes: int
    total: int
    kind: str = "keys"
    """Which table it belongs to."""
    rate: str = "rate"
    latency: str = ""
    """Prefix of the names under which the generator reports rate and latencies."""


def _watching(name: str, words: str, total: int, *, clients: int, rate: str = "rate") -> Row:
    """A row of ``bench watch``: watchers in two processes on ten connections, puts from a third."""
    return Row(name, ("watch", *words.split()), clients, 10, 2, total, "streams", rate, "put_")


_MANY = "--streams 100 --watch-per-stream 100 --watched-key-total 10000"

ROWS = (
    Row("put-c1", ("put",), 1, 1, 1, 3_000),
    Row("put-c100", ("put",), 100, 10, 2, 40_000),
    Row("put-c1000", ("put",), 1000, 100, 2, 60_000),
    Row("range-linearizable-c100", ("range", "--consistency", "l"), 100, 10, 2, 60_000),
    Row("range-serializable-c100", ("range", "--consistency", "s"), 100, 10, 2, 80_000),
    Row("txn-c100", ("txn-put",), 100, 10, 2, 40_000),
    Row("mixed-c100", ("mixed",), 100, 10, 2, 50_000),
    _watching("watch-1000-on-1-key", "--streams 100 --watch-per-stream 10", 2_000, clients=16),
    _watching("watch-10000-on-10000-keys", _MANY, 40_000, clients=100),
    _watching(
        "put-with-1-idle-watcher",
        "--idle --streams 1 --watch-per-stream 1 --watched-key-total 10000",
        40_000,
        clients=100,
        rate="put_rate",
    ),
    _watching("put-with-10000-idle-watchers", f"--idle {_MANY}", 40_000, clients=100, rate="put_rate"),
    Row("watch-latency-1-watcher", ("watch-latency",), 1, 1, 1, 2_000, "streams"),
    Row("lease-keepalive-c100", ("lease-keepalive",), 100, 10, 2, 100_000, "streams"),
    Row("lease-keepalive-c1000", ("lease-keepalive",), 1000, 100, 2, 150_000, "streams"),
    Row("lock-c10-on-10-names", ("lock", "--locks", "10"), 10, 10, 1, 3_000, "streams"),
)


USERS = (
    ("user", "add", "root", "--no-password"),
    ("user", "grant-role", "root", "root"),
    ("role", "add", "bench"),
    ("role", "grant-permission", "bench", "readwrite", "--from-key", ""),
    ("user", "add", "alice", "--no-password"),
    ("user", "grant-role", "alice", "bench"),
    ("auth", "enable"),
)
"""What makes a cluster ask for users, one of whom, no root, may read and write all keys."""


@dataclass(frozen=True)
class Setting:
    """What a run has beside the plain one: flags of the members, and of the load generator."""

    certificates: Files | None = None
    asks_for_users: bool = False

    def cluster(self, program: Program) -> Cluster:
        """Make a cluster that is not started yet."""
        if self.certificates is None:
            return Cluster(program, size=3)
        return secured(Cluster(program, size=3, flags=self.certificates.server_flags))

    def prepare(self, endpoints: list[str]) -> None:
        """Have the members of a cluster ask for users: the load generator is the one that its certificate names."""
        if self.certificates is None or not self.asks_for_users:
            return
        flags = ["--endpoints", ",".join(endpoints), *self.certificates.client_flags]
        for words in USERS:
            subprocess.run(
                [sys.executable, "-m", "raftkv.cli.ctl", *flags, *words], check=True, cwd=ROOT, stdout=DEVNULL
            )

    @property
    def flags(self) -> list[str]:
        """Flags of ``raftkvctl bench``."""
        return self.certificates.bench_flags if self.certificates is not None else []


def measure(row: Row, endpoints: list[str], scale: float, setting: Setting) -> dict[str, Any]:
    """Run one row against a cluster; what the generator printed."""
    command = [
        *(sys.executable, "-m", "raftkv.cli.ctl", "bench", *row.words, "--json"),
        *("--endpoints", ",".join(endpoints), "--clients", str(row.clients), "--conns", str(row.connections)),
        *("--processes", str(row.processes), *setting.flags),
        *("--total", str(max(row.clients, int(row.total * scale)))),
    ]
    if row.kind == "keys":
        command += ["--val-size", "256", "--key-size", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"{row.name} failed: {done.stderr.strip() or done.stdout.strip()}")
    found = json.loads(done.stdout)
    names = ("p50_ms", "p99_ms")
    return {
        "rate": found[row.rate],
        "errors": found["errors"],
        "units": found.get("events") or found.get("calls") or found["put_calls"],
        "generator_us": found["generator_us"],
        **{name: found[row.latency + name] for name in names},
    }


def run_round(program: Program, rows: tuple[Row, ...], scale: float, setting: Setting) -> dict[str, dict[str, Any]]:
    """All rows against a fresh cluster of one program."""
    with setting.cluster(program) as cluster:
        setting.prepare(list(cluster.endpoints))
        results = {}
        for row in rows:
            results[row.name] = measure(row, list(cluster.endpoints), scale, setting)
            summary = results[row.name]
            print(
                f"  {program.name:7} {row.name:25} {summary['rate']:>9,.0f}/s  p50 {summary['p50_ms']:.2f} ms",
                flush=True,
            )
        return results


def compare(rounds: int, rows: tuple[Row, ...], scale: float, setting: Setting) -> dict[str, Any]:
    """All rounds; the medians and their ratios."""
    seen: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        # The program that goes first changes, so that a drift of the machine favours neither.
        for program in PROGRAMS if number % 2 == 0 else reversed(PROGRAMS):
            for name, summary in run_round(program, rows, scale, setting).items():
                seen[name][program.name].append(summary)
    return {"machine": machine(), "rounds": rounds, "rows": [make_row(row, seen[row.name]) for row in rows]}


def make_row(row: Row, seen: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of one row; a ratio above 1 means that raftkv is better."""

    def median(program: str, key: str) -> float:
        return float(statistics.median(summary[key] for summary in seen[program]))

    etcd, raftkv = median("etcd", "rate"), median("raftkv", "rate")
    return {
        "row": row.name,
        "kind": row.kind,
        "etcd": round(etcd, 1),
        "raftkv": round(raftkv, 1),
        "unit": "1/s",
        "ratio": round(raftkv / etcd, 2),
        "etcd_p50_ms": median("etcd", "p50_ms"),
        "raftkv_p50_ms": median("raftkv", "p50_ms"),
        "etcd_p99_ms": median("etcd", "p99_ms"),
        "raftkv_p99_ms": median("raftkv", "p99_ms"),
        "errors": sum(sum(summary["errors"].values()) for runs in seen.values() for summary in runs),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "hot_path": "compiled" if is_compiled() else "interpreted",
        "date": date.today().isoformat(),
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown: one table for keys, one for watches, leases and locks."""
    lines = [*_rows_of(results, "keys"), "", *_rows_of(results, "streams"), ""]
    facts = results["machine"]
    lines.append(
        f"Three members and the load generator on {facts['cores']} shared cores, 256-byte values, fsync on, "
        f"median of {results['rounds']} alternating rounds, {facts['date']}. Rates of watches are events, and their "
        f"latencies those of the puts meanwhile; with idle watchers the rate is that of puts."
    )
    return "\n".join(lines)


def _rows_of(results: dict[str, Any], kind: str) -> list[str]:
    lines = [
        "| row | etcd 3.5.1 | raftkv | ratio | p50 etcd / raftkv | p99 etcd / raftkv |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in results["rows"]:
        if row["kind"] != kind:
            continue
        latencies = (f"{row[f'etcd_{p}_ms']:.1f} / {row[f'raftkv_{p}_ms']:.1f} ms" for p in ("p50", "p99"))
        cells = (row["row"], f"{row['etcd']:,.0f}/s", f"{row['raftkv']:,.0f}/s", f"**{row['ratio']:.2f}**", *latencies)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_table(text: str, name: str = "bench") -> None:
    """Put a table between the markers of its name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    page = TABLES[name]
    readme = page.read_text(encoding="utf-8")
    before, _, rest = readme.partition(begin)
    _, _, after = rest.partition(end)
    if not rest or end not in rest:
        raise SystemExit(f"{page.relative_to(ROOT)} lacks the markers {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


INK, MUTED, GRID = "#1f2933", "#52606d", "#e4e7eb"
STYLE = {
    "font.size": 9, "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": INK,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 14,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.edgecolor": "#cbd2d9",
    "axes.grid": True, "axes.grid.axis": "x", "axes.axisbelow": True, "grid.color": GRID, "ytick.major.size": 0,
    "legend.frameon": False, "figure.constrained_layout.use": True, "savefig.dpi": 130,
}  # fmt: skip
"""How all plots of bars look."""


@contextmanager
def drawing(path: Path, title: str, height: float) -> Iterator[Any]:
    """Write what the block draws on the axes to a file, in the common style."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(8, height))
        axes.set_title(title)
        yield axes
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path)
        pyplot.close(figure)


def plot(results: dict[str, Any]) -> None:
    """Bars of the ratios, from the line of etcd on: to the right faster, to the left slower."""
    rows = list(reversed(results["rows"]))
    names, ratios = [row["row"] for row in rows], [row["ratio"] for row in rows]
    with drawing(PLOT, "raftkv beside etcd 3.5.1, in one run", 0.32 * len(rows) + 1.3) as axes:
        colours = ["#2a6f97" if ratio >= 1 else "#bc6c25" for ratio in ratios]
        axes.barh(names, [ratio - 1 for ratio in ratios], left=1, color=colours, height=0.66)
        for place, ratio in enumerate(ratios):
            side = "left" if ratio >= 1 else "right"
            axes.annotate(f"{ratio:.2f}", (ratio, place), (4 if ratio >= 1 else -4, 0), textcoords="offset points",
                          ha=side, va="center", fontsize=8, color=INK)  # fmt: skip
        axes.axvline(1.0, color=MUTED, linewidth=1)
        axes.set_xlim(min(0.5, min(ratios) - 0.2), max(ratios) + 0.25)
        axes.set_xlabel("rate of raftkv as a multiple of etcd's (1 is etcd; left of it etcd is faster)")


def main() -> None:
    """Measure and write everything."""
    parser = argparse.ArgumentParser(description="raftkv beside etcd in one run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the calls of each row")
    parser.add_argument("--rows", default="", help="names, comma-separated; default: all")
    parser.add_argument("--tls", action="store_true", help="all under TLS, with certificates of clients and members")
    parser.add_argument("--users", action="store_true", help="as --tls, and members ask for users, by certificate")
    parser.add_argument("--dry-run", action="store_true", help="print the table and write no file")
    arguments = parser.parse_args()
    names = set(filter(None, arguments.rows.split(",")))
    is_kept = not (arguments.dry_run or names or arguments.tls or arguments.users)
    if is_kept and find_spec("matplotlib") is None:
        raise SystemExit("the plot of the results needs matplotlib: pip install matplotlib, or use --dry-run")
    rows = tuple(row for row in ROWS if not names or row.name in names)
    with tempfile.TemporaryDirectory(prefix="raftkv-bench-") as folder:
        is_secure = arguments.tls or arguments.users
        setting = Setting(Files.make(Path(folder)) if is_secure else None, arguments.users)
        results = compare(arguments.rounds, rows, arguments.scale, setting)
    print(table(results))
    if not is_kept:
        return
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    write_table(table(results))
    plot(results)


if __name__ == "__main__":
    main()
