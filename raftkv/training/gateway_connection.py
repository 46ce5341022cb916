"""One connection of a TCPStore client: its requests in order, its waits beside them.

1. Requests are done one after the other, but that runs of SET and MULTI_SET go to raftkv together.
2. WAIT and BARRIER run as tasks: the client may ask other things meanwhile, or cancel them.
3. Requests that wait to be done are bounded: beyond ``PENDING_BYTES_MAX`` nothing is read from the socket.
4. Nothing that raftkv does breaks the connection: while no leader is there, the client waits. What raftkv refuses for
   good (a value that is too large, no permission) closes it with a line in the log: TCPStore has no word for an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from raftkv.errors import RaftKVError
from raftkv.training import gateway_wire as wire
from raftkv.training.gateway_store import ReplicatedStore
from raftkv.training.gateway_wire import FrameError, Op, Reader, Request

PENDING_BYTES_MAX: Final = 16 * 1024 * 1024
WAITS_MAX: Final = 1024
"""Of one connection at once; torch's clients have one."""

_log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """See the module.

    Arguments:
        store: where everything is kept.
        on_end: called when it has ended.
    """

    def __init__(self, store: ReplicatedStore, on_end: Callable[[Connection], None]) -> None:
        self._store = store
        self._on_end = on_end
        self._reader = Reader()
        self._pending: deque[Request] = deque()
        self._pending_bytes = 0
        self._is_paused = False
        self._is_validated = False
        self._is_gone = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._waits: set[asyncio.Task[None]] = set()
        self._work: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport
        self.peer = "a client"
        self._answers = {
            Op.COMPARE_SET: self._compare_set,
            Op.GET: self._get,
            Op.ADD: self._add,
            Op.CHECK: self._check,
            Op.GETNUMKEYS: self._count,
            Op.DELETE_KEY: self._delete,
            Op.APPEND: self._append,
            Op.MULTI_GET: self._multi_get,
            Op.CANCEL_WAIT: self._cancel_wait,
            Op.PING: self._ping,
            Op.QUEUE_PUSH: self._push,
            Op.QUEUE_POP: self._pop,
            Op.QUEUE_LEN: self._length,
            Op.LIST_KEYS: self._list,
            Op.WAIT: self._wait,
            Op.BARRIER: self._barrier,
        }

    async def finished(self) -> None:
        """Wait until what was asked for so far is done."""
        if self._work is not None:
            await asyncio.wait([self._work])

    def close(self) -> None:
        """Close it, without a word in the log."""
        self._transport.close()

    # ---- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("the gateway serves streams")
        self._transport = transport
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a client"

    def data_received(self, data: bytes) -> None:
        """Take requests, or close on what is none."""
        self._reader.feed(data)
        try:
            for request in self._reader.requests():
                self._take(request)
        except FrameError as error:
            self.refuse(str(error))
            return
        if self._pending and self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._run())
        if self._pending_bytes > PENDING_BYTES_MAX and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _take(self, request: Request) -> None:
        if self._is_validated == (request.op is Op.VALIDATE):
            raise FrameError("it validates twice" if self._is_validated else "it is not a client of TCPStore")
        if request.op is Op.VALIDATE:
            if request.number != wire.MAGIC:
                raise FrameError("it is not a client of TCPStore: a wrong magic number")
            self._is_validated = True
            return
        self._pending.append(request)
        self._pending_bytes += request.size_bytes

    def pause_writing(self) -> None:
        """The client does not read its answers."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It reads again."""
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, and nobody waits any more; what it wrote before is still done."""
        self._is_gone = True
        self._writable.set()
        for task in self._waits:
            task.cancel()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_gone and self._work is None:
            self._on_end(self)

    def refuse(self, reason: str) -> None:
        """Close the connection at once, and say why."""
        if not self._transport.is_closing():
            _log.warning("closed the connection of %s: %s", self.peer, reason)
        self._pending.clear()
        self._transport.abort()

    # ---- requests

    async def _run(self) -> None:
        try:
            while self._pending:
                await self._writable.wait()
                await self._step()
                if self._is_paused and self._pending_bytes <= PENDING_BYTES_MAX // 2:
                    self._is_paused = False
                    self._transport.resume_reading()
        except RaftKVError as error:
            self.refuse(str(error))
        finally:
            self._work = None
            self._end_if_done()

    async def _step(self) -> None:
        """Do the next request, or as many writes without an answer as come next."""
        request = self._pending[0]
        if request.op in (Op.SET, Op.MULTI_SET):
            await self._store.set_many(list(self._drain_sets()))
            return
        self._drop_first()
        self._answer(await self._answers[request.op](request))

    def _answer(self, answer: bytes) -> None:
        if answer and not self._transport.is_closing():
            self._transport.write(answer)

    def _drain_sets(self) -> Iterator[tuple[bytes, bytes]]:
        while self._pending and self._pending[0].op in (Op.SET, Op.MULTI_SET):
            request = self._drop_first()
            yield from zip(request.keys, request.values, strict=True)

    def _drop_first(self) -> Request:
        request = self._pending.popleft()
        self._pending_bytes -= request.size_bytes
        return request

    async def _get(self, request: Request) -> bytes:
        return wire.pack_bytes(await self._store.get(request.key) or b"")

    async def _multi_get(self, request: Request) -> bytes:
        return wire.pack_many([value or b"" for value in await self._store.get_many(request.keys)])

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

    async def _list(self, request: Request) -> bytes:
        keys = await self._store.keys()
        return wire.pack_int(len(keys)) + wire.pack_many(keys)

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
            self._begin_wait(self._store.wait_for(missing))
        return b"" if missing else wire.READY

    async def _barrier(self, request: Request) -> bytes:
        if await self._store.arrive(request.key, request.number):
            return wire.READY
        self._begin_wait(self._store.wait_all_arrived(request.key, request.number))
        return b""

    def _begin_wait(self, wait: Coroutine[Any, Any, None]) -> None:
        if self._is_gone or len(self._waits) >= WAITS_MAX:
            wait.close()
            if not self._is_gone:
                self.refuse(f"more than {WAITS_MAX} waits at once")
            return
        task = asyncio.get_running_loop().create_task(self._answer_wait(wait))
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)

    async def _answer_wait(self, wait: Coroutine[Any, Any, None]) -> None:
        try:
            await wait
        except RaftKVError as error:
            self.refuse(str(error))
        else:
            self._answer(wire.READY)

    async def _cancel_wait(self, request: Request) -> bytes:
        for task in list(self._waits):
            task.cancel()
        return wire.CANCELED
