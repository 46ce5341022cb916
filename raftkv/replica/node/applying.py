"""Applies committed entries, each at once or, if it is much work, in slices between other work of the loop.

    applying.take(entries)      # applied now, or queued behind an entry in progress

Nearly every entry is applied at once, and the entries of a Ready are one unit of the store with one applied index. An
entry that is much work (as ``Applier.begin`` decides) is a unit of its own: the entries before it are finished and
answered, then it gets ``SLICE_S`` of each pass of the loop until it is done. Meanwhile ticks, messages, the log and
sending continue, so no leader is deposed; committed entries are queued; readers see the state before the entry (the
store ensures that, by revision), and nothing is committed to the database.

Very many short entries are also too much for one turn of the node: after ``TURN_S`` the applied entries are finished
and answered as a unit, and the next turn continues.

Applied changes stay in memory until the database has them. Entries may come faster than the database writes, where puts
keep large values that are not part of the entry: so entries wait while the database is
``NodeSettings.unwritten_max_bytes`` behind.

A received snapshot replaces an entry in progress and everything after it, because it contains them; when the member
stops, the disk stays at the entry before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Final

from raftkv import errors
from raftkv.apply import wire
from raftkv.apply.applier import Outcome, Work
from raftkv.apply.wire import INNER_KIND_AT, Kind
from raftkv.histograms import Buckets, doubling
from raftkv.raft.log import RaftLog
from raftkv.raft.types import Entry, EntryType, Message, MessageType
from raftkv.replica.node.proposals import Waiter
from raftkv.replica.node.waits import NodeSettings
from raftkv.rpc.shares import name_of
from raftkv.storage import failpoints
from raftkv.storage.failpoints import failpoint

if TYPE_CHECKING:
    from raftkv.replica.node.node import Node

_log = logging.getLogger(__name__)

SLICE_S: Final = 0.015
"""Seconds per pass of the loop for an entry in progress, so that other work gets its turn."""

TURN_S: Final = 0.008
"""Seconds for which a turn applies short entries; answering them takes about as long again."""
TURN_SHARED_S: Final = 0.002
"""The same while several identities use the member."""

PUT_BYTES_BITS: Final = 12
"""A put counts as one additional entry for each 4 KiB of its size."""

_PUT: Final = bytes([Kind.PUT])
_NORMAL: Final = EntryType.NORMAL
ENTRIES_PER_LOOK: Final = 32
"""Number of entries between two readings of the clock."""

CATCH_UP_S: Final = 0.02
"""Pause in seconds between two checks of how far the database is behind."""

LONG_REST: Final = 4
"""Time for short entries after a long one, as a multiple of its duration: they wait a fifth of the time at most."""

SLOW_S: Final = 0.1
"""Duration in seconds above which an entry counts as slow and is logged with its caller (etcd: warning-apply-duration).
"""
APPLY_S: Final = doubling(0.0001, 20)

Answers = list[tuple[Waiter, Outcome]]


class ApplyTimes:
    """Durations of applying entries, by kind and by whether they were refused.

    The entries of a run are counted together: the clock is read once for all, and each counts the average. Counting an
    entry costs 0.1 us, a run 1 us.

    Attributes:
        run: entries of the run under way, by kind (``apply.wire.Kind``), which is negative for a refused one.
        buckets: seconds, by the same.
        slow: entries that took longer than ``SLOW_S``.
    """

    def __init__(self) -> None:
        self.run: dict[int, int] = {}
        self.buckets: dict[int, Buckets] = {}
        self.slow = 0

    @property
    def txns(self) -> int:
        """Number of txns applied here, including refused ones."""
        buckets = self.buckets
        return sum([buckets[kind].count for kind in (Kind.TXN, -Kind.TXN) if kind in buckets])

    def end_run(self, began_s: float) -> None:
        """Record that all entries of the run are applied.

        Arguments:
            began_s: start of the run, by ``perf_counter``.
        """
        run = self.run
        if run:
            seconds = (perf_counter() - began_s) / sum(run.values())
            for kind, count in run.items():
                self.took(kind, seconds, count)
            run.clear()

    def took(self, kind: int, seconds: float, count: int = 1) -> None:
        """Count entries of a kind.

        Arguments:
            kind: negative for refused entries.
            seconds: duration of each.
            count: number of entries.
        """
        buckets = self.buckets.get(kind)
        if buckets is None:
            buckets = self.buckets[kind] = Buckets(APPLY_S)
        buckets.observe(seconds, count)
        if seconds > SLOW_S:
            self.slow += count


class _UnderWay:
    """An entry that is being applied in slices."""

    __slots__ = ("began_s", "entry", "is_long", "kind", "waiter", "work")

    def __init__(self, entry: Entry, kind: int, waiter: Waiter | None, work: Work, is_long: bool) -> None:
        self.entry = entry
        self.kind = kind
        self.waiter = waiter
        self.work = work
        self.is_long = is_long
        self.began_s = perf_counter()


class Applying:
    """Applies committed entries in order, the long ones in slices.

    Arguments:
        node: node of the entries.
        wake: requests a turn of the node: the core may return more entries.
    """

    def __init__(self, node: Node, wake: Callable[[], None]) -> None:
        self._node = node
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Entry] = deque()
        self._under_way: _UnderWay | None = None
        self._taken = node.applied
        self._until = perf_counter() + TURN_S
        self._entries_left = ENTRIES_PER_LOOK
        self._is_paused = False
        self._is_waiting = False
        self.times = ApplyTimes()

    def begin_turn(self) -> int:
        """Continue, at the start of a turn, with the rest of the last one; return the number of applied entries."""
        self._until = self._end_of_turn()
        self._entries_left = ENTRIES_PER_LOOK
        if not self._is_paused:
            return 0
        self._is_paused = False
        before = len(self._queue)
        self._run()
        return before - len(self._queue)

    def _end_of_turn(self) -> float:
        return perf_counter() + (TURN_SHARED_S if self._node.uses.company else TURN_S)

    @property
    def is_whole(self) -> bool:
        """Whether no entry is in progress."""
        return self._under_way is None

    def take(self, entries: list[Entry]) -> None:
        """Apply committed entries, in order."""
        first = entries[0].index
        if first != self._taken + 1:
            raise errors.InvariantError(f"entry {first} follows applied index {self._taken}")
        self._taken = entries[-1].index
        self._queue.extend(entries)
        if self._under_way is None and not self._is_paused:
            self._run()

    def replaced(self, index: int) -> None:
        """Drop all pending entries: a received database, of entry ``index``, replaces the state."""
        self._queue.clear()
        self._taken = index
        self._drop(errors.RequestTimeoutError())

    def close(self) -> None:
        """Stop, with the member."""
        self._queue.clear()
        self._drop(errors.StoppedError())

    def _drop(self, error: errors.StatusError) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.work.close()
            if under_way.waiter is not None:
                under_way.waiter.fail(error)

    def _run(self) -> None:
        """Apply queued entries, in runs of one term, up to an entry that takes longer or the end of the turn's time."""
        queue, node, applier = self._queue, self._node, self._node.applier
        while queue and self._under_way is None and not self._is_paused:
            if self._is_far_ahead():
                self._wait()
                return
            term = applier.term = queue[0].term
            answers: Answers = []
            last: Entry | None = None
            began_s = perf_counter()
            while queue and queue[0].term == term:
                entry = queue.popleft()
                if entry.type != _NORMAL:
                    node.apply_conf_change(entry, answers)
                elif entry.data and not self._apply(entry, answers, last):
                    break
                last = entry
                self._entries_left -= _weight(entry)
                if self._entries_left <= 0 and queue and (self._is_time_up() or self._is_far_ahead()):
                    self._is_paused = True
                    self._wake()
                    break
            is_whole = self.is_whole
            self.times.end_run(began_s)
            if last is not None and is_whole:
                node.applied_up_to(last, answers)
                if answers:
                    self._charge(answers, perf_counter() - began_s)

    def _charge(self, answers: Answers, seconds: float) -> None:
        """Charge the time of a run to the callers of its entries; nearly always there is only one."""
        uses, part_s = self._node.uses, seconds / len(answers)
        identity, count = answers[0][0].identity, 0
        for waiter, _ in answers:
            if waiter.identity is not identity:
                uses.charge(identity, part_s * count)
                identity, count = waiter.identity, 0
            count += 1
        uses.charge(identity, part_s * count)

    def _is_time_up(self) -> bool:
        self._entries_left = ENTRIES_PER_LOOK
        return perf_counter() >= self._until

    def _is_far_ahead(self) -> bool:
        """Whether the database must catch up first. A database without space catches up only if more is applied; one
        whose map is full, as soon as its last reader has ended.
        """
        store = self._node.applier.store
        if store.unwritten_bytes <= self._node.settings.unwritten_max_bytes:
            return False
        return store.space_error is None or isinstance(store.space_error, errors.MapFullError)

    def _wait(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._node.applier.store.commit()
            self._loop.call_later(CATCH_UP_S, self._go_on)

    def _go_on(self) -> None:
        """Check again whether the database has caught up."""
        self._is_waiting = False
        if self._node.stopped:
            return
        try:
            self.begin_turn()
            self._run()
        except Exception as error:
            self._node.fatal(error)
            return
        self._wake()

    def _apply(self, entry: Entry, answers: Answers, before: Entry | None) -> bool:
        """Apply one request; return False if it is in progress now, and the entries before it are answered."""
        request = wire.decode(entry.data)
        if request is None:
            return True  # no caller waits for it
        kind, request_id, body = request
        does = entry.data[INNER_KIND_AT] if kind == wire.IDENTIFIED and len(entry.data) > INNER_KIND_AT else kind
        is_long = request_id == self._node.proposals.long_id
        waiter = self._node.proposals.pop(request_id)
        self._node.applier.index = entry.index
        if failpoints.armed:
            failpoint("beforeApplyOneEntryNormal")
        if waiter is None:
            outcome = self._node.applier.begin(kind, body, is_answered=False)
        else:
            outcome = self._node.applier.begin(kind, body, waiter.request)
        if not isinstance(outcome, Outcome):
            self._under_way = _UnderWay(entry, does, waiter, outcome, is_long)
            if before is not None:
                self._node.applied_up_to(before, answers)
            self._loop.call_soon(self._slice, self._under_way)
            return False
        if is_long:
            self._next_long()
        if outcome.error is not None:
            does = -does
        run = self.times.run
        run[does] = run.get(does, 0) + 1
        if waiter is not None:
            answers.append((waiter, outcome))
        if failpoints.armed:
            failpoint("afterApplyOneEntryNormal")
        return True

    def _slice(self, under_way: _UnderWay) -> None:
        """Continue with the entry in progress, for a while."""
        if self._under_way is not under_way or self._node.stopped:
            return
        began_s, waiter = perf_counter(), under_way.waiter
        try:
            outcome = _work(under_way.work, began_s + SLICE_S)
            if waiter is not None:
                self._node.uses.charge(waiter.identity, perf_counter() - began_s)
            if outcome is None:
                self._loop.call_soon(self._slice, under_way)
                return
            if failpoints.armed:
                failpoint("afterApplyOneEntryNormal")
            self._under_way = None
            does = under_way.kind if outcome.error is None else -under_way.kind
            took_s = perf_counter() - under_way.began_s
            self.times.took(does, took_s)
            if took_s > SLOW_S:
                what = next((kind.name for kind in Kind if kind == under_way.kind), "unknown")
                whose = "another member's client" if waiter is None else name_of(waiter.identity)
                _log.warning("slow apply: an entry (%s) took %.2f s, from %r", what, took_s, whose)
            self._node.applied_up_to(under_way.entry, [] if waiter is None else [(waiter, outcome)])
            if under_way.is_long:
                self._end_long(took_s)
            self._until = self._end_of_turn()
            self._run()
        except Exception as error:
            self._node.fatal(error)
            return
        self._wake()

    def _end_long(self, took_s: float) -> None:
        """Let the next long entry into the log; others with proposals get ``LONG_REST`` times its time first."""
        if len(self._node.proposals.shares.held) > 1:
            self._loop.call_later(LONG_REST * took_s, self._next_long)
        else:
            self._next_long()

    def _next_long(self) -> None:
        if not self._node.stopped and self._node.proposals.end_long():
            self._wake()


def _weight(entry: Entry) -> int:
    """Return the number of small puts that an entry may cost: other kinds may have hundreds of operations, or keys."""
    data = entry.data
    if (
        data
        and data[0] != Kind.PUT
        and not (data[0] == Kind.IDENTIFIED and data[INNER_KIND_AT : INNER_KIND_AT + 1] == _PUT)
    ):
        return ENTRIES_PER_LOOK
    return 1 + (len(data) >> PUT_BYTES_BITS)


def _work(work: Work, until: float) -> Outcome | None:
    """Work until a time of ``perf_counter``, one piece at least; return the outcome if it is complete."""
    try:
        next(work)
        while perf_counter() < until:
            next(work)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome
    return None


class Backlog:
    """The entries that are committed and not applied: limits their size, and makes callers wait when they are too many.

    A member commits what the other members have, however slowly it applies: because of an entry that takes minutes, or
    a database whose disk hangs. Its entries are in memory until they are applied and in the database. So above
    ``NodeSettings.unapplied_max_bytes`` it ignores appends, as if they were lost: the leader probes the member until it
    accepts one, waits for it if there is no quorum without it, and sends it the database if the leader's log no longer
    has the entries. Empty appends are ignored too: a rejection would cause a transfer of the whole database each time,
    which cannot be installed while an entry is in progress. Heartbeats still report the commit index.

    This ends without further messages: committed entries are applied without any leader.

    A client is refused earlier, as in etcd, because its response depends on applying here.

    Arguments:
        log: log of the core.
        settings: limits.

    Attributes:
        is_long: whether this member applies so much later than it commits that it should accept no writes of clients.
        appends_dropped: number of ignored messages of leaders.
    """

    def __init__(self, log: RaftLog, settings: NodeSettings) -> None:
        self._log = log
        self._settings = settings
        self._committed_at_tick = log.committed
        self.is_long = False
        self.appends_dropped = 0

    @property
    def size_bytes(self) -> int:
        """Size of the entries that are committed and not applied."""
        return self._log.unapplied_bytes()

    def tick(self) -> None:
        """Compare the applied index with the commit index of the last tick: newer entries may be one large batch."""
        log, settings = self._log, self._settings
        entries = self._committed_at_tick - log.applied
        self._committed_at_tick = log.committed
        self.is_long = entries > settings.unapplied_max or self.size_bytes > settings.unapplied_max_bytes

    def takes(self, message: Message) -> bool:
        """Return whether a message of another member may be accepted."""
        if message.type != MessageType.APPEND or self.size_bytes <= self._settings.unapplied_max_bytes:
            return True
        self.appends_dropped += 1
        return False
