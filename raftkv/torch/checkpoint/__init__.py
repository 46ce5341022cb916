"""Checkpoints of ``torch.distributed.checkpoint`` (DCP) in the registry: complete and verified, or absent.

::

    state = {"model": model, "optimizer": optimizer, "data": loader, f"rng.{rank}": torch.get_rng_state()}
    last = raftkv.torch.checkpoint.resume(run, state)                  # None: a fresh start
    for step in range(0 if last is None else last.step + 1, steps):
        ...
        dcp.save(state, storage_writer=Writer(run, step, metrics={"loss": loss}))

    dcp.load(state, storage_reader=Reader(registry, "latest"))         # or a step, a tag, ("best", "loss")

The ``state`` and the files of ``Writer(files=...)`` are one commit: model, optimizer, position in the data and random
number states are of the same step, or the checkpoint does not exist.

    writer   DCP's StorageWriter: writes to the attempt's directory, computes digests meanwhile, prepares, commits
    reader   DCP's StorageReader: finds, pins, verifies digests before use; another world size may load
    resume   loads the latest checkpoint at the start of a training program (in ``reader``)
    link     connects both to the registry, in this process or in one that torch has started

Invariants

1. ``.metadata`` is written only while the claim lasts; the coordinator prepares it, as the last rank.
2. Nothing is used, and above all nothing is unpickled, before its digest was verified.
3. A failure of one rank fails all ranks, by DCP's own collectives; the failed rank aborts the attempt.

A name, and with it torch, is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftkv.lazy import attach

if TYPE_CHECKING:
    from raftkv.torch.checkpoint.reader import Reader as Reader
    from raftkv.torch.checkpoint.reader import resume as resume
    from raftkv.torch.checkpoint.writer import Writer as Writer

__getattr__, __dir__, __all__ = attach(__name__, {"reader": "Reader resume", "writer": "Writer"})
