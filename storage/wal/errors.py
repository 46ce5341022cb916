"""What the write-ahead log raises, all of it below ``raftkv.errors``.

CorruptionError
+-- WALCorruptError     bytes that were synced are not what was written: file, offset, reason
StorageError
+-- WALNotFoundError    no log in this directory
+-- WALExistsError      a log is already there, it is not overwritten
+-- WALLockedError      another process uses the log
+-- WALVersionError     the log was written by a raftkv with another format
+-- WALFailedError      a write or sync failed once: this log is of no more use to this process
SpaceError
+-- WALSpaceError       no room for the next segment; nothing was written, the log is still good
"""

from __future__ import annotations

from raftkv.errors import CorruptionError, SpaceError, StorageError


class WALCorruptError(CorruptionError):
    """The log is damaged where a crash cannot have damaged it. The member must not start from it.

    ``path`` names the file, ``offset`` the first byte of the frame (or record) that is not what was written.
    """

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"write-ahead log {path} is damaged at offset {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason


class WALNotFoundError(StorageError):
    """There is no write-ahead log in the directory."""


class WALExistsError(StorageError):
    """There is a write-ahead log in the directory already."""


class WALLockedError(StorageError):
    """Another process (or another part of this one) has the log open."""


class WALVersionError(StorageError):
    """The log is whole, and of a format that this program does not know."""


class WALFailedError(StorageError):
    """A write or sync failed. The kernel may have dropped the pages and called them clean, so a retried sync that
    succeeds proves nothing (the "fsyncgate" of 2018): the log refuses everything from then on."""


class WALSpaceError(SpaceError):
    """No room on the disk for the next segment. Raised before any byte of the batch is written; a retry is safe."""
