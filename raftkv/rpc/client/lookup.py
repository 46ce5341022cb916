"""Names of hosts, looked up on daemon threads: the end of a program does not wait for a DNS server that is dead.

    for address in await addresses("h1.example", 2379): ...

asyncio looks names up on a pool of threads that both the end of the loop and the end of the interpreter join, and
nothing ends a lookup under way: with a dead server it takes ten seconds and more, even if its caller had a shorter
time limit. Here a thread that is not waited for any more ends by itself, or with the process. Concurrent lookups of one
name share a thread, so that connections which are tried again and again while DNS is dead do not add up.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")

_under_way: Final[dict[tuple[str, int], Future[list[str]]]] = {}
_lock = threading.RLock()


async def addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host, in numbers, in the order in which they should be tried.

    Arguments:
        host: a name, or an address already.
        port: for names that stand for another address with another port.

    Raises:
        OSError: it has none, or no DNS server answers.
    """
    if _is_number(host):
        return [host]
    key = host, port
    with _lock:
        found = _under_way.get(key)
        if found is None:
            found = _under_way[key] = _begin(lambda: _look_up(host, port))
            found.add_done_callback(lambda _: _forget(key))
    return await _answer(found)


async def beside(work: Callable[[], T]) -> T:
    """Do blocking work that may hang, such as a DNS lookup, on a daemon thread of its own; returns its result.

    Raises:
        OSError: the process may have no more threads.
    """
    return await _answer(_begin(work))


def _begin(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def do() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        threading.Thread(target=do, name="raftkv-lookup", daemon=True).start()
    except RuntimeError as error:  # the process may have no more of them just now
        raise OSError(errno.EAGAIN, str(error)) from None
    return future


async def _answer(future: Future[T]) -> T:
    """Wait for a thread; a caller that is cancelled leaves the answer to the others."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def tell(_: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(told.set)

    future.add_done_callback(tell)
    await told.wait()
    return future.result()


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


def _is_number(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False


def _forget(key: tuple[str, int]) -> None:
    with _lock:
        _under_way.pop(key, None)


def _after_fork() -> None:
    """Forget what threads of the parent look up: they are not here."""
    global _lock
    _lock = threading.RLock()
    _under_way.clear()


os.register_at_fork(after_in_child=_after_fork)
