"""The errors of checkpoints, with one-line messages: what happened, where, and what to do."""

from __future__ import annotations

from typing import Final

from raftkv.errors import RaftKVError


class CheckpointError(RaftKVError):
    """Any of the errors below."""


class CheckpointNotFound(CheckpointError, LookupError):
    """The checkpoint does not exist, or was deleted."""


class CheckpointExists(CheckpointError):
    """The step has been committed already, by another attempt."""

    definite = True


class StaleStep(CheckpointError):
    """The step is not above the newest committed step; ``latest`` never goes back."""

    definite = True


class FenceBroken(CheckpointError):
    """Another writer has claimed the checkpoints of the run since; nothing was written.

    Attributes:
        generation: generation of the ended claim.
    """

    definite = True

    def __init__(self, run_id: str, generation: int) -> None:
        super().__init__(
            f"generation {generation} of the checkpoints of run {run_id!r} is over: another writer has claimed them; "
            "stop this one, or claim them again if it is the right one"
        )
        self.run_id = run_id
        self.generation = generation


class AttemptOver(CheckpointError):
    """An attempt to save a checkpoint was aborted, or its checkpoint was deleted before this rank read the outcome."""

    definite = True


class PrepareConflict(CheckpointError):
    """The files of ranks conflict: two different lists of one rank, or two ranks with the same file."""

    definite = True


class RanksMissing(CheckpointError, TimeoutError):
    """Some ranks did not prepare their part in time.

    Attributes:
        missing: missing ranks.
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
    """A prepared file was deleted or truncated before the commit; nothing was committed.

    Attributes:
        name: file name below the checkpoint.
        rank: rank that owns it.
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
    """A file differs from the prepared one: it is missing, or has another size or content.

    Attributes:
        name: file name below the checkpoint.
    """

    def __init__(self, where: str, name: str, why: str) -> None:
        super().__init__(f"{where}: {name} {why}; load another checkpoint, and find the cause")
        self.name = name


class StorageError(CheckpointError):
    """The place of the files could not be read or written."""


PRINTABLE_CHARACTERS: Final = 1500
"""Maximum length of untrusted text in messages."""


class NotWhole(CheckpointError):
    """A directory of another tool is not a complete checkpoint, or cannot be read safely; nothing was registered.

    Attributes:
        why: what is missing or wrong, without the place.
    """

    definite = True

    def __init__(self, where: str, why: str) -> None:
        super().__init__(printable(f"{where}: {why}"))
        self.why = printable(why)


def printable(text: str) -> str:
    """Escape untrusted text, such as a name in a file, so that it can neither end the line nor control a terminal."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown if len(shown) <= PRINTABLE_CHARACTERS else f"{shown[:PRINTABLE_CHARACTERS]}..."


class PinLost(CheckpointError):
    """A reader's pin has ended before the reader released it, so the checkpoint may be deleted during the read."""

    definite = True
