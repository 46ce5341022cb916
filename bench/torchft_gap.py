"""How long a torchft job pauses when a replica is killed, and when the leader of raftkv is: raftkv's lighthouse beside
torchft's own, with the same replicas, in one run.

    python -m bench.torchft_gap [--kills 5] [--leaders 3] [--services raftkv,torchft,...] [--json]

Three replicas (gloo, CPU) train a model of nine numbers, so that nearly all of a step is the quorum. A gap is the time
between two steps that a survivor has committed, the longer one of the survivors', as they measured it themselves:

- ``step``: nobody dies; the median over many steps;
- ``replica``: SIGKILL of a replica, up to the first step of the smaller quorum; a new one takes its place each time;
- ``raft-leader``: SIGKILL of raftkv's leader, beside the time until a member tells of another leader.

``raftkv`` is one daemon for all replicas, ``raftkv-nodes`` one for each, as on nodes of their own. ``torchft`` has the
defaults of its command line (heartbeat timeout 5 s, join timeout 60 s), ``torchft-1s`` a heartbeat timeout of 1 s. Exit
code 1: a limit was missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import raftkv
from raftkv.client.local import LocalCluster, LocalMember
from raftkv.client.sync.library import Client
from tests.foreign.environments import InstallError
from tests.foreign.torchft_job import Replica, TorchftJob

SERVICES = ("raftkv", "raftkv-nodes", "torchft", "torchft-1s")
REPLICAS = 3
WARM_STEPS = 30
KILL_LIMIT_S = 0.5
LEADER_LIMIT_S = 1.0
"""Above the election."""


@dataclass(frozen=True)
class Result:
    """What one fault costs with one service; seconds.

    Attributes:
        excess: gaps without the election that they went through; only of ``raft-leader``.
        limit_s: of the median gap, or excess; 0: none.
    """

    service: str
    fault: str
    gaps: list[float]
    excess: list[float]
    limit_s: float

    @property
    def ok(self) -> bool:
        return not self.limit_s or statistics.median(self.excess or self.gaps) <= self.limit_s

    def as_json(self) -> str:
        summary = {
            "service": self.service,
            "fault": self.fault,
            "trials": len(self.gaps),
            "median_s": round(statistics.median(self.gaps), 4),
            "max_s": round(max(self.gaps), 4),
        }
        if self.excess:
            summary["excess_median_s"] = round(statistics.median(self.excess), 4)
            summary["excess_max_s"] = round(max(self.excess), 4)
        if self.limit_s:
            summary |= {"limit_s": self.limit_s, "ok": self.ok}
        return json.dumps(summary)

    def as_text(self) -> str:
        line = f"{self.service:<11} {self.fault:<12} {len(self.gaps):>5} x"
        line += f"  median {statistics.median(self.gaps):7.3f} s  max {max(self.gaps):7.3f} s"
        if self.excess:
            line += f"  above the election {statistics.median(self.excess):6.3f} s, max {max(self.excess):6.3f} s"
        if self.limit_s:
            line += f"  limit {self.limit_s:g} s: {'ok' if self.ok else 'MISSED'}"
        return line


def gap_s(replicas: list[Replica], since: float, until_step: int) -> float:
    """The longest time between steps of any of the replicas, from before ``since`` up to a step."""
    longest = 0.0
    for replica in replicas:
        steps = [step for step in replica.steps if step.step <= until_step]
        times = [after.at - before.at for before, after in itertools.pairwise(steps) if after.at >= since]
        longest = max([longest, *times])
    return longest


class Bench:
    """One service, its replicas, and what is done to them."""

    def __init__(self, service: str, job: TorchftJob, cluster: LocalCluster | None) -> None:
        self._service = service
        self._job = job
        self._cluster = cluster
        self._count = 0
        self._address = self._start() if service != "raftkv-nodes" else ""
        self._replicas = [self._new() for _ in range(REPLICAS)]

    def _start(self) -> str:
        if self._cluster is not None:
            return self._job.lighthouse(self._cluster.endpoints, "--min-replicas=2")
        return self._job.own_lighthouse(2, 1000 if self._service == "torchft-1s" else 5000)

    def _new(self) -> Replica:
        self._count += 1
        return self._job.replica(f"replica_{self._count}", self._address or self._start())

    def _all_together(self) -> int:
        """Wait until all train together and warm up; returns the step."""
        done = max((replica.last.step for replica in self._replicas if replica.steps), default=0)
        first = max(replica.wait(lambda step: step.replicas == REPLICAS, after=done).step for replica in self._replicas)
        return max(replica.wait(_any, after=first + WARM_STEPS).step for replica in self._replicas)

    def steps(self) -> Result:
        """Nobody dies."""
        begin = self._all_together()
        end = self._replicas[0].wait(_any, after=begin + 100).step
        times = [step.at for step in self._replicas[0].steps if begin <= step.step <= end]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return Result(self._service, "step", gaps, [], 0.0)

    def kills(self, trials: int) -> Result:
        """A replica dies."""
        gaps = []
        for _ in range(trials):
            begin = self._all_together()
            victim, *survivors = self._replicas
            last_id = survivors[0].last.quorum_id
            since = time.monotonic()
            victim.kill()
            end = max(_smaller(replica, last_id, begin) for replica in survivors)
            gaps.append(gap_s(survivors, since, end))
            self._replicas = [*survivors, self._new()]
        return Result(self._service, "replica", gaps, [], KILL_LIMIT_S if self._cluster is not None else 0.0)

    def leaders(self, trials: int, cluster: LocalCluster) -> Result:
        """The leader of raftkv dies."""
        gaps, excess = [], []
        for _ in range(trials):
            self._all_together()
            with cluster.connect() as kv:
                leader = next(_leaders(cluster.members, kv))
                others = [member for member in cluster.members if member is not leader]
                since = time.monotonic()
                leader.kill()
                next(_leaders(others, kv))
                election_s = time.monotonic() - since
            end = max(replica.wait(_any, after=replica.last.step + WARM_STEPS).step for replica in self._replicas)
            gaps.append(gap_s(self._replicas, since, end))
            excess.append(gaps[-1] - election_s)
            leader.restart()
        return Result(self._service, "raft-leader", gaps, excess, LEADER_LIMIT_S)


def _any(step: object) -> bool:
    return True


def _smaller(replica: Replica, last_id: int, begin: int) -> int:
    return replica.wait(lambda step: step.quorum_id > last_id and step.replicas < REPLICAS, after=begin).step


def _leaders(members: list[LocalMember], kv: Client) -> Iterator[LocalMember]:
    """Asks each in turn whether it leads, again and again."""
    for member in itertools.cycle(members):
        (status,) = kv.status(member.endpoint)
        if not status.error and status.member_id == status.leader_id:
            yield member


def measure(service: str, kills: int, leaders: int, tell: Callable[[Result], None]) -> bool:
    """All faults of one service; tells if all limits were kept."""
    ok = True

    def done(result: Result) -> None:
        nonlocal ok
        ok = ok and result.ok
        tell(result)

    def run(cluster: LocalCluster | None) -> None:
        with TorchftJob() as job:
            bench = Bench(service, job, cluster)
            done(bench.steps())
            done(bench.kills(kills))
            if cluster is not None:
                done(bench.leaders(leaders, cluster))

    if service.startswith("torchft"):
        run(None)
    else:
        with raftkv.local(size=3) as cluster:
            run(cluster)
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="replicas killed with each service")
    parser.add_argument("--leaders", type=int, default=3, help="leaders of raftkv killed")
    parser.add_argument("--services", default=",".join(SERVICES), help="which, in this order")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each fault")
    arguments = parser.parse_args()
    services = arguments.services.split(",")
    unknown = sorted(set(services) - set(SERVICES))
    if unknown or arguments.kills < 1 or arguments.leaders < 1:
        parser.error(f"unknown service {unknown[0]!r}" if unknown else "at least one of each fault")

    def tell(result: Result) -> None:
        print(result.as_json() if arguments.json else result.as_text(), flush=True)

    try:
        verdicts = [measure(service, arguments.kills, arguments.leaders, tell) for service in services]
    except (AssertionError, InstallError) as error:
        print(f"torchft_gap: {error}", file=sys.stderr)
        return 1
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
