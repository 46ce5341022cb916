"""Locks and elections: a queue of keys below a name; the oldest key holds the lock, or leads.

    NAME/LEASE1  created at 5   holds the lock             release deletes its key
    NAME/LEASE2  created at 8   waits for LEASE1's key     a deletion of that key or its own wakes it; then it reads
    NAME/LEASE3  created at 9   waits for LEASE2's             both in one txn, and only then holds the lock

::

    async with kv.lock("name", ttl=10) as lock:
        await kv.put("x", b"y", fence=lock)        # written only while the lock is still held
        lock.fence                                 # a number that increases with every holder: pass it to other systems

    lock = kv.lock("name")
    if await lock.try_acquire(): ...

A process that was stopped may still believe that it holds a lock. The lock cannot prevent this; only the store that
receives the writes can. So important writes carry ``fence=lock``: within the write, the cluster checks that the lock's
key still has the create revision of this holder, and otherwise refuses the write (``LockLost``). Other stores can
compare ``lock.fence``.

The block is interrupted with ``LeaseLost`` when the lease is lost, and raises ``LockLost`` at its end if another client
deleted the key. Each lock has a separate lease by default, because a lease can be in the queue of a name only once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, ClassVar, Self

from raftkv.client.arguments import limit
from raftkv.client.errors import FenceLost, LockLost, LockNotFree, TermLost, WatchCanceled
from raftkv.client.kv import KV, Txn
from raftkv.client.lease import Interrupt, Lease, Session, checked_ttl, farewell_s, seen_through
from raftkv.client.operations import Delete, Get, GetRange, Put, create_revision
from raftkv.client.operations import value as value_of
from raftkv.client.rpc import methods
from raftkv.client.rpc.retry import is_transient, until_answered
from raftkv.client.scope import Part, Scope, Text, to_bytes
from raftkv.client.values import KeyValue
from raftkv.client.watch import Request, Watcher, responses
from raftkv.errors import CompactedError, StatusError
from raftkv.pb import kv_pb2, rpc_pb2

# -- contender ------------------------------------------------------------------------------------------------------
#
# Waiting in a queue: the algorithm of locks and elections.
#
# Every contender has a key ``NAME/LEASEHEX``, attached to its lease; the key with the lowest create revision holds the
# lock or leads. The others wait for the deletion of the key right before theirs, so that a release wakes only one
# contender. The keys are those of etcd's own recipes: members' Lock and Election services and Go programs wait in the
# same queue.
#
# Invariants:
#
# 1. After every wait, and before a contender is first, one txn reads the contender's key (it still exists, with the
#    same create revision) *and* the keys before it.
# 2. A step with an unknown outcome is repeated: the value or lease of a key shows its owner.
# 3. The create revision is a fencing token. Losing the lease, or the key, is an error where it is relied upon.


class Contender:
    """One entry of a queue.

    Attributes:
        key: key of this contender, as the client sees it.
        fence: create revision of the key; 0: not in the queue.
    """

    def __init__(self, scope: Scope, name: Text, lease: Lease, error: type[FenceLost]) -> None:
        self.prefix = to_bytes(name) + b"/"
        self.key = self.prefix + b"%x" % lease.id
        self.fence = 0
        self._scope = scope
        self._lease = lease
        self._error = error
        self._value: Text = b""
        self._asked = False

    @property
    def guard_key(self) -> bytes:
        """The key as the store knows it."""
        return self._scope.space.key(self.key)

    def lost(self, reason: str = "") -> FenceLost:
        """Return the error for a lost place in the queue."""
        return self._error(self.guard_key, self.fence, reason)

    async def enqueue(self, value: Text) -> KeyValue | None:
        """Enter the queue; return the existing key if this contender is in the queue already."""
        self._value, self._asked = value, True

        async def step() -> KeyValue | None:
            txn = Txn(self._scope).when(create_revision(self.key) == 0)
            ok, results = await txn.then(Put(self.key, value, self._lease)).otherwise(Get(self.key)).commit()
            found: KeyValue | None = None if ok else results[0]
            self.fence = results[0].revision if ok else results[0].create_revision
            return found

        return await until_answered(step)

    async def predecessor(self) -> tuple[KeyValue | None, int]:
        """Return the key right before this one (None: this one is first), and the revision of the read.

        Raises:
            FenceLost: this contender's key is gone.
        """

        async def step() -> tuple[KeyValue | None, int]:
            newest: dict[str, Any] = {"limit": 1, "sort_by": "create_revision", "descending": True}
            before = GetRange(self.prefix, prefix=True, keys_only=True, max_create_revision=self.fence - 1, **newest)
            done = await Txn(self._scope).when(create_revision(self.key) == self.fence).then(before).commit()
            if not done.succeeded:
                raise self.lost()
            return (done.results[0][0] if done.results[0] else None), done.revision

        return await until_answered(step)

    async def wait_turn(self) -> int:
        """Wait until no key is before this one; return the revision at which that was read.

        Raises:
            FenceLost: this contender's key is gone.
            LeaseLost: the lease is lost.
        """
        while True:
            before, revision = await self.predecessor()
            if before is None:
                self._lease.check()
                return revision
            await self._wait_deleted((before.key, self.key), revision + 1)

    async def _wait_deleted(self, keys: Sequence[bytes], start_revision: int) -> None:
        """Wait until one of the keys is deleted, or its history is compacted."""
        hub, space = self._scope.hub, self._scope.space
        watchers = [Watcher(Request(space.key(key), start_revision=start_revision, no_put=True)) for key in keys]
        for watcher in watchers:
            hub.add(watcher)
        waiting = [asyncio.ensure_future(hub.next_response(watcher)) for watcher in watchers]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                with suppress(CompactedError):  # the caller reads the predecessor again
                    each.result()
        finally:
            for each, watcher in zip(waiting, watchers, strict=True):
                each.cancel()
                hub.remove(watcher)
            await asyncio.gather(*waiting, return_exceptions=True)

    async def leave(self, timeout_s: float | None = None) -> bool:
        """Leave the queue, also when it is unknown whether it was entered; return False if it was not.

        Arguments:
            timeout_s: None: the client's.

        Raises:
            StatusError: the cluster could not be reached.
        """
        if not self._asked:
            return False
        attempts = 0

        async def step() -> bool:
            nonlocal attempts
            attempts += 1
            if self.fence:
                ours = create_revision(self.key) == self.fence
            else:
                ours = value_of(self.key) == to_bytes(self._value)
            return (await Txn(self._scope).when(ours).then(Delete(self.key)).commit(timeout_s=timeout_s)).succeeded

        left = await until_answered(step, self._scope.timeout_s if timeout_s is None else timeout_s)
        # If the key is gone at a second attempt, the first attempt has probably deleted it.
        return left or attempts > 1


# -- holder ---------------------------------------------------------------------------------------------------------
#
# The common part of locks and terms: an entry in a queue, its lease, and the block in which it is held.
#
# Subclasses define how to enter the queue (``_join``), and the names of the public methods.


class Holder:
    """A lock or a term, held or not."""

    _error: ClassVar[type[FenceLost]] = FenceLost
    _not_first = "it is not held"

    def __init__(
        self,
        scope: Scope,
        name: Text,
        ttl: float,
        lease: Lease | Session | None,
        *,
        interrupt: bool = True,
        disconnect_grace_s: float = 0.0,
    ) -> None:
        self.name = name
        self._scope = scope
        self._ttl = checked_ttl(ttl)
        self._grace_s = disconnect_grace_s
        self._given = lease
        if lease is not None and not hasattr(lease, "check"):
            raise TypeError(f"lease= takes a lease or a session of this client, not {lease!r}")
        self._interrupts = interrupt
        self._lease: Lease | None = None
        self._place: Contender | None = None
        self._first = False
        self._is_entering = False
        self._block: Interrupt | None = None

    def __repr__(self) -> str:
        state = f"held, fence {self.fence}" if self._first else "waiting" if self.fence else "not held"
        return f"<{type(self).__name__} {self.name!r}: {state}>"

    # ---- public attributes

    @property
    def lease(self) -> Lease:
        """The lease of its key, which may be lost already.

        Raises:
            FenceLost: it never had a lease.
        """
        if self._lease is None:
            raise self._error(b"", 0, self._not_first)
        return self._lease

    @property
    def key(self) -> bytes:
        """The key, as the client sees it; empty while not in the queue."""
        return self._place.key if self._place is not None else b""

    @property
    def guard_key(self) -> bytes:
        """The key, as the store knows it; empty while not in the queue."""
        return self._place.guard_key if self._place is not None else b""

    @property
    def fence(self) -> int:
        """The fencing token: the create revision of the key; 0 while not in the queue."""
        return self._place.fence if self._place is not None else 0

    def check(self) -> None:
        """Raise ``LeaseLost`` or ``FenceLost`` if it is not safe to use."""
        if not self._first:
            raise self._error(self.guard_key, self.fence, self._not_first)
        self.lease.check()

    def broken(self) -> FenceLost:
        """Record that the cluster has found the key deleted or replaced; return the error to raise."""
        self._first = False
        return self._error(self.guard_key, self.fence)

    @property
    def _reliable(self) -> bool:
        return self._first and self._lease is not None and self._lease.alive

    # ---- entering and leaving the queue

    async def _join(self, place: Contender) -> None:
        """Enter the queue."""
        raise NotImplementedError

    async def _enter(self, timeout_s: float | None) -> None:
        timeout_s = limit(timeout_s, "timeout_s")
        try:
            async with asyncio.timeout(timeout_s):
                await self._try_to_enter(wait=True)
        except LockNotFree:
            raise
        except TimeoutError:
            raise LockNotFree(self.name, timeout_s) from None

    async def _try_to_enter(self, *, wait: bool) -> bool:
        if self._first or self._is_entering:
            raise LockNotFree(self.name, None, "by this very object; make one for each thread or task that wants it")
        self._is_entering = True
        try:
            await self._leave()  # the place of an attempt that could not give it back
            return await self._stand_in_line(wait)
        except BaseException as error:
            await self._leave_quietly(self._farewell_s(error))
            raise
        finally:
            self._is_entering = False

    async def _stand_in_line(self, wait: bool) -> bool:
        self._lease = lease = await self._get_lease()
        self._place = place = Contender(self._scope, self.name, lease, self._error)
        with lease.interrupting():
            await self._join(place)
            if wait:
                await place.wait_turn()
            elif (await place.predecessor())[0] is not None:
                await self._leave_quietly()
                return False
        lease.check()
        self._first = True
        return True

    async def _get_lease(self) -> Lease:
        if self._given is None:
            return await Lease(self._scope, self._ttl, disconnect_grace_s=self._grace_s)
        lease = self._given if isinstance(self._given, Lease) else self._given.lease
        lease.check()
        return lease

    async def _leave(self, timeout_s: float | None = None) -> None:
        """Leave the queue.

        Arguments:
            timeout_s: None: the client's.

        Raises:
            FenceLost: it was no longer held: another client may have held it in the meantime.
            StatusError: the cluster could not be reached; the key is deleted when the lease ends, or by another call.
        """
        place, was_first = self._place, self._first
        self._place, self._first = None, False
        if place is not None:
            await seen_through(self._give_back(place, timeout_s, was_first=was_first))

    async def _give_back(self, place: Contender, timeout_s: float | None, *, was_first: bool) -> None:
        try:
            left = await place.leave(timeout_s)
        except StatusError as error:
            if self._given is not None:
                self._place = self._place or place  # its lease goes on, so the key stays until this is repeated
            elif is_transient(error) and self._lease is not None:
                self._lease.stop()  # a revocation would fail too
            raise
        finally:
            await self._end_lease(timeout_s)
        if was_first and not left:
            raise place.lost()

    def _farewell_s(self, error: BaseException | None) -> float | None:
        """Return the time limit of the release; unlimited if the caller's lease would keep a leftover key alive."""
        return farewell_s(error) if self._given is None else None

    async def _end_lease(self, timeout_s: float | None) -> None:
        if self._given is None and self._lease is not None:
            with suppress(StatusError):  # the keep-alives have stopped, so the lease expires
                await self._lease.revoke(timeout_s)

    async def _leave_quietly(self, timeout_s: float | None = None) -> None:
        self._first = False
        with suppress(StatusError):  # the lease expires, or the caller must end it
            await self._leave(timeout_s)

    # ---- as a block

    async def __aenter__(self) -> Self:
        await self._enter(None)
        if self._interrupts:
            self._block = self.lease.interrupting()
            self._block.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, self._block = self._block, None
        is_lost = self._lease is not None and self._lease.lost.is_set()
        try:
            if block is not None:
                block.__exit__(kind, error, trace)
        finally:
            if kind is not None or is_lost:
                await self._leave_quietly(self._farewell_s(error))
            else:
                await self._leave()
        if is_lost and kind is None:
            self.lease.check()


