"""A process group of torch whose store is raftkv, twice: with ``raftkv.torch.Store`` and with a ``raftkv://`` URL.

Without arguments it starts a cluster and two ranks; between the two groups the leader of the cluster is killed.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import raftkv
from raftkv.torch import Store
from raftkv.torch.init_method import register

TIMEOUT = timedelta(seconds=60)


def reduce(rank: int) -> int:
    """Add up the ranks, and end the group."""
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


def run_rank(endpoints: str, rank: int, size: int) -> None:
    """Be one rank."""
    with Store(endpoints, "job1/epoch-1", TIMEOUT) as store:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        print(f"rank {rank}: {reduce(rank)}", flush=True)
        store.wait(["the leader was killed"])
        print(f"rank {rank}: {store.add('counter', 1) > 0}", flush=True)

    register()
    dist.init_process_group("gloo", init_method=f"raftkv://{endpoints}/job1/epoch-2", rank=rank, world_size=size)
    print(f"rank {rank}: {reduce(rank)}", flush=True)


def kill_leader(cluster: raftkv.LocalCluster) -> None:
    """End the member that leads."""
    with cluster.connect() as kv:
        leader = next(status.endpoint for status in kv.status() if status.member_id == status.leader_id)
    cluster.members[cluster.endpoints.index(leader)].kill()


def demonstrate() -> None:
    """A cluster, and two ranks of this program."""
    with raftkv.local(3) as cluster:
        endpoints = ",".join(cluster.endpoints)
        command = [sys.executable, __file__, endpoints]
        ranks = [subprocess.Popen([*command, str(rank), "2"], stdout=subprocess.PIPE, text=True) for rank in range(2)]
        print([rank.stdout.readline().strip() for rank in ranks])
        kill_leader(cluster)
        with Store(endpoints, "job1/epoch-1", TIMEOUT) as store:
            store.set("the leader was killed", "")
        for rank in ranks:
            print(rank.communicate()[0].splitlines(), rank.returncode)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        demonstrate()
