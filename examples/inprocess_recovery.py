"""Three ranks train together; one is killed; the others go on in their processes, with the steps and weights they had.

Nothing is started again: no interpreter, no import of torch, no loading of a checkpoint. Needs torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import raftkv.torch
import raftkv.training

RANKS = 3
STEPS = 300
FATAL_STEP = 100


def work(endpoints: str) -> None:
    """One rank."""
    torch.manual_seed(os.getpid())  # every rank begins with other weights: sync makes them the same
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def share_weights(group: raftkv.torch.ElasticGroup) -> None:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, group.source)

    run = raftkv.training.join(
        "example", endpoints=endpoints, min_nodes=2, max_nodes=RANKS, expected_nodes=RANKS,
        last_call_timeout_s=60, disconnect_grace_s=0.03, lease_ttl_s=5, address="127.0.0.1",
    )  # fmt: skip
    with run, raftkv.torch.ElasticGroup(run, sync=share_weights) as group:
        first_rank, longest_s, last = group.rank, 0.0, time.monotonic()
        for step in group.steps(STEPS):
            with step:
                inputs = torch.randn(8, 4)
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= group.world_size
                optimizer.step()  # after the last collective: a step that fails has changed nothing
            if step.number == FATAL_STEP and first_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            now = time.monotonic()
            longest_s, last = max(longest_s, now - last), now
        weights = " ".join(f"{value:.6f}" for value in model.weight.flatten().tolist())
        print(
            first_rank, group.rank, group.world_size, group.generation, group.step, f"{longest_s * 1000:.0f}", weights
        )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        work(sys.argv[1])
        sys.exit()
    with raftkv.local(size=3) as cluster:
        command = [sys.executable, "-W", "ignore", __file__, ",".join(cluster.endpoints)]
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(RANKS)]
        ended = [(rank.communicate()[0].split(), rank.returncode) for rank in ranks]
    killed = [status for line, status in ended if not line]
    lines = sorted(line for line, _ in ended if line)
    print("killed:", [signal.Signals(-status).name for status in killed])
    for before, rank, size, generation, steps, longest_ms, *_ in lines:
        print(
            f"rank {before} is now rank {rank} of {size} in generation {generation}: "
            f"{steps} steps, the longest {longest_ms} ms"
        )
    print("weights are the same:", lines[0][6:] == lines[1][6:])
