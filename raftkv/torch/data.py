"""Samplers of torch that use each sample exactly once, over changing worlds and dying processes.

::

    sampler = ElasticSampler(len(files), run, batch_size=32, shuffle=chunk_order(files, seed=7))
    loader = DataLoader(Files(files, read), batch_size=32, sampler=sampler, num_workers=4)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)                          # continues at the checkpoint, if it was in this epoch
        for batch in sampler.batches(loader):             # counts what the loop gets, not what is read ahead
            ...
            dcp.save({"model": model, "data": sampler}, ...)          # or save(saving, sampler.position)

The state is one position of all ranks together (``raftkv.checkpoint.positions``), so it is the same on every rank and
can be loaded in a world of any size. Save it after the step that used the batch, so that both are in one commit.

torchdata's ``StatefulDataLoader`` saves and loads the sampler and does not need ``batches``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, cast

from torch import distributed as dist
from torch.utils.data import Dataset, Sampler

from raftkv.checkpoint.positions import Position
from raftkv.dataset.shuffle import ChunkOrder, Permutation
from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.dataset.dataset import Snapshot
    from raftkv.dataset.entry import Entry

T = TypeVar("T")

Order = Callable[[int], Sequence[int]]
"""Returns the order of an epoch: the numbers of all samples, each once. Depends only on the epoch."""
WINDOW: Final = 16


class Ranked(Protocol):
    """Rank and world size of this process; a run of ``raftkv.training`` has both."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...


class Files(Dataset[T], Generic[T]):
    """The files of one version of a dataset, as a torch dataset.

    Arguments:
        files: ``Dataset.next_pass()``.
        read: makes a sample from an entry; runs in the workers of the loader.
    """

    def __init__(self, files: Snapshot, read: Callable[[Entry], T]) -> None:
        self.files = files
        self._read = read

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> T:
        return self._read(self.files[number])


def chunk_order(files: Snapshot, *, seed: int = 0, window: int = WINDOW) -> Order:
    """Return orders that shuffle entries within a few chunks at a time, for ``shuffle=``; see ``dataset.shuffle``.

    Arguments:
        files: one version of a dataset.
        seed: determines the orders, together with the epoch.
        window: number of chunks that a process must cache so that it reads each chunk once.
    """
    counts = files.chunk_counts
    return lambda epoch: ChunkOrder(counts, seed=seed, epoch=epoch, window=window)


