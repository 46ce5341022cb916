"""Reflector: list an interval of keys, watch it from the next revision, and report each change once, for ever.

::

    nodes = Reflector(control, below("/raftkv/train/job/node/"), on_changes)
    nodes.start()                            # lists, then watches
    await nodes.ready()
    nodes.items, nodes.revision              # the state of the interval at one revision

        list at 7     watch from 8                     history is compacted: list at 31, watch from 32
        |------------>|-----------> ... ------------X  |------------>|----------->
        PUT a, PUT b   PUT c, DELETE a                 the difference: DELETE b, PUT d

Everything that keeps a copy of keys uses this class, so its users need not know whether a change came from a list or
from the watch.

Invariants:

1. ``revision`` never goes back, unless the cluster was restored from a backup (``HistoryReplaced``): then everything
   that differs from ``items`` is reported; a reflector that keeps no ``items`` reports everything that is there. A list
   that is older than ``revision`` changes nothing.
2. A change is reported once: an event at or before ``revision`` is passed over, and a list reports only what is newer
   than ``revision``, and the keys that have gone since.
3. The watch begins right behind the revision of the list, so nothing falls between the two.
4. Nothing but ``close``, or the end of the client, ends a reflector. The client's watches survive members and outages
   of any length; a compaction leads to a new list; an error for which waiting is no cure, as a missing permission, is
   handed to ``on_refused``, and the list is tried again ever more slowly.

Leaves out what values mean, and states between two revisions that a list has passed over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from raftkv.client.control.control import Control, until_answered
from raftkv.client.errors import HistoryReplaced, is_client_closed
from raftkv.client.kv.operations import GetRange
from raftkv.client.rpc.retry import Backoff
from raftkv.client.scope import Text, prefix_end, to_bytes
from raftkv.client.values import DELETE, PUT, Event, KeyValue
from raftkv.errors import CANCELED, CompactedError, StatusError

_log = logging.getLogger(__name__)

Interval = tuple[Text, Text]
"""First key and end; an empty end: the first key alone."""
OnChanges = Callable[[Sequence[Event]], None]
OnRefused = Callable[[Exception], None]

REFUSED_PAUSE_MAX_S: Final = 1.0


def below(prefix: Text) -> Interval:
    """Return the interval of all keys that begin with a prefix."""
    return prefix, prefix_end(to_bytes(prefix))


class Reflector:
    """A copy of an interval that follows the store; see the module.

    Arguments:
        control: the store.
        interval: of the keys.
        on_changes: called on the loop after each list and each batch of the watch, with what is new: possibly nothing.
        deletes: False: the reflector reports no deletion and keeps no ``items``, so its memory does not grow.
        on_refused: called with each error that does not pass by itself; the default writes a line into the log,
            unless it is that the client was closed.
        on_end: called with that error: nothing will be reported any more.
        outlives_restore: False: that the cluster was restored is the end too.
        on_restored: called when the cluster was restored from a backup, before what it holds now is reported.

    Attributes:
        items: the keys that exist, as of ``revision``.
        revision: of the store; 0: nothing is known yet.
    """

    def __init__(
        self,
        control: Control,
        interval: Interval,
        on_changes: OnChanges,
        *,
        deletes: bool = True,
        on_refused: OnRefused | None = None,
        on_end: OnRefused = lambda error: None,
        outlives_restore: bool = True,
        on_restored: Callable[[], None] = lambda: None,
    ) -> None:
        self.items: dict[bytes, KeyValue] = {}
        self.revision = 0
        self._control = control
        self._interval = interval
        self._on_changes = on_changes
        self._deletes = deletes
        self._outlives_restore = outlives_restore
        self._on_restored = on_restored
        self._on_refused = on_refused or self._log_refusal
        self._on_end = on_end
        self._refusal = ""
        self._news_only = False
        self._is_closed = False
        self._end: Exception | None = None
        self._unwatch: Callable[[], None] | None = None
        self._listing: asyncio.Task[None] | None = None
        self._backoff = Backoff(max_s=REFUSED_PAUSE_MAX_S)
        self._following = asyncio.Event()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def is_following(self) -> bool:
        """Whether a watch keeps ``items`` current; False: the first list, or one after a compaction, is under way."""
        return self._following.is_set() and self._end is None

    def get(self, key: str) -> KeyValue | None:
        """Return one of the items; None: the key does not exist."""
        return self.items.get(key.encode())

    def start(self, items: Iterable[KeyValue] = (), revision: int = 0, *, news_only: bool = False) -> None:
        """Begin to follow; of what the caller has read already nothing is reported.

        Arguments:
            items: what the interval held at ``revision``.
            revision: everything up to it is known to the caller; 0: nothing is, and the reflector lists first.
            news_only: what is there at the start is neither read nor reported; for one that keeps no ``items``.
        """
        self._news_only = news_only
        if not revision:
            self._list_again()
            return
        if self._deletes:
            self.items = {item.key: item for item in items}
        self.revision = revision
        self._watch()

    def load(self, items: Iterable[KeyValue], revision: int) -> None:
        """Take a list that the caller has read, report what is new in it, and follow the store from there.

        Arguments:
            items: what the interval held at ``revision``.
            revision: of the store; a list that is older than what is known changes nothing.
        """
        if self._is_closed or revision < self.revision:
            return
        known, found = self.items, {item.key: item for item in items}
        gone = [Event(DELETE, KeyValue(key, b"", 0, 0, revision, 0)) for key in known if key not in found]
        # Keys written at or before the known revision were reported already: that takes no memory of keys.
        # After a restore nothing is known by its revision, but what is as it was is no change.
        new = (item for item in found.values() if item.mod_revision > self.revision and item != known.get(item.key))
        fresh = sorted(new, key=_mod_revision)
        if self._unwatch is None and self._listing is None:
            self.revision = revision
            self._watch()
        self._take([*gone, *(Event(PUT, item) for item in fresh)], revision)

    async def refresh(self) -> None:
        """List now.

        Raises:
            StatusError: the store refused.
        """
        listing = GetRange(*self._range, limit=1 if self._news_only else 0)
        result = await until_answered(lambda: self._control.txn((), [listing]))
        is_first, self._news_only = self._news_only, False
        self.load(() if is_first else result.results[0], result.revision)

    async def ready(self) -> None:
        """Wait until a watch keeps ``items`` current; raises why that will never be, as when the client was closed."""
        await self._following.wait()
        self._check()

    async def reached(self, revision: int) -> None:
        """Wait until everything up to a revision is known here, or ``close``.

        Raises:
            StatusError: the client was closed before.
        """
        if self.revision < revision and not self._is_closed:
            self._check()
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((revision, future))
            await future

    def close(self) -> None:
        """Follow no more; nothing is reported from now on."""
        self._is_closed = True
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self._listing is not None:
            self._listing.cancel()
        for _, future in self._waiting:
            if not future.done():
                future.set_result(None)

    def _check(self) -> None:
        if self._end is not None:
            raise self._end

    def _finish(self, error: Exception) -> None:
        """Tell all waiters that the client was closed."""
        self._end = error
        self._following.set()
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(error)
        self._on_end(error)

    # -- list

    @property
    def _range(self) -> tuple[Text, Text | None]:
        return self._interval[0], self._interval[1] or None

    def _list_again(self, pause_s: float = 0.0) -> None:
        self._following.clear()
        self._listing = asyncio.get_running_loop().create_task(self._list(pause_s))

    async def _list(self, pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.refresh()
            except Exception as error:
                self._on_refused(error)
                if isinstance(error, StatusError) and error.code == CANCELED and error.definite:
                    self._finish(error)
                    return
                pause_s = self._backoff.next_s()
            else:
                break
        self._listing = None
        if not self._is_closed:
            self._watch()

    # -- watch

    def _watch(self) -> None:
        self._following.set()
        first, end = self._interval
        try:
            self._unwatch = self._control.watch(
                first, end, self.revision + 1, self._on_events, self._on_lost, deletes=self._deletes
            )
        except StatusError as error:
            self._on_refused(error)
            if not is_client_closed(error):
                raise
            self._finish(error)  # it was closed between the list and the watch

    def _on_events(self, revision: int, events: Sequence[Event]) -> None:
        if self._is_closed:
            return
        self._backoff.reset()
        fresh = [event for event in events if event.kv.mod_revision > self.revision]
        self._take(fresh, max(revision, self.revision))

    def _on_lost(self, error: Exception) -> None:
        if self._is_closed:
            return
        self._unwatch = None
        pause_s = 0.0
        if isinstance(error, HistoryReplaced):
            if not self._outlives_restore:
                self._finish(error)
                return
            self._forget_revisions()
            self._on_restored()
        if not isinstance(error, CompactedError):
            # The client has waited for all that passes by itself: this error would be the same on the next watch.
            self._on_refused(error)
            pause_s = self._backoff.next_s()
        if not self._is_closed:
            self._list_again(pause_s)

    # -- what is known

    def _forget_revisions(self) -> None:
        """Begin with the next list, at any revision: the store is another one, as after a restore."""
        self.revision = 0
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_result(None)

    def _take(self, changes: Sequence[Event], revision: int) -> None:
        for event in changes if self._deletes else ():
            if event.type == DELETE:
                self.items.pop(event.kv.key, None)
            else:
                self.items[event.kv.key] = event.kv
        self.revision = revision
        waiting, self._waiting = self._waiting, []
        for wanted, future in waiting:
            if wanted > revision:
                self._waiting.append((wanted, future))
            elif not future.done():
                future.set_result(None)
        self._on_changes(changes)

    def _log_refusal(self, error: Exception) -> None:
        if str(error) != self._refusal and not is_client_closed(error):
            self._refusal = str(error)
            _log.warning("raftkv: %r cannot be followed, it is tried again: %s", self._interval[0], error)


def _mod_revision(item: KeyValue) -> int:
    return item.mod_revision
