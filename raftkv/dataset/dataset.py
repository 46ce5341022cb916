"""A dataset: publishes, reads and caches versions. For programs without an event loop.

::

    with raftkv.connect("127.0.0.1:2379") as kv:
        data = raftkv.dataset.Dataset(kv, "imagenet", directory="/dev/shm/manifests")
        data.publish(entries)                  # sorted by path; any iterator
        for epoch in range(90):
            files = data.next_pass()           # the newest version, the same until the end of the pass
            for entry in files: ...
        data.collect()                         # deletes versions and chunks that are no longer needed

Cached chunks of a pinned version stay readable while the cluster is unavailable. A version counts as the newest only if
the store confirmed it at most ``max_staleness_s`` ago; else the store is asked, and ``StaleHead`` is raised if it does
not answer in time. ``follow=True`` updates ``current`` as soon as a version is published.

Usable from any thread, and in other processes (as workers of a data loader, forked or not). Other processes have
separate caches and connections; a shared ``directory`` avoids repeated reads of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, Final, overload

from raftkv.client.arguments import limit, seconds, text, whole
from raftkv.client.operations import delete, get, get_range, mod_revision, put
from raftkv.client.operations import version as version_of
from raftkv.client.records import read, readable
from raftkv.client.rpc.retry import until_answered
from raftkv.client.sync.library import Client, client_of
from raftkv.client.sync.loop import LoopThread
from raftkv.dataset import codec
from raftkv.dataset import publish as collecting
from raftkv.dataset import publish as publishing
from raftkv.dataset.cache import Memory, SharedDirectory
from raftkv.dataset.codec import Child, Chunk, foreign, unseal
from raftkv.dataset.entry import Entry
from raftkv.dataset.errors import DatasetNotFound, InvalidEntry
from raftkv.dataset.keys import DatasetKeys, Head, Note, check_name
from raftkv.dataset.publish import Collected
from raftkv.dataset.source import Follower, Source, Store, through
from raftkv.dataset.tree import Builder, Cut
from raftkv.errors import ConfigError

# ---- one version, which never changes: the list of chunks is in memory, entries are read on demand

AHEAD: Final = 4


class Snapshot(Sequence[Entry]):
    """One version of a dataset; made by ``Dataset``.

    Arguments:
        head: head of the version.
        leaves: chunks, in order.
        chunks: source of the chunks.

    Attributes:
        head: head of the version.
        chunk_counts: entries of each chunk.
    """

    def __init__(self, head: Head, leaves: Sequence[Child], chunks: Dataset) -> None:
        self.head = head
        self.chunk_counts = [leaf.entries for leaf in leaves]
        self._digests = [leaf.digest for leaf in leaves]
        self._firsts = [leaf.first for leaf in leaves]
        self._starts = list(accumulate(self.chunk_counts, initial=0))
        self._chunks = chunks

    def __repr__(self) -> str:
        return f"<version {self.head.version}: {len(self)} entries in {len(self._digests)} chunks>"

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, position: int) -> Entry: ...
    @overload
    def __getitem__(self, position: slice) -> list[Entry]: ...

    def __getitem__(self, position: int | slice) -> Entry | list[Entry]:
        """Return the entry at a position, or a list of those of a slice."""
        if isinstance(position, slice):
            first, stop, step = position.indices(len(self))
            if step == 1:
                return list(islice(self.entries(first), max(stop - first, 0)))
            return [self[at] for at in range(first, stop, step)]
        if not -len(self) <= position < len(self):
            raise IndexError(f"entry {position} of {len(self)}")
        position %= len(self)
        number = bisect_right(self._starts, position) - 1
        return self._read(number)[position - self._starts[number]]

    def __iter__(self) -> Iterator[Entry]:
        return self.entries()

    def __contains__(self, path: object) -> bool:
        """Return whether there is an entry of a path."""
        return isinstance(path, str) and self.lookup(path) is not None

    def lookup(self, path: str) -> Entry | None:
        """Return the entry of a path, or None."""
        number = bisect_right(self._firsts, path) - 1
        return None if number < 0 else self._read(number).find(path)

    def entries(self, first: int = 0) -> Iterator[Entry]:
        """Yield the entries from a position on; the next chunks are read ahead."""
        if first >= len(self):
            return
        begin = bisect_right(self._starts, first) - 1
        for number in range(begin, len(self._digests)):
            self._chunks.fetch_ahead(self._digests[number + 1 : number + 1 + AHEAD])
            chunk = self._read(number)
            yield from islice(chunk, first - self._starts[number], None) if number == begin else chunk

    def below(self, folder: str) -> Iterator[Entry]:
        """Yield the entries whose paths begin with a prefix, as ``train/cat/``."""
        number = max(bisect_right(self._firsts, folder) - 1, 0)
        while number < len(self._digests):
            chunk = self._read(number)
            for at in range(bisect_left(chunk.paths, folder), len(chunk)):
                if not chunk.paths[at].startswith(folder):
                    return
                yield chunk[at]
            number += 1

    def fetch_ahead(self, numbers: Sequence[int]) -> None:
        """Start reading some chunks, such as those of the next window of a ``ChunkOrder``; return at once."""
        self._chunks.fetch_ahead([self._digests[number] for number in numbers])

    def _read(self, number: int) -> Chunk:
        digest = self._digests[number]
        chunk = self._chunks.chunk(digest)
        if len(chunk) != self.chunk_counts[number] or chunk.paths[0] != self._firsts[number]:
            raise foreign(digest, "it is not what the index says")
        return chunk


def leaves_below(root: str, read: Callable[[str], codec.Node]) -> list[Child]:
    """Return all chunks below a root, in order.

    Arguments:
        root: digest of the root.
        read: reads an index node.

    Raises:
        ChunkCorrupted: the index is not valid.
    """
    top = read(root)
    level, children = top.level, list(top.children)
    while level > 1:
        level -= 1
        below: list[Child] = []
        for child in children:
            found = read(child.digest)
            if found.level != level or not _is_what_is_said(found, child):
                raise foreign(child.digest, "it is not what the index above says")
            below += found.children
        children = below
        if any(later.first <= earlier.first for earlier, later in pairwise(children)):
            raise foreign(root, "its chunks are not sorted")
    return children


def _is_what_is_said(found: codec.Node, child: Child) -> bool:
    # Because of its first path no node can be in two places, so there are not more nodes than the store has.
    firsts = [below.first for below in found.children[:1]]
    return firsts == [child.first] and sum(below.entries for below in found.children) == child.entries


CACHE_BYTES: Final = 128 * 1024 * 1024
DIRECTORY_BYTES: Final = 4 * 1024 * 1024 * 1024
KEEP_S: Final = 24 * 3600
TIMEOUT_S: Final = 10.0


class _Local:
    """The part of a dataset that is shared within one process: caches, and tasks on the client's loop."""

    def __init__(
        self, loop: LoopThread, store: Store, keys: DatasetKeys, directory: SharedDirectory | None, cache: int
    ):
        self.loop = loop
        self.store = store
        self.blobs: Memory[bytes] = Memory(cache // 2)
        self.chunks: Memory[codec.Chunk] = Memory(cache - cache // 2)
        self.source = Source(store, keys, directory, self.blobs)
        self.follower: Follower | None = None
        self.opening = threading.Lock()

    def blob(self, digest: str) -> bytes:
        """Return the verified bytes of a digest."""
        found = self.blobs.get(digest)
        return self.loop.run(self.source.fetch(digest)) if found is None else found


class Dataset:
    """Reads and publishes the manifest of one dataset.

    Arguments:
        kv: a client of the cluster (``raftkv.connect``), not a view of one.
        name: name of the dataset.
        cache_bytes: limit for chunks in memory: half of it as stored, half unpacked. A million entries take 4 to 22 MB
            as stored; chunks that do not fit are read again from the directory or the store.
        directory: directory shared by the processes of this machine, so that each chunk is read once; empty: none.
        directory_bytes: limit for the files there.
        follow: update ``current`` as soon as a version is published; False: only in ``next_pass``.
        max_staleness_s: maximum time since the store confirmed the newest version.
        timeout_s: time for the store to confirm it.
        make_store: makes the store from the asyncio client; for tests.

    Raises:
        ConfigError: a name, a number or the directory is not valid.
    """

    def __init__(
        self,
        kv: Client,
        name: str,
        *,
        cache_bytes: int = CACHE_BYTES,
        directory: str | os.PathLike[str] = "",
        directory_bytes: int = DIRECTORY_BYTES,
        follow: bool = False,
        max_staleness_s: float = 60.0,
        timeout_s: float = TIMEOUT_S,
        make_store: Callable[[Any], Store] = through,
    ) -> None:
        if cache_bytes < 0 or directory_bytes < 0 or max_staleness_s <= 0 or timeout_s <= 0:
            raise ConfigError("bytes of a dataset's caches are not negative, its times positive")
        self.name = check_name("dataset", name)
        self.keys = DatasetKeys(name)
        self._kv = client_of(kv)
        self._cache_bytes = cache_bytes
        self._directory = SharedDirectory(directory, directory_bytes) if directory else None
        self._follow = follow
        self._staleness_s = max_staleness_s
        self._timeout_s = timeout_s
        self._make_store = make_store
        self._snapshot: Snapshot | None = None
        self._locals: dict[int, _Local] = {}

    def __repr__(self) -> str:
        return f"<dataset {self.name!r}>"

    def __getstate__(self) -> dict[str, Any]:
        """Omit the caches and objects of this process' loop; a copy in another process makes new ones."""
        return {**self.__dict__, "_locals": {}}

    @property
    def _local(self) -> _Local:
        process = os.getpid()
        local = self._locals.get(process)
        if local is None:
            loop, kv = self._kv.target()
            made = _Local(loop, self._make_store(kv), self.keys, self._directory, self._cache_bytes)
            # Of concurrent threads one wins, without a lock that a fork could leave locked.
            local = self._locals.setdefault(process, made)
            for other in [number for number in self._locals if number != process]:
                self._locals.pop(other, None)  # the parent's
        return local

    # ---- which version

    @property
    def current(self) -> Snapshot:
        """The version of this pass; with ``follow=True`` the newest. Errors as ``next_pass``."""
        if self._follow:
            return self._open(self._newest())
        return self.next_pass() if self._snapshot is None else self._snapshot

    def next_pass(self) -> Snapshot:
        """Begin a pass over the newest version, which is used until the next call.

        Raises:
            DatasetNotFound: nothing was published.
            StaleHead: the store could not be asked in time.
            StatusError: the cluster refused.
        """
        return self._open(self._newest())

    def at(self, version: int, root: str = "") -> Snapshot:
        """Return an existing version, to continue a pass that began with it.

        Arguments:
            version: version number.
            root: required root digest, in case the dataset was deleted and published again; empty: any.

        Raises:
            DatasetNotFound: the version does not exist, or was deleted.
        """
        key = self.keys.version(whole(version, "a version"))
        text(root, "a root")
        (item,) = self._run(lambda local: _txn(local.store, [get(key)]))
        head = None if item is None else read(Head, item)
        if head is None or root not in ("", head.root):
            raise DatasetNotFound(
                f"dataset {self.name!r} has no version {version}{f' with the root {root[:16]}' if head else ''}, or "
                "not any more; pin versions that are needed for long (Dataset.pin)"
            )
        return self._open(head)

    def versions(self) -> list[Head]:
        """Return all readable versions, oldest first."""
        (found,) = self._run(lambda local: _txn(local.store, [get_range(self.keys.versions, prefix=True)]))
        return readable(Head, found.items)

    def wait_version(self, version: int, timeout_s: float | None = None) -> Head:
        """Wait until a version, or a later one, is published.

        Raises:
            TimeoutError: none was published in time.
        """
        local = self._local
        follower = self._follower(local)

        async def wait() -> Head:
            try:
                async with asyncio.timeout(limit(timeout_s, "timeout_s")):
                    return await follower.reached(version)
            except TimeoutError:
                known = 0 if follower.head is None else follower.head.version
                raise TimeoutError(
                    f"version {version} of dataset {self.name!r} was not published within {timeout_s:g} s; the newest "
                    f"that is known is {known}"
                ) from None

        return local.loop.run(wait())

    def _newest(self) -> Head:
        local = self._local
        follower = self._follower(local)
        head, age_s = follower.head, follower.age_s
        if head is None or age_s > self._staleness_s:
            return local.loop.run(follower.confirmed(self._staleness_s, self._timeout_s))
        if age_s > self._staleness_s / 2:
            local.loop.post(follower.refresh())
        return head

    def _follower(self, local: _Local) -> Follower:
        if local.follower is None:
            with local.opening:
                if local.follower is None:
                    local.follower = local.loop.run(self._follow_head(local))
        return local.follower

    async def _follow_head(self, local: _Local) -> Follower:
        def on_head(head: Head) -> None:
            if self._follow:  # so that its index is already loaded at the first request
                self._fetch_ahead(local, [head.root])

        return Follower(local.store, self.keys, on_head)

    def _open(self, head: Head) -> Snapshot:
        known = self._snapshot
        if known is None or known.head != head:
            leaves = leaves_below(head.root, self._node)
            known = self._snapshot = Snapshot(head, leaves, self)
        return known

    # ---- reading: of ``current``

    def __len__(self) -> int:
        return len(self.current)

    def __getitem__(self, position: Any) -> Any:
        return self.current[position]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.current)

    def lookup(self, path: str) -> Entry | None:
        """Return the entry of a path in ``current``, or None."""
        return self.current.lookup(path)

    @property
    def store_reads(self) -> int:
        """Number of chunks and index nodes that this process has read from the store."""
        return self._local.source.reads

    @property
    def resident_bytes(self) -> int:
        """Bytes of what is cached in memory, at most ``cache_bytes``."""
        return self._local.blobs.size_bytes + self._local.chunks.size_bytes

    def chunk(self, digest: str) -> codec.Chunk:
        """Return a chunk, verified and decoded."""
        local = self._local
        found = local.chunks.get(digest)
        if found is None:
            found = codec.decode_chunk(digest, unseal(digest, local.blob(digest)))
            local.chunks.put(digest, found, found.size_bytes)
        return found

    def fetch_ahead(self, digests: Sequence[str]) -> None:
        """Start fetching chunks that will be read soon."""
        local = self._local
        wanted = [digest for digest in digests if digest not in local.blobs and digest not in local.chunks]
        if wanted:
            local.loop.call_soon(self._fetch_ahead, local, wanted)

    def _fetch_ahead(self, local: _Local, digests: Sequence[str]) -> None:
        for digest in digests:
            if digest not in local.blobs:  # it may have arrived since it was requested
                local.source.start(digest)

    def _node(self, digest: str) -> codec.Node:
        return codec.decode_node(digest, unseal(digest, self._local.blob(digest)))

    # ---- publishing

    def publish(
        self,
        entries: Iterable[Entry],
        *,
        keep_s: float = KEEP_S,
        rewrite: bool = False,
        allow_empty: bool = False,
        cut: Cut | None = None,
    ) -> Head:
        """Publish a version with all its entries, and return it; if nothing has changed, return the current version.

        Arguments:
            entries: entries sorted by path, read on demand.
            keep_s: minimum time that the previous version can still be read, timed by the store.
            rewrite: write all chunks, also existing ones, to repair damage.
            allow_empty: allow a version without entries.
            cut: rule for chunk boundaries; chunks are reused only by versions with the same rule.

        Raises:
            ConfigError: ``keep_s`` is negative.
            InvalidEntry: an entry is not valid, duplicate or out of order, or there are no entries.
            PublishConflict: another publisher was faster.
            StatusError: the cluster refused, as for a quota. In each case readers still see the previous version.
        """
        if seconds(keep_s, "keep_s") < 0:
            raise ConfigError(f"keep_s={keep_s:g}: a version is kept for a time from 0 s on")
        local = self._local
        builder = Builder(cut)
        begun: list[publishing.Publishing] = []  # filled as soon as it has begun, also if Ctrl-C comes at that moment

        async def begin() -> None:
            begun.append(await publishing.begin(local.store.control, self.keys, time.time, rewrite=rewrite))

        async def end() -> None:
            for each in begun:
                await each.close()

        try:
            local.loop.run(begin())
            (under_way,) = begun
            ready = []
            for sealed in _built(builder, entries):
                ready.append(sealed)
                if len(ready) == publishing.WINDOW:
                    local.loop.run(under_way.put(ready))
                    ready = []
            if not builder.count and not allow_empty:
                raise InvalidEntry(f"no entries for dataset {self.name!r}; pass allow_empty=True to publish nothing")
            local.loop.run(under_way.put(ready))
            head = local.loop.run(under_way.finish(builder, time.time, math.ceil(keep_s)))
            if local.follower is not None:  # the publisher sees its version in the next pass
                with contextlib.suppress(TimeoutError):
                    self.wait_version(head.version, self._timeout_s)
            return head
        finally:
            local.loop.post(end())

    # ---- what stays and what goes

    def pin(self, version: int, name: str) -> None:
        """Keep a version until ``unpin``. Use one pin per job, not one per rank.

        Raises:
            DatasetNotFound: the version does not exist, or was deleted.
        """
        key = self.keys.pin(version, check_name("pin", name))
        note = Note(name, time.time()).encode()
        exists = version_of(self.keys.version(version)) > 0
        result = self._run(lambda local: until_answered(lambda: local.store.control.txn([exists], [put(key, note)])))
        if not result.succeeded:
            raise DatasetNotFound(f"dataset {self.name!r} has no version {version}, or not any more; pin a later one")

    def unpin(self, version: int, name: str) -> None:
        """Remove a pin; does nothing if there is none."""
        key = self.keys.pin(version, check_name("pin", name))
        (found,) = self._run(lambda local: _txn(local.store, [get(key)]))
        if found is not None:  # only this pin, not a newer one that a late copy of this call could find
            unmoved = mod_revision(key) == found.mod_revision
            self._run(lambda local: until_answered(lambda: local.store.control.txn([unmoved], [delete(key)])))

    def collect(self, *, keep_last: int = 2, dry_run: bool = False) -> Collected:
        """Delete old versions that are not kept, and unreferenced chunks. Arguments as ``publish.collect``.

        Raises:
            ChunkCorrupted: the index of a version cannot be read; nothing was deleted for it.
        """
        local = self._local
        return local.loop.run(
            collecting.collect(local.store.control, self.keys, local.source.fetch, keep_last=keep_last, dry_run=dry_run)
        )

    def _run(self, make: Callable[[_Local], Any]) -> Any:
        local = self._local
        return local.loop.run(make(local))

    # ---- the end

    def close(self) -> None:
        """Stop following the head; open versions stay readable. Idempotent."""
        local = self._locals.get(os.getpid())
        if local is not None and local.follower is not None:
            local.loop.call_soon(local.follower.close)
            local.follower = None

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _built(builder: Builder, entries: Iterable[Entry]) -> Iterator[tuple[str, bytes]]:
    for entry in entries:
        if not isinstance(entry, Entry):
            raise InvalidEntry(f"{entry!r:.100} is not a raftkv.dataset.Entry; publish Entry(path, size, ...)")
        yield from builder.add(entry)
    yield from builder.finish()


async def _txn(store: Store, operations: Sequence[Any]) -> Any:
    result = await until_answered(lambda: store.control.txn((), operations))
    return result.results
