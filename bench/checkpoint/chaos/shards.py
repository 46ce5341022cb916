"""The files that ranks write, and what a loader sees of them.

A shard begins with a line that says whose it is, and ends with a mark, so that one can see what a loader of a real tool
sees: that a file is missing or cut off, but not that it, or a part of it, is another generation's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

SHARD_BYTES: Final = 16 * 1024
MIXTURE: Final = -1
_END: Final = b"\nend of shard\n"


@dataclass(frozen=True)
class Shard:
    """Whose bytes they are: of which rank, step and generation."""

    rank: int
    step: int
    generation: int

    def encoded(self) -> bytes:
        """Return the bytes of the file; of one length, whoever writes them."""
        head = json.dumps(asdict(self)).encode().ljust(128) + b"\n"
        body = bytes([(self.rank * 7 + self.step * 13 + self.generation) % 251]) * SHARD_BYTES
        return head + body + _END


def write_shard(path: Path, shard: Shard, midway: Callable[[], None], *, fsync: bool = True) -> bytes:
    """Write a shard in two halves; returns its bytes.

    Arguments:
        path: of the file.
        shard: whose it is.
        midway: called when half of it is written.
        fsync: make it, and its name, durable.
    """
    data = shard.encoded()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", buffering=0) as file:
        file.write(data[: len(data) // 2])
        midway()
        file.write(data[len(data) // 2 :])
        if fsync:
            os.fsync(file.fileno())
    if fsync:
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return data


def read_shard(path: Path) -> Shard | None:
    """Return whose shard it is; None: it is missing, or cut off. ``MIXTURE``: two processes have written to it."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if not data.endswith(_END):
        return None
    shard = Shard(**json.loads(data.partition(b"\n")[0]))
    return shard if data == shard.encoded() else replace(shard, generation=MIXTURE)
