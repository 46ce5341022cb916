"""A rank of ``test_two_ranks``: saves, loads and resumes through DCP over gloo, and prints what it found as JSON.

python -m tests.torch.checkpoint.ranks WHAT ENDPOINTS DIRECTORY RENDEZVOUS_FILE RANK WORLD_SIZE
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import raftkv
from raftkv.checkpoint import Registry
from raftkv.errors import RaftKVError
from raftkv.torch.checkpoint import Reader, Writer, resume
from raftkv.torch.checkpoint.reader import typed

ROWS = 12


def state(value: float) -> dict[str, Any]:
    """A tensor in shards, a replicated one, and a value of each rank's own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(ROWS * 4, dtype=torch.float32).reshape(ROWS, 4) + value
    return {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "bias": distribute_tensor(torch.full((3,), value), mesh, [Replicate()]),
        f"rng.{dist.get_rank()}": torch.tensor([value + dist.get_rank()]),
    }


def facts(loaded: dict[str, Any]) -> list[float]:
    rows = loaded["rows"]
    assert isinstance(rows, DTensor)
    whole = rows.full_tensor()
    return [float(whole.sum()), float(loaded["bias"].full_tensor().sum())]


def save(registry: Registry) -> Any:
    """In the three ways, and what one failing rank does to the other."""
    rank, found = dist.get_rank(), []
    assert resume(registry, state(0)) is None
    writer = Writer(registry, 1, files={f"data-{rank}": str(rank).encode()})
    dcp.save(state(1), storage_writer=writer)
    dcp.async_save(state(2), storage_writer=Writer(registry, 2)).result()
    process = AsyncCheckpointerType.PROCESS
    dcp.async_save(state(3), storage_writer=Writer(registry, 3), async_checkpointer_type=process).result()

    def fail() -> bytes:
        raise OSError("no room on rank 1")

    try:
        with typed():
            dcp.save(state(4), storage_writer=Writer(registry, 4, files={"a": fail} if rank == 1 else {}))
    except BaseException as error:
        found.append("no room on rank 1" in str(error))
    try:
        with typed():
            dcp.save(state(2), storage_writer=Writer(registry, 2))
    except RaftKVError as error:
        found.append(type(error).__name__)
    dcp.save(state(5), storage_writer=Writer(registry, 5), use_collectives=False)
    dist.barrier()
    return [*found, [(each.step, each.kind, each.world_size) for each in registry.checkpoints()]]


def mixed(registry: Registry) -> Any:
    """Rank 1 saves another step than rank 0; from the second step on with plans that torch's planner has kept."""
    rank, found = dist.get_rank(), []
    assert resume(registry, state(0)) is None
    for step, is_cached in ((1, False), (2, True), (3, True)):
        planner = DefaultSavePlanner(enable_plan_caching=is_cached)
        for own in (step + 10 * rank, step):
            try:
                with typed():
                    dcp.save(state(7), storage_writer=Writer(registry, own, timeout_s=30.0), planner=planner)
                found.append("saved")
            except RaftKVError as error:
                found.append(str(error))
    return [found, [each.step for each in registry.checkpoints()]]


def again(registry: Registry) -> Any:
    """A program resumes anew, as after an error that it has caught, with the plans that torch's planner has kept."""
    found: list[Any] = []
    for first in (1, 4):
        last = resume(registry, {"bias": state(0)["bias"]})
        found.append(None if last is None else last.step)
        for step in range(first, first + 3):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            try:
                with typed():
                    dcp.save(state(7), storage_writer=Writer(registry, step, timeout_s=30.0), planner=planner)
            except RaftKVError as error:
                found.append(str(error))
    return [found, [each.step for each in registry.checkpoints()]]


def load(registry: Registry) -> Any:
    """With any number of ranks."""
    loaded = state(0)
    loaded.pop(f"rng.{dist.get_rank()}")
    last = resume(registry, loaded, verify="all")
    newest = facts(loaded)
    reader = Reader(registry, 1)
    first = {"bias": loaded["bias"]}
    dcp.load(first, storage_reader=reader)
    dist.barrier()
    return [last.step if last else None, newest, facts(loaded)[1], reader.read("data-1").decode()]


def killed(registry: Registry) -> Any:
    """Rank 1 dies after its part is prepared; rank 0 raises, nothing is committed."""
    resume(registry, state(0))
    writer = Writer(registry, 9)
    if dist.get_rank() == 1:
        write = writer.write_data

        def die(*arguments: Any) -> Any:
            write(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        writer.write_data = die  # type: ignore[method-assign]
    try:
        dcp.save(state(9), storage_writer=writer)
    except BaseException as error:
        return [type(error).__name__, registry.latest("dcp").step]
    return ["committed"]


def main() -> None:
    what, endpoints, directory, rendezvous, *numbers = sys.argv[1:]
    rank, size = map(int, numbers)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    with raftkv.connect(endpoints) as kv:
        rank_of = {"save": save, "mixed": mixed, "again": again, "load": load, "killed": killed}[what]
        found = rank_of(Registry(kv, "two", uri=directory))
        print(json.dumps(found), flush=True)
        os._exit(0)  # without the farewells of process groups, whose other ranks may be dead


if __name__ == "__main__":
    main()
