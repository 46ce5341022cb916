"""Waiting for keys of a store, by reflectors that begin at the revision at which a key was absent.

A key comes true by a value, or by an item of the queue of that name. A value wakes everybody who waits for its key; an
item wakes one, as in torch's server, or consumers would be told of items that another has taken: each item comes with
a token, and whoever can delete that token is the one. Tokens older than the wait belong to nobody and are left alone;
the item takes its token along when it is popped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from raftkv.client.control.control import Control
from raftkv.client.control.reflector import Interval, OnChanges, Reflector, below
from raftkv.client.values import Event

TakeToken = Callable[[bytes, int], Awaitable[bool]]
"""Whether it is for this waiter to be woken by a token (its key, its revision), and for no other."""


def queue_prefix(kind: bytes, key: bytes) -> bytes:
    """Return the prefix of a queue's items (``q/``) or tokens (``t/``); its length keeps ``a`` and ``a/b`` apart.

    Arguments:
        kind: ``q/`` or ``t/``.
        key: of the queue.
    """
    return b"%s%d:%s/" % (kind, len(key), key)


TOKENS_MAX: Final = 1024
"""Tokens that are kept for one wait: with more items than these in its queue, a waiter is woken without one."""


async def first_value(
    control: Control, key: bytes, revision: int, accept: Callable[[bytes], bool] = lambda _: True
) -> bytes:
    """Wait for the first value that is written after a revision, among those accepted.

    Arguments:
        control: the keys of the store.
        key: of the value.
        revision: at which there was no such value.
        accept: tells whether a value will do.

    Raises:
        WatchCanceled: the client was closed, or a member refused for good.
    """
    found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_changes(changes: Sequence[Event]) -> None:
        for event in changes:
            if not found.done() and accept(event.value):
                found.set_result(event.value)

    reflector = _puts(control, (b"k/" + key, b""), revision, on_changes, found)
    try:
        return await found
    finally:
        reflector.close()


class Wait:
    """A wait for one key that was absent at a revision; it begins at once, and ends with the ``with`` block.

    Arguments:
        control: the keys of the store.
        key: which.
        revision: at which it was absent.
        take_token: None: there are no queues.
    """

    def __init__(self, control: Control, key: bytes, revision: int, take_token: TakeToken | None) -> None:
        self._take_token = take_token
        self._there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tokens: asyncio.Queue[tuple[bytes, int]] = asyncio.Queue()
        self._reflectors = [_puts(control, (b"k/" + key, b""), revision, self._on_values, self._there)]
        if take_token is not None:
            tokens = below(queue_prefix(b"t/", key))
            self._reflectors.append(_puts(control, tokens, revision, self._on_tokens, self._there))

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *_: object) -> None:
        for reflector in self._reflectors:
            reflector.close()

    def _on_values(self, changes: Sequence[Event]) -> None:
        if changes and not self._there.done():
            self._there.set_result(None)

    def _on_tokens(self, changes: Sequence[Event]) -> None:
        for event in changes:
            if self._tokens.qsize() < TOKENS_MAX:
                self._tokens.put_nowait((event.key, event.revision))
            elif not self._there.done():
                self._there.set_result(None)

    async def finished(self) -> None:
        """Return when the key has come true.

        Raises:
            WatchCanceled: the client was closed, or a member refused for good.
        """
        if self._take_token is None:
            await self._there
            return
        woken = asyncio.ensure_future(self._woken(self._take_token))
        try:
            await asyncio.wait((self._there, woken), return_when=asyncio.FIRST_COMPLETED)
            for waiting in (self._there, woken):
                if waiting.done():
                    waiting.result()
        finally:
            woken.cancel()
            await asyncio.gather(woken, return_exceptions=True)

    async def _woken(self, take_token: TakeToken) -> None:
        while not await take_token(*await self._tokens.get()):
            continue


def _puts(
    control: Control, interval: Interval, revision: int, on_changes: OnChanges, waiting: asyncio.Future[Any]
) -> Reflector:
    """Follow what is put into an interval after a revision; a refusal ends the waiting."""

    def on_refused(error: Exception) -> None:
        if not waiting.done():
            waiting.set_exception(error)
            waiting.exception()  # seen: whoever waited may have given up

    reflector = Reflector(control, interval, on_changes, deletes=False, on_refused=on_refused)
    reflector.start(revision=revision)
    return reflector