class Lock(Holder):
    """One lock of one holder; created by ``Client.lock``. Not reentrant; only one task may use it at a time."""

    _error = LockLost

    @property
    def held(self) -> bool:
        """Whether the lock is held and safe to use, as far as this client knows."""
        return self._reliable

    async def acquire(self, timeout_s: float | None = None) -> Lock:
        """Wait for the lock.

        Arguments:
            timeout_s: None: no limit.

        Raises:
            LockNotFree: others held the lock until the timeout.
            LeaseLost: the lease ended while waiting.
            LockLost: another client deleted the key while waiting.
            StatusError: the cluster refused, or could not be reached at the start.
        """
        await self._enter(timeout_s)
        return self

    async def try_acquire(self) -> bool:
        """Acquire the lock if it is free; return False if another holder has it."""
        return await self._try_to_enter(wait=False)

    async def release(self) -> None:
        """Release the lock; does nothing if it is not held.

        Raises:
            LockLost: the lock was no longer held: another client may have held it in the meantime.
            StatusError: the cluster could not be reached; the key is deleted when the lease ends, or by another call.
        """
        await self._leave()

    async def _join(self, place: Contender) -> None:
        # The mark distinguishes a key put by this attempt, whose answer was lost, from another holder's key.
        mark = secrets.token_hex(8)
        found = await place.enqueue(mark)
        if found is not None and found.value != mark.encode():
            place.fence = 0
            raise LockNotFree(self.name, None, "with the same lease")


