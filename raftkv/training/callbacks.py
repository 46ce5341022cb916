"""Callbacks: a list of functions that are called on a change; each can be cancelled.

    changes: Callbacks[[Run]] = Callbacks()
    cancel = changes.add(print)
    changes.call(run)
    cancel()                        # harmless when repeated

A callback that is added twice is called twice. When a callback adds or cancels callbacks, this takes effect at the next
call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, ParamSpec

from raftkv.client.arguments import function
from raftkv.client.lease import tell

P = ParamSpec("P")


class Callbacks(Generic[P]):
    """A list of callbacks, each of which can be cancelled."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[P, object]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, callback: Callable[P, object]) -> Callable[[], None]:
        """Add a callback; return a function that cancels it."""
        self._last += 1
        number = self._last
        self._callbacks[number] = function(callback, "a callback")

        def cancel() -> None:
            self._callbacks.pop(number, None)

        return cancel

    def call(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all, in the order in which they came."""
        for callback in list(self._callbacks.values()):
            callback(*args, **kwargs)


class UserCallbacks(Callbacks[P]):
    """Callbacks of a user, called on the loop; an exception goes to the loop's exception handler, not to other
    callbacks."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all, in the order in which they came."""
        for callback in list(self._callbacks.values()):
            tell(partial(_call, callback, kwargs), args)


def _call(callback: Callable[..., object], kwargs: dict[str, object], args: tuple[object, ...]) -> None:
    callback(*args, **kwargs)
