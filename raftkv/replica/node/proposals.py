"""The queue of proposals, and the waiter of each proposal.

A proposal is *unsent* until the Raft core accepts it (there may be no leader for a while), then *sent* until its entry
is applied here. The caller's response comes from the entry as this member applies it, wherever the leader is.

A waiter that gives up (client gone, timeout) is forgotten. If its proposal was unsent it leaves the queue, and will
never be proposed; if it was sent, it may still commit, and its caller is not notified.

A proposal whose caller has a deadline is not proposed after the deadline, nor if it would be applied after it. Such a
proposal is refused on arrival, by the measured waiting time, or when its turn comes (the oldest first). This refusal is
definite (``etcdserver: too many requests``, with the time to retry), unlike DEADLINE_EXCEEDED, after which clients
cannot know the outcome.

An entry counts what applying it costs, not only its bytes: 200 bytes may look at 10,000 keys. Of the entries that take
long to apply, one of this member is in the log at a time: later entries wait for it, and would wait for as many as one
client likes to send. The others wait here, and identities take turns.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, final

from mypy_extensions import mypyc_attr

from raftkv import errors
from raftkv.apply import wire as requests
from raftkv.apply.applier import Outcome
from raftkv.apply.txn import LONG_WORK
from raftkv.loop.fair import EQUAL, MEMBER, FairQueue, Weights
from raftkv.pb import rpc_pb2
from raftkv.raft.errors import ProposalDropped
from raftkv.rpc.shares import Identity, Shares, name_of, queue_of, refusal

_log = logging.getLogger(__name__)

EXPIRED_AT_ONCE: Final = 2000
"""Proposals that are refused in one turn of the loop, 18 ms: each has its call answered."""

PENDING_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of proposals of one identity that may wait at a time; all identities together have a seventh more."""

PROPOSAL_BYTES: Final = PENDING_BYTES_MAX // 20_000
"""Bytes that each proposal counts in addition to its own: 20,000 small ones may wait."""

FORWARDED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Size of forwarded requests that a leader queues while its log accepts no more; further ones are dropped."""

SURE: Final = 2
"""A proposal is refused on arrival only if it would be late even at this multiple of the measured speed."""

SOON_S: Final = 0.01
"""Proposals that waited no longer than this are not checked for their deadline: they arrived in this turn."""

SORTED_AT_ONCE: Final = 16_000
"""Proposals that are moved to the queues of their identities at a time, while more wait than fit in one append: 10 ms.

Many more than fit in one append, if they are small; otherwise the order would remain that of arrival."""

ENTRY_COST_BYTES: Final = 1024
"""Bytes that a waiting entry counts in addition to its own: appending, sending and applying it takes as long."""

KEY_COST_BYTES: Final = 16
"""Bytes that a waiting entry counts for each key of its work: looking at a key takes a microsecond."""

COUNTED_AGAIN_BYTES: Final = 4096
"""Size of a txn up to which its keys are counted again when its turn comes: 0.2 ms at most."""

PACE_MIN_BYTES: Final = 64 * 1024
PACE_MAX_BYTES: Final = 8 * 1024 * 1024
PACE_DELAY_S: Final = 0.015
PACE_DELAY_LIGHT_S: Final = 0.002
"""Additional delay while an identity proposes less than its part: only it waits for what the others have in the log."""
PACE_LIGHT_S: Final = 0.25
"""How long such an identity counts as present after a proposal."""
PACE_DELAY_ALONE_S: Final = 0.1
"""Additional delay while only one identity has proposals: the first proposal of another waits this long, once."""
PACE_GIVEN_UP_S: Final = 1.0
"""Duration of a round, in seconds, after which its proposals may be lost."""
PROBE_BYTES: Final = 16 * 1024
"""A round of at most this size shows the shortest time until something is applied."""
PROBE_EVERY_S: Final = 1.0
PROBE_EVERY_ROUNDS: Final = 100
"""Maximum age of that measurement, in seconds and rounds; then the log is emptied for a new one: 2 % of the time."""

START_BITS: Final = 40


@mypyc_attr(allow_interpreted_subclasses=True)
class Waiter:
    """Waits for a proposal with callbacks: for requests that cannot afford a task each (see ``waits``).

    Arguments:
        request: the parsed request, so that applying need not parse it again.
        identity: identity in whose share it counts.
        deadline: loop time after which its caller no longer waits; ``None``: no deadline.

    Attributes:
        work: keys that applying its entry looks at or changes, about; of those that take long (``LONG_WORK``), only one
            is in the log at a time.
        held_bytes: bytes that it counts in that share.
        started_at: loop time of the proposal.
    """

    __slots__ = ("deadline", "held_bytes", "identity", "request", "started_at", "work")

    def __init__(self, request: Any = None, identity: Identity = MEMBER, deadline: float | None = None) -> None:
        self.request = request
        self.identity = identity
        self.deadline = deadline
        self.work = 0
        self.held_bytes = 0
        self.started_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether its caller has left, and was or will be told why."""
        return False

    def finish(self, outcome: Outcome) -> None:
        """Handle the outcome: the entry was applied."""
        raise NotImplementedError

    def fail(self, error: errors.StatusError) -> None:
        """Handle the reason why no outcome will come."""
        raise NotImplementedError


