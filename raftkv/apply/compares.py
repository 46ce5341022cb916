"""Evaluation of a txn's compares, on what the index knows wherever that is enough.

Versions, revisions and leases are in the index; only VALUE reads records. All compares on one interval and target are
one condition, so the interval is walked once however many they are, and no further than the first key that fails.

    holds(view, key, target, result, 1)   # one that names a key
    yield from all_hold(view, compares)   # any, with a pause after each small piece of work
    yield from check_work(view, compares) # refuses what would keep every member from applying anything else for long

Compares decide what an entry does, so every member evaluates them: how much work they are is asked where a txn is
taken, and never while it is applied.

Rules, etcd's: a predicate on an interval must hold for every key of it. A missing key has no value to compare with, so
VALUE fails on it; its numbers compare as zeros. A target that this version does not know compares zero with the zero of
an unset field, and a result that it does not know holds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final

from raftkv import errors
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.storage.index import State
from raftkv.storage.mvcc import Store
from raftkv.storage.mvcc_range import PinnedView, Reader
from raftkv.storage.revision import SUB_BITS

View = Store | PinnedView
"""The state that compares are evaluated on."""

Compare = rpc_pb2.Compare
# Asked for by name, an enum's value costs more than a comparison with it.
_EQUAL, _GREATER, _LESS, _NOT_EQUAL = Compare.EQUAL, Compare.GREATER, Compare.LESS, Compare.NOT_EQUAL
_VERSION, _CREATE, _MOD, _VALUE, _LEASE = Compare.VERSION, Compare.CREATE, Compare.MOD, Compare.VALUE, Compare.LEASE
KEYS_PER_PIECE: Final = 512
BYTES_PER_PIECE: Final = 256 * 1024
COMPARES_PER_PIECE: Final = 1000
"""Compares that are sorted by their intervals between two pauses: 1 ms."""

WORK_MAX: Final = 10_000_000
"""Keys that the compares of one txn may walk through, nested ones included: 4 s of applying on every member. etcd has
no limit, reads their values too, and takes 15 s."""
VALUE_WORK: Final = 4
"""Weight of a key whose value is compared."""
BYTES_PER_KEY: Final = 512
"""Bytes of values that take as long as one key more."""
SAMPLES: Final = 8
"""Values by which the size of all values of an interval is estimated, each as large as a request."""
INTERVALS_PER_PIECE: Final = 64
"""Intervals of which the keys are counted between two pauses: 0.3 ms."""


def holds(view: View, key: bytes, target: int, result: int, wanted: Any) -> bool:
    """Return whether a predicate on a single key holds.

    Arguments:
        view: what it is evaluated on.
        key, target, result: of the predicate.
        wanted: what is compared with.
    """
    reader = view.reader
    state = reader.state(key, view.revision)
    # etcd compares with zeros for a key that does not exist, but a value that does not exist equals and orders with
    # nothing.
    if state is None:
        return target != _VALUE and _matches(result, 0, wanted)
    return _matches(result, _operand(reader, target, state), wanted)


def all_hold(view: View, compares: Iterable[Compare]) -> Generator[None, None, bool]:
    """Return whether all predicates hold, on single keys and on intervals, with a pause after each piece.

    Arguments:
        view: what they are evaluated on.
        compares: the predicates.
    """
    conditions: dict[tuple[bytes, bytes, int], _Condition] = {}
    for number, compare in enumerate(compares, 1):
        # Compares of one interval and target are merged, so that the interval is walked once, however many there are.
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
    walk = reader.walk(key, end, view.revision)
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


def check_work(view: Store, intervals: Iterable[Compare]) -> Generator[None, None, None]:
    """Refuse compares on intervals that are too much work to be evaluated by every member, with pauses.

    Arguments:
        view: the store where the txn is taken; the one that it is applied to may be larger.
        intervals: the compares.

    Raises:
        TooManyComparedError: they are.
    """
    left = WORK_MAX
    for number, compare in enumerate(intervals, 1):
        key, end = compare.key, compare.range_end
        count = view.known_count(key, end)
        left -= count
        if count and compare.target == _VALUE:
            left -= count * (VALUE_WORK - 1 + view.reader.mean_bytes(key, end, SAMPLES) // BYTES_PER_KEY)
            yield
        elif number % INTERVALS_PER_PIECE == 0:
            yield
        if left < 0:
            raise errors.TooManyComparedError


class _Condition:
    """The conjunction of compares that every operand of an interval must satisfy."""

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
        # Over a whole piece at once, in C: a loop over the keys of an interval would run in the interpreter.
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
    """Return what is compared with: zero when the target's own field is not set."""
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
    """Return the operands of the first keys: of all, but for values that would be too much at once."""
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
