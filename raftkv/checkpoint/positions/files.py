"""A position as a file of a checkpoint: committed with model and optimizer, or not at all.

with run.checkpoint(step) as saving:
    if run.rank == 0:
        save(saving, position)
with run.resume() as last:
    position = Position.begin(length) if last is None else load(last, Position)
"""

from __future__ import annotations

from typing import Final, Protocol, TypeVar

from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.storage.verify import read_verified
from raftkv.client.control.records import Record

FILE: Final = "raftkv-position.json"

R = TypeVar("R", bound=Record)


class Writes(Protocol):
    """What a file is written to: a saving of ``run.checkpoint``, files of a rank."""

    def write(self, name: str, data: bytes, /) -> object:
        """Write a whole file."""
        ...


class Reads(Protocol):
    """What a file is read from: a resumed checkpoint."""

    def read(self, name: str, /) -> bytes:
        """Return a whole file, verified."""
        ...


def save(files: Writes, position: Record, name: str = FILE) -> None:
    """Write a position; one rank does.

    Arguments:
        files: of the checkpoint that is being saved.
        position: a ``Position``, or what a ``Ledger`` says was used.
        name: of the file; another for each of several datasets.
    """
    files.write(name, position.encode())


def load(files: Reads | Checkpoint, kind: type[R], name: str = FILE) -> R:
    """Return the position that was committed with a checkpoint.

    Arguments:
        files: a resumed checkpoint, or the record of one.
        kind: what was saved: ``Position`` or ``Used``.
        name: of the file.

    Raises:
        DigestMismatch, StorageError: the file is not what was committed, or there is none.
        RecordError: it holds something else.
    """
    data = read_verified(files, name) if isinstance(files, Checkpoint) else files.read(name)
    return kind.decode(data)
