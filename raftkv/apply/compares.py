"""Evaluation of a txn's compares, on the data in the index where that is enough.

Versions, revisions and leases are in the index; only VALUE reads records. All compares on one interval and target are
combined, so the interval is scanned only once, and only up to the first key that fails.

    holds(view, key, target, result, 1)   # a compare of a single key
    yield from all_hold(view, compares)   # any compares, with a pause after each small piece of work
    yield from check_work(view, compares) # refuses work that would keep all members from applying for too long

Compares decide the effect of an entry, so every member evaluates them: their amount of work is checked where a txn is
received, and never while it is applied.

Rules, etcd's: a predicate on an interval must hold for every key in it. A missing key has no value, so VALUE fails on
it; its numbers compare as zeros. A target that this version does not know compares zero with the zero of an unset
field, and an unknown result is true.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Final

from raftkv import errors
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.storage.index import State
from raftkv.storage.mvcc import Store
from raftkv.storage.mvcc_range import PinnedView, Reader
from raftkv.storage.revision import SUB_BITS, after

View = Store | PinnedView
"""The state on which compares are evaluated."""

Compare = rpc_pb2.Compare
# Looking up an enum's value by name costs more than comparing with it.
_EQUAL, _GREATER, _LESS, _NOT_EQUAL = Compare.EQUAL, Compare.GREATER, Compare.LESS, Compare.NOT_EQUAL
_VERSION, _CREATE, _MOD, _VALUE, _LEASE = Compare.VERSION, Compare.CREATE, Compare.MOD, Compare.VALUE, Compare.LEASE
KEYS_PER_PIECE: Final = 512
BYTES_PER_PIECE: Final = 256 * 1024
COMPARES_PER_PIECE: Final = 1000
"""Compares sorted by interval between two pauses: 1 ms."""

WORK_MAX: Final = 1_000_000
"""Maximum number of keys that the compares of one txn may scan, including nested ones: 0.4 s of applying on every
member. etcd has no limit, and reads their values too."""
VALUE_WORK: Final = 4
"""Weight of a key whose value is compared."""
BYTES_PER_KEY: Final = 512
"""Bytes of values that take as long as one more key."""
SAMPLES: Final = 8
"""Number of values read to estimate the size of all values of an interval; each may be as large as a request."""
INTERVALS_PER_PIECE: Final = 64
"""Intervals whose keys are counted between two pauses: 0.3 ms."""


def holds(view: View, key: bytes, target: int, result: int, wanted: Any) -> bool:
    """Return whether a predicate on a single key holds.

    Arguments:
        view: the state.
        key, target, result: parts of the predicate.
        wanted: value to compare with.
    """
    reader = view.reader
    state = reader.state(key, view.revision)
    # For a key that does not exist, etcd compares numbers as zeros, but a missing value neither equals nor orders with
    # anything.
    if state is None:
        return target != _VALUE and _matches(result, 0, wanted)
    return _matches(result, _operand(reader, target, state), wanted)


def all_hold(view: View, compares: Iterable[Compare]) -> Generator[None, None, bool]:
    """Return whether all predicates hold, on single keys and on intervals, with a pause after each piece.

    Arguments:
        view: the state.
        compares: the predicates.
    """
    conditions: dict[tuple[bytes, bytes, int], _Condition] = {}
    for number, compare in enumerate(compares, 1):
        # Compares of one interval and target are merged, so that the interval is scanned only once.
        name = compare.key, compare.range_end, compare.target
        condition = conditions.get(name)
        if condition is None:
            condition = conditions[name] = _Condition()
        condition.add(compare.result, wanted(compare))
        if number % COMPARES_PER_PIECE == 0:
            yield
    for (key, end, target), condition in conditions.items():
        if not (yield from _holds_throughout(view, key, end, target, condition)):
            return False
    return True


def _holds_throughout(
    view: View, key: bytes, end: bytes, target: int, condition: _Condition
) -> Generator[None, None, bool]:
    reader = view.reader
    walk = reader.walk(key, end, after(view.revision))
    is_empty = True
    while not walk.done:
        view.check()
        states = walk.take(KEYS_PER_PIECE)
        while states:
            is_empty = False
            values = _operands(reader, target, states)
            if not condition.passes_all(values):
                return False
            states = states[len(values) :]
            yield
        yield
    # An interval without keys counts as one key that does not exist.
    return not is_empty or (target != _VALUE and condition.passes_all((0,)))


def check_work(view: Store, intervals: Iterable[Compare]) -> Generator[None, None, int]:
    """Refuse compares on intervals that are too much work for every member, with pauses.

    Arguments:
        view: the store of the member that received the txn; it may be larger when the txn is applied.
        intervals: the compares.

    Returns:
        Their work, in keys.

    Raises:
        TooManyComparedError: they are too much work.
    """
    left = WORK_MAX
    mean_bytes = partial(view.reader.mean_bytes, view.revision)
    for number, compare in enumerate(intervals, 1):
        key, end = compare.key, compare.range_end
        count = view.known_count(key, end)
        left -= count
        if count and compare.target == _VALUE:
            left -= count * (VALUE_WORK - 1 + mean_bytes(key, end, SAMPLES) // BYTES_PER_KEY)
            yield
        elif number % INTERVALS_PER_PIECE == 0:
            yield
        if left < 0:
            raise errors.TooManyComparedError
    return WORK_MAX - left


class _Condition:
    """The conjunction of compares that every key of an interval must satisfy."""

    __slots__ = ("equal", "greater", "is_false", "less", "unequal")

    def __init__(self) -> None:
        self.equal: Any = None
        self.greater: Any = None
        self.less: Any = None
        self.unequal: set[Any] = set()
        self.is_false = False

    def add(self, result: int, wanted: Any) -> None:
        if result == _EQUAL:
            self.is_false = self.is_false or (self.equal is not None and self.equal != wanted)
            self.equal = wanted
        elif result == _NOT_EQUAL:
            self.unequal.add(wanted)
        elif result == _GREATER:
            self.greater = wanted if self.greater is None else max(self.greater, wanted)
        elif result == _LESS:
            self.less = wanted if self.less is None else min(self.less, wanted)

    def passes_all(self, values: Sequence[Any]) -> bool:
        # Over a whole piece at once, in C, because a loop over the keys of an interval would be slow.
        return not (
            self.is_false
            or (self.equal is not None and values.count(self.equal) != len(values))
            or (self.greater is not None and min(values) <= self.greater)
            or (self.less is not None and max(values) >= self.less)
            or (self.unequal and not self.unequal.isdisjoint(values))
        )


_WANTED: Final[dict[int, Callable[[Compare], Any]]] = {
    _VERSION: lambda compare: compare.version,
    _CREATE: lambda compare: compare.create_revision,
    _MOD: lambda compare: compare.mod_revision,
    _VALUE: lambda compare: compare.value,
    _LEASE: lambda compare: compare.lease,
}


def wanted(compare: Compare) -> Any:
    """Return the value to compare with: zero when the target's own field is not set."""
    operand = _WANTED.get(compare.target)
    return 0 if operand is None else operand(compare)


