"""``raftkv.torch.Store``: a ``torch.distributed.Store`` whose keys are in raftkv.

::

    store = raftkv.torch.Store("h1:2379,h2:2379,h3:2379", "jobs/j1/epoch-7")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

Every operation behaves like that of TCPStore, but there is no single point of failure: when a member of raftkv dies, a
running ``wait`` or ``get`` continues on the next. The store may be used by any number of threads, and by forked
children.

How torch treats a store written in Python, and the consequences:

1. torch calls ``deleteKey`` and ``getNumKeys``, not ``delete_key`` and ``num_keys``, so both names are defined.
2. torch keeps only the C++ object, and its calls fail once the Python object is gone. So this module keeps a reference
   to every store until ``close()``, the end of its ``with`` block, or the end of the process.
3. The queue operations and ``list_keys`` cannot be provided in Python; ``barrier`` consists of ``add`` and ``wait``.
4. Every call needs the interpreter lock, and NCCL's own threads call while Python computes. So give NCCL a TCPStore
   client of a gateway (``raftkv tcpstore-gateway``) instead.

Errors: ``DistStoreError`` for a timeout, a value that is not a number, an ended generation (``fence``), and permanent
refusals by raftkv; TypeError for keys and values that are neither str nor bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store as TorchStore

from raftkv.client.scope import to_bytes
from raftkv.client.sync.library import Client, connect
from raftkv.errors import ConfigError, RaftKVError
from raftkv.training.records import STORE_ROOT
from raftkv.training.tcpstore.store import ReplicatedStore

if TYPE_CHECKING:
    from raftkv.client.operations import Fence

T = TypeVar("T")
Call = Callable[[ReplicatedStore], Coroutine[Any, Any, T]]

DEFAULT_TIMEOUT: Final = timedelta(minutes=5)
"""Default timeout, as of TCPStore."""

_kept: set[Store] = set()
"""References to the Python object of each store, because torch keeps only the C++ object (see the module)."""


class _Shared:
    """A client, and the store on it, for a store and its clones; closed with the last of them.

    Arguments:
        client: the client.
        owned: whether to close the client at the end.
    """

    def __init__(self, client: Client, owned: bool, prefix: str, fence: Fence | None) -> None:
        self._client = client
        self._owned = owned
        self.prefix = prefix
        self._fence = fence
        self._lock = threading.Lock()
        self._users = 0
        self._store: tuple[Any, ReplicatedStore] | None = None

    def run(self, call: Call[T], timeout_s: float) -> T:
        """Run ``call(store)`` on the client's loop, with a time limit.

        Arguments:
            call: returns the coroutine.
            timeout_s: seconds.

        Raises:
            TimeoutError: the call took longer.
        """
        loop, kv = self._client.target()
        found = self._store
        if found is None or found[0] is not kv:
            # The first call, or one of a forked child, which has a new client and new writers.
            found = self._store = kv, ReplicatedStore(kv, self.prefix, fence=self._fence, queues=False)
        return loop.run(_within(call(found[1]), timeout_s))

    def enter(self) -> None:
        """Add one user."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Remove one user; the last one cleans up."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        if self._store is not None:
            with contextlib.suppress(RaftKVError, TimeoutError):
                self.run(ReplicatedStore.close, _CLOSE_TIMEOUT_S)
        if self._owned:
            self._client.close()


_CLOSE_TIMEOUT_S: Final = 2.0


