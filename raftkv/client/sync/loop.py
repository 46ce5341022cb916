"""One event loop on one background thread, and calls to it from any other thread.

Owns the hand-over between threads, and what becomes of it in a forked child. It knows nothing of keys and values.

    loop = LoopThread("raftkv")
    loop.run(coroutine)        # runs it over there, returns its result or raises its exception here
    loop.close()

How a call travels: it is put into a queue; the loop is woken if it does not already know of something in the queue, so
calls of many threads share one wake-up; a task runs the coroutine and, in the very step in which that ends, opens the
lock on which the caller waits. No future, no condition, no callback in between: each would cost a turn of the loop.
The usual calls (``run_taskless``) do without the task as well.

Invariants:

1. A caller never waits for ever: when the thread ends, every call that is queued or under way fails with ``Closed``.
2. Ctrl-C in a waiting caller cancels its call and leaves, at the latest half a second after the signal. A signal
   handler may make calls itself, wherever it interrupts the program.
3. A forked child uses nothing of the parent (``LoopThread.disown``): its descriptors are replaced by ``/dev/null``
   without a byte or a shutdown on the way. The kernel closes our copies; the parent's connections do not notice. Their
   numbers stay taken, since Python objects that hold them will close them some day. The epoll instance is shared with
   the parent, so unregistering anything there would be felt by it: it is replaced as well, never asked.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextlib
import encodings.idna
import os
import selectors
import ssl
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, Final, TypeVar

from raftkv.client.rpc import core
from raftkv.errors import RaftKVError
from raftkv.rpc import limits
from raftkv.rpc.client import channel

T = TypeVar("T")

IMPORTED_EARLY: Final = (channel, limits, ssl, encodings.idna, concurrent.futures.thread)
"""Everything that the loop's thread would else import when it first needs it. If a fork fell into such an import, the
child would wait for ever for the module's lock, whose holder does not exist there."""

JOIN_TIMEOUT_S: Final = 5.0
SIGNALS_SEEN_WITHIN_S: Final = 0.5
"""A signal that comes just before a thread begins to wait for a lock is seen only when that wait ends."""

_CLOSED: Final = "the client is closed"


class Closed(RaftKVError):
    """A call on a client that is closed, or that was closed while the call was under way: its outcome is unknown."""


class Forked(RaftKVError):
    """Something of the parent process was used in a forked child."""


class WrongThread(RaftKVError):
    """A blocking call on the thread that would have to answer it; use ``raftkv.aio`` there."""


class _Call:
    """One call: what to run, and where the answer goes."""

    __slots__ = ("context", "coroutine", "done", "error", "result", "task")

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        # If the program traces, the caller's span has to be found on the loop's thread.
        self.context = copy_context() if core.TRACING_API in core.loaded_modules else None
        self.coroutine = coroutine
        self.done = threading.Lock()
        self.error: BaseException | None = None
        self.result: Any = None
        self.task: asyncio.Task[None] | None = None
        self.done.acquire()

    async def drive(self) -> None:
        """Run it and let the caller go on."""
        try:
            self.result = await self.coroutine
        except BaseException as error:  # of any kind: told to the caller
            self.error = error
        finally:
            self.done.release()

    def cancel(self) -> None:
        """Cancel it, on the loop's thread, if it runs."""
        if self.task is not None:
            self.task.cancel()

    def refuse(self, error: RaftKVError) -> None:
        """Fail it: it was never run."""
        self.coroutine.close()
        self.error = error
        self.done.release()


class _PostedCall(_Call):
    """A call that no caller waits for, and so none holds: asyncio alone would let its task be collected."""

    __slots__ = ("under_way",)

    def __init__(self, coroutine: Coroutine[Any, Any, Any], under_way: set[_PostedCall]) -> None:
        super().__init__(coroutine)
        self.under_way = under_way

    async def drive(self) -> None:
        """Run it, and hold it for so long."""
        self.under_way.add(self)
        try:
            await super().drive()
        finally:
            self.under_way.discard(self)


