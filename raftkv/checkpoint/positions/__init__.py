"""Which samples were used: the part of a checkpoint that makes data exactly-once over changing worlds and crashes.

::

    position = Position.begin(len(files))                     # all ranks in step: a count is all there is to know
    mine = position.share(batch_size=32, rank=rank, world_size=world_size)
    position = position.step(batch_size=32, world_size=world_size)
    save(saving, position)                                    # a file of the checkpoint: one commit with the model
    position = load(resumed, Position)                        # any world goes on from there

    position   ranks that step together: a pure function of what was used
    ledger     ranks that do not: ranges that are taken, and marked as they are used; for asyncio
    sync       the same without an event loop
    intervals  sets of numbers as few intervals
    files      a position as a file of a checkpoint

Exactly once means: in the history that a committed checkpoint stands for, each sample of an epoch was used once,
whatever world sizes and crashes there were. What was used after the last commit is used again, as the
steps that it went into are done again: both are forgotten together, because both are in one commit.
"""

from __future__ import annotations

from raftkv.checkpoint.positions.files import load, save
from raftkv.checkpoint.positions.ledger import RangeLost, TakenRange, Used
from raftkv.checkpoint.positions.position import Position
from raftkv.checkpoint.positions.sync import Ledger

__all__ = ["Ledger", "Position", "RangeLost", "TakenRange", "Used", "load", "save"]
