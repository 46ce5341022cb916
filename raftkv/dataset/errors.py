"""The errors of datasets: one line each, saying what, where and what to do."""

from __future__ import annotations

from raftkv.errors import RaftKVError


class DatasetError(RaftKVError):
    """Any of the errors below."""


class DatasetNotFound(DatasetError, LookupError):
    """Nothing was published under this name, or no such version."""


class InvalidEntry(DatasetError, ValueError):
    """An entry cannot be published; nothing was."""


class VersionGone(DatasetError, LookupError):
    """The version that is read was collected: its chunks are not in the store any more."""


class ChunkCorrupted(DatasetError):
    """A chunk is not what its digest says, or holds what no publisher writes."""


class PublishConflict(DatasetError):
    """Another publisher was faster, or this publisher was taken for dead; the head is as that one left it."""

    definite = True


class StaleHead(DatasetError, TimeoutError):
    """The store did not confirm in time that the known version is the newest."""
