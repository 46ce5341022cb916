"""What all ranks of a generation wait for: keys below one prefix, each put once, seen by one reflector.

    posted = PostedKeys(generation, is_stale)
    value = await posted.wait("ready/0")      # put by whoever came last, for everybody

One watch a rank, whatever the number of barriers: a member encodes an event once for all that watch the same interval,
so a barrier of 1,024 ranks is 1,024 writes and one event. The watch begins with the generation, so what was put before
a rank asked, even if it was deleted since, is seen. A value is kept until it is taken, and is taken once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raftkv.client.control.control import ClientControl
from raftkv.client.control.reflector import Reflector, below
from raftkv.client.values import Event

if TYPE_CHECKING:
    from raftkv.training.api.generation import Generation


class PostedKeys:
    """The keys below one prefix that all ranks wait for, kept current by one reflector.

    Arguments:
        generation: whose keys.
        is_stale: tells whether nobody will ask for a name any more.
    """

    def __init__(self, generation: Generation, is_stale: Callable[[str], bool]) -> None:
        self.prefix = f"{generation.base}open/"
        self._generation = generation
        self._is_stale = is_stale
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._reflector: Reflector | None = None
        self._failure: Exception | None = None

    async def wait(self, name: str) -> bytes:
        """Wait for the value of a name.

        Raises:
            StatusError: the cluster refuses to be watched.
        """
        if self._failure is not None:
            raise self._failure
        if name in self._values:
            return self._values.pop(name)
        if self._reflector is None:
            self._reflector = Reflector(
                ClientControl(self._generation.kv),
                below(self.prefix),
                self._on_changes,
                deletes=False,
                on_refused=self._on_refused,
            )
            self._reflector.start(revision=self._generation.world.revision)
        waiter = self._waiting.setdefault(name, asyncio.get_running_loop().create_future())
        # Shielded: somebody else may wait for the same name, and who gave up may come again.
        value = await asyncio.shield(waiter)
        self._waiting.pop(name, None)
        return value

    def forget(self, name: str) -> None:
        """Drop the value of a name: nobody will ask for it any more."""
        self._values.pop(name, None)

    def close(self) -> None:
        """Watch no more."""
        if self._reflector is not None:
            self._reflector.close()

    def _on_changes(self, changes: Sequence[Event]) -> None:
        for event in changes:
            name = event.key.decode()[len(self.prefix) :]
            waiter = self._waiting.get(name)
            if waiter is None:
                if not self._is_stale(name):
                    self._values[name] = event.value
            elif not waiter.done():
                waiter.set_result(event.value)

    def _on_refused(self, error: Exception) -> None:
        self._failure = error
        self.close()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # seen: whoever waited may have given up
