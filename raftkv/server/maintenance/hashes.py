"""Hashes of this member's history: made on a thread, and kept for the last compactions.

    hash_ = await hashes.at(revision)         # 0: the present
    await hashes.keep()                        # of the present compact revision, if it is not kept yet

A hash at a compacted revision can be made until the next compaction. The last ``KEPT_MAX`` are kept, so that a member
can answer for a compaction that others ask about when it is one ahead of them.

Owns the way of the peer port's HashKV, too. What is done about damage that a hash meets: ``damage``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from raftkv import errors
from raftkv.histograms import Buckets, doubling
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.server import AsyncUnaryHandler
from raftkv.server.durable import when_durable
from raftkv.server.maintenance.comparison import Hash
from raftkv.server.services.responder import parse_or_raise, refusals
from raftkv.server.snapshots.files import on_thread
from raftkv.storage.hash import KVHash
from raftkv.storage.mvcc import Store

KEPT_MAX: Final = 10
"""Compactions whose hashes are kept, as in etcd."""
HASH_S: Final = doubling(0.01, 15)
PEER_HASH_KV: Final = SERVICES["raftkvpb.Peer"]["HashKV"]

T = TypeVar("T")


async def scan(job: Callable[[threading.Event], T]) -> T:
    """Read a whole database on a thread; who is cancelled has it end, and knows when it has ended.

    Arguments:
        job: is given the event that ends it.
    """
    given_up = threading.Event()
    return await on_thread(lambda: job(given_up), given_up.set)


class Hashes:
    """The hashes of a member.

    Arguments:
        store: of the member.
        member_id: for the answers to other members.
        on_damage: called with damage that a hash has met.
    """

    def __init__(self, store: Store, member_id: int, on_damage: Callable[[errors.CorruptionError], None]) -> None:
        self._store = store
        self._member_id = member_id
        self._on_damage = on_damage
        self._kept: OrderedDict[int, Hash] = OrderedDict()
        # For other members and checks: a scan at a time, each takes a good part of a processor.
        self._turn = asyncio.Lock()
        self.clients_turn = asyncio.Lock()
        """The same for what clients ask for, so that however many ask, members wait for none of them."""
        self.durations = Buckets(HASH_S)
        """Durations of hashes of the present; ``durations_at`` has those of a revision."""
        self.durations_at = Buckets(HASH_S)

    @property
    def kept(self) -> list[Hash]:
        """Hashes of the last compactions, the newest first."""
        return list(reversed(self._kept.values()))

    async def compute(self, revision: int) -> KVHash:
        """Hash on a thread, once everything up to a revision is committed; 0 is the present.

        Raises:
            CompactedError, FutureRevisionError: there is no such revision.
            UnwrittenError: the database has no room for what was written.
        """
        job: Callable[..., KVHash] = await when_durable(self._store, partial(self._store.hash_kv, revision))
        began_s = time.perf_counter()
        try:
            found = await scan(job)
        except errors.CorruptionError as error:
            self._on_damage(error)
            raise errors.DamagedError from error
        durations = self.durations_at if revision else self.durations
        durations.observe(time.perf_counter() - began_s)
        return found

    async def at(self, revision: int) -> Hash:
        """Return the hash at a revision, a kept one if there is; 0 is the present.

        Raises:
            CompactedError, FutureRevisionError: there is no such revision.
        """
        kept = self._kept.get(revision)
        if kept is not None:
            return kept
        async with self._turn:
            found = await self.compute(revision)
        return Hash(found.hash, found.compact_revision, found.revision)

    async def keep(self) -> None:
        """Hash the present compact revision, unless that is done or nothing was ever compacted."""
        revision = self._store.compact_revision
        if revision <= 0 or revision in self._kept:
            return
        try:
            found = await self.at(revision)
        except (errors.CompactedError, errors.UnwrittenError, errors.DamagedError):
            return  # the next compaction came first, or the disk is full, or damaged
        if found.compact_revision != revision:
            return  # hashed before the compaction was on disk
        self._kept[revision] = found
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        """Another database is in place: what was kept is of the one before."""
        self._kept.clear()

    def for_members(self) -> dict[str, AsyncUnaryHandler]:
        """Handlers of what other members ask, by path."""
        return {PEER_HASH_KV.path: self._answer}

    async def _answer(self, data: bytes, _call: UnaryCall) -> bytes:
        request = parse_or_raise(rpc_pb2.HashKVRequest, data)
        with refusals():
            found = await self.at(request.revision)
        answer = rpc_pb2.HashKVResponse(
            hash=found.hash, compact_revision=found.compact_revision, hash_revision=found.revision
        )
        answer.header.member_id = self._member_id
        answer.header.revision = self._store.revision
        return answer.SerializeToString()
