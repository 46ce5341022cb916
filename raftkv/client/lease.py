"""Leases: keys that are deleted when their owner is gone. Sessions: a new lease after a loss.

::

    async with kv.lease(ttl=10) as lease:              # granted, kept alive, revoked at the end
        await kv.put("workers/1", b"here", lease=lease)
        ...                                            # a loss interrupts this block with LeaseLost

    lease = await kv.lease(ttl=10)                     # the same without a block: ends with revoke() or the client
    lease.on_lost(lambda lease: ...)
    await lease.lost.wait()

A lease is *lost* when the cluster does not know it any more, or was restored from a backup and so is another cluster.
It is also lost when the TTL has passed, on this machine's clock, since the last confirmed keep-alive was *sent*:
another owner may then hold what the lease protected, even if the cluster still knows the lease. (A lease with
``patient=True`` ignores this last rule.) A process that was stopped for longer than the TTL, or whose machine was
suspended, notices the loss at its next ``check``, even before the event loop runs again; every call with ``lease=``
makes a check.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from raftkv.client.arguments import function, limit, seconds, whole
from raftkv.client.errors import EndpointsFailed, LeaseLost
from raftkv.client.kv import KV, Txn
from raftkv.client.operations import delete, lease_of, mod_revision, put
from raftkv.client.rpc import methods
from raftkv.client.rpc.core import Client, Stream
from raftkv.client.rpc.methods import Method
from raftkv.client.rpc.retry import Backoff, is_transient
from raftkv.client.scope import Part, Scope, Text, to_bytes
from raftkv.client.values import LeaseInfo
from raftkv.errors import PERMISSION_DENIED, LeaseNotFoundError, PermissionDeniedError, RaftKVError, StatusError
from raftkv.loop.outcomes import outcome_of
from raftkv.pb import rpc_pb2
from raftkv.suspend_clock import SuspendClock

# -- interrupts -----------------------------------------------------------------------------------------------------
#
# Stopping a block of code when the lease or key that it needs is lost.
#
# Works like ``asyncio.timeout``: the task in the block is cancelled, and at the end of the block this cancellation
# becomes an error of raftkv. Cancellations from elsewhere pass through.
#
# ::
#
#     with interrupting(lease) :          # CancelledError inside becomes LeaseLost outside
#         await something_long()

T = TypeVar("T")

FAREWELL_S: Final = 0.5
"""Time limit of the cleanup after an interrupted block: a user who pressed Ctrl-C waits for the prompt. What could not
be released ends with its lease."""


def farewell_s(error: BaseException | None) -> float | None:
    """Return the time limit of the cleanup at the end of a block; None: the limit of any call.

    Arguments:
        error: exception that the block ended with.
    """
    return FAREWELL_S if isinstance(error, KeyboardInterrupt | asyncio.CancelledError) else None


_farewells: Final[set[asyncio.Task[Any]]] = set()
"""Cleanup tasks in progress. The event loop holds only weak references to tasks."""


async def seen_through(step: Coroutine[Any, Any, T]) -> T:
    """Run a cleanup step that continues in the background if its caller is cancelled; the caller then leaves at once.

    Otherwise a second cancellation would leave the lease or key in the cluster without an owner.

    Arguments:
        step: coroutine that releases the lease or key.
    """
    task = asyncio.get_running_loop().create_task(step)
    _farewells.add(task)
    task.add_done_callback(_farewells.discard)
    return await outcome_of(task)


class Interrupt:
    """An interruptible block in one task.

    Arguments:
        subscribe: function that registers ``fire`` to be called on the loss, and returns a function to unregister it.
        error: creates the error that the block ends with.
    """

    __slots__ = ("_cancelling", "_error", "_subscribe", "_task", "_unsubscribe", "fired")

    def __init__(
        self, subscribe: Callable[[Callable[[Any], None]], Callable[[], None]], error: Callable[[], Exception]
    ) -> None:
        self.fired = False
        self._subscribe = subscribe
        self._error = error
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._unsubscribe: Callable[[], None] | None = None

    def fire(self, lost: Any = None) -> None:
        """Interrupt the block after the loss, unless its own task reports the loss and is about to raise."""
        if self.fired or self._task is None or self._task is asyncio.current_task():
            return
        self.fired = True
        self._task.cancel()

    def __enter__(self) -> Interrupt:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._unsubscribe = self._subscribe(self.fire)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        task, self._task = self._task, None
        if not self.fired or task is None or task is not asyncio.current_task():
            return
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error() from None


def tell(callback: Callable[[T], Any], news: T) -> None:
    """Call a user's callback on the loop; its exceptions go to the loop's exception handler.

    Arguments:
        callback: function of a user.
        news: argument of the callback.
    """
    try:
        callback(news)
    except Exception as error:
        context = {"message": f"raftkv: a callback failed: {callback!r}", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)


class Callbacks(Generic[T]):
    """Functions that are called with news; each can be cancelled.

    A callback that is added twice is called twice. When a callback adds or cancels callbacks, this takes effect at the
    next call.
    """

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[T], Any]] = {}
        self._last = 0

    def __iter__(self) -> Iterator[Callable[[T], Any]]:
        return iter(list(self._callbacks.values()))

    def add(self, callback: Callable[[T], Any], name: str = "a callback") -> Callable[[], None]:
        """Add a callback; return a function that cancels it, which is harmless when repeated."""
        self._last += 1
        number = self._last
        self._callbacks[number] = function(callback, name)
        return lambda: self._callbacks.pop(number, None) and None

    def call(self, news: T) -> None:
        """Call all, in the order in which they came."""
        for callback in self:
            callback(news)


_sleep: Final = SuspendClock()


def lease_now() -> float:
    """Return the time of the leases' clock: the loop's time plus the time in suspension; must be called on the loop.

    Leases expire in the cluster while the machine is suspended, so a lease may have ended when the machine resumes.
    """
    _sleep.has_slept()
    return _sleep.total_s + asyncio.get_running_loop().time()


OnLost = Callable[["Lease"], Any]

GRACE_MAX_S = 9_000_000_000
"""The longest TTL that the cluster grants."""
SHORTEST_S = 0.001
"""Time limit of a grant that has used up its time waiting for a concurrent grant of the same lease."""
_GRANT_ANY = Method(methods.LEASE_GRANT.path, methods.LEASE_GRANT.response, True)
"""A grant with any id: if the answer is lost, the granted lease expires unused, so the call may be repeated."""


def checked_ttl(ttl: float) -> float:
    """Return a valid TTL.

    Raises:
        TypeError: the TTL is not a number.
        ValueError: the TTL is not positive, or not finite.
    """
    if seconds(ttl, "the TTL of a lease") <= 0:
        raise ValueError(f"the TTL of a lease must be positive, not {ttl:g}")
    return ttl


class Lease:
    """One lease; created by ``Client.lease``, granted by ``await`` or ``async with``.

    Attributes:
        id: lease id; 0 until it is granted.
        ttl: seconds that the cluster has granted; before the grant, the requested seconds.
        lost: event that is set when the lease is lost.
        disconnect_grace_ms: time for which the lease outlives a broken connection; 0: its TTL.
        patient: whether the lease is lost only when the cluster says so. The cluster's minimum TTL, which lets other
            leases survive an election, does not apply to such a lease.
    """

    def __init__(
        self,
        scope: Scope,
        ttl: float,
        *,
        id: int = 0,
        interrupt: bool = True,
        disconnect_grace_s: float = 0.0,
        patient: bool = False,
    ) -> None:
        checked_ttl(ttl)
        if not 0 <= seconds(disconnect_grace_s, "disconnect_grace_s") <= GRACE_MAX_S:
            raise ValueError(f"the grace of a lease is from 0 to {GRACE_MAX_S} s, not {disconnect_grace_s:g} s")
        self.id = whole(id, "the id of a lease")
        # Rounded up, because 0 means no grace period.
        self.disconnect_grace_ms = math.ceil(disconnect_grace_s * 1000)
        self.patient = patient
        self.ttl = math.ceil(ttl)
        self.lost = asyncio.Event()
        self._scope = scope
        self._deadline = 0.0
        self._granted = False
        self._granting = asyncio.Lock()
        self._over = ""
        self._cluster_id = 0
        self._callbacks: Callbacks[Lease] = Callbacks()
        self._timer: asyncio.TimerHandle | None = None
        self._interrupt = self.interrupting() if interrupt else None

    def __repr__(self) -> str:
        state = f"over: {self._over}" if self._over else "kept alive" if self._granted else "not granted yet"
        return f"<Lease {self.id:x}: ttl {self.ttl} s, {state}>"

    # ---- lifecycle

    def __await__(self) -> Generator[Any, None, Lease]:
        return self.grant().__await__()

    async def grant(self, timeout_s: float | None = None) -> Lease:
        """Grant the lease and keep it alive; does nothing the second time.

        Raises:
            LeaseExistsError: the id is in use.
            StatusError: the lease could not be granted.
        """
        loop_time = asyncio.get_running_loop().time
        deadline = loop_time() + (self._scope.timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s"))
        async with self._granting:  # concurrent callers share one grant
            if not self._granted:
                await self._ask_for_it(max(deadline - loop_time(), SHORTEST_S))
        return self

    async def _ask_for_it(self, timeout_s: float) -> None:
        scope = self._scope
        method = methods.LEASE_GRANT if self.id else _GRANT_ANY
        request = rpc_pb2.LeaseGrantRequest(TTL=self.ttl, ID=self.id, exact_ttl=self.patient)
        asked_at = lease_now()
        answer = await scope.core.call(method, request, timeout_s=timeout_s)
        self.id, self.ttl, self._granted = answer.ID, answer.TTL, True
        self._cluster_id = answer.header.cluster_id
        self.renewed(answer.TTL, asked_at)
        scope.keeper.heard_of(self._cluster_id)
        scope.keeper.add(self)

    async def revoke(self, timeout_s: float | None = None) -> None:
        """End the lease now, and delete all its keys. The keep-alives stop, even if this call fails.

        Raises:
            StatusError: the cluster could not be reached; the lease expires with its TTL.
        """
        if not self._granted or self._over:
            return
        self.stop("it was revoked")
        # The lease may be gone: an earlier attempt succeeded but its answer was lost, or the lease expired.
        with suppress(LeaseNotFoundError):
            await self._scope.call(_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=self.id), timeout_s)

    def stop(self, reason: str = "it is no longer kept alive") -> None:
        """Stop the keep-alives, and let the lease expire."""
        self._over = self._over or reason
        self._scope.keeper.remove(self)
        if self._timer is not None:
            self._timer.cancel()

    async def info(self, *, keys: bool = False, timeout_s: float | None = None) -> LeaseInfo:
        """Return the cluster's information about the lease.

        Arguments:
            keys: whether to list its keys too.
            timeout_s: None: the client's.
        """
        return await lease_info(self._scope, self.id, keys=keys, timeout_s=timeout_s)

    @property
    def cluster_id(self) -> int:
        """Return the id of the cluster that granted the lease; 0: not granted, or unknown."""
        return self._cluster_id

    # ---- validity

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lease is certainly still valid, unless it is revoked; 0: none."""
        if not self._granted or self._over:
            return 0.0
        return max(self._deadline - lease_now(), 0.0)

    @property
    def silent_s(self) -> float:
        """Seconds since the last confirmed keep-alive was sent; for a patient lease this may exceed the TTL by far."""
        return max(lease_now() - (self._deadline - self.ttl), 0.0)

    @property
    def alive(self) -> bool:
        """Whether the lease is safe to use; a patient lease is, until the cluster reports that it is gone."""
        if self.patient:
            return self._granted and not self._over
        return self.remaining_s > 0.0

    def check(self) -> None:
        """Raise ``LeaseLost`` if the lease is not safe to use."""
        if self.alive:
            return
        if not self._granted:
            raise LeaseLost(self.id, "it was never granted: await it, or enter it with async with")
        if not self._over:
            self._expire()
        raise LeaseLost(self.id, self._over)

    def on_lost(self, callback: OnLost) -> Callable[[], None]:
        """Call a function on the loop when the lease is lost (at once if it is). Return a function to undo this."""
        cancel = self._callbacks.add(callback, "on_lost")
        if self.lost.is_set():
            callback(self)
        return cancel

    def interrupting(self) -> Interrupt:
        """Return a context manager whose block is interrupted with ``LeaseLost`` when the lease is lost."""
        return Interrupt(self.on_lost, lambda: LeaseLost(self.id, self._over))

    # ---- for the keeper and for calls that used the lease

    def answered(self, answer: rpc_pb2.LeaseKeepAliveResponse, asked_at: float) -> None:
        """Process a member's answer to a keep-alive.

        Arguments:
            answer: answer of the member.
            asked_at: time at which the keep-alive was sent, by ``lease_now``.
        """
        self._scope.keeper.heard_of(answer.header.cluster_id)
        if answer.TTL > 0:
            self.renewed(answer.TTL, asked_at)
        else:
            self.lose("the cluster no longer knows it")

    def refused(self, error: StatusError) -> None:
        """Record that a member refuses to serve keep-alives; the lease remains valid until its deadline."""

    def renewed(self, ttl: int, asked_at: float) -> None:
        """Extend the deadline after an answer of the cluster.

        Arguments:
            ttl: TTL in seconds that the cluster has confirmed.
            asked_at: time at which the keep-alive was sent, by ``lease_now``.
        """
        self.ttl = ttl
        self._deadline = max(self._deadline, asked_at + ttl)
        if self._timer is None and not self.patient:
            self._watch_deadline()

    def lose(self, reason: str) -> None:
        """Mark the lease as lost, and notify its owner."""
        if self._over:
            return
        self.stop(reason)
        self.lost.set()
        for callback in self._callbacks:
            tell(callback, self)

    def _watch_deadline(self) -> None:
        # One timer: renewals only move the deadline, and a timer that fires too early is restarted.
        if self._over:
            return
        left_s = self._deadline - lease_now()
        if left_s > 0.0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._watch_deadline)
        else:
            self._expire()

    def _expire(self) -> None:
        failures = self._scope.keeper.failures
        because = f" (last failure: {list(failures.values())[-1]})" if failures else ""
        self.lose(f"no keep-alive was confirmed within {self.ttl} s{because}")

    # ---- as a block

    async def __aenter__(self) -> Lease:
        await self.grant()
        if self._interrupt is not None:
            self._interrupt.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._interrupt is not None:
            self._interrupt.__exit__(kind, error, trace)
        if self.lost.is_set():
            if kind is None:
                raise LeaseLost(self.id, self._over)
            return
        with suppress(StatusError):  # the keep-alives have stopped, so the lease expires
            await self.revoke(farewell_s(error))


