"""raftkv beside real etcd 3.5.1 under h2load.

    python -m bench.neutral                              5 pairs, about six minutes
    python -m bench.neutral --pairs 1 --seconds 0.5      a quick look, under a minute
    python -m bench.neutral --rows put-c100,txn-c100 --json

Without h2load (Debian: nghttp2-client) the generator of `raftkvctl bench` sends the same bytes; each row names its
generator and what that cost. `--write` keeps the results in bench/neutral/results.json and puts the table into
docs/reference/performance.md, in both by what the hot path is (interpreted, or compiled by `make native`), unless other
work used more than a quarter of the cores: then the rates are those of the contention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.compare import PROGRAMS, write_table
from bench.neutral import generators, pairs, report
from bench.neutral.rows import ROWS, Calls

RESULTS = Path(__file__).parent / "results.json"
TABLES = {"interpreted": "neutral", "compiled": "neutral-compiled"}
"""The table of each kind of hot path."""
OTHERS_SHARE_MAX = 0.25
"""Share of the cores that others may have used in a run that is kept."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.neutral", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each row and program")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement, about")
    parser.add_argument("--rows", default="", help=f"comma-separated; all: {','.join(row.name for row in ROWS)}")
    parser.add_argument("--generator", choices=sorted(generators.GENERATORS), default=generators.usual())
    parser.add_argument("--json", action="store_true", help="one object instead of the table")
    parser.add_argument("--write", action="store_true", help="keep the results, and the table in the documentation")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Measure what the command line asks for."""
    options = parse(words)
    names = set(filter(None, options.rows.split(",")))
    if unknown := names - {row.name for row in ROWS}:
        raise SystemExit(f"bench: no row is called {', '.join(sorted(unknown))}")
    rows = [row for row in ROWS if not names or row.name in names]
    unsent = {row.name for row in rows if isinstance(row, Calls) and not generators.can_send(options.generator, row)}
    if names & unsent:
        raise SystemExit(f"bench: {', '.join(sorted(names & unsent))}: only h2load can send that")
    rows = [row for row in rows if row.name not in unsent]
    results = pairs.run(PROGRAMS, rows, options.pairs, options.seconds, options.generator, pairs.tell_on_stderr)
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        report.show(results)
    return keep(results) if options.write else 0


def keep(results: dict[str, Any]) -> int:
    """Write the results and the table, if the run was undisturbed; return the exit code."""
    others = statistics.median(report.others_shares(results))
    if others > OTHERS_SHARE_MAX:
        print(f"bench: not kept: other work used {others:.0%} of the cores", file=sys.stderr)
        return 1
    kind = results["machine"]["hot_path"]
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**kept, kind: results}, indent=2) + "\n", encoding="utf-8")
    write_table(report.markdown(results), TABLES[kind])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
