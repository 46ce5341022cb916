"""Awaiting what the loop otherwise reports to callbacks: for handlers that are coroutines."""

from __future__ import annotations

import asyncio

from raftkv import errors
from raftkv.server.node.node import Node


class _Read:
    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ready(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: errors.StatusError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


async def read_confirmed(node: Node) -> None:
    """Wait until this member's state is at least as new as the moment of the call.

    Raises:
        RequestTimeoutError, StoppedError: it was not in time.
    """
    read = _Read()
    node.read(read)
    await read.done
