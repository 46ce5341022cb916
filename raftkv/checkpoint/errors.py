"""The errors of checkpoints: one line each, saying what, where and what to do."""

from __future__ import annotations

from typing import Final

from raftkv.errors import RaftKVError


class CheckpointError(RaftKVError):
    """Any of the errors below."""


class CheckpointNotFound(CheckpointError, LookupError):
    """There is no such checkpoint, or not any more."""


class CheckpointExists(CheckpointError):
    """The step has been committed already, by another attempt."""

    definite = True


class StaleStep(CheckpointError):
    """A step that is not above the newest was to be committed: ``latest`` never goes back."""

    definite = True


class FenceBroken(CheckpointError):
    """Another writer has claimed the checkpoints of the run since; nothing was written.

    Attributes:
        generation: of the claim that is over.
    """

    definite = True

    def __init__(self, run_id: str, generation: int) -> None:
        super().__init__(
            f"generation {generation} of the checkpoints of run {run_id!r} is over: another writer has claimed them; "
            "stop this one, and claim them anew if it is the right one"
        )
        self.run_id = run_id
        self.generation = generation


class AttemptOver(CheckpointError):
    """An attempt to save a checkpoint was given up; or its checkpoint was deleted before this rank looked for it."""

    definite = True


class PrepareConflict(CheckpointError):
    """The files of ranks do not fit together: two lists of one rank, or two ranks with the same file."""

    definite = True


class RanksMissing(CheckpointError, TimeoutError):
    """Some ranks did not prepare their part in time.

    Attributes:
        missing: those ranks.
    """

    definite = True

    def __init__(self, what: str, timeout_s: float, missing: list[int]) -> None:
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        super().__init__(
            f"{what} was not prepared by all ranks within {timeout_s:g} s; missing: rank{'s'[: len(missing) > 1]} "
            f"{shown}; abort it, and save again"
        )
        self.missing = missing


class FilesChanged(CheckpointError):
    """A file that a rank had prepared was gone or cut before the commit; nothing was committed.

    Attributes:
        name: of the file, below the checkpoint.
        rank: whose it is.
    """

    definite = True

    def __init__(self, where: str, name: str, rank: int, why: str) -> None:
        super().__init__(
            f"{where}: {name}, which rank {rank} had prepared, {why}; nothing was committed: find out what deletes or "
            "cuts files there, and save again"
        )
        self.name = name
        self.rank = rank


class DigestMismatch(CheckpointError):
    """A file is not what was prepared: it is missing, has another size, or other contents.

    Attributes:
        name: of the file, below the checkpoint.
    """

    def __init__(self, where: str, name: str, why: str) -> None:
        super().__init__(f"{where}: {name} {why}; load another checkpoint, and have this one looked at")
        self.name = name


class StorageError(CheckpointError):
    """The place of the bytes could not be read or written."""


PRINTABLE_CHARACTERS: Final = 1500
"""Limit of what is shown of a stranger's text."""


class NotWhole(CheckpointError):
    """A directory of another tool is no whole checkpoint, or cannot be read safely; nothing was registered.

    Attributes:
        why: what is missing or wrong, without the place.
    """

    definite = True

    def __init__(self, where: str, why: str) -> None:
        super().__init__(printable(f"{where}: {why}"))
        self.why = printable(why)


def printable(text: str) -> str:
    """Return text of strangers, as a name that a file names, so that it neither ends the line nor steers a terminal."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown if len(shown) <= PRINTABLE_CHARACTERS else f"{shown[:PRINTABLE_CHARACTERS]}..."


class PinLost(CheckpointError):
    """A reader's pin has ended before the reader: the checkpoint may be deleted under it."""

    definite = True
