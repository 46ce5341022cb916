"""The store of one generation: a TCPStore on the node of rank 0, and how agents use it without ever hanging in it.

::

    hosted = host_store()                                   # on the node of rank 0: a fresh one for every generation
    store = connect_store("10.0.0.7", port, is_over=lambda: participant.nodes_waiting > 0)

A fresh server for each generation, so no key of an earlier attempt is ever met, and torch's own C++ server, so workers
and NCCL talk to it as to any other. The agent itself gets an ``AgentStore``, which is the same store with one more
promise:

- **No wait outlasts the generation.** torch's agent gives out ranks by ``get`` and ends by ``wait``, with 300 s of
  patience and no way back: a node that dies between joining and that moment would take all others with it. Here such a
  wait ends when the run says that the generation is over. A missing rank is made up then: the workers that are started
  with it can reach no rank, and the agent stops them at its next look, 0.1 s later, and comes back to the rendezvous.
  torch's client waits for a host that has frozen for ever, so its calls are made on a thread, which is left there.
- **It can be let go.** The agent holds the store of one generation until it has that of the next. ``drop`` leaves it an
  empty shell, so that the server ends, and a node that has one port for it (``store_port``) can do so again.

Leaves out: a store that survives its node; it is as short-lived as its generation.
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
"""How often a call that is not answered looks whether the generation is over."""
POLL_MIN_S: Final = 0.005
POLL_MAX_S: Final = 0.1
"""How often a wait asks for its keys. torch's own wait writes two lines of warnings each time that its time is up."""
CONNECT_TIMEOUT_S: Final = 60.0
"""For reaching the node of rank 0 while it lives."""
TIMEOUT_S: Final = 300.0
"""torch's own, of waits in a whole generation."""
_PROBE_TIMEOUT_S: Final = 2.0
_PROBE: Final = b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x0d" + struct.pack("<I", 1)
"""What a client of a TCPStore begins with: a magic number, and a ping, which the server sends back."""
_T = TypeVar("_T")
_ROLE_INFO: Final = "torchelastic/role_info/"
_TERMINAL_STATE: Final = "torchelastic/agent/terminal_state"
_ASSIGNED_RANKS: Final = "torchelastic/assigned_ranks/"


class StoreUnreachable(Exception):
    """The node of rank 0 lives, and its store cannot be reached from here; the text is one line."""


class GenerationEnded(Exception):
    """The generation was over before its store could be used."""


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
        host, port: of the store.
        is_over: tells why the generation is over; empty: it is not.

    Raises:
        GenerationEnded: the generation is over.
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
    """Find out why a TCPStore does not answer there; empty: it does."""
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
    """A daemon thread that makes calls, one after the other; one that never returns keeps this thread alone."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="raftkv-store", daemon=True).start()

    def call(self, call: Callable[[], _T]) -> Future[_T]:
        """Make a call; returns its outcome to be."""
        future: Future[_T] = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Make no calls any more."""
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
    """Stands for a store that was let go: each call fails as on a store whose node is gone."""

    def __getattr__(self, name: str) -> Any:
        raise DistError("the store of this generation was let go")


class AgentStore(Store):
    """A TCPStore whose operations never wait longer than an agent can afford.

    Arguments:
        store: the generation's.
        is_over: the generation has ended; asked between waits, without I/O.
        world_size: agents of the generation.
        on_exit: called when torch's agent enters its last barrier, which it does if all its workers have ended well.
        exit_timeout_s: for that barrier; None: torch's own.

    Attributes:
        has_made_up: ranks were given out that stand for nothing; the agent must come back.
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
        """Time limit of waits that are given none."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of waits that are given none."""
        self._timeout = timeout

    def drop(self) -> None:
        """Let go of the store; later calls are answered as after the end of the generation."""
        self._is_over = lambda: True
        self._store = _Gone()
        if self._caller is not None:
            self._caller.close()
            self._caller = None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until keys are there, or the generation is over.

        Arguments:
            keys: all of them.
            timeout: for all; None: the store's own.

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
        """Store a value; lost when the generation is over, as the store is.

        Arguments:
            key: of the value.
            value: text or bytes.
        """
        if key.startswith(_ROLE_INFO):
            self._role_info = value.encode() if isinstance(value, str) else value
        self._unless_over(lambda: self._store.set(key, value), None)

    def get(self, key: str) -> bytes:
        """Return a value, once it is there; a stand-in when the generation is over, see the module."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values as ``get`` does."""
        self.wait(keys)
        found = None if self._is_over() else self._unless_over(lambda: self._store.multi_get(list(keys)), None)
        return [self._stand_in(key) for key in keys] if found is None else found

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set values as ``set`` does.

        Arguments:
            keys, values: equally many.
        """
        self._unless_over(lambda: self._store.multi_set(list(keys), list(values)), None)

    def add(self, key: str, amount: int) -> int:
        """Count; 0 when the generation is over.

        Arguments:
            key: of the number.
            amount: may be negative.
        """
        if key.startswith(_TERMINAL_STATE):
            self._on_exit()
        total: int = self._unless_over(lambda: self._store.add(key, amount), 0)
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether keys are there."""
        found: bool = self._unless_over(lambda: self._store.check(list(keys)), False)
        return found

    def _unless_over(self, call: Callable[[], _T], stand_in: _T) -> _T:
        """Return what a call returns; if it fails because the store's node died, the stand-in, once the run says so."""
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
        """Make a call; raises DistError if it is not answered before the generation is over, as by a frozen host."""
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
