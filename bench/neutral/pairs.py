"""Measures rows in pairs: both clusters are up all the time, and who goes first changes from pair to pair.

Invariants:
- All calls go to the leader; a measurement in which it changed is made again.
- Answers were good. Calls that write have added exactly so many revisions to the store. Calls that read brought back
  exactly as many bytes as that many copies of one answer, which grpcio asked for and which holds the value.
- Both programs are asked for about the same time, by the rate that they reached before.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import compare
from bench.neutral.generators import GENERATORS, Sent
from bench.neutral.rows import KEY, LEASE, PUT, VALUE, Calls
from raftkv.pb import rpc_pb2
from tests.compat.wire import Wire
from tests.procs import Cluster, Program
from tests.server.process.process import leader_of

# -- processor ------------------------------------------------------------------------------------------------------
#
# Processor time of members, of a generator and of all else on the machine, from `/proc`.

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_IDLE, _IO_WAIT, _GUEST = 3, 4, 8
"""Fields of the first line of `/proc/stat`; guests are counted as user time already."""


def process_s(pid: int) -> float:
    """User and system time of a process with all its threads, in seconds, to 10 ms."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS_A_SECOND


def busy_s(stat: str) -> float:
    """Time in which the machine's cores were not idle, in seconds, from the text of `/proc/stat`."""
    fields = [int(field) for field in stat.splitlines()[0].split()[1 : 1 + _GUEST]]
    return (sum(fields) - fields[_IDLE] - fields[_IO_WAIT]) / _TICKS_A_SECOND


@dataclass(frozen=True)
class Times:
    """Clocks at one moment, or what passed between two, in seconds of processors but for ``wall_s``.

    Attributes:
        members: of one cluster.
        ours: this process and the children that it has waited for.
        all: whatever kept the machine's cores busy.
    """

    wall_s: float
    members: float
    ours: float
    all: float

    def __sub__(self, before: Times) -> Times:
        return Times(
            self.wall_s - before.wall_s, self.members - before.members, self.ours - before.ours, self.all - before.all
        )

    @property
    def others_share(self) -> float:
        """Share of the machine's cores that others than the members and this benchmark used, 0 to 1."""
        cores_s = self.wall_s * (os.cpu_count() or 1)
        return min(1.0, max(0.0, self.all - self.members - self.ours) / cores_s)


