"""Proposals on their way through the log, and who waits for each.

A proposal is *unsent* until the Raft core took it (there may be no leader for a while), then *sent* until its entry is
applied here. The caller's answer comes from the entry as this member applies it, wherever the leader is.

A waiter that gives up (client gone, time out) is forgotten. If its proposal was unsent it will never be proposed;
if it was sent, it may still commit, and its caller is not told.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, Final, final

from mypy_extensions import mypyc_attr

from raftkv import errors
from raftkv.apply import request as requests
from raftkv.apply.applier import Outcome
from raftkv.loop.fair import MEMBER, FairQueue
from raftkv.raft.errors import ProposalDropped
from raftkv.rpc.shares import Identity, Shares, queue_of, refusal

_log = logging.getLogger(__name__)

EXPIRED_AT_ONCE: Final = 2000
"""Proposals that are given up in one turn of the loop, 18 ms: each has its call answered."""

PENDING_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of proposals of one identity that may wait at a time; all identities together have a seventh more."""

PROPOSAL_BYTES: Final = PENDING_BYTES_MAX // 20_000
"""What each counts besides its own bytes: 20,000 small ones may wait."""

FORWARDED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Requests that a leader keeps for its followers while its log takes no more; what comes beyond that is dropped."""


SORTED_AT_ONCE: Final = 16_000
"""Proposals that are moved to the queues of their identities in one go, while more wait than one append takes: 10 ms.

Many more than one append takes, if they are small: else the order would stay that of arrival."""

ENTRY_COST_BYTES: Final = 1024
"""What an entry counts besides its own bytes while it waits: to append, send and apply it takes as long."""

PACE_MIN_BYTES: Final = 256 * 1024
PACE_MAX_BYTES: Final = 8 * 1024 * 1024
PACE_DELAY_S: Final = 0.03
PACE_GIVEN_UP_S: Final = 1.0
"""How long a round may take: what was proposed may be lost."""
SHORTEST_GROWTH: Final = 1.05

START_BITS: Final = 40


@mypyc_attr(allow_interpreted_subclasses=True)
class Waiter:
    """The callback form of waiting for a proposal: for requests that cannot afford a task each (``waits``).

    Attributes:
        request: the parsed request, so that applying need not parse it again.
        started_at: loop time of the proposal.
        held_by, held_bytes: in whose share it falls, and what it counts.
    """

    __slots__ = ("held_by", "held_bytes", "request", "started_at")

    request: Any
    started_at: float
    held_by: Identity
    held_bytes: int

    @property
    def identity(self) -> Identity:
        """In whose share it falls; here: the member's own."""
        return MEMBER

    def has_room(self, size_bytes: int) -> bool:
        """Take note that a long answer takes so many bytes more while it is put together; False: leave it out."""
        return True

    def finish(self, outcome: Outcome) -> None:
        """Take the outcome: the entry was applied."""
        raise NotImplementedError

    def fail(self, error: errors.StatusError) -> None:
        """Take the reason why no outcome will come."""
        raise NotImplementedError


