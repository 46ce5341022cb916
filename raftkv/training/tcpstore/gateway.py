"""The TCPStore gateway: torch's own store protocol, replicated in raftkv.

::

    raftkv tcpstore-gateway --listen 127.0.0.1:29400 --endpoints h1:2379,h2:2379,h3:2379
    torchrun --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29400 --rdzv-conf=is_host=0 ...

For clients that speak only TCPStore: torchrun's c10d, NCCL's own threads, C++. Such a client never reconnects, so the
gateway should be on the node of its clients; if a member of raftkv fails, the gateway connects to another. Gateways
with the same name, on any number of nodes, serve one store.

Reading order: ``wire`` (bytes), ``Connection`` (a client), ``Budget`` (memory limits of all clients), ``store`` (the
operations), ``StoreLifetime`` (lifetime of the keys).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from raftkv import aio
from raftkv.errors import ConfigError, RaftKVError, StatusError
from raftkv.rpc.shares import Identity, Shares, identity_of_peer, name_of
from raftkv.training.tcpstore import wire
from raftkv.training.tcpstore.store import BATCH_BYTES_MAX, WATCHED_KEYS_MAX, OnTrouble, ReplicatedStore, persist
from raftkv.training.tcpstore.wire import FrameError, Op, Reader, Request
from raftkv.urls import join_address

# -- connection -----------------------------------------------------------------------------------------------------
#
# One connection of a TCPStore client: requests are handled in order, waits run concurrently.
#
# 1. Requests are done one after the other, except that consecutive SET and MULTI_SET go to raftkv together.
# 2. WAIT and BARRIER run as tasks: the client may send other requests meanwhile, or cancel them.
# 3. Problems of raftkv do not break the connection: while there is no leader, the client waits. A permanent refusal (a
#    value that is too large, no permission) closes it with a line in the log, because TCPStore has no error answers.
#
# The load of one client, and of all clients together (``Budget``), is bounded:
#
# 4. Pending requests are kept as bytes; beyond ``PENDING_BYTES_MAX`` nothing is read from the socket.
# 5. After ``REQUESTS_PER_TURN`` requests, or a part of a long one, other connections get their turn.
# 6. A long answer is sent in parts, each when the client has read the previous one; no other answer comes in between.
# 7. A request that is not complete within ``REQUEST_TIMEOUT_S``, or an answer that is not read within
#    ``ANSWER_STALL_S``, ends the connection, unless the client moves ``PACE_BYTES_PER_S``.

# -- budget ---------------------------------------------------------------------------------------------------------
#
# The memory limit for all connections of a gateway together: for pending requests, and for unread answers.
#
# Each connection has its own limits, but thousands of connections need one more. When a budget is exceeded, the address
# that holds most (``rpc/shares``) loses the connection that holds most; of equals, the one that has held bytes longest.
# So a client that requests little and reads its answers never loses its connection.

REQUEST_BYTES_MAX: Final = 256 * 1024 * 1024
ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024


class Budget:
    """A memory limit for one kind of bytes.

    Arguments:
        limit_bytes: limit for all holders together.
        what: what is held, for the log.
    """

    def __init__(self, limit_bytes: int, what: str) -> None:
        self._shares = Shares(limit_bytes)
        self._what = what
        self._held: dict[Connection, int] = {}
        """Bytes of each holder, in the order in which they began to hold some."""

    @property
    def total(self) -> int:
        """Bytes of all holders together."""
        return self._shares.used

    def hold(self, holder: Connection, size_bytes: int) -> None:
        """Set how much a connection holds now; 0: nothing. May close a connection, this one or another.

        Arguments:
            holder: the connection.
            size_bytes: size of everything that waits for the client.
        """
        shares = self._shares
        if held_bytes := self._held.get(holder, 0):
            shares.give_back(holder.identity, held_bytes)
        if not size_bytes:
            self._held.pop(holder, None)
            return
        self._held[holder] = size_bytes
        shares.take(holder.identity, size_bytes)
        while shares.used > shares.limit:
            whose = max(shares.held, key=shares.held.__getitem__)
            greediest = max((one for one in self._held if one.identity == whose), key=self._held.__getitem__)
            held_bytes = self._held.pop(greediest)
            shares.give_back(whose, held_bytes)
            greediest.refuse(
                f"it holds {held_bytes} bytes of {self._what}, more than any other of the {name_of(whose)}, which "
                f"holds most, and all connections together more than the limit of {shares.limit}"
            )


class Budgets:
    """The budgets of one gateway.

    Arguments:
        request_bytes, answer_bytes: the limits.

    Attributes:
        listing: held while a list of all keys is read and put together, by one connection at a time: until it is
            written, no budget counts it, and it may have a million keys.
    """

    def __init__(self, request_bytes: int = REQUEST_BYTES_MAX, answer_bytes: int = ANSWER_BYTES_MAX) -> None:
        self.requests = Budget(request_bytes, "requests that are not done")
        self.answers = Budget(answer_bytes, "answers that it does not read")
        self.listing = asyncio.Lock()

    def forget(self, holder: Connection) -> None:
        """Drop the account of a connection that has ended."""
        self.requests.hold(holder, 0)
        self.answers.hold(holder, 0)


PENDING_BYTES_MAX: Final = 1024 * 1024
REQUESTS_PER_TURN: Final = 64
WAITS_MAX: Final = 64
"""Waits of one connection at once; torch's clients have one."""
WATCH_BYTES: Final = 4096
"""Approximate memory of one waited-for key, here and at a member; counted in the connection's budget."""
REQUEST_TIMEOUT_S: Final = 60.0
ANSWER_STALL_S: Final = 60.0
PACE_BYTES_PER_S: Final = 64 * 1024
"""Minimum speed of a client that sends or reads for longer than that: many bytes take longer on a slow network."""
_PAIRS_PER_WRITE: Final = 1000