def now(pids: Sequence[int]) -> Times:
    """Read all clocks."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Times(
        time.perf_counter(),
        sum(map(process_s, pids)),
        sum(usage.ru_utime + usage.ru_stime for usage in usages),
        busy_s(Path("/proc/stat").read_text(encoding="utf-8")),
    )


def pids_of(cluster: Cluster) -> list[int]:
    """Return the processes of all members."""
    return [member.process.pid for member in cluster.members if member.process is not None]


ATTEMPTS = 5
_RANGE = rpc_pb2.RangeRequest(key=KEY)
_FRAME_HEAD_BYTES = 5

Row = Calls | compare.Row
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """One row, one program, one pair.

    Attributes:
        rate: calls a second; of watches: events.
        members_us: processor time of all members for a call, in microseconds.
        leader_us: the leader's part of that.
        generator_us: the same of the generator.
        others_share: of the machine's cores, used by others meanwhile, 0 to 1.
    """

    rate: float
    members_us: float
    leader_us: float
    generator_us: float
    others_share: float


class Scene:
    """A cluster that is up, and an independent client for checks."""

    def __init__(self, cluster: Cluster) -> None:
        self.name = cluster.program.name
        self.endpoints = cluster.endpoints
        self.pids = pids_of(cluster)
        self._wire = Wire(cluster.endpoints)
        self._ask("etcdserverpb.KV/Put", PUT)
        self._ask("etcdserverpb.Lease/LeaseGrant", LEASE)

    def close(self) -> None:
        """Let the client go."""
        self._wire.close()

    def _ask(self, method: str, request: Any, member: int = 0) -> Any:
        answer = self._wire.call(method, request, member)
        if answer.message is None:
            raise SystemExit(f"bench: {self.name}: {answer.code}: {answer.text}")
        return answer.message

    def leader(self) -> str:
        """Return the endpoint of the member that leads."""
        member = leader_of(self._wire)
        if member < 0:
            raise SystemExit(f"bench: {self.name} has no leader")
        return self.endpoints[member]

    def read(self, member: str) -> Any:
        """Ask a member for the key of all rows."""
        return self._ask("etcdserverpb.KV/Range", _RANGE, self.endpoints.index(member))


def send_checked(row: Calls, scene: Scene, leader: str, generator: str, calls: int) -> Sent:
    """Send so many calls of a row; SystemExit if an answer cannot have been good."""
    before = scene.read(leader)
    sent = GENERATORS[generator](row, leader, calls)
    after = scene.read(leader)
    check(row, calls, sent, before, after)
    return sent


def check(row: Calls, calls: int, sent: Sent, before: Any, after: Any) -> None:
    """Compare what was answered with the key of all rows, as read before and after. SystemExit as above."""
    added, wanted = after.header.revision - before.header.revision, calls * row.revisions
    if added != wanted:
        raise SystemExit(f"bench: {row.name}: {calls} calls were to add {wanted} revisions, and added {added}")
    if [kv.value for kv in after.kvs] != [VALUE]:
        raise SystemExit(f"bench: {row.name}: the key of all rows has another value")
    answered = calls * row.requests * (_FRAME_HEAD_BYTES + row.answer(after).ByteSize())
    if not row.revisions and sent.data_bytes not in (None, answered):
        raise SystemExit(f"bench: {row.name}: {sent.data_bytes} bytes were answered, not {answered}")


def measure(row: Row, scene: Scene, generator: str, calls: int) -> Measured:
    """Measure a row once; again, if the leader changed meanwhile."""
    for _ in range(ATTEMPTS):
        leader = scene.leader()
        leader_pid = scene.pids[scene.endpoints.index(leader)]
        before, leader_before_s = now(scene.pids), process_s(leader_pid)
        if isinstance(row, Calls):
            sent, units = send_checked(row, scene, leader, generator, calls), calls * row.requests
            rate, generator_us = sent.rate * row.requests, sent.generator_s / units * 1e6
        else:
            found = compare.measure(row, [leader], calls / row.total, compare.Setting())
            rate, generator_us, units = found["rate"], found["generator_us"], found["units"]
            if found["errors"]:
                raise SystemExit(f"bench: {row.name}: {found['errors']}")
        spent, leader_s = now(scene.pids) - before, process_s(leader_pid) - leader_before_s
        if scene.leader() == leader:
            members_us, leader_us = (seconds / units * 1e6 for seconds in (spent.members, leader_s))
            return Measured(rate, members_us, leader_us, generator_us, spent.others_share)
    raise SystemExit(f"bench: {scene.name} changed its leader {ATTEMPTS} times")


def calls_for(row: Row, scene: Scene, generator: str, seconds: float) -> int:
    """Return how many calls take about so long, after a short run that warms both ends."""
    if not isinstance(row, Calls):
        return max(row.clients, int(row.total * seconds))
    first = 200 + 10 * row.clients
    return max(first, int(measure(row, scene, generator, first).rate / row.requests * seconds))


def run(
    programs: Sequence[Program], rows: Sequence[Row], pairs: int, seconds: float, generator: str, tell: Tell
) -> dict[str, Any]:
    """Measure all pairs of all rows.

    Arguments:
        programs: etcd and raftkv.
        seconds: length of one measurement, about.
        generator: of unary calls, by name.
        tell: told of each measurement.
    """
    seen: dict[str, dict[str, list[Measured]]] = {row.name: {each.name: [] for each in programs} for row in rows}
    with ExitStack() as stack:
        scenes = [Scene(stack.enter_context(Cluster(program, size=3))) for program in programs]
        for scene in scenes:
            stack.callback(scene.close)
        load_before = os.getloadavg()[0]
        calls = {(row.name, scene.name): calls_for(row, scene, generator, seconds) for row in rows for scene in scenes}
        for number in range(pairs):
            for row in rows:
                for scene in scenes if number % 2 == 0 else reversed(scenes):
                    found = measure(row, scene, generator, calls[row.name, scene.name])
                    seen[row.name][scene.name].append(found)
                    tell(f"pair {number + 1}: {row.name:24} {scene.name:7} {found.rate:>9,.0f}/s")
    return {
        "machine": {**compare.machine(), "load_before": round(load_before, 1)},
        "pairs": pairs,
        "seconds": seconds,
        "rows": [
            {
                "row": row.name,
                "generator": generator if isinstance(row, Calls) else "raftkvctl",
                **{name: [asdict(one) for one in found] for name, found in seen[row.name].items()},
            }
            for row in rows
        ],
    }


def tell_on_stderr(text: str) -> None:
    """Show progress beside the results."""
    print(text, file=sys.stderr, flush=True)
