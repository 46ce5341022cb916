"""Waiting for the database to have what was written, for readers of the file itself, such as hashes and copies.

A commit that finds no room is tried again for as long as the member lives, so a wait for it could last for days.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from raftkv.errors import StorageError, UnwrittenError
from raftkv.storage.mvcc import Store

T = TypeVar("T")

LOOK_S: Final = 0.05
"""Between two looks at whether a commit has failed: the owner of the store tries again every tenth of a second."""


def _always() -> bool:
    return True


async def when_durable(
    store: Store, begin: Callable[[Callable[[T], None]], None], is_wanted: Callable[[], bool] = _always
) -> T:
    """Wait for something that the store does once a commit has ended; return what it gives.

    A member that stops in the middle of an entry commits nothing any more: who waits then must not want it for ever.

    Arguments:
        store: whose commit it is.
        begin: asks for it, and is given what to call then.
        is_wanted: whether to go on waiting; looked at now and then.

    Raises:
        UnwrittenError: a commit found no room meanwhile.
        StorageError: it is not wanted any more.
    """
    earlier = store.space_error
    ready: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    begin(lambda given: None if ready.done() else ready.set_result(given))
    while not (await asyncio.wait((ready,), timeout=LOOK_S))[0]:
        error = store.space_error
        # One from before may be over: room was made, and the commit that finds it is on its way.
        if error is not None and error is not earlier:
            ready.cancel()
            raise UnwrittenError from error
        if not is_wanted():
            ready.cancel()
            raise StorageError("what was written is not waited for any more")
    return ready.result()


async def flushed(store: Store, is_wanted: Callable[[], bool] = _always) -> None:
    """Wait until everything written so far is in the database.

    Arguments:
        store: what was written to.
        is_wanted: as of ``when_durable``, which also says what is raised.
    """

    def begin(done: Callable[[None], None]) -> None:
        store.flush(partial(done, None))

    await when_durable(store, begin, is_wanted)
