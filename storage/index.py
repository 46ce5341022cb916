"""The ordered map of all keys to their histories, in memory only.

Entries are small because there is one for every key of the store:

    one generation, one put (nearly all keys)       the packed revision itself, an ``int``
    anything else                                   a ``KeyIndex``

    put 5.0        put 9.0                 delete 12.0                compact(13)
    int 5.0   ->   KeyIndex(5.0, 9.0)  ->  KeyIndex(5.0 9.0 12.0(t))  ->  forgotten
                        | compact(9)
                        v
                   KeyIndex(9.0), version 2: an integer could not store the version

Further structures make common queries cheap:

- ``_keys``, a sorted list, serves intervals. ``_dead`` is a sorted list of those keys in ``_keys`` that do not exist
  now, so the number of live keys in an interval is a difference of positions and needs no iteration.
- ``_dirty`` holds the keys that a compaction could shorten, so a compaction skips all others. It is a dict, not a set,
  because its order must not depend on the hash seed (replays must be exact).

Memory per key, measured with 1,000,000 keys of 64 bytes: about 200 B, of which the key takes 97 B.

An interval is ``(key, end)`` as on the wire (etcd's ``range_end``). An empty ``end`` means the single key, a zero byte
means "to the last key"; otherwise the interval is ``key <= x < end``, which is empty when ``end <= key``.

THE HISTORY OF ONE KEY (``KeyIndex``)

A key lives through generations: a put opens one if none is open, a deletion (tombstone, ``t``) closes it. Example, one
key that is put at revisions 1 and 2, deleted at 3, put at 4 and deleted at 5:

    revision       1     2     3     4     5      6 ...
    change         put   put   del   put   del
                   |               | |         |
    generation     +------ 1 ------+ +--- 2 ---+   none is open: the key does not exist
    created        1     1           4
    version        1     2           1
    at main        1     2     none  4     none   none

A compaction keeps the newest revision at or below the compact revision, because reads *at* the compact revision are
allowed. A tombstone is kept only when it is exactly at the compact revision, so that a watch from there still sees the
deletion (etcd issues 18089 and 19179, etcd >= 3.5.16):

    compact(2)      2  3(t) | 4  5(t)
    compact(3)         3(t) | 4  5(t)
    compact(4)                4  5(t)
    compact(5)                   5(t)
    compact(6)      nothing: the index forgets the key

Revisions are packed integers (``revision.py``). ``created`` is a main revision and ``version`` counts the puts of the
generation since it was created, including puts that were compacted away. Invariants: revisions ascend; every closed
generation ends in a tombstone; the open generation has at least one revision or does not exist.

Keys with one generation of one put, nearly all in most stores, never get here: the map keeps them as an integer.

A key may be put and deleted any number of times. Closing a generation appends to a list, and a lookup is a binary
search. Only a compaction takes longer for a longer history, and only in proportion to the revisions that it drops.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from sortedcontainers import SortedList

from raftkv.errors import InvariantError
from raftkv.storage.revision import SUB_BITS, after, describe, to_key, to_tombstone_key


class Generation(NamedTuple):
    """A closed generation of a key.

    Attributes:
        created: main revision of the put that opened it; 0 if a compaction dropped that put and left the tombstone
            alone.
        version: number of changes since then, including the tombstone.
        revisions: remaining packed revisions, ascending; the last one is the tombstone. A list if there are many:
            neither a deletion nor a step of a compaction should copy millions.
    """

    created: int
    version: int
    revisions: tuple[int, ...] | list[int]


class Found(NamedTuple):
    """The place where the state of a key at some revision is recorded."""

    modified: int
    """Packed revision of the put: the record to read."""
    created: int
    """Main revision of the put that opened the generation."""
    version: int


_NO_GENERATIONS: Final[list[Generation]] = []
_NO_REVISIONS: Final[list[int]] = []
"""Shared by all keys without revisions; to be replaced, never changed: an empty list per key would cost 56 bytes."""

LISTED_FROM: Final = 1_000
"""Number of revisions from which a closed generation keeps its list; shorter ones become tuples to save memory."""

DROPS_MAX: Final = 1 << 62
"""No limit: more revisions than a key can have."""


class KeyIndex:
    """The history of one key: its closed generations, oldest first, and the open one.

    Attributes:
        closed: generations that ended in a deletion.
        created, version, revisions: the open generation; 0, 0 and empty while the key does not exist.
    """

    __slots__ = ("closed", "created", "revisions", "version")

    def __init__(self, created: int = 0, version: int = 0, revisions: list[int] | None = None) -> None:
        self.closed = _NO_GENERATIONS
        self.created = created
        self.version = version
        self.revisions = _NO_REVISIONS if revisions is None else revisions

    @classmethod
    def from_tombstone(cls, revision: int) -> KeyIndex:
        """Return the history of a key of which a compaction left only the deletion."""
        key_index = cls()
        key_index.closed = [Generation(0, 1, (revision,))]
        return key_index

    def is_live(self) -> bool:
        """Return whether the key exists now."""
        return bool(self.revisions)

    def is_empty(self) -> bool:
        """Return whether no revision is left, so that the index should forget the key."""
        return not self.revisions and not self.closed

    def needs_compaction(self) -> bool:
        """Return whether a compaction at some later revision could drop anything."""
        return bool(self.closed) or len(self.revisions) > 1

    def last(self) -> int:
        """Return the packed revision of the newest change, a tombstone included; 0 if there is none."""
        if self.revisions:
            return self.revisions[-1]
        return self.closed[-1].revisions[-1] if self.closed else 0

    def put(self, revision: int) -> None:
        """Record a put at a packed revision.

        Raises:
            InvariantError: the revision is not newer than all known ones.
        """
        if revision <= self.last():
            raise InvariantError(f"put at {describe(revision)} is not after {describe(self.last())}")
        if self.revisions:
            self.revisions.append(revision)
            self.version += 1
        else:
            self.created, self.version, self.revisions = revision >> SUB_BITS, 1, [revision]

    def tombstone(self, revision: int) -> None:
        """Record a deletion at a packed revision.

        Raises:
            InvariantError: the key does not exist, or the revision is not newer than all known ones.
        """
        if not self.revisions or revision <= self.revisions[-1]:
            raise InvariantError(f"tombstone at {describe(revision)} on a key last changed at {describe(self.last())}")
        # The tombstone counts as one more version, so that ``_find`` can compute the version of a put from its distance
        # to the end, in a closed generation exactly as in the open one.
        revisions: tuple[int, ...] | list[int] = self.revisions
        if isinstance(revisions, list) and len(revisions) >= LISTED_FROM:
            revisions.append(revision)
        else:
            revisions = (*revisions, revision)
        generation = Generation(self.created, self.version + 1, revisions)
        # The first closed generation of a key replaces the shared empty list.
        if self.closed:
            self.closed.append(generation)
        else:
            self.closed = [generation]
        self.created, self.version, self.revisions = 0, 0, _NO_REVISIONS

    def before(self, bound: int) -> Found | None:
        """Return the state before a packed revision; ``None`` when the key did not exist then."""
        if self.revisions and self.revisions[0] < bound:
            return _find(self.created, self.version, self.revisions, bound)
        # The last generation that began before ``bound``; any later one is not visible yet.
        position = bisect_left(self.closed, bound, key=_first) - 1
        if position < 0:
            return None
        generation = self.closed[position]
        # The tombstone is visible as well: the key did not exist between this generation and the next.
        if generation.revisions[-1] < bound:
            return None
        return _find(generation.created, generation.version, generation.revisions, bound)

    def since(self, main: int) -> list[int]:
        """Return packed revisions at or after a main revision, oldest first, only the last of each main revision."""
        bound = main << SUB_BITS
        # As in etcd's keyIndex.Since, only the last of several changes in one transaction counts. The dict keeps one
        # value per main revision, in order.
        newest: dict[int, int] = {}
        for revisions in (*(generation.revisions for generation in self.closed), self.revisions):
            newest.update((revision >> SUB_BITS, revision) for revision in revisions if revision >= bound)
        return list(newest.values())

    def kept(self, compacted: int, after: int) -> Iterator[tuple[int, bool, int]]:
        """Iterate over the revisions that a compaction at a main revision keeps, oldest first.

        Arguments:
            compacted: the main revision.
            after: packed revision; only later revisions are returned.

        Returns:
            packed revision, whether it is a deletion, first main revision whose compaction drops it (0: none does).
        """
        closed = self.closed
        first = max(bisect_right(closed, after, key=_last), bisect_left(closed, compacted << SUB_BITS, key=_last))
        for number in range(first, len(closed)):
            revisions = closed[number].revisions
            for at in range(max(bisect_right(revisions, after), _first_kept(revisions, compacted)), len(revisions) - 1):
                yield revisions[at], False, revisions[at + 1] >> SUB_BITS
            later = closed[number + 1].revisions if number + 1 < len(closed) else self.revisions
            main = revisions[-1] >> SUB_BITS
            # A tombstone exactly at the compact revision stays, unless the same transaction put the key again.
            due = main if later and later[0] >> SUB_BITS == main else main + 1
            if due > compacted:
                yield revisions[-1], True, due
        revisions, last = self.revisions, len(self.revisions) - 1
        for at in range(max(bisect_right(revisions, after), _first_kept(revisions, compacted)), last + 1):
            yield revisions[at], False, revisions[at + 1] >> SUB_BITS if at < last else 0

    def compact(self, main: int, drops_max: int = DROPS_MAX) -> list[bytes]:
        """Drop the revisions that a compaction at a main revision drops; return their revision keys, oldest first.

        Arguments:
            main: the compact revision.
            drops_max: number of revisions to drop at most; if that many are returned, call again for the rest.
        """
        dropped: list[bytes] = []
        self._drop_generations(main, drops_max, dropped)
        room = drops_max - len(dropped)
        # Unless ``room`` ran out, the remaining closed generations ended at or after ``main``. The open generation then
        # began after ``main`` and keeps everything. Only the oldest remaining generation can straddle ``main``.
        if self.closed:
            self.closed[0] = _trim(self.closed[0], main, room, dropped)
        elif self.revisions:
            # No closed generation is left: drop the empty list.
            self.closed = _NO_GENERATIONS
            first = min(_first_kept(self.revisions, main), room)
            dropped += map(to_key, self.revisions[:first])
            del self.revisions[:first]
        return dropped

    def _drop_generations(self, main: int, drops_max: int, dropped: list[bytes]) -> None:
        """Drop whole generations that ended before ``main``, or that another one followed at ``main`` itself, while
        ``drops_max`` allows it.
        """
        # Strictly before: a tombstone exactly at ``main`` stays, and ``_trim`` keeps only the tombstone.
        ended = bisect_left(self.closed, main << SUB_BITS, key=_last)
        # Of several generations in one transaction only the last counts: a put between two of them is not the state at
        # ``main``.
        while ended + 1 < len(self.closed) and self.closed[ended + 1].revisions[0] < (main + 1) << SUB_BITS:
            ended += 1
        whole = 0
        for generation in islice(self.closed, ended):
            # The whole generation would exceed the limit: ``_trim`` drops as much as fits from its front.
            if len(dropped) + len(generation.revisions) > drops_max:
                break
            dropped += _keys_of_closed(generation.revisions)
            whole += 1
        del self.closed[:whole]


def _first(generation: Generation) -> int:
    return generation.revisions[0]


def _last(generation: Generation) -> int:
    return generation.revisions[-1]


def _find(created: int, version: int, revisions: list[int] | tuple[int, ...], bound: int) -> Found:
    position = bisect_left(revisions, bound) - 1
    # The newest revision has ``version``; each step back in the same generation is one version less. So versions stay
    # right after compactions, which only cut from the front.
    return Found(revisions[position], created, version - (len(revisions) - 1 - position))


def _first_kept(revisions: list[int] | tuple[int, ...], main: int) -> int:
    """Return the position of the newest revision at or below ``main``; 0 when there is none."""
    # Reads at ``main`` itself are still allowed, and need this revision.
    return max(bisect_left(revisions, (main + 1) << SUB_BITS) - 1, 0)


def _trim(generation: Generation, main: int, drops_max: int, dropped: list[bytes]) -> Generation:
    first = min(_first_kept(generation.revisions, main), drops_max)
    if not first:
        return generation
    revisions = generation.revisions
    dropped += map(to_key, revisions[:first])
    if isinstance(revisions, list):
        del revisions[:first]
        return generation
    return generation._replace(revisions=revisions[first:])


def _keys_of_closed(revisions: tuple[int, ...] | list[int]) -> list[bytes]:
    # On disk, the key of a tombstone carries a mark (``revision.py``); the keys of the puts before it do not.
    return [*map(to_key, revisions[:-1]), to_tombstone_key(revisions[-1])]


TO_THE_LAST: Final = b"\x00"
"""The ``end`` of an interval without an upper bound."""


State = tuple[bytes, int, int, int]
"""A key at some revision: the key, packed revision of its value, main revision of its creation, version."""


class Index:
    """The keys of a store, in order, each with its history.

    One thread owns it, and no method may be called while an iterator of it is in use.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, int | KeyIndex] = {}
        self._keys: SortedList[bytes] = SortedList()
        self._dead: SortedList[bytes] = SortedList()
        self._dirty: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def live_count(self) -> int:
        """Number of keys that exist now."""
        return len(self._keys) - len(self._dead)

    @property
    def has_dead(self) -> bool:
        """Whether any known key does not exist now."""
        return bool(self._dead)

    def put(self, key: bytes, revision: int) -> tuple[int, int, int]:
        """Record a put.

        Arguments:
            key: the key, known or not.
            revision: packed revision of the put, newer than all others.

        Returns:
            main revision of creation, version, packed revision of the replaced value (0 if the key did not exist).
        """
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = revision
            self._keys.add(key)
            return revision >> SUB_BITS, 1, 0
        # Second put: an integer cannot represent it, and a compaction can now drop the first.
        if isinstance(entry, int):
            self._entries[key] = KeyIndex(entry >> SUB_BITS, 2, [entry, revision])
            self._dirty[key] = None
            return entry >> SUB_BITS, 2, entry
        return self._put_again(key, entry, revision)

    def _put_again(self, key: bytes, entry: KeyIndex, revision: int) -> tuple[int, int, int]:
        revisions = entry.revisions
        previous = revisions[-1] if revisions else 0
        # The key was deleted before: it lives again, in a new generation.
        if not previous:
            self._dead.remove(key)
        entry.put(revision)
        self._dirty[key] = None
        return entry.created, entry.version, previous

    def tombstone(self, key: bytes, revision: int) -> int:
        """Record the deletion of a key that exists.

        Arguments:
            key: the key.
            revision: packed revision of the deletion, newer than all others.

        Returns:
            packed revision of the deleted value.

        Raises:
            InvariantError: the key does not exist.
        """
        entry = self._entries.get(key)
        if entry is None:
            raise InvariantError(f"tombstone on the unknown key {key!r}")
        if isinstance(entry, int):
            # The integer stood for version 1 of the only generation.
            entry = self._entries[key] = KeyIndex(entry >> SUB_BITS, 1, [entry])
        previous = entry.last()
        entry.tombstone(revision)
        self._dead.add(key)
        self._dirty[key] = None
        return previous

    def latest(self, key: bytes) -> int:
        """Return the packed revision of the current value of a key; 0 when the key does not exist."""
        entry = self._entries.get(key, 0)
        if isinstance(entry, int):
            return entry
        return _latest(entry)

    def get(self, key: bytes, bound: int) -> Found | None:
        """Return the state of a key before a packed revision; ``None`` if it did not exist then."""
        entry = self._entries.get(key)
        if isinstance(entry, int):
            return Found(entry, entry >> SUB_BITS, 1) if entry < bound else None
        return None if entry is None else entry.before(bound)

    def get_latest(self, key: bytes) -> Found | None:
        """Return the current state of a key; ``None`` if it does not exist."""
        entry = self._entries.get(key)
        return None if entry is None else _get_latest(entry)

    def keys(self, key: bytes, end: bytes, *, reverse: bool = False) -> Iterator[bytes]:
        """Iterate over the known keys of an interval in order, live or not.

        Arguments:
            key, end: the interval.
            reverse: begin with the last one.
        """
        if not end:
            return iter((key,) if key in self._entries else ())
        if end == TO_THE_LAST:
            return iter(self._keys.irange(key, reverse=reverse))
        if end <= key:
            return iter(())
        return iter(self._keys.irange(key, end, inclusive=(True, False), reverse=reverse))

    def live(self, key: bytes, end: bytes) -> Iterator[tuple[bytes, int]]:
        """Iterate over the keys of an interval that exist now, in order.

        Arguments:
            key, end: the interval.

        Returns:
            pairs of a key and the packed revision of its value.
        """
        entries = self._entries
        for name in self.keys(key, end):
            entry = entries[name]
            # A dead key stays in the index until a compaction forgets it; its latest revision is 0 here.
            revision = entry if isinstance(entry, int) else _latest(entry)
            if revision:
                yield name, revision

    def kept(self, key: bytes, end: bytes, compacted: int, after: int) -> Iterator[tuple[bytes, int, bool, int]]:
        """Iterate over the revisions of an interval that a compaction keeps, by key, then oldest first.

        Arguments:
            key, end: the interval.
            compacted: main revision of the compaction; the index may still have revisions that it drops.
            after: packed revision; revisions of the first key up to this one are skipped.

        Returns:
            key, and the values of ``KeyIndex.kept``; revision 0 for a key with no kept revision, so that the caller can
            pause: there may be very many such keys.
        """
        entries = self._entries
        for name in self.keys(key, end):
            entry = entries[name]
            behind = after if name == key else 0
            if isinstance(entry, int):
                yield name, entry if entry > behind else 0, False, 0
                continue
            is_left = False
            for revision, is_deletion, due in entry.kept(compacted, behind):
                is_left = True
                yield name, revision, is_deletion, due
            if not is_left:
                yield name, 0, False, 0

    def live_at(self, key: bytes, end: bytes, main: int) -> Iterator[tuple[bytes, int]]:
        """Iterate over the keys of an interval that existed at a main revision, in order.

        Arguments:
            key, end: the interval.
            main: the main revision.

        Returns:
            pairs of a key and the packed revision of the value that it had then.
        """
        entries = self._entries
        bound = after(main)
        for name in self.keys(key, end):
            entry = entries[name]
            if isinstance(entry, int):
                # A single put: the key exists from this revision on.
                if entry < bound:
                    yield name, entry
            else:
                found = entry.before(bound)
                if found is not None:
                    yield name, found.modified

    def states(self, names: Iterable[bytes], bound: int) -> list[State]:
        """Return the states before a packed revision of those keys that existed then.

        Arguments:
            names: keys that the index knows.
            bound: the packed revision; ``revision.after`` of a main revision shows all of its changes.
        """
        entries = self._entries
        found: list[State] = []
        for name in names:
            entry = entries[name]
            if isinstance(entry, int):
                if entry < bound:
                    found.append((name, entry, entry >> SUB_BITS, 1))
                continue
            revisions = entry.revisions
            # Reads of the present are by far the most frequent: the newest state, without a search.
            if revisions and revisions[-1] < bound:
                found.append((name, revisions[-1], entry.created, entry.version))
            elif (state := entry.before(bound)) is not None:
                found.append((name, *state))
        return found

    def state(self, key: bytes, main: int) -> State | None:
        """Return the state of a key as of a main revision; ``None`` if it did not exist then.

        Arguments:
            key: the key, known or not.
            main: the main revision.
        """
        return next(iter(self.states((key,), after(main))), None) if key in self._entries else None

    def known_count(self, key: bytes, end: bytes) -> int:
        """Return the number of known keys of an interval, live or not: the cost of iterating over it.

        The cost is logarithmic in the size of the store.

        Arguments:
            key, end: the interval.
        """
        if not end:
            return int(key in self._entries)
        if end == TO_THE_LAST:
            return len(self._keys) - int(self._keys.bisect_left(key))
        return max(int(self._keys.bisect_left(end)) - int(self._keys.bisect_left(key)), 0)

    def sample(self, key: bytes, end: bytes, count: int) -> list[bytes]:
        """Return some known keys of an interval, chosen at random; all of them if there are at most ``count``.

        Arguments:
            key, end: the interval.
            count: number of keys to return, at most.
        """
        known = self.known_count(key, end)
        if known <= count:
            return list(self.keys(key, end))
        first = int(self._keys.bisect_left(key))
        return [self._keys[first + number] for number in random.sample(range(known), count)]

    def count(self, key: bytes, end: bytes) -> int:
        """Return the number of keys of an interval that exist now.

        The cost is logarithmic in the size of the store.

        Arguments:
            key, end: the interval.
        """
        if not end:
            return 1 if self.latest(key) else 0
        # Checked before ``end <= key``: a zero byte sorts before nearly every key.
        if end == TO_THE_LAST:
            return self.live_count - self._live_before(key)
        if end <= key:
            return 0
        return self._live_before(end) - self._live_before(key)

    def _live_before(self, key: bytes) -> int:
        # Every dead key is also a known key, so the difference counts the live ones.
        known: int = self._keys.bisect_left(key)
        dead: int = self._dead.bisect_left(key)
        return known - dead

    def take_dirty(self) -> dict[bytes, None]:
        """Remove and return the set of keys to compact.

        The caller passes each key to ``compact_key`` once; later changes go to a new set.
        """
        dirty, self._dirty = self._dirty, {}
        return dirty

    def compact_key(self, key: bytes, main: int, drops_max: int = DROPS_MAX) -> list[bytes]:
        """Compact the history of one key at a main revision; return the dropped revision keys.

        Arguments:
            key: the key; ignored if the index has already forgotten it.
            main: the compact revision.
            drops_max: revisions to drop at most; if as many are returned, there may be more: ask again.
        """
        entry = self._entries.get(key)
        if entry is None or isinstance(entry, int):
            return []
        dropped = entry.compact(main, drops_max)
        if entry.is_empty():
            self._forget(key)
        # A later compaction can drop something newer than ``main``, or ``drops_max`` cut this one short.
        elif entry.needs_compaction():
            self._dirty[key] = None
        # One live put is left, and it is the first of its generation: an integer represents it.
        elif entry.version == 1:
            self._entries[key] = entry.revisions[0]
        return dropped

    def _forget(self, key: bytes) -> None:
        del self._entries[key]
        self._keys.remove(key)
        # No revision is left, so the key does not exist and is among the dead keys.
        self._dead.remove(key)
        self._dirty.pop(key, None)

    def restore(self, entries: dict[bytes, int | KeyIndex], dead: Iterable[bytes], dirty: Iterable[bytes]) -> None:
        """Replace the contents by the result of a scan of the disk (``restore.py``).

        Arguments:
            entries: history of each key; the index takes the dict over.
            dead: keys that do not exist now.
            dirty: keys that a compaction could shorten.
        """
        self._entries = entries
        self._keys = SortedList(entries)
        self._dead = SortedList(dead)
        self._dirty = dict.fromkeys(dirty)

    def restore_part(self, part: list[tuple[bytes, int | KeyIndex]]) -> None:
        """Add some scanned keys to a fresh index, which must not be used before ``restored``."""
        # A slice of sorted keys at a time: sorting a million at once would block the loop for a second.
        self._keys.update(key for key, _ in part)
        for key, entry in part:
            if isinstance(entry, KeyIndex):
                if not entry.is_live():
                    self._dead.add(key)
                if entry.needs_compaction():
                    self._dirty[key] = None

    def restored(self, entries: dict[bytes, int | KeyIndex]) -> None:
        """Take over the histories of all keys passed to ``restore_part``; from now on the index may be used."""
        self._entries = entries

    def become(self, other: Index) -> dict[bytes, int | KeyIndex]:
        """Take over the contents of another index at once; the other index must not be used afterwards.

        Returns:
            the previous histories, now unused: freeing a million of them takes a tenth of a second.
        """
        # This object stays, because the reader, the transaction and the compactor hold references to it.
        before = self._entries
        self._entries, self._keys = other._entries, other._keys
        self._dead, self._dirty = other._dead, other._dirty
        return before


