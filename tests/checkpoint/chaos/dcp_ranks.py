"""A rank that saves with torch's DCP and ``raftkv.torch.checkpoint``, and stops at the same points."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from raftkv.errors import RaftKVError
from raftkv.torch.checkpoint import Reader, Writer
from tests.checkpoint.chaos.points import AFTER_COMMIT, AFTER_PREPARE, BEFORE_PREPARE, BEFORE_WRITE, MID_WRITE, Points
from tests.checkpoint.chaos.registry_ranks import METRIC, RegistryRank, problems_of

ELEMENTS = 2048
TIMEOUT_S = 120.0


class DcpRank(RegistryRank):
    """Save and resume as ``RegistryRank`` does, by DCP.

    Arguments:
        points, endpoints: as of ``RegistryRank``.
        is_async: a thread saves.
    """

    def __init__(self, points: Points, endpoints: list[str], *, is_async: bool = False) -> None:
        torch.set_num_threads(1)
        self._is_async = is_async
        super().__init__(points, endpoints)

    def gather(self, path: str, rank: int, size: int) -> None:
        """Build the process group of a generation."""
        store = dist.FileStore(path, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))

    def save(self, step: int, rank: int, size: int, stop_at: str) -> int:
        """Implement ``RegistryRank.save``."""
        self._points.stop_at = stop_at
        writer = _Writer(self._points, self._registry, step, metrics={METRIC: 1.0 / step}, claim=self._claim)
        state = {name: torch.full((ELEMENTS,), float(step)) for name in _names(rank)}
        with _own_errors():
            try:
                planner = _Planner(self._points)
                if self._is_async:
                    saving: Any = dcp.async_save(state, storage_writer=writer, planner=planner)
                    saving.result()
                else:
                    dcp.save(state, storage_writer=writer, planner=planner)
            finally:
                self._attempt = writer.attempt
        self._points.reach(AFTER_COMMIT)
        return int(writer.checkpoint.number)

    def resume(self) -> tuple[int, list[str]]:
        """Implement ``RegistryRank.resume``: all ranks at the same time."""
        reader = Reader(self._registry, "latest", verify="all")
        state = {name: torch.zeros(ELEMENTS) for name in _names(dist.get_rank())}
        with _own_errors():
            dcp.load(state, storage_reader=reader)
        found = reader.checkpoint
        wrong = [name for name, tensor in state.items() if not torch.all(tensor == float(found.step))]
        return found.step, [*problems_of(found), *(f"step {found.step}: {name} is another's" for name in wrong)]


def _names(rank: int) -> list[str]:
    return [f"rank.{rank}.{part}" for part in ("first", "second")]


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raise raftkv's own error instead of the one in which DCP tells of it."""
    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, RaftKVError):
                raise cause from error
        raise


class _Planner(dcp.DefaultSavePlanner):
    """Stops between two tensors."""

    def __init__(self, points: Points) -> None:
        super().__init__()
        self._points = points
        self._written = 0

    def resolve_data(self, write_item: Any) -> Any:
        if self._written == 1:
            self._points.reach(MID_WRITE)
        self._written += 1
        return super().resolve_data(write_item)


class _Writer(Writer):
    """Stops before and after it prepares."""

    def __init__(self, points: Points, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._points = points

    @property
    def attempt(self) -> Any:
        return self._attempt.inner if isinstance(self._attempt, _Attempt) else self._attempt

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._points.reach(BEFORE_WRITE)
        return super().write_data(plan, planner)

    def _enter(self, part: Any) -> Any:
        if not isinstance(self._attempt, _Attempt):
            self._attempt = _Attempt(super()._enter(part), self._points)
        self._part = part
        return self._attempt


class _Attempt:
    """An attempt that stops before and after it is prepared."""

    def __init__(self, inner: Any, points: Points) -> None:
        self.inner = inner
        self._points = points

    def prepare(self, rank: int, files: Any, *, metrics: Any = None) -> None:
        self._points.reach(BEFORE_PREPARE)
        self.inner.prepare(rank, files, metrics=metrics)
        self._points.reach(AFTER_PREPARE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
