"""What a training program does at its start: claim, decide what was left undecided, load the newest checkpoint.

    last = resume(run, state)           # or resume(registry, state)
    first = 0 if last is None else last.step + 1

All ranks get the same checkpoint, or none, whatever is committed or deleted meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.errors import AttemptOver, CheckpointNotFound
from raftkv.checkpoint.keys import DCP
from raftkv.checkpoint.records import Checkpoint
from raftkv.errors import RaftKVError
from raftkv.torch.checkpoint.link import Link, Source, from_rank_0
from raftkv.torch.checkpoint.reader import READ, Reader
from raftkv.training.api.run import Run


def resume(
    source: Source,
    state: dict[str, Any],
    *,
    kind: str = DCP,
    verify: str = READ,
    anywhere: bool = False,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Checkpoint | None:
    """Load the newest checkpoint into a state, on all ranks the same; None: there is none.

    Arguments:
        source: a run, or a registry, whose checkpoints this program then claims: all who wrote before are refused.
        state: as for ``dcp.load``.
        kind, verify, anywhere: see ``Reader``.
        process_group, no_dist: as for ``dcp.load``.

    Raises:
        DigestMismatch: a file is not what was committed; it names the file.
        StorageError: a file cannot be read.
        FenceBroken, GenerationOver: another has claimed the run's checkpoints meanwhile.
        CheckpointException: of DCP, for what else can go wrong on any rank.
    """

    def load(checkpoint: Checkpoint) -> Checkpoint:
        reader = Reader(
            source, checkpoint, kind=checkpoint.kind, verify=verify, anywhere=anywhere, process_group=process_group,
            no_dist=no_dist,
        )  # fmt: skip
        with typed(reader):
            load_state(state, storage_reader=reader, process_group=process_group, no_dist=no_dist)
        return checkpoint

    if isinstance(source, Run):
        with source.resume(kind) as last:
            return None if last is None else load(last.checkpoint)
    claim, found = from_rank_0(process_group, lambda: _find(Link(source), kind), no_dist=no_dist)
    Link(source).keep(claim)
    return None if found is None else load(found)


def _find(link: Link, kind: str) -> tuple[Claim, Checkpoint | None]:
    claim = link.claim(take_over=True)
    try:
        return claim, link.registry.latest(kind)
    except CheckpointNotFound:
        return claim, None


@contextlib.contextmanager
def typed(reader: Reader | None = None) -> Iterator[None]:
    """Raise raftkv's own error instead of the ``CheckpointException`` in which DCP tells of it."""
    try:
        yield
    except CheckpointException as error:
        if reader is not None and reader.failure is not None:
            raise reader.failure from error
        causes = [cause for cause, _ in error.failures.values() if isinstance(cause, RaftKVError)]
        # A rank that failed gives the attempt up, which the others hear: its own error is the one to tell.
        for cause in sorted(causes, key=lambda cause: isinstance(cause, AttemptOver)):
            raise cause from error
        raise
