"""Index of watchers: a dictionary for single keys, a treap for intervals; watchers of one interval form a group.

Within a group, watchers that want every event unmodified are stored as one table per stream: delivering to them is a
loop over a few bytes each. The others (filters, previous values, fragments, progress, a start in the future) are
*special* and handled one by one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from sortedcontainers import SortedDict

from raftkv.replica.watch.messages import id_field

if TYPE_CHECKING:
    from raftkv.replica.watch.stream import WatchStream

# -- intervals ------------------------------------------------------------------------------------------------------
#
# A treap ordered by start, with the greatest end of each subtree.
#
#     intervals.add(b"a", b"c", group)
#     intervals.containing(b"b") -> [group]
#
# Adding, removing and lookup cost O(log n), and lookup O(log n) more for each interval found. An end of ``b"\0"`` is
# open, as on the wire; open intervals are stored separately, in order of start, because no key is after their end.
#
# Clients cannot predict priorities: otherwise they could choose intervals that turn the tree into a list, which would
# be searched to its end, and be deeper than the stack. No result depends on the shape of the tree.

T = TypeVar("T")
_SEED: Final = random.SystemRandom().getrandbits(64)
OPEN_END = b"\0"
_LENGTHS: Final = 40
ALL: Final = 1 << 62
"""No limit."""


class _Node(Generic[T]):
    __slots__ = ("end", "end_max", "left", "priority", "right", "start", "value")

    def __init__(self, start: bytes, end: bytes, value: T, priority: float) -> None:
        self.start = start
        self.end = end
        self.value = value
        self.priority = priority
        self.left: _Node[T] | None = None
        self.right: _Node[T] | None = None
        self.end_max = end

    def update(self) -> None:
        end_max = self.end
        if self.left is not None and self.left.end_max > end_max:
            end_max = self.left.end_max
        if self.right is not None and self.right.end_max > end_max:
            end_max = self.right.end_max
        self.end_max = end_max


class Intervals(Generic[T]):
    """Values by interval; each interval has at most one value.

    Attributes:
        size: number of intervals.
    """

    def __init__(self) -> None:
        self._root: _Node[T] | None = None
        self._open: SortedDict[bytes, T] = SortedDict()
        self._random = random.Random(_SEED)
        self.size = 0
        # Number of bounds by the number of bits of their length.
        self._lengths = [0] * _LENGTHS

    def __len__(self) -> int:
        return self.size

    @property
    def longest_bytes(self) -> int:
        """Approximate length, or more, of the longest bound of a bounded interval: the cost of one comparison."""
        return max([1 << bits for bits, count in enumerate(self._lengths) if count], default=0)

    def get(self, start: bytes, end: bytes) -> T | None:
        """Return the value of exactly this interval."""
        if end == OPEN_END:
            found: T | None = self._open.get(start)
            return found
        node = self._root
        while node is not None and (node.start, node.end) != (start, end):
            node = node.left if (start, end) < (node.start, node.end) else node.right
        return None if node is None else node.value

    def add(self, start: bytes, end: bytes, value: T) -> None:
        """Add a new interval."""
        if end == OPEN_END:
            self._open[start] = value
            self.size += 1
            return
        self._count(start, end, 1)
        new = _Node(start, end, value, self._random.random())
        # Descend to the position of its priority: the subtree below is small, and only that is split.
        above: _Node[T] | None = None
        is_left = False
        node = self._root
        while node is not None and node.priority > new.priority:
            if node.end_max < end:
                node.end_max = end
            is_left = (start, end) < (node.start, node.end)
            above, node = node, node.left if is_left else node.right
        new.left, new.right = _split(node, start, end)
        new.update()
        self._hang(above, is_left, new)

    def _count(self, start: bytes, end: bytes, change: int) -> None:
        self.size += change
        self._lengths[max(len(start), len(end)).bit_length()] += change

    def _hang(self, above: _Node[T] | None, is_left: bool, node: _Node[T] | None) -> None:
        """Replace one of the children of a node by a subtree; ``None``: the root."""
        if above is None:
            self._root = node
        elif is_left:
            above.left = node
        else:
            above.right = node

    def remove(self, start: bytes, end: bytes) -> None:
        """Remove an existing interval."""
        if end == OPEN_END:
            del self._open[start]
            self.size -= 1
            return
        path: list[_Node[T]] = []
        is_left = False
        node = self._root
        while node is not None and (node.start, node.end) != (start, end):
            path.append(node)
            is_left = (start, end) < (node.start, node.end)
            node = node.left if is_left else node.right
        if node is None:
            raise KeyError((start, end))
        self._count(start, end, -1)
        self._hang(path[-1] if path else None, is_left, _merge(node.left, node.right))
        for above in reversed(path):
            above.update()

    def pop(self) -> T:
        """Remove the first interval, bounded ones before open ones, and return its value; there must be one."""
        node = self._root
        if node is None:
            value: T = self._open.popitem(0)[1]
            self.size -= 1
            return value
        above: _Node[T] | None = None
        while node.left is not None:
            above, node = node, node.left
        # The ends recorded above it may now be greater than the remaining ones: a search may descend in vain, but
        # misses nothing.
        self._hang(above, True, node.right)
        self._count(node.start, node.end, -1)
        return node.value

    def containing(self, key: bytes, most: int = ALL) -> list[T]:
        """Return the values of all intervals that contain a key: bounded ones in order of start, then open ones.

        Arguments:
            key: key to look up.
            most: if there are more intervals than this, ``most + 1`` are returned.
        """
        found: list[T] = []
        _collect(self._root, key, found, most)
        if self._open and len(found) <= most:
            left = most + 1 - len(found)
            found += [self._open[start] for start in islice(self._open.irange(None, key), left)]
        return found


def _collect(node: _Node[T] | None, key: bytes, found: list[T], most: int) -> None:
    while node is not None and node.end_max > key:
        if node.left is not None:
            _collect(node.left, key, found, most)
        if node.start > key or len(found) > most:
            return
        if node.end > key:
            found.append(node.value)
        node = node.right


def _split(node: _Node[T] | None, start: bytes, end: bytes) -> tuple[_Node[T] | None, _Node[T] | None]:
    """Return the intervals that sort before one, and the others."""
    if node is None:
        return None, None
    if (node.start, node.end) < (start, end):
        node.right, above = _split(node.right, start, end)
        node.update()
        return node, above
    below, node.left = _split(node.left, start, end)
    node.update()
    return below, node


def _merge(below: _Node[T] | None, above: _Node[T] | None) -> _Node[T] | None:
    if below is None or above is None:
        return below or above
    if below.priority > above.priority:
        below.right = _merge(below.right, above)
        below.update()
        return below
    above.left = _merge(below, above.left)
    above.update()
    return above


# -- watchers -------------------------------------------------------------------------------------------------------

LOOK_BYTES: Final = 4096
"""Bytes compared in negligible time: finding a group takes about twenty comparisons, including its place in the tree.
"""

WATCHER_BYTES: Final = 1100
"""Maximum memory of a watcher besides its key: measured 720 to 1,100, including its place in the index."""


class Watcher:
    """One watch of a client.

    Attributes:
        stream, watch_id: stream of the watcher, and its id, which is unique in that stream.
        key, range_end: as in the index: ``range_end`` empty for one key, ``b"\\0"`` for no end.
        start_revision: requested revision, 0 for "from now".
        value_bytes_max: size of the largest values whose puts it wants; 0: of all.
        next_revision: the first revision not sent yet; valid only while the watcher is served from history.
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
        """Memory of the watcher."""
        return WATCHER_BYTES + len(self.key) + len(self.range_end)

    @property
    def is_filtered(self) -> bool:
        """Whether its filters may exclude some events."""
        return self.no_put or self.no_delete or self.value_bytes_max > 0

    def wants(self, is_delete: bool, value_bytes: int) -> bool:
        """Return whether an event passes its filters."""
        if is_delete:
            return not self.no_delete
        return not self.no_put and not 0 < self.value_bytes_max < value_bytes


