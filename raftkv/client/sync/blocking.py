"""How an async object gets a blocking face: the same methods, run on the loop's thread.

    class Lease(Face[aio.Lease]):
        revoke = blocking(aio.Lease.revoke)

``blocking`` keeps name, arguments, types and documentation of the method, so the two faces cannot drift apart. A
``Face`` belongs to the loop, and so to the process, that it was made in: in a forked child its methods raise
``Forked``, and leaving its ``with`` block does nothing, since what it stands for is the parent's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from raftkv.client.sync.loop import LoopThread

Inner = TypeVar("Inner")
Result = TypeVar("Result")
P = ParamSpec("P")


class Face(Generic[Inner]):
    """A blocking face of an async object.

    Arguments:
        owner: the client; it lives as long as this does.
        loop: where the object lives.
        inner: the object.
    """

    def __init__(self, owner: object, loop: LoopThread, inner: Inner) -> None:
        self._owner = owner
        self._loop = loop
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    def target(self) -> tuple[LoopThread, Inner]:
        """The loop and the object, for a call."""
        return self._loop, self._inner

    def _ask(self, question: Callable[[Inner], Result]) -> Result:
        """Ask the object something that only its loop's thread may ask."""

        async def ask() -> Result:
            return question(self._inner)

        self._loop.check_usable()
        return self._loop.run(ask())

    def _enter(self, enter: Coroutine[Any, Any, object], leave: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run what takes something; if Ctrl-C comes in between, have it given back as soon as it is there."""
        try:
            self._loop.run(enter)
        except KeyboardInterrupt:
            self._loop.post(leave())
            raise


def light(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, P], Result]:
    """As ``blocking``, of a method that awaits nothing but futures (see ``LoopThread.run_light``)."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        loop, inner = self.target()
        return loop.run_light(method(inner, *args, **kwargs))  # type: ignore[no-any-return]

    return call


def blocking(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, P], Result]:
    """The blocking twin of a coroutine method, for the class body of its object's face."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        loop, inner = self.target()
        return loop.run(method(inner, *args, **kwargs))  # type: ignore[no-any-return]

    return call
