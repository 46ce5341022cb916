"""Leases: keys that end with their owner.

::

    async with kv.lease(ttl=10) as lease:              # granted, kept alive, revoked at the end
        await kv.put("workers/1", b"here", lease=lease)
        ...                                            # a loss interrupts this block with LeaseLost

    lease = await kv.lease(ttl=10)                     # the same without a block: ends by revoke() or with the client
    lease.on_lost(lambda lease: ...)
    await lease.lost.wait()

A lease is *lost* when the cluster does not know it any more, or is another one, restored from a backup; or when its TTL
has passed on this machine's clock since the last keep-alive that was confirmed was *sent*: then another owner may have
what it protected, even if the cluster still knows the lease (one with ``patient=True`` leaves this last way out). A
process that was stopped for longer than that, or whose machine slept, learns it at its next ``check`` (every call with
``lease=`` makes one), not only when the loop has come round.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Final, TypeVar

from raftkv.client.arguments import function, seconds, whole
from raftkv.client.errors import LeaseLost
from raftkv.client.rpc import methods
from raftkv.client.rpc.methods import Method
from raftkv.client.scope import Part, Scope
from raftkv.client.values import LeaseInfo
from raftkv.errors import LeaseNotFoundError, StatusError
from raftkv.pb import rpc_pb2
from raftkv.suspend_clock import SuspendClock

# -- interrupts -----------------------------------------------------------------------------------------------------
#
# Stopping a block of code when what it relies on is lost.
#
# Works as ``asyncio.timeout`` does: the task in the block is cancelled, and at the end of the block that cancellation
# becomes an error of our own. Cancellations from elsewhere pass through.
#
# ::
#
#     with interrupting(lease) :          # CancelledError inside becomes LeaseLost outside
#         await something_long()

T = TypeVar("T")

FAREWELL_S: Final = 0.5
"""How long the end of a block that was interrupted tells the cluster of it: a user who pressed Ctrl-C waits for the
prompt, and what could not be given back ends with its lease."""


def farewell_s(error: BaseException | None) -> float | None:
    """Return how long the end of a block may take to give back what it held; None: as long as any call.

    Arguments:
        error: that the block ended with.
    """
    return FAREWELL_S if isinstance(error, KeyboardInterrupt | asyncio.CancelledError) else None


_farewells: Final[set[asyncio.Task[Any]]] = set()
"""Steps under way; the loop itself would forget them."""


async def seen_through(step: Coroutine[Any, Any, T]) -> T:
    """Take a last step that goes on in the background when its caller is cancelled meanwhile, and then leaves at once.

    Otherwise a second cancellation would leave the lease or key in the cluster, without an owner.

    Arguments:
        step: what gives it back.
    """
    task = asyncio.get_running_loop().create_task(step)
    _farewells.add(task)
    task.add_done_callback(_look_at)
    return await asyncio.shield(task)


def _look_at(task: asyncio.Task[Any]) -> None:
    """Take its failure: its caller may have left."""
    _farewells.discard(task)
    if not task.cancelled():
        task.exception()


class Interrupt:
    """One block of one task.

    Arguments:
        subscribe: is given ``fire`` to call on the loss, and returns how to take that back.
        error: makes the error that the block ends with.
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
        """Interrupt the block after the loss, unless its task has found it out by itself and is about to raise."""
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
    """Call back, on the loop, from the middle of work for others: what it raises goes to the loop's exception handler.

    Arguments:
        callback: of a user.
        news: what it is called with.
    """
    try:
        callback(news)
    except Exception as error:
        context = {"message": f"raftkv: a callback failed: {callback!r}", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)


_sleep: Final = SuspendClock()


def lease_now() -> float:
    """Return the present by the leases' clock: the loop's, plus the time in which the machine slept; on the loop.

    The cluster goes on while the machine sleeps, so a lease may be over when the machine wakes up.
    """
    _sleep.has_slept()
    return _sleep.total_s + asyncio.get_running_loop().time()


OnLost = Callable[["Lease"], Any]

GRACE_MAX_S = 9_000_000_000
"""The longest TTL that the cluster grants."""
SHORTEST_S = 0.001
"""Time limit of a grant that has waited for another one of the same lease until its own time was up."""
_GRANT_ANY = Method(methods.LEASE_GRANT.path, methods.LEASE_GRANT.response, True)
"""A grant of any id: if the answer is lost, that lease ends by itself, so the call may be repeated."""


def checked_ttl(ttl: float) -> float:
    """Return a TTL that can be asked for.

    Raises:
        TypeError: it is no number.
        ValueError: it is not positive, or not finite.
    """
    if seconds(ttl, "the TTL of a lease") <= 0:
        raise ValueError(f"the TTL of a lease must be positive, not {ttl:g}")
    return ttl


