"""The directory where a snapshot lies while it is checked, as large as the database and a segment of the log.

It goes with its block. One of a process that was killed goes with the next backup: each is locked by whoever uses it,
and the system takes the locks of the dead away.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "raftkv-backup-"


@contextmanager
def temporary_directory(base: str = "") -> Iterator[Path]:
    """Make a directory for the time of the block, and delete what others left that were killed.

    Arguments:
        base: where; empty: where the system has its temporary files.

    Raises:
        OSError: it cannot be made there.
    """
    _remove_leftovers(Path(base or tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=base or None) as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_leftovers(base: Path) -> None:
    for path in base.glob(PREFIX + "*"):
        # Another user's, or gone meanwhile: theirs to clean up.
        with suppress(OSError):
            _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # An empty one may have been made just now, and not be locked yet.
        if os.fstat(descriptor).st_uid != os.geteuid() or not os.listdir(descriptor):
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(descriptor)
