"""Reads chunks from the store and follows the head; on the event loop of the client.

Every chunk is requested once for all threads, and once for all processes that share a directory. The head is followed
by one watch. It is only as current as the last confirmation by the store: if that was too long ago, ``confirmed`` asks
again, which costs one read of one key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raftkv.client.control import ClientControl, Control, Reflector, check_whole
from raftkv.client.records import RecordError, read
from raftkv.client.rpc.retry import until_answered
from raftkv.client.values import Event
from raftkv.dataset.cache import Memory, SharedDirectory
from raftkv.dataset.codec import check
from raftkv.dataset.errors import DatasetNotFound, StaleHead, VersionGone
from raftkv.dataset.keys import DatasetKeys, Head
from raftkv.loop.outcomes import outcome_of, take_outcome

if TYPE_CHECKING:
    from raftkv.client.library import Client

# ---- the store: a chunk is the same wherever it is read, so a follower may serve it
#
# If a follower lacks the chunk, the leader is asked.

Read = Callable[[str], Awaitable[bytes | None]]


@dataclass(frozen=True, slots=True)
class Store:
    """The store and caches that datasets work with.

    Attributes:
        control: transactions, watches, leases.
        read: returns the value of a key that never changes, or None.
    """

    control: Control
    read: Read


def through(kv: Client) -> Store:
    """Return the store of a client.

    Raises:
        ConfigError: the client is a view.
    """

    async def read(key: str) -> bytes | None:
        item: Any = await until_answered(lambda: kv.get(key, serializable=True))
        if item is None:
            item = await until_answered(lambda: kv.get(key))
        return None if item is None else bytes(item.value)

    return Store(ClientControl(check_whole(kv)), read)


class Source:
    """Reads chunks; see the module.

    Arguments:
        store: store of the keys.
        keys: keys of the dataset.
        directory: directory shared with other processes of the machine; None: none.
        cache: received state; other threads may read it.

    Attributes:
        reads: number of chunks read from the store.
    """

    def __init__(
        self, store: Store, keys: DatasetKeys, directory: SharedDirectory | None, cache: Memory[bytes]
    ) -> None:
        self.reads = 0
        self._store = store
        self._keys = keys
        self._directory = directory
        self._cache = cache
        self._under_way: dict[str, asyncio.Task[bytes]] = {}

    async def fetch(self, digest: str) -> bytes:
        """Return the verified bytes of a digest.

        Raises:
            VersionGone: the store does not have it any more.
            ChunkCorrupted: the store has other bytes.
            StatusError: the cluster refused.
        """
        # It may have arrived since the caller looked into the cache.
        known = self._cache.get(digest)
        return await outcome_of(self.start(digest)) if known is None else known

    def start(self, digest: str) -> asyncio.Task[bytes]:
        """Start fetching a digest; call on the loop."""
        task = self._under_way.get(digest)
        if task is None:
            task = self._under_way[digest] = asyncio.get_running_loop().create_task(self._get(digest))
            task.add_done_callback(lambda done: self._forget(digest, done))
        return task

    def _forget(self, digest: str, done: asyncio.Task[bytes]) -> None:
        self._under_way.pop(digest, None)
        take_outcome(done)  # a chunk that was fetched ahead may have no reader

    async def _get(self, digest: str) -> bytes:
        if self._directory is None:
            blob = await self._read(digest)
        else:
            blob = await self._directory.once(digest, lambda: self._read(digest))
        self._cache.put(digest, blob, len(blob))
        return blob

    async def _read(self, digest: str) -> bytes:
        blob = await self._store.read(self._keys.chunk(digest))
        self.reads += 1
        if blob is None:
            raise VersionGone(
                f"chunk {digest[:16]} of dataset {self._keys.name!r} is not in the store: the version that names it "
                "was collected; begin a new pass, and pin versions that are read for long"
            )
        return check(digest, blob)


class Follower:
    """The head of a dataset, followed by a watch.

    Arguments:
        store, keys: store, and its keys.
        on_head: called on the loop with each version.

    Attributes:
        head: newest known version.
    """

    def __init__(self, store: Store, keys: DatasetKeys, on_head: Callable[[Head], None]) -> None:
        self.head: Head | None = None
        self._keys = keys
        self._on_head = on_head
        self._moved = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._confirmed_at = self._loop.time()
        self._failure: Exception | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._copy = Reflector(store.control, (keys.head, ""), self._take, on_refused=self._refuse)
        self._copy.start()

    @property
    def age_s(self) -> float:
        """Upper bound of the seconds since the store confirmed that ``head`` is the newest."""
        return self._loop.time() - self._confirmed_at

    async def confirmed(self, staleness_s: float, timeout_s: float) -> Head:
        """Return the newest version, confirmed at most ``staleness_s`` ago.

        Raises:
            DatasetNotFound: nothing was published.
            StaleHead: the store did not answer in time.
            StatusError: it refused.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._followed()
                while self.age_s > staleness_s:
                    await self.refresh()
        except TimeoutError:
            known = "nothing" if self.head is None else f"version {self.head.version}"
            raise StaleHead(
                f"dataset {self._keys.name!r}: {known} is known, and the store has not confirmed for {self.age_s:.1f} "
                f"s that it is the newest (max_staleness_s={staleness_s:g}); see whether the cluster can be reached"
            ) from None
        return self.known()

    async def _followed(self) -> None:
        while not self._copy.is_following and self.head is None:
            if self._failure is not None:
                raise self._failure
            self._moved.clear()
            await self._moved.wait()

    async def refresh(self) -> None:
        """Ask the store, once for all concurrent callers."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = self._loop.create_task(self._refresh())
        await outcome_of(self._refreshing)

    async def _refresh(self) -> None:
        asked_at = self._loop.time()
        await self._copy.refresh()
        self._confirmed_at = max(self._confirmed_at, asked_at)

    def known(self) -> Head:
        """Return the newest known version.

        Raises:
            DatasetNotFound: no version is known.
            RecordError: the head is not a valid record.
        """
        if self.head is None and self._failure is not None:
            raise self._failure
        if self.head is None:
            raise DatasetNotFound(
                f"nothing was published as dataset {self._keys.name!r}; publish it, or check the name"
            )
        return self.head

    async def reached(self, version: int) -> Head:
        """Wait until a version, or a later one, is known.

        Raises:
            StatusError: the cluster refuses to be asked.
        """
        while self.head is None or self.head.version < version:
            if self._failure is not None:
                raise self._failure
            self._moved.clear()
            await self._moved.wait()
        return self.head

    def close(self) -> None:
        """Stop following."""
        self._copy.close()

    def _take(self, _: Sequence[Event]) -> None:
        item = self._copy.get(self._keys.head)
        try:
            head = None if item is None else read(Head, item)
        except RecordError as error:
            self.head = None
            self._failure = error
            self._loop.call_soon(self._moved.set)
            return
        self._failure = None
        moved = head is not None and head != self.head
        self.head = head
        self._loop.call_soon(self._moved.set)  # by then a first list is followed by its watch
        if moved and head is not None:
            self._on_head(head)

    def _refuse(self, error: Exception) -> None:
        self._failure = error
        self._moved.set()
