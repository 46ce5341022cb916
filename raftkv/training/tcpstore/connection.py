"""One connection of a TCPStore client: its requests in order, its waits beside them.

1. Requests are done one after the other, but that runs of SET and MULTI_SET go to raftkv together.
2. WAIT and BARRIER run as tasks: the client may ask other things meanwhile, or cancel them.
3. Nothing that raftkv does breaks the connection: while no leader is there, the client waits. What raftkv refuses for
   good (a value that is too large, no permission) closes it with a line in the log: TCPStore has no word for an error.

What one client can make the gateway hold or do is bounded, and what all together (``tcpstore.budget``):

4. Requests that wait to be done stay bytes; beyond ``PENDING_BYTES_MAX`` nothing is read from the socket.
5. After ``REQUESTS_PER_TURN`` requests, or a part of a long one, others have their turn.
6. A long answer is sent in parts, the next when the client has read the one before; nothing comes between.
7. A request that does not come whole in ``REQUEST_TIMEOUT_S``, and a client that reads nothing of its answers for
   ``ANSWER_STALL_S``, ends the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from raftkv.errors import RaftKVError
from raftkv.training.tcpstore import wire
from raftkv.training.tcpstore.budget import Budgets
from raftkv.training.tcpstore.store import BATCH_BYTES_MAX, WATCHED_KEYS_MAX, ReplicatedStore
from raftkv.training.tcpstore.wire import FrameError, Op, Reader, Request

PENDING_BYTES_MAX: Final = 1024 * 1024
REQUESTS_PER_TURN: Final = 64
WAITS_MAX: Final = 64
"""Waits of one connection at once; torch's clients have one."""
WATCH_BYTES: Final = 4096
"""What a key costs while it is waited for, here and at a member; counted among what a connection holds."""
REQUEST_TIMEOUT_S: Final = 60.0
ANSWER_STALL_S: Final = 60.0
_PAIRS_PER_WRITE: Final = 1000

_READS: Final = frozenset(
    (Op.GET, Op.MULTI_GET, Op.CHECK, Op.WAIT, Op.GETNUMKEYS, Op.LIST_KEYS, Op.QUEUE_LEN, Op.PING, Op.CANCEL_WAIT)
)
"""Not worth doing when the client has gone."""