class Lease:
    """One lease; made by ``Client.lease``, granted by ``await`` or ``async with``.

    Attributes:
        id: in the cluster; 0 until it is granted.
        ttl: seconds that the cluster has granted; until then those asked for.
        lost: set when it is lost.
        disconnect_grace_ms: how long it outlives a broken connection; 0: as long as its TTL.
        patient: whether only the cluster may say that it is lost. The cluster's least TTL, which lets others survive
            an election, does not hold for it.
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
        # Rounded up: no grace at all means none.
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
        self._callbacks: dict[int, OnLost] = {}
        self._last_callback = 0
        self._timer: asyncio.TimerHandle | None = None
        self._interrupt = self.interrupting() if interrupt else None

    def __repr__(self) -> str:
        state = f"over: {self._over}" if self._over else "kept alive" if self._granted else "not granted yet"
        return f"<Lease {self.id:x}: ttl {self.ttl} s, {state}>"

    # ---- its life

    def __await__(self) -> Generator[Any, None, Lease]:
        return self.grant().__await__()

    async def grant(self, timeout_s: float | None = None) -> Lease:
        """Have it granted and keep it alive; does nothing the second time.

        Raises:
            LeaseExistsError: the id is in use.
            StatusError: it could not be granted.
        """
        loop_time = asyncio.get_running_loop().time
        deadline = loop_time() + (self._scope.timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s"))
        async with self._granting:  # asked for by many at once, it is granted once
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
        scope.keeper.add(self)

    async def revoke(self, timeout_s: float | None = None) -> None:
        """End it now, with all its keys. It is not kept alive from here on, even if this fails.

        Raises:
            StatusError: the cluster could not be told; the lease ends with its TTL.
        """
        if not self._granted or self._over:
            return
        self.stop("it was revoked")
        try:
            await self._scope.call(_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=self.id), timeout_s)
        except LeaseNotFoundError:
            return  # by an attempt of ours whose answer was lost, or by its end: both is what was wanted

    def stop(self, reason: str = "it is not kept alive any more") -> None:
        """Keep it alive no longer, and leave it to its TTL."""
        self._over = self._over or reason
        self._scope.keeper.remove(self)
        if self._timer is not None:
            self._timer.cancel()

    async def info(self, *, keys: bool = False, timeout_s: float | None = None) -> LeaseInfo:
        """Return what the cluster knows of it.

        Arguments:
            keys: name its keys too.
            timeout_s: None: the client's.
        """
        return await lease_info(self._scope, self.id, keys=keys, timeout_s=timeout_s)

    @property
    def cluster_id(self) -> int:
        """Return the id of the cluster that has granted it; 0: none has, or it did not say."""
        return self._cluster_id

    # ---- whether it can be relied on

    @property
    def remaining_s(self) -> float:
        """Seconds for which it certainly still lives, unless it is revoked; 0: none."""
        if not self._granted or self._over:
            return 0.0
        return max(self._deadline - lease_now(), 0.0)

    @property
    def silent_s(self) -> float:
        """Seconds since the last confirmed keep-alive was sent; for a patient one that may be far more than the TTL."""
        return max(lease_now() - (self._deadline - self.ttl), 0.0)

    @property
    def alive(self) -> bool:
        """Whether it can be relied on; a patient one until the cluster has said that it is gone."""
        if self.patient:
            return self._granted and not self._over
        return self.remaining_s > 0.0

    def check(self) -> None:
        """Raise ``LeaseLost`` if it cannot be relied on."""
        if self.alive:
            return
        if not self._granted:
            raise LeaseLost(self.id, "it was never granted: await it, or enter it with async with")
        if not self._over:
            self._expire()
        raise LeaseLost(self.id, self._over)

    def on_lost(self, callback: OnLost) -> Callable[[], None]:
        """Call back, on the loop, when it is lost (at once if it is). Returns how to take that back."""
        self._last_callback += 1
        number = self._last_callback
        self._callbacks[number] = function(callback, "on_lost")
        if self.lost.is_set():
            callback(self)
        return lambda: self._callbacks.pop(number, None) and None

    def interrupting(self) -> Interrupt:
        """Make a ``with`` block that is interrupted with ``LeaseLost`` when it is lost."""
        return Interrupt(self.on_lost, lambda: LeaseLost(self.id, self._over))

    # ---- for the keeper and for calls that relied on it

    def answered(self, answer: rpc_pb2.LeaseKeepAliveResponse, asked_at: float) -> None:
        """Take a member's answer to a keep-alive that was sent at ``asked_at`` of the leases' clock.

        Arguments:
            answer: of the member.
            asked_at: when the keep-alive was sent, by ``lease_now``.
        """
        cluster_id = answer.header.cluster_id
        if 0 != self._cluster_id != cluster_id != 0:
            # A cluster that was restored from an older state may know the lease, and not what was put with it since.
            self.lose("another cluster has granted it: this one was restored since")
        elif answer.TTL > 0:
            self.renewed(answer.TTL, asked_at)
        else:
            self.lose("the cluster does not know it any more")

    def refused(self, error: StatusError) -> None:
        """Take note that a member refuses to serve keep-alives; the lease lives on until its deadline."""

    def renewed(self, ttl: int, asked_at: float) -> None:
        """Move the deadline after an answer of the cluster.

        Arguments:
            ttl: seconds that the cluster has confirmed.
            asked_at: when it was asked, by ``lease_now``.
        """
        self.ttl = ttl
        self._deadline = max(self._deadline, asked_at + ttl)
        if self._timer is None and not self.patient:
            self._watch_deadline()

    def lose(self, reason: str) -> None:
        """End it against its owner's wish."""
        if self._over:
            return
        self.stop(reason)
        self.lost.set()
        for callback in list(self._callbacks.values()):
            tell(callback, self)

    def _watch_deadline(self) -> None:
        # One timer: renewals only move the deadline, and a timer that comes too early is set again.
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
        try:
            await self.revoke(farewell_s(error))
        except StatusError:
            return  # no keep-alive is sent any more: it ends with its TTL