class Locks(Part):
    """Methods for locks."""

    def lock(
        self, name: Text, *, ttl: float = 10, lease: Lease | Session | None = None, interrupt: bool = True
    ) -> Lock:
        """Return a new lock, to be acquired by ``async with`` or ``acquire``.

        Arguments:
            name: lock name; holders of the same name exclude each other, including other etcd clients.
            ttl: seconds after which a dead or partitioned holder loses the lock.
            lease: lease to use instead of a new one.
            interrupt: whether to interrupt the block when the lease is lost; if False, the block raises ``LeaseLost``
                at its end.
        """
        return Lock(self.scope, name, ttl, lease, interrupt=interrupt)


# -- election -------------------------------------------------------------------------------------------------------
#
# Elections: one leader among the candidates, and observers that follow the leader.
#
# ::
#
#     async with kv.campaign("leader", b"10.0.0.1:80", ttl=10) as term:      # waits until it is leader
#         await term.proclaim(b"10.0.0.1:81")
#         await kv.put("x", b"y", fence=term)                                # only while it is leader
#
#     async for leader in kv.observe("leader"): print(leader.value)
#
# A term ends by ``resign``, with its lease, or when a client deletes its key. As with locks, the block is interrupted
# when the lease is lost, and only ``fence=term`` prevents late writes of a leader that was stopped.


