"""The catalogue of copies: existing copies, nearest first, and the choice of nodes for new ones.

::

    copies = await nearest(control, keys, 100, "rank-3", Spot("host-7", "row1/rack7"))
    peers = choose(await holders(control, keys), own, count=2)

``nearest`` reads only a few keys, no matter how many copies a run has. It lists only copies of the committed attempt;
copies of an earlier attempt at the same step, of any generation, are not copies of this checkpoint.

READING: a file of a checkpoint from the nearest copy whose digest is right: memory, a disk, or shared storage.

    data = await read_nearest(control, keys, checkpoint, "rank-3", Spot("host-7"), read_copy, limit_bytes=1 << 34)

The caller names the checkpoint, so all ranks with the same checkpoint read the same attempt. Its record has the digest
of the list of files, and the list that of each file; the catalogue only gives locations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from raftkv.checkpoint.copies import transfer
from raftkv.checkpoint.digest import of_bytes
from raftkv.checkpoint.errors import CheckpointNotFound, DigestMismatch, StorageError, printable
from raftkv.checkpoint.keys import MEMORY, RegistryKeys, check_file_name, check_step
from raftkv.checkpoint.records import TIERS, AttemptRecord, Checkpoint, CopyRecord, FileRecord, HolderRecord
from raftkv.checkpoint.storage.verify import decode_manifest, find_file, load_manifest, read_verified
from raftkv.client.control import Control, until_answered
from raftkv.client.operations import get, get_range
from raftkv.client.records import read, readable
from raftkv.client.values import KeyValue, RangeResult
from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.checkpoint.commit.manifest import Manifest


COPIES_MAX: Final = 128
"""Maximum copies of one file that a reader considers."""


class Spot(NamedTuple):
    """The location of a reader: the name of its machine, and its place, as ``row1/rack7``."""

    host: str = ""
    topology: str = ""


class Copy(NamedTuple):
    """A copy of a file, as seen from a reader.

    Attributes:
        distance: 0: on the reader's machine; else 1 and a step for each level of the topology that is another.
        record: the claim of its holder; None: the file of the checkpoint itself, in shared storage.
        uri: directory of the file; empty: the copy is in the memory of a holder.
    """

    distance: int
    record: CopyRecord | None
    uri: str = ""

    @property
    def tier(self) -> str:
        """Return one of ``records.TIERS``."""
        return TIERS[-1] if self.record is None else self.record.tier


class Whereabouts(NamedTuple):
    """A committed checkpoint, and the copies of one of its files.

    Attributes:
        checkpoint: record of the checkpoint.
        listing: the list of its files, unchecked; None: it is beside them.
        copies: the nearest first; that in shared storage comes last.
    """

    checkpoint: Checkpoint
    listing: bytes | None
    copies: list[Copy]


def distance(spot: Spot, host: str, topology: str) -> int:
    """Return the distance of a machine from a spot.

    >>> spot = Spot("a", "row1/rack7")
    >>> [distance(spot, *other) for other in (("a", ""), ("b", "row1/rack7"), ("c", "row1/rack8"), ("d", "row2/rack1"))]
    [0, 1, 2, 3]
    """
    if host == spot.host:
        return 0
    own, other = spot.topology.split("/"), topology.split("/")
    shared = 0
    while shared < min(len(own), len(other)) and own[shared] == other[shared]:
        shared += 1
    return 1 + max(len(own), len(other)) - shared


async def nearest(control: Control, keys: RegistryKeys, step: int, file: str, spot: Spot, kind: str) -> Whereabouts:
    """Find the copies of a file of a committed checkpoint.

    Arguments:
        control: the store.
        keys: keys of the run.
        step, kind: step and kind of the checkpoint.
        file: file name in the checkpoint.
        spot: location of the reader.

    Raises:
        CheckpointNotFound: the checkpoint does not exist, or was deleted.
    """
    step, file = check_step(step), check_file_name(file)
    reads = [
        get(keys.record(kind, step)),
        get(keys.manifest(kind, step)),
        get_range(keys.copies_at(kind, step, file), prefix=True, limit=COPIES_MAX, descending=True),
    ]
    result = await until_answered(lambda: control.txn((), reads))
    record, listing, page = result.results
    if record is None:
        raise CheckpointNotFound(f"run {keys.run_id!r} has no checkpoint of step {step} of kind {kind}")
    checkpoint = read(Checkpoint, record)
    records = sorted(_copies_among(page.items, checkpoint), key=lambda copy: copy.holder)
    found = [Copy(distance(spot, copy.host, copy.topology), copy) for copy in records]
    found.sort(key=lambda copy: (TIERS.index(copy.tier), copy.distance))
    if kind != MEMORY:
        found.append(Copy(distance(spot, "", ""), None, checkpoint.uri))
    return Whereabouts(checkpoint, None if listing is None else listing.value, found)


async def copies_of(control: Control, keys: RegistryKeys, attempt: AttemptRecord | Checkpoint) -> list[CopyRecord]:
    """Return the copies of all files of an attempt, as announced by their holders."""
    return _copies_among(await _all(control, keys.copies_at(attempt.kind, attempt.step)), attempt)


def _copies_among(items: Sequence[KeyValue], attempt: AttemptRecord | Checkpoint) -> list[CopyRecord]:
    return [copy for copy in readable(CopyRecord, _leased(items)) if copy.id == attempt.id]


async def holders(control: Control, keys: RegistryKeys) -> list[HolderRecord]:
    """Return the nodes of a run that keep copies, by name."""
    return readable(HolderRecord, _leased(await _all(control, keys.holders)))


def _leased(items: Sequence[KeyValue]) -> list[KeyValue]:
    """Return the keys of living holders: one without a lease, as a mirror of the cluster writes it, would stay."""
    return [item for item in items if item.lease]


async def _all(control: Control, prefix: str) -> Sequence[KeyValue]:
    result = await until_answered(lambda: control.txn((), [get_range(prefix, prefix=True)]))
    page: RangeResult = result.results[0]
    return page.items


def choose(found: Sequence[HolderRecord], own: str, spot: Spot) -> list[HolderRecord]:
    """Return holders in order of preference for copies: the own one, one in each other failure domain, then the rest.

    A failure domain is what has one topology; without a topology, a machine. Ranks begin at different places of one
    ring, so that the copies of all ranks are spread evenly.

    Arguments:
        found: all checkpoints of the run.
        own: name of the holder on the rank's node; empty: it has none.
        spot: location of the rank.
    """
    ring = sorted(found, key=lambda holder: holder.holder)
    mine = [holder for holder in ring if holder.holder == own]
    others = [holder for holder in ring if holder.holder > own] + [holder for holder in ring if holder.holder < own]
    used = {spot.topology or spot.host}
    first: list[HolderRecord] = []
    for holder in others:
        domain = holder.topology or holder.host
        if domain not in used:
            used.add(domain)
            first.append(holder)
    rest = [holder for holder in others if holder not in first]
    rest.sort(key=lambda holder: holder.host == spot.host)  # another process of its machine is the last resort
    return [*mine, *first, *rest]


def describe(copy: CopyRecord) -> str:
    """Return a line about a copy, for people."""
    return printable(f"{copy.file} of step {copy.step} in the {copy.tier} of {copy.host} ({copy.address})")


ReadCopy = Callable[["CopyRecord", int], Awaitable[memoryview]]
"""Reads a copy of a given size from its holder, without verification; raises StorageError."""


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
    """Return the bytes of a file, verified against its prepared digest.

    Arguments:
        control: the store.
        keys: keys of the run.
        checkpoint: result of a lookup by this rank, or by another rank for all.
        file: file name in the checkpoint.
        spot: location of the reader.
        read_copy: reads from a holder.
        limit_bytes: limit of allocated memory; 0: half of this machine's memory.

    Raises:
        CheckpointNotFound: it is deleted, or was replaced by a later one.
        DigestMismatch: the list of files is not the one that was committed, or a file in shared storage is not.
        StorageError: no copy could be read whose digest is right; the text says of each why.
        ConfigError: the file is larger than the limit.
    """
    found = await nearest(control, keys, checkpoint.step, file, spot, checkpoint.kind)
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
            await asyncio.to_thread(check, data, wanted, describe(copy.record))
            return data
        except (StorageError, DigestMismatch) as error:
            why.append(str(error))
    raise StorageError(f"{checkpoint.reference}: no copy of {file} can be read: {'; '.join(why) or 'there is none'}")


async def _manifest(checkpoint: Checkpoint, found: Whereabouts) -> Manifest:
    if found.listing is None:
        return await asyncio.to_thread(load_manifest, checkpoint)
    return decode_manifest(checkpoint.uri, found.listing, checkpoint.manifest)


def check(data: memoryview, wanted: FileRecord, where: str) -> None:
    """Compare bytes with the prepared digest. Raises DigestMismatch."""
    if (len(data), of_bytes(data, wanted.digest)) != (wanted.size_bytes, wanted.digest):
        raise DigestMismatch(where, wanted.name, "is not what was prepared")