class ElasticSampler(Sampler[int]):
    """The samples of this rank, from a position that all ranks share; see the module.

    In every step each rank takes one batch; the samples left at the end are divided evenly, so some ranks may have one
    sample less in the last step, or none. With ``drop_last`` all ranks have full batches, and samples that do not fill
    a batch for each rank are not used in that epoch.

    Arguments:
        dataset: dataset, or its length.
        run: gives rank and world size, read in every pass; None: ``rank`` and ``world_size`` are used, else
            ``torch.distributed``, else there is one rank.
        batch_size: batch size of each rank, as in the loader.
        rank, world_size: rank and world size of this process; change them with ``set_world``.
        seed: determines the order, together with the epoch.
        shuffle: False: the order of the dataset; or a function that returns the order of an epoch (``chunk_order``).
        drop_last: see above.
        name: identity of the data, as version and root of a manifest; a state with another name is refused.

    Raises:
        ConfigError: a size is not valid.
    """

    def __init__(
        self,
        dataset: int | Sized,
        run: Ranked | None = None,
        *,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool | Order = True,
        drop_last: bool = False,
        name: str = "",
    ) -> None:
        if (rank is None) != (world_size is None) or (run is not None and rank is not None):
            raise ConfigError("give a sampler a run, or rank and world_size together")
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._run = run
        self._world = None if rank is None or world_size is None else (rank, world_size)
        self._shuffle = shuffle
        length = int(dataset) if isinstance(dataset, Integral) else len(cast(Sized, dataset))
        self._position = Position.begin(length, seed=seed, dataset=name)
        self._position.share(batch_size, *self.world)
        self._is_counted = False
        self._is_drawing = False
        self._passes: list[_Pass] = []
        self._divided_for: tuple[int, int] | None = None

    # ---- where it is

    @property
    def world(self) -> tuple[int, int]:
        """Rank and world size, now."""
        if self._run is not None:
            return self._run.rank, self._run.world_size
        if self._world is not None:
            return self._world
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def set_world(self, rank: int, world_size: int) -> None:
        """Continue in another world; the next ``iter`` divides the rest of the epoch again."""
        self._position.share(self.batch_size, rank, world_size)
        self._world = (rank, world_size)

    @property
    def epoch(self) -> int:
        """Return the epoch of the position."""
        return self._position.epoch

    @property
    def position(self) -> Position:
        """The samples that the training loop has used; save it with the model.

        Raises:
            ConfigError: samples were taken, but the loop has not reported which of them it got.
        """
        if not self._is_counted and any(taken.steps for taken in self._passes):
            raise ConfigError(
                "samples were taken from this sampler, and none were counted: iterate over sampler.batches(loader), or "
                "call sampler.advance() after each step"
            )
        return self._position

    @position.setter
    def position(self, position: Position) -> None:
        own = self._position
        if position.length != own.length or (position.dataset and own.dataset and position.dataset != own.dataset):
            raise ConfigError(
                f"this position is of {position.length} samples of {position.dataset or 'a dataset'}, and there are "
                f"{own.length} of {own.dataset or 'a dataset'}: go on with the version that it was saved with "
                "(Dataset.at)"
            )
        self._position = position
        self._passes.clear()
        self._is_counted = False

    def set_epoch(self, epoch: int, length: int | None = None) -> None:
        """Begin an epoch, unless the position is already in it.

        In ``batches`` a loader cannot lead back to an earlier one: those of accelerate and Fabric set the number of
        their passes, which begins at 0 in each process.

        Arguments:
            epoch: epoch, from 0.
            length: length of the dataset in that epoch; None: unchanged.
        """
        at = self._position
        if epoch != at.epoch and not (self._is_drawing and epoch < at.epoch):
            self._position = Position(epoch, at.length if length is None else length, 0, at.seed, at.dataset)
            self._passes.clear()
            self._is_counted = False

    def advance(self, steps: int = 1) -> None:
        """Count completed steps of all ranks.

        Raises:
            ConfigError: the world has changed since the pass began, so its samples no longer belong to this rank.
        """
        before, now = self._divided_for, self.world
        if before is not None and before != now:
            raise ConfigError(
                f"the world has changed from rank {before[0]} of {before[1]} to rank {now[0]} of {now[1]} since this "
                "pass over the sampler began: restart from the last checkpoint, and iterate again"
            )
        self._is_counted = True
        for _ in range(steps):
            self._position = self._after(self._position)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader that uses this sampler, and count each when the loop gets it."""
        self._is_drawing = True
        try:
            for batch in loader:
                self._is_drawing = False
                self.advance()
                yield batch
                self._is_drawing = True
        finally:
            self._is_drawing = False
        if not self._position.is_over and not self.share(self._position):
            self.advance()  # the last step of the epoch, in which this rank has no samples

    def _after(self, position: Position) -> Position:
        _, world_size = self._divided_for or self.world
        after = position.step(self.batch_size, world_size)
        tail = self.drop_last and after.remaining < self.batch_size * world_size
        return after.after(after.remaining) if tail else after

    # ---- what torch asks

    def __len__(self) -> int:
        """Return how many samples this rank has left in the epoch."""
        rank, world_size = self.world
        full, tail = divmod(self._position.remaining, self.batch_size * world_size)
        rest = 0 if self.drop_last else tail * (rank + 1) // world_size - tail * rank // world_size
        return full * self.batch_size + rest

    def __iter__(self) -> Iterator[int]:
        self._divided_for = self.world
        taken = _Pass(self, self._position)
        self._passes[:] = [taken]
        return taken

    def order(self, epoch: int) -> Sequence[int]:
        """Return the order of an epoch."""
        if callable(self._shuffle):
            made = self._shuffle(epoch)
            if len(made) != self._position.length:
                raise ConfigError(f"the order of epoch {epoch} has {len(made)} samples, not {self._position.length}")
            return made
        length = self._position.length
        return Permutation(length, (self._position.seed, epoch)) if self._shuffle else range(length)

    def share(self, position: Position) -> range:
        """Return the places of this rank in the step at a position."""
        rank, world_size = self._divided_for or self.world
        if self.drop_last and position.remaining < self.batch_size * world_size:
            return range(0)
        return position.share(self.batch_size, rank, world_size)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values; the same on every rank."""
        at = self._position
        return {
            "epoch": at.epoch, "length": at.length, "consumed": at.consumed, "seed": at.seed, "dataset": at.dataset
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of a world of any size.

        Raises:
            ConfigError: the state belongs to another dataset.
            RecordError: the value is not a state of a sampler.
        """
        self.position = Position.from_plain(dict(state_dict))


class _Pass(Iterator[int]):
    """One iteration; torchdata saves its state with each batch, and loads it into a new one."""

    def __init__(self, sampler: ElasticSampler, begin: Position) -> None:
        self._sampler = sampler
        self._go_on(begin)

    def _go_on(self, begin: Position) -> None:
        self.steps = 0
        self._ahead = begin
        self._order = self._sampler.order(begin.epoch)
        self._share: Iterator[int] = iter(())

    def __next__(self) -> int:
        for place in self._share:
            return self._order[place]
        while not self._ahead.is_over:
            share = self._sampler.share(self._ahead)
            self._ahead = self._sampler._after(self._ahead)
            if share:
                self.steps += 1
                self._share = iter(share)
                return self._order[next(self._share)]
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the step whose samples were returned last."""
        at = self._ahead
        return {**self._sampler.state_dict(), "epoch": at.epoch, "consumed": at.consumed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._sampler.load_state_dict(state_dict)
        self._go_on(self._sampler.position)
        self._sampler._passes.append(self)
