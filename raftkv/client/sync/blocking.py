"""How an async object gets a blocking twin: the same methods, run on the loop's thread.

    class Lease(Blocking[aio.Lease]):
        revoke = blocking(aio.Lease.revoke)

``blocking`` keeps name, arguments, types and documentation of the method, so the twins cannot drift apart. A
``Blocking`` belongs to the loop, and so to the process, that it was made in: in a forked child its methods raise
``Forked``, and leaving its ``with`` block does nothing, since what it stands for is the parent's.

A client finds the object of a method in one of its parts: ``put = blocking(KV.put, "kv")``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

from raftkv.client.arguments import many
from raftkv.client.kv.bulk import WINDOW
from raftkv.client.sync.loop import LoopThread
from raftkv.client.sync.watch import iterate

Inner = TypeVar("Inner")
Result = TypeVar("Result")
P = ParamSpec("P")

CHUNK = 16 * WINDOW
"""Items of a bulk call that are handed over to the loop's thread at once."""


class Blocking(Generic[Inner]):
    """The blocking twin of an async object.

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

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: it stands for what this process holds."""
        name = type(self).__name__
        raise TypeError(f"a {name} belongs to its process and cannot be pickled; send the client, and make one there")

    def target(self) -> tuple[LoopThread, Inner]:
        """Return the loop and the object, for a call."""
        return self._loop, self._inner

    def _ask(self, question: Callable[[Inner], Result]) -> Result:
        """Ask the object something that only its loop's thread may ask."""

        async def ask() -> Result:
            return question(self._inner)

        self._loop.check_usable()
        return self._loop.run(ask())

    def _enter(
        self, enter: Callable[[], Coroutine[Any, Any, Result]], leave: Callable[[], Coroutine[Any, Any, object]]
    ) -> Result:
        """Run what takes it; if Ctrl-C, or what a signal handler raises, comes in between, have it given back."""
        is_taken = False

        async def take() -> Result:
            nonlocal is_taken
            result = await enter()
            is_taken = True
            return result

        async def give_back() -> None:
            if is_taken:  # else it was given up on the way, or has failed, and may be another thread's
                await leave()

        try:
            return self._loop.run(take())
        except BaseException:
            self._loop.post(give_back())
            raise


class Held(Blocking[Inner]):
    """The twin of something that is taken and given back: a lease, a session, a lock, a term."""

    def check(self) -> None:
        """Raise ``LeaseLost`` or ``FenceLost`` if it cannot be relied on, ``Forked`` in a child of its process."""
        self._loop.check_usable()
        inner: Any = self._inner
        if self._loop.is_current:  # a call that relies on it, already over there
            inner.check()
        else:
            self._ask(lambda _: inner.check())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._loop.is_disowned:
            inner: Any = self._inner
            self._loop.run(inner.__aexit__(kind, error, trace))


def _target(self: Any, part: str) -> tuple[LoopThread, Any]:
    loop, inner = self.target()
    return loop, getattr(inner, part) if part else inner


def blocking(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, Result]], part: str = ""
) -> Callable[Concatenate[Any, P], Result]:
    """Make the blocking twin of a coroutine method.

    Arguments:
        method: of the async object.
        part: name of the part of the client that has it; empty: the object itself.
    """

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        loop, inner = _target(self, part)
        return loop.run(method(inner, *args, **kwargs))

    return call


def taskless(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, Result]], part: str = ""
) -> Callable[Concatenate[Any, P], Result]:
    """Make the blocking twin of a method that awaits nothing but futures (see ``LoopThread.run_taskless``).

    Arguments:
        method, part: as for ``blocking``.
    """

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        loop, inner = _target(self, part)
        return loop.run_taskless(method(inner, *args, **kwargs))

    return call


def iterates_like(
    method: Callable[Concatenate[Inner, P], AsyncGenerator[Result, None]],
) -> Callable[[Callable[..., Iterator[Result]]], Callable[Concatenate[Any, P], Iterator[Result]]]:
    """Give a method the name, documentation and arguments of an async generator."""
    signature = inspect.signature(method)
    result = str(signature.return_annotation).replace("AsyncGenerator[", "Iterator[").replace(", None]", "]")

    def dress(call: Callable[..., Iterator[Result]]) -> Callable[Concatenate[Any, P], Iterator[Result]]:
        dressed = functools.wraps(method)(call)
        dressed.__dict__["__signature__"] = signature.replace(return_annotation=result)
        return dressed

    return dress


def iterating(
    method: Callable[Concatenate[Inner, P], AsyncGenerator[Result, None]], part: str
) -> Callable[Concatenate[Any, P], Iterator[Result]]:
    """Make the blocking twin of an async generator.

    Arguments:
        method, part: as for ``blocking``.
    """

    @iterates_like(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Result]:
        loop, inner = _target(self, part)
        return iterate(loop, method(inner, *args, **kwargs))

    return call


def chunked(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, list[Result]]], part: str
) -> Callable[Concatenate[Any, P], list[Result]]:
    """Make the blocking twin of a method for many items: its first argument is drawn from on the caller's thread.

    Arguments:
        method, part: as for ``blocking``.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> list[Result]:
        loop, inner = _target(self, part)
        given = signature.bind(inner, *args, **kwargs)
        first = list(given.arguments)[1]
        done: list[Result] = []
        for chunk in _chunks(many(given.arguments[first], method.__name__)):
            given.arguments[first] = chunk
            done += loop.run(method(*given.args, **given.kwargs))
        return done

    return call


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(items.items() if isinstance(items, Mapping) else items)
    while chunk := list(itertools.islice(iterator, CHUNK)):
        yield chunk
