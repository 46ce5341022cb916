"""Two ranks train in one group; the power fails; the job is started again and goes on from its latest checkpoint.

The group finds the checkpoint by itself, and does the steps since then again with the same losses, bit for bit. A rank
that is lost alone costs nothing of that: see `../inprocess_recovery.py`. Needs torch.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

import raftkv

RANKS = 2
STEPS = 60
SAVE_EVERY = 20
FATAL_STEP = 50


def work(endpoints: str, uri: str, fatal_step: int) -> None:
    """One rank; prints the loss of each step."""
    import torch
    import torch.distributed as dist

    import raftkv.torch
    import raftkv.training

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def share(group: raftkv.torch.ElasticGroup) -> None:
        states = [model.state_dict(), optimizer.state_dict()]
        dist.broadcast_object_list(states, group.source)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])

    def save(group: raftkv.torch.ElasticGroup, saving: Any) -> None:
        if group.rank == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], saving.path("state.pt"))

    def load(group: raftkv.torch.ElasticGroup, last: Any) -> None:
        states = torch.load(io.BytesIO(last.read("state.pt")), weights_only=True)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])

    run = raftkv.training.join(
        "job", endpoints=endpoints, min_nodes=RANKS, max_nodes=RANKS, expected_nodes=RANKS, lease_ttl_s=10,
        disconnect_grace_s=0.03, address="127.0.0.1", checkpoints=uri,
    )  # fmt: skip
    with run, raftkv.torch.ElasticGroup(run, sync=share, load=load, save=save, save_every=SAVE_EVERY) as group:
        for step in group.steps(STEPS):
            with step as number:
                data = torch.Generator().manual_seed(number * RANKS + group.rank)  # the position in the data
                inputs = torch.randn(8, 8, generator=data)
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                for tensor in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
                    dist.all_reduce(tensor)
                    tensor /= RANKS
                optimizer.step()
            print(number, loss.item().hex(), flush=True)
            if number == fatal_step:
                os.kill(os.getpid(), signal.SIGKILL)


def start(endpoints: str, uri: str, fatal_step: int = -1) -> dict[str, str]:
    """Run the job; returns the losses by step."""
    command = [sys.executable, "-W", "ignore", __file__, endpoints, uri, str(fatal_step)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(RANKS)]
    curves = [dict(line.split() for line in rank.communicate()[0].splitlines()) for rank in ranks]
    first, *_, last = curves[0]
    ends = sorted(signal.Signals(-rank.returncode).name if rank.returncode else "done" for rank in ranks)
    print("from step", first, "to", last, *ends, "all ranks agree:", curves.count(curves[0]) == RANKS)
    return curves[0]


if __name__ == "__main__":
    if len(sys.argv) == 4:
        work(*sys.argv[1:3], int(sys.argv[3]))
        sys.exit()
    with raftkv.local() as cluster, tempfile.TemporaryDirectory() as directory:
        endpoints = ",".join(cluster.endpoints)
        before = start(endpoints, directory, FATAL_STEP)
        after = start(endpoints, directory)
    twice = [step for step in before if step in after]
    same = all(before[step] == after[step] for step in twice)
    print("steps done twice:", len(twice), "with the same losses, bit for bit:", same)
