"""The part of the store that runs and registries use, and no more: so that the simulator can stand in for it.

``ClientControl`` is the real one, over ``raftkv.aio``; it works on raftkv and on etcd alike. A txn that fails
indefinitely may have been applied: so each is safe to repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from raftkv.client.kv.operations import Compare, Operation
from raftkv.client.rpc import methods, retry
from raftkv.client.scope import Text
from raftkv.client.values import Event, TxnResult
from raftkv.errors import ConfigError, StatusError
from raftkv.pb import rpc_pb2

if TYPE_CHECKING:
    from raftkv.client.lease.lease import Lease
    from raftkv.client.library import Client
    from raftkv.client.watch import Watch

OnEvents = Callable[[int, Sequence[Event]], None]
OnLost = Callable[[Exception], None]

CALL_TIMEOUT_S: Final = 5.0
TXN_TIMEOUT_S: Final = 1.5
"""A txn that a member has passed on to a leader which died is lost, and not told: it is sent again, as all of them may
be. About as long as an election takes."""
TXN_TIMEOUT_MAX_S: Final = 24.0
"""Longest time limit of a patient control: a txn that was lost in an outage is sent again that much later, at worst."""


class Grant(Protocol):
    """A lease that is kept alive."""

    @property
    def id(self) -> int:
        """Its id in the cluster."""
        ...

    @property
    def ttl_s(self) -> int:
        """Seconds, as the cluster has granted them."""
        ...

    @property
    def silent_s(self) -> float:
        """Seconds since the last keep-alive that was confirmed."""
        ...


class Control(Protocol):
    """The part of a client that programs with state in the store use."""

    async def grant(self, ttl_s: int, grace_s: float, on_lost: Callable[[], None]) -> Grant:
        """Grant a lease and keep it alive until ``end``, through outages of the store of any length.

        Arguments:
            ttl_s: at least; the cluster may grant more.
            grace_s: it may end so long after this process' connection broke; 0: only with the TTL.
            on_lost: called once, on the loop, when the cluster says that it is gone.

        Raises:
            StatusError: it could not be granted.
        """
        ...

    async def grant_fixed(self, ttl_s: int) -> int:
        """Grant a lease without keep-alives, which ends after ``ttl_s``; return its id."""
        ...

    async def end(self, grant: Grant, *, revoke: bool) -> None:
        """Keep a lease alive no longer, and end it now if that can be told to the store.

        Arguments:
            grant: of this control.
            revoke: False: the lease ends with its TTL.
        """
        ...

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Execute one transaction.

        Arguments:
            compares: all must hold for ``then``.
            then: operations.
            otherwise: operations if a condition does not hold.

        Raises:
            StatusError: refused, or no member answered; see ``definite``.
        """
        ...

    def watch(
        self,
        key: Text,
        end: Text,
        start_revision: int,
        on_events: OnEvents,
        on_lost: OnLost,
        *,
        deletes: bool = True,
    ) -> Callable[[], None]:
        """Watch an interval: every change from a revision on, each once, in order; returns how to end it.

        Arguments:
            key, end: the interval; an empty end: the key alone.
            start_revision: of the first change.
            on_events: called on the loop with the revision up to which everything has come now, and the changes.
            on_lost: called once if it cannot go on, as when history was compacted.
            deletes: False: deletions are left out.
        """
        ...


class Patience:
    """How long a txn may take before it is sent again: twice as long each time that it was not answered in time.

    When ten thousand programs write at the same moment, the last of them is answered seconds later. If each sent its
    txn again before that, the cluster would only ever execute copies whose senders have given them up.

    Arguments:
        max_s: of the timeout.

    Attributes:
        timeout_s: of the next txn.
    """

    def __init__(self, max_s: float) -> None:
        self.timeout_s = TXN_TIMEOUT_S
        self._max_s = max_s

    def late(self, timeout_s: float) -> None:
        """Take note that a txn was not answered in this time; of many that were sent together the first counts."""
        self.timeout_s = min(max(self.timeout_s, 2 * timeout_s), self._max_s)

    def answered(self, took_s: float) -> None:
        """Take note that a txn was answered."""
        self.timeout_s = min(max(TXN_TIMEOUT_S, 4 * took_s), self._max_s)