_REVOKE = Method(methods.LEASE_REVOKE.path, methods.LEASE_REVOKE.response, True, cancellable=False)
"""A revocation of a lease of ours: that it is gone already is no failure, so the call may be repeated; and who is
cancelled meanwhile wants it all the same."""


async def lease_info(scope: Scope, id: int, *, keys: bool, timeout_s: float | None) -> LeaseInfo:
    """Return what the cluster knows of a lease; keys as far as the scope's view goes.

    Arguments:
        id: of the lease.
        keys: name its keys too, as far as the view goes.
        timeout_s: None: the client's.
    """
    answer = await scope.call(methods.LEASE_TIME_TO_LIVE, rpc_pb2.LeaseTimeToLiveRequest(ID=id, keys=keys), timeout_s)
    prefix = scope.space.prefix
    own = tuple(key[len(prefix) :] for key in answer.keys if key.startswith(prefix))
    return LeaseInfo(answer.ID, answer.TTL, answer.grantedTTL, own)


class Leases(Part):
    """Leases: to get, to look at, to end."""

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
        """Make a lease, to be granted by ``await`` or ``async with``.

        Arguments:
            ttl: seconds without a keep-alive after which it ends; the cluster may grant more.
            id: 0: any.
            on_lost: called on the loop when it is lost.
            interrupt: its ``async with`` block is interrupted when it is lost; else ``LeaseLost`` comes at the end.
            disconnect_grace_s: seconds that it may live on once this process is gone, that is, its connection broke and
                was not replaced within that time; 0: its TTL decides alone. raftkv only; etcd goes by the TTL.
            patient: it is lost on the word of the cluster alone, never because that cannot be reached: for owners
                whose work must go on through an outage of all of it. Others may then own what it protected before the
                owner knows: writes that rely on it must carry a fence.
        """
        lease = Lease(
            self.scope, ttl, id=id, interrupt=interrupt, disconnect_grace_s=disconnect_grace_s, patient=patient
        )
        if on_lost is not None:
            lease.on_lost(on_lost)
        return lease

    async def lease_info(self, id: int, *, keys: bool = False, timeout_s: float | None = None) -> LeaseInfo:
        """Return what the cluster knows of a lease; its ttl is -1 if there is no such lease.

        Arguments:
            id: of the lease.
            keys: name its keys too, as far as the view goes.
            timeout_s: None: the client's.
        """
        return await lease_info(self.scope, id, keys=keys, timeout_s=timeout_s)

    async def leases(self, *, timeout_s: float | None = None) -> list[int]:
        """Return the ids of all leases."""
        answer = await self.scope.call(methods.LEASE_LEASES, rpc_pb2.LeaseLeasesRequest(), timeout_s)
        return [lease.ID for lease in answer.leases]

    async def revoke(self, id: int, *, timeout_s: float | None = None) -> None:
        """End a lease that is not this client's.

        Arguments:
            id: of the lease.
            timeout_s: None: the client's.

        Raises:
            LeaseNotFoundError: there is none.
        """
        await self.scope.call(methods.LEASE_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=id), timeout_s)
