"""The memory of a node: accepts copies, serves them, and drops them when a later checkpoint is committed.

::

    async with Holder(control, "job", Me("node-1", host="h1", address="10.0.0.7"), limit_bytes=8 << 30):
        ...                                             # while the node is in the run, across all its generations

It belongs to the node's agent, which outlives workers, so a copy survives the worker that made it. ``Shelf`` stores and
announces copies, without sockets; ``Holder`` serves them.

    put   token, attempt, file, digest, size, secret -> offer read -> bytes -> digest compared -> key written -> answer
    get   token, digest                              -> bytes

Invariants

1. A copy is announced only when its bytes are here and their digest was verified; it is requested only by digest.
2. The keys are under one lease of this process. If the cluster says that the lease has ended, all remaining copies are
   announced again under a new one.
3. Copies older than the newest commit of their kind are dropped; newer ones stay, because they may still be committed.
4. Nothing is allocated before the token was verified and the size fits below the limit. The token shows the right to
   read the keys of the run. The secret shows that the sender may write them: its digest is in a key, the rank's offer.
5. Connections that have not presented the token are closed, oldest first, to make room for later ones. Readers, however
   slow, leave room for senders.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from raftkv.checkpoint.copies import transfer
from raftkv.checkpoint.digest import Digest, of_bytes
from raftkv.checkpoint.keys import RegistryKeys, kind_of
from raftkv.checkpoint.records import CopyRecord, HolderRecord, Latest, Offer
from raftkv.client.control import Control, Grant, Reflector, below, until_answered
from raftkv.client.operations import Operation, delete, get, put
from raftkv.client.records import RecordError, readable
from raftkv.client.values import DELETE, Event
from raftkv.errors import ConfigError, LeaseNotFoundError, RaftKVError

if TYPE_CHECKING:
    import mmap

_log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 64
READERS_MAX: Final = 48
"""Connections that may read copies at once; the others are for senders."""
HEAD_TIMEOUT_S: Final = 10.0
_DIGESTED_BYTES: Final = 8 << 20
"""Bytes that a thread digests at once."""
OPERATIONS_MAX: Final = 100
"""Maximum operations of one txn; etcd allows 128."""


class Me(NamedTuple):
    """The node of a holder.

    Attributes:
        name: name of this incarnation of the node.
        host: host name of its machine.
        address: address where others reach it, and where it listens.
        topology: location, as ``row1/rack7``.
    """

    name: str
    host: str
    address: str = "127.0.0.1"
    topology: str = ""


@dataclass(slots=True)
class Held:
    """The stored bytes of a copy.

    Attributes:
        memory: buffer, which may be longer than the bytes.
        size_bytes: number of bytes.
        copies: under which names they are announced.
        readers: number of current readers.
    """

    memory: mmap.mmap
    size_bytes: int
    copies: list[CopyRecord] = field(default_factory=list)
    readers: int = 0


class NoRoom(RaftKVError):
    """A copy does not fit into the limit of the holder."""


class Shelf:
    """The stored copies of a holder, and their keys in the catalogue.

    Arguments:
        control: the store.
        run_id: run id.
        record: record of the holder.
        limit_bytes: limit for all bytes together.
        ttl_s, grace_s: TTL and grace time of the lease; see ``Control.grant``.

    Attributes:
        record: record of the holder.
        held: bytes by digest.
        used_bytes: of all that is here or on its way.
    """

    def __init__(
        self, control: Control, run_id: str, record: HolderRecord, *, limit_bytes: int, ttl_s: int = 5,
        grace_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.record = record
        self.held: dict[str, Held] = {}
        self.used_bytes = 0
        self._control = control
        self._keys = RegistryKeys(run_id)
        self._limit_bytes = limit_bytes
        self._times = ttl_s, grace_s
        self._grant: Grant | None = None
        self._granting = asyncio.Lock()
        self._grants = 0
        self._latest: dict[str, Latest] = {}
        self._forgotten: dict[str, int] = {}
        self._spare: list[mmap.mmap] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._copy = Reflector(control, below(self._keys.latest_all), self._changed, on_restored=self._forgotten.clear)

    async def open(self) -> None:
        """Register, and follow the commits of the run.

        Raises:
            StatusError: the cluster refused.
        """
        self._copy.start()
        await self._leased()

    async def close(self, *, is_away: bool = False) -> None:
        """End the lease, and with it every key of this holder.

        Arguments:
            is_away: make no calls to the store; the lease ends with its TTL.
        """
        self._copy.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        grant, self._grant = self._grant, None
        if grant is not None:
            with contextlib.suppress(RaftKVError):
                await self._control.end(grant, revoke=not is_away)
        self.held.clear()

    # ---- bytes

    async def check_offered(self, copy: CopyRecord, secret: str) -> None:
        """Refuse a copy that its sender has not offered in the store.

        Arguments:
            copy: record of the copy.
            secret: what the sender presents.

        Raises:
            NoRoom: no program that may write the keys of the run has offered it, or another one than the sender.
            TimeoutError: the store did not answer in the time that a sender waits.
        """
        read = get(self._keys.attempt(copy.kind, copy.id).offer(copy.file))
        async with asyncio.timeout(transfer.IDLE_TIMEOUT_S):
            found = (await until_answered(lambda: self._control.txn((), [read]))).results[0]
        offer = Offer(copy.file, copy.size_bytes, copy.digest, of_bytes(secret.encode(errors="replace")))
        if readable(Offer, [found] if found else []) != [offer]:
            raise NoRoom(f"no writer of the run has offered {copy.digest} as {copy.file} of this attempt")

    async def take_room(self, size_bytes: int, generation: int) -> mmap.mmap:
        """Return memory for a copy of a generation; pass it to ``add`` or ``give_back``.

        Arguments:
            size_bytes: size of the copy.
            generation: generation of its attempt; open attempts of earlier ones were resolved, and are dropped if there
                is no room.

        Raises:
            NoRoom: it does not fit.
        """
        if self.used_bytes + size_bytes > self._limit_bytes:
            self._spare.clear()
            await self._copy.refresh()  # the newest commit, which stays, may be one of those generations'
            await self._let_go(lambda copy: self._is_over(copy) or self._is_left_over(copy, generation))
        if self.used_bytes + size_bytes > self._limit_bytes:
            raise NoRoom(f"{size_bytes} bytes more than {self.used_bytes} do not fit into {self._limit_bytes}")
        memory = self._memory_of(size_bytes)
        self.used_bytes += size_bytes
        return memory

    def _memory_of(self, size_bytes: int) -> mmap.mmap:
        for place, memory in enumerate(self._spare):
            if len(memory) == max(size_bytes, 1):
                return self._spare.pop(place)
        self._spare.clear()
        try:
            return transfer.memory_of(size_bytes)
        except OSError as error:  # the machine has less than the limit
            raise NoRoom(f"{size_bytes} bytes: {error}") from None

    def give_back(self, memory: mmap.mmap, size_bytes: int) -> None:
        """Return memory, for the next copy of the same size."""
        self.used_bytes -= size_bytes
        self._spare = [*self._spare[-3:], memory]

    async def add(self, copy: CopyRecord, memory: mmap.mmap | None) -> None:
        """Store and announce a copy whose digest was verified.

        Arguments:
            copy: record of the copy.
            memory: from ``take_room``; None: bytes with its digest are here.

        Raises:
            StatusError: the cluster refused.
        """
        held = self.held.get(copy.digest)
        if held is None:
            if memory is None:
                raise NoRoom("this node no longer has it")
            held = self.held[copy.digest] = Held(memory, copy.size_bytes)
        elif memory is not None:  # another rank has brought the same bytes meanwhile
            self.give_back(memory, copy.size_bytes)
        if copy not in held.copies:
            held.copies.append(copy)
        while True:
            lease = (await self._leased()).id
            try:
                await self._write([put(self._key(copy), copy.encode(), lease=lease)])
            except LeaseNotFoundError:
                self._grant = None
                continue
            break
        self._tidy()

    def has(self, digest: str, size_bytes: int) -> bool:
        """Return whether the bytes with a digest are stored here."""
        held = self.held.get(digest)
        return held is not None and held.size_bytes == size_bytes

    def _key(self, copy: CopyRecord) -> str:
        return self._keys.copy(copy.kind, copy.id, copy.file, copy.holder)

    async def _write(self, operations: Sequence[Operation]) -> None:
        for start in range(0, len(operations), OPERATIONS_MAX):
            part = operations[start : start + OPERATIONS_MAX]
            await until_answered(partial(self._control.txn, (), part))

    # ---- the lease

    async def _leased(self) -> Grant:
        """Return the lease; under a new lease, all copies are announced again."""
        async with self._granting:
            while self._grant is None:
                self._grants += 1
                lost = partial(self._lost, self._grants)
                grant = await until_answered(partial(self._control.grant, *self._times, lost))
                copies = [copy for held in self.held.values() for copy in held.copies]
                try:
                    await self._write([
                        put(self._keys.holder(self.record.holder), self.record.encode(), lease=grant.id),
                        *(put(self._key(copy), copy.encode(), lease=grant.id) for copy in copies),
                    ])  # fmt: skip
                except LeaseNotFoundError:
                    continue
                self._grant = grant
            return self._grant

    def _lost(self, number: int) -> None:
        if number == self._grants:  # else a call has met its end before
            self._grant = None
            self._start(self._leased())

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("raftkv: the process that holds checkpoint copies failed: %s", error)

    # ---- what goes

    def _changed(self, changes: Sequence[Event]) -> None:
        self._latest = {
            kind_of(item.key): latest for item in self._copy.items.values() for latest in readable(Latest, [item])
        }
        self._forgotten |= {kind_of(each.kv.key): each.kv.mod_revision for each in changes if each.type == DELETE}
        self._tidy()

    def _tidy(self) -> None:
        if any(self._is_over(copy) for held in self.held.values() for copy in held.copies):
            self._start(self._let_go(self._is_over))

    def _is_over(self, copy: CopyRecord) -> bool:
        """Return whether its attempt has ended: after a commit, no attempt of earlier generations is open."""
        if copy.id.began_revision < self._forgotten.get(copy.kind, 0):
            return True
        latest = self._latest.get(copy.kind)
        return latest is not None and (copy.generation, copy.step) < (latest.generation, latest.step)

    def _is_left_over(self, copy: CopyRecord, generation: int) -> bool:
        latest = self._latest.get(copy.kind)
        is_latest = latest is not None and (copy.step, copy.generation) == (latest.step, latest.generation)
        return copy.generation < generation and not is_latest

    async def _let_go(self, is_over: Callable[[CopyRecord], bool]) -> None:
        keys = []
        for digest, held in [*self.held.items()]:
            gone = [copy for copy in held.copies if is_over(copy)]
            held.copies = [copy for copy in held.copies if copy not in gone]
            keys += [delete(self._key(copy)) for copy in gone]
            if not held.copies and gone:
                del self.held[digest]
                if held.readers:
                    self.used_bytes -= held.size_bytes  # the memory goes with its last reader
                else:
                    self.give_back(held.memory, held.size_bytes)
        await self._write(keys)


class Holder:
    """Serves a shelf over TCP; started and ended by ``async with``.

    Arguments:
        control: the store.
        run_id: run id.
        me: the node.
        limit_bytes: limit for all copies together.
        ttl_s, grace_s: TTL and grace time of its lease.
    """

    def __init__(
        self, control: Control, run_id: str, me: Me, *, limit_bytes: int, ttl_s: int = 5, grace_s: float = 0.0
    ) -> None:
        self._me = me
        self._parts = control, run_id
        self._options: dict[str, Any] = {"limit_bytes": limit_bytes, "ttl_s": ttl_s, "grace_s": grace_s}
        self._token = secrets.token_hex(32)
        self._stack = contextlib.AsyncExitStack()
        self._serving: set[asyncio.Task[None]] = set()
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}
        """Connections that have not presented the token, oldest first."""
        self._readers = 0
        self._listener: socket.socket | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Listen, register, and serve."""
        me = self._me
        family = socket.AF_INET6 if ":" in me.address else socket.AF_INET
        try:
            listener = socket.create_server((me.address, 0), family=family)
        except OSError:  # others reach it there, but it is not this machine's own, as behind a translation of addresses
            listener = socket.create_server(("", 0), family=family)
        self._listener = listener
        listener.setblocking(False)
        shown = f"[{me.address}]" if ":" in me.address else me.address
        address = f"{shown}:{listener.getsockname()[1]}"
        record = HolderRecord(me.name, me.host, address, self._token, me.topology)
        self.shelf = Shelf(*self._parts, record, **self._options)
        try:
            await self.shelf.open()
        except BaseException:
            listener.close()
            raise
        self._spawn(self._accept(listener))

    async def close(self, *, is_away: bool = False) -> None:
        """Stop serving, and end the lease.

        Arguments:
            is_away: the store did not answer just now: the lease ends with its TTL.
        """
        for task in [*self._serving]:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            await self.shelf.close(is_away=is_away)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left: later
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            if len(self._serving) > CONNECTIONS_MAX:
                if not self._strangers:
                    connection.close()
                    continue
                self._strangers.pop(next(iter(self._strangers))).cancel()
            self._strangers[connection] = self._spawn(self._serve(connection))
            await asyncio.sleep(0)  # it has shown a token that is here already before it can be the oldest

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                async with asyncio.timeout(HEAD_TIMEOUT_S):
                    prefix = await _exactly(connection, transfer.HEAD.size)
                    head = transfer.decode(await _exactly(connection, transfer.length_of(prefix)))
                if not hmac.compare_digest(str(head.get("token")).encode(errors="replace"), self._token.encode()):
                    return
                self._strangers.pop(connection, None)
                await (self._put if head.get("do") == "put" else self._get)(connection, head)
            except (RecordError, NoRoom, ConfigError) as error:
                with contextlib.suppress(OSError, TimeoutError):
                    await _send(connection, transfer.encode({"error": str(error)[:200]}))
            except (OSError, ValueError, TimeoutError, RecursionError) as error:
                _log.debug("raftkv: a connection to the process that holds checkpoint copies failed: %s", error)
            except RaftKVError as error:
                _log.warning("raftkv: a checkpoint copy was refused: %s", error)
            finally:
                self._strangers.pop(connection, None)

    async def _get(self, connection: socket.socket, head: Mapping[str, Any]) -> None:
        held = self.shelf.held.get(str(head.get("digest")))
        if held is None:
            raise NoRoom("this node does not have it")
        if self._readers >= READERS_MAX:
            raise NoRoom(f"{READERS_MAX} others read from this node")
        self._readers += 1
        held.readers += 1
        try:
            await _send(connection, transfer.encode({"size_bytes": held.size_bytes}))
            view = memoryview(held.memory)[: held.size_bytes]
            async with asyncio.timeout(transfer.patience_s(held.size_bytes)):
                for start in range(0, held.size_bytes, transfer.PIECE_BYTES):
                    await _send(connection, view[start : start + transfer.PIECE_BYTES])
        finally:
            self._readers -= 1
            held.readers -= 1

    async def _put(self, connection: socket.socket, head: Mapping[str, Any]) -> None:
        shelf, own = self.shelf, self.shelf.record
        plain = {name: head[name] for name in _OF_SENDER if name in head}
        copy = CopyRecord.from_plain({
            **plain, "holder": own.holder, "host": own.host, "address": own.address, "token": own.token,
            "topology": own.topology,
        })  # fmt: skip
        await shelf.check_offered(copy, str(head.get("secret")))
        if shelf.has(copy.digest, copy.size_bytes):
            await shelf.add(copy, None)
            await _send(connection, transfer.encode({"has": True}))
            return
        memory = await shelf.take_room(copy.size_bytes, copy.generation)
        try:
            await _send(connection, transfer.encode({"has": False}))
            view, digest = memoryview(memory)[: copy.size_bytes], Digest.like(copy.digest)
            async with asyncio.timeout(transfer.patience_s(copy.size_bytes)):
                for start in range(0, len(view), _DIGESTED_BYTES):  # at the end the sender waits for the last alone
                    part = view[start : start + _DIGESTED_BYTES]
                    await _fill(connection, part)
                    await asyncio.to_thread(digest.update, part)
            if str(digest) != copy.digest:
                raise NoRoom("its bytes do not match their digest")
        except BaseException:
            shelf.give_back(memory, copy.size_bytes)
            raise
        await shelf.add(copy, memory)
        await _send(connection, transfer.encode({"has": True}))


_OF_SENDER: Final = ("kind", "step", "generation", "number", "file", "digest", "size_bytes")


async def _send(connection: socket.socket, data: bytes | memoryview) -> None:
    async with asyncio.timeout(transfer.IDLE_TIMEOUT_S):
        await asyncio.get_running_loop().sock_sendall(connection, data)


async def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    await _fill(connection, memoryview(data))
    return bytes(data)


async def _fill(connection: socket.socket, view: memoryview) -> None:
    loop, place = asyncio.get_running_loop(), 0
    while place < len(view):
        async with asyncio.timeout(transfer.IDLE_TIMEOUT_S):
            count = await loop.sock_recv_into(connection, view[place : place + transfer.PIECE_BYTES])
        if not count:
            raise ValueError(f"a connection ended after {place} of {len(view)} bytes")
        place += count
