"""What nothing needs any more: versions that are neither new nor kept, and chunks that no version names.

A version stays as long as it is the head, among the last few, younger since its end than ``keep_s`` of its successor's
publishing (a lease of the store says so, no clock here), or pinned. Readers of the others get ``VersionGone``.

Why no chunk in use is deleted. Chunks go in txns that hold only while no ``publishing`` key exists and the head is the
one that was seen. Versions come only with a move of the head, so each deleted chunk was named by none at that moment;
and who publishes later looks for chunks after registering, so after the deletion, and writes it again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from raftkv.client.control.control import Control
from raftkv.client.control.records import read
from raftkv.client.kv.compares import Compare, create_revision, mod_revision
from raftkv.client.kv.operations import Operation, delete, get, get_range
from raftkv.client.rpc.retry import until_answered
from raftkv.dataset.codec import blob, node
from raftkv.dataset.keys import DatasetKeys, Head
from raftkv.dataset.publish import chunk_keys

Fetch = Callable[[str], Awaitable[bytes]]
"""Returns the verified bytes of a digest."""

BATCH: Final = 100
"""Deletions in a txn; etcd admits 128 operations."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What was done.

    Attributes:
        versions: that were dropped.
        chunks: deleted.
        hindered: why it did not come to its end; empty: it did. What is left is for the next time.
    """

    versions: tuple[int, ...] = ()
    chunks: int = 0
    hindered: str = ""


async def collect(
    control: Control, keys: DatasetKeys, fetch: Fetch, *, keep_last: int = 2, dry_run: bool = False
) -> Collected:
    """Delete what nothing needs.

    Arguments:
        control: the store.
        keys: of the dataset.
        fetch: reads an index node of the versions that stay.
        keep_last: versions that stay whatever their age, the head among them.
        dry_run: delete nothing, and say what would be.

    Raises:
        ChunkCorrupted, VersionGone: the index of a version cannot be read; nothing was deleted for it.
    """
    reads: list[Operation] = [
        get(keys.head),
        get_range(keys.versions, prefix=True),
        get_range(keys.keeps, prefix=True, keys_only=True),
    ]
    result = await until_answered(lambda: control.txn((), reads))
    found, versions, keeps = result.results
    if found is None:
        return Collected(hindered=f"nothing was published as {keys.name!r}")
    head = read(Head, found)
    unmoved = mod_revision(keys.head) == found.mod_revision
    known = {version.version: version for version in (read(Head, item) for item in versions.items)}
    kept = {
        int(number)
        for item in keeps.items
        if (number := item.key[len(keys.keeps.encode()) :].partition(b"/")[0]).isdigit() and len(number) == 12
    }
    old = sorted(set(known) - kept - set(sorted(known)[-max(keep_last, 1) :]) - {head.version})
    dropped = old if dry_run else [number for number in old if await _drop(control, keys, number, unmoved)]
    live = {head.root} | {version.root for number, version in known.items() if number not in dropped}
    for root in sorted(live):
        live |= await _below(fetch, root)
    garbage = [key for key in await chunk_keys(control, keys) if key.rpartition("/")[2] not in live]
    if dry_run:
        return Collected(tuple(dropped), len(garbage))
    nobody = create_revision(keys.publishings, prefix=True) == 0
    for at in range(0, len(garbage), BATCH):
        batch = garbage[at : at + BATCH]
        if not await _delete(control, [unmoved, nobody], batch):
            why = "somebody publishes, or has published meanwhile; collect again afterwards"
            return Collected(tuple(dropped), at, why)
    return Collected(tuple(dropped), len(garbage))


async def _drop(control: Control, keys: DatasetKeys, number: int, unmoved: Compare) -> bool:
    """Take a version from readers, unless somebody has pinned it meanwhile."""
    unkept = create_revision(keys.keeps_of(number), prefix=True) == 0
    version = keys.version(number)
    result = await until_answered(lambda: control.txn([unmoved, unkept], [delete(version)], [get(version)]))
    # A copy of this txn that was answered late finds the version gone.
    return result.succeeded or result.results[0] is None


async def _delete(control: Control, conditions: list[Compare], batch: list[str]) -> bool:
    result = await until_answered(lambda: control.txn(conditions, [delete(key) for key in batch]))
    return result.succeeded


async def _below(fetch: Fetch, root: str) -> set[str]:
    """Return the digests of everything below a root; chunks are not read."""
    found: set[str] = set()
    open_nodes = [root]
    while open_nodes:
        digest = open_nodes.pop()
        found_node = node.decode(digest, blob.unseal(digest, await fetch(digest)))
        below = {child.digest for child in found_node.children}
        if found_node.level > 1:
            open_nodes += below - found
        found |= below
    return found
