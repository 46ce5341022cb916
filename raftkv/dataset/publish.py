"""Publishing a new version: writes the new chunks, then one txn that moves the head.

::

    publishing/<id> (leased) ---> which chunks are there? ---> put those that are not ---> head, version/<n>, keep/<n-1>
                                                                 (one txn: head as seen, publishing/<id> still there)

Invariants:

1. Until the last txn readers see the old version; after a failure ``collect`` deletes the new chunks.
2. No chunk is deleted while a ``publishing`` key exists, and a publisher moves the head only while its own key exists.
   So a chunk that the publisher found still exists when the head names it.
3. If the store has no space, publishing fails at once instead of waiting as runs do, so that the publisher knows.
4. Of the publishers that began with the same head, one moves it; the others raise ``PublishConflict``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from raftkv.client.control import Control, Grant, read_below, txn_until_answered
from raftkv.client.kv import pipelined
from raftkv.client.operations import (
    Compare,
    Operation,
    create_revision,
    delete,
    get,
    get_range,
    lease_of,
    mod_revision,
    put,
    version,
)
from raftkv.client.records import RecordError, read
from raftkv.client.rpc.retry import until_answered
from raftkv.client.values import KeyValue
from raftkv.dataset import codec
from raftkv.dataset.errors import PublishConflict
from raftkv.dataset.keys import VERSION_MAX, DatasetKeys, Head, Note
from raftkv.dataset.tree import Builder, Sealed

LEASE_TTL_S: Final = 30
PAGE: Final = 5000
WINDOW: Final = 4
"""Maximum chunks written concurrently."""


class Publishing:
    """One version that is being published; made by ``begin``."""

    def __init__(self, control: Control, keys: DatasetKeys, grant: Grant, publish_id: str) -> None:
        self.written = 0
        """Number of new chunks and nodes."""
        self.written_bytes = 0
        self.head: Head | None = None
        """The previous version; None: this is the first."""
        self._control = control
        self._keys = keys
        self._grant = grant
        self._id = publish_id
        self._own = f"{keys.publishings}{publish_id}"
        self._seen = 0
        self._known: set[str] = set()

    async def open(self, now: Callable[[], float], *, rewrite: bool) -> None:
        """Register, then list the existing chunks.

        Arguments:
            now: the wall clock, for people.
            rewrite: write all chunks, also existing ones.
        """
        note = Note(f"{socket.gethostname()}:{os.getpid()}", now())
        result = await until_answered(
            lambda: self._control.txn((), [put(self._own, note.encode(), lease=self._grant.id), get(self._keys.head)])
        )
        found: KeyValue | None = result.results[1]
        self.head = None if found is None else read(Head, found)
        self._seen = 0 if found is None else found.mod_revision
        if not rewrite:
            self._known = {key.rpartition("/")[2] for key in await chunk_keys(self._control, self._keys)}

    async def put(self, sealed: Sequence[Sealed]) -> None:
        """Store new chunks, concurrently.

        Raises:
            StatusError: the cluster refused, as for a quota; nothing is published.
        """
        fresh = {digest: blob for digest, blob in sealed if digest not in self._known}
        await pipelined(self._put, fresh.items(), WINDOW)
        self._known.update(fresh)
        self.written += len(fresh)
        self.written_bytes += sum(map(len, fresh.values()))

    async def _put(self, sealed: Sealed) -> None:
        digest, blob = sealed
        await until_answered(lambda: self._control.txn((), [put(self._keys.chunk(digest), blob)]))

    async def finish(self, builder: Builder, now: Callable[[], float], keep_s: int) -> Head:
        """Move the head and return the version; if nothing has changed, return the current version.

        Arguments:
            builder: builder that has made all chunks.
            now: the wall clock, for people.
            keep_s: how long the previous version is kept.

        Raises:
            PublishConflict: another publisher has moved the head since ``open``, or this publisher's lease has ended.
            RecordError: version numbers are exhausted.
        """
        before = self.head
        unmoved = mod_revision(self._keys.head) == self._seen
        if before is not None and before.root == builder.root:
            result = await txn_until_answered(self._control, [unmoved], (), [get(self._keys.head)])
            if result.succeeded:
                return before
            raise self._conflict(before.version, result.results[0], "another publisher was faster")
        number = 1 if before is None else before.version + 1
        if number > VERSION_MAX:
            raise RecordError(Head.NAME, f"{self._keys.head}: version {VERSION_MAX} is the last that can be")
        made = (builder.count, builder.size_bytes, builder.chunks, builder.stored_bytes)
        head = Head(builder.root, number, *made, self._id, now())
        operations: list[Operation] = [
            put(self._keys.head, head.encode()), put(self._keys.version(number), head.encode()), delete(self._own)
        ]  # fmt: skip
        if before is not None and keep_s:
            lease_id = await until_answered(lambda: self._control.grant_fixed(keep_s))
            operations.append(put(self._keys.age(before.version), Note("", now()).encode(), lease=lease_id))
        conditions = [unmoved, version(self._own) > 0]
        result = await until_answered(
            lambda: self._control.txn(conditions, operations, [get(self._keys.head), get(self._own)])
        )
        if result.succeeded:
            return head
        found, own = result.results
        newest = None if found is None else read(Head, found)
        if newest is not None and newest.id == self._id:
            return newest  # an earlier copy of this txn succeeded
        raise self._conflict(
            number, found, "this publisher was silent for too long" if own is None else "another publisher was faster"
        )

    def _conflict(self, number: int, found: KeyValue | None, why: str) -> PublishConflict:
        newest = 0 if found is None else read(Head, found).version
        return PublishConflict(
            f"version {number} of dataset {self._keys.name!r} was not published: {why}; the newest is {newest}; "
            "publish again if yours is still wanted"
        )

    async def close(self) -> None:
        """Remove the registration, if it still exists."""
        await self._control.end(self._grant, revoke=True)


async def begin(control: Control, keys: DatasetKeys, now: Callable[[], float], *, rewrite: bool = False) -> Publishing:
    """Begin to publish.

    Arguments:
        control: the store.
        keys: keys of the dataset.
        now: the wall clock, for people.
        rewrite: write all chunks, also existing ones.
    """
    grant = await until_answered(lambda: control.grant(LEASE_TTL_S, 0.0, lambda: None))
    publishing = Publishing(control, keys, grant, os.urandom(8).hex())
    try:
        await publishing.open(now, rewrite=rewrite)
    except BaseException:
        await publishing.close()
        raise
    return publishing


async def chunk_keys(control: Control, keys: DatasetKeys) -> list[str]:
    """Return the keys of all chunks and nodes in the store, read page by page."""
    pages = read_below(control, keys.chunks, PAGE, keys_only=True)
    return [item.key.decode() async for items in pages for item in items if item.key.isascii()]


# ---- collection: old versions that are not kept, and unreferenced chunks
#
# A version is kept while it is the head, among the last few, pinned, or its successor was published less than
# ``keep_s`` ago (timed by a lease of the store, not by a clock here). Readers of other versions get ``VersionGone``.
#
# No used chunk is deleted: the deleting txns require that no ``publishing`` key exists and that the head is unchanged.
# Versions appear only when the head moves, so at that moment no version names a deleted chunk. A later publisher lists
# the chunks after it has registered, which is after the deletion, and writes the chunk again.

Fetch = Callable[[str], Awaitable[bytes]]
"""Returns the verified bytes of a digest."""

BATCH: Final = 100
"""Maximum deletions in a txn; etcd allows 128 operations."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The outcome of a collection.

    Attributes:
        versions: deleted versions.
        chunks: number of deleted chunks.
        hindered: why it stopped early, so that the next collection deletes the rest; empty: it is complete.
    """

    versions: tuple[int, ...] = ()
    chunks: int = 0
    hindered: str = ""


async def collect(
    control: Control, keys: DatasetKeys, fetch: Fetch, *, keep_last: int = 2, dry_run: bool = False
) -> Collected:
    """Delete old versions and unreferenced chunks.

    Arguments:
        control: the store.
        keys: keys of the dataset.
        fetch: reads an index node of the kept versions.
        keep_last: number of versions kept at any age, including the head.
        dry_run: delete nothing, and return what would be deleted.

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
    none_publishes = lease_of(keys.publishings, prefix=True) == 0  # a key without one would stay for ever
    for at in range(0, len(garbage), BATCH):
        batch = garbage[at : at + BATCH]
        if not await _delete(control, [unmoved, none_publishes], batch):
            why = "another client publishes, or has published meanwhile; collect again afterwards"
            return Collected(tuple(dropped), at, why)
    return Collected(tuple(dropped), len(garbage))


async def _drop(control: Control, keys: DatasetKeys, number: int, unmoved: Compare) -> bool:
    """Delete a version, unless it was pinned meanwhile."""
    unkept = create_revision(keys.keeps_of(number), prefix=True) == 0
    version = keys.version(number)
    result = await until_answered(lambda: control.txn([unmoved, unkept], [delete(version)], [get(version)]))
    # If an earlier copy of this txn has succeeded, this one finds the version gone.
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
        found_node = codec.decode_node(digest, codec.unseal(digest, await fetch(digest)))
        below = {child.digest for child in found_node.children}
        if found_node.level > 1:
            open_nodes += below - found
        found |= below
    return found
