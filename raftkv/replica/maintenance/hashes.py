"""Hashes of this member's history: made on a thread, kept for the last compactions, and compared with those of others.

    hash_ = await hashes.at(revision)         # 0: the present
    await hashes.keep()                        # of the present compact revision, if it is not kept yet

A hash at a compacted revision can be made until the next compaction. The last ``KEPT_MAX`` are kept, so that a member
can answer for a compaction that others ask about when it is one ahead of them.

Owns the peer port's HashKV, too. ``damage`` acts on damage that a hash meets.
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
# Two hashes can be compared only if they are of one revision with one compact revision. A hash that cannot be compared
# (no answer, compacted since, not yet there, another compact revision) makes the result UNKNOWN, never EQUAL.

MEMBER_UNKNOWN = 0
"""Member id of an alarm that is about the cluster: the wrong member is unknown."""


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
    """The answer of another member.

    Attributes:
        member_id: who.
        hash: its hash; None if it gave none.
        present: its revision when it answered.
        failure: why it gave none.
    """

    member_id: int
    hash: Hash | None
    present: int = 0
    failure: str = ""


@dataclass(slots=True)
class Finding:
    """The result of a comparison.

    Attributes:
        suspects: members that an alarm is about.
        reasons: a line for everything that is not as it should be.
        compared: members whose hashes could be compared.
    """

    suspects: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    compared: int = 0
    is_complete: bool = True

    @property
    def result(self) -> Result:
        """The verdict. One difference is enough; equality needs all."""
        if self.suspects:
            return Result.DIFFERENT
        return Result.EQUAL if self.is_complete else Result.UNKNOWN

    def unknown(self, member_id: int, why: str) -> None:
        """Note that a member could not be compared."""
        self.is_complete = False
        self.reasons.append(f"member {member_id:x} could not be compared: {why}")

    def suspect(self, member_id: int, why: str) -> None:
        """Note that a member's data are wrong, or may be."""
        if member_id not in self.suspects:
            self.suspects.append(member_id)
        self.reasons.append(f"member {member_id:x}: {why}")


def _majority(groups: Mapping[int, Sequence[int]], count: int) -> int | None:
    """Return the hash that most members have, of so many in all; None if no hash has a majority."""
    return next((hash_ for hash_, members in groups.items() if 2 * len(members) > count), None)


def at_start(me: int, mine: Hash, answers: Sequence[Answer]) -> Finding:
    """Compare this member with the others before it serves.

    etcd's member does not serve if it differs from any other. Here one that agrees with most others serves: to have it
    begin anew, because the disk of another is damaged, would take the quorum from good data.

    Arguments:
        me: id of this member.
        mine: its hash.
        answers: of the others, at the same revision.
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
    """Compare the followers with the leader, which is wrong where most members have another hash.

    Arguments:
        me: id of this member, which leads.
        before: its hash, of the revision that the followers were asked for.
        after: its hash of the present, made when a quorum had confirmed a read after their answers.
        present: its revision then.
        answers: of the followers.
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
        answers: of the others.
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
