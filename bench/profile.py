"""Where a member's processor time goes: microseconds for each operation, by stage.

    python -m bench.profile [--rows put-c100,txn-c100] [--scale 1.0]

For each row a cluster of three members is loaded as ``bench.compare`` does it, from the member that leads on. The
processor time of a member is the kernel's (``/proc/PID/task``), so other work on the machine hardly changes it. How the
loop's part of it is shared among the stages is sampled by the member itself (``/debug/pprof/profile``): a sample counts
for the innermost function of its stack that the table below knows.

    stage         leader  follower
    check            1.1       0.0
    answer           2.1       0.0
    ...

``loop`` is asyncio with the system calls that it makes on sockets, ``wait`` its calls of epoll. Threads beside the loop
(commits of the database, the log's) are one line. A sample stands for 10 ms: a row needs some seconds of processor time
for figures that mean something, and its number of samples is the last line. Leaves out: latencies, other programs.
"""

from __future__ import annotations

import argparse
import os
import re
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.compare import ROWS, Row, Setting, measure
from tests.procs import RAFTKV, Cluster, Member, http_get

PROGRAM: Final = RAFTKV.with_flags("--log-level", "error", "--enable-pprof")
SAMPLED_S: Final = 2.0
"""For so long a member looks at its loop, again and again until the load ends."""
TICK_US: Final = 1e6 / os.sysconf("SC_CLK_TCK")

STAGES: Final[tuple[tuple[str, str], ...]] = (
    ("check", r"apply/check|services/(crowded|leader_guard)|node/admission|apply/alarms|auth/"),
    (
        "answer",
        r"rpc/cork|services/responder:.*(reply|finish)|apply/response|server/(core|calls):.*(reply|_answer|send)",
    ),
    ("propose", r"node/proposals|services/|apply/request"),
    ("wal", r"wal/|node/disk"),
    ("replicate", r"peer/|client/"),
    ("raft", r"raft/"),
    ("watch", r"watch/"),
    ("lease", r"lease/|apply/leases|storage/attachments"),
    ("index", r"storage/(index|key_index)|sortedcontainers/"),
    ("store", r"storage/|backend/"),
    ("apply", r"apply/|node/applying"),
    ("node", r"node/"),
    ("rpc", r"rpc/|server/"),
    ("wait", r".*selectors:"),
    ("loop", r"asyncio/"),
)
"""Stages, each with the functions that it is made of (``folder/module:name``); the first that fits counts."""
THREADS: Final = "other threads"
SAMPLES: Final = "samples"
_PATTERNS: Final = tuple((stage, re.compile(pattern)) for stage, pattern in STAGES)


def stage_of(stack: str) -> str:
    """Return the stage of a folded stack.

    >>> stage_of("asyncio/events:Handle._run;server/core:Server.read;services/kv:KVService.put;apply/check:check_put")
    'check'
    """
    for frame in reversed(stack.split(";")):
        for stage, pattern in _PATTERNS:
            if pattern.match(frame):
                return stage
    return "else"


@dataclass
class Used:
    """Processor time of a process so far, in microseconds: its loop, and all other threads."""

    loop_us: float
    others_us: float

    @classmethod
    def of(cls, pid: int) -> Used:
        """Read it from the kernel."""
        times = {}
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = (task / "stat").read_text("ascii").rpartition(")")[2].split()
            times[int(task.name)] = (int(fields[11]) + int(fields[12])) * TICK_US
        return cls(times[pid], sum(times.values()) - times[pid])


class Sampler(threading.Thread):
    """Has a member look at its loop, from the start of this thread to ``end``."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self._endpoint = member.endpoint
        self._ended = threading.Event()
        self.stages: Counter[str] = Counter()
        self.start()

    def end(self) -> Counter[str]:
        """Return the number of samples of each stage."""
        self._ended.set()
        self.join()
        return self.stages

    def run(self) -> None:
        """Ask, and add up what is answered."""
        path = f"/debug/pprof/profile?seconds={SAMPLED_S:g}"
        while not self._ended.is_set():
            status, _, text = http_get(self._endpoint, path, timeout_s=SAMPLED_S + 60)
            if status != 200:
                raise SystemExit(f"{self._endpoint}{path}: {status} {text}")
            for line in text.splitlines():
                stack, _, count = line.rpartition(" ")
                self.stages[stage_of(stack)] += int(count)


def leader_of(members: list[Member]) -> Member:
    """Return the member that leads."""
    for member in members:
        if '"raftState":"StateLeader"' in http_get(member.endpoint, "/debug/vars")[2]:
            return member
    raise SystemExit("no member leads")


def profile(row: Row, scale: float) -> dict[str, dict[str, float]]:
    """Load a fresh cluster with one row; microseconds of each stage for an operation, of the leader and a follower."""
    with Cluster(PROGRAM, size=3) as cluster:
        leader = leader_of(cluster.members)
        follower = next(member for member in cluster.members if member is not leader)
        looked_at = {"leader": leader, "follower": follower}
        endpoints = [leader.endpoint]
        measure(row, endpoints, scale / 10, Setting())
        before = {name: Used.of(_pid(member)) for name, member in looked_at.items()}
        samplers = {name: Sampler(member) for name, member in looked_at.items()}
        measure(row, endpoints, scale, Setting())
        operations = max(row.clients, int(row.total * scale))
        found = {}
        for name, member in looked_at.items():
            used = Used.of(_pid(member))
            stages = samplers[name].end()
            loop_us = (used.loop_us - before[name].loop_us) / operations
            found[name] = {stage: loop_us * count / stages.total() for stage, count in stages.items()}
            found[name][THREADS] = (used.others_us - before[name].others_us) / operations
            found[name][SAMPLES] = stages.total()
        return found


def _pid(member: Member) -> int:
    if member.process is None:
        raise SystemExit(f"{member.name} has ended")
    return member.process.pid


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """The figures of all rows as Markdown: a line for each stage, a column for each row, leader / follower."""
    stages = (*(stage for stage, _ in STAGES), "else", THREADS)
    for member in (member for row in found.values() for member in row.values()):
        member["**all**"] = sum(member.get(stage, 0.0) for stage in stages)
    lines = [f"| us an operation | {' | '.join(found)} |", f"|---|{'---:|' * len(found)}"]
    for stage in (*stages, "**all**", SAMPLES):
        cells = (" / ".join(f"{used.get(stage, 0.0):.1f}" for used in row.values()) for row in found.values())
        lines.append(f"| {stage} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Profile the rows and print the table."""
    parser = argparse.ArgumentParser(description="where a member's processor time goes, by stage")
    parser.add_argument("--rows", default="put-c100,txn-c100,range-linearizable-c100,lease-keepalive-c100")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the calls of each row")
    arguments = parser.parse_args()
    names = arguments.rows.split(",")
    rows = [row for row in ROWS if row.name in names]
    print(table({row.name: profile(row, arguments.scale) for row in rows}))


if __name__ == "__main__":
    main()
