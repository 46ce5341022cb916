"""The history of one key: its generations (pure; no store, no clock, no disk).

A key lives through generations: a put opens one if none is open, a deletion (tombstone, ``t``) closes it. Example, one
key that is put at revisions 1 and 2, deleted at 3, put at 4 and deleted at 5:

    revision       1     2     3     4     5      6 ...
    change         put   put   del   put   del
                   |               | |         |
    generation     +------ 1 ------+ +--- 2 ---+   none is open: the key does not exist
    created        1     1           4
    version        1     2           1
    get(main)      1     2     none  4     none   none

A compaction keeps the newest revision at or below the compact revision, because reads *at* the compact revision are
allowed. A tombstone is kept only when it is exactly at the compact revision, so that a watch from there still sees the
deletion (etcd issues 18089 and 19179, etcd >= 3.5.16):

    compact(2)      2  3(t) | 4  5(t)
    compact(3)         3(t) | 4  5(t)
    compact(4)                4  5(t)
    compact(5)                   5(t)
    compact(6)      nothing: the index forgets the key

Revisions are packed integers (``revision.py``). ``created`` is a main revision and ``version`` counts the puts of the
generation since it was created, also those compacted away since. Invariants: revisions ascend; every closed generation
ends in a tombstone and holds at least it; the open one has at least one revision or does not exist.

Keys with one generation of one put, nearly all in most stores, never get here: ``index.py`` keeps them as an integer.

A key may be put and deleted any number of times, so the only operation whose cost grows with the history is a
compaction, and that only with what it drops: closing a generation appends to a list, a lookup searches by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from raftkv.errors import InvariantError
from raftkv.storage.revision import SUB_BITS, describe, to_key, to_tombstone_key


class Generation(NamedTuple):
    """A closed generation of a key.

    Attributes:
        created: main revision of the put that opened it; 0 if a compaction dropped that put and left the tombstone
            alone.
        version: number of changes since then, the tombstone included.
        revisions: packed revisions that are left, ascending; the last one is the tombstone. A list where they are many:
            neither a deletion nor a step of a compaction is to copy millions.
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
"""What all keys without any share, to be replaced and never changed: an empty list of their own costs 56 bytes."""

LISTED_FROM: Final = 1_000
"""Revisions of a generation from which on they stay a list when it is closed: a tuple takes less memory."""

