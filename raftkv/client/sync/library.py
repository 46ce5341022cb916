"""The blocking client: ``raftkv.connect`` and ``raftkv.Client``, for programs without an event loop.

::

    with raftkv.connect("127.0.0.1:2379,127.0.0.1:2381") as kv:
        kv.put("jobs/a", b"1")
        kv.get("jobs/a").value
        for event in kv.watch("jobs/", prefix=True): ...

It has the same methods as ``raftkv.aio``, without ``await``. Any number of threads may use one client. An event loop on
a background thread, which starts at the first call, makes their calls over one connection and keeps leases alive.

After ``fork`` (training workers, ``multiprocessing``) the child may continue to use the client: its first call opens a
separate thread and connection. The child neither writes to the parent's connection nor shuts it down. What the parent
*holds* stays the parent's: a lease, lock, term, session or watch raises ``Forked`` when the child uses it; the child
does not keep it alive, and does not release it at the end of a block or of the process.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar, cast

from raftkv.client import admin, library, operations
from raftkv.client import cache as aio_cache
from raftkv.client import endpoints as aio_endpoints
from raftkv.client import kv as aio_kv
from raftkv.client import lease as aio_lease
from raftkv.client import lock as aio_lock
from raftkv.client.admin import Admin
from raftkv.client.arguments import function
from raftkv.client.cache import MAX_BYTES, IndexFunction
from raftkv.client.credentials import Secret
from raftkv.client.endpoints import Endpoint
from raftkv.client.errors import LeaseLost, TxnConflict
from raftkv.client.kv import KV, RETRIES, Bulk
from raftkv.client.lease import Leases
from raftkv.client.lock import Elections
from raftkv.client.rpc.retry import Backoff
from raftkv.client.sync.blocking import (
    Asked,
    Blocking,
    Drawn,
    Held,
    Scoped,
    Shown,
    Stream,
    Watch,
    blocking,
    chunked,
    iterates_like,
    iterating,
    passing,
    taking,
    taskless,
)
from raftkv.client.sync.loop import CallbackQueue, Closed, LoopThread, begin_the_end, wait_for_the_end
from raftkv.client.values import KeyValue
from raftkv.client.watch import QUEUE_BYTES
from raftkv.errors import CompactedError

if TYPE_CHECKING:
    from raftkv.client.operations import Compare, FenceLike, LeaseLike, Operation
    from raftkv.client.scope import Text

T = TypeVar("T")
P = ParamSpec("P")
Result = TypeVar("Result")

# -- lease ----------------------------------------------------------------------------------------------------------
#
# Leases for programs without an event loop.
#
# ::
#
#     with kv.lease(ttl=10) as lease:                 # granted, kept alive by the client's thread, revoked at the end
#         kv.put("workers/1", b"here", lease=lease)
#         lease.check()                               # raises LeaseLost if it is not safe to use any more
#
# Unlike a block with ``async``, this block is not interrupted when its lease is lost, because a thread cannot be
# interrupted. The loss is reported by every call that uses the lease (``lease=``), by ``check()``, by ``lost`` (a
# ``threading.Event``), by ``on_lost`` callbacks, and in any case by ``LeaseLost`` at the end of the block.
#
# After fork, the child neither keeps alive nor releases what its parent holds; using it there raises ``Forked``.


class Lease(Held[aio_lease.Lease]):
    """One lease; created by ``Client.lease``, granted by ``with`` or ``grant()``.

    Attributes:
        lost: event that is set when the lease is lost; any thread may wait for it.
    """

    def __init__(self, owner: object, loop: LoopThread, inner: aio_lease.Lease) -> None:
        super().__init__(owner, loop, inner)
        self.lost = threading.Event()
        self._ask(lambda lease: lease.on_lost(lambda _: self.lost.set()))

    id = Shown[int]()
    """The lease id; 0 until it is granted."""

    ttl = Shown[int]()
    """The TTL in seconds that the cluster has granted; before the grant, the requested TTL."""

    remaining_s = Asked[float]()
    """Seconds for which the lease is certainly still valid, unless it is revoked; 0: none."""

    alive = Asked[bool]()
    """Whether the lease is safe to use."""

    grant = taking(aio_lease.Lease.grant, aio_lease.Lease.revoke)

    revoke = blocking(aio_lease.Lease.revoke, LoopThread.see_through)
    info = blocking(aio_lease.Lease.info)

    def stop(self, reason: str = "it is no longer kept alive") -> None:
        """Stop the keep-alives, and let the lease expire."""
        self._ask(lambda lease: lease.stop(reason))

    def check(self) -> None:
        """Raise ``LeaseLost`` if the lease is not safe to use, ``Forked`` in a child process."""
        if not self._inner.id:
            self._loop.check_usable()
            raise LeaseLost(0, "it was never granted: enter it by with, or call grant()")
        super().check()

    lose = passing(aio_lease.Lease.lose)

    def on_lost(self, callback: Callable[[Lease], Any]) -> Callable[[], None]:
        """Call a function when the lease is lost (at once if it is), on a separate thread; it may use the client.

        Returns a function to undo this.
        """

        function(callback, "on_lost")
        callbacks = CallbackQueue()
        take_back = self._ask(lambda lease: lease.on_lost(lambda _: callbacks.call_soon(callback, self)))
        return lambda: self._ask(lambda _: take_back())

    def __enter__(self) -> Self:
        return self.grant()


# -- session --------------------------------------------------------------------------------------------------------
#
# Sessions for programs without an event loop; see ``client.lease.Session`` for what they are.
#
# ::
#
#     with kv.session(ttl=10, on_lost=stop_work, on_established=start_work) as session:
#         session.keep("workers/1", b"here")          # put again whenever the session is established anew


class Session(Held[aio_lease.Session]):
    """A lease that is replaced after a loss.

    Created by ``Client.session``, established by ``with`` or ``establish()``.
    """

    id = Shown[int]()
    """Id of the current lease."""

    generation = Shown[int]()
    """Number of leases so far; 0: none yet. Locks and terms do not survive a change of it."""

    error = Shown[Exception | None]()
    """Why the session is not established at present; None while it is."""

    alive = Asked[bool]()
    """Whether the current lease is safe to use."""

    @property
    def lease(self) -> Lease:
        """The current lease, which may be lost already.

        Raises:
            LeaseLost: the session has not had a lease yet.
        """
        return Lease(self._owner, self._loop, self._inner.lease)

    lose = passing(aio_lease.Session.lose)

    establish = taking(aio_lease.Session.establish, aio_lease.Session.close)

    established = blocking(aio_lease.Session.established)
    keep = blocking(aio_lease.Session.keep)
    drop = blocking(aio_lease.Session.drop)
    close = blocking(aio_lease.Session.close, LoopThread.see_through)

    def __enter__(self) -> Self:
        return self.establish()


# -- lock -----------------------------------------------------------------------------------------------------------
#
# Locks for programs without an event loop.
#
# ::
#
#     with kv.lock("name", ttl=10) as lock:
#         kv.put("x", b"y", fence=lock)               # written only while the lock is held
#
# A block is not interrupted when its lease is lost (as above): the loss is reported by every call with ``fence=``, by
# ``check()``, by ``lease.on_lost``, and at the end of the block.

HeldInner = TypeVar("HeldInner", bound=aio_lock.Holder)


class Holder(Held[HeldInner]):
    """The common part of a lock and a term: a key in a queue."""

    def __init__(self, owner: object, loop: LoopThread, inner: HeldInner) -> None:
        super().__init__(owner, loop, inner)
        self._lease: Lease | None = None

    key = Shown[bytes]()
    """The key, as the client sees it; empty while not held."""

    guard_key = Shown[bytes]()
    """The key, as the store knows it; empty while not held."""

    fence = Shown[int]()
    """The fencing token: the create revision of the key; 0 while not held."""

    @property
    def lease(self) -> Lease:
        """The lease of the key.

        Raises:
            FenceLost: it is not held.
        """
        inner = self._inner.lease
        if self._lease is None or self._lease.target()[1] is not inner:
            self._lease = Lease(self._owner, self._loop, inner)
        return self._lease

    broken = passing(aio_lock.Holder.broken)


class Lock(Holder[aio_lock.Lock]):
    """One lock of one holder; created by ``Client.lock``. Not reentrant; competing threads need one object each."""

    held = Asked[bool]()
    """Whether the lock is held and safe to use, as far as this client knows."""

    acquire = taking(aio_lock.Lock.acquire, aio_lock.Lock.release)

    try_acquire = blocking(aio_lock.Lock.try_acquire)
    release = blocking(aio_lock.Lock.release, LoopThread.see_through)

    def __enter__(self) -> Self:
        return self.acquire()


def plain_lease(lease: Any) -> Any:
    """Return the ``lease`` argument for the async side: the async object itself."""
    return lease.target()[1] if isinstance(lease, Blocking) else lease


# -- election -------------------------------------------------------------------------------------------------------
#
# Elections for programs without an event loop.
#
# ::
#
#     with kv.campaign("leader", b"me") as term:      # waits until it is leader
#         while work_is_left():
#             kv.put("progress", step(), fence=term)  # raises TermLost or LeaseLost when it is no longer leader
#
# A block is not interrupted when its lease is lost.


class Term(Holder[aio_lock.Term]):
    """A candidacy, and the term that follows it; created by ``Client.campaign``."""

    leads = Asked[bool]()
    """Whether this candidate is leader, as far as this client knows."""

    campaign = taking(aio_lock.Term.campaign, aio_lock.Term.resign)

    proclaim = blocking(aio_lock.Term.proclaim)
    resign = blocking(aio_lock.Term.resign, LoopThread.see_through)

    def __enter__(self) -> Self:
        return self.campaign()


# -- txn ------------------------------------------------------------------------------------------------------------
#
# Transactions for programs without an event loop; see ``kv.txn`` for what they mean.


class Txn(Blocking[aio_kv.Txn]):
    """A transaction under construction; each method returns the same object. Created by ``Client.txn``."""

    def when(self, *conditions: Compare) -> Txn:
        """Add conditions; all must hold. Without conditions, ``then`` is executed.

        Raises:
            TypeError: an argument is not a condition, for example ``kv.version("a")`` without a comparison.
        """
        self._inner.when(*conditions)
        return self

    def then(self, *operations: Operation | Txn) -> Txn:
        """Add operations, which may be txns, to execute if the conditions hold."""
        self._inner.then(*map(_plain, operations))
        return self

    def otherwise(self, *operations: Operation | Txn) -> Txn:
        """Add operations to execute if a condition does not hold."""
        self._inner.otherwise(*map(_plain, operations))
        return self

    commit = taskless(aio_kv.Txn.commit)


def _plain(operation: Operation | Txn) -> Operation:
    return operation.target()[1] if isinstance(operation, Txn) else operation


# -- stm ------------------------------------------------------------------------------------------------------------
#
# Transactions written as plain code, for programs without an event loop; see ``stm`` for what they guarantee.
#
# ::
#
#     def move(tx):
#         a, b = int(tx.get("a") or 0), int(tx.get("b") or 0)
#         tx.put("a", str(a - 1))
#         tx.put("b", str(b + 1))
#
#     kv.stm(move)


class Transaction(Blocking[aio_kv.Transaction]):
    """One attempt: the keys read so far, and the pending writes."""

    get = blocking(aio_kv.Transaction.get)
    range = blocking(aio_kv.Transaction.range)

    def put(self, key: Text, value: Text, *, lease: LeaseLike | None = None) -> None:
        """Write a key when the transaction is committed.

        Arguments:
            key, value: key and value; text is encoded as UTF-8.
            lease: lease that the key is attached to.
        """
        self._inner.put(key, value, lease=lease)

    def delete(self, key: Text) -> None:
        """Delete a key when the transaction is committed."""
        self._inner.delete(key)


# -- users ----------------------------------------------------------------------------------------------------------
#
# Users and roles of the blocking client: ``kv.users`` and ``kv.roles``, as in ``raftkv.client.admin``.


@dataclass(frozen=True)
class _Of:
    """The methods of a part of a client."""

    _client: Client
    _part: str

    def target(self) -> tuple[LoopThread, Any]:
        """Return the loop and the part, for a call."""
        loop, kv = self._client.target()
        return loop, getattr(kv, self._part)


class Users(_Of):
    """Methods for users and authentication."""

    enable_auth = blocking(admin.Users.enable_auth)
    disable_auth = blocking(admin.Users.disable_auth)
    auth_status = blocking(admin.Users.auth_status)
    add = blocking(admin.Users.add)
    delete = blocking(admin.Users.delete)
    get = blocking(admin.Users.get)
    list = blocking(admin.Users.list)
    change_password = blocking(admin.Users.change_password)
    grant_role = blocking(admin.Users.grant_role)
    revoke_role = blocking(admin.Users.revoke_role)


class Roles(_Of):
    """Methods for roles and their permissions."""

    add = blocking(admin.Roles.add)
    delete = blocking(admin.Roles.delete)
    get = blocking(admin.Roles.get)
    list = blocking(admin.Roles.list)
    grant = blocking(admin.Roles.grant)
    revoke = blocking(admin.Roles.revoke)


# -- cache ----------------------------------------------------------------------------------------------------------
#
# Caches for programs without an event loop; see ``client.cache`` for what they guarantee.
#
# ::
#
#     with kv.cache("jobs/") as jobs:
#         jobs.get("jobs/a")                          # from memory, on the calling thread, without using the loop
#         for update in jobs.subscribe(): ...
#
# The loop's thread changes the copy under a lock that readers also take, so they see whole revisions too.


def _reading(
    method: Callable[Concatenate[aio_cache.Cache, P], Coroutine[Any, Any, Result]], read: Callable[..., Result]
) -> Callable[Concatenate[Any, P], Result]:
    """Return the twin of a read, which uses the loop's thread only if it has to wait.

    Arguments:
        method: method of the async cache.
        read: method that reads the copy.
    """

    def local(
        self: Cache,
        /,
        *args: Any,
        min_revision: int = 0,
        linearizable: bool = False,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Result:
        if not self.is_at(min_revision, linearizable=linearizable):
            self.wait(min_revision, linearizable=linearizable, timeout_s=timeout_s)
        return read(self.target()[1].copy, *args, **kwargs)

    call: Any = functools.wraps(method)(local)
    return cast("Callable[Concatenate[Any, P], Result]", call)


class Cache(Scoped[aio_cache.Cache]):
    """A local copy of a prefix; created by ``Client.cache``, filled by ``with`` or ``start()``."""

    revision = Shown[int]()
    """The revision of the copy: reads see all changes up to it. 0: the copy is not filled yet."""

    size_bytes = Shown[int]()
    """Approximate memory of the keys, limited by ``max_bytes``."""

    error = Shown[Exception | None]()
    """Why the copy has ended, or does not follow the cluster at present; None: it follows, as far as is known."""

    start = taking(aio_cache.Cache.start, aio_cache.Cache.close)
    close = blocking(aio_cache.Cache.close)
    wait = blocking(aio_cache.Cache.wait)
    get = _reading(aio_cache.Cache.get, aio_cache.Copy.get_item)
    range = _reading(aio_cache.Cache.range, aio_cache.Copy.get_range)
    select = _reading(aio_cache.Cache.select, aio_cache.Copy.select_items)

    def is_at(self, min_revision: int = 0, *, linearizable: bool = False) -> bool:
        """Return whether a read with these arguments needs no ``wait``.

        Arguments:
            min_revision, linearizable: as for ``wait``.
        """
        self._loop.check_usable()
        return self._inner.is_at(min_revision, linearizable=linearizable)

    def subscribe(self) -> Stream[aio_cache.CacheUpdate]:
        """Return a ``Stream`` of a snapshot, then every change, which ends with the cache."""
        return Stream(self, self._loop, Drawn(self._inner.subscribe()))

    def __enter__(self) -> Self:
        return self.start()


# -- endpoints ------------------------------------------------------------------------------------------------------
#
# Endpoints of services for programs without an event loop; see ``client.endpoints`` for what they are.
#
# ::
#
#     with kv.endpoints("greeter").register("10.0.0.1:50051"):
#         serve()
#
#     for servers in kv.endpoints("greeter").watch():
#         channel.use([server.addr for server in servers.values()])


class Endpoints(Blocking[aio_endpoints.Endpoints]):
    """The servers of one service; created by ``Client.endpoints``."""

    def __init__(self, client: Client, service: str) -> None:
        loop, kv = client.target()
        super().__init__(client, loop, kv.endpoints(service))
        self._client = client
        self._service = service

    @property
    def service(self) -> str:
        """The name of the service."""
        return self._service

    @contextmanager
    def register(self, addr: str, metadata: Any = None, *, name: str = "", ttl: float = 10) -> Iterator[Session]:
        """Register an endpoint for the block, with a separate session; the endpoint is removed at the end of the block.

        Arguments:
            addr: address of this server for clients.
            metadata: information about the server.
            name: name of the key below the service's; empty: the address.
            ttl: seconds after which a dead or partitioned server is removed.

        Raises:
            StatusError: the cluster refused, or could not be reached at the start.
            ValueError: the address is empty, or the metadata cannot be encoded as JSON.
        """
        value = aio_endpoints.encode(Endpoint(addr, metadata))
        with self._client.session(ttl) as session:
            session.keep(f"{self._service}/{name or addr}", value)
            yield session

    add = blocking(aio_endpoints.Endpoints.add)
    delete = blocking(aio_endpoints.Endpoints.delete)
    update = blocking(aio_endpoints.Endpoints.update)
    list = blocking(aio_endpoints.Endpoints.list)

    def watch(self) -> Stream[dict[str, Endpoint]]:
        """Return a ``Stream`` of all endpoints, now and after each change; it never ends by itself."""
        return Stream(self, self._loop, Drawn(self._inner.watch()))


class _Target(NamedTuple):
    """The target of calls: a thread, and the client that lives on it."""

    loop: LoopThread
    kv: library.Client


class Client:
    """A client of a cluster; created by ``raftkv.connect`` and, for a part of the keys, by ``view``.

    Usable by any thread, and in forked children. ``close()``, or the end of a ``with`` block, ends its thread.
    """

    def __init__(self, make: Callable[[], library.Client], parent: Client | None = None, prefix: Text = b"") -> None:
        self._make = make
        self._parent = parent
        self._prefix = prefix
        self._target: _Target | None = None
        self._opening = threading.RLock()  # reentrant: a signal handler may use the client while it is being opened
        self._is_closed = False
        self._finish: weakref.finalize[[LoopThread, library.Client], Client] | None = None
        _clients.add(self)

    def __repr__(self) -> str:
        if self._parent is not None:
            return f"<view of {self._prefix!r} in {self._parent!r}>"
        shown = repr(self._make() if self._target is None else self._target.kv)
        return f"{shown.removesuffix('>')}, closed>" if self._is_closed and not shown.endswith(", closed>") else shown

    # ---- keys and values

    put = taskless(KV.put)
    get = taskless(KV.get)
    range = taskless(KV.range)
    count = taskless(KV.count)
    delete = taskless(KV.delete)
    put_many = chunked(Bulk.put_many)
    get_many = chunked(Bulk.get_many)
    pages = iterating(Bulk.pages)

    @iterates_like(Bulk.scan)
    def scan(self, *args: Any, **kwargs: Any) -> Iterator[KeyValue]:
        """Yield the keys of ``Bulk.scan``: fetched in pages, yielded one by one."""
        return itertools.chain.from_iterable(page.items for page in self.pages(*args, **kwargs))

    # ---- transactions

    version = staticmethod(operations.version)
    value = staticmethod(operations.value)
    create_revision = staticmethod(operations.create_revision)
    mod_revision = staticmethod(operations.mod_revision)
    lease_of = staticmethod(operations.lease_of)

    def txn(self, *, fence: FenceLike | None = None) -> Txn:
        """Return a new transaction; with ``fence``, it commits only while that lock or term is held."""
        loop, kv = self.target()
        return Txn(self, loop, kv.txn(fence=fence))

    def stm(
        self,
        function: Callable[[Transaction], T],
        *,
        retries: int = RETRIES,
        fence: FenceLike | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """Run a plain function as a transaction; return its result. For the guarantees see ``raftkv.aio``.

        Arguments:
            function: reads and writes through its argument, on this thread; it may run several times, and if it raises,
                nothing is written.
            retries: maximum number of attempts when other writers interfere.
            fence: commit only while this lock or term is held.
            timeout_s: limit of each commit; None: the client's.

        Raises:
            TxnConflict: other writers interfered at every attempt; nothing was written.
            FenceLost: the lock or term has ended; nothing was written.
            StatusError: the cluster refused, or the outcome is unknown: see ``definite``.
            TypeError: the function is a coroutine function, which would never run.
        """
        loop, kv = self.target()
        backoff = Backoff(base_s=0.001, max_s=0.1)
        for _ in range(retries):
            attempt = aio_kv.Transaction(kv.scope)
            try:
                result = function(Transaction(self, loop, attempt))
                if inspect.iscoroutine(result):
                    result.close()
                    raise TypeError("stm() takes a plain function here; one with async is for the stm() of raftkv.aio")
                if loop.run(attempt.commit(fence, timeout_s)):
                    return result
            except CompactedError:
                pass  # the revision was compacted before all reads were done: start again
            loop.run(backoff.wait())
        raise TxnConflict(aio_kv.CONFLICT.format(retries))

    # ---- watches

    def watch(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        start_revision: int = 0,
        prev_kv: bool = False,
        no_put: bool = False,
        no_delete: bool = False,
        keys_only: bool = False,
        max_value_bytes: int = 0,
        queue_bytes: int = QUEUE_BYTES,
        timeout_s: float | None = None,
    ) -> Watch:
        """Watch a key or a range; returns when the cluster has confirmed the watch, so that later writes are seen.

        Arguments:
            key, end, prefix: as for ``range``.
            start_revision: first revision; 0: from now on.
            prev_kv: whether events carry the key as it was before.
            no_put, no_delete: whether to leave such events out.
            keys_only: whether to leave values out; raftkv members then do not send them.
            max_value_bytes: leave out puts of larger values, in the same way; 0: no limit.
            queue_bytes: limit of the queue for a slow reader.
            timeout_s: time limit of the confirmation; None: the client's.

        Raises:
            Compacted: the start revision is compacted; some members report this only with the first event.
            EndpointsFailed: no member confirmed the watch in time.
        """
        loop, kv = self.target()

        async def begin() -> Any:
            watch = kv.watch(
                key,
                end,
                prefix=prefix,
                start_revision=start_revision,
                prev_kv=prev_kv,
                no_put=no_put,
                no_delete=no_delete,
                keys_only=keys_only,
                max_value_bytes=max_value_bytes,
                queue_bytes=queue_bytes,
            )
            try:
                await watch.ready(timeout_s)
            except BaseException:
                watch.cancel()
                raise
            return watch

        return Watch(self, loop, loop.run(begin()))

    # ---- leases, locks, elections

    def lease(
        self,
        ttl: float,
        *,
        id: int = 0,
        on_lost: Callable[[Lease], Any] | None = None,
        disconnect_grace_s: float = 0.0,
        patient: bool = False,
    ) -> Lease:
        """Return a new lease, to be granted by ``with`` or ``grant()``.

        Arguments:
            ttl: seconds without a keep-alive after which the lease expires; the cluster may grant more.
            id: lease id; 0: any.
            on_lost: called with the lease when it is lost, on a separate thread.
            disconnect_grace_s: seconds after which the lease expires when this process is gone; 0: its TTL.
            patient: whether the lease is lost only when the cluster says so, never because the cluster is unreachable.
        """
        loop, kv = self.target()
        inner = kv.lease(ttl, id=id, interrupt=False, disconnect_grace_s=disconnect_grace_s, patient=patient)
        lease = Lease(self, loop, inner)
        if on_lost is not None:
            lease.on_lost(on_lost)
        return lease

    lease_info = blocking(Leases.lease_info)
    leases = blocking(Leases.leases)
    revoke = blocking(Leases.revoke)

    def session(
        self,
        ttl: float = 10,
        *,
        on_lost: Callable[[Session], Any] | None = None,
        on_established: Callable[[Session], Any] | None = None,
    ) -> Session:
        """Return a new session, to be established by ``with`` or ``establish()``.

        Arguments:
            ttl: TTL of its leases, in seconds.
            on_lost: called with the session when its lease is lost, on a separate thread.
            on_established: called after that, in order, when the session has a new lease and its keys are put again.
        """
        loop, kv = self.target()
        callbacks = CallbackQueue()

        def tell(callback: Callable[[Session], Any] | None) -> Callable[[aio_lease.Session], Any] | None:
            return None if callback is None else lambda _: callbacks.call_soon(callback, session)

        async def make() -> aio_lease.Session:
            return kv.session(ttl, on_lost=tell(on_lost), on_established=tell(on_established))

        session = Session(self, loop, loop.run(make()))
        return session

    def lock(self, name: Text, *, ttl: float = 10, lease: Lease | Session | None = None) -> Lock:
        """Return a new lock, to be acquired by ``with`` or ``acquire()``.

        Arguments:
            name: lock name; holders of the same name exclude each other, including other etcd clients.
            ttl: seconds after which a dead or partitioned holder loses the lock.
            lease: lease to use instead of a new one.
        """
        loop, kv = self.target()
        return Lock(self, loop, kv.lock(name, ttl=ttl, lease=plain_lease(lease), interrupt=False))

    def campaign(self, name: Text, value: Text = b"", *, ttl: float = 10, lease: Lease | Session | None = None) -> Term:
        """Return a new candidacy, to be run by ``with`` or ``Term.campaign()``.

        Arguments:
            name: name of the election.
            value: value for observers during the term, e.g. the leader's address.
            ttl, lease: as for ``lock``.
        """
        loop, kv = self.target()
        return Term(self, loop, kv.campaign(name, value, ttl=ttl, lease=plain_lease(lease), interrupt=False))

    leader = blocking(Elections.leader)

    def observe(self, name: Text) -> Stream[KeyValue]:
        """Return a ``Stream`` of the leader, each proclamation and each next leader; it never ends by itself."""
        loop, kv = self.target()
        return Stream(self, loop, Drawn(kv.observe(name)))

    # ---- the cluster

    status = blocking(Admin.status)
    members = blocking(Admin.members)
    member_add = blocking(Admin.member_add)
    member_remove = blocking(Admin.member_remove)
    member_update = blocking(Admin.member_update)
    member_promote = blocking(Admin.member_promote)
    compact = blocking(Admin.compact)
    snapshot = blocking(Admin.snapshot)
    alarms = blocking(Admin.alarms)
    disarm = blocking(Admin.disarm)
    set_quota = blocking(Admin.set_quota)
    remove_quota = blocking(Admin.remove_quota)
    quotas = blocking(Admin.quotas)
    set_limit = blocking(Admin.set_limit)
    limits = blocking(Admin.limits)

    @property
    def users(self) -> Users:
        """Methods for users and authentication: see ``raftkv.client.admin``."""
        return Users(self, "users")

    @property
    def roles(self) -> Roles:
        """Methods for roles and their permissions."""
        return Roles(self, "roles")

    # ---- the client itself

    def view(self, prefix: Text) -> Client:
        """Return a client for the keys with a prefix, which it adds and removes; it shares the connection."""
        return Client(self._make, self, prefix)

    def cache(
        self, prefix: Text, *, indexes: Mapping[str, IndexFunction] | None = None, max_bytes: int = MAX_BYTES
    ) -> Cache:
        """Return a local copy of all keys with a prefix, to be filled by ``with`` or ``start()``.

        Arguments:
            prefix: prefix of the keys; ``""``: all keys.
            indexes: index functions by name; each returns the values under which a key is found. They run on the
                client's thread, so they must not use the client.
            max_bytes: limit of keys and values, plus 400 bytes for each key and for each of its index entries; a larger
                cache ends with ``CacheTooLarge``.
        """
        loop, kv = self.target()
        return Cache(self, loop, kv.cache(prefix, indexes=indexes, max_bytes=max_bytes))

    def endpoints(self, service: str) -> Endpoints:
        """Return the servers of a service, to register, list and follow them."""
        return Endpoints(self, service)

    def close(self) -> None:
        """Close the connection and end the thread; remaining leases, locks and watches are lost.

        Calls in progress on other threads raise ``Closed``. In a forked child, only the child's own connection and
        thread are closed. Does nothing for a view. Safe to repeat.
        """
        if self._parent is not None:
            return
        self._is_closed = True
        target, self._target = self._target, None
        if target is not None:
            target.loop.close(target.kv.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Client], tuple[Any, ...]]:
        """Let a copy in another process (``spawn``, ``forkserver``) open a new connection with the same settings."""
        if self._parent is not None:
            return Client.view, (self._parent, self._prefix)
        return Client, (self._make,)

    def target(self) -> _Target:
        """Return the thread and the async client in this process, for calls without a blocking twin.

        Raises:
            Closed: the client is closed.
        """
        return self._target or self._open()

    def _open(self) -> _Target:
        with self._opening:
            if self._target is None:
                opened = self._open_root() if self._parent is None else self._open_view(self._parent)
                self._target = self._target or opened
            target = self._target
        if self._is_closed:  # by another thread in the meantime
            self.close()
            raise Closed("the client is closed")
        return target

    def _open_view(self, parent: Client) -> _Target:
        loop, kv = parent.target()
        return _Target(loop, kv.view(self._prefix))

    def _open_root(self) -> _Target:
        if self._is_closed:
            wait_for_the_end()
            raise Closed("the client is closed")
        kv = self._make()
        if self._target is not None:
            return self._target
        loop = LoopThread("raftkv-client")
        self._finish = weakref.finalize(self, _drop, loop, kv)
        self._finish.atexit = False
        return _Target(loop, kv)

    def _after_fork_in_child(self) -> None:
        self._opening = threading.RLock()
        target, self._target = self._target, None
        if self._finish is not None:
            self._finish.detach()
        if target is not None and self._parent is None:
            target.loop.disown()


def client_of(value: Client) -> Client:
    """Return a blocking client after checking its type.

    Raises:
        TypeError: the value is not a blocking client.
    """
    if not hasattr(value, "target"):
        raise TypeError(f"kv is a client made by raftkv.connect, not {value!r}")
    return value


def _drop(loop: LoopThread, kv: library.Client) -> None:
    """End the thread of a client that was garbage-collected without ``close``; do not wait for it."""
    loop.close(kv.close(), wait=False)


def _connector(make: Callable[P, library.Client]) -> Callable[P, Client]:
    @functools.wraps(make)
    def connect(*args: P.args, **kwargs: P.kwargs) -> Client:
        for name in kwargs:
            kwargs[name] = _repeatable(kwargs[name], name)
        bound = functools.partial(make, *map(_repeatable, args), **kwargs)
        bound()  # fails early on unusable settings; opens nothing
        return Client(bound)

    return connect


def _repeatable(argument: Any, name: str = "") -> Any:
    """Return an argument in a reusable form for a forked child: an iterator as a list, a password hidden."""
    if name in ("password", "token"):
        return Secret(argument)
    return list(argument) if isinstance(argument, Iterator) else argument


connect = _connector(library.connect)

_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _close_all() -> None:
    """Close all clients, because their threads must not continue during the interpreter's shutdown."""
    begin_the_end()
    for client in list(_clients):
        client.close()
