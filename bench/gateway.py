"""The JSON gateway of raftkv beside etcd's: puts and linearizable ranges at 100 keep-alive connections of HTTP/1.1.

    python -m bench.gateway [--rounds 5] [--requests 20000]

Three members of each run all the time, and the leader of each is asked in turn, the first one another each round, so
that both meet the same moods of the machine. What counts is the median of the ratios; rates are those of this machine.
The generator is h2load (Debian's nghttp2-client), which costs 2 to 3 us a request.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.compare import PROGRAMS
from bench.neutral import h2load
from bench.neutral.pairs import tell_on_stderr
from tests.compat.wire import Wire
from tests.procs import Cluster
from tests.server.process.process import leader_of

CONNECTIONS = 100
VALUE_BYTES = 256
KEY = base64.b64encode(b"gateway/key").decode()
VALUE = base64.b64encode(b"v" * VALUE_BYTES).decode()
ROWS = {"put": {"key": KEY, "value": VALUE}, "range": {"key": KEY}}
_FLAGS = ("--h1", "-H", "content-type: application/json")


def measure(endpoint: str, row: str, requests: int, body: Path) -> float:
    """Send so many requests; return how many a second were answered.

    Raises:
        SystemExit: not all of them were answered well.
    """
    url = f"http://{endpoint}/v3/kv/{row}"
    return h2load.send(url, body, requests=requests, connections=CONNECTIONS, flags=_FLAGS).rate


def main(words: Sequence[str]) -> int:
    """Measure what the command line asks for; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20_000)
    asked = parser.parse_args(words)
    if not h2load.is_installed():
        raise SystemExit("bench: h2load is missing: install nghttp2-client")
    rates: dict[str, dict[str, list[float]]] = {row: {program.name: [] for program in PROGRAMS} for row in ROWS}
    with (
        Cluster(PROGRAMS[0], size=3) as first,
        Cluster(PROGRAMS[1], size=3) as second,
        tempfile.TemporaryDirectory() as folder,
        ExitStack() as stack,
    ):
        wires = [stack.enter_context(Wire(cluster.endpoints)) for cluster in (first, second)]
        for number in range(asked.rounds):
            for row, message in ROWS.items():
                body = Path(folder) / f"{row}.json"
                body.write_text(json.dumps(message), encoding="ascii")
                for cluster, wire in list(zip((first, second), wires, strict=True))[:: (1, -1)[number % 2]]:
                    rate = measure(cluster.endpoints[leader_of(wire)], row, asked.requests, body)
                    rates[row][cluster.program.name].append(rate)
                    tell_on_stderr(f"round {number + 1}: {row} {cluster.program.name}: {rate:.0f}/s")
    print("| | etcd | raftkv | raftkv / etcd |\n|---|---|---|---|")
    for row, found in rates.items():
        ratios = [ours / theirs for theirs, ours in zip(found["etcd"], found["raftkv"], strict=True)]
        etcd, raftkv, ratio = map(statistics.median, (found["etcd"], found["raftkv"], ratios))
        print(f"| {row}, {CONNECTIONS} connections | {etcd:.0f}/s | {raftkv:.0f}/s | {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