class _TasklessCall(_Call):
    """A call whose coroutine awaits plain futures only: driven by their callbacks, without a task.

    That saves the task, and the turn of the loop after which a new task would begin.
    """

    __slots__ = ("awaited", "loop", "under_way")

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop, under_way: set[_TasklessCall]
    ) -> None:
        super().__init__(coroutine)
        self.loop = loop
        self.under_way = under_way
        self.awaited: asyncio.Future[Any] | None = None

    def step(self, _: object = None) -> None:
        """Run it up to its next wait, on the loop's thread."""
        try:
            context = self.context
            awaited = self.coroutine.send(None) if context is None else context.run(self.coroutine.send, None)
        except StopIteration as stop:
            self.result = stop.value
        except BaseException as error:  # of any kind: told to the caller
            self.error = error
        else:
            self.awaited = awaited
            if awaited is None:  # a bare yield: asyncio.sleep(0)
                self.loop.call_soon(self.step)
            else:
                awaited._asyncio_future_blocking = False  # as a task does: it has been seen to be awaited
                awaited.add_done_callback(self.step)
            return
        self.awaited = None
        self.under_way.discard(self)
        self.done.release()

    def cancel(self) -> None:
        """Cancel what it waits for, on the loop's thread."""
        if self.awaited is not None:
            self.awaited.cancel()


class LoopThread:
    """An event loop on a thread of its own, started at once.

    Arguments:
        name: of the thread.

    Attributes:
        is_disowned: this is a forked child, and the thread is the parent's.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._queue: deque[_Call] = deque()
        # It looks into the queue for all callers: what the one who woke it has in its context is not the others'.
        self._context = Context()
        self._taskless: set[_TasklessCall] = set()
        self._posted: set[_PostedCall] = set()
        self._is_woken = False
        self._is_closed = False
        self._has_stopped = False
        self._process = os.getpid()
        self.is_disowned = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, for ``call_soon_threadsafe`` and for objects that live on it."""
        return self._loop

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.get_ident() == self._thread.ident

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it.

        Raises:
            Closed: the loop is closed.
            WrongThread: this *is* the loop's thread.
        """
        result: T = self._finish(_Call(coroutine))
        return result

    def run_taskless(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that awaits nothing but futures (no timeouts, no task groups), and wait for it."""
        result: T = self._finish(_TasklessCall(coroutine, self._loop, self._taskless))
        return result

    def _finish(self, call: _Call) -> Any:
        """Submit a call and wait for it."""
        if threading.get_ident() == self._thread.ident:
            call.coroutine.close()
            raise WrongThread(
                "a blocking call on the client's own event loop thread would wait for itself: "
                "make it on another thread, or use raftkv.aio"
            )
        try:
            self._submit(call)
            while not call.done.acquire(timeout=SIGNALS_SEEN_WITHIN_S):
                if self._queue:  # this is a signal handler's call, and who was interrupted has yet to wake the loop
                    self.call_soon(self._take_queued)
        except BaseException:  # Ctrl-C while waiting
            self.call_soon(self._cancel, call)
            raise
        if call.error is None:
            return call.result
        wait_for_the_end()
        try:
            raise _for_caller(call.error)
        finally:
            del call  # it holds the error, whose traceback holds this frame

    def check_usable(self) -> None:
        """Raise ``Forked`` if the thread is that of a parent process."""
        if self.is_disowned:
            raise self._refusal()

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Run a plain function on the loop, some time soon; nothing if the loop is closed.

        Arguments:
            function: what to run.
            arguments: for it.
        """
        if self._is_closed:
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def post(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine some time soon and wait for nothing; it is dropped if the loop is closed."""
        self._submit(_PostedCall(coroutine, self._posted))

    def close(self, last: Coroutine[Any, Any, object] | None = None, *, wait: bool = True) -> None:
        """End the thread; harmless when repeated.

        Arguments:
            last: run before, on the loop, with all calls still under way.
            wait: until it has ended.
        """
        if self._is_closed:
            if last is not None:
                last.close()
            return
        self.call_soon(self._begin_end, last)
        self._is_closed = True
        if wait and not self.is_current:
            self._thread.join(JOIN_TIMEOUT_S)

    def disown(self) -> None:
        """Let go, in a forked child, of all that belongs to the parent (invariant 3). Uses no lock and no loop."""
        self._is_closed = self.is_disowned = True
        self._queue.clear()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            for descriptor in self._descriptors():
                with contextlib.suppress(OSError):
                    os.dup2(null, descriptor, inheritable=False)
        finally:
            os.close(null)
        _inherited.append(self)

    # ---- on the caller's thread

    def _submit(self, call: _Call) -> None:
        self._queue.append(call)
        if self._is_closed:
            self._refuse_queued()
        elif not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._take_queued, context=self._context)
            except RuntimeError:  # it was closed just now
                self._refuse_queued()

    def _refusal(self) -> RaftKVError:
        if self.is_disowned:
            return Forked(
                f"this belongs to process {self._process}, and this is its forked child {os.getpid()}: "
                "take a new one from the client here, which has connections of its own"
            )
        return Closed(_CLOSED)

    def _refuse_queued(self) -> None:
        while self._queue:
            try:
                call = self._queue.popleft()
            except IndexError:
                return
            call.refuse(self._refusal())

    # ---- on the loop's thread

    def _take_queued(self) -> None:
        # First clear the flag, then look: a caller between the two wakes the loop again, so none is overlooked.
        self._is_woken = False
        if self._has_stopped:  # no caller would wait for a call that begins now
            self._refuse_queued()
            return
        queue, create_task = self._queue, self._loop.create_task
        while queue:
            call = queue.popleft()
            if isinstance(call, _TasklessCall):
                self._taskless.add(call)
                call.step()
            else:
                call.task = create_task(call.drive(), context=call.context)

    def _cancel(self, call: _Call) -> None:
        with contextlib.suppress(ValueError):
            self._queue.remove(call)
            call.coroutine.close()
        call.cancel()
        self._take_queued()  # Ctrl-C may have come before the loop was woken, while all others thought that it was

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._is_closed = self._has_stopped = True
            self._cancel_all()
            self._loop.close()
            self._refuse_queued()

    def _begin_end(self, last: Coroutine[Any, Any, object] | None) -> None:
        async def end() -> None:
            try:
                if last is not None:
                    await last
            finally:
                self._loop.stop()

        self._end_task = self._loop.create_task(end())

    def _cancel_all(self) -> None:
        self._refuse_queued()
        for call in list(self._taskless):
            call.cancel()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        while self._taskless:  # they end within a few turns; one that had yielded bare could not be cancelled before
            for call in list(self._taskless):
                call.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    # ---- in a forked child

    def _descriptors(self) -> set[int]:
        """Return every descriptor of the loop: what it selects on, connections that wait for nothing, its own."""
        found = {key.fd for key in list((self._selector.get_map() or {}).values())}
        found.update(getattr(self._loop, "_transports", ()))
        for name in ("_ssock", "_csock"):
            end = getattr(self._loop, name, None)
            if end is not None:
                found.add(end.fileno())
        if isinstance(self._selector, selectors.EpollSelector):
            found.add(self._selector.fileno())
        return {descriptor for descriptor in found if descriptor >= 0}


