"""The JSON gateway of raftkv beside etcd's: puts and linearizable ranges at 100 keep-alive connections of HTTP/1.1.

    python -m bench.gateway [--rounds 5] [--requests 20000]

Three members of each run all the time, and the leader of each is asked in turn, the first one another each round, so
that both meet the same moods of the machine. What counts is the median of the ratios; rates are those of this machine.
The generator is h2load (Debian's nghttp2-client), which costs 2 to 3 us a request.
"""

from __future__ import annotations

import base64
import json
import statistics
import sys
from contextlib import ExitStack

from bench.neutral import h2load, usual
from bench.report import markdown, parser_of
from bench.stage import PROGRAMS, in_turn, leader_of, progress
from tests.procs import Cluster

CONNECTIONS = 100
KEY = base64.b64encode(b"gateway/key").decode()
ROWS = {"put": {"key": KEY, "value": base64.b64encode(b"v" * 256).decode()}, "range": {"key": KEY}}
FLAGS = ("--h1", "-H", "content-type: application/json")


def main() -> None:
    """Measure, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20_000)
    asked = parser.parse_args()
    if usual() != "h2load":
        sys.exit("bench: h2load is missing: install nghttp2-client")
    rates: dict[str, dict[str, list[float]]] = {row: {program.name: [] for program in PROGRAMS} for row in ROWS}
    with ExitStack() as stack:
        clusters = [stack.enter_context(Cluster(program, size=3)) for program in PROGRAMS]
        for number in range(asked.rounds):
            for row, message in ROWS.items():
                for cluster in in_turn(clusters, number):
                    url, body = f"http://{leader_of(cluster).endpoint}/v3/kv/{row}", json.dumps(message).encode()
                    sent = h2load(url, body, *FLAGS, requests=asked.requests, connections=CONNECTIONS)
                    rates[row][cluster.program.name].append(sent.rate)
                    progress(f"round {number + 1}: {row} {cluster.program.name}: {sent.rate:.0f}/s")
    lines = []
    for row, found in rates.items():
        ratios = [ours / theirs for theirs, ours in zip(found["etcd"], found["raftkv"], strict=True)]
        etcd, raftkv, ratio = map(statistics.median, (found["etcd"], found["raftkv"], ratios))
        lines.append((f"{row}, {CONNECTIONS} connections", f"{etcd:.0f}/s", f"{raftkv:.0f}/s", f"{ratio:.2f}"))
    print(markdown(("", "etcd", "raftkv", "raftkv / etcd"), lines))


if __name__ == "__main__":
    main()
