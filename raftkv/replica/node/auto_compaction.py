"""Automatic compaction: the leader proposes to drop old history.

This module decides when and to which revision to compact; the proposal is made like a client's. Two policies, as in
etcd (server/etcdserver/api/v3compactor):

- *periodic* keeps the history of a time span. Each member, also followers, samples its revision every tenth of
  ``min(retention, 1 h)``, so that a new leader knows the revision of one retention ago. The first compaction comes
  after a whole retention, the next ones every ``min(retention, 1 h)``, always to the sample of one retention ago.
- *revision* keeps a number of revisions: every 5 minutes it compacts to the current one minus that number.

    policy.target(now, revision) -> revision to compact to, or None     # called every policy.interval_s

Policies do not read clocks. A failed compaction is retried at the next sample.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from raftkv import errors
from raftkv.apply.wire import MEMBER, Kind
from raftkv.loop.fair import MEMBER as OWN
from raftkv.pb import rpc_pb2
from raftkv.replica.node.waits import AwaitableNode

_log = logging.getLogger(__name__)

PERIOD_MAX_S: Final = 3600.0
SAMPLES_PER_PERIOD: Final = 10
REVISION_INTERVAL_S: Final = 300.0


class PeriodicPolicy:
    """Keeps the history of a time span.

    Arguments:
        retention_s: the span.
        now: monotonic seconds of the start.
    """

    def __init__(self, retention_s: float, now: float) -> None:
        self._period_s = min(retention_s, PERIOD_MAX_S)
        self.interval_s = self._period_s / SAMPLES_PER_PERIOD
        # The oldest sample in a full queue is one retention old.
        self._samples: deque[int] = deque(maxlen=int(retention_s / self.interval_s + 0.5) + 1)
        self._due_at = now + retention_s
        self._compacted = 0

    def target(self, now: float, revision: int) -> int | None:
        """Implement ``Policy.target``."""
        self._samples.append(revision)
        # Half an interval of tolerance: a timer that fires a little early must not cost a whole interval.
        is_due = now + self.interval_s / 2 >= self._due_at
        return self._samples[0] if is_due and self._samples[0] > self._compacted else None

    def done(self, now: float, target: int) -> None:
        """Implement ``Policy.done``."""
        self._compacted = target
        self._due_at = now + self._period_s


class RevisionPolicy:
    """Keeps a number of revisions.

    Arguments:
        retention: the number.
    """

    interval_s = REVISION_INTERVAL_S

    def __init__(self, retention: int) -> None:
        self._retention = retention
        self._compacted = 0

    def target(self, now: float, revision: int) -> int | None:
        """Implement ``Policy.target``."""
        target = revision - self._retention
        return target if target > self._compacted else None

    def done(self, now: float, target: int) -> None:
        """Implement ``Policy.done``."""
        self._compacted = target


Policy = PeriodicPolicy | RevisionPolicy


class AutoCompaction:
    """Runs a policy on a member.

    Arguments:
        policy: decides the target.
        proposer: proposes compactions.
        is_leader: returns whether this member leads.
        revision: returns the current revision.
    """

    def __init__(
        self, policy: Policy, proposer: AwaitableNode, is_leader: Callable[[], bool], revision: Callable[[], int]
    ) -> None:
        self._policy = policy
        self._proposer = proposer
        self._is_leader = is_leader
        self._revision = revision
        self._is_compacting = False

    async def run(self) -> None:
        """Work until cancelled. Samples are also taken during a compaction."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                now = loop.time()
                target = self.sample(now)
                if target is not None:
                    group.create_task(self.compact(now, target))
                await asyncio.sleep(self._policy.interval_s)

    def sample(self, now: float) -> int | None:
        """Take a sample; return the revision to compact to, if it is due, none is in progress, and this member leads.

        Arguments:
            now: monotonic seconds.
        """
        target = self._policy.target(now, self._revision())
        return None if self._is_compacting or not self._is_leader() else target

    async def compact(self, now: float, target: int) -> None:
        """Compact to a revision; if that fails, the next sample tries again.

        Arguments:
            now: monotonic seconds of the sample.
            target: the revision.
        """
        request = rpc_pb2.CompactionRequest(revision=target)
        self._is_compacting = True
        try:
            body = request.SerializeToString()
            error = (await self._proposer.propose(Kind.COMPACT, body, request, MEMBER, identity=OWN)).error
        except errors.StatusError as failure:
            error = failure
        finally:
            self._is_compacting = False
        if error is None or isinstance(error, errors.CompactedError):
            self._policy.done(now, target)
            _log.info("auto-compaction to revision %d is done", target)
        else:
            _log.warning("auto-compaction to revision %d failed: %s", target, error)
