"""How long a save of torch.distributed.checkpoint holds training up, and when it is committed: in three ways.

    python -m bench.checkpoint.async_save --size 256MiB                  # CPU, gloo
    python -m bench.checkpoint.async_save --size 1GiB --device cuda      # GPU, cpu:gloo,cuda:nccl

Two ranks of an `ElasticGroup` hold so many bytes each and save them through the registry of a cluster of three, with
`dcp.save`, and with `dcp.async_save` in a thread and in a process. While a save is under way they go on with allreduces
on the device and change their state; what is loaded afterwards must be the state at the save, bit for bit. Then rank 1
is killed while its save is under way: rank 0 must get an error or the commit, go on alone, and save the next step.

`held_s` is the time in the call, `committed_s` until the checkpoint was found, `steps` the allreduces meanwhile. The
first save of each way also starts threads or a process: it is left out. On `cuda` both ranks share one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from typing import Any

import raftkv
from bench.checkpoint.overhead import size_of
from bench.stage import Worker, progress, tell

RANKS = 2
WAYS = ("save", "thread", "process")
TENSORS = 8
PATIENCE_S = 120.0


# ---- a rank


class Rank:
    """One rank: its state, and how it saves it."""

    def __init__(self, run: Any, group: Any, size_bytes: int, device: str) -> None:
        import torch

        self._run = run
        self._group = group
        self._tensors = {
            f"layer.{run.rank}.{number}": torch.rand(size_bytes // TENSORS // 4, device=device)
            for number in range(TENSORS)
        }
        self._gradient = torch.ones(1000, device=device)

    def save(self, way: str, step: int) -> dict[str, Any]:
        """Save in a way; returns what it took."""
        from torch.distributed.checkpoint.state_dict_loader import load

        from raftkv.torch.checkpoint import Reader

        before = {name: tensor.clone() for name, tensor in self._tensors.items()}
        began = time.monotonic()
        future = self.begin(way, step)
        held = time.monotonic()
        steps = 0
        while future is not None and not self.train(future.done()):
            steps += 1
        if future is not None:
            future.result()
        committed = time.monotonic()
        self.train(True)
        loaded = {name: tensor.clone() for name, tensor in self._tensors.items()}
        load(loaded, storage_reader=Reader(self._run.checkpoints, step))
        is_same = all(bool((loaded[name] == tensor).all()) for name, tensor in before.items())
        return {
            "way": way, "held_s": held - began, "committed_s": committed - began, "steps": steps, "is_same": is_same,
        }  # fmt: skip

    def begin(self, way: str, step: int) -> Any:
        """Save, or begin to; returns the future of an asynchronous save."""
        from torch.distributed.checkpoint import state_dict_saver as saver

        from raftkv.torch.checkpoint import Writer

        writer = Writer(self._run, step)
        if way == "save":
            saver.save(self._tensors, storage_writer=writer)
            return None
        kind = saver.AsyncCheckpointerType.PROCESS if way == "process" else saver.AsyncCheckpointerType.THREAD
        return saver.async_save(self._tensors, storage_writer=writer, async_checkpointer_type=kind)

    def train(self, is_done: bool) -> bool:
        """Change the state, by what all ranks have to do with; returns whether all are done."""
        import torch.distributed as dist

        if self._gradient.is_cuda:  # on the CPU the save has the group to itself
            self._gradient.fill_(float(is_done))
            dist.all_reduce(self._gradient)
            is_done = bool(self._gradient[0] == dist.get_world_size())
        for tensor in self._tensors.values():
            tensor.add_(1)
        self._group.settle()
        return is_done


def work(endpoints: str, directory: str, size_bytes: int, device: str, rounds: int) -> None:
    """Save in each way, then be killed (rank 1), or outlive it (rank 0)."""
    warnings.simplefilter("ignore")
    if device == "cuda":
        os.environ |= {"NCCL_HOSTID": str(os.getpid()), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    import torch

    import raftkv.torch
    import raftkv.training

    torch.set_num_threads(2)
    backend, gpu = ("cpu:gloo,cuda:nccl", torch.device("cuda", 0)) if device == "cuda" else ("gloo", None)
    run = raftkv.training.join(
        "async", endpoints=endpoints, min_nodes=1, max_nodes=RANKS, expected_nodes=RANKS, address="127.0.0.1",
        last_call_timeout_s=PATIENCE_S, checkpoints=directory,
    )  # fmt: skip
    with run, raftkv.torch.ElasticGroup(run, backend, device=gpu) as group:
        rank, step = Rank(run, group, size_bytes, device), 0
        for way in WAYS:
            for _ in range(rounds + 1):
                step += 1
                tell(rank=run.rank, **rank.save(way, step))
        survive(run, group, rank, step + 1)


def survive(run: Any, group: Any, rank: Rank, step: int) -> None:
    """Rank 1 is killed while a save is under way; rank 0 goes on alone, and saves the step that comes after it."""
    future = rank.begin("thread", step)
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    died = time.monotonic()
    try:
        future.result(PATIENCE_S)
        outcome = "committed"
    except Exception as error:
        outcome = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    known = time.monotonic()
    group.recover()
    recovered = time.monotonic()
    with run.resume() as last:
        found = 0 if last is None else last.step
    rank.begin("save", step + 1)
    newest = run.checkpoints.latest("dcp").step
    tell(
        rank=0, way="thread, rank 1 killed", known_s=known - died, recovered_s=recovered - known, outcome=outcome,
        found=found, is_right=found in (step - 1, step) and newest == step + 1,
    )  # fmt: skip


# ---- the driver


def measure(size_bytes: int, device: str, rounds: int, directory: str) -> list[dict[str, Any]]:
    """Run the two ranks; returns what they have told."""
    with raftkv.local(size=3, flags=("--log-level", "error")) as cluster:
        words = ["--device", device, "--work", ",".join(cluster.endpoints), "--directory", directory]
        words += ["--size", str(size_bytes), "--rounds", str(rounds)]
        ranks = [Worker("bench.checkpoint.async_save", *words) for _ in range(RANKS)]
        told = [line for rank in ranks for line in rank.rest()]
        statuses = sorted(rank.process.wait() for rank in ranks)
        for rank in ranks:
            rank.end()
    if statuses != [-signal.SIGKILL, 0]:
        progress(f"the ranks ended with {statuses}, not with 0 and SIGKILL")
    return told


def rows_of(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way, and one for each death."""
    by_way: dict[str, list[dict[str, Any]]] = defaultdict(list)
    deaths = []
    for facts in told:
        if "outcome" in facts:
            deaths.append(facts)
        else:
            by_way[facts["way"]].append(facts)
    rows: list[dict[str, Any]] = []
    for way, saves in by_way.items():
        warm = saves[1 : len(saves) // RANKS] + saves[len(saves) // RANKS + 1 :]
        rows.append(
            {
                "way": way,
                "saves": len(warm),
                "held_s": round(statistics.median(save["held_s"] for save in warm), 3),
                "committed_s": round(statistics.median(save["committed_s"] for save in warm), 3),
                "steps": round(statistics.median(save["steps"] for save in warm)),
                "is_right": all(save["is_same"] for save in saves),
            }
        )
    return rows + deaths


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=size_of, default=size_of("64MiB"), help="bytes of each rank")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3, help="saves in each way")
    parser.add_argument("--directory", default="", help="where the checkpoints lie; empty: one of its own")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.directory, given.size, given.device, given.rounds)
        return 0
    with tempfile.TemporaryDirectory(dir=given.directory or None) as directory:
        rows = rows_of(measure(given.size, given.device, given.rounds, directory))
    for row in rows:
        print(json.dumps(row))
    return 0 if len(rows) == len(WAYS) + 1 and all(row["is_right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
