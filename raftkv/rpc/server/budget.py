"""How many answer bytes wait for clients to read them, per connection and for the whole process.

An answer is counted when it is made, not when the client sends its next bytes. Each connection has an account
(``AnswerAccount``), and all connections of a process share one ``AnswerBudget``.

The cost of an answer:

- a unary answer: all of it, until its stream is closed: the engine keeps a message whole until its last byte has left;
- messages of streams: the unsent part, and up to ``SLICE_BYTES`` more for a stream with an unsent part;
- bytes held by the transport.

What happens when too much waits:

- above the limit of a connection, a call fails (CONNECTION_FULL), and a stream's ``send`` waits;
- above ``RELIEF_SHARE`` of the process's limit, connections that do not read are ended, those of the identities that
  hold most first (``rpc/shares``);
- at the process's limit, an identity that would hold less makes the largest connections of the greediest identity end,
  although they read. Otherwise calls fail and streams wait, except on connections that hold less than
  ``send_buffer_floor_bytes``, so clients that read their answers can continue.

The hot path costs one comparison and one dictionary entry: an account may use ``GRANT_BYTES`` before it has to ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from raftkv.rpc.http2 import SLICE_BYTES
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.shares import Identity, Uses, greedier, refusal, totals
from raftkv.rpc.status import Code, RpcError

GRANT_BYTES: Final = 64 * 1024
"""Bytes that a connection may queue without asking the process."""

RELIEF_SHARE: Final = 0.75
RELIEF_INTERVAL_S: Final = 0.02
"""Shortest time between two scans for connections that do not read: a scan takes 1 us per connection with answers."""

URGENT_SHARE: Final = 1 / 20
"""Fraction of the grace that is left if a call would fail otherwise."""

READING_BYTES: Final = 64 * 1024
READING_SHARE: Final = 64
"""A client reads if within the grace it took 64 KiB, or a 64th of what waits if that is more, or all that waits."""

STALL_CHECKS: Final = 8
"""Checks of a stream within its timeout."""

PROGRESS_BYTES: Final = 1024
"""A stream that lets less through between two checks makes no progress: a window of a few bytes is not reading."""

CONNECTION_FULL: Final = "too many response bytes are waiting for this connection"
NOT_READ: Final = b"responses_not_read"
"""Debug data of the GOAWAY that ends a connection whose client does not read."""

GREEDIEST: Final = b"others_need_the_room_of_responses"
"""Debug data of the GOAWAY that ends a connection whose client reads, but has more than its share."""

NOT_FINISHED: Final = b"unfinished_requests"
"""Debug data of the GOAWAY that ends the connection with most bytes of unfinished requests."""


class AnswerBudget:
    """The waiting answers of all connections of a process, and their limit.

    Arguments:
        limits: provides ``process_send_buffer_bytes``, ``send_buffer_floor_bytes`` and ``reading_grace_s``.
        uses: counts the use of the process by clients.

    Attributes:
        used_bytes: bytes that wait now, except up to ``GRANT_BYTES`` per connection that are not reported yet.
        ended_total: connections ended because they did not read, or held most.
        held_bytes: unfinished request messages of all connections.
    """

    def __init__(self, limits: ServerLimits | None = None, uses: Uses | None = None) -> None:
        limits = limits or ServerLimits()
        self.uses = Uses() if uses is None else uses
        self.limit_bytes = limits.process_send_buffer_bytes
        self.high_bytes = int(self.limit_bytes * RELIEF_SHARE)
        self.floor_bytes = limits.send_buffer_floor_bytes
        self.grace_s = limits.reading_grace_s
        self.used_bytes = 0
        self.ended_total = 0
        self.accounts: dict[AnswerAccount, None] = {}
        """Accounts of open connections, the oldest first: of equal ones the oldest ends."""
        self.held_bytes = 0
        self.held_limit_bytes = limits.process_assembly_bytes
        self._waiting: set[AnswerAccount] = set()
        self._relief_at_s = float("-inf")

    @property
    def short(self) -> bool:
        """True while so many bytes wait that streams should queue nothing more."""
        return self.used_bytes > self.high_bytes

    def wait(self, account: AnswerAccount) -> None:
        """Wake the connection of ``account`` when the shortage has ended."""
        self._waiting.add(account)

    def add(self, amount: int) -> None:
        """Add bytes of an account; negative: give them back."""
        self.used_bytes += amount
        if self._waiting and self.used_bytes <= self.high_bytes:
            waiting, self._waiting = self._waiting, set()
            for account in waiting:
                account.wake()

    def leave(self, account: AnswerAccount) -> None:
        """Remove the account of a closed connection."""
        self.accounts.pop(account, None)
        self._waiting.discard(account)

    def drop_greediest(self) -> None:
        """End the largest connection of the identity with most unfinished request bytes: there are too many."""
        sizes = [(account.held_size(), account) for account in self.accounts]
        held = totals([(account.identity, size) for size, account in sizes])
        greediest = max(sizes, key=lambda one: (held[one[1].identity], one[0]))[1]
        self.ended_total += 1
        greediest.end(NOT_FINISHED)

    def make_room(self, account: AnswerAccount, size: int) -> bool:
        """End connections of the greediest identity, although they read, until an answer of another identity fits.

        Arguments:
            account, size: account and size of the answer.
        """
        while self.used_bytes + size > self.limit_bytes:
            held = totals([(one.identity, one.reported) for one in self.accounts])
            greediest = greedier(held, account.identity, size)
            if greediest is None:
                return False
            theirs = [one for one in self.accounts if one.identity == greediest]
            self.ended_total += 1
            max(theirs, key=lambda one: one.reported).end(GREEDIEST)
        return True

    def owed_bytes(self, account: AnswerAccount) -> int:
        """Return the bytes that the greediest identity would give up for another: until both hold the same."""
        held = totals([(one.identity, one.reported) for one in self.accounts])
        greediest = greedier(held, account.identity, 0)
        return 0 if greediest is None else (held[greediest] - held.get(account.identity, 0)) // 2

    def relieve(self, now_s: float, urgent: bool = False) -> None:
        """End connections that do not read, until enough is free; identities that hold most come first.

        Arguments:
            now_s: seconds of the owner's clock.
            urgent: whether a call would fail otherwise: the grace is shorter then.
        """
        if now_s < self._relief_at_s:
            return
        self._relief_at_s = now_s + RELIEF_INTERVAL_S
        holders = [one for one in self.accounts if one.reported]
        for account in holders:
            account.settle(account.buffered_size(), relieve=False)
        since_s = now_s - self.grace_s * (URGENT_SHARE if urgent else 1)
        stalled = [one for one in holders if one.reported and one.last_read_s < since_s]
        held = totals([(one.identity, one.reported) for one in holders])
        for account in sorted(stalled, key=lambda one: (held[one.identity], one.reported), reverse=True):
            if self.used_bytes <= self.high_bytes:
                return
            self.ended_total += 1
            account.end(NOT_READ)


def _nothing() -> int:
    return 0


class AccountedConnection(Protocol):
    """The connection of an account."""

    def held_size(self) -> int:
        """Return the bytes of unfinished requests, and of large requests without an answer."""

    def queued_size(self) -> int:
        """Return the bytes of bodies that have not left."""

    def queued_by_streams(self) -> list[int]:
        """Return the waiting bytes of each streaming call that has any."""

    def give_up(self, reason: bytes) -> None:
        """Drop all waiting bytes, and end the connection with a GOAWAY that gives the reason."""

    def wake(self) -> None:
        """Ask the shell to send what may leave."""


class AnswerAccount:
    """The waiting answers of one connection.

    Attributes:
        room: bytes that may be queued without asking. May be negative: streams are asked to wait, never cut.
        allowance: value of ``room`` while nothing waits; the difference is what waits.
        answers: sizes of answers that have not left completely, by stream.
        reported: bytes known to the process budget.
        identity: identity whose share is used: the user of the last call, else the connection's identity.
        left_bytes: total bytes passed to the transport; the core counts them.
        buffered_size: returns the bytes held by the transport; set by the connection's shell.
    """

    __slots__ = (
        "_buffered",
        "_clock",
        "_connection",
        "_grant_bytes",
        "_limit_bytes",
        "_loose",
        "_mark",
        "_slack",
        "_stream_bytes",
        "allowance",
        "answers",
        "budget",
        "buffered_size",
        "identity",
        "left_bytes",
        "reported",
        "room",
    )

    def __init__(
        self,
        budget: AnswerBudget,
        limits: ServerLimits,
        clock: Callable[[], float],
        connection: AccountedConnection,
        identity: Identity,
    ) -> None:
        self.budget = budget
        self.identity: Identity = identity
        self.answers: dict[int, int] = {}
        self.reported = 0
        self.left_bytes = 0
        self.buffered_size: Callable[[], int] = _nothing
        self._limit_bytes = limits.connection_send_buffer_bytes
        self._grant_bytes = min(GRANT_BYTES, self._limit_bytes)
        self._stream_bytes = limits.stream_send_buffer_bytes
        self.allowance = self.room = self._grant_bytes
        self._loose = 0
        self._buffered = 0
        self._mark = (0, 0.0)
        self._clock = clock
        self._connection: AccountedConnection | None = connection
        budget.accounts[self] = None

    @property
    def total(self) -> int:
        """Bytes that wait for this connection."""
        return self.allowance - self.room

    @property
    def crowded(self) -> bool:
        """True while streams with queued bytes should queue no more."""
        return self.total > self._limit_bytes // 2 or (self.budget.short and self.total > self.budget.floor_bytes)

    def has_room(self, queued: int) -> bool:
        """Return whether a stream may send now. It may have to wait for its client, its connection or the process.

        Arguments:
            queued: waiting bytes of the stream.
        """
        if not self.crowded:
            return queued <= self._stream_bytes
        if self.budget.short:
            self.budget.wait(self)
            return False
        return queued == 0

    def room_bytes(self) -> int:
        """Return how large an answer may be now. Connections that do not read may be ended to make room."""
        budget = self.budget
        self._recount()
        if budget.used_bytes > budget.high_bytes:
            budget.relieve(self._clock())
        total = self.total
        shared = max(budget.limit_bytes - budget.used_bytes, budget.floor_bytes - total)
        if budget.short:
            shared = max(shared, budget.owed_bytes(self))
        return max(0, min(self._limit_bytes - total, shared))

    def ask(self, size: int) -> RpcError | None:
        """Make room for an answer larger than ``room``. Returns the error to answer with if there is none."""
        self._recount()
        if self.total + size > self._limit_bytes:
            return RpcError(Code.RESOURCE_EXHAUSTED, CONNECTION_FULL)
        budget = self.budget
        if budget.used_bytes + size > budget.high_bytes:
            budget.relieve(self._clock(), urgent=budget.used_bytes + size > budget.limit_bytes)
        if self.total + size > budget.floor_bytes and not budget.make_room(self, size):
            text = refusal(self.identity, f"{budget.limit_bytes} response bytes that may wait for all clients")
            return RpcError(Code.RESOURCE_EXHAUSTED, text)
        if self._connection is not None:
            self._allow(size)
        return None

    def _allow(self, size: int) -> None:
        """Report ``size`` bytes that are about to be queued, so that others see them counted."""
        total = self.total
        self.allowance = min(total + size + GRANT_BYTES, max(self._limit_bytes, total + size))
        self.room = self.allowance - total
        self._report(total + size)

    def queue(self, size: int) -> None:
        """Count bytes of a stream without checking the limit."""
        self._loose += size
        self.room -= size
        if self.room < 0 and self._connection is not None:
            self._allow(0)

    def closed(self, stream_id: int) -> None:
        """Remove the answer of a closed stream."""
        self.room += self.answers.pop(stream_id, 0)

    def leave(self, stream_id: int, queued: int) -> None:
        """Count the unsent ``queued`` bytes of a stream whose whole answer is queued."""
        moved = min(queued, self._loose)
        self._loose -= moved
        self.room -= queued - moved
        self.answers[stream_id] = self.answers.get(stream_id, 0) + queued

    def settle(self, buffered: int, relieve: bool = True) -> None:
        """Update the counts after a flush.

        Not needed while ``room == allowance`` and the transport holds nothing now and held nothing the last time.

        Arguments:
            buffered: bytes held by the transport.
            relieve: whether to end connections that do not read if too much waits.
        """
        if self._connection is None:
            return
        queued = self._connection.queued_size()
        if queued or buffered or self._buffered or self.answers or self.reported:
            self._settle(queued, buffered)
        else:  # all has left, and nothing is reported: as after nearly every flush of streams
            self._loose = 0
            self.allowance = self.room = self._grant_bytes
        if relieve and self.budget.short:
            self.budget.relieve(self._clock())

    def _settle(self, queued: int, buffered: int) -> None:
        self.room += self._buffered - buffered
        self._buffered = buffered
        if not queued:
            self.room += self._loose
            self._loose = 0
        elif self._loose > queued + SLICE_BYTES:
            # Rounded up by one slice here; a recount adds one slice per stream.
            self.room += self._loose - queued - SLICE_BYTES
            self._loose = queued + SLICE_BYTES
        self._report(self.total)

    def _recount(self) -> None:
        """Compute the exact unsent size of the messages of streams."""
        if self._connection is None:
            return
        loose = sum(size + SLICE_BYTES for size in self._connection.queued_by_streams())
        if loose < self._loose:
            self.room += self._loose - loose
            self._loose = loose
        self._report(self.total)

    def _report(self, total: int) -> None:
        before, self.reported = self.reported, total
        if total != before:
            self.budget.add(total - before)
        if total:
            taken = self.left_bytes - self._buffered - self._mark[0]
            if not before or taken >= min(total, max(READING_BYTES, total // READING_SHARE)):
                self._mark = (self.left_bytes - self._buffered, self._clock())
        else:
            self.allowance = self.room = self._grant_bytes

    @property
    def last_read_s(self) -> float:
        """When the client last took a fair part of what waits. Meaningless while nothing waits."""
        return self._mark[1]

    def wake(self) -> None:
        """Wake the connection: the process has room again."""
        if self._connection is not None:
            self._connection.wake()

    def held_size(self) -> int:
        """Return the bytes of the connection's unfinished requests, and of its large requests without an answer."""
        return 0 if self._connection is None else self._connection.held_size()

    def end(self, reason: bytes) -> None:
        """End the connection: others need its memory."""
        if self._connection is not None:
            self._connection.give_up(reason)
        self.close()

    def close(self) -> None:
        """Close the account: the connection is gone, and so are its waiting bytes."""
        if self._connection is not None:
            self._connection = None
            self.buffered_size = _nothing
            self.answers.clear()
            self._loose = self._buffered = 0
            self.budget.leave(self)
            before, self.reported = self.reported, 0
            self.allowance = self.room = GRANT_BYTES
            self.budget.add(-before)


class StallWatch:
    """Finds streams that make no progress. It is asked regularly, but only while bytes wait.

    Arguments:
        timeout_s: how long a stream may make no progress.
    """

    __slots__ = ("_seen", "_timeout_s", "interval_s")

    def __init__(self, timeout_s: float) -> None:
        self.interval_s = timeout_s / STALL_CHECKS
        self._timeout_s = timeout_s
        self._seen: dict[int, tuple[int, float]] = {}

    def expired(self, progress: dict[int, int], now_s: float) -> list[int]:
        """Return the streams that have made no progress for too long.

        Arguments:
            progress: for every stream with waiting bytes, a number that grows as they leave.
            now_s: time of the loop.
        """
        seen = self._seen
        self._seen = {}
        ended: list[int] = []
        for stream_id, sent in progress.items():
            before, since_s = seen.get(stream_id, (-PROGRESS_BYTES, now_s))
            if sent - before >= PROGRESS_BYTES:
                self._seen[stream_id] = (sent, now_s)
            elif now_s - since_s >= self._timeout_s:
                ended.append(stream_id)
            else:
                self._seen[stream_id] = (before, since_s)
        return ended
