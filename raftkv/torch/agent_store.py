"""The store of one generation: a TCPStore on the node of rank 0, which agents use without hanging in it.

::

    hosted = host_store()                                   # on the node of rank 0, new for every generation
    store = connect_store("10.0.0.7", port, is_over=lambda: participant.nodes_waiting > 0)

Each generation has a new server, so no key of an earlier attempt is found. It is torch's own C++ server, so workers and
NCCL use it as usual. The agent itself gets an ``AgentStore``, which is the same store with two more guarantees:

- **No wait outlasts the generation.** torch's agent assigns ranks by ``get`` and ends by ``wait``, both with a timeout
  of 300 s after which it fails: one node that dies after joining would end all others. Here such a wait ends when the
  run says that the generation has ended. A missing rank is then invented: workers started with it cannot reach any
  rank, and the agent stops them at its next poll, 0.1 s later, and returns to the rendezvous. torch's client waits for
  ever for a frozen host, so its calls are made on a thread, which is abandoned then.
- **The store can be released.** The agent holds the store of one generation until it has that of the next. ``drop``
  leaves it an empty object, so that the server ends, and a node with a fixed port (``store_port``) can reuse the port.

The store does not survive its node, and lasts only for its generation.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final, TypeVar

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError, DistStoreError

SLICE_S: Final = 0.2
"""Interval at which an unanswered call checks whether the generation has ended."""
POLL_MIN_S: Final = 0.005
POLL_MAX_S: Final = 0.1
"""Interval at which a wait polls its keys. torch's own wait prints two lines of warnings at each timeout."""
CONNECT_TIMEOUT_S: Final = 60.0
"""Time limit for connecting to the node of rank 0 while it lives."""
TIMEOUT_S: Final = 300.0
"""torch's own timeout of waits."""
_PROBE_TIMEOUT_S: Final = 2.0
_PROBE: Final = b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x0d" + struct.pack("<I", 1)
"""First bytes of a TCPStore client: a magic number, and a ping, which the server returns."""
_T = TypeVar("_T")
_ROLE_INFO: Final = "torchelastic/role_info/"
_TERMINAL_STATE: Final = "torchelastic/agent/terminal_state"
_ASSIGNED_RANKS: Final = "torchelastic/assigned_ranks/"


class StoreUnreachable(Exception):
    """The node of rank 0 is alive, but its store cannot be reached from here; the message is one line."""


class GenerationEnded(Exception):
    """The generation ended before its store could be used."""


def host_store(port: int = 0) -> TCPStore:
    """Start the store of a generation on this node, on a free port unless one is given.

    Raises:
        StoreUnreachable: the port cannot be had.
    """
    try:
        return TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))
    except DistError as error:
        raise StoreUnreachable(f"no store can be started on port {port or '(any)'}: {_first_line(error)}") from None


def connect_store(host: str, port: int, is_over: Callable[[], bool]) -> TCPStore:
    """Connect to the store on the node of rank 0.

    A host that has frozen accepts connections and never answers, for which torch's client waits forever: so it is
    tried only after a ping was answered.

    Arguments:
        host, port: address of the store.
        is_over: returns why the generation has ended; empty: it has not.

    Raises:
        GenerationEnded: the generation has ended.
        StoreUnreachable: it cannot be reached, although the run holds that its node is there.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    pause = threading.Event()
    while not is_over():
        reason = _probe(host, port)
        if not reason:
            try:
                return TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
                )
            except DistError as error:
                reason = _first_line(error)
        if time.monotonic() > deadline:
            raise StoreUnreachable(
                f"the store of rank 0 at {host}:{port} cannot be reached from here within {CONNECT_TIMEOUT_S:g} s "
                f"({reason}): give that node an address that others can use (--local-addr), and open its ports"
            )
        pause.wait(SLICE_S / 4)
    raise GenerationEnded


def _probe(host: str, port: int) -> str:
    """Return why no TCPStore answers at an address; empty: one answers."""
    try:
        with socket.create_connection((host, port), _PROBE_TIMEOUT_S) as connection:
            connection.sendall(_PROBE)
            connection.settimeout(_PROBE_TIMEOUT_S)
            connection.recv(4)  # anything, even the end: a process is alive there
    except OSError as error:
        return str(error)
    return ""


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


class _Caller:
    """A daemon thread that makes calls one after the other; a call that never returns blocks only this thread."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="raftkv-store", daemon=True).start()

    def call(self, call: Callable[[], _T]) -> Future[_T]:
        """Queue a call; return a future of its result."""
        future: Future[_T] = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Stop making calls."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del item, call, future  # what they refer to may be a server, whose port is wanted again


class _Gone:
    """Placeholder for a released store: each call fails as on a store whose node is gone."""

    def __getattr__(self, name: str) -> Any:
        raise DistError("the store of this generation was let go")