class Store(TorchStore):
    """A ``torch.distributed.Store`` whose keys are in the cluster.

    Arguments:
        endpoints: endpoints as for ``raftkv.connect``, or a client, which the caller must close.
        prefix: prefix of the keys. Processes with the same prefix share a store; use a new one for every attempt of a
            job, for example with its generation. Below ``/raftkv/store/``, unless it begins with a slash.
        timeout: timeout of ``get`` and ``wait``, and of every call while raftkv does not answer.
        fence: condition of every write: a lock, a term, or the ``fence`` of a world.
        options: for ``raftkv.connect``: user, password, certificates.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str] | Client,
        prefix: str,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        *,
        fence: Fence | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not prefix.strip("/"):
            raise ConfigError("a store needs a prefix that tells it from others, as the job's name and its attempt")
        owned = not isinstance(endpoints, Client)
        client = connect(endpoints, **options) if not isinstance(endpoints, Client) else endpoints
        self._begin(_Shared(client, owned, _full_prefix(prefix), fence), timeout)

    def _begin(self, shared: _Shared, timeout: timedelta | float) -> None:
        self.set_timeout(timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout))
        self._shared = shared
        self._is_closed = False
        shared.enter()
        _kept.add(self)

    def __repr__(self) -> str:
        return f"<raftkv Store below {self._shared.prefix!r}{', closed' if self._is_closed else ''}>"

    # ---- as torch calls it

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value.

        Arguments:
            key: key of the value.
            value: text or bytes.
        """
        self._run("set", [key], lambda store: store.set_many([(_bytes(key), _bytes(value))]))

    def get(self, key: str) -> bytes:
        """Return a value; waits for it, as long as the store's timeout.

        Raises:
            DistStoreError: it was not set in time.
        """
        return self._run("wait", [key], lambda store: store.wait_value(_bytes(key)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number; absent is 0. Returns the sum; no other caller gets the same one by the same addition.

        Arguments:
            key: key of the number.
            amount: may be negative.

        Raises:
            DistStoreError: the value is not a number.
        """
        return self._run("add", [key], lambda store: store.add(_bytes(key), int(amount)))

    def append(self, key: str, value: str | bytes) -> None:
        """Put bytes behind a value; absent is empty.

        Arguments:
            key: key of the value.
            value: value to append.
        """
        self._run("append", [key], lambda store: store.append(_bytes(key), _bytes(value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all the keys have values, now."""
        return not self._run("check", keys, lambda store: store.missing([_bytes(key) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until every key has had a value.

        Arguments:
            keys: which.
            timeout: None: the store's.

        Raises:
            DistStoreError: some were not set in time.
        """
        self._run("wait", keys, lambda store: store.wait([_bytes(key) for key in keys]), timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a value if the current one equals the expected one; with an empty expected value, if there is none.

        Arguments:
            key: key of the value.
            expected: the present value.
            desired: the next one.

        Returns:
            The current value; if there is none, the expected value.
        """
        name, old, new = _bytes(key), _bytes(expected), _bytes(desired)
        return self._run("compare_set", [key], lambda store: store.compare_set(name, old, new))

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether it existed."""
        return self._run("delete_key", [key], lambda store: store.delete(_bytes(key)))

    def num_keys(self) -> int:
        """Count the keys."""
        return self._run("num_keys", [], lambda store: store.count())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys; waits for each, as ``get`` does."""
        names = [_bytes(key) for key in keys]

        async def read(store: ReplicatedStore) -> list[bytes]:
            found = await store.get_many(names)
            return [
                await store.wait_value(name) if value is None else value
                for name, value in zip(names, found, strict=True)
            ]

        return self._run("wait", keys, read)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values.

        Arguments:
            keys, values: equally many.

        Raises:
            DistStoreError: not as many values as keys.
        """
        if len(keys) != len(values):
            raise DistStoreError(f"multi_set: {len(keys)} keys and {len(values)} values")
        pairs = [(_bytes(key), _bytes(value)) for key, value in zip(keys, values, strict=True)]
        self._run("multi_set", keys, lambda store: store.set_many(pairs))

    def has_extended_api(self) -> bool:
        """Tell torch that there are ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def clone(self) -> Store:
        """Return another store of the same keys, on the same connection."""
        twin = type(self).__new__(type(self))
        TorchStore.__init__(twin)
        twin._begin(self._shared, self._limit)
        return twin

    deleteKey = delete_key  # noqa: N815 - the name that torch calls
    getNumKeys = num_keys  # noqa: N815

    # ---- its life

    def close(self) -> None:
        """Let go of it: close its connection, if no clone uses it. The keys stay. Harmless when repeated.

        torch must no longer use it: destroy the process groups first.
        """
        _kept.discard(self)
        if not self._is_closed:
            self._is_closed = True
            self._shared.leave()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    @property
    def _limit(self) -> timedelta:
        # A property of the C++ half, which its type stubs leave out.
        limit: timedelta = self.timeout  # type: ignore[attr-defined, unused-ignore]
        return limit

    def _run(self, what: str, keys: Sequence[str], call: Call[T], timeout: timedelta | None = None) -> T:
        limit = self._limit if timeout is None else timeout
        try:
            return self._shared.run(call, limit.total_seconds())
        except TimeoutError:
            shown = ", ".join(map(str, keys[:10])) + (", ..." if len(keys) > 10 else "")
            milliseconds = limit / timedelta(milliseconds=1)
            raise DistStoreError(f"{what} timeout after {milliseconds:.0f}ms, keys: {shown}") from None
        except RaftKVError as error:
            raise DistStoreError(f"{what}: {error}") from error


async def _within(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Limit the time of a call: negative means no limit, as in torch; zero still finds existing values."""
    async with asyncio.timeout(None if timeout_s < 0 else max(timeout_s, _SHORTEST_S)):
        return await work


_SHORTEST_S: Final = 0.05
"""Minimum seconds of a call, even with a shorter or zero timeout, so that existing values are found."""


def _full_prefix(prefix: str) -> str:
    full = prefix if prefix.startswith("/") else f"{STORE_ROOT}{prefix}"
    return full if full.endswith("/") else f"{full}/"


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else to_bytes(text)
