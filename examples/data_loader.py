"""Workers of a torch DataLoader read through the client that they inherited: each has a connection of its own.

The parent's lock is held all the while; a worker could neither lose it nor give it back. Needs torch.
"""

from __future__ import annotations

import os

import torch
from torch.utils.data import DataLoader, Dataset

import raftkv

SAMPLES = 64


class Stored(Dataset[torch.Tensor]):
    """Samples that are in the store."""

    def __init__(self, kv: raftkv.Client) -> None:
        self.kv = kv

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Read one, and say who has read it."""
        self.kv.put(f"seen/{index}", str(os.getpid()))
        item = self.kv.get(f"sample/{index}")
        if item is None:
            raise IndexError(index)
        return torch.tensor(float(item.text))


if __name__ == "__main__":
    with raftkv.local() as cluster, cluster.connect() as kv:
        kv.put_many({f"sample/{index}": str(index) for index in range(SAMPLES)})
        with kv.lock("training") as lock:
            loader = DataLoader(Stored(kv), batch_size=8, num_workers=2, multiprocessing_context="fork")
            total = sum(float(batch.sum()) for batch in loader)
            kv.put("result", str(total), fence=lock)
        readers = {item.text for item in kv.range("seen/", prefix=True)}
        print("sum", total)
        print("read by", len(readers), "workers, not by this process:", str(os.getpid()) not in readers)
