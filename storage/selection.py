"""Reads of whole intervals in pieces: filtered, sorted and limited by what the index knows.

    work = Selector(reader, main, key, end, Selection(target=MOD, descending=True, limit=1)).pieces()
    for kvs in work: ...                # lists of serialized KeyValues, in order; often empty: a pause
    found = work's return value         # Selected: how many keys there are, whether the limit cut any

Every ``yield`` comes after a small piece of work (``KEYS_PER_PIECE`` keys looked at, or about ``BYTES_PER_PIECE``
loaded), so that the one who drives it can do other things between: the loop of a member serves puts, the apply of a
log entry goes on with the next piece. The answer is that of revision ``main`` even if the store changes meanwhile,
unless that revision is compacted: ``check`` is asked before each piece and raises then.

Rules, as in etcd (server/etcdserver/txn/range.go):

- Filters are inclusive bounds on revisions. ``count`` is of the interval, without filter and limit.
- Equal sort values stay in order of key, in either direction (etcd leaves their order open).
- A sort target without an order ascends, and then a limit, unless there is a filter, cuts *before* sorting.

Keys, versions and revisions are in the index, so only the values that are returned are read from disk; sorting by
VALUE reads all. With a limit no more candidates are kept than a small multiple of it; without, sorted runs are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from raftkv.storage.index import State
from raftkv.storage.key_value import KeyValueView
from raftkv.storage.revision import SUB_BITS

if TYPE_CHECKING:
    from raftkv.storage.mvcc_range import Reader

T = TypeVar("T")

KEY, VERSION, CREATE, MOD, VALUE = range(5)
"""Sort targets, numbered as on the wire."""
NONE, ASCEND, DESCEND = range(3)
"""Sort orders, numbered as on the wire."""

LIMIT_MAX: Final = 2**63 - 1
"""Cuts nothing, and has no successor in 64 bits."""
KEYS_PER_PIECE: Final = 256
KEYS_PER_PIECE_MIN: Final = 16
BYTES_PER_PIECE: Final = 256 * 1024
RUN_ITEMS: Final = 2048
"""Items sorted at once: about a millisecond."""
RUNS_FREED_AT_ONCE: Final = 8
"""Sorted runs that are freed where they are given up: 1 ms."""
CANDIDATES_MAX: Final = 1000
"""Largest limit for which the best so far are kept apart; beyond it everything is sorted."""
ITEM_BYTES: Final = 200
"""Memory of an item that waits to be sorted, beside its value."""

Pieces = Generator[list[bytes], None, "Selected"]
Item = tuple[Any, int, bytes, int]
"""Sort value, place among equals, key, packed revision."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The wanted part of an interval, and its order.

    Revisions are main revisions, and 0 is no bound; a limit of 0 or less is none. Without ``counts`` the count of the
    answer may be too low: at an older revision counting is a walk to the end.
    """

    limit: int = 0
    counts: bool = True
    count_only: bool = False
    keys_only: bool = False
    target: int = KEY
    order: int = NONE
    min_mod: int = 0
    max_mod: int = 0
    min_create: int = 0
    max_create: int = 0

    @property
    def is_filtered(self) -> bool:
        """Whether some keys of the interval may be left out."""
        return bool(self.min_mod or self.max_mod or self.min_create or self.max_create)

    def passes(self, state: State) -> bool:
        """Return whether the filters let a key through."""
        modified, created = state[1] >> SUB_BITS, state[2]
        return not (
            (self.max_mod and modified > self.max_mod)
            or (self.min_mod and modified < self.min_mod)
            or (self.max_create and created > self.max_create)
            or (self.min_create and created < self.min_create)
        )


@dataclass(frozen=True, slots=True)
class Selected:
    """The end of a selection: what is known when all pieces were yielded."""

    count: int
    """Keys of the interval, selected or not."""
    more: bool
    """Whether the limit left any out."""


def nothing() -> None:
    """Check nothing."""


def no_limit(_size_bytes: int) -> None:
    """Let an answer grow."""


class Selector:
    """One selection under way.

    Arguments:
        reader: of the store.
        main: the revision to read at.
        key, end: the interval, as in the index.
        selection: what of it.
        count: its number of keys where that is known already; it is found by walking otherwise.
        check: raises when ``main`` cannot be read any more.
        grow: called with bytes held until the end beside what was yielded; raises when they are too many.
    """

    def __init__(
        self,
        reader: Reader,
        main: int,
        key: bytes,
        end: bytes,
        selection: Selection,
        count: int | None = None,
        check: Callable[[], None] = nothing,
        grow: Callable[[int], None] = no_limit,
    ) -> None:
        self._reader = reader
        self._main = main
        self._key = key
        self._end = end
        self._selection = selection
        self._known_count = count
        self._counts = count is None and selection.counts
        """Whether the walk must go on to the end for the count alone."""
        self._check = check
        self._grow = grow
        self._walked = 0

    def pieces(self) -> Pieces:
        """Read what is selected, in pieces; the module says how."""
        selection = self._selection
        # Nothing to read, or nothing but a count that is known.
        if self._known_count == 0 or (selection.count_only and self._known_count is not None):
            return Selected(self._known_count, False)
        if selection.count_only:
            for _ in self._walk(0):
                yield []
            return Selected(self._walked, False)
        if selection.target == KEY:
            return (yield from self._in_key_order())
        return (yield from self._sorted())

    def _walk(self, wanted: int) -> Iterator[list[State]]:
        """The keys of the interval in pieces; ``wanted`` of them may do (0: all)."""
        # Only an answer in descending order of keys is walked downward: ties of other sorts stay in order of key.
        reverse = self._selection.target == KEY and self._selection.order == DESCEND
        walk = self._reader.walk(self._key, self._end, self._main, reverse=reverse)
        size = KEYS_PER_PIECE
        while not walk.done:
            # Between two pieces a compaction may have taken the revision away.
            self._check()
            # Not many more keys than the limit needs, but never so few that the pauses cost more than the work.
            if wanted:
                size = max(KEYS_PER_PIECE_MIN, min(KEYS_PER_PIECE, wanted - self._walked))
            states = walk.take(size)
            self._walked += len(states)
            yield states

    def _in_key_order(self) -> Pieces:
        """Up or down: each piece is answered as it is found."""
        selection, limit = self._selection, self._selection.limit
        is_filtered = selection.is_filtered
        taken, more = 0, False
        # One more than the limit shows whether there is more; a filter may pass over any number of keys.
        for states in self._walk(0 if is_filtered or not 0 < limit < LIMIT_MAX else limit + 1):
            if more:  # only the count is still wanted
                yield []
                continue
            passing = [state for state in states if selection.passes(state)] if is_filtered else states
            if 0 < limit < taken + len(passing):
                more = True
                passing = passing[: limit - taken]
            taken += len(passing)
            yield from self._load([(state[0], state[1]) for state in passing])
            # Nothing more is wanted of the interval, not even its count.
            if more and not self._counts:
                break
        return Selected(self._count(), more)

    def _sorted(self) -> Pieces:
        """By something else: everything is looked at before anything is answered."""
        selection = self._selection
        limit = selection.limit
        # etcd sorts in ascending order when a target comes without an order, but hands the limit to the store: the
        # limit then cuts in key order, before the sort.
        cuts_first = selection.order == NONE and not selection.is_filtered and 0 < limit < LIMIT_MAX
        fetch = limit + 1 if cuts_first else 0
        # The best so far suffice if a limit is small; a large one would make each new item cost as much as sorting all.
        items = _Sorted(selection.order == DESCEND, limit if 0 < limit <= CANDIDATES_MAX else 0)
        try:
            return (yield from self._in_order(items, fetch))
        finally:
            # A million at once would hold the loop for 0.1 s, at the end or after the reader has gone.
            if len(items.runs) > RUNS_FREED_AT_ONCE:
                self._reader.free_later(items.runs)

    def _in_order(self, items: _Sorted, fetch: int) -> Pieces:
        """All keys, or ``fetch`` of them, in the order of what is sorted."""
        selection, limit, passing = self._selection, self._selection.limit, 0
        for states in self._walk(fetch):
            if fetch and passing >= fetch:  # only the count is still wanted
                yield []
                continue
            chosen = [state for state in states if selection.passes(state)] if selection.is_filtered else states
            if fetch:
                chosen = chosen[: fetch - passing]
            passing += len(chosen)
            yield from self._add(items, chosen)
            if fetch and passing >= fetch and not self._counts:
                break
        ordered = items.in_order()
        wanted = limit if limit > 0 else passing
        while wanted > 0 and (some := list(islice(ordered, min(wanted, KEYS_PER_PIECE)))):
            wanted -= len(some)
            yield from self._load([(item[2], item[3]) for item in some])
        return Selected(self._count(), 0 < limit < passing)

    def _count(self) -> int:
        return self._walked if self._known_count is None else self._known_count

    def _add(self, items: _Sorted, states: list[State]) -> Generator[list[bytes], None, None]:
        """Put keys among those to be sorted, their values loaded if it is by value."""
        target = self._selection.target
        # The index knows all targets but the value.
        if target != VALUE:
            values: Iterable[Any]
            # Main revisions, as on the wire: keys of one transaction are equal, and stay in order of key.
            if target == MOD:
                values = [state[1] >> SUB_BITS for state in states]
            else:
                values = [state[2] if target == CREATE else state[3] for state in states]
            items.add(values, states)
            self._grow(items.take_growth())
            yield []
            return
        done = 0
        for kvs in self._values([state[1] for state in states]):
            items.add([KeyValueView(kv).value for kv in kvs], states[done : done + len(kvs)], by_value=True)
            done += len(kvs)
            self._grow(items.take_growth())
            yield []

    def _load(self, pairs: list[tuple[bytes, int]]) -> Generator[list[bytes], None, None]:
        """The answer for keys and revisions, in pieces; at least one, so that each walk has its pause."""
        # A piece in which nothing was selected was work as well, and pauses.
        if not pairs:
            yield []
        elif not self._selection.keys_only:
            yield from self._values([revision for _, revision in pairs])
        elif self._selection.target == VALUE:
            # Here etcd keeps the leases: it reads the records, to sort them.
            for kvs in self._values([revision for _, revision in pairs]):
                yield [KeyValueView(kv).without_value() for kv in kvs]
        else:
            self._check()
            yield self._reader.keys_at(pairs, self._main)

    def _values(self, revisions: list[int]) -> Iterator[list[bytes]]:
        """KeyValues in pieces of about ``BYTES_PER_PIECE``."""
        position = 0
        while position < len(revisions):
            self._check()
            kvs = self._reader.load_all(revisions[position : position + KEYS_PER_PIECE], BYTES_PER_PIECE)
            position += len(kvs)
            yield kvs


class _Sorted:
    """Items on their way to being sorted: the best ``keep`` of them, or all (0) in sorted runs.

    Attributes:
        runs: those that are full.
    """

    def __init__(self, descending: bool, keep: int) -> None:
        self._descending = descending
        self._keep = keep
        self._run: list[Item] = []
        self.runs: list[list[Item]] = []
        self._added = 0
        self._held_bytes = 0
        self._reported_bytes = 0
        self._worst: Item | None = None

    def add(self, values: Iterable[Any], states: list[State], *, by_value: bool = False) -> None:
        """Take items in order of key.

        Arguments:
            values: what each item is sorted by.
            states: the items.
            by_value: whether what they are sorted by takes memory of its own.
        """
        items: list[Item] = []
        for value, (key, revision, _, _) in zip(values, states, strict=True):
            self._added += 1
            # The second member breaks ties in order of key, in both directions; so two items are never equal, and the
            # keys behind it are never compared.
            items.append((value, -self._added if self._descending else self._added, key, revision))
        worst = self._worst
        # A key worse than the worst kept one cannot be among the best any more.
        if worst is not None:
            items = [item for item in items if (item > worst) == self._descending]
        self._run += items
        self._held_bytes += _size_bytes(items, by_value)
        if len(self._run) >= RUN_ITEMS:
            self._end_run(by_value)

    def take_growth(self) -> int:
        """Return the bytes held more than at the last call; negative if some were dropped."""
        growth = self._held_bytes - self._reported_bytes
        self._reported_bytes = self._held_bytes
        return growth

    def _end_run(self, by_value: bool) -> None:
        self._run.sort(reverse=self._descending)
        # Only the best so far can be in the answer: the rest of the run is dropped, and its memory with it.
        if self._keep:
            self._held_bytes -= _size_bytes(self._run[self._keep :], by_value)
            del self._run[self._keep :]
            # The run goes on with the best ``keep`` of it; what comes next is measured against the last of them.
            self._worst = self._run[-1]
        else:
            self.runs.append(self._run)
            self._run = []

    def in_order(self) -> Iterator[Item]:
        """Iterate over all that is kept, sorted."""
        self._run.sort(reverse=self._descending)
        self.runs.append(self._run)
        return merge(*self.runs, reverse=self._descending)


def _size_bytes(items: list[Item], by_value: bool) -> int:
    return len(items) * ITEM_BYTES + (sum(len(item[0]) for item in items) if by_value else 0)


def collect(
    pieces: Pieces, size_bytes_max: int = 1 << 62
) -> Generator[None, None, tuple[list[bytes], Selected | None]]:
    """Gather a selection, with its pauses.

    Arguments:
        pieces: the selection.
        size_bytes_max: bytes of KeyValues at which it stops early.

    Returns:
        the KeyValues, and how the selection ended; ``None`` if it was stopped early.
    """
    kvs: list[bytes] = []
    size_bytes = 0
    while size_bytes < size_bytes_max:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return kvs, end.value
        kvs += piece
        size_bytes += sum(map(len, piece))
        yield
    # The walk was not finished: neither the count nor whether there is more is known.
    return kvs, None


def finish(work: Generator[None, None, T]) -> T:
    """Do all the pieces of some work at once and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def drain(pieces: Pieces) -> tuple[list[bytes], Selected]:
    """Do all of a selection at once; return its KeyValues and how it ended."""
    kvs: list[bytes] = []
    while True:
        try:
            kvs += next(pieces)
        except StopIteration as end:
            found: Selected = end.value
            return kvs, found
