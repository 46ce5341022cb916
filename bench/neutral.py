"""raftkv beside real etcd 3.5.1 under an independent load generator: h2load.

    python -m bench.neutral                              5 pairs, about six minutes
    python -m bench.neutral --pairs 1 --seconds 0.5      a quick look, under a minute
    python -m bench.neutral --rows put-c100,txn-c100

It needs Debian's nghttp2-client. Both clusters run all the time, and the order of the programs alternates from pair to
pair. `--write` stores the results in bench/neutral.json and the table in docs/reference/performance.md, separately for
each kind of hot path (interpreted, or compiled by `make native`). Nothing is written if other work used more than a
quarter of the cores, because the rates would then measure the contention.

Invariants:
- All calls go to the leader; if the leader changed during a measurement, the measurement is repeated.
- Answers are checked. Calls that write must have added exactly the expected number of revisions to the store. Calls
  that read must have returned exactly as many bytes as the same number of copies of one answer, which grpcio requested
  and which contains the value.
- Both programs are measured for about the same time, based on the rate that they reached before.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import keep, machine, markdown, medians, parser_of, write_table
from bench.stage import PROGRAMS, TICKS_PER_S, in_turn, leader_of, pids_of, processor_s, progress
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.rpc.framing import frame
from tests.compat.wire import Wire
from tests.procs import Cluster

RESULTS = Path(__file__).with_suffix(".json")
TABLES = {"interpreted": "neutral", "compiled": "neutral-compiled"}
"""The table for each kind of hot path."""
OTHERS_SHARE_MAX = 0.25
"""Maximum share of the cores that other work may use in a stored run."""
ATTEMPTS = 5
TIMEOUT_S = 600.0
_FRAME_HEAD_BYTES = 5
_GRPC = ("-H", "content-type: application/grpc", "-H", "te: trailers")

# ---- rows

KEY = b"neutral/key"
VALUE = b"v" * 256
PUT = rpc_pb2.PutRequest(key=KEY, value=VALUE)
LEASE = rpc_pb2.LeaseGrantRequest(ID=0x1234, TTL=3600)


@dataclass(frozen=True)
class Calls:
    """Identical calls, because h2load takes one request body.

    Attributes:
        connections: connections of the generator.
        streams: concurrent calls on each connection.
        revisions: revisions that each call adds to the store; 0: the call reads.
        messages: requests in one call; 0: the call is unary.
        answer: returns the expected answer of a reading call for one request, given a range read of the key.
    """

    name: str
    path: str
    message: bytes
    connections: int = 100
    streams: int = 1
    revisions: int = 0
    messages: int = 0
    answer: Callable[[rpc_pb2.RangeResponse], Any] = lambda read: read

    @property
    def requests(self) -> int:
        """Number of requests in a call."""
        return max(1, self.messages)

    @property
    def body(self) -> bytes:
        """The request messages with gRPC's framing."""
        return bytes(frame(self.message)) * self.requests


def _kept(read: rpc_pb2.RangeResponse) -> rpc_pb2.LeaseKeepAliveResponse:
    return rpc_pb2.LeaseKeepAliveResponse(header=read.header, ID=LEASE.ID, TTL=LEASE.TTL)


_put = partial(Calls, path=methods.PUT.path, message=PUT.SerializeToString(), revisions=1)
_keep_bytes = rpc_pb2.LeaseKeepAliveRequest(ID=LEASE.ID).SerializeToString()
_keep = partial(Calls, path=methods.LEASE_KEEP_ALIVE.path, message=_keep_bytes, answer=_kept)
_RANGE = rpc_pb2.RangeRequest(key=KEY)
_SERIALIZABLE = rpc_pb2.RangeRequest(key=KEY, serializable=True)
_EXISTS = rpc_pb2.Compare(key=KEY, target=rpc_pb2.Compare.VERSION, result=rpc_pb2.Compare.GREATER, version=0)
_TXN = rpc_pb2.TxnRequest(compare=[_EXISTS], success=[rpc_pb2.RequestOp(request_put=PUT)])
CALLS = (
    _put("put-c1", connections=1),
    _put("put-c10", connections=10),
    _put("put-c100"),
    _put("put-c100x10", streams=10),
    Calls("range-linearizable-c100", methods.RANGE.path, _RANGE.SerializeToString()),
    Calls("range-serializable-c100", methods.RANGE.path, _SERIALIZABLE.SerializeToString()),
    Calls("txn-c100", methods.TXN.path, _TXN.SerializeToString(), revisions=1),
    _keep("lease-keepalive-once-c100", messages=1),
    _keep("lease-keepalive-ten-c100", messages=10),
)
ROWS = {row.name: row for row in CALLS}


# ---- the generator: it shares the cores with the members, so its processor time is shown beside each figure


@dataclass(frozen=True)
class Sent:
    """The measurements of a generator.

    Attributes:
        rate: answered calls per second.
        generator_s: processor time of the generator, in seconds.
        data_bytes: total size of all answers' bodies.
    """

    rate: float
    generator_s: float
    data_bytes: int