class Walk:
    """An iteration over an interval at one moment, up or down, in pieces; the index may change between the pieces.

    Arguments:
        index: the index of the store.
        key, end: the interval.
        bound: packed revision; changes before it are visible.
        reverse: begin with the last key.
    """

    __slots__ = ("_bound", "_end", "_index", "_key", "_reverse", "done")

    def __init__(self, index: Index, key: bytes, end: bytes, bound: int, *, reverse: bool = False) -> None:
        self._index = index
        self._key = key
        self._end = end
        self._bound = bound
        self._reverse = reverse
        self.done = False
        """Whether the end of the interval was reached."""

    def take(self, keys_max: int) -> list[State]:
        """Return the states of the next known keys of the interval that existed at the revision.

        Arguments:
            keys_max: number of known keys to look at, at most.
        """
        # Known keys, not live ones, so that a step takes bounded time even in an interval full of deleted keys.
        names = list(islice(self._index.keys(self._key, self._end, reverse=self._reverse), keys_max))
        if len(names) < keys_max or not self._end:
            self.done = True
        elif self._reverse:
            # No key is left below the start of the interval or below the least key. That key must not become the
            # ``end`` either: a zero byte there means "to the last key".
            self.done = names[-1] in (self._key, TO_THE_LAST)
            self._end = names[-1]
        else:
            # The successor of the last key in byte order. A key created before it later need not be found: it is newer
            # than the moment.
            self._key = names[-1] + b"\x00"
        return self._index.states(names, self._bound)


def _latest(entry: int | KeyIndex) -> int:
    if isinstance(entry, int):
        return entry
    revisions = entry.revisions
    return revisions[-1] if revisions else 0


def _get_latest(entry: int | KeyIndex) -> Found | None:
    if isinstance(entry, int):
        return Found(entry, entry >> SUB_BITS, 1)
    return Found(entry.revisions[-1], entry.created, entry.version) if entry.revisions else None
