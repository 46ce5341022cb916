"""Index of watchers: a dictionary for single keys, a treap for intervals; watchers of one interval form a group.

Within a group, watchers that want every event as it is are kept as one table a stream: delivering to them is a loop
over a few bytes each. The others (filters, previous values, fragments, progress, a start in the future) are *special*
and looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from raftkv.replica.watch.intervals import ALL, Intervals
from raftkv.replica.watch.messages import id_field

if TYPE_CHECKING:
    from raftkv.replica.watch.stream import WatchStream


LOOK_BYTES: Final = 4096
"""Bytes that are compared in no time: to find a group takes some twenty comparisons, with its place in the tree."""

WATCHER_BYTES: Final = 1100
"""Memory of a watcher beside its key, at most: measured 720 to 1,100, with its place in the index."""


class Watcher:
    """One watch of a client.

    Attributes:
        stream, watch_id: whose it is; the id is unique in its stream.
        key, range_end: as in the index: ``range_end`` empty for one key, ``b"\\0"`` for no end.
        start_revision: what the client asked for, 0 for "from now".
        value_bytes_max: size of the largest values whose puts it wants; 0: of all.
        next_revision: the first revision not sent yet; kept only while the watcher is served from history.
        is_quiet: no event was sent since the last progress notification was due, or since it was created.
    """

    __slots__ = (
        "fragment",
        "id_field",
        "is_quiet",
        "key",
        "keys_only",
        "next_revision",
        "no_delete",
        "no_put",
        "prev_kv",
        "progress_notify",
        "range_end",
        "start_revision",
        "stream",
        "value_bytes_max",
        "watch_id",
    )

    def __init__(
        self,
        stream: WatchStream,
        watch_id: int,
        key: bytes,
        range_end: bytes = b"",
        start_revision: int = 0,
        *,
        no_put: bool = False,
        no_delete: bool = False,
        prev_kv: bool = False,
        fragment: bool = False,
        progress_notify: bool = False,
        keys_only: bool = False,
        value_bytes_max: int = 0,
    ) -> None:
        self.stream = stream
        self.watch_id = watch_id
        self.id_field = id_field(watch_id)
        self.key = key
        self.range_end = range_end
        self.start_revision = start_revision
        self.next_revision = start_revision
        self.no_put = no_put
        self.no_delete = no_delete
        self.prev_kv = prev_kv
        self.fragment = fragment
        self.progress_notify = progress_notify
        self.keys_only = keys_only
        self.value_bytes_max = value_bytes_max
        self.is_quiet = True

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return WATCHER_BYTES + len(self.key) + len(self.range_end)

    @property
    def is_filtered(self) -> bool:
        """Whether some events do not reach it."""
        return self.no_put or self.no_delete or self.value_bytes_max > 0

    def wants(self, is_delete: bool, value_bytes: int) -> bool:
        """Return whether its filters let an event through."""
        if is_delete:
            return not self.no_delete
        return not self.no_put and not 0 < self.value_bytes_max < value_bytes


_NO_WATCHERS: Final[dict[Watcher, None]] = {}
"""The empty dict that all groups without special watchers share, never changed: a dict each takes 64 bytes."""


class Group:
    """All watchers of one key or one interval.

    Attributes:
        interval: key and range end, as of its watchers.
        next_revision: the first revision that they did not get, of a group that fell behind.
    """

    __slots__ = ("interval", "next_revision", "plain", "special")

    def __init__(self, interval: tuple[bytes, bytes]) -> None:
        self.interval = interval
        self.next_revision = 0
        self.plain: dict[WatchStream, dict[int, bytes]] = {}
        """For each stream, the ids of its watchers here, each with its encoded field of a response."""
        self.special = _NO_WATCHERS

    def __bool__(self) -> bool:
        return bool(self.plain or self.special)

    @property
    def size(self) -> int:
        """How many watchers it has."""
        return sum(map(len, self.plain.values())) + len(self.special)

    def pop(self) -> Watcher:
        """Remove one of the watchers; there must be one."""
        if self.special:
            return self.special.popitem()[0]
        stream, ids = self.plain.popitem()
        watcher = stream.watchers[ids.popitem()[0]]
        if ids:
            self.plain[stream] = ids
        return watcher


class WatcherIndex:
    """Watchers by what they watch.

    Attributes:
        size: how many there are.
        next_revision: the first revision that they did not get, when all of them fell behind at once.
    """

    def __init__(self) -> None:
        self.by_key: dict[bytes, Group] = {}
        self.ranges: Intervals[Group] = Intervals()
        self.size = self.next_revision = 0

    def __bool__(self) -> bool:
        return self.size > 0

    def add(self, watcher: Watcher, *, special: bool) -> None:
        """Add a watcher; ``special`` if events must not reach it unseen.

        Arguments:
            watcher: has everything so far.
            special: events must not reach it unseen.
        """
        group = self._group(watcher.key, watcher.range_end)
        if special:
            group.special = group.special or {}
            group.special[watcher] = None
        else:
            group.plain.setdefault(watcher.stream, {})[watcher.watch_id] = watcher.id_field
        self.size += 1

    def remove(self, watcher: Watcher) -> bool:
        """Remove a watcher; whether it was here."""
        group = self._find(watcher.key, watcher.range_end)
        if group is None:
            return False
        if watcher in group.special:
            del group.special[watcher]
        else:
            ids = group.plain.get(watcher.stream)
            if ids is None or ids.pop(watcher.watch_id, None) is None:
                return False
            if not ids:
                del group.plain[watcher.stream]
        self.size -= 1
        if not group:
            self._forget(watcher.key, watcher.range_end)
        return True

    def __contains__(self, watcher: Watcher) -> bool:
        group = self._find(watcher.key, watcher.range_end)
        return group is not None and (
            watcher in group.special or watcher.watch_id in group.plain.get(watcher.stream, ())
        )

    def detach(self, group: Group) -> None:
        """Remove a whole group, however many watchers it has, at once."""
        self.size -= group.size
        self._forget(*group.interval)

    def detach_stream(self, group: Group, stream: WatchStream) -> Group:
        """Take out the watchers of one stream that want every event of a group as it is.

        Arguments:
            group: of the same key or interval.
            stream: of the watchers.
        """
        detached = Group(group.interval)
        detached.plain[stream] = group.plain.pop(stream)
        self.size -= detached.size
        if not group:
            self._forget(*group.interval)
        return detached

    def attach(self, group: Group) -> bool:
        """Add a whole group, unless there is one of its interval; whether it was added."""
        if self._find(*group.interval) is not None:
            return False
        self._set(*group.interval, group)
        self.size += group.size
        return True

    def pop(self) -> Group:
        """Remove a group, whichever is found soonest; there must be one."""
        group = self.ranges.pop() if self.ranges else self.by_key.popitem()[1]
        self.size -= group.size
        return group

    def weight(self, key: bytes) -> int:
        """How many times as much it is to find a group of a key as usual: bounds may be as large as a request."""
        if len(key) < LOOK_BYTES:
            return 1
        return 1 + min(len(key), self.ranges.longest_bytes) // LOOK_BYTES

    def groups(self, key: bytes, most: int = ALL) -> Sequence[Group]:
        """The groups whose key or interval contains a key; when there are more than so many, more than that, not all.

        Arguments:
            key: to be looked for.
            most: how many are wanted.
        """
        group = self.by_key.get(key)
        if not self.ranges:
            return () if group is None else (group,)
        found = self.ranges.containing(key, most)
        if group is not None:
            found.append(group)
        return found

    def _find(self, key: bytes, range_end: bytes) -> Group | None:
        return self.ranges.get(key, range_end) if range_end else self.by_key.get(key)

    def _group(self, key: bytes, range_end: bytes) -> Group:
        group = self._find(key, range_end)
        if group is None:
            group = Group((key, range_end))
            self._set(key, range_end, group)
        return group

    def _set(self, key: bytes, range_end: bytes, group: Group) -> None:
        if range_end:
            self.ranges.add(key, range_end, group)
        else:
            self.by_key[key] = group

    def _forget(self, key: bytes, range_end: bytes) -> None:
        if range_end:
            self.ranges.remove(key, range_end)
        else:
            del self.by_key[key]
