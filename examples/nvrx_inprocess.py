"""In-process restart with nvidia-resiliency-ext, its store in raftkv: the job outlives any rank, rank 0 too.

Needs nvidia-resiliency-ext 0.4.1 and torch. Without arguments it starts a cluster and three ranks, lets a step of one
fail, and kills rank 0. On a cluster of yours, for each rank:

    RANK=0 WORLD_SIZE=3 python examples/nvrx_inprocess.py --endpoints h1:2379,h2:2379,h3:2379 --job job1-attempt0
"""

# The wrapper looks for a parameter of type CallWrapper, so annotations must stay types (no postponed evaluation).

import argparse
import os
import re
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import raftkv

RANKS = 3


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoints", default="", help="members of raftkv, comma-separated")
    parser.add_argument("--job", default="example", help="another one for every start of the job")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fail-at", type=int, default=-1, help="step at which rank 1 of the first world fails")
    parser.add_argument("--until", type=Path, help="go on until this file is there")
    return parser.parse_args()


def run_rank(options: argparse.Namespace) -> None:
    """Be one rank, through failures of the others."""
    from nvidia_resiliency_ext import inprocess

    from raftkv.torch import Store
    from raftkv.torch.nvrx import NvrxStore

    often = timedelta(milliseconds=50)
    base = Store(options.endpoints, f"{options.job}/worlds", timedelta(seconds=60))
    wrapper = inprocess.Wrapper(
        store_factory=NvrxStore,
        store_kwargs={"endpoints": options.endpoints, "prefix": f"{options.job}/wrapper"},
        monitor_thread_interval=often,
        monitor_process_interval=often,
        heartbeat_interval=often,
        heartbeat_timeout=timedelta(seconds=10),
        last_call_wait=often,
    )

    @wrapper
    def run(call: inprocess.CallWrapper = None) -> None:
        train(options, base, call)

    run()


def train(options: argparse.Namespace, base: "raftkv.torch.Store", call: object) -> None:
    """One world: a process group of its own keys, and steps until it ends or fails."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(f"world-{call.iteration}", base)
    # The wrapper cannot interrupt gloo: a rank that waits for a live one, which has given up, waits for the timeout.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=5))
    step, done = 0, False
    while not done:
        call.ping()
        if step == options.fail_at and rank == 1 and call.iteration == 0:
            raise RuntimeError("a step failed")
        done = reduce_step(options, step)
        if step == 0:
            print(f"process {os.getpid()}, restart {call.iteration}: rank {rank} of {size}", flush=True)
        step += 1
    dist.destroy_process_group()


def reduce_step(options: argparse.Namespace, step: int) -> bool:
    """Reduce; tells whether all ranks are done."""
    import torch
    import torch.distributed as dist

    finished = options.until.exists() if options.until else step + 1 >= options.steps
    votes = torch.tensor([float(finished)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def start_rank(rank: int, endpoints: str, stop: Path) -> subprocess.Popen:
    """Start this program as one rank."""
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    options = [f"--endpoints={endpoints}", "--fail-at=3", f"--until={stop}"]
    return subprocess.Popen(
        [sys.executable, __file__, *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def wait_world(ranks: list[subprocess.Popen], size: int, restart: int) -> set[int]:
    """Wait until each has reduced in a world of that size, not before that restart; returns their processes."""
    processes = set()
    for rank in ranks:
        for line in rank.stdout:
            found = re.fullmatch(r"process (\d+), restart (\d+): rank \d of (\d)\n", line)
            if found and int(found[2]) >= restart and int(found[3]) == size:
                processes.add(int(found[1]))
                break
    return processes


def demonstrate() -> None:
    """A cluster, three ranks, two misfortunes."""
    with raftkv.local(3) as cluster, tempfile.TemporaryDirectory() as directory:
        stop = Path(directory) / "stop"
        ranks = [start_rank(rank, ",".join(cluster.endpoints), stop) for rank in range(RANKS)]
        try:
            same = wait_world(ranks, 3, restart=1) == {rank.pid for rank in ranks}
            print(f"a step failed, and all three go on in the same processes: {same}")
            ranks[0].kill()
            same = wait_world(ranks[1:], 2, restart=2) == {rank.pid for rank in ranks[1:]}
            print(f"rank 0 was killed, and two go on in the same processes: {same}")
            stop.touch()
            print("they ended with", *(rank.wait() for rank in ranks[1:]))
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()


if __name__ == "__main__":
    given = parse()
    run_rank(given) if given.endpoints else demonstrate()
