"""Reads of whole intervals in pieces: filtered, sorted and limited with the data in the index.

    work = Selector(reader, main, key, end, Selection(target=MOD, descending=True, limit=1)).pieces()
    for kvs in work: ...                # lists of serialized KeyValues, in order; often empty: a pause
    found = work's return value         # Selected: number of keys, whether the limit cut any

Every ``yield`` comes after a small piece of work (``KEYS_PER_PIECE`` keys looked at, or about ``BYTES_PER_PIECE``
loaded), so that the caller can do other work in between: the loop of a member serves puts, the apply of a log entry
continues with the next piece. The result is that of revision ``main`` even if the store changes meanwhile, unless that
revision is compacted: ``check`` is called before each piece and raises then.

Rules, as in etcd (server/etcdserver/txn/range.go):

- Filters are inclusive bounds on revisions. ``count`` counts the interval, regardless of filter and limit.
- Items with equal sort values stay in order of key, in either direction (etcd leaves their order open).
- A sort target without an order sorts ascending; a limit then cuts *before* sorting, unless there is a filter.

Keys, versions and revisions are in the index, so only the returned values are read from disk; sorting by VALUE reads
all. With a limit, at most a small multiple of it is kept as candidates; without one, sorted runs are merged.
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
"""Number of sorted runs that are freed immediately: 1 ms."""
CANDIDATES_MAX: Final = 1000
"""Largest limit for which only the best candidates are kept; with larger limits everything is sorted."""
ITEM_BYTES: Final = 200
"""Memory of an item that waits to be sorted, without its value."""

Pieces = Generator[list[bytes], None, "Selected"]
Item = tuple[Any, int, bytes, int]
"""Sort value, tie-breaker, key, packed revision."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The wanted part of an interval, and its order.

    Revisions are main revisions; 0 means no bound. A limit of 0 or less means no limit. Without ``counts`` the count in
    the result may be too low: at an older revision, counting requires iterating to the end.
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
        """Whether filters may exclude some keys of the interval."""
        return bool(self.min_mod or self.max_mod or self.min_create or self.max_create)

    def passes(self, state: State) -> bool:
        """Return whether a key passes the filters."""
        modified, created = state[1] >> SUB_BITS, state[2]
        return not (
            (self.max_mod and modified > self.max_mod)
            or (self.min_mod and modified < self.min_mod)
            or (self.max_create and created > self.max_create)
            or (self.min_create and created < self.min_create)
        )


@dataclass(frozen=True, slots=True)
class Selected:
    """The final result of a selection, after all pieces were yielded."""

    count: int
    """Number of keys in the interval, selected or not."""
    more: bool
    """Whether the limit left any out."""


def nothing() -> None:
    """Check nothing."""


def no_limit(_size_bytes: int) -> None:
    """Accept any size."""