class _ClientGrant:
    """A lease of the client library."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    @property
    def id(self) -> int:
        return self.lease.id

    @property
    def ttl_s(self) -> int:
        return self.lease.ttl

    @property
    def silent_s(self) -> float:
        return self.lease.silent_s


def check_whole(kv: Client) -> Client:
    """Return a client that sees all keys.

    What runs, registries and datasets keep has names of its own in the store, and their fences name these: through a
    view, or a namespace, a write under a fence would find nothing there, and be told that the fence is over.

    Raises:
        ConfigError: it sees only the keys below a prefix.
        TypeError: it is no client.
    """
    if not hasattr(kv, "scope"):
        raise TypeError(f"kv is a client made by raftkv.aio.connect, not {kv!r}")
    if prefix := kv.scope.space.prefix:
        below = prefix.decode(errors="backslashreplace")
        raise ConfigError(
            f"kv sees the keys below {below!r} alone; give the client that connect() makes without namespace=, and no "
            "view of it"
        )
    return kv


class ClientControl:
    """The store through a client.

    Arguments:
        kv: the client; of a view, all keys are those of the view.
        is_patient: wait longer for the answer of a txn each time that it did not come in time: for writers that are
            many at the same moment. Else it is sent again as soon as an election may have lost it.
    """

    def __init__(self, kv: Client, *, is_patient: bool = False) -> None:
        if not hasattr(kv, "scope"):
            raise TypeError(f"kv is a client made by raftkv.aio.connect, not {kv!r}")
        self._kv = kv
        self._patience = Patience(TXN_TIMEOUT_MAX_S if is_patient else TXN_TIMEOUT_S)
        self._watches: set[asyncio.Task[None]] = set()

    async def grant(self, ttl_s: int, grace_s: float, on_lost: Callable[[], None]) -> Grant:
        """Implement ``Control.grant``."""
        lease = self._kv.lease(ttl_s, disconnect_grace_s=grace_s, patient=True, on_lost=lambda _: on_lost())
        return _ClientGrant(await lease.grant())

    async def grant_fixed(self, ttl_s: int) -> int:
        """Implement ``Control.grant_fixed``."""
        answer = await self._kv.scope.core.call(
            methods.LEASE_GRANT, rpc_pb2.LeaseGrantRequest(TTL=ttl_s), timeout_s=CALL_TIMEOUT_S
        )
        return int(answer.ID)

    async def end(self, grant: Grant, *, revoke: bool) -> None:
        """Implement ``Control.end``."""
        if not isinstance(grant, _ClientGrant):
            raise TypeError("a grant of another control")
        if revoke:
            await grant.lease.revoke(min(grant.ttl_s, TXN_TIMEOUT_S))  # else it ends by itself
        else:
            grant.lease.stop()

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Implement ``Control.txn``."""
        txn = self._kv.txn().when(*compares).then(*then).otherwise(*otherwise)
        clock, timeout_s = asyncio.get_running_loop().time, self._patience.timeout_s
        began = clock()
        try:
            result = await txn.commit(timeout_s=timeout_s)
        except StatusError:
            if clock() - began >= timeout_s:
                self._patience.late(timeout_s)
            raise
        self._patience.answered(clock() - began)
        return result

    def watch(
        self,
        key: Text,
        end: Text,
        start_revision: int,
        on_events: OnEvents,
        on_lost: OnLost,
        *,
        deletes: bool = True,
    ) -> Callable[[], None]:
        """Implement ``Control.watch``."""
        watch = self._kv.watch(key, end or None, start_revision=start_revision, no_delete=not deletes)
        task = asyncio.get_running_loop().create_task(_read(watch, on_events, on_lost))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

        def cancel() -> None:
            watch.cancel()
            task.cancel()  # which may not have begun

        return cancel


async def _read(watch: Watch, on_events: OnEvents, on_lost: OnLost) -> None:
    try:
        while events := await watch.next_batch():
            on_events(watch.revision, events)
    except Exception as error:
        watch.cancel()
        on_lost(error)


# -- retries --------------------------------------------------------------------------------------------------------
#
# Calls of a run that are made again until the store answers: an outage delays a run, it ends nothing.

T = TypeVar("T")

RETRY_MIN_S: Final = 0.02
RETRY_MAX_S: Final = 0.25


OnTrouble = Callable[[StatusError | None], None]


async def until_answered(
    call: Callable[[], Awaitable[T]], limit_s: float | None = None, on_trouble: OnTrouble | None = None
) -> T:
    """Make a call that is safe to repeat until the store answers; one without room counts as one that does not.

    Arguments:
        call: makes it anew each time.
        limit_s: no attempt begins later than that; None: however long it takes.
        on_trouble: see ``rpc.retry.until_answered``.

    Raises:
        StatusError: the store refused, or the last attempt within the limit failed.
    """
    # Without jitter: the simulator replays a run from its seed.
    return await retry.until_answered(
        call, limit_s, max_wait_s=RETRY_MAX_S, jitter=0.0, wait_for_room=True, on_trouble=on_trouble
    )


async def txn_until_answered(
    control: Control, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
) -> TxnResult:
    """Execute a txn that is safe to repeat until the store answers.

    Arguments:
        control: the store.
        compares, then, otherwise: as for ``Control.txn``.

    Raises:
        StatusError: the store refused.
    """
    return await until_answered(lambda: control.txn(compares, then, otherwise))
