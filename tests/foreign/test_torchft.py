"""torchft itself, its managers of Rust included, on raftkv's lighthouse: one job that loses everything in turn."""

from __future__ import annotations

import subprocess

import pytest

import raftkv
from raftkv.client.local import LocalCluster, LocalMember
from tests.foreign.environments import interpreter
from tests.foreign.torchft_job import TorchftJob

ASK = """
import sys
from datetime import timedelta
from torchft.coordination import LighthouseClient
client = LighthouseClient(sys.argv[1], timedelta(seconds=60))
print(client.quorum("asks", timedelta(seconds=60), step=1, data={"told": "on"}).quorum_id)
"""


def leader_of(cluster: LocalCluster) -> LocalMember:
    """The member that leads now."""
    with cluster.connect() as kv:
        statuses = kv.status()
    return next(
        member
        for member, status in zip(cluster.members, statuses, strict=True)
        if not status.error and status.member_id == status.leader_id
    )


@pytest.mark.long
def test_a_job_survives_its_replicas_its_leader_and_the_restart_of_all():
    with raftkv.local(size=3) as cluster, TorchftJob() as job:
        flags = ("--min-replicas=1", "--heartbeat-timeout-ms=60000")
        mine, theirs = (job.lighthouse(cluster.endpoints, *flags) for _ in range(2))
        a, b, c = (job.replica(name, address) for name, address in (("a", mine), ("b", theirs), ("c", theirs)))
        together = a.wait(lambda step: step.replicas == 3)

        # Long before the heartbeats of the dead one can be missed: by the closed connection.
        c.kill()
        shrunk = a.wait(lambda step: step.quorum_id > together.quorum_id and step.replicas == 2, after=together.step)
        b.wait(lambda step: step.quorum_id >= shrunk.quorum_id)

        dead = leader_of(cluster)
        dead.kill()
        last = a.last.step
        a.wait(lambda step: step.step > last + 20)
        dead.restart()

        # A node dies, with its daemon and its replica: the other daemon learns it from the end of its lease.
        job.kill_lighthouse(theirs)
        b.kill()
        alone = a.wait(lambda step: step.replicas == 1, after=a.last.step)
        assert alone.quorum_id > shrunk.quorum_id

        last_id = a.last.quorum_id
        job.kill_all()
        for member in cluster.members:
            member.kill()
        for member in cluster.members:
            member.start()
        for member in cluster.members:
            member.wait_ready()
        address = job.lighthouse(cluster.endpoints, "--min-replicas=1", "--heartbeat-timeout-ms=1000")
        asked = subprocess.run(
            [str(interpreter("torchft")), "-c", ASK, address], capture_output=True, text=True, check=True, timeout=120
        )
        assert int(asked.stdout) > last_id