_REVOKE = Method(methods.LEASE_REVOKE.path, methods.LEASE_REVOKE.response, True, cancellable=False)
"""Revokes a lease of this client. A lease that is gone already is not a failure, so the call may be repeated. It
continues when its caller is cancelled, because the lease must end in any case."""


async def lease_info(scope: Scope, id: int, *, keys: bool, timeout_s: float | None) -> LeaseInfo:
    """Return the cluster's information about a lease; of its keys, those within the scope's view.

    Arguments:
        scope: scope of the client.
        id: lease id.
        keys: whether to list its keys too.
        timeout_s: None: the client's.
    """
    answer = await scope.call(methods.LEASE_TIME_TO_LIVE, rpc_pb2.LeaseTimeToLiveRequest(ID=id, keys=keys), timeout_s)
    prefix = scope.space.prefix
    own = tuple(key[len(prefix) :] for key in answer.keys if key.startswith(prefix))
    return LeaseInfo(answer.ID, answer.TTL, answer.grantedTTL, own)


class Leases(Part):
    """Methods that create, inspect and revoke leases."""

    def lease(
        self,
        ttl: float,
        *,
        id: int = 0,
        on_lost: OnLost | None = None,
        interrupt: bool = True,
        disconnect_grace_s: float = 0.0,
        patient: bool = False,
    ) -> Lease:
        """Return a new lease, to be granted by ``await`` or ``async with``.

        Arguments:
            ttl: seconds without a keep-alive after which the lease expires; the cluster may grant more.
            id: lease id; 0: any.
            on_lost: called on the loop when the lease is lost.
            interrupt: whether to interrupt the ``async with`` block when the lease is lost; if False, the block raises
                ``LeaseLost`` at its end.
            disconnect_grace_s: seconds after which the lease expires when this process's connection broke and was not
                replaced; 0: only the TTL counts. raftkv only; etcd ignores it and uses the TTL.
            patient: whether the lease is lost only when the cluster says so, never because the cluster is unreachable:
                for owners whose work must continue through an outage of the whole cluster. Another owner may then hold
                what the lease protected before this owner knows, so writes that depend on the lease must carry a fence.
        """
        lease = Lease(
            self.scope, ttl, id=id, interrupt=interrupt, disconnect_grace_s=disconnect_grace_s, patient=patient
        )
        if on_lost is not None:
            lease.on_lost(on_lost)
        return lease

    async def lease_info(self, id: int, *, keys: bool = False, timeout_s: float | None = None) -> LeaseInfo:
        """Return the cluster's information about a lease; ``ttl`` is -1 if it does not exist.

        Arguments:
            id: lease id.
            keys: whether to list its keys too, as far as the view goes.
            timeout_s: None: the client's.
        """
        return await lease_info(self.scope, id, keys=keys, timeout_s=timeout_s)

    async def leases(self, *, timeout_s: float | None = None) -> list[int]:
        """Return the ids of all leases."""
        answer = await self.scope.call(methods.LEASE_LEASES, rpc_pb2.LeaseLeasesRequest(), timeout_s)
        return [lease.ID for lease in answer.leases]

    async def revoke(self, id: int, *, timeout_s: float | None = None) -> None:
        """Revoke a lease that another client may own.

        Arguments:
            id: lease id.
            timeout_s: None: the client's.

        Raises:
            LeaseNotFoundError: the lease does not exist.
        """
        await self.scope.call(methods.LEASE_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=id), timeout_s)