class Proposals:
    """Queues the proposals of a member, and knows the waiter of each.

    Arguments:
        ids: fresh request ids.
        timeout_s: longest wait of a caller.
        clock: returns the loop time.
        on_wait: called with an identity, and the time that one of its proposals has waited for its turn.
        keys_of: counts the keys of the intervals of a txn: entries before it may have added some since it arrived.
        weights: as in ``FairQueue``.

    Attributes:
        unsent_bytes: size of the entries that are not proposed yet.
        taken_work_bytes: bytes that the work of the entries taken last counts.
        failed: number of proposals that timed out.
        late: number of proposals refused because they would have been applied after their deadline.
    """

    def __init__(
        self,
        ids: Iterator[int],
        timeout_s: float,
        clock: Callable[[], float],
        on_wait: Callable[[Identity, float], None] = lambda identity, seconds: None,
        keys_of: Callable[[rpc_pb2.TxnRequest], int] = lambda request: 0,
        weights: Weights = EQUAL,
    ) -> None:
        self._ids = ids
        self._timeout_s = timeout_s
        self._clock = clock
        # In order of proposal, hence of timeout.
        self._waiters: dict[int, Waiter] = {}
        self._unsent: dict[int, bytes] = {}
        self._crowd = _Crowd(clock, weights)
        """The oldest unsent proposals, while more wait than fit in one append: identities take turns by bytes."""
        self.unsent_bytes = self.taken_work_bytes = 0
        self._has_work = False
        """Whether an entry of ``_unsent`` has work that its bytes do not show."""
        self._long = _Crowd(None, weights)
        """Long entries that wait until another one is applied."""
        self.long_id = 0
        """Request id of the long entry that is unsent or in the log; 0: there is none."""
        self._long_at = 0.0
        self.shares = Shares(PENDING_BYTES_MAX)
        self.failed = self.late = 0
        self._on_wait = on_wait
        self._keys_of = keys_of

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, kind: int, body: bytes, waiter: Waiter, now: float) -> int:
        """Queue a proposal.

        Arguments:
            kind, body: the request.
            waiter: gets the outcome.
            now: loop time.

        Returns:
            Its request id.

        Raises:
            ShareError: too much is pending already.
            LimitedError: it would wait until after the caller's deadline.
            ContextDeadlineExceededError: the deadline has passed.
        """
        deadline = waiter.deadline
        if deadline is not None and (deadline <= now or self._crowd.queue.length):
            self._check_deadline(waiter.identity, deadline, now)
        request_id = self.expect(waiter, now, len(body))
        data = requests.encode(kind, request_id, body)
        if waiter.work > LONG_WORK:
            self._long.add(queue_of(waiter.identity), request_id, data)
            if not self.long_id:
                self.end_long()
            return request_id
        if waiter.work or isinstance(waiter.request, rpc_pb2.TxnRequest):
            self._has_work = True
        self._unsent[request_id] = data
        self.unsent_bytes += len(data) + ENTRY_COST_BYTES
        return request_id

    def end_long(self) -> bool:
        """Queue the next long entry, since the last one is applied or will not be; return whether there is one."""
        self.long_id = 0
        if not self._long.queue.length:
            return False
        [(request_id, data)], _ = self._long.take(0, lambda request_id: False)
        self.long_id, self._long_at = request_id, self._clock()
        self._unsent[request_id], self._has_work = data, True
        self.unsent_bytes += len(data) + ENTRY_COST_BYTES
        return True

    def _check_deadline(self, identity: Identity, deadline: float, now: float) -> None:
        if deadline <= now:
            raise errors.ContextDeadlineExceededError
        wait_s = self._crowd.queue.wait_s(queue_of(identity))
        if wait_s > SURE * (deadline - now):
            self.late += 1
            raise too_late("proposals", identity, wait_s)

    def add_ahead(
        self, kind: int, body: bytes, waiter: Waiter, now: float, propose: Callable[[list[bytes]], None]
    ) -> None:
        """Propose something at once, before all unsent proposals.

        Arguments:
            kind, body, waiter, now: as in ``add``.
            propose: proposes it, or raises ``ProposalDropped``.

        Raises:
            TooManyRequestsError: it was refused, or too many wait already.
        """
        request_id = self.expect(waiter, now, len(body))
        try:
            propose([requests.encode(kind, request_id, body)])
        except ProposalDropped:
            self.pop(request_id)
            raise errors.TooManyRequestsError from None

    def expect(self, waiter: Waiter, now: float, size_bytes: int = 0) -> int:
        """Register the waiter for an entry that another part proposes.

        Arguments:
            waiter: gets the outcome.
            now: loop time.
            size_bytes: size of the entry, if it waits here.

        Returns:
            A fresh request id.

        Raises:
            ShareError: too many wait already.
        """
        identity = waiter.identity
        if not self.shares.has_room(identity, PROPOSAL_BYTES):
            what = f"{self.shares.limit >> 20} MiB of proposals ({PROPOSAL_BYTES} bytes and its own each) that may wait"
            raise errors.ShareError(refusal(identity, what))
        waiter.held_bytes = PROPOSAL_BYTES + size_bytes
        self.shares.take(identity, waiter.held_bytes)
        request_id = next(self._ids)
        waiter.started_at = now
        self._waiters[request_id] = waiter
        return request_id

    def is_waiting(self, request_id: int) -> bool:
        """Return whether a caller still waits for a request id."""
        return request_id in self._waiters

    def take_unsent(
        self, bytes_max: int = PENDING_BYTES_MAX, apply_s: float = 0.0, pace: Pace | None = None
    ) -> list[tuple[int, bytes]]:
        """Remove and return the oldest unsent proposals; they count as sent unless given back.

        Arguments:
            bytes_max: as many as fit, but at least one; with 0 only those that the pace lets pass.
            apply_s: shortest time until they are applied.
            pace: the pace.
        """
        unsent = self._unsent
        self.taken_work_bytes = 0
        if not bytes_max and len(self.shares.held) < 2:
            return []
        if self.unsent_bytes > bytes_max or self._crowd.queue.length:
            return self._take_in_turns(bytes_max, apply_s, pace)
        if self._has_work:
            work_bytes = sum(self._work_bytes(request_id, data) for request_id, data in unsent.items())
            if self.unsent_bytes + work_bytes > bytes_max:
                return self._take_in_turns(bytes_max, apply_s, pace)
            self.taken_work_bytes, self._has_work = work_bytes, False
        self._unsent, self.unsent_bytes = {}, 0
        taken = list(unsent.items())
        first = self._waiters.get(taken[0][0]) if taken else None
        if first is not None and self._clock() - first.started_at > SOON_S:
            late_at = self._clock() + apply_s
            taken = [item for item in taken if not self._is_late(item[0], late_at)]
        return taken

    def _take_in_turns(self, bytes_max: int, apply_s: float, pace: Pace | None) -> list[tuple[int, bytes]]:
        """Take as many as fit, from all waiting identities in turn: the flood of one does not delay any other."""
        identity: Identity = ""
        queue = queue_of(identity)
        late_at = self._clock() + apply_s
        taken: list[tuple[int, bytes]] = []
        for request_id in list(islice(self._unsent, SORTED_AT_ONCE)):
            waiter = self._waiters.get(request_id)
            if waiter is None:  # another member uses this id
                self._leave(request_id)
                continue
            if waiter.identity != identity:
                identity = waiter.identity
                queue = queue_of(identity)
            data = self._unsent.pop(request_id)
            size_bytes = len(data) + ENTRY_COST_BYTES
            cost = size_bytes + waiter.work * KEY_COST_BYTES
            if pace is not None and not bytes_max and pace.lets_pass(self._crowd.queue, queue, cost):
                self.unsent_bytes -= size_bytes
                if not self._is_late(request_id, late_at):
                    taken.append((request_id, data))
            else:
                self._crowd.add(queue, request_id, data)
        self._has_work = bool(self._unsent)
        if bytes_max:
            taken, dropped_bytes = self._crowd.take(
                bytes_max, lambda request_id: self._is_late(request_id, late_at), self._work_bytes
            )
            self.unsent_bytes -= cost_bytes([data for _, data in taken]) + dropped_bytes
        oldest: dict[Identity, float] = {}
        for request_id, _ in taken:
            waiter = self._waiters[request_id]
            self.taken_work_bytes += waiter.work * KEY_COST_BYTES
            oldest.setdefault(waiter.identity, waiter.started_at)
        for identity, started_at in oldest.items():
            self._on_wait(identity, late_at - apply_s - started_at)
        return taken

    def _work_bytes(self, request_id: int, data: bytes) -> int:
        """Return the bytes that the work of a proposal counts, now that its turn has come."""
        waiter = self._waiters.get(request_id)
        if waiter is None:
            return 0
        if len(data) <= COUNTED_AGAIN_BYTES and isinstance(waiter.request, rpc_pb2.TxnRequest):
            waiter.work = max(waiter.work, self._keys_of(waiter.request))
        return waiter.work * KEY_COST_BYTES

    def _is_late(self, request_id: int, late_at: float) -> bool:
        """Refuse a proposal whose turn has come if it cannot be applied before its deadline; return whether it was."""
        waiter = self._waiters.get(request_id)
        if waiter is None or waiter.is_over:
            self.pop(request_id)
            if request_id == self.long_id:
                self.end_long()
            return True
        deadline, now = waiter.deadline, self._clock()
        # The estimate may be of a time without load; a proposal that has not waited is tried.
        if deadline is None or deadline > late_at or now - waiter.started_at <= SOON_S < deadline - now:
            return False
        self.pop(request_id)
        if request_id == self.long_id:
            self.end_long()
        self.late += 1
        if deadline <= now:
            waiter.fail(errors.ContextDeadlineExceededError())
        else:
            wait_s = self._crowd.queue.wait_s(queue_of(waiter.identity))
            waiter.fail(too_late("proposals", waiter.identity, max(wait_s, late_at - now)))
        return True

    def give_back(self, unsent: list[tuple[int, bytes]]) -> None:
        """Queue again, in front, proposals that the core refused: there is no leader, or its limit is reached."""
        unsent = [item for item in unsent if item[0] in self._waiters]
        self.unsent_bytes += cost_bytes([data for _, data in unsent])
        if not self._crowd.queue.length:
            self._unsent = {**dict(unsent), **self._unsent}
            self._has_work = True
            return
        for request_id, data in reversed(unsent):
            self._crowd.put_back(queue_of(self._waiters[request_id].identity), request_id, data)

    def withdraw(self, request_id: int) -> bool:
        """Forget an unsent proposal, which will never be proposed; return False if it is not unsent."""
        return self._leave(request_id) and self.pop(request_id) is not None

    def _leave(self, request_id: int) -> bool:
        """Remove an unsent proposal from its queue; return whether it was unsent."""
        waiter = self._waiters.get(request_id)
        if waiter is not None and request_id in self._long.datas:
            self._long.discard(queue_of(waiter.identity), request_id)
            return True
        data = self._unsent.pop(request_id, None)
        if data is None and waiter is not None and request_id in self._crowd.datas:
            data = self._crowd.discard(queue_of(waiter.identity), request_id)
        if data is None:
            return False
        self.unsent_bytes -= len(data) + ENTRY_COST_BYTES
        if request_id == self.long_id:
            self.end_long()
        return True

    def pop(self, request_id: int) -> Waiter | None:
        """Forget and return the waiter for the id of an entry in the log, if there is one here."""
        waiter = self._waiters.pop(request_id, None)
        if waiter is not None:
            self.shares.give_back(waiter.identity, waiter.held_bytes)
        return waiter

    def observe(self, observer: Callable[[float], None] | None, clock: Callable[[], float]) -> None:
        """Measure the time of each proposal, from arrival to outcome; ``None``: stop measuring, at no cost.

        Arguments:
            observer: called with seconds.
            clock: returns the loop time, like the ``now`` of ``add``.
        """
        self._waiters = dict(self._waiters) if observer is None else _Timed(self._waiters, observer, clock)

    def take_expired(self, now: float) -> list[tuple[Waiter, bool]]:
        """Return waiters that have timed out at ``now`` (loop time), each with whether its proposal was sent; if there
        are very many, only some of them, so that the next tick gets the next ones.
        """
        oldest = now - self._timeout_s
        if self.long_id and self._long_at <= oldest:
            self.end_long()  # its entry may be lost
        late: list[int] = []
        for request_id, waiter in self._waiters.items():
            if waiter.started_at > oldest or len(late) == EXPIRED_AT_ONCE:
                break
            late.append(request_id)
        expired: list[tuple[Waiter, bool]] = []
        for request_id in late:
            waiter = self._waiters[request_id]
            expired.append((waiter, not self._leave(request_id)))
            del self._waiters[request_id]
            self.shares.give_back(waiter.identity, waiter.held_bytes)
        self.failed += len(expired)
        return expired

    def close(self) -> None:
        """Fail everything, because the member stops."""
        waiters = list(self._waiters.values())
        self._waiters.clear()
        self._unsent, self.unsent_bytes = {}, 0
        self._crowd.clear()
        self._long.clear()
        for waiter in waiters:
            self.shares.give_back(waiter.identity, waiter.held_bytes)
            waiter.fail(errors.StoppedError())