_NO_WATCHERS: Final[dict[Watcher, None]] = {}
"""The empty dict shared by all groups without special watchers; never changed. A separate dict takes 64 bytes."""


class Group:
    """All watchers of one key or one interval.

    Attributes:
        interval: key and range end of its watchers.
        next_revision: the first revision that they did not get, for a group that fell behind.
    """

    __slots__ = ("interval", "next_revision", "plain", "special")

    def __init__(self, interval: tuple[bytes, bytes]) -> None:
        self.interval = interval
        self.next_revision = 0
        self.plain: dict[WatchStream, dict[int, bytes]] = {}
        """For each stream, the ids of its watchers in the group, each with its encoded field of a response."""
        self.special = _NO_WATCHERS

    def __bool__(self) -> bool:
        return bool(self.plain or self.special)

    @property
    def size(self) -> int:
        """Number of watchers."""
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
    """Watchers by their key or interval.

    Attributes:
        size: number of watchers.
        next_revision: the first revision that they did not get, if all of them fell behind at once.
    """

    def __init__(self) -> None:
        self.by_key: dict[bytes, Group] = {}
        self.ranges: Intervals[Group] = Intervals()
        self.size = self.next_revision = 0

    def __bool__(self) -> bool:
        return self.size > 0

    def add(self, watcher: Watcher, *, special: bool) -> None:
        """Add a watcher.

        Arguments:
            watcher: a watcher that has all events so far.
            special: each event must be handled for this watcher separately.
        """
        group = self._group(watcher.key, watcher.range_end)
        if special:
            group.special = group.special or {}
            group.special[watcher] = None
        else:
            group.plain.setdefault(watcher.stream, {})[watcher.watch_id] = watcher.id_field
        self.size += 1

    def remove(self, watcher: Watcher) -> bool:
        """Remove a watcher; return whether it was here."""
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
        """Remove a whole group in constant time, however many watchers it has."""
        self.size -= group.size
        self._forget(*group.interval)

    def detach_stream(self, group: Group, stream: WatchStream) -> Group:
        """Remove the watchers of one stream that want every event of a group unmodified, and return them as a group.

        Arguments:
            group: group of the key or interval.
            stream: stream of the watchers.
        """
        detached = Group(group.interval)
        detached.plain[stream] = group.plain.pop(stream)
        self.size -= detached.size
        if not group:
            self._forget(*group.interval)
        return detached

    def attach(self, group: Group) -> bool:
        """Add a whole group, unless there is one with its interval; return whether it was added."""
        if self._find(*group.interval) is not None:
            return False
        self._set(*group.interval, group)
        self.size += group.size
        return True

    def pop(self) -> Group:
        """Remove and return any group; there must be one."""
        group = self.ranges.pop() if self.ranges else self.by_key.popitem()[1]
        self.size -= group.size
        return group

    def weight(self, key: bytes) -> int:
        """Return the relative cost of finding the groups of a large key: bounds may be as large as a request."""
        return 1 + min(len(key), self.ranges.longest_bytes) // LOOK_BYTES

    def groups(self, key: bytes, most: int = ALL) -> Sequence[Group]:
        """Return the groups whose key or interval contains a key; if there are more than ``most``, not all of them.

        Arguments:
            key: key to look up.
            most: limit; if exceeded, more than ``most`` groups are returned.
        """
        group = self.by_key.get(key)
        if not self.ranges.size:
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
