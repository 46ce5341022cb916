"""Hashes of this member's history: computed on a thread, kept for the last compactions, and compared between members.

    hash_ = await hashes.at(revision)         # 0: the current revision
    await hashes.keep()                        # at the current compact revision, if it is not kept yet

A hash at a compacted revision can be computed until the next compaction. The last ``KEPT_MAX`` are kept, so that a
member that is one compaction ahead can still answer for an earlier one.

This module also serves HashKV on the peer port. ``damage`` acts on damage found by a hash.
"""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from raftkv import errors
from raftkv.histograms import Buckets, doubling
from raftkv.loop.scheduler import on_thread
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.node.admission import parse_or_raise, refusals
from raftkv.replica.snapshots.files import when_durable
from raftkv.rpc.server.calls import AsyncUnaryHandler, UnaryCall
from raftkv.storage.hash import KVHash
from raftkv.storage.mvcc import Store

# -- comparison -----------------------------------------------------------------------------------------------------
#
# Comparison of the hashes of several members. Pure: the rules are etcd's (server/etcdserver/corrupt.go).
#
#     at_start       own hash against each other member's      different: this member must not serve
#     while_running  the leader's, before and after a read      followers whose history cannot be part of the leader's
#                    that a quorum confirmed
#     of_compaction  all members' at one compacted revision     members outside the majority; id 0 if there is none
#
# Two hashes can be compared only if they have the same revision and compact revision. A hash that cannot be compared
# (no response, compacted meanwhile, not yet there, another compact revision) makes the result UNKNOWN, never EQUAL.

MEMBER_UNKNOWN = 0
"""Member id of an alarm about the cluster: it is unknown which member is wrong."""


class Result(enum.Enum):
    """The outcome of a comparison."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Hash:
    """A member's hash of its history up to a revision."""

    hash: int
    compact_revision: int
    revision: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of another member.

    Attributes:
        member_id: id of the member.
        hash: its hash; ``None`` if it gave none.
        present: its revision when it responded.
        failure: why it gave no hash.
    """

    member_id: int
    hash: Hash | None
    present: int = 0
    failure: str = ""


@dataclass(slots=True)
class Finding:
    """The result of a comparison.

    Attributes:
        suspects: members for which an alarm is raised.
        reasons: one line for each problem.
        compared: members whose hashes could be compared.
    """

    suspects: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    compared: int = 0
    is_complete: bool = True

    @property
    def result(self) -> Result:
        """The result. One difference is enough; equality requires all members."""
        if self.suspects:
            return Result.DIFFERENT
        return Result.EQUAL if self.is_complete else Result.UNKNOWN

    def unknown(self, member_id: int, why: str) -> None:
        """Record that a member could not be compared."""
        self.is_complete = False
        self.reasons.append(f"member {member_id:x} could not be compared: {why}")

    def suspect(self, member_id: int, why: str) -> None:
        """Record that a member's data is wrong, or may be."""
        if member_id not in self.suspects:
            self.suspects.append(member_id)
        self.reasons.append(f"member {member_id:x}: {why}")


def _majority(groups: Mapping[int, Sequence[int]], count: int) -> int | None:
    """Return the hash of more than half of ``count`` members; ``None`` if no hash has a majority."""
    return next((hash_ for hash_, members in groups.items() if 2 * len(members) > count), None)


def at_start(me: int, mine: Hash, answers: Sequence[Answer]) -> Finding:
    """Compare this member with the others before it serves.

    An etcd member does not serve if it differs from any other. Here a member that agrees with most others serves: if it
    had to start again because another member's disk is damaged, the good data would lose its quorum.

    Arguments:
        me: id of this member.
        mine: its hash.
        answers: responses of the others, at the same revision.
    """
    finding, groups = Finding(), {mine.hash: [me]}
    for answer in answers:
        found = answer.hash
        if found is None or found.revision != mine.revision:
            finding.unknown(answer.member_id, answer.failure or f"it hashed revision {found.revision if found else 0}")
        elif found.compact_revision != mine.compact_revision:
            finding.unknown(answer.member_id, f"it is compacted to {found.compact_revision}")
        else:
            finding.compared += 1
            groups.setdefault(found.hash, []).append(answer.member_id)
    is_right = _majority(groups, len(answers) + 1) == mine.hash
    for hash_, members in groups.items():
        for member_id in members if hash_ != mine.hash else ():
            if is_right:
                finding.suspect(member_id, f"hash {hash_:08x} at revision {mine.revision}, most have {mine.hash:08x}")
            else:
                finding.suspect(me, f"hash {mine.hash:08x}, but member {member_id:x} has {hash_:08x}")
    return finding


