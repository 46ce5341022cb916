"""TCPStore's operations on raftkv's keys: what the gateway serves, and what ``raftkv.torch.Store`` is made of.

Below the prefix of a store:

    k/<key>                  a value, as it is
    q/<size>:<key>/<id>      an item of a queue; the oldest by create revision comes first
    t/<size>:<key>/<id>      the right to wake one waiter for that item
    w/<id>                   a writer (see ``tcpstore.writer``)

Reads are linearizable. Writes happen exactly once. A wait reads once, at some revision, and watches what was not there
from the next revision on: nothing is polled, and no event can fall between. As long as raftkv does not answer, calls
go on trying; their callers bound them, with ``asyncio.timeout``.

What TCPStore does with a number that is none, an absent key, an empty expectation and so on was observed on torch
2.13's own server (the libuv one) and is kept; ``tests/training/tcpstore/test_conformance.py`` compares.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from raftkv import aio
from raftkv.client.control.control import ClientControl
from raftkv.client.kv.operations import Fence, Operation
from raftkv.client.rpc.retry import Backoff
from raftkv.errors import RaftKVError
from raftkv.training.tcpstore.key_queue import ABSENT, KeyQueues, Seen
from raftkv.training.tcpstore.wait import Wait, first_value, queue_prefix
from raftkv.training.tcpstore.writer import ATTEMPT_TIMEOUT_S, OnTrouble, Outcome, Writer, Writers, persist

OPERATIONS_MAX: Final = 100
"""Operations of one txn: members allow 128, and a writer's own key is one of them."""
BATCH_BYTES_MAX: Final = 1024 * 1024
"""Bytes of one txn: members allow 1.5 MiB."""
FIRST_READ_KEYS: Final = 8
"""Keys read by the first txn of a read of many: how large their values are shows in its answer."""
WATCHED_KEYS_MAX: Final = 100
"""Keys that one wait watches at once; the next are watched from the same revision on when those have come."""
KEYS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes that a list of all keys may have."""
_CONFLICT_PAUSE_S: Final = 0.002
_CONFLICT_PAUSE_MAX_S: Final = 0.05
"""32 processes that add to one number at once make 6 calls an addition; with 0.25 s, 5, but it takes thrice as long."""
_NUMBER: Final = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_INT64: Final = 1 << 64

DELETE: Final = object()
"""What a change makes of a value: nothing."""
KEEP: Final = object()
"""What a change makes of a value: what it was."""
Change = Callable[[bytes | None], tuple[Any, Any]]
"""From the value (None: absent) to what it becomes (bytes, ``DELETE`` or ``KEEP``) and the answer for the caller."""


class NotANumber(RaftKVError):
    """ADD or BARRIER on a value that is no decimal number of 64 bits."""

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
        key: for the error.
        value: of the key.

    Raises:
        NotANumber: there is none, or it does not fit.
    """
    found = _NUMBER.match(value)
    number = int(found[1]) if found else _INT64
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
        prefix: of all keys of the store; ends with a slash.
        fence: every write depends on this lock, term or world.
        on_trouble: told of attempts that fail and are repeated.
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
        """Delete what the store keeps for this process; the values stay. Only when no call is under way."""
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
        """Write values; those of one key in their order. At once as far as they fit into one txn, else in order."""
        async with self._writers.one() as writer:
            for batch in _batches(pairs):
                await writer.commit((), [aio.put(b"k/" + key, value) for key, value in batch.items()])

    async def change(self, key: bytes, change: Change, *, likely_absent: bool = False) -> Any:
        """Read, decide and write, with nobody in between.

        Arguments:
            key: of the value.
            change: decides; called again when somebody else has come in between.
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
                if new is KEEP:  # what is guessed or remembered is no ground for an answer
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
        """Add to a decimal number, absent is 0; returns the sum.

        Arguments:
            key: of the number.
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
        """Put bytes behind a value; absent is empty.

        Arguments:
            key: of the value.
            value: what to add to it.
        """
        await self.change(key, lambda old: ((old or b"") + value, None), likely_absent=True)

    async def compare_set(self, key: bytes, expected: bytes, new: bytes) -> bytes:
        """Replace what is expected: nothing at all, or an empty value, if that is empty.

        Arguments:
            key: of the value.
            expected: the present value.
            new: the next one.

        Returns:
            The value that is there now; if there is none, what was expected.
        """

        def change(value: bytes | None) -> tuple[Any, bytes]:
            if value is None:
                return (KEEP, expected) if expected else (new, new)
            return (new, new) if value == expected else (KEEP, value)

        found: bytes = await self.change(key, change)
        return found

    async def delete(self, key: bytes) -> bool:
        """Delete a value; tells whether there was one."""
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
        """Find those keys that have neither value nor queue, and the revision at which that was so."""
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
        """Wait until every key has been there, a value or an item of a queue; not necessarily at the same time."""
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
        """Come to a barrier; tells whether it is complete. The value of the key counts those who have come.

        Arguments:
            key: of the barrier.
            size: how many must come.

        Raises:
            NotANumber: the key has another value.
        """
        return await self.add(key, 1) >= size

    async def wait_all_arrived(self, key: bytes, size: int) -> None:
        """Wait until so many have come, or somebody writes something else to the key.

        Arguments:
            key: of the barrier.
            size: how many must come.
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
        """Put an item at the end of a queue; wakes one who waits for it.

        Arguments:
            key: of the queue.
            value: the item.
        """
        name = secrets.token_hex(8).encode()
        items = [aio.put(queue_prefix(b"q/", key) + name, value), aio.put(queue_prefix(b"t/", key) + name)]
        async with self._writers.one() as writer:
            await writer.commit((), items)

    async def pop(self, key: bytes) -> tuple[int, bytes]:
        """Take the oldest item; returns how many there were, 0 with an empty value if none, and the item."""
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
        """Tell whether it is for this waiter, and for no other, to be woken by a new item.

        Arguments:
            token: its key.
            revision: at which the token was put.
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
    """Return as many of the keys from there on as hold so many different ones; a client may name a key very often."""
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
