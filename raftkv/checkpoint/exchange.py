"""Exchange of checkpoints: exports to a directory, and imports.

::

    await registry.export(checkpoint, "s3://archive/job-100")          # files, manifest and record
    await registry.import_export(claim, "s3://archive/job-100")        # in this cluster, or in another one

An import is saved like any other checkpoint (begun, prepared when its files are durable, committed), so it exists
completely or not at all, under the claim of the importing program. Files of a manifest are verified while they are
copied. An interrupted import leaves an attempt for the garbage collection and starts again; an interrupted export
continues.

An export is complete when its record, which is written last, exists. Empty directories are not copied.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from raftkv.checkpoint.commit.attempt import PREPARED_MAX_BYTES, PREPARED_TOTAL_MAX_BYTES, Attempt
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.commit.manifest import MAX_BYTES, RECORD
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.errors import DigestMismatch
from raftkv.checkpoint.keys import AttemptId
from raftkv.checkpoint.records import Checkpoint, FileRecord, Prepared, Reference
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.transfer import copy_files
from raftkv.checkpoint.storage.verify import Progress, decode_manifest, read_manifest
from raftkv.client.records import RecordError
from raftkv.errors import ConfigError
from raftkv.loop.outcomes import outcome_of
from raftkv.loop.scheduler import on_thread

T = TypeVar("T")

ORIGIN: Final = "raftkv.origin"
"""Metadata name for the origin of a copied or imported checkpoint."""
PARTS_MAX: Final = PREPARED_TOTAL_MAX_BYTES // PREPARED_MAX_BYTES
_DIGEST_CHARACTERS: Final = 140
"""More than any digest has."""


Begin = Callable[..., Awaitable[Attempt]]
"""Begins an attempt like ``Registry.begin``: below the uri of the registry, or in the incoming directory."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A directory that will become a checkpoint.

    Attributes:
        place: place of the files.
        files: its files, each with its digest or ``UNKNOWN``.
        step, kind, parent, metadata, metrics: fields of the checkpoint.
    """

    place: Place
    files: Sequence[FileRecord]
    step: int
    kind: str
    parent: Reference | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


# ---- the outcome of an import from another tool (``raftkv.integrations.importers``)

IMPORTED: Final = "imported"
FOUND: Final = "found"
SKIPPED: Final = "skipped"
REFUSED: Final = "refused"


@dataclass(frozen=True)
class Imported:
    """The outcome for one candidate that ``Registry.import_directory`` found.

    Attributes:
        path: path below the directory.
        tool: tool that wrote it.
        kind: one of ``keys.KINDS``; empty: not a checkpoint.
        step: None: unknown.
        action: ``imported``, ``skipped``, ``refused``, or ``found`` in a dry run.
        reason: why it was skipped or refused.
        uri: where the checkpoint is now; empty: not imported.
        file_count, size_bytes: number and total size of its files.
        metrics: metrics recorded by its tool.
    """

    path: str
    tool: str
    kind: str
    step: int | None
    action: str
    reason: str = ""
    uri: str = ""
    file_count: int = 0
    size_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return asdict(self)


OnResult = Callable[[Imported], None]


# ---- out


async def export(checkpoint: Checkpoint, uri: str, on_progress: Progress | None = None) -> None:
    """Copy a checkpoint to a directory; after an interruption, call this again. It must be pinned meanwhile.

    Arguments:
        checkpoint: checkpoint to copy.
        uri: directory.
        on_progress: called with numbers of bytes, on several threads.

    Raises:
        DigestMismatch: a file differs from the committed one.
        StorageError: a file could not be read or written.
        ConfigError: the directory has another checkpoint, or other files.
    """
    stop = threading.Event()
    await on_thread(lambda: _export(checkpoint, Place(uri), on_progress, stop), stop.set)


def _export(checkpoint: Checkpoint, target: Place, on_progress: Progress | None, stop: threading.Event) -> None:
    source, record = Place(checkpoint.uri), checkpoint.encode()
    if source.root == target.root and source.is_local == target.is_local:
        raise ConfigError(f"{target.uri} is where {checkpoint.reference} lies; export it to another directory")
    if _names_attempt(_real(target)):
        raise ConfigError(f"{target.uri} has the name of a directory that collectors delete; export to another")
    data = read_manifest(checkpoint)
    manifest = decode_manifest(source.uri, data, checkpoint.manifest)
    if target.exists(MANIFEST):
        if target.read(MANIFEST, MAX_BYTES) != data:
            raise ConfigError(f"another checkpoint lies at {target.uri}; export to an empty directory")
    elif others := [found.name for found in target.list() if not found.name.startswith(MANIFEST)]:
        raise ConfigError(f"other files lie at {target.uri}, such as {others[0]}; export to an empty directory")
    target.write(MANIFEST, data)  # first, so that an interrupted copy shows whose files these are
    files = [file for _, file in manifest.files]
    copy_files(source, files, target, resume=True, on_progress=on_progress, stop=stop)
    target.write(RECORD, record)


def _real(place: Place) -> str:
    return os.path.realpath(place.root) if place.is_local else place.root


def _names_attempt(path: str) -> bool:
    """Return whether a path leads into the directory of an attempt, with which collectors delete everything in it."""
    return any(AttemptId.of_directory(part) for part in path.split("/"))


# ---- in


def read_export(uri: str) -> tuple[Checkpoint, Incoming]:
    """Return the record of an export, and the checkpoint that it would become.

    Arguments:
        uri: directory.

    Raises:
        ConfigError: there is no export, or it is incomplete.
        DigestMismatch: the manifest does not match the record.
        StorageError: the export cannot be read.
    """
    place = Place(uri)
    if not place.exists(RECORD):
        raise ConfigError(f"{place.uri} is not an export of a checkpoint, or an incomplete one: it has no {RECORD}")
    try:
        checkpoint = Checkpoint.decode(place.read(RECORD, MAX_BYTES))
    except RecordError as error:
        raise DigestMismatch(place.uri, RECORD, f"cannot be read: {error}") from None
    manifest = decode_manifest(place.uri, place.read(MANIFEST, MAX_BYTES), checkpoint.manifest)
    metadata = {**checkpoint.metadata, ORIGIN: str(checkpoint.reference)}
    files = [file for _, file in manifest.files]
    return checkpoint, Incoming(place, files, checkpoint.step, checkpoint.kind, None, metadata, checkpoint.metrics)


async def save_copy(begin: Begin, claim: Claim, what: Incoming, on_progress: Progress | None = None) -> Checkpoint:
    """Copy an incoming directory below the uri of a registry, and commit it.

    Arguments:
        begin: ``begin`` of the registry.
        claim: current claim.
        what: comes in.
        on_progress: called with numbers of bytes, on several threads.

    Raises:
        ConfigError: there are too many files.
        CheckpointExists, StaleStep: the step, or a later one, is committed.
        CheckpointNotFound: the parent does not exist.
        DigestMismatch: a file has a wrong digest.
        StorageError: a file could not be read or written.
        FenceBroken, GenerationOver: the claim has ended.
    """
    parts = in_parts(what.files)
    if len(parts) > PARTS_MAX:  # before a byte is copied
        raise ConfigError(
            f"{what.place.uri} has {len(what.files)} files, too many for one checkpoint: the list of their names and "
            f"digests may take {PARTS_MAX * PREPARED_MAX_BYTES >> 20} MiB; pack them into fewer and larger files"
        )
    attempt = await begin(
        claim, what.step, world_size=len(parts), kind=what.kind, parent=what.parent, metadata=what.metadata
    )
    stop = threading.Event()
    copy = partial(copy_files, what.place, what.files, Place(attempt.uri), on_progress=on_progress, stop=stop)
    try:
        files = {file.name: file for file in await on_thread(copy, stop.set)}
        for rank, part in enumerate(parts):
            metrics = what.metrics if rank == 0 else None
            await attempt.prepare(rank, [files[file.name] for file in part], metrics=metrics)
        return await attempt.commit()
    except BaseException as error:
        await outcome_of(asyncio.create_task(attempt.give_up(error, "it could not be imported")))
        raise


def in_parts(files: Sequence[FileRecord]) -> list[list[FileRecord]]:
    """Split files into parts that one rank can prepare each: as few as possible, at least one."""
    limit = PREPARED_MAX_BYTES - 100
    parts: list[list[FileRecord]] = [[]]
    size_bytes = 0
    for file in files:
        own = len(Prepared(0, (file,)).encode()) + _DIGEST_CHARACTERS
        if size_bytes + own > limit:
            parts.append([])
            size_bytes = 0
        parts[-1].append(file)
        size_bytes += own
    return parts
