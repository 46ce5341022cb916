"""A file of a checkpoint from the nearest copy whose digest is right: memory, a disk, or shared storage.

    data = await read_nearest(control, keys, checkpoint, "rank-3", Spot("host-7"), read_copy, limit_bytes=1 << 34)

The caller names the checkpoint, so all ranks that were told of one read one attempt. Its record vouches for the list of
files, and the list for each file; the catalogue only says where to look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from raftkv.checkpoint.copies import catalogue, transfer
from raftkv.checkpoint.digest import Digest
from raftkv.checkpoint.errors import CheckpointNotFound, DigestMismatch, StorageError
from raftkv.checkpoint.storage.verify import decode_manifest, find_file, load_manifest, read_verified
from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.checkpoint.commit.manifest import Manifest
    from raftkv.checkpoint.copies.catalogue import Spot, Whereabouts
    from raftkv.checkpoint.keys import RegistryKeys
    from raftkv.checkpoint.records import Checkpoint, CopyRecord, FileRecord
    from raftkv.client.control import Control

ReadCopy = Callable[["CopyRecord", int], Awaitable[memoryview]]
"""Reads a copy of so many bytes from its holder, unchecked; raises StorageError."""


async def receive(copy: CopyRecord, size_bytes: int) -> memoryview:
    """Read a copy from its holder, on a thread. Implements ``ReadCopy``."""
    return await asyncio.to_thread(transfer.receive, copy, size_bytes)


async def read_nearest(
    control: Control,
    keys: RegistryKeys,
    checkpoint: Checkpoint,
    file: str,
    spot: Spot,
    read_copy: ReadCopy,
    *,
    limit_bytes: int = 0,
) -> memoryview:
    """Return the bytes of a file, with the digest that was prepared.

    Arguments:
        control: the store.
        keys: of the run.
        checkpoint: as a lookup returned it, or another rank that has looked it up for all.
        file: its name in the checkpoint.
        spot: of the reader.
        read_copy: reads from a holder.
        limit_bytes: of what is allocated; 0: half of this machine's memory.

    Raises:
        CheckpointNotFound: it is deleted, or was replaced by a later one.
        DigestMismatch: the list of files is not the one that was committed, or a file in shared storage is not.
        StorageError: no copy could be read whose digest is right; the text says of each why.
        ConfigError: the file is larger than the limit.
    """
    found = await catalogue.nearest(control, keys, checkpoint.step, file, spot, checkpoint.kind)
    if found.checkpoint.id != checkpoint.id:
        raise CheckpointNotFound(f"{checkpoint.reference} is another attempt by now; look the latest up again")
    wanted = find_file(await _manifest(checkpoint, found), checkpoint, file)
    limit_bytes = limit_bytes or transfer.memory_limit_bytes()
    if wanted.size_bytes > limit_bytes:
        raise ConfigError(f"{file} of {checkpoint.reference} has {wanted.size_bytes} bytes, more than {limit_bytes}")
    why = []
    for copy in found.copies:
        if copy.record is None:
            return memoryview(await asyncio.to_thread(read_verified, checkpoint, file, file=wanted))
        try:
            data = await read_copy(copy.record, wanted.size_bytes)
            await asyncio.to_thread(check, data, wanted, catalogue.describe(copy.record))
            return data
        except (StorageError, DigestMismatch) as error:
            why.append(str(error))
    raise StorageError(f"{checkpoint.reference}: no copy of {file} can be read: {'; '.join(why) or 'there is none'}")


async def _manifest(checkpoint: Checkpoint, found: Whereabouts) -> Manifest:
    if found.listing is None:
        return await asyncio.to_thread(load_manifest, checkpoint)
    return decode_manifest(checkpoint.uri, found.listing, checkpoint.manifest)


def check(data: memoryview, wanted: FileRecord, where: str) -> None:
    """Compare bytes with what a rank has prepared. Raises DigestMismatch."""
    found = Digest.like(wanted.digest)
    found.update(data)
    if (len(data), str(found)) != (wanted.size_bytes, wanted.digest):
        raise DigestMismatch(where, wanted.name, "is not what was prepared")