class Selector:
    """A selection in progress.

    Arguments:
        reader: reader of the store.
        bound: packed revision; changes before it are visible.
        key, end: the interval, as in the index.
        selection: filters, order and limit.
        count: number of keys in the interval if it is already known; otherwise found by iterating.
        check: raises when that state is no longer readable.
        grow: called with the number of bytes held besides what was yielded; may raise to refuse.
    """

    def __init__(
        self,
        reader: Reader,
        bound: int,
        key: bytes,
        end: bytes,
        selection: Selection,
        count: int | None = None,
        check: Callable[[], None] = nothing,
        grow: Callable[[int], None] = no_limit,
    ) -> None:
        self._reader = reader
        self._bound = bound
        self._key = key
        self._end = end
        self._selection = selection
        self._known_count = count
        self._counts = count is None and selection.counts
        """Whether the iteration must continue to the end only for the count."""
        self._check = check
        self._grow = grow
        self._walked = 0

    def pieces(self) -> Pieces:
        """Read what is selected, in pieces, as the module docstring describes."""
        selection = self._selection
        # Nothing to read, or only a count that is known.
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
        """Iterate over the keys of the interval in pieces; ``wanted`` keys may be enough (0: all)."""
        # Only results in descending order of keys are read downwards: ties of other sorts stay in order of key.
        reverse = self._selection.target == KEY and self._selection.order == DESCEND
        walk = self._reader.walk(self._key, self._end, self._bound, reverse=reverse)
        size = KEYS_PER_PIECE
        while not walk.done:
            # A compaction between two pieces may have dropped the revision.
            self._check()
            # Not many more keys than the limit needs, but enough that the pauses do not cost more than the work.
            if wanted:
                size = max(KEYS_PER_PIECE_MIN, min(KEYS_PER_PIECE, wanted - self._walked))
            states = walk.take(size)
            self._walked += len(states)
            yield states

    def _in_key_order(self) -> Pieces:
        """Yield in key order, up or down: each piece is yielded as it is found."""
        selection, limit = self._selection, self._selection.limit
        is_filtered = selection.is_filtered
        taken, more = 0, False
        # One more than the limit shows whether there is more; a filter may skip any number of keys.
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
            # Nothing more of the interval is needed, not even its count.
            if more and not self._counts:
                break
        return Selected(self._count(), more)

    def _sorted(self) -> Pieces:
        """Yield in another order: all keys are looked at before the first is yielded."""
        selection = self._selection
        limit = selection.limit
        # etcd sorts in ascending order when a target comes without an order, but passes the limit to the store: the
        # limit then cuts in key order, before the sort.
        cuts_first = selection.order == NONE and not selection.is_filtered and 0 < limit < LIMIT_MAX
        fetch = limit + 1 if cuts_first else 0
        # With a small limit the best candidates suffice; with a large one each new item would cost a full sort.
        items = _Sorted(selection.order == DESCEND, limit if 0 < limit <= CANDIDATES_MAX else 0)
        try:
            return (yield from self._in_order(items, fetch))
        finally:
            # Freeing a million at once would block the loop for 0.1 s, at the end or after the reader has left.
            if len(items.runs) > RUNS_FREED_AT_ONCE:
                self._reader.free_later(items.runs)

    def _in_order(self, items: _Sorted, fetch: int) -> Pieces:
        """Yield all keys, or ``fetch`` of them, in sort order."""
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
        """Add keys to those to be sorted; load their values first if sorting by value."""
        target = self._selection.target
        # The index has all sort targets except the value.
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
        """Yield the KeyValues for keys and revisions, in pieces; at least one, so that each step has its pause."""
        # A piece in which nothing was selected was also work, and needs a pause.
        if not pairs:
            yield []
        elif not self._selection.keys_only:
            yield from self._values([revision for _, revision in pairs])
        elif self._selection.target == VALUE:
            # Like etcd, keep the leases here: it reads the records to sort them.
            for kvs in self._values([revision for _, revision in pairs]):
                yield [KeyValueView(kv).without_value() for kv in kvs]
        else:
            self._check()
            yield self._reader.keys_at(pairs, self._bound)

    def _values(self, revisions: list[int]) -> Iterator[list[bytes]]:
        """Iterate over KeyValues in pieces of about ``BYTES_PER_PIECE``."""
        position = 0
        while position < len(revisions):
            self._check()
            kvs = self._reader.load_all(revisions[position : position + KEYS_PER_PIECE], BYTES_PER_PIECE)
            position += len(kvs)
            yield kvs


class _Sorted:
    """Items to be sorted: the best ``keep`` of them, or all of them (0) in sorted runs.

    Attributes:
        runs: the full runs.
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
        """Add items, which must come in order of key.

        Arguments:
            values: sort value of each item.
            states: the items.
            by_value: whether the sort values take additional memory.
        """
        items: list[Item] = []
        for value, (key, revision, _, _) in zip(values, states, strict=True):
            self._added += 1
            # The second member breaks ties in order of key, in both directions, so two items are never equal and the
            # keys after it are never compared.
            items.append((value, -self._added if self._descending else self._added, key, revision))
        worst = self._worst
        # A key worse than the worst kept one can no longer be among the best.
        if worst is not None:
            items = [item for item in items if (item > worst) == self._descending]
        self._run += items
        self._held_bytes += _size_bytes(items, by_value)
        if len(self._run) >= RUN_ITEMS:
            self._end_run(by_value)

    def take_growth(self) -> int:
        """Return the change in bytes held since the last call; negative if some were dropped."""
        growth = self._held_bytes - self._reported_bytes
        self._reported_bytes = self._held_bytes
        return growth

    def _end_run(self, by_value: bool) -> None:
        self._run.sort(reverse=self._descending)
        # Only the best candidates can be in the result: drop the rest of the run and its memory.
        if self._keep:
            self._held_bytes -= _size_bytes(self._run[self._keep :], by_value)
            del self._run[self._keep :]
            # The run continues with its best ``keep`` items; later items are compared with the last of them.
            self._worst = self._run[-1]
        else:
            self.runs.append(self._run)
            self._run = []

    def in_order(self) -> Iterator[Item]:
        """Iterate over all kept items, sorted."""
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
        size_bytes_max: bytes of KeyValues at which to stop early.

    Returns:
        the KeyValues, and the final result; ``None`` if it was stopped early.
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
    # The iteration was not finished: neither the count nor whether there is more is known.
    return kvs, None


def finish(work: Generator[None, None, T]) -> T:
    """Run all steps of a generator at once and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def drain(pieces: Pieces) -> tuple[list[bytes], Selected]:
    """Run a selection at once; return its KeyValues and its final result."""
    kvs: list[bytes] = []
    while True:
        try:
            kvs += next(pieces)
        except StopIteration as end:
            found: Selected = end.value
            return kvs, found
