"""A training script for torchrun that knows nothing of its rendezvous: allreduce after allreduce, through any fault.

    torchrun --rdzv-backend=raftkv --rdzv-endpoint=h1:2379,h2:2379,h3:2379 --rdzv-id=job --nnodes=2:4 \\
        examples/train_allreduce.py --steps 1000 --checkpoint

With ``--checkpoint`` the step is kept in raftkv, written by rank 0 under the fence of its generation: a rank that comes
back goes on from there, and a rank that slept through the end of its generation can write nothing. Run alone, it starts
a throwaway cluster of raftkv and two agents for itself. Needs torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import raftkv
import raftkv.training


def main() -> None:
    """A worker, if torchrun has started this; else the whole demonstration."""
    options = parse()
    if "RANK" in os.environ:
        train(options)
    else:
        demonstrate(options)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="end after so many; 0: only by --stop-file")
    parser.add_argument("--stop-file", type=Path, help="end when it is there")
    parser.add_argument("--step-s", type=float, default=0.02, help="what a step's computation takes, in seconds")
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--checkpoint", action="store_true", help="keep the step in raftkv")
    parser.add_argument("--notes", type=Path, help="directory: each worker notes the time of every step there")
    return parser.parse_args()


def train(options: argparse.Namespace) -> None:
    """What a worker does: all of it is plain torch but for the checkpoint."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if options.backend == "nccl" else "cpu"
    generation, restarts = os.environ.get("RAFTKV_EPOCH", "?"), os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"rank {rank} of {size}, generation {generation}, restarts {restarts}", flush=True)
    counter = Counter() if options.checkpoint else None
    note = Note(options.notes, rank, size)
    step, stop = counter.read() if counter is not None else 0, False
    while not stop and not 0 < options.steps <= step:
        wants_stop = rank == 0 and options.stop_file is not None and options.stop_file.exists()
        data = torch.tensor([1.0, float(wants_stop)], device=device)
        dist.all_reduce(data)
        step, stop = step + 1, bool(data[1])
        if int(data[0]) != size:
            raise SystemExit(f"{int(data[0])} ranks took part in step {step}, not {size}")
        note.step(step)
        if counter is not None and rank == 0:
            counter.write(step)
        threading.Event().wait(options.step_s)
    print(f"rank {rank} ends after step {step}", flush=True)
    dist.destroy_process_group()


class Counter:
    """The step of this run, in raftkv: what a real script does with its checkpoints' names."""

    def __init__(self) -> None:
        self._run = raftkv.training.join()  # takes its place in the run of the agent that has started it
        self._key = f"steps/{self._run.run_id}"

    def read(self) -> int:
        """The step to go on from."""
        item = self._run.kv.get(self._key)
        return int(item.text) if item is not None else 0

    def write(self, step: int) -> None:
        """Keep a step, unless this generation is over."""
        self._run.kv.put(self._key, str(step), fence=self._run.fence)


class Note:
    """The monotonic time of each step of this process, a line each: rank, world size, step, seconds."""

    def __init__(self, directory: Path | None, rank: int, size: int) -> None:
        self._head = f"{rank} {size}"
        generation = os.environ.get("RAFTKV_EPOCH", "0")
        path = None if directory is None else directory / f"{generation}-{rank}-{os.getpid()}.steps"
        self._file: IO[str] | None = None if path is None else path.open("a", encoding="ascii", buffering=1)

    def step(self, number: int) -> None:
        """Another one is done."""
        if self._file is not None:
            self._file.write(f"{self._head} {number} {time.monotonic():.6f}\n")


def demonstrate(options: argparse.Namespace) -> None:
    """Two agents on this machine, and a cluster for them."""
    with raftkv.local() as cluster, cluster.connect() as kv:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--rdzv-backend=raftkv", "--rdzv-id=demo"),
            "--rdzv-conf=lease_ttl=10",
            *(f"--rdzv-endpoint={','.join(cluster.endpoints)}", "--local-addr=127.0.0.1", __file__, "--checkpoint"),
            f"--steps={options.steps}",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        agents = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        outputs = [agent.communicate() for agent in agents]
        for line in sorted(line for output, _ in outputs for line in output.splitlines()):
            print(line)
        print("agents ended with", *(agent.returncode for agent in agents))
        if any(agent.returncode for agent in agents):
            print(*(errors for _, errors in outputs), file=sys.stderr)
        step = kv.get("steps/demo")
        print("step in the store:", step.text if step is not None else "none")


if __name__ == "__main__":
    main()
