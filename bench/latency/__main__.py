"""Where the microseconds of one put go, on three members and one client.

    python -m bench.latency measure --puts 3000 --out before.json
    python -m bench.latency draw before.json after.json --picture docs/images/put-latency.svg

`draw` takes any number of results, names each after its file, and draws them under each other; it needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.latency.draw import draw, lines
from bench.latency.measure import measure
from tests.procs import ROOT

PICTURE = ROOT / "docs" / "images" / "put-latency.svg"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.latency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="measure, and print each stage")
    measuring.add_argument("--puts", type=int, default=3000)
    measuring.add_argument("--fastest", type=float, default=1.0, help="share of the puts to look at, on a busy machine")
    measuring.add_argument("--out", type=Path, help="keep the result in this file")
    drawing = commands.add_parser("draw", help="draw results that were kept")
    drawing.add_argument("results", type=Path, nargs="+")
    drawing.add_argument("--picture", type=Path, default=PICTURE, help="SVG or PNG, by its ending")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Do what the command line asks for."""
    options = parse(words)
    if options.command == "draw":
        paths = {path.stem: path for path in options.results}
        if len(paths) < len(options.results):
            raise SystemExit("bench: two results have the same name")
        results = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}
        draw(results, options.picture)
        return 0
    result = measure(options.puts, options.fastest)
    print("\n".join(lines(options.out.stem if options.out else "raftkv", result)))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