_READS: Final = frozenset(
    (Op.GET, Op.MULTI_GET, Op.CHECK, Op.WAIT, Op.GETNUMKEYS, Op.LIST_KEYS, Op.QUEUE_LEN, Op.PING, Op.CANCEL_WAIT)
)
"""Not worth doing when the client has gone."""

_log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """The protocol of one TCPStore client.

    Arguments:
        store: store of all keys.
        on_end: called when it has ended.
        budgets: shared with all other connections of the gateway.
        admit: called when it is open; False: there is no room for it.

    Attributes:
        identity: identity of the client's address, in whose shares it is.
    """

    def __init__(
        self,
        store: ReplicatedStore,
        on_end: Callable[[Connection], None],
        budgets: Budgets,
        admit: Callable[[Connection], bool] = lambda connection: True,
    ) -> None:
        self._store = store
        self._on_end = on_end
        self._admit = admit
        self._budgets = budgets
        self._loop = asyncio.get_running_loop()
        self._reader = Reader()
        self._next: Request | None = None
        """The next request, already parsed to see whether it is one more write."""
        self._doing_bytes = 0
        self._waiting_bytes = 0
        self._unfinished_since = self._loop.time()
        """Since when the next request is incomplete; inf: none of its bytes have arrived."""
        self._stalled_since = float("inf")
        self._stalled_bytes = 0
        self._is_paused = False
        self.is_validated = False
        """Whether the client has sent the validation of TCPStore."""
        self._is_gone = False
        self._is_refused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._speaking = asyncio.Lock()
        self._waits: set[asyncio.Task[None]] = set()
        self._work: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport
        self.peer = "a client"
        self.identity: Identity = ""

    @property
    def held_bytes(self) -> int:
        """Bytes of unfinished requests: incomplete ones, pending ones, and waits."""
        return self._reader.held_bytes + self._doing_bytes + self._waiting_bytes

    async def finished(self) -> None:
        """Wait until all requests received so far are done."""
        if self._work is not None:
            await asyncio.wait([self._work])

    def close(self) -> None:
        """Close the connection without logging."""
        self._transport.close()

    def give_way(self) -> None:
        """Close the connection at once, without logging."""
        self._is_refused = True
        self._transport.abort()

    def check(self, now: float) -> None:
        """Close the connection if it has waited too long for its client; called every few seconds."""
        request_s, answer_s = now - self._unfinished_since, now - self._stalled_since
        if request_s > REQUEST_TIMEOUT_S + self._reader.held_bytes / PACE_BYTES_PER_S:
            self.refuse(f"a request did not come whole in {request_s:.0f} s")
        elif answer_s > ANSWER_STALL_S + self._read_bytes() / PACE_BYTES_PER_S:
            self.refuse(f"it has not read its answers for {answer_s:.0f} s")

    def _read_bytes(self) -> int:
        """Return how much of its answers the client has read since it fell behind."""
        return max(0, self._stalled_bytes - self._transport.get_write_buffer_size())

    # ---- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve a client."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("the gateway serves streams")
        self._transport = transport
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer = join_address(*name[:2])
            self.identity = identity_of_peer(self.peer)
        if not self._admit(self):
            self.give_way()

    def data_received(self, data: bytes) -> None:
        """Store bytes; requests are parsed in their turn."""
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
        """Stop handling requests, because the client does not read its answers."""
        self._writable.clear()
        self._stalled_since = self._loop.time()
        self._stalled_bytes = self._transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        """Handle requests again, because the client reads."""
        self._writable.set()
        self._stalled_since = float("inf")
        self._budgets.answers.hold(self, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the waits of a disconnected client; its earlier writes are still done."""
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
        """Close the connection at once, and log the reason."""
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
        except Exception as error:  # else the client would wait for ever
            _log.exception("a request of %s failed", self.peer)
            self.refuse(f"{type(error).__name__}: {error}")
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
        """Return the next request; None: it is incomplete, or was not parsed completely in this turn."""
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
        """Execute a request, together with directly following writes without an answer."""
        if self.is_validated == (request.op is Op.VALIDATE):
            raise FrameError("it validates twice" if self.is_validated else "it is not a client of TCPStore")
        if request.op is Op.VALIDATE:
            if request.number != wire.MAGIC:
                raise FrameError("it is not a client of TCPStore: a wrong magic number")
            self.is_validated = True
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
        """Return the keys and values of a write and of the writes that directly follow it."""
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
        """Send a part of an answer; ``more_bytes`` of it are in memory and come next."""
        if self._is_gone or self._transport.is_closing():
            return
        self._transport.write(answer)
        unread = self._transport.get_write_buffer_size()
        # A small answer on its way is not an unread answer, so no budget counts it.
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
"""A table of the class: one of bound methods would keep a closed connection alive until the garbage collector runs."""


# -- lifetime -------------------------------------------------------------------------------------------------------
#
# The lifetime of the keys of a gateway's store: as long as a gateway of that name runs, and a while longer.
#
# The next job with the same name must not find the store of an ended job: stock torchrun would find its run closed.
# TCPStore's keys end with its process; here they end with the *last* gateway of the name, of which there may be many
# (one per node), and which may be restarted:
#
# 1. Each gateway keeps a leased key. A stopped gateway revokes the lease; that of a killed gateway expires.
# 2. A gateway that starts and finds no such key deletes all keys of the store. The check and the delete are one txn.
# 3. A running gateway never deletes keys. If its lease is lost, as when raftkv was unavailable, it takes a new one.

LINGER_S: Final = 60
_PARTS: Final = ("k/", "q/", "t/", "w/")


class StoreLifetime:
    """One gateway's part in the lifetime of its store.

    Arguments:
        kv: the client.
        prefix: prefix of the store; ends with a slash.
        linger_s: how long the keys outlive a killed gateway.
        fresh: delete what is there in any case.
    """

    def __init__(
        self, kv: aio.Client, prefix: str, linger_s: int, *, fresh: bool = False, on_trouble: OnTrouble | None = None
    ) -> None:
        self._kv = kv.view(prefix)
        self._session = self._kv.session(linger_s)
        self._fresh = fresh
        self._on_trouble = on_trouble
        self._key = f"g/{secrets.token_hex(6)}"

    async def begin(self) -> bool:
        """Register this gateway; return whether the store was cleared. Repeats until raftkv answers.

        Raises:
            StatusError: it refuses for good.
        """
        await persist(self._session.establish, self._on_trouble)
        began = await persist(self._announce, self._on_trouble)
        await persist(lambda: self._session.keep(self._key, b""), self._on_trouble)
        return began

    async def _announce(self) -> bool:
        here = aio.put(self._key, lease=self._session)
        # Holds where no gateway has a key, for theirs have leases. Its own, if an earlier attempt came through,
        # counts: a copy that was held up must not delete what clients have written since.
        mine = aio.create_revision(self._key) == 0
        alone = [mine] if self._fresh else [aio.lease_of("g/", prefix=True) == 0]
        clear = [aio.delete(part, prefix=True) for part in _PARTS]
        return (await self._kv.txn().when(*alone).then(*clear, here).otherwise(here).commit()).succeeded

    async def end(self) -> None:
        """Deregister this gateway; after the last one, the next gateway of the name deletes the keys."""
        await self._session.close()


ROOT: Final = "/raftkv/tcpstore/"
CONNECTIONS_MAX: Final = 4096
DESCRIPTORS_RESERVED: Final = 64
"""File descriptors reserved for other uses: connections to members, standard streams, temporary files."""
_DRAIN_S: Final = 5.0
_CHECK_INTERVAL_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The configuration of a gateway.

    Attributes:
        host, port: address to listen on; port 0: any free port.
        prefix: prefix of the store's keys; ends with a slash.
        linger_s: see ``StoreLifetime``.
        fresh: begin with an empty store, even if another gateway serves it.
    """

    host: str = "127.0.0.1"
    port: int = 29400
    prefix: str = f"{ROOT}default/"
    linger_s: int = LINGER_S
    fresh: bool = False

    def __post_init__(self) -> None:
        if not self.prefix.endswith("/"):
            raise ConfigError(f"the prefix of a store ends with a slash: {self.prefix!r}")
        if self.linger_s < 1:
            raise ConfigError(f"linger must be at least 1 s, not {self.linger_s}")


class Gateway:
    """A running gateway; made by ``start``.

    Arguments:
        kv: the client; it stays its owner's.
        config: configuration of the service.
    """

    def __init__(self, kv: aio.Client, config: GatewayConfig) -> None:
        self._config = config
        self._trouble = _Trouble()
        self._store = ReplicatedStore(kv, config.prefix, on_trouble=self._trouble.note)
        self._lifetime = StoreLifetime(
            kv, config.prefix, config.linger_s, fresh=config.fresh, on_trouble=self._trouble.note
        )
        self._connections: dict[Connection, None] = {}
        """Connections, oldest first."""
        self._shares = Shares(connections_allowed())
        """Connections by address."""
        self._is_full = False
        self._budgets = Budgets()
        self._checking: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Address at which the gateway listens."""
        if self._server is None:
            raise ConfigError("the gateway does not listen yet")
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Listen, once raftkv has answered.

        Raises:
            OSError: the address cannot be listened on.
            StatusError: raftkv refuses for good.
        """
        loop = asyncio.get_running_loop()
        # The address first: whether it is free is known at once.
        self._server = await loop.create_server(
            self._connection, self._config.host, self._config.port, backlog=1024, start_serving=False
        )
        if await self._lifetime.begin():
            _log.info("emptied the store below %s", self._config.prefix)
        await self._server.start_serving()
        self._checking = loop.create_task(self._check())

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            now = asyncio.get_running_loop().time()
            for connection in list(self._connections):
                connection.check(now)

    async def close(self) -> None:
        """Stop listening, finish the clients' writes, close their connections, deregister."""
        if self._checking is not None:
            self._checking.cancel()
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        try:
            async with asyncio.timeout(_DRAIN_S):
                for connection in connections:
                    await connection.finished()
                await self._store.close()
                await self._lifetime.end()
        except TimeoutError:
            _log.warning("stopped while the raftkv cluster did not answer: the last writes of clients may be lost")
        for connection in connections:
            connection.close()

    def _forget(self, connection: Connection) -> None:
        if self._connections.pop(connection, self) is None:
            self._shares.give_back(connection.identity, 1)

    def _admit(self, connection: Connection) -> bool:
        """Count a new connection; False: there is no room for it."""
        if not self._has_room(connection.identity):
            if not self._is_full:
                _log.warning("refusing connections: %d are open, which is the limit", self._shares.limit)
            self._is_full = True
            return False
        self._is_full = False
        self._connections[connection] = None
        self._shares.take(connection.identity, 1)
        return True

    def _has_room(self, identity: Identity) -> bool:
        """Make room: the oldest connection that has not sent the validation goes, else one of the greediest address."""
        if self._shares.used < self._shares.limit:
            return True
        silent = next((one for one in self._connections if not one.is_validated), None)
        if silent is None:
            return self._shares.make_room(identity, 1, self._end_newest)
        self._forget(silent)
        silent.give_way()
        return True

    def _end_newest(self, identity: Identity) -> bool:
        newest = next(one for one in reversed(self._connections) if one.identity == identity)
        self._forget(newest)
        newest.refuse(f"all {self._shares.limit} connections are in use, most of them by the {name_of(identity)}")
        return True

    def _connection(self) -> asyncio.Protocol:
        return Connection(self._store, self._forget, self._budgets, self._admit)


def connections_allowed() -> int:
    """Return the maximum number of clients, which leaves file descriptors for connections to raftkv."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(1, min(CONNECTIONS_MAX, soft - DESCRIPTORS_RESERVED))


class _Trouble:
    """Logs one line when raftkv stops answering and one when it answers again, for any number of calls."""

    def __init__(self) -> None:
        self._is_known = False

    def note(self, error: StatusError | None) -> None:
        """Record that an attempt failed, or (None) that it works again."""
        if error is None and self._is_known:
            _log.warning("the raftkv cluster answers again")
        elif error is not None and not self._is_known:
            _log.warning("the raftkv cluster does not answer, clients wait: %s", error)
        self._is_known = error is not None
