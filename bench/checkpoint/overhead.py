"""The overhead of the registry on saves of torch.distributed.checkpoint, and how long a save blocks training.

    python -m bench.checkpoint.overhead --size 1GiB --rounds 9                         beside plain DCP, in turns
    python -m bench.checkpoint.overhead --size 1GiB --directory /dev/shm/overhead      on a disk without cost
    python -m bench.checkpoint.overhead --ways save,thread,process --size 256MiB [--device cuda]

*Beside plain DCP*: both sync what they write. Plain DCP syncs its files; the registry also syncs the names of files and
directories, digests all bytes, and commits through a cluster of three members on the same machine. Between two saves
everything is deleted and written back, so that no save pays for the previous one. The bar: the registry's median is at
most 3 % above plain DCP. The time of digests alone is printed beside it; they are computed while the file is written.

*Ways*: each of two ranks of an `ElasticGroup` holds the given number of bytes, and saves them with `dcp.save`, and with
`dcp.async_save` in a thread and in a process. During a save they continue with allreduces on the device and change
their state; the state loaded afterwards must be the state at the save, bit for bit. *held* is the time in the call,
*committed* the time until the checkpoint existed, *steps* the number of allreduces in between. On `cuda` both ranks
share one GPU.

The first save of each kind is a warm-up and does not count. The exit code is 1 if the bar was missed or a bit differed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load

import raftkv
import raftkv.torch
import raftkv.training
from bench.report import markdown, medians, names_of, parser_of
from bench.stage import Worker, in_turn, share_gpu, tell
from raftkv.checkpoint import Registry
from raftkv.checkpoint.digest import ALGORITHMS, SHA256, Digest
from raftkv.torch.checkpoint import Reader, Writer

BAR: Final = 0.03
UNITS: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
TENSORS: Final = 16
RANKS: Final = 2
WAYS: Final = ("save", "thread", "process")


def size_of(text: str) -> int:
    """Parse a size such as ``1GiB``."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def state_of(size_bytes: int, device: str = "cpu", name: str = "layer") -> dict[str, torch.Tensor]:
    """Return a model of the given size, in tensors of equal size."""
    return {f"{name}.{number}": torch.rand(size_bytes // TENSORS // 4, device=device) for number in range(TENSORS)}


def timed(step: Callable[[], Any]) -> float:
    """Return the duration of a step, in seconds."""
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


# ---- beside plain DCP


def beside_plain(directory: Path, registry: Registry, size_bytes: int, rounds: int, digest: str) -> bool:
    """Save in turns, and print; return whether the bar is met."""
    state = state_of(size_bytes)
    found: dict[str, list[float]] = {"plain": [], "registry": []}
    for number in range(1, rounds + 2):
        for name in in_turn(found, number):
            plain = FileSystemWriter(directory / "plain")
            writer = plain if name == "plain" else Writer(registry, number, digest=digest)
            found[name].append(timed(partial(saver.save, state, storage_writer=writer)))
            shutil.rmtree(directory)
            os.sync()
    times = {name: taken[1:] for name, taken in found.items()}
    lines = [
        (name, *(f"{each(taken):.3f} s" for each in (statistics.median, min, max))) for name, taken in times.items()
    ]
    pairs = [ours / plain - 1 for plain, ours in zip(times["plain"], times["registry"], strict=True)]
    overhead, block, digested = (
        statistics.median(times["registry"]) / statistics.median(times["plain"]) - 1,
        os.urandom(1 << 20),
        Digest(digest),
    )
    digest_s = timed(lambda: [digested.update(block) for _ in range(size_bytes >> 20)])
    print(markdown(("writer", "median", "least", "most"), lines))
    print(f"\ndigests alone: {digest_s:.3f} s, beside the writing; overhead: {overhead:+.1%} of the medians, "
          f"{statistics.median(pairs):+.1%} in pairs; the bar is {BAR:+.0%}")  # fmt: skip
    return overhead <= BAR


# ---- ways


class Rank:
    """One rank: its state, and its ways to save it."""

    def __init__(self, run: Any, group: Any, size_bytes: int, device: str) -> None:
        self._run = run
        self._group = group
        self._tensors = state_of(size_bytes, device, f"layer.{run.rank}")
        self._gradient = torch.ones(1000, device=device)

    def save(self, way: str, step: int) -> dict[str, Any]:
        """Save in one way; return the measured times."""
        before = {name: tensor.clone() for name, tensor in self._tensors.items()}
        began, steps, writer = time.monotonic(), 0, Writer(self._run, step)
        if way == "save":
            saver.save(self._tensors, storage_writer=writer)
            held = time.monotonic()
        else:
            kind = saver.AsyncCheckpointerType(way)
            future = saver.async_save(self._tensors, storage_writer=writer, async_checkpointer_type=kind)
            held = time.monotonic()
            while not self._train(future.done()):
                steps += 1
            future.result()
        committed = time.monotonic()
        self._train(True)
        loaded = {name: tensor.clone() for name, tensor in self._tensors.items()}
        load(loaded, storage_reader=Reader(self._run.checkpoints, step))
        is_same = all(bool((loaded[name] == tensor).all()) for name, tensor in before.items())
        took = {"held": held - began, "committed": committed - began, "steps": steps}
        return {"way": way, "took": took, "is_same": is_same}

    def _train(self, is_done: bool) -> bool:
        """Change the state in a collective step of all ranks; return whether all are done."""
        if self._gradient.is_cuda:  # on the CPU, the save uses the group exclusively
            self._gradient.fill_(float(is_done))
            dist.all_reduce(self._gradient)
            is_done = bool(self._gradient[0] == dist.get_world_size())
        for tensor in self._tensors.values():
            tensor.add_(1)
        self._group.settle()
        return is_done


def work(endpoints: str, options: argparse.Namespace) -> None:
    """Save in each way, and report the times of each save."""
    gpu = share_gpu(options.device)
    run = raftkv.training.join(
        "async", endpoints=endpoints, min_nodes=1, max_nodes=RANKS, expected_nodes=RANKS, address="127.0.0.1",
        last_call_timeout_s=120.0, checkpoints=str(options.directory),
    )  # fmt: skip
    with run, raftkv.torch.ElasticGroup(run, "gloo" if gpu is None else "cpu:gloo,cuda:nccl", device=gpu) as group:
        rank, step = Rank(run, group, options.size, options.device), 0
        for way in options.ways:
            for number in range(options.rounds + 1):
                step += 1
                tell(is_warm=number > 0, **rank.save(way, step))


def compare_ways(endpoints: list[str], options: argparse.Namespace, directory: Path) -> bool:
    """Run the two ranks, and print; return whether all loaded states were correct."""
    words = ["--work", ",".join(endpoints), "--directory", str(directory), "--size", str(options.size)]
    words += ["--ways", ",".join(options.ways), "--rounds", str(options.rounds), "--device", options.device]
    ranks = [Worker("bench.checkpoint.overhead", *words) for _ in range(RANKS)]
    told = [line for rank in ranks for line in rank.rest()]
    for rank in ranks:
        rank.end()
    if len(told) != RANKS * len(options.ways) * (options.rounds + 1):
        raise SystemExit("bench: a rank ended too early")
    lines = []
    for way in options.ways:
        warm = medians([line["took"] for line in told if line["way"] == way and line["is_warm"]])
        lines.append((way, f"{warm['held']:.3f} s", f"{warm['committed']:.3f} s", f"{warm['steps']:g}"))
    print(markdown(("way", "held", "committed after", "steps meanwhile"), lines))
    return all(line["is_same"] for line in told)


def main() -> None:
    """Measure, and exit with 1 if the bar was missed or a state was wrong."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--size", type=size_of, default="1GiB", help="of the model, or of each rank (default 1GiB)")
    parser.add_argument("--directory", type=Path, help="where to save (default: a temporary one)")
    parser.add_argument("--digest", default=SHA256, choices=list(ALGORITHMS), help="algorithm (default sha256)")
    parser.add_argument("--ways", type=names_of(WAYS), default=[], help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.work:
        work(options.work, options)
        return
    with tempfile.TemporaryDirectory(prefix="raftkv-overhead-") as own, raftkv.local(size=3) as cluster:
        directory = (options.directory or Path(own)) / "checkpoints"
        if options.ways:
            is_good = compare_ways(cluster.endpoints, options, directory)
        else:
            with cluster.connect() as kv:
                registry = Registry(kv, "overhead", uri=str(directory))
                is_good = beside_plain(directory, registry, options.size, options.rounds, options.digest)
    sys.exit(int(not is_good))


if __name__ == "__main__":
    main()
