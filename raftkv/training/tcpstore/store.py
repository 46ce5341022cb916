"""TCPStore's operations on raftkv's keys, used by the gateway and by ``raftkv.torch.Store``.

Below the prefix of a store:

    k/<key>                  a value, as it is
    q/<size>:<key>/<id>      an item of a queue; the oldest by create revision comes first
    t/<size>:<key>/<id>      the right to wake one waiter for that item
    w/<id>                   a writer (see ``Writer``)

Reads are linearizable. Writes happen exactly once. A wait reads once, at some revision, and watches absent keys from
the next revision on, so nothing is polled and no event is missed. While raftkv does not answer, calls are repeated;
callers limit them with ``asyncio.timeout``.

The behaviour with values that are not numbers, absent keys, empty expected values and so on is that of torch 2.13's own
server (the libuv one); ``tests/training/tcpstore/test_conformance.py`` compares them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from raftkv import aio
from raftkv.client.control import ClientControl, Control, Interval, OnChanges, Reflector, below
from raftkv.client.operations import Compare, Fence, Operation
from raftkv.client.rpc.retry import Backoff, until_answered
from raftkv.client.values import Event
from raftkv.errors import RaftKVError, StatusError
from raftkv.loop.outcomes import done_before

# -- wait -----------------------------------------------------------------------------------------------------------
#
# Waiting for keys of a store, by reflectors that begin at the revision at which a key was absent.
#
# A wait for a key ends with a value, or with an item of the queue of that name. A value wakes all waiters of its key.
# An item wakes only one, as in torch's server, so that no consumer wakes for an item that another has taken: each item
# comes with a token, and the waiter that deletes the token wakes. Tokens older than the wait belong to no waiter and
# are ignored; popping an item deletes its token.

TakeToken = Callable[[bytes, int], Awaitable[bool]]
"""Takes a token (its key, its revision); returns whether this waiter got it and wakes."""


def queue_prefix(kind: bytes, key: bytes) -> bytes:
    """Return the prefix of a queue's items (``q/``) or tokens (``t/``); its length keeps ``a`` and ``a/b`` apart.

    Arguments:
        kind: ``q/`` or ``t/``.
        key: key of the queue.
    """
    return b"%s%d:%s/" % (kind, len(key), key)


TOKENS_MAX: Final = 1024
"""Maximum tokens stored for one wait; with more items in its queue, a waiter wakes without a token."""


async def first_value(
    control: Control, key: bytes, revision: int, accept: Callable[[bytes], bool] = lambda _: True
) -> bytes:
    """Wait for the first value that is written after a revision, among those accepted.

    Arguments:
        control: the keys of the store.
        key: key of the value.
        revision: revision at which no such value existed.
        accept: returns whether a value is accepted.

    Raises:
        WatchCanceled: the client was closed, or a member refused for good.
    """
    found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_changes(changes: Sequence[Event]) -> None:
        for event in changes:
            if not found.done() and accept(event.value):
                found.set_result(event.value)

    reflector = _puts(control, (b"k/" + key, b""), revision, on_changes, found)
    try:
        return await found
    finally:
        reflector.close()


class Wait:
    """A wait for one key that was absent at a revision; it begins at once, and ends with the ``with`` block.

    Arguments:
        control: the keys of the store.
        key: key.
        revision: revision at which the key was absent.
        take_token: None: there are no queues.
    """

    def __init__(self, control: Control, key: bytes, revision: int, take_token: TakeToken | None) -> None:
        self._take_token = take_token
        self._there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tokens: asyncio.Queue[tuple[bytes, int]] = asyncio.Queue()
        self._reflectors = [_puts(control, (b"k/" + key, b""), revision, self._on_values, self._there)]
        if take_token is not None:
            tokens = below(queue_prefix(b"t/", key))
            self._reflectors.append(_puts(control, tokens, revision, self._on_tokens, self._there))

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *_: object) -> None:
        for reflector in self._reflectors:
            reflector.close()

    def _on_values(self, changes: Sequence[Event]) -> None:
        if changes and not self._there.done():
            self._there.set_result(None)

    def _on_tokens(self, changes: Sequence[Event]) -> None:
        for event in changes:
            if self._tokens.qsize() < TOKENS_MAX:
                self._tokens.put_nowait((event.key, event.revision))
            elif not self._there.done():
                self._there.set_result(None)

    async def finished(self) -> None:
        """Return when the key has a value, or an item for this waiter.

        Raises:
            WatchCanceled: the client was closed, or a member refused for good.
        """
        if self._take_token is None:
            await self._there
            return
        woken = await done_before(self._woken(self._take_token), self._there)
        for waiting in (self._there, woken):
            if waiting is not None and waiting.done():
                waiting.result()

    async def _woken(self, take_token: TakeToken) -> None:
        while not await take_token(*await self._tokens.get()):
            continue


def _puts(
    control: Control, interval: Interval, revision: int, on_changes: OnChanges, waiting: asyncio.Future[Any]
) -> Reflector:
    """Follow puts to an interval after a revision; a refusal ends the wait."""

    def on_refused(error: Exception) -> None:
        if not waiting.done():
            waiting.set_exception(error)
            waiting.exception()  # seen: the waiter may have given up

    reflector = Reflector(control, interval, on_changes, deletes=False, on_refused=on_refused)
    reflector.start(revision=revision)
    return reflector


# -- key_queue ------------------------------------------------------------------------------------------------------
#
# The order of changes to one value, in this process: a queue for each key, and the last seen value.
#
# Many connections of one gateway add to the same counter. If all tried at once, all but one would fail each time. In a
# queue each call starts with the value that the previous one has written, and usually succeeds at once. The seen value
# is only a guess, because other processes write too.

REMEMBERED_MAX: Final = 256
REMEMBERED_BYTES_MAX: Final = 64 * 1024
"""Maximum size of a remembered value; a larger one is read again."""


class Seen(NamedTuple):
    """A value (None: absent) and the revision that wrote it (0: absent)."""

    value: bytes | None
    revision: int

    @classmethod
    def of(cls, item: aio.KeyValue | None) -> Seen:
        """Make it from the result of a read."""
        return ABSENT if item is None else cls(item.value, item.mod_revision)


ABSENT: Final = Seen(None, 0)


@dataclass
class KeyQueue:
    """The queue of one key.

    Attributes:
        seen: last state seen; None: unknown.
        users: number of calls that hold or wait for the lock.
    """

    seen: Seen | None = None
    users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class KeyQueues:
    """The queues of one store; only ``REMEMBERED_MAX`` are kept without waiters."""

    def __init__(self) -> None:
        self._queues: OrderedDict[bytes, KeyQueue] = OrderedDict()

    @contextlib.asynccontextmanager
    async def at(self, key: bytes) -> AsyncIterator[KeyQueue]:
        """Wait in the queue of a key until it is this caller's turn."""
        queue = self._queues.setdefault(key, KeyQueue())
        self._queues.move_to_end(key)
        queue.users += 1
        try:
            async with queue.lock:
                yield queue
        finally:
            queue.users -= 1
            self._tidy(queue)

    def _tidy(self, queue: KeyQueue) -> None:
        if queue.seen is not None and queue.seen.value is not None and len(queue.seen.value) > REMEMBERED_BYTES_MAX:
            queue.seen = None
        while len(self._queues) > REMEMBERED_MAX:
            oldest = next(iter(self._queues))
            if self._queues[oldest].users:
                return
            del self._queues[oldest]


