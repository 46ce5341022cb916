"""Ranks that reduce over raftkv stores, twice: by a store that only torch holds, and by a URL.

python store_worker.py ENDPOINTS SIZE: the ranks are forks of one process, which has used a store before.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from raftkv.torch import Store
from raftkv.torch.init_method import register

TIMEOUT = timedelta(seconds=60)


def reduce(rank: int, size: int) -> int:
    value = torch.tensor([rank + 1])
    dist.all_reduce(value)
    dist.barrier()
    group = dist.new_group(list(range(size)))
    objects = [rank]
    dist.broadcast_object_list(objects, 0, group)
    if objects != [0]:
        raise RuntimeError(f"broadcast gave {objects}")
    dist.monitored_barrier(group, timeout=TIMEOUT)
    dist.destroy_process_group()
    return int(value)


def run_rank(endpoints: str, inherited: Store, rank: int, size: int) -> None:
    inherited.add("ranks", 1)
    store = Store(endpoints, f"workers/{size}/by-store", TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    del store
    gc.collect()
    first = reduce(rank, size)
    url = f"raftkv://{endpoints}/workers/{size}/by-url"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=TIMEOUT)
    inherited.set(f"rank/{rank}", f"{first} {reduce(rank, size)}")


def main(endpoints: str, size: int) -> None:
    store = Store(endpoints, f"workers/{size}/shared", TIMEOUT)
    store.set("begun", "")
    register()
    register()
    children = []
    for rank in range(size):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            run_rank(endpoints, store, rank, size)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    results = store.multi_get([f"rank/{rank}" for rank in range(size)])
    print(store.get("ranks").decode(), *sorted({result.decode() for result in results}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
