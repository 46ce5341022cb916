"""What all ranks of a generation wait for: keys below one prefix, each put once, seen by one reflector.

    posted = PostedKeys(generation, is_stale)
    value = await posted.wait("ready/0")      # put by whoever came last, for everybody

One watch a rank, whatever the number of barriers: a member encodes an event once for all that watch the same interval,
so a barrier of 1,024 ranks is 1,024 writes and one event. The watch begins with the generation, so what was put before
a rank asked, even if it was deleted since, is seen; unless the store has compacted its history: then ``PostedLost`` is
raised as soon as a later use of the name shows it. A value is kept until it is forgotten: who took it may not have got
it, if its time was up in that moment. If the cluster is restored from a backup the generation ends: what ranks have
said since is gone, and nobody would say it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raftkv.client.control.control import ClientControl
from raftkv.client.control.reflector import Reflector, below
from raftkv.client.values import Event
from raftkv.training.api.generation import RESTORED
from raftkv.training.errors import TrainingError

if TYPE_CHECKING:
    from raftkv.training.api.generation import Generation


class PostedLost(TrainingError):
    """A key was deleted before this rank saw it: a later use of its name was posted, and no history tells of it."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} was missed: a later use of the name has replaced it, and the store has compacted its history; "
            "leave the generation, and go on in the next"
        )


class PostedKeys:
    """The keys below one prefix that all ranks wait for, kept current by one reflector.

    A key is ``<name>/<number of its use>``.

    Arguments:
        generation: whose keys.
        is_stale: tells whether nobody will ask for a name any more.
    """

    def __init__(self, generation: Generation, is_stale: Callable[[str], bool]) -> None:
        self.prefix = f"{generation.base}open/"
        self._generation = generation
        self._is_stale = is_stale
        self._values: dict[str, bytes] = {}
        self._newest: dict[str, int] = {}
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._reflector: Reflector | None = None
        self._failure: Exception | None = None

    async def wait(self, name: str) -> bytes:
        """Wait for the value of a name.

        Raises:
            PostedLost: it was deleted before it could be seen here.
            StatusError: the cluster refuses to be watched.
        """
        if self._failure is not None:
            raise self._failure
        if name in self._values:
            return self._values[name]
        if self._is_behind(name):
            raise PostedLost(name)
        if self._reflector is None:
            self._reflector = Reflector(
                ClientControl(self._generation.kv),
                below(self.prefix),
                self._on_changes,
                deletes=False,
                on_refused=self._on_refused,
                on_restored=lambda: self._generation.end(RESTORED),
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
            if not self._is_stale(name):
                self._values[name] = event.value
            place, _, number = name.rpartition("/")
            self._newest[place] = max(self._newest.get(place, 0), int(number))
            waiter = self._waiting.get(name)
            if waiter is not None and not waiter.done():
                waiter.set_result(event.value)
        for name, waiter in self._waiting.items():
            if not waiter.done() and self._is_behind(name):
                waiter.set_exception(PostedLost(name))
                waiter.exception()  # seen: whoever waited may have given up

    def _is_behind(self, name: str) -> bool:
        """Tell whether a later use of the name was posted; they come in order, so this one will not come any more."""
        place, _, number = name.rpartition("/")
        return int(number) < self._newest.get(place, 0)

    def _on_refused(self, error: Exception) -> None:
        self._failure = error
        self.close()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # seen: whoever waited may have given up