class _Timed(dict[int, Waiter]):
    """Waiters whose waiting time is measured when they are removed."""

    def __init__(
        self, waiters: dict[int, Waiter], observer: Callable[[float], None], clock: Callable[[], float]
    ) -> None:
        super().__init__(waiters)
        self._observer = observer
        self._clock = clock

    def pop(self, request_id: int, default: Any = None) -> Any:
        waiter = super().pop(request_id, default)
        if waiter is not None:
            self._observer(self._clock() - waiter.started_at)
        return waiter


def _no_work(number: int, data: bytes) -> int:
    return 0


@final
class _Crowd:
    """Entries that wait for the log, each under a number: identities take turns by bytes, and no flood delays others.

    Arguments:
        clock, weights: as in ``FairQueue``.

    Attributes:
        queue: the numbers.
        datas: the entries.
    """

    def __init__(self, clock: Callable[[], float] | None, weights: Weights) -> None:
        self.queue = FairQueue[int](clock, weights)
        self.datas: dict[int, bytes] = {}

    def add(self, identity: Identity, number: int, data: bytes) -> None:
        """Queue an entry behind the others of its identity."""
        self.datas[number] = data
        self.queue.add(identity, number)

    def put_back(self, identity: Identity, number: int, data: bytes) -> None:
        """Queue an entry before the others of its identity."""
        self.datas[number] = data
        self.queue.put_back(identity, number)

    def discard(self, identity: Identity, number: int) -> bytes:
        """Forget a waiting entry, and return it."""
        self.queue.discard(identity, number)
        return self.datas.pop(number)

    def take(
        self, bytes_max: int, is_late: Callable[[int], bool], work_bytes: Callable[[int, bytes], int] = _no_work
    ) -> tuple[list[tuple[int, bytes]], int]:
        """Take as many entries as fit in ``bytes_max``, but at least one, of identities in turn.

        Arguments:
            bytes_max: maximum total size.
            is_late: refuses an entry whose turn comes too late; returns whether it did.
            work_bytes: returns the bytes that an entry counts in addition to its size.

        Returns:
            the entries, and the size in bytes of the late ones.
        """
        queue, taken, left_bytes, dropped_bytes = self.queue, list[tuple[int, bytes]](), bytes_max, 0
        looks = EXPIRED_AT_ONCE
        while queue.length and looks:
            identity, number = queue.pop()
            data = self.datas.pop(number)
            size_bytes = len(data) + ENTRY_COST_BYTES
            if is_late(number):
                dropped_bytes += size_bytes
                looks -= 1
                continue
            cost = size_bytes + work_bytes(number, data)
            left_bytes -= cost
            if taken and left_bytes < 0:
                self.put_back(identity, number, data)
                break
            queue.charge(identity, cost)
            taken.append((number, data))
        return taken, dropped_bytes

    def clear(self) -> None:
        """Forget all entries."""
        self.queue.clear()
        self.datas.clear()


