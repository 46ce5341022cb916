"""The way of a new version into the store: its new chunks, then one txn that moves the head.

::

    publishing/<id> (leased) ---> which chunks are there? ---> put those that are not ---> head, version/<n>, keep/<n-1>
                                                                 (one txn: head as seen, publishing/<id> still there)

Invariants:

1. Whatever happens before the last txn, readers see the old version; what was written is garbage (``collect``).
2. No chunk is deleted while a ``publishing`` key exists, and the head moves only while one's own does. So a chunk that
   was found here is there when the head names it.
3. A store without room is not waited for, as runs do: whoever publishes has to know.
4. Of publishers that began with the same head one moves it; the others raise ``PublishConflict``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

from raftkv.client.control.control import Control, Grant, txn_until_answered
from raftkv.client.control.records import read
from raftkv.client.kv.kv import pipelined
from raftkv.client.kv.operations import Operation, delete, get, get_range, mod_revision, put, version
from raftkv.client.rpc.retry import until_answered
from raftkv.client.scope import prefix_end
from raftkv.client.values import KeyValue
from raftkv.dataset.errors import PublishConflict
from raftkv.dataset.keys import DatasetKeys, Head, Note
from raftkv.dataset.tree import Builder, Sealed

LEASE_TTL_S: Final = 30
PAGE: Final = 5000
WINDOW: Final = 4
"""Chunks on their way at once."""


class Publishing:
    """One new version on its way; made by ``begin``."""

    def __init__(self, control: Control, keys: DatasetKeys, grant: Grant, publish_id: str) -> None:
        self.written = 0
        """Chunks and nodes that were not there before."""
        self.written_bytes = 0
        self.head: Head | None = None
        """The version before; None: this is the first."""
        self._control = control
        self._keys = keys
        self._grant = grant
        self._id = publish_id
        self._own = f"{keys.publishings}{publish_id}"
        self._seen = 0
        self._known: set[str] = set()

    async def open(self, now: Callable[[], float], *, rewrite: bool) -> None:
        """Register, then see what is there.

        Arguments:
            now: the wall clock, for people.
            rewrite: write all chunks, also those that are there.
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
        """Store what is not there yet, side by side.

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
        """Move the head; returns the version, which is the present one if nothing has changed.

        Arguments:
            builder: that has made all chunks.
            now: the wall clock, for people.
            keep_s: how long the version before stays.

        Raises:
            PublishConflict: somebody else has published since ``open``, or this publisher's lease has ended.
        """
        before = self.head
        if before is not None and before.root == builder.root:
            return before
        number = 1 if before is None else before.version + 1
        made = (builder.count, builder.size_bytes, builder.chunks, builder.stored_bytes)
        head = Head(builder.root, number, *made, self._id, now())
        operations: list[Operation] = [
            put(self._keys.head, head.encode()), put(self._keys.version(number), head.encode()), delete(self._own)
        ]  # fmt: skip
        if before is not None and keep_s:
            lease_id = await until_answered(lambda: self._control.grant_fixed(keep_s))
            operations.append(put(self._keys.age(before.version), Note("", now()).encode(), lease=lease_id))
        conditions = [mod_revision(self._keys.head) == self._seen, version(self._own) > 0]
        result = await until_answered(
            lambda: self._control.txn(conditions, operations, [get(self._keys.head), get(self._own)])
        )
        if result.succeeded:
            return head
        found, own = result.results
        newest = None if found is None else read(Head, found)
        if newest is not None and newest.id == self._id:
            return newest  # an earlier copy of this txn has done it
        why = "this publisher was silent for too long" if own is None else "somebody else has published meanwhile"
        raise PublishConflict(
            f"version {number} of dataset {self._keys.name!r} was not published: {why}; the newest is "
            f"{0 if newest is None else newest.version}; publish again if yours is still wanted"
        )

    async def close(self) -> None:
        """Take the registration back, if there still is one."""
        await self._control.end(self._grant, revoke=True)


async def begin(control: Control, keys: DatasetKeys, now: Callable[[], float], *, rewrite: bool = False) -> Publishing:
    """Begin to publish.

    Arguments:
        control: the store.
        keys: of the dataset.
        now: the wall clock, for people.
        rewrite: write all chunks, also those that are there.
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
    """Return the keys of all chunks and nodes in the store, page by page: those of a moment, unless chunks change."""
    first, end = keys.chunks.encode(), prefix_end(keys.chunks.encode())
    found: list[str] = []
    while True:
        operation = get_range(first, end, limit=PAGE, keys_only=True)
        result = await txn_until_answered(control, (), [operation])
        page = result.results[0]
        found += [item.key.decode() for item in page.items if item.key.isascii()]
        if not page.more:
            return found
        first = page.items[-1].key + b"\0"
