"""A worker that reduces until a file says stop; it notes its process, rank and world in a log, a line for each start.

python torchrun_worker.py LOG STOP
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(log: Path, stop: Path) -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    line = f"{os.getpid()} {os.getppid()} {dist.get_rank()} {dist.get_world_size()}\n"
    with log.open("a") as file:
        file.write(line)
    total = torch.zeros(1)
    while not total.item():
        total.fill_(float(stop.exists()))
        dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