class Term(Holder):
    """A candidacy, and the term that follows it; created by ``Client.campaign``."""

    _error = TermLost
    _not_first = "it does not lead"

    def __init__(self, scope: Scope, name: Text, value: Text, *how: Any, **more: Any) -> None:
        super().__init__(scope, name, *how, **more)
        self._value = value

    @property
    def leads(self) -> bool:
        """Whether this candidate is leader, as far as this client knows."""
        return self._reliable

    async def campaign(self, timeout_s: float | None = None) -> Term:
        """Wait until this candidate is leader.

        Arguments:
            timeout_s: None: no limit.

        Raises:
            LockNotFree: others were leader until the timeout.
            LeaseLost: the lease ended while waiting.
            TermLost: another client deleted the key while waiting.
            StatusError: the cluster refused, or could not be reached at the start.
        """
        await self._enter(timeout_s)
        return self

    async def proclaim(self, value: Text) -> None:
        """Change the value that observers see.

        Raises:
            TermLost: this candidate is no longer leader.
            LeaseLost: the lease is lost.
            StatusError: the outcome is unknown; the call may be repeated.
        """
        self.check()
        if not await self._write(value):
            raise self.broken()

    async def resign(self) -> None:
        """End the term; does nothing if it has ended.

        Raises:
            TermLost: the term had ended already: another candidate may have been leader in the meantime.
            StatusError: the cluster could not be reached; the key is deleted when the lease ends, or by another call.
        """
        await self._leave()

    async def _join(self, place: Contender) -> None:
        found = await place.enqueue(self._value)
        if found is not None and found.value != to_bytes(self._value) and not await self._write(self._value):
            raise place.lost()

    async def _write(self, value: Text) -> bool:
        ours = create_revision(self.key) == self.fence
        done = await Txn(self._scope).when(ours).then(Put(self.key, value, self.lease)).commit()
        if done.succeeded:
            self._value = value
        return done.succeeded


