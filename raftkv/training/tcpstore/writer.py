"""Writes that happen exactly once, whatever becomes of the member that was asked.

A write whose answer is lost may have happened or not, and may still be on its way. To ask the store whether a counter
was incremented is no answer: others increment it too. So each txn of a ``Writer`` also writes a key of the writer's
own, on the condition that nobody has since its last txn:

1. The txn is repeated as it is until an answer comes. Only one of its copies can find the writer's key untouched.
2. If a copy finds it touched, an earlier copy has done the work: the key holds the mark of that very txn.
3. If a copy finds that the txn's conditions do not hold, but another may still be under way, the key is touched before
   anything else is done: a late copy must not find conditions that have come true since.
4. A writer makes one txn at a time. One that is given up in the middle (a timeout, a cancelled task) is of no more
   use, and is not given back.

``Writers`` keeps those that are free: at most as many as there were writes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from raftkv import aio
from raftkv.client.kv.operations import Compare, Fence, Operation
from raftkv.client.rpc.retry import until_answered
from raftkv.errors import StatusError

T = TypeVar("T")

ATTEMPT_TIMEOUT_S: Final = 3.0
"""Time limit of one attempt: a member that is frozen is left after this."""
_PAUSE_MAX_S: Final = 0.25

OnTrouble = Callable[[StatusError | None], None]
"""Told of every attempt that failed, and with None of the success that follows."""


class Outcome(NamedTuple):
    """What became of a txn.

    Attributes:
        applied: its conditions held, and its operations happened.
        revision: at which they did.
        found: results of the operations for the other case.
    """

    applied: bool
    revision: int = 0
    found: Sequence[Any] = ()


async def persist(attempt: Callable[[], Awaitable[T]], on_trouble: OnTrouble | None = None) -> T:
    """Repeat what may be repeated until it works; bound it with ``asyncio.timeout``.

    Arguments:
        attempt: makes the call anew each time.
        on_trouble: as for ``until_answered``.

    Raises:
        StatusError: the cluster refused for a reason that does not pass.
    """
    return await until_answered(attempt, max_wait_s=_PAUSE_MAX_S, on_trouble=on_trouble)


class Writer:
    """Writes each value exactly once, however often it has to be sent.

    Arguments:
        kv: the keys of the store.
        key: this writer's own; nobody else writes it.
        fence: every write depends on this lock, term or world.
    """

    def __init__(self, kv: aio.Client, key: bytes, fence: Fence | None, on_trouble: OnTrouble | None) -> None:
        self.key = key
        self._kv = kv
        self._fence = fence
        self._on_trouble = on_trouble
        self._revision = 0
        self._marks = 0

    async def commit(
        self,
        conditions: Sequence[Compare],
        operations: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> Outcome:
        """Do the operations, once, if the conditions hold; else the others, which only read.

        Arguments:
            conditions: all must hold.
            operations: what to write.
            otherwise: reads.

        Raises:
            FenceLost: what the fence stands for is over; nothing was written.
            StatusError: the cluster refused; nothing was written.
        """
        mark = self._next_mark()
        inner = aio.txn().when(*conditions).then(aio.put(self.key, mark), *operations).otherwise(*otherwise)
        while True:
            outer, doubtful = await self._attempt_until_answered(inner)
            if outer.succeeded:
                result = self._outcome(outer)
                return result if result.applied or not doubtful else await self._settle(result, mark)
            if self._touched(outer.results[0]) == mark:
                return Outcome(True, self._revision)

    async def _settle(self, refused: Outcome, mark: bytes) -> Outcome:
        """Make sure that no copy of a txn whose conditions did not hold can happen any more; one may be under way."""
        touch = aio.txn().then(aio.put(self.key, self._next_mark()))
        outer, _ = await self._attempt_until_answered(touch)
        if outer.succeeded:
            self._revision = outer.revision
            return refused
        return Outcome(True, self._revision) if self._touched(outer.results[0]) == mark else refused

    def _next_mark(self) -> bytes:
        self._marks += 1
        return b"%d" % self._marks

    def _touched(self, item: aio.KeyValue | None) -> bytes:
        """Return the mark of the txn that wrote the key last; empty: the whole store was deleted since."""
        self._revision = 0 if item is None else item.mod_revision
        return b"" if item is None else item.value

    def _outcome(self, outer: aio.TxnResult) -> Outcome:
        applied: bool = outer.results[0].succeeded
        if applied:
            self._revision = outer.revision
        return Outcome(applied, outer.revision, outer.results[0].results)

    async def _attempt_until_answered(self, inner: aio.Txn) -> tuple[aio.TxnResult, bool]:
        unsure = False

        async def attempt() -> aio.TxnResult:
            nonlocal unsure
            untouched = aio.mod_revision(self.key) == self._revision
            outer = self._kv.txn(fence=self._fence).when(untouched).then(inner).otherwise(aio.get(self.key))
            try:
                return await outer.commit(timeout_s=ATTEMPT_TIMEOUT_S)
            except StatusError as error:
                unsure = unsure or not error.definite
                raise

        return await persist(attempt, self._on_trouble), unsure


class Writers:
    """The writers of one process that are free.

    Arguments:
        kv, fence, on_trouble: as for ``Writer``.
        prefix: of their keys.
    """

    def __init__(
        self, kv: aio.Client, prefix: bytes, fence: Fence | None = None, on_trouble: OnTrouble | None = None
    ) -> None:
        self._kv = kv
        self._prefix = prefix + secrets.token_hex(6).encode() + b"."
        self._fence = fence
        self._on_trouble = on_trouble
        self._free: list[Writer] = []
        self._made = 0

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[Writer]:
        """Lend a writer for one write or several, one after the other."""
        writer = self._free.pop() if self._free else self._make()
        yield writer
        self._free.append(writer)  # not after an exception: see the module

    async def forget(self) -> None:
        """Delete the keys of the writers; only when no write is under way. Does its best, and no more."""
        self._free.clear()
        with contextlib.suppress(StatusError, asyncio.CancelledError):
            await self._kv.delete(self._prefix, prefix=True, timeout_s=ATTEMPT_TIMEOUT_S)

    def _make(self) -> Writer:
        self._made += 1
        return Writer(self._kv, self._prefix + str(self._made).encode(), self._fence, self._on_trouble)