def too_late(what: str, identity: Identity, wait_s: float) -> errors.LimitedError:
    """Return the refusal of a request that would be served after its deadline: it was not begun.

    Arguments:
        what: the thing that waits before it.
        identity: identity of the request.
        wait_s: expected wait in seconds.
    """
    wait_ms = max(1, math.ceil(wait_s * 1000))
    return errors.LimitedError(f"the deadline is too near: {wait_ms} ms of {what} of {name_of(identity)} wait", wait_ms)


def cost_bytes(datas: list[bytes]) -> int:
    """Return the cost of waiting entries in bytes."""
    return sum(map(len, datas)) + len(datas) * ENTRY_COST_BYTES


@final
class Pace:
    """Limits how much this member puts into the log before the first of it is applied, because the log is not fair.

    Waiting proposals are taken from identities in turn, but a flood in the log delays everything after it. So the log
    gets only as much as is applied within a short time (``PACE_DELAY_S`` above the shortest time; large batches of a
    single identity are efficient and may take longer). The limit is small at first, doubles while it is used and
    applied in time, and halves when it is not, like TCP's congestion window.

    Under a flood the log is never empty, and no round shows the shortest time. So from time to time the log is emptied,
    and the next round is small (like BBR: Cardwell and others, 2016). An estimate that grew with the rounds would
    mistake the flood's own delay for the disk's: an ordinary put would wait 0.2 to 0.4 s.

    Attributes:
        first, newest: marks of the first and last proposal in this round (see ``Node``); 0: none.
        limit_bytes: size limit of a round.
        left_bytes: rest of this round; negative when more has passed.
        apply_s: shortest time until a proposal made now is applied; 0: unknown.
    """

    def __init__(self) -> None:
        self.first = self.newest = 0
        self.limit_bytes = self.left_bytes = PACE_MIN_BYTES
        self.apply_s = self._measured_s = 0.0
        self._measured_at = self._began = 0.0
        self._room_bytes = PACE_MIN_BYTES
        """Limit of this round: lower than ``limit_bytes`` while the shortest time is measured."""
        self._is_first = self._is_shared = False
        """Whether the log was empty when this round began; whether several identities take part in it."""
        self._light_until = 0.0
        self._passed: dict[Identity, int] = {}
        """Bytes of this round that passed although its limit was reached."""
        self._passed_bytes = 0

    def has_given_up(self, now: float) -> bool:
        """Return whether there is a round, and its proposals may be lost."""
        return self.first != 0 and now - self._began > PACE_GIVEN_UP_S

    def propose(self, mark: int, size_bytes: int, now: float, is_first: bool, is_shared: bool) -> None:
        """Record a proposal.

        Arguments:
            mark: mark of its last entry.
            size_bytes: its size (``cost_bytes``).
            is_first: whether nothing else was in the log.
            is_shared: whether several identities have proposals.
        """
        if not self.first:
            self.first, self._began, self._is_first, self._is_shared = mark, now, is_first, False
        self.newest = mark
        self._is_shared = self._is_shared or is_shared
        self.left_bytes -= size_bytes

    def end(self, now: float, *, is_lost: bool = False) -> None:
        """Record, at the time itself, that the first proposal of this round is applied, or is given up."""
        if is_lost:
            self.limit_bytes = max(PACE_MIN_BYTES, self.limit_bytes // 2)
        elif self._room_bytes:
            self._learn(now)
        if self._passed:
            self._light_until = now + PACE_LIGHT_S
        is_empty = not self._room_bytes
        is_due = self._is_shared and now - self._measured_at > max(PROBE_EVERY_S, PROBE_EVERY_ROUNDS * self.apply_s)
        self.first, self._room_bytes = 0, self.limit_bytes
        if is_empty:
            self._room_bytes = PROBE_BYTES
        elif is_due:
            self.first, self._began, self._room_bytes = self.newest, now, 0
        self.left_bytes = self._room_bytes
        self._passed.clear()
        self._passed_bytes = 0

    def _learn(self, now: float) -> None:
        delay_s, used_bytes = now - self._began, self._room_bytes - self.left_bytes
        if not self.apply_s or self._room_bytes == PROBE_BYTES or (self._is_first and used_bytes <= PROBE_BYTES):
            # The smaller of two, because a disk that was busy once is not slow.
            self.apply_s = min(delay_s, self._measured_s or delay_s)
            self._measured_s, self._measured_at = delay_s, now
        if self._room_bytes == PROBE_BYTES:
            return
        self.apply_s = min(delay_s, self.apply_s)
        shared_s = PACE_DELAY_LIGHT_S if now < self._light_until else PACE_DELAY_S
        target_s = self.apply_s + (shared_s if self._is_shared else PACE_DELAY_ALONE_S)
        if delay_s > target_s + self.apply_s:
            self.limit_bytes = max(PACE_MIN_BYTES, min(self.limit_bytes, used_bytes) // 2)
        elif used_bytes * 4 < self.limit_bytes:
            self.limit_bytes = max(PACE_MIN_BYTES, self.limit_bytes // 2)
        elif used_bytes >= self.limit_bytes and delay_s <= target_s:
            self.limit_bytes = min(PACE_MAX_BYTES, self.limit_bytes * 2)

    def lets_pass(self, waiting: FairQueue[int], identity: Identity, size_bytes: int) -> bool:
        """Return whether an entry need not wait for the next round, and count it.

        Its identity must have no other waiting entries, and must have used less than an equal part of this round.

        Arguments:
            waiting: queue for the next round.
            identity: identity of the entry.
            size_bytes: its size, with what it counts in addition.
        """
        passed_bytes = self._passed.get(identity, 0) + size_bytes
        parts = len(self._passed) + 1 + (identity not in self._passed)
        if waiting.has(identity) or passed_bytes * parts > self.limit_bytes:
            return False
        if self._passed_bytes + size_bytes > self.limit_bytes:
            return False
        self._passed[identity] = passed_bytes
        self._passed_bytes += size_bytes
        return True


def answer(waiter: Waiter, outcome: Outcome) -> None:
    """Answer a caller. The entry is applied in any case, so a failure to answer affects no other caller."""
    try:
        waiter.finish(outcome)
    except errors.InvariantError:
        raise
    except Exception:
        _log.exception("a request was applied, but its answer could not be delivered")


class Forwarded:
    """Proposals that followers forwarded to this leader, to be appended together with its own.

    An entry of an unknown kind stops a member, and again at each start. So proposals of unknown kinds are dropped here:
    one faulty member, or one flipped bit in its memory, must not stop all others through the log.

    Proposals that have waited here for as long as a member waits for the outcome are dropped too: their callers have
    already timed out.

    Arguments:
        clock: monotonic seconds.
        patience_s: time that members wait for the outcome of a proposal.
        weights: as in ``FairQueue``.
    """

    def __init__(self, clock: Callable[[], float], patience_s: float, weights: Weights = EQUAL) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._unsorted: list[tuple[int, bytes]] = []
        self._numbers = itertools.count(1)
        self._came: deque[tuple[float, int]] = deque()
        """Arrival times of proposals that are not late yet, and the last number of each message."""
        self._late = 0
        """Number up to which proposals are late."""
        self._crowd = _Crowd(None, weights)
        """The oldest proposals, while more wait than fit in one append, by user or member."""
        self.size_bytes = 0

    def add(self, datas: list[bytes]) -> int:
        """Keep proposals for the next turn; return the number of dropped ones, which get no response and time out."""
        if self.size_bytes > FORWARDED_BYTES_MAX:
            return len(datas)
        known = [(next(self._numbers), data) for data in datas if requests.is_known(data)]
        if known:
            self._look()
            self._came.append((self._clock(), known[-1][0]))
            self._unsorted += known
            self.size_bytes += _cost_bytes(known)
        if dropped := len(datas) - len(known):
            _log.warning(
                "dropped %d proposals of other members: their kind is unknown to this version of raftkv", dropped
            )
        return dropped

    def _look(self) -> None:
        oldest = self._clock() - self._patience_s
        while self._came and self._came[0][0] <= oldest:
            self._late = self._came.popleft()[1]

    def take(self, bytes_max: int, pace: Pace | None = None) -> list[tuple[int, bytes]]:
        """Take the oldest proposals; from users in turn, if more wait.

        Arguments:
            bytes_max: as many as fit, but at least one; with 0 only those that the pace lets pass.
            pace: the pace.

        Returns:
            each with its number; none if all examined ones are late.
        """
        self._look()
        if self.size_bytes <= bytes_max and not self._crowd.queue.length:
            taken, self._unsorted, self.size_bytes = self._unsorted, [], 0
            return taken if not taken or taken[0][0] > self._late else [one for one in taken if one[0] > self._late]
        first, self._unsorted = self._unsorted[:SORTED_AT_ONCE], self._unsorted[SORTED_AT_ONCE:]
        taken, dropped_bytes = list[tuple[int, bytes]](), 0
        for number, data in first:
            origin = _origin_of(data)
            if (
                pace is not None
                and not bytes_max
                and pace.lets_pass(self._crowd.queue, origin, len(data) + ENTRY_COST_BYTES)
            ):
                taken.append((number, data))
            else:
                self._crowd.add(origin, number, data)
        if bytes_max:
            taken, dropped_bytes = self._crowd.take(bytes_max, lambda number: number <= self._late)
        self.size_bytes -= _cost_bytes(taken) + dropped_bytes
        return taken

    def give_back(self, items: list[tuple[int, bytes]]) -> None:
        """Queue again, in front, proposals that the log refused."""
        self.size_bytes += _cost_bytes(items)
        if not self._crowd.queue.length:
            self._unsorted = items + self._unsorted
            return
        for number, data in reversed(items):
            self._crowd.put_back(_origin_of(data), number, data)

    def clear(self) -> int:
        """Drop all; return their number."""
        count, self._unsorted, self.size_bytes = len(self._unsorted) + len(self._crowd.datas), [], 0
        self._crowd.clear()
        return count


def _cost_bytes(items: list[tuple[int, bytes]]) -> int:
    return cost_bytes([data for _, data in items])


def _origin_of(data: bytes) -> Identity:
    """Return the user who caused an entry, if the entry names one; otherwise the member that proposed it."""
    if data[:1] == bytes((requests.IDENTIFIED,)):
        with contextlib.suppress(errors.MalformedEntryError):
            caller, _, _ = requests.decode_identified(data[requests.HEADER_SIZE_BYTES :])
            if caller.user:
                return caller.user
    return f"member {data[1:3].hex()}"


def request_ids(member_id: int, start: int) -> Iterator[int]:
    """Return unique ids that identify the waiter of a proposal or a read round.

        16 bits of the member id | 40 bits of the start | 8 bits, counting on into the others

    The first part makes ids unique among members, the second across restarts of one member: an entry proposed before a
    crash cannot be mistaken for one proposed after it.

    Arguments:
        member_id: id of this member.
        start: different at each start of the process; see ``new_start``.
    """
    prefix = (member_id & 0xFFFF) << 48
    first = (start & ((1 << START_BITS) - 1)) << 8
    return map(prefix.__or__, itertools.chain(range(first + 1, 1 << 48), itertools.count()))


def new_start() -> int:
    """Return a random number that distinguishes this start of the process from all others.

    etcd uses the time (pkg/idutil), which is the same at each start of a machine without a persistent clock.
    """
    return random.SystemRandom().getrandbits(START_BITS)
