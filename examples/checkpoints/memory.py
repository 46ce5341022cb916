"""A node is killed, and its state comes back from the memory of another node: no disk, no shared storage.

    raftkvctl run exec --job job --nnodes 2 --conf checkpoint_memory=8GiB --conf topology=row1/rack7 -- \\
        python examples/checkpoints/memory.py

Every 5 steps, each rank's model and momentum go to the memory of its own node and of one more. Run alone, this starts
a throwaway cluster of raftkv and two nodes, kills one of them with its agent and its worker, starts it again, and
compares the losses with those of the same ranks without a fault.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import raftkv
import raftkv.checkpoint
import raftkv.training

NODES = 2
STEPS = 40
SAVE_EVERY = 5
KILL_AT = 20
STEP_S = 0.02


def main() -> None:
    """A worker, if an agent has started this; else the whole demonstration."""
    if "RAFTKV_RANK" in os.environ:
        logging.getLogger("raftkv").setLevel(logging.ERROR)  # a save may meet the node that is killed
        train(Path(sys.argv[1]))
    else:
        demonstrate()


def make_rank(rank: int) -> tuple[Any, Any, Any]:
    """Return model, momentum, and the random numbers of a rank's data."""
    import torch

    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    momentum = [torch.zeros_like(parameter) for parameter in model.parameters()]
    return model, momentum, torch.Generator().manual_seed(100 + rank)


def one_step(model: Any, momentum: Any, data: Any) -> float:
    """Train on one batch; returns the loss. Importing torch.optim would take longer than all of this."""
    import torch

    inputs = torch.randn(16, 8, generator=data)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter, velocity in zip(model.parameters(), momentum, strict=True):
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.001 * velocity)
            parameter.grad = None
    return loss.item()


def train(directory: Path) -> None:
    """What a worker does; a job in practice would average gradients too."""
    from raftkv.torch.memory import Memory

    run = raftkv.training.join()
    model, momentum, data = make_rank(run.rank)
    memory = Memory(run, every=SAVE_EVERY)
    last = memory.restore()
    if last is not None:
        model.load_state_dict(last.state["model"])
        momentum = last.state["momentum"]
        data.set_state(last.state["data"])
    first = 0 if last is None else last.step
    with (directory / f"losses-{run.rank}").open("a", encoding="ascii") as file:
        print(f"generation {run.generation} from {first}", file=file)
        for step in range(first + 1, STEPS + 1):
            print(step, one_step(model, momentum, data).hex(), file=file, flush=True)
            threading.Event().wait(STEP_S)  # a step takes its time
            state = {"model": model.state_dict(), "momentum": momentum, "data": data.get_state()}
            memory.save(step, state)
    memory.wait()


def start_node(endpoints: str, name: str, directory: str) -> subprocess.Popen[bytes]:
    """What would be typed on each machine."""
    command = (
        f"run exec --job demo --nnodes {NODES} --conf checkpoint_memory=64MiB,rank_policy=fill,lease_ttl=10 --quiet"
    )
    here = ["--node-name", name, "--local-addr", "127.0.0.1"]
    words = ["--endpoints", endpoints, *command.split(), *here, "--", sys.executable, __file__, directory]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "raftkv.cli.ctl", *words], env=environment)


def demonstrate() -> None:
    """Two nodes, of which one is killed; the losses are those of ranks that nothing disturbs."""
    with tempfile.TemporaryDirectory() as directory, raftkv.local() as cluster, cluster.connect() as kv:
        endpoints = ",".join(cluster.endpoints)
        nodes = {name: start_node(endpoints, name, directory) for name in ("node-a", "node-b")}
        registry = raftkv.checkpoint.Registry(kv, "demo")
        with registry.watch("memory", start_revision=1) as commits:
            for commit in commits:
                if commit.checkpoint.step >= KILL_AT:
                    break
        copies = registry.nearest(commit.checkpoint.step, "rank-1", to="node-a")
        print("copies of the state of rank 1:", len(copies), "in", {copy.tier for copy in copies})
        nodes["node-b"].send_signal(signal.SIGKILL)
        nodes["node-b"].wait()
        print("node-b is killed, and comes back empty")
        nodes["node-b"] = start_node(endpoints, "node-b", directory)
        print("the nodes ended with", [node.wait(120) for node in nodes.values()])
        compare(Path(directory))


def compare(directory: Path) -> None:
    """Compare all losses with those of undisturbed ranks."""
    same, starts = True, set()
    for rank in range(NODES):
        parts = make_rank(rank)
        expected = [one_step(*parts).hex() for _ in range(STEPS)]
        lines = [line.split() for line in (directory / f"losses-{rank}").read_text(encoding="ascii").splitlines()]
        starts.add(" then ".join("0" if words[-1] == "0" else "a save" for words in lines if words[0] == "generation"))
        losses = [words for words in lines if words[0] != "generation"]
        same &= all(expected[int(step) - 1] == loss for step, loss in losses) and int(losses[-1][0]) == STEPS
    print("generations began from", starts)
    print("all losses are the same, bit for bit:", same)


if __name__ == "__main__":
    main()