def _matches(result: int, have: Any, want: Any) -> bool:
    if result == _EQUAL:
        return bool(have == want)
    if result == _NOT_EQUAL:
        return bool(have != want)
    if result == _GREATER:
        return bool(have > want)
    return bool(have < want) if result == _LESS else True


def _operand(reader: Reader, target: int, state: State) -> Any:
    key, revision, created, version = state
    if target == _VALUE:
        return kv_pb2.KeyValue.FromString(reader.record(revision)).value
    if target == _VERSION:
        return version
    if target == _CREATE:
        return created
    if target == _MOD:
        return revision >> SUB_BITS
    return reader.lease_at(key, revision) if target == _LEASE else 0


def _operands(reader: Reader, target: int, states: list[State]) -> list[Any]:
    """Return the operands of the first keys: of all keys, unless the values would be too large at once."""
    if target == _VALUE:
        parse = kv_pb2.KeyValue.FromString
        return [parse(kv).value for kv in reader.load_all([state[1] for state in states], BYTES_PER_PIECE)]
    if target == _VERSION:
        return [state[3] for state in states]
    if target == _CREATE:
        return [state[2] for state in states]
    if target == _MOD:
        return [state[1] >> SUB_BITS for state in states]
    if target == _LEASE:
        return [reader.lease_at(state[0], state[1]) for state in states]
    return [0] * len(states)