# -- session --------------------------------------------------------------------------------------------------------
#
# Sessions: a lease that is replaced after a loss, and the keys attached to it.
#
# ::
#
#     async with kv.session(ttl=10, on_lost=stop_work, on_established=start_work) as session:
#         await session.keep("workers/1", b"10.0.0.1")      # put again whenever the session is established anew
#         await kv.put("x", b"y", lease=session)
#
# When its lease is lost (the process was paused, or the cluster was unavailable for longer than the TTL), a session
# calls ``on_lost``, gets a new lease as soon as the cluster answers, puts its keys again, and calls
# ``on_established``. In between, calls that use the session raise ``LeaseLost``. If another client has put a key in the
# meantime, the session leaves that key alone from then on, and logs its name. ``generation`` counts the leases: locks
# and terms do not survive a change of it.

_log = logging.getLogger(__name__)

OnSession = Callable[["Session"], Any]


class Session:
    """One session; created by ``Client.session``, established by ``await`` or ``async with``.

    Attributes:
        generation: number of leases so far; 0: none yet.
        error: why the session is not established at present; None while it is.
    """

    def __init__(self, scope: Scope, ttl: float, on_lost: OnSession | None, on_established: OnSession | None) -> None:
        self.generation = 0
        self.error: Exception | None = None
        self._scope = scope
        self._kv = KV(scope)
        self._ttl = checked_ttl(ttl)
        self._on_lost = on_lost
        self._on_established = on_established
        self._lease: Lease | None = None
        self._kept: dict[bytes, bytes] = {}
        self._changed = asyncio.Event()
        self._establishing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        if self._lease is None:
            return f"<Session: ttl {self._ttl:g} s, not established yet>"
        state = "established" if self.error is None else f"lost: {self.error}"
        return f"<Session: {state}, lease {self._lease.id:x}, ttl {self._ttl:g} s, generation {self.generation}>"

    # ---- as a lease

    @property
    def lease(self) -> Lease:
        """The current lease, which may be lost already.

        Raises:
            LeaseLost: the session has not had a lease yet.
        """
        if self._lease is None:
            raise LeaseLost(0, "the session was never established: await it, or enter it with async with")
        return self._lease

    @property
    def id(self) -> int:
        """Id of the current lease."""
        return self.lease.id

    @property
    def alive(self) -> bool:
        """Whether the current lease is safe to use."""
        return self._lease is not None and self._lease.alive

    def check(self) -> None:
        """Raise ``LeaseLost`` if the current lease is not safe to use."""
        self.lease.check()

    def lose(self, reason: str) -> None:
        """Record that the cluster does not know the current lease any more."""
        self.lease.lose(reason)

    # ---- lifecycle

    async def establish(self) -> Session:
        """Get the first lease; does nothing the second time.

        Raises:
            StatusError: the cluster did not grant a lease.
        """
        async with self._establishing:  # concurrent callers share one grant
            if self._lease is None:
                self._lease = await Lease(self._scope, self._ttl)
                self.generation = 1
                self._task = asyncio.get_running_loop().create_task(self._stay())
        return self

    def __await__(self) -> Generator[Any, None, Session]:
        return self.establish().__await__()

    async def established(self, generation: int = 1, *, timeout_s: float | None = None) -> None:
        """Wait until the session is established for at least the given number of times.

        Arguments:
            generation: number of leases to wait for.
            timeout_s: None: no limit.

        Raises:
            LeaseLost: the session has ended, or was never established.
            TimeoutError: the session was not established in time.
        """
        timeout_s = limit(timeout_s, "timeout_s")
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_established(generation)
        except TimeoutError:
            why = f": {self.error}" if self.error is not None else ""
            raise TimeoutError(f"the session was not established within {timeout_s or 0:g} s{why}") from None

    async def _wait_established(self, generation: int) -> None:
        while self.generation < generation or self.error is not None or not self.alive:
            if self._task is None or self._task.done():
                self.check()
            await self._changed.wait()

    async def keep(self, key: Text, value: Text) -> None:
        """Put a key with the session's lease, now and each time the session is established again.

        The first put is unconditional. Later puts are skipped if another client has put the key since. (A user without
        read permission cannot see this, and always puts.)

        Arguments:
            key, value: as for ``put``.

        Raises:
            LeaseLost: the session is not established now; the key is put when it is, unless another client has put it.
            StatusError: the put failed; see ``definite``. It is repeated with the next lease.
        """
        name = to_bytes(key)
        self._kept[name] = to_bytes(value)
        await self._kv.put(name, value, lease=self.lease)

    async def drop(self, key: Text) -> None:
        """Delete a key, unless another client has put it since, and stop keeping it."""
        name = to_bytes(key)
        self._kept.pop(name, None)
        if self._lease is not None:
            await self._delete(name, self._lease)

    async def _delete(self, name: bytes, lease: Lease) -> None:
        """Delete a key if it is attached to a lease of this session; otherwise it belongs to another client."""
        await Txn(self._scope).when(lease_of(name) == lease.id).then(delete(name)).commit()

    async def close(self) -> None:
        """End the session and delete its keys. ``on_lost`` is not called, because the owner requested the end."""
        await seen_through(self._give_back(None))

    async def _give_back(self, timeout_s: float | None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._lease is not None:
            with suppress(RaftKVError):  # the keep-alives have stopped, so the lease expires
                await self._lease.revoke(timeout_s)

    async def _stay(self) -> None:
        while True:
            await self.lease.lost.wait()
            self.error = LeaseLost(self.lease.id, "its session is being established again")
            self._tell(self._on_lost)
            if self._scope.core.closed:
                return
            await self._establish_again()
            self.error = None
            self.generation += 1
            self._tell(self._on_established)

    async def _establish_again(self) -> None:
        backoff, own = Backoff(), {self.lease.id}
        while True:
            try:
                lease = await Lease(self._scope, self._ttl)
                own.add(lease.id)
                try:
                    await self._put_kept(lease, own)
                except asyncio.CancelledError:
                    self._lease = lease  # ``close`` of the session revokes it
                    raise
                except BaseException:
                    lease.stop()  # the next attempt uses a new lease
                    raise
            except RaftKVError as error:
                self.error = error
                await backoff.wait()
            else:
                self._lease = lease
                return

    async def _put_kept(self, lease: Lease, own: set[int]) -> None:
        """Put the kept keys under a new lease, including changes by ``keep`` and ``drop`` in the meantime.

        Arguments:
            lease: new lease.
            own: ids of the leases of this session; a key attached to one of them is still this session's.
        """
        there: dict[bytes, bytes] = {}
        while there != self._kept:
            for name in [name for name in there if name not in self._kept]:
                await self._delete(name, lease)
                del there[name]
            for name, value in [item for item in self._kept.items() if there.get(item[0]) != item[1]]:
                if self._kept.get(name) != value:
                    continue
                if await self._put_again(name, value, lease, own):
                    there[name] = value
                elif self._kept.get(name) == value:
                    del self._kept[name]
                    _log.warning("another client overwrote key %r: the session no longer maintains it", name)

    async def _put_again(self, name: bytes, value: bytes, lease: Lease, own: set[int]) -> bool:
        """Put a key that is gone or attached to a lease of this session; return False if it is another client's."""
        while True:
            try:
                found = await self._kv.get(name)
            except PermissionDeniedError:  # no read permission: put unconditionally, as at first
                await self._kv.put(name, value, lease=lease)
                return True
            if found is not None and found.lease not in own:
                return False
            seen = mod_revision(name) == (0 if found is None else found.mod_revision)
            if (await Txn(self._scope).when(seen).then(put(name, value, lease=lease)).commit()).succeeded:
                return True

    def _tell(self, callback: OnSession | None) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if callback is not None:
            tell(callback, self)

    async def __aenter__(self) -> Session:
        return await self.establish()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await seen_through(self._give_back(farewell_s(error)))


class Sessions(Part):
    """Methods that create sessions."""

    def session(
        self, ttl: float = 10, *, on_lost: OnSession | None = None, on_established: OnSession | None = None
    ) -> Session:
        """Return a new session, to be established by ``await`` or ``async with``.

        Arguments:
            ttl: TTL of its leases, in seconds.
            on_lost: called on the loop, with the session, when its lease is lost.
            on_established: called when the session has a new lease and its keys are put again.
        """
        return Session(self.scope, ttl, on_lost, on_established)


# -- keeper ---------------------------------------------------------------------------------------------------------
#
# Keep-alives: all leases of a client on one stream.
#
# Decides when a keep-alive is sent (every third of the TTL), and what an answer means: the lease is valid until the TTL
# has passed *since the keep-alive was sent*, by this machine's monotonic clock. Each lease has at most one keep-alive
# in flight, so the answer always belongs to it.
#
# If a member has not answered by the time of the next keep-alive, the keeper moves to the next endpoint and sends
# keep-alives for all leases at once. So a paused or partitioned member costs a third of a TTL, and one that does not
# accept connections ``CONNECT_MAX_S``; when no member has answered, the next round starts within ``RETRY_MAX_S``. A
# lease is lost only when the cluster says so, or at its own deadline.
#
# When the client loses the permission to write a lease's keys, the member ends the stream, but does not name the lease.
# The keeper then sends keep-alives one by one. The lease whose keep-alive ends the stream is lost; the others continue.
#
# A lease with a grace (``disconnect_grace_ms``) gets its first keep-alive right after the grant, so that the member
# knows about it.

SENDS_PER_TTL: Final = 3
"""Keep-alives per TTL: two may be lost."""
RETRY_MAX_S: Final = 0.25
"""Longest wait before the next round of endpoints: a TTL may be 1 s, and a new leader waits twice as long for us."""
ONE_MAX_S: Final = 1.0
"""Time limit of an answer while keep-alives are sent one by one."""
CONNECT_MAX_S: Final = 0.1
"""Time to connect before the next endpoint is tried. The attempt continues, so the endpoint may be ready later."""
_HAS_LEADER: Final = (("hasleader", "true"),)


class LeaseKeeper:
    """The keep-alives of one client.

    Arguments:
        core: connection to the cluster.
    """

    def __init__(self, core: Client) -> None:
        self.failures: dict[str, str] = {}
        """Endpoint to why its last stream ended, the latest last; empty while a stream works."""
        self._core = core
        self._leases: dict[int, Lease] = {}
        self._due: list[tuple[float, int]] = []
        self._sent_at: dict[int, float] = {}
        self._wake = asyncio.Event()
        self._cluster_id = 0
        self._given_up = ""
        self._is_emptied = False
        self._streams_failed = 0
        self._one_by_one = False
        self._look_again_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def add(self, lease: Lease) -> None:
        """Start the keep-alives of a lease that was just granted."""
        loop = asyncio.get_running_loop()
        self._leases[lease.id] = lease
        first_s = 0.0 if lease.disconnect_grace_ms else lease.ttl / SENDS_PER_TTL
        heapq.heappush(self._due, (loop.time() + first_s, lease.id))
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())

    def remove(self, lease: Lease) -> None:
        """Stop the keep-alives of a lease."""
        if self._leases.get(lease.id) is lease:
            del self._leases[lease.id]
            self._wake.set()

    def heard_of(self, cluster_id: int) -> None:
        """Lose the leases of other clusters than the one that now answers: it was restored from an older state.

        It may know a lease, but not the keys attached to it since.

        Arguments:
            cluster_id: id in the header of an answer to this client; 0: unknown.
        """
        if cluster_id in (self._cluster_id, 0):
            return
        self._cluster_id = cluster_id
        for lease in list(self._leases.values()):
            if 0 != lease.cluster_id != cluster_id:
                lease.lose("another cluster has granted it: this one was restored since")

    async def close(self) -> None:
        """Stop all keep-alives; all leases are lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for lease in list(self._leases.values()):
            lease.lose("the client was closed")

    async def _run(self) -> None:
        backoff = Backoff(max_s=RETRY_MAX_S)
        while self._leases:
            endpoint, token = self._core.endpoint, ""
            self._given_up, self._is_emptied = "", False
            self._streams_failed += 1
            try:
                stream = await self._core.stream(methods.LEASE_KEEP_ALIVE, endpoint, metadata=_HAS_LEADER, eager=True)
                token = stream.token
                async with stream:
                    await self._serve(stream, backoff)
                self._note_failure(endpoint, "the member has ended the stream")
            except StatusError as error:
                if self._is_emptied:
                    continue  # it was removed; another lease may have been added since
                self._note_failure(endpoint, self._given_up or str(error))
                if not self._core.forget_token(error, token):
                    self._on_refusal(error)
            if self._leases:
                self._core.next_endpoint(endpoint)
                if self._streams_failed % len(self._core.endpoints) == 0:  # all endpoints were tried
                    await backoff.wait()

    def _on_refusal(self, error: StatusError) -> None:
        if error.code == PERMISSION_DENIED and self._sent_at:
            self._find_denied(error)
        elif not self._given_up and not is_transient(error):
            for lease in list(self._leases.values()):
                lease.refused(error)

    def _find_denied(self, error: StatusError) -> None:
        """Find and end the lease that this client may no longer write; the member did not name it."""
        suspects = [lease for lease_id in self._sent_at if (lease := self._leases.get(lease_id)) is not None]
        self._one_by_one = len(suspects) > 1
        if len(suspects) == 1:
            suspects[0].refused(error)
            suspects[0].lose(str(error))

    async def _serve(self, stream: Stream[rpc_pb2.LeaseKeepAliveResponse], backoff: Backoff) -> None:
        """Send keep-alives for all leases at once, then for each when due; return when the stream or all leases end."""
        now = asyncio.get_running_loop().time()
        self._sent_at.clear()
        self._due = [(now, lease_id) for lease_id in sorted(self._leases)]
        sending = asyncio.get_running_loop().create_task(self._send(stream))
        try:
            while (answer := await stream.receive()) is not None:
                self._on_answer(answer)
                backoff.reset()
                self._streams_failed = 0
                self.failures.clear()
        finally:
            sending.cancel()

    async def _send(self, stream: Stream[rpc_pb2.LeaseKeepAliveResponse]) -> None:
        loop = asyncio.get_running_loop()
        connected_by = loop.time() + CONNECT_MAX_S
        while self._leases and not stream.done:
            self._wake.clear()
            if not stream.connected and loop.time() >= connected_by:
                self._given_up = f"no connection to {stream.endpoint} within {CONNECT_MAX_S:g} s"
                break
            if not self._send_due(stream, loop.time()):
                break
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_look(stream, connected_by)):
                    await self._wake.wait()
        # There are no leases, or the member does not answer; the reader of the stream wakes when the stream ends.
        self._is_emptied = not self._leases
        stream.cancel()

    def _next_look(self, stream: Stream[rpc_pb2.LeaseKeepAliveResponse], connected_by: float) -> float | None:
        due_at = self._due[0][0] if self._due else None
        if self._one_by_one and self._sent_at:
            return self._look_again_at
        if stream.connected:
            return due_at
        return connected_by if due_at is None else min(due_at, connected_by)

    def _send_due(self, stream: Stream[rpc_pb2.LeaseKeepAliveResponse], now: float) -> bool:
        """Send due keep-alives; return False if an earlier one is unanswered, or the stream has ended."""
        if self._one_by_one and self._sent_at:
            if now < self._look_again_at:
                return True
            self._given_up = f"{stream.endpoint} did not answer a keep-alive in time"
            return False
        while self._due and self._due[0][0] <= now:
            lease_id = heapq.heappop(self._due)[1]
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease_id in self._sent_at:
                self._given_up = f"{stream.endpoint} did not answer a keep-alive in time"
                return False
            self._sent_at[lease_id] = lease_now()
            heapq.heappush(self._due, (now + lease.ttl / SENDS_PER_TTL, lease_id))
            try:
                request = rpc_pb2.LeaseKeepAliveRequest(ID=lease_id, disconnect_grace_ms=lease.disconnect_grace_ms)
                stream.send_nowait(request)
            except StatusError:
                return False
            if self._one_by_one:
                self._look_again_at = now + ONE_MAX_S
                return True
        self._one_by_one = False
        return True

    def _on_answer(self, answer: rpc_pb2.LeaseKeepAliveResponse) -> None:
        sent_at = self._sent_at.pop(answer.ID, None)
        lease = self._leases.get(answer.ID)
        if self._one_by_one:
            self._wake.set()
        if lease is None or sent_at is None:
            return
        if 0 < answer.TTL != lease.ttl:
            self._move(lease.id, answer.TTL / SENDS_PER_TTL - (lease_now() - sent_at))
        lease.answered(answer, sent_at)

    def _move(self, lease_id: int, wait_s: float) -> None:
        """Reschedule the next keep-alive of a lease after a change of its TTL, which is rare."""
        due_at = asyncio.get_running_loop().time() + wait_s
        self._due = [entry for entry in self._due if entry[1] != lease_id]
        heapq.heapify(self._due)
        heapq.heappush(self._due, (due_at, lease_id))
        self._wake.set()

    def _note_failure(self, endpoint: str, reason: str) -> None:
        self.failures.pop(endpoint, None)
        self.failures[endpoint] = reason


# -- renewals -------------------------------------------------------------------------------------------------------
#
# Keep-alives for a lease of another client, with the members' answers unchanged.
#
#     async with aclosing(renewals(scope, lease_id, first_answer_s=5.0)) as answers:
#         async for answer in answers: print(answer.TTL)         # ends when the cluster does not know the lease
#
# For programs that forward the answers; the owner of a lease uses ``lease``.


class _Adopted(Lease):
    """A lease granted elsewhere; its TTL is known after the first answer."""

    def __init__(self, scope: Scope, lease_id: int, first_answer_s: float) -> None:
        super().__init__(scope, max(first_answer_s, 0.001), id=lease_id, interrupt=False)
        self.answers: asyncio.Queue[rpc_pb2.LeaseKeepAliveResponse | StatusError | None] = asyncio.Queue()
        self._granted = True
        self._is_known = False
        self._first_answer_s = first_answer_s
        self._deadline = lease_now() + first_answer_s
        self._watch_deadline()
        scope.keeper.add(self)

    def answered(self, answer: rpc_pb2.LeaseKeepAliveResponse, asked_at: float) -> None:
        if not self._is_known and answer.TTL > 0:
            self._is_known, self._deadline = True, asked_at + answer.TTL
            if self._timer is not None:
                self._timer.cancel()
            self._watch_deadline()
        super().answered(answer, asked_at)
        self.answers.put_nowait(answer if answer.TTL > 0 else None)

    def refused(self, error: StatusError) -> None:
        self.stop(str(error))
        self.answers.put_nowait(error)

    def _expire(self) -> None:
        failed = EndpointsFailed(self._scope.keeper.failures, self._first_answer_s, definite=False, explain=False)
        super()._expire()
        self.answers.put_nowait(failed)


async def renewals(
    scope: Scope, lease_id: int, first_answer_s: float
) -> AsyncGenerator[rpc_pb2.LeaseKeepAliveResponse, None]:
    """Keep a lease alive until it is gone, and yield each answer of a member.

    Arguments:
        scope: scope of the client.
        lease_id: id of the lease.
        first_answer_s: time limit of the first answer, over all endpoints; later the TTL applies.

    Raises:
        EndpointsFailed: no member answered in time.
        StatusError: a member refused.
    """
    lease = _Adopted(scope, lease_id, first_answer_s)
    try:
        while (answer := await lease.answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer
    finally:
        lease.stop()
