"""A rank of ``test_recovery``: counts steps in a weight, says in JSON what happens to it, stops when a file is there.

python -m tests.torch.recovery_rank ENDPOINTS STOP_FILE
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import raftkv.torch
import raftkv.training

ENOUGH = 1_000_000


def tell(**facts) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    endpoints, stop = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    weight = torch.zeros(1)
    pause = threading.Event()

    def share_weight(group: raftkv.torch.ElasticGroup) -> None:
        dist.broadcast(weight, group.source)
        tell(event="epoch", epoch=group.epoch, rank=group.rank, size=group.world_size, step=group.step, pid=own_pid)

    own_pid = threading.get_native_id()
    run = raftkv.training.join(
        "recovery", endpoints=endpoints, min_nodes=2, max_nodes=3, expected_nodes=3,
        last_call_timeout_s=120, disconnect_grace_s=0.05, lease_ttl_s=6, address="127.0.0.1", fault_limit=0,
    )  # fmt: skip
    with run, raftkv.torch.ElasticGroup(run, sync=share_weight) as group:
        for step in group.steps(ENOUGH):
            with step:
                said = torch.tensor([1.0, float(stop.exists())])
                dist.all_reduce(said)
                weight += said[0] / group.world_size  # one more, for any number of ranks
            if step.failure is None and said[1]:
                break
            pause.wait(0.002)
        run.barrier("stopped")
        tell(event="end", step=step.number + 1, weight=weight.item(), recovered=group.last_recovery is not None)


if __name__ == "__main__":
    main()