class Proposals:
    """Queues the proposals of a member, and knows who waits for each.

    Arguments:
        ids: fresh request ids.
        timeout_s: longest wait of a caller.
    """

    def __init__(self, ids: Iterator[int], timeout_s: float) -> None:
        self._ids = ids
        self._timeout_s = timeout_s
        # In order of proposal, hence of deadline.
        self._waiters: dict[int, Waiter] = {}
        self._unsent: list[tuple[int, bytes]] = []
        self._crowd = FairQueue[_Item]()
        """While more waits than one append takes: what was unsent first, so that identities take turns by bytes."""
        self.unsent_bytes = 0
        """What waits to be proposed."""
        self.shares = Shares(PENDING_BYTES_MAX)
        self.failed = 0

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
        """
        request_id = self.expect(waiter, now, len(body))
        self._unsent.append((request_id, requests.encode(kind, request_id, body)))
        self.unsent_bytes += len(self._unsent[-1][1]) + ENTRY_COST_BYTES
        return request_id

    def add_ahead(
        self, kind: int, body: bytes, waiter: Waiter, now: float, propose: Callable[[list[bytes]], None]
    ) -> None:
        """Propose something at once, before all that is unsent.

        Arguments:
            kind, body, waiter, now: as of ``add``.
            propose: takes it, or raises ``ProposalDropped``.

        Raises:
            TooManyRequestsError: it was not taken, or too many wait already.
        """
        request_id = self.expect(waiter, now, len(body))
        try:
            propose([requests.encode(kind, request_id, body)])
        except ProposalDropped:
            self.pop(request_id)
            raise errors.TooManyRequestsError from None

    def expect(self, waiter: Waiter, now: float, size_bytes: int = 0) -> int:
        """Note who waits for an entry that another part proposes.

        Arguments:
            waiter: gets the outcome.
            now: loop time.
            size_bytes: of the entry, as far as it waits here.

        Returns:
            A fresh request id.

        Raises:
            ShareError: too many wait already.
        """
        identity = waiter.identity
        if not self.shares.has_room(identity, PROPOSAL_BYTES):
            what = f"{self.shares.limit >> 20} MiB of proposals ({PROPOSAL_BYTES} bytes and its own each) that may wait"
            raise errors.ShareError(refusal(identity, what))
        waiter.held_by, waiter.held_bytes = identity, PROPOSAL_BYTES + size_bytes
        self.shares.take(identity, waiter.held_bytes)
        request_id = next(self._ids)
        waiter.started_at = now
        self._waiters[request_id] = waiter
        return request_id

    def is_waiting(self, request_id: int) -> bool:
        """Return whether a caller still waits for a request id."""
        return request_id in self._waiters

    def take_unsent(self, bytes_max: int = PENDING_BYTES_MAX) -> list[tuple[int, bytes]]:
        """Take the oldest unsent proposals whose callers still wait; they count as sent unless given back.

        Arguments:
            bytes_max: as many as fit, but at least one.
        """
        unsent = self._unsent
        if self.unsent_bytes <= bytes_max and not self._crowd.length:
            self._unsent, self.unsent_bytes = [], 0
            return [item for item in unsent if item[0] in self._waiters]
        return self._take_in_turns(bytes_max)

    def _take_in_turns(self, bytes_max: int) -> list[tuple[int, bytes]]:
        """Take what fits, of all identities that wait in turn: the flood of one holds up no other."""
        crowd, waiters = self._crowd, self._waiters
        first, self._unsent = self._unsent[:SORTED_AT_ONCE], self._unsent[SORTED_AT_ONCE:]
        identity: Identity = ""
        queue = queue_of(identity)
        for request_id, data in first:
            waiter = waiters.get(request_id)
            if waiter is None:
                self.unsent_bytes -= len(data) + ENTRY_COST_BYTES
                continue
            if waiter.held_by != identity:
                identity = waiter.held_by
                queue = queue_of(identity)
            crowd.add(queue, _Item(request_id, data))
        taken = _take_fitting(crowd, bytes_max)
        self.unsent_bytes -= cost_bytes([item.data for item in taken])
        return [(item.number, item.data) for item in taken if item.number in waiters]

    def give_back(self, unsent: list[tuple[int, bytes]]) -> None:
        """Queue again, in front, what the core did not take: there is no leader, or its limit is reached."""
        self.unsent_bytes += cost_bytes([data for _, data in unsent])
        if not self._crowd.length:
            self._unsent = unsent + self._unsent
            return
        for request_id, data in reversed(unsent):
            waiter = self._waiters.get(request_id)
            if waiter is None:
                self.unsent_bytes -= len(data) + ENTRY_COST_BYTES
            else:
                self._crowd.put_back(queue_of(waiter.held_by), _Item(request_id, data))

    def pop(self, request_id: int) -> Waiter | None:
        """Return who waits for this id, if anybody here, and forget it."""
        waiter = self._waiters.pop(request_id, None)
        if waiter is not None:
            self.shares.give_back(waiter.held_by, waiter.held_bytes)
        return waiter

    def observe(self, observer: Callable[[float], None] | None, clock: Callable[[], float]) -> None:
        """Have the time of each proposal measured, from its arrival to its outcome; None: no more, at no cost.

        Arguments:
            observer: called with seconds.
            clock: loop time, as ``add`` is given it.
        """
        self._waiters = dict(self._waiters) if observer is None else _Timed(self._waiters, observer, clock)

    def take_expired(self, now: float) -> list[tuple[Waiter, bool]]:
        """Return waiters whose time is up at ``now`` (loop time), each with whether its proposal was sent; of very many
        some, so that the next tick has the next.
        """
        oldest = now - self._timeout_s
        late: list[int] = []
        for request_id, waiter in self._waiters.items():
            if waiter.started_at > oldest or len(late) == EXPIRED_AT_ONCE:
                break
            late.append(request_id)
        if not late:
            return []
        unsent = {request_id for request_id, _ in self._unsent} | {item.number for item in self._crowd}
        expired: list[tuple[Waiter, bool]] = []
        for request_id in late:
            waiter = self._waiters[request_id]
            expired.append((waiter, request_id not in unsent))
            del self._waiters[request_id]
            self.shares.give_back(waiter.held_by, waiter.held_bytes)
        self.failed += len(expired)
        return expired

    def close(self) -> None:
        """Fail everything: the member stops."""
        waiters = list(self._waiters.values())
        self._waiters.clear()
        self._unsent, self.unsent_bytes = [], 0
        self._crowd.clear()
        for waiter in waiters:
            self.shares.give_back(waiter.held_by, waiter.held_bytes)
            waiter.fail(errors.StoppedError())


class _Timed(dict[int, Waiter]):
    """Waiters of which each is measured when it is taken out."""

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


class _Item:
    """A proposal that waits in a queue. It is found there by what it is: to hash all bytes would take a long turn.

    Attributes:
        number: its request id; of what was forwarded, any number.
        data: the entry.
    """

    __slots__ = ("data", "number")

    def __init__(self, number: int, data: bytes) -> None:
        self.number = number
        self.data = data


def _take_fitting(crowd: FairQueue[_Item], bytes_max: int) -> list[_Item]:
    """Take what fits into so many bytes, but at least one, of identities in turn: no flood holds up others."""
    taken: list[_Item] = []
    left_bytes = bytes_max
    while len(crowd):
        queue, item = crowd.pop()
        left_bytes -= len(item.data) + ENTRY_COST_BYTES
        if taken and left_bytes < 0:
            crowd.put_back(queue, item)
            break
        crowd.charge(queue, len(item.data) + ENTRY_COST_BYTES)
        taken.append(item)
    return taken


def cost_bytes(datas: list[bytes]) -> int:
    """Return what entries count while they wait."""
    return sum(map(len, datas)) + len(datas) * ENTRY_COST_BYTES


@final
class Pace:
    """How much this member puts into the log before the first of it is applied: what is there is served in order.

    While proposals wait here, identities take turns. In the log, a flood is ahead of all that comes after it. So no
    more goes there than is applied in a moment (``PACE_DELAY_S`` above the shortest that was seen of late): little at
    first, twice as much while it is used and applied in time, half as much when it is not, as TCP feels its way.

    Attributes:
        mark: what was proposed first in this round (see ``Node``); 0: nothing is under way.
        limit_bytes: of a round.
        left_bytes: of this round.
    """

    def __init__(self) -> None:
        self.mark = 0
        self.began = 0.0
        self.limit_bytes = self.left_bytes = PACE_MIN_BYTES
        self._shortest_s = math.inf

    def begin(self, mark: int, now: float) -> None:
        """Begin a round: something is proposed while nothing was under way."""
        self.mark, self.began, self.left_bytes = mark, now, self.limit_bytes

    def end(self, now: float) -> None:
        """What was proposed first is applied."""
        delay_s, used_bytes = now - self.began, self.limit_bytes - self.left_bytes
        self._shortest_s = min(delay_s, self._shortest_s * SHORTEST_GROWTH)
        if delay_s > 2 * self._shortest_s + PACE_DELAY_S:
            self.limit_bytes = max(PACE_MIN_BYTES, min(self.limit_bytes, used_bytes) // 2)
        elif used_bytes * 4 < self.limit_bytes:
            self.limit_bytes = max(PACE_MIN_BYTES, self.limit_bytes // 2)
        elif used_bytes >= self.limit_bytes and delay_s <= self._shortest_s + PACE_DELAY_S:
            self.limit_bytes = min(PACE_MAX_BYTES, self.limit_bytes * 2)
        self.mark, self.left_bytes = 0, self.limit_bytes


def answer(waiter: Waiter, outcome: Outcome) -> None:
    """Answer a caller. The entry is applied in any case, so a failure to answer harms no other caller."""
    try:
        waiter.finish(outcome)
    except errors.InvariantError:
        raise
    except Exception:
        _log.exception("could not answer a request that was applied")


class Forwarded:
    """Proposals that followers passed on to this leader, to be appended together with its own.

    An entry of a kind that a member does not know stops it, and again at each start. So proposals of unknown kinds are
    dropped here: one faulty member, or one flipped bit in its memory, must not stop all others through the log.
    """

    def __init__(self) -> None:
        self._datas: list[bytes] = []
        self._crowd = FairQueue[_Item]()
        """While more waits than one append takes: what came first, by user or member."""
        self.size_bytes = 0

    def add(self, datas: list[bytes]) -> int:
        """Keep proposals for the next turn; how many were dropped: those get no answer, and time out."""
        if self.size_bytes > FORWARDED_BYTES_MAX:
            return len(datas)
        known = [data for data in datas if requests.is_known(data)]
        self._datas += known
        self.size_bytes += cost_bytes(known)
        if dropped := len(datas) - len(known):
            _log.warning("dropped %d proposals of other members, of a kind that this version does not know", dropped)
        return dropped

    def take(self, bytes_max: int) -> list[bytes]:
        """Take the oldest, as many as fit into ``bytes_max``, but at least one; of users in turn, if more wait."""
        if self.size_bytes <= bytes_max and not self._crowd.length:
            taken, self._datas, self.size_bytes = self._datas, [], 0
            return taken
        first, self._datas = self._datas[:SORTED_AT_ONCE], self._datas[SORTED_AT_ONCE:]
        for data in first:
            self._crowd.add(_origin_of(data), _Item(0, data))
        taken = [item.data for item in _take_fitting(self._crowd, bytes_max)]
        self.size_bytes -= cost_bytes(taken)
        return taken

    def give_back(self, datas: list[bytes]) -> None:
        """Keep again, in front, what the log did not take."""
        self.size_bytes += cost_bytes(datas)
        if not self._crowd.length:
            self._datas = datas + self._datas
            return
        for data in reversed(datas):
            self._crowd.put_back(_origin_of(data), _Item(0, data))

    def clear(self) -> int:
        """Drop all; how many."""
        count, self._datas, self.size_bytes = len(self._datas) + len(self._crowd), [], 0
        self._crowd.clear()
        return count


def _origin_of(data: bytes) -> Identity:
    """Return the user who caused an entry, as far as it says; else the member that proposed it."""
    if data[:1] == bytes((requests.IDENTIFIED,)):
        with contextlib.suppress(errors.MalformedEntryError):
            caller, _, _ = requests.decode_identified(data[requests.HEADER_SIZE_BYTES :])
            if caller.user:
                return caller.user
    return f"member {data[1:3].hex()}"


def request_ids(member_id: int, start: int) -> Iterator[int]:
    """An endless supply of ids that pair a proposal or a read round with its waiter.

        16 bits of the member id | 40 bits of the start | 8 bits, counting on into the others

    Unique among members by the first part and across restarts of one member by the second: an entry proposed before a
    crash cannot be taken for one proposed after it.

    Arguments:
        member_id: of this member.
        start: another one at each start of the process; see ``new_start``.
    """
    prefix = (member_id & 0xFFFF) << 48
    first = (start & ((1 << START_BITS) - 1)) << 8
    for number in itertools.count(first + 1):
        yield prefix | (number & ((1 << 48) - 1))


def new_start() -> int:
    """Draw what distinguishes this start of the process from all others.

    etcd takes the time (pkg/idutil), which is the same at each start of a machine whose clock nothing keeps.
    """
    return random.SystemRandom().getrandbits(START_BITS)
