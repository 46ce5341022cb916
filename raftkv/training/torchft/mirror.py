"""A copy of all keys below a prefix, kept up to date by a watch through outages of any length.

    mirror = Mirror(kv, "/raftkv/torchft/job/head/", on_change=wake)
    async with asyncio.TaskGroup() as group:
        group.create_task(mirror.run())

``items`` is always the state of the store at one revision, ``revision``; it never goes back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from raftkv.client.library import Client
from raftkv.client.rpc.retry import Backoff
from raftkv.client.values import PUT, Event, KeyValue
from raftkv.errors import RaftKVError, StatusError

RETRY_MAX_S = 0.25
_log = logging.getLogger(__name__)


class Mirror:
    """See the module.

    Arguments:
        kv: whole, not a view.
        prefix: of the keys.
        on_change: called on the loop after every change of ``items``, and when it is complete for the first time.

    Attributes:
        items: by key.
        revision: of the store; 0: nothing has been read yet.
    """

    def __init__(self, kv: Client, prefix: str, on_change: Callable[[], None]) -> None:
        self.items: dict[str, KeyValue] = {}
        self.revision = 0
        self._kv = kv
        self._prefix = prefix
        self._on_change = on_change

    async def run(self) -> None:
        """Follow the store until cancelled."""
        backoff = Backoff(max_s=RETRY_MAX_S)
        while True:
            try:
                await self._read()
                backoff.reset()
                await self._follow()
            except StatusError as error:
                _log.debug("%s: %s", self._prefix, error)
            except RaftKVError as error:
                _log.warning("%s: %s", self._prefix, error)
            await backoff.wait()

    async def _read(self) -> None:
        page = await self._kv.range(self._prefix, prefix=True)
        self.items = {item.key.decode(errors="replace"): item for item in page}
        self.revision = page.revision
        self._on_change()

    async def _follow(self) -> None:
        watch = self._kv.watch(self._prefix, prefix=True, start_revision=self.revision + 1)
        try:
            while events := await watch.next_batch():
                for event in events:
                    self._take(event)
                self.revision = max(self.revision, watch.revision)
                self._on_change()
        finally:
            watch.cancel()

    def _take(self, event: Event) -> None:
        key = event.key.decode(errors="replace")
        if event.type == PUT:
            self.items[key] = event.kv
        else:
            self.items.pop(key, None)