_log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """The protocol of one TCPStore client.

    Arguments:
        store: where everything is kept.
        on_end: called when it has ended.
        budgets: shared with all other connections of the gateway.
    """

    def __init__(self, store: ReplicatedStore, on_end: Callable[[Connection], None], budgets: Budgets) -> None:
        self._store = store
        self._on_end = on_end
        self._budgets = budgets
        self._loop = asyncio.get_running_loop()
        self._reader = Reader()
        self._next: Request | None = None
        """Cut already, to see whether it is one more write; it is done next."""
        self._doing_bytes = 0
        self._waiting_bytes = 0
        self._unfinished_since = self._loop.time()
        """When what has come of the next request began to wait for its rest; inf: nothing has come of it."""
        self._stalled_since = float("inf")
        self._is_paused = False
        self._is_validated = False
        self._is_gone = False
        self._is_refused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._speaking = asyncio.Lock()
        self._waits: set[asyncio.Task[None]] = set()
        self._work: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport
        self.peer = "a client"

    @property
    def held_bytes(self) -> int:
        """Bytes of requests that are not done: those that have not come as a whole, those that wait, and waits."""
        return self._reader.held_bytes + self._doing_bytes + self._waiting_bytes

    async def finished(self) -> None:
        """Wait until what was asked for so far is done."""
        if self._work is not None:
            await asyncio.wait([self._work])

    def close(self) -> None:
        """Close it, without a word in the log."""
        self._transport.close()

    def check(self, now: float) -> None:
        """Close it if it has waited for its client for too long; called every few seconds."""
        if now - self._unfinished_since > REQUEST_TIMEOUT_S:
            self.refuse(f"a request did not come whole in {REQUEST_TIMEOUT_S:g} s")
        elif now - self._stalled_since > ANSWER_STALL_S:
            self.refuse(f"it has not read its answers for {ANSWER_STALL_S:g} s")

    # ---- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve a client."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("the gateway serves streams")
        self._transport = transport
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a client"

    def data_received(self, data: bytes) -> None:
        """Take bytes; what they ask for is found out when it is their turn."""
        if self._is_refused:
            return
        self._reader.feed(data)
        self._count_held()
        if self._work is None and not self._is_refused:
            self._work = self._loop.create_task(self._run())
        if self._reader.buffered_bytes > PENDING_BYTES_MAX and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """Take no more requests: the client does not read its answers."""
        self._writable.clear()
        self._stalled_since = self._loop.time()

    def resume_writing(self) -> None:
        """Take requests again: the client reads."""
        self._writable.set()
        self._stalled_since = float("inf")
        self._budgets.answers.hold(self, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the waits of a client that has gone; what it wrote before is still done."""
        self._is_gone = True
        self._writable.set()
        for task in self._waits:
            task.cancel()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_gone and self._work is None:
            self._budgets.forget(self)
            self._on_end(self)

    def refuse(self, reason: str) -> None:
        """Close the connection at once, and say why."""
        if not self._transport.is_closing():
            _log.warning("closed the connection of %s: %s", self.peer, reason)
        self._is_refused = True
        self._reader = Reader()
        self._next = None
        self._transport.abort()

    # ---- requests

    async def _run(self) -> None:
        try:
            await self._do_all()
        except (RaftKVError, FrameError) as error:
            self.refuse(str(error))
        finally:
            self._work = None
            self._end_if_done()

    async def _do_all(self) -> None:
        in_turn = 0
        while not self._is_refused:
            await self._writable.wait()
            request = self._take()
            if request is not None:
                await self._do(request)
                in_turn += 1
            elif not self._reader.is_cut_short:
                return
            self._count_held()
            if in_turn >= REQUESTS_PER_TURN or request is None:
                in_turn = 0
                await asyncio.sleep(0)

    def _take(self) -> Request | None:
        """Take the next request; None: it has not come as a whole, or not all of it was looked at in this turn."""
        request, self._next = self._next or self._reader.next(), None
        if request is not None:
            self._unfinished_since = float("inf")
            self._doing_bytes = request.size_bytes
        elif not self._reader.is_cut_short:
            # Out of bytes: more are wanted, and if they are the rest of a request, not at any time.
            if self._reader.held_bytes and self._unfinished_since == float("inf"):
                self._unfinished_since = self._loop.time()
            self._doing_bytes = 0
        if self._is_paused and (request is None or self._reader.buffered_bytes <= PENDING_BYTES_MAX // 2):
            self._is_paused = False
            self._transport.resume_reading()
        return request

    def _count_held(self) -> None:
        self._budgets.requests.hold(self, self.held_bytes)

    async def _do(self, request: Request) -> None:
        """Do a request, or as many writes without an answer as come next."""
        if self._is_validated == (request.op is Op.VALIDATE):
            raise FrameError("it validates twice" if self._is_validated else "it is not a client of TCPStore")
        if request.op is Op.VALIDATE:
            if request.number != wire.MAGIC:
                raise FrameError("it is not a client of TCPStore: a wrong magic number")
            self._is_validated = True
        elif self._is_gone and request.op in _READS:
            return
        elif request.op in (Op.SET, Op.MULTI_SET):
            await self._store.set_many(list(self._writes(request)))
        elif request.op is Op.MULTI_GET:
            await self._multi_get(request)
        elif request.op is Op.LIST_KEYS:
            await self._list()
        elif answer := await _ANSWERS[request.op](self, request):
            async with self._speaking:
                self._answer(answer)

    def _writes(self, request: Request) -> Iterator[tuple[bytes, bytes]]:
        """Return the keys and values of a write, and of those that are there behind it."""
        pairs, size_bytes = 0, 0
        while True:
            yield from zip(request.keys, request.values, strict=True)
            pairs += len(request.keys)
            size_bytes += request.size_bytes
            if pairs >= _PAIRS_PER_WRITE or size_bytes >= BATCH_BYTES_MAX:
                break
            following = self._reader.next()
            if following is None or following.op not in (Op.SET, Op.MULTI_SET):
                self._next = following
                break
            request = following
        self._doing_bytes = size_bytes + (self._next.size_bytes if self._next is not None else 0)

    # ---- answers

    def _answer(self, answer: bytes, more_bytes: int = 0) -> None:
        """Send; ``more_bytes`` of the same answer are in memory and come next."""
        if self._is_gone or self._transport.is_closing():
            return
        self._transport.write(answer)
        unread = self._transport.get_write_buffer_size()
        # A little that is on its way is no answer that nobody reads, and is counted by nobody.
        self._budgets.answers.hold(self, unread + more_bytes if not self._writable.is_set() else 0)

    async def _multi_get(self, request: Request) -> None:
        async with self._speaking, aclosing(self._values(request)) as parts:
            async for values in parts:
                # A value that is there several times is in memory once.
                left_bytes = sum({id(value): len(value) for value in values}.values())
                for value in values:
                    self._answer(wire.pack_bytes(value), left_bytes)
                    await self._writable.wait()
                    if self._is_gone or self._is_refused:
                        return

    async def _values(self, request: Request) -> AsyncGenerator[list[bytes], None]:
        async for found in self._store.values(request.keys):
            yield [value or b"" for value in found]

    async def _get(self, request: Request) -> bytes:
        return wire.pack_bytes(await self._store.get(request.key) or b"")

    async def _add(self, request: Request) -> bytes:
        return wire.pack_int(await self._store.add(request.key, request.number))

    async def _append(self, request: Request) -> bytes:
        await self._store.append(request.key, request.values[0])
        return b""

    async def _compare_set(self, request: Request) -> bytes:
        return wire.pack_bytes(await self._store.compare_set(request.key, *request.values))

    async def _delete(self, request: Request) -> bytes:
        return wire.pack_int(await self._store.delete(request.key))

    async def _check(self, request: Request) -> bytes:
        return wire.NOT_READY if await self._store.missing(request.keys) else wire.READY

    async def _count(self, request: Request) -> bytes:
        return wire.pack_int(await self._store.count())

    async def _list(self) -> None:
        async with self._speaking, self._budgets.listing:
            if not self._is_gone and not self._is_refused:
                keys = await self._store.keys()
                self._answer(wire.pack_int(len(keys)) + wire.pack_many(keys))

    async def _ping(self, request: Request) -> bytes:
        return wire.pack_nonce(request.number)

    async def _push(self, request: Request) -> bytes:
        await self._store.push(request.key, request.values[0])
        return b""

    async def _pop(self, request: Request) -> bytes:
        count, value = await self._store.pop(request.key)
        return wire.pack_int(count) + (wire.pack_bytes(value) if count else b"")

    async def _length(self, request: Request) -> bytes:
        return wire.pack_int(await self._store.length(request.key))

    # ---- waits

    # Whether there is something to wait for is found out in the order of the requests; only the rest runs beside them.

    async def _wait(self, request: Request) -> bytes:
        missing = await self._store.missing(request.keys)
        if missing:
            self._begin_wait(self._store.wait_for(missing), len(missing))
        return b"" if missing else wire.READY

    async def _barrier(self, request: Request) -> bytes:
        if await self._store.arrive(request.key, request.number):
            return wire.READY
        self._begin_wait(self._store.wait_all_arrived(request.key, request.number), 1)
        return b""

    def _begin_wait(self, wait: Coroutine[Any, Any, None], keys: int) -> None:
        if self._is_gone or len(self._waits) >= WAITS_MAX:
            wait.close()
            if not self._is_gone:
                self.refuse(f"more than {WAITS_MAX} waits at once")
            return
        size_bytes = self._doing_bytes + min(keys, WATCHED_KEYS_MAX) * WATCH_BYTES
        self._waiting_bytes += size_bytes
        task = self._loop.create_task(self._answer_wait(wait))
        self._waits.add(task)
        task.add_done_callback(partial(self._wait_ended, size_bytes))

    async def _answer_wait(self, wait: Coroutine[Any, Any, None]) -> None:
        try:
            await wait
            async with self._speaking:
                self._answer(wire.READY)
        except RaftKVError as error:
            self.refuse(str(error))

    def _wait_ended(self, size_bytes: int, task: asyncio.Task[None]) -> None:
        self._waits.discard(task)
        self._waiting_bytes -= size_bytes
        if not self._is_gone:
            self._count_held()

    async def _cancel_wait(self, request: Request) -> bytes:
        for task in list(self._waits):
            task.cancel()
        return wire.CANCELED


_ANSWERS: Final[dict[Op, Callable[[Connection, Request], Coroutine[Any, Any, bytes]]]] = {
    Op.COMPARE_SET: Connection._compare_set,
    Op.GET: Connection._get,
    Op.ADD: Connection._add,
    Op.CHECK: Connection._check,
    Op.GETNUMKEYS: Connection._count,
    Op.DELETE_KEY: Connection._delete,
    Op.APPEND: Connection._append,
    Op.CANCEL_WAIT: Connection._cancel_wait,
    Op.PING: Connection._ping,
    Op.QUEUE_PUSH: Connection._push,
    Op.QUEUE_POP: Connection._pop,
    Op.QUEUE_LEN: Connection._length,
    Op.WAIT: Connection._wait,
    Op.BARRIER: Connection._barrier,
}
"""Table of the class, not of each connection: one of bound methods would keep a closed one until the collector runs."""
