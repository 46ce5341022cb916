"""One rank that reduces over a raftkv store, twice: by a store that only torch holds, and by a URL."""

from __future__ import annotations

import gc
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from raftkv.torch import Store
from raftkv.torch.init_method import register

TIMEOUT = timedelta(seconds=60)


def reduce(rank: int) -> int:
    value = torch.tensor([rank + 1])
    dist.all_reduce(value)
    dist.barrier()
    group = dist.new_group([0, 1])
    objects = [rank]
    dist.broadcast_object_list(objects, 0, group)
    if objects != [0]:
        raise SystemExit(f"broadcast gave {objects}")
    dist.monitored_barrier(group, timeout=TIMEOUT)
    dist.destroy_process_group()
    return int(value)


def main(endpoints: str, rank: int, world_size: int) -> None:
    store = Store(endpoints, "workers/by-store", TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    del store
    gc.collect()
    first = reduce(rank)
    register()
    register()
    url = f"raftkv://{endpoints}/workers/by-url"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size, timeout=TIMEOUT)
    print(f"store {first} url {reduce(rank)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