# -- writer ---------------------------------------------------------------------------------------------------------
#
# Writes that happen exactly once, even if the member that was asked fails.
#
# A write whose answer is lost may have happened or not, or may still be in transit. Reading the counter does not tell
# whether it was incremented, because others increment it too. So each txn of a ``Writer`` also writes a key of this
# writer, on the condition that the key is unchanged since its last txn:
#
# 1. The txn is repeated unchanged until an answer comes. Only one of its copies can find the writer's key unchanged.
# 2. If a copy finds the key changed, an earlier copy has done the work: the key holds the mark of that txn.
# 3. If a copy finds that the txn's conditions do not hold, but another copy may still be in transit, the key is changed
#    first, so that a late copy cannot succeed if the conditions hold later.
# 4. A writer makes one txn at a time. A writer whose txn was abandoned (a timeout, a cancelled task) is not reused.
#
# ``Writers`` keeps the free writers: at most as many as there were concurrent writes.

T = TypeVar("T")

ATTEMPT_TIMEOUT_S: Final = 3.0
"""Time limit of one attempt, after which the call moves on from a frozen member."""
_PAUSE_MAX_S: Final = 0.25

OnTrouble = Callable[[StatusError | None], None]
"""Called with the error of every failed attempt, and with None after the next success."""


class Outcome(NamedTuple):
    """The outcome of a txn.

    Attributes:
        applied: whether its conditions held and its operations were made.
        revision: revision at which they did.
        found: results of the operations for the other case.
    """

    applied: bool
    revision: int = 0
    found: Sequence[Any] = ()