def while_running(me: int, before: Hash, after: Hash, present: int, answers: Sequence[Answer]) -> Finding:
    """Compare the followers with the leader, which is wrong if most members have another hash.

    Arguments:
        me: id of this member, which leads.
        before: its hash at the revision that the followers were asked for.
        after: its hash at the current revision, computed after a quorum had confirmed a read after their responses.
        present: its revision then.
        answers: responses of the followers.
    """
    finding, groups = Finding(), {before.hash: [me]}
    if (after.revision, after.compact_revision) == (before.revision, before.compact_revision) and after != before:
        finding.suspect(me, f"two hashes of revision {after.revision}: {before.hash:08x} and {after.hash:08x}")
    for answer in answers:
        found = answer.hash
        if answer.present > present:
            finding.suspect(answer.member_id, f"revision {answer.present}, above the leader's {present}")
        elif found is None or found.revision != before.revision:
            finding.unknown(answer.member_id, answer.failure or f"it hashed revision {found.revision if found else 0}")
        elif found.compact_revision > after.compact_revision:
            why = f"compacted to {found.compact_revision}, above the leader's {after.compact_revision}"
            finding.suspect(answer.member_id, why)
        elif found.compact_revision != before.compact_revision:
            finding.unknown(answer.member_id, f"it is compacted to {found.compact_revision}")
        else:
            finding.compared += 1
            groups.setdefault(found.hash, []).append(answer.member_id)
    majority = _majority(groups, len(answers) + 1)
    if majority not in (None, before.hash):
        finding.suspect(me, f"hash {before.hash:08x} at revision {before.revision}, most members have {majority:08x}")
    for hash_, members in groups.items():
        for member_id in members if hash_ not in (before.hash, majority) else ():
            finding.suspect(
                member_id, f"hash {hash_:08x} at revision {before.revision}, the leader has {before.hash:08x}"
            )
    return finding


def of_compaction(me: int, mine: Hash, answers: Sequence[Answer]) -> Finding:
    """Compare all members at a compacted revision: the majority is right.

    Arguments:
        me: id of this member, which leads.
        mine: its hash.
        answers: responses of the others.
    """
    finding, groups = Finding(), {mine.hash: [me]}
    for answer in answers:
        found = answer.hash
        if found is None:
            finding.unknown(answer.member_id, answer.failure)
        elif (found.revision, found.compact_revision) != (mine.revision, mine.compact_revision):
            finding.unknown(answer.member_id, f"revision {found.revision}, compacted to {found.compact_revision}")
        else:
            finding.compared += 1
            groups.setdefault(found.hash, []).append(answer.member_id)
    if len(groups) == 1:
        return finding
    majority = _majority(groups, len(answers) + 1)
    if majority is None:
        told = "; ".join(f"{hash_:08x}: " + ", ".join(f"{one:x}" for one in ids) for hash_, ids in groups.items())
        finding.suspect(MEMBER_UNKNOWN, f"no hash of revision {mine.revision} has a majority ({told})")
        return finding
    for hash_, members in groups.items():
        for member_id in members if hash_ != majority else ():
            why = f"hash {hash_:08x} at compacted revision {mine.revision}, most members have {majority:08x}"
            finding.suspect(member_id, why)
    return finding


KEPT_MAX: Final = 10
"""Number of compactions whose hashes are kept, as in etcd."""
HASH_S: Final = doubling(0.01, 15)
PEER_HASH_KV: Final = SERVICES["raftkvpb.Peer"]["HashKV"]

T = TypeVar("T")


async def scan(job: Callable[[threading.Event], T]) -> T:
    """Read a whole database on a thread; if the caller is cancelled, cancel the job and wait for its end.

    Arguments:
        job: called with the event that cancels it.
    """
    given_up = threading.Event()
    return await on_thread(lambda: job(given_up), given_up.set)


class Hashes:
    """The hashes of a member.

    Arguments:
        store: store of the member.
        member_id: id of this member, for responses to other members.
        on_damage: called with damage found by a hash.
    """

    def __init__(self, store: Store, member_id: int, on_damage: Callable[[errors.CorruptionError], None]) -> None:
        self._store = store
        self._member_id = member_id
        self._on_damage = on_damage
        self._kept: OrderedDict[int, Hash] = OrderedDict()
        # For other members and checks: one scan at a time, because each uses much of a processor.
        self._turn = asyncio.Lock()
        self.clients_turn = asyncio.Lock()
        """The same for requests of clients, so that members never wait for them."""
        self.durations = Buckets(HASH_S)
        """Durations of hashes at the current revision; ``durations_at`` has those at a given revision."""
        self.durations_at = Buckets(HASH_S)

    @property
    def kept(self) -> list[Hash]:
        """Return the hashes of the last compactions, the newest first."""
        return list(reversed(self._kept.values()))

    async def compute(self, revision: int) -> KVHash:
        """Compute a hash on a thread, once everything up to a revision is committed; 0 is the current revision.

        Raises:
            CompactedError, FutureRevisionError: the revision cannot be read.
            UnwrittenError: the database has no space for the unwritten changes.
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
        """Return the hash at a revision, a kept one if possible; 0 is the current revision.

        Raises:
            CompactedError, FutureRevisionError: the revision cannot be read.
        """
        kept = self._kept.get(revision)
        if kept is not None:
            return kept
        async with self._turn:
            found = await self.compute(revision)
        return Hash(found.hash, found.compact_revision, found.revision)

    async def keep(self) -> None:
        """Keep the hash at the current compact revision, unless that is done or nothing was ever compacted."""
        revision = self._store.compact_revision
        if revision <= 0 or revision in self._kept:
            return
        try:
            found = await self.at(revision)
        except (errors.CompactedError, errors.UnwrittenError, errors.DamagedError):
            return  # the next compaction came first, or the disk is full or damaged
        if found.compact_revision != revision:
            return  # computed before the compaction was on disk
        self._kept[revision] = found
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        """Drop the kept hashes, because another database is in place."""
        self._kept.clear()

    def for_members(self) -> dict[str, AsyncUnaryHandler]:
        """Return the handlers for requests of other members, by path."""
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
