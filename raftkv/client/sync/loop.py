"""An event loop on a background thread, and calls to it from other threads.

Handles the hand-over between threads, and its state in a forked child. It knows nothing of keys and values.

    loop = LoopThread("raftkv")
    loop.run(coroutine)        # runs it on the loop's thread; returns its result or raises its exception here
    loop.close()

The path of a call: the call is put into a queue. The loop is woken unless a wake-up is already pending, so calls of
many threads share one wake-up. A task runs the coroutine and, in the same step in which the coroutine ends, releases
the lock on which the caller waits. There is no future, condition or callback in between, because each would cost a turn
of the loop. The usual calls (``run_taskless``) do not even need the task.

Invariants:

1. A caller never waits for ever: when the thread ends, every queued or running call fails with ``Closed``.
2. Ctrl-C in a waiting caller cancels its call (that of ``see_through`` goes on instead), and the caller returns at most
   0.5 s after the signal. A signal handler may make calls itself, wherever it interrupts the program.
3. A forked child uses nothing of the parent (``LoopThread.disown``). Its descriptors are replaced by ``/dev/null``,
   without sending a byte or a shutdown. The kernel closes the child's copies; the parent's connections are not
   affected. The descriptor numbers stay in use, because Python objects will close them some day. The epoll instance is
   shared with the parent, so unregistering from it would affect the parent; it is replaced too, and never called.
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
"""Modules that the loop's thread would otherwise import at their first use. If a fork happened during such an import,
the child would wait for ever for the module's lock, whose holder does not exist there."""

JOIN_TIMEOUT_S: Final = 5.0
SIGNALS_SEEN_WITHIN_S: Final = 0.5
"""Longest wait for a lock: a signal that arrives just before such a wait is handled only when the wait ends."""

_CLOSED: Final = "the client is closed"


class Closed(RaftKVError):
    """A call on a client that is closed, or was closed during the call; the outcome of the call is then unknown."""


class Forked(RaftKVError):
    """An object of the parent process was used in a forked child."""


class WrongThread(RaftKVError):
    """A blocking call on the thread that would have to answer it; use ``raftkv.aio`` there."""


class _Call:
    """One call: the coroutine, and the place for its outcome."""

    __slots__ = ("context", "coroutine", "done", "error", "result", "task")

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        # For tracing: the caller's span must be available on the loop's thread.
        self.context = copy_context() if core.TRACING_API in core.loaded_modules else None
        self.coroutine = coroutine
        self.done = threading.Lock()
        self.error: BaseException | None = None
        self.result: Any = None
        self.task: asyncio.Task[None] | None = None
        self.done.acquire()

    async def drive(self) -> None:
        """Run the coroutine and wake the caller."""
        try:
            self.result = await self.coroutine
        except BaseException as error:  # of any kind: passed to the caller
            self.error = error
        finally:
            self.done.release()

    def cancel(self) -> None:
        """Cancel the call, on the loop's thread, if it is running."""
        if self.task is not None:
            self.task.cancel()

    def refuse(self, error: RaftKVError) -> None:
        """Fail the call, which was never run."""
        self.coroutine.close()
        self.error = error
        self.done.release()


class _PostedCall(_Call):
    """A call that needs no waiting caller. It keeps itself referenced, because asyncio holds tasks only weakly."""

    __slots__ = ("under_way",)

    def __init__(self, coroutine: Coroutine[Any, Any, Any], under_way: set[_PostedCall]) -> None:
        super().__init__(coroutine)
        self.under_way = under_way

    async def drive(self) -> None:
        """Run the coroutine, and keep a reference until it ends."""
        self.under_way.add(self)
        try:
            await super().drive()
        finally:
            self.under_way.discard(self)


class _TasklessCall(_Call):
    """A call whose coroutine awaits only plain futures: driven by their callbacks, without a task.

    This saves the task, and the turn of the loop after which a new task would start.
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
        """Run the coroutine to its next wait, on the loop's thread."""
        try:
            context = self.context
            awaited = self.coroutine.send(None) if context is None else context.run(self.coroutine.send, None)
        except StopIteration as stop:
            self.result = stop.value
        except BaseException as error:  # of any kind: passed to the caller
            self.error = error
        else:
            self.awaited = awaited
            if awaited is None:  # a bare yield: asyncio.sleep(0)
                self.loop.call_soon(self.step)
            else:
                awaited._asyncio_future_blocking = False  # as a task does: marks the future as awaited
                awaited.add_done_callback(self.step)
            return
        self.awaited = None
        self.under_way.discard(self)
        self.done.release()

    def cancel(self) -> None:
        """Cancel the awaited future, on the loop's thread."""
        if self.awaited is not None:
            self.awaited.cancel()


