"""torchrun, DDP and torch.distributed.checkpoint: a worker is killed, and no loss is other than it would have been.

    torchrun --rdzv-backend=raftkv --rdzv-endpoint=h1:2379,h2:2379,h3:2379 --rdzv-id=job --nnodes=2:4 \\
        --max-restarts=9 examples/checkpoints/torchrun.py --uri=/shared/checkpoints

Model, optimizer, position in the data and the random numbers of each rank are one commit: all of a step, or nothing.
Run alone, it starts a throwaway cluster of raftkv and a job of two workers, kills one of them some steps after the
checkpoint of step 20, and compares the losses with those of a job that nothing disturbs and that saves nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import raftkv
import raftkv.checkpoint
import raftkv.training

WORKERS = 2
STEPS = 40
SAVE_EVERY = 10
SAVED = 20
KILL_AT = 25
STEP_S = 0.05


def main() -> None:
    """A worker, if torchrun has started this; else the whole demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri", default="", help="where checkpoints are kept; empty: none are saved")
    parser.add_argument("--losses", type=Path, help="rank 0 adds a line for each step to this file")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options.uri, options.losses)
    else:
        demonstrate()


def train(uri: str, losses: Path | None) -> None:
    """What a worker does."""
    import torch
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.nn.parallel import DistributedDataParallel

    from raftkv.torch.checkpoint import Writer, resume

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)  # dropout differs from rank to rank
    training, data, rng = make_states(model, optimizer)
    state: dict[str, Any] = {"training": training, "data": data, f"rng.{rank}": rng}
    last, run = None, None
    if uri:
        run = raftkv.training.join(checkpoints=uri)  # takes its place in the run of the agent that has started it
        run.kv.put(f"pids/{rank}", str(os.getpid()))
        last = resume(run, state)
    for step in range(0 if last is None else last.step, STEPS):
        inputs = data.next_batch()[rank::size]
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and losses is not None:
            with losses.open("a", encoding="ascii") as file:
                file.write(f"{step} {mean.item().hex()}\n")
        threading.Event().wait(STEP_S)  # a step takes its time
        if run is not None and (step + 1) % SAVE_EVERY == 0:
            dcp.save(state, storage_writer=Writer(run, step + 1, metrics={"loss": mean.item()}))
    dist.destroy_process_group()


def make_states(model: Any, optimizer: Any) -> tuple[Any, Any, Any]:
    """Return what is saved, as DCP asks for it: model and optimizer, position in the data, random numbers."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.stateful import Stateful

    class Training(Stateful):
        def state_dict(self) -> dict[str, Any]:
            models, optimizers = get_state_dict(model, optimizer)
            return {"model": models, "optimizer": optimizers}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    class Data(Stateful):
        """Batches in a random order that all ranks share; each takes its part of them."""

        def __init__(self) -> None:
            self._order = torch.Generator().manual_seed(2)
            self._position = 0

        def next_batch(self) -> Any:
            self._position += 1
            return torch.randn(16, 8, generator=self._order)

        def state_dict(self) -> dict[str, Any]:
            return {"order": self._order.get_state(), "position": torch.tensor(self._position)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self._order.set_state(state["order"])
            self._position = int(state["position"])

    class RandomNumbers(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"state": torch.get_rng_state()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.set_rng_state(state["state"])

    return Training(), Data(), RandomNumbers()


def demonstrate() -> None:
    """A job that is killed, and one that nothing disturbs; their losses are the same, bit for bit."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as directory, raftkv.local() as cluster, cluster.connect() as kv:
        disturbed, undisturbed = Path(directory) / "disturbed", Path(directory) / "undisturbed"
        uri = f"{directory}/checkpoints"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=raftkv", "--rdzv-id=demo", "--nnodes=1"),
            *(f"--rdzv-endpoint={','.join(cluster.endpoints)}", f"--nproc-per-node={WORKERS}", "--max-restarts=1"),
            *("--local-addr=127.0.0.1", "--rdzv-conf=lease_ttl=10", __file__, f"--uri={uri}", f"--losses={disturbed}"),
        ]
        agent = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        registry = raftkv.checkpoint.Registry(kv, "demo", uri=f"{uri}/demo")
        with registry.watch(start_revision=1) as commits:
            for commit in commits:
                print(f"step {commit.checkpoint.step} is committed by generation {commit.checkpoint.generation}")
                if commit.checkpoint.step == SAVED:
                    wait_for_line(disturbed, KILL_AT)
                    os.kill(int(kv.get(f"pids/{WORKERS - 1}").text), signal.SIGKILL)
                    print("a worker is killed")
                if commit.checkpoint.step == STEPS:
                    break
        print("the job ended with", agent.wait())
        ended = run_undisturbed(undisturbed, environment)
        print("the job without faults ended with", *ended)
        lines = [line.split() for line in disturbed.read_text(encoding="ascii").splitlines()]
        expected = dict(line.split() for line in undisturbed.read_text(encoding="ascii").splitlines())
        print("steps done twice:", len(lines) - STEPS)
        print("all losses are the same, bit for bit:", all(expected[step] == loss for step, loss in lines))
        print("steps without a loss:", len(expected.keys() - dict(lines).keys()))


def wait_for_line(path: Path, number: int) -> None:
    """Wait until a file has so many lines."""
    while path.read_text(encoding="ascii").count("\n") < number:
        threading.Event().wait(0.001)


def run_undisturbed(losses: Path, environment: dict[str, str]) -> list[int]:
    """Run the same workers without an agent, a cluster and checkpoints; returns their exit statuses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    named = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORKERS)}
    command = [sys.executable, __file__, f"--losses={losses}"]
    workers = [subprocess.Popen(command, env={**named, "RANK": str(rank)}) for rank in range(WORKERS)]
    return [worker.wait() for worker in workers]


if __name__ == "__main__":
    main()
