"""Blocking twins of async objects: the same methods, run on the loop's thread.

    class Lease(Blocking[aio.Lease]):
        revoke = blocking(aio.Lease.revoke)

``blocking`` keeps the name, arguments, types and documentation of a method, so the twins cannot diverge. A ``Blocking``
object belongs to the loop, and so to the process, in which it was created. In a forked child its methods raise
``Forked``, and leaving its ``with`` block does nothing, because the underlying object belongs to the parent.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    overload,
)

from raftkv.client.arguments import limit, many, seconds
from raftkv.client.kv import WINDOW
from raftkv.client.sync.loop import LoopThread
from raftkv.client.values import Event
from raftkv.loop.outcomes import take_outcome

if TYPE_CHECKING:
    from raftkv.client import watch as aio_watch

# -- watch ----------------------------------------------------------------------------------------------------------
#
# A for loop over the items of a watch, or of another endless source on the loop's thread.
#
# Holds one batch that was fetched and not yet consumed. Further items wait in the source, which bounds its queue: a
# slow loop here is a slow reader of the source.
#
#     for event in stream: ...                       # until it is cancelled, or fails with its error
#     event = stream.get(timeout_s=1.0)              # one; TimeoutError; None: cancelled
#     for event in stream.events(timeout_s=5.0): ... # those that arrive within five seconds
#     stream.cancel()                                # from any thread: loops over it end
#
# Any number of threads may consume one stream: each item is returned to one of them, the end to all.

T = TypeVar("T")


class Source(Protocol[T]):
    """A source of items on the loop's thread."""

    async def next_batch(self) -> list[T]:
        """Return the next items, at least one; an empty list: the source has ended."""

    def cancel(self) -> None:
        """End the source; a waiting ``next_batch`` returns an empty list."""


class Drawn(Generic[T]):
    """A source that reads an async generator item by item. An aborted wait does not end the generator."""

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._items = items
        self._drawing: asyncio.Task[T] | None = None
        self._is_cancelled = False

    async def next_batch(self) -> list[T]:
        """Return the next item, in a list; an empty one at the end."""
        if self._is_cancelled:
            return []
        if self._drawing is None:
            self._drawing = asyncio.get_running_loop().create_task(self._draw())
            self._drawing.add_done_callback(take_outcome)
        drawing = self._drawing
        await asyncio.wait([drawing])
        self._drawing = None
        if drawing.cancelled():
            return []
        item = drawing.result()
        return [] if item is _NOTHING else [item]

    def cancel(self) -> None:
        """Stop reading the generator."""
        self._is_cancelled = True
        if self._drawing is not None:
            self._drawing.cancel()

    async def _draw(self) -> T:
        return await anext(self._items, _NOTHING)


_NOTHING: Final[Any] = object()


