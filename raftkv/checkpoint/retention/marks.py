"""Marks: which runs write to a place, so that no run deletes what another one has written.

Each run of each cluster has a random mark, kept in the store, and leaves an empty file of that name in every place that
it writes to, before it writes anything else there::

    /shared/checkpoints/job/raftkv-run-9f86d081884c7d65
    /shared/checkpoints/job/step-000000000100.g7.1/...

A directory that no key names may be the checkpoint of another run, or of another cluster, that writes to the same
place. Only where the one mark is the run's own can it be a leftover of that run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.storage.place import Place
from raftkv.client.control.control import Control, until_answered
from raftkv.client.kv.operations import get, put, version

Leave = Callable[[str, str, bytes], Awaitable[None]]

PREFIX: Final = "raftkv-run-"


async def mark(control: Control, run_id: str, uri: str, leave: Leave) -> None:
    """Leave the mark of a run in a place; to be called before anything else is written there.

    Arguments:
        control: the store.
        run_id: of the run.
        uri: of the place.
        leave: leaves a file of a name, as ``leave_file`` does.

    Raises:
        StorageError: the place cannot be written to.
        StatusError: the cluster refused.
    """
    key = RegistryKeys(run_id).mark
    new = os.urandom(8).hex().encode()
    while True:
        result = await until_answered(lambda: control.txn([version(key) == 0], [put(key, new)], [get(key)]))
        own = new if result.succeeded else result.results[0] and result.results[0].value
        if own:
            await leave(uri, PREFIX + own.decode(), f"{run_id}\n".encode())
            return


async def leave_file(uri: str, name: str, data: bytes) -> None:
    """Write a file of a place, unless there is one of that name. Raises StorageError."""

    def leave() -> None:
        place = Place(uri)
        if not place.exists(name):
            place.write(name, data)

    await asyncio.to_thread(leave)


def read_marks(uri: str) -> dict[str, str]:
    """Return the marks in a place, and the run that each names. Raises StorageError."""
    place = Place(uri)
    found = [name for name in place.names() if name.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): place.read(name).decode(errors="replace").strip() for name in found}


def is_alone(names: Sequence[str], own: bytes | None) -> bool:
    """Return whether a place has the mark of one run, and no other.

    Arguments:
        names: of what lies in the place.
        own: the mark of that run, as the store has it; None: it has none.
    """
    return own is not None and [name for name in names if name.startswith(PREFIX)] == [PREFIX + own.decode()]