async def persist(attempt: Callable[[], Awaitable[T]], on_trouble: OnTrouble | None = None) -> T:
    """Repeat a call after temporary errors until it succeeds; limit it with ``asyncio.timeout``.

    Arguments:
        attempt: makes a new call each time.
        on_trouble: as for ``until_answered``.

    Raises:
        StatusError: the cluster refused for a reason that does not pass.
    """
    return await until_answered(attempt, max_wait_s=_PAUSE_MAX_S, on_trouble=on_trouble)


class Writer:
    """Writes each value exactly once, however often it has to be sent.

    Arguments:
        kv: the keys of the store.
        key: this writer's own; no other writes it.
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
        self, conditions: Sequence[Compare], operations: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> Outcome:
        """Make the operations exactly once if the conditions hold; else the reads in ``otherwise``.

        Arguments:
            conditions: conditions, all of which must hold.
            operations: writes to make.
            otherwise: reads.

        Raises:
            FenceLost: the lock, term or world of the fence has ended; nothing was written.
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
        """Make sure that no copy of a refused txn that is still in transit can succeed later."""
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
    """The free writers of one process.

    Arguments:
        kv, fence, on_trouble: as for ``Writer``.
        prefix: prefix of their keys.
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
        """Try to delete the keys of the writers; call this only when no write is running."""
        self._free.clear()
        with contextlib.suppress(StatusError, asyncio.CancelledError):
            await self._kv.delete(self._prefix, prefix=True, timeout_s=ATTEMPT_TIMEOUT_S)

    def _make(self) -> Writer:
        self._made += 1
        return Writer(self._kv, self._prefix + str(self._made).encode(), self._fence, self._on_trouble)


OPERATIONS_MAX: Final = 100
"""Maximum operations of one txn: members allow 128, including that on the writer's key."""
BATCH_BYTES_MAX: Final = 1024 * 1024
"""Maximum bytes of one txn; members allow 1.5 MiB."""
FIRST_READ_KEYS: Final = 8
"""Keys in the first txn of a large read; its answer shows how large the values are."""
WATCHED_KEYS_MAX: Final = 100
"""Keys that one wait watches at once; the next keys are then watched from the same revision on."""
KEYS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum bytes of a list of all keys."""
_CONFLICT_PAUSE_S: Final = 0.002
_CONFLICT_PAUSE_MAX_S: Final = 0.05
"""With 32 processes that add to one number, an addition takes 6 calls; with 0.25 s it takes 5, but three times as
long."""
_NUMBER: Final = re.compile(rb"[ \t\n\v\f\r]*([+-]?)0*([0-9]{1,20})(?![0-9])")
"""Matches at most as many digits as fit into 64 bits, because Python does not parse thousands of digits."""
_INT64: Final = 1 << 64

DELETE: Final = object()
"""Result of a change: delete the value."""
KEEP: Final = object()
"""Result of a change: keep the value."""
Change = Callable[[bytes | None], tuple[Any, Any]]
"""Maps a value (None: absent) to its new value (bytes, ``DELETE`` or ``KEEP``) and the answer for the caller."""


class NotANumber(RaftKVError):
    """ADD or BARRIER on a value that is not a 64-bit decimal number."""

    def __init__(self, key: bytes, value: bytes) -> None:
        shown = value[:40]
        super().__init__(f"the value of {key!r} is not a number: {shown!r}")


class TooManyKeys(RaftKVError):
    """The keys of the store are more than a list can hold."""

    def __init__(self, count: int) -> None:
        super().__init__(f"the store has {count} keys: a list holds {KEYS_BYTES_MAX} bytes of keys")


def parse_number(key: bytes, value: bytes) -> int:
    """Parse the number at the beginning of a value, as C reads it.

    Arguments:
        key: key, for the error.
        value: value of the key.

    Raises:
        NotANumber: there is none, or it does not fit.
    """
    found = _NUMBER.match(value)
    number = int(found[1] + found[2]) if found else _INT64
    if not -(1 << 63) <= number < 1 << 63:
        raise NotANumber(key, value)
    return number


def wrap(number: int) -> int:
    """Wrap a sum to 64 bits."""
    return (number + (1 << 63)) % _INT64 - (1 << 63)


class ReplicatedStore:
    """One store; belongs to the event loop of its client.

    Arguments:
        kv: the client.
        prefix: prefix of all keys of the store; ends with a slash.
        fence: every write depends on this lock, term or world.
        on_trouble: called for failed attempts, which are repeated.
        queues: whether there are queues, so that waits must look for their items too.
    """

    def __init__(
        self,
        kv: aio.Client,
        prefix: str | bytes,
        *,
        fence: Fence | None = None,
        on_trouble: OnTrouble | None = None,
        queues: bool = True,
    ) -> None:
        self._kv = kv.view(prefix)
        self._control = ClientControl(self._kv)
        self._writers = Writers(self._kv, b"w/", fence, on_trouble)
        self._on_trouble = on_trouble
        self._queues = queues
        self._changes = KeyQueues()

    async def close(self) -> None:
        """Delete the keys of this process' writers; the values stay. Call this only when no call is running."""
        await self._writers.forget()

    # ---- values

    async def get(self, key: bytes) -> bytes | None:
        """Read a value; None: absent."""
        return (await self._see(key)).value

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Read values, in the order of the keys."""
        return [value async for values in self.values(keys) for value in values]

    async def values(self, keys: Sequence[bytes]) -> AsyncGenerator[list[bytes | None], None]:
        """Read values, in the order of the keys: about ``BATCH_BYTES_MAX`` at a time, however large they are."""
        start, count = 0, FIRST_READ_KEYS
        while start < len(keys):
            some = _with_distinct(keys, start, count)
            start += len(some)
            distinct = list(dict.fromkeys(some))
            result = await self._read([aio.get(b"k/" + key) for key in distinct])
            found = {
                key: None if item is None else item.value for key, item in zip(distinct, result.results, strict=True)
            }
            yield [found[key] for key in some]
            mean_bytes = sum(len(value or b"") for value in found.values()) // len(found) + 1
            count = max(1, min(OPERATIONS_MAX, BATCH_BYTES_MAX // mean_bytes))

    async def set_many(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Write values in order; as many as fit into one txn are written together."""
        async with self._writers.one() as writer:
            for batch in _batches(pairs):
                await writer.commit((), [aio.put(b"k/" + key, value) for key, value in batch.items()])

    async def change(self, key: bytes, change: Change, *, likely_absent: bool = False) -> Any:
        """Change a value atomically: read, decide and write, with no other write in between.

        Arguments:
            key: key of the value.
            change: decides; called again after another write in between.
            likely_absent: try it as if there were no value, which saves a read if there is none.

        Returns:
            What ``change`` tells the caller.
        """
        async with self._changes.at(key) as queue, self._writers.one() as writer:
            seen, guessed = queue.seen, True
            if seen is None:
                seen, guessed = (ABSENT, True) if likely_absent else (await self._see(key), False)
            pauses = Backoff(_CONFLICT_PAUSE_S, _CONFLICT_PAUSE_MAX_S)
            while True:
                new, answer = _decide(change, seen.value, guessed)
                if new is KEEP and not guessed:
                    return answer
                if new is KEEP:  # a guessed or remembered value must not decide the answer
                    seen, guessed = await self._see(key), False
                    continue
                outcome = await self._replace(writer, key, seen, new)
                if outcome.applied:
                    queue.seen = ABSENT if new is DELETE else Seen(new, outcome.revision)
                    return answer
                seen, guessed = Seen.of(outcome.found[0]), False
                await asyncio.sleep(pauses.next_s())

    async def _see(self, key: bytes) -> Seen:
        return Seen.of(await persist(lambda: self._kv.get(b"k/" + key, timeout_s=ATTEMPT_TIMEOUT_S), self._on_trouble))

    async def _replace(self, writer: Writer, key: bytes, seen: Seen, new: Any) -> Outcome:
        where = b"k/" + key
        operation = aio.delete(where) if new is DELETE else aio.put(where, new)
        # The mod revision of a key that is not there is 0.
        return await writer.commit([aio.mod_revision(where) == seen.revision], [operation], [aio.get(where)])

    async def add(self, key: bytes, amount: int) -> int:
        """Add to a decimal number (absent: 0); return the sum.

        Arguments:
            key: key of the number.
            amount: may be negative.

        Raises:
            NotANumber: something else is there.
        """

        def change(value: bytes | None) -> tuple[bytes, int]:
            total = wrap((0 if value is None else parse_number(key, value)) + amount)
            return b"%d" % total, total

        total: int = await self.change(key, change, likely_absent=True)
        return total

    async def append(self, key: bytes, value: bytes) -> None:
        """Append bytes to a value (absent: empty).

        Arguments:
            key: key of the value.
            value: value to append.
        """
        await self.change(key, lambda old: ((old or b"") + value, None), likely_absent=True)

    async def compare_set(self, key: bytes, expected: bytes, new: bytes) -> bytes:
        """Replace a value if it equals ``expected``; an empty ``expected`` matches an absent or empty value.

        Arguments:
            key: key of the value.
            expected: the present value.
            new: the next one.

        Returns:
            The current value; if there is none, the expected value.
        """

        def change(value: bytes | None) -> tuple[Any, bytes]:
            if value is None:
                return (KEEP, expected) if expected else (new, new)
            return (new, new) if value == expected else (KEEP, value)

        found: bytes = await self.change(key, change)
        return found

    async def delete(self, key: bytes) -> bool:
        """Delete a value; return whether it existed."""
        existed: bool = await self.change(key, lambda old: (KEEP, False) if old is None else (DELETE, True))
        return existed

    async def count(self) -> int:
        """Count the values."""
        return await persist(lambda: self._kv.count("k/", prefix=True, timeout_s=ATTEMPT_TIMEOUT_S), self._on_trouble)

    async def keys(self) -> list[bytes]:
        """Read the keys of all values, as of one revision.

        Raises:
            TooManyKeys: they are more than ``KEYS_BYTES_MAX`` together.
        """

        async def attempt() -> list[bytes]:
            found: list[bytes] = []
            size_bytes = 0
            async for page in self._kv.pages("k/", prefix=True, keys_only=True, timeout_s=ATTEMPT_TIMEOUT_S):
                found += [item.key[2:] for item in page.items]
                size_bytes += sum(len(item.key) + 8 for item in page.items)
                if size_bytes > KEYS_BYTES_MAX:
                    raise TooManyKeys(page.count)
            return found

        return await persist(attempt, self._on_trouble)

    # ---- waiting

    async def missing(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Return the keys that have neither value nor queue, with the revision at which this was read."""
        missing: dict[bytes, int] = {}
        for some in _chunks(list(dict.fromkeys(keys)), OPERATIONS_MAX // 2):
            asked = [aio.get_range(b"k/" + key, count_only=True) for key in some]
            if self._queues:
                asked += [aio.get_range(queue_prefix(b"q/", key), prefix=True, count_only=True) for key in some]
            result = await self._read(asked)
            counts = [found.count for found in result.results]
            for index, key in enumerate(some):
                if not any(counts[index :: len(some)]):
                    missing[key] = result.revision
        return missing

    async def wait(self, keys: Iterable[bytes]) -> None:
        """Wait until every key has had a value or an item of a queue, not necessarily at the same time."""
        await self.wait_for(await self.missing(keys))

    async def wait_for(self, missing: Mapping[bytes, int]) -> None:
        """Do the rest of ``wait``, with what ``missing`` has found."""
        for some in _chunks(list(missing), WATCHED_KEYS_MAX):
            with contextlib.ExitStack() as stack:
                take = self.take_token if self._queues else None
                waits = [stack.enter_context(Wait(self._control, key, missing[key], take)) for key in some]
                for wait in waits:
                    await wait.finished()

    async def wait_value(self, key: bytes) -> bytes:
        """Wait for a value, and return it."""
        result = await self._read([aio.get(b"k/" + key)])
        if result.results[0] is None:
            return await first_value(self._control, key, result.revision)
        found: bytes = result.results[0].value
        return found

    async def arrive(self, key: bytes, size: int) -> bool:
        """Arrive at a barrier; return whether it is complete. The value of the key counts the arrivals.

        Arguments:
            key: key of the barrier.
            size: number of ranks that must arrive.

        Raises:
            NotANumber: the key has another value.
        """
        return await self.add(key, 1) >= size

    async def wait_all_arrived(self, key: bytes, size: int) -> None:
        """Wait until ``size`` ranks have arrived, or the key gets another kind of value.

        Arguments:
            key: key of the barrier.
            size: number of ranks that must arrive.
        """

        def complete(value: bytes) -> bool:
            try:
                return parse_number(key, value) >= size
            except NotANumber:
                return True

        result = await self._read([aio.get(b"k/" + key)])
        item = result.results[0]
        if item is None or not complete(item.value):
            await first_value(self._control, key, result.revision, complete)

    # ---- queues

    async def push(self, key: bytes, value: bytes) -> None:
        """Append an item to a queue; wakes one waiter.

        Arguments:
            key: key of the queue.
            value: the item.
        """
        name = secrets.token_hex(8).encode()
        items = [aio.put(queue_prefix(b"q/", key) + name, value), aio.put(queue_prefix(b"t/", key) + name)]
        async with self._writers.one() as writer:
            await writer.commit((), items)

    async def pop(self, key: bytes) -> tuple[int, bytes]:
        """Remove the oldest item; return the previous length and the item, or 0 and an empty value."""
        prefix = queue_prefix(b"q/", key)
        oldest = aio.get_range(prefix, prefix=True, limit=1, sort_by="create_revision")
        pauses = Backoff(_CONFLICT_PAUSE_S, _CONFLICT_PAUSE_MAX_S)
        async with self._writers.one() as writer:
            while True:
                found = (await self._read([oldest])).results[0]
                if not found.items:
                    return 0, b""
                item = found.items[0]
                token = queue_prefix(b"t/", key) + item.key[len(prefix) :]
                still_there = aio.mod_revision(item.key) == item.mod_revision
                if (await writer.commit([still_there], [aio.delete(item.key), aio.delete(token)])).applied:
                    return found.count, item.value
                await asyncio.sleep(pauses.next_s())

    async def length(self, key: bytes) -> int:
        """Count the items of a queue."""
        prefix = queue_prefix(b"q/", key)
        return await persist(lambda: self._kv.count(prefix, prefix=True, timeout_s=ATTEMPT_TIMEOUT_S), self._on_trouble)

    async def take_token(self, token: bytes, revision: int) -> bool:
        """Take the token of a new item; return whether this waiter got it.

        Arguments:
            token: key of the token.
            revision: revision at which the token was put.
        """
        async with self._writers.one() as writer:
            still_there = aio.mod_revision(token) == revision
            return (await writer.commit([still_there], [aio.delete(token)])).applied

    # ---- inside

    async def _read(self, questions: Sequence[Operation]) -> aio.TxnResult:
        question = self._kv.txn().then(*questions)
        return await persist(lambda: question.commit(timeout_s=ATTEMPT_TIMEOUT_S), self._on_trouble)


def _decide(change: Change, value: bytes | None, guessed: bool) -> tuple[Any, Any]:
    try:
        return change(value)
    except NotANumber:
        if guessed:
            return KEEP, None
        raise


def _chunks(keys: Sequence[bytes], size: int = OPERATIONS_MAX) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def _with_distinct(keys: Sequence[bytes], start: int, count: int) -> Sequence[bytes]:
    """Return the next keys up to a number of different ones, because a client may repeat a key very often."""
    seen: set[bytes] = set()
    end = start
    for key in keys[start : start + 10 * OPERATIONS_MAX]:
        seen.add(key)
        if len(seen) > count:
            break
        end += 1
    return keys[start:end]


def _batches(pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[dict[bytes, bytes]]:
    """Pairs by the txn; a txn may write a key once, so the last value of a key counts."""
    batch: dict[bytes, bytes] = {}
    size_bytes = 0
    for key, value in pairs:
        size_bytes += len(key) + len(value)
        if batch and (len(batch) >= OPERATIONS_MAX or size_bytes > BATCH_BYTES_MAX):
            yield batch
            batch, size_bytes = {}, len(key) + len(value)
        batch[key] = value
    if batch:
        yield batch