def send(row: Calls, endpoint: str, calls: int) -> Sent:
    """POST the row's body ``calls`` times, in one thread.

    h2load counts answers by their HTTP status, and a failed gRPC call has status 200 too, so ``check`` the results.

    Raises:
        SystemExit: some requests were not answered with a status of 2xx.
    """
    before_s = _usage_s(resource.RUSAGE_CHILDREN)
    with tempfile.NamedTemporaryFile(prefix="raftkv-bench-") as file:
        file.write(row.body)
        file.flush()
        sizes = (f"-c{row.connections}", f"-m{row.streams}", f"-n{calls}")
        command = ["h2load", "-t1", *sizes, "-d", file.name, *_GRPC, f"http://{endpoint}{row.path}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    return parse_h2load(done.stdout + done.stderr, calls, _usage_s(resource.RUSAGE_CHILDREN) - before_s)


def parse_h2load(text: str, requests: int, generator_s: float = 0.0) -> Sent:
    """Parse the output of h2load. Raises SystemExit as ``send``."""
    patterns = (r"finished in [^,]+, ([0-9.]+) req/s", r"status codes: (\d+) 2xx", r"\((\d+)\) data")
    rate, good, data = (re.search(pattern, text) for pattern in patterns)
    if rate is None or good is None or data is None or int(good[1]) != requests:
        raise SystemExit(f"bench: h2load: {text}")
    return Sent(float(rate[1]), generator_s, int(data[1]))


# ---- pairs


def _usage_s(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def busy_s(stat: str) -> float:
    """Return the busy time of the machine's cores in seconds, from the text of `/proc/stat`."""
    user, nice, system, _idle, _io_wait, *interrupts = (int(field) for field in stat.splitlines()[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / TICKS_PER_S  # guest times are included in user time


class Meter:
    """Processor time since this object was created: of all members, their leader, this process, and the machine."""

    def __init__(self, pids: Sequence[int], leader_pid: int) -> None:
        self._read = lambda: (
            time.perf_counter() * (os.cpu_count() or 1),
            sum(map(processor_s, pids)),
            processor_s(leader_pid),
            _usage_s(resource.RUSAGE_SELF) + _usage_s(resource.RUSAGE_CHILDREN),
            busy_s(Path("/proc/stat").read_text(encoding="utf-8")),
        )
        self._before = self._read()

    def costs(self, units: int) -> dict[str, float]:
        """Return the members' microseconds per unit, and the share of the cores that other work used, 0 to 1."""
        spent = (now - before for now, before in zip(self._read(), self._before, strict=True))
        cores_s, members_s, leader_s, ours_s, all_s = spent
        others = min(1.0, max(0.0, all_s - members_s - ours_s) / cores_s)
        return {"members_us": members_s / units * 1e6, "leader_us": leader_s / units * 1e6, "others_share": others}


class Scene:
    """A running cluster, and an independent client for checks."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self.cluster = cluster
        self.name = cluster.program.name
        self._wire = stack.enter_context(Wire(cluster.endpoints))
        self._ask("etcdserverpb.KV/Put", PUT)
        self._ask("etcdserverpb.Lease/LeaseGrant", LEASE)

    def _ask(self, method: str, request: Any, member: int = 0) -> Any:
        answer = self._wire.call(method, request, member)
        if answer.message is None:
            raise SystemExit(f"bench: {self.name}: {answer.code}: {answer.text}")
        return answer.message

    def read(self, endpoint: str) -> Any:
        """Read the common key of all rows from a member."""
        return self._ask("etcdserverpb.KV/Range", _RANGE, self.cluster.endpoints.index(endpoint))

    def measure(self, row: Calls, calls: int) -> dict[str, float]:
        """Measure a row once, or again if the leader changed in the meantime.

        Returns:
            ``rate``; ``members_us``, ``leader_us``, ``generator_us`` per request; ``others_share``.
        """
        for _ in range(ATTEMPTS):
            leader, units = leader_of(self.cluster), calls * row.requests
            meter, before = Meter(pids_of(self.cluster), leader.process.pid), self.read(leader.endpoint)
            sent = send(row, leader.endpoint, calls)
            check(row, calls, sent, before, self.read(leader.endpoint))
            costs = {"generator_us": sent.generator_s / units * 1e6, **meter.costs(units)}
            if leader_of(self.cluster) is leader:
                return {"rate": sent.rate * row.requests, **costs}
        raise SystemExit(f"bench: {self.name} changed its leader {ATTEMPTS} times")

    def calls_for(self, row: Calls, seconds: float) -> int:
        """Return the number of calls that take about this many seconds, after a short run that warms up both ends."""
        first = 200 + 10 * row.connections * row.streams
        return max(first, int(self.measure(row, first)["rate"] / row.requests * seconds))


def check(row: Calls, calls: int, sent: Sent, before: Any, after: Any) -> None:
    """Compare the answers with the common key, as read before and after; raise SystemExit if they differ."""
    added, wanted = after.header.revision - before.header.revision, calls * row.revisions
    if added != wanted:
        raise SystemExit(f"bench: {row.name}: {calls} calls were to add {wanted} revisions, and added {added}")
    if [kv.value for kv in after.kvs] != [VALUE]:
        raise SystemExit(f"bench: {row.name}: the key of all rows has another value")
    answered = calls * row.requests * (_FRAME_HEAD_BYTES + row.answer(after).ByteSize())
    if not row.revisions and sent.data_bytes != answered:
        raise SystemExit(f"bench: {row.name}: {sent.data_bytes} bytes were answered, not {answered}")


def run(rows: Sequence[Calls], pairs: int, seconds: float) -> dict[str, Any]:
    """Measure all pairs of all rows; each measurement takes about the given time."""
    seen: dict[str, dict[str, list[Any]]] = {row.name: {each.name: [] for each in PROGRAMS} for row in rows}
    with ExitStack() as stack:
        scenes = [Scene(stack.enter_context(Cluster(program, 3)), stack) for program in PROGRAMS]
        facts = machine()
        calls = {(row.name, scene.name): scene.calls_for(row, seconds) for row in rows for scene in scenes}
        for number in range(pairs):
            for row in rows:
                for scene in in_turn(scenes, number):
                    found = scene.measure(row, calls[row.name, scene.name])
                    seen[row.name][scene.name].append(found)
                    progress(f"pair {number + 1}: {row.name:24} {scene.name:7} {found['rate']:>9,.0f}/s")
    lines = [{"row": name, **found} for name, found in seen.items()]
    return {"machine": facts, "pairs": pairs, "seconds": seconds, "rows": lines}


# ---- the table


def _us(value: float) -> str:
    """Format microseconds with two significant digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _line(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row; a ratio is raftkv's figure divided by etcd's in the same pair."""
    etcd, raftkv = medians(row["etcd"]), medians(row["raftkv"])
    ratios = [ours["rate"] / theirs["rate"] for theirs, ours in zip(row["etcd"], row["raftkv"], strict=True)]
    names = ("generator_us", "members_us", "leader_us")
    generator, members, leader = (f"{_us(etcd[name])} / {_us(raftkv[name])} us" for name in names)
    cost = raftkv["members_us"] / etcd["members_us"] if etcd["members_us"] else 0.0
    spread = f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}-{max(ratios):.2f})"
    rates = (f"{etcd['rate']:,.0f}/s", f"{raftkv['rate']:,.0f}/s")
    return [row["row"], generator, *rates, spread, members, f"{cost:.2f}", leader]


def others_shares(results: dict[str, Any]) -> list[float]:
    """Return the share of the cores that other work used, for each measurement."""
    return [one["others_share"] for row in results["rows"] for name in ("etcd", "raftkv") for one in row[name]]


def table(results: dict[str, Any]) -> str:
    """Return the table, with a description of its conditions."""
    names = ("row", "h2load's cost", "etcd 3.5.1", "raftkv", "ratio (range)", "members' cost", "ratio", "the leader's")
    text = markdown(names, map(_line, results["rows"]))
    facts, shares = results["machine"], others_shares(results)
    return (
        f"{text}\n\n"
        f"Three members of each program and the generator on {facts['cores']} shared cores, both clusters up, calls "
        f"to the leader, 256-byte values, fsync on; {results['pairs']} alternating pairs of about "
        f"{results['seconds']:g} s, {facts['date']}, Python {facts['python']}, hot path {facts['hot_path']}. "
        f"Rates and ratios are medians. Costs are user and system time of processors for a request, etcd / raftkv; "
        f"members are taken all three together. All calls of a row are the same bytes, so all puts go to one key. "
        f"Load of the machine before the run "
        f"{facts['load']:g}; other work used {statistics.median(shares):.0%} of the cores meanwhile "
        f"({min(shares):.0%} to {max(shares):.0%})."
    )


def write(results: dict[str, Any]) -> int:
    """Write the results and the table, if the run was undisturbed; return the exit code."""
    others = statistics.median(others_shares(results))
    if others > OTHERS_SHARE_MAX:
        print(f"bench: not kept: other work used {others:.0%} of the cores", file=sys.stderr)
        return 1
    kind = results["machine"]["hot_path"]
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    keep(RESULTS, {**kept, kind: results})
    write_table(table(results), TABLES[kind])
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Run the measurements of the command line."""
    parser = parser_of(__doc__, list(ROWS), writes="the results, and the table in the documentation")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each row and program")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement, about")
    given = parser.parse_args(words)
    if shutil.which("h2load") is None:
        raise SystemExit("bench: h2load is missing: install nghttp2-client")
    results = run([ROWS[name] for name in given.rows], given.pairs, given.seconds)
    print(table(results))
    return write(results) if given.write else 0


if __name__ == "__main__":
    sys.exit(main())
