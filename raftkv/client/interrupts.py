"""Stopping a block of code when what it relies on is lost.

Works as ``asyncio.timeout`` does: the task in the block is cancelled, and at the end of the block that cancellation
becomes an error of our own. Cancellations from elsewhere pass through.

::

    with interrupting(lease) :          # CancelledError inside becomes LeaseLost outside
        await something_long()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, TypeVar

T = TypeVar("T")

FAREWELL_S: Final = 0.5
"""How long the end of a block that was interrupted tells the cluster of it: whoever pressed Ctrl-C waits for the
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

    What a caller gives back as it is cancelled once more would stay else, held by nobody.

    Arguments:
        step: what gives it back.
    """
    task = asyncio.get_running_loop().create_task(step)
    _farewells.add(task)
    task.add_done_callback(_look_at)
    return await asyncio.shield(task)


def _look_at(task: asyncio.Task[Any]) -> None:
    """Take its failure: whoever waited for it may have left."""
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
