"""One reader of the benchmark of manifests: does what its input says, line by line, and tells what it took.

python -m bench.dataset.client '{"endpoints": "...", "name": "...", "cache_bytes": 67108864, "directory": ""}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import raftkv
from bench.stage import memory_mib, tell
from raftkv.dataset import ChunkOrder, Dataset
from raftkv.dataset.dataset import Snapshot


def read_all(files: Snapshot) -> int:
    return sum(1 for _ in files)


def read_shuffled(files: Snapshot) -> int:
    """Read a tenth of the entries in an order of chunks, as a loader does."""
    order = ChunkOrder(files.chunk_counts, seed=1, epoch=1, window=8)
    return sum(1 for at in range(len(order) // 10) if files[order[at]].size >= 0) * 10


def passed(data: Dataset, read: Callable[[Snapshot], int]) -> dict[str, Any]:
    """One pass over the newest version."""
    reads, begin = data.store_reads, time.perf_counter()
    entries = read(data.next_pass())
    return {"entries": entries, "seconds": time.perf_counter() - begin, "store_reads": data.store_reads - reads}


def main() -> None:
    task = json.loads(sys.argv[1])
    with raftkv.connect(task["endpoints"]) as kv:
        kv.get("warm-up")
        data = Dataset(kv, task["name"], cache_bytes=task["cache_bytes"], directory=task["directory"])
        before = memory_mib("self")["VmRSS"]
        tell(event="ready")
        for line in sys.stdin:
            command, *arguments = line.split()
            if command == "pass":
                tell(**passed(data, read_all))
            elif command == "shuffled":
                tell(**passed(data, read_shuffled))
            elif command == "adopt":
                head = data.wait_version(int(arguments[0]), timeout_s=600)
                found = data.next_pass().lookup(arguments[1])
                tell(version=head.version, at=time.time(), found=found is not None)
            elif command == "memory":
                grown_bytes = int((memory_mib("self")["VmHWM"] - before) * 2**20)
                tell(grown_bytes=grown_bytes, cached_bytes=data.resident_bytes)


if __name__ == "__main__":
    main()
