"""Watches for programs without an event loop.

::

    for event in kv.watch("jobs/", prefix=True):
        print(event.type, event.key, event.value, event.revision)

    with kv.watch("jobs/a") as watch:
        event = watch.get(timeout_s=5.0)                # TimeoutError if nothing came
        for event in watch.events(timeout_s=5.0): ...   # those that come within five seconds

``watch.cancel()`` from another thread ends the loop. What it guarantees is said in ``watch``: events come in order,
each once, none left out, whichever members die meanwhile; ``Compacted`` is raised if that is impossible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftkv.client.sync.iteration import _NOTHING, Stream
from raftkv.client.values import Event

if TYPE_CHECKING:
    from raftkv.client.sync.loop import LoopThread
    from raftkv.client.watch import watch as aio_watch


class Watch(Stream[Event]):
    """One watch; made by ``Client.watch``."""

    def __init__(self, owner: object, loop: LoopThread, inner: aio_watch.Watch) -> None:
        super().__init__(owner, loop, inner)
        self._inner = inner
        self._taken = 0

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def revision(self) -> int:
        """Everything up to this revision has been handed out: the place to go on from, plus one. 0: not known yet."""
        return max(self._taken, self._inner.revision if not self._batch else 0)

    def _take(self) -> Event:
        event = super()._take()
        # A revision is handed out with its last event: the next one, if it is here, tells whether this was it.
        following = self._batch
        if event is not _NOTHING and (not following or following[0].revision > event.revision):
            self._taken = event.revision
        return event
