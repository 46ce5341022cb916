"""The used samples, saved in a checkpoint, so that each sample is used exactly once over changing worlds and crashes.

::

    position = Position.begin(len(files))                     # ranks that step together: one count is enough
    mine = position.share(batch_size=32, rank=rank, world_size=world_size)
    position = position.step(batch_size=32, world_size=world_size)
    save(saving, position)                                    # a file of the checkpoint: one commit with the model
    position = load(resumed, Position)                        # a world of any size continues from there

    ledger = Ledger(registry, "train")                        # other ranks; ``AsyncLedger`` for asyncio
    ledger.open(claim, used or Used.begin(length), range_size=1000)    # every rank; the first one does it
    while (taken := ledger.take(claim, rank)) is not None:
        for sample in range(taken.first, taken.end): ...
        ledger.mark(claim, taken, taken.end)                  # they are in the model, and in the next checkpoint
    save(saving, ledger.used())                               # at a barrier

Exactly once means: in the history of a committed checkpoint, each sample of an epoch was used once, for all world sizes
and crashes. Samples used after the last commit are used again, because their steps are repeated.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import quote

from raftkv.checkpoint.commit.claim import Claim, under
from raftkv.checkpoint.errors import CheckpointError
from raftkv.checkpoint.keys import RegistryKeys, check_name, check_run_id, parts_in_run
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.storage.verify import read_verified
from raftkv.client.arguments import instance, text, whole
from raftkv.client.control import Control, until_answered
from raftkv.client.operations import Operation, create_revision, delete, get, get_range, mod_revision, put, value
from raftkv.client.records import NUMBER_MAX, SIGNED, Limits, Record, RecordError, encoded, read
from raftkv.client.sync.blocking import Blocking, blocking
from raftkv.client.values import KeyValue, TxnResult
from raftkv.errors import ConfigError, StatusError

if TYPE_CHECKING:
    from raftkv.checkpoint.sync import Registry


# ---- sets of integers, as sorted intervals that neither touch nor overlap

Interval = tuple[int, int]
"""First number, and the first number after the interval."""
Intervals = tuple[Interval, ...]


def united(intervals: Iterable[Interval], *more: Interval) -> Intervals:
    """Return the union without empty intervals.

    >>> united([(0, 4), (10, 12)], (4, 6))
    ((0, 6), (10, 12))
    """
    found: list[Interval] = []
    for first, end in sorted(each for each in (*intervals, *more) if each[0] < each[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return tuple(found)


def without(intervals: Sequence[Interval], length: int) -> Intervals:
    """Return the numbers from 0 to ``length`` - 1 that are in none of the intervals.

    >>> without(((0, 6), (10, 12)), 15)
    ((6, 10), (12, 15))
    """
    ends = [0, *(end for _, end in intervals)]
    firsts = [*(first for first, _ in intervals), length]
    return tuple((first, end) for first, end in zip(ends, firsts, strict=True) if first < end)


def size(intervals: Iterable[Interval]) -> int:
    """Return the number of integers in the intervals."""
    return sum(end - first for first, end in intervals)


def overlaps(intervals: Iterable[Interval]) -> bool:
    """Return whether two intervals overlap."""
    ordered = sorted(intervals)
    return any(later[0] < earlier[1] for earlier, later in pairwise(ordered))


# ---- ranks that step together


@dataclass(frozen=True, slots=True)
class Position(Record):
    """The progress of a pass as one number, for worlds of any size. Immutable; ``step`` returns the next position.

    A step of ``world_size`` ranks uses the next ``batch_size * world_size`` numbers, a part for each rank. The next
    step begins after them, in a world of any size, so a new world divides the rest of the epoch again. The last step
    divides the rest evenly, so a rank may have one sample less, or none. The numbers are positions in an order of the
    epoch (``raftkv.dataset.Permutation``), which depends on seed and epoch.

    >>> position = Position.begin(10)
    >>> [list(position.share(2, rank, 3)) for rank in range(3)]
    [[0, 1], [2, 3], [4, 5]]
    >>> position = position.step(2, 3)                               # a rank dies: the world has two
    >>> [list(position.share(2, rank, 2)) for rank in range(2)]
    [[6, 7], [8, 9]]
    >>> position.step(2, 2).is_over
    True

    Attributes:
        epoch: epoch, from 0.
        length: samples of the epoch.
        consumed: number of used samples among these.
        seed: seed of the order.
        dataset: identity of the data, as version and root of a manifest, for the program that resumes.
    """

    NAME: ClassVar[str] = "position"
    epoch: int
    length: int
    consumed: int  # no default, so that every file has it, and other records are not taken for positions
    seed: int = 0
    dataset: str = ""
    LIMITS: ClassVar[Limits] = {"seed": SIGNED}

    def __post_init__(self) -> None:
        for name in ("epoch", "length", "consumed", "seed"):  # another number would be written, and never read again
            object.__setattr__(self, name, whole(getattr(self, name), f"the {name} of a position"))
        text(self.dataset, "the dataset of a position")
        if abs(self.seed) > NUMBER_MAX:
            raise ConfigError(f"the seed of a position has at most 64 bits: {self.seed}")
        if self.epoch < 0 or not 0 <= self.consumed <= self.length:
            raise ConfigError(f"no position: {self.consumed} of {self.length} samples of epoch {self.epoch} are used")

    @classmethod
    def begin(cls, length: int, *, seed: int = 0, dataset: str = "") -> Self:
        """Return the beginning of the first epoch. Arguments as the attributes."""
        return cls(0, length, 0, seed, dataset)

    @property
    def remaining(self) -> int:
        """Number of unused samples of the epoch."""
        return self.length - self.consumed

    @property
    def is_over(self) -> bool:
        """Whether all samples of the epoch were used."""
        return self.consumed == self.length

    def steps(self, batch_size: int, world_size: int) -> int:
        """Return the number of remaining steps in a world of this size."""
        return -(-self.remaining // _checked(batch_size, world_size))

    def share(self, batch_size: int, rank: int, world_size: int) -> range:
        """Return the numbers of a rank in the next step.

        Arguments:
            batch_size: batch size of each rank.
            rank, world_size: rank and size in the current world.

        Raises:
            ConfigError: there is no such rank, or a size is not positive.
        """
        most = _checked(batch_size, world_size)
        rank, world_size = whole(rank, "rank"), whole(world_size, "world_size")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} does not exist in a world of {world_size}")
        count = min(most, self.remaining)
        first = self.consumed + count * rank // world_size
        return range(first, self.consumed + count * (rank + 1) // world_size)

    def step(self, batch_size: int, world_size: int) -> Position:
        """Return the position after one step of all ranks."""
        return self.after(min(_checked(batch_size, world_size), self.remaining))

    def after(self, samples: int) -> Position:
        """Return the position after a number of samples of all ranks together."""
        return replace(self, consumed=self.consumed + whole(samples, "samples"))

    def next_epoch(self, length: int | None = None) -> Position:
        """Return the beginning of the next epoch.

        Arguments:
            length: length of the dataset; None: unchanged.
        """
        return replace(self, epoch=self.epoch + 1, consumed=0, length=self.length if length is None else length)

    @property
    def metadata(self) -> dict[str, str]:
        """Epoch and samples, for ``metadata=`` of a checkpoint, for people."""
        return {"epoch": str(self.epoch), "samples": f"{self.consumed}/{self.length}"}


def _checked(batch_size: int, world_size: int) -> int:
    batch_size, world_size = whole(batch_size, "batch_size"), whole(world_size, "world_size")
    if batch_size < 1 or world_size < 1:
        raise ConfigError(f"a batch and a world have at least one: batch_size={batch_size}, world_size={world_size}")
    return batch_size * world_size


# ---- ranks that do not step together: ranges are taken, marked as used, and taken again after a crash
#
#         state          epoch, length, free and used samples                  one key
#     taken/<first>  a range, its rank, how far it is used                 one key for each taken range
#
# Every write carries the claim of the run's generation. A new generation opens the ledger from the checkpoint with
# which it resumes: uncommitted marks are dropped with their steps, ranges of dead ranks are free again, and writes of
# ranks of the old generation are refused (``FenceBroken``).
#
# Invariant: free, taken and done ranges never overlap, and together are the whole epoch.

INTERVALS_MAX: Final = 20_000
"""Maximum intervals of one record; about this many ranges may be taken at a checkpoint."""


class RangeLost(CheckpointError):
    """A range no longer belongs to this rank: it was given back, or the ledger was opened again."""

    definite = True


@dataclass(frozen=True, slots=True)
class _Ranges(Record):
    """The base of records with intervals."""

    @classmethod
    def read_field(cls, name: str, kind: str, value: object) -> object:
        """Implement ``Record.read_field``."""
        if kind != "Intervals":
            return super(_Ranges, cls).read_field(name, kind, value)
        if not isinstance(value, list) or len(value) > INTERVALS_MAX:
            raise RecordError(cls.NAME, f"{name} are not intervals")
        found = [tuple(each) for each in value if isinstance(each, list)]
        if len(found) != len(value) or not all(_is_interval(each) for each in found) or overlaps(found):
            raise RecordError(cls.NAME, f"{name} are not separate intervals")
        return united(found)


def _is_interval(found: tuple[Any, ...]) -> bool:
    return len(found) == 2 and all(type(number) is int for number in found) and 0 <= found[0] < found[1]


@dataclass(frozen=True, slots=True)
class Used(_Ranges):
    """The used samples of an epoch; a checkpoint saves this from a ledger.

    Attributes:
        epoch: epoch, from 0.
        length: samples of the epoch.
        done: used samples.
        dataset: identity of the data, for the program that resumes.
    """

    NAME: ClassVar[str] = "used samples"
    epoch: int
    length: int
    done: Intervals  # no default, so that every file has it, and other records are not taken for this one
    dataset: str = ""

    def __post_init__(self) -> None:
        for name in ("epoch", "length"):  # another number would be written, and never read again
            object.__setattr__(self, name, whole(getattr(self, name), f"the {name} of used samples"))

    @classmethod
    def begin(cls, length: int, *, dataset: str = "") -> Self:
        """Return the beginning of the first epoch. Arguments as the attributes."""
        return cls(0, length, (), dataset)

    def check(self) -> None:
        """Implement ``Record.check``: samples beyond the epoch are refused."""
        if self.done and self.done[-1][1] > self.length:
            raise RecordError(self.NAME, f"{self.done[-1][1]} samples of {self.length}")

    @property
    def remaining(self) -> int:
        """Number of unused samples of the epoch."""
        return self.length - size(self.done)


@dataclass(frozen=True, slots=True)
class State(_Ranges):
    """The ledger itself.

    Attributes:
        epoch, length, dataset: as of ``Used``.
        range_size: samples of a range.
        generation: generation of the claim that opened it.
        free: samples that no rank has taken.
        done: used samples.
    """

    NAME: ClassVar[str] = "ledger of positions"
    epoch: int
    length: int
    range_size: int
    generation: int
    free: Intervals = ()
    done: Intervals = ()
    dataset: str = ""

    def check(self) -> None:
        """Implement ``Record.check``: see the invariant."""
        if overlaps((*self.free, *self.done)) or any(end > self.length for _, end in (*self.free, *self.done)):
            raise RecordError(self.NAME, f"its samples are not apart, or beyond {self.length}")


@dataclass(frozen=True, slots=True)
class TakenRange(Record):
    """A range that a rank has taken.

    Attributes:
        first, end: the numbers from ``first`` to ``end`` - 1.
        done: the numbers before this one are used.
        epoch: epoch of the pass.
        rank: rank that owns it.
        id: id of this take.
    """

    NAME: ClassVar[str] = "taken range"
    first: int
    end: int
    done: int
    epoch: int
    rank: int
    id: str = field(default="")

    def check(self) -> None:
        """Implement ``Record.check``."""
        if not self.first <= self.done <= self.end or self.first == self.end:
            raise RecordError(self.NAME, f"samples {self.first} to {self.end} are used up to {self.done}")

    def belongs_to(self, key: str) -> bool:
        """Implement ``Record.belongs_to``."""
        parts = parts_in_run(key)
        return len(parts) == 4 and parts[0] == "position" and parts[2:] == ["taken", f"{self.first:015d}"]


class _Seen(NamedTuple):
    """The ledger at one revision."""

    state: State
    revision: int
    taken: Sequence[TakenRange]


class AsyncLedger:
    """The ranges of one dataset of one run; see the module. An interrupted call can be repeated.

    Arguments:
        control: the store.
        run_id: run id.
        name: name of the dataset.

    Raises:
        ConfigError: a name is not valid.
    """

    def __init__(self, control: Control, run_id: str, name: str = "train") -> None:
        self.name = check_name("ledger", name)
        self._control = control
        base = f"{RegistryKeys(check_run_id(run_id)).base}position/{quote(name, safe='')}/"
        self._key = f"{base}state"
        self._taken = f"{base}taken/"
        # By the id of a taking, what calls that did not end may have done: taken it, marked it, ended it (as done?).
        self._taking: set[str] = set()
        self._marking: dict[str, TakenRange] = {}
        self._settling: dict[str, bool] = {}

    async def open(self, claim: Claim, used: Used, *, range_size: int) -> None:
        """Begin a generation from its checkpoint. All ranks make the same call; the first one has the effect.

        Arguments:
            claim: claim of the generation.
            used: used samples of the checkpoint with which all resume, or ``Used.begin``.
            range_size: samples per range; choose some seconds of work.

        Raises:
            ConfigError: a range has no samples.
            FenceBroken, GenerationOver: the claim has ended.
        """
        instance(used, Used, "used")
        range_size = whole(range_size, "range_size")
        if range_size < 1:
            raise ConfigError(f"a range has at least one sample, not {range_size}")
        if used.done and used.done[-1][1] > used.length:
            raise ConfigError(f"samples beyond the {used.length} of epoch {used.epoch} cannot be used")
        while True:
            (found,) = (await under(self._control, claim, (), [get(self._key)])).results
            if found is not None and read(State, found).generation == claim.generation:
                return
            state = State(
                used.epoch, used.length, range_size, claim.generation, without(used.done, used.length), used.done,
                used.dataset,
            )  # fmt: skip
            seen = mod_revision(self._key) == _revision(found)
            await under(
                self._control, claim, [seen], [put(self._key, encoded(state)), delete(self._taken, prefix=True)]
            )

    async def take(self, claim: Claim, rank: int) -> TakenRange | None:
        """Take the next range; None: none is free (other ranks may still work: see ``is_over``).

        Arguments:
            claim: claim of the generation.
            rank: rank that takes it.

        Raises:
            FenceBroken, GenerationOver: the claim has ended.
        """
        rank, taking = whole(rank, "rank"), os.urandom(8).hex()
        try:
            return await self._take(claim, rank, taking)
        except (asyncio.CancelledError, StatusError):
            self._taking.add(taking)
            raise

    async def _take(self, claim: Claim, rank: int, taking: str) -> TakenRange | None:
        while True:
            seen = await self._read(claim)
            for left in seen.taken:
                if left.id in self._taking and left.rank == rank:
                    self._taking.discard(left.id)
                    return left
            if not seen.state.free:
                return None
            (first, end), *rest = seen.state.free
            middle = min(end, first + seen.state.range_size)
            taken = TakenRange(first, middle, first, seen.state.epoch, rank, taking)
            state = replace(seen.state, free=united(rest, (middle, end)))
            key = self._key_of(taken)
            result = await under(
                self._control,
                claim,
                [mod_revision(self._key) == seen.revision],
                [put(self._key, state.encode()), put(key, encoded(taken))],
                [get(key)],
            )
            if result.succeeded or _is(result.results[0], taken):
                return taken

    async def mark(self, claim: Claim, taken: TakenRange, done: int) -> TakenRange:
        """Record that the numbers before ``done`` are in the model; at the end of the range, the range is done.

        Returns the range with which to continue.

        Raises:
            ConfigError: that is outside of the range, or before the last mark.
            RangeLost: the range no longer belongs to this rank.
            FenceBroken, GenerationOver: the claim has ended.
        """
        done = whole(done, "done")
        if not taken.done <= done <= taken.end:
            raise ConfigError(f"samples {taken.first} to {taken.end} are used up to {taken.done}, not back to {done}")
        if done == taken.end:
            await self._settle(claim, taken, is_done=True)
            return replace(taken, done=done)
        after, key = replace(taken, done=done), self._key_of(taken)
        while True:
            (found,) = (await under(self._control, claim, (), [get(key)])).results
            there = None if found is None else read(TakenRange, found)
            mine = there if there == after else self._own(there, taken)
            if mine is None:
                raise self._lost(taken)
            if mine.done >= done:
                self._marking.pop(taken.id, None)
                return mine
            self._marking[taken.id] = after
            await under(self._control, claim, [mod_revision(key) == _revision(found)], [put(key, after.encode())])

    async def give_back(self, claim: Claim, taken: TakenRange) -> None:
        """Give the unmarked rest of a range back. Errors as ``mark``."""
        await self._settle(claim, taken, is_done=False)

    async def _settle(self, claim: Claim, taken: TakenRange, *, is_done: bool) -> None:
        """End a taken range: its marked numbers are done, the others are free."""
        key = self._key_of(taken)
        while True:
            seen = await self._read(claim)
            there = next((one for one in seen.taken if one.first == taken.first), None)
            mine = self._own(there, taken)
            if mine is None:
                if self._settling.get(taken.id) is is_done and (there is None or there.id != taken.id):
                    break  # an earlier copy of this txn succeeded: no other rank ends this range
                raise self._lost(taken)
            middle = mine.end if is_done else mine.done
            done, free = (mine.first, middle), (middle, mine.end)
            state = replace(seen.state, done=united(seen.state.done, done), free=united(seen.state.free, free))
            self._settling[taken.id] = is_done
            result = await under(
                self._control,
                claim,
                [mod_revision(self._key) == seen.revision, value(key) == mine.encode()],
                [put(self._key, state.encode()), delete(key)],
            )
            if result.succeeded:
                break
        self._settling.pop(taken.id, None)
        self._marking.pop(taken.id, None)

    def _own(self, there: TakenRange | None, taken: TakenRange) -> TakenRange | None:
        """Return the stored range if it is the taken one, possibly with an interrupted mark."""
        return there if there is not None and there in (taken, self._marking.get(taken.id)) else None

    def _lost(self, taken: TakenRange) -> RangeLost:
        return RangeLost(
            f"samples {taken.first} to {taken.end} of epoch {taken.epoch} are not rank {taken.rank}'s any more; "
            "drop what was made of them, and take another range"
        )

    async def used(self) -> Used:
        """Return the used samples, including marks of taken ranges; save it while no rank changes the model."""
        seen = await self._look(lambda reads: until_answered(lambda: self._control.txn((), reads)))
        state, partly = seen.state, [(taken.first, taken.done) for taken in seen.taken]
        return Used(state.epoch, state.length, united(state.done, *partly), state.dataset)

    async def is_over(self) -> bool:
        """Return whether all samples of the epoch are used."""
        return (await self.used()).remaining == 0

    async def next_epoch(self, claim: Claim, epoch: int, length: int | None = None, dataset: str = "") -> None:
        """Begin the next epoch when the previous one is complete. All ranks call this; the first call has the effect.

        Arguments:
            claim: claim of the generation.
            epoch: the new one.
            length: length of the dataset; None: unchanged.
            dataset: identity of the data; empty: unchanged.

        Raises:
            ConfigError: the previous epoch has unused samples.
            FenceBroken, GenerationOver: the claim has ended.
        """
        epoch, given = whole(epoch, "epoch"), None if length is None else whole(length, "length")
        while True:
            seen = await self._read(claim)
            state = seen.state
            if state.epoch >= epoch:
                return
            if state.free or seen.taken:
                raise ConfigError(
                    f"epoch {state.epoch} of {self.name!r} is not over: {state.length - size(state.done)} samples are "
                    "left; wait for the other ranks at a barrier"
                )
            samples = state.length if given is None else given
            fresh = replace(
                state, epoch=epoch, length=samples, free=without((), samples), done=(), dataset=dataset or state.dataset
            )
            none_taken = create_revision(self._taken, prefix=True) == 0
            await under(
                self._control,
                claim,
                [mod_revision(self._key) == seen.revision, none_taken],
                [put(self._key, encoded(fresh))],
            )

    def _key_of(self, taken: TakenRange) -> str:
        return f"{self._taken}{taken.first:015d}"

    async def _read(self, claim: Claim) -> _Seen:
        return await self._look(lambda reads: under(self._control, claim, (), reads))

    async def _look(self, ask: Callable[[list[Operation]], Awaitable[TxnResult]]) -> _Seen:
        result = await ask([get(self._key), get_range(self._taken, prefix=True)])
        found, taken = result.results
        if found is None:
            raise ConfigError(f"the ledger {self.name!r} is not open: call open() in every generation, on every rank")
        return _Seen(read(State, found), _revision(found), [read(TakenRange, item) for item in taken.items])


def _revision(found: KeyValue | None) -> int:
    return 0 if found is None else found.mod_revision


def _is(found: KeyValue | None, taken: TakenRange) -> bool:
    return found is not None and read(TakenRange, found) == taken


# ---- a position as a file of a checkpoint: committed with model and optimizer, or not at all

FILE: Final = "raftkv-position.json"

R = TypeVar("R", bound=Record)


class Writes(Protocol):
    """Target of a file: a saving of ``run.checkpoint``, or files of a rank."""

    def write(self, name: str, data: bytes, /) -> object:
        """Write a complete file."""
        ...


class Reads(Protocol):
    """Source of a file: a resumed checkpoint."""

    def read(self, name: str, /) -> bytes:
        """Return the verified content of a file."""
        ...


def save(files: Writes, position: Record, name: str = FILE) -> None:
    """Write a position, on one rank.

    Arguments:
        files: files of the checkpoint that is being saved.
        position: a ``Position``, or ``Ledger.used()``.
        name: file name; use different names for several datasets.

    Raises:
        ConfigError: it could not be loaded again.
    """
    files.write(name, encoded(position))


def load(files: Reads | Checkpoint, kind: type[R], name: str = FILE) -> R:
    """Return the position that was committed with a checkpoint.

    Arguments:
        files: a resumed checkpoint, or the record of one.
        kind: saved class: ``Position`` or ``Used``.
        name: file name.

    Raises:
        DigestMismatch, StorageError: the file differs from the committed one, or is missing.
        RecordError: the file has another kind of content.
    """
    data = read_verified(files, name) if isinstance(files, Checkpoint) else files.read(name)
    return kind.decode(data)


class Ledger(Blocking[AsyncLedger]):
    """``AsyncLedger`` for programs without an event loop.

    Arguments:
        registry: registry of the run's checkpoints.
        name: name of the dataset.

    Raises:
        ConfigError: the name is not valid.
    """

    def __init__(self, registry: Registry, name: str = "train") -> None:
        loop, inner = registry.target()
        super().__init__(registry, loop, AsyncLedger(inner.control, inner.run_id, name))

    open = blocking(AsyncLedger.open)
    take = blocking(AsyncLedger.take)
    mark = blocking(AsyncLedger.mark)
    give_back = blocking(AsyncLedger.give_back)
    used = blocking(AsyncLedger.used)
    is_over = blocking(AsyncLedger.is_over)
    next_epoch = blocking(AsyncLedger.next_epoch)
