"""Ownership of files: which files may be deleted with a checkpoint.

A record is not trusted: a writer of one run's keys could name any directory in it. So the collector deletes only below
its given place, and only if the place has a marker file of the run.
A
directory directly below that place with the name of the attempt was created only for it, and is deleted as a whole;
any other one is kept.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from raftkv.checkpoint.commit.manifest import MAX_BYTES, Manifest
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.keys import NAME_BYTES_MAX, AttemptId, RegistryKeys
from raftkv.checkpoint.records import Checkpoint, Deleting
from raftkv.checkpoint.storage.place import Place
from raftkv.client.control import Control, until_answered
from raftkv.client.operations import get, mod_revision, put, version
from raftkv.client.records import RecordError
from raftkv.errors import ConfigError

CHECKS_AT_ONCE: Final = 16
"""Threads that look for manifests, because an object store answers each look after some 20 ms."""


def holds_whole_checkpoint(uri: str) -> bool:
    """Return whether a directory has all files of its manifest.

    No zombie leaves such a directory: the manifest is written when all files are there. If no key names it, the store
    is not the one that it was committed in, as after a restore from a backup.

    Raises:
        StorageError: the place cannot be read.
    """
    place = Place(uri)
    if not place.exists(MANIFEST):
        return False
    try:
        files = [file for _, file in Manifest.decode(place.read(MANIFEST, MAX_BYTES)).files]
    except RecordError:
        return False
    there = {found.name: found.size_bytes for found in place.list()}
    return all(there.get(file.name) == file.size_bytes for file in files)


def without_files(uri: str, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints below a place that have no manifest there; of those elsewhere nothing is known.

    Raises:
        StorageError: the place cannot be read.
    """

    def is_gone(checkpoint: Checkpoint) -> bool:
        try:
            return Place(uri).name_below(checkpoint.uri) != "" and not Place(checkpoint.uri).exists(MANIFEST)
        except ConfigError:
            return False  # the record names no place

    if not uri:
        return []
    with ThreadPoolExecutor(CHECKS_AT_ONCE, "raftkv-check") as threads:
        return [each for each, gone in zip(checkpoints, threads.map(is_gone, checkpoints), strict=True) if gone]


def refusal(gone: Deleting, attempt: AttemptId, place: Place) -> str:
    """Return why the files of a deletion must not be deleted; empty: they may be.

    Arguments:
        gone: files to delete.
        attempt: whose.
        place: place in which the run may delete.

    Raises:
        ConfigError: the uri is not valid.
    """
    if place.name_below(gone.uri) == attempt.directory:
        return ""
    return f"{gone.uri} stays: it does not lie below {place.uri}; collect with its place to delete it"


def is_own(uri: str, attempt: AttemptId) -> bool:
    """Return whether a directory has the name of an attempt."""
    return uri.rpartition("/")[2] == attempt.directory


# ---- marks: which runs write to a place, so that no run deletes the files of another
#
# Each run of each cluster has a random mark in the store, and leaves a small file of that name in every place before it
# writes anything else there::
#
#     /shared/checkpoints/job/raftkv-run-9f86d081884c7d65
#     /shared/checkpoints/job/step-000000000100.g7.1/...
#
# A directory that no key names may be the checkpoint of another run, or of another cluster, that writes to the same
# place. It can only be a leftover of this run where this run's mark is the only one.

Leave = Callable[[str, str, bytes], Awaitable[None]]

PREFIX: Final = "raftkv-run-"
_MARK: Final = re.compile(rb"[0-9A-Za-z]{1,64}")


async def mark(control: Control, run_id: str, uri: str, leave: Leave) -> None:
    """Write the marker file of a run to a place; call this before writing anything else there.

    Arguments:
        control: the store.
        run_id: run id.
        uri: URI of the place.
        leave: leaves a file of a name, as ``leave_file`` does.

    Raises:
        StorageError: the place cannot be written to.
        StatusError: the cluster refused.
    """
    key = RegistryKeys(run_id).mark
    new = os.urandom(8).hex().encode()
    seen = version(key) == 0
    while True:
        result = await until_answered(partial(control.txn, [seen], [put(key, new)], [get(key)]))
        found = None if result.succeeded else result.results[0]
        own = new if result.succeeded else b"" if found is None else found.value
        if _MARK.fullmatch(own):
            await leave(uri, PREFIX + own.decode(), f"{run_id}\n".encode())
            return
        # Another mark takes the place of what raftkv did not write.
        seen = version(key) == 0 if found is None else mod_revision(key) == found.mod_revision


async def leave_file(uri: str, name: str, data: bytes) -> None:
    """Write a file of a place unless it exists. Raises StorageError."""

    def leave() -> None:
        place = Place(uri)
        if not place.exists(name):
            place.write(name, data)

    await asyncio.to_thread(leave)


def read_marks(uri: str) -> dict[str, str]:
    """Return the marker files in a place, with the run of each. Raises StorageError."""
    place, found = Place(uri), dict[str, str]()
    for name in place.names():
        if name.startswith(PREFIX):
            text = next(place.chunks(name, NAME_BYTES_MAX + 1), b"")  # others may write there, and no run id is longer
            found[name.removeprefix(PREFIX)] = text.decode(errors="replace").removesuffix("\n")
    return found


def is_alone(marks: Mapping[str, str], run_id: str, own: bytes | None) -> bool:
    """Return whether a place has the marker of a run, and no other.

    Arguments:
        marks: in the place, as of ``read_marks``: a run whose record has the mark of another is not at home there.
        run_id: run id.
        own: marker of the run, according to the store; None: it has none.
    """
    return own is not None and marks == {own.decode(errors="replace"): run_id}
