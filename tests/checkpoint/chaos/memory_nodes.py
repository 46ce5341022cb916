"""A node of a run whose state is in memory: agent, holder and rank in one process, which stops at named points.

Its state says whose it is: rank, step and generation, and as many bytes as the driver wants, which follow from these.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

import raftkv.training
from raftkv.checkpoint import sync
from raftkv.checkpoint.copies import transfer
from raftkv.checkpoint.copies.holder import Holder
from raftkv.checkpoint.errors import RanksMissing
from raftkv.errors import RaftKVError
from raftkv.torch.memory import Memory
from tests.checkpoint.chaos.points import AFTER_COMMIT, AFTER_PREPARE, BEFORE_COMMIT, BEFORE_PREPARE, Points

NODES: Final = 3
BEFORE_SEND: Final = "before_send"
MID_SEND: Final = "mid_send"
BETWEEN_SENDS: Final = "between_sends"
IN_RESTORE: Final = "in_restore"

SAVE_POINTS: Final = (BEFORE_SEND, MID_SEND, BETWEEN_SENDS, BEFORE_PREPARE, AFTER_PREPARE, BEFORE_COMMIT, AFTER_COMMIT)
"""Nothing sent; half of the bytes with its own node; one node has them; both have; prepared; and of the coordinator."""
PATIENCE_S: Final = 90.0
LEASE_TTL_S: Final = 8
"""On a machine that is busy a node that lives stays silent for seconds. That one was killed its connection tells."""


class _Halves(Sequence[memoryview]):
    """The parts of a state, with a stop in the middle."""

    def __init__(self, parts: Sequence[memoryview], points: Points) -> None:
        half = len(parts[-1]) // 2
        self._parts = [*parts[:-1], parts[-1][:half], parts[-1][half:]]
        self._points = points

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, place: Any) -> Any:
        return self._parts[place]

    def __iter__(self) -> Iterator[memoryview]:
        yield from self._parts[:-1]
        self._points.reach(MID_SEND)
        yield self._parts[-1]


class MemoryNode:
    """Do what the driver says.

    Arguments:
        points: where to stop.
        options: endpoints, run id, size of the state in bytes.
    """

    def __init__(self, points: Points, options: tuple[list[str], str, int]) -> None:
        torch.set_num_threads(1)
        self._points = points
        self._endpoints, self._run_id, size_bytes = options
        self._base = torch.arange(size_bytes, dtype=torch.int64).remainder_(251).to(torch.uint8)
        self._run: Any = None
        self._memory: Any = None
        self._holders: list[Holder] = []
        self._hook()

    def _hook(self) -> None:
        points, send, opened, fetch = self._points, transfer.send, Holder.open, sync.Registry.fetch
        prepare, commit = sync.Attempt.prepare, sync.Attempt.commit

        def stopping_send(holder: Any, copy: Any, parts: Sequence[memoryview]) -> None:
            points.reach(BEFORE_SEND)
            send(holder, copy, _Halves(parts, points))
            points.reach(BETWEEN_SENDS)

        def stopping_prepare(self: sync.Attempt, *args: Any, **more: Any) -> None:
            points.reach(BEFORE_PREPARE)
            prepare(self, *args, **more)
            points.reach(AFTER_PREPARE)

        def stopping_commit(self: sync.Attempt, *args: Any, **more: Any) -> Any:
            points.reach(BEFORE_COMMIT)
            done = commit(self, *args, **more)
            points.reach(AFTER_COMMIT)
            return done

        def stopping_fetch(self: sync.Registry, *args: Any, **more: Any) -> Any:
            points.reach(IN_RESTORE)
            return fetch(self, *args, **more)

        async def noted_open(holder: Holder) -> None:
            await opened(holder)
            self._holders.append(holder)

        patched: list[tuple[Any, str, Any]] = [
            (transfer, "send", stopping_send), (sync.Attempt, "prepare", stopping_prepare),
            (sync.Attempt, "commit", stopping_commit), (sync.Registry, "fetch", stopping_fetch),
            (Holder, "open", noted_open),
        ]  # fmt: skip
        for owner, name, value in patched:
            setattr(owner, name, value)

    def enter(self, name: str) -> tuple[int, int]:
        """Take part in the next generation; returns it and this rank."""
        if self._run is None:
            self._run = raftkv.training.join(
                self._run_id, endpoints=self._endpoints, min_nodes=NODES, max_nodes=NODES, host=name,
                topology=f"rack-{name}", address="127.0.0.1", rank_policy="fill",
                memory_bytes=8 * len(self._base) + (1 << 22), timeout_s=PATIENCE_S, return_timeout_s=0,
                fault_limit=0, lease_ttl_s=LEASE_TTL_S,
            )  # fmt: skip
        else:
            self._run.rejoin(PATIENCE_S)
        self._memory = Memory(self._run, timeout_s=PATIENCE_S)
        return self._run.generation, self._run.rank

    def _body(self, rank: int, step: int, generation: int) -> torch.Tensor:
        return self._base + (7 * rank + 13 * step + 31 * generation) % 251

    def save(self, step: int, stop_at: str) -> int:
        """Save a state; returns the last step that is known to be prepared, on rank 0 committed."""
        self._points.stop_at = stop_at
        facts = (self._run.rank, step, self._run.generation)
        self._memory.save(step, {"facts": torch.tensor(facts), "body": self._body(*facts), "name": "state"})
        self._memory.wait()
        return int(self._memory.committed)

    def restore(self, stop_at: str) -> dict[str, Any]:
        """Restore; returns whose state it is, how long it took, and what is wrong with its bytes."""
        self._points.stop_at = stop_at
        began, before_s = time.perf_counter(), time.process_time()
        try:
            found = self._memory.restore()
        except (RaftKVError, RanksMissing, TimeoutError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        took_s, processor_s = time.perf_counter() - began, time.process_time() - before_s
        if found is None:
            return {"step": -1, "wrong": ""}
        rank, step, generation = found.state["facts"].tolist()
        is_right = torch.equal(found.state["body"], self._body(rank, step, generation))
        wrong = "" if is_right and (rank, step) == (self._run.rank, found.step) else f"{rank}, {step}, {found.step}"
        return {"step": step, "generation": generation, "took_s": took_s, "processor_s": processor_s, "wrong": wrong}

    def damage(self) -> int:
        """Flip a bit in everything that this node holds; returns how much that is."""
        for holder in self._holders:
            for held in holder.shelf.held.values():
                held.memory[held.size_bytes - 1] ^= 1
        return sum(len(holder.shelf.held) for holder in self._holders)

    def forget(self) -> None:
        """Forget what is in memory, so that earlier steps may be saved; on rank 0."""
        if self._run.rank == 0:
            world, registry = self._run.world, self._run.checkpoints
            registry.forget_memory(registry.claim_run(world.generation, world.revision, world.fence))

    def train(self, steps: int, every: int, step_s: float, port: int) -> dict[str, float]:
        """Take steps: each a collective of gloo, and time in which the processor has nothing to do, as beside a GPU."""
        if not dist.is_initialized():
            where = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", init_method=where, rank=self._run.rank, world_size=NODES)
        memory = Memory(self._run, every=every or 1)
        facts = (self._run.rank, 0, self._run.generation)
        state = {"facts": torch.tensor(facts), "body": self._body(*facts)}
        gradient = torch.ones(1 << 16)
        if every:
            memory.save(every, state)  # the first one makes the buffer
            memory.wait()
        dist.barrier()
        before_s, began = memory.held_s, time.perf_counter()
        for step in range(1, steps + 1):
            threading.Event().wait(step_s)
            dist.all_reduce(gradient)
            if every:
                memory.save(every + step, state)
        took_s = time.perf_counter() - began
        memory.wait()
        return {"took_s": took_s, "held_s": memory.held_s - before_s, "committed": memory.committed}

    def ask(self, questions: int) -> list[float]:
        """Ask for the nearest copies of this rank's state; returns how long each answer took, in seconds."""
        registry, times = self._run.checkpoints, []
        step = registry.latest("memory").step
        for _ in range(questions):
            began = time.perf_counter()
            found = registry.nearest(step, f"rank-{self._run.rank}", to="elsewhere", topology="rack-x")
            times.append(time.perf_counter() - began)
            assert found
        return times
