"""Compares the history of all members: at the start, while running, and after compactions.

    at the start      this member against all others, before it serves; a difference stops it
    while running     by the leader every ``--corrupt-check-time``; a difference raises the CORRUPT alarm
    compactions       by the leader every ``--compact-hash-check-time``, at the last compacted revisions

A hash that could not be compared is "unknown": logged, counted, tried again the next time, and never treated as equal.
The rules are in ``hashes``. Each member computes its hashes on threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from raftkv import errors
from raftkv.apply.membership import Membership
from raftkv.pb import rpc_pb2
from raftkv.raft.types import StateRole
from raftkv.replica.maintenance import hashes
from raftkv.replica.maintenance.hashes import PEER_HASH_KV, Answer, Finding, Hash, Hashes, Result
from raftkv.replica.maintenance.space import raise_alarm
from raftkv.replica.node.node import Node
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError

_log = logging.getLogger(__name__)

KEEP_INTERVAL_S: Final = 1.0
"""Seconds between two checks for a compaction whose hash must be kept."""
HASH_TIMEOUT_S: Final = 60.0
"""Longest wait in seconds for another member's hash, for which it reads its whole history."""


@dataclass(frozen=True, slots=True)
class CorruptionSettings:
    """Settings of the comparisons.

    Attributes:
        at_start: whether this member is compared before it serves.
        interval_s: seconds between comparisons while running; 0 for none.
        of_compactions: whether compactions are compared.
        compaction_interval_s: seconds between comparisons of compactions.
    """

    at_start: bool = False
    interval_s: float = 0.0
    of_compactions: bool = False
    compaction_interval_s: float = 60.0


class Members:
    """The other members, as sources of hashes.

    Arguments:
        membership: members of the cluster.
        me: id of this member.
        channel: returns the connection to a member, ``None`` if it is unknown.
    """

    def __init__(self, membership: Membership, me: int, channel: Callable[[int], Channel | None]) -> None:
        self._membership = membership
        self.me = me
        self._channel = channel

    async def hashes(self, revision: int) -> list[Answer]:
        """Ask all other members, concurrently."""
        others = [one.ID for one in self._membership.list() if self.me != one.ID]
        return list(await asyncio.gather(*(self._hash(one, revision) for one in others)))

    async def _hash(self, member_id: int, revision: int) -> Answer:
        channel = self._channel(member_id)
        if channel is None:
            return Answer(member_id, None, failure="it is not connected")
        data = rpc_pb2.HashKVRequest(revision=revision).SerializeToString()
        try:
            call = channel.unary(PEER_HASH_KV.path, data, HASH_TIMEOUT_S, wait_for_ready=False)
            answer = rpc_pb2.HashKVResponse.FromString(await call)
        except RpcError as error:
            return Answer(member_id, None, failure=str(error))
        except DecodeError as error:
            return Answer(member_id, None, failure=f"its answer cannot be read: {error}")
        found = Hash(answer.hash, answer.compact_revision, answer.hash_revision)
        return Answer(member_id, found, answer.header.revision)


class CorruptionChecker(Collector):
    """Compares this member with the others.

    Arguments:
        settings: settings of the comparisons.
        node: for leadership, reads and alarms.
        hashes: hashes of this member.
        members: the other members.
    """

    def __init__(self, settings: CorruptionSettings, node: Node, hashes: Hashes, members: Members) -> None:
        self._settings = settings
        self._node = node
        self._hashes = hashes
        self._members = members
        self._counts: Counter[tuple[str, Result]] = Counter()
        self._checked_compaction = 0

    def collect(self) -> Iterator[Metric]:
        """Yield the number of comparisons, by kind and result."""
        text = "Comparisons of hashes with other members; unknown: some could not be compared."
        family = CounterMetricFamily("raftkv_corruption_checks", text, labels=["kind", "result"])
        for kind in ("start", "running", "compaction"):
            for result in Result:
                family.add_metric([kind, result.value], float(self._counts[kind, result]))
        yield family

    async def run(self) -> None:
        """Compare periodically until cancelled."""
        settings = self._settings
        async with asyncio.TaskGroup() as group:
            if settings.interval_s > 0:
                group.create_task(self._repeat(settings.interval_s, self.check_running))
            if settings.of_compactions:
                group.create_task(self._repeat(KEEP_INTERVAL_S, self._hashes.keep, by_all=True))
                group.create_task(self._repeat(settings.compaction_interval_s, self.check_compactions))

    async def _repeat(self, interval_s: float, check: Callable[[], Awaitable[None]], *, by_all: bool = False) -> None:
        while True:
            await asyncio.sleep(interval_s)
            if by_all or self._node.role == StateRole.LEADER:
                await check()

    async def check_start(self) -> None:
        """Compare this member with the others, if configured.

        Raises:
            CorruptionError: its history differs from that of most members.
        """
        if not self._settings.at_start:
            return
        try:
            mine = await self._hashes.at(0)
        except errors.StatusError as error:
            self._failed("start", error)
            return
        finding = hashes.at_start(self._members.me, mine, await self._members.hashes(mine.revision))
        self._note("start", finding)
        if self._members.me in finding.suspects:
            raise errors.CorruptionError(
                f"member {self._members.me:x} found data inconsistency with peers at revision {mine.revision} "
                f"({'; '.join(finding.reasons)}): compare raftkvctl endpoint hashkv --cluster; if most members agree "
                "without it, remove its data and let it join again"
            )

    async def check_running(self) -> None:
        """Compare the followers with this leader."""
        try:
            before = await self._hashes.at(0)
            answers = await self._members.hashes(before.revision)
            await self._node.confirm_read()
            # Its revision is read before its hash: only a follower that is ahead of both is ahead of the leader.
            after = await self._hashes.at(0)
        except errors.StatusError as error:
            self._failed("running", error)
            return
        present = max(after.revision, self._node.store.revision)
        finding = hashes.while_running(self._members.me, before, after, present, answers)
        self._note("running", finding)
        await self._raise_alarms(finding)

    async def check_compactions(self) -> None:
        """Compare all members at the newest compacted revision at which all can be compared."""
        await self._hashes.keep()
        for mine in self._hashes.kept:
            if mine.revision <= self._checked_compaction:
                return
            finding = hashes.of_compaction(self._members.me, mine, await self._members.hashes(mine.revision))
            self._note("compaction", finding)
            if finding.result is not Result.UNKNOWN:
                self._checked_compaction = mine.revision if finding.result is Result.EQUAL else 0
                await self._raise_alarms(finding)
                return

    def _failed(self, kind: str, error: errors.StatusError) -> None:
        finding = Finding()
        finding.unknown(self._members.me, str(error))
        self._note(kind, finding)

    def _note(self, kind: str, finding: Finding) -> None:
        self._counts[kind, finding.result] += 1
        if finding.result is Result.EQUAL:
            _log.info("corruption check (%s): the data is equal on %d other members", kind, finding.compared)
            return
        level = logging.ERROR if finding.result is Result.DIFFERENT else logging.WARNING
        _log.log(level, "corruption check (%s): %s: %s", kind, finding.result.value, "; ".join(finding.reasons))

    async def _raise_alarms(self, finding: Finding) -> None:
        raised = {alarm.memberID for alarm in self._node.applier.alarms.raised(rpc_pb2.CORRUPT)}
        for member_id in finding.suspects:
            if member_id in raised:
                continue
            try:
                await raise_alarm(self._node, member_id, rpc_pb2.CORRUPT)
            except errors.StatusError as error:
                _log.warning(
                    "could not raise the CORRUPT alarm of member %x, the next check retries: %s", member_id, error
                )
