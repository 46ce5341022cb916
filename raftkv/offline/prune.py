"""Archived segments that no backup needs any more are deleted.

    deleted = prune(Path("archive"), {cluster_id: lowest_index_of_the_backups_kept})

A segment goes when the one after it in the same directory begins at or before the first entry that a restore from the
oldest backup would need, so the newest always stays. Clusters that no backup is of are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from raftkv.errors import StorageError
from raftkv.offline.archive import MemberArchive, segment_directories
from raftkv.storage.wal.archive import MARKS_SUFFIX


def prune(archive: Path, needed: Mapping[int, int]) -> list[Path]:
    """Delete segments with their marks, the oldest first, and return their paths.

    Arguments:
        archive: a directory that holds those of members; none before the first segment is archived.
        needed: by cluster, the lowest applied index of the backups that are kept.

    Raises:
        StorageError: a file cannot be deleted.
        CorruptionError: the oldest segment of a member cannot be read.
    """
    deleted = []
    for directory in segment_directories(archive):
        member = MemberArchive.open(directory)
        if member.cluster_id not in needed:
            continue
        for name, after in pairwise(member.names):
            if after.first_index > needed[member.cluster_id] + 1:
                break
            path = directory / str(name)
            try:
                path.unlink()
                path.with_name(path.name + MARKS_SUFFIX).unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(f"cannot delete {path}: {error.strerror}") from error
            deleted.append(path)
    return deleted