DROPS_MAX: Final = 1 << 62
"""More revisions than a key can have."""


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
        """Make the history of a key of which only a deletion is left, as found on disk after a compaction."""
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
            InvariantError: the revision is not newer than everything known.
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
            InvariantError: the key does not exist, or the revision is not newer than everything known.
        """
        if not self.revisions or revision <= self.revisions[-1]:
            raise InvariantError(f"tombstone at {describe(revision)} on a key last changed at {describe(self.last())}")
        # The tombstone counts as one more version, so that ``_find`` computes the version of a put from its distance to
        # the end in a closed generation exactly as it does in the open one.
        revisions: tuple[int, ...] | list[int] = self.revisions
        if isinstance(revisions, list) and len(revisions) >= LISTED_FROM:
            revisions.append(revision)
        else:
            revisions = (*revisions, revision)
        generation = Generation(self.created, self.version + 1, revisions)
        # The first closed generation of a key replaces the list that all keys without one share.
        if self.closed:
            self.closed.append(generation)
        else:
            self.closed = [generation]
        self.created, self.version, self.revisions = 0, 0, _NO_REVISIONS

    def get(self, main: int) -> Found | None:
        """Return the state as of a main revision; ``None`` when the key did not exist then."""
        # The packed form sorts like (main, sub): everything up to the last change of ``main`` is below this.
        bound = (main + 1) << SUB_BITS
        if self.revisions and self.revisions[0] < bound:
            return _find(self.created, self.version, self.revisions, bound)
        # The last generation that began at or before ``main``; any later one is not visible yet.
        position = bisect_left(self.closed, bound, key=_first) - 1
        if position < 0:
            return None
        generation = self.closed[position]
        # Its tombstone is visible as well: the key did not exist between this generation and the next.
        if generation.revisions[-1] < bound:
            return None
        return _find(generation.created, generation.version, generation.revisions, bound)

    def since(self, main: int) -> list[int]:
        """Return packed revisions at or after a main revision, oldest first, only the last of each main revision."""
        bound = main << SUB_BITS
        # As etcd's keyIndex.Since: of several changes in one transaction only the last counts. The dict keeps one value
        # for each main revision, in the order in which they came.
        newest: dict[int, int] = {}
        for revisions in (*(generation.revisions for generation in self.closed), self.revisions):
            newest.update((revision >> SUB_BITS, revision) for revision in revisions if revision >= bound)
        return list(newest.values())

    def kept(self, compacted: int, after: int) -> Iterator[tuple[int, bool, int]]:
        """Iterate over what a compaction at a main revision leaves, oldest first.

        Arguments:
            compacted: the main revision.
            after: packed revision to begin behind.

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
            # One exactly at the compact revision stays, unless its own transaction put the key again.
            due = main if later and later[0] >> SUB_BITS == main else main + 1
            if due > compacted:
                yield revisions[-1], True, due
        revisions, last = self.revisions, len(self.revisions) - 1
        for at in range(max(bisect_right(revisions, after), _first_kept(revisions, compacted)), last + 1):
            yield revisions[at], False, revisions[at + 1] >> SUB_BITS if at < last else 0

    def compact(self, main: int, drops_max: int = DROPS_MAX) -> list[bytes]:
        """Drop what a compaction at a main revision drops; return the revision keys of it, oldest first.

        Arguments:
            main: the compact revision.
            drops_max: revisions to drop at most; if as many are returned, there may be more: ask again.
        """
        dropped: list[bytes] = []
        self._drop_generations(main, drops_max, dropped)
        room = drops_max - len(dropped)
        # What is left of ``closed`` ended at or after ``main``, unless room ran out; then the open generation began
        # after it and keeps everything. Only the oldest one left can straddle ``main``.
        if self.closed:
            self.closed[0] = _trim(self.closed[0], main, room, dropped)
        elif self.revisions:
            # All closed generations are gone: give the emptied list back.
            self.closed = _NO_GENERATIONS
            first = min(_first_kept(self.revisions, main), room)
            dropped += map(to_key, self.revisions[:first])
            del self.revisions[:first]
        return dropped

    def _drop_generations(self, main: int, drops_max: int, dropped: list[bytes]) -> None:
        """Drop the generations that ended before ``main``, or that the last one at ``main`` itself followed, as long as
        there is room for a whole one.
        """
        # Strictly before: a tombstone exactly at ``main`` stays, and ``_trim`` leaves just it.
        ended = bisect_left(self.closed, main << SUB_BITS, key=_last)
        # Of several in one transaction the last one: a put between two of them is not the state at ``main``.
        while ended + 1 < len(self.closed) and self.closed[ended + 1].revisions[0] < (main + 1) << SUB_BITS:
            ended += 1
        whole = 0
        for generation in islice(self.closed, ended):
            # No room for the whole of it: ``_trim`` cuts what still fits from its front.
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
    # The newest revision has ``version``; each step back in the same generation is one version less. So the version
    # survives compactions, which only cut from the front.
    return Found(revisions[position], created, version - (len(revisions) - 1 - position))


def _first_kept(revisions: list[int] | tuple[int, ...], main: int) -> int:
    """Position of the newest revision at or below ``main``, 0 when there is none."""
    # Reads at ``main`` itself are still allowed, and see this one.
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
    # On disk the key of a tombstone carries a mark (``revision.py``), the keys of the puts before it do not.
    return [*map(to_key, revisions[:-1]), to_tombstone_key(revisions[-1])]