class Stream(Generic[T]):
    """A blocking iterator; as a context manager, it cancels itself at the end of the block.

    Arguments:
        owner: client, which stays alive as long as this object.
        loop: thread of the source.
        source: source of the items.
    """

    def __init__(self, owner: object, loop: LoopThread, source: Source[T]) -> None:
        self._owner = owner
        self._loop = loop
        self._source = source
        self._batch: deque[T] = deque()
        self._fetching = threading.Lock()
        self._is_cancelled = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while (item := self._take()) is _NOTHING:
            if not self._fetch(None):
                raise StopIteration
        return item

    def get(self, *, timeout_s: float | None = None) -> T | None:
        """Return the next item; None: the stream was cancelled.

        Arguments:
            timeout_s: time limit; None: no limit.

        Raises:
            TimeoutError: no item arrived in time.
        """
        timeout_s = limit(timeout_s, "timeout_s")
        while (item := self._take()) is _NOTHING:
            if not self._fetch(timeout_s):
                return None
        return item

    def events(self, *, timeout_s: float) -> Iterator[T]:
        """Iterate over the items that arrive within ``timeout_s`` from now; later calls continue after them."""
        deadline = time.monotonic() + seconds(timeout_s, "timeout_s")
        while True:
            try:
                item = self.get(timeout_s=max(deadline - time.monotonic(), 0.0))
            except TimeoutError:
                return
            if item is None:
                return
            yield item

    def cancel(self) -> None:
        """End the stream, from any thread; loops over it end, and unread items are dropped. Safe to repeat."""
        self._is_cancelled = True
        self._batch.clear()
        self._loop.call_soon(self._source.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def _take(self) -> T:
        """Return the next available item, or ``_NOTHING``."""
        self._loop.check_usable()
        try:
            return self._batch.popleft()
        except IndexError:
            nothing: T = _NOTHING
            return nothing

    def _fetch(self, timeout_s: float | None) -> bool:
        """Fetch a batch, of which another thread may consume items first; return False at the end."""
        timeout_s = limit(timeout_s, "timeout_s")
        # ``acquire`` interprets -1 as no limit, so a negative remainder would wait for the other thread without limit.
        if not self._fetching.acquire(
            timeout=-1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        ):
            raise _nothing_came(timeout_s)
        try:
            if self._is_cancelled or self._batch:  # by another thread in the meantime
                return not self._is_cancelled
            return self._loop.run(self._next_batch(timeout_s)) and not self._drop_if_cancelled()
        finally:
            self._fetching.release()

    def _drop_if_cancelled(self) -> bool:
        if self._is_cancelled:
            self._batch.clear()
        return self._is_cancelled

    async def _next_batch(self, timeout_s: float | None) -> bool:
        """Store the next batch in this object, so that it is not lost if Ctrl-C comes before this returns."""
        try:
            async with asyncio.timeout(timeout_s):
                batch = await self._source.next_batch()
        except TimeoutError:
            if timeout_s is None:
                raise
            raise _nothing_came(timeout_s) from None
        if not self._is_cancelled:
            self._batch.extend(batch)
        return bool(batch)


def _nothing_came(timeout_s: float | None) -> TimeoutError:
    return TimeoutError(f"nothing came within {timeout_s or 0:g} s")


def iterate(loop: LoopThread, source: AsyncIterator[T]) -> Iterator[T]:
    """Iterate over an async generator, with one call per item; closing this iterator closes the generator.

    Arguments:
        loop: thread of the generator.
        source: the generator.
    """

    async def draw() -> T:
        return await anext(source, _NOTHING)

    try:
        while (item := loop.run(draw())) is not _NOTHING:
            yield item
    finally:
        close = getattr(source, "aclose", None)
        if close is not None and not loop.is_disowned:
            loop.post(close())


# -- watch ----------------------------------------------------------------------------------------------------------
#
# Watches for programs without an event loop.
#
# ::
#
#     for event in kv.watch("jobs/", prefix=True):
#         print(event.type, event.key, event.value, event.revision)
#
#     with kv.watch("jobs/a") as watch:
#         event = watch.get(timeout_s=5.0)                # TimeoutError if nothing came
#         for event in watch.events(timeout_s=5.0): ...   # those that arrive within five seconds
#
# ``watch.cancel()`` from another thread ends the loop. For the guarantees see ``watch``: events come in order, each
# exactly once, even if members die; ``Compacted`` is raised if that is impossible.


class Watch(Stream[Event]):
    """One watch; created by ``Client.watch``."""

    def __init__(self, owner: object, loop: LoopThread, inner: aio_watch.Watch) -> None:
        super().__init__(owner, loop, inner)
        self._inner = inner
        self._taken = 0

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def revision(self) -> int:
        """The revision up to which all events were returned; continue from the next one. 0: unknown."""
        return max(self._taken, self._inner.revision if not self._batch else 0)

    def _take(self) -> Event:
        event = super()._take()
        # A revision counts once its last event was returned: the next event, if available, shows whether that was the
        # last.
        following = self._batch
        if event is not _NOTHING and (not following or following[0].revision > event.revision):
            self._taken = event.revision
        return event


Inner = TypeVar("Inner")
Made = TypeVar("Made")
Result = TypeVar("Result")
P = ParamSpec("P")

CHUNK = 16 * WINDOW
"""Number of items of a bulk call that are passed to the loop's thread at once."""


class Blocking(Generic[Inner]):
    """The blocking twin of an async object.

    Arguments:
        owner: client, which stays alive as long as this object.
        loop: thread of the object.
        inner: the async object.
    """

    def __init__(self, owner: object, loop: LoopThread, inner: Inner) -> None:
        self._owner = owner
        self._loop = loop
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, because the object belongs to this process."""
        name = type(self).__name__
        raise TypeError(f"a {name} belongs to its process and cannot be pickled; send the client, and make one there")

    def target(self) -> tuple[LoopThread, Inner]:
        """Return the loop and the async object, for a call."""
        return self._loop, self._inner

    def _ask(self, question: Callable[[Inner], Result]) -> Result:
        """Call a function with the async object on the loop's thread."""

        async def ask() -> Result:
            return question(self._inner)

        self._loop.check_usable()
        return self._loop.run(ask())

    def _enter(
        self, enter: Callable[[], Coroutine[Any, Any, Result]], leave: Callable[[], Coroutine[Any, Any, object]]
    ) -> Result:
        """Run ``enter``; if Ctrl-C or a signal handler's exception interrupts it, run ``leave``."""
        is_taken = False

        async def take() -> Result:
            nonlocal is_taken
            result = await enter()
            is_taken = True
            return result

        async def give_back() -> None:
            if is_taken:  # otherwise it was aborted or failed, and another thread may hold the object
                await leave()

        try:
            return self._loop.run(take())
        except BaseException:
            self._loop.post(give_back())
            raise


class Shown(Generic[Result]):
    """A read-only attribute of the async object, with the same name, that any thread may read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, twin: None, owner: type) -> Self: ...

    @overload
    def __get__(self, twin: Blocking[Any], owner: type) -> Result: ...

    def __get__(self, twin: Blocking[Any] | None, owner: type) -> Self | Result:
        return self if twin is None else self._read(twin)

    def __set__(self, twin: object, value: NoReturn) -> NoReturn:
        raise AttributeError(f"{self._name} cannot be set")

    def _read(self, twin: Blocking[Any]) -> Result:
        result: Result = getattr(twin._inner, self._name)
        return result


class Asked(Shown[Result]):
    """A read-only attribute that only the loop's thread may read."""

    def _read(self, twin: Blocking[Any]) -> Result:
        result: Result = twin._ask(lambda inner: getattr(inner, self._name))
        return result


def passing(method: Callable[Concatenate[Inner, P], Result]) -> Callable[Concatenate[Any, P], Result]:
    """Return the twin of a method that never waits, and that any thread may call.

    Arguments:
        method: method of the async object.
    """

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return method(self._inner, *args, **kwargs)

    return call


class Scoped(Blocking[Inner]):
    """The twin of an object with a block, whose end gives something back. In a forked child it does nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._loop.is_disowned:
            inner: Any = self._inner
            self._loop.see_through(inner.__aexit__(kind, error, trace))


class Held(Scoped[Inner]):
    """The twin of an object that is acquired and released: a lease, a session, a lock, a term."""

    def check(self) -> None:
        """Raise ``LeaseLost`` or ``FenceLost`` if it is not safe to use, ``Forked`` in a child process."""
        self._loop.check_usable()
        inner: Any = self._inner
        if self._loop.is_current:  # a call that uses it, already on the loop's thread
            inner.check()
        else:
            self._ask(lambda _: inner.check())


Twin = TypeVar("Twin", bound=Blocking[Any])


def taking(
    take: Callable[Concatenate[Any, P], Coroutine[Any, Any, object]],
    give_back: Callable[[Any], Coroutine[Any, Any, object]],
) -> Callable[Concatenate[Twin, P], Twin]:
    """Return the blocking twin of a method that acquires something; the twin returns its own object.

    Arguments:
        take: method of the async object.
        give_back: method that releases it, for a call that Ctrl-C interrupts before it returns.
    """

    @functools.wraps(take)
    def call(self: Twin, /, *args: P.args, **kwargs: P.kwargs) -> Twin:
        self._enter(lambda: take(self._inner, *args, **kwargs), lambda: give_back(self._inner))
        return self

    return call


def blocking(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, Result]],
    run: Callable[[LoopThread, Coroutine[Any, Any, Result]], Result] = LoopThread.run,
) -> Callable[Concatenate[Any, P], Result]:
    """Return the blocking twin of a coroutine method.

    Arguments:
        method: method of the async object.
        run: how the loop thread runs it.
    """

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        loop, inner = self.target()
        return run(loop, method(inner, *args, **kwargs))

    return call


def making(
    method: Callable[Concatenate[Inner, P], object], twin: Callable[[Any, LoopThread, Any], Made]
) -> Callable[Concatenate[Any, P], Made]:
    """Return the twin of a method that returns an async object, or a coroutine of one: it returns the object's twin.

    Arguments:
        method: method of the async object.
        twin: class of the twins.
    """

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Made:
        made = self._ask(lambda inner: method(inner, *args, **kwargs))
        return twin(self, self._loop, self._loop.run(made) if inspect.iscoroutine(made) else made)

    return call


def taskless(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, P], Result]:
    """Return the blocking twin of a method that only awaits futures (see ``LoopThread.run_taskless``)."""
    return blocking(method, LoopThread.run_taskless)


def iterates_like(
    method: Callable[Concatenate[Inner, P], AsyncGenerator[Result, None]],
) -> Callable[[Callable[..., Iterator[Result]]], Callable[Concatenate[Any, P], Iterator[Result]]]:
    """Return a decorator that copies the name, documentation and arguments of an async generator."""
    signature = inspect.signature(method)
    result = str(signature.return_annotation).replace("AsyncGenerator[", "Iterator[").replace(", None]", "]")

    def dress(call: Callable[..., Iterator[Result]]) -> Callable[Concatenate[Any, P], Iterator[Result]]:
        dressed = functools.wraps(method)(call)
        dressed.__dict__["__signature__"] = signature.replace(return_annotation=result)
        return dressed

    return dress


def iterating(
    method: Callable[Concatenate[Inner, P], AsyncGenerator[Result, None]],
) -> Callable[Concatenate[Any, P], Iterator[Result]]:
    """Return the blocking twin of an async generator."""

    @iterates_like(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Result]:
        loop, inner = self.target()
        return iterate(loop, method(inner, *args, **kwargs))

    return call


def chunked(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, list[Result]]],
) -> Callable[Concatenate[Any, P], list[Result]]:
    """Return the blocking twin of a method for many items, whose first argument is consumed on the caller's thread."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> list[Result]:
        loop, inner = self.target()
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
