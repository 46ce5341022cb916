"""In-process restart with nvidia-resiliency-ext, its store in raftkv: the job outlives any rank, rank 0 too.

Needs nvidia-resiliency-ext 0.4.1, torch, and a raftkv cluster. For each rank:

    RANK=0 WORLD_SIZE=3 python examples/nvrx_inprocess.py --endpoints 127.0.0.1:2379 --job j1

A rank whose step fails is restarted with the others, in the same processes; a rank that is killed is left out, and the
others go on. Each line says what happened: a world of so many ranks has reduced, at that iteration.
"""

# The wrapper looks for a parameter of type CallWrapper, so annotations must stay types (no postponed evaluation).

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

from raftkv.torch import Store
from raftkv.torch.nvrx import NvrxStore

INTERVAL = timedelta(milliseconds=50)
GROUP_TIMEOUT = timedelta(seconds=5)
"""Of gloo: the wrapper cannot interrupt it, so a rank that waits for a live one, which has given up, waits so long."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoints", default="127.0.0.1:2379", help="members of raftkv, comma-separated")
    parser.add_argument("--job", required=True, help="another one for every start of the job")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fail-at", type=int, default=-1, help="step at which rank 1 of the first world fails")
    parser.add_argument("--until", type=Path, help="go on until this file is there")
    return parser.parse_args()


def say(text: str) -> None:
    """Print a line with the time."""
    sys.stdout.write(f"{time.time():.3f} {text}\n")
    sys.stdout.flush()


def train(options: argparse.Namespace, base: Store, call: inprocess.CallWrapper | None = None) -> None:
    """One world: a process group of its own keys, and steps until it ends or fails."""
    iteration = call.iteration if call is not None else 0
    store = dist.PrefixStore(f"world-{iteration}", base)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    step, done = 0, False
    while not done:
        if call is not None:
            call.ping()
        if step == options.fail_at and rank == 1 and iteration == 0:
            raise RuntimeError("a step failed")
        done = reduce_step(options, step)
        if step == 0:
            say(f"pid {os.getpid()} iteration {iteration} rank {rank} of {size}")
        step += 1
    dist.destroy_process_group()
    say(f"pid {os.getpid()} done")


def reduce_step(options: argparse.Namespace, step: int) -> bool:
    """Reduce; tells whether everybody is done."""
    finished = options.until.exists() if options.until else step + 1 >= options.steps
    votes = torch.tensor([float(finished)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def main() -> None:
    """Run one rank."""
    options = parse()
    base = Store(options.endpoints, f"{options.job}/worlds", timedelta(seconds=60))
    wrapper = inprocess.Wrapper(
        store_factory=NvrxStore,
        store_kwargs={"endpoints": options.endpoints, "prefix": f"{options.job}/wrapper"},
        monitor_thread_interval=INTERVAL,
        monitor_process_interval=INTERVAL,
        heartbeat_interval=INTERVAL,
        heartbeat_timeout=timedelta(seconds=10),
        last_call_wait=INTERVAL,
    )

    @wrapper
    def run(call: inprocess.CallWrapper | None = None) -> None:
        train(options, base, call)

    run()


if __name__ == "__main__":
    main()
