"""The checkpoint registry: a checkpoint is complete, verified and visible on every member, or does not exist.

::

    registry = raftkv.checkpoint.Registry(kv, "job", uri="/shared/checkpoints/job")
    registry.latest(), registry.at(100), registry.best("loss"), registry.tagged("release")

The bytes are files on any file system of fsspec. The registry keeps the small records that must be consistent: which
checkpoints exist, and which writer may add the next one. User code starts with ``Registry`` (``aio.Registry`` for
asyncio); developers should read ``keys`` (the layout) and ``commit`` (how a checkpoint is created).

    commit      claims, attempts in two phases, takeover      find       lookups, watches of commits and of the best
    retention   holds, policies and deletion                  storage    the files
    copies      copies in the memory of nodes                 exchange   exports, imports and copies between runs
    positions   which samples were used                       trackers   files that name the newest for other tools
    saver       saves of a single-process program             registry   all of it as one object
    aio, sync   public names with and without an event loop
    keys, records, digest, errors: names, layout and values

The package is an ordinary client of the store, so it runs on raftkv and on etcd. It does not import torch and does not
depend on training runs; ``raftkv.training``, ``raftkv.torch`` and ``raftkv.integrations`` use it. Names are imported
when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftkv.lazy import attach

if TYPE_CHECKING:
    from raftkv.checkpoint import aio as aio
    from raftkv.checkpoint.commit.claim import Claim as Claim
    from raftkv.checkpoint.commit.summary import Measured as Measured
    from raftkv.checkpoint.errors import AttemptOver as AttemptOver
    from raftkv.checkpoint.errors import CheckpointError as CheckpointError
    from raftkv.checkpoint.errors import CheckpointExists as CheckpointExists
    from raftkv.checkpoint.errors import CheckpointNotFound as CheckpointNotFound
    from raftkv.checkpoint.errors import DigestMismatch as DigestMismatch
    from raftkv.checkpoint.errors import FenceBroken as FenceBroken
    from raftkv.checkpoint.errors import FilesChanged as FilesChanged
    from raftkv.checkpoint.errors import NotWhole as NotWhole
    from raftkv.checkpoint.errors import PinLost as PinLost
    from raftkv.checkpoint.errors import PrepareConflict as PrepareConflict
    from raftkv.checkpoint.errors import RanksMissing as RanksMissing
    from raftkv.checkpoint.errors import StaleStep as StaleStep
    from raftkv.checkpoint.errors import StorageError as StorageError
    from raftkv.checkpoint.find import Commit as Commit
    from raftkv.checkpoint.records import Checkpoint as Checkpoint
    from raftkv.checkpoint.records import FileRecord as FileRecord
    from raftkv.checkpoint.records import Reference as Reference
    from raftkv.checkpoint.retention.collector import Collected as Collected
    from raftkv.checkpoint.retention.policy import Best as Best
    from raftkv.checkpoint.retention.policy import Policy as Policy
    from raftkv.checkpoint.saver import Saver as Saver
    from raftkv.checkpoint.sync import Attempt as Attempt
    from raftkv.checkpoint.sync import Commits as Commits
    from raftkv.checkpoint.sync import Pin as Pin
    from raftkv.checkpoint.sync import Registry as Registry

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "commit.claim": "Claim",
        "commit.summary": "Measured",
        "errors": (
            "AttemptOver CheckpointError CheckpointExists CheckpointNotFound DigestMismatch FenceBroken "
            "FilesChanged NotWhole PinLost PrepareConflict RanksMissing StaleStep StorageError"
        ),
        "find": "Commit",
        "records": "Checkpoint FileRecord Reference",
        "retention.collector": "Collected",
        "retention.policy": "Best Policy",
        "saver": "Saver",
        "sync": "Attempt Commits Pin Registry",
    },
    ["aio"],
)
