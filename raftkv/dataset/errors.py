"""The errors of datasets, with one-line messages: what happened, where, and what to do."""

from __future__ import annotations

from raftkv.errors import RaftKVError


class DatasetError(RaftKVError):
    """Any of the errors below."""


class DatasetNotFound(DatasetError, LookupError):
    """Nothing was published under this name, or the version does not exist."""


class InvalidEntry(DatasetError, ValueError):
    """An entry is not valid; nothing was published."""


class VersionGone(DatasetError, LookupError):
    """The version was deleted by a collection: its chunks are no longer in the store."""


class ChunkCorrupted(DatasetError):
    """A chunk does not have its digest, or has content that no publisher writes."""


class PublishConflict(DatasetError):
    """Another publisher was faster, or the lease of this publisher has ended; the head is unchanged by this one."""

    definite = True


class StaleHead(DatasetError, TimeoutError):
    """The store did not confirm in time that the known version is the newest."""