class LoopThread:
    """An event loop on a separate thread, which starts at once.

    Arguments:
        name: name of the thread.

    Attributes:
        is_disowned: whether this is a forked child, and the thread is the parent's.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        """The loop, for ``call_soon_threadsafe`` and for objects that live on it."""
        self._queue: deque[_Call] = deque()
        # The queue is processed for all callers, so the context of the caller that woke the loop must not be used.
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
        """Run a coroutine that only awaits futures (no timeouts, no task groups), and wait for it."""
        result: T = self._finish(_TasklessCall(coroutine, self.loop, self._taskless))
        return result

    def see_through(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that gives something back, and wait for it; Ctrl-C ends the wait, and not the coroutine.

        A cancelled call might never have begun, and then a lock would stay held, with a lease that is kept alive.
        """
        result: T = self._finish(_PostedCall(coroutine, self._posted))
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
                if self._queue:  # the call of a signal handler; the interrupted caller has not woken the loop yet
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
            del call  # breaks a cycle: call -> error -> traceback -> this frame

    def check_usable(self) -> None:
        """Raise ``Forked`` if the thread belongs to a parent process."""
        if self.is_disowned:
            raise self._refusal()

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a plain function on the loop soon; does nothing if the loop is closed.

        Arguments:
            function: function to call.
            arguments: its arguments.
        """
        if self._is_closed:
            return
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def post(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine soon without waiting for it; it is dropped if the loop is closed."""
        self._submit(_PostedCall(coroutine, self._posted))

    def close(self, last: Coroutine[Any, Any, object] | None = None, *, wait: bool = True) -> None:
        """End the thread; safe to repeat.

        Arguments:
            last: coroutine to run first, on the loop, while calls are still in progress.
            wait: whether to wait for the end of the thread.
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
        """Release, in a forked child, everything that belongs to the parent (invariant 3). Uses no lock and no loop."""
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
                self.loop.call_soon_threadsafe(self._take_queued, context=self._context)
            except RuntimeError:  # the loop was closed just now
                self._refuse_queued()

    def _refusal(self) -> RaftKVError:
        if self.is_disowned:
            return Forked(
                f"this belongs to process {self._process}, and this is its forked child {os.getpid()}: "
                "take a new one from the client here, which has connections of its own"
            )
        return Closed(_CLOSED)

    def _refuse_queued(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._queue.popleft().refuse(self._refusal())

    # ---- on the loop's thread

    def _take_queued(self) -> None:
        # Clear the flag before reading the queue: a caller in between wakes the loop again, so no call is overlooked.
        self._is_woken = False
        if self._has_stopped:  # no caller would wait for a call that starts now
            self._refuse_queued()
            return
        queue, create_task = self._queue, self.loop.create_task
        while queue:
            call = queue.popleft()
            if isinstance(call, _TasklessCall):
                self._taskless.add(call)
                call.step()
            else:
                call.task = create_task(call.drive(), context=call.context)

    def _cancel(self, call: _Call) -> None:
        if not isinstance(call, _PostedCall):
            with contextlib.suppress(ValueError):
                self._queue.remove(call)
                call.coroutine.close()
            call.cancel()
        self._take_queued()  # Ctrl-C may have prevented a wake-up that all others relied on

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self._is_closed = self._has_stopped = True
            self._cancel_all()
            self.loop.close()
            self._refuse_queued()

    def _begin_end(self, last: Coroutine[Any, Any, object] | None) -> None:
        async def end() -> None:
            try:
                if last is not None:
                    await last
            finally:
                self.loop.stop()

        self._end_task = self.loop.create_task(end())

    def _cancel_all(self) -> None:
        self._refuse_queued()
        for call in list(self._taskless):
            call.cancel()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        while self._taskless:  # they end within a few turns; one that had yielded bare could not be cancelled before
            for call in list(self._taskless):
                call.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())

    # ---- in a forked child

    def _descriptors(self) -> set[int]:
        """Return every descriptor of the loop: its selector's, those of connections without a pending wait, its own."""
        found = {key.fd for key in list((self._selector.get_map() or {}).values())}
        found.update(getattr(self.loop, "_transports", ()))
        for name in ("_ssock", "_csock"):
            end = getattr(self.loop, name, None)
            if end is not None:
                found.add(end.fileno())
        if isinstance(self._selector, selectors.EpollSelector):
            found.add(self._selector.fileno())
        return {descriptor for descriptor in found if descriptor >= 0}


_end = threading.Event()
"""Set when the interpreter shuts down."""


def begin_the_end() -> None:
    """Record that the interpreter shuts down: clients are about to be closed while other threads still run."""
    _end.set()


def wait_for_the_end() -> None:
    """Block a daemon thread here during shutdown; otherwise it would print a traceback before it is stopped anyway."""
    thread = threading.current_thread()
    if _end.is_set() and thread.daemon and thread is not threading.main_thread():
        while True:
            threading.Event().wait()


_inherited: list[LoopThread] = []
"""Loops of parents, kept so that their finalisers do not run during the child's life."""


def _for_caller(error: BaseException) -> BaseException:
    if isinstance(error, asyncio.CancelledError):
        return Closed(f"{_CLOSED}; the call was under way and may have happened")
    return error


# -- callbacks ------------------------------------------------------------------------------------------------------
#
# Callbacks of the user, run outside the loop's thread: they may block, and may use the client.
#
# A ``CallbackQueue`` runs them one by one, in order, on a thread that exists only while callbacks are queued. An
# exception of a callback goes to ``threading.excepthook``, as for any thread, and the next callback still runs.


class CallbackQueue:
    """Callbacks that run in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._is_running = False

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Queue a callback, and return at once.

        Arguments:
            callback: function to call.
            arguments: its arguments.
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