class Elections(Part):
    """Methods for elections."""

    def campaign(
        self,
        name: Text,
        value: Text = b"",
        *,
        ttl: float = 10,
        lease: Lease | Session | None = None,
        interrupt: bool = True,
    ) -> Term:
        """Return a new candidacy, to be run by ``async with`` or ``Term.campaign``.

        Arguments:
            name: name of the election.
            value: value for observers during the term, e.g. the leader's address.
            ttl, lease, interrupt: as for ``lock``.
        """
        return Term(self.scope, name, value, ttl, lease, interrupt=interrupt)

    async def leader(self, name: Text) -> KeyValue | None:
        """Return the key of the current leader; None: there is no leader."""
        found = await KV(self.scope).range(to_bytes(name) + b"/", prefix=True, limit=1, sort_by="create_revision")
        return found[0] if found else None

    async def observe(self, name: Text) -> AsyncGenerator[KeyValue, None]:
        """Yield the leader, each proclamation and each next leader; resumes like a watch, and never ends by itself.

        Raises:
            StatusError: the cluster refuses.
        """
        async with aclosing(observations(self.scope, name)) as answers:
            async for answer in answers:
                yield self.scope.space.key_value(answer.kvs[0])


async def observations(
    scope: Scope, name: Text, *, on_trouble: Callable[[StatusError | None], None] | None = None
) -> AsyncGenerator[rpc_pb2.RangeResponse, None]:
    """Follow an election, and yield messages in the form of etcd's clients; for programs that forward them.

    Each response has the header of the message that it came with, and one key, that of the leader. A proclamation has
    ``count`` and ``more`` of the read that found the leader.

    Arguments:
        scope: scope of the client.
        name: name of the election.
        on_trouble: see ``until_answered``.

    Raises:
        StatusError: the cluster refuses.
    """
    line = to_bytes(name) + b"/"
    oldest = GetRange(line, prefix=True, limit=1, sort_by="create_revision").request(scope.space)
    shown: kv_pb2.KeyValue | None = None
    while True:
        answer = await until_answered(lambda: scope.call(methods.RANGE, oldest), on_trouble=on_trouble)
        try:
            if not answer.kvs:
                later = Request(oldest.key, oldest.range_end, answer.header.revision + 1, no_delete=True)
                found = await _first_candidate(scope, later)
            else:
                found = rpc_pb2.RangeResponse(header=answer.header, kvs=answer.kvs)
            leader = found.kvs[0]
            if leader != shown:
                shown = leader
                yield found
            proclaimed = Request(leader.key, start_revision=found.header.revision + 1)
            async with aclosing(_events(scope, proclaimed)) as changes:
                async for header, event in changes:
                    if event.type == kv_pb2.Event.DELETE:
                        break
                    shown = event.kv
                    yield rpc_pb2.RangeResponse(header=header, kvs=[shown], count=answer.count, more=answer.more)
        except CompactedError:
            continue


async def _first_candidate(scope: Scope, request: Request) -> rpc_pb2.RangeResponse:
    async with aclosing(_events(scope, request)) as changes:
        async for header, event in changes:
            header.revision = event.kv.mod_revision
            return rpc_pb2.RangeResponse(header=header, kvs=[event.kv])
    raise WatchCanceled("the client is closed")


async def _events(scope: Scope, request: Request) -> AsyncGenerator[tuple[rpc_pb2.ResponseHeader, kv_pb2.Event], None]:
    async with aclosing(responses(scope.hub, Watcher(request))) as messages:
        async for message in messages:
            for event in message.events:
                yield message.header, event