_end = threading.Event()
"""Set when the interpreter ends."""


def begin_the_end() -> None:
    """Take note that the interpreter ends: the clients are about to be closed under the threads that still run."""
    _end.set()


def wait_for_the_end() -> None:
    """Stop a daemon thread here if the interpreter ends: it would write a traceback, and be stopped all the same."""
    thread = threading.current_thread()
    if _end.is_set() and thread.daemon and thread is not threading.main_thread():
        while True:
            threading.Event().wait()


_inherited: list[LoopThread] = []
"""Loops of parents, kept so that their finalisers do not run while the child lives."""


def _for_caller(error: BaseException) -> BaseException:
    if isinstance(error, asyncio.CancelledError):
        return Closed(f"{_CLOSED}; the call was under way and may have happened")
    return error


# -- callbacks ------------------------------------------------------------------------------------------------------
#
# Callbacks of the user, run away from the loop's thread: they may block, and may use the client.
#
# A ``CallbackQueue`` runs them one after the other, in order, on a thread that lives only while there are any. What a
# callback raises goes to ``threading.excepthook``, as from any thread, and the next one is run all the same.


class CallbackQueue:
    """Callbacks that run in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._is_running = False

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Queue a callback; returns at once.

        Arguments:
            callback: what to call.
            arguments: for it.
        """
        with self._lock:
            self._waiting.append((callback, arguments))
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="raftkv-callbacks", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                callback, arguments = self._waiting.popleft()
            try:
                callback(*arguments)
            except Exception:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