class AgentStore(Store):
    """A TCPStore whose operations never wait longer than an agent can afford.

    Arguments:
        store: the generation's.
        is_over: the generation has ended; asked between waits, without I/O.
        world_size: agents of the generation.
        on_exit: called when torch's agent enters its last barrier, which it does if all its workers have ended well.
        exit_timeout_s: timeout of that barrier; None: torch's own.

    Attributes:
        has_made_up: whether substitute ranks were returned; the agent must return to the rendezvous.
    """

    def __init__(
        self,
        store: TCPStore,
        is_over: Callable[[], bool],
        world_size: int,
        on_exit: Callable[[], object] = lambda: None,
        exit_timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._on_exit = on_exit
        self._exit_timeout = None if exit_timeout_s is None else timedelta(seconds=exit_timeout_s)
        self._store: Any = store  # torch's stubs lack parts of it
        self._is_over = is_over
        self._caller: _Caller | None = _Caller()
        self._world_size = world_size
        self._timeout = timedelta(seconds=TIMEOUT_S)
        self._role_info = b""
        self.has_made_up = False

    @property
    def timeout(self) -> timedelta:
        """Default timeout of waits."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of waits."""
        self._timeout = timeout

    def drop(self) -> None:
        """Release the store; later calls behave as after the end of the generation."""
        self._is_over = lambda: True
        self._store = _Gone()
        if self._caller is not None:
            self._caller.close()
            self._caller = None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until the keys exist or the generation ends.

        Arguments:
            keys: all keys.
            timeout: total timeout; None: the store's own.

        Raises:
            DistStoreError: neither came in time.
        """
        limit = self._timeout if timeout is None else timeout
        if self._exit_timeout is not None and keys and keys[0].startswith(_TERMINAL_STATE):
            limit = self._exit_timeout
        deadline = time.monotonic() + limit.total_seconds()
        pause, poll_s = threading.Event(), POLL_MIN_S
        while not self._is_over():
            # If its node is gone the run will say so.
            with contextlib.suppress(DistError):
                if self._made(lambda: self._store.check(list(keys))):
                    return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise DistStoreError(f"wait timeout after {limit}, keys: {', '.join(keys)}")
            pause.wait(min(poll_s, left_s))
            poll_s = min(2 * poll_s, POLL_MAX_S)

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value; dropped if the generation has ended.

        Arguments:
            key: key of the value.
            value: text or bytes.
        """
        if key.startswith(_ROLE_INFO):
            self._role_info = value.encode() if isinstance(value, str) else value
        self._unless_over(lambda: self._store.set(key, value), None)

    def get(self, key: str) -> bytes:
        """Wait for a value and return it; after the end of the generation, return a substitute (see the module)."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values like ``get``."""
        self.wait(keys)
        found = None if self._is_over() else self._unless_over(lambda: self._store.multi_get(list(keys)), None)
        return [self._stand_in(key) for key in keys] if found is None else found

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values like ``set``.

        Arguments:
            keys, values: equally many.
        """
        self._unless_over(lambda: self._store.multi_set(list(keys), list(values)), None)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; 0 after the end of the generation.

        Arguments:
            key: key of the number.
            amount: may be negative.
        """
        if key.startswith(_TERMINAL_STATE):
            self._on_exit()
        total: int = self._unless_over(lambda: self._store.add(key, amount), 0)
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether the keys exist."""
        found: bool = self._unless_over(lambda: self._store.check(list(keys)), False)
        return found

    def _unless_over(self, call: Callable[[], _T], stand_in: _T) -> _T:
        """Return the result of a call; if it fails because the store's node died, return the substitute once the run
        says so."""
        try:
            return self._made(call)
        except DistError:
            deadline = time.monotonic() + self._timeout.total_seconds()
            pause = threading.Event()
            while not self._is_over():
                if time.monotonic() > deadline:
                    raise
                pause.wait(SLICE_S / 4)
            return stand_in

    def _made(self, call: Callable[[], _T]) -> _T:
        """Make a call; raise DistError if it is not answered before the generation ends, for example by a frozen
        host."""
        if self._caller is None:
            return call()
        future = self._caller.call(call)
        while True:
            try:
                return future.result(SLICE_S)
            except TimeoutError:
                if not future.done() and self._is_over():
                    raise DistError("the store did not answer before the end of the generation") from None

    def _stand_in(self, key: str) -> bytes:
        self.has_made_up = True
        if not self._role_info:
            return b""
        info = json.loads(self._role_info)
        own_rank, size = int(info["rank"]), int(info["local_world_size"])
        if key.startswith(_ROLE_INFO):
            return json.dumps({**info, "rank": int(key.removeprefix(_ROLE_INFO))}).encode()
        if key.startswith(_ASSIGNED_RANKS):
            first, total = own_rank * size, self._world_size * size
            return json.dumps([first, total, first, total]).encode()
        return b""
