"""Cutting a torn tail off the last segment, so that the log goes on where its last good frame ends.

Owns the order of the steps. A crash between any two of them leaves a segment whose tail is torn at the same offset
again: zeroing only adds to the evidence. The bytes cut off are kept beside the segment for whoever wants to look, if
the disk has room for them: nobody has been told that they were durable, so a full disk keeps no member from starting.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from raftkv.storage.failpoints import failpoint

from .disk import Disk
from .segment import NO_SPACE, TEMPORARY_NAME
from .tail import written_end


@dataclass(frozen=True, slots=True)
class Repair:
    """The account of a cut: ``cut_bytes`` of ``path`` from ``offset`` on, and the name of their copy.

    It is empty where the disk had no room for one.
    """

    path: str
    offset: int
    cut_bytes: int
    reason: str
    saved_as: str


def cut_tail(disk: Disk, path: str, data: bytes, offset: int, reason: str) -> Repair:
    """Zero the end of a segment, durably, after a copy of what was written is durable beside it, if there is room.

    Arguments:
        disk: the file operations.
        path: of the segment.
        data: the whole segment.
        offset: where the last good frame ends.
        reason: why, for the user.

    Raises:
        OSError: the system refused an operation.
    """
    failpoint("walBeforeRepair")
    # What is behind the last byte that is not zero was never written, or is zero already.
    end = written_end(data)
    saved_as = _save_copy(disk, path, data[:end])
    failpoint("walAfterRepairCopy")
    fd = disk.open(path)
    try:
        # Zeros and not a shorter file: the head says how long the file is, and another length is taken for damage.
        disk.write(fd, [bytes(end - offset)], offset)
        disk.sync_data(fd)
    finally:
        disk.close(fd)
    failpoint("walAfterRepair")
    return Repair(path, offset, end - offset, reason, saved_as)


def _save_copy(disk: Disk, path: str, data: bytes) -> str:
    directory, name = os.path.split(path)
    saved_as = os.path.join(directory, _free_name(f"{name}.broken", set(disk.list_names(directory))))
    # Under its own name only when it is whole and durable: a crash leaves no half of a copy.
    temporary = os.path.join(directory, TEMPORARY_NAME)
    try:
        _write_copy(disk, temporary, data)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        return ""
    disk.rename(temporary, saved_as)
    # Durable before the tail is cut: these bytes exist nowhere else.
    disk.sync_directory(directory)
    return saved_as


def _write_copy(disk: Disk, path: str, data: bytes) -> None:
    fd = disk.create(path)
    try:
        disk.write(fd, [data], 0)
        disk.sync_data(fd)
    except OSError:
        # Half a copy takes the room that others need now.
        disk.remove(path)
        raise
    finally:
        disk.close(fd)


def _free_name(name: str, taken: set[str]) -> str:
    """``name``, or ``name.2`` and so on: the copy of an earlier repair is not overwritten."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}.{number}"
    return free
