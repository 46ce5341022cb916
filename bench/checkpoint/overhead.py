"""What the registry costs a save of torch.distributed.checkpoint: beside plain DCP, in turns, in one run.

    python -m bench.checkpoint.overhead --size 1GiB --rounds 9
    python -m bench.checkpoint.overhead --size 1GiB --directory /dev/shm/overhead       # a disk that costs nothing

Both sync what they write: plain DCP its files, the registry also names of files and directories, and it digests all
bytes and commits through a cluster of three members on the same machine. Between two saves everything is deleted and
written back, so that no save pays for the one before. The bar: the median of the registry is at most 3 % over plain.
The time that digests alone take is printed beside it: they are made while the file is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import raftkv
from raftkv.checkpoint import Registry
from raftkv.checkpoint.digest import ALGORITHMS, SHA256, Digest
from raftkv.torch.checkpoint import Writer

BAR: Final = 0.03
UNITS: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
TENSORS: Final = 16


def size_of(text: str) -> int:
    """Read a size as ``1GiB``."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def state_of(size_bytes: int) -> dict[str, torch.Tensor]:
    """Return a model of so many bytes: tensors of the same size."""
    return {f"layer.{number}": torch.rand(size_bytes // TENSORS // 4) for number in range(TENSORS)}


def timed(step: Callable[[], Any]) -> float:
    """Return how long a step takes, in seconds."""
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def measure(directory: Path, registry: Registry, size_bytes: int, rounds: int, digest: str) -> dict[str, list[float]]:
    """Save in turns; the first round of each warms up and does not count."""
    state = state_of(size_bytes)
    found: dict[str, list[float]] = {"plain": [], "registry": []}
    for number in range(1, rounds + 2):
        ways: dict[str, Callable[[], Any]] = {
            "plain": lambda: save(state, storage_writer=FileSystemWriter(directory / "plain")),
            "registry": lambda number=number: save(state, storage_writer=Writer(registry, number, digest=digest)),
        }
        for name in sorted(ways, reverse=bool(number % 2)):  # who is first changes from round to round
            took = timed(ways[name])
            if number > 1:
                found[name].append(took)
            shutil.rmtree(directory)
            os.sync()
    return found


def digest_time(size_bytes: int, algorithm: str) -> float:
    """Return the seconds that digesting so many bytes takes on a core of its own."""
    block = os.urandom(1 << 20)
    digest = Digest(algorithm)
    return timed(lambda: [digest.update(block) for _ in range(size_bytes >> 20)])


def main() -> int:
    """Measure, print, and return 1 if the bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=size_of, default="1GiB", help="of the model (default 1GiB)")
    parser.add_argument("--rounds", type=int, default=9, help="saves of each, beside one to warm up (default 9)")
    parser.add_argument("--directory", type=Path, help="where to save (default: a temporary one)")
    parser.add_argument("--digest", default=SHA256, choices=list(ALGORITHMS), help="algorithm (default sha256)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    directory = options.directory or Path(tempfile.mkdtemp(prefix="raftkv-overhead-"))
    with raftkv.local(size=3) as cluster, cluster.connect() as kv:
        registry = Registry(kv, "overhead", uri=str(directory))
        found = measure(directory, registry, options.size, options.rounds, options.digest)
    medians = {name: statistics.median(times) for name, times in found.items()}
    best = {name: min(times) for name, times in found.items()}
    pairs = [ours / plain - 1 for plain, ours in zip(found["plain"], found["registry"], strict=True)]
    report = {
        "size_bytes": options.size, "rounds": options.rounds, "times_s": found, "median_s": medians,
        "overhead": medians["registry"] / medians["plain"] - 1,
        "overhead_of_best": best["registry"] / best["plain"] - 1,
        "overhead_in_pairs": statistics.median(pairs), "digest_s": digest_time(options.size, options.digest),
    }  # fmt: skip
    if options.json:
        print(json.dumps(report))
    else:
        for name, times in found.items():
            print(f"{name:9} median {medians[name]:.3f} s of {len(times)}; {min(times):.3f} to {max(times):.3f} s")
        print(f"digests alone: {report['digest_s']:.3f} s, beside the writing")
        print(f"overhead: {report['overhead']:+.1%} of the medians, {report['overhead_of_best']:+.1%} of the best, "
              f"{report['overhead_in_pairs']:+.1%} in pairs; the bar is {BAR:+.0%}")  # fmt: skip
    return int(medians["registry"] / medians["plain"] - 1 > BAR)


if __name__ == "__main__":
    sys.exit(main())
